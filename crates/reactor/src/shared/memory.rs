//! The memory of a shared stream: an anonymous file that both ends map, sealed so that neither can take it away.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::limits::{SHARED_RING_BYTES_MAX, SHARED_RING_BYTES_MIN};
use crate::region::{Access, Region};

/// Of the counters and flags of both rings, before the first ring's bytes.
pub(super) const CONTROL_BYTES: usize = 4096;

/// The control page, then the two rings. What lies in it is read and written through atomics and raw copies alone, never
/// through references, since the peer does so too.
#[derive(Debug)]
pub(super) struct SharedMemory {
    region: Region,
    ring_bytes: usize,
}

impl SharedMemory {
    /// Makes the memory of a new stream; the descriptor is for the peer.
    ///
    /// # Errors
    /// The kernel's: no descriptors, no memory.
    pub(super) fn create(ring_bytes: usize) -> Result<(Self, OwnedFd), Errno> {
        debug_assert!(is_ring(ring_bytes), "a power of two within the limits");
        let (region, fd) = Region::sealed("byway-stream", bytes(ring_bytes))?;
        Ok((Self { region, ring_bytes }, fd))
    }

    /// Maps what a peer has made.
    ///
    /// # Errors
    /// `EPROTO` for what is no such memory (see [`Region::of_peer`]); else the kernel's.
    pub(super) fn open(fd: BorrowedFd<'_>, ring_bytes: usize) -> Result<Self, Errno> {
        if !is_ring(ring_bytes) {
            return Err(Errno::PROTO);
        }
        Ok(Self { region: Region::of_peer(fd, bytes(ring_bytes), Access::Write)?, ring_bytes })
    }

    /// Bytes of each ring, a power of two.
    pub(super) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// Where a word of the control page lies, `at` bytes in; a multiple of 8.
    pub(super) fn control(&self, at: usize) -> *mut u8 {
        debug_assert!(at < CONTROL_BYTES && at.is_multiple_of(8), "in the control page");
        self.region.at(at)
    }

    /// Where the bytes of ring 0 or 1 begin.
    pub(super) fn ring(&self, number: usize) -> *mut u8 {
        debug_assert!(number < 2, "there are two");
        self.region.at(CONTROL_BYTES + number * self.ring_bytes)
    }
}

fn bytes(ring_bytes: usize) -> usize {
    CONTROL_BYTES + 2 * ring_bytes
}

fn is_ring(bytes: usize) -> bool {
    bytes.is_power_of_two() && (SHARED_RING_BYTES_MIN..=SHARED_RING_BYTES_MAX).contains(&bytes)
}
