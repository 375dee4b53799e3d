//! Windows over RDMA, which the peer's device reaches, and puts and gets in them.
//!
//! A put or get is checked against the peer's [grants](super::grants) first: a mistake is then refused here and not by the
//! device, which would end the connection. All pieces of one get count as the one use of a window for one use. When the last
//! piece has ended, the window's owner is told and closes it. A get of which no piece reached the device, because the memory to
//! be filled could not be registered, does not count as a use of the window.

use std::rc::Rc;

use byway_reactor::{Errno, Frame, FrameRange, Gather, Reactor};

use super::sessions::{Event, Sessions};
use super::transfer::{Get, Remote};
use super::{EndedGet, Fabric, GetError, Handler};
use crate::rdma::transport::{ConnectionId, Down, GetFailed, Transport};
use crate::rdma::{RdmaError, Window as ExposedWindow, WindowAddress};
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot, Slots};
#[cfg(doc)]
use crate::windows::Windows;
use crate::windows::{OpenError, WindowKey};
use crate::wire::{Grant, Header, Kind, WindowAdvert};

/// Gets that devices have in flight.
#[derive(Default)]
pub(super) struct RdmaReads {
    gets: Slots<RdmaGet>,
    uses: Slots<Use>,
}

/// A get, or a piece of one.
pub(super) struct RdmaGet {
    pub(super) session: SessionId,
    pub(super) context: u64,
    /// Of a window for one use.
    once: Option<UseId>,
}

/// What a use of a window is called.
pub(super) type UseId = Slot<Use>;

/// A window for one use that is being read.
pub(super) struct Use {
    session: SessionId,
    window: WindowKey,
    /// Pieces that were asked for and have not ended.
    left: usize,
    /// Whether more of them may come.
    is_open: bool,
    /// What was not read is not used.
    was_read: bool,
}

/// A window of the peer that was used up, of which the peer is to be told.
pub(super) struct UsedUp {
    pub(super) session: SessionId,
    pub(super) window: WindowKey,
}

impl RdmaReads {
    /// Begins a get, and gives its number; followed by [`Self::asked`] or [`Self::was_refused`].
    fn begin(&mut self, get: &Get) -> u64 {
        let Get { session, once, context, .. } = *get;
        self.gets.insert(RdmaGet { session, context, once }).to_u64()
    }

    /// The device has been asked for a get: a piece of a use is under way.
    fn asked(&mut self, once: Option<UseId>) {
        if let Some(using) = once.and_then(|once| self.uses.get_mut(once)) {
            using.left += 1;
        }
    }

    /// The device was not asked for a get.
    fn was_refused(&mut self, number: u64) {
        self.gets.remove(Slot::from_u64(number));
    }

    /// Takes a get that has ended.
    fn end(&mut self, number: u64) -> Option<RdmaGet> {
        self.gets.remove(Slot::from_u64(number))
    }

    /// A get of a window for one use is begun, which may have several pieces.
    fn begin_use(&mut self, session: SessionId, window: WindowKey) -> UseId {
        self.uses.insert(Use { session, window, left: 0, is_open: true, was_read: false })
    }

    /// All pieces of a get were asked for: the window is in use, unless none was found.
    fn end_use(&mut self, once: UseId, sessions: &mut Sessions) -> Option<UsedUp> {
        let using = self.uses.get_mut(once)?;
        using.is_open = false;
        if (using.left > 0 || using.was_read)
            && let Some(rdma) = sessions.rdma_mut(using.session)
        {
            rdma.grants.set_in_use(using.window, true);
        }
        self.forget_use(once, sessions)
    }

    /// A piece of a get has ended.
    fn end_piece(&mut self, once: UseId, was_read: bool, sessions: &mut Sessions) -> Option<UsedUp> {
        let using = self.uses.get_mut(once)?;
        using.left -= 1;
        using.was_read |= was_read;
        self.forget_use(once, sessions)
    }

    /// With its last piece a use is over: the window is forgotten, unless nothing was read.
    fn forget_use(&mut self, once: UseId, sessions: &mut Sessions) -> Option<UsedUp> {
        self.uses.get(once).filter(|using| using.left == 0 && !using.is_open)?;
        let Use { session, window, was_read, .. } = self.uses.remove(once)?;
        if let Some(rdma) = sessions.rdma_mut(session) {
            if was_read {
                rdma.grants.forget(window);
            } else {
                rdma.grants.set_in_use(window, false);
            }
        }
        was_read.then_some(UsedUp { session, window })
    }
}

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
    pub(super) fn begin_use(&mut self, session: SessionId, window: WindowKey) -> Option<UseId> {
        let state = self.sessions.open(session)?;
        state.wire.rdma().filter(|rdma| rdma.grants.is_once(window))?;
        Some(self.rdma_reads.begin_use(session, window))
    }

    /// All pieces of a get were asked for.
    pub(super) fn end_use(&mut self, once: Option<UseId>) {
        let used_up = once.and_then(|once| self.rdma_reads.end_use(once, &mut self.sessions));
        self.tell_of_use(used_up);
    }

    /// Tells the peer that a window of its own was used up.
    fn tell_of_use(&mut self, used_up: Option<UsedUp>) {
        if let Some(UsedUp { session, window }) = used_up {
            self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::USED));
        }
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

    /// Where a window of ours lies, for the peer of a session over RDMA.
    pub(super) fn exposed_grant(&mut self, window: WindowKey) -> Option<Grant> {
        let (WindowAddress { address, rkey }, len) = self.windows.exposed(window)?;
        Some(Grant::new(address, len as u64, rkey))
    }

    /// Puts what `push` appends where it belongs, by the device.
    pub(super) fn rdma_put(
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
        let rdma = self.sessions.rdma_mut(session).ok_or(Errno::NOTCONN)?;
        let place = rdma.grants.find(to, len, WindowAdvert::PUT).map_err(|_| Errno::FAULT)?;
        rdma.grants.use_up(to.window);
        let rdma = self.lanes.rdma_mut().ok_or(Errno::NOTCONN)?;
        let mut gather = rdma.transport.gather();
        push(&mut gather);
        debug_assert!(gather.len() == len, "as many bytes as announced");
        rdma.transport.put(connection, WindowAddress { address: place.address, rkey: place.key }, gather);
        Ok(())
    }

    /// Gets by the device, in a use that was begun if the window is for one.
    pub(super) fn rdma_get(
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

    /// The peer says that its device has placed a payload in a window of ours.
    pub(super) fn rdma_placed<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        if !matches!(kind, Kind::Data | Kind::Reply) || header.payload_len() == 0 {
            return Err(CloseReason::Unexpected(kind));
        }
        let (window, len) = (WindowKey(header.window.get()), header.payload_len());
        match self.windows.check_placed(session, window, header.window_offset.get(), len) {
            Ok(()) => handler.placed(self, reactor, session, kind, header),
            Err(error) => self.nack(session, header, error),
        }
        Ok(())
    }
}

/// What came of opening memory to a device: the window, or why there is none, with a target's frame if it is not lost.
type Exposing = Result<WindowKey, (OpenError, Option<Frame>)>;

/// What it means that a device does not open a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// It cannot have this memory.
    Alone,
    /// It is at its end, and the session with it.
    EndsSession,
    /// The session is at its end, which its owner has yet to hear.
    Ended,
}

impl Refusal {
    fn of(error: RdmaError, has_connection: bool) -> Self {
        match error {
            _ if !has_connection => Self::Ended,
            error if error.is_of_memory() => Self::Alone,
            _ => Self::EndsSession,
        }
    }
}

/// Memory that is to be opened.
enum ToExpose {
    /// For the peer to fill.
    Target(FrameRange),
    /// For the peer to read.
    Source(FrameRange<Rc<Frame>>),
}

impl ToExpose {
    /// Bytes.
    fn len(&self) -> usize {
        match self {
            Self::Target(memory) => memory.len,
            Self::Source(memory) => memory.len,
        }
    }

    /// Opens it to the device of a connection's peer; gives it back if that cannot be, unless it is lost.
    fn open(self, transport: &Transport, connection: ConnectionId) -> Result<ExposedWindow, (RdmaError, Option<Self>)> {
        match self {
            Self::Target(memory) => {
                let (start, len) = (memory.start, memory.len);
                let again = |frame| Self::Target(FrameRange { frame, start, len });
                transport.open_target(connection, memory).map_err(|(error, frame)| (error, frame.map(again)))
            }
            Self::Source(memory) => {
                let opened = transport.open_source(connection, memory.clone());
                opened.map_err(|error| (error, Some(Self::Source(memory))))
            }
        }
    }

    /// A target's frame.
    fn into_frame(self) -> Option<Frame> {
        match self {
            Self::Target(memory) => Some(memory.frame),
            Self::Source(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_at_its_end_ends_the_session_and_memory_that_it_cannot_have_does_not() {
        let registering = |errno| RdmaError::System { call: "ibv_reg_mr", errno };
        assert_eq!(Refusal::of(RdmaError::MemoryLimit { bytes: 9 }, true), Refusal::Alone);
        assert_eq!(Refusal::of(registering(Errno::FAULT), true), Refusal::Alone);
        assert_eq!(Refusal::of(registering(Errno::IO), true), Refusal::EndsSession);
        assert_eq!(Refusal::of(registering(Errno::NODEV), true), Refusal::EndsSession);
        // The transport has ended the connection, and says so later: its reason is the session's.
        assert_eq!(Refusal::of(RdmaError::State("a window"), false), Refusal::Ended);
    }
}
