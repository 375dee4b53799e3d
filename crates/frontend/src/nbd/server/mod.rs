//! The NBD front end of one loop: connections, from their first byte to their last.
//!
//! The front end owns no loop and no thread. Its owner hands it streams, completions of [`NBD_CLASS`] and the engine's
//! [`Done`]s with tags of that class.

mod connection;
mod fenced;
mod greeting;
mod input;
mod secure;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use byway_fabric::access::Origin;
use byway_fabric::feedback::Flow;
use byway_fabric::tls::ServerTls;
use byway_reactor::{Completion, Errno, Op, Outcome, Reactor, Socket, Token};
use byway_service::block::{Catalog, Done, Engine, Tag, VolumeId};
use slab::Slab;

pub use self::connection::CloseReason;
use self::connection::{Connection, Context, Pending, TAG_RECEIVE, TAG_SEND};
use self::fenced::{ClientId, Fenced, TAG_FENCE};
use self::greeting::{Greeting, Guest};
use super::handshake::{HandshakeConfig, TlsMode};
use crate::limits::{CONNECTIONS_MAX, GREETINGS_HEAP_BYTES_MAX, HANDSHAKE_SECONDS_MAX};

/// The class of the front end's tokens and tags.
pub const NBD_CLASS: u8 = 0x40;

const TAG_TIMEOUT: u8 = 3;

/// How a front end serves.
#[derive(Debug, Clone)]
pub struct NbdOptions {
    /// How connections are negotiated, but for TLS.
    pub handshake: HandshakeConfig,
    /// Encryption, and with which certificate.
    pub tls: ServerTls,
    /// A TCP client that is gone is noticed within about this time. A silent one is legal.
    pub keep_alive: Duration,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self { handshake: HandshakeConfig::default(), tls: ServerTls::Off, keep_alive: Duration::from_secs(60) }
    }
}

/// What a front end has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NbdCounters {
    /// Connections ever.
    pub connections: u64,
    /// Connections that ended by a fault: of the protocol, of the stream, by a time limit.
    pub faults: u64,
    /// Connections refused because there were too many.
    pub refused: u64,
}

/// What a front end uses of its loop.
pub struct LoopContext<'a> {
    /// The loop.
    pub reactor: &'a mut Reactor,
    /// The loop's engine.
    pub engine: &'a mut Engine,
    /// The loop's volumes.
    pub catalog: &'a Catalog,
}

/// The front end. See the module.
pub struct NbdFrontend {
    options: NbdOptions,
    clients: Slab<Client>,
    generation: u32,
    pending: Slab<Pending>,
    /// Connections that wait for a frame, in order.
    stalled: VecDeque<usize>,
    fenced: Fenced,
    draining: bool,
    /// Heap memory of the replies that wait.
    queued_heap: usize,
    /// Of those to clients in their handshake.
    greetings_heap: usize,
    /// Frames that payloads of writes are received into, in bytes.
    payload_bytes: usize,
    counters: NbdCounters,
    last_end: Option<CloseReason>,
}

struct Client {
    generation: u32,
    socket: Socket,
    /// Asked for at once: a connection that was reset has no address any more. `None` on a unix socket.
    peer: Option<SocketAddr>,
    phase: Phase,
    /// Operations of the loop that still hold the connection's memory.
    operations: u32,
    closed: bool,
    in_stalled: bool,
    in_fenced: bool,
    sent: Flow,
    received: Flow,
}

/// A client that is served: what it moves, in bytes on the wire.
#[derive(Debug, Clone)]
pub struct NbdClient {
    /// Where it is; `None` on a unix socket.
    pub peer: Option<SocketAddr>,
    /// What it has opened.
    pub volume: VolumeId,
    /// Its requests that have not been answered.
    pub in_flight: usize,
    /// Bytes that it, or the kernel for it, has taken.
    pub sent_bytes: u64,
    /// Bytes that came from it.
    pub received_bytes: u64,
    /// Bytes a second that it takes now.
    pub send_rate: f64,
    /// Bytes a second that come from it now.
    pub receive_rate: f64,
}

enum Phase {
    Greeting(Box<Greeting>),
    Serving(Box<Connection>, Box<Guest>),
}

impl NbdFrontend {
    /// A front end without connections.
    pub fn new(mut options: NbdOptions) -> Self {
        options.handshake.tls = match options.tls {
            ServerTls::Off => TlsMode::Off,
            ServerTls::Optional(_) => TlsMode::Optional,
            ServerTls::Required(_) => TlsMode::Required,
        };
        Self {
            options,
            clients: Slab::new(),
            generation: 0,
            pending: Slab::new(),
            stalled: VecDeque::new(),
            fenced: Fenced::default(),
            draining: false,
            queued_heap: 0,
            greetings_heap: 0,
            payload_bytes: 0,
            counters: NbdCounters::default(),
            last_end: None,
        }
    }

    /// Connections now.
    pub fn connection_count(&self) -> usize {
        self.clients.len()
    }

    /// Heap memory of the replies that wait to be sent.
    pub fn queued_heap_bytes(&self) -> usize {
        self.queued_heap + self.greetings_heap
    }

    /// What the front end has seen.
    pub fn counters(&self) -> NbdCounters {
        self.counters
    }

    /// Why the connection that ended last ended.
    pub fn last_end(&self) -> Option<CloseReason> {
        self.last_end
    }

    /// Serves a new stream.
    pub fn open(&mut self, context: &mut LoopContext<'_>, socket: Socket) {
        if self.clients.len() >= CONNECTIONS_MAX || self.draining {
            self.counters.refused += 1;
            let peer = name_of(context.reactor.peer_address(socket));
            tracing::warn!(peer, limit = CONNECTIONS_MAX, "NBD connection refused: too many, or shutting down");
            return context.reactor.close(socket);
        }
        self.counters.connections += 1;
        self.generation = self.generation.wrapping_add(1);
        context.reactor.keep_alive(socket, self.options.keep_alive);
        let peer = context.reactor.peer_address(socket);
        let entry = self.clients.vacant_entry();
        let token = Token::new(NBD_CLASS, 0, entry.key() as u32, self.generation);
        let index = entry.key();
        let tls = self.options.tls.server().cloned();
        let greeting = Greeting::new(socket, token, self.options.handshake, tls, origin(context.reactor, socket));
        entry.insert(Client {
            generation: self.generation,
            socket,
            peer,
            phase: Phase::Greeting(Box::new(greeting)),
            operations: 1,
            closed: false,
            in_stalled: false,
            in_fenced: false,
            sent: Flow::default(),
            received: Flow::default(),
        });
        let at = context.reactor.now() + Duration::from_secs(HANDSHAKE_SECONDS_MAX);
        context.reactor.submit(Op::Timer { at }, token.with_tag(TAG_TIMEOUT));
        self.advance(context, index);
    }

    /// Takes a completion of [`NBD_CLASS`].
    pub fn handle(&mut self, context: &mut LoopContext<'_>, completion: Completion) {
        if completion.token.tag() == TAG_FENCE {
            return self.look_at_fenced(context);
        }
        let index = completion.token.index() as usize;
        let Some(client) = self.clients.get_mut(index) else { return };
        if client.generation & 0x00ff_ffff != completion.token.generation() {
            return;
        }
        client.operations -= 1;
        match (completion.token.tag(), completion.outcome) {
            (TAG_RECEIVE, Outcome::Received { mut into, result }) => {
                let n = *result.as_ref().unwrap_or(&0);
                client.received.note(n, context.reactor.turned_at());
                match &mut client.phase {
                    Phase::Greeting(greeting) => greeting.received(&mut into, n),
                    Phase::Serving(connection, _) => connection.received(&mut into, n),
                }
                match result {
                    _ if client.closed => {}
                    Ok(0) => client.at_end_of_stream(),
                    Ok(_) => {}
                    Err(error) => client.fail(CloseReason::Stream(error)),
                }
            }
            (TAG_SEND, Outcome::Sent { gather, result }) => {
                client.sent.note(*result.as_ref().unwrap_or(&0), context.reactor.turned_at());
                match &mut client.phase {
                    Phase::Greeting(greeting) => greeting.sent(gather),
                    Phase::Serving(connection, _) => connection.sent(gather),
                }
                if let Err(error) = result {
                    client.send_failed(error);
                }
            }
            (TAG_TIMEOUT, Outcome::TimedOut(Ok(())))
                if matches!(client.phase, Phase::Greeting(_)) && !client.closed =>
            {
                client.fail(CloseReason::Slow);
            }
            _ => {}
        }
        self.advance(context, index);
    }

    /// Takes the end of a request whose tag has [`NBD_CLASS`] in its highest byte.
    pub fn done(&mut self, context: &mut LoopContext<'_>, done: Done) {
        let id = (done.tag.0 & 0x00ff_ffff_ffff_ffff) as usize;
        let Some(index) = self.pending.get(id).map(|pending| pending.connection) else { return };
        if let Some(Client { phase: Phase::Serving(connection, _), .. }) = self.clients.get_mut(index) {
            connection.done(context.engine, &mut self.pending, id, done.outcome);
            self.advance(context, index);
        }
    }

    /// The client of a request of the front end's class that the engine has not completed yet; `None` on a Unix socket.
    pub fn peer_of(&self, tag: Tag) -> Option<SocketAddr> {
        let pending = self.pending.get((tag.0 & 0x00ff_ffff_ffff_ffff) as usize)?;
        self.clients.get(pending.connection)?.peer
    }

    /// The clients that are served and that move the most now: at most `count`, the busiest first. A walk over all of them.
    pub fn busiest_clients(&self, reactor: &Reactor, count: usize) -> Vec<NbdClient> {
        let now = reactor.now();
        let served = self.clients.iter().filter_map(|(_, client)| match &client.phase {
            Phase::Serving(connection, _) if !client.closed => Some((client, connection)),
            _ => None,
        });
        let mut clients: Vec<_> = served
            .map(|(client, connection)| NbdClient {
                peer: client.peer,
                volume: connection.volume(),
                in_flight: connection.in_flight(),
                sent_bytes: client.sent.bytes(),
                received_bytes: client.received.bytes(),
                send_rate: client.sent.rate(now),
                receive_rate: client.received.rate(now),
            })
            .collect();
        let rate = |client: &NbdClient| client.send_rate + client.receive_rate;
        clients.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
        clients.truncate(count);
        clients
    }

    /// Whether a connection is to be asked again by [`turn`](Self::turn): for want of frames, or of what its volume may move.
    pub fn is_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// Asks again for connections that waited for a frame, in the order in which they came: to be called after each round of
    /// completions.
    pub fn turn(&mut self, context: &mut LoopContext<'_>) {
        // A connection that goes on may give back what one before it waits for, and no completion would tell of that.
        let mut goes_on = true;
        while std::mem::take(&mut goes_on) {
            for _ in 0..self.stalled.len() {
                let Some(index) = self.stalled.pop_front() else { return };
                if let Some(client) = self.clients.get_mut(index) {
                    client.in_stalled = false;
                    self.advance(context, index);
                    goes_on |= self.clients.get(index).is_none_or(|client| !client.in_stalled);
                }
            }
        }
    }

    /// Ends the connections of volumes that are no longer served.
    pub fn drop_volumes(&mut self, context: &mut LoopContext<'_>, gone: &[VolumeId]) {
        let ends: Vec<usize> = self
            .clients
            .iter()
            .filter(|(_, client)| matches!(&client.phase, Phase::Serving(c, _) if gone.contains(&c.volume())))
            .map(|(index, _)| index)
            .collect();
        for index in ends {
            self.clients[index].fail(CloseReason::VolumeGone);
            self.advance(context, index);
        }
    }

    /// Ends the connections of clients that may do less by now than they were told: their certificate is on a revocation list,
    /// or the volume is no longer for them, or no longer to be written. Gives how many.
    pub fn enforce_access(&mut self, context: &mut LoopContext<'_>) -> usize {
        let tls = self.options.tls.server();
        let has_lost = |client: &Client| match &client.phase {
            Phase::Greeting(greeting) => greeting.guest().has_lost(None, tls),
            Phase::Serving(connection, guest) => {
                let volume = context.engine.volume(connection.volume());
                guest.has_lost(volume.and_then(|volume| volume.right(&guest.client)), tls)
            }
        };
        // A connection that ends already, as of a volume that is gone, keeps its reason.
        let ends: Vec<usize> = self
            .clients
            .iter()
            .filter(|(_, client)| client.end().is_none() && has_lost(client))
            .map(|(index, _)| index)
            .collect();
        for &index in &ends {
            self.clients[index].fail(CloseReason::AccessLost);
            self.advance(context, index);
        }
        ends.len()
    }

    /// Reads nothing more; connections end when what is in flight has been answered.
    pub fn drain(&mut self, context: &mut LoopContext<'_>) {
        self.draining = true;
        let all: Vec<usize> = self.clients.iter().map(|(index, _)| index).collect();
        for index in all {
            match &mut self.clients[index].phase {
                Phase::Greeting(_) => self.clients[index].fail(CloseReason::Shutdown),
                Phase::Serving(connection, _) => {
                    connection.draining.get_or_insert(CloseReason::Shutdown);
                }
            }
            self.advance(context, index);
        }
    }

    /// Does all that a connection can do now, and closes it when it is at its end.
    fn advance(&mut self, context: &mut LoopContext<'_>, index: usize) {
        let Some(client) = self.clients.get_mut(index) else { return };
        if let Phase::Greeting(greeting) = &mut client.phase
            && !client.closed
        {
            greeting.set_crowded(self.greetings_heap > GREETINGS_HEAP_BYTES_MAX);
            let served = greeting.advance(context, index);
            self.greetings_heap = greeting.count_heap(self.greetings_heap);
            client.operations += greeting.started_operations();
            if let Some(connection) = served {
                client.phase = Phase::Serving(Box::new(connection), Box::new(greeting.guest().clone()));
            } else if let Some(end) = greeting.draining
                && greeting.is_idle()
            {
                client.fail(end);
            }
        }
        if let Phase::Serving(connection, _) = &mut client.phase
            && !client.closed
        {
            let before = (connection.receiving, connection.sending);
            let mut context = Context {
                reactor: &mut *context.reactor,
                engine: &mut *context.engine,
                pending: &mut self.pending,
                queued_heap: self.queued_heap,
                payload_bytes: self.payload_bytes,
            };
            connection.advance(&mut context);
            connection.note_departure(context.engine);
            self.queued_heap = connection.count_heap(self.queued_heap);
            self.payload_bytes = connection.count_payload(self.payload_bytes);
            client.operations += u32::from(connection.receiving && !before.0);
            client.operations += u32::from(connection.sending && !before.1);
            if connection.stalled && !client.in_stalled {
                client.in_stalled = true;
                self.stalled.push_back(index);
            }
            if connection.fenced && !std::mem::replace(&mut client.in_fenced, true) {
                self.fenced.add(context.reactor, ClientId { index, generation: client.generation });
            }
            if let Some(end) = connection.draining
                && connection.is_idle(&self.pending)
            {
                client.fail(end);
            }
        }
        self.close_if_over(context, index);
    }

    fn close_if_over(&mut self, context: &mut LoopContext<'_>, index: usize) {
        let client = &mut self.clients[index];
        let Some(end) = client.end() else { return };
        if !client.closed {
            client.closed = true;
            self.last_end = Some(end);
            context.reactor.close(client.socket);
            context.reactor.cancel(Token::new(NBD_CLASS, TAG_TIMEOUT, index as u32, client.generation));
            // A peer that leaves in the greeting looked whether a server listens, as another node does at its start.
            let looked = matches!((&client.phase, end), (Phase::Greeting(_), CloseReason::Stream(_)));
            if end.is_fault() && !looked {
                self.counters.faults += 1;
                tracing::info!(peer = name_of(client.peer), reason = %end, "NBD connection ended");
            } else {
                tracing::debug!(peer = name_of(client.peer), reason = %end, "NBD connection ended");
            }
            match &mut client.phase {
                Phase::Greeting(greeting) => self.greetings_heap = greeting.count_heap(self.greetings_heap),
                Phase::Serving(connection, _) => {
                    connection.abandon(&mut self.pending);
                    self.queued_heap = connection.count_heap(self.queued_heap);
                    self.payload_bytes = connection.count_payload(self.payload_bytes);
                }
            }
        }
        let at_store = matches!(&client.phase, Phase::Serving(connection, _) if connection.has_requests());
        if client.operations == 0 && !at_store {
            self.clients.remove(index);
        }
    }
}

impl Client {
    /// Ends the connection at once, whatever is in flight.
    fn fail(&mut self, end: CloseReason) {
        match &mut self.phase {
            Phase::Greeting(greeting) => greeting.closing = Some(end),
            Phase::Serving(connection, _) => connection.closing = Some(end),
        }
    }

    /// A client that has gone need not hear TLS's end: if that was all there was to send, it ended as it should.
    fn send_failed(&mut self, error: Errno) {
        let end = match &self.phase {
            Phase::Greeting(greeting) => greeting.draining.filter(|_| greeting.is_secure()),
            Phase::Serving(connection, _) => connection.draining.filter(|_| connection.has_said_end()),
        };
        self.fail(end.unwrap_or(CloseReason::Stream(error)));
    }

    fn at_end_of_stream(&mut self) {
        match &mut self.phase {
            Phase::Greeting(greeting) => greeting.at_end_of_stream(),
            Phase::Serving(connection, _) => connection.hung_up(),
        }
    }

    /// Why it is over, if it is.
    fn end(&self) -> Option<CloseReason> {
        match &self.phase {
            Phase::Greeting(greeting) => greeting.closing,
            Phase::Serving(connection, _) => connection.closing,
        }
    }
}

/// Where a client connects from.
fn origin(reactor: &Reactor, socket: Socket) -> Origin {
    match reactor.peer_address(socket) {
        Some(peer) => Origin::Address(peer.ip().to_canonical()),
        None if reactor.is_tcp(socket) => Origin::Unknown,
        None => Origin::Unix,
    }
}

/// A peer, as the log names it.
fn name_of(peer: Option<SocketAddr>) -> String {
    peer.map_or_else(|| "a unix socket".to_owned(), |peer| peer.to_string())
}

#[cfg(test)]
mod tests;
