//! The epoll backend, for kernels and containers that refuse io_uring: sockets by readiness, files by a few threads.
//!
//! Every socket is registered once, edge-triggered, and remembers whether it is readable and writable; an operation is
//! tried when it is submitted and again at each edge. So a busy stream costs one call a transfer.

mod descriptor;
mod socket;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use self::socket::{Receive, StreamState};
pub(crate) use self::socket::{fill_scatter, message};
use crate::blocking::RawBuffer;
use crate::counters::Counters;
use crate::descriptor_floor;
use crate::file::OpenFile;
use crate::frame::Frame;
use crate::handles::Table;
use crate::limits::OPS_MAX;
use crate::net;
use crate::op::{Address, Completion, File, Listener, Op, Outcome, Token, Wait};
use crate::os::Os;
use crate::time::{Instant, monotonic};
use crate::waker::Waker;
use crate::workers::{Call, Done};

/// Events taken from the kernel in one call.
const EVENTS_PER_CALL: usize = 128;
/// Connections accepted from one listener before others get their turn.
const ACCEPTS_PER_TURN: usize = 64;

const KIND_STREAM: u64 = 0;
const KIND_LISTENER: u64 = 1;
const KIND_WAKER: u64 = 2 << 32;
const KIND_DESCRIPTOR: u64 = 3;

pub(crate) struct Epoll {
    pub(crate) queue: OwnedFd,
    os: Os,
    streams: Table<StreamState>,
    accepts: HashMap<Listener, Token>,
    operations: HashMap<u64, FileOperation>,
    next_job: u64,
    events: Vec<epoll::Event>,
    iovecs: Vec<libc::iovec>,
    done: Vec<Done>,
    in_flight: usize,
    /// The last call gave what was known and did not ask the kernel.
    has_skipped: bool,
}

/// A file operation that a worker has.
struct FileOperation {
    token: Token,
    file: File,
    direct: bool,
    kind: FileOperationKind,
}

enum FileOperationKind {
    Read(Frame),
    Write(Frame),
    Sync,
    Allocate { offset: u64, len: u64 },
    Extents,
    Prefetch,
}

impl Epoll {
    pub(crate) fn open() -> std::io::Result<Self> {
        let queue = descriptor_floor::raise(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let os = Os::new()?;
        if let Some(event) = os.waker.event() {
            epoll::add(&queue, event, EventData::new_u64(KIND_WAKER), EventFlags::IN)?;
        }
        Ok(Self {
            queue,
            os,
            streams: Table::default(),
            accepts: HashMap::new(),
            operations: HashMap::new(),
            next_job: 0,
            events: Vec::with_capacity(EVENTS_PER_CALL),
            iovecs: Vec::new(),
            done: Vec::new(),
            in_flight: 0,
            has_skipped: false,
        })
    }

    pub(crate) fn submit(&mut self, op: Op, token: Token) {
        if self.in_flight + self.os.timers.len() >= OPS_MAX {
            return self.os.fail(op, token, Errno::AGAIN);
        }
        match op {
            Op::Recv { socket, into, min } => {
                let receive = Receive { token, into, min: min.max(1), got: 0 };
                self.start_receive(socket, receive);
            }
            Op::Send { socket, gather } => self.start_send(socket, gather, token),
            Op::Accept { listener } => self.start_accept(listener, token),
            Op::Connect { to } => self.start_connect(&to, token),
            Op::Readable { descriptor } => self.start_wait(descriptor, token),
            Op::Timer { at } => self.os.timers.add(at, token),
            file_op => match self.os.file_op_now(file_op) {
                Ok(outcome) => self.os.ready.push_back(Completion { token, outcome }),
                Err(file_op) => self.start_job(file_op, token),
            },
        }
    }

    fn start_accept(&mut self, listener: Listener, token: Token) {
        if self.os.listener(listener).is_err() {
            return self.os.fail(Op::Accept { listener }, token, Errno::BADF);
        }
        if self.accepts.contains_key(&listener) {
            return self.os.fail(Op::Accept { listener }, token, Errno::BUSY);
        }
        self.accepts.insert(listener, token);
        self.in_flight += 1;
        self.accept_some(listener);
    }

    fn accept_some(&mut self, listener: Listener) {
        let Some(&token) = self.accepts.get(&listener) else { return };
        for _ in 0..ACCEPTS_PER_TURN {
            let Ok(fd) = self.os.listener(listener) else { return };
            let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
            let accepted = match rustix::net::accept_with(fd, flags) {
                Ok(stream) => self.adopt(stream).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => Err(error),
            };
            let failed = accepted.is_err();
            self.os.ready.push_back(Completion { token, outcome: Outcome::Accepted(accepted) });
            if failed {
                self.accepts.remove(&listener);
                self.in_flight -= 1;
                return;
            }
        }
        // More may wait, and no edge will tell: arming again makes one.
        if let Ok(fd) = self.os.listener(listener) {
            let data = EventData::new_u64(event_data(KIND_LISTENER, listener.index, listener.generation));
            let _ = epoll::modify(&self.queue, fd, data, EventFlags::IN | EventFlags::ET);
        }
    }

    fn start_job(&mut self, op: Op, token: Token) {
        let (file, call, kind) = match op {
            Op::Read { file, offset, into, start, len } => {
                let memory = RawBuffer { ptr: into.range(start, len), len };
                (file, Call::Read { memory, offset, staged: into.is_device() }, FileOperationKind::Read(into))
            }
            Op::Write { file, offset, from, start, len, durable } => {
                let memory = RawBuffer { ptr: from.range(start, len), len };
                (
                    file,
                    Call::Write { memory, offset, durable, staged: from.is_device() },
                    FileOperationKind::Write(from),
                )
            }
            Op::WriteOnce { file, at, from, start, len } => {
                let memory = RawBuffer { ptr: from.range(start, len), len };
                (file, Call::WriteOnce { memory, at }, FileOperationKind::Write(from))
            }
            Op::Sync { file } => (file, Call::Sync, FileOperationKind::Sync),
            Op::Allocate { file, mode, offset, len } => {
                (file, Call::Allocate { mode, offset, len }, FileOperationKind::Allocate { offset, len })
            }
            Op::Extents { file, offset, len, count_max } => {
                (file, Call::Extents { offset, len, count_max }, FileOperationKind::Extents)
            }
            Op::Prefetch { file, offset, len } => (file, Call::Prefetch { offset, len }, FileOperationKind::Prefetch),
            other => return self.os.fail(other, token, Errno::INVAL),
        };
        self.next_job += 1;
        let slot = self.next_job;
        let started = match self.os.file(file).cloned() {
            Ok(open) => {
                let direct = open.options().direct;
                self.operations.insert(slot, FileOperation { token, file, direct, kind });
                self.os.in_use(file);
                self.in_flight += 1;
                // SAFETY: the operation's frame lies in `operations` until its `Done` is collected, and nothing touches it there.
                unsafe { self.os.workers.run(slot, open, call) }
            }
            Err(error) => {
                let outcome = kind.outcome(Err(error), Vec::new());
                return self.os.ready.push_back(Completion { token, outcome });
            }
        };
        if let Err(error) = started {
            self.end_job(Done { slot, result: Err(error), extents: Vec::new() });
        }
    }

    fn end_job(&mut self, done: Done) {
        let Some(operation) = self.operations.remove(&done.slot) else { return };
        self.in_flight -= 1;
        if let FileOperationKind::Allocate { offset, len } = operation.kind {
            self.os.forget_residency(operation.file, offset, len);
        }
        self.os.unuse(operation.file);
        let outcome = operation.kind.outcome(done.result, done.extents);
        self.os.count_transfer(operation.direct, &outcome);
        self.os.ready.push_back(Completion { token: operation.token, outcome });
    }

    fn collect_jobs(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        self.os.workers.collect(&mut done);
        for one in done.drain(..) {
            self.end_job(one);
        }
        self.done = done;
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        let before = into.len();
        into.extend(self.os.ready.drain(..));
        let has_some = into.len() > before;
        // What is known is handled first, and the kernel asked by the next call: most often that one would have asked it anyway.
        // So no event waits for more than one call.
        if has_some && !std::mem::replace(&mut self.has_skipped, true) {
            return Ok(());
        }
        self.has_skipped = false;
        self.turn(!has_some, wait)?;
        into.extend(self.os.ready.drain(..));
        Ok(())
    }

    /// Whether nothing has completed, as far as is known without asking the kernel.
    pub(crate) fn is_quiet(&self) -> bool {
        self.os.ready.is_empty()
    }

    /// Takes events and timers, waiting for the first if `may_wait`.
    fn turn(&mut self, may_wait: bool, wait: Wait) -> std::io::Result<()> {
        let timeout = if may_wait { self.timeout(wait) } else { Some(Duration::ZERO) };
        if timeout != Some(Duration::ZERO) {
            self.os.counters.sleeps += 1;
        }
        let timeout = timeout.map(|left| rustix::event::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        self.events.clear();
        match epoll::wait(&self.queue, rustix::buffer::spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let events = std::mem::take(&mut self.events);
        for event in &events {
            self.take_event(event.data.u64(), event.flags);
        }
        self.events = events;
        if self.os.workers.pending() > 0 {
            self.collect_jobs();
        }
        if self.os.timers.len() > 0 {
            self.os.expire_timers(monotonic());
        }
        Ok(())
    }

    /// How long to sleep; `None` is for ever.
    fn timeout(&mut self, wait: Wait) -> Option<Duration> {
        let until = match wait {
            Wait::Poll => return Some(Duration::ZERO),
            Wait::Block => None,
            Wait::Until(at) => Some(at),
        };
        let at = match (until, self.os.timers.next_at()) {
            (Some(a), Some(b)) => a.min(b),
            (Some(at), None) | (None, Some(at)) => at,
            (None, None) => return None,
        };
        Some(at.since(monotonic()))
    }

    fn take_event(&mut self, data: u64, flags: EventFlags) {
        let index = data as u32;
        let generation = (data >> 34) as u32;
        match data >> 32 & 3 {
            _ if data == KIND_WAKER => self.take_wake(),
            KIND_LISTENER => {
                let found = self.accepts.keys().find(|l| l.index == index && l.generation & 0x3fff_ffff == generation);
                if let Some(&listener) = found {
                    self.accept_some(listener);
                }
            }
            KIND_DESCRIPTOR => self.descriptor_event(index, generation),
            _ => self.stream_event(index, generation, flags),
        }
    }

    fn take_wake(&mut self) {
        if let Some(event) = self.os.waker.event() {
            let mut count = [0; 8];
            let _ = rustix::io::read(event, &mut count);
        }
        let by_worker = self.os.workers.pending() > 0;
        self.collect_jobs();
        if self.os.waker.take() || !by_worker {
            self.os.ready.push_back(Completion { token: Token::WAKE, outcome: Outcome::Woken });
        }
    }

    pub(crate) fn cancel(&mut self, token: Token) {
        self.os.cancel_timers(token);
        if let Some(listener) = self.accepts.iter().find(|(_, t)| **t == token).map(|(listener, _)| *listener) {
            self.end_accept(listener);
        }
        self.cancel_streams(token);
        self.cancel_waits(token);
        // File operations are with a worker, or will be: they end as they end.
    }

    fn end_accept(&mut self, listener: Listener) {
        if let Some(token) = self.accepts.remove(&listener) {
            self.in_flight -= 1;
            let outcome = Outcome::Accepted(Err(Errno::CANCELED));
            self.os.ready.push_back(Completion { token, outcome });
        }
    }

    pub(crate) fn os(&mut self) -> &mut Os {
        &mut self.os
    }

    pub(crate) fn counters(&self) -> Counters {
        self.os.counters
    }

    pub(crate) fn waker(&self) -> Waker {
        self.os.waker.clone()
    }

    pub(crate) fn listen(&mut self, address: &Address) -> std::io::Result<Listener> {
        self.adopt_listener(net::listen(address)?)
    }

    pub(crate) fn adopt_listener(&mut self, fd: OwnedFd) -> std::io::Result<Listener> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let (index, generation) = self.os.listeners.insert(fd);
        let listener = Listener { index, generation };
        let data = EventData::new_u64(event_data(KIND_LISTENER, index, generation));
        let fd = self.os.listener(listener)?.as_fd();
        epoll::add(&self.queue, fd, data, EventFlags::IN | EventFlags::ET)?;
        Ok(listener)
    }

    pub(crate) fn local_address(&self, listener: Listener) -> Option<SocketAddr> {
        SocketAddr::try_from(rustix::net::getsockname(self.os.listener(listener).ok()?).ok()?).ok()
    }

    pub(crate) fn close_listener(&mut self, listener: Listener) {
        self.end_accept(listener);
        self.os.listeners.remove(listener.index, listener.generation);
    }

    pub(crate) fn add_file(&mut self, file: Arc<OpenFile>) -> File {
        self.os.add_file(file)
    }

    pub(crate) fn remove_file(&mut self, file: File) {
        self.os.remove_file(file);
    }

    pub(crate) fn try_write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.os.try_write(file, offset, bytes)
    }

    pub(crate) fn resident(&self, file: File, offset: u64, len: usize, now: Instant) -> bool {
        self.os.resident(file, offset, len, now)
    }
}

impl FileOperationKind {
    fn outcome(self, result: Result<usize, Errno>, extents: Vec<crate::Extent>) -> Outcome {
        match self {
            Self::Read(into) => Outcome::Read { into, result },
            Self::Write(from) => Outcome::Written { from, result },
            Self::Sync => Outcome::Synced(result.map(|_| ())),
            Self::Allocate { .. } => Outcome::Allocated(result.map(|_| ())),
            Self::Extents => Outcome::Extents(result.map(|_| extents)),
            Self::Prefetch => Outcome::Prefetched(result.map(|_| ())),
        }
    }
}

/// Index in the low half, kind in two bits, 30 bits of generation.
fn event_data(kind: u64, index: u32, generation: u32) -> u64 {
    u64::from(index) | kind << 32 | u64::from(generation & 0x3fff_ffff) << 34
}

impl Drop for Epoll {
    fn drop(&mut self) {
        // Operations use frames that `operations` keeps: the threads are joined before anything is freed.
        while self.os.workers.pending() > 0 {
            self.collect_jobs();
            std::thread::yield_now();
        }
    }
}
