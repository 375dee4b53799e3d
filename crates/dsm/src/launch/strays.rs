//! Processes of a job that have left its process groups, as daemons do: the environment tells whose they are.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::processes;

/// Looks for processes that those of the first look started meanwhile.
const LOOKS_MAX: usize = 4;

/// Kills all processes of this user, on this machine, whose environment has these variables. One that has cleared its environment is not found.
pub(super) fn kill_strays(variables: &[(&str, &str)]) {
    let wanted: Vec<String> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    for _ in 0..LOOKS_MAX {
        if kill_once(&wanted) == 0 {
            return;
        }
    }
}

/// How many it killed.
fn kill_once(wanted: &[String]) -> usize {
    let kill = |pid: i32| {
        // Before the look: the number may become another process's.
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        let environment = processes::environment(pid)?;
        let has = |wanted: &String| environment.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes());
        if !wanted.iter().all(has) {
            return None;
        }
        pidfd_send_signal(process, Signal::KILL).ok()
    };
    processes::numbers().filter_map(kill).count()
}
