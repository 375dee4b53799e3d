//! Keeping I/O of device memory apart from other I/O of the same disk.
//!
//! Linux merges requests of neighbouring sectors, and up to 6.16 or so it does not look where their memory lies. A
//! controller need not take one command whose memory is partly its own and partly main memory (NVMe 2.0, CMBLOC.CDMMMS;
//! qemu's does not), and then it fails all of it. Requests of different priority are never merged. So I/O of device memory
//! has a best-effort priority (`ioprio_set(2)`) of its own, one that this process does not have, which means next to
//! nothing to schedulers and nothing to most NVMe disks, which have none.

use std::sync::OnceLock;

/// `IOPRIO_CLASS_BE`, shifted.
const BEST_EFFORT: i32 = 2 << 13;
/// Levels of a class are 0 to 7; what nobody has set is 4.
const LEVELS: [i32; 3] = [5, 6, 7];
/// `IOPRIO_WHO_PROCESS`; the process 0 is the calling thread.
const WHO_PROCESS: i32 = 1;

/// The priority of I/O of device memory, as io_uring and `ioprio_set(2)` take it.
pub(crate) fn priority() -> u16 {
    static PRIORITY: OnceLock<u16> = OnceLock::new();
    *PRIORITY.get_or_init(|| {
        // What was set, else what follows from the nice value: (20 + nice) / 5.
        let set = get().map_or(0, |priority| priority & 7);
        let nice = rustix::process::getpriority_process(None).unwrap_or(0);
        let level = LEVELS.into_iter().find(|level| *level != set && *level != (20 + nice) / 5).unwrap_or(LEVELS[0]);
        (BEST_EFFORT | level) as u16
    })
}

/// Does a call of this thread at [`priority`].
pub(crate) fn with_priority<R>(call: impl FnOnce() -> R) -> R {
    // Where priorities cannot be had, nothing sorts by them either: the call is done as it is.
    let before = get().unwrap_or(0);
    set(i32::from(priority()));
    let result = call();
    set(before);
    result
}

fn get() -> Option<i32> {
    // SAFETY: the call takes no memory.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0) };
    i32::try_from(priority).ok().filter(|priority| *priority >= 0)
}

fn set(priority: i32) {
    // SAFETY: as above.
    let _ = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, priority) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_priority_is_another_than_ours_and_does_not_stay() {
        let before = get();
        let during = with_priority(get);
        assert_eq!(get(), before);
        if let Some(during) = during {
            assert_eq!(during, i32::from(priority()));
            assert_ne!(Some(during), before);
            assert_ne!(during & 7, 4, "what all others have");
        }
    }
}
