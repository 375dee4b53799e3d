//! The network: links between nodes, listeners, and how connections come to be and end.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::events::{Event, Key};
use super::node::{InFlight, Work};
use super::shared_memory::SharedEnd;
use super::stream::{Connection, Stage, StreamEnd};
use super::world::{Crash, Inner, LinkProfile};
use crate::Instant;
use crate::op::{Address, Errno, Listener, Outcome, Socket};

/// How long a connect waits for an answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// How often a connect that a partition holds tries again.
const CONNECT_RETRY: Duration = Duration::from_millis(100);
/// Connections that wait at a listener; more are refused.
const BACKLOG: usize = 128;

#[derive(Debug)]
pub(super) struct ListenerEntry {
    pub(super) address: Option<SocketAddr>,
    /// Its streams are over shared memory.
    pub(super) is_shared: bool,
    /// The accept in flight.
    pub(super) accept: Option<u64>,
    backlog: VecDeque<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Net {
    links: BTreeMap<(IpAddr, IpAddr), Link>,
    pub(super) connections: BTreeMap<u64, Connection>,
}

#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) profile: LinkProfile,
    /// Since when it is cut.
    cut: Option<Instant>,
    /// The events that end the patience of its connections while it is cut.
    patience: Vec<Key>,
    stalled_until: Instant,
    /// When the last byte so far has left, from the lower address and from the higher.
    busy_until: [Instant; 2],
}

/// The ends of a connect under way.
struct Connecting {
    from: SocketAddr,
    to: SocketAddr,
    /// The listener shares memory.
    is_shared: bool,
}

impl ListenerEntry {
    fn is_at(&self, address: SocketAddr, is_shared: bool) -> bool {
        self.address == Some(address) && self.is_shared == is_shared
    }
}

/// Where a listener of that address is, and whether it shares memory.
fn place_of(address: &Address) -> Option<(SocketAddr, bool)> {
    match address {
        Address::Tcp(address) => Some((*address, false)),
        Address::Shared(path) => Some((path.to_str()?.parse().ok()?, true)),
        Address::Unix(_) | Address::Rdma(_) => None,
    }
}

fn ordered(a: IpAddr, b: IpAddr) -> (IpAddr, IpAddr) {
    if a <= b { (a, b) } else { (b, a) }
}

impl Net {
    pub(super) fn set_link(&mut self, a: IpAddr, b: IpAddr, profile: LinkProfile) {
        self.link(a, b).profile = profile;
    }

    pub(super) fn link(&mut self, a: IpAddr, b: IpAddr) -> &mut Link {
        self.links.entry(ordered(a, b)).or_default()
    }

    pub(super) fn is_cut(&self, a: IpAddr, b: IpAddr) -> bool {
        self.cut_since(a, b).is_some()
    }

    fn cut_since(&self, a: IpAddr, b: IpAddr) -> Option<Instant> {
        self.links.get(&ordered(a, b))?.cut
    }

    /// When what arrives now may pass a stall.
    pub(super) fn stalled_until(&self, a: IpAddr, b: IpAddr) -> Instant {
        self.links.get(&ordered(a, b)).map_or(Instant::ZERO, |link| link.stalled_until)
    }

    pub(super) fn stall(&mut self, a: IpAddr, b: IpAddr, until: Instant) {
        let link = self.link(a, b);
        link.stalled_until = link.stalled_until.max(until);
    }

    /// When `bytes` that `from` sends now have left.
    pub(super) fn occupy(&mut self, from: IpAddr, to: IpAddr, bytes: usize, now: Instant) -> Instant {
        let link = self.link(from, to);
        let nanos = bytes as u64 * 1_000_000_000 / link.profile.bandwidth.max(1);
        let busy = &mut link.busy_until[usize::from(from > to)];
        *busy = (*busy).max(now) + Duration::from_nanos(nanos);
        *busy
    }

    /// The connections that go over a link.
    fn joining(&self, a: IpAddr, b: IpAddr) -> Vec<u64> {
        self.connections.iter().filter(|(_, connection)| connection.joins(a, b)).map(|(key, _)| *key).collect()
    }

    /// Whether an end has a receive (or send) in flight.
    pub(super) fn busy(&self, connection: u64, end: usize, send: bool) -> bool {
        self.connections.get(&connection).is_some_and(|connection| {
            let end = &connection.ends[end];
            if send { end.send.is_some() } else { end.receive.is_some() }
        })
    }
}

impl Inner {
    /// What a segment takes over a link, besides its length.
    pub(super) fn latency(&mut self, a: IpAddr, b: IpAddr) -> Duration {
        let profile = self.net.link(a, b).profile;
        profile.latency + self.up_to(profile.jitter)
    }

    pub(super) fn listen(&mut self, id: u64, address: &Address) -> Result<Listener, Errno> {
        let (wanted, is_shared) = place_of(address).ok_or(Errno::OPNOTSUPP)?;
        let node = self.nodes.get_mut(&id).filter(|node| !node.dead).ok_or(Errno::BADF)?;
        let port = if wanted.port() == 0 { node.next_port() } else { wanted.port() };
        let at = SocketAddr::new(node.ip, port);
        if node.listeners.iter_mut().any(|(_, _, entry)| entry.is_at(at, is_shared)) {
            return Err(Errno::ADDRINUSE);
        }
        let entry = ListenerEntry { address: Some(at), is_shared, accept: None, backlog: VecDeque::new() };
        let (index, generation) = node.listeners.insert(entry);
        Ok(Listener { index, generation })
    }

    pub(super) fn close_listener(&mut self, id: u64, listener: Listener) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(entry) = node.listeners.remove(listener.index, listener.generation) else { return };
        for connection in entry.backlog {
            self.reset(connection, Errno::CONNRESET);
        }
        if let Some(op) = entry.accept {
            self.fail(id, op, Errno::CANCELED);
        }
    }

    pub(super) fn start_accept(&mut self, id: u64, op: u64, listener: Listener) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(entry) = node.listeners.get_mut(listener.index, listener.generation) else { return };
        entry.accept = Some(op);
        for connection in std::mem::take(&mut entry.backlog) {
            self.give_to_accept(id, op, connection);
        }
    }

    fn give_to_accept(&mut self, id: u64, op: u64, connection: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(token) = node.ops.get(&op).map(|op| op.token) else { return };
        let (index, generation) = node.sockets.insert((connection, 1));
        let socket = Socket { index, generation };
        node.push(token, Outcome::Accepted(Ok(socket)));
        if let Some(connection) = self.net.connections.get_mut(&connection) {
            connection.ends[1].stage = Stage::Open;
        }
    }

    pub(super) fn start_connect(&mut self, id: u64, op: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let ip = node.ip;
        let from = SocketAddr::new(ip, node.next_port());
        let Some(InFlight { work: Work::Connect { to, from: at }, event, .. }) = node.ops.get_mut(&op) else { return };
        *at = Some(from);
        let Some((to, _)) = place_of(to) else { return self.fail(id, op, Errno::OPNOTSUPP) };
        let limit = self.now + CONNECT_LIMIT;
        *event = Some(self.events.add(limit, Event::ConnectTimeout { node: id, op }));
        let at = self.now + self.latency(ip, to.ip());
        self.events.add(at, Event::Syn { node: id, op });
    }

    fn connecting(&self, id: u64, op: u64) -> Option<Connecting> {
        match &self.nodes.get(&id)?.ops.get(&op)?.work {
            &Work::Connect { ref to, from: Some(from) } => {
                place_of(to).map(|(to, is_shared)| Connecting { from, to, is_shared })
            }
            _ => None,
        }
    }

    pub(super) fn syn(&mut self, id: u64, op: u64) {
        let Some(Connecting { from, to, is_shared }) = self.connecting(id, op) else { return };
        if self.net.is_cut(from.ip(), to.ip()) {
            self.events.add(self.now + CONNECT_RETRY, Event::Syn { node: id, op });
            return;
        }
        let connection = self.open_connection(id, from, to, is_shared);
        let at = self.now + self.latency(from.ip(), to.ip());
        self.events.add(at, Event::SynAck { node: id, op, connection });
    }

    /// Makes a connection if there is a listener.
    fn open_connection(&mut self, client: u64, from: SocketAddr, to: SocketAddr, is_shared: bool) -> Option<u64> {
        let server = self.live(to.ip())?;
        let key = self.new_id();
        let node = self.nodes.get_mut(&server)?;
        let (_, _, entry) = node.listeners.iter_mut().find(|(_, _, entry)| entry.is_at(to, is_shared))?;
        let accept = entry.accept;
        if accept.is_none() {
            if entry.backlog.len() == BACKLOG {
                return None;
            }
            entry.backlog.push_back(key);
        }
        let mut ends = [StreamEnd::new(client, from), StreamEnd::new(server, to)];
        if is_shared {
            let of_ends = SharedEnd::pair().expect("descriptors for a simulated stream over shared memory");
            ends.iter_mut().zip(of_ends).for_each(|(end, shared)| end.shared = Some(shared));
        }
        self.net.connections.insert(key, Connection { ends });
        if let Some(op) = accept {
            self.give_to_accept(server, op, key);
        }
        Some(key)
    }

    pub(super) fn syn_ack(&mut self, id: u64, op: u64, connection: Option<u64>) {
        let Some(Connecting { from, to, .. }) = self.connecting(id, op) else {
            // The connect was cancelled, or its node died.
            return connection.into_iter().for_each(|connection| self.reset(connection, Errno::CONNRESET));
        };
        if self.net.is_cut(from.ip(), to.ip()) {
            self.events.add(self.now + CONNECT_RETRY, Event::SynAck { node: id, op, connection });
            return;
        }
        let Some(connection) = connection else { return self.fail(id, op, Errno::CONNREFUSED) };
        let Some(state) = self.net.connections.get_mut(&connection) else {
            return self.fail(id, op, Errno::CONNRESET);
        };
        state.ends[0].stage = Stage::Open;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        self.events.remove(node.ops.get_mut(&op).and_then(|op| op.event.take()));
        let (index, generation) = node.sockets.insert((connection, 0));
        node.complete(op, |_, _| Outcome::Connected(Ok(Socket { index, generation })));
    }

    pub(super) fn connect_timeout(&mut self, id: u64, op: u64) {
        if self.connecting(id, op).is_some() {
            self.count.timeouts += 1;
            self.fail(id, op, Errno::TIMEDOUT);
        }
    }

    pub(super) fn partition(&mut self, a: IpAddr, b: IpAddr) {
        if self.net.is_cut(a, b) {
            return;
        }
        self.count.partitions += 1;
        self.net.link(a, b).cut = Some(self.now);
        for key in self.net.joining(a, b) {
            self.watch(key, 0);
            self.watch(key, 1);
        }
    }

    /// Plans the end of the patience of an end, if its link is cut. A kernel has none with a process of its own host.
    fn watch(&mut self, connection: u64, end: usize) {
        let Some(state) = self.net.connections.get(&connection).filter(|state| !state.is_shared()) else { return };
        let (a, b) = state.ips(end);
        if let Some(since) = self.net.cut_since(a, b) {
            let at = (since + state.ends[end].keep_alive).max(self.now);
            let key = self.events.add(at, Event::Silent { connection, end });
            self.net.link(a, b).patience.push(key);
        }
    }

    pub(super) fn heal(&mut self, a: IpAddr, b: IpAddr) {
        let link = self.net.link(a, b);
        link.cut = None;
        for event in std::mem::take(&mut link.patience) {
            self.events.remove(Some(event));
        }
        for key in self.net.joining(a, b) {
            let Some(connection) = self.net.connections.get(&key) else { continue };
            if connection.ends.iter().any(|end| end.stage == Stage::Crashed) {
                self.reset(key, Errno::CONNRESET);
            } else {
                self.schedule(key, 0);
                self.schedule(key, 1);
            }
        }
    }

    /// The keep-alive time of an end has passed in a partition, unless it was made longer meanwhile.
    pub(super) fn silent(&mut self, key: u64, end: usize) {
        let Some(connection) = self.net.connections.get(&key) else { return };
        if connection.ends[end].stage == Stage::Crashed {
            // A machine without power has no patience to lose: its peer finds out by its own.
            return;
        }
        let (a, b) = connection.ips(end);
        let patience = connection.ends[end].keep_alive;
        if self.net.cut_since(a, b).is_some_and(|since| since + patience <= self.now) {
            self.count.timeouts += 1;
            self.reset(key, Errno::TIMEDOUT);
        }
    }

    pub(super) fn reset_random_connection(&mut self) -> bool {
        // No kernel resets a stream between two living processes of its own host.
        let may_break = |connection: &Connection| connection.is_whole() && !connection.is_shared();
        let whole: Vec<u64> =
            self.net.connections.iter().filter(|(_, connection)| may_break(connection)).map(|(key, _)| *key).collect();
        let place = self.rng.below(whole.len() as u64) as usize;
        let Some(key) = whole.get(place).copied() else { return false };
        self.count.resets += 1;
        self.reset(key, Errno::CONNRESET);
        true
    }

    /// A loop ends. The kernel outlives a process: it delivers what was closed before, and closes the rest or, by chance,
    /// resets it. After a power loss peers see resets, at once or when the partition that hides it ends.
    pub(super) fn end_connections(&mut self, id: u64, how: Crash) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let listeners: Vec<(u32, u32)> = node.listeners.iter_mut().map(|(i, g, _)| (i, g)).collect();
        for (index, generation) in listeners {
            node.listeners.remove(index, generation);
        }
        let mine: Vec<(u64, usize)> = self
            .net
            .connections
            .iter()
            .flat_map(|(key, connection)| [(*key, 0), (*key, 1)].map(|of| (of, connection.ends[of.1].node)))
            .filter_map(|(of, node)| (node == id).then_some(of))
            .collect();
        for (key, end) in mine {
            let Some(connection) = self.net.connections.get_mut(&key) else { continue };
            connection.end_memory(end);
            let (a, b) = connection.ips(0);
            let stage = &mut connection.ends[end].stage;
            if how == Crash::Process && *stage == Stage::Closed {
                continue;
            }
            if how == Crash::Process && *stage == Stage::Open && self.rng.one_in(2) {
                self.close_end(key, end, false);
                continue;
            }
            *stage = Stage::Crashed;
            if !self.net.is_cut(a, b) {
                self.reset(key, Errno::CONNRESET);
            }
        }
    }

    pub(super) fn peer_address(&self, id: u64, socket: Socket) -> Option<SocketAddr> {
        let (key, end) = *self.nodes.get(&id)?.sockets.get(socket.index, socket.generation)?;
        Some(self.net.connections.get(&key).filter(|connection| !connection.is_shared())?.ends[1 - end].address)
    }

    pub(super) fn keep_alive(&mut self, id: u64, socket: Socket, idle: Duration) {
        let entry = self.nodes.get(&id).and_then(|node| node.sockets.get(socket.index, socket.generation)).copied();
        if let Some((key, end)) = entry
            && let Some(connection) = self.net.connections.get_mut(&key)
        {
            connection.ends[end].keep_alive = idle;
            self.watch(key, end);
        }
    }

    /// An operation of a stream or listener has ended: it is no longer waited for.
    pub(super) fn forget_stream_op(&mut self, id: u64, op: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let socket = match node.ops.get(&op).map(|op| &op.work) {
            Some(Work::Accept { listener }) => {
                let (index, generation) = (listener.index, listener.generation);
                if let Some(entry) = node.listeners.get_mut(index, generation) {
                    entry.accept = None;
                }
                return;
            }
            Some(Work::Recv { socket, .. } | Work::Send { socket, .. }) => *socket,
            _ => return,
        };
        let entry = node.sockets.get(socket.index, socket.generation).copied();
        if let Some((key, end)) = entry
            && let Some(connection) = self.net.connections.get_mut(&key)
        {
            let end = &mut connection.ends[end];
            end.receive.take_if(|receive| *receive == op);
            end.send.take_if(|send| *send == op);
        }
    }
}
