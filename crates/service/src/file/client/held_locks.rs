//! The locks that a client's users hold, so that they can be asked for again from a server that has forgotten them.
//!
//! Pure. A lock is known by file, family and owner; the handle that it was had by does not matter, as at the server.

use std::collections::HashMap;
use std::time::Duration;

use super::LockRange;
use crate::limits::FILE_GRACE;

/// A lock that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldLock {
    pub(super) range: LockRange,
    pub(super) exclusive: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct HeldLocks {
    /// The epoch in which they are held. `None`: they are being asked for again.
    epoch: Option<u64>,
    /// By the number of the node.
    nodes: HashMap<u64, Vec<HeldLock>>,
}

impl HeldLocks {
    /// The epoch in which they are held. `None` while they are asked for again.
    pub(super) fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    /// A session of an epoch has begun. Gives the locks to ask for again, with the node of each, if they were held in another epoch:
    /// until [`HeldLocks::recovered`] no lock of an earlier epoch is noted, since nobody would ask for it.
    pub(super) fn begin_recovery(&mut self, epoch: u64) -> Option<Vec<(u64, HeldLock)>> {
        if self.epoch == Some(epoch) {
            return None;
        }
        self.epoch = None;
        Some(self.all())
    }

    /// All of them have been asked for in an epoch.
    pub(super) fn recovered(&mut self, epoch: u64) {
        self.epoch = Some(epoch);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.nodes.values().map(Vec::len).sum()
    }

    /// All, with the node of each.
    pub(super) fn all(&self) -> Vec<(u64, HeldLock)> {
        self.nodes.iter().flat_map(|(node, locks)| locks.iter().map(|lock| (*node, *lock))).collect()
    }

    /// The locks that another process has held for this client, and their epoch; 0 while they are asked for again.
    pub(super) fn take_over(&mut self, epoch: u64, locks: Vec<(u64, HeldLock)>) {
        self.epoch = (epoch != 0).then_some(epoch);
        for (node, lock) in locks {
            self.nodes.entry(node).or_default().push(lock);
        }
    }

    /// The server has given (`Some(exclusive)`) or taken (`None`) a lock in an epoch. False if that is not the epoch of the others any more:
    /// the server has forgotten it, and it must be asked for again.
    pub(super) fn note(&mut self, epoch: u64, node: u64, range: LockRange, now: Option<bool>) -> bool {
        if self.epoch != Some(epoch) {
            return false;
        }
        let locks = self.nodes.entry(node).or_default();
        let mut rest = Vec::new();
        locks.retain(|HeldLock { range: held, exclusive }| {
            let is_same = (held.whole, held.owner) == (range.whole, range.owner);
            if !is_same || held.last < range.start || range.last < held.start {
                return true;
            }
            let piece = |start, last| HeldLock { range: LockRange { start, last, ..*held }, exclusive: *exclusive };
            if held.start < range.start {
                rest.push(piece(held.start, range.start - 1));
            }
            if held.last > range.last {
                rest.push(piece(range.last + 1, held.last));
            }
            false
        });
        locks.append(&mut rest);
        if let Some(exclusive) = now {
            let lock = joined(locks, HeldLock { range, exclusive });
            locks.push(lock);
        }
        if locks.is_empty() {
            self.nodes.remove(&node);
        }
        true
    }

    /// The locks of a file are lost, or it is not open any more.
    pub(super) fn forget(&mut self, node: u64) {
        self.nodes.remove(&node);
    }
}

/// A lock with its neighbours of the same kind, which are taken out: a program may lock record after record.
fn joined(locks: &mut Vec<HeldLock>, mut lock: HeldLock) -> HeldLock {
    locks.retain(|HeldLock { range: held, exclusive }| {
        let is_same = (held.whole, held.owner, *exclusive) == (lock.range.whole, lock.range.owner, lock.exclusive);
        let before = |one: &LockRange, other: &LockRange| one.last.checked_add(1) == Some(other.start);
        if !is_same || !(before(held, &lock.range) || before(&lock.range, held)) {
            return true;
        }
        (lock.range.start, lock.range.last) = (lock.range.start.min(held.start), lock.range.last.max(held.last));
        false
    });
    lock
}

/// Whether a new server process can give locks back that another had given, of which nothing was heard for a time (`silent`). A third process
/// between the two gave locks to others only if it lived longer than its grace time: in the part of the silence before the new one began.
pub(super) fn nobody_else_had_them(silent: Duration, uptime: Duration) -> bool {
    silent.saturating_sub(uptime) < FILE_GRACE
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    fn range(owner: u64, start: u64, last: u64) -> LockRange {
        LockRange { whole: false, owner, pid: 1, start, last }
    }

    fn in_epoch(epoch: u64) -> HeldLocks {
        HeldLocks { epoch: Some(epoch), ..HeldLocks::default() }
    }

    fn held(locks: &HeldLocks) -> Vec<(u64, u64, u64, bool)> {
        let tuple = |(_, HeldLock { range, exclusive })| (range.owner, range.start, range.last, exclusive);
        let mut all: Vec<_> = locks.all().into_iter().map(tuple).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn ranges_are_cut_and_joined_as_the_server_does() {
        let mut locks = in_epoch(0);
        assert!(locks.note(0, 5, range(1, 0, 99), Some(true)));
        assert!(locks.note(0, 5, range(2, 200, 299), Some(false)));
        assert!(locks.note(0, 5, range(1, 40, 49), None));
        assert_eq!(held(&locks), [(1, 0, 39, true), (1, 50, 99, true), (2, 200, 299, false)]);
        assert!(locks.note(0, 5, range(1, 40, 49), Some(true)));
        assert_eq!(held(&locks), [(1, 0, 99, true), (2, 200, 299, false)]);
        assert!(locks.note(0, 5, range(1, 200, u64::MAX), Some(true)), "up to the end, and the start is no neighbour");
        assert_eq!(held(&locks), [(1, 0, 99, true), (1, 200, u64::MAX, true), (2, 200, 299, false)]);
        for record in 0..1000 {
            assert!(locks.note(0, 6, range(1, record, record), Some(true)));
        }
        assert_eq!(locks.all().len(), 4);
        assert!(locks.note(0, 5, range(1, 0, u64::MAX), None) && locks.note(0, 5, range(2, 0, u64::MAX), None));
        locks.forget(6);
        assert!(locks.is_empty());
    }

    #[test]
    fn flock_and_ranges_are_apart() {
        let mut locks = in_epoch(0);
        let whole = LockRange { whole: true, ..range(1, 0, u64::MAX) };
        assert!(locks.note(0, 5, whole, Some(true)) && locks.note(0, 5, range(1, 0, 9), Some(false)));
        assert!(locks.note(0, 5, whole, None));
        assert_eq!(held(&locks), [(1, 0, 9, false)]);
    }

    #[test]
    fn a_lock_of_an_earlier_epoch_is_not_held() {
        let mut locks = in_epoch(3);
        assert!(!locks.note(2, 5, range(1, 0, 9), Some(true)));
        assert!(locks.is_empty());
    }

    #[test]
    fn a_lock_that_the_old_server_gave_late_is_asked_for_again() {
        let mut locks = in_epoch(1);
        assert!(locks.note(1, 5, range(1, 0, 9), Some(true)));
        assert_eq!(locks.begin_recovery(1), None, "the server has kept them");
        assert_eq!(locks.begin_recovery(2).unwrap().len(), 1);
        assert!(!locks.note(1, 5, range(1, 20, 29), Some(true)), "the old server's answer is read now");
        assert_eq!(locks.begin_recovery(3).unwrap().len(), 1, "the session ended before all were asked for");
        locks.recovered(3);
        assert_eq!(held(&locks), [(1, 0, 9, true)]);
        assert!(locks.note(3, 5, range(1, 20, 29), Some(true)));
    }

    #[test]
    fn a_third_server_between_two_had_no_time_to_give_locks_away() {
        let seconds = Duration::from_secs;
        assert!(nobody_else_had_them(seconds(14), seconds(0)));
        assert!(
            nobody_else_had_them(seconds(40), seconds(30)),
            "the new one was there for most of it, and knows what it gave"
        );
        assert!(!nobody_else_had_them(FILE_GRACE, seconds(0)));
        assert!(!nobody_else_had_them(seconds(40), seconds(3)));
    }
}
