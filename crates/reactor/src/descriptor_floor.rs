//! High numbers for the descriptors of this process's loops.
//!
//! A library inside of another program leaves the low numbers to that program: shells and daemons give them a meaning, and replace
//! what they find there (`dup2`), so that the library would send its bytes into a file of the program.
//!
//! The loops' numbers are remembered with the identity of what they stand for: a number that a loop has closed, and that the program has
//! got since, is the program's.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::io::Errno;

/// The smallest number; 0 before [`set`].
static FLOOR: AtomicI32 = AtomicI32::new(0);

/// Numbers below this are remembered. Programs rarely have more descriptors; what lies above is treated as theirs.
const REMEMBERED: usize = 1 << 16;

/// One bit for each number that a descriptor of a loop has had.
static MARKED: [AtomicU64; REMEMBERED / 64] = [const { AtomicU64::new(0) }; REMEMBERED / 64];

/// What a marked number stood for. Only the pages of marked numbers are ever touched.
static IDENTITIES: [AtomicU64; REMEMBERED] = [const { AtomicU64::new(0) }; REMEMBERED];

/// Loops that are opened from now on, and their connections, have descriptors with numbers from `floor` on.
pub fn set(floor: i32) {
    FLOOR.store(floor, Ordering::Release);
}

/// The number from which on loops have their descriptors; 0 before [`set`].
pub fn get() -> i32 {
    FLOOR.load(Ordering::Acquire)
}

/// Whether a loop's descriptor has this number.
pub fn is_raised(number: i32) -> bool {
    let Some(mark) = Mark::of(number) else { return false };
    mark.word.load(Ordering::Acquire) & mark.bit != 0
        && identity_of(number) == Some(mark.identity.load(Ordering::Acquire))
}

/// The numbers for which [`is_raised`] holds, in their order.
pub fn raised() -> impl Iterator<Item = i32> {
    marked().filter(|number| is_raised(*number))
}

/// The same, in a forked child: from now on they are no loop's, and the caller closes them.
pub fn disown() -> Vec<i32> {
    let numbers = raised().collect();
    for word in &MARKED {
        word.store(0, Ordering::Release);
    }
    numbers
}

fn marked() -> impl Iterator<Item = i32> {
    MARKED.iter().enumerate().flat_map(|(index, word)| {
        let bits = word.load(Ordering::Acquire);
        (0..64).filter(move |bit| bits & (1 << bit) != 0).map(move |bit| (index * 64 + bit) as i32)
    })
}

/// What is remembered of a number.
struct Mark {
    /// Of [`MARKED`].
    word: &'static AtomicU64,
    bit: u64,
    identity: &'static AtomicU64,
}

impl Mark {
    fn of(number: i32) -> Option<Self> {
        let index = usize::try_from(number).ok()?;
        Some(Self { word: MARKED.get(index / 64)?, bit: 1 << (index % 64), identity: IDENTITIES.get(index)? })
    }
}

/// Tells sockets and files in memory apart. All event descriptors and epoll queues have the same one; loops keep theirs for long.
fn identity_of(number: i32) -> Option<u64> {
    // SAFETY: the descriptor is looked at during this call alone; of one that is closed the kernel says so.
    let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) }).ok()?;
    Some(stat.st_dev.rotate_left(48) ^ stat.st_ino)
}

/// A loop has this descriptor from now on.
fn mark(fd: BorrowedFd<'_>) {
    let number = fd.as_raw_fd();
    if let (Some(mark), Some(identity)) = (Mark::of(number), identity_of(number)) {
        mark.identity.store(identity, Ordering::Release);
        mark.word.fetch_or(mark.bit, Ordering::AcqRel);
    }
}

/// The same descriptor with a high number, if a floor is set. One that cannot have it, because of the limit of open files, keeps its
/// number.
pub(crate) fn raise(low: OwnedFd) -> OwnedFd {
    let floor = get();
    if floor == 0 {
        return low;
    }
    let high = if low.as_raw_fd() >= floor { None } else { rustix::io::fcntl_dupfd_cloexec(&low, floor).ok() };
    let raised = high.unwrap_or(low);
    mark(raised.as_fd());
    raised
}

/// A duplicate for a loop, from the floor on, if one is set.
///
/// # Errors
/// `EMFILE`: the limit of open files.
pub fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let floor = get();
    let high = rustix::io::fcntl_dupfd_cloexec(fd, floor)?;
    if floor > 0 {
        mark(high.as_fd());
    }
    Ok(high)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::{IoChoice, Reactor};

    #[test]
    fn a_loop_leaves_low_numbers_to_the_program_and_its_own_are_known_while_it_has_them() {
        let low = raise(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        assert!(!is_raised(low.as_raw_fd()), "no floor is set");
        set(600);
        let _reactor = Reactor::open(IoChoice::Epoll, 1 << 20).unwrap();
        let numbers: Vec<i32> = raised().collect();
        assert!(numbers.len() >= 2 && numbers.iter().all(|number| *number >= 600), "{numbers:?}");

        // The program has many descriptors: the loop's lie far above the floor.
        let (ours, theirs) = UnixStream::pair().unwrap();
        set(900);
        let ours = raise(ours.into());
        let number = ours.as_raw_fd();
        assert!(number >= 900 && is_raised(number));
        drop(ours);
        assert!(!is_raised(number), "it is closed");
        let of_program = rustix::io::fcntl_dupfd_cloexec(&theirs, number).unwrap();
        assert_eq!(of_program.as_raw_fd(), number);
        assert!(!is_raised(number), "the program has the number now");
        assert!(disown().len() >= numbers.len() && raised().next().is_none());
    }
}
