//! Sources and destinations of a copy.

use byway_reactor::{Completion, Errno, Extent, Frame, Instant, Reactor};

use crate::remote::TransferError;

/// One end of a copy, driven by completions of the loop that it shares with the other end.
///
/// An endpoint gets a token class of its own when it is made; every completion of that class is handed to
/// [`Endpoint::complete`]. Each request is answered exactly once, in any order.
pub trait Endpoint {
    /// Size in bytes.
    fn bytes(&self) -> u64;

    /// Offsets and lengths are multiples of this, except at the end of the image; a power of two.
    fn block_bytes(&self) -> u32 {
        1
    }

    /// Ranges that were not written through this endpoint read as zeroes, so that holes need no request.
    fn is_blank(&self) -> bool;

    /// A text (no white space) that names the object, and for a source changes when its contents may have changed, as
    /// far as that can be told. Asked for before and after; a resume file holds both ends'.
    fn identity(&self) -> String;

    /// Whether a source whose contents have changed has another [`Endpoint::identity`]. Where it need not, what an earlier
    /// run copied counts only after it was read again.
    fn shows_changes(&self) -> bool {
        false
    }

    /// A frame of memory that costs it less than others, if it has such and there is some free.
    fn own_frame(&self, _len: usize) -> Option<Frame> {
        None
    }

    /// Drops this machine's cache of the contents, so that further reads come from the disk or server. All writes have been
    /// flushed.
    fn drop_cache(&mut self) {}

    /// When the client gives up, while it has no session with its server; `None` while it has one.
    fn lost_at(&self) -> Option<Instant> {
        None
    }

    /// Starts a request. `id` is unused until its answer has come.
    fn submit(&mut self, reactor: &mut Reactor, id: u32, request: Request);

    /// Takes a completion of its class and appends the answers that it makes.
    fn complete(&mut self, reactor: &mut Reactor, completion: Completion, done: &mut Vec<Done>);

    /// Sends what was submitted since the last turn and appends answers that have come meanwhile. Called after requests
    /// were submitted and after completions were handed over, before the loop waits.
    fn turn(&mut self, _reactor: &mut Reactor, _done: &mut Vec<Done>) {}

    /// The token class of its operations.
    fn class(&self) -> u8;
}

/// A request to an endpoint. Its range lies within the endpoint.
#[derive(Debug)]
pub enum Request {
    /// Fill all of `into`.
    Read {
        /// First byte.
        offset: u64,
        /// The memory; its length is how much.
        into: Frame,
    },
    /// Write all of `from`.
    Write {
        /// First byte.
        offset: u64,
        /// The memory.
        from: Frame,
    },
    /// Make a range read as zeroes.
    Zero {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make all answered writes durable.
    Flush,
    /// List data and holes.
    Extents {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// The answer to the request `id`.
#[derive(Debug)]
pub struct Done {
    /// As given to [`Endpoint::submit`].
    pub id: u32,
    /// Its result.
    pub answer: Answer,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The kernel's.
    #[error("{0}")]
    File(Errno),
    /// The server's, or the connection's.
    #[error("{0}")]
    Remote(TransferError),
}

/// The result of a request.
#[derive(Debug)]
pub enum Answer {
    /// A read: all of it, or an error.
    Read(Result<Frame, EndpointError>),
    /// A write, a zero or a flush.
    Changed(Result<(), EndpointError>),
    /// In order from the offset, without gaps; may cover less than asked, never nothing.
    Extents(Result<Vec<Extent>, EndpointError>),
}
