//! Memory that a peer has lent: only this end copies into it and out of it, once for each transfer.
//!
//! The peer may read and write the memory at any time, and may free its pages; it cannot truncate it. So no reference to it
//! is ever made, bytes are checked after they were copied out, and a hostile peer spoils only its own bytes.
//!
//! A memory may be larger than what a loop maps of its peers at a time. So it is mapped in parts of [`PEER_PART_BYTES`],
//! each when it is first used, and the loop unmaps the part that was used longest ago (`Shared::map_part`).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::blocking::{self, RawBuffer};
use crate::byte_range::ByteRange;
use crate::limits::{FRAME_BYTES_MIN, PEER_PART_BYTES};
use crate::region::{Access, Region, check_peer_file};

/// A memory of a peer, and what is mapped of it here.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    file: OwnedFd,
    bytes: u64,
    access: Access,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    /// Counts in units of [`PEER_PART_BYTES`] from the start of the memory.
    number: u64,
    region: Region,
    used_at: u64,
}

impl PeerMemory {
    /// Takes a file that a peer says has `bytes` bytes, if there is `room` for so many. Nothing is mapped yet.
    ///
    /// # Errors
    /// `EPROTO` if it can be no such memory, `ENOBUFS` if there is no room; else the kernel's.
    pub(super) fn open(file: OwnedFd, bytes: u64, access: Access, room: u64) -> Result<Self, Errno> {
        if !bytes.is_multiple_of(FRAME_BYTES_MIN as u64) {
            return Err(Errno::PROTO);
        }
        if bytes > room {
            return Err(Errno::NOBUFS);
        }
        check_peer_file(file.as_fd(), bytes)?;
        Ok(Self { file, bytes, access, parts: Vec::new() })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn mapped_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.region.bytes()).sum()
    }

    /// Checks that `len` bytes lie at `offset`, and for writing that the peer has lent the memory for that.
    ///
    /// # Errors
    /// `ERANGE`, `EACCES`.
    pub(super) fn check(&self, offset: u64, len: usize, access: Access) -> Result<(), Errno> {
        if access == Access::Write && self.access == Access::Read {
            return Err(Errno::ACCESS);
        }
        if ByteRange::new(offset, len as u64).ends_by(self.bytes) { Ok(()) } else { Err(Errno::RANGE) }
    }

    /// The address of byte `offset`, which lies in the memory, and how many bytes follow it there in the same mapping. `None` if
    /// that part is not mapped.
    pub(super) fn address(&mut self, offset: u64, now: u64) -> Option<(*mut u8, usize)> {
        let (number, at) = place(offset);
        let part = self.parts.iter_mut().find(|part| part.number == number)?;
        part.used_at = now;
        Some((part.region.at(at), part.region.bytes() - at))
    }

    /// Bytes of the part that `offset` lies in.
    pub(super) fn part_bytes(&self, offset: u64) -> usize {
        let start = offset / PEER_PART_BYTES as u64 * PEER_PART_BYTES as u64;
        usize::try_from(self.bytes - start).map_or(PEER_PART_BYTES, |left| left.min(PEER_PART_BYTES))
    }

    /// Maps the part that `offset` lies in, which is not mapped.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn map(&mut self, offset: u64, now: u64) -> Result<(), Errno> {
        let (number, _) = place(offset);
        let start = number * PEER_PART_BYTES as u64;
        let region = Region::of_peer_part(self.file.as_fd(), start, self.part_bytes(offset), self.access)?;
        self.parts.push(Part { number, region, used_at: now });
        Ok(())
    }

    /// Writes to `offset` through the descriptor, where no part can be mapped.
    ///
    /// # Errors
    /// `ENOMEM` where this process may not write so far into a file (`RLIMIT_FSIZE`): to try could end it. Else the kernel's.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> Result<(), Errno> {
        let end = offset.saturating_add(bytes.len() as u64);
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| end > limit) {
            return Err(Errno::NOMEM);
        }
        let memory = RawBuffer { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() };
        // SAFETY: the slice is valid during the call, and a write only reads it.
        unsafe { blocking::write(self.file.as_fd(), memory, offset, false) }.map(|_| ())
    }

    /// Reads from `offset` on through the descriptor, where no part can be mapped.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), Errno> {
        let memory = RawBuffer { ptr: bytes.as_mut_ptr(), len: bytes.len() };
        // SAFETY: the slice is valid during the call, and borrowed mutably.
        let count = unsafe { blocking::read(self.file.as_fd(), memory, offset)? };
        if count < bytes.len() { Err(Errno::RANGE) } else { Ok(()) }
    }

    /// When the mapped part that was used longest ago was used.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.parts.iter().map(|part| part.used_at).min()
    }

    /// Unmaps what was used at that time.
    pub(super) fn unmap(&mut self, used_at: u64) {
        self.parts.retain(|part| part.used_at != used_at);
    }

    /// From now on it is what the peer has left there: nothing that the memory's owner does is seen. For a simulated peer that has
    /// died and whose program is then tidied up, which no kernel does.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn leave_as_it_is(&mut self) -> std::io::Result<()> {
        let mut bytes = vec![0; self.bytes as usize];
        std::fs::File::from(self.file.try_clone()?).read_exact_at(&mut bytes, 0)?;
        let copy = rustix::fs::memfd_create("byway-left", rustix::fs::MemfdFlags::CLOEXEC)?;
        let copy = std::fs::File::from(copy);
        copy.write_all_at(&bytes, 0)?;
        self.file = copy.into();
        self.unmap_all();
        Ok(())
    }

    /// Unmaps all of it.
    pub(super) fn unmap_all(&mut self) {
        self.parts.clear();
    }
}

/// The number of the part in which `offset` lies, and where in it.
fn place(offset: u64) -> (u64, usize) {
    (offset / PEER_PART_BYTES as u64, (offset % PEER_PART_BYTES as u64) as usize)
}
