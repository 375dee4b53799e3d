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
use byway_reactor::{Gather, Op, Reactor, Token};
use zerocopy::IntoBytes;

use super::grants::PeerAddress;
use super::lane::{Lane, LaneId};
use super::{RDMA, RDMA_FAILED, RDMA_IDLE};
use crate::rdma::WindowAddress;
use crate::rdma::transport::{ConnectionId, Down, Event as RdmaEvent, Transport};
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
        for (header, payload) in lane.outbound.take_outbox() {
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
        if lane.connection.is_some() && lane.outbound.needs_spare() {
            lane.outbound.set_spare(self.transport.gather());
        }
    }

    /// Ends the connection of a lane that is closed: nothing that is posted touches memory any more.
    pub(super) fn close(&mut self, lane: &mut Lane) {
        for received in lane.inbound.take_messages() {
            self.transport.discard(received);
        }
        if let Some(connection) = lane.connection.take() {
            self.lanes.remove(&connection);
            self.transport.close(connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::{Address, IoChoice, Wait};

    use super::*;
    use crate::fabric::{Fabric, Options};
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
