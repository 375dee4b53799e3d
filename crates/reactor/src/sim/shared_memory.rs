//! Streams over shared memory: their bytes travel as those of other streams; what their ends lend each other is real.
//!
//! An end lends by the code and the descriptors of a real stream, and the peer maps them into the same process once more. Its
//! copies are complete when they return, so a run stays a matter of its seed.

use std::ops::Range;

use super::node::SimLoop;
use super::stream::{Connection, Stage};
use super::world::Inner;
use crate::frame::Frame;
use crate::gather::Gather;
use crate::op::{Errno, Socket};
use crate::shared::{Lending, LentPlace};

/// What an end of a stream over shared memory has besides.
#[derive(Debug)]
pub(super) struct SharedEnd {
    /// `None` once its process is dead or has closed it.
    lending: Option<Lending>,
    /// Its process has ended the stream, as the peer sees at once.
    has_ended: bool,
}

impl SharedEnd {
    /// The client's and the server's.
    pub(super) fn pair() -> Result<[Self; 2], Errno> {
        Ok(Lending::simulated()?.map(|lending| Self { lending: Some(lending), has_ended: false }))
    }
}

impl Connection {
    /// Whether it is one over shared memory.
    pub(super) fn is_shared(&self) -> bool {
        self.ends[0].shared.is_some()
    }

    /// The process of an end dies. Its memory is then as it was for the peer, whatever the owner of the world drops.
    pub(super) fn end_memory(&mut self, end: usize) {
        if self.ends[end].stage == Stage::Closed {
            return;
        }
        if let Some(shared) = &mut self.ends[end].shared {
            shared.lending = None;
        }
        let lending = self.ends[1 - end].shared.as_mut().and_then(|shared| shared.lending.as_mut());
        for memory in lending.into_iter().flat_map(Lending::memories_mut) {
            memory.leave_as_it_is().expect("memory for a copy of what a dead process has lent");
        }
    }
}

impl Inner {
    /// The process of an end ends its stream, and unmaps the peer's memory if it closes it.
    pub(super) fn note_end(&mut self, key: u64, end: usize, is_closed: bool) {
        let connection = self.net.connections.get_mut(&key);
        if let Some(shared) = connection.and_then(|connection| connection.ends[end].shared.as_mut()) {
            shared.has_ended = true;
            shared.lending.take_if(|_| is_closed);
        }
    }

    /// The ends of a socket's stream: its own, then the peer's.
    fn shared_ends(&mut self, id: u64, socket: Socket) -> Result<[&mut SharedEnd; 2], Errno> {
        let entry = self.nodes.get(&id).and_then(|node| node.sockets.get(socket.index, socket.generation));
        let (key, end) = *entry.ok_or(Errno::NOTCONN)?;
        let connection = self.net.connections.get_mut(&key).ok_or(Errno::NOTCONN)?;
        let [first, second] = connection.ends.each_mut().map(|end| end.shared.as_mut());
        let (first, second) = (first.ok_or(Errno::NOTCONN)?, second.ok_or(Errno::NOTCONN)?);
        Ok(if end == 0 { [first, second] } else { [second, first] })
    }
}

impl SimLoop {
    /// What a stream over shared memory has to do with lent memory.
    ///
    /// # Errors
    /// `ENOTCONN` if the socket has no such stream, else what `with` gives.
    pub(crate) fn lending<R>(
        &mut self,
        socket: Socket,
        with: impl FnOnce(&mut Lending) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let mut world = self.world.borrow_mut();
        let [own, _] = world.shared_ends(self.id, socket)?;
        with(own.lending.as_mut().ok_or(Errno::NOTCONN)?)
    }

    /// See [`Reactor::put`](crate::Reactor::put).
    pub(crate) fn put(&mut self, socket: Socket, gather: &Gather, to: LentPlace) -> Result<(), Errno> {
        self.lending(socket, |lending| lending.put(gather, to))?;
        self.world.borrow_mut().copies += 1;
        self.with(|node| node.counters.put_bytes += gather.len() as u64);
        Ok(())
    }

    /// See [`Reactor::get`](crate::Reactor::get).
    pub(crate) fn get(
        &mut self,
        socket: Socket,
        from: LentPlace,
        into: &mut Frame,
        range: Range<usize>,
    ) -> Result<(), Errno> {
        let len = range.len() as u64;
        self.lending(socket, |lending| lending.get(from, into, range))?;
        self.world.borrow_mut().copies += 1;
        self.with(|node| node.counters.got_bytes += len);
        if self.has_peer_ended(socket) { Err(Errno::CONNRESET) } else { Ok(()) }
    }

    /// Whether a stream is one over shared memory.
    pub(crate) fn is_shared(&self, socket: Socket) -> bool {
        self.world.borrow_mut().shared_ends(self.id, socket).is_ok()
    }

    /// Whether its peer has ended it.
    fn has_peer_ended(&self, socket: Socket) -> bool {
        let mut world = self.world.borrow_mut();
        world.shared_ends(self.id, socket).is_ok_and(|[_, peer]| peer.has_ended)
    }
}
