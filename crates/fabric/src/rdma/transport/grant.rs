//! Grants: where the windows lie that a peer has opened, and the numbers that ours are granted under.
//!
//! A message that names a window of its sender carries a grant of it. The receiver keeps it under a small number that
//! the sender chose, the lowest that is free, until that number is granted again: so its table is never longer than
//! the sender has windows open at a time, and nobody has to say that a window is closed. Whoever uses a grant of a window
//! that is closed is refused by the device.

use std::collections::HashMap;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::super::domain::WindowAddress;
use crate::limits::RDMA_WINDOWS_MAX;
use crate::windows::{WindowError, WindowKey};

/// Where a window lies. docs/wire.md draws it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Grant {
    /// Its first byte, in its owner's memory.
    pub address: U64,
    /// The key of its registration.
    pub rkey: U32,
    /// Bytes.
    pub len: U32,
    /// The number that it is kept under.
    pub number: U32,
    /// What may be done: 1 read, 2 write.
    pub rights: U32,
}

/// Bytes of a grant.
pub const GRANT_BYTES: usize = 24;
const _: () = assert!(size_of::<Grant>() == GRANT_BYTES);

/// May be read.
pub const GRANT_READ: u32 = 1;
/// May be written.
pub const GRANT_WRITE: u32 = 2;

/// The windows that a peer has granted.
#[derive(Debug, Default)]
pub struct Grants {
    keys: Vec<u64>,
    grants: HashMap<u64, Grant>,
}

impl Grants {
    /// Takes note of a grant of the window `key`. False if its number is beyond
    /// [`RDMA_WINDOWS_MAX`]: the peer's fault.
    pub fn insert(&mut self, key: WindowKey, grant: Grant) -> bool {
        let number = grant.number.get() as usize;
        if number >= RDMA_WINDOWS_MAX {
            return false;
        }
        if self.keys.len() <= number {
            self.keys.resize(number + 1, 0);
        }
        let before = std::mem::replace(&mut self.keys[number], key.0);
        self.grants.remove(&before);
        self.grants.insert(key.0, grant);
        true
    }

    /// Where `len` bytes at `offset` of a window lie, if they may be used so.
    ///
    /// # Errors
    /// As the peer would say: there is no such window, not so much of it, or it is open for something else.
    pub fn find(&self, key: WindowKey, offset: u64, len: usize, right: u32) -> Result<WindowAddress, WindowError> {
        let grant = self.grants.get(&key.0).ok_or(WindowError::Key)?;
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= u64::from(grant.len.get()));
        if !inside {
            return Err(WindowError::Bounds);
        }
        if grant.rights.get() & right == 0 {
            return Err(WindowError::Rights);
        }
        Ok(WindowAddress { address: grant.address.get(), rkey: grant.rkey.get() }.at(offset))
    }
}

/// The numbers of our own windows towards one peer.
#[derive(Debug, Default)]
pub struct Numbers {
    free: Vec<u32>,
    used: u32,
}

impl Numbers {
    /// A number that is free; none if [`RDMA_WINDOWS_MAX`] windows are open.
    pub fn take(&mut self) -> Option<u32> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        let number = self.used;
        (number < RDMA_WINDOWS_MAX as u32).then(|| {
            self.used += 1;
            number
        })
    }

    /// Its window is closed.
    pub fn give_back(&mut self, number: u32) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(number: u32, rights: u32) -> Grant {
        let (address, rkey) = (U64::new(0x0102_0304_0506_0708), U32::new(0x1112_1314));
        Grant { address, rkey, len: U32::new(4096), number: U32::new(number), rights: U32::new(rights) }
    }

    #[test]
    fn a_grant_has_these_bytes() {
        let golden = [8, 7, 6, 5, 4, 3, 2, 1, 0x14, 0x13, 0x12, 0x11, 0, 16, 0, 0, 7, 0, 0, 0, 2, 0, 0, 0];
        assert_eq!(grant(7, GRANT_WRITE).as_bytes(), golden);
    }

    #[test]
    fn a_range_is_found_within_the_window_and_for_what_it_is_open() {
        let mut grants = Grants::default();
        assert!(grants.insert(WindowKey(5), grant(0, GRANT_WRITE)));
        let found = grants.find(WindowKey(5), 96, 4000, GRANT_WRITE);
        assert_eq!(found, Ok(WindowAddress { address: 0x0102_0304_0506_0708 + 96, rkey: 0x1112_1314 }));
        assert_eq!(grants.find(WindowKey(5), 97, 4000, GRANT_WRITE), Err(WindowError::Bounds));
        assert_eq!(grants.find(WindowKey(5), u64::MAX, 2, GRANT_WRITE), Err(WindowError::Bounds));
        assert_eq!(grants.find(WindowKey(5), 0, 1, GRANT_READ), Err(WindowError::Rights));
        assert_eq!(grants.find(WindowKey(6), 0, 1, GRANT_WRITE), Err(WindowError::Key));
    }

    #[test]
    fn a_number_that_is_granted_again_forgets_the_window_before() {
        let mut grants = Grants::default();
        for key in 1..1000 {
            assert!(grants.insert(WindowKey(key), grant((key % 3) as u32, GRANT_READ)));
        }
        assert_eq!((grants.grants.len(), grants.keys.len()), (3, 3));
        assert!(grants.find(WindowKey(996), 0, 1, GRANT_READ).is_err());
        assert!(grants.find(WindowKey(997), 0, 1, GRANT_READ).is_ok());
        assert!(!grants.insert(WindowKey(1), grant(RDMA_WINDOWS_MAX as u32, GRANT_READ)));
    }

    #[test]
    fn the_same_key_under_many_numbers_does_not_grow_the_table() {
        let mut grants = Grants::default();
        for number in 0..100 {
            assert!(grants.insert(WindowKey(1), grant(number, GRANT_READ)));
        }
        assert_eq!(grants.grants.len(), 1);
        assert!(grants.insert(WindowKey(2), grant(0, GRANT_READ)));
        assert_eq!(grants.grants.len(), 1, "the number's window before was the same key");
    }

    #[test]
    fn numbers_are_bounded_and_used_again() {
        let mut numbers = Numbers::default();
        let all: Vec<u32> = std::iter::from_fn(|| numbers.take()).collect();
        assert_eq!(all.len(), RDMA_WINDOWS_MAX);
        numbers.give_back(7);
        assert_eq!((numbers.take(), numbers.take()), (Some(7), None));
    }
}
