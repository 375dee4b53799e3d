//! Keeping I/O of device memory apart, one transfer from the next and from all other I/O of the same disk.
//!
//! Linux merges requests of neighbouring sectors, and (6.12) does not look where their memory lies. A controller need not
//! take one command whose data is partly in its own memory and partly in main memory, nor one whose data is there while the
//! list of its pieces is here (NVMe 1.4, CMBLOC.CDMMMS and CDPMLS); then it fails all of it. qemu's takes neither, the
//! latter as a list of SGL descriptors. A transfer that is alone has one piece and no list.
//!
//! Requests of different priority are never merged. So each such transfer has a best-effort priority (`ioprio_set(2)`) that
//! this process does not have, and that the one before did not have. It means next to nothing to schedulers and nothing to
//! most NVMe disks, which have none.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `IOPRIO_CLASS_BE`, shifted.
const BEST_EFFORT: i32 = 2 << 13;
/// Levels of the class to choose from; there are 0 to 7, and the default is 4.
const LEVELS: [i32; 5] = [3, 5, 6, 7, 2];
/// So many are used in turn.
const TURNS: usize = 3;
/// `IOPRIO_WHO_PROCESS`; the process 0 is the calling thread.
const WHO_PROCESS: i32 = 1;

/// The priority of the next transfer, as io_uring and `ioprio_set(2)` take it.
pub(crate) fn priority() -> u16 {
    static PRIORITIES: OnceLock<[u16; TURNS]> = OnceLock::new();
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let priorities = PRIORITIES.get_or_init(|| {
        // What was set, else what follows from the nice value: (20 + nice) / 5.
        let set = get().map_or(0, |priority| priority & 7);
        let nice = rustix::process::getpriority_process(None).unwrap_or(0);
        let mut others = LEVELS.into_iter().filter(|level| *level != set && *level != (20 + nice) / 5);
        std::array::from_fn(|_| (BEST_EFFORT | others.next().unwrap_or(LEVELS[0])) as u16)
    });
    priorities[TURN.fetch_add(1, Ordering::Relaxed) % TURNS]
}

/// Does a call of this thread at a [`priority`].
pub(crate) fn with_priority<R>(call: impl FnOnce() -> R) -> R {
    // Where priorities cannot be had the call is done as it is.
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
    fn priorities_are_others_than_ours_and_do_not_stay() {
        let before = get();
        let seen: Vec<_> = (0..6).map(|_| with_priority(get)).collect();
        assert_eq!(get(), before);
        for during in seen.iter().flatten() {
            assert!(*during >> 13 == 2 && *during & 7 != 4, "{during:#x}");
            assert_ne!(Some(*during), before);
        }
        // Other tests may take turns meanwhile.
        assert!(seen.iter().any(|during| *during != seen[0]), "{seen:?}");
    }
}
