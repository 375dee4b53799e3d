//! Where a peer's windows lie, for wires that place payloads by themselves.
//!
//! A wire whose ends can reach each other's memory needs no receiver for a payload, but must be told where a window is: a
//! `Call` that names a window of its sender brings a [`Grant`] with it, and so does a `Window`, by which nodes and lenders of memory
//! tell of theirs. The table keeps the last grant of each slot of the peer's windows; a window that is used again has another key, and an old grant is then not found any more.

use byway_reactor::ByteRange;

use crate::limits::GRANTS_MAX;
use crate::windows::{WindowError, WindowKey, slot_of};
use crate::wire::{Grant, WindowAdvert};

use super::operations::Remote;

/// A range of the peer's memory, in what the wire counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerAddress {
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
    /// Of [`WindowAdvert`].
    rights: u8,
    /// Which piece of lent memory it lies in.
    lent: Option<u32>,
    /// For one use, which is under way: there is no other meanwhile.
    is_in_use: bool,
}

/// What a session's peer has granted.
#[derive(Debug, Default)]
pub(super) struct Grants {
    by_slot: Vec<Option<Granted>>,
}

impl Grants {
    /// Notes a grant. False if there is no room for it: the slot is above [`GRANTS_MAX`].
    pub(super) fn note(&mut self, window: WindowKey, grant: Grant, rights: u8) -> bool {
        self.put(Granted { window, grant, rights, lent: None, is_in_use: false })
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

    /// Notes that a program's window lies in the piece `number` of lent memory; if there is room.
    pub(super) fn note_lent(&mut self, window: WindowKey, grant: Grant, number: u32, rights: u8) {
        self.put(Granted { window, grant, rights, lent: Some(number), is_in_use: false });
    }

    /// Forgets a window in lent memory.
    pub(super) fn forget_lent(&mut self, window: WindowKey) {
        self.take(window);
    }

    /// Whether a window lies in that piece of lent memory; those of an arena lie in the first.
    pub(super) fn lies_in(&self, number: u32) -> bool {
        self.by_slot.iter().flatten().any(|granted| granted.lent.unwrap_or(0) == number)
    }

    fn take(&mut self, window: WindowKey) -> Option<Granted> {
        self.by_slot.get_mut(slot_of(window))?.take_if(|granted| granted.window == window)
    }

    /// Forgets a window; whether it was known, and for one use.
    pub(super) fn forget(&mut self, window: WindowKey) -> bool {
        self.take(window).is_some_and(|granted| granted.rights & WindowAdvert::ONCE != 0)
    }

    /// Whether a window is for one use.
    pub(super) fn is_once(&self, window: WindowKey) -> bool {
        self.granted(window).is_some_and(|granted| granted.rights & WindowAdvert::ONCE != 0)
    }

    /// The only use of a window is under way, or has ended without one: then there may be another, if the window is still open.
    pub(super) fn set_in_use(&mut self, window: WindowKey, is_in_use: bool) {
        let granted = self.by_slot.get_mut(slot_of(window)).and_then(Option::as_mut);
        if let Some(granted) = granted.filter(|granted| granted.window == window) {
            granted.is_in_use = is_in_use;
        }
    }

    /// Forgets a window that is for one use; whether it was.
    pub(super) fn use_up(&mut self, window: WindowKey) -> bool {
        self.is_once(window) && self.forget(window)
    }

    fn granted(&self, window: WindowKey) -> Option<Granted> {
        self.by_slot
            .get(slot_of(window))
            .copied()
            .flatten()
            .filter(|granted| granted.window == window && !granted.is_in_use)
    }

    /// Where `len` bytes of a window lie, for what `right` (of [`WindowAdvert`]) says.
    ///
    /// # Errors
    /// It was not granted, or not for that, or has not so many bytes there.
    pub(super) fn find(&self, at: Remote, len: usize, right: u8) -> Result<PeerAddress, WindowError> {
        let Granted { grant, rights, lent, .. } = self.granted(at.window).ok_or(WindowError::Key)?;
        if rights & right == 0 {
            return Err(WindowError::Rights);
        }
        let is_inside = ByteRange::new(at.offset, len as u64).ends_by(grant.len.get());
        let address = grant.address.get().checked_add(at.offset).filter(|_| is_inside);
        let (memory, key) = (lent.unwrap_or(0), grant.key.get());
        Ok(PeerAddress { memory, address: address.ok_or(WindowError::Bounds)?, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(address: u64, len: u64) -> Grant {
        Grant::new(address, len, 7)
    }

    #[test]
    fn a_place_is_found_within_the_last_grant_of_its_slot_alone() {
        let mut grants = Grants::default();
        let window = WindowKey(5 << 20 | 3);
        let at = |window, offset| Remote { window, offset };
        let find = |grants: &Grants, at, len| grants.find(at, len, WindowAdvert::PUT);
        assert_eq!(find(&grants, at(window, 0), 1), Err(WindowError::Key));
        assert!(!grants.lies_in(0));
        assert!(grants.note(window, grant(4096, 100), WindowAdvert::PUT));
        assert!(grants.lies_in(0) && !grants.lies_in(1), "an arena is the first that is lent");
        assert_eq!(find(&grants, at(window, 40), 60), Ok(PeerAddress { memory: 0, address: 4136, key: 7 }));
        assert_eq!(find(&grants, at(window, 41), 60), Err(WindowError::Bounds), "beyond its end");
        assert_eq!(find(&grants, at(window, u64::MAX), 2), Err(WindowError::Bounds));
        assert_eq!(grants.find(at(window, 40), 60, WindowAdvert::GET), Err(WindowError::Rights));
        let other = WindowKey(6 << 20 | 3);
        assert_eq!(find(&grants, at(other, 0), 1), Err(WindowError::Key), "another user of the slot");
        let next = WindowKey(9 << 20 | 3);
        assert!(grants.note(next, grant(u64::MAX - 1, 100), WindowAdvert::PUT));
        assert_eq!(find(&grants, at(window, 0), 1), Err(WindowError::Key), "the slot has another user");
        assert_eq!(find(&grants, at(next, 2), 1), Err(WindowError::Bounds), "no address");
        assert!(!grants.note(WindowKey(1 << 20 | GRANTS_MAX as u64), grant(0, 1), WindowAdvert::PUT));
    }

    #[test]
    fn a_window_for_one_use_is_forgotten_when_it_was_used() {
        let mut grants = Grants::default();
        let (once, often) = (WindowKey(5 << 20 | 3), WindowKey(5 << 20 | 4));
        assert!(grants.note(once, grant(4096, 100), WindowAdvert::GET | WindowAdvert::ONCE));
        assert!(grants.note(often, grant(8192, 100), WindowAdvert::GET));
        assert!(!grants.use_up(often) && !grants.use_up(WindowKey(6 << 20 | 3)));
        assert!(grants.use_up(once) && !grants.use_up(once));
        let find = |grants: &Grants, window| grants.find(Remote { window, offset: 0 }, 1, WindowAdvert::GET);
        assert_eq!(find(&grants, once), Err(WindowError::Key));
        assert!(find(&grants, often).is_ok());
        grants.forget(often);
        assert_eq!(find(&grants, often), Err(WindowError::Key));
    }

    #[test]
    fn a_window_whose_use_came_to_nothing_may_be_used_again_unless_it_was_closed() {
        let mut grants = Grants::default();
        let (window, next) = (WindowKey(5 << 20 | 3), WindowKey(6 << 20 | 3));
        let find = |grants: &Grants, window| grants.find(Remote { window, offset: 0 }, 1, WindowAdvert::GET);
        assert!(grants.note(window, grant(4096, 100), WindowAdvert::GET | WindowAdvert::ONCE));
        grants.set_in_use(window, true);
        assert_eq!(find(&grants, window), Err(WindowError::Key), "it is used");
        assert!(!grants.is_once(window), "nor does another use begin");
        grants.set_in_use(window, false);
        assert!(find(&grants, window).is_ok() && grants.is_once(window));
        grants.set_in_use(window, true);
        assert!(grants.forget(window), "its owner has closed it");
        grants.set_in_use(window, false);
        assert_eq!(find(&grants, window), Err(WindowError::Key));
        assert!(grants.note(next, grant(8192, 100), WindowAdvert::GET));
        grants.set_in_use(window, true);
        assert!(find(&grants, next).is_ok(), "another user of the slot");
    }

    #[test]
    fn a_programs_window_is_found_for_its_own_direction_and_in_the_memory_where_it_lies() {
        let mut grants = Grants::default();
        let [first, second, third] = [1, 2, 3].map(|slot| WindowKey(7 << 20 | slot));
        let at = |window| Remote { window, offset: 10 };
        grants.note_lent(first, grant(4096, 100), 5, WindowAdvert::PUT);
        grants.note_lent(second, grant(8192, 100), 5, WindowAdvert::GET);
        assert_eq!(grants.find(at(first), 90, WindowAdvert::PUT), Ok(PeerAddress { memory: 5, address: 4106, key: 7 }));
        assert_eq!(
            grants.find(at(second), 90, WindowAdvert::GET),
            Ok(PeerAddress { memory: 5, address: 8202, key: 7 })
        );
        assert_eq!(grants.find(at(first), 1, WindowAdvert::GET), Err(WindowError::Rights));
        assert_eq!(grants.find(at(second), 1, WindowAdvert::PUT), Err(WindowError::Rights));
        grants.forget_lent(WindowKey(8 << 20 | 1));
        assert!(grants.find(at(first), 1, WindowAdvert::PUT).is_ok(), "it was another user of the slot");
        grants.forget_lent(first);
        assert!(grants.lies_in(5), "another window lies there");
        assert_eq!(grants.find(at(first), 1, WindowAdvert::PUT), Err(WindowError::Key));
        grants.forget_lent(second);
        assert!(!grants.lies_in(5));
        // A slot that is used again, by a peer that does not say so first.
        grants.note_lent(third, grant(0, 1), 6, WindowAdvert::PUT);
        grants.note_lent(WindowKey(9 << 20 | 3), grant(0, 1), 7, WindowAdvert::PUT);
        assert!(!grants.lies_in(6) && grants.lies_in(7));
        let beyond = WindowKey(1 << 20 | GRANTS_MAX as u64);
        grants.note_lent(beyond, grant(0, 1), 8, WindowAdvert::PUT);
        assert!(!grants.lies_in(8), "no room, so nothing lies there");
    }
}
