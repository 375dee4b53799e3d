//! What a server lets in: its listeners, the peers that it admits, the room for their connections, and the loop that serves each.

use std::net::SocketAddr;
use std::sync::Arc;

use byway_reactor::{Instant, Listener, Op, Reactor, Socket, Token};

use super::ACCEPT;
use super::inbound::{HEADER_FRAME_BYTES, Inbound};
use super::lane::{Lane, LaneId};
use super::lanes::Lanes;
use crate::limits::{ACCEPT_PAUSE, HANDSHAKES_MAX, LANES_MAX, TURNED_AWAY_MAX};
use crate::log_limit::LogLimit;
use crate::registry::{HandedLane, LoopId, Registry};
use crate::session::{self, Identity, Terms};
use crate::tls::{PeerIdentity, ServerTls, TlsError};
use crate::wire::{FEATURE_PAYLOAD_CHECKSUM, Header, Hello, Kind, RefuseCode};

/// Says which addresses may connect.
type Admits = Box<dyn Fn(SocketAddr) -> bool + Send>;

/// The sessions of a server, and the loop of this fabric among its loops.
pub(super) struct Home {
    pub(super) registry: Arc<Registry>,
    pub(super) id: LoopId,
}

/// What becomes of a connection that was accepted.
pub(super) enum Arrival {
    Admitted,
    /// There is no room for it, which its `Hello` is answered with.
    TurnedAway,
    /// It is closed at once.
    Refused(RefuseCode),
}

/// See the module.
pub(super) struct Admission {
    /// The class of the listeners' tokens.
    class: u8,
    /// Of a server.
    home: Option<Home>,
    tls: ServerTls,
    listeners: Vec<Listener>,
    /// `None`: all addresses may connect.
    admits: Option<Admits>,
    /// No session is begun any more.
    draining: bool,
    refusals_log: LogLimit,
}

impl Admission {
    /// Of a fabric that does not serve yet, with tokens of `class`.
    pub(super) fn new(class: u8) -> Self {
        Self {
            class,
            home: None,
            tls: ServerTls::Off,
            listeners: Vec::new(),
            admits: None,
            draining: false,
            refusals_log: LogLimit::default(),
        }
    }

    /// Serves sessions of `registry`.
    pub(super) fn serve(&mut self, reactor: &Reactor, registry: Arc<Registry>) {
        let id = registry.join(reactor.waker());
        self.home = Some(Home { registry, id });
    }

    /// Where this is, of a server.
    pub(super) fn home(&self) -> Option<&Home> {
        self.home.as_ref()
    }

    /// What connections that are accepted from now on must or may do about TLS.
    pub(super) fn set_tls(&mut self, tls: ServerTls) {
        self.tls = tls;
    }

    /// Connections of peers that `admits` says no to are closed at once.
    pub(super) fn set_admits(&mut self, admits: impl Fn(SocketAddr) -> bool + Send + 'static) {
        self.admits = Some(Box::new(admits));
    }

    /// Whether a revocation list that is in force by now names what a client has shown by TLS.
    pub(super) fn has_revoked(&self, peer: &PeerIdentity) -> bool {
        self.tls.server().is_some_and(|server| server.has_revoked(peer))
    }

    /// Accepts connections of a listener.
    pub(super) fn listen(&mut self, reactor: &mut Reactor, listener: Listener) {
        self.listeners.push(listener);
        self.accept(reactor, self.listeners.len() as u32 - 1);
    }

    /// Accepts the next connection of the listener with this number.
    pub(super) fn accept(&self, reactor: &mut Reactor, number: u32) {
        if let Some(&listener) = self.listeners.get(number as usize) {
            reactor.submit(Op::Accept { listener }, self.token(number));
        }
    }

    /// Sets a timer at whose end the next connection is to be accepted.
    pub(super) fn accept_later(&self, reactor: &mut Reactor, number: u32) {
        reactor.submit(Op::Timer { at: reactor.now() + ACCEPT_PAUSE }, self.token(number));
    }

    fn token(&self, number: u32) -> Token {
        Token::new(self.class, ACCEPT, number, 0)
    }

    /// Stops listening, and lets no session begin any more.
    pub(super) fn close(&mut self, reactor: &mut Reactor) {
        for listener in &self.listeners {
            reactor.close_listener(*listener);
        }
        self.draining = true;
    }

    /// What becomes of a connection that was accepted.
    pub(super) fn judge(&mut self, reactor: &Reactor, socket: Socket, lanes: &Lanes) -> Arrival {
        let peer = reactor.peer_address(socket);
        let is_stranger = match (&self.admits, peer) {
            (Some(admits), Some(peer)) => !admits(peer),
            // Reset before it was accepted: its requests would be served for an unknown client.
            (Some(_), None) => reactor.is_tcp(socket),
            (None, _) => false,
        };
        if is_stranger {
            tracing::warn!(?peer, "connection refused: its address is not in an --allow range, or it was reset");
            return Arrival::Refused(RefuseCode::Auth);
        }
        match self.no_room(reactor.now(), peer, lanes) {
            false => Arrival::Admitted,
            true if lanes.len() >= LANES_MAX + TURNED_AWAY_MAX => Arrival::Refused(RefuseCode::Busy),
            true => Arrival::TurnedAway,
        }
    }

    /// What a connect request of a device is refused with, if it is.
    pub(super) fn refuses_device(
        &mut self,
        now: Instant,
        peer: Option<SocketAddr>,
        lanes: &Lanes,
    ) -> Option<RefuseCode> {
        if self.admits.as_ref().is_some_and(|admits| !peer.is_some_and(admits)) {
            tracing::warn!(?peer, "connection refused: not in an --allow range");
            return Some(RefuseCode::Auth);
        }
        if matches!(self.tls, ServerTls::Required(_)) {
            tracing::warn!(?peer, "connection refused: TLS is required, and RDMA has none");
            return Some(RefuseCode::Auth);
        }
        if self.draining {
            return Some(RefuseCode::ShuttingDown);
        }
        self.no_room(now, peer, lanes).then_some(RefuseCode::Busy)
    }

    /// Whether there are too many connections for one more of `peer`. The log says so, but not for each.
    fn no_room(&mut self, now: Instant, peer: Option<SocketAddr>, lanes: &Lanes) -> bool {
        let (connections, handshakes) = (lanes.len(), lanes.handshakes());
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

    /// Gives a lane that was accepted the TLS that it must have, or may.
    ///
    /// # Errors
    /// The files of TLS are at fault.
    pub(super) fn begin_tls(&self, lane: &mut Lane) -> Result<(), TlsError> {
        match &self.tls {
            ServerTls::Off => {}
            ServerTls::Optional(server) => lane.tls.offer(server.clone()),
            ServerTls::Required(server) => lane.tls.begin(server.accept()?),
        }
        Ok(())
    }

    /// The features that a lane's session is to have.
    ///
    /// # Errors
    /// The code to refuse it with.
    pub(super) fn check_hello(&self, lane: &Lane, hello: &Hello, terms: &Terms) -> Result<u32, RefuseCode> {
        let features = session::negotiate(hello, terms)?;
        let is_rdma = lane.connection.is_some();
        if lane.is_turned_away() {
            return Err(RefuseCode::Busy);
        }
        if is_rdma && features & FEATURE_PAYLOAD_CHECKSUM != 0 {
            return Err(RefuseCode::Feature);
        }
        if is_rdma && hello.lane.get() > 0 {
            return Err(RefuseCode::Protocol);
        }
        if self.draining { Err(RefuseCode::ShuttingDown) } else { Ok(features) }
    }

    /// The loop with the fewest sessions, if a lane that begins one can go there, and is on another.
    pub(super) fn better_loop(&self, lane: &Lane) -> Option<LoopId> {
        let home = self.home.as_ref().filter(|_| !lane.was_handed() && lane.connection.is_none())?;
        Some(home.registry.least_loaded(home.id)).filter(|to| *to != home.id)
    }

    /// The other loop on which the session of a lane lives.
    pub(super) fn loop_of(&self, identity: &Identity) -> Option<LoopId> {
        let home = self.home.as_ref()?;
        home.registry.home(&identity.nonce).filter(|to| *to != home.id)
    }

    /// Hands a lane to another loop, now or, while TLS's own last words are on their way, once they have gone. False if it
    /// cannot be.
    pub(super) fn hand_over(
        &self,
        reactor: &mut Reactor,
        lanes: &mut Lanes,
        slot: LaneId,
        hello: &Header,
        to: LoopId,
    ) -> bool {
        let (Some(home), Some(lane)) = (&self.home, lanes.get_mut(slot)) else { return false };
        if lane.is_busy() {
            lane.fence(hello);
            return true;
        }
        let Some(connection) = lane.socket.and_then(|socket| reactor.release(socket)) else { return false };
        let tls = lanes.take_out(slot).and_then(|lane| lane.tls.into_stream());
        let begins = hello.body::<Hello>().lane.get() == 0;
        let from = Some(home.id).filter(|_| begins);
        home.registry.hand_over(to, HandedLane { connection, hello: *hello, tls, from });
        true
    }

    /// Takes the lanes that other loops have handed to this one; each is then to be [adopted](Self::adopt).
    pub(super) fn take_handed(&self) -> Vec<HandedLane> {
        self.home.as_ref().map_or_else(Vec::new, |home| home.registry.take_lanes(home.id))
    }

    /// Takes over a lane that another loop has handed over, whose `Hello` comes next. `None`: it goes back, or is gone.
    pub(super) fn adopt(&mut self, reactor: &mut Reactor, lanes: &mut Lanes, handed: HandedLane) -> Option<LaneId> {
        let frame = reactor.receive_buffers().alloc(HEADER_FRAME_BYTES);
        let turned_away = self.no_room(reactor.now(), None, lanes);
        if let Some(from) = handed.from.filter(|_| turned_away || frame.is_none()) {
            self.home.as_ref()?.registry.hand_over(from, HandedLane { from: None, ..handed });
            return None;
        }
        let socket = match reactor.adopt(handed.connection) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, "cannot take over a connection from another loop");
                return None;
            }
        };
        let now = reactor.now();
        let mut lane = Lane::handed(socket, Inbound::behind_hello(frame, now), turned_away, now);
        if let Some(stream) = handed.tls {
            lane.tls.begin(stream);
        }
        Some(lanes.insert(lane))
    }

    /// A lane with this `Hello` no longer waits for the end of its client's old session.
    pub(super) fn stop_waiting(&self, hello: &Header) {
        if let (Some(home), Ok((hello, identity))) = (&self.home, session::read_hello(hello, Kind::Hello))
            && hello.lane.get() == 0
        {
            home.registry.stopped_waiting(&identity);
        }
    }

    /// The session of a client has ended.
    pub(super) fn session_ended(&self, identity: &Identity) {
        if let Some(home) = &self.home {
            home.registry.ended(identity);
        }
    }
}
