//! The operations of a loop, and their completions.
//!
//! An [`Op`] owns the memory that it works on; its [`Completion`] returns the memory, also after an error or a cancellation.
//! So the caller never holds memory that the kernel may still touch.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::Instant;
use crate::frame::Frame;
use crate::gather::{Gather, Scatter};

pub use rustix::io::Errno;

/// The caller's label of an operation, handed back untouched: what kind of owner, which one, which of its slots.
///
/// `index` and `generation` name a slab entry, so that a completion that outlives its owner is recognised.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(u64);

impl Token {
    /// The token of the completion that a [`Waker`](crate::Waker) causes.
    pub const WAKE: Self = Self(u64::MAX);

    /// A token of `class` (the owner) and `tag` (which of the owner's operations) for the slab entry `index` of `generation`
    /// (its low 24 bits). `index` must be under 2^24.
    pub const fn new(class: u8, tag: u8, index: u32, generation: u32) -> Self {
        debug_assert!(index < 1 << 24);
        Self((class as u64) << 56 | (tag as u64) << 48 | ((generation & 0x00ff_ffff) as u64) << 24 | index as u64)
    }

    /// The operation's owner.
    pub const fn class(self) -> u8 {
        (self.0 >> 56) as u8
    }

    /// Which of the owner's operations it is.
    pub const fn tag(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// The slab index.
    pub const fn index(self) -> u32 {
        (self.0 & 0x00ff_ffff) as u32
    }

    /// The generation's low 24 bits.
    pub const fn generation(self) -> u32 {
        (self.0 >> 24 & 0x00ff_ffff) as u32
    }

    /// The same owner's operation `tag`.
    #[must_use]
    pub const fn with_tag(self, tag: u8) -> Self {
        Self(self.0 & !(0xff << 48) | (tag as u64) << 48)
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token({}.{} #{}@{})", self.class(), self.tag(), self.index(), self.generation())
    }
}

/// A stream socket of this loop. Names a slot and its generation; a stale one answers `EBADF`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Socket {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A listening socket of this loop.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Listener {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A file of this loop (see [`Reactor::add_file`](crate::Reactor::add_file)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct File {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A foreign descriptor that this loop waits for (see [`Reactor::add_descriptor`](crate::Reactor::add_descriptor)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Descriptor {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// Where a stream socket listens or connects to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Address {
    /// TCP. In a simulation the IP address names the node.
    Tcp(SocketAddr),
    /// A unix stream socket.
    Unix(PathBuf),
    /// A unix stream socket over which memory is shared, that then carries the stream. The kernel is only asked to wake an
    /// end that sleeps. In simulations the path is the IP and port of the listener (see [`crate::sim`]).
    Shared(PathBuf),
    /// An address of an RDMA device. A loop itself neither listens at it nor connects to it: both answer
    /// `EOPNOTSUPP`. The fabric uses it for its RDMA transport.
    Rdma(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp://{address}"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Shared(path) => write!(f, "shm://{}", path.display()),
            Self::Rdma(address) => write!(f, "rdma://{address}"),
        }
    }
}

/// Where a write begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteAt {
    /// At this byte.
    Offset(u64),
    /// At the end of the file as it is then (`RWF_APPEND`): two appends never overlap.
    End,
}

impl WriteAt {
    /// The offset and the flags for `pwritev2`.
    pub(crate) fn offset_and_flags(self) -> (u64, i32) {
        match self {
            Self::Offset(offset) => (offset, 0),
            Self::End => (0, libc::RWF_APPEND),
        }
    }
}

/// One operation.
#[derive(Debug)]
pub enum Op {
    /// Accept connections until cancelled; each is a completion of its own. Ends with an error completion.
    Accept {
        /// Where from.
        listener: Listener,
    },
    /// Connect a new stream.
    Connect {
        /// Where to.
        to: Address,
    },
    /// Receive at least `min` bytes (at least 1), at most what `into` holds. Fewer than `min` means end of stream.
    Recv {
        /// From which stream. One receive at a time.
        socket: Socket,
        /// Where to, in order.
        into: Scatter,
        /// When to complete.
        min: usize,
    },
    /// Send all of it. One send at a time.
    Send {
        /// To which stream.
        socket: Socket,
        /// What, in order.
        gather: Gather,
    },
    /// Read up to `len` bytes at `offset` into `into[start..start + len]`. Short only at the end of the file.
    Read {
        /// From which file.
        file: File,
        /// Byte offset in it.
        offset: u64,
        /// The frame; for a direct file `start`, `len` and `offset` are multiples of its block.
        into: Frame,
        /// First byte in the frame.
        start: usize,
        /// Bytes.
        len: usize,
    },
    /// Write `from[start..start + len]` at `offset`, all of it or an error.
    Write {
        /// To which file.
        file: File,
        /// Byte offset in it.
        offset: u64,
        /// The frame.
        from: Frame,
        /// First byte in the frame.
        start: usize,
        /// Bytes.
        len: usize,
        /// Durable before it completes (`RWF_DSYNC`).
        durable: bool,
    },
    /// Write `from[start..start + len]` as one `write(2)` does, and answer how many bytes the file took: fewer where it may not grow
    /// further. Not for simulated files.
    WriteOnce {
        /// To which file.
        file: File,
        /// Where in it.
        at: WriteAt,
        /// The frame.
        from: Frame,
        /// First byte in the frame.
        start: usize,
        /// Bytes.
        len: usize,
    },
    /// Make all completed writes durable (`fdatasync`).
    Sync {
        /// Of which file.
        file: File,
    },
    /// Change how a range is backed.
    Allocate {
        /// Of which file.
        file: File,
        /// Into what.
        mode: Allocate,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// List what lies in a range: data and holes. What lies past the end of the file as it is now is data.
    Extents {
        /// Of which file.
        file: File,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// At most so many extents (at least 1).
        count_max: usize,
    },
    /// Bring a range into the page cache; completes when that is under way or done.
    Prefetch {
        /// Of which file.
        file: File,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Complete when a descriptor can be read from, or has ended or failed. Nothing is read. One at a time, each for one
    /// completion; while it is readable, the next completes at once.
    Readable {
        /// Which one.
        descriptor: Descriptor,
    },
    /// Complete at or after `at`.
    Timer {
        /// When.
        at: Instant,
    },
}

/// How [`Op::Allocate`] changes a range. What a store cannot do answers `EOPNOTSUPP`. Any range will do, also of a
/// device that is not `direct`: parts of its blocks are written, or kept by a discard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocate {
    /// Read as zeroes and give the space back (`FALLOC_FL_PUNCH_HOLE`; a device: its command for zeroes, which may unmap).
    /// Zeroes are never written out.
    PunchHole,
    /// Read as zeroes and keep the space (`FALLOC_FL_ZERO_RANGE`). A device that has no command for it writes zeroes out,
    /// which takes as long as any write does.
    ZeroRange,
    /// Give the space back; what it reads as afterwards does not matter (a file: punch; a device: `BLKDISCARD`).
    Discard,
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// Reads as zeroes and takes no space; else data.
    pub hole: bool,
}

/// The end of an operation (or one connection of an [`Op::Accept`]).
#[derive(Debug)]
pub struct Completion {
    /// As given to `submit`.
    pub token: Token,
    /// What came of it, with the operation's memory.
    pub outcome: Outcome,
}

/// What came of an operation. A cancelled one answers [`Errno::CANCELED`].
#[derive(Debug)]
pub enum Outcome {
    /// [`Op::Accept`]: a stream, or the error that ended accepting.
    Accepted(Result<Socket, Errno>),
    /// [`Op::Connect`].
    Connected(Result<Socket, Errno>),
    /// [`Op::Recv`]: bytes received in total.
    Received {
        /// The memory.
        into: Scatter,
        /// Bytes; under `min` only at the end of the stream, or when cancelled after some came.
        result: Result<usize, Errno>,
    },
    /// [`Op::Send`]: all of it went, or the stream is broken.
    Sent {
        /// The memory.
        gather: Gather,
        /// Bytes sent, all of them.
        result: Result<usize, Errno>,
    },
    /// [`Op::Read`].
    Read {
        /// The memory.
        into: Frame,
        /// Bytes read; short only at the end of the file.
        result: Result<usize, Errno>,
    },
    /// [`Op::Write`].
    Written {
        /// The memory.
        from: Frame,
        /// All of it, or an error.
        result: Result<usize, Errno>,
    },
    /// [`Op::Sync`].
    Synced(Result<(), Errno>),
    /// [`Op::Allocate`].
    Allocated(Result<(), Errno>),
    /// [`Op::Extents`]: in order from `offset`, without gaps; may cover less than asked, never nothing.
    Extents(Result<Vec<Extent>, Errno>),
    /// [`Op::Prefetch`].
    Prefetched(Result<(), Errno>),
    /// [`Op::Readable`].
    Readable(Result<(), Errno>),
    /// [`Op::Timer`].
    TimedOut(Result<(), Errno>),
    /// Another thread called [`Waker::wake`](crate::Waker::wake).
    Woken,
}

/// How long [`Reactor::reap`](crate::Reactor::reap) may wait when nothing is ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all.
    Poll,
    /// Until something completes.
    Block,
    /// Until something completes or that time has come.
    Until(Instant),
}
