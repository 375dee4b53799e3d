//! One life of a node: its sessions, its operations under way, and the messages of its program.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use byway_fabric::PayloadChecksum;
use byway_fabric::node::{
    Address, Completed, Deadline, Descriptor, Group, Memory, Message, Node, NodeOptions, Op, OpError, OpId, Outcome,
    Session,
};
use byway_reactor::sim::World;
use byway_rpc::node::{PROGRAM, Rpc};
use byway_rpc::session::{Grant, Spoken, Versions};

use super::blocks::{Mine, Theirs};
use super::calls::{CallWindows, OpenCall};
use super::ledger::{Ledger, Mode};
use super::rules::{broken, rule};

/// Calls that each peer may have in flight.
pub const GRANT_CALLS: u16 = 3;
/// Messages that each peer may send before the program has taken them.
pub const GRANT_MESSAGES: u16 = 4;
pub const KEEP_ALIVE: Duration = Duration::from_millis(400);
const PORT: u16 = 4711;
const FRAME_BYTES: usize = 8 << 20;
const OPS_MAX: usize = 4096;
/// The first byte of a message's header.
const NUMBERED: u8 = 1;
pub const OFFERS_WINDOW: u8 = 2;
pub const BEHIND_PUT: u8 = 3;

pub fn ip(node: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8 + 1))
}

/// Where a node listens: for all, and for nodes of its host.
fn at(node: usize) -> Address {
    Address::Tcp(SocketAddr::new(ip(node), PORT))
}

fn shared_at(node: usize) -> Address {
    Address::Shared(SocketAddr::new(ip(node), PORT).to_string().into())
}

/// What an operation under way is.
pub enum Pending {
    Accept,
    Receive,
    /// By the index of the node.
    Connect(usize),
    Send,
    Call {
        number: u64,
        windows: Option<CallWindows>,
    },
    /// A window is closed: its memory must not change from then on.
    Close(Memory),
    /// A put or get of the holder of a call, by its key.
    Serve {
        held: u64,
        memory: Memory,
        is_put: bool,
    },
    PutBlocks {
        session: Session,
        tag: u64,
        memory: Memory,
    },
    GetBlocks {
        session: Session,
        get: super::blocks::Get,
    },
    /// With the puts that were under way when it began.
    Flush {
        session: Session,
        before: BTreeSet<u64>,
    },
}

/// A session as its program knows it.
#[derive(Default)]
pub struct Peer {
    /// Messages sent, and messages received.
    sent: u64,
    received: u64,
    /// The window that is open for it.
    pub mine: Option<Mine>,
    /// The window that it has opened.
    pub theirs: Option<Theirs>,
}

pub struct Life {
    // Before the node: what is dropped last ends it.
    pub held: BTreeMap<u64, OpenCall>,
    pub pending: BTreeMap<u64, (Option<OpId>, Pending)>,
    pub sessions: BTreeMap<Session, Peer>,
    /// Sessions that it has closed, of which messages may still come.
    left: BTreeSet<Session>,
    pub index: usize,
    /// The nodes that it connects to.
    wanted: Vec<usize>,
    /// Memory of windows that were closed, and what it held then.
    pub closed: Vec<(Memory, Vec<u8>)>,
    next: u64,
    pub has_checksums: bool,
    /// It begins nothing any more.
    pub is_ending: bool,
    /// Bytes of frames that it uses without sessions.
    pub frame_bytes_idle: usize,
    group: Group,
    pub rpc: Rpc,
}

impl Pending {
    /// For the report of a run that does not end.
    pub fn name(&self) -> String {
        match self {
            Self::Accept => "accept".into(),
            Self::Receive => "receive".into(),
            Self::Connect(to) => format!("connect to {to}"),
            Self::Send => "send or close of a window".into(),
            Self::Call { number, .. } => format!("call {number}"),
            Self::Close(_) => "close of a window".into(),
            Self::Serve { held, is_put, .. } => format!("transfer for held call {held}, put: {is_put}"),
            Self::PutBlocks { tag, .. } => format!("put {tag}"),
            Self::GetBlocks { .. } => "get".into(),
            Self::Flush { .. } => "flush".into(),
        }
    }
}

impl Life {
    pub fn new(world: &World, ledger: &mut Ledger, index: usize, wanted: Vec<usize>, seed: u64) -> Self {
        let has_checksums = seed.is_multiple_of(3);
        let checksum = if has_checksums { PayloadChecksum::Required } else { PayloadChecksum::Off };
        let options =
            NodeOptions { messages: GRANT_MESSAGES, keep_alive: KEEP_ALIVE, checksum, ..NodeOptions::default() };
        let grant = Grant { calls: GRANT_CALLS, notices: 0 };
        let spoken = vec![Spoken { protocol: PROGRAM, versions: Versions::only(1), grant: Some(grant) }];
        let own_seed = ledger.random.next_u64();
        let rpc = Rpc::over(world.node(ip(index), FRAME_BYTES), &options, spoken, own_seed).expect("a node");
        ledger.names.insert(rpc.id(), index);
        let group = rpc.node().group(OPS_MAX).expect("a group");
        let mut life = Self {
            held: BTreeMap::new(),
            pending: BTreeMap::new(),
            sessions: BTreeMap::new(),
            left: BTreeSet::new(),
            index,
            wanted,
            closed: Vec::new(),
            next: 1,
            has_checksums,
            is_ending: false,
            frame_bytes_idle: 0,
            group,
            rpc,
        };
        life.rpc.node().listen(&at(index)).expect("a simulated address is free");
        if ledger.has_neighbours(index) {
            life.rpc.node().listen(&shared_at(index)).expect("a simulated address is free");
        }
        life.frame_bytes_idle = life.node().counters().expect("not in a child").frame_bytes;
        let accept = life.node().start_accept().expect("an accept");
        life.add(accept, Pending::Accept);
        life.receive();
        life
    }

    pub fn node(&self) -> &Node {
        self.rpc.node()
    }

    /// The next number of this life.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes the next message or end of a session, if it does not wait for that.
    pub fn receive(&mut self) {
        if !self.is_ending && !self.pending.values().any(|(_, pending)| matches!(pending, Pending::Receive)) {
            let receive = self.node().start_receive(None).expect("a receive");
            self.add(receive, Pending::Receive);
        }
    }

    /// Begins to wait for an operation.
    pub fn add(&mut self, op: Op, pending: Pending) -> OpId {
        let key = self.number();
        let id = self.group.add(op, key).expect("the group has room");
        self.pending.insert(key, (Some(id), pending));
        id
    }

    /// Which node a session's peer is, once it has said so.
    pub fn peer(&self, ledger: &Ledger, session: Session) -> Option<usize> {
        ledger.names.get(&self.rpc.node_of(session)?).copied()
    }

    /// A session with a peer that has said who it is.
    pub fn pick_session(&self, ledger: &mut Ledger) -> Option<(Session, usize)> {
        let known = |session: &Session| Some((*session, self.peer(ledger, *session)?));
        let sessions: Vec<_> = self.sessions.keys().filter_map(known).collect();
        let place = ledger.below(sessions.len());
        sessions.get(place).copied()
    }

    /// Handles everything that is ready.
    pub fn turn(&mut self, world: &World, ledger: &mut Ledger) {
        loop {
            self.node().turn().expect("the node turns");
            while let Ok(completion) = self.group.test() {
                let Some((_, pending)) = self.pending.remove(&completion.context) else {
                    broken(format!("an operation of node {} ended twice", self.index))
                };
                self.ended(ledger, pending, completion.result);
            }
            while let Ok(request) = self.rpc.next_call(Deadline::now()) {
                self.called(ledger, request);
            }
            if !world.has_ready(ip(self.index)) {
                return;
            }
        }
    }

    fn ended(&mut self, ledger: &mut Ledger, pending: Pending, result: Completed) {
        match pending {
            Pending::Accept => {
                if let Ok(Outcome::Session(session)) = result {
                    self.session_up(ledger, session);
                }
                if !self.is_ending {
                    let accept = self.node().start_accept().expect("an accept");
                    self.add(accept, Pending::Accept);
                }
            }
            Pending::Connect(_) => {
                if let Ok(Outcome::Session(session)) = result {
                    self.session_up(ledger, session);
                }
            }
            Pending::Receive => {
                match result {
                    Ok(Outcome::Message(message)) => self.received(ledger, &message),
                    Ok(Outcome::Ended(session, reason)) => {
                        ledger.session_ended(self.index, reason);
                        self.forget(ledger, session);
                    }
                    Err(OpError::Cancelled) if self.is_ending => return,
                    other => broken(format!("a receive of node {} ended with {other:?}", self.index)),
                }
                // Messages that a program leaves have their senders wait for credit.
                if ledger.mode != Mode::Busy || !ledger.one_in(3) {
                    self.receive();
                }
            }
            Pending::Send => {}
            Pending::Close(memory) => {
                rule!(!memory.is_in_use(), "a window of node {} is closed, and its memory in use", self.index);
                let mut bytes = vec![0; memory.len()];
                memory.read(0, &mut bytes).expect("its own range");
                self.closed.push((memory, bytes));
            }
            Pending::Call { number, windows } => self.call_ended(ledger, number, windows, &result),
            Pending::Serve { held, memory, is_put } => self.served(ledger, held, (&memory, is_put), &result),
            Pending::PutBlocks { session, tag, memory } => self.put_ended(ledger, session, tag, &memory, &result),
            Pending::GetBlocks { session, get } => self.get_ended(ledger, session, &get, &result),
            Pending::Flush { session, before } => self.flushed(session, &before, &result),
        }
    }

    fn session_up(&mut self, ledger: &mut Ledger, session: Session) {
        ledger.note(self.index, 2);
        // An accept may have its result behind the first message.
        self.sessions.entry(session).or_default();
        self.offer_window(ledger, session);
    }

    /// A session has ended, and so what was open for it.
    pub fn forget(&mut self, ledger: &mut Ledger, session: Session) {
        ledger.note(self.index, 3);
        if let Some(mine) = self.sessions.remove(&session).and_then(|peer| peer.mine) {
            self.close_window(mine.window, mine.memory);
        }
        let is_of_it = |held: &OpenCall| held.session == session && !held.is_busy;
        let calls: Vec<u64> = self.held.iter().filter(|(_, held)| is_of_it(held)).map(|(key, _)| *key).collect();
        for key in calls {
            self.abandon(ledger, key);
        }
    }

    /// Closes a window; the memory is looked at from then on.
    pub fn close_window(&mut self, window: byway_fabric::node::Window, memory: Memory) {
        let closing = window.close().expect("a window is closed once");
        self.add(closing, Pending::Close(memory));
    }

    /// Sends a message of that kind, whose place among all that this end has sent it says. False if it cannot be sent now.
    pub fn send(&mut self, session: Session, kind: u8, payload: &[u8]) -> bool {
        let Some(peer) = self.sessions.get(&session) else { return false };
        let header = [&[kind][..], &peer.sent.to_le_bytes()].concat();
        let Ok(op) = self.node().send(session, &header, payload) else { return false };
        self.add(op, Pending::Send);
        if let Some(peer) = self.sessions.get_mut(&session) {
            peer.sent += 1;
        }
        true
    }

    /// Ends a session.
    pub fn close_session(&mut self, ledger: &mut Ledger) {
        let Some((session, _)) = self.pick_session(ledger) else { return };
        self.node().close(session).expect("not in a child");
        self.left.insert(session);
        self.forget(ledger, session);
    }

    pub fn say_something(&mut self, ledger: &mut Ledger) {
        if let Some((session, _)) = self.pick_session(ledger) {
            self.say_to(ledger, session);
        }
    }

    pub fn say_to(&mut self, ledger: &mut Ledger, session: Session) {
        let len = ledger.below(200);
        self.send(session, NUMBERED, &vec![7; len]);
    }

    fn received(&mut self, ledger: &mut Ledger, message: &Message) {
        ledger.report.messages += 1;
        ledger.note(self.index, 4);
        if self.left.contains(&message.session) {
            return;
        }
        let peer = self.sessions.entry(message.session).or_default();
        let (kind, rest) = (message.header[0], &message.header[1..]);
        if kind == BEHIND_PUT {
            // It comes when the bytes lie there, which messages that were sent later do not wait for.
            return self.put_was_told(message.session, rest);
        }
        let (number, received) = (u64::from_le_bytes(rest.try_into().expect("a number")), peer.received);
        rule!(number == received, "node {} got message {number} of a session after {received}", self.index);
        peer.received += 1;
        if kind == OFFERS_WINDOW {
            let descriptor = Descriptor::from_bytes(message.payload[..].try_into().expect("a descriptor"));
            peer.theirs = Some(Theirs::new(descriptor));
        }
    }

    /// Connects to those to whom it has no session.
    pub fn reconnect(&mut self, ledger: &Ledger) {
        let mut missing = self.wanted.clone();
        let connected: Vec<usize> = self.sessions.keys().filter_map(|session| self.peer(ledger, *session)).collect();
        let connecting = self.pending.values().filter_map(|(_, pending)| match pending {
            Pending::Connect(to) => Some(*to),
            _ => None,
        });
        for there in connected.into_iter().chain(connecting) {
            if let Some(place) = missing.iter().position(|wanted| *wanted == there) {
                missing.swap_remove(place);
            }
        }
        for to in missing {
            let address = if ledger.are_on_one_host(self.index, to) { shared_at(to) } else { at(to) };
            let op = self.node().start_connect(&address).expect("a connect");
            self.add(op, Pending::Connect(to));
        }
    }

    /// Whether every session that it wants is there, and its peer has opened a window.
    pub fn is_connected(&self, ledger: &Ledger) -> bool {
        let has = |wanted: &usize| self.sessions.keys().any(|session| self.peer(ledger, *session) == Some(*wanted));
        self.wanted.iter().all(has) && self.sessions.values().all(|peer| peer.theirs.is_some())
    }

    /// Messages that it has sent over a session, and those that it has received.
    pub fn messages(&self, session: Session) -> (u64, u64) {
        self.sessions.get(&session).map_or((0, 0), |peer| (peer.sent, peer.received))
    }

    /// The memory of windows that were closed holds what it did then.
    pub fn check_closed(&mut self) {
        for (memory, held) in std::mem::take(&mut self.closed) {
            self.check_unchanged(&memory, &held);
        }
    }

    pub fn check_unchanged(&self, memory: &Memory, held: &[u8]) {
        let mut bytes = vec![0; held.len()];
        memory.read(0, &mut bytes).expect("its own range");
        rule!(bytes == held, "memory of node {} changed after its window was closed", self.index);
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { sent, received, mine, theirs } = self;
        write!(f, "{sent} sent, {received} received, windows {} and {}", mine.is_some(), theirs.is_some())
    }
}
