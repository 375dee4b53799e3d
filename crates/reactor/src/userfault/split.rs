//! A second process with the same descriptors.

use rustix::io::Errno;
use rustix::process::Pid;

/// Forks; both processes have one table of descriptors: what one opens or closes the other has open or closed, and what is open stays open
/// until both have ended. In the child it gives `None`. The process must have one thread.
///
/// # Errors
/// `EBUSY`: it has more threads. The kernel's.
pub fn fork_with_shared_descriptors() -> std::io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(Errno::BUSY.into());
    }
    // SAFETY: as fork(2), of a process with one thread: no lock is held that the child waits for. Both ends use descriptors that they own as
    // values, of which each process has a copy: the caller lets one of the two use what was opened before.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) };
    match child {
        -1 => Err(std::io::Error::last_os_error()),
        0 => Ok(None),
        child => Ok(i32::try_from(child).ok().and_then(Pid::from_raw)),
    }
}
