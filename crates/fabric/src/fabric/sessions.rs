//! The sessions of a fabric: how far each has come, what their owner is to hear of them, and how long they were made to wait.
//!
//! The counts here are of the table. Whoever changes in a session what its peer owes calls [`Sessions::watch`], or a peer that owes an answer is
//! not watched.

use std::net::SocketAddr;
use std::time::Duration;

use byway_reactor::{Address, Instant, Reactor};

use super::EndedGet;
use super::lane::LaneId;
use super::lanes::Lanes;
use super::lending::is_disconnect;
use super::operations::Remote;
use super::shm_direct::{PeerPlace, Shm};
use super::wire::{Rdma, Wire};
use crate::capabilities::Capabilities;
use crate::feedback::{Delays, Feedback, Meter, Stall};
use crate::limits::{SESSION_HEAP_BYTES_MAX, SESSION_HEAP_BYTES_MIN};
use crate::rdma::transport::{ConnectionId, Went};
use crate::registry::Registry;
use crate::session::{Agreed, CloseReason, Identity, Intake, KeepAliveStep, Liveness, Terms};
use crate::slots::{SessionId, SessionKind, Slots};
use crate::tls::{PeerIdentity, TlsClient};

/// Which end of a session this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) role: Role,
    pub(super) identity: Identity,
    pub(super) capabilities: Capabilities,
    pub(super) terms: Terms,
    pub(super) agreed: Agreed,
    /// What a client shows and asks for on every lane.
    pub(super) tls: Option<TlsClient>,
    /// What the peer has shown by TLS, on every lane.
    pub(super) tls_peer: PeerIdentity,
    pub(super) remote: Option<Address>,
    pub(super) peer: Option<SocketAddr>,
    /// By number; 0 is the control lane.
    pub(super) lanes: Vec<Option<LaneId>>,
    pub(super) intake: Intake,
    pub(super) wire: Wire,
    /// It has ended.
    pub(super) down: bool,
    /// We have said goodbye: the peer relies on it that we copy nothing any more.
    pub(super) leaving: bool,
    /// The peer has ended the session: it copies nothing any more.
    pub(super) peer_disconnected: bool,
    lanes_left: usize,
    lanes_up: usize,
    up: bool,
    drained: bool,
    released: bool,
    liveness: Liveness,
    /// Gets that have not ended.
    gets: usize,
    /// What the owner says of the peer.
    expects_reply: bool,
    meter: Meter,
}

impl Session {
    /// A session that is not up, with places for so many lanes.
    pub(super) fn new(
        role: Role,
        identity: Identity,
        capabilities: Capabilities,
        terms: Terms,
        agreed: Agreed,
        lanes: usize,
        liveness: Liveness,
    ) -> Self {
        Self {
            role,
            identity,
            capabilities,
            terms,
            agreed,
            tls: None,
            tls_peer: PeerIdentity::Plain,
            remote: None,
            peer: None,
            lanes: vec![None; lanes],
            intake: Intake::default(),
            wire: Wire::of(&capabilities),
            down: false,
            leaving: false,
            peer_disconnected: false,
            lanes_left: 0,
            lanes_up: 0,
            up: false,
            drained: false,
            released: false,
            liveness,
            gets: 0,
            expects_reply: false,
            meter: Meter::default(),
        }
    }

    /// Whether it can be used, or could be until it ended.
    pub(super) fn was_up(&self) -> bool {
        self.up
    }

    /// Whether it can be used.
    pub(super) fn is_up(&self) -> bool {
        self.up && !self.down
    }

    /// The control lane.
    #[inline]
    pub(super) fn control_lane(&self) -> Option<LaneId> {
        self.lanes.first().copied().flatten()
    }

    /// A lane is the session's from now on.
    pub(super) fn add_lane(&mut self, number: u16, lane: LaneId) {
        self.lanes[usize::from(number)] = Some(lane);
        self.lanes_left += 1;
    }

    /// A lane of a client is up. Whether all are.
    pub(super) fn note_lane_up(&mut self) -> bool {
        self.lanes_up += 1;
        self.lanes_up == self.lanes.len()
    }

    /// The peer has sent something.
    #[inline]
    pub(super) fn heard(&mut self, now: Instant) {
        self.liveness.heard(now);
    }

    /// So many bytes have come.
    #[inline]
    pub(super) fn received(&mut self, bytes: usize, now: Instant) {
        self.meter.received(bytes, now);
    }

    /// So many bytes have gone.
    #[inline]
    pub(super) fn sent(&mut self, bytes: usize, now: Instant) {
        self.meter.sent(bytes, now);
    }

    /// What was measured until now.
    pub(super) fn measured(&self, now: Instant) -> Feedback {
        self.meter.read(now)
    }

    /// Whether gets have not ended.
    pub(super) fn has_gets(&self) -> bool {
        self.gets > 0
    }

    /// Whether nothing more is received from a server's client until it has taken answers: they lie on our heap.
    pub(super) fn is_held(&self, lanes: &Lanes) -> bool {
        // A client never stops listening: both ends could else wait for each other. It ends sessions that ask too much.
        if !lanes.watches_intake() || self.role != Role::Server {
            return false;
        }
        let heap = lanes.heap_of(self);
        heap > SESSION_HEAP_BYTES_MAX || (lanes.is_full() && heap > SESSION_HEAP_BYTES_MIN)
    }

    /// Whether we do not listen to the peer at the moment.
    fn is_unheard(&self, lanes: &Lanes) -> bool {
        let is_paused = |lane: &LaneId| lanes.get(*lane).is_some_and(|lane| lane.inbound.is_paused());
        self.lanes.iter().flatten().any(is_paused) && self.is_held(lanes)
    }
}

/// What the owner of a session is to hear.
pub(super) enum Event {
    Up(SessionId),
    Down(SessionId, CloseReason),
    Drained(SessionId),
    Got(SessionId, EndedGet),
    /// A session cannot go on.
    Failed(SessionId, CloseReason),
}

/// Events for which a fabric keeps room.
const EVENTS_KEPT: usize = 256;

/// See the module.
#[derive(Default)]
pub(super) struct Sessions {
    table: Slots<Session, SessionKind>,
    /// Those that expect something of their peers.
    expecting: usize,
    events: Vec<Event>,
    /// Empty: room for the next events, while those before are delivered.
    delivered: Vec<Event>,
    /// What all sessions were made to wait.
    delays: Delays,
}

impl Sessions {
    /// Those that have not been released.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn insert(&mut self, session: Session) -> SessionId {
        self.table.insert(session)
    }

    #[inline]
    pub(super) fn get(&self, session: SessionId) -> Option<&Session> {
        self.table.get(session)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, session: SessionId) -> Option<&mut Session> {
        self.table.get_mut(session)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        self.table.iter()
    }

    /// One that has not ended.
    #[inline]
    pub(super) fn open(&self, session: SessionId) -> Option<&Session> {
        self.table.get(session).filter(|state| !state.down)
    }

    /// One that has not ended.
    #[inline]
    pub(super) fn open_mut(&mut self, session: SessionId) -> Option<&mut Session> {
        self.table.get_mut(session).filter(|state| !state.down)
    }

    /// The control lane of a session.
    #[inline]
    pub(super) fn control_lane(&self, session: SessionId) -> Option<LaneId> {
        self.table.get(session)?.control_lane()
    }

    /// What was lent in a session over shared memory.
    #[inline]
    pub(super) fn shm(&self, session: SessionId) -> Option<&Shm> {
        self.table.get(session)?.wire.shm()
    }

    /// What was lent in a session over shared memory.
    pub(super) fn shm_mut(&mut self, session: SessionId) -> Option<&mut Shm> {
        self.table.get_mut(session)?.wire.shm_mut()
    }

    /// What devices reach in a session over RDMA.
    pub(super) fn rdma_mut(&mut self, session: SessionId) -> Option<&mut Rdma> {
        self.table.get_mut(session)?.wire.rdma_mut()
    }

    /// The connection of a session over RDMA that has not ended.
    #[inline]
    pub(super) fn rdma_connection(&self, session: SessionId) -> Option<ConnectionId> {
        self.open(session)?.wire.rdma()?.connection
    }

    /// The place of a window of the peer, over shared memory, if we can reach it.
    #[inline]
    pub(super) fn place_of(&self, session: SessionId, at: Remote, len: usize, right: u8) -> Option<PeerPlace> {
        self.open(session).filter(|state| !state.leaving)?.wire.shm()?.find(at, len, right)
    }

    /// Whether nothing more is received in a session: see [`Session::is_held`].
    #[inline]
    pub(super) fn is_held(&self, session: SessionId, lanes: &Lanes) -> bool {
        lanes.watches_intake() && self.table.get(session).is_some_and(|state| state.is_held(lanes))
    }

    /// The session of a client that says that it is this one.
    pub(super) fn of_client(&self, identity: &Identity) -> Option<(SessionId, &Session)> {
        let is_it = |state: &Session| state.role == Role::Server && !state.down && state.identity == *identity;
        self.table.iter().find(|(_, state)| is_it(state))
    }

    /// Sessions whose client has begun a newer one.
    pub(super) fn superseded(&self, registry: &Registry) -> Vec<SessionId> {
        let is_stale =
            |state: &Session| state.role == Role::Server && !state.down && registry.superseded(&state.identity);
        self.table.iter().filter(|(_, state)| is_stale(state)).map(|(session, _)| session).collect()
    }

    /// Sessions of peers that take nothing, while memory is short because of them, or of a server's clients at all: those that have
    /// less than it takes to be held back are too many then.
    pub(super) fn stopped(&mut self, lanes: &Lanes, now: Instant) -> Vec<SessionId> {
        if !lanes.watches_intake() {
            return Vec::new();
        }
        let has_stopped = |(session, state): (SessionId, &mut Session)| {
            let heap = lanes.heap_of(state);
            let is_one_of_many = state.role == Role::Server && heap > 0 && lanes.is_full();
            let short = heap > SESSION_HEAP_BYTES_MAX || is_one_of_many;
            state.intake.has_stopped(short, now).then_some(session)
        };
        self.table.iter_mut().filter(|(_, state)| state.is_up()).filter_map(has_stopped).collect()
    }

    /// Sessions whose peers have been silent for too long while something is expected of them, and what is to be done about it.
    pub(super) fn silent(&mut self, lanes: &Lanes, now: Instant) -> Vec<(SessionId, KeepAliveStep)> {
        if self.expecting == 0 {
            return Vec::new();
        }
        let mut silent = Vec::new();
        for (session, state) in self.table.iter_mut().filter(|(_, state)| state.is_up()) {
            // A peer may say what it likes while we do not listen; whether it takes what we have said is watched instead.
            if state.is_unheard(lanes) {
                state.liveness.heard(now);
            }
            match state.liveness.check(now) {
                KeepAliveStep::Wait => {}
                due => silent.push((session, due)),
            }
        }
        silent
    }

    /// Whether something is expected of a peer.
    #[inline]
    pub(super) fn is_expecting(&self) -> bool {
        self.expecting > 0
    }

    /// Says whether the owner expects a reply.
    pub(super) fn set_expects_reply(&mut self, reactor: &Reactor, session: SessionId, expects_reply: bool) {
        if let Some(state) = self.table.get_mut(session) {
            state.expects_reply = expects_reply;
            self.watch(reactor, session);
        }
    }

    /// A get has begun.
    pub(super) fn begin_get(&mut self, reactor: &Reactor, session: SessionId) {
        if let Some(state) = self.table.get_mut(session) {
            state.gets += 1;
            self.watch(reactor, session);
        }
    }

    /// A get has ended.
    pub(super) fn end_get(&mut self, reactor: &Reactor, session: SessionId) {
        if let Some(state) = self.table.get_mut(session) {
            state.gets -= 1;
            self.watch(reactor, session);
        }
    }

    /// Watches the peer while a reply is expected.
    pub(super) fn watch(&mut self, reactor: &Reactor, session: SessionId) {
        let Some(state) = self.table.get_mut(session).filter(|state| !state.down) else { return };
        let is_awaited = state.wire.shm().is_some_and(|shm| shm.loans.is_awaited());
        let expects_reply = state.expects_reply || state.gets > 0 || is_awaited;
        if state.liveness.expects_reply() != expects_reply {
            state.liveness.set_expects_reply(expects_reply, reactor.now());
            if expects_reply {
                self.expecting += 1;
            } else {
                self.expecting -= 1;
            }
        }
    }

    /// A session that has not ended can be used from now on.
    pub(super) fn set_up(&mut self, session: SessionId) {
        if let Some(state) = self.open_mut(session) {
            state.up = true;
            self.events.push(Event::Up(session));
        }
    }

    /// Ends a session, and gives its lanes, which are to be closed. `None` if it has ended before.
    pub(super) fn end(&mut self, reactor: &Reactor, session: SessionId, reason: CloseReason) -> Option<Vec<LaneId>> {
        let state = self.table.get_mut(session).filter(|state| !state.down)?;
        state.down = true;
        state.peer_disconnected = is_disconnect(reason);
        if state.liveness.expects_reply() {
            state.liveness.set_expects_reply(false, reactor.now());
            self.expecting -= 1;
        }
        tracing::debug!(peer = ?state.peer, %reason, "session ended");
        let lanes: Vec<LaneId> = state.lanes.iter().flatten().copied().collect();
        self.events.push(Event::Down(session, reason));
        if lanes.is_empty() {
            self.note_drained(session);
        }
        Some(lanes)
    }

    /// A lane of a session is gone.
    pub(super) fn remove_lane(&mut self, session: SessionId, lane: LaneId) {
        let Some(state) = self.table.get_mut(session) else { return };
        state.lanes.iter_mut().filter(|other| **other == Some(lane)).for_each(|other| *other = None);
        state.lanes_left -= 1;
        if state.down && state.lanes_left == 0 {
            self.note_drained(session);
        }
    }

    fn note_drained(&mut self, session: SessionId) {
        if let Some(state) = self.table.get_mut(session)
            && !std::mem::replace(&mut state.drained, true)
        {
            self.events.push(Event::Drained(session));
        }
    }

    /// Sessions whose peers were lent memory of a program.
    pub(super) fn lenders(&self) -> Vec<SessionId> {
        let has_lent = |state: &Session| state.wire.shm().is_some_and(|shm| !shm.loans.is_empty());
        self.table.iter().filter(|(_, state)| has_lent(state)).map(|(session, _)| session).collect()
    }

    /// How often memory is lent to peers: each piece, to each of them.
    pub(super) fn loan_count(&self) -> usize {
        self.table.iter().filter_map(|(_, state)| state.wire.shm()).map(|shm| shm.loans.len()).sum()
    }

    /// All that the owner did for an ended session has ended too.
    pub(super) fn release(&mut self, session: SessionId) {
        if let Some(state) = self.table.get_mut(session) {
            debug_assert!(state.down, "only an ended session is released");
            state.released = true;
        }
    }

    /// Takes a session out whose lanes are gone, and that its owner has released.
    pub(super) fn remove_if_done(&mut self, session: SessionId) -> Option<Session> {
        self.table.get(session).filter(|state| state.released && state.drained)?;
        self.table.remove(session)
    }

    /// Tells the owner, when events are delivered next.
    pub(super) fn tell(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Whether there is something to tell.
    #[inline]
    pub(super) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Takes what is to be told. The list is given back to [`Self::keep_events`].
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::replace(&mut self.events, std::mem::take(&mut self.delivered))
    }

    /// Keeps an empty list for later events.
    pub(super) fn keep_events(&mut self, mut events: Vec<Event>) {
        events.shrink_to(EVENTS_KEPT);
        self.delivered = events;
    }

    /// The delays and stalls of all sessions, also of those that have ended.
    pub(super) fn delays(&self) -> Delays {
        self.delays
    }

    /// A transfer has begun that could not begin when it was asked for.
    pub(super) fn note_start(&mut self, session: SessionId, waited: Duration) {
        if let Some(state) = self.table.get_mut(session) {
            self.delays.note_start(&mut state.meter, waited);
        }
    }

    /// Something has waited that long.
    pub(super) fn note_stall(&mut self, session: SessionId, stall: Stall, waited: Duration) {
        if let Some(state) = self.table.get_mut(session) {
            self.delays.note_stall(&mut state.meter, stall, waited);
        }
    }

    /// The peer, or the kernel for it, has taken what was sent.
    #[inline]
    pub(super) fn note_sent(&mut self, session: SessionId, went: Went, now: Instant) {
        if let Some(state) = self.table.get_mut(session) {
            state.meter.sent(went.bytes, now);
            self.delays.note_sent(&mut state.meter, went.waited, went.took);
        }
    }
}

impl Drop for Sessions {
    /// They end with the fabric, without a word of their peers: what those can write is taken from them.
    fn drop(&mut self) {
        for (_, state) in self.table.iter().filter(|(_, state)| !state.peer_disconnected) {
            state.wire.shm().into_iter().for_each(|shm| shm.loans.take_back());
        }
    }
}
