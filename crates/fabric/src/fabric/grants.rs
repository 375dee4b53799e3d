//! Where a peer's windows lie, for wires that place payloads by themselves.
//!
//! A wire whose ends can reach each other's memory needs no receiver for a payload, but must be told where a window is: a
//! `Call` that names a window of its sender brings a [`Grant`] with it. The table keeps the last grant of each slot of the
//! peer's windows; a window that is used again has another key, and an old grant is then not found any more.

use crate::limits::GRANTS_MAX;
use crate::windows::{WindowKey, slot_of};
use crate::wire::Grant;

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
}

/// What a session's peer has granted.
#[derive(Debug, Default)]
pub(super) struct Grants {
    by_slot: Vec<Option<Granted>>,
}

impl Grants {
    /// Notes a grant. False if there is no room for it: the slot is above [`GRANTS_MAX`].
    pub(super) fn note(&mut self, window: WindowKey, grant: Grant) -> bool {
        let slot = slot_of(window);
        if slot >= GRANTS_MAX {
            return false;
        }
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, None);
        }
        self.by_slot[slot] = Some(Granted { window, grant });
        true
    }

    /// Where `len` bytes of a window lie, if it was granted and has so many there.
    pub(super) fn find(&self, at: Remote, len: usize) -> Option<Place> {
        let granted = self.by_slot.get(slot_of(at.window)).copied().flatten();
        let grant = granted.filter(|granted| granted.window == at.window)?.grant;
        let end = at.offset.checked_add(len as u64)?;
        if end > u64::from(grant.len.get()) {
            return None;
        }
        Some(Place { address: grant.address.get().checked_add(at.offset)?, key: grant.key.get() })
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
        assert_eq!(grants.find(at(window, 0), 1), None);
        assert!(grants.note(window, grant(4096, 100)));
        assert_eq!(grants.find(at(window, 40), 60), Some(Place { address: 4136, key: 7 }));
        assert_eq!(grants.find(at(window, 41), 60), None, "beyond its end");
        assert_eq!(grants.find(at(window, u64::MAX), 2), None);
        assert_eq!(grants.find(at(WindowKey(6 << 20 | 3), 0), 1), None, "another user of the slot");
        let next = WindowKey(9 << 20 | 3);
        assert!(grants.note(next, grant(u64::MAX - 1, 100)));
        assert_eq!(grants.find(at(window, 0), 1), None, "the slot has another user");
        assert_eq!(grants.find(at(next, 2), 1), None, "no address");
        assert!(!grants.note(WindowKey(1 << 20 | GRANTS_MAX as u64), grant(0, 1)));
    }
}
