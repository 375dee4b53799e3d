//! Requests of a volume's user, and their results.

use std::time::Duration;

use byway_fabric::tls::TlsError;
use byway_reactor::Extent;

use super::super::engine::ZeroFlags;
use super::super::wire::CallError;

/// What a user asks for.
#[derive(Debug)]
pub enum Request<R, W> {
    /// Fill `into` (`len` bytes) from `offset`.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
        /// The memory; comes back with the answer.
        into: R,
    },
    /// Write `len` bytes of `from` at `offset`.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
        /// The payload; kept until it is flushed.
        from: W,
        /// Durable before it is answered.
        durable: bool,
    },
    /// Make durable what was answered before.
    Flush,
    /// No longer needed.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Durable before it is answered.
        durable: bool,
    },
    /// Zeroes from now on.
    Zero {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// How.
        flags: ZeroFlags,
    },
    /// List data and holes.
    Extents {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Bring into the server's memory.
    Prefetch {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// The server said so.
    #[error(transparent)]
    Call(#[from] CallError),
    /// No server could be reached for too long.
    #[error("the server could not be reached for {} s; check that it runs, then open the volume again", .0.as_secs())]
    Lost(Duration),
    /// The memory that the volume lived in is gone, and the contents with it: the server process ended, or the volume was
    /// replaced there.
    #[error("the volume lived in a server's memory, and that process ended or replaced it; its contents are lost")]
    VolatileLost,
    /// The name is another volume's now.
    #[error(
        "its server has another file or device under the volume's name than the one that was opened; what was not flushed \
         is not written into it. Open the volume again if that is the one you mean"
    )]
    Replaced,
    /// The server is there, and would not open the volume again.
    #[error("the server opened the volume before, and refuses it now: {0}")]
    Refused(CallError),
    /// The server is there, and TLS with it fails: it refuses the client's certificate now, or shows another of its own.
    #[error("the server opened the volume before, and TLS with it fails now: {0}")]
    Tls(TlsError),
    /// The server restarted, and writes that it had acknowledged could not be written again.
    #[error("the server restarted and refused writes that it had acknowledged before: {0}")]
    ReplayFailed(CallError),
    /// The server could not flush, and a change waited at the client's bound for [`Bounds::lost_after`]. The client keeps what it has;
    /// once the server has opened the volume's files anew, it sends that again and takes changes again.
    #[error(
        "the server cannot flush ({0}), so no more writes are kept; run `byway ctl reopen` there (docs/operations.md)"
    )]
    FlushFailed(CallError),
    /// The volume was closed.
    #[error("the volume is closed")]
    Closed,
    /// Its user cancelled it.
    #[error("cancelled{}", if *.sent { "; a server had it, and may have done it" } else { " before it was sent" })]
    Cancelled {
        /// A server may have done it: it was sent, and its session ended without an answer.
        sent: bool,
    },
}

/// The end of a request.
#[derive(Debug)]
pub struct Done<R> {
    /// As it was given.
    pub tag: u64,
    /// What came of it.
    pub result: Result<Answer, VolumeError>,
    /// A read's memory.
    pub buffer: Option<R>,
}

/// What came of a request that went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Unit,
    /// Data and holes, in order from the offset; perhaps fewer bytes than asked.
    Extents(Vec<Extent>),
}

/// What the machine keeps within.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Requests taken and not answered; more are handed back.
    pub requests_max: usize,
    /// Bytes of unflushed writes kept (each at least 4 KiB, what a frame takes). At half the machine flushes by itself; at
    /// the bound, changes wait.
    pub unflushed_bytes_max: usize,
    /// How long without a server until everything fails; and how long, once the server could not flush, a change waits at the
    /// bound until it fails, with those that come after it.
    pub lost_after: Duration,
}
