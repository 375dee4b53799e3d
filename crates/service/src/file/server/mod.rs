//! The service of shares on one loop.
//!
//! The loop has each session's table (`table.rs`) and decodes calls (`calls.rs`). Calls that may block, except transfers of
//! data, run on worker threads (`workers.rs`), with the rights of the calling user (`tree.rs` has the calls themselves). The
//! loop's own reads and writes move data between frames and files (`data.rs`). Locks are a table that the loops of a share
//! have in common (`locking.rs`): a wait costs no thread. Answers to calls that must not be done twice are kept
//! (`replies.rs`), and so is a client's state when its session ends (`sessions.rs`, `recovery.rs`).

mod calls;
mod counters;
mod data;
mod descriptors;
mod finish;
mod kept_files;
mod kept_names;
mod leases;
mod listing;
mod locking;
mod open_files;
mod outcome;
mod recovery;
mod refusals;
mod reopening;
mod replies;
mod sessions;
mod silence;
mod syncing;
mod table;
mod tree;
mod waiting;
mod workers;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use byway_fabric::access::Right;
use byway_fabric::{EndedGet, SessionId, Slot, Slots, WindowKey};
use byway_reactor::privilege::limit_writes_of_thread;
use byway_reactor::{Completion, File, Instant, Op, Reactor, Token, Waker, WriteAt};
use byway_rpc::session::{CallRef, Grant, Incomer, Spoken};

use self::calls::Asked;
use self::counters::{Counted, Counters};
pub use self::counters::{ShareCounters, ShareReport};
use self::leases::Parked;
pub use self::recovery::Recovery;
use self::replies::{Arrival, KeptReply, Reply, SlotUse};
use self::sessions::Attaching;
use self::silence::Silence;
use self::table::{Client, Node};
use self::waiting::Transfer;
use self::workers::Workers;
use super::grace::ClientHolding;
use super::leases::{Change, Since};
use super::share::Share;
use super::wire::{CallError, ClientName, PROTOCOL, VERSIONS};
use crate::host::{At, Host, Line, Service, SmallAnswer};

/// Where the end of a wait for a lock is told: the loop of the session that waits.
#[derive(Clone, Debug)]
pub struct Ticket {
    mailbox: Arc<Mailbox>,
    request: FileRequestId,
}

#[derive(Debug)]
struct Mailbox {
    granted: Mutex<Vec<FileRequestId>>,
    /// Sessions whose clients have begun another, perhaps on another loop.
    superseded: Mutex<Vec<SessionId>>,
    leases: Mutex<Vec<leases::News>>,
    waker: Waker,
}

/// A call to answer.
#[derive(Clone, Copy, Debug)]
struct Call {
    session: SessionId,
    named: CallRef,
    /// Where the answer is kept, if it is.
    slot: Option<SlotUse>,
    counted: Option<Counted>,
}

impl From<CallRef> for Call {
    fn from(named: CallRef) -> Self {
        Self { session: named.session, named, slot: None, counted: None }
    }
}

/// The window of a call.
#[derive(Clone, Copy, Debug)]
struct Window {
    key: WindowKey,
    len: usize,
}

/// The number of a [`FileRequest`].
type FileRequestId = Slot<FileRequest>;

/// A client's request that has not ended.
#[derive(Debug)]
enum FileRequest {
    /// A worker looks up a share's root, for a client that attaches.
    Attach { call: Call, attaching: Attaching },
    /// A worker puts a client on the lists of its shares, before it gets what the call asks for.
    List { call: Call, entry: ClientHolding<ClientName> },
    /// A worker thread runs it.
    Worker { call: Call, node: Arc<Node>, since: Option<Since> },
    /// Bytes are read from a file.
    Read { call: Call, window: Option<Window>, len: usize },
    /// Bytes come from the client's window, to be written.
    Get { call: Call, node: Arc<Node>, file: File, to: WriteAt, len: usize },
    /// Bytes are written to a file.
    Write { call: Call, node: Arc<Node>, len: usize },
    /// A lock is waited for.
    Lock { call: Call },
    /// A client waits for recalls.
    Recalls { call: Call },
}

impl FileRequest {
    fn call(&self) -> Call {
        match self {
            Self::Attach { call, .. }
            | Self::List { call, .. }
            | Self::Worker { call, .. }
            | Self::Read { call, .. }
            | Self::Get { call, .. }
            | Self::Write { call, .. }
            | Self::Lock { call, .. }
            | Self::Recalls { call } => *call,
        }
    }
}

/// See the module.
pub struct Shares {
    class: u8,
    recovery: Arc<Recovery>,
    shares: Vec<Arc<Share>>,
    counters: Counters,
    /// By the index of the session's slot.
    clients: Vec<Option<Client>>,
    requests: Slots<FileRequest>,
    workers: Workers,
    /// Changes of requests.
    changes: HashMap<FileRequestId, Change>,
    /// Jobs whose change waits for leases.
    parked: HashMap<FileRequestId, Parked>,
    /// For when the timer for leases is set.
    lease_timer: Option<Instant>,
    /// Clients with locks.
    silence: Silence<SessionId>,
    mailbox: Arc<Mailbox>,
    /// What waits for frames.
    line: Line<Transfer>,
    /// Frames that had come back when it was tried last.
    given_back: u64,
}

impl Shares {
    /// No shares. Operations of the loop are of `class`; `recovery` is what the loops of the process have in common.
    pub fn new(reactor: &Reactor, class: u8, recovery: &Arc<Recovery>) -> Self {
        recovery.start(reactor.now());
        let (granted, superseded, leases) = (Mutex::default(), Mutex::default(), Mutex::default());
        let mailbox = Arc::new(Mailbox { granted, superseded, leases, waker: reactor.waker() });
        Self {
            class,
            recovery: Arc::clone(recovery),
            shares: Vec::new(),
            counters: Counters::default(),
            clients: Vec::new(),
            requests: Slots::default(),
            workers: Workers::new(reactor.waker()),
            changes: HashMap::new(),
            parked: HashMap::new(),
            lease_timer: None,
            silence: Silence::default(),
            mailbox,
            line: Line::default(),
            given_back: 0,
        }
    }

    /// What the service speaks, where each session may have so many calls in flight.
    pub const fn spoken(calls: u16) -> Spoken {
        Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: Some(Grant { calls, notices: 0 }) }
    }

    /// Takes `shares` as the whole list. The sessions that use one that is gone end: their clients come back and find it gone, or
    /// as it is now. From the first share on the calling thread, which is the loop's, writes to files without root's privileges: what
    /// it writes is for users.
    pub fn replace(&mut self, host: &mut Host, reactor: &mut Reactor, shares: &[Arc<Share>]) {
        if !shares.is_empty()
            && let Err(error) = limit_writes_of_thread()
        {
            tracing::error!(%error, "cannot give up root's privileges of writing; the shares stay as they were");
            return;
        }
        self.counters.replace(&self.shares, shares);
        self.shares = shares.to_vec();
        if let Some(until) = self.recovery.expect(shares, reactor.now()) {
            reactor.submit(Op::Timer { at: until }, Token::new(self.class, sessions::GRACE_END, 0, 0));
        }
        let at = host.at(reactor);
        let stays = |share: &Arc<Share>| shares.iter().any(|new| Arc::ptr_eq(new, share));
        for client in self.clients.iter().flatten() {
            if !client.shares.iter().all(stays) {
                at.sessions.dismiss(at.fabric, at.reactor, client.session);
            }
        }
    }

    /// Takes the end of an operation of the service's class.
    pub fn complete(&mut self, host: &mut Host, reactor: &mut Reactor, completion: Completion) {
        if completion.token.tag() == sessions::EXPIRY {
            return self.expire(reactor);
        }
        if completion.token.tag() == sessions::GRACE_END {
            return self.end_grace(reactor.now());
        }
        if completion.token.tag() == leases::LEASE_TIMER {
            self.lease_timer = None;
            return;
        }
        if completion.token.tag() == locking::LOCK_TIMER {
            return self.watch_locks(&mut host.at(reactor));
        }
        let request = FileRequestId::of_token(completion.token);
        self.moved(&mut host.at(reactor), request, completion.outcome);
    }

    /// The node ends: what waits for a lock or for leases of others waits no longer, and its client asks the next server.
    pub fn drain(&mut self, host: &mut Host, reactor: &mut Reactor) {
        let waits = self
            .requests
            .iter()
            .filter(|(_, request)| matches!(request, FileRequest::Lock { .. } | FileRequest::Recalls { .. }))
            .map(|(slot, _)| slot);
        let waits: Vec<_> = waits.collect();
        for request in waits {
            self.end(&mut host.at(reactor), request, Err(CallError::Busy));
        }
        self.end_parked(&mut host.at(reactor));
    }

    /// What this loop has done for each share.
    pub fn report(&self) -> Vec<ShareReport> {
        let clients = || self.clients.iter().flatten().filter(|client| !client.is_gone);
        let uses = |client: &&Client, share: &Arc<Share>| client.shares.iter().any(|used| Arc::ptr_eq(used, share));
        let report = |share: &Arc<Share>| ShareReport {
            share: Arc::clone(share),
            counters: self.counters.of(share),
            clients: clients().filter(|client| uses(client, share)).count() as u64,
        };
        self.shares.iter().map(report).collect()
    }

    /// Whether no call is left.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    fn client(&mut self, session: SessionId) -> Result<&mut Client, CallError> {
        let client = self.clients.get_mut(session.index as usize).and_then(Option::as_mut);
        client.filter(|client| client.session == session).ok_or(CallError::Stale)
    }

    fn start(&mut self, at: &mut At<'_>, request: FileRequest) -> FileRequestId {
        let session = request.call().session;
        at.sessions.begin_request(session);
        if let Ok(client) = self.client(session) {
            client.requests += 1;
        }
        self.requests.insert(request)
    }

    /// Answers, and ends the request.
    fn end(&mut self, at: &mut At<'_>, request: FileRequestId, answer: Result<Reply<'_>, CallError>) {
        self.end_change(request);
        let Some(ended) = self.requests.remove(request) else { return };
        self.reply(at, ended.call(), answer);
        self.ended(at, ended.call().session);
    }

    /// An answered request of a session has ended.
    fn ended(&mut self, at: &mut At<'_>, session: SessionId) {
        if let Ok(client) = self.client(session) {
            client.requests -= 1;
            if client.is_gone && client.requests == 0 {
                self.keep_or_drop(at, session);
            }
        }
        at.sessions.end_request(at.fabric, session);
    }

    /// Answers a call by an inline result and a small payload, or by an error.
    fn reply(&mut self, at: &mut At<'_>, call: Call, answer: Result<Reply<'_>, CallError>) {
        self.counters.answered(call.counted, answer.err());
        if let (Some(slot), Ok(client)) = (call.slot, self.client(call.session)) {
            client.replies.keep(slot, answer);
        }
        match answer {
            Ok(Reply { result, payload }) => {
                at.sessions.answer(at.fabric, call.named, SmallAnswer::done(result, payload));
            }
            Err(error) => at.sessions.answer(at.fabric, call.named, SmallAnswer::failed(error.status())),
        }
    }

    /// What the client of a session may do in a share, as its access list says now.
    fn right(at: &At<'_>, session: SessionId, share: &Share) -> Option<Right> {
        let client = at.sessions.get(session).map(|session| session.client.clone()).unwrap_or_default();
        share.right(&client)
    }
}

impl Service for Shares {
    fn protocol(&self) -> u8 {
        PROTOCOL
    }

    fn called(&mut self, at: &mut At<'_>, call: CallRef, asked: &Incomer<'_>) {
        let mut asked = match Asked::parse(call, asked) {
            Ok(asked) => asked,
            Err(error) => return self.reply(at, call.into(), Err(error)),
        };
        if let Ok(client) = self.client(call.session) {
            asked.call.counted = Counted::of(client, &asked);
        }
        let call = asked.call;
        // Each answer renews the client's leases, also one that is given again.
        if !self.note_heard(at, call.session) {
            return;
        }
        if let (Some(slot), Ok(client)) = (call.slot, self.client(call.session)) {
            match client.replies.arrive(slot) {
                Arrival::New => {}
                Arrival::Again(Ok(KeptReply { result, payload })) => {
                    return at.sessions.answer(at.fabric, call.named, SmallAnswer::done(&result[..], payload));
                }
                Arrival::Again(Err(error)) => {
                    return at.sessions.answer(at.fabric, call.named, SmallAnswer::failed(error.status()));
                }
                Arrival::Running => {
                    return at.sessions.answer(at.fabric, call.named, SmallAnswer::failed(CallError::Busy.status()));
                }
            }
        }
        if let Err(error) = self.begin(at, &asked) {
            self.reply(at, call, Err(error));
        }
    }

    fn got(&mut self, at: &mut At<'_>, _session: SessionId, get: EndedGet) {
        self.got_bytes(at, FileRequestId::from_u64(get.context), get.into_frame());
    }

    fn peer_gone(&mut self, at: &mut At<'_>, session: SessionId) {
        if at.sessions.is_up(session) {
            return;
        }
        self.gone(at, session);
    }

    fn turn(&mut self, at: &mut At<'_>) {
        self.turn_leases(at);
        for (request, result) in self.workers.collect() {
            self.finish(at, request, result);
        }
        let granted = std::mem::take(&mut *self.mailbox.granted.lock().unwrap_or_else(PoisonError::into_inner));
        for request in granted {
            let session = self.requests.get(request).map(|request| request.call().session);
            if let Some(session) = session {
                self.note_locked(at, session);
            }
            self.end(at, request, Ok(Reply::DONE));
        }
        self.end_superseded(at);
        self.remove_unneeded();
        self.feed(at);
    }

    fn has_waiting(&self) -> bool {
        !self.line.is_empty()
    }

    fn can_go_on(&self, reactor: &Reactor) -> bool {
        self.can_feed(reactor)
    }
}
