//! Sessions over RDMA: one lane, whose connection is a queue pair.
//!
//! `Hello`, `Welcome` and all messages after them are those of every lane; only here each is one message of the
//! [transport](crate::rdma::transport), which keeps their order. A client exposes each of its windows to its server's device and
//! tells where it lies by a grant; the server writes and reads there, and a put is announced by its message with
//! [`FLAG_PLACED`](crate::wire::FLAG_PLACED), which arrives when its bytes do. A server exposes nothing.
//!
//! Payloads have no checksum of ours here: each packet has one of the wire's, and what was placed may be changed by the
//! peer until its window is closed. There is no TLS either.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;

use byway_reactor::{Completion, Errno, Frame, Gather, Op, Reactor, Token};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::lane::{Lane, Phase};
use super::transfer::Remote;
use super::{Event, Fabric, GetError, Handler, LINK};
use crate::limits::PAYLOAD_BYTES_MAX;
use crate::rdma::transport::{Event as News, GetFailed, Received, Transport};
use crate::rdma::{RdmaError, Window, WindowAddress};
use crate::registration::{Counters, Mode};
use crate::session::{self, CloseReason};
use crate::slots::{Slot, Slots};
use crate::tls::ServerTls;
use crate::windows::WindowKey;
use crate::wire::{FLAG_PLACED, Grant, HEADER_BYTES, Header, Kind, RefuseCode, WindowNews};

/// The connections over RDMA, and whose they are.
pub(super) struct Links {
    transport: Transport,
    lanes: HashMap<Slot, Slot>,
    gets: Slots<LinkGet>,
    /// Lanes that cannot be connected, which their owner is told as he is of others: by and by.
    failed: Vec<(Slot, CloseReason)>,
}

impl Links {
    /// See [`Transport::registrations`].
    pub(super) fn registrations(&self) -> Option<(Mode, Counters)> {
        self.transport.registrations()
    }
}

/// A get that is under way.
struct LinkGet {
    session: Slot,
    context: u64,
    /// The window, if it was for one use: its owner is told that it was used.
    once: Option<WindowKey>,
}

impl Links {
    fn new(class: u8) -> Self {
        let transport = Transport::new(Token::new(class, LINK, 0, 0));
        Self { transport, lanes: HashMap::new(), gets: Slots::default(), failed: Vec::new() }
    }

    /// Whether nothing was queued since the last flush: who handles what that brought may have asked for more.
    pub(super) fn is_flushed(&self) -> bool {
        self.transport.is_flushed()
    }
}

impl Fabric {
    /// Listens at an address of an RDMA device; connections become sessions. Gives the address, with the port that was
    /// chosen if 0 was asked for.
    ///
    /// # Errors
    /// [`RdmaError`]: no library, no device at the address, or the system's.
    pub fn listen_rdma(&mut self, reactor: &mut Reactor, address: SocketAddr) -> Result<SocketAddr, RdmaError> {
        self.links().transport.listen(reactor, address)
    }

    fn links(&mut self) -> &mut Links {
        let class = self.options.class;
        self.links.get_or_insert_with(|| Box::new(Links::new(class)))
    }

    pub(super) fn close_link_listeners(&mut self) {
        if let Some(links) = &mut self.links {
            links.transport.close_listeners();
        }
    }

    /// Connects the lane of a client's session.
    pub(super) fn connect_link(&mut self, reactor: &mut Reactor, slot: Slot, to: SocketAddr) {
        let session = self.lanes.get(slot).and_then(|lane| self.sessions.get(lane.session?));
        let step = if session.is_some_and(|state| state.tls.is_some()) {
            // Whoever wants TLS gets it or nothing.
            tracing::warn!(%to, "a session with TLS was asked for over RDMA, which has none: use tcp");
            Err(CloseReason::WeRefused(RefuseCode::Auth))
        } else {
            self.links()
                .transport
                .connect(reactor, to)
                .map_err(|error| crate::rdma::transport::Down::Setup(error).into())
        };
        match step {
            Ok(link) => {
                self.links().lanes.insert(link, slot);
                if let Some(lane) = self.lanes.get_mut(slot) {
                    (lane.link, lane.connecting) = (Some(link), false);
                }
            }
            Err(reason) => {
                if let Some(lane) = self.lanes.get_mut(slot) {
                    lane.connecting = false;
                }
                self.links().failed.push((slot, reason));
                reactor.submit(Op::Timer { at: reactor.now() }, Token::new(self.options.class, LINK, 0, 0));
            }
        }
    }

    /// The connection of a session over RDMA.
    pub(super) fn link_of(&self, session: Slot) -> Option<Slot> {
        let state = self.sessions.get(session).filter(|state| !state.down)?;
        self.lanes.get(state.lanes.first().copied().flatten()?)?.link
    }

    /// Takes a completion of the transport's.
    pub(super) fn link_completion<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        completion: &Completion,
        handler: &mut H,
    ) {
        let Some(links) = &mut self.links else { return };
        links.transport.handle(reactor, completion);
        for (slot, reason) in std::mem::take(&mut links.failed) {
            self.lane_failed(reactor, slot, reason);
        }
        self.hear_links(reactor, handler);
    }

    /// Hears what has happened on the links.
    fn hear_links<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        loop {
            self.take_gots(reactor);
            let Some(links) = &mut self.links else { return };
            let Some(news) = links.transport.next_event() else { return };
            let lane_of = |link: &Slot| links.lanes.get(link).copied();
            match news {
                News::Asked { connection, peer } => self.link_asked(reactor, connection, peer),
                News::Connected(link) => {
                    let lane = lane_of(&link);
                    self.link_connected(link, lane);
                }
                News::Message(link, received) => match lane_of(&link).and_then(|slot| self.lanes.get_mut(slot)) {
                    Some(lane) => {
                        lane.backlog.push_back(received);
                        if let Some(slot) = lane_of(&link) {
                            self.take_backlog(reactor, slot, handler);
                        }
                    }
                    None => links.transport.done_with(link, received),
                },
                News::Sent(link, went) => {
                    if let Some(slot) = lane_of(&link) {
                        self.note_went(slot, went, reactor.now());
                        self.link_sent(reactor, slot, link, handler);
                    }
                }
                News::Down(link, down) => {
                    if let Some(slot) = links.lanes.remove(&link) {
                        if let Some(lane) = self.lanes.get_mut(slot) {
                            lane.link = None;
                        }
                        self.lane_failed(reactor, slot, down.into());
                    }
                }
            }
        }
    }

    /// Somebody asks at a listener.
    fn link_asked(&mut self, reactor: &mut Reactor, link: Slot, peer: Option<SocketAddr>) {
        let stranger = match (&self.admits, peer) {
            (Some(admits), Some(peer)) => !admits(peer),
            (Some(_), None) => true,
            (None, _) => false,
        };
        let refused = if stranger {
            tracing::warn!(?peer, "connection refused: not in an --allow range");
            Some(RefuseCode::Auth)
        } else if matches!(self.tls_server, ServerTls::Required(_)) {
            tracing::warn!(?peer, "connection refused: TLS is required, which RDMA has not");
            Some(RefuseCode::Auth)
        } else if self.draining {
            Some(RefuseCode::ShuttingDown)
        } else {
            self.no_room()
        };
        let Some(links) = &mut self.links else { return };
        if let Some(code) = refused {
            self.counters.refused += 1;
            self.last_closed = Some(CloseReason::WeRefused(code));
            return links.transport.refuse(link, code);
        }
        let mut lane = Lane::new(None, Phase::AwaitHello, reactor.now());
        lane.link = Some(link);
        let slot = self.lanes.insert(lane);
        self.handshakes += 1;
        links.lanes.insert(link, slot);
        links.transport.accept(reactor, link);
    }

    /// Messages can go both ways: a client says `Hello`.
    fn link_connected(&mut self, link: Slot, slot: Option<Slot>) {
        let peer = self.links.as_ref().and_then(|links| links.transport.peer(link));
        let Some((slot, lane)) = slot.and_then(|slot| Some((slot, self.lanes.get_mut(slot)?))) else { return };
        if lane.phase != Phase::Connecting {
            return;
        }
        lane.phase = Phase::AwaitWelcome;
        let Some(state) = lane.session.and_then(|session| self.sessions.get_mut(session)) else { return };
        state.peer = peer;
        let header = session::hello(&state.identity, &state.terms, 0);
        if lane.push(header, self.clock, |_| ()) {
            self.dirty.push(slot);
        }
    }

    /// Where the client of a lane is.
    pub(super) fn link_peer(&self, lane: &Lane) -> Option<SocketAddr> {
        self.links.as_ref()?.transport.peer(lane.link?)
    }

    /// Takes the messages that have come, unless the peer must take answers first.
    pub(super) fn take_backlog<H: Handler>(&mut self, reactor: &mut Reactor, slot: Slot, handler: &mut H) {
        loop {
            let Some(lane) = self.lanes.get(slot) else { return };
            let is_held = lane.session.is_some_and(|session| self.is_held(session));
            if matches!(lane.phase, Phase::Fenced | Phase::Closing) || (lane.phase == Phase::Up && is_held) {
                return;
            }
            let (phase, session, link) = (lane.phase, lane.session, lane.link);
            let Some(received) = self.lanes.get_mut(slot).and_then(|lane| lane.backlog.pop_front()) else { return };
            if let Some(state) = session.and_then(|session| self.sessions.get_mut(session)) {
                state.liveness.heard(reactor.now());
            }
            let step = match (phase, session) {
                (Phase::Up, Some(session)) => self.link_message(reactor, (slot, session), &received, handler),
                _ => self.handshake_message(reactor, slot, received.header()),
            };
            if let (Some(link), Some(links)) = (link, &mut self.links) {
                links.transport.done_with(link, received);
            }
            if let Err(reason) = step {
                return self.lane_failed(reactor, slot, reason);
            }
        }
    }

    fn link_message<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        (slot, session): (Slot, Slot),
        received: &Received,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let (header, kind) = self.open_header(slot, received.header())?;
        let payload = received.payload();
        let placed = header.flags & FLAG_PLACED != 0;
        if header.payload_len() != payload.len() && !(placed && payload.is_empty()) {
            return Err(CloseReason::Truncated);
        }
        if let Some(state) = self.sessions.get_mut(session) {
            // What was placed came by the device, just before.
            let bytes = HEADER_BYTES + header.payload_len().min(PAYLOAD_BYTES_MAX);
            state.meter.received(bytes, reactor.now());
        }
        self.dispatch(reactor, session, (kind, &header), payload, handler)
    }

    /// The peer has some of what was sent.
    fn link_sent<H: Handler>(&mut self, reactor: &mut Reactor, slot: Slot, link: Slot, handler: &mut H) {
        let is_idle = self.links.as_ref().is_none_or(|links| links.transport.is_idle(link));
        let Some(lane) = self.lanes.get(slot) else { return };
        let (session, is_idle) = (lane.session, is_idle && lane.outbox.is_empty());
        if let Some(state) = session.and_then(|session| self.sessions.get_mut(session)) {
            state.intake.took();
        }
        if let Some(reason) = lane.close_when_sent.filter(|_| is_idle) {
            return self.lane_failed(reactor, slot, reason);
        }
        self.count_heap(slot);
        if let Some(session) = session {
            self.resume(reactor, session, handler);
        }
    }

    /// Hands over what a lane wants to send.
    pub(super) fn send_outbox(&mut self, slot: Slot) {
        let (Some(lane), Some(links)) = (self.lanes.get_mut(slot), &mut self.links) else { return };
        let Some(link) = lane.link else { return };
        for (header, payload) in lane.take_outbox() {
            let mut bytes = [0; size_of::<Header>()];
            bytes.copy_from_slice(header.as_bytes());
            links.transport.send(link, bytes, payload);
        }
        if lane.close_when_sent.is_some() {
            links.transport.finish(link);
        }
    }

    /// Posts what the links have to send, and hears what that brings.
    pub(super) fn flush_links<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let Some(links) = &mut self.links else { return };
        links.transport.flush(reactor);
        self.hear_links(reactor, handler);
    }

    /// A gather for the next message of a link.
    pub(super) fn give_spare(&mut self, slot: Slot) {
        if let (Some(lane), Some(links)) = (self.lanes.get_mut(slot), &mut self.links)
            && lane.link.is_some()
            && lane.spare.is_none()
        {
            lane.spare = Some(links.transport.gather());
        }
    }

    /// Bytes and heap memory that a link has queued for a lane.
    pub(super) fn link_queued(&self, lane: &Lane) -> (usize, usize) {
        let (Some(links), Some(link)) = (&self.links, lane.link) else { return (0, 0) };
        (links.transport.queued(link), links.transport.queued_heap(link))
    }

    /// Ends the connection of a lane that is closed: nothing that is posted touches memory any more.
    pub(super) fn close_link(&mut self, reactor: &Reactor, slot: Slot) {
        let (Some(lane), Some(links)) = (self.lanes.get_mut(slot), &mut self.links) else { return };
        let link = lane.link.take();
        for received in std::mem::take(&mut lane.backlog) {
            links.transport.discard(received);
        }
        if let Some(link) = link {
            links.lanes.remove(&link);
            links.transport.close(link);
        }
        self.take_gots(reactor);
    }

    /// Passes on the gets that have ended.
    fn take_gots(&mut self, reactor: &Reactor) {
        let Some(links) = &mut self.links else { return };
        for got in links.transport.take_gots() {
            let Some(links) = &mut self.links else { return };
            let Some(get) = links.gets.remove(Slot::from_u64(got.token)) else { continue };
            let LinkGet { session, context, once } = get;
            if let Some(state) = self.sessions.get_mut(session) {
                state.gets -= 1;
                if got.result.is_ok() {
                    state.meter.received(got.frame.len(), reactor.now());
                }
            }
            self.watch(reactor, session);
            // What was not read is not used up.
            let was_read = !matches!(got.result, Err(GetFailed::Memory(_)));
            if let Some(window) = once.filter(|_| was_read) {
                self.tell_of_window(session, window, WindowNews::new(WindowNews::USED, 0), None);
            }
            let result = got.result.map_err(|failed| match failed {
                // Whatever the device says of it, the connection ends with it: its reason is the session's.
                GetFailed::Work(_) => GetError::Ended,
                GetFailed::Memory(errno) => GetError::Io(errno),
            });
            self.events.push(Event::Got(session, (got.frame, context), result));
        }
    }

    /// Opens memory to the device of the peer of `session`: `Err` gives it back for a session of another kind.
    pub(super) fn expose(&mut self, session: Slot, memory: Memory, context: u64) -> Result<Option<WindowKey>, Memory> {
        let (Some(link), Some(links)) = (self.link_of(session), &self.links) else { return Err(memory) };
        let opened: Result<Window, RdmaError> = match memory {
            Memory::Target(frame, start, len) => links.transport.open_target(link, (frame, start, len)),
            Memory::Source(frame, start, len) => links.transport.open_source(link, (frame, start, len)),
        };
        match opened {
            Ok(window) => Ok(self.windows.open_exposed(&mut self.random, session, window, context)),
            Err(error) => {
                // Waiting would not help.
                let reason = CloseReason::from(crate::rdma::transport::Down::Setup(error));
                self.events.push(Event::Failed(session, reason));
                Ok(None)
            }
        }
    }

    /// Where a window of ours lies, for the peer of a session over RDMA.
    pub(super) fn exposed_grant(&mut self, window: WindowKey) -> Option<Grant> {
        let (WindowAddress { address, rkey }, len) = self.windows.exposed(window)?;
        Some(Grant { address: U64::new(address), len: U32::new(len as u32), key: U32::new(rkey) })
    }

    /// Puts what `push` appends where it belongs, by the device.
    pub(super) fn write_by_link(
        &mut self,
        (session, link): (Slot, Slot),
        (to, len): (Remote, usize),
        push: impl FnOnce(&mut Gather),
    ) -> Result<(), Errno> {
        // Messages that were said before go before it: the peer need not wait for the bytes of this to hear of others.
        let state = self.sessions.get(session).ok_or(Errno::NOTCONN)?;
        if let Some(slot) = state.lanes.first().copied().flatten() {
            self.send_outbox(slot);
        }
        let state = self.sessions.get_mut(session).ok_or(Errno::NOTCONN)?;
        let place = state.grants.find(to, len, WindowNews::PUT).map_err(|_| Errno::FAULT)?;
        state.grants.use_up(to.window);
        let links = self.links.as_mut().ok_or(Errno::NOTCONN)?;
        let mut gather = links.transport.gather();
        push(&mut gather);
        debug_assert!(gather.len() == len, "as many bytes as announced");
        links.transport.put(link, WindowAddress { address: place.address, rkey: place.key }, gather);
        Ok(())
    }

    /// Gets by the device.
    pub(super) fn read_by_link(
        &mut self,
        reactor: &Reactor,
        (session, link): (Slot, Slot),
        from: Remote,
        into: Frame,
        context: u64,
    ) -> Result<(), Frame> {
        let (Some(state), Some(links)) = (self.sessions.get_mut(session), &mut self.links) else { return Err(into) };
        let place = match state.grants.find(from, into.len(), WindowNews::GET) {
            Ok(place) => place,
            Err(error) => {
                self.events.push(Event::Got(session, (into, context), Err(GetError::Refused(error))));
                return Ok(());
            }
        };
        let once = state.grants.use_up(from.window).then_some(from.window);
        let number = links.gets.insert(LinkGet { session, context, once });
        let address = WindowAddress { address: place.address, rkey: place.key };
        if let Err(into) = links.transport.get(link, address, into, number.to_u64()) {
            links.gets.remove(number);
            return Err(into);
        }
        if let Some(state) = self.sessions.get_mut(session) {
            state.gets += 1;
        }
        self.watch(reactor, session);
        Ok(())
    }

    /// The peer says that its device has placed a payload in a window of ours.
    pub(super) fn written_by_link<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: Slot,
        (kind, header): (Kind, &Header),
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        if !matches!(kind, Kind::Data | Kind::Reply) || header.payload_len() == 0 {
            return Err(CloseReason::Unexpected(kind));
        }
        let (window, len) = (WindowKey(header.window.get()), header.payload_len());
        match self.windows.check_placed(session, window, header.window_offset.get(), len) {
            Ok(()) => handler.placed(self, reactor, session, (kind, header)),
            Err(error) => self.nack(session, header, error),
        }
        Ok(())
    }
}

/// Memory that is to be opened.
pub(super) enum Memory {
    /// For the peer to fill.
    Target(Frame, usize, usize),
    /// For the peer to read.
    Source(Rc<Frame>, usize, usize),
}
