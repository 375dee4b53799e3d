//! Sockets that a service manager opened and passed on (`sd_listen_fds(3)`): descriptors from 3 on.

use std::os::fd::{FromRawFd, OwnedFd};

/// The first passed descriptor.
const FIRST: i32 = 3;
/// More are not taken.
const COUNT_MAX: i32 = 64;

/// The passed listening sockets, or none if none were passed to this process. To be called once, before threads start:
/// it takes the descriptors over.
///
/// # Errors
/// `InvalidInput` if `LISTEN_FDS` is no count from 0 to 64, or a passed descriptor is not open.
pub fn inherited_listeners() -> std::io::Result<Vec<OwnedFd>> {
    let number = |name: &str| std::env::var(name).ok();
    if number("LISTEN_PID").and_then(|pid| pid.parse().ok()) != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").and_then(|count| count.parse::<i32>().ok());
    let count = count.filter(|count| (0..=COUNT_MAX).contains(count)).ok_or(std::io::ErrorKind::InvalidInput)?;
    (FIRST..FIRST + count)
        .map(|raw| {
            // SAFETY: `fcntl` only looks at the number.
            if unsafe { libc::fcntl(raw, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
                return Err(std::io::ErrorKind::InvalidInput.into());
            }
            // SAFETY: the descriptor is open, as `fcntl` has just said, and the manager passed it to this process alone.
            Ok(unsafe { OwnedFd::from_raw_fd(raw) })
        })
        .collect()
}
