//! The session with the server: made when it is needed, and made again when it was lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use byway_fabric::CloseReason;
use byway_fabric::node::{Deadline, NodeOptions, Op, OpError, Session, SubmitError};
use byway_fabric::random::Random;
use byway_fabric::tls::TlsClient;
use byway_fabric::wire::RefuseCode;
use byway_reactor::Address;
use byway_rpc::node::{Call, Reply, Rpc};
use byway_rpc::protocol::CALLS_FILES;
use zerocopy::{FromBytes, IntoBytes};

use super::super::wire::{
    Arguments, AttachResult, CallError, ClientName, Entry, FLAG_RENEWS_LOCKS, Method, PROTOCOL, SHARE_LEASES,
    SHARE_READ_ONLY, SHARE_TRUSTS,
};
use super::ClientError;
use super::backoff::Backoff;
use super::buffers::{Buffer, Buffers};
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
    pub(super) renews_locks: bool,
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
    /// The share has leases.
    pub(super) gives_leases: bool,
    /// Syncs that had failed when the server process began to keep what it has of this client.
    pub(super) failed_syncs: u64,
}

/// How a call ended that brought no answer of the file service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server's word.
    Call(CallError),
    /// The session ended before the call was sent, or before the server has begun it.
    NotSent,
    /// The session ended: whether it was done is not known.
    Lost,
    /// The time was over, and the session goes on: it may still be done.
    Late,
}

/// What a server had of this client at the last attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) instance: u64,
    pub(super) state: u64,
    /// The session's number that began with this state.
    pub(super) epoch: u64,
}

/// What is done with a session and the share's root before others use the session. False: it is another share.
pub(super) type OnAttached<'a> = &'a mut dyn FnMut(Live, &Entry) -> Result<bool, Failure>;

#[derive(Default)]
struct State {
    live: Option<Live>,
    /// Sessions that were tried.
    number: u64,
    attached: Option<Attached>,
    connecting: bool,
    backoff: Backoff,
    /// Since when there is no session.
    lost: Option<Instant>,
    /// Another process is to go on with this client.
    suspended: bool,
    closed: bool,
}

/// What another process needs to be the same client to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Continuation {
    pub(super) name: ClientName,
    /// Nanoseconds of the clock of leases.
    pub(super) heard: u64,
    pub(super) instance: u64,
    /// Of the last session.
    pub(super) number: u64,
    pub(super) attached: Option<Attached>,
}

pub(super) struct ServerConnection {
    server: Server,
    /// Names this client to the server in all its sessions.
    name: ClientName,
    /// When the last call was sent that was answered, by the clock of leases.
    heard: AtomicU64,
    /// Calls that were sent.
    calls: AtomicU64,
    /// Sessions that were made in place of one that was lost.
    reconnects: AtomicU64,
    /// The server process of the last session that worked.
    instance: AtomicU64,
    pub(super) rpc: Rpc,
    pub(super) buffers: Buffers,
    state: Mutex<State>,
    changed: Condvar,
    lost_after: Duration,
    /// When calls and attempts to connect end at the latest, in nanoseconds of the clock of leases.
    end: AtomicU64,
    pub(super) times: Times,
}

/// How long calls may take while the server is alive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) short: Duration,
    pub(super) long: Duration,
    /// How long a call is made again that the server has no room for.
    pub(super) busy: Duration,
}

impl ServerConnection {
    pub(super) fn new(server: Server, lost_after: Duration) -> std::io::Result<Self> {
        let name = Random::from_kernel().bytes16();
        let heard = caches::now().nanos();
        let new = Continuation { name, heard, instance: NO_INSTANCE, number: 0, attached: None };
        Self::of(new, server, lost_after)
    }

    /// The connection of a client that another process was.
    pub(super) fn of(client: Continuation, server: Server, lost_after: Duration) -> std::io::Result<Self> {
        let options = NodeOptions { bulk_lanes: 2, ..NodeOptions::default() };
        let rpc = Rpc::open_for(&options, vec![CALLS_FILES])?;
        Ok(Self {
            server,
            name: client.name,
            heard: AtomicU64::new(client.heard),
            calls: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            instance: AtomicU64::new(client.instance),
            rpc,
            buffers: Buffers::default(),
            state: Mutex::new(State { number: client.number, attached: client.attached, ..State::default() }),
            changed: Condvar::new(),
            lost_after,
            end: AtomicU64::new(u64::MAX),
            times: Times { short: FILE_CALL_TIME_MAX, long: FILE_LONG_CALL_TIME_MAX, busy: FILE_CALL_TIME_MAX },
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
        let number = self.state().number + 1;
        let live = self.attempt(number, attached)?;
        let mut state = self.state();
        (state.live, state.number) = (Some(live), number);
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
            if state.suspended || self.has_reached_end() {
                return Err(Failure::Lost);
            }
            let lost = *state.lost.get_or_insert_with(Instant::now);
            // After that, each call tries once.
            if state.closed || (tried && lost.elapsed() > self.lost_after) {
                return Err(Failure::Lost);
            }
            let pause = state.backoff.remaining(Instant::now());
            if state.connecting || !pause.is_zero() {
                tried |= state.connecting;
                let pause = self.left(if state.connecting { RECONNECT_MAX } else { pause });
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
                Ok(live) if state.suspended => {
                    drop(state);
                    self.changed.notify_all();
                    let _ = self.rpc.node().close(live.session);
                    return Err(Failure::Lost);
                }
                Ok(live) => {
                    self.reconnects.fetch_add(1, Ordering::Relaxed);
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
        let (node, deadline) = (self.rpc.node(), Deadline::after(self.left(ATTEMPT_TIME_MAX)));
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
        let flags = if self.server.renews_locks { FLAG_RENEWS_LOCKS } else { 0 };
        let name_len = (self.server.share.len() as u16).into();
        let arguments = Arguments { name_len, flags: flags.into(), ..super::NONE };
        let payload = [self.server.share.as_bytes(), &self.name].concat();
        let (since, mut pause) = (Instant::now(), BUSY_PAUSE_MIN);
        // The server ends the calls of the session before this one first.
        let reply = loop {
            match self.call_on(session, Method::Attach, &arguments, &payload, None) {
                Err(Failure::Call(CallError::Busy)) if since.elapsed() < self.left(ATTEMPT_TIME_MAX) => {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                answer => break answer.map_err(|failure| self.failed(failure))?,
            }
        };
        let result = AttachResult::read_from_bytes(&reply.result[..]).map_err(|_| ClientError::Lost)?;
        let (root, _) = Entry::read_from_prefix(&reply.payload).map_err(|_| ClientError::Lost)?;
        let is = |flag| result.flags.get() & flag != 0;
        let (read_only, trusts, gives_leases) = (is(SHARE_READ_ONLY), is(SHARE_TRUSTS), is(SHARE_LEASES));
        let instance = result.instance.get();
        let kept = result.state.get();
        let mut state = self.state();
        let before = state.attached.filter(|before| before.instance == instance && before.state == kept);
        let epoch = before.map_or(number, |before| before.epoch);
        state.attached = Some(Attached { instance, state: kept, epoch });
        drop(state);
        // Others go on while this machine sleeps.
        let silent = Duration::from_nanos(caches::now().nanos().saturating_sub(self.heard.load(Ordering::Acquire)));
        let uptime = Duration::from_millis(result.uptime_ms.get());
        let last = self.instance.load(Ordering::Acquire);
        let is_new_process = last != instance && last != NO_INSTANCE;
        let may_reclaim = is_new_process && nobody_else_had_them(silent, uptime);
        let failed_syncs = result.failed_syncs.get();
        let live = Live {
            session,
            number,
            epoch,
            instance,
            is_new_process,
            may_reclaim,
            read_only,
            trusts,
            gives_leases,
            failed_syncs,
        };
        Ok((live, root))
    }

    /// A call of the session that works was sent then, by the clock of leases, and has been answered.
    pub(super) fn heard(&self, sent: byway_reactor::Instant) {
        self.heard.fetch_max(sent.nanos(), Ordering::AcqRel);
    }

    /// Sessions that were made in place of one that was lost.
    pub(super) fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
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

    /// Calls and attempts to connect that begin from now on end within that time, until [`ServerConnection::resume`].
    pub(super) fn set_end(&self, within: Duration) {
        self.end.store((caches::now() + within).nanos(), Ordering::Relaxed);
    }

    /// How long something may take that may take so long.
    fn left(&self, time: Duration) -> Duration {
        match self.end.load(Ordering::Relaxed) {
            u64::MAX => time,
            end => time.min(Duration::from_nanos(end.saturating_sub(caches::now().nanos()))),
        }
    }

    /// Whether the time of [`ServerConnection::set_end`] is over.
    pub(super) fn has_reached_end(&self) -> bool {
        self.left(Duration::MAX).is_zero()
    }

    /// No session is made until [`ServerConnection::resume`]. Gives the one that there is, which is to be ended. Waits for an attempt to
    /// connect; [`Failure::Late`] if that does not end in time.
    pub(super) fn suspend(&self) -> Result<Option<Live>, Failure> {
        let mut state = self.state();
        state.suspended = true;
        let live = state.live.take();
        while state.connecting {
            let left = self.left(RECONNECT_MAX);
            if left.is_zero() {
                return Err(Failure::Late);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(live)
    }

    /// Ends a session so that the server keeps what it has of the client.
    pub(super) fn end(&self, live: Live) {
        let _ = self.rpc.node().close(live.session);
        self.buffers.clear();
    }

    /// Sessions are made again.
    pub(super) fn resume(&self) {
        self.end.store(u64::MAX, Ordering::Relaxed);
        self.state().suspended = false;
        self.changed.notify_all();
    }

    /// What another process needs to go on with this client, which is suspended.
    pub(super) fn continuation(&self) -> Continuation {
        let (heard, instance) = (self.heard.load(Ordering::Acquire), self.instance.load(Ordering::Acquire));
        let state = self.state();
        Continuation { name: self.name, heard, instance, number: state.number, attached: state.attached }
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
        buffer: Option<&Buffer>,
    ) -> Result<Reply, Failure> {
        self.begin(session, method, arguments, payload, buffer)?.wait()
    }

    /// The same, without waiting for the answer. The buffer is the server's until the call has ended.
    pub(super) fn begin(
        &self,
        session: Session,
        method: Method,
        arguments: &Arguments,
        payload: &[u8],
        buffer: Option<&Buffer>,
    ) -> Result<Asked, Failure> {
        let windows: Vec<_> = buffer.map(Buffer::descriptor).into_iter().collect();
        let call = Call {
            protocol: PROTOCOL,
            method: method as u16,
            arguments: arguments.as_bytes(),
            windows: &windows,
            payload,
        };
        let deadline = match method {
            Method::Lock => Deadline::NEVER,
            Method::Sync | Method::SyncShare | Method::Allocate | Method::CopyRange | Method::SetAttributes => {
                Deadline::after(self.left(self.times.long))
            }
            _ => Deadline::after(self.left(self.times.short)),
        };
        match self.rpc.call(session, &call, deadline) {
            Ok(op) => {
                self.calls.fetch_add(1, Ordering::Relaxed);
                Ok(Asked { op, is_long: method == Method::Lock })
            }
            Err(SubmitError::Busy) => Err(Failure::Call(CallError::Busy)),
            Err(SubmitError::TooLong) => Err(Failure::Call(rustix::io::Errno::TOOBIG.into())),
            Err(_) => Err(Failure::NotSent),
        }
    }

    /// A buffer with a window that is open to the session.
    pub(super) fn buffer(&self, live: Live) -> Result<Buffer, Failure> {
        self.buffers.take(self.rpc.node(), live.session, live.number)
    }
}

/// A call that has begun.
pub(super) struct Asked {
    pub(super) op: Op,
    /// It may wait for other clients, and other calls of this one are shorter.
    is_long: bool,
}

impl Asked {
    /// Waits for the answer.
    pub(super) fn wait(self) -> Result<Reply, Failure> {
        let ended =
            if self.is_long { self.op.wait_in_background(Deadline::NEVER) } else { self.op.wait(Deadline::NEVER) };
        match ended {
            Ok(Ok(outcome)) => Reply::of(outcome).map_err(|_| Failure::Lost),
            Ok(Err(OpError::Deadline)) => Err(Failure::Late),
            Ok(Err(OpError::Status(status))) => Err(Failure::Call(CallError::from_status(status))),
            // The server has answered all that it had begun, before it said so.
            Ok(Err(OpError::Ended(CloseReason::Refused(RefuseCode::Drained)))) => Err(Failure::NotSent),
            Ok(Err(_)) | Err(_) => Err(Failure::Lost),
        }
    }
}
