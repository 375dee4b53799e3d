//! Slots of calls that must not be done twice: the server keeps the answer of each slot's last call.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::limits::FILE_SLOTS;

/// Where the server keeps the answer to a call, and which call of the slot it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::file) struct SlotUse {
    pub(in crate::file) slot: u8,
    pub(in crate::file) sequence: u16,
}

/// Slots without a call, with the number of their last one.
#[derive(Debug)]
pub(in crate::file) struct SlotPool {
    free: Mutex<Vec<SlotUse>>,
    freed: Condvar,
}

/// A slot that is taken until this is dropped.
#[derive(Debug)]
pub(in crate::file) struct Taken<'a> {
    pool: &'a SlotPool,
    pub(in crate::file) slot: SlotUse,
}

/// A call that is sent again after its session has ended.
#[derive(Clone, Copy, Debug)]
pub(in crate::file) struct Repeats {
    /// Also to a server that has kept no answer and may have done it.
    repeatable: bool,
    /// The epoch of the first session that was lost with the call.
    lost_in: Option<u64>,
}

impl Repeats {
    pub(in crate::file) fn new(repeatable: bool) -> Self {
        Self { repeatable, lost_in: None }
    }

    /// The session of that epoch has ended, and whether the call was done is not known.
    pub(in crate::file) fn lost(&mut self, epoch: u64) {
        self.lost_in.get_or_insert(epoch);
    }

    /// Whether it may be sent in a session of that epoch.
    pub(in crate::file) fn may_be_sent(&self, epoch: u64) -> bool {
        self.repeatable || self.lost_in.is_none_or(|lost_in| lost_in == epoch)
    }
}

impl Default for SlotPool {
    fn default() -> Self {
        // The lowest is taken first: a server keeps answers for as many slots as were used.
        let free = (1..=FILE_SLOTS).rev().map(|slot| SlotUse { slot, sequence: 0 }).collect();
        Self { free: Mutex::new(free), freed: Condvar::new() }
    }
}

impl SlotPool {
    fn free(&self) -> MutexGuard<'_, Vec<SlotUse>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last call of each slot, while no call is under way.
    pub(in crate::file) fn last_calls(&self) -> [u16; FILE_SLOTS as usize] {
        let mut last = [0; FILE_SLOTS as usize];
        for SlotUse { slot, sequence } in self.free().iter() {
            last[usize::from(*slot) - 1] = *sequence;
        }
        last
    }

    /// The slots of a client in another process, with the last call of each.
    pub(in crate::file) fn of_last_calls(last: impl Fn(usize) -> u16) -> Self {
        let pool = Self::default();
        for one in pool.free().iter_mut() {
            one.sequence = last(usize::from(one.slot) - 1);
        }
        pool
    }

    /// Takes a slot for a new call; waits for one.
    pub(in crate::file) fn take(&self) -> Taken<'_> {
        let mut free = self.free();
        loop {
            if let Some(last) = free.pop() {
                let slot = SlotUse { sequence: last.sequence.wrapping_add(1), ..last };
                return Taken { pool: self, slot };
            }
            free = self.freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.pool.free().push(self.slot);
        self.pool.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_one_call_at_a_time_and_each_another_number() {
        let pool = SlotPool::default();
        let first = pool.take();
        assert_eq!(first.slot, SlotUse { slot: 1, sequence: 1 });
        let second = pool.take();
        assert_eq!(second.slot, SlotUse { slot: 2, sequence: 1 });
        drop(first);
        assert_eq!(pool.take().slot, SlotUse { slot: 1, sequence: 2 });
        let mut all: Vec<_> = (0..FILE_SLOTS - 1).map(|_| pool.take()).collect();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pool.take().slot);
            all.truncate(3);
            waits.join().unwrap();
        });
    }
}
