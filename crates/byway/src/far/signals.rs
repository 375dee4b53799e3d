//! Signals of `byway far`: a terminal sends its signals to the program too; signals sent to byway alone are passed on.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use byway_frontend::fault::keeper::{Spare, signal_descendants};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// Signals that are sent to one process; the program is to have them.
const PASSED_ON: [i32; 4] = [SIGHUP, SIGTERM, SIGUSR1, SIGUSR2];

/// Signals that a terminal sends to the program as well: what they end is the program's affair.
const LEFT_TO_PROGRAM: [i32; 2] = [SIGINT, SIGQUIT];

/// Those of some signals that this process has not inherited as ignored: the program is to inherit the same.
fn not_ignored(signals: impl IntoIterator<Item = i32>) -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    signals.into_iter().filter(|signal| mask & 1 << (signal - 1) == 0).collect()
}

/// Keeps while the pager pages; gives its exit status, which is the program's. If the pager was killed all programs are.
///
/// # Errors
/// The kernel's.
pub(super) fn keep(pager: Pid) -> std::io::Result<ExitCode> {
    // A handler, and no more: programs that are executed have none of it.
    let mut signals =
        Signals::new(not_ignored(PASSED_ON.into_iter().chain(LEFT_TO_PROGRAM)).into_iter().chain([SIGCHLD]))?;
    super::allow_all_descriptors();
    let spare = Spare::take()?;
    loop {
        if let Some((_, status)) = waitpid(Some(pager), WaitOptions::NOHANG)? {
            let Some(code) = status.exit_status() else {
                crate::output::note(super::PAGER_KILLED.to_owned());
                spare.end_descendants();
                return Ok(ExitCode::FAILURE);
            };
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
        for signal in signals.wait().filter(|signal| PASSED_ON.contains(signal)) {
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = kill_process(pager, signal);
            }
        }
    }
}

/// The pager's signals. It goes on where others would end or stop: programs wait for it.
pub(super) struct PagerSignals {
    passed_on: Vec<(i32, Arc<AtomicBool>)>,
    child_ended: Arc<AtomicBool>,
}

impl PagerSignals {
    pub(super) fn take() -> std::io::Result<Self> {
        let flag = |signal| {
            let flag = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal, Arc::clone(&flag)).map(|_| (signal, flag))
        };
        for signal in not_ignored(LEFT_TO_PROGRAM.into_iter().chain([SIGTSTP])) {
            flag(signal)?;
        }
        let passed_on = not_ignored(PASSED_ON).into_iter().map(flag).collect::<Result<_, _>>()?;
        Ok(Self { passed_on, child_ended: flag(SIGCHLD)?.1 })
    }

    /// Sends the program what has come for it; without one, all that it has left behind.
    pub(super) fn pass_on(&self, program: Option<Pid>) {
        for (signal, has_come) in &self.passed_on {
            if has_come.load(Ordering::Relaxed)
                && has_come.swap(false, Ordering::Relaxed)
                && let Some(signal) = Signal::from_named_raw(*signal)
            {
                let sent = match program {
                    Some(program) => kill_process(program, signal).map_err(std::io::Error::from),
                    None => signal_descendants(signal),
                };
                if let Err(error) = sent {
                    tracing::warn!(%error, ?signal, "a signal cannot be passed on");
                }
            }
        }
    }

    /// Whether a child has ended since the last time.
    pub(super) fn take_child_ended(&self) -> bool {
        self.child_ended.load(Ordering::Relaxed) && self.child_ended.swap(false, Ordering::Acquire)
    }
}
