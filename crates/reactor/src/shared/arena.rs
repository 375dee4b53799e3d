//! Memory that a peer has lent: bytes are copied into it and out of it, once, by this end alone.
//!
//! The peer may read and write it at any time, and may give its pages back; it cannot make it shorter. So it is never seen
//! through a reference, whatever comes out of it is a copy that is looked at afterwards, and a hostile peer spoils its own
//! bytes and nothing else.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::link::copy_part;
use crate::bytewise;
use crate::frame::Frame;
use crate::gather::Gather;
use crate::limits::{ARENA_BYTES_MAX, FRAME_BYTES_MIN};
use crate::os::Os;
use crate::region::{Access, Region};

/// The arena of a peer, as it lies in this process.
#[derive(Debug)]
pub(crate) struct PeerArena {
    region: Region,
    access: Access,
}

impl PeerArena {
    /// Maps what a peer says to be an arena of `bytes` bytes, if there is `room` for so many.
    ///
    /// # Errors
    /// `EPROTO` if it is none, `ENOBUFS` if there is no room; else the kernel's.
    pub(crate) fn open(file: BorrowedFd<'_>, (bytes, access): (u64, Access), room: usize) -> Result<Self, Errno> {
        let bytes = usize::try_from(bytes).map_err(|_| Errno::PROTO)?;
        if bytes > ARENA_BYTES_MAX || !bytes.is_multiple_of(FRAME_BYTES_MIN) {
            return Err(Errno::PROTO);
        }
        if bytes > room {
            return Err(Errno::NOBUFS);
        }
        Ok(Self { region: Region::of_peer(file, bytes, access)?, access })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.region.bytes()
    }

    /// The address of `offset`, if `len` bytes lie there.
    fn range(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        let offset = usize::try_from(offset).map_err(|_| Errno::RANGE)?;
        let end = offset.checked_add(len).ok_or(Errno::RANGE)?;
        if end > self.bytes() { Err(Errno::RANGE) } else { Ok(self.region.at(offset)) }
    }

    /// Copies all of a gather to `offset`.
    ///
    /// # Errors
    /// See [`Reactor::put`](crate::Reactor::put).
    pub(crate) fn put(&self, os: &mut Os, gather: &Gather, offset: u64) -> Result<(), Errno> {
        if self.access == Access::Read {
            return Err(Errno::ACCESS);
        }
        let to = self.range(offset, gather.len())?;
        os.check_gather(gather)?;
        let mut done = 0;
        for segment in &gather.segments {
            let len = segment.len();
            // SAFETY: the lengths of the segments are the gather's, which lies in the mapping from `to` on. The mapping is
            // the peer's file, which is neither a head nor seen through references; were a frame to lie in the same file,
            // it would be at another address.
            unsafe { copy_part(os, gather, segment, 0, (to.add(done), len))? };
            done += len;
        }
        os.counters.put_bytes += done as u64;
        Ok(())
    }

    /// Fills `into.start..into.end` of a frame with what lies at `offset` now.
    ///
    /// # Errors
    /// See [`Reactor::get`](crate::Reactor::get).
    pub(crate) fn get(&self, os: &mut Os, offset: u64, into: (&mut Frame, Range<usize>)) -> Result<(), Errno> {
        let (frame, range) = into;
        let len = range.len();
        let from = self.range(offset, len)?;
        // SAFETY: so many bytes lie in the mapping, and in the frame, which is at another address also where it lies in the same
        // file.
        unsafe { bytewise::copy(from, frame.range(range.start, len), len) };
        os.counters.got_bytes += len as u64;
        Ok(())
    }
}
