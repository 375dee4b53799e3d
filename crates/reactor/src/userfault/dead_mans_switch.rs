//! A signal that the kernel itself sends when this process has ended.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use linux_raw_sys::general::F_SETSIG;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal};

/// Kills processes when this process has ended, and all processes with the same table of descriptors.
///
/// It is a pipe. Nothing is written to it, and its writing end is in that table alone. A reading end is open for each process that is to
/// be killed, and names it as the owner of its signals (`F_SETOWN`, `F_SETSIG`). The kernel signals all owners when the writing end is closed.
#[derive(Debug)]
pub struct DeadMansSwitch {
    read: OwnedFd,
    /// Closed last of all: with this process.
    _write: OwnedFd,
}

/// As long as it is there its process is killed with this one.
#[derive(Debug)]
pub struct Armed {
    _read: OwnedFd,
}

impl DeadMansSwitch {
    /// A switch whose writing end has this number or a higher one. A process that ends closes its highest descriptors first (Linux since 4.3):
    /// the processes are killed before anything with a lower number is closed.
    ///
    /// # Errors
    /// The kernel's; `EINVAL`: the number is beyond the limit of open files.
    pub fn new(number: RawFd) -> Result<Self, Errno> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(Self { read, _write: rustix::io::fcntl_dupfd_cloexec(&write, number)? })
    }

    /// Has a process killed too. The caller makes sure that the number is that process's still, when this has returned.
    ///
    /// # Errors
    /// The kernel's; `ESRCH`: there is no such process.
    pub fn arm(&self, process: Pid) -> Result<Armed, Errno> {
        // Each process needs a file of its own, since a file has one owner.
        let path = format!("/proc/self/fd/{}", self.read.as_raw_fd());
        let read = open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        set(&read, F_SETSIG as i32, Signal::KILL.as_raw())?;
        set(&read, libc::F_SETOWN, process.as_raw_nonzero().get())?;
        set(&read, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK)?;
        Ok(Armed { _read: read })
    }
}

fn set(file: impl AsFd, command: i32, value: i32) -> Result<(), Errno> {
    // SAFETY: these commands take a number, and change the file of the descriptor alone.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, value) };
    if result == -1 { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Killed with the test.
    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Self(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn the_kernel_kills_a_process_whose_switch_is_gone_and_spares_one_that_was_disarmed() {
        let (mut killed, mut spared) = (Sleeper::start(), Sleeper::start());
        let switch = DeadMansSwitch::new(100).unwrap();
        let armed = switch.arm(Pid::from_child(&killed.0)).unwrap();
        drop(switch.arm(Pid::from_child(&spared.0)).unwrap());
        assert!(killed.0.try_wait().unwrap().is_none());
        drop(switch);
        assert_eq!(killed.0.wait().unwrap().signal(), Some(9));
        drop(armed);
        assert!(spared.0.try_wait().unwrap().is_none());
    }
}
