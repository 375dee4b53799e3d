//! The windows of this end that are open to peers: how they are opened, announced, lent and closed, and what peers do there.
//!
//! Over lanes the owner of a window checks each put and get. Over RDMA the device does, and knows only an address and a key.
//! So a node announces the location and rights of each window that it opens by the message `Window`, and its peer checks transfers
//! against them first. A program's mistake is then found before anything goes to the device. A peer that does not check meets the
//! registration, which has exactly the window's bytes and rights, and its session ends. Over shared memory an end announces
//! windows in memory that it has lent in the same way (`lending.rs`).

use std::ops::Range;
use std::rc::Rc;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Frame, FrameRange, Gather, Mapping, Reactor, Socket};
use zerocopy::{FromBytes, FromZeros};

use super::lane::LaneId;
use super::operations::{PayloadMeta, Put, Remote};
use super::rdma_windows::{Refusal, ToExpose, exposed_grant};
use super::sessions::{Event, Role};
use super::shm_direct::Shm;
use super::wire::Wire;
use super::{Fabric, GetError, Handler, Slab};
use crate::checksum::payload_checksum;
use crate::descriptor::Descriptor;
#[cfg(doc)]
use crate::limits::LOANS_MAX;
use crate::limits::PAYLOAD_BYTES_MAX;
use crate::node::wire::{PlacedBody, PutBody};
use crate::rdma::transport::Down;
use crate::session::CloseReason;
use crate::slots::SessionId;
#[cfg(doc)]
use crate::windows::Windows;
use crate::windows::{GivenBack, OpenError, WindowError, WindowKey};
use crate::wire::{FLAG_PAYLOAD_CHECKSUM, Grant, Header, Kind, Pull, WindowAdvert};

/// What came of opening memory to a device: the window, or why there is none, with a target's frame if it is not lost.
type Exposing = Result<WindowKey, (OpenError, Option<Frame>)>;

impl Fabric {
    /// Opens memory for the peer of `session` to fill; see [`Windows::open_target`].
    ///
    /// # Errors
    /// See [`OpenError`]; with the frame, unless it is lost. The session goes on. If the session or its device
    /// is at its end, the window is opened without a device, and closed with the session.
    pub fn open_target(
        &mut self,
        session: SessionId,
        memory: FrameRange,
        context: u64,
    ) -> Result<WindowKey, (OpenError, Option<Frame>)> {
        let (start, len) = (memory.start, memory.len);
        match self.expose(session, ToExpose::Target(memory), context) {
            Ok(opened) => opened,
            Err(memory) if self.windows.is_full() => Err((OpenError::Full, memory.into_frame())),
            Err(memory) => {
                let opened = memory.into_frame().and_then(|frame| {
                    let memory = FrameRange { frame, start, len };
                    self.windows.open_target(&mut self.random, session, memory, context)
                });
                opened.ok_or((OpenError::Full, None))
            }
        }
    }

    /// Opens memory for the peer of `session` to read; see [`Windows::open_source`].
    ///
    /// # Errors
    /// See [`OpenError`], and [`Self::open_target`] of a session at its end. The session goes on.
    pub fn open_source(
        &mut self,
        session: SessionId,
        memory: FrameRange<Rc<Frame>>,
        context: u64,
    ) -> Result<WindowKey, OpenError> {
        if let Ok(opened) = self.expose(session, ToExpose::Source(memory.clone()), context) {
            return opened.map_err(|(error, _)| error);
        }
        self.windows.open_source(&mut self.random, session, memory, context).ok_or(OpenError::Full)
    }

    /// Opens memory to the device of the peer of `session`: `Err` gives it back for a session of another kind, and for one that
    /// is at its end.
    fn expose(&mut self, session: SessionId, memory: ToExpose, context: u64) -> Result<Exposing, ToExpose> {
        let (Some(connection), Some(rdma)) = (self.sessions.rdma_connection(session), self.lanes.rdma()) else {
            return Err(memory);
        };
        let refused = |error, frame| Ok(Err((error, frame)));
        if !self.windows.has_room_exposed() {
            return refused(OpenError::Full, memory.into_frame());
        }
        let bytes = memory.len();
        let (error, memory) = match memory.open(&rdma.transport, connection) {
            Ok(window) => {
                let key = self.windows.open_exposed(&mut self.random, session, window, context);
                return Ok(key.ok_or((OpenError::Full, None)));
            }
            Err(refused) => refused,
        };
        let refusal = Refusal::of(error, rdma.transport.has(connection));
        tracing::warn!(%error, bytes, ?refusal, "cannot open a window to a peer's device");
        if refusal == Refusal::EndsSession {
            self.sessions.tell(Event::Failed(session, Down::Setup(error).into()));
        }
        match memory {
            Some(memory) if refusal != Refusal::Alone => Err(memory),
            memory => refused(OpenError::Rdma(error), memory.and_then(ToExpose::into_frame)),
        }
    }

    /// Tells the peer of a session, over wires where that is needed, that a window is open for it. The advert goes before all
    /// later messages. The peer may then put or get, also if no message names the window.
    pub fn announce(&mut self, session: SessionId, window: WindowKey) {
        let (Some(grant), Some(rights)) =
            (exposed_grant(&mut self.windows, window), self.windows.exposed_rights(window))
        else {
            return;
        };
        self.tell_of_window(session, window, &WindowAdvert::opened(rights, 0, grant));
    }

    /// Tells the peer of a session, over wires where that is needed, that a window is about to close. Its puts and gets in
    /// flight there end the session, and so do those that it begins before it has this message; later ones fail at its end.
    pub fn withdraw(&mut self, session: SessionId, window: WindowKey) {
        if self.windows.exposed_rights(window).is_some() {
            self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::CLOSED));
        }
    }

    /// Tells the peer of a session where a window of ours lies, and lends it the memory if it has not got it yet: all of
    /// `mapping`, of which the window has `range`; for puts, if `write`, else for gets. False if that
    /// cannot be: another wire, TLS, memory that cannot be lent ([`Mapping::lend`]), too many loans ([`LOANS_MAX`]), or puts in a
    /// session with checksums: the peer's next put would change bytes before this end has checked those of the last. Then all goes
    /// as it does without.
    ///
    /// A window that the peer was told of is closed by [`Fabric::recall`].
    pub fn lend_window(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        window: WindowKey,
        mapping: &Mapping,
        range: Range<usize>,
        write: bool,
    ) -> bool {
        let Some(socket) = self.control_socket(session) else { return false };
        if self.sessions.open(session).is_none() {
            return false;
        }
        if write && self.agreed(session).is_some_and(crate::Agreed::payload_checksum) {
            return false;
        }
        // Before the memory is sealed for it, which it stays.
        let Some(shm) = self.sessions.shm_mut(session) else { return false };
        let mut unmap = Vec::new();
        let lent = shm.loans.lend(reactor, socket, window, mapping, write, &mut unmap);
        self.tell_to_unmap(session, unmap);
        let Some(lent) = lent else { return false };
        let rights = if write { WindowAdvert::PUT } else { WindowAdvert::GET };
        let grant = Grant::new(lent.offset + range.start as u64, range.len() as u64, 0);
        self.tell_of_window(session, window, &WindowAdvert::opened(rights, lent.number, grant));
        true
    }

    /// Has the peer forget where a window lies; [`Handler::recalled`] tells when it has, or its session has ended. False if it
    /// never knew. The window itself is to be closed too.
    pub fn recall(&mut self, reactor: &Reactor, session: SessionId, window: WindowKey) -> bool {
        let told = self.sessions.shm_mut(session).is_some_and(|shm| shm.loans.recall(window));
        if told {
            // A peer that does not answer is not waited for for ever.
            self.sessions.watch(reactor, session);
            self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::CLOSED));
        }
        told
    }

    /// How often memory is lent to peers: each piece, to each of them.
    pub fn loan_count(&self) -> usize {
        self.sessions.loan_count()
    }

    pub(super) fn tell_of_window(&mut self, session: SessionId, window: WindowKey, advert: &WindowAdvert) {
        self.send(session, advert.about(window.0));
    }

    fn tell_to_unmap(&mut self, session: SessionId, numbers: Vec<u32>) {
        for number in numbers {
            self.tell_of_window(session, WindowKey(0), &WindowAdvert::unmap(number));
        }
    }

    /// The peer tells of a window, its own or ours.
    pub(super) fn window_advert_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        header: &Header,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let (window, advert) = (WindowKey(header.window.get()), header.body::<WindowAdvert>());
        let Some(state) = self.sessions.get_mut(session) else { return Ok(()) };
        match (advert.what, &mut state.wire) {
            // One that finds no room is refused when it is used, as if it were not there.
            (WindowAdvert::OPENED, Wire::Rdma(rdma)) => drop(rdma.grants.note(window, advert.grant, advert.rights)),
            (WindowAdvert::CLOSED, Wire::Rdma(rdma)) => drop(rdma.grants.forget(window)),
            (WindowAdvert::USED, Wire::Rdma(_)) => drop(self.windows.used(session, window)),
            (_, Wire::Rdma(_)) => return Err(CloseReason::Unexpected(Kind::Window)),
            _ => return self.lent_window_advert_came(reactor, session, window, &advert, handler),
        }
        Ok(())
    }

    /// The peer tells of a window in memory that one of the ends has lent.
    fn lent_window_advert_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        window: WindowKey,
        advert: &WindowAdvert,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let socket = self.control_socket(session);
        let shm = self.sessions.shm_mut(session);
        match advert.what {
            WindowAdvert::OPENED if !matches!(advert.rights, WindowAdvert::PUT | WindowAdvert::GET) => {
                return Err(CloseReason::Unexpected(Kind::Window));
            }
            WindowAdvert::OPENED => {
                if let (Some(shm), Some(socket)) = (shm, socket) {
                    shm.note_lent(reactor, socket, window, advert);
                }
            }
            WindowAdvert::CLOSED => {
                if let Some(shm) = shm.filter(|_| !seeded::is(Bug::GrantKept)) {
                    shm.forget_lent(window);
                }
                self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::FORGOTTEN));
            }
            WindowAdvert::FORGOTTEN => {
                let forgotten = shm.is_some_and(|shm| shm.loans.forget(window));
                self.sessions.watch(reactor, session);
                let unmap = self.sessions.shm_mut(session).map(|shm| shm.loans.excess(false));
                self.tell_to_unmap(session, unmap.unwrap_or_default());
                if forgotten {
                    handler.recalled(self, reactor, session, window);
                }
            }
            WindowAdvert::UNMAP => return shm.map_or(Ok(()), |shm| shm.unmap(reactor, advert.memory.get())),
            _ => return Err(CloseReason::Unexpected(Kind::Window)),
        }
        Ok(())
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
        let window = WindowKey(header.window.get());
        match &mut state.wire {
            // There is no such place: the payload goes as ever.
            Wire::Stream => {}
            Wire::Rdma(rdma) => drop(rdma.grants.note(window, grant, WindowAdvert::PUT | WindowAdvert::GET)),
            Wire::Shm(shm) => {
                let socket = control_lane.and_then(|lane| self.lanes.get(lane)?.socket);
                shm.note_grant(reactor, socket, window, grant);
            }
        }
        Ok(rest)
    }

    /// The peer wants a piece of a window.
    pub(super) fn pulled(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        header: &Header,
    ) -> Result<(), CloseReason> {
        let pull: Pull = header.body();
        let len = pull.len.get() as usize;
        let key = WindowKey(header.window.get());
        if len > PAYLOAD_BYTES_MAX {
            self.nack(session, header, WindowError::Bounds);
            return Ok(());
        }
        match self.windows.read(session, key, header.window_offset.get(), len) {
            Ok((frame, start)) => {
                let checked = self.agreed(session).is_some_and(crate::Agreed::payload_checksum);
                let checksum = checked.then(|| payload_checksum(&frame, start..start + len));
                let route = self.route(session);
                let target = Remote { window: WindowKey(pull.target.get()), offset: 0 };
                let push = |gather: &mut Gather| gather.push_shared(frame, start, len);
                self.answering = true;
                let (header, payload) = (Header::new(Kind::Data), PayloadMeta { len, checksum });
                let put = self.put(reactor, Put { session, route, to: target, header, payload }, push);
                self.answering = false;
                put.map_err(CloseReason::Io)
            }
            Err(error) => {
                self.nack(session, header, error);
                Ok(())
            }
        }
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
        let by_device = self.sessions.rdma_connection(session).is_some();
        let lent = self.sessions.shm(session).is_some_and(Shm::has_lent);
        if !(by_device || lent) || !matches!(kind, Kind::Data | Kind::Reply) || header.payload_len() == 0 {
            return Err(CloseReason::Unexpected(kind));
        }
        let Some(slot) = self.sessions.control_lane(session) else { return Ok(()) };
        let (window, offset, len) = (WindowKey(header.window.get()), header.window_offset.get(), header.payload_len());
        if by_device {
            match self.windows.check_placed(session, window, offset, len) {
                Ok(()) => self.tell_placed(reactor, slot, session, kind, header, handler),
                Err(error) => self.refuse_payload(slot, session, header, error),
            }
            return Ok(());
        }
        let shm = self.sessions.shm(session);
        match self.windows.lend(session, window, offset, len) {
            Ok((frame, _)) if shm.is_some_and(|shm| shm.may_have_placed(window, &frame)) => {
                self.payload_placed(reactor, slot, session, header, frame, handler)
            }
            Ok((frame, _)) => {
                // It cannot reach that memory: nothing was written, and what lies there is not the peer's.
                let _ = self.windows.give_back(window, frame);
                Err(CloseReason::Unexpected(kind))
            }
            Err(error) => {
                self.refuse_payload(slot, session, header, error);
                Ok(())
            }
        }
    }

    /// A payload that came on a lane lies in the frame of its window: checks it, gives the frame back, tells the owner.
    pub(super) fn payload_placed<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        session: SessionId,
        header: &Header,
        frame: Frame,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let (key, len) = (WindowKey(header.window.get()), header.payload_len());
        let checked = header.flags & FLAG_PAYLOAD_CHECKSUM != 0;
        let due = checked || self.agreed(session).is_some_and(crate::Agreed::payload_checksum);
        let start = self.windows.start(key).unwrap_or(0) + header.window_offset.get() as usize;
        let inside = start.checked_add(len).is_some_and(|end| end <= frame.len());
        let good = !due
            || (checked && inside && payload_checksum(&frame, start..start + len) == header.payload_checksum.get());
        let given = self.windows.give_back(key, frame);
        if !good {
            return Err(CloseReason::PayloadChecksum);
        }
        if !matches!(given, GivenBack::Open) {
            // Closed while it was filled: the peer waits for an answer, as for a put that comes a moment later.
            self.refuse_payload(slot, session, header, WindowError::Key);
            return Ok(());
        }
        if self.windows.is_get(session, key) {
            let wanted = self.windows.bytes(key);
            let result = if wanted == len { Ok(()) } else { Err(GetError::Length { wanted, got: len }) };
            self.end_get(reactor, session, key, result, handler);
        } else {
            let kind = if header.kind == Kind::Reply as u8 { Kind::Reply } else { Kind::Data };
            self.tell_placed(reactor, slot, session, kind, header, handler);
        }
        Ok(())
    }

    /// What came on a lane lies in its window: tells the owner. Not the end of a put of which the peer was refused an earlier part: its
    /// message says that all of it lies there.
    fn tell_placed<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        session: SessionId,
        kind: Kind,
        header: &Header,
        handler: &mut H,
    ) {
        match self.lanes.get_mut(slot).and_then(|lane| lane.inbound.earlier_refusal(header)) {
            Some(error) => self.nack(session, header, error),
            None => handler.placed(self, reactor, session, kind, header),
        }
    }

    /// Tells the peer that a payload on that lane names a window wrongly.
    pub(super) fn refuse_payload(&mut self, slot: LaneId, session: SessionId, header: &Header, error: WindowError) {
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.inbound.note_refused(header, error);
        }
        self.nack(session, header, error);
    }

    /// Tells the peer that its message named a window wrongly.
    fn nack(&mut self, session: SessionId, refused: &Header, error: WindowError) {
        let mut header = Header::new(Kind::Nack);
        header.body = refused.body;
        header.window = refused.window;
        header.window_offset.set(error as u64);
        self.send(session, header);
    }

    /// Opens all of a slab to the peer of a session, for puts and gets, until [`Fabric::close_slab`].
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_slab(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        slab: &Slab,
        context: u64,
    ) -> Result<Descriptor, OpenError> {
        // SAFETY: a slab gives out no references to its bytes, and its frames are all of this loop.
        let frame = || unsafe { Frame::over(slab.mapping(), 0, slab.len()) };
        let put =
            self.open_target(session, FrameRange::new(frame(), 0, slab.len()), context).map_err(|(error, _)| error)?;
        let get = match self.open_source(session, FrameRange::new(Rc::new(frame()), 0, slab.len()), context) {
            Ok(get) => get,
            Err(error) => {
                let _ = self.windows().close(put);
                return Err(error);
            }
        };
        for (key, write) in [(put, true), (get, false)] {
            self.announce(session, key);
            self.lend_window(reactor, session, key, slab.mapping(), 0..slab.len(), write);
        }
        Ok(Descriptor::new(Some(put), Some(get), slab.len()))
    }

    /// Closes the windows of a slab: nothing that its peer puts from now on is taken. Over shared memory the peer reaches the memory
    /// until it has let go of it; so the slab is dropped, and never another's.
    pub fn close_slab(&mut self, reactor: &Reactor, session: SessionId, descriptor: &Descriptor) {
        for key in [descriptor.put_key(), descriptor.get_key()] {
            self.withdraw(session, key);
            self.recall(reactor, session, key);
            let _ = self.windows().close(key);
        }
    }

    /// Tells a client that what it has put lies there.
    ///
    /// # Errors
    /// The message is of no put of a node's, or asks for more: the session is to be closed.
    pub fn confirm_put(&mut self, session: SessionId, kind: Kind, header: &Header) -> Result<(), CloseReason> {
        let body: PutBody = header.body();
        let is_put = kind == Kind::Data && body.target.get() == 0 && body.message() == Ok(None);
        if !is_put {
            return Err(CloseReason::Unexpected(kind));
        }
        let mut placed = PlacedBody::new_zeroed();
        placed.put = body.put;
        self.send(session, Header::with_body(Kind::Placed, &placed));
        Ok(())
    }

    /// The stream of a session's lane 0.
    fn control_socket(&self, session: SessionId) -> Option<Socket> {
        self.lanes.get(self.sessions.control_lane(session)?)?.socket
    }
}
