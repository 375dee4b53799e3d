//! How sessions begin: connecting and accepting lanes, `Hello`, `Welcome`, and the fence.

use std::net::SocketAddr;
use std::sync::Arc;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Address, Errno, Listener, Op, Reactor, Socket};

use super::admission::Arrival;
use super::lane::{Lane, LaneId, Phase};
use super::sessions::{Role, Session};
use super::{CONNECT, Fabric, Handler};
use crate::capabilities::{Capabilities, WireKind};
use crate::limits::BULK_LANES_MAX;
use crate::rdma::RdmaError;
use crate::rdma::transport::ConnectionId;
use crate::registry::{Claim, Registry, SessionReservation};
use crate::session::{self, Agreed, CloseReason, Identity, Liveness, PayloadChecksum};
use crate::slots::SessionId;
use crate::tls::TlsClient;
use crate::wire::{HEADER_BYTES, Header, Hello, Kind, RefuseCode};

impl Fabric {
    /// Makes this fabric a server's: it serves sessions of `registry`.
    pub fn serve(&mut self, reactor: &Reactor, registry: Arc<Registry>) {
        self.admission.serve(reactor, registry);
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

    /// Listens at an address of an RDMA device; connections become sessions. Gives the address, with the port that was
    /// chosen if 0 was asked for.
    ///
    /// # Errors
    /// [`RdmaError`]: no library, no device at the address, or the system's.
    pub fn listen_rdma(&mut self, reactor: &mut Reactor, address: SocketAddr) -> Result<SocketAddr, RdmaError> {
        self.lanes.begin_rdma().transport.listen(reactor, address)
    }

    /// Accepts connections of a listener that the owner made.
    pub fn accept_from(&mut self, reactor: &mut Reactor, listener: Listener) {
        self.admission.listen(reactor, listener);
    }

    /// Stops listening and begins no session any more; those that are there go on.
    pub fn close_listeners(&mut self, reactor: &mut Reactor) {
        self.admission.close(reactor);
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
        let slot = self.lanes.insert(Lane::connecting(session, number, reactor.now()));
        let Some(state) = self.sessions.get_mut(session) else { return };
        state.add_lane(number, slot);
        match state.remote.clone() {
            Some(Address::Rdma(to)) => self.connect_rdma(reactor, slot, to),
            Some(to) => reactor.submit(Op::Connect { to }, slot.token(self.options.class, CONNECT)),
            None => {}
        }
    }

    /// Connects the lane of a client's session.
    fn connect_rdma(&mut self, reactor: &mut Reactor, slot: LaneId, to: SocketAddr) {
        let session = self.lanes.get(slot).and_then(|lane| self.sessions.get(lane.session?));
        let step = if session.is_some_and(|state| state.tls.is_some()) {
            // A session that asks for TLS is refused without it.
            tracing::warn!(%to, "a session with TLS was requested over RDMA, which has none: use tcp");
            Err(CloseReason::WeRefused(RefuseCode::Auth))
        } else {
            self.lanes.begin_rdma().connect(reactor, slot, to)
        };
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.connection = step.ok();
            lane.connect_ended();
        }
        match step {
            Ok(connection) => {
                let session = self.lanes.get(slot).and_then(|lane| lane.session);
                if let Some(rdma) = session.and_then(|session| self.sessions.rdma_mut(session)) {
                    rdma.connection = Some(connection);
                }
            }
            Err(reason) => self.lanes.begin_rdma().fail_later(reactor, slot, reason),
        }
    }

    pub(super) fn connected(&mut self, reactor: &mut Reactor, slot: LaneId, result: Result<Socket, Errno>) {
        let Some(lane) = self.lanes.get_mut(slot) else {
            if let Ok(socket) = result {
                reactor.close(socket);
            }
            return;
        };
        lane.connect_ended();
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
                    Some(Ok(stream)) => lane.tls.begin(stream),
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
        self.admission.accept(reactor, listener);
    }

    pub(super) fn accepted(&mut self, reactor: &mut Reactor, listener: u32, result: Result<Socket, Errno>) {
        let socket = match result {
            Ok(socket) => socket,
            Err(Errno::CANCELED | Errno::BADF) => return,
            Err(error) => {
                // Out of descriptors, most likely: go on in a moment, others may close theirs.
                tracing::error!(%error, "cannot accept a connection; on EMFILE, raise LimitNOFILE");
                return self.admission.accept_later(reactor, listener);
            }
        };
        let arrival = self.admission.judge(reactor, socket, &self.lanes);
        match arrival {
            Arrival::Admitted => {}
            Arrival::TurnedAway => self.tally.note_turned_away(),
            Arrival::Refused(code) => {
                self.tally.note_refused(code);
                return reactor.close(socket);
            }
        }
        if !seeded::is(Bug::NoKeepAlive) {
            reactor.keep_alive(socket, self.options.keep_alive * 2);
        }
        let mut lane = Lane::accepted(socket, matches!(arrival, Arrival::TurnedAway), reactor.now());
        if self.admission.begin_tls(&mut lane).is_err() {
            return reactor.close(socket);
        }
        let slot = self.lanes.insert(lane);
        if !self.receive_handshake(reactor, slot) {
            self.lane_failed(reactor, slot, CloseReason::NoFrames);
        }
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
            let first = asked.map(|lane| lane.inbound.frame().map_or(&[][..], |frame| &frame.bytes()[..n]));
            let reason = first.map_or(CloseReason::Truncated, session::foreign);
            return self.lane_failed(reactor, slot, reason);
        }
        match self.try_tls(reactor, slot, n, handler) {
            Ok(false) => {}
            Ok(true) => return,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let Some(&bytes) = lane.inbound.frame().and_then(|frame| frame.bytes().first_chunk::<HEADER_BYTES>()) else {
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
        let Some(lane) = self.lanes.get(slot) else { return Ok(()) };
        match self.admission.check_hello(lane, &hello, &self.options.terms) {
            Err(code) => self.refuse(slot, code),
            Ok(_) if hello.lane.get() > 0 => self.join_lane(reactor, slot, header, &hello, &identity),
            Ok(features) => self.start_session(reactor, slot, header, &hello, &identity, features),
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
        let better = self.lanes.get(slot).and_then(|lane| self.admission.better_loop(lane));
        if better.is_some_and(|to| self.admission.hand_over(reactor, &mut self.lanes, slot, header, to)) {
            return;
        }
        let (Some(home), Some(lane)) = (self.admission.home(), self.lanes.get_mut(slot)) else { return };
        let tls_peer = lane.peer();
        // The lists may be newer than the lane's TLS handshake.
        if self.admission.has_revoked(&tls_peer) {
            return self.refuse(slot, RefuseCode::Auth);
        }
        match home.registry.claim(identity, home.id) {
            Claim::Stale => return self.refuse(slot, RefuseCode::Superseded),
            Claim::Wait => {
                lane.fence(header);
                return self.end_superseded(reactor);
            }
            Claim::Granted => {}
        }
        let instance = home.registry.instance();
        let agreed = Agreed { features, instance };
        let bulk_lanes = if lane.connection.is_some() { 0 } else { hello.bulk_lanes.get().clamp(1, BULK_LANES_MAX) };
        let lanes = 1 + usize::from(bulk_lanes);
        let (socket, connection) = (lane.socket, lane.connection);
        let capabilities = Capabilities::on(reactor, WireKind::of_socket(reactor, socket), lane.tls.is_on());
        let by_device = || self.lanes.rdma()?.transport.peer(connection?);
        let peer = by_device().or_else(|| reactor.peer_address(socket?));
        self.tally.note_session();
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
        if self.admission.home().is_none() {
            return;
        }
        let to = self.admission.loop_of(identity);
        if to.is_none_or(|to| !self.admission.hand_over(reactor, &mut self.lanes, slot, header, to)) {
            self.refuse(slot, RefuseCode::UnknownSession);
        }
    }

    /// Takes the lanes that other loops have handed to this one.
    pub(super) fn take_handed_lanes(&mut self, reactor: &mut Reactor) {
        for handed in self.admission.take_handed() {
            let hello = handed.hello;
            let Some(slot) = self.admission.adopt(reactor, &mut self.lanes, handed) else { continue };
            let has_frame = self.lanes.get(slot).is_some_and(|lane| lane.inbound.frame().is_some());
            let step = if has_frame { Ok(()) } else { Err(CloseReason::NoFrames) };
            if let Err(reason) = step.and_then(|()| self.hello_came(reactor, slot, &hello, Kind::Hello)) {
                self.lane_failed(reactor, slot, reason);
            }
        }
    }

    /// Lets those in whose old session has ended.
    pub(super) fn retry_fenced(&mut self, reactor: &mut Reactor) {
        for (slot, header) in self.lanes.take_fenced() {
            if let Err(reason) = self.hello_came(reactor, slot, &header, Kind::Hello) {
                self.lane_failed(reactor, slot, reason);
            }
        }
    }

    /// A client asks at a listener. The loop with the fewest sessions answers it.
    pub(super) fn rdma_asked(&mut self, reactor: &mut Reactor, connection: ConnectionId, peer: Option<SocketAddr>) {
        let Some(rdma) = self.lanes.rdma_mut() else { return };
        let Some(home) = self.admission.home() else { return rdma.transport.refuse(connection, RefuseCode::Busy) };
        let place = home.registry.reserve(home.id);
        if place.home() == home.id {
            return self.answer_rdma(reactor, connection, peer, place);
        }
        if let Some(asked) = rdma.transport.take_out(connection) {
            home.registry.hand_over_connection(asked, &place);
        }
    }

    /// Answers the clients that have asked at the listeners of other loops.
    pub(super) fn take_handed_connections<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let Some(home) = self.admission.home() else { return };
        let handed = home.registry.take_connections(home.id);
        if handed.is_empty() {
            return;
        }
        for (asked, place) in handed {
            let transport = &mut self.lanes.begin_rdma().transport;
            match transport.adopt(reactor, asked) {
                Ok(connection) => {
                    let peer = transport.peer(connection);
                    self.answer_rdma(reactor, connection, peer, place);
                }
                Err(error) => tracing::warn!(%error, "a loop cannot take over an RDMA connection, which is refused"),
            }
        }
        self.take_rdma_events(reactor, handler);
    }

    /// Accepts or refuses a connect request.
    fn answer_rdma(
        &mut self,
        reactor: &mut Reactor,
        connection: ConnectionId,
        peer: Option<SocketAddr>,
        reservation: SessionReservation,
    ) {
        if let Some(code) = self.admission.refuses_device(reactor.now(), peer, &self.lanes) {
            self.tally.note_refused(code);
            return self.lanes.begin_rdma().transport.refuse(connection, code);
        }
        let lane = Lane::accepted_by_device(connection, reservation, reactor.now());
        let slot = self.lanes.insert(lane);
        self.lanes.begin_rdma().accept(reactor, connection, slot);
        self.watch_clients(reactor);
    }

    /// Messages can go both ways: a client says `Hello`.
    pub(super) fn rdma_connected(&mut self, connection: ConnectionId, slot: LaneId) {
        let peer = self.lanes.rdma().and_then(|rdma| rdma.transport.peer(connection));
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.phase != Phase::Connecting {
            return;
        }
        lane.phase = Phase::AwaitWelcome;
        let Some(state) = lane.session.and_then(|session| self.sessions.get_mut(session)) else { return };
        state.peer = peer;
        let header = session::hello(&state.identity, &state.terms, 0);
        self.lanes.push(slot, header, self.clock, |_| ());
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
            if let Some(shm) = self.sessions.shm_mut(session) {
                self.shm_direct.lend_to(reactor, socket, shm);
            }
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
