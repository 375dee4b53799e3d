//! The loop of a node with all its state, and the execution of a program's commands.
//!
//! Frames, pools and shared frames are counted without atomics (`Rc`), so two threads must never use them at the same time.
//! The engine owns all of them in its reactor and its fabric, none of its methods returns one, and it lies in a mutex: that
//! makes it [`Send`]. A program gets copies (messages), or bytes in mappings, which any thread may hold.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, MutexGuard};

use byway_reactor::{Address, Completion, Errno, Instant, Op, Reactor, Token, Wait};

use super::command::{Command, Header};
use super::deferred::Deferred;
use super::error::OpError;
use super::layer::{Layer, Turn};
use super::liveness::ReplyWatch;
use super::lock::Lock;
use super::memory::Places;
use super::moving::Moving;
use super::op::{Completed, Outcome};
use super::shared::OpSlot;
use super::shared::{OpKind, Shared};
use super::transfers::{Get, Linger, Put, PutRequest};
use super::windows::{Closings, OpenWindow};
use super::{NodeCounters, NodeOptions, OpId, Session};
use crate::limits::CLOSE_TIME_MAX;
use crate::registration::{self, Mode};
use crate::session::{self, ClientId, CloseReason, Identity};
use crate::slots::{SessionId, Slots};
use crate::tls::TlsClient;
use crate::wire::{Kind, RefuseCode};
use crate::{Fabric, Options};

/// The class of the fabric's tokens, and of our own.
const FABRIC_CLASS: u8 = 1;
const NODE_CLASS: u8 = 2;
const CLOSE: u8 = 1;
const ALARM: u8 = 2;

/// See the module.
pub(super) struct Engine {
    reactor: Reactor,
    fabric: Fabric,
    pub(super) core: Core,
    reaped: Vec<Completion>,
    /// Commands that were taken out of the tables and have not run.
    commands: VecDeque<Command>,
}

/// Commands, and reports, for which a turn keeps room.
const COMMANDS_KEPT: usize = 256;

// SAFETY: all that is not `Send` in here is counted by `Rc`s whose every handle lies in this engine: the fabric is made here, the
// reactor was made by `Node` for this engine, their pools, frames and shared frames stay with them, and frames over a program's
// memory are made and dropped here. Nothing of it is handed out, so who has the engine (through its mutex, one thread at a time)
// has them all. The layer is `Send` by its bound. Nothing in it depends on the thread: the reactor is opened for threads, and
// neither it nor the fabric has thread-local state; nor do the verbs of RDMA, which any thread may call. Where the reactor is
// somebody else's (`Node::over`) none of this holds: `Inner::try_engine` gives that engine to the thread alone that made it, and
// on another thread it is never dropped.
unsafe impl Send for Engine {}

/// A session on the loop.
pub(super) struct NodeSession {
    pub(super) fabric: SessionId,
    /// The fabric says that it can be used.
    pub(super) up: bool,
    /// This end has connected.
    pub(super) begins: bool,
    /// The peer has all lanes: a client that has named its protocols, or a server, which has let in each lane; and if there is
    /// a layer, the server has named its protocols.
    pub(super) greeted: bool,
    /// Messages that may be sent.
    pub(super) credits: u32,
    /// Messages that the peer may send.
    pub(super) granted: u32,
    /// Credit is to be given back once the peer has read more of what waits for it.
    pub(super) credit_held: bool,
    pub(super) waiting: VecDeque<Waiting>,
    /// Since when something waits for credit of the peer.
    pub(super) short_since: Option<Instant>,
    /// Parts of puts and gets that have not ended, of operations that have not.
    pub(super) asked: usize,
    pub(super) deferred: Deferred,
    /// What a turn has left of an operation.
    pub(super) moving: Option<Box<Moving>>,
    /// Puts in flight, by their place in the order of all, in that order; and how many there were.
    pub(super) puts: VecDeque<u64>,
    pub(super) put_count: u64,
    /// Puts in flight that go through the stream, by the key of their window: what is put there meanwhile goes behind them, even
    /// if the window's place is known by now. None where there is no stream.
    pub(super) streamed: HashMap<u64, u32>,
    /// Flushes, each with the number of puts before it.
    pub(super) flushes: VecDeque<(u64, OpSlot)>,
    pub(super) windows: HashSet<(u64, u64)>,
    /// Windows that were closed while the peer may have been sending into them.
    pub(super) filling: usize,
    /// Whether the fabric was told that a reply is expected, and whether it is to be told anew.
    pub(super) expected_reply: bool,
    pub(super) liveness_noted: bool,
    pub(super) ended: Option<CloseReason>,
}

/// What waits for credit.
pub(super) enum Waiting {
    Message { op: Option<OpSlot>, header: Header, payload: Vec<u8> },
    Put { op: OpSlot, segments: super::memory::HeldSegments, to: Places, message: Header },
}

impl NodeSession {
    /// Whether the program knows of it.
    pub(super) fn is_ready(&self) -> bool {
        self.up && self.greeted
    }

    /// Whether a put waits for credit, or for a message before it that does.
    pub(super) fn has_put_waiting(&self) -> bool {
        self.waiting.iter().any(|waiting| matches!(waiting, Waiting::Put { .. }))
    }
}

impl Waiting {
    fn op(&self) -> Option<OpSlot> {
        match self {
            Self::Message { op, .. } => *op,
            Self::Put { op, .. } => Some(*op),
        }
    }
}

/// What the loop has done of what the tables hold.
enum Report {
    Ended(OpSlot, Completed),
    /// A message that was counted as waiting has been sent, or will not be.
    WaitsNoLonger(Session),
}

/// What the fabric's events change.
pub(super) struct Core {
    shared: Arc<Lock<Shared>>,
    /// What the tables are told when they are locked next.
    reports: Vec<Report>,
    pub(super) sessions: HashMap<Session, NodeSession>,
    pub(super) by_fabric: HashMap<SessionId, Session>,
    pub(super) puts: Slots<Put>,
    pub(super) gets: Slots<Get>,
    pub(super) lingering: Vec<Linger>,
    /// Sessions of which something is deferred.
    pub(super) crowded: Vec<Session>,
    /// Sessions with an operation whose parts have not all begun.
    pub(super) moving: usize,
    /// Bytes that this turn has copied.
    pub(super) copied_bytes: usize,
    pub(super) closings: Closings,
    pub(super) reply_watch: ReplyWatch,
    pub(super) layer: Option<Box<dyn Layer>>,
    pub(super) credits: u16,
    alarm: Option<Instant>,
}

impl Engine {
    /// An engine on a loop. Keys and nonces are those of the seed, if there is one.
    pub(super) fn new(
        reactor: Reactor,
        options: &NodeOptions,
        seed: Option<u64>,
        shared: &Arc<Lock<Shared>>,
        layer: Option<Box<dyn Layer>>,
    ) -> Self {
        let mut fabric_options = Options::new(FABRIC_CLASS);
        fabric_options.keep_alive = options.keep_alive;
        fabric_options.terms.bulk_lanes = options.bulk_lanes;
        fabric_options.terms.checksum = options.checksum;
        fabric_options.registrations = options.registrations;
        fabric_options.seed = seed;
        let mut fabric = Fabric::new(fabric_options);
        fabric.set_tls_server(options.tls.clone());
        let instance = fabric.random().next_u64();
        fabric.serve(&reactor, Arc::new(crate::Registry::new(instance)));
        let core = Core {
            shared: Arc::clone(shared),
            reports: Vec::new(),
            sessions: HashMap::new(),
            by_fabric: HashMap::new(),
            puts: Slots::default(),
            gets: Slots::default(),
            lingering: Vec::new(),
            crowded: Vec::new(),
            moving: 0,
            copied_bytes: 0,
            closings: Closings::default(),
            reply_watch: ReplyWatch::default(),
            layer,
            credits: options.messages.max(1),
            alarm: None,
        };
        Self { reactor, fabric, core, reaped: Vec::new(), commands: VecDeque::new() }
    }

    pub(super) fn reactor(&mut self) -> &mut Reactor {
        &mut self.reactor
    }

    pub(super) fn now(&self) -> Instant {
        self.reactor.now()
    }

    /// Which backend it has.
    pub(super) fn io(&self) -> &'static str {
        self.reactor.io().name
    }

    /// Writes to the tables what has ended on the loop, and takes the commands out of them. To be called with the tables of this node.
    pub(super) fn settle(&mut self, shared: &mut Shared) {
        self.core.report(shared);
        if self.commands.is_empty() {
            std::mem::swap(&mut self.commands, &mut shared.commands);
        } else {
            self.commands.append(&mut shared.commands);
        }
    }

    /// Whether commands were taken that have not run.
    pub(super) fn has_commands(&self) -> bool {
        !self.commands.is_empty()
    }

    /// Whether the kernel has not been given all that was submitted.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        self.reactor.has_unsubmitted()
    }

    /// Drops the commands that were taken: a thread has panicked, and no other one runs them.
    pub(super) fn drop_commands(&mut self) {
        self.commands.clear();
    }

    /// Runs the commands that were taken, and sends what comes of them.
    pub(super) fn run_commands(&mut self) {
        if self.commands.is_empty() {
            return;
        }
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            self.core.run(&mut self.fabric, &mut self.reactor, command);
        }
        // Its room is kept, but not all that a burst has left.
        commands.shrink_to(COMMANDS_KEPT);
        self.commands = commands;
        self.flush();
    }

    /// Sends what has gathered, and begins what may now begin.
    fn flush(&mut self) {
        loop {
            self.core.end_filling(&mut self.fabric);
            // First: the fabric sets a timer for peers that are watched from now on.
            self.core.update_liveness(&mut self.fabric, &self.reactor);
            self.fabric.flush(&mut self.reactor, &mut self.core);
            let ran = !self.core.crowded.is_empty() && self.core.run_deferred(&mut self.fabric, &mut self.reactor);
            if !ran && !self.core.reply_watch.has_changes() {
                break;
            }
        }
        self.core.end_lingering();
    }

    /// Runs the commands that were taken, for a thread that is not going to wait: the kernel takes what they submit.
    pub(super) fn pass_on(&mut self) {
        self.run_commands();
        self.hand_over();
    }

    /// Has the kernel take what was submitted.
    pub(super) fn hand_over(&mut self) {
        self.reactor.hand_over();
    }

    /// Takes the completions that are known without asking the kernel.
    pub(super) fn reap_known(&mut self) {
        // A failure now repeats in the wait, which reports it.
        let _ = self.turn(Reactor::reap_known);
    }

    /// Waits as asked, and does what has come.
    pub(super) fn reap(&mut self, wait: Wait) -> Result<(), Errno> {
        self.turn(|reactor, reaped| reactor.reap(reaped, wait))
    }

    fn turn(
        &mut self,
        reap: impl FnOnce(&mut Reactor, &mut Vec<Completion>) -> std::io::Result<()>,
    ) -> Result<(), Errno> {
        let mut reaped = std::mem::take(&mut self.reaped);
        self.core.copied_bytes = 0;
        let result = reap(&mut self.reactor, &mut reaped);
        for completion in reaped.drain(..) {
            match completion.token.class() {
                _ if completion.token == Token::WAKE => {}
                FABRIC_CLASS => self.fabric.handle(&mut self.reactor, completion, &mut self.core),
                NODE_CLASS => self.timed_out(completion.token),
                other => debug_assert!(false, "nobody has begun anything of class {other}"),
            }
        }
        self.reaped = reaped;
        self.fabric.feed_starved(&mut self.reactor, &mut self.core);
        self.flush();
        result.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn timed_out(&mut self, token: Token) {
        if token.tag() == CLOSE {
            let named = |session: &&Session| {
                session.0.index == token.index() && session.0.generation & 0x00ff_ffff == token.generation()
            };
            if let Some(state) =
                self.core.sessions.keys().find(named).and_then(|session| self.core.sessions.get(session))
            {
                self.fabric.close(&mut self.reactor, state.fabric, CloseReason::Closed);
            }
            return;
        }
        let now = self.reactor.now();
        if self.core.alarm.is_some_and(|at| at <= now) {
            self.core.alarm = None;
            self.core.with_layer(&mut self.fabric, &mut self.reactor, |layer, turn| layer.alarm(turn, now));
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.fabric.end_lent(&mut self.reactor);
    }
}

impl Core {
    /// The tables, which know by then all that was reported.
    pub(super) fn shared(&mut self) -> MutexGuard<'_, Shared> {
        let mut shared = self.shared.lock();
        report(&mut self.reports, &mut shared);
        shared
    }

    /// As [`Self::shared`], with the tables that the caller has locked.
    fn report(&mut self, shared: &mut Shared) {
        report(&mut self.reports, shared);
    }

    /// Ends an operation. Threads see that it has ended when this one locks the tables again: no later than with the turn's end.
    pub(super) fn complete(&mut self, op: OpSlot, result: Completed) {
        self.reports.push(Report::Ended(op, result));
    }

    /// A message that was counted waits no longer. Seen as with [`Self::complete`].
    pub(super) fn waits_no_longer(&mut self, session: Session) {
        self.reports.push(Report::WaitsNoLonger(session));
    }

    pub(super) fn with_layer(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        call: impl FnOnce(&mut dyn Layer, &mut Turn<'_>),
    ) {
        if let Some(mut layer) = self.layer.take() {
            call(&mut *layer, &mut Turn::new(self, fabric, reactor));
            self.layer = Some(layer);
        }
    }

    /// Has the layer called at `at`, or before if it asked for that.
    pub(super) fn set_alarm(&mut self, reactor: &mut Reactor, at: Instant) {
        if self.alarm.is_some_and(|earlier| earlier <= at) {
            return;
        }
        let token = Token::new(NODE_CLASS, ALARM, 0, 0);
        if self.alarm.replace(at).is_some() {
            reactor.cancel(token);
        }
        reactor.submit(Op::Timer { at }, token);
    }

    /// Does what was asked for.
    pub(super) fn run_now(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, command: Command) {
        match command {
            Command::Listen { op, address } => {
                let result = listen(fabric, reactor, &address).map(Outcome::Listening);
                self.complete(op, result);
            }
            Command::StopListening { op } => {
                fabric.close_listeners(reactor);
                self.complete(op, Ok(Outcome::Done));
            }
            Command::Connect { session, address, tls } => self.connect(fabric, reactor, session, address, tls),
            Command::Close { session } => self.close(fabric, reactor, session, RefuseCode::ShuttingDown),
            Command::Send { op, session, header, payload } => {
                self.send(fabric, reactor, session, Waiting::Message { op, header, payload });
            }
            Command::Say { session, header, payload } => self.say(fabric, reactor, session, header, &payload),
            Command::Put { op, session, segments, to, message: Some(message) } => {
                self.send(fabric, reactor, session, Waiting::Put { op, segments, to, message });
            }
            Command::Put { op, session, segments, to, message: None } => {
                self.start_put(fabric, reactor, session, PutRequest { op, segments, to, message: None });
            }
            Command::Get { op, session, segments, from } => {
                self.start_get(fabric, reactor, op, session, segments, from);
            }
            Command::GiveUp { op, session } => self.give_up(fabric, reactor, op, session),
            Command::Flush { op, session } => self.start_flush(op, session),
            Command::Open { op, sessions, mapping, range, rights, once } => {
                let asked = OpenWindow { mapping: &mapping, range, rights, once };
                let opened = self.open(fabric, reactor, &sessions, &asked);
                self.complete(op, opened.map(Outcome::Opened));
            }
            Command::CloseWindow { op, sessions, descriptor, mapping } => {
                self.close_window(fabric, reactor, op, &sessions, descriptor, mapping);
            }
            Command::Look { op, session, into } => {
                let looked = self.look(fabric, reactor, session, &into);
                self.complete(op, looked.map(|()| Outcome::Done));
            }
            Command::Cancel { op, kind } => self.cancel(fabric, reactor, op, kind),
            Command::GiveCredit { session } => self.give_credit(fabric, session),
            Command::Alarm { at } => self.set_alarm(reactor, at),
            // The thread that asked waits for this.
            Command::Count { tell } => drop(tell.send(held(fabric, reactor))),
        }
    }

    pub(super) fn add_link(&mut self, fabric: SessionId, session: Session, begins: bool) {
        let state = NodeSession {
            fabric,
            up: false,
            begins,
            // A layer must know first what the peer speaks.
            greeted: begins && self.layer.is_none(),
            credits: 0,
            granted: u32::from(self.credits),
            credit_held: false,
            waiting: VecDeque::new(),
            short_since: None,
            asked: 0,
            deferred: Deferred::default(),
            moving: None,
            puts: VecDeque::new(),
            put_count: 0,
            streamed: HashMap::new(),
            flushes: VecDeque::new(),
            windows: HashSet::new(),
            filling: 0,
            expected_reply: false,
            liveness_noted: false,
            ended: None,
        };
        self.sessions.insert(session, state);
        self.by_fabric.insert(fabric, session);
    }

    fn connect(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        to: Address,
        tls: Option<TlsClient>,
    ) {
        // Each session is a client of its own: a client has one at a time.
        let mut words = [0; 4];
        words.fill_with(|| fabric.random().next_u64());
        let bytes: [u8; 32] = zerocopy::transmute!(words);
        let (client, nonce) = (bytes[..16].try_into(), bytes[16..].try_into());
        let (Ok(client), Ok(nonce)) = (client, nonce) else { return };
        let identity = Identity { client: ClientId(client), number: 1, nonce };
        let slot = fabric.connect_over(reactor, to, identity, tls);
        self.add_link(slot, session, true);
    }

    pub(super) fn close(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session, code: RefuseCode) {
        let Some(state) = self.sessions.get(&session) else { return };
        if !state.is_ready() {
            return fabric.close(reactor, state.fabric, CloseReason::Closed);
        }
        self.end_deferred(fabric, reactor, session);
        let Some(state) = self.sessions.get(&session) else { return };
        // The peer closes when it has read that: closed by us, its other lanes could end before it has read all of this one.
        fabric.send(state.fabric, session::refuse(Kind::Goodbye, code));
        let at = reactor.now() + CLOSE_TIME_MAX;
        reactor.submit(Op::Timer { at }, Token::new(NODE_CLASS, CLOSE, session.0.index, session.0.generation));
    }

    /// The operation's owner wants its memory free of other users.
    fn give_up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, op: Option<OpId>, session: Session) {
        if let Some(op) = op {
            if self.cancel_deferred(session, op) {
                return self.complete(op.0, Err(OpError::Cancelled));
            }
            // It may have ended in between.
            if !self.shared().is_under_way(op.0) {
                return;
            }
        }
        if let Some(state) = self.sessions.get(&session) {
            fabric.close(reactor, state.fabric, CloseReason::Closed);
        }
    }

    fn cancel(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, op: OpId, kind: OpKind) {
        match kind {
            OpKind::Send(session) => {
                let Some(state) = self.sessions.get_mut(&session) else { return };
                let place = state.waiting.iter().position(|waiting| waiting.op() == Some(op.0));
                let is_waiting = place.and_then(|place| state.waiting.remove(place)).is_some();
                self.note_credit(fabric, reactor, session);
                if !is_waiting && !self.cancel_deferred(session, op) {
                    return;
                }
                self.waits_no_longer(session);
                self.complete(op.0, Err(OpError::Cancelled));
            }
            OpKind::Transfer(session) => {
                if self.cancel_deferred(session, op) {
                    self.complete(op.0, Err(OpError::Cancelled));
                }
            }
            OpKind::Layer => self.with_layer(fabric, reactor, |layer, turn| layer.cancelled(turn, op)),
            OpKind::Receive(_) | OpKind::Accept | OpKind::Connect(_) | OpKind::Plain => {}
        }
    }
}

fn report(reports: &mut Vec<Report>, shared: &mut Shared) {
    for report in reports.drain(..) {
        match report {
            Report::Ended(op, result) => shared.complete(op, result),
            Report::WaitsNoLonger(session) => shared.waits_no_longer(session),
        }
    }
    reports.shrink_to(COMMANDS_KEPT);
}

/// The loop's own share of the counters: windows, loans, frames and registrations.
fn held(fabric: &mut Fabric, reactor: &Reactor) -> NodeCounters {
    let frames = reactor.frames();
    let frame_bytes = frames.bytes() - frames.free_bytes();
    let loans = fabric.loan_count();
    let (mode, registrations) = fabric.registrations().unwrap_or((Mode::Cached, registration::Counters::default()));
    let registered_each_time = if let Mode::EachTime(reason) = mode { Some(reason) } else { None };
    let windows = fabric.windows();
    let (windows, windows_refused) = (windows.len(), windows.refused());
    let (ops, sessions) = (0, 0);
    NodeCounters { windows, windows_refused, ops, sessions, loans, frame_bytes, registrations, registered_each_time }
}

/// Listens; gives the address with its port, where there is one.
fn listen(fabric: &mut Fabric, reactor: &mut Reactor, address: &Address) -> Result<Option<SocketAddr>, OpError> {
    if let Address::Rdma(at) = address {
        return fabric.listen_rdma(reactor, *at).map(Some).map_err(OpError::Rdma);
    }
    let listening = fabric.listen(reactor, address).map(|listener| reactor.local_address(listener));
    listening.map_err(|error| OpError::Io(Errno::from_io_error(&error).unwrap_or(Errno::IO)))
}

#[cfg(test)]
mod tests;
