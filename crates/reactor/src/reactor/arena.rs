//! Memory that one end of a stream over shared memory lends to the other, which then copies straight into it and out of it.
//!
//! The client lends ([`Reactor::lend_arena`]), says so over the stream, and says where its frames lie
//! ([`Frame::arena_offset`](crate::Frame::arena_offset)). The server takes the arena ([`Reactor::take_arena`]) and moves
//! bytes with [`Reactor::put`] and [`Reactor::get`]: one copy each, done when the call returns; what is to be told about it
//! goes over the stream. A server lends nothing.

use super::Reactor;
use crate::frame::FramePool;
use crate::gather::Gather;
use crate::op::{Errno, Socket};
use crate::shared::Floor;

impl Reactor {
    /// Lends the server of a stream an arena ([`FramePool::shared`], which says what that means), once. It may say no
    /// ([`Reactor::take_arena`] there), and then goes on without. Several streams to one server may be lent the same arena;
    /// what was lent is taken back frame by frame ([`FramePool::revoke`]).
    ///
    /// # Errors
    /// `ENOTCONN` if the socket is no stream over shared memory, `EINVAL` if the pool is no arena, `EALREADY` if one was lent,
    /// `EOPNOTSUPP` at a server's end; `EPIPE` if the server is gone or takes none, else the kernel's: then none was lent.
    pub fn lend_arena(&mut self, socket: Socket, pool: &FramePool) -> Result<(), Errno> {
        self.shared.lend_arena(socket, pool)
    }

    /// Takes the arena that the client of a stream has lent; gives its size in bytes. It is mapped until the stream is closed,
    /// also when the client has died. Pages of it that the client has not touched and that are copied to are accounted to this
    /// process: [`ARENAS_BYTES_MAX`](crate::limits::ARENAS_BYTES_MAX) bounds how many.
    ///
    /// # Errors
    /// `EAGAIN` if none has come: a client says that it has lent after it has. `ENOTCONN` if the socket is no stream over
    /// shared memory, `EALREADY` if one was taken, `EOPNOTSUPP` at a client's end. `EPROTO` for what is no arena, `ENOBUFS`
    /// without room for it, `ECONNRESET` if the client is gone, else the kernel's: then none will be taken from this stream.
    pub fn take_arena(&mut self, socket: Socket) -> Result<usize, Errno> {
        self.shared.take_arena(socket)
    }

    /// Bytes of the arena that was taken from the client of a stream.
    pub fn peer_arena_bytes(&self, socket: Socket) -> Option<usize> {
        self.shared.arena_bytes(socket)
    }

    /// Copies all of `gather` into the peer's arena, to `offset` there. It is done when this returns, and blocks the loop as
    /// long as the copy takes; ranges of mapped files are read by the kernel, and should be resident as for a send.
    ///
    /// # Errors
    /// `ENOTCONN` without an arena, `ERANGE` if the range is not in it, `EBADF` and `EFAULT` for a file that is not of this
    /// loop and a range that is not in its mapping: nothing was copied. `EFAULT` for a file that became shorter, and what the
    /// kernel says of reading it: some may have been copied.
    pub fn put(&mut self, socket: Socket, gather: &Gather, offset: u64) -> Result<(), Errno> {
        let (shared, mut floor) = floor!(self);
        shared.put(&mut floor, socket, gather, offset)
    }

    /// Fills `into` with what lies in the peer's arena at `offset` now. It is done when this returns. The peer may be writing
    /// there: what was got is to be checked here, never there.
    ///
    /// # Errors
    /// `ENOTCONN` without an arena, `ERANGE` if the range is not in it: nothing was copied.
    pub fn get(&mut self, socket: Socket, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        let (shared, mut floor) = floor!(self);
        shared.get(&mut floor, socket, offset, into)
    }
}
