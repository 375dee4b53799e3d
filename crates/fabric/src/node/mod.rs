//! A node: sessions, messages and memory for a program with threads that wait; the library has no threads of its own.
//!
//! [`Fabric`](crate::Fabric) is for event loops; a [`Node`] is for other programs. It is a handle that threads share. There is no
//! dispatcher: a thread that waits drives the loop, for all others too (docs/decisions/0021). So a program that neither waits nor
//! calls [`Node::progress`] neither sends nor receives, and its peers can only fill its kernel buffers.
//!
//! Every request is an [`Op`], which ends exactly once: wait for it, for the first of several ([`Node::wait_any`]), add it to a
//! [`Group`] that threads share, or poll. Messages ([`Node::send`]) need credit, which bounds the messages that the peer's
//! program has not received. Bytes of any length go between [`Memory`] and the [`Window`]s that the peer has opened to us
//! ([`Node::put`], [`Node::get`], and of several ranges of one window [`Node::get_ranges`], [`Node::put_ranges`]), or between
//! those windows and a slice of the caller, which then waits ([`Node::get_into`], [`Node::put_from`]).
//!
//! Memory is private ([`Node::register`]), can be lent to peers on the same host, which then copy directly
//! ([`Node::register_shared`]), or is the caller's own file in memory ([`Node::register_file`]). A window is for one peer, and open
//! until it is closed or for one use, or it is for the first of several peers ([`Node::open_window_for_one_of`]).
//!
//! ```
//! use byway_fabric::node::{Deadline, Node, NodeOptions, Outcome, Rights, parse_address};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let soon = || Deadline::after(std::time::Duration::from_secs(10));
//! let (server, client) = (Node::open(&NodeOptions::default())?, Node::open(&NodeOptions::default())?);
//! let at = server.listen(&parse_address("tcp://127.0.0.1:0")?)?.ok_or("no port")?;
//! let (incoming, outgoing) = (server.start_accept()?, client.start_connect(&parse_address(&format!("tcp://{at}"))?)?);
//! // Two nodes in one thread: each gets a turn until both have their session.
//! let session = loop {
//!     if let Ok(result) = outgoing.test() {
//!         break result?;
//!     }
//!     server.progress()?;
//! };
//! let Outcome::Session(to_server) = session else { return Err("no session".into()) };
//! let Outcome::Session(to_client) = incoming.wait(soon())?? else { return Err("no session".into()) };
//!
//! // The server opens a window and announces it; the client reads it without the server's program.
//! let memory = server.register(4096)?;
//! memory.write(0, b"what the server has")?;
//! let window = server.open_window(to_client, &memory, 0..4096, Rights::GET)?;
//! server.send(to_client, b"look here", &window.descriptor().to_bytes())?;
//! let message = client.receive(soon())?;
//! assert_eq!(message.header, b"look here");
//! let remote = byway_fabric::node::Descriptor::from_bytes(&message.payload[..].try_into()?);
//! let mine = client.register(19)?;
//! let get = client.get(to_server, &remote, 0, &[mine.segment(0..19)])?;
//! while get.test().is_err() {
//!     server.progress()?;
//! }
//! assert_eq!(&mine.bytes()?[..], b"what the server has");
//! # Ok(())
//! # }
//! ```

mod address;
mod borrowed;
mod command;
mod deferred;
mod engine;
mod error;
mod events;
mod feedback;
mod fork;
mod group;
mod layer;
mod liveness;
#[doc(hidden)]
pub mod lock;
mod memory;
mod moving;
mod op;
mod poll;
mod requests;
mod shared;
mod transfers;
mod wait;
mod windows;
pub(crate) mod wire;

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

use byway_reactor::{Clock, IoChoice, Mapping, Reactor, Waker, descriptor_floor};

pub use self::address::{AddressError, parse as parse_address};
use self::engine::Engine;
pub use self::error::{InUse, NodeError, OpError, SubmitError, WaitError};
pub use self::feedback::SessionFeedback;
pub use self::group::{Group, GroupCompletion, GroupFull};
pub use self::layer::{Layer, Turn};
use self::lock::Lock;
pub use self::memory::{Bytes, Memory, Segment, Window};
pub use self::op::{Completed, Op, OpId, Outcome};
use self::shared::SessionState;
use self::shared::Shared;
pub use self::wait::Deadline;
pub use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor, Rights};
use crate::limits::{MESSAGES_DEFAULT, NODE_FRAME_BYTES_DEFAULT, NODE_KEEP_ALIVE_DEFAULT};
use crate::registration::{Counters, Limits, Unavailable};
use crate::session::PayloadChecksum;
use crate::slots::Slot;
use crate::tls::ServerTls;
pub use byway_reactor::{Address, FileMemoryError as RegisterError, PathState};

/// How a node is opened. To be written with `..NodeOptions::default()` at its end: there may be more to say one day.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The backend. `Auto` is epoll: a ring does not survive a fork in which the child goes on to use it, and is taken where it is
    /// asked for.
    pub io: IoChoice,
    /// Memory for connections and messages, in bytes.
    pub frame_bytes: usize,
    /// Connections beside the first of each session that this node makes, for large payloads; 1 to
    /// [`BULK_LANES_MAX`](crate::limits::BULK_LANES_MAX).
    pub bulk_lanes: u16,
    /// Messages that a session's peer may send before the program has taken them; at least 1.
    pub messages: u16,
    /// Silence of a peer from which bytes, credit or the end of a put are expected, after which it is probed; after twice that its session ends.
    /// A program that neither waits nor polls for so long is taken for dead by its peers. What is longer than
    /// [`KEEP_ALIVE_MAX`](crate::limits::KEEP_ALIVE_MAX) is that.
    pub keep_alive: Duration,
    /// Whether payloads carry a checksum. It is taken before the bytes are sent: where a session has them, memory must not be
    /// written to ([`Memory::write`]) while it is put or got from, or the receiver ends the session as for any wrong checksum. A
    /// peer that requires them has a session with them.
    pub checksum: PayloadChecksum,
    /// How much of the program's memory stays registered after its use with each device of RDMA, in ranges and bytes: above, what
    /// was used longest ago is let go of, and what is in use is registered for one use ([`NodeCounters::registrations`] tells).
    /// With 0 of either each use registers. More ranges than [`REGISTERED_RANGES_MAX`](crate::limits::REGISTERED_RANGES_MAX) are taken
    /// for so many. Bytes count against the limit on locked memory (`ulimit -l`).
    pub registrations: Limits,
    /// What sessions that others begin may or must do about TLS. [`Node::connect_secure`] begins one.
    pub tls: ServerTls,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            io: IoChoice::Auto,
            frame_bytes: NODE_FRAME_BYTES_DEFAULT,
            bulk_lanes: 1,
            messages: MESSAGES_DEFAULT,
            keep_alive: NODE_KEEP_ALIVE_DEFAULT,
            checksum: PayloadChecksum::Off,
            registrations: Limits::default(),
            tls: ServerTls::Off,
        }
    }
}

/// A session of a node. A name: it goes stale when the session has ended and the program knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Session(Slot<SessionState>);

impl Session {
    /// The name as a number; never 0.
    pub fn to_u64(self) -> u64 {
        self.0.to_u64()
    }

    /// The name of that number.
    pub fn from_u64(number: u64) -> Self {
        Self(Slot::from_u64(number))
    }
}

/// A message that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Over which session.
    pub session: Session,
    /// At most [`MESSAGE_HEADER_BYTES_MAX`](crate::limits::MESSAGE_HEADER_BYTES_MAX) bytes.
    pub header: Vec<u8>,
    /// At most [`SMALL_BYTES_MAX`](crate::limits::SMALL_BYTES_MAX) bytes; none behind a put.
    pub payload: Vec<u8>,
}

/// What a node has, counted now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounters {
    /// Windows that are open, those of gets under way included.
    pub windows: usize,
    /// How often a peer named a window wrongly.
    pub windows_refused: u64,
    /// Operations whose result was not taken.
    pub ops: usize,
    /// Sessions.
    pub sessions: usize,
    /// How often memory is lent to peers, each piece to each of them.
    pub loans: usize,
    /// Bytes of [`NodeOptions::frame_bytes`] in use, by messages, and by connections beyond their own receive buffers.
    pub frame_bytes: usize,
    /// What became of the program's own memory over RDMA, where it must be registered with a device: see
    /// [`registration`](crate::registration). All 0 before such a transfer.
    pub registrations: Counters,
    /// Why memory is registered for each transfer, if it is ([`registrations`](Self::registrations)).
    pub registered_each_time: Option<Unavailable>,
}

/// See the module. Cloning gives another handle; the node ends with the last of them and of its operations, windows and groups,
/// and then cuts its sessions: [close](Node::close) them before.
#[derive(Clone)]
pub struct Node {
    inner: Arc<Inner>,
}

/// Nodes that this process has opened.
static NODES: AtomicU64 = AtomicU64::new(0);

struct Inner {
    /// Of the nodes that this process has opened.
    number: u64,
    mark: fork::Mark,
    /// Not dropped in the child of a fork: it would speak on the parent's connections.
    engine: ManuallyDrop<Lock<Engine>>,
    shared: ManuallyDrop<Arc<Lock<Shared>>>,
    waker: Waker,
    /// Of [`Node::descriptor`], once asked for.
    poll: OnceLock<poll::Poll>,
    io: &'static str,
    /// Messages that each peer may send.
    messages: u16,
    /// The loop's own descriptor, for the same; none in a simulation.
    loop_fd: Option<OwnedFd>,
    clock: Clock,
    /// The only thread that may use the engine, where the loop was not opened for threads.
    home: Option<ThreadId>,
    kept: borrowed::Kept,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.mark.is_child() || self.is_away() {
            return;
        }
        // SAFETY: dropped once, here, and not used after: this is the end of the struct.
        unsafe {
            ManuallyDrop::drop(&mut self.engine);
            ManuallyDrop::drop(&mut self.shared);
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({})", self.inner.io)
    }
}

impl Node {
    /// Opens a node.
    ///
    /// # Errors
    /// The kernel's: no memory, no descriptors, io_uring refused.
    pub fn open(options: &NodeOptions) -> std::io::Result<Self> {
        Self::open_over(options, None)
    }

    /// Opens a node with a [`Layer`].
    ///
    /// # Errors
    /// As for [`Node::open`].
    pub fn open_with(options: &NodeOptions, layer: Box<dyn Layer>) -> std::io::Result<Self> {
        Self::open_over(options, Some(layer))
    }

    fn open_over(options: &NodeOptions, layer: Option<Box<dyn Layer>>) -> std::io::Result<Self> {
        let reactor = Reactor::open_for_threads(options.io, options.frame_bytes)?;
        Self::new(reactor, options, layer, None, None)
    }

    /// A node on a simulated loop ([`byway_reactor::sim`]), whose keys and nonces are those of the seed. It belongs to the
    /// calling thread, as the loop does. Nothing moves the world's clock here, so no thread may wait: the simulation turns each
    /// node by [`Node::progress`] and looks at operations by [`Op::test`].
    ///
    /// # Errors
    /// The kernel's: no memory.
    ///
    /// # Panics
    /// Later, where another thread uses it.
    #[doc(hidden)]
    pub fn over(
        reactor: Reactor,
        options: &NodeOptions,
        layer: Option<Box<dyn Layer>>,
        seed: u64,
    ) -> std::io::Result<Self> {
        Self::new(reactor, options, layer, Some(seed), Some(std::thread::current().id()))
    }

    fn new(
        mut reactor: Reactor,
        options: &NodeOptions,
        layer: Option<Box<dyn Layer>>,
        seed: Option<u64>,
        home: Option<ThreadId>,
    ) -> std::io::Result<Self> {
        // The program says itself how much it puts into which peer's memory.
        reactor.take_all_memory();
        let (waker, clock) = (reactor.waker(), reactor.clock());
        let loop_fd = reactor.descriptor().map(descriptor_floor::duplicate).transpose()?;
        let shared = Arc::new(Lock::new(Shared::default()));
        let engine = Engine::new(reactor, options, seed, &shared, layer);
        let inner = Inner {
            number: NODES.fetch_add(1, Ordering::Relaxed),
            mark: fork::Mark::new()?,
            io: engine.io(),
            messages: options.messages.max(1),
            engine: ManuallyDrop::new(Lock::new(engine)),
            shared: ManuallyDrop::new(shared),
            waker,
            poll: OnceLock::new(),
            loop_fd,
            clock,
            home,
            kept: borrowed::Kept::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What tells it from other nodes of the process.
    pub(super) fn number(&self) -> u64 {
        self.inner.number
    }

    /// Which backend it has: `epoll` or `uring`.
    pub fn io(&self) -> &'static str {
        self.inner.io
    }

    /// Memory of `bytes` (1 to [`MEMORY_BYTES_MAX`](crate::limits::MEMORY_BYTES_MAX)), page-aligned, zeroes. Any
    /// node of the process can use it, one at a time: while operations or windows of one do, others are refused.
    ///
    /// # Errors
    /// `InvalidInput` for another number of bytes; the kernel's, if there is no memory.
    pub fn register(&self, bytes: usize) -> std::io::Result<Memory> {
        check_bytes(bytes)?;
        Ok(Memory::new(self, Mapping::new(bytes)?, bytes))
    }

    /// As [`Node::register`], of memory that peers on this host can be lent. A peer with a window there over `shm://` gets
    /// and puts by one copy of its own, where private memory takes two and a message. For gets any number of peers have it at a
    /// time, for puts one (and then no other for gets). Windows of others are served through their connections as ever, and so are
    /// windows for puts in sessions with [checksums](NodeOptions::checksum), where one put could change bytes before those of
    /// another are checked. Memory that was lent for gets, or that a device of RDMA had, is sealed against new writers and not lent
    /// for puts any more. A peer has all of the memory then, not the window alone.
    ///
    /// A child of a fork shares it too, until it is taken back from a peer that was lost while it could write there: from then
    /// on the child finds zeroes, and the parent has the bytes for itself.
    ///
    /// # Errors
    /// As for [`Node::register`]; no descriptors.
    pub fn register_shared(&self, bytes: usize) -> std::io::Result<Memory> {
        check_bytes(bytes)?;
        Ok(Memory::new(self, Mapping::shared(bytes)?, bytes))
    }

    /// Memory that the caller has made: a range of a file in memory (`memfd_create`), from the start of a page on, of 1 to
    /// [`MEMORY_BYTES_MAX`](crate::limits::MEMORY_BYTES_MAX) bytes. Its size must be fixed by seals (`F_SEAL_SHRINK`,
    /// `F_SEAL_GROW`), since to touch a page that was cut off ends the process. The caller may have it mapped
    /// elsewhere, where it sees what comes at once; so the bytes are never given out as references. The descriptor stays the
    /// caller's.
    ///
    /// Seal it with `F_SEAL_FUTURE_WRITE` too, once it is registered and mapped by its other writers: from then on the kernel
    /// refuses new writers and holes. Only such a file is lent to peers on this host over `shm://` (the whole file, if it
    /// is of whole pages, for gets alone; puts go through the connection), since the peer could open another anew for writing.
    /// And only such a file stays registered with a device of RDMA between transfers. Before a hole is punched into another,
    /// its windows must have been closed: a device keeps the pages that it has.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register_file(&self, file: BorrowedFd<'_>, range: Range<u64>) -> Result<Memory, RegisterError> {
        let bytes = range.end.checked_sub(range.start).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.filter(|bytes| *bytes <= crate::limits::MEMORY_BYTES_MAX).ok_or(RegisterError::Range)?;
        Ok(Memory::new(self, Mapping::of_file(file, range.start, bytes)?, bytes))
    }

    /// Opens a range of memory to the peer of a session. See [`Node::open_window_once`] for one that can be used once.
    ///
    /// # Errors
    /// `OutOfRange`, `Borrowed`, `Full`, or the session is gone; `Rdma` where a device cannot have the memory, for want of memory
    /// that may be locked mostly: the session goes on.
    pub fn open_window(
        &self,
        session: Session,
        memory: &Memory,
        range: Range<usize>,
        rights: Rights,
    ) -> Result<Window, NodeError> {
        self.open_range(&[session], memory.segment(range), rights, false)
    }

    /// Opens a range of memory, of at most 1 MiB ([`PAYLOAD_BYTES_MAX`](crate::limits::PAYLOAD_BYTES_MAX)), for one put of one
    /// range or one get of one segment (or one of each): a second is refused, and so are all pieces but one of those that have
    /// several; over RDMA all pieces of one get are one use.
    ///
    /// # Errors
    /// As for [`Node::open_window`]; `TooLong`.
    pub fn open_window_once(
        &self,
        session: Session,
        memory: &Memory,
        range: Range<usize>,
        rights: Rights,
    ) -> Result<Window, NodeError> {
        self.open_window_for_one_of(&[session], memory, range, rights)
    }

    /// As [`Node::open_window_once`], for whichever of several sessions' peers is the first (up to
    /// [`WINDOW_SESSIONS_MAX`](crate::limits::WINDOW_SESSIONS_MAX) of them): one put, or one get (or one of each) in all, by
    /// the same descriptor for each. Later peers are refused, and counted; while the bytes of one are on their way others are
    /// refused as `Busy`, and if his session ends before they have come the window is open still. It closes by itself when the
    /// last of the sessions ends.
    ///
    /// # Errors
    /// As for [`Node::open_window`]; `TooLong`; one of the sessions has ended; `EOPNOTSUPP` if one of several is over RDMA.
    pub fn open_window_for_one_of(
        &self,
        sessions: &[Session],
        memory: &Memory,
        range: Range<usize>,
        rights: Rights,
    ) -> Result<Window, NodeError> {
        if range.len() > crate::limits::PAYLOAD_BYTES_MAX || sessions.len() > crate::limits::WINDOW_SESSIONS_MAX {
            return Err(SubmitError::TooLong.into());
        }
        self.open_range(sessions, memory.segment(range), rights, true)
    }

    /// A group of at most `capacity` operations (1 to [`GROUP_OPS_MAX`](crate::limits::GROUP_OPS_MAX)).
    ///
    /// # Errors
    /// `TooLong` for another capacity; `Forked`.
    pub fn group(&self, capacity: usize) -> Result<Group, SubmitError> {
        Group::new(self, capacity)
    }
}

fn check_bytes(bytes: usize) -> std::io::Result<()> {
    let good = (1..=crate::limits::MEMORY_BYTES_MAX).contains(&bytes);
    if good { Ok(()) } else { Err(std::io::ErrorKind::InvalidInput.into()) }
}
