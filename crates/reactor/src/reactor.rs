//! The loop as its owner sees it, over one of three backends.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::counters::Counters;
use crate::epoll::Epoll;
use crate::file::OpenFile;
use crate::frame::FramePool;
use crate::gather::Gather;
use crate::op::{Address, Completion, Descriptor, Errno, File, Listener, Op, Socket, Token, Wait};
use crate::os::Os;
use crate::path::PathState;
use crate::receive_buffers::ReceiveBuffers;
use crate::shared::{self, BackendContext, Detached, Shared};
use crate::sim::SimLoop;
use crate::time::Instant;
use crate::uring::{self, Uring};
use crate::wait_policy::{Plan, WaitPolicy};
use crate::waker::Waker;

/// Which backend is wanted (`--io`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoChoice {
    /// io_uring where the kernel allows it, else epoll.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// epoll and a few threads for files.
    Epoll,
}

/// Which backend a loop has, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Io {
    /// `uring`, `epoll` or `sim`.
    pub name: &'static str,
    /// Why this one, in words for an operator.
    pub reason: String,
}

/// One event loop. It belongs to the thread that made it.
pub struct Reactor {
    backend: Backend,
    io: Io,
    frames: FramePool,
    pub(crate) receive_buffers: ReceiveBuffers,
    wait_policy: WaitPolicy,
    shared: Shared,
    /// Completions that were reaped while a stream was given up.
    aside: Vec<Completion>,
    /// Turns since the kernel was asked.
    stream_turns: u32,
    /// When the last completions were reaped, and when the kernel was asked: as of the turn before.
    turned_at: Instant,
    asked_at: Instant,
}

pub(crate) enum Backend {
    Uring(Box<Uring>),
    Epoll(Box<Epoll>),
    Sim(Box<SimLoop>),
}

impl Backend {
    pub(crate) fn submit(&mut self, op: Op, token: Token) {
        match self {
            Self::Uring(uring) => uring.submit(op, token),
            Self::Epoll(epoll) => epoll.submit(op, token),
            Self::Sim(sim) => sim.submit(op, token),
        }
    }

    pub(crate) fn close(&mut self, socket: Socket) {
        match self {
            Self::Uring(uring) => uring.close(socket),
            Self::Epoll(epoll) => epoll.close(socket),
            Self::Sim(sim) => sim.close(socket),
        }
    }

    /// Whether the kernel has, as far as can be seen without asking it, nothing for us and wants nothing of us.
    fn is_quiet(&mut self) -> bool {
        match self {
            Self::Uring(uring) => uring.is_quiet(),
            Self::Epoll(epoll) => epoll.is_quiet(),
            Self::Sim(_) => false,
        }
    }

    /// What does not depend on how the loop waits; none in a simulation.
    pub(crate) fn os(&mut self) -> Option<&mut Os> {
        match self {
            Self::Uring(uring) => Some(uring.os()),
            Self::Epoll(epoll) => Some(epoll.os()),
            Self::Sim(_) => None,
        }
    }

    /// A stream's descriptor; none in a simulation.
    pub(crate) fn descriptor(&self, socket: Socket) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Uring(uring) => uring.descriptor(socket),
            Self::Epoll(epoll) => epoll.descriptor(socket),
            Self::Sim(_) => None,
        }
    }
}

/// The module of shared streams, and what it uses of the loop.
macro_rules! context {
    ($self:ident) => {
        (&mut $self.shared, BackendContext { backend: &mut $self.backend, buffers: &$self.receive_buffers })
    };
}

mod arena;
mod threads;

/// Turns that the streams over shared memory may have between two in which the kernel is asked: a busy stream is not to keep a socket
/// waiting.
const STREAM_TURNS_MAX: u32 = 16;
/// The same as a time: turns can be long.
const LINK_TIME_MAX: Duration = Duration::from_micros(100);

/// A look that took longer than this gave the CPU away.
const SPIN_LOST_NANOS: u128 = 15_000;

/// How long the end of a bell's receive is waited for. The kernel ends it at once.
const BELL_END_MAX: Duration = Duration::from_secs(1);

/// Sleeps for so many nanoseconds, or a little more.
fn sleep(nanos: u64) {
    let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: nanos as i64 };
    let _ = rustix::thread::nanosleep(&time);
}

macro_rules! each {
    ($self:ident, $backend:ident => $call:expr) => {
        match &mut $self.backend {
            Backend::Uring($backend) => $call,
            Backend::Epoll($backend) => $call,
            Backend::Sim($backend) => $call,
        }
    };
}

impl Reactor {
    /// Opens a loop for the calling thread, with a pool of `frame_bytes` (see [`FramePool`]).
    ///
    /// When a loop over io_uring is dropped, the kernel takes it down later and interrupts the thread once for that: a
    /// blocking call that the thread makes meanwhile may fail with `EINTR`, although no signal has come.
    ///
    /// # Errors
    /// The kernel's: no memory, no descriptors, or, for [`IoChoice::Uring`], io_uring refused.
    pub fn open(choice: IoChoice, frame_bytes: usize) -> std::io::Result<Self> {
        let frames = FramePool::new(frame_bytes)?;
        // Short sleeps are to be short: the default lets the kernel add 50 us to each.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let refused = match choice {
            IoChoice::Epoll => "asked for".to_owned(),
            IoChoice::Auto | IoChoice::Uring => match Uring::open(&frames) {
                Ok(uring) => {
                    let asked = if choice == IoChoice::Auto { "the kernel allows it" } else { "asked for" };
                    let io = Io { name: "uring", reason: format!("{asked}; {}", uring.features()) };
                    return Ok(Self::over(Backend::Uring(Box::new(uring)), io, frames));
                }
                Err(error) if choice == IoChoice::Uring => return Err(error),
                Err(error) => format!("io_uring is not to be had: {error}{}", uring::remedy(&error)),
            },
        };
        let io = Io { name: "epoll", reason: refused };
        Ok(Self::over(Backend::Epoll(Box::new(Epoll::open()?)), io, frames))
    }

    /// The loop of a simulated node (see [`crate::sim`]).
    pub(crate) fn simulated(backend: SimLoop, frames: FramePool) -> Self {
        let io = Io { name: "sim", reason: "a simulation".to_owned() };
        Self::over(Backend::Sim(Box::new(backend)), io, frames)
    }

    fn over(backend: Backend, io: Io, frames: FramePool) -> Self {
        Self {
            backend,
            io,
            receive_buffers: ReceiveBuffers::new(frames.clone()),
            frames,
            wait_policy: WaitPolicy::default(),
            shared: Shared::default(),
            aside: Vec::new(),
            stream_turns: 0,
            turned_at: Instant::ZERO,
            asked_at: Instant::ZERO,
        }
    }

    /// Which backend it is, and why.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// The time now.
    pub fn now(&self) -> Instant {
        match &self.backend {
            Backend::Sim(sim) => sim.now(),
            _ => crate::time::monotonic(),
        }
    }

    /// The loop's frames.
    pub fn frames(&self) -> &FramePool {
        &self.frames
    }

    /// What the loop has moved so far.
    pub fn counters(&self) -> Counters {
        match &self.backend {
            Backend::Uring(uring) => uring.counters(),
            Backend::Epoll(epoll) => epoll.counters(),
            Backend::Sim(sim) => sim.counters(),
        }
    }

    /// Wakes this loop from other threads.
    pub fn waker(&self) -> Waker {
        match &self.backend {
            Backend::Uring(uring) => uring.waker(),
            Backend::Epoll(epoll) => epoll.waker(),
            Backend::Sim(sim) => sim.waker(),
        }
    }

    /// Starts an operation. Its completion comes from [`Reactor::reap`], never from here. Past
    /// [`OPS_MAX`](crate::limits::OPS_MAX) operations in flight it completes with `EAGAIN`.
    pub fn submit(&mut self, op: Op, token: Token) {
        if let Backend::Sim(sim) = &mut self.backend {
            return sim.submit(op, token);
        }
        let (shared, mut context) = context!(self);
        if let Some(op) = shared.submit(&mut context, op, token) {
            self.backend.submit(op, token);
        }
    }

    /// Sends all of `gather` on a stream over shared memory, if that can be done now: the peer has it then, and no completion
    /// comes. Else nothing was sent, and it is to be sent by [`Op::Send`].
    pub fn send_now(&mut self, socket: Socket, gather: &Gather) -> bool {
        if self.shared.is_unused() {
            return false;
        }
        let (shared, mut context) = context!(self);
        shared.send_now(&mut context, socket, gather)
    }

    /// Asks for the early end of all operations of `token`; each still completes.
    pub fn cancel(&mut self, token: Token) {
        let (shared, mut context) = context!(self);
        shared.cancel(&mut context, token);
        each!(self, backend => backend.cancel(token));
    }

    /// Appends completions to `into`, waiting for the first one as long as `wait` says. In a simulation it never
    /// waits: the world's clock is moved by its owner.
    ///
    /// # Errors
    /// The kernel's, when waiting itself fails; the loop is then unusable.
    pub fn reap(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        let before = into.len();
        let reaped = self.reap_some(into, wait);
        if into.len() > before {
            self.turned_at = self.now();
            self.wait_policy.completed(&into[before..]);
        }
        reaped
    }

    /// When [`Reactor::reap`] last gave completions: the time without asking a clock for it.
    pub fn turned_at(&self) -> Instant {
        self.turned_at
    }

    /// Looks at the busy streams over shared memory alone, if the kernel seems to have nothing and was asked not long ago: true if
    /// they had something.
    fn poll_streams(&mut self, into: &mut Vec<Completion>) -> bool {
        let before = into.len();
        let lately = self.turned_at.since(self.asked_at) < LINK_TIME_MAX;
        if lately && self.stream_turns < STREAM_TURNS_MAX && self.shared.is_hot() && self.backend.is_quiet() {
            let (shared, mut context) = context!(self);
            shared.turn_streams(&mut context, into);
        }
        let found = into.len() > before;
        if found {
            self.stream_turns += 1;
        } else {
            (self.stream_turns, self.asked_at) = (0, self.turned_at);
        }
        found
    }

    fn reap_some(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        into.append(&mut self.aside);
        if self.poll_streams(into) {
            return Ok(());
        }
        self.reap_once(into, Wait::Poll)?;
        if !into.is_empty() || wait == Wait::Poll || matches!(self.backend, Backend::Sim(_)) {
            return Ok(());
        }
        let began = self.now();
        match self.wait_policy.plan() {
            Plan::Sleep => {}
            Plan::Spin(nanos) => self.spin(into, began, nanos)?,
            Plan::Gather(nanos) => {
                sleep(nanos);
                self.reap_once(into, Wait::Poll)?;
            }
        }
        if into.is_empty() {
            let wait = if self.shared.sleep() { wait } else { Wait::Poll };
            self.reap_once(into, wait)?;
        }
        let waited = self.now().since(began).as_nanos();
        self.wait_policy.waited(waited.min(u128::from(u64::MAX)) as u64);
        Ok(())
    }

    /// Takes what has completed, waiting in the kernel as long as `wait` says.
    fn reap_once(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        let before = into.len();
        each!(self, backend => backend.reap(into, wait))?;
        if !self.shared.is_unused() {
            let (shared, mut context) = context!(self);
            shared.turn(&mut context, into, before);
        }
        Ok(())
    }

    /// Looks for completions again and again for `nanos`, letting others run in between.
    fn spin(&mut self, into: &mut Vec<Completion>, began: Instant, nanos: u64) -> std::io::Result<()> {
        let mut last = began;
        loop {
            rustix::thread::sched_yield();
            self.reap_once(into, Wait::Poll)?;
            let now = self.now();
            if !into.is_empty() || now.since(began).as_nanos() >= u128::from(nanos) {
                return Ok(());
            }
            // The CPU was given to another thread with work to do: do not spin.
            if now.since(last).as_nanos() > SPIN_LOST_NANOS {
                self.wait_policy.contended();
                return Ok(());
            }
            last = now;
        }
    }

    /// Notes that a receive brought `requests`, which ask for `bytes` to be moved: the loop decides by it how it waits.
    pub fn note_requests(&mut self, requests: u32, bytes: u64) {
        if requests > 0 && !matches!(self.backend, Backend::Sim(_)) {
            let now = self.now();
            self.wait_policy.note(requests, bytes, now);
        }
    }

    /// Binds and listens.
    ///
    /// # Errors
    /// The kernel's: `AddrInUse`, `PermissionDenied`, ...
    pub fn listen(&mut self, address: &Address) -> std::io::Result<Listener> {
        let listener = each!(self, backend => backend.listen(address))?;
        if matches!(address, Address::Shared(_)) {
            self.shared.add_listener(listener);
        }
        Ok(listener)
    }

    /// Gives connections of a listener streams over shared memory from now on, as [`Address::Shared`] does: for a listener that was
    /// taken over. Call it before the first accept.
    pub fn share_memory(&mut self, listener: Listener) {
        self.shared.add_listener(listener);
    }

    /// Takes over a listening socket (socket activation).
    ///
    /// # Errors
    /// `Unsupported` in a simulation.
    pub fn adopt_listener(&mut self, fd: OwnedFd) -> std::io::Result<Listener> {
        each!(self, backend => backend.adopt_listener(fd))
    }

    /// Where a listener listens: the port that the kernel chose, if 0 was asked for.
    pub fn local_address(&self, listener: Listener) -> Option<SocketAddr> {
        match &self.backend {
            Backend::Uring(uring) => uring.local_address(listener),
            Backend::Epoll(epoll) => epoll.local_address(listener),
            Backend::Sim(sim) => sim.local_address(listener),
        }
    }

    /// Stops listening. A pending accept completes with `ECANCELED`.
    pub fn close_listener(&mut self, listener: Listener) {
        self.shared.remove_listener(listener);
        each!(self, backend => backend.close_listener(listener));
    }

    /// Takes over a connected stream socket, or what another loop's [`Reactor::release`] has given up.
    ///
    /// # Errors
    /// The kernel's; `ENOBUFS` without a frame for a stream over shared memory, or without room for its arena (see
    /// [`ARENAS_BYTES_MAX`](crate::limits::ARENAS_BYTES_MAX)); `Unsupported` in a simulation.
    pub fn adopt(&mut self, stream: impl Into<Detached>) -> std::io::Result<Socket> {
        let (fd, stream) = stream.into().into_parts();
        let socket = each!(self, backend => backend.adopt(fd))?;
        let (shared, mut context) = context!(self);
        if let Err(error) = shared.attach(&mut context, socket, stream) {
            self.backend.close(socket);
            return Err(error.into());
        }
        Ok(socket)
    }

    /// Gives up a stream that has no operation in flight, to hand it to another loop. `None` if it has, if it is
    /// stale, or in a simulation. The arena that its peer has lent goes with it.
    pub fn release(&mut self, socket: Socket) -> Option<Detached> {
        match self.shared.is_busy(socket) {
            None => return each!(self, backend => backend.release(socket)).map(Detached::from),
            Some(true) => return None,
            Some(false) => {}
        }
        self.end_bell(socket);
        let fd = each!(self, backend => backend.release(socket))?;
        Some(self.shared.detach(socket, fd))
    }

    /// Ends the receive that listens to a socket's bell, and waits for its end: the kernel has it in its hands.
    fn end_bell(&mut self, socket: Socket) {
        let bell = shared::bell_token(socket);
        each!(self, backend => backend.cancel(bell));
        let until = self.now() + BELL_END_MAX;
        let mut reaped = Vec::new();
        loop {
            let failed = each!(self, backend => backend.reap(&mut reaped, Wait::Until(until))).is_err();
            if let Some(place) = reaped.iter().position(|completion| completion.token == bell) {
                reaped.remove(place);
                break;
            }
            if failed || self.now() >= until {
                break;
            }
        }
        if !self.shared.is_unused() {
            let (shared, mut context) = context!(self);
            shared.turn(&mut context, &mut reaped, 0);
        }
        self.aside.append(&mut reaped);
    }

    /// Whether a stream is one of TCP.
    pub fn is_tcp(&self, socket: Socket) -> bool {
        match &self.backend {
            Backend::Uring(uring) => uring.is_tcp(socket),
            Backend::Epoll(epoll) => epoll.is_tcp(socket),
            Backend::Sim(sim) => sim.peer_address(socket).is_some(),
        }
    }

    /// The peer's TCP address; `None` for unix sockets, and for a [TCP](Self::is_tcp) connection that the peer has reset: it is
    /// accepted all the same, its bytes can be received, and their sender is unknown.
    pub fn peer_address(&self, socket: Socket) -> Option<SocketAddr> {
        match &self.backend {
            Backend::Uring(uring) => uring.peer_address(socket),
            Backend::Epoll(epoll) => epoll.peer_address(socket),
            Backend::Sim(sim) => sim.peer_address(socket),
        }
    }

    /// What the kernel says of the path to a TCP peer, by a system call; `None` for other streams.
    pub fn path_state(&self, socket: Socket) -> Option<PathState> {
        match &self.backend {
            Backend::Uring(uring) => uring.path_state(socket),
            Backend::Epoll(epoll) => epoll.path_state(socket),
            Backend::Sim(_) => None,
        }
    }

    /// Has the kernel notice a TCP peer that is gone within about `idle`.
    pub fn keep_alive(&mut self, socket: Socket, idle: Duration) {
        each!(self, backend => backend.keep_alive(socket, idle));
    }

    /// Closes a stream. Operations in flight on it complete (receives with end of stream or an error, sends with an
    /// error); the descriptor goes when the last has.
    pub fn close(&mut self, socket: Socket) {
        let (shared, mut context) = context!(self);
        shared.close(&mut context, socket);
        self.backend.close(socket);
    }

    /// Takes over a descriptor that something else reads and writes, to wait for it by [`Op::Readable`]: an event channel, say.
    /// Another owner of the open file passes a duplicate.
    ///
    /// # Errors
    /// `Unsupported` in a simulation.
    pub fn add_descriptor(&mut self, fd: OwnedFd) -> std::io::Result<Descriptor> {
        match &mut self.backend {
            Backend::Uring(uring) => Ok(uring.add_descriptor(fd)),
            Backend::Epoll(epoll) => Ok(epoll.add_descriptor(fd)),
            Backend::Sim(_) => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// Closes a descriptor; a wait for it ends with `ECANCELED`.
    pub fn remove_descriptor(&mut self, descriptor: Descriptor) {
        match &mut self.backend {
            Backend::Uring(uring) => uring.remove_descriptor(descriptor),
            Backend::Epoll(epoll) => epoll.remove_descriptor(descriptor),
            Backend::Sim(_) => {}
        }
    }

    /// Says that nothing more will be sent; receiving goes on.
    pub fn shutdown_send(&mut self, socket: Socket) {
        if !self.shared.shutdown_send(socket) {
            each!(self, backend => backend.shutdown_send(socket));
        }
    }

    /// Makes a file usable on this loop. The same [`OpenFile`] may be used by many loops.
    pub fn add_file(&mut self, file: Arc<OpenFile>) -> File {
        each!(self, backend => backend.add_file(file))
    }

    /// Forgets a file: new operations answer `EBADF`, those in flight end as usual, then this loop lets go of it.
    pub fn remove_file(&mut self, file: File) {
        each!(self, backend => backend.remove_file(file));
    }

    /// Writes all of `bytes` at once, if that waits for no device.
    ///
    /// # Errors
    /// `EAGAIN` if it would wait: use [`Op::Write`]. Else the kernel's.
    pub fn try_write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        each!(self, backend => backend.try_write(file, offset, bytes))
    }

    /// Reads a range of a mapped file at once, into memory that needs a copy of it. It should be resident
    /// ([`Reactor::resident`]): a page that is not makes the loop wait for the disk. Short only at the end of the file.
    ///
    /// # Errors
    /// The kernel's; `EOPNOTSUPP` in a simulation.
    pub fn read_now(&mut self, file: File, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        self.backend.os().ok_or(Errno::OPNOTSUPP)?.read_now(file, offset, into)
    }

    /// Receives what is here of a stream straight into a file that lives in memory, in whole pages of the file or up to
    /// the end of the range, so that no page is ever half of one transfer and half of another. Gives the bytes moved;
    /// 0 if no whole page is here, or the file does not lend itself to it, or there is no room: use [`Op::Recv`] and
    /// [`Op::Write`]. No receive may be in flight on the stream.
    pub fn receive_into_file(&mut self, socket: Socket, file: File, offset: u64, len: usize) -> usize {
        match &mut self.backend {
            _ if self.shared.is_busy(socket).is_some() => 0,
            Backend::Uring(uring) => uring.receive_into_file(socket, file, offset, len),
            Backend::Epoll(epoll) => epoll.receive_into_file(socket, file, offset, len),
            Backend::Sim(_) => 0,
        }
    }

    /// Bytes of a stream that are here to be received, as far as is known: 0 says nothing.
    pub fn readable_bytes(&self, socket: Socket) -> usize {
        if let Some(bytes) = self.shared.readable_bytes(socket) {
            return bytes;
        }
        match &self.backend {
            Backend::Uring(uring) => uring.readable_bytes(socket),
            Backend::Epoll(epoll) => epoll.readable_bytes(socket),
            Backend::Sim(_) => 0,
        }
    }

    /// Whether a stream's peer has closed or reset it, though what it sent before may not be received yet.
    pub fn has_hung_up(&self, socket: Socket) -> bool {
        self.backend.descriptor(socket).is_some_and(crate::net::has_hung_up)
    }

    /// Whether a range of a mapped file is in memory, so that sending it waits for nothing. Known to about a second.
    pub fn resident(&mut self, file: File, offset: u64, len: usize) -> bool {
        let now = self.now();
        match &self.backend {
            Backend::Uring(uring) => uring.resident(file, offset, len, now),
            Backend::Epoll(epoll) => epoll.resident(file, offset, len, now),
            Backend::Sim(sim) => sim.resident(file, offset, len),
        }
    }
}
