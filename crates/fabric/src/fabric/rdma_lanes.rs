//! Sessions over RDMA: one lane, whose connection is a queue pair.
//!
//! `Hello`, `Welcome` and all later messages are those of every lane, but here each is one message of the
//! [transport](crate::rdma::transport), which keeps their order. A client exposes each of its windows to its server's device
//! and locates it by a grant. The server writes and reads there, and announces a put by a message with
//! [`FLAG_PLACED`](crate::wire::FLAG_PLACED), which arrives after the bytes. A server exposes nothing.
//!
//! Payloads have no checksum of byway's here: each packet has one on the wire, and the peer may change placed bytes until
//! its window is closed. RDMA sessions have no TLS.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Completion, Gather, Op, Reactor, Token};
use zerocopy::IntoBytes;

use super::grants::PeerAddress;
use super::lane::{Lane, LaneId};
use super::sessions::Role;
use super::{Fabric, Handler, RDMA, RDMA_FAILED, RDMA_IDLE};
use crate::rdma::WindowAddress;
use crate::rdma::transport::{ConnectionId, Down, Event as RdmaEvent, Transport, Went};
use crate::registration::{Counters, Limits, Mode};
use crate::session::CloseReason;
use crate::wire::Header;

/// The RDMA connections of a fabric, and the lane of each.
pub(super) struct RdmaLanes {
    pub(super) transport: Transport,
    /// The class of its tokens.
    class: u8,
    lanes: HashMap<ConnectionId, LaneId>,
    /// A timer runs at whose end the silent peers of a server are probed.
    is_watching: bool,
    /// Lanes that could not be connected. Their sessions end by a timer, so that a caller hears of it as of other failures: later.
    failed: Vec<(LaneId, CloseReason)>,
}

impl RdmaLanes {
    /// None, for tokens of `class`.
    pub(super) fn new(class: u8, limits: Limits) -> Self {
        let transport = Transport::new(Token::new(class, RDMA, 0, 0), limits);
        Self { transport, class, lanes: HashMap::new(), is_watching: false, failed: Vec::new() }
    }

    /// See [`Transport::registrations`].
    pub(super) fn registrations(&self) -> Option<(Mode, Counters)> {
        self.transport.registrations()
    }

    /// Whether nothing was queued since the last flush; handling its results may have queued more.
    pub(super) fn is_flushed(&self) -> bool {
        self.transport.is_flushed()
    }

    /// Connects a client's lane.
    pub(super) fn connect(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        to: SocketAddr,
    ) -> Result<ConnectionId, CloseReason> {
        let connection = self.transport.connect(reactor, to).map_err(Down::Setup)?;
        self.lanes.insert(connection, slot);
        Ok(connection)
    }

    /// A lane could not be connected: see [`Self::take_failed`].
    pub(super) fn fail_later(&mut self, reactor: &mut Reactor, slot: LaneId, reason: CloseReason) {
        self.failed.push((slot, reason));
        reactor.submit(Op::Timer { at: reactor.now() }, Token::new(self.class, RDMA_FAILED, 0, 0));
    }

    /// Takes the lanes that could not be connected, when the timer has ended.
    pub(super) fn take_failed(&mut self) -> Vec<(LaneId, CloseReason)> {
        std::mem::take(&mut self.failed)
    }

    /// Accepts a connect request as a lane.
    pub(super) fn accept(&mut self, reactor: &mut Reactor, connection: ConnectionId, slot: LaneId) {
        self.lanes.insert(connection, slot);
        self.transport.accept(reactor, connection);
    }

    /// The next event, and the lane of its connection.
    pub(super) fn next_event(&mut self) -> Option<(RdmaEvent, Option<LaneId>)> {
        let event = self.transport.next_event()?;
        let slot = match &event {
            RdmaEvent::Asked { .. } => None,
            RdmaEvent::Connected(connection) | RdmaEvent::Message(connection, _) | RdmaEvent::Sent(connection, _) => {
                self.lanes.get(connection).copied()
            }
            RdmaEvent::Down(connection, _) => self.lanes.remove(connection),
        };
        Some((event, slot))
    }

    /// Has the clients looked at once in a keep-alive, as long as there are any.
    pub(super) fn watch_clients(&mut self, reactor: &mut Reactor, keep_alive: Duration) {
        if self.is_watching || self.lanes.is_empty() || seeded::is(Bug::NoKeepAlive) {
            return;
        }
        self.is_watching = true;
        let at = reactor.now() + keep_alive;
        reactor.submit(Op::Timer { at }, Token::new(self.class, RDMA_IDLE, 0, 0));
    }

    /// Probes the clients that have been silent since the last time, when the timer has ended: one that is gone without a word, its
    /// power or the link to it, would keep its session's frames for ever. As over TCP it is known after twice the keep-alive, and
    /// the retries of the device.
    pub(super) fn probe_clients(&mut self, is_client: impl Fn(LaneId) -> bool) {
        self.is_watching = false;
        for (connection, _) in self.lanes.iter().filter(|(_, slot)| is_client(**slot)) {
            self.transport.probe(*connection);
        }
    }

    /// Hands over what a lane wants to send.
    pub(super) fn send(&mut self, lane: &mut Lane) {
        let Some(connection) = lane.connection else { return };
        for (header, payload) in lane.take_outbox() {
            let mut bytes = [0; size_of::<Header>()];
            bytes.copy_from_slice(header.as_bytes());
            self.transport.send(connection, bytes, payload);
        }
        if lane.close_when_sent.is_some() {
            self.transport.finish(connection);
        }
    }

    /// Puts the payload of `len` bytes that `push` appends to its place.
    pub(super) fn put(
        &mut self,
        connection: ConnectionId,
        to: PeerAddress,
        len: usize,
        push: impl FnOnce(&mut Gather),
    ) {
        let mut gather = self.transport.gather();
        push(&mut gather);
        debug_assert!(gather.len() == len, "as many bytes as announced");
        self.transport.put(connection, WindowAddress { address: to.address, rkey: to.key }, gather);
    }

    /// Gives a lane a gather for its next message.
    pub(super) fn give_spare(&mut self, lane: &mut Lane) {
        if lane.connection.is_some() && lane.spare.is_none() {
            lane.spare = Some(self.transport.gather());
        }
    }

    /// Ends the connection of a lane that is closed: nothing that is posted touches memory any more.
    pub(super) fn close(&mut self, lane: &mut Lane) {
        for received in std::mem::take(&mut lane.backlog) {
            self.transport.discard(received);
        }
        if let Some(connection) = lane.connection.take() {
            self.lanes.remove(&connection);
            self.transport.close(connection);
        }
    }
}

impl Fabric {
    /// Takes a completion of the transport's.
    pub(super) fn rdma_completion<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        completion: &Completion,
        handler: &mut H,
    ) {
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
    pub(super) fn watch_clients(&mut self, reactor: &mut Reactor) {
        if let Some(rdma) = self.lanes.rdma_mut().filter(|_| self.admission.home().is_some()) {
            rdma.watch_clients(reactor, self.options.keep_alive);
        }
    }

    /// Handles the events of the RDMA connections.
    pub(super) fn take_rdma_events<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        loop {
            self.take_gots(reactor);
            let Some((event, slot)) = self.lanes.rdma_mut().and_then(RdmaLanes::next_event) else { return };
            match (event, slot) {
                (RdmaEvent::Asked { connection, peer }, _) => self.rdma_asked(reactor, connection, peer),
                (RdmaEvent::Connected(connection), Some(slot)) => self.rdma_connected(connection, slot),
                (RdmaEvent::Message(connection, received), slot) => {
                    if let Some((slot, lane)) = slot.and_then(|slot| Some((slot, self.lanes.get_mut(slot)?))) {
                        lane.backlog.push_back(received);
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

    /// The peer has some of what was sent.
    fn rdma_sent<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        connection: ConnectionId,
        went: Option<Went>,
        handler: &mut H,
    ) {
        let is_idle = self.lanes.rdma().is_none_or(|rdma| rdma.transport.is_idle(connection));
        let Some(lane) = self.lanes.get(slot) else { return };
        let (session, is_idle) = (lane.session, is_idle && lane.outbox.is_empty());
        if let (Some(session), Some(went)) = (session, went) {
            self.sessions.note_sent(session, went, reactor.now());
        }
        if let Some(state) = session.and_then(|session| self.sessions.get_mut(session)) {
            state.intake.took();
        }
        if let Some(reason) = lane.close_when_sent.filter(|_| is_idle) {
            return self.lane_failed(reactor, slot, reason);
        }
        self.lanes.count_heap(slot);
        if let Some(session) = session {
            self.resume(reactor, session, handler);
        }
    }

    /// Posts queued messages of the RDMA connections, and handles the events that follow.
    pub(super) fn flush_rdma<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let Some(rdma) = self.lanes.rdma_mut() else { return };
        rdma.transport.flush(reactor);
        self.take_rdma_events(reactor, handler);
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::{Address, IoChoice, Wait};

    use super::*;
    use crate::fabric::Options;
    use crate::session::{ClientId, Identity};

    #[test]
    fn a_connect_that_fails_at_once_is_told_by_a_timer_that_is_none_of_the_transports() {
        let mut reactor = Reactor::open(IoChoice::Auto, 1 << 20).unwrap();
        let mut fabric = Fabric::new(Options::new(7));
        let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [2; 16] };
        // An address of documentation: no device has it.
        fabric.connect(&mut reactor, Address::Rdma("192.0.2.1:9".parse().unwrap()), identity);
        if fabric.lanes.rdma().is_none_or(|rdma| rdma.failed.is_empty()) {
            let reason = "there is a connection manager, which looks for the address";
            return byway_skip::skip_this(byway_skip::SkipReason::Machine(reason));
        }
        let mut completions = Vec::new();
        while completions.is_empty() {
            reactor.reap(&mut completions, Wait::Block).unwrap();
        }
        // The timer at those ends the pause after the removal of a device.
        let of_transport = [RDMA, RDMA + 1];
        assert!(completions.iter().all(|completion| !of_transport.contains(&completion.token.tag())));
        assert_eq!(completions[0].token.tag(), RDMA_FAILED);
    }
}
