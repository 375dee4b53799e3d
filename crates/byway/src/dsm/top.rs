//! `byway dsm top`: what the processes of a running job wait for.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use byway_dsm::launch::{LiveJob, live_jobs};
use byway_frontend::fault::keeper::descendants;
use clap::Args;
use rustix::process::Pid;

use crate::output;

/// The time between two looks, whose rates are shown.
const INTERVAL: Duration = Duration::from_secs(1);

/// Clears a terminal's screen and begins at its top (ECMA-48: CUP, ED).
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// The arguments of `byway dsm top`.
#[derive(Args, Debug)]
pub struct DsmTopArguments {
    /// Process number of byway dsm run, or of a process of the job; needed if several jobs run
    #[arg(value_name = "PID")]
    pub process: Option<u32>,
}

/// Why no job is shown.
#[derive(Debug, thiserror::Error)]
pub enum DsmTopError {
    /// There is none.
    #[error(
        "no job of byway dsm run has a process on this machine: start byway dsm top as the user that started the job"
    )]
    NoJob,
    /// The process has no part in one.
    #[error(
        "process {0} is not of a job of byway dsm run: name the process of byway dsm run or one of the job's processes, as the user that started it"
    )]
    NotOfJob(u32),
    /// There are several.
    #[error(
        "{count} jobs of byway dsm run have processes on this machine: name one of their processes, such as {}",
        list(processes)
    )]
    Several {
        /// Jobs.
        count: usize,
        /// A process of each.
        processes: Vec<u32>,
    },
    /// The job tells nothing.
    #[error(
        "no process of the job answers: they have not joined it yet, have left it, are stopped, or use an older byway"
    )]
    Silent,
    /// It has ended meanwhile.
    #[error("the job has ended")]
    Ended,
    /// Standard output is gone.
    #[error("cannot print: {0}")]
    Print(std::io::Error),
}

fn list(processes: &[u32]) -> String {
    processes.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
}

/// The job of a process; without one, the only job.
fn choose(mut jobs: Vec<LiveJob>, process: Option<u32>) -> Result<LiveJob, DsmTopError> {
    if let Some(process) = process {
        let of = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or(DsmTopError::NotOfJob(process))?;
        let started = descendants(of).unwrap_or_default();
        let is_of = |other: u32| {
            other == process || started.iter().any(|pid| pid.as_raw_nonzero().get().cast_unsigned() == other)
        };
        jobs.retain(|job| job.processes().any(is_of));
    }
    match (jobs.len(), process) {
        (0, None) => Err(DsmTopError::NoJob),
        (0, Some(process)) => Err(DsmTopError::NotOfJob(process)),
        (1, _) => Ok(jobs.remove(0)),
        (count, _) => {
            let processes = jobs.iter().filter_map(|job| job.processes().next()).collect();
            Err(DsmTopError::Several { count, processes })
        }
    }
}

/// Shows a job each second on a terminal, until it ends or a signal comes; elsewhere once.
///
/// # Errors
/// See [`DsmTopError`].
pub(super) fn run(arguments: &DsmTopArguments) -> Result<ExitCode, DsmTopError> {
    let mut job = choose(live_jobs(), arguments.process)?;
    let is_terminal = std::io::stdout().is_terminal();
    let mut before = job.look();
    loop {
        pause();
        job = match job.again() {
            Some(job) => job,
            None if is_terminal => {
                output::note(DsmTopError::Ended);
                return Ok(ExitCode::SUCCESS);
            }
            None => return Err(DsmTopError::Ended),
        };
        let now = job.look();
        if now.is_empty() && !is_terminal {
            return Err(DsmTopError::Silent);
        }
        let clear = if is_terminal { CLEAR } else { "" };
        let mut out = output::stdout();
        write!(out, "{clear}{}", now.since(&before)).and_then(|()| out.flush()).map_err(DsmTopError::Print)?;
        if !is_terminal {
            return Ok(ExitCode::SUCCESS);
        }
        before = now;
    }
}

#[expect(clippy::disallowed_methods, reason = "rates are of the time between two looks")]
fn pause() {
    std::thread::sleep(INTERVAL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_job_the_error_says_what_was_looked_for() {
        let none = |process| choose(Vec::new(), process).unwrap_err().to_string();
        assert!(none(None).starts_with("no job of byway dsm run has a process on this machine"));
        for process in [std::process::id(), 0, u32::MAX] {
            assert!(none(Some(process)).starts_with(&format!("process {process} is not of a job of byway dsm run")));
        }
    }
}
