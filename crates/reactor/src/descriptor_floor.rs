//! High numbers for the descriptors of this process's loops.
//!
//! A library inside of another program leaves the low numbers to that program: shells and daemons give them a meaning, and replace
//! what they find there (`dup2`), so that the library would send its bytes into a file of the program.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::io::Errno;

/// The smallest number; 0 before [`set`].
static FLOOR: AtomicI32 = AtomicI32::new(0);

/// Numbers from the floor on that are remembered.
const REMEMBERED: usize = 256;

/// One bit for each number that a descriptor of a loop has had.
static RAISED: [AtomicU64; REMEMBERED / 64] = [const { AtomicU64::new(0) }; REMEMBERED / 64];

/// Loops that are opened from now on, and their connections, have descriptors with numbers from `floor` on.
pub fn set(floor: i32) {
    FLOOR.store(floor, Ordering::Release);
}

/// Whether a loop's descriptor has, or had, this number.
pub fn is_raised(number: i32) -> bool {
    place(number).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
}

/// The numbers for which [`is_raised`] holds, in their order.
pub fn raised() -> impl Iterator<Item = i32> {
    let floor = FLOOR.load(Ordering::Acquire);
    (floor..floor + REMEMBERED as i32).filter(|number| is_raised(*number))
}

fn place(number: i32) -> Option<(&'static AtomicU64, u64)> {
    let floor = FLOOR.load(Ordering::Acquire);
    let index = usize::try_from(number.checked_sub(floor)?).ok().filter(|index| floor > 0 && *index < REMEMBERED)?;
    Some((&RAISED[index / 64], 1 << (index % 64)))
}

/// The same descriptor with a high number, if a floor is set. One that cannot have it, because of the limit of open files, stays as it is.
pub(crate) fn raise(low: OwnedFd) -> OwnedFd {
    let floor = FLOOR.load(Ordering::Acquire);
    if floor == 0 || low.as_raw_fd() >= floor {
        return low;
    }
    duplicate(low.as_fd()).unwrap_or(low)
}

/// A duplicate for a loop, from the floor on, if one is set.
///
/// # Errors
/// `EMFILE`: the limit of open files.
pub fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let floor = FLOOR.load(Ordering::Acquire);
    let high = rustix::io::fcntl_dupfd_cloexec(fd, floor)?;
    if let Some((word, bit)) = place(high.as_raw_fd()) {
        word.fetch_or(bit, Ordering::AcqRel);
    }
    Ok(high)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::{IoChoice, Reactor};

    #[test]
    fn a_loop_leaves_low_numbers_to_the_program() {
        let low = raise(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        assert!(!is_raised(low.as_raw_fd()), "no floor is set");
        set(600);
        let _reactor = Reactor::open(IoChoice::Epoll, 1 << 20).unwrap();
        let numbers: Vec<i32> = raised().collect();
        assert!(numbers.len() >= 2 && numbers.iter().all(|number| *number >= 600), "{numbers:?}");
    }
}
