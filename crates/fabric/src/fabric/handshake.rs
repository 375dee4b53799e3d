//! How sessions begin: connecting and accepting lanes, `Hello`, `Welcome`, and the fence.

use std::net::SocketAddr;
use std::sync::Arc;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Address, Errno, Instant, Listener, Op, Reactor, Socket, Token};

use super::lane::{Lane, LaneId, Phase};
use super::receive::HEADER_FRAME_BYTES;
use super::secure::Secure;
use super::sessions::{Role, Session};
use super::{ACCEPT, CONNECT, Fabric, Handler, token};
use crate::capabilities::{Capabilities, WireKind};
use crate::limits::{ACCEPT_PAUSE, BULK_LANES_MAX, HANDSHAKES_MAX, LANES_MAX, TURNED_AWAY_MAX};
use crate::registry::{Claim, HandedLane, LoopId, Registry};
use crate::session::{self, Agreed, CloseReason, Identity, Liveness, PayloadChecksum};
use crate::slots::SessionId;
use crate::tls::{ServerTls, TlsClient};
use crate::wire::{FEATURE_PAYLOAD_CHECKSUM, HEADER_BYTES, Header, Hello, Kind, RefuseCode};

impl Fabric {
    /// Makes this fabric a server's: it serves sessions of `registry`.
    pub fn serve(&mut self, reactor: &Reactor, registry: Arc<Registry>) {
        let home = registry.join(reactor.waker());
        self.server = Some((registry, home));
    }

    /// Listens; connections become sessions. Gives the listener, whose address the reactor knows.
    ///
    /// # Errors
    /// The kernel's: `AddrInUse`, `PermissionDenied`, ...
    pub fn listen(&mut self, reactor: &mut Reactor, address: &Address) -> std::io::Result<Listener> {
        let listener = reactor.listen(address)?;
        self.accept_from(reactor, listener);
        Ok(listener)
    }

    /// Accepts connections of a listener that the owner made.
    pub fn accept_from(&mut self, reactor: &mut Reactor, listener: Listener) {
        self.listeners.push(listener);
        let index = self.listeners.len() as u32 - 1;
        reactor.submit(Op::Accept { listener }, Token::new(self.options.class, ACCEPT, index, 0));
    }

    /// Stops listening and begins no session any more; those that are there go on.
    pub fn close_listeners(&mut self, reactor: &mut Reactor) {
        for listener in &self.listeners {
            reactor.close_listener(*listener);
        }
        self.draining = true;
        if let Some(rdma) = self.lanes.rdma_mut() {
            rdma.transport.close_listeners();
        }
        for slot in self.lanes.without_hello() {
            self.lane_failed(reactor, slot, CloseReason::WeRefused(RefuseCode::ShuttingDown));
        }
        self.retry_fenced(reactor);
    }

    /// Starts a session with a server. [`Handler::up`] or [`Handler::down`] tells
    /// what came of it.
    pub fn connect(&mut self, reactor: &mut Reactor, to: Address, identity: Identity) -> SessionId {
        let tls = self.tls_client.clone();
        self.connect_over(reactor, to, identity, tls)
    }

    /// The same, with the session's own credentials for TLS, or without TLS.
    pub fn connect_over(
        &mut self,
        reactor: &mut Reactor,
        to: Address,
        identity: Identity,
        tls: Option<TlsClient>,
    ) -> SessionId {
        let agreed = Agreed { features: 0, instance: 0 };
        let is_rdma = matches!(to, Address::Rdma(_));
        let bulk_lanes = if is_rdma { 0 } else { self.options.terms.bulk_lanes.clamp(1, BULK_LANES_MAX) };
        let lanes = 1 + usize::from(bulk_lanes);
        let mut terms = self.options.terms;
        if is_rdma {
            terms.bulk_lanes = 0;
            // Its packets have checksums; see `rdma_lanes.rs`.
            if terms.checksum == PayloadChecksum::Wanted {
                terms.checksum = PayloadChecksum::Off;
            }
        }
        let liveness = Liveness::new(self.options.keep_alive, reactor.now());
        let capabilities = Capabilities::on(reactor, WireKind::of_address(&to), tls.is_some());
        let mut state = Session::new(Role::Client, identity, capabilities, terms, agreed, lanes, liveness);
        (state.remote, state.tls) = (Some(to), tls);
        let session = self.sessions.insert(state);
        self.connect_lane(reactor, session, 0);
        session
    }

    fn connect_lane(&mut self, reactor: &mut Reactor, session: SessionId, number: u16) {
        let mut lane = Lane::new(None, Phase::Connecting, reactor.now());
        lane.session = Some(session);
        lane.number = number;
        lane.connecting = true;
        let slot = self.lanes.insert(lane);
        let Some(state) = self.sessions.get_mut(session) else { return };
        state.add_lane(number, slot);
        if let Some(Address::Rdma(to)) = state.remote {
            return self.connect_rdma(reactor, slot, to);
        }
        if let Some(to) = state.remote.clone() {
            reactor.submit(Op::Connect { to }, token(self.options.class, CONNECT, slot));
        }
    }

    pub(super) fn connected(&mut self, reactor: &mut Reactor, slot: LaneId, result: Result<Socket, Errno>) {
        let Some(lane) = self.lanes.get_mut(slot) else {
            if let Ok(socket) = result {
                reactor.close(socket);
            }
            return;
        };
        lane.connecting = false;
        match result {
            Ok(socket) if lane.phase == Phase::Closing => {
                reactor.close(socket);
                return self.forget_lane_if_done(slot);
            }
            Err(_) if lane.phase == Phase::Closing => return self.forget_lane_if_done(slot),
            Err(error) => return self.lane_failed(reactor, slot, CloseReason::Io(error)),
            Ok(socket) => {
                lane.socket = Some(socket);
                lane.phase = Phase::AwaitWelcome;
                let (number, session) = (lane.number, lane.session);
                let Some(state) = session.and_then(|session| self.sessions.open_mut(session)) else {
                    return self.lane_failed(reactor, slot, CloseReason::Closed);
                };
                state.peer = reactor.peer_address(socket);
                let header = session::hello(&state.identity, &state.terms, number);
                match state.tls.as_ref().map(TlsClient::connect) {
                    Some(Ok(stream)) => lane.secure = Some(Box::new(Secure::new(stream))),
                    Some(Err(error)) => return self.lane_failed(reactor, slot, CloseReason::Tls(error)),
                    None => {}
                }
                reactor.keep_alive(socket, self.options.keep_alive * 2);
                self.lanes.push(slot, header, self.clock, |_| ());
            }
        }
        if !self.receive_handshake(reactor, slot) {
            self.lane_failed(reactor, slot, CloseReason::NoFrames);
        }
    }

    /// The pause after an accept that failed is over.
    pub(super) fn accept_again(&mut self, reactor: &mut Reactor, listener: u32) {
        if let Some(&handle) = self.listeners.get(listener as usize) {
            let token = Token::new(self.options.class, ACCEPT, listener, 0);
            reactor.submit(Op::Accept { listener: handle }, token);
        }
    }

    pub(super) fn accepted(&mut self, reactor: &mut Reactor, listener: u32, result: Result<Socket, Errno>) {
        let socket = match result {
            Ok(socket) => socket,
            Err(Errno::CANCELED | Errno::BADF) => return,
            Err(error) => {
                // Out of descriptors, most likely: go on in a moment, others may close theirs.
                tracing::error!(%error, "cannot accept a connection; on EMFILE, raise LimitNOFILE");
                let again = Token::new(self.options.class, ACCEPT, listener, 0);
                return reactor.submit(Op::Timer { at: reactor.now() + ACCEPT_PAUSE }, again);
            }
        };
        let peer = reactor.peer_address(socket);
        let is_stranger = match (&self.admits, peer) {
            (Some(admits), Some(peer)) => !admits(peer),
            // Reset before it was accepted: its requests would be served for an unknown client.
            (Some(_), None) => reactor.is_tcp(socket),
            (None, _) => false,
        };
        let turned_away = !is_stranger && self.no_room(reactor.now(), peer);
        let refused = if is_stranger {
            tracing::warn!(?peer, "connection refused: its address is not in an --allow range, or it was reset");
            Some(RefuseCode::Auth)
        } else if turned_away && self.lanes.len() >= LANES_MAX + TURNED_AWAY_MAX {
            Some(RefuseCode::Busy)
        } else {
            None
        };
        self.counters.refused += u64::from(turned_away || refused.is_some());
        if let Some(code) = refused {
            self.last_closed = Some(CloseReason::WeRefused(code));
            return reactor.close(socket);
        }
        if !seeded::is(Bug::NoKeepAlive) {
            reactor.keep_alive(socket, self.options.keep_alive * 2);
        }
        let mut lane = Lane::new(Some(socket), Phase::AwaitHello, reactor.now());
        lane.turned_away = turned_away;
        match &self.tls_server {
            ServerTls::Off => {}
            ServerTls::Optional(server) => lane.tls_offered = Some(server.clone()),
            ServerTls::Required(server) => match server.accept() {
                Ok(stream) => lane.secure = Some(Box::new(Secure::new(stream))),
                Err(_) => return reactor.close(socket),
            },
        }
        let slot = self.lanes.insert(lane);
        if !self.receive_handshake(reactor, slot) {
            self.lane_failed(reactor, slot, CloseReason::NoFrames);
        }
    }

    /// Whether there are too many connections for one more of `peer`. The log says so, but not for each.
    pub(super) fn no_room(&mut self, now: Instant, peer: Option<SocketAddr>) -> bool {
        let (connections, handshakes) = (self.lanes.len(), self.lanes.handshakes());
        if handshakes < HANDSHAKES_MAX && connections < LANES_MAX {
            return false;
        }
        if let Some(since_last) = self.refusals_log.admit(now) {
            tracing::warn!(
                ?peer,
                connections,
                connections_max = LANES_MAX,
                handshakes,
                handshakes_max = HANDSHAKES_MAX,
                refused_since_last_line = since_last,
                "connection refused: the event loop has no room for it; run another node, or, where connections are at their most, more loops (--threads)"
            );
        }
        true
    }

    /// Bytes of a handshake have come: all of it, or the stream has ended.
    pub(super) fn handshake_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        n: usize,
        handler: &mut H,
    ) {
        if n < HEADER_BYTES {
            // A server that answers less than this speaks something else: TLS, most likely.
            let asked = self.lanes.get(slot).filter(|lane| lane.phase == Phase::AwaitWelcome);
            let first = asked.map(|lane| lane.frame.as_ref().map_or(&[][..], |frame| &frame.bytes()[..n]));
            let reason = first.map_or(CloseReason::Truncated, session::foreign);
            return self.lane_failed(reactor, slot, reason);
        }
        match self.try_tls(reactor, slot, n, handler) {
            Ok(false) => {}
            Ok(true) => return,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let Some(&bytes) = lane.frame.as_ref().and_then(|frame| frame.bytes().first_chunk::<HEADER_BYTES>()) else {
            return;
        };
        let step = self.handshake_message(reactor, slot, &bytes);
        if let Err(reason) = step {
            self.lane_failed(reactor, slot, reason);
        }
    }

    /// Takes the message that a handshake consists of, at the front of `bytes`.
    pub(super) fn handshake_message(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        bytes: &[u8],
    ) -> Result<(), CloseReason> {
        let phase = self.lanes.get(slot).map_or(Phase::Closing, |lane| lane.phase);
        let opened = self.open_header(slot, bytes).map_err(|_| match phase {
            Phase::AwaitWelcome => session::foreign(bytes),
            _ => CloseReason::NotByway,
        });
        opened.and_then(|(header, kind)| match phase {
            Phase::AwaitHello => self.hello_came(reactor, slot, &header, kind),
            Phase::AwaitWelcome => self.welcome_came(reactor, slot, &header, kind),
            _ => Err(CloseReason::Unexpected(kind)),
        })
    }

    pub(super) fn hello_came(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        header: &Header,
        kind: Kind,
    ) -> Result<(), CloseReason> {
        let (hello, identity) = session::read_hello(header, kind)?;
        let features = match session::negotiate(&hello, &self.options.terms) {
            Ok(features) => features,
            Err(code) => {
                self.refuse(slot, code);
                return Ok(());
            }
        };
        let is_rdma = self.lanes.get(slot).is_some_and(|lane| lane.connection.is_some());
        if self.lanes.get(slot).is_some_and(|lane| lane.turned_away) {
            self.refuse(slot, RefuseCode::Busy);
        } else if is_rdma && features & FEATURE_PAYLOAD_CHECKSUM != 0 {
            self.refuse(slot, RefuseCode::Feature);
        } else if is_rdma && hello.lane.get() > 0 {
            self.refuse(slot, RefuseCode::Protocol);
        } else if self.draining {
            self.refuse(slot, RefuseCode::ShuttingDown);
        } else if hello.lane.get() > 0 {
            self.join_lane(reactor, slot, header, &hello, &identity);
        } else {
            self.start_session(reactor, slot, header, &hello, &identity, features);
        }
        Ok(())
    }

    /// Answers `Refuse`; the lane ends when that was sent.
    pub(super) fn refuse(&mut self, slot: LaneId, code: RefuseCode) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        lane.close_when_sent = Some(CloseReason::WeRefused(code));
        self.lanes.push(slot, session::refuse(Kind::Refuse, code), self.clock, |_| ());
    }

    fn start_session(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        header: &Header,
        hello: &Hello,
        identity: &Identity,
        features: u32,
    ) {
        if self.moves_elsewhere(reactor, slot, header) {
            return;
        }
        let Some((registry, home)) = &self.server else { return };
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let tls_peer = lane.peer();
        // The lists may be newer than the lane's TLS handshake.
        if self.tls_server.server().is_some_and(|server| server.has_revoked(&tls_peer)) {
            return self.refuse(slot, RefuseCode::Auth);
        }
        match registry.claim(identity, *home) {
            Claim::Stale => return self.refuse(slot, RefuseCode::Superseded),
            Claim::Wait => {
                lane.phase = Phase::Fenced;
                lane.hello = Some(*header);
                return self.end_superseded(reactor);
            }
            Claim::Granted => {}
        }
        let instance = registry.instance();
        let agreed = Agreed { features, instance };
        let bulk_lanes = if lane.connection.is_some() { 0 } else { hello.bulk_lanes.get().clamp(1, BULK_LANES_MAX) };
        let lanes = 1 + usize::from(bulk_lanes);
        let (socket, connection) = (lane.socket, lane.connection);
        let capabilities = Capabilities::on(reactor, WireKind::of_socket(reactor, socket), lane.secure.is_some());
        let by_device = || self.lanes.rdma()?.transport.peer(connection?);
        let peer = by_device().or_else(|| reactor.peer_address(socket?));
        self.counters.sessions += 1;
        let liveness = Liveness::new(self.options.keep_alive, reactor.now());
        let terms = self.options.terms;
        let mut state = Session::new(Role::Server, *identity, capabilities, terms, agreed, lanes, liveness);
        (state.tls_peer, state.peer) = (tls_peer, peer);
        if let Some(rdma) = state.wire.rdma_mut() {
            rdma.connection = connection;
        }
        let session = self.sessions.insert(state);
        self.lane_up(reactor, slot, session, 0);
        self.welcome(slot, hello, &agreed);
        self.sessions.set_up(session);
    }

    fn welcome(&mut self, slot: LaneId, hello: &Hello, agreed: &Agreed) {
        self.lanes.push(slot, session::welcome(hello, agreed), self.clock, |_| ());
    }

    /// A bulk lane finds its session, here or on another loop.
    fn join_lane(&mut self, reactor: &mut Reactor, slot: LaneId, header: &Header, hello: &Hello, identity: &Identity) {
        let number = hello.lane.get();
        if let Some((session, state)) = self.sessions.of_client(identity) {
            let agreed = state.agreed;
            // The nonce alone does not do: what was shown for the session must be shown for each of its lanes.
            if self.lanes.get(slot).is_none_or(|lane| lane.peer() != state.tls_peer) {
                return self.refuse(slot, RefuseCode::Auth);
            }
            if state.lanes.get(usize::from(number)).is_none_or(Option::is_some) {
                return self.refuse(slot, RefuseCode::Protocol);
            }
            self.lane_up(reactor, slot, session, number);
            return self.welcome(slot, hello, &agreed);
        }
        let Some((registry, here)) = &self.server else { return };
        let home = registry.home(&identity.nonce).filter(|home| home != here);
        if home.is_none_or(|home| !self.hand_over(reactor, slot, header, home)) {
            self.refuse(slot, RefuseCode::UnknownSession);
        }
    }

    /// Hands the lane that begins a session to the loop that has the fewest, if that is another one.
    fn moves_elsewhere(&mut self, reactor: &mut Reactor, slot: LaneId, header: &Header) -> bool {
        let (Some((registry, here)), Some(lane)) = (&self.server, self.lanes.get(slot)) else { return false };
        if lane.was_handed || lane.connection.is_some() {
            return false;
        }
        let to = registry.least_loaded(*here);
        to != *here && self.hand_over(reactor, slot, header, to)
    }

    /// Hands a lane to another loop, now or, while TLS's own last words are on their way, once they have gone. False if it
    /// cannot be.
    fn hand_over(&mut self, reactor: &mut Reactor, slot: LaneId, header: &Header, to: LoopId) -> bool {
        let (Some((registry, here)), Some(lane)) = (&self.server, self.lanes.get_mut(slot)) else { return false };
        if lane.is_busy() {
            lane.phase = Phase::Fenced;
            lane.hello = Some(*header);
            return true;
        }
        let Some(connection) = lane.socket.and_then(|socket| reactor.release(socket)) else { return false };
        let secure = self.lanes.take_out(slot).and_then(|lane| lane.secure);
        let tls = secure.map(|secure| secure.into_stream());
        let begins = header.body::<Hello>().lane.get() == 0;
        registry.hand_over(to, HandedLane { connection, hello: *header, tls, from: Some(*here).filter(|_| begins) });
        true
    }

    pub(super) fn take_handed_lanes(&mut self, reactor: &mut Reactor) {
        let Some((registry, here)) = self.server.clone() else { return };
        for handed in registry.take_lanes(here) {
            let frame = reactor.receive_buffers().alloc(HEADER_FRAME_BYTES);
            let turned_away = self.no_room(reactor.now(), None);
            if let Some(from) = handed.from.filter(|_| turned_away || frame.is_none()) {
                registry.hand_over(from, HandedLane { from: None, ..handed });
                continue;
            }
            let socket = match reactor.adopt(handed.connection) {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::warn!(%error, "cannot take over a connection from another loop");
                    continue;
                }
            };
            let mut lane = Lane::new(Some(socket), Phase::AwaitHello, reactor.now());
            lane.secure = handed.tls.map(|stream| Box::new(Secure::new(stream)));
            lane.frame = frame;
            lane.turned_away = turned_away;
            lane.sequence_in = 1;
            lane.was_handed = true;
            let has_frame = lane.frame.is_some();
            let slot = self.lanes.insert(lane);
            let step = if has_frame { Ok(()) } else { Err(CloseReason::NoFrames) };
            if let Err(reason) = step.and_then(|()| self.hello_came(reactor, slot, &handed.hello, Kind::Hello)) {
                self.lane_failed(reactor, slot, reason);
            }
        }
    }

    fn lane_up(&mut self, reactor: &mut Reactor, slot: LaneId, session: SessionId, number: u16) {
        let Some(had_session) = self.lanes.set_up(slot, session, number) else { return };
        if !had_session && let Some(state) = self.sessions.get_mut(session) {
            state.add_lane(number, slot);
        }
        self.receive_messages(reactor, slot);
    }

    fn welcome_came(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        header: &Header,
        kind: Kind,
    ) -> Result<(), CloseReason> {
        let Some(lane) = self.lanes.get(slot) else { return Ok(()) };
        let (number, socket, Some(session)) = (lane.number, lane.socket, lane.session) else { return Ok(()) };
        let tls_peer = lane.peer();
        let Some(state) = self.sessions.get_mut(session) else { return Ok(()) };
        let agreed = session::read_welcome(header, kind, &state.identity, &state.terms)?;
        if number == 0 {
            (state.agreed, state.tls_peer) = (agreed, tls_peer);
        } else if state.agreed.instance != agreed.instance {
            return Err(CloseReason::Refused(RefuseCode::UnknownSession));
        }
        let are_all_up = state.note_lane_up();
        let bulk_lanes = state.lanes.len() as u16 - 1;
        self.lane_up(reactor, slot, session, number);
        if self.sessions.open(session).is_none() {
            return Ok(());
        }
        if number == 0 {
            self.lend_arena(reactor, session, socket);
            for bulk in 1..=bulk_lanes {
                self.connect_lane(reactor, session, bulk);
            }
        }
        if are_all_up {
            self.sessions.set_up(session);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
