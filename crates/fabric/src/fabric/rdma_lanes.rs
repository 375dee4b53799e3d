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

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Completion, Instant, Op, Reactor, Token};
use zerocopy::IntoBytes;

use super::lane::{Lane, LaneId, Phase};
use super::reach::Reach;
use super::{Fabric, Handler, LINK, LINK_FAILED, LINK_IDLE, Options, Role};
use crate::limits::PAYLOAD_BYTES_MAX;
use crate::rdma::RdmaError;
use crate::rdma::transport::{ConnectionId, Event as News, Received, Transport};
use crate::registration::{Counters, Limits, Mode};
use crate::registry::Place;
use crate::session::{self, CloseReason};
use crate::slots::SessionId;
use crate::tls::ServerTls;
use crate::wire::{FLAG_PLACED, HEADER_BYTES, Header, RefuseCode};

/// The connections over RDMA, and whose they are.
pub(super) struct Links {
    pub(super) transport: Transport,
    lanes: HashMap<ConnectionId, LaneId>,
    pub(super) reach: Reach,
    /// A timer runs at whose end the silent peers of a server are probed.
    is_watching: bool,
    /// Lanes that cannot be connected, which their owner is told as he is of others: by and by.
    failed: Vec<(LaneId, CloseReason)>,
}

impl Links {
    /// See [`Transport::registrations`].
    pub(super) fn registrations(&self) -> Option<(Mode, Counters)> {
        self.transport.registrations()
    }
}

impl Links {
    fn new(class: u8, limits: Limits) -> Self {
        let transport = Transport::new(Token::new(class, LINK, 0, 0), limits);
        Self { transport, lanes: HashMap::new(), reach: Reach::default(), is_watching: false, failed: Vec::new() }
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
        let Options { class, registrations, .. } = self.options;
        self.links.get_or_insert_with(|| Box::new(Links::new(class, registrations)))
    }

    pub(super) fn close_link_listeners(&mut self) {
        if let Some(links) = &mut self.links {
            links.transport.close_listeners();
        }
    }

    /// Connects the lane of a client's session.
    pub(super) fn connect_link(&mut self, reactor: &mut Reactor, slot: LaneId, to: SocketAddr) {
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
                let Some(lane) = self.lanes.get_mut(slot) else { return };
                (lane.link, lane.connecting) = (Some(link), false);
                let state = lane.session.and_then(|session| self.sessions.get_mut(session));
                if let Some(rdma) = state.and_then(|state| state.wire.rdma_mut()) {
                    rdma.connection = Some(link);
                }
            }
            Err(reason) => {
                if let Some(lane) = self.lanes.get_mut(slot) {
                    lane.connecting = false;
                }
                self.links().failed.push((slot, reason));
                reactor.submit(Op::Timer { at: reactor.now() }, Token::new(self.options.class, LINK_FAILED, 0, 0));
            }
        }
    }

    /// The connection of a session over RDMA.
    pub(super) fn link_of(&self, session: SessionId) -> Option<ConnectionId> {
        let state = self.sessions.get(session).filter(|state| !state.down)?;
        state.wire.rdma()?.connection
    }

    /// Takes a completion of the transport's.
    pub(super) fn link_completion<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        completion: &Completion,
        handler: &mut H,
    ) {
        let Some(links) = &mut self.links else { return };
        match completion.token.tag() {
            LINK_FAILED => {
                for (slot, reason) in std::mem::take(&mut links.failed) {
                    self.lane_failed(reactor, slot, reason);
                }
            }
            LINK_IDLE => {
                links.is_watching = false;
                self.probe_clients();
                self.watch_clients(reactor);
            }
            _ => links.transport.handle(reactor, completion),
        }
        self.hear_links(reactor, handler);
    }

    /// Probes the clients that have been silent since the last time: one that is gone without a word, its power or the link to
    /// it, would keep its session's frames for ever. As over TCP it is known after twice the keep-alive, and the retries of the
    /// device.
    fn probe_clients(&mut self) {
        let Some(links) = &mut self.links else { return };
        let is_client = |slot: &LaneId| {
            let session = self.lanes.get(*slot).and_then(|lane| self.sessions.get(lane.session?));
            session.is_some_and(|state| state.role == Role::Server && !state.down)
        };
        let of_clients: Vec<ConnectionId> =
            links.lanes.iter().filter(|(_, slot)| is_client(slot)).map(|(link, _)| *link).collect();
        for link in of_clients {
            links.transport.probe(link);
        }
    }

    /// Has the clients looked at once in a keep-alive, as long as there are any.
    fn watch_clients(&mut self, reactor: &mut Reactor) {
        let Some(links) = self.links.as_mut().filter(|links| !links.is_watching && !links.lanes.is_empty()) else {
            return;
        };
        if self.server.is_some() && !seeded::is(Bug::NoKeepAlive) {
            links.is_watching = true;
            let at = reactor.now() + self.options.keep_alive;
            reactor.submit(Op::Timer { at }, Token::new(self.options.class, LINK_IDLE, 0, 0));
        }
    }

    /// Hears what has happened on the links.
    fn hear_links<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        loop {
            self.take_gots(reactor);
            let Some(links) = &mut self.links else { return };
            let Some(news) = links.transport.next_event() else { return };
            let lane_of = |link: &ConnectionId| links.lanes.get(link).copied();
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

    /// A client asks at a listener. The loop with the fewest sessions answers it.
    fn link_asked(&mut self, reactor: &mut Reactor, link: ConnectionId, peer: Option<SocketAddr>) {
        let Some(links) = &mut self.links else { return };
        let Some((registry, here)) = &self.server else { return links.transport.refuse(link, RefuseCode::Busy) };
        let place = registry.reserve(*here);
        if place.home() == *here {
            return self.answer_link(reactor, (link, peer), place);
        }
        if let Some(asked) = links.transport.take_out(link) {
            registry.hand_over_link(asked, &place);
        }
    }

    /// Answers the clients that have asked at the listeners of other loops.
    pub(super) fn take_handed_links<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let Some((registry, here)) = &self.server else { return };
        let handed = registry.take_links(*here);
        if handed.is_empty() {
            return;
        }
        for (asked, place) in handed {
            let transport = &mut self.links().transport;
            match transport.adopt(reactor, asked) {
                Ok(link) => {
                    let peer = transport.peer(link);
                    self.answer_link(reactor, (link, peer), place);
                }
                Err(error) => tracing::warn!(%error, "a loop cannot take over an RDMA connection, which is refused"),
            }
        }
        self.hear_links(reactor, handler);
    }

    /// Accepts or refuses who asks.
    fn answer_link(&mut self, reactor: &mut Reactor, (link, peer): (ConnectionId, Option<SocketAddr>), place: Place) {
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
            self.no_room(reactor.now(), peer).then_some(RefuseCode::Busy)
        };
        let Some(links) = &mut self.links else { return };
        if let Some(code) = refused {
            self.counters.refused += 1;
            self.last_closed = Some(CloseReason::WeRefused(code));
            return links.transport.refuse(link, code);
        }
        let mut lane = Lane::new(None, Phase::AwaitHello, reactor.now());
        (lane.link, lane.place) = (Some(link), Some(place));
        let slot = self.lanes.insert(lane);
        self.handshakes += 1;
        links.lanes.insert(link, slot);
        links.transport.accept(reactor, link);
        self.watch_clients(reactor);
    }

    /// Messages can go both ways: a client says `Hello`.
    fn link_connected(&mut self, link: ConnectionId, slot: Option<LaneId>) {
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
    pub(super) fn take_backlog<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, handler: &mut H) {
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
        (slot, session): (LaneId, SessionId),
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
    fn link_sent<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, link: ConnectionId, handler: &mut H) {
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
    pub(super) fn send_outbox(&mut self, slot: LaneId) {
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
    pub(super) fn give_spare(&mut self, slot: LaneId) {
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

    /// When the oldest was queued of what a link has not handed to its device.
    pub(super) fn link_oldest(&self, lane: &Lane) -> Option<Instant> {
        self.links.as_ref()?.transport.oldest(lane.link?)
    }

    /// Ends the connection of a lane that is closed: nothing that is posted touches memory any more.
    pub(super) fn close_link(&mut self, reactor: &Reactor, slot: LaneId) {
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
        if fabric.links.as_ref().is_none_or(|links| links.failed.is_empty()) {
            let reason = "there is a connection manager, which looks for the address";
            return byway_skip::skip_this(byway_skip::SkipReason::Machine(reason));
        }
        let mut completions = Vec::new();
        while completions.is_empty() {
            reactor.reap(&mut completions, Wait::Block).unwrap();
        }
        // The timer at those ends the pause after the removal of a device.
        let of_transport = [LINK, LINK + 1];
        assert!(completions.iter().all(|completion| !of_transport.contains(&completion.token.tag())));
        assert_eq!(completions[0].token.tag(), LINK_FAILED);
    }
}
