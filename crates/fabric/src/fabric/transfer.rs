//! The transfers of a session: messages, puts and gets.
//!
//! A *message* is a header, and perhaps a small payload. A *put* moves bytes into a window of the peer, followed by a
//! message. A *get* moves bytes of the peer's window into this end's memory, without the peer's owner. Users of a session
//! have only these three. The transport decides how they travel: over lanes a put is a message whose payload is received
//! straight into the window, and a get is a `Pull` that the peer's fabric answers with `Data`.

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Errno, FileRange, Frame, Gather, Reactor};
use zerocopy::{FromZeros, IntoBytes};

use super::lane::{LaneId, Phase};
use super::operations::Get;
use super::rdma_windows::{RdmaGet, UseId, UsedUp, exposed_grant};
use super::sessions::{Event, Role};
use super::wire::Wire;
use super::{EndedGet, Fabric, GetError, Handler, PayloadMeta, Put, Remote};
use crate::limits::ANSWERS_MAX;
use crate::rdma::WindowAddress;
use crate::rdma::transport::{ConnectionId, GetFailed, Went};
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::{WindowError, WindowKey};
use crate::wire::{FLAG_GRANT, FLAG_PAYLOAD_CHECKSUM, FLAG_PLACED, Grant, Header, Kind, Pull, WindowAdvert};

/// Whether a message is sent because the peer has sent one. (What is pulled is too.)
fn is_answer(header: &Header) -> bool {
    let forgets = || header.body::<WindowAdvert>().what == WindowAdvert::FORGOTTEN;
    let is_of = |kind: Kind| header.kind == kind as u8;
    [Kind::Pong, Kind::Nack, Kind::Placed].into_iter().any(is_of) || (is_of(Kind::Window) && forgets())
}

impl Fabric {
    /// Sends a message without a payload.
    pub fn send(&mut self, session: SessionId, header: Header) {
        self.send_with(session, header, PayloadMeta::default(), |_| ());
    }

    /// Sends a message with a payload of at most [`SMALL_BYTES_MAX`](crate::limits::SMALL_BYTES_MAX) bytes, which `push`
    /// appends. If it is a call whose header names a window of ours, the peer is told where that lies, over wires where that helps.
    ///
    /// On a session that has ended this does nothing: the owner is told that by [`Handler::down`].
    pub fn send_with(
        &mut self,
        session: SessionId,
        mut header: Header,
        payload: PayloadMeta,
        push: impl FnOnce(&mut Gather),
    ) {
        let Some(grant) = self.grant_for(session, &header) else {
            return self.push(session, 0, header, payload, push);
        };
        header.flags |= FLAG_GRANT;
        let bytes = grant.as_bytes();
        let with_grant = |checksum| crc32c::crc32c_combine(crc32c::crc32c(bytes), checksum, payload.len);
        let checked = self.agreed(session).is_some_and(crate::Agreed::payload_checksum);
        let checksum = if payload.len > 0 { payload.checksum } else { Some(0) }.filter(|_| checked);
        let payload = PayloadMeta { len: bytes.len() + payload.len, checksum: checksum.map(with_grant) };
        self.push(session, 0, header, payload, |gather| {
            gather.push_head(bytes);
            push(gather);
        });
    }

    /// Puts a payload, which `push` appends, to a place in the peer's memory, and a message behind it: [`Handler::placed`] tells
    /// the peer. Puts into one window must all go by one route.
    ///
    /// The peer refuses a place that does not exist, and counts that; it touches nothing, and its owner does not hear of the message.
    ///
    /// # Errors
    /// The payload cannot be read: its file has become shorter, or is broken. The message was not sent. Over lanes this is found
    /// later, and ends the session.
    pub fn put(&mut self, reactor: &mut Reactor, put: Put, push: impl FnOnce(&mut Gather)) -> Result<(), Errno> {
        match self.place(reactor, put.session, put.to, put.payload.len, push) {
            Err(push) => self.put_by_route(put, push),
            Ok(placed) => {
                placed?;
                self.put_done(put);
            }
        }
        Ok(())
    }

    /// Sends the message behind a payload that is in the peer's memory already ([`Fabric::put_file`]).
    pub fn put_done(&mut self, put: Put) {
        let Put { session, to, mut header, payload, .. } = put;
        header.window.set(to.window.0);
        header.window_offset.set(to.offset);
        header.flags |= FLAG_PLACED;
        self.push(session, 0, header, payload, |_| ());
    }

    /// As [`Fabric::put`] over lanes, and through them even if the place can be reached: behind the puts that go by that route.
    pub fn put_by_route(&mut self, put: Put, push: impl FnOnce(&mut Gather)) {
        let Put { session, route, to, mut header, payload } = put;
        header.window.set(to.window.0);
        header.window_offset.set(to.offset);
        self.push(session, route.0, header, payload, push);
    }

    /// Gets as many bytes from a place in the peer's memory as `into` has room for. [`Handler::got`] gives the frame back,
    /// with `context`.
    ///
    /// # Errors
    /// The frame: all windows are open ([`WINDOWS_MAX`](crate::limits::WINDOWS_MAX)), or the session has ended.
    pub fn get(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        from: Remote,
        into: Frame,
        context: u64,
    ) -> Result<(), Frame> {
        let once = self.begin_use(session, from.window);
        let begun = self.get_piece(reactor, Get { session, from, once, context }, into);
        self.end_use(once);
        begun
    }

    /// Gets in several pieces, each into a frame of its own from its own offset, which are one use of the window where that is
    /// for one and a device reads it; over lanes each is a use. Each piece ends as a get with `context`. Gives back what could
    /// not be begun, for the reasons of [`Fabric::get`].
    pub fn get_pieces(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        window: WindowKey,
        pieces: impl IntoIterator<Item = (u64, Frame)>,
        context: u64,
    ) -> Vec<Frame> {
        let once = self.begin_use(session, window);
        let begin = |(offset, into)| {
            let get = Get { session, from: Remote { window, offset }, once, context };
            self.get_piece(reactor, get, into).err()
        };
        let refused = pieces.into_iter().filter_map(begin).collect();
        self.end_use(once);
        refused
    }

    fn get_piece(&mut self, reactor: &mut Reactor, get: Get, into: Frame) -> Result<(), Frame> {
        let Get { session, from, context, .. } = get;
        if self.sessions.open(session).is_none() {
            return Err(into);
        }
        let into = match self.fetch(reactor, get, into) {
            Ok(()) => return Ok(()),
            Err(into) => into,
        };
        let len = into.len();
        let target = self.windows.open_get(&mut self.random, session, into, context)?;
        self.sessions.begin_get(reactor, session);
        let mut pull = Pull::new_zeroed();
        pull.target.set(target.0);
        pull.len.set(len as u32);
        let mut header = Header::with_body(Kind::Pull, &pull);
        header.window.set(from.window.0);
        header.window_offset.set(from.offset);
        self.send(session, header);
        Ok(())
    }

    fn push(
        &mut self,
        session: SessionId,
        lane: usize,
        mut header: Header,
        payload: PayloadMeta,
        push: impl FnOnce(&mut Gather),
    ) {
        let Some(state) = self.sessions.open_mut(session) else { return };
        let is_answer = self.answering || is_answer(&header);
        if state.role == Role::Server {
            header.instance.set(state.agreed.instance);
        }
        header.payload_len.set(payload.len as u32);
        state.leaving |= header.kind == Kind::Goodbye as u8;
        if let Some(checksum) = payload.checksum.filter(|_| payload.len > 0) {
            header.flags |= FLAG_PAYLOAD_CHECKSUM;
            header.payload_checksum.set(checksum);
        }
        let Some(slot) = state.lanes.get(lane).copied().flatten() else { return };
        self.lanes.push(slot, header, self.clock, push);
        if let Some(lane) = self.lanes.get_mut(slot) {
            let placed = header.flags & FLAG_PLACED != 0;
            debug_assert!(placed || lane.queued_is(payload.len), "as many bytes as announced");
            // Over RDMA what waits to be sent lies with the transport, and is not told apart.
            if is_answer && lane.connection.is_none() && lane.outbound.note_answer() {
                self.look_at_answers(session);
            }
        }
        self.lanes.count_heap(slot);
    }

    /// Ends the session of a peer that asks and asks, and takes too few of the answers.
    fn look_at_answers(&mut self, session: SessionId) {
        let Some(state) = self.sessions.get(session) else { return };
        let slots = state.lanes.iter().flatten();
        let waiting: usize =
            slots.map(|slot| self.lanes.get_mut(*slot).map_or(0, |lane| lane.outbound.answers())).sum();
        if waiting > ANSWERS_MAX {
            self.sessions.tell(Event::Failed(session, CloseReason::AsksTooMuch));
        }
    }

    /// The peer refused a get, or a put.
    pub(super) fn refused<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        header: &Header,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let target = WindowKey(header.body::<Pull>().target.get());
        let error = WindowError::from_number(header.window_offset.get());
        if !self.windows.is_get(session, target) {
            handler.put_refused(self, reactor, session, header, error);
            return Ok(());
        }
        // Its bytes are on the way at the same time: the peer contradicts itself.
        if self.windows.is_lent(target) {
            return Err(CloseReason::Unexpected(Kind::Nack));
        }
        self.end_get(reactor, session, target, Err(GetError::Refused(error)), handler);
        Ok(())
    }

    /// Says whether a session expects a reply, besides the bytes that gets have asked for: only while it does is the peer's silence
    /// watched.
    pub fn set_expects_reply(&mut self, reactor: &Reactor, session: SessionId, expects_reply: bool) {
        self.sessions.set_expects_reply(reactor, session, expects_reply);
    }

    /// Where a window that a call names lies for the server of `session`, if that can be told.
    fn grant_for(&mut self, session: SessionId, header: &Header) -> Option<Grant> {
        let window = WindowKey(header.window.get());
        if header.kind != Kind::Call as u8 || window.0 == 0 {
            return None;
        }
        match &self.sessions.open(session)?.wire {
            Wire::Stream => None,
            Wire::Rdma(_) => exposed_grant(&mut self.windows, window),
            Wire::Shm(shm) => {
                let (frame, start, len) = self.windows.range(window)?;
                shm.grant_of(frame, start, len)
            }
        }
    }

    /// Whether a put (or get, if `put` is false) of `len` bytes can be begun, as far as this side knows.
    ///
    /// # Errors
    /// Over RDMA: no such window of the peer, or not so much of it, or not for that. Over lanes the peer looks.
    pub fn check_remote(&self, session: SessionId, at: Remote, len: usize, put: bool) -> Result<(), WindowError> {
        let state = self.sessions.open(session);
        let Some(Wire::Rdma(rdma)) = state.map(|state| &state.wire) else { return Ok(()) };
        let right = if put { WindowAdvert::PUT } else { WindowAdvert::GET };
        rdma.grants.find(at, len, right).map(|_| ())
    }

    /// Whether a put of so many bytes goes by its route, through the stream: over lanes, where we cannot reach the place.
    pub fn goes_by_route(&self, session: SessionId, to: Remote, len: usize) -> bool {
        let by_device = self.sessions.rdma_connection(session).is_some();
        !by_device && self.sessions.place_of(session, to, len, WindowAdvert::PUT).is_none()
    }

    /// Whether a put (or get, if `put` is false) of so many bytes is copied by this end, when it is begun.
    pub fn is_copied(&self, session: SessionId, at: Remote, len: usize, put: bool) -> bool {
        let right = if put { WindowAdvert::PUT } else { WindowAdvert::GET };
        self.sessions.place_of(session, at, len, right).is_some()
    }

    /// Puts what `push` appends where it belongs, if we can reach that: `push` is given back if not.
    fn place<P: FnOnce(&mut Gather)>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        to: Remote,
        len: usize,
        push: P,
    ) -> Result<Result<(), Errno>, P> {
        if let Some(connection) = self.sessions.rdma_connection(session) {
            return Ok(self.put_by_device(connection, session, to, len, push));
        }
        let Some(place) = self.sessions.place_of(session, to, len, WindowAdvert::PUT) else { return Err(push) };
        let result = self.shm_direct.put(reactor, place, len, push);
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
        let place = self.sessions.place_of(session, to, from.len, WindowAdvert::PUT)?;
        let result = place.put_file(reactor, from)?;
        if let (Some(state), Ok(count)) = (self.sessions.get_mut(session), result) {
            state.sent(count, self.clock);
        }
        Some(result)
    }

    /// Gets what we can reach; gives the frame back if we cannot.
    fn fetch(&mut self, reactor: &mut Reactor, get: Get, mut into: Frame) -> Result<(), Frame> {
        let Get { session, from, context, .. } = get;
        if let Some(connection) = self.sessions.rdma_connection(session) {
            return self.get_by_device(reactor, connection, get, into);
        }
        let len = into.len();
        let Some(place) = self.sessions.place_of(session, from, len, WindowAdvert::GET) else { return Err(into) };
        let result = place.get(reactor, &mut into);
        if let Some(state) = self.sessions.get_mut(session) {
            state.received(len, self.clock);
        }
        self.sessions.tell(Event::Got(session, EndedGet { frame: Some(into), context, result }));
        Ok(())
    }

    /// Puts what `push` appends where it belongs, by the device.
    fn put_by_device(
        &mut self,
        connection: ConnectionId,
        session: SessionId,
        to: Remote,
        len: usize,
        push: impl FnOnce(&mut Gather),
    ) -> Result<(), Errno> {
        // Messages that were said before go before it: the peer need not wait for the bytes of this to hear of others.
        if let Some(slot) = self.sessions.control_lane(session) {
            self.lanes.send_by_device(slot);
        }
        let wire = self.sessions.rdma_mut(session).ok_or(Errno::NOTCONN)?;
        let place = wire.find_for_put(to, len).map_err(|_| Errno::FAULT)?;
        self.lanes.rdma_mut().ok_or(Errno::NOTCONN)?.put(connection, place, len, push);
        Ok(())
    }

    /// Gets by the device, in a use that was begun if the window is for one.
    fn get_by_device(
        &mut self,
        reactor: &Reactor,
        connection: ConnectionId,
        get: Get,
        into: Frame,
    ) -> Result<(), Frame> {
        let Get { session, from, once, context } = get;
        let (Some(wire), Some(rdma)) = (self.sessions.rdma_mut(session), self.lanes.rdma_mut()) else {
            return Err(into);
        };
        let place = match wire.grants.find(from, into.len(), WindowAdvert::GET) {
            Ok(place) => place,
            Err(error) => {
                let result = Err(GetError::Refused(error));
                self.sessions.tell(Event::Got(session, EndedGet { frame: Some(into), context, result }));
                return Ok(());
            }
        };
        let number = self.rdma_reads.begin(&get);
        let address = WindowAddress { address: place.address, rkey: place.key };
        if let Err(into) = rdma.transport.get(connection, address, into, number) {
            self.rdma_reads.was_refused(number);
            return Err(into);
        }
        self.rdma_reads.asked(once);
        self.sessions.begin_get(reactor, session);
        Ok(())
    }

    /// Passes on the gets that have ended.
    pub(super) fn take_gots(&mut self, reactor: &Reactor) {
        let Some(rdma) = self.lanes.rdma_mut() else { return };
        for got in rdma.transport.take_gots() {
            let Some(RdmaGet { session, context, once }) = self.rdma_reads.end(got.token) else { continue };
            if let (Some(state), Ok(()), Some(frame)) = (self.sessions.get_mut(session), got.result, &got.frame) {
                state.received(frame.len(), reactor.now());
            }
            self.sessions.end_get(reactor, session);
            if let Some(once) = once {
                let was_read = !matches!(got.result, Err(GetFailed::Memory(_)));
                let used_up = self.rdma_reads.end_piece(once, was_read, &mut self.sessions);
                self.tell_of_use(used_up);
            }
            let result = got.result.map_err(|failed| match failed {
                // Whatever the device says of it, the connection ends with it: its reason is the session's.
                GetFailed::Work(_) => GetError::Ended,
                GetFailed::Memory(errno) => GetError::Io(errno),
                GetFailed::GivenUp => GetError::GivenUp,
            });
            self.sessions.tell(Event::Got(session, EndedGet { frame: got.frame, context, result }));
        }
    }

    /// A get of a window is begun, which may have several pieces: gives the use that this is of a window for one use.
    fn begin_use(&mut self, session: SessionId, window: WindowKey) -> Option<UseId> {
        let state = self.sessions.open(session)?;
        state.wire.rdma().filter(|rdma| rdma.grants.is_once(window))?;
        Some(self.rdma_reads.begin_use(session, window))
    }

    /// All pieces of a get were asked for.
    fn end_use(&mut self, once: Option<UseId>) {
        let used_up = once.and_then(|once| self.rdma_reads.end_use(once, &mut self.sessions));
        self.tell_of_use(used_up);
    }

    /// Tells the peer that a window of its own was used up.
    fn tell_of_use(&mut self, used_up: Option<UsedUp>) {
        if let Some(UsedUp { session, window }) = used_up {
            self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::USED));
        }
    }

    /// Sends what a lane has gathered over shared memory, if there is room for it now; false if that is to be done in
    /// another way.
    pub(super) fn send_now<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, handler: &mut H) -> bool {
        let now = self.clock;
        let Some(lane) = self.lanes.get_mut(slot) else { return true };
        let Some(bytes) = lane.send_now(reactor, now) else { return false };
        let (session, went) = (lane.session, lane.outbound.went(bytes, now));
        self.lanes.count_heap(slot);
        if let Some(session) = session {
            self.sessions.note_sent(session, went, now);
            if let Some(state) = self.sessions.get_mut(session) {
                state.intake.took();
            }
            self.resume(reactor, session, handler);
        }
        true
    }

    pub(super) fn sent<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        gather: Gather,
        result: Result<usize, Errno>,
        handler: &mut H,
    ) {
        let now = self.clock;
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        lane.outbound.sent(gather);
        let session = lane.session;
        if let Some(session) = session {
            self.sessions.note_sent(session, lane.outbound.went(result.unwrap_or(0), now), now);
        }
        if lane.phase == Phase::Closing {
            return self.forget_lane_if_done(slot);
        }
        if let Some(state) = session.and_then(|session| self.sessions.get_mut(session)) {
            state.intake.took();
        }
        match (result, lane.close_when_sent) {
            // What the lane ends for is not forgotten over a peer that does not want to hear it.
            (Err(error), reason) => self.lane_failed(reactor, slot, reason.unwrap_or(CloseReason::Io(error))),
            (Ok(_), Some(reason)) if lane.outbound.queued() == 0 => self.lane_failed(reactor, slot, reason),
            (Ok(_), _) if seeded::is(Bug::SendNotResumed) => {}
            (Ok(_), _) => self.lanes.start_send(reactor, slot, now),
        }
        self.lanes.count_heap(slot);
        if let Some(session) = session {
            self.resume(reactor, session, handler);
        }
    }

    /// The peer has some of what was sent.
    pub(super) fn rdma_sent<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        connection: ConnectionId,
        went: Option<Went>,
        handler: &mut H,
    ) {
        let is_idle = self.lanes.rdma().is_none_or(|rdma| rdma.transport.is_idle(connection));
        let Some(lane) = self.lanes.get(slot) else { return };
        let (session, is_idle) = (lane.session, is_idle && lane.outbound.is_outbox_empty());
        if let (Some(session), Some(went)) = (session, went) {
            self.sessions.note_sent(session, went, reactor.now());
        }
        if let Some(state) = session.and_then(|session| self.sessions.get_mut(session)) {
            state.intake.took();
        }
        if let Some(reason) = lane.close_when_sent.filter(|_| is_idle) {
            return self.lane_failed(reactor, slot, reason);
        }
        self.lanes.count_heap(slot);
        if let Some(session) = session {
            self.resume(reactor, session, handler);
        }
    }
}
