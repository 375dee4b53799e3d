//! The connections of a fabric: which of them have something to send, which wait for a buffer, and how much memory waits on them.
//!
//! A lane is added, gets up, is closed and goes away by the methods here, so that the counts and lists agree with the table. Its handshake
//! sets its phase.

use byway_reactor::{Gather, Instant, Op, Reactor};

use super::lane::{Lane, LaneId, Phase};
use super::rdma_lanes::RdmaLanes;
use super::sessions::Session;
use super::{CONNECT, RECV, SEND};
use crate::limits::{FENCE_TIME_MAX, HANDSHAKE_TIME_MAX, LOOP_HEAP_BYTES_MAX, SESSION_HEAP_BYTES_MAX};
use crate::registration;
use crate::slots::{SessionId, Slots};
use crate::wire::Header;

/// See the module.
pub(super) struct Lanes {
    /// The class of their tokens.
    class: u8,
    table: Slots<Lane>,
    /// Those that may have something to send and no send in flight.
    dirty: Vec<LaneId>,
    /// Control lanes that wait for a buffer that their message fits into, in order.
    starved: Vec<LaneId>,
    /// Buffers that had come back when they were last looked at.
    starved_fed_at: u64,
    /// Those that are neither up nor being closed.
    handshakes: usize,
    /// Heap memory of what waits to be sent, on all lanes.
    queued_heap: usize,
    /// How much memory stays registered with devices.
    registrations: registration::Limits,
    /// Those over RDMA, if there ever was one.
    rdma: Option<Box<RdmaLanes>>,
}

impl Lanes {
    /// None, for tokens of `class`.
    pub(super) fn new(class: u8, registrations: registration::Limits) -> Self {
        Self {
            class,
            table: Slots::default(),
            dirty: Vec::new(),
            starved: Vec::new(),
            starved_fed_at: 0,
            handshakes: 0,
            queued_heap: 0,
            registrations,
            rdma: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    #[inline]
    pub(super) fn get(&self, slot: LaneId) -> Option<&Lane> {
        self.table.get(slot)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: LaneId) -> Option<&mut Lane> {
        self.table.get_mut(slot)
    }

    /// Adds a lane, whose handshake begins.
    pub(super) fn insert(&mut self, lane: Lane) -> LaneId {
        self.handshakes += 1;
        self.table.insert(lane)
    }

    /// Lanes in their handshake.
    #[inline]
    pub(super) fn handshakes(&self) -> usize {
        self.handshakes
    }

    /// The handshake of a lane is over: it has this number in its session. Gives whether it had its session before; `None` if it
    /// is gone.
    pub(super) fn set_up(&mut self, slot: LaneId, session: SessionId, number: u16) -> Option<bool> {
        let lane = self.table.get_mut(slot)?;
        self.handshakes -= 1;
        Some(lane.set_up(session, number))
    }

    /// Takes a lane out, in its handshake, on which nothing is in flight.
    pub(super) fn take_out(&mut self, slot: LaneId) -> Option<Lane> {
        let lane = self.table.remove(slot)?;
        self.handshakes -= 1;
        Some(lane)
    }

    /// Starts to close a lane. False if that was done before.
    pub(super) fn close(&mut self, reactor: &mut Reactor, slot: LaneId) -> bool {
        let Some(lane) = self.table.get_mut(slot).filter(|lane| lane.phase != Phase::Closing) else { return false };
        if lane.phase != Phase::Up {
            self.handshakes -= 1;
        }
        lane.phase = Phase::Closing;
        match lane.socket {
            Some(socket) => reactor.close(socket),
            None => reactor.cancel(slot.token(self.class, CONNECT)),
        }
        if let Some(rdma) = &mut self.rdma {
            rdma.close(lane);
        }
        true
    }

    /// Takes a closed lane out when nothing is in flight on it any more.
    pub(super) fn remove_if_done(&mut self, slot: LaneId) -> Option<Lane> {
        self.table.get(slot).filter(|lane| lane.phase == Phase::Closing && !lane.is_busy())?;
        let lane = self.table.remove(slot)?;
        self.queued_heap -= lane.outbound.counted_heap();
        Some(lane)
    }

    /// Lanes whose `Hello` no session has come of, and that are not being refused.
    pub(super) fn without_hello(&self) -> Vec<LaneId> {
        let waits = |(_, lane): &(LaneId, &Lane)| lane.phase == Phase::AwaitHello && lane.close_when_sent.is_none();
        self.table.iter().filter(waits).map(|(slot, _)| slot).collect()
    }

    /// Takes the `Hello` of each fenced lane, which may try again.
    pub(super) fn take_fenced(&mut self) -> Vec<(LaneId, Header)> {
        if self.handshakes == 0 {
            return Vec::new();
        }
        let fenced = self.table.iter_mut().filter(|(_, lane)| lane.phase == Phase::Fenced);
        let retry = |(slot, lane): (LaneId, &mut Lane)| {
            lane.phase = Phase::AwaitHello;
            Some((slot, lane.take_hello()?))
        };
        fenced.filter_map(retry).collect()
    }

    /// Lanes whose handshake has taken too long.
    pub(super) fn slow(&self, now: Instant) -> Vec<LaneId> {
        if self.handshakes == 0 {
            return Vec::new();
        }
        let is_slow = |(_, lane): &(LaneId, &Lane)| {
            let time_max = if lane.is_fenced() { FENCE_TIME_MAX } else { HANDSHAKE_TIME_MAX };
            !matches!(lane.phase, Phase::Up | Phase::Closing) && now - lane.opened_at() >= time_max
        };
        self.table.iter().filter(is_slow).map(|(slot, _)| slot).collect()
    }

    /// Appends a message to what a lane sends next.
    #[inline]
    pub(super) fn push(&mut self, slot: LaneId, header: Header, now: Instant, payload: impl FnOnce(&mut Gather)) {
        let Some(lane) = self.table.get_mut(slot) else { return };
        if let Some(rdma) = &mut self.rdma {
            rdma.give_spare(lane);
        }
        if lane.push(header, now, payload) {
            self.dirty.push(slot);
        }
    }

    /// Takes a lane that has something to send and no send in flight.
    #[inline]
    pub(super) fn take_dirty(&mut self) -> Option<LaneId> {
        while let Some(slot) = self.dirty.pop() {
            if self.table.get(slot).is_some_and(|lane| lane.outbound.is_dirty()) {
                return Some(slot);
            }
        }
        None
    }

    /// Whether a lane may have something to send.
    #[inline]
    pub(super) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Sends what has gathered on a lane: see [`Lane::start_send`].
    #[inline]
    pub(super) fn start_send(&mut self, reactor: &mut Reactor, slot: LaneId, now: Instant) {
        if let Some(lane) = self.table.get_mut(slot) {
            lane.start_send(reactor, slot.token(self.class, SEND), now);
        }
    }

    /// Hands what has gathered on a lane over to the transport of its device. False for a lane of a stream.
    #[inline]
    pub(super) fn send_by_device(&mut self, slot: LaneId) -> bool {
        let lane = self.table.get_mut(slot).filter(|lane| lane.connection.is_some());
        let (Some(lane), Some(rdma)) = (lane, &mut self.rdma) else { return false };
        rdma.send(lane);
        true
    }

    /// Begins a receive.
    #[inline]
    pub(super) fn receive(&mut self, reactor: &mut Reactor, slot: LaneId, op: Op) {
        let Some(lane) = self.table.get_mut(slot) else { return };
        lane.inbound.begin();
        reactor.submit(op, slot.token(self.class, RECV));
    }

    /// Bytes that wait on a lane for the peer, or the kernel for it, to take them.
    pub(super) fn queued_on(&self, lane: &Lane) -> usize {
        let in_transport = || Some(self.rdma.as_ref()?.transport.queued(lane.connection?));
        lane.outbound.queued() + in_transport().unwrap_or(0)
    }

    /// Heap memory of that.
    pub(super) fn heap_on(&self, lane: &Lane) -> usize {
        lane.outbound.queued_heap() + heap_in_transport(self.rdma.as_deref(), lane)
    }

    /// The lanes of a session.
    pub(super) fn of<'a>(&'a self, session: &'a Session) -> impl Iterator<Item = &'a Lane> {
        session.lanes.iter().flatten().filter_map(|slot| self.table.get(*slot))
    }

    /// Heap memory of what waits for a session's peer.
    pub(super) fn heap_of(&self, session: &Session) -> usize {
        self.of(session).map(|lane| self.heap_on(lane)).sum()
    }

    /// When the oldest of what waits on a lane was queued.
    pub(super) fn oldest_on(&self, lane: &Lane) -> Option<Instant> {
        let in_transport = || self.rdma.as_ref()?.transport.oldest(lane.connection?);
        lane.outbound.oldest().into_iter().chain(in_transport()).min()
    }

    /// Notes how much heap memory a lane's queue has.
    #[inline]
    pub(super) fn count_heap(&mut self, slot: LaneId) {
        let Some(lane) = self.table.get_mut(slot) else { return };
        let now = lane.outbound.queued_heap() + heap_in_transport(self.rdma.as_deref(), lane);
        self.queued_heap = self.queued_heap - lane.outbound.count_heap(now) + now;
    }

    /// Heap memory of what waits to be sent.
    pub(super) fn queued_heap(&self) -> usize {
        self.queued_heap
    }

    /// Whether what waits is so much that peers are watched for taking it.
    #[inline]
    pub(super) fn watches_intake(&self) -> bool {
        self.queued_heap > SESSION_HEAP_BYTES_MAX
    }

    /// Whether so much waits to be sent that answers which need memory of their own must wait.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.queued_heap > LOOP_HEAP_BYTES_MAX
    }

    /// A lane waits for a longer buffer, behind those that do already.
    pub(super) fn starve(&mut self, slot: LaneId) {
        if let Some(lane) = self.table.get_mut(slot)
            && lane.inbound.starve()
        {
            self.starved.push(slot);
        }
    }

    /// Whether lanes wait for longer buffers.
    #[inline]
    pub(super) fn has_starved(&self) -> bool {
        !self.starved.is_empty()
    }

    /// Takes the lanes that wait for longer buffers, in order, if buffers have come back since they were last taken; each is then
    /// to be [fed](Self::feed).
    pub(super) fn take_starved(&mut self, given_back: u64) -> Vec<LaneId> {
        if self.starved.is_empty() || std::mem::replace(&mut self.starved_fed_at, given_back) == given_back {
            return Vec::new();
        }
        std::mem::take(&mut self.starved)
    }

    /// A lane no longer waits for a longer buffer. Whether the messages that it has are to be looked at.
    pub(super) fn feed(&mut self, slot: LaneId) -> bool {
        let Some(lane) = self.table.get_mut(slot) else { return false };
        lane.inbound.note_fed();
        lane.phase == Phase::Up && lane.inbound.take_paused().is_some()
    }

    /// Connections over RDMA, if there ever was one.
    #[inline]
    pub(super) fn rdma(&self) -> Option<&RdmaLanes> {
        self.rdma.as_deref()
    }

    /// Connections over RDMA, if there ever was one.
    #[inline]
    pub(super) fn rdma_mut(&mut self) -> Option<&mut RdmaLanes> {
        self.rdma.as_deref_mut()
    }

    /// Connections over RDMA, of which there will be one.
    pub(super) fn begin_rdma(&mut self) -> &mut RdmaLanes {
        self.rdma.get_or_insert_with(|| Box::new(RdmaLanes::new(self.class, self.registrations)))
    }

    /// See [`RdmaLanes::probe_clients`].
    pub(super) fn probe_clients(&mut self, is_client: impl Fn(SessionId) -> bool) {
        let session_of = |slot: LaneId| self.table.get(slot)?.session;
        if let Some(rdma) = &mut self.rdma {
            rdma.probe_clients(|slot| session_of(slot).is_some_and(&is_client));
        }
    }

    /// As if so many lanes were in their handshakes.
    #[cfg(test)]
    pub(super) fn pretend_handshakes(&mut self, count: usize) {
        self.handshakes = count;
    }
}

/// Heap memory of what a lane has handed over to the transport of its device.
fn heap_in_transport(rdma: Option<&RdmaLanes>, lane: &Lane) -> usize {
    rdma.zip(lane.connection).map_or(0, |(rdma, connection)| rdma.transport.queued_heap(connection))
}
