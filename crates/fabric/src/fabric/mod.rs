//! The sessions of one loop.
//!
//! [`Fabric`] is composed of parts that own their state: sessions, lanes, windows, admission and those of each wire. A part's methods
//! take only what they need. What concerns several of them, or calls the owner's [`Handler`], is routed by the methods of `Fabric` here
//! and in `handshake`, `ending`, `receive`, `transfer` and `open_windows`.
//!
//! The owner passes completions of its token class to [`Fabric::handle`], and calls [`Fabric::flush`] once it has handled
//! all reaped completions. Messages sent meanwhile go out in one system call per lane. That is the batching: under load a
//! turn brings many messages, and a lane has one send in flight while the next gathers.

mod admission;
mod ending;
mod grants;
mod handler;
mod handshake;
mod inbound;
mod lane;
mod lanes;
mod lending;
mod open_windows;
mod operations;
mod outbound;
mod rdma_lanes;
mod rdma_windows;
mod receive;
mod secure;
mod sessions;
mod shm_direct;
mod slab;
mod tally;
mod transfer;
mod wire;

use std::net::SocketAddr;
use std::time::Duration;

use byway_reactor::{Completion, FramePool, Instant, Op, Outcome, PathState, Reactor, Token};

use self::admission::Admission;
use self::ending::Farewells;
pub use self::handler::Handler;
use self::lane::LaneId;
use self::lanes::Lanes;
pub use self::operations::{EndedGet, GetError, PayloadMeta, Put, Remote, Route};
use self::rdma_lanes::RdmaLanes;
use self::rdma_windows::RdmaReads;
use self::sessions::{Event, Role, Sessions};
use self::shm_direct::ShmDirect;
pub use self::slab::Slab;
pub use self::tally::FabricCounters;
use self::tally::Tally;
use crate::access::{self, Origin};
use crate::capabilities::{Capabilities, WireKind};
use crate::feedback::{Delays, Feedback, Stall};
use crate::limits::{KEEP_ALIVE_DEFAULT, KEEP_ALIVE_MAX, TICK};
use crate::random::Random;
use crate::rdma::transport::Event as RdmaEvent;
use crate::registration;
use crate::session::{self, Agreed, CloseReason, KeepAliveStep, Terms};
use crate::slots::SessionId;
use crate::tls::{ServerTls, TlsClient};
use crate::windows::{WindowKey, Windows, slot_of};
use crate::wire::{Header, Kind};

const RECV: u8 = 1;
const SEND: u8 = 2;
const CONNECT: u8 = 3;
const ACCEPT: u8 = 4;
const TIMER: u8 = 5;
const AGAIN: u8 = 6;
/// And the one after it.
const RDMA: u8 = 7;
const RDMA_FAILED: u8 = 9;
const RDMA_IDLE: u8 = 10;

/// How a fabric behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The class of its tokens.
    pub class: u8,
    /// What it brings to handshakes.
    pub terms: Terms,
    /// A peer that owes a reply is probed after so much silence, and is dead after twice that. Values above [`KEEP_ALIVE_MAX`] are cut to
    /// it.
    pub keep_alive: Duration,
    /// How much of a program's own memory stays registered with each device of RDMA after its use.
    pub registrations: registration::Limits,
    /// Makes keys and nonces those of a seed: for simulations only.
    pub seed: Option<u64>,
}

impl Options {
    /// The defaults, for tokens of `class`.
    pub fn new(class: u8) -> Self {
        let terms = Terms { checksum: session::PayloadChecksum::Off, bulk_lanes: 2 };
        let registrations = registration::Limits::default();
        Self { class, terms, keep_alive: KEEP_ALIVE_DEFAULT, registrations, seed: None }
    }
}

/// See the module.
pub struct Fabric {
    options: Options,
    sessions: Sessions,
    lanes: Lanes,
    windows: Windows,
    random: Random,
    admission: Admission,
    tls_client: Option<TlsClient>,
    ticking: bool,
    /// A timer is set that has the loop not sleep, and look at what waits once more.
    turns_again: bool,
    farewells: Farewells,
    /// What is put now is what the peer has asked for.
    answering: bool,
    tally: Tally,
    shm_direct: ShmDirect,
    /// Gets that devices have in flight.
    rdma_reads: RdmaReads,
    /// The time of the turn.
    clock: Instant,
}

impl Fabric {
    /// A fabric without sessions.
    pub fn new(options: Options) -> Self {
        Self {
            options: Options { keep_alive: options.keep_alive.min(KEEP_ALIVE_MAX), ..options },
            lanes: Lanes::new(options.class, options.registrations),
            sessions: Sessions::default(),
            windows: Windows::default(),
            random: options.seed.map_or_else(Random::from_kernel, Random::from_seed),
            admission: Admission::new(options.class),
            tls_client: None,
            ticking: false,
            turns_again: false,
            farewells: Farewells::default(),
            answering: false,
            tally: Tally::default(),
            shm_direct: ShmDirect::default(),
            rdma_reads: RdmaReads::default(),
            clock: Instant::ZERO,
        }
    }

    /// What connections that are accepted from now on must or may do about TLS.
    pub fn set_tls_server(&mut self, tls: ServerTls) {
        self.admission.set_tls(tls);
    }

    /// Sessions that are begun from now on by [`Fabric::connect`] speak TLS on all their connections, or none if `None`.
    pub fn set_tls_client(&mut self, tls: Option<TlsClient>) {
        self.tls_client = tls;
    }

    /// What the wire of a session can do; `None` if there is no such session. With TLS payloads must lie in frames or heads:
    /// what is encrypted must be read.
    pub fn capabilities(&self, session: SessionId) -> Option<Capabilities> {
        self.sessions.get(session).map(|session| session.capabilities)
    }

    /// The windows, to be closed.
    pub fn windows(&mut self) -> &mut Windows {
        &mut self.windows
    }

    /// Random numbers.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// What was agreed for a session.
    pub fn agreed(&self, session: SessionId) -> Option<&Agreed> {
        self.sessions.get(session).filter(|session| session.was_up()).map(|session| &session.agreed)
    }

    /// What names a session: random, and known only to its two ends, unless an attacker reads a plain connection.
    pub fn nonce(&self, session: SessionId) -> Option<[u8; 16]> {
        self.sessions.get(session).map(|session| session.identity.nonce)
    }

    /// Where a session's peer is.
    pub fn peer(&self, session: SessionId) -> Option<SocketAddr> {
        self.sessions.get(session)?.peer
    }

    /// What is known of a session's peer, by its certificate and by where it connects from.
    pub fn identity(&self, session: SessionId) -> Option<access::Identity> {
        let state = self.sessions.get(session)?;
        let origin = match (state.capabilities.wire, state.peer) {
            (WireKind::Unix | WireKind::Shared, _) => Origin::Unix,
            (_, Some(peer)) => Origin::Address(peer.ip().to_canonical()),
            (_, None) => Origin::Unknown,
        };
        Some(state.tls_peer.identity(origin))
    }

    /// Whether a revocation list that is in force by now names what a session's client has shown by TLS: see
    /// [`TlsServer::has_revoked`](crate::tls::TlsServer::has_revoked).
    pub fn is_revoked(&self, session: SessionId) -> bool {
        let state = self.sessions.get(session).filter(|state| state.role == Role::Server);
        state.is_some_and(|state| self.admission.has_revoked(&state.tls_peer))
    }

    /// Sessions that have not been released.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// Connections.
    pub fn lane_count(&self) -> usize {
        self.lanes.len()
    }

    /// What has come and gone.
    pub fn counters(&self) -> FabricCounters {
        self.tally.counters()
    }

    /// Connections of peers that `admits` says no to are closed at once, and so are those that were reset before they were
    /// accepted, whose address is unknown. Unix sockets are not asked about.
    pub fn admit(&mut self, admits: impl Fn(SocketAddr) -> bool + Send + 'static) {
        self.admission.set_admits(admits);
    }

    /// Why the connection or session that ended last ended.
    pub fn last_closed(&self) -> Option<CloseReason> {
        self.tally.last_closed()
    }

    /// What a session's transfers were like until now, and what waits; `None` if it is not up. A walk over its lanes, no system call.
    pub fn feedback(&self, reactor: &Reactor, session: SessionId) -> Option<Feedback> {
        let state = self.sessions.get(session).filter(|state| state.is_up())?;
        let now = reactor.now();
        let mut feedback = state.measured(now);
        for lane in self.lanes.of(state) {
            feedback.queued_bytes += self.lanes.queued_on(lane) as u64;
            let waiting = self.lanes.oldest_on(lane).map_or(Duration::ZERO, |at| now.since(at));
            feedback.waiting = feedback.waiting.max(waiting);
        }
        Some(feedback)
    }

    /// What the wire says of the path to a session's peer; `None` where it says nothing, as over shared memory. A system
    /// call, for the lane of payloads that has the most to send.
    pub fn path(&self, reactor: &Reactor, session: SessionId) -> Option<PathState> {
        let lanes = self.lanes.of(self.sessions.get(session)?);
        reactor.path_state(lanes.max_by_key(|lane| (lane.outbound.queued(), lane.number))?.socket?)
    }

    /// The delays and stalls of all sessions, also of those that have ended.
    pub fn delays(&self) -> Delays {
        self.sessions.delays()
    }

    /// The sessions of clients that are up.
    pub fn client_sessions(&self) -> impl Iterator<Item = SessionId> + '_ {
        let up = self.sessions.iter().filter(|(_, state)| state.is_up() && state.role == Role::Server);
        up.map(|(slot, _)| slot)
    }

    /// The owner begins a transfer that it could not begin when it was asked: so long it has waited for frames.
    pub fn note_start(&mut self, session: SessionId, waited: Duration) {
        self.sessions.note_start(session, waited);
    }

    /// Something of the owner has waited that long.
    pub fn note_stall(&mut self, session: SessionId, stall: Stall, waited: Duration) {
        self.sessions.note_stall(session, stall, waited);
    }

    /// Bytes of frames that wait on a session's lanes for the peer to take them.
    pub fn queued_frame_bytes(&self, session: SessionId) -> usize {
        let state = self.sessions.get(session);
        let lanes = state.into_iter().flat_map(|state| self.lanes.of(state));
        lanes.map(|lane| lane.outbound.queued_frames()).sum()
    }

    /// Sessions over shared memory that are begun from now on lend their server this arena ([`FramePool::shared`]): windows
    /// in its frames are filled and read without the stream. Plain sessions only: what TLS protects goes through TLS.
    pub fn lend(&mut self, arena: FramePool) {
        self.shm_direct.lend(arena);
    }

    /// The arena that the next session over shared memory will lend. None if there never was one, or the last one was still
    /// in use when its session ended.
    pub fn arena(&self) -> Option<&FramePool> {
        self.shm_direct.arena()
    }

    /// What the cache of registered memory has done for sessions over RDMA; nothing before memory outside the pool was
    /// first moved.
    pub fn registrations(&self) -> Option<(registration::Mode, registration::Counters)> {
        self.lanes.rdma()?.registrations()
    }

    /// Heap memory of what waits to be sent.
    pub fn queued_heap_bytes(&self) -> usize {
        self.lanes.queued_heap()
    }

    /// Whether so much waits to be sent to all clients that answers which need memory of their own must wait.
    pub fn is_full(&self) -> bool {
        self.lanes.is_full()
    }

    /// Whether anything can be put to a session's peer yet.
    pub fn can_put(&self, session: SessionId) -> bool {
        let has_bulk = self.sessions.get(session).is_some_and(|state| state.lanes.iter().skip(1).any(Option::is_some));
        has_bulk || self.sessions.rdma_connection(session).is_some()
    }

    /// The route to a session's peer with the fewest bytes queued.
    pub fn route(&self, session: SessionId) -> Route {
        let Some(session) = self.sessions.get(session) else { return Route(1) };
        let queued = |slot: &Option<LaneId>| {
            slot.and_then(|slot| self.lanes.get(slot)).map_or(usize::MAX, |lane| lane.outbound.queued())
        };
        Route((1..session.lanes.len()).min_by_key(|lane| queued(&session.lanes[*lane])).unwrap_or(1))
    }

    /// The route that all puts into one window can take: the same each time.
    pub fn route_to(&self, session: SessionId, window: WindowKey) -> Route {
        let bulk_lanes = self.sessions.get(session).map_or(1, |session| session.lanes.len().saturating_sub(1).max(1));
        Route(1 + slot_of(window) % bulk_lanes)
    }

    /// Bytes of messages that wait to be sent to a session's peer.
    pub fn control_queued(&self, session: SessionId) -> usize {
        let lane = self.sessions.control_lane(session);
        lane.and_then(|slot| self.lanes.get(slot)).map_or(0, |lane| self.lanes.queued_on(lane))
    }

    /// Heap memory of messages that wait to be sent to a session's peer: payloads of puts in frames do not count, whichever way they
    /// take.
    pub(crate) fn control_queued_heap(&self, session: SessionId) -> usize {
        let lane = self.sessions.control_lane(session);
        lane.and_then(|slot| self.lanes.get(slot)).map_or(0, |lane| self.lanes.heap_on(lane))
    }

    /// Takes a completion of this fabric's class.
    pub fn handle<H: Handler>(&mut self, reactor: &mut Reactor, completion: Completion, handler: &mut H) {
        if completion.token.tag() >= RDMA {
            self.rdma_completion(reactor, &completion, handler);
            return self.deliver(reactor, handler);
        }
        let slot = LaneId::of_token(completion.token);
        self.clock = reactor.turned_at();
        match completion.outcome {
            Outcome::Received { into, result } => self.received(reactor, slot, into, result, handler),
            Outcome::Sent { gather, result } => self.sent(reactor, slot, gather, result, handler),
            Outcome::Connected(result) => self.connected(reactor, slot, result),
            Outcome::Accepted(result) => self.accepted(reactor, slot.index, result),
            Outcome::TimedOut(_) if completion.token.tag() == ACCEPT => self.accept_again(reactor, slot.index),
            Outcome::TimedOut(_) if completion.token.tag() == AGAIN => self.turns_again = false,
            Outcome::TimedOut(_) => {
                self.ticking = false;
                self.tick(reactor);
            }
            _ => {}
        }
        self.deliver(reactor, handler);
    }

    /// The loop was woken by another one: takes the lanes that it passed on, and looks at sessions that wait.
    pub fn woken<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        self.take_handed_lanes(reactor);
        self.take_handed_connections(reactor, handler);
        self.end_superseded(reactor);
        self.retry_fenced(reactor);
        self.deliver(reactor, handler);
    }

    #[inline]
    fn deliver<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        if self.sessions.has_events() {
            self.deliver_all(reactor, handler);
        }
    }

    fn deliver_all<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        while self.sessions.has_events() {
            let mut events = self.sessions.take_events();
            for event in events.drain(..) {
                match event {
                    Event::Up(session) => handler.up(self, reactor, session),
                    Event::Down(session, reason) => handler.down(self, reactor, session, reason),
                    Event::Failed(session, reason) => self.close(reactor, session, reason),
                    Event::Got(session, get) => handler.got(self, reactor, session, get),
                    Event::Drained(session) => {
                        self.end_transfers(reactor, session, handler);
                        handler.drained(self, reactor, session);
                        self.forget_if_done(session);
                    }
                }
            }
            self.sessions.keep_events(events);
        }
    }

    /// Sends what has gathered. To be called once after all completions of a reap were handled.
    pub fn flush<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let given_back = reactor.receive_buffers().given_back();
        self.deliver(reactor, handler);
        let class = self.options.class;
        let mut clocked = false;
        loop {
            while let Some(slot) = self.lanes.take_dirty() {
                if !std::mem::replace(&mut clocked, true) {
                    self.clock = reactor.now();
                }
                if self.send_now(reactor, slot, handler) {
                    continue;
                }
                if !self.lanes.send_by_device(slot) {
                    self.lanes.start_send(reactor, slot, self.clock);
                }
            }
            self.flush_rdma(reactor, handler);
            self.deliver(reactor, handler);
            if !self.lanes.has_dirty() && self.lanes.rdma().is_none_or(RdmaLanes::is_flushed) {
                break;
            }
        }
        if !self.ticking
            && (self.lanes.handshakes() > 0
                || self.sessions.is_expecting()
                || !self.farewells.is_empty()
                || self.lanes.watches_intake())
        {
            self.ticking = true;
            let at = reactor.now() + TICK;
            reactor.submit(Op::Timer { at }, Token::new(class, TIMER, 0, 0));
        }
        let starved = self.lanes.has_starved() && reactor.receive_buffers().given_back() != given_back;
        if (starved || handler.can_go_on(reactor)) && !std::mem::replace(&mut self.turns_again, true) {
            // What ended here has no completion to wake the loop by.
            reactor.submit(Op::Timer { at: reactor.now() }, Token::new(class, AGAIN, 0, 0));
        }
    }

    /// Takes a completion of the transport's.
    fn rdma_completion<H: Handler>(&mut self, reactor: &mut Reactor, completion: &Completion, handler: &mut H) {
        let Some(rdma) = self.lanes.rdma_mut() else { return };
        match completion.token.tag() {
            RDMA_FAILED => {
                for (slot, reason) in rdma.take_failed() {
                    self.lane_failed(reactor, slot, reason);
                }
            }
            RDMA_IDLE => {
                let is_clients = |session| self.sessions.open(session).is_some_and(|state| state.role == Role::Server);
                self.lanes.probe_clients(is_clients);
                self.watch_clients(reactor);
            }
            _ => rdma.transport.handle(reactor, completion),
        }
        self.take_rdma_events(reactor, handler);
    }

    /// Has the clients looked at once in a keep-alive.
    fn watch_clients(&mut self, reactor: &mut Reactor) {
        if let Some(rdma) = self.lanes.rdma_mut().filter(|_| self.admission.home().is_some()) {
            rdma.watch_clients(reactor, self.options.keep_alive);
        }
    }

    /// Handles the events of the RDMA connections.
    fn take_rdma_events<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        loop {
            self.take_gots(reactor);
            let Some((event, slot)) = self.lanes.rdma_mut().and_then(RdmaLanes::next_event) else { return };
            match (event, slot) {
                (RdmaEvent::Asked { connection, peer }, _) => self.rdma_asked(reactor, connection, peer),
                (RdmaEvent::Connected(connection), Some(slot)) => self.rdma_connected(connection, slot),
                (RdmaEvent::Message(connection, received), slot) => {
                    if let Some((slot, lane)) = slot.and_then(|slot| Some((slot, self.lanes.get_mut(slot)?))) {
                        lane.inbound.push_message(received);
                        self.take_backlog(reactor, slot, handler);
                    } else if let Some(rdma) = self.lanes.rdma_mut() {
                        rdma.transport.done_with(connection, received);
                    }
                }
                (RdmaEvent::Sent(connection, went), Some(slot)) => {
                    self.rdma_sent(reactor, slot, connection, went, handler);
                }
                (RdmaEvent::Down(_, down), Some(slot)) => {
                    if let Some(lane) = self.lanes.get_mut(slot) {
                        lane.connection = None;
                    }
                    self.lane_failed(reactor, slot, down.into());
                }
                (RdmaEvent::Connected(_) | RdmaEvent::Sent(..) | RdmaEvent::Down(..), None) => {}
            }
        }
    }

    /// Posts queued messages of the RDMA connections, and handles the events that follow.
    fn flush_rdma<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let Some(rdma) = self.lanes.rdma_mut() else { return };
        rdma.transport.flush(reactor);
        self.take_rdma_events(reactor, handler);
    }

    /// Looks at everything that waits.
    fn tick(&mut self, reactor: &mut Reactor) {
        self.end_slow_handshakes(reactor);
        self.retry_fenced(reactor);
        self.end_superseded(reactor);
        self.end_stopped(reactor);
        self.end_farewells(reactor);
        for (slot, due) in self.sessions.silent(&self.lanes, reactor.now()) {
            if due == KeepAliveStep::Probe {
                self.send(slot, Header::new(Kind::Ping));
            } else {
                self.close(reactor, slot, CloseReason::Silent);
            }
        }
    }
}
