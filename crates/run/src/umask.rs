//! The program's umask, which the kernel applies to its own files alone.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::Mode;

use crate::process;

/// Not known yet.
const UNKNOWN: u32 = u32::MAX;

/// Of this process. A child of `vfork` has a umask of its own, and this memory.
static UMASK: AtomicU32 = AtomicU32::new(UNKNOWN);

/// The bits that new files do not get.
pub(crate) fn now() -> u32 {
    if is_guest() {
        return ask();
    }
    let known = UMASK.load(Ordering::Acquire);
    if known != UNKNOWN {
        return known;
    }
    let mask = ask();
    UMASK.store(mask, Ordering::Release);
    mask
}

/// The program has set it.
pub(crate) fn set(mask: u32) {
    if !is_guest() {
        UMASK.store(mask & 0o777, Ordering::Release);
    }
}

fn is_guest() -> bool {
    process::this().is_some_and(process::Process::is_guest)
}

/// What the kernel says. Without `/proc` it tells the umask only to a process that sets it, which other threads may notice.
fn ask() -> u32 {
    let told = std::fs::read_to_string("/proc/self/status").ok().and_then(|status| in_status(&status));
    told.unwrap_or_else(|| {
        let mask = rustix::process::umask(Mode::from_raw_mode(0o077));
        rustix::process::umask(mask);
        mask.as_raw_mode()
    })
}

fn in_status(status: &str) -> Option<u32> {
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(mask.trim(), 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_the_umask() {
        assert_eq!(in_status("Name:\tsh\nUmask:\t0027\nState:\tR (running)\n"), Some(0o027));
        assert_eq!(in_status("Name:\tsh\n"), None);
        let before = rustix::process::umask(Mode::from_raw_mode(0o031));
        let told = ask();
        rustix::process::umask(before);
        assert_eq!(told, 0o031);
    }
}
