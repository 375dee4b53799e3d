//! The program's umask, which the kernel applies to its own files alone.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::Mode;

/// Not known yet.
const UNKNOWN: u32 = u32::MAX;

static UMASK: AtomicU32 = AtomicU32::new(UNKNOWN);

/// The bits that new files do not get.
pub(crate) fn now() -> u32 {
    let known = UMASK.load(Ordering::Acquire);
    if known != UNKNOWN {
        return known;
    }
    // The kernel tells it to a process that sets it; `/proc` tells it too, at a higher price.
    let mask = rustix::process::umask(Mode::from_raw_mode(0o077));
    rustix::process::umask(mask);
    UMASK.store(mask.as_raw_mode(), Ordering::Release);
    mask.as_raw_mode()
}

/// The program has set it.
pub(crate) fn set(mask: u32) {
    UMASK.store(mask & 0o777, Ordering::Release);
}
