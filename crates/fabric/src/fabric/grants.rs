//! Where a peer's windows lie, for wires that place payloads by themselves.
//!
//! A wire whose ends can reach each other's memory needs no receiver for a payload, but must be told where a window is: a
//! `Call` that names a window of its sender brings a [`Grant`] with it, and a `Lend` tells of a program's window. The table keeps the last grant of each slot of the
//! peer's windows; a window that is used again has another key, and an old grant is then not found any more.

use crate::limits::GRANTS_MAX;
use crate::windows::{WindowKey, slot_of};
use crate::wire::Grant;

use super::transfer::Remote;

/// A range of the peer's memory, in what the wire counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// In which of the pieces of memory that the peer has lent, over shared memory.
    pub(super) memory: u32,
    /// Where it starts.
    pub(super) address: u64,
    /// What the wire wants to be shown for it, if anything.
    pub(super) key: u32,
}

#[derive(Clone, Copy, Debug)]
struct Granted {
    window: WindowKey,
    grant: Grant,
    /// What a program's window lies in, and whether it is for puts; else for gets. Others are for what their call says.
    lent: Option<(u32, bool)>,
}

/// What a session's peer has granted.
#[derive(Debug, Default)]
pub(super) struct Grants {
    by_slot: Vec<Option<Granted>>,
}

impl Grants {
    /// Notes a grant. False if there is no room for it: the slot is above [`GRANTS_MAX`].
    pub(super) fn note(&mut self, window: WindowKey, grant: Grant) -> bool {
        self.put(Granted { window, grant, lent: None })
    }

    fn put(&mut self, granted: Granted) -> bool {
        let slot = slot_of(granted.window);
        if slot >= GRANTS_MAX {
            return false;
        }
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, None);
        }
        self.by_slot[slot] = Some(granted);
        true
    }

    /// Notes where a program's window lies; gives the memory that no window lies in now.
    pub(super) fn note_lent(&mut self, window: WindowKey, grant: Grant, lent: (u32, bool)) -> Option<u32> {
        let before = self.by_slot.get(slot_of(window)).copied().flatten().and_then(|granted| granted.lent);
        if !self.put(Granted { window, grant, lent: Some(lent) }) {
            return self.unused(Some(lent));
        }
        self.unused(before)
    }

    /// Forgets a window; gives the memory that no window lies in now.
    pub(super) fn forget(&mut self, window: WindowKey) -> Option<u32> {
        let granted = self.by_slot.get_mut(slot_of(window))?.take_if(|granted| granted.window == window)?;
        self.unused(granted.lent)
    }

    fn unused(&self, lent: Option<(u32, bool)>) -> Option<u32> {
        let (number, _) = lent?;
        let is_in = |granted: &Granted| granted.lent.is_some_and(|(other, _)| other == number);
        (!self.by_slot.iter().flatten().any(is_in)).then_some(number)
    }

    /// Where `len` bytes of a window lie, if it was granted for that and has so many there.
    pub(super) fn find(&self, at: Remote, len: usize, write: bool) -> Option<Place> {
        let granted = self.by_slot.get(slot_of(at.window)).copied().flatten();
        let Granted { grant, lent, .. } = granted.filter(|granted| granted.window == at.window)?;
        if lent.is_some_and(|(_, put)| put != write) {
            return None;
        }
        let end = at.offset.checked_add(len as u64)?;
        if end > u64::from(grant.len.get()) {
            return None;
        }
        let memory = lent.map_or(0, |(number, _)| number);
        Some(Place { memory, address: grant.address.get().checked_add(at.offset)?, key: grant.key.get() })
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::little_endian::{U32, U64};

    use super::*;

    fn grant(address: u64, len: u32) -> Grant {
        Grant { address: U64::new(address), len: U32::new(len), key: U32::new(7) }
    }

    #[test]
    fn a_place_is_found_within_the_last_grant_of_its_slot_alone() {
        let mut grants = Grants::default();
        let window = WindowKey(5 << 20 | 3);
        let at = |window, offset| Remote { window, offset };
        assert_eq!(grants.find(at(window, 0), 1, true), None);
        assert!(grants.note(window, grant(4096, 100)));
        assert_eq!(grants.find(at(window, 40), 60, true), Some(Place { memory: 0, address: 4136, key: 7 }));
        assert_eq!(grants.find(at(window, 41), 60, true), None, "beyond its end");
        assert_eq!(grants.find(at(window, u64::MAX), 2, true), None);
        assert_eq!(grants.find(at(WindowKey(6 << 20 | 3), 0), 1, true), None, "another user of the slot");
        let next = WindowKey(9 << 20 | 3);
        assert!(grants.note(next, grant(u64::MAX - 1, 100)));
        assert_eq!(grants.find(at(window, 0), 1, true), None, "the slot has another user");
        assert_eq!(grants.find(at(next, 2), 1, true), None, "no address");
        assert!(!grants.note(WindowKey(1 << 20 | GRANTS_MAX as u64), grant(0, 1)));
    }

    #[test]
    fn a_programs_window_is_found_for_its_own_direction_and_its_memory_is_left_with_the_last() {
        let mut grants = Grants::default();
        let [first, second, third] = [1, 2, 3].map(|slot| WindowKey(7 << 20 | slot));
        let at = |window| Remote { window, offset: 10 };
        assert_eq!(grants.note_lent(first, grant(4096, 100), (5, true)), None);
        assert_eq!(grants.note_lent(second, grant(8192, 100), (5, false)), None);
        assert_eq!(grants.find(at(first), 90, true), Some(Place { memory: 5, address: 4106, key: 7 }));
        assert_eq!(grants.find(at(second), 90, false), Some(Place { memory: 5, address: 8202, key: 7 }));
        assert_eq!((grants.find(at(first), 1, false), grants.find(at(second), 1, true)), (None, None));
        assert_eq!(grants.forget(WindowKey(8 << 20 | 1)), None, "another user of the slot");
        assert_eq!(grants.forget(first), None, "another window lies there");
        assert_eq!((grants.find(at(first), 1, true), grants.forget(first)), (None, None));
        assert_eq!(grants.forget(second), Some(5));
        // A slot that is used again, by a peer that does not say so first.
        assert_eq!(grants.note_lent(third, grant(0, 1), (6, true)), None);
        assert_eq!(grants.note_lent(WindowKey(9 << 20 | 3), grant(0, 1), (7, true)), Some(6));
        let beyond = WindowKey(1 << 20 | GRANTS_MAX as u64);
        assert_eq!(grants.note_lent(beyond, grant(0, 1), (8, true)), Some(8), "no room, so nothing lies there");
    }
}
