//! The client's session with its server: connecting again and again, opening the volume, calls, windows.

mod calls;
mod session;

use std::rc::Rc;
use std::time::Duration;

use byway_fabric::limits::CONTROL_QUEUE_BYTES;
use byway_fabric::tls::TlsClient;
use byway_fabric::{Agreed, ClientId, CloseReason, Fabric, Feedback, Identity, Options, SessionId, Stall, WindowKey};
use byway_reactor::limits::ARENA_BYTES_MAX;
use byway_reactor::{Address, Completion, Frame, FramePool, Instant, Op, Reactor, Token};
use byway_rpc::session::{Calls, Grant, Spoken};

use super::super::wire::{CallError, PROTOCOL, VERSIONS};
use super::machine::{Machine, OpId};
use super::request::{Bounds, Done, Request, VolumeError};
use crate::limits::{
    CLIENT_LOST_AFTER, CLIENT_REQUESTS_MAX, CLIENT_UNFLUSHED_BYTES, NOTICES_PER_SESSION, RECONNECT_MIN,
};

/// The tag of the volume's own timer; the fabric's tags are below.
const TIMER: u8 = 16;
/// The tag of the timer that ends a pause.
const PAUSE: u8 = 17;
/// How often a volume that waits for something looks at the time.
const TICK: Duration = Duration::from_millis(50);
/// Notices kept until the user takes them; older ones are dropped.
const NOTICES_MAX: usize = 16;

/// How a volume is used.
#[derive(Clone, Copy, Debug)]
pub struct VolumeOptions {
    /// The session: token class, checksum, lanes, keep-alive.
    pub fabric: Options,
    /// Bounds of what waits.
    pub bounds: Bounds,
    /// Nothing will be written: the server is told.
    pub read_only: bool,
    /// Who it is to the server; a new client by default.
    pub client: Option<ClientName>,
}

/// A client, so that another process can go on as it: the server begins the session of a client only when the I/O of the client's
/// earlier sessions has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientName {
    /// 16 random bytes.
    pub id: [u8; 16],
    /// Higher than the numbers of all its sessions before.
    pub first_session: u64,
}

impl VolumeOptions {
    /// The defaults, with tokens of `class` (0x30 to 0x3f).
    pub fn new(class: u8) -> Self {
        let bounds = Bounds {
            requests_max: CLIENT_REQUESTS_MAX,
            unflushed_bytes_max: CLIENT_UNFLUSHED_BYTES,
            lost_after: CLIENT_LOST_AFTER,
        };
        Self { fabric: Options::new(class), bounds, read_only: false, client: None }
    }
}

/// What the server said of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Bytes.
    pub len: u64,
    /// What offsets and lengths must be multiples of.
    pub block_bytes: u32,
    /// The longest request, in bytes.
    pub request_max: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The contents go with the server process.
    pub volatile: bool,
    /// The server process.
    pub instance: u64,
    /// The files that the server has open for the volume. Where this or [`VolumeInfo::instance`] is another than before,
    /// what was acknowledged and not flushed may be missing: it is written again, or, if the volume is volatile, all fails.
    pub store: u64,
    /// What the volume's bytes lie in, by a name that lasts as long as it does; 0 if the server does not know. Where it is
    /// another than before, all fails: the name is another volume's now.
    pub backing_id: u64,
}

/// What happened to a volume besides its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// It was opened, at first or again.
    Opened(VolumeInfo),
    /// It has another size.
    Resized(u64),
    /// The connection was lost; it is being made again.
    Disconnected(CloseReason),
    /// The server would not open it; that is tried again.
    Refused(CallError),
}

/// A volume of a server. See the module above.
pub struct Volume {
    fabric: Fabric,
    core: Core,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Connects at that time.
    Waiting(Instant),
    Connecting,
    Opening,
    Open {
        handle: u32,
    },
    /// The session ended; its lanes have not.
    Draining,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Open,
    Operation(OpId, Option<WindowKey>),
}

struct Core {
    machine: Machine<Frame, Rc<Frame>>,
    calls: Calls<Pending>,
    /// Operations whose answer came while their memory was still being filled: the server broke the protocol.
    limbo: Vec<(OpId, WindowKey)>,
    state: State,
    session: Option<SessionId>,
    agreed: Option<Agreed>,
    options: VolumeOptions,
    address: Address,
    name: String,
    identity: Identity,
    info: Option<VolumeInfo>,
    backoff: Duration,
    notices: Vec<Notice>,
    ticking: bool,
    /// Since when operations wait for an answer to give its credit back.
    short_since: Option<Instant>,
    /// The timer of a pause is set.
    pausing: bool,
    sessions: u64,
}

impl Volume {
    /// A volume of the server at `address`. Connects when [`Volume::flush`] is called.
    pub fn connect(reactor: &Reactor, address: Address, volume: &str, options: VolumeOptions) -> Self {
        let mut fabric = Fabric::new(options.fabric);
        let name = options.client.unwrap_or_else(|| ClientName { id: fabric.random().bytes16(), first_session: 1 });
        let (client, number) = (ClientId(name.id), name.first_session.saturating_sub(1));
        let now = reactor.now();
        let core = Core {
            machine: Machine::new(options.bounds, now),
            calls: calls(client),
            limbo: Vec::new(),
            state: State::Waiting(now),
            session: None,
            agreed: None,
            options,
            address,
            name: volume.to_owned(),
            identity: Identity { client, number, nonce: [0; 16] },
            info: None,
            backoff: RECONNECT_MIN,
            notices: Vec::new(),
            ticking: false,
            short_since: None,
            pausing: false,
            sessions: 0,
        };
        Self { fabric, core }
    }

    /// Sessions that are begun from now on are over TLS. To be called before the first [`Volume::flush`].
    pub fn set_tls(&mut self, tls: TlsClient) {
        self.fabric.set_tls_client(Some(tls));
    }

    /// A frame for a request. Over shared memory it is one of memory that the server has mapped too, which saves a copy on
    /// the way; requests take frames of any pool.
    pub fn alloc(&self, reactor: &Reactor, len: usize) -> Option<Frame> {
        self.shared_frame(len).or_else(|| reactor.frames().alloc(len))
    }

    /// A frame of memory that the server has mapped too, if there is any free.
    pub fn shared_frame(&self, len: usize) -> Option<Frame> {
        self.fabric.arena()?.alloc(len)
    }

    /// Takes a request; its answer comes from [`Volume::reap`] with that tag.
    ///
    /// # Errors
    /// The request, when too many are waiting: take answers first.
    pub fn submit(&mut self, request: Request<Frame, Rc<Frame>>, tag: u64) -> Result<(), Request<Frame, Rc<Frame>>> {
        self.core.machine.submit(request, tag)
    }

    /// Asks that the request of that tag end early; its answer comes as ever from [`Volume::reap`]. What no server has ends
    /// at once with [`VolumeError::Cancelled`], and so does what a server had when its session ends: it is not sent again.
    /// A server that is there answers as if nothing had been said. False if no request has that tag.
    pub fn cancel(&mut self, tag: u64) -> bool {
        self.core.machine.cancel(tag)
    }

    /// Appends the answers that have come.
    pub fn reap(&mut self, into: &mut Vec<Done<Frame>>) {
        self.core.machine.reap(into);
    }

    /// Appends what happened besides.
    pub fn take_notices(&mut self, into: &mut Vec<Notice>) {
        into.append(&mut self.core.notices);
    }

    /// What the server said of the volume, once it was opened.
    pub fn info(&self) -> Option<&VolumeInfo> {
        self.core.info.as_ref()
    }

    /// Why every request fails, if it does.
    pub fn failed(&self) -> Option<VolumeError> {
        self.core.machine.failed()
    }

    /// When all requests fail unless there is a session by then; `None` while there is one.
    pub fn lost_at(&self) -> Option<Instant> {
        self.core.machine.lost_at()
    }

    /// Requests whose answers have not been taken.
    pub fn pending(&self) -> usize {
        self.core.machine.pending()
    }

    /// What its session's transfers were like until now; `None` while there is no session.
    pub fn feedback(&self, reactor: &Reactor) -> Option<Feedback> {
        self.fabric.feedback(reactor, self.core.session?)
    }

    /// Changes that were sent again to another server process, or into another store.
    pub fn replayed(&self) -> u64 {
        self.core.machine.replayed()
    }

    /// Whether there is a session, and its server has every change that was acknowledged.
    pub fn is_settled(&self) -> bool {
        self.core.machine.settled()
    }

    /// Bytes of acknowledged changes that are kept until a flush.
    pub fn unflushed_bytes(&self) -> usize {
        self.core.machine.unflushed_bytes()
    }

    /// Sessions that were begun.
    pub fn sessions(&self) -> u64 {
        self.core.sessions
    }

    /// Answers to calls that were not in flight, which changed nothing: the server answered a call twice.
    pub fn stray_answers(&self) -> u64 {
        self.core.calls.counters().late
    }

    /// Takes a completion of this volume's token class.
    pub fn handle(&mut self, reactor: &mut Reactor, completion: Completion) {
        if completion.token.tag() < TIMER {
            return self.fabric.handle(reactor, completion, &mut self.core);
        }
        if completion.token.tag() == PAUSE {
            self.core.pausing = false;
            return;
        }
        self.core.ticking = false;
        let now = reactor.now();
        self.core.machine.tick(now);
        if self.core.machine.failed().is_some() {
            self.core.give_up(&mut self.fabric, reactor);
        }
        if self.core.calls.next_deadline().is_some_and(|at| at <= now)
            && let Some(session) = self.core.session
        {
            self.fabric.close(reactor, session, CloseReason::Silent);
        }
    }

    /// Sends what can be sent. To be called after submitting, and after all completions of a reap were handled.
    pub fn flush(&mut self, reactor: &mut Reactor) {
        let core = &mut self.core;
        self.fabric.feed_starved(reactor, core);
        if let State::Waiting(at) = core.state
            && core.machine.failed().is_none()
            && reactor.now() >= at
        {
            core.begin_session(&mut self.fabric, reactor);
        }
        core.pump(&mut self.fabric, reactor);
        if let Some(session) = core.session {
            self.fabric.set_expects_reply(reactor, session, core.state == State::Opening || core.calls_out() > 0);
        }
        self.fabric.flush(reactor, core);
        let waits = core.calls_out() > 0 || !matches!(core.state, State::Open { .. } | State::Failed);
        if waits && !core.ticking {
            core.ticking = true;
            let now = reactor.now();
            let at = match core.state {
                State::Waiting(at) => at.min(now + TICK),
                _ => now + TICK,
            };
            reactor.submit(Op::Timer { at }, Token::new(core.options.fabric.class, TIMER, 0, 0));
        }
        if let Some(at) = core.machine.paused_until(reactor.now())
            && !core.pausing
        {
            core.pausing = true;
            reactor.submit(Op::Timer { at }, Token::new(core.options.fabric.class, PAUSE, 0, 0));
        }
    }

    /// Fails all requests and ends the session. [`Volume::is_closed`] tells when nothing is in flight any more.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.core.machine.fail(VolumeError::Closed);
        self.core.give_up(&mut self.fabric, reactor);
    }

    /// Whether nothing is in flight and nothing will be.
    pub fn is_closed(&self) -> bool {
        self.core.state == State::Failed && self.fabric.lane_count() == 0
    }
}

impl Core {
    fn begin_session(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        self.identity.number += 1;
        self.identity.nonce = fabric.random().bytes16();
        self.state = State::Connecting;
        self.sessions += 1;
        if matches!(self.address, Address::Shared(_)) && fabric.arena().is_none() {
            let bytes = reactor.frames().bytes().min(ARENA_BYTES_MAX);
            match FramePool::shared(bytes) {
                Ok(arena) => fabric.lend(arena),
                Err(error) => tracing::debug!(%error, "cannot lend memory; payloads go through the stream"),
            }
        }
        self.session = Some(fabric.connect(reactor, self.address.clone(), self.identity));
    }

    fn give_up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        match self.session {
            Some(session) => fabric.close(reactor, session, CloseReason::Closed),
            None => self.state = State::Failed,
        }
    }

    fn notice(&mut self, notice: Notice) {
        if self.notices.len() == NOTICES_MAX {
            self.notices.remove(0);
        }
        self.notices.push(notice);
    }

    /// Sends operations while the server and the queues allow.
    fn pump(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        let (State::Open { handle }, Some(session)) = (self.state, self.session) else { return };
        self.note_credit(fabric, session, reactor);
        if !self.may_call() {
            return;
        }
        let now = reactor.now();
        while self.may_call()
            && !fabric.windows().is_full()
            && fabric.control_queued(session) < CONTROL_QUEUE_BYTES
            && let Some(id) = self.machine.next(now)
        {
            self.send(fabric, session, handle, id, now);
        }
        self.note_credit(fabric, session, reactor);
    }

    /// Notes when operations begin to wait for credit, and when they need not any more.
    fn note_credit(&mut self, fabric: &mut Fabric, session: SessionId, reactor: &Reactor) {
        let short = !self.may_call() && self.machine.unanswered() > self.calls_out();
        match (short, self.short_since) {
            (true, None) => self.short_since = Some(reactor.now()),
            (false, Some(since)) => {
                self.short_since = None;
                fabric.note_stall(session, Stall::Credit, reactor.now().since(since));
            }
            _ => {}
        }
    }

    /// Calls in flight.
    fn calls_out(&self) -> usize {
        self.session.map_or(0, |session| self.calls.calls_out(session))
    }

    fn may_call(&mut self) -> bool {
        self.session.is_some_and(|session| self.calls.may_call(session, PROTOCOL).is_ok())
    }
}

/// The calls of a client of volumes, which takes notices of them.
fn calls(client: ClientId) -> Calls<Pending> {
    let grant = Some(Grant { calls: 0, notices: NOTICES_PER_SESSION });
    Calls::new(client.0, vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant }])
}
