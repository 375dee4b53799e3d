//! Payloads over shared memory that one end copies directly into or out of the arena that a client has lent.
//!
//! A client lends its server an *arena*, a pool of frames that both map, and says with each call where its window lies in
//! it. The server copies straight into the window, or out of it, and reports that by a message: one copy, where the stream
//! needs two. Payloads outside of the arena go through the stream.
//!
//! The server can write all of the arena at any time, and no page can be taken back while it has the arena mapped. So an
//! arena is for one server. When a session ends while windows are open, their pages are replaced by private ones
//! ([`FramePool::revoke`]): a server that continues a copy after a long stop writes into pages that nothing uses. The arena
//! is not lent again then.

use byway_reactor::{Errno, FileRange, Frame, FramePool, Gather, LentPlace, Reactor, Socket};

use super::grants::Grants;
use super::lending::Loans;
use super::operations::{GetError, Remote};
use crate::session::CloseReason;
use crate::windows::WindowKey;
use crate::wire::{Grant, Kind, WindowAdvert};

/// What this end lends servers, and the list by which it copies payloads.
#[derive(Default)]
pub(super) struct ShmDirect {
    /// What sessions that are begun lend.
    arena: Option<FramePool>,
    /// Empty: a list for the next payload.
    payload: Gather,
}

impl ShmDirect {
    /// Lends this arena from now on.
    pub(super) fn lend(&mut self, arena: FramePool) {
        self.arena = Some(arena);
    }

    /// The arena that the next session will lend.
    pub(super) fn arena(&self) -> Option<&FramePool> {
        self.arena.as_ref()
    }

    /// Lends the server of a session that is welcomed our arena. Without, all goes through the stream.
    pub(super) fn lend_to(&self, reactor: &mut Reactor, socket: Option<Socket>, shm: &mut Shm) {
        let (Some(arena), Some(socket)) = (&self.arena, socket) else { return };
        match reactor.lend_arena(socket, arena) {
            Ok(()) => shm.arena = Some(arena.clone()),
            Err(error) => tracing::debug!(%error, "no arena for the server: payloads go through the stream"),
        }
    }

    /// Copies the payload of `len` bytes that `push` appends to its place.
    #[inline]
    pub(super) fn put(
        &mut self,
        reactor: &mut Reactor,
        to: PeerPlace,
        len: usize,
        push: impl FnOnce(&mut Gather),
    ) -> Result<(), Errno> {
        push(&mut self.payload);
        debug_assert!(self.payload.len() == len, "as many bytes as announced");
        let result = reactor.put(to.socket, &self.payload, to.place);
        self.payload.clear();
        result
    }

    /// A session has ended: what its server may still be writing of the frames of its windows is taken from it.
    pub(super) fn revoke<'a>(&mut self, shm: &mut Shm, frames: impl Iterator<Item = &'a mut Frame>) {
        let Some(arena) = shm.arena.take() else { return };
        let mut revoked = 0;
        for frame in frames.filter(|frame| arena.owns(frame)) {
            if let Err(error) = arena.revoke(frame) {
                // No memory for a page, or no mapping: then this process is at its end in other ways too.
                tracing::error!(%error, "memory that a lost server may write cannot be taken back");
            }
            revoked += 1;
        }
        if revoked > 0 {
            self.arena = None;
        }
    }
}

/// A place in memory that the peer has lent.
#[derive(Clone, Copy)]
pub(super) struct PeerPlace {
    socket: Socket,
    place: LentPlace,
}

impl PeerPlace {
    /// Fills a frame from it.
    #[inline]
    pub(super) fn get(self, reactor: &mut Reactor, into: &mut Frame) -> Result<(), GetError> {
        let len = into.len();
        reactor.get(self.socket, self.place, into, 0..len).map_err(|error| match error {
            Errno::CONNRESET => GetError::Ended,
            error => GetError::Io(error),
        })
    }

    /// Reads a range of a file into it, if no device is needed; gives how many bytes came.
    pub(super) fn put_file(self, reactor: &mut Reactor, from: FileRange) -> Option<Result<usize, Errno>> {
        let result = reactor.put_file(self.socket, from, self.place);
        Some(result).filter(|result| *result != Err(Errno::AGAIN))
    }
}

/// What has been lent over shared memory in a session, both ways.
#[derive(Debug, Default)]
pub(super) struct Shm {
    /// The arena that a client has lent its server.
    arena: Option<FramePool>,
    /// A server has looked for the arena of its client.
    has_looked: bool,
    /// The stream over which the peer has lent memory, once some of it was taken.
    taken_over: Option<Socket>,
    /// Where the peer's windows lie in that.
    grants: Grants,
    /// What the peer was lent of a program's memory.
    pub(super) loans: Loans,
}

impl Shm {
    /// Where so many bytes of a window of the peer lie, if we can reach them.
    #[inline]
    pub(super) fn find(&self, at: Remote, len: usize, right: u8) -> Option<PeerPlace> {
        let socket = self.taken_over?;
        let found = self.grants.find(at, len, right).ok()?;
        Some(PeerPlace { socket, place: LentPlace { memory: found.memory, offset: found.address } })
    }

    /// Where a window of ours lies for the server, if it does in the arena that it was lent.
    pub(super) fn grant_of(&self, frame: &Frame, start: usize, len: usize) -> Option<Grant> {
        self.arena.as_ref().filter(|arena| arena.owns(frame))?;
        Some(Grant::new((frame.arena_offset()? + start) as u64, len as u64, 0))
    }

    /// A client tells where its window lies in the arena that it has lent over the stream of its control lane.
    pub(super) fn note_grant(
        &mut self,
        reactor: &mut Reactor,
        socket: Option<Socket>,
        window: WindowKey,
        grant: Grant,
    ) {
        if !std::mem::replace(&mut self.has_looked, true)
            && let Some(socket) = socket
        {
            // The arena is what a client lends first.
            match reactor.take_memory(socket, 0) {
                Ok(_) => self.taken_over = Some(socket),
                Err(error) => tracing::debug!(%error, "a client's arena cannot be used"),
            }
        }
        if self.taken_over.is_some() {
            self.grants.note(window, grant, WindowAdvert::PUT | WindowAdvert::GET);
        }
    }

    /// The peer tells where a window of its own lies, in memory that it has lent.
    pub(super) fn note_lent(
        &mut self,
        reactor: &mut Reactor,
        socket: Socket,
        window: WindowKey,
        advert: &WindowAdvert,
    ) {
        let number = advert.memory.get();
        match reactor.take_memory(socket, number) {
            Ok(_) => {
                self.taken_over = Some(socket);
                self.grants.note_lent(window, advert.grant, number, advert.rights);
            }
            Err(error) => tracing::debug!(%error, "a peer's memory cannot be used"),
        }
    }

    /// Forgets where a window of the peer lies.
    pub(super) fn forget_lent(&mut self, window: WindowKey) {
        self.grants.forget_lent(window);
    }

    /// The peer tells that we need not keep its memory mapped.
    pub(super) fn unmap(&self, reactor: &mut Reactor, number: u32) -> Result<(), CloseReason> {
        if self.grants.lies_in(number) {
            return Err(CloseReason::Unexpected(Kind::Window));
        }
        if let Some(socket) = self.taken_over {
            reactor.leave_memory(socket, number);
        }
        Ok(())
    }

    /// Whether the peer can have placed anything.
    #[inline]
    pub(super) fn has_lent(&self) -> bool {
        self.arena.is_some() || !self.loans.is_empty()
    }

    /// Whether the peer can write the memory of a window, in this frame, by itself.
    pub(super) fn may_have_placed(&self, window: WindowKey, frame: &Frame) -> bool {
        self.loans.is_written(window) || self.arena.as_ref().is_some_and(|arena| arena.owns(frame))
    }
}
