//! Where a peer's windows lie, for wires that place payloads by themselves.
//!
//! A wire whose ends can reach each other's memory needs no receiver for a payload, but must be told where a window is: a
//! `Call` that names a window of its sender brings a [`Grant`] with it, and so does the `Window` of a node. The table keeps the last grant of each slot of the
//! peer's windows; a window that is used again has another key, and an old grant is then not found any more.

use crate::limits::GRANTS_MAX;
use crate::windows::{WindowError, WindowKey, slot_of};
use crate::wire::{Grant, WindowNews};

use super::transfer::Remote;

/// A range of the peer's memory, in what the wire counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Where it starts.
    pub(super) address: u64,
    /// What the wire wants to be shown for it, if anything.
    pub(super) key: u32,
}

#[derive(Clone, Copy, Debug)]
struct Granted {
    window: WindowKey,
    grant: Grant,
    /// Of [`WindowNews`].
    rights: u8,
}

/// What a session's peer has granted.
#[derive(Debug, Default)]
pub(super) struct Grants {
    by_slot: Vec<Option<Granted>>,
}

impl Grants {
    /// Notes a grant. False if there is no room for it: the slot is above [`GRANTS_MAX`].
    pub(super) fn note(&mut self, window: WindowKey, grant: Grant, rights: u8) -> bool {
        let slot = slot_of(window);
        if slot >= GRANTS_MAX {
            return false;
        }
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, None);
        }
        self.by_slot[slot] = Some(Granted { window, grant, rights });
        true
    }

    /// Forgets a window; whether it was known, and for one use.
    pub(super) fn forget(&mut self, window: WindowKey) -> bool {
        let slot = self.by_slot.get_mut(slot_of(window));
        let known = slot.and_then(|slot| slot.take_if(|granted| granted.window == window));
        known.is_some_and(|granted| granted.rights & WindowNews::ONCE != 0)
    }

    /// Forgets a window that is for one use; whether it was.
    pub(super) fn use_up(&mut self, window: WindowKey) -> bool {
        let granted = self.granted(window).is_some_and(|granted| granted.rights & WindowNews::ONCE != 0);
        granted && self.forget(window)
    }

    fn granted(&self, window: WindowKey) -> Option<Granted> {
        self.by_slot.get(slot_of(window)).copied().flatten().filter(|granted| granted.window == window)
    }

    /// Where `len` bytes of a window lie, for what `right` (of [`WindowNews`]) says.
    ///
    /// # Errors
    /// It was not granted, or not for that, or has not so many bytes there.
    pub(super) fn find(&self, at: Remote, len: usize, right: u8) -> Result<Place, WindowError> {
        let Granted { grant, rights, .. } = self.granted(at.window).ok_or(WindowError::Key)?;
        if rights & right == 0 {
            return Err(WindowError::Rights);
        }
        let end = at.offset.checked_add(len as u64).filter(|end| *end <= u64::from(grant.len.get()));
        let address = grant.address.get().checked_add(at.offset).filter(|_| end.is_some());
        Ok(Place { address: address.ok_or(WindowError::Bounds)?, key: grant.key.get() })
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
        let find = |grants: &Grants, at, len| grants.find(at, len, WindowNews::PUT);
        assert_eq!(find(&grants, at(window, 0), 1), Err(WindowError::Key));
        assert!(grants.note(window, grant(4096, 100), WindowNews::PUT));
        assert_eq!(find(&grants, at(window, 40), 60), Ok(Place { address: 4136, key: 7 }));
        assert_eq!(find(&grants, at(window, 41), 60), Err(WindowError::Bounds), "beyond its end");
        assert_eq!(find(&grants, at(window, u64::MAX), 2), Err(WindowError::Bounds));
        assert_eq!(grants.find(at(window, 40), 60, WindowNews::GET), Err(WindowError::Rights));
        let other = WindowKey(6 << 20 | 3);
        assert_eq!(find(&grants, at(other, 0), 1), Err(WindowError::Key), "another user of the slot");
        let next = WindowKey(9 << 20 | 3);
        assert!(grants.note(next, grant(u64::MAX - 1, 100), WindowNews::PUT));
        assert_eq!(find(&grants, at(window, 0), 1), Err(WindowError::Key), "the slot has another user");
        assert_eq!(find(&grants, at(next, 2), 1), Err(WindowError::Bounds), "no address");
        assert!(!grants.note(WindowKey(1 << 20 | GRANTS_MAX as u64), grant(0, 1), WindowNews::PUT));
    }

    #[test]
    fn a_window_for_one_use_is_forgotten_when_it_was_used() {
        let mut grants = Grants::default();
        let (once, often) = (WindowKey(5 << 20 | 3), WindowKey(5 << 20 | 4));
        assert!(grants.note(once, grant(4096, 100), WindowNews::GET | WindowNews::ONCE));
        assert!(grants.note(often, grant(8192, 100), WindowNews::GET));
        assert!(!grants.use_up(often) && !grants.use_up(WindowKey(6 << 20 | 3)));
        assert!(grants.use_up(once) && !grants.use_up(once));
        let find = |grants: &Grants, window| grants.find(Remote { window, offset: 0 }, 1, WindowNews::GET);
        assert_eq!(find(&grants, once), Err(WindowError::Key));
        assert!(find(&grants, often).is_ok());
        grants.forget(often);
        assert_eq!(find(&grants, often), Err(WindowError::Key));
    }
}
