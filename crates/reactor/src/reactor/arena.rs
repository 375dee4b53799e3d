//! Memory that one end of a stream over shared memory lends to the other, which then copies straight into it and out of it.
//!
//! Either end lends any number of pieces, numbered from 0: a client an arena, which is a whole pool of frames
//! ([`Reactor::lend_arena`]), either end memory of a program ([`Reactor::lend_memory`]). It announces the piece and the
//! location of its windows over the stream. The other end takes the piece ([`Reactor::take_memory`]) and moves bytes with
//! [`Reactor::put`] and [`Reactor::get`]: one copy each, done when the call returns. Messages about the transfer go over the
//! stream.
//!
//! A memory has any size. The loop maps the parts that it uses, and unmaps those used longest ago
//! ([`PEER_MAPPED_BYTES_MAX`](crate::limits::PEER_MAPPED_BYTES_MAX)).

use std::ops::Range;

use super::{Backend, Reactor};
use crate::byte_range::FileRange;
use crate::frame::{Frame, FramePool};
use crate::gather::Gather;
use crate::loan::Loan;
use crate::op::{Errno, Socket};
use crate::shared::{BackendContext, Lending, LentPlace};

impl Reactor {
    /// Whether a stream is one over shared memory.
    pub fn is_shared(&self, socket: Socket) -> bool {
        match &self.backend {
            Backend::Sim(sim) => sim.is_shared(socket),
            _ => self.shared.is_busy(socket).is_some(),
        }
    }

    /// Lends the server of a stream an arena ([`FramePool::shared`], which says what that means), once, and before any other memory: it
    /// has number 0. The server may say no ([`Reactor::take_memory`] there), and then goes on without. Several streams to one server may be lent the same arena;
    /// what was lent is taken back frame by frame ([`FramePool::revoke`]).
    ///
    /// # Errors
    /// `ENOTCONN` if the socket is no stream over shared memory, `EINVAL` if the pool is no arena, `EALREADY` if one was lent,
    /// `EOPNOTSUPP` at a server's end; `EPIPE` if the server is gone or takes none, else the kernel's: then none was lent.
    pub fn lend_arena(&mut self, socket: Socket, pool: &FramePool) -> Result<(), Errno> {
        self.lending(socket, |lending| lending.lend(pool))
    }

    /// Lends the peer of a stream memory of a program ([`Mapping::lend`](crate::Mapping::lend)); gives its number, by which the
    /// peer takes it. The loan is to be kept until the peer has said that it copies nothing there any more, or the stream has ended.
    ///
    /// # Errors
    /// `ENOTCONN` if the socket is no stream over shared memory, `EPIPE` if the peer is gone or takes nothing any more, `EAGAIN`
    /// if it has not looked at many before, else the kernel's: then it was not lent.
    pub fn lend_memory(&mut self, socket: Socket, loan: &Loan) -> Result<u32, Errno> {
        self.lending(socket, |lending| lending.lend_memory(loan))
    }

    /// Takes the memory that the peer of a stream has lent under that number, if that was not done before; gives its size in
    /// bytes. It is this end's until it is [left](Reactor::leave_memory) or the stream is closed, also when the peer has died.
    /// What was lent before is taken too. Of what a peer lends for reading, [`Reactor::put`] is refused.
    ///
    /// Pages that the peer has not touched and that are copied to are accounted to this process:
    /// [`ARENAS_BYTES_MAX`](crate::limits::ARENAS_BYTES_MAX) bounds how many, unless [`Reactor::take_all_memory`] was called.
    ///
    /// # Errors
    /// `EAGAIN` for a number that was not lent: a peer says that it has lent after it has. `ENOBUFS` without room for it, or for more
    /// than [`ARENAS_PER_STREAM_MAX`](crate::limits::ARENAS_PER_STREAM_MAX): it is refused, others can be taken. `ENOENT` for one that
    /// was left or refused, `ENOTCONN` if the socket is no stream over shared memory. `EPROTO` for what is no such memory,
    /// `ECONNRESET` if the peer is gone, else the kernel's: then no more will be taken from this stream.
    pub fn take_memory(&mut self, socket: Socket, number: u32) -> Result<u64, Errno> {
        let room = self.shared.arena_room();
        self.lending(socket, |lending| lending.take_memory(number, room))
    }

    /// Has the loop take memories of its peers whatever their size: for a program that says itself what is copied into which of
    /// them, and so how many pages are accounted to it.
    pub fn take_all_memory(&mut self) {
        self.shared.take_all_memory();
    }

    /// Lets go of memory that the peer of a stream has lent.
    pub fn leave_memory(&mut self, socket: Socket, number: u32) {
        let _ = self.lending(socket, |lending| {
            lending.leave(number);
            Ok(())
        });
    }

    fn lending<R>(&mut self, socket: Socket, with: impl FnOnce(&mut Lending) -> Result<R, Errno>) -> Result<R, Errno> {
        match &mut self.backend {
            Backend::Sim(sim) => sim.lending(socket, with),
            _ => with(self.shared.lending(socket)?),
        }
    }

    /// Bytes of all that was taken from the peer of a stream and not left.
    pub fn peer_arena_bytes(&self, socket: Socket) -> Option<u64> {
        self.shared.arena_bytes(socket)
    }

    /// Bytes that are mapped of all peers' memories.
    #[cfg(test)]
    pub(crate) fn mapped_peer_bytes(&self) -> usize {
        self.shared.mapped_peer_bytes()
    }

    /// Copies all of `gather` to a place in the peer's memory. The copy is complete when this returns, and blocks the loop as long as
    /// it takes; ranges of mapped files are read by the kernel, and should be resident as for a send. Where this process has no room
    /// for another mapping (`ENOMEM`, `EAGAIN`), the bytes are written by system calls.
    ///
    /// # Errors
    /// `ENOTCONN` without such memory, `EACCES` if it is lent for reading, `ERANGE` if the range is not in it, `EBADF` and
    /// `EFAULT` for a file that is not of this loop and a range that is not in its mapping: nothing was copied. `EFAULT` for a
    /// file that became shorter, what the kernel says of reading it, and of mapping or writing the memory: some may have been copied.
    pub fn put(&mut self, socket: Socket, gather: &Gather, to: LentPlace) -> Result<(), Errno> {
        if let Backend::Sim(sim) = &mut self.backend {
            return sim.put(socket, gather, to);
        }
        let (shared, mut context) = context!(self);
        shared.put(&mut context, socket, gather, to)
    }

    /// Reads a range of a file to a place in the peer's memory, without a copy in between; gives how many bytes that are, fewer than `len`
    /// only where the file ends. The copy is complete when this returns, and waits for no device.
    ///
    /// # Errors
    /// `ENOTCONN`, `EACCES` and `ERANGE` as for [`Reactor::put`]: nothing was copied. `EAGAIN` if a part of the range is not in memory, or
    /// this process has no room to map the peer's: read it into a frame ([`Op::Read`](crate::Op::Read)), and put that; always in a
    /// simulation. `EAGAIN`, and what the kernel says of the read and of mapping the memory: some may have been copied.
    pub fn put_file(&mut self, socket: Socket, from: FileRange, to: LentPlace) -> Result<usize, Errno> {
        if let Backend::Sim(sim) = &mut self.backend {
            return sim.lending(socket, |_| Err(Errno::AGAIN));
        }
        let (shared, mut context) = context!(self);
        shared.put_file(&mut context, socket, from, to)
    }

    /// Fills a range of a frame with what lies at a place in the peer's memory now. The copy is complete when this returns. The peer
    /// may be writing there: check the copy, never the original. Without room for a mapping it reads as [`Reactor::put`] writes.
    ///
    /// # Errors
    /// `ENOTCONN` without such memory, `ERANGE` if the range is not in it: nothing was copied. What the kernel says of mapping or
    /// reading the memory: some may have been copied. `ECONNRESET` if the peer has ended the
    /// stream, for it may have given the memory's pages up: what was copied is nothing.
    pub fn get(&mut self, socket: Socket, from: LentPlace, into: &mut Frame, range: Range<usize>) -> Result<(), Errno> {
        if let Backend::Sim(sim) = &mut self.backend {
            return sim.get(socket, from, into, range);
        }
        let (shared, mut context) = context!(self);
        shared.get(&mut context, socket, from, into, range)?;
        if shared.has_peer_ended(socket) { Err(Errno::CONNRESET) } else { Ok(()) }
    }
}
