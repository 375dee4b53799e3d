//! The session with the server: made when it is needed, and made again when it was lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, NodeOptions, OpError, Session, SubmitError};
use byway_fabric::random::Random;
use byway_fabric::tls::TlsClient;
use byway_reactor::Address;
use byway_rpc::node::{Call, Reply, Rpc};
use byway_rpc::protocol::CALLS_FILES;
use zerocopy::{FromBytes, IntoBytes};

use super::super::wire::{Arguments, AttachResult, CallError, ClientName, Entry, Method, PROTOCOL};
use super::ClientError;
use super::backoff::Backoff;
use super::buffers::Buffers;
use super::caches;
use super::held_locks::nobody_else_had_them;
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN, FILE_CALL_TIME_MAX, FILE_LONG_CALL_TIME_MAX, RECONNECT_MAX};

/// How long one attempt to connect may take.
const ATTEMPT_TIME_MAX: Duration = Duration::from_secs(10);

/// How long a client that ends waits for the server to have heard it.
const DETACH_TIME_MAX: Duration = Duration::from_secs(1);

/// Before the first session. Processes have random numbers.
const NO_INSTANCE: u64 = 0;

/// Where the server is.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) address: Address,
    pub(super) tls: Option<TlsClient>,
    pub(super) share: String,
}

/// A session that works.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) session: Session,
    /// Counts the client's sessions.
    pub(super) number: u64,
    /// The time in which the server's names of nodes and open files are good: several sessions, if the server has kept them.
    pub(super) epoch: u64,
    /// The server process.
    pub(super) instance: u64,
    /// It is another process than that of the session before.
    pub(super) is_new_process: bool,
    /// Locks of an earlier epoch can be asked for again.
    pub(super) may_reclaim: bool,
    pub(super) read_only: bool,
    /// The groups of callers count.
    pub(super) trusts: bool,
}

/// How a call ended that brought no answer of the file service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server's word.
    Call(CallError),
    /// The session ended before the call was sent.
    NotSent,
    /// The session ended: whether it was done is not known.
    Lost,
    /// The time was over, and the session goes on: it may still be done.
    Late,
}

/// What a server had of this client at the last attach.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Attached {
    instance: u64,
    state: u64,
}

/// What is done with a session and the share's root before others use the session. False: it is another share.
pub(super) type OnAttached<'a> = &'a mut dyn FnMut(Live, &Entry) -> Result<bool, Failure>;

#[derive(Default)]
struct State {
    live: Option<Live>,
    /// Sessions that were tried.
    number: u64,
    /// Of the last attach, and its epoch.
    attached: Option<(Attached, u64)>,
    connecting: bool,
    backoff: Backoff,
    /// Since when there is no session.
    lost: Option<Instant>,
    closed: bool,
}

pub(super) struct ServerConnection {
    server: Server,
    /// Names this client to the server in all its sessions.
    name: ClientName,
    /// When the last call was sent that was answered, by the clock of leases.
    heard: AtomicU64,
    /// Calls that were sent.
    calls: AtomicU64,
    /// The server process of the last session that worked.
    instance: AtomicU64,
    pub(super) rpc: Rpc,
    pub(super) buffers: Buffers,
    state: Mutex<State>,
    changed: Condvar,
    lost_after: Duration,
    pub(super) times: Times,
}

/// How long calls may take while the server is alive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) short: Duration,
    pub(super) long: Duration,
}

impl ServerConnection {
    pub(super) fn new(server: Server, lost_after: Duration) -> std::io::Result<Self> {
        let options = NodeOptions { bulk_lanes: 2, ..NodeOptions::default() };
        let rpc = Rpc::open_for(&options, vec![CALLS_FILES])?;
        Ok(Self {
            server,
            name: Random::from_kernel().bytes16(),
            heard: AtomicU64::new(caches::now().nanos()),
            calls: AtomicU64::new(0),
            instance: AtomicU64::new(NO_INSTANCE),
            rpc,
            buffers: Buffers::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            lost_after,
            times: Times { short: FILE_CALL_TIME_MAX, long: FILE_LONG_CALL_TIME_MAX },
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session that works now.
    pub(super) fn now(&self) -> Option<Live> {
        self.state().live
    }

    /// Whether no further session is made.
    pub(super) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Makes the first session.
    pub(super) fn open(&self, attached: OnAttached<'_>) -> Result<Live, ClientError> {
        let live = self.attempt(1, attached)?;
        let mut state = self.state();
        (state.live, state.number) = (Some(live), 1);
        self.instance.store(live.instance, Ordering::Release);
        Ok(live)
    }

    /// A session: the one that there is, or a new one. Waits for it as long as the server may be lost.
    pub(super) fn live(&self, attached: OnAttached<'_>) -> Result<Live, Failure> {
        let mut tried = false;
        loop {
            let mut state = self.state();
            if let Some(live) = state.live {
                return Ok(live);
            }
            let lost = *state.lost.get_or_insert_with(Instant::now);
            // After that, each call tries once.
            if state.closed || (tried && lost.elapsed() > self.lost_after) {
                return Err(Failure::Lost);
            }
            let pause = state.backoff.remaining(Instant::now());
            if state.connecting || !pause.is_zero() {
                tried |= state.connecting;
                let pause = if state.connecting { RECONNECT_MAX } else { pause };
                drop(self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            state.connecting = true;
            let number = state.number + 1;
            drop(state);
            let made = self.attempt(number, attached);
            let mut state = self.state();
            state.connecting = false;
            state.number = number;
            tried = true;
            match made {
                // The client was closed meanwhile, and nobody else would end this session.
                Ok(live) if state.closed => {
                    drop(state);
                    self.changed.notify_all();
                    self.leave(live);
                    return Err(Failure::Lost);
                }
                Ok(live) => {
                    tracing::info!(share = self.server.share, "the server is back after {:?}", lost.elapsed());
                    (state.live, state.lost, state.backoff) = (Some(live), None, Backoff::default());
                    self.instance.store(live.instance, Ordering::Release);
                    drop(state);
                    self.changed.notify_all();
                    return Ok(live);
                }
                Err(error) => {
                    tracing::debug!(share = self.server.share, %error, "cannot connect again yet");
                    state.backoff.failed(Instant::now());
                    drop(state);
                    self.changed.notify_all();
                }
            }
        }
    }

    fn attempt(&self, number: u64, attached: OnAttached<'_>) -> Result<Live, ClientError> {
        let (node, deadline) = (self.rpc.node(), Deadline::after(ATTEMPT_TIME_MAX));
        let connected = match &self.server.tls {
            Some(tls) => node.connect_secure(&self.server.address, tls, deadline),
            None => node.connect(&self.server.address, deadline),
        };
        let session = connected.map_err(ClientError::Connect)?;
        let made = self.attach(session, number).and_then(|(live, root)| match attached(live, &root) {
            Ok(true) => Ok(live),
            Ok(false) => Err(ClientError::OtherDirectory { share: self.server.share.clone() }),
            Err(failure) => Err(self.failed(failure)),
        });
        if made.is_err() {
            let _ = node.close(session);
        }
        made
    }

    fn failed(&self, failure: Failure) -> ClientError {
        match failure {
            Failure::Call(error) => ClientError::Refused { share: self.server.share.clone(), error },
            Failure::NotSent | Failure::Lost | Failure::Late => ClientError::Lost,
        }
    }

    fn attach(&self, session: Session, number: u64) -> Result<(Live, Entry), ClientError> {
        let arguments = Arguments { name_len: (self.server.share.len() as u16).into(), ..super::NONE };
        let payload = [self.server.share.as_bytes(), &self.name].concat();
        let (since, mut pause) = (Instant::now(), BUSY_PAUSE_MIN);
        // The server ends the calls of the session before this one first.
        let reply = loop {
            match self.call_on(session, Method::Attach, &arguments, &payload, None) {
                Err(Failure::Call(CallError::Busy)) if since.elapsed() < ATTEMPT_TIME_MAX => {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                answer => break answer.map_err(|failure| self.failed(failure))?,
            }
        };
        let result = AttachResult::read_from_bytes(&reply.result[..]).map_err(|_| ClientError::Lost)?;
        let (root, _) = Entry::read_from_prefix(&reply.payload).map_err(|_| ClientError::Lost)?;
        let is = |flag| result.flags.get() & flag != 0;
        let (read_only, trusts) = (is(super::super::wire::SHARE_READ_ONLY), is(super::super::wire::SHARE_TRUSTS));
        let instance = result.instance.get();
        let now = Attached { instance, state: result.state.get() };
        let mut state = self.state();
        let before = state.attached.filter(|(before, _)| *before == now);
        let epoch = before.map_or(number, |(_, epoch)| epoch);
        state.attached = Some((now, epoch));
        drop(state);
        // Others go on while this machine sleeps.
        let silent = Duration::from_nanos(caches::now().nanos().saturating_sub(self.heard.load(Ordering::Acquire)));
        let uptime = Duration::from_millis(result.uptime_ms.get());
        let last = self.instance.load(Ordering::Acquire);
        let is_new_process = last != instance && last != NO_INSTANCE;
        let may_reclaim = is_new_process && nobody_else_had_them(silent, uptime);
        Ok((Live { session, number, epoch, instance, is_new_process, may_reclaim, read_only, trusts }, root))
    }

    /// A call of the session that works was sent then, by the clock of leases, and has been answered.
    pub(super) fn heard(&self, sent: byway_reactor::Instant) {
        self.heard.fetch_max(sent.nanos(), Ordering::AcqRel);
    }

    /// Calls that were sent.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// The session of that number has ended.
    pub(super) fn lose(&self, number: u64) {
        let mut state = self.state();
        if let Some(live) = state.live.take_if(|live| live.number == number) {
            tracing::warn!(share = self.server.share, "the session with the server has ended; calls wait for it");
            state.lost = Some(Instant::now());
            drop(state);
            let _ = self.rpc.node().close(live.session);
            self.buffers.clear();
            self.changed.notify_all();
        }
    }

    /// No further session is made; the one that there is ends.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let live = state.live.take();
        drop(state);
        self.changed.notify_all();
        self.buffers.clear();
        if let Some(live) = live {
            self.leave(live);
        }
    }

    /// Ends a session for good: the server need not keep files and locks for a client that does not come back.
    fn leave(&self, live: Live) {
        let call = Call { protocol: PROTOCOL, method: Method::Detach as u16, ..Call::default() };
        let deadline = Deadline::after(DETACH_TIME_MAX);
        let _ = self.rpc.call(live.session, &call, deadline).map(|op| op.wait(Deadline::NEVER));
        let _ = self.rpc.node().close(live.session);
    }

    /// Asks over a session, with a window of a buffer if there is one.
    pub(super) fn call_on(
        &self,
        session: Session,
        method: Method,
        arguments: &Arguments,
        payload: &[u8],
        buffer: Option<&super::buffers::Buffer>,
    ) -> Result<Reply, Failure> {
        let windows: Vec<_> = buffer.map(super::buffers::Buffer::descriptor).into_iter().collect();
        let call = Call {
            protocol: PROTOCOL,
            method: method as u16,
            arguments: arguments.as_bytes(),
            windows: &windows,
            payload,
        };
        let deadline = match method {
            Method::Lock => Deadline::NEVER,
            Method::Sync | Method::Allocate | Method::CopyRange | Method::SetAttributes => {
                Deadline::after(self.times.long)
            }
            _ => Deadline::after(self.times.short),
        };
        let op = match self.rpc.call(session, &call, deadline) {
            Ok(op) => {
                self.calls.fetch_add(1, Ordering::Relaxed);
                op
            }
            Err(SubmitError::Busy) => return Err(Failure::Call(CallError::Busy)),
            Err(SubmitError::TooLong) => return Err(Failure::Call(rustix::io::Errno::TOOBIG.into())),
            Err(SubmitError::Unsupported) => return Err(Failure::Call(CallError::NotServed(NO_FILES))),
            Err(_) => return Err(Failure::NotSent),
        };
        match op.wait(Deadline::NEVER) {
            Ok(Ok(outcome)) => Reply::of(outcome).map_err(|_| Failure::Lost),
            Ok(Err(OpError::Deadline)) => Err(Failure::Late),
            Ok(Err(OpError::Status(status))) => Err(Failure::Call(CallError::from_status(status))),
            Ok(Err(_)) | Err(_) => Err(Failure::Lost),
        }
    }

    /// A buffer with a window that is open to the session.
    pub(super) fn buffer(&self, live: Live) -> Result<super::buffers::Buffer, Failure> {
        self.buffers.take(self.rpc.node(), (live.session, live.number))
    }
}

/// What a server says that has no shares.
const NO_FILES: byway_rpc::message::Status = byway_rpc::message::Status::UnknownProtocol;
