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
use zerocopy::FromBytes;

use super::grants::PeerAddress;
use super::sessions::{Event, Role};
use super::transfer::{Get, Remote};
use super::wire::Wire;
use super::{EndedGet, Fabric, GetError, Handler};
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::WindowKey;
use crate::wire::{Grant, Header, Kind, WindowAdvert};

impl Fabric {
    /// Sessions over shared memory that are begun from now on lend their server this arena ([`FramePool::shared`]): windows
    /// in its frames are filled and read without the stream. Plain sessions only: what TLS protects goes through TLS.
    pub fn lend(&mut self, arena: FramePool) {
        self.arena = Some(arena);
    }

    /// The arena that the next session over shared memory will lend. None if there never was one, or the last one was still
    /// in use when its session ended.
    pub fn arena(&self) -> Option<&FramePool> {
        self.arena.as_ref()
    }

    /// Lends the server of a session that is welcomed our arena. Without, all goes through the stream.
    pub(super) fn lend_arena(&mut self, reactor: &mut Reactor, session: SessionId, socket: Option<Socket>) {
        let Some(shm) = self.sessions.shm_mut(session) else { return };
        let (Some(arena), Some(socket)) = (&self.arena, socket) else { return };
        match reactor.lend_arena(socket, arena) {
            Ok(()) => shm.arena = Some(arena.clone()),
            Err(error) => tracing::debug!(%error, "no arena for the server: payloads go through the stream"),
        }
    }

    /// Where a window that a call names lies for the server of `session`, if that can be told.
    pub(super) fn grant_for(&mut self, session: SessionId, header: &Header) -> Option<Grant> {
        let window = WindowKey(header.window.get());
        if header.kind != Kind::Call as u8 || window.0 == 0 {
            return None;
        }
        let arena = match &self.sessions.open(session)?.wire {
            Wire::Stream => return None,
            Wire::Rdma(_) => return self.exposed_grant(window),
            Wire::Shm(shm) => shm.arena.as_ref()?,
        };
        let (frame, start, len) = self.windows.range(window)?;
        if !arena.owns(frame) {
            return None;
        }
        Some(Grant::new((frame.arena_offset()? + start) as u64, len as u64, 0))
    }

    /// The peer tells where its window lies, in the first bytes of a payload. Gives the rest.
    pub(super) fn granted<'a>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<&'a [u8], CloseReason> {
        let Some(state) = self.sessions.get_mut(session) else { return Ok(&[]) };
        let is_call = kind == Kind::Call && state.role == Role::Server;
        let control_lane = state.control_lane();
        let grant = Grant::read_from_prefix(payload).ok().filter(|_| is_call);
        let (grant, rest) = grant.ok_or(CloseReason::Unexpected(kind))?;
        let (window, rights) = (WindowKey(header.window.get()), WindowAdvert::PUT | WindowAdvert::GET);
        match &mut state.wire {
            // There is no such place: the payload goes as ever.
            Wire::Stream => {}
            Wire::Rdma(rdma) => drop(rdma.grants.note(window, grant, rights)),
            Wire::Shm(shm) => {
                let socket = control_lane.and_then(|lane| self.lanes.get(lane)?.socket);
                if !std::mem::replace(&mut shm.has_looked, true)
                    && let Some(socket) = socket
                {
                    // The arena is what a client lends first.
                    match reactor.take_memory(socket, 0) {
                        Ok(_) => shm.taken_over = Some(socket),
                        Err(error) => tracing::debug!(%error, "a client's arena cannot be used"),
                    }
                }
                if shm.taken_over.is_some() {
                    shm.grants.note(window, grant, rights);
                }
            }
        }
        Ok(rest)
    }

    /// The place of a window of the peer, if we can reach it, and over which stream.
    fn place_of(&self, session: SessionId, at: Remote, len: usize, right: u8) -> Option<(Socket, PeerAddress)> {
        let state = self.sessions.open(session).filter(|state| !state.leaving)?;
        let shm = state.wire.shm()?;
        Some((shm.taken_over?, shm.grants.find(at, len, right).ok()?))
    }

    /// Whether a put of so many bytes goes by its route, through the stream: over lanes, where we cannot reach the place.
    pub fn goes_by_route(&self, session: SessionId, to: Remote, len: usize) -> bool {
        self.sessions.rdma_connection(session).is_none() && self.place_of(session, to, len, WindowAdvert::PUT).is_none()
    }

    /// Whether a put (or get, if `put` is false) of so many bytes is copied by this end, when it is begun.
    pub fn is_copied(&self, session: SessionId, at: Remote, len: usize, put: bool) -> bool {
        let right = if put { WindowAdvert::PUT } else { WindowAdvert::GET };
        self.place_of(session, at, len, right).is_some()
    }

    /// Puts what `push` appends where it belongs, if we can reach that: `push` is given back if not.
    pub(super) fn place<P: FnOnce(&mut Gather)>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        to: Remote,
        len: usize,
        push: P,
    ) -> Result<Result<(), Errno>, P> {
        if let Some(connection) = self.sessions.rdma_connection(session) {
            return Ok(self.rdma_put(connection, session, to, len, push));
        }
        let Some((socket, place)) = self.place_of(session, to, len, WindowAdvert::PUT) else { return Err(push) };
        let mut gather = std::mem::take(&mut self.placed);
        push(&mut gather);
        debug_assert!(gather.len() == len, "as many bytes as announced");
        let result = reactor.put(socket, &gather, LentPlace { memory: place.memory, offset: place.address });
        gather.clear();
        self.placed = gather;
        if let Some(state) = self.sessions.get_mut(session) {
            state.sent(len, self.clock);
        }
        Ok(result)
    }

    /// Reads a range of a file straight to a place in the peer's memory, if this end can reach that and no device is needed; gives how many
    /// bytes came, fewer than `len` only where the file ends. Tell the peer by [`Fabric::put_done`]. `None`: read the range into a frame.
    pub fn put_file(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        to: Remote,
        from: FileRange,
    ) -> Option<Result<usize, Errno>> {
        let (socket, place) = self.place_of(session, to, from.len, WindowAdvert::PUT)?;
        let place = LentPlace { memory: place.memory, offset: place.address };
        match reactor.put_file(socket, from, place) {
            Err(Errno::AGAIN) => None,
            result => {
                if let (Some(state), Ok(count)) = (self.sessions.get_mut(session), result) {
                    state.sent(count, self.clock);
                }
                Some(result)
            }
        }
    }

    /// Gets what we can reach; gives the frame back if we cannot.
    pub(super) fn fetch(&mut self, reactor: &mut Reactor, get: Get, mut into: Frame) -> Result<(), Frame> {
        let Get { session, from, context, .. } = get;
        if let Some(connection) = self.sessions.rdma_connection(session) {
            return self.rdma_get(reactor, connection, get, into);
        }
        let len = into.len();
        let Some((socket, place)) = self.place_of(session, from, len, WindowAdvert::GET) else { return Err(into) };
        let place = LentPlace { memory: place.memory, offset: place.address };
        let result = reactor.get(socket, place, &mut into, 0..len).map_err(|error| match error {
            Errno::CONNRESET => GetError::Ended,
            error => GetError::Io(error),
        });
        if let Some(state) = self.sessions.get_mut(session) {
            state.received(len, self.clock);
        }
        self.sessions.tell(Event::Got(session, EndedGet { frame: Some(into), context, result }));
        Ok(())
    }

    /// The peer says that it has placed a payload.
    pub(super) fn placed_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        if self.sessions.rdma_connection(session).is_some() {
            return self.rdma_placed(reactor, session, kind, header, handler);
        }
        let shm = self.sessions.shm(session);
        let lent = shm.is_some_and(|shm| shm.arena.is_some() || !shm.loans.is_empty());
        if !lent || !matches!(kind, Kind::Data | Kind::Reply) || header.payload_len() == 0 {
            return Err(CloseReason::Unexpected(kind));
        }
        let (window, len) = (WindowKey(header.window.get()), header.payload_len());
        match self.windows.lend(session, window, header.window_offset.get(), len) {
            Ok((frame, _)) if self.may_have_placed(session, window, &frame) => {
                self.payload_placed(reactor, session, header, frame, handler)
            }
            Ok((frame, _)) => {
                // It cannot reach that memory: nothing was written, and what lies there is not the peer's.
                let _ = self.windows.give_back(window, frame);
                Err(CloseReason::Unexpected(kind))
            }
            Err(error) => {
                self.nack(session, header, error);
                Ok(())
            }
        }
    }

    /// Whether the peer of a session can write the memory of a window by itself.
    fn may_have_placed(&self, session: SessionId, window: WindowKey, frame: &Frame) -> bool {
        let Some(shm) = self.sessions.shm(session) else { return false };
        shm.loans.is_written(window) || shm.arena.as_ref().is_some_and(|arena| arena.owns(frame))
    }

    /// A session has ended: what its server may still be writing is taken from it.
    pub(super) fn revoke(&mut self, session: SessionId) {
        let shm = self.sessions.shm_mut(session);
        let Some(arena) = shm.and_then(|shm| shm.arena.take()) else { return };
        let mut revoked = 0;
        for frame in self.windows.targets_of(session).filter(|frame| arena.owns(frame)) {
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
