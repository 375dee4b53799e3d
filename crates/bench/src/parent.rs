//! Ends a process of a benchmark or demonstration together with its parent.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Has the kernel kill this process when `parent`, its parent, ends, however that ends.
///
/// # Errors
/// `NotFound` if it has ended already, or never was the parent; else the kernel's.
pub(crate) fn end_with(parent: i32) -> std::io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before that.
    if getppid().map(Pid::as_raw_pid) == Some(parent) { Ok(()) } else { Err(std::io::ErrorKind::NotFound.into()) }
}
