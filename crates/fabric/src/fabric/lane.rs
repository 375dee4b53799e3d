//! One connection of a session: how far it has come, and its parts. What it receives is in `inbound.rs`, what it sends in
//! `outbound.rs`, its TLS in `secure.rs`.

use byway_reactor::{Instant, Socket};

use super::inbound::Inbound;
use super::outbound::Outbound;
use super::secure::LaneTls;
use crate::rdma::transport::ConnectionId;
use crate::registry::SessionReservation;
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot};
use crate::tls::PeerIdentity;
use crate::wire::Header;

/// How far a lane has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client's connect is in flight.
    Connecting,
    /// The server waits for the `Hello`.
    AwaitHello,
    /// The server has the `Hello`, and waits for the client's old session to end.
    Fenced,
    /// The client waits for the `Welcome`.
    AwaitWelcome,
    /// It carries messages.
    Up,
    /// It is closed; what was in flight has not all come back.
    Closing,
}

/// A connection of a fabric.
pub(super) type LaneId = Slot<Lane>;

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) socket: Option<Socket>,
    /// In place of a socket, its connection over RDMA.
    pub(super) connection: Option<ConnectionId>,
    pub(super) session: Option<SessionId>,
    /// 0 is the control lane.
    pub(super) number: u16,
    pub(super) phase: Phase,
    pub(super) close_when_sent: Option<CloseReason>,
    handshake: Handshake,
    pub(super) tls: LaneTls,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
}

/// What matters of a lane until it is up.
#[derive(Debug)]
struct Handshake {
    opened_at: Instant,
    /// The client's connect is in flight.
    is_connecting: bool,
    /// The `Hello` of a fenced lane.
    hello: Option<Header>,
    /// Another loop has handed it over.
    was_handed: bool,
    /// The session to be of an RDMA connection; its loop counts it already.
    reservation: Option<SessionReservation>,
    /// The loop has no room for this connection, and answers its `Hello` with that refusal.
    is_turned_away: bool,
}

impl Lane {
    fn new(phase: Phase, now: Instant) -> Self {
        Self {
            socket: None,
            connection: None,
            session: None,
            number: 0,
            phase,
            close_when_sent: None,
            handshake: Handshake {
                opened_at: now,
                is_connecting: false,
                hello: None,
                was_handed: false,
                reservation: None,
                is_turned_away: false,
            },
            tls: LaneTls::default(),
            inbound: Inbound::new(now),
            outbound: Outbound::new(),
        }
    }

    /// A lane of a client's session, whose connect begins.
    pub(super) fn connecting(session: SessionId, number: u16, now: Instant) -> Self {
        let mut lane = Self::new(Phase::Connecting, now);
        (lane.session, lane.number, lane.handshake.is_connecting) = (Some(session), number, true);
        lane
    }

    /// A connection that a server has accepted, and has no room for if it is turned away.
    pub(super) fn accepted(socket: Socket, is_turned_away: bool, now: Instant) -> Self {
        let mut lane = Self::new(Phase::AwaitHello, now);
        (lane.socket, lane.handshake.is_turned_away) = (Some(socket), is_turned_away);
        lane
    }

    /// An accepted connection that another loop has handed over, with the `Hello` that it has received.
    pub(super) fn handed(socket: Socket, inbound: Inbound, is_turned_away: bool, now: Instant) -> Self {
        let mut lane = Self::accepted(socket, is_turned_away, now);
        (lane.inbound, lane.handshake.was_handed) = (inbound, true);
        lane
    }

    /// A connection of a device that a server accepts, for the session that its loop counts already.
    pub(super) fn accepted_by_device(connection: ConnectionId, reservation: SessionReservation, now: Instant) -> Self {
        let mut lane = Self::new(Phase::AwaitHello, now);
        (lane.connection, lane.handshake.reservation) = (Some(connection), Some(reservation));
        lane
    }

    /// The client's connect has ended.
    pub(super) fn connect_ended(&mut self) {
        self.handshake.is_connecting = false;
    }

    /// The handshake is over: it has this number in its session. Whether it had its session before.
    pub(super) fn set_up(&mut self, session: SessionId, number: u16) -> bool {
        (self.phase, self.number, self.handshake.reservation) = (Phase::Up, number, None);
        self.session.replace(session).is_some()
    }

    /// Its `Hello` waits for the end of the client's old session, or for its own last send before it goes to another loop.
    pub(super) fn fence(&mut self, hello: &Header) {
        (self.phase, self.handshake.hello) = (Phase::Fenced, Some(*hello));
    }

    /// Takes the `Hello` of a fenced lane.
    pub(super) fn take_hello(&mut self) -> Option<Header> {
        self.handshake.hello.take()
    }

    /// Whether its `Hello` waits, and neither for its last send nor to be refused.
    pub(super) fn is_fenced(&self) -> bool {
        self.handshake.hello.is_some() && !self.is_busy() && self.close_when_sent.is_none()
    }

    /// Whether the loop answers its `Hello` with a refusal, because it has no room for this connection.
    pub(super) fn is_turned_away(&self) -> bool {
        self.handshake.is_turned_away
    }

    /// Whether another loop has handed it over.
    pub(super) fn was_handed(&self) -> bool {
        self.handshake.was_handed
    }

    /// When its handshake began.
    pub(super) fn opened_at(&self) -> Instant {
        self.handshake.opened_at
    }

    /// The peer's identity, as proved by TLS.
    pub(super) fn peer(&self) -> PeerIdentity {
        self.tls.peer()
    }

    /// Whether operations are in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.inbound.is_in_flight() || self.outbound.is_in_flight() || self.handshake.is_connecting
    }
}
