//! Copies into and out of the memories that peers have lent, of which a loop has mapped
//! [`PEER_MAPPED_BYTES_MAX`] at most.
//!
//! A program may have no room for a mapping. Then bytes are written to and read from the memory's file by system calls, through a
//! buffer. The payload does not take the stream instead: what was put into the same window before lies there already, and its
//! message would no longer be ahead of this one.

use std::ops::Range;

use rustix::io::Errno;

use super::shm_stream::{ShmStream, copy_memory, copy_part};
use super::{BackendContext, Lending, PeerMemory, Shared};
use crate::blocking::RawBuffer;
use crate::byte_range::FileRange;
use crate::bytewise;
use crate::frame::Frame;
use crate::gather::Gather;
use crate::limits::PEER_MAPPED_BYTES_MAX;
use crate::op::Socket;
use crate::os::Os;
use crate::region::Access;

/// Bytes that are copied at a time where a peer's memory cannot be mapped.
const UNMAPPED_BYTES: usize = 64 << 10;

/// A place in the memory that a stream's peer has lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentPlace {
    /// The number under which the peer has lent the memory; 0 is an arena.
    pub memory: u32,
    /// Bytes from its start.
    pub offset: u64,
}

/// As [`Shared`] does it, for one stream and without a bound for what is mapped: for the simulation.
impl Lending {
    /// # Errors
    /// See [`Reactor::put`](crate::Reactor::put); `EFAULT` for mapped files.
    pub(crate) fn put(&mut self, gather: &Gather, mut to: LentPlace) -> Result<(), Errno> {
        let memory = self.memory(to.memory).ok_or(Errno::NOTCONN)?;
        memory.check(to.offset, gather.len(), Access::Write)?;
        for segment in &gather.segments {
            let mut done = 0;
            while done < segment.len() {
                let (address, room) = mapped(memory, to.offset)?;
                let len = room.min(segment.len() - done);
                // SAFETY: as in `Shared::put`; nothing is unmapped meanwhile.
                unsafe { copy_memory(gather, segment, done, address, len)? };
                (done, to.offset) = (done + len, to.offset + len as u64);
            }
        }
        Ok(())
    }

    /// # Errors
    /// See [`Reactor::get`](crate::Reactor::get).
    pub(crate) fn get(&mut self, mut from: LentPlace, into: &mut Frame, mut range: Range<usize>) -> Result<(), Errno> {
        let memory = self.memory(from.memory).ok_or(Errno::NOTCONN)?;
        memory.check(from.offset, range.len(), Access::Read)?;
        while !range.is_empty() {
            let (address, room) = mapped(memory, from.offset)?;
            let len = room.min(range.len());
            // SAFETY: as in `Shared::get`; nothing is unmapped meanwhile.
            unsafe { bytewise::copy(address, into.range(range.start, len), len) };
            (range.start, from.offset) = (range.start + len, from.offset + len as u64);
        }
        Ok(())
    }
}

fn mapped(memory: &mut PeerMemory, offset: u64) -> Result<(*mut u8, usize), Errno> {
    if memory.address(offset, 0).is_none() {
        memory.map(offset, 0)?;
    }
    memory.address(offset, 0).ok_or(Errno::RANGE)
}

impl Shared {
    /// Copies all of a gather to a place in the memory of a stream's peer.
    ///
    /// # Errors
    /// See [`Reactor::put`](crate::Reactor::put).
    pub(crate) fn put(
        &mut self,
        context: &mut BackendContext<'_>,
        socket: Socket,
        gather: &Gather,
        mut to: LentPlace,
    ) -> Result<(), Errno> {
        self.check(socket, to, gather.len(), Access::Write)?;
        let os = context.backend.os().ok_or(Errno::NOTCONN)?;
        os.check_gather(gather)?;
        for segment in &gather.segments {
            let mut done = 0;
            while done < segment.len() {
                let left = segment.len() - done;
                let len = if let Some((address, room)) = self.try_map_part(os, socket, to)? {
                    let len = room.min(left);
                    // SAFETY: `len` bytes lie in the mapping from `address` on, which stays until the next call of `try_map_part`. The
                    // mapping is the peer's file, which is neither a head nor seen through references; were a frame to lie in the
                    // same file, it would be at another address.
                    unsafe { copy_part(os, gather, segment, done, address, len)? };
                    len
                } else {
                    let mut copy = vec![0; left.min(UNMAPPED_BYTES)];
                    // SAFETY: into all of a buffer that is nothing else's.
                    unsafe { copy_part(os, gather, segment, done, copy.as_mut_ptr(), copy.len())? };
                    self.memory(socket, to)?.write(&copy, to.offset)?;
                    copy.len()
                };
                (done, to.offset) = (done + len, to.offset + len as u64);
            }
        }
        os.counters.put_bytes += gather.len() as u64;
        Ok(())
    }

    /// Reads a range of a file, up to its end, to a place in the memory of a stream's peer; gives the bytes.
    ///
    /// # Errors
    /// See [`Reactor::put_file`](crate::Reactor::put_file).
    pub(crate) fn put_file(
        &mut self,
        context: &mut BackendContext<'_>,
        socket: Socket,
        FileRange { file, offset, len }: FileRange,
        mut to: LentPlace,
    ) -> Result<usize, Errno> {
        self.check(socket, to, len, Access::Write)?;
        let os = context.backend.os().ok_or(Errno::NOTCONN)?;
        let mut done = 0;
        while done < len {
            // From a frame it can be written to the peer's memory as it is.
            let (address, room) = self.try_map_part(os, socket, to)?.ok_or(Errno::AGAIN)?;
            let part = RawBuffer { ptr: address, len: room.min(len - done) };
            // SAFETY: so many bytes lie in the mapping of the peer's file, which stays until the next call of `try_map_part`, and which
            // is seen through no reference.
            let count = unsafe { os.read_cached(file, offset + done as u64, part)? };
            (done, to.offset) = (done + count, to.offset + count as u64);
            if count < part.len {
                break;
            }
        }
        os.counters.put_bytes += done as u64;
        Ok(done)
    }

    /// Fills a range of a frame with what lies at a place in the memory of a stream's peer now.
    ///
    /// # Errors
    /// See [`Reactor::get`](crate::Reactor::get).
    pub(crate) fn get(
        &mut self,
        context: &mut BackendContext<'_>,
        socket: Socket,
        mut from: LentPlace,
        into: &mut Frame,
        mut range: Range<usize>,
    ) -> Result<(), Errno> {
        self.check(socket, from, range.len(), Access::Read)?;
        let os = context.backend.os().ok_or(Errno::NOTCONN)?;
        os.counters.got_bytes += range.len() as u64;
        while !range.is_empty() {
            let len = if let Some((address, room)) = self.try_map_part(os, socket, from)? {
                let len = room.min(range.len());
                // SAFETY: so many bytes lie in the mapping, and in the frame, which is at another address also where it lies in the
                // same file.
                unsafe { bytewise::copy(address, into.range(range.start, len), len) };
                len
            } else {
                let mut copy = vec![0; range.len().min(UNMAPPED_BYTES)];
                self.memory(socket, from)?.read(&mut copy, from.offset)?;
                into.write(range.start, &copy);
                copy.len()
            };
            (range.start, from.offset) = (range.start + len, from.offset + len as u64);
        }
        Ok(())
    }

    fn memory(&mut self, socket: Socket, at: LentPlace) -> Result<&mut PeerMemory, Errno> {
        self.lending(socket)?.memory(at.memory).ok_or(Errno::NOTCONN)
    }

    fn check(&mut self, socket: Socket, at: LentPlace, len: usize, access: Access) -> Result<(), Errno> {
        self.memory(socket, at)?.check(at.offset, len, access)
    }

    /// As [`Shared::map_part`]; `None` if this process has no room for the mapping.
    fn try_map_part(&mut self, os: &mut Os, socket: Socket, at: LentPlace) -> Result<Option<(*mut u8, usize)>, Errno> {
        match self.map_part(os, socket, at) {
            // Too many mappings or too much address space; too much that would be locked, after `mlockall`.
            Err(error @ (Errno::NOMEM | Errno::AGAIN)) => {
                if !std::mem::replace(&mut self.is_unmapped_said, true) {
                    tracing::warn!(
                        %error,
                        "cannot map memory of a peer; it is copied by system calls, which is slower: raise vm.max_map_count or RLIMIT_AS"
                    );
                }
                Ok(None)
            }
            mapped => mapped.map(Some),
        }
    }

    /// The address of a place in a peer's memory, and how many bytes follow it there; maps that part if it is not mapped. The
    /// address is good until the next call.
    fn map_part(&mut self, os: &mut Os, socket: Socket, at: LentPlace) -> Result<(*mut u8, usize), Errno> {
        self.clock += 1;
        let now = self.clock;
        let memory = self.memory(socket, at)?;
        if let Some(found) = memory.address(at.offset, now) {
            return Ok(found);
        }
        let bytes = memory.part_bytes(at.offset);
        self.make_room(bytes);
        let memory = self.memory(socket, at)?;
        memory.map(at.offset, now)?;
        os.counters.mapped_loans += 1;
        memory.address(at.offset, now).ok_or(Errno::RANGE)
    }

    /// Bytes that are mapped of all peers' memories.
    pub(crate) fn mapped_peer_bytes(&self) -> usize {
        self.streams.iter().map(ShmStream::mapped_peer_bytes).sum()
    }

    /// Unmaps what was used longest ago, until `bytes` more may be mapped.
    fn make_room(&mut self, bytes: usize) {
        let mut mapped = self.mapped_peer_bytes();
        while mapped + bytes > PEER_MAPPED_BYTES_MAX {
            let Some(oldest) = self.streams.iter().filter_map(ShmStream::oldest_use).min() else { return };
            for stream in self.streams.iter_mut() {
                let before = stream.mapped_peer_bytes();
                stream.lending().memories_mut().for_each(|memory| memory.unmap(oldest));
                mapped -= before - stream.mapped_peer_bytes();
            }
        }
    }
}
