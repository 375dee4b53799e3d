//! What the operations of a session take and give: see [`transfer`](super::transfer).

use byway_reactor::{Errno, Frame};

#[cfg(doc)]
use super::Fabric;
use super::rdma_windows::UseId;
#[cfg(doc)]
use crate::limits::PAYLOAD_BYTES_MAX;
use crate::slots::SessionId;
use crate::windows::{WindowError, WindowKey};
use crate::wire::Header;

/// A place in memory that the peer has opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The window.
    pub window: WindowKey,
    /// Bytes from its start.
    pub offset: u64,
}

/// Length and checksum of a payload, which its header carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PayloadMeta {
    /// Bytes.
    pub len: usize,
    /// Its CRC32C, if the session has payload checksums.
    pub checksum: Option<u32>,
}

/// What a put moves, and where to.
#[derive(Clone, Copy, Debug)]
pub struct Put {
    /// The session with the peer.
    pub session: SessionId,
    /// The way that the payload takes if it goes over lanes.
    pub route: Route,
    /// Where the payload goes.
    pub to: Remote,
    /// The message behind it.
    pub header: Header,
    /// 1 to [`PAYLOAD_BYTES_MAX`] bytes.
    pub payload: PayloadMeta,
}

/// What a get reads.
#[derive(Clone, Copy)]
pub(super) struct Get {
    pub(super) session: SessionId,
    pub(super) from: Remote,
    /// The use of a window for one use that it belongs to.
    pub(super) once: Option<UseId>,
    /// Given back with the frame.
    pub(super) context: u64,
}

/// One of the ways that puts can take to the peer: see [`Fabric::route`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route(pub(super) usize);

/// Why a get brought nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// The peer has no such window, or not so much of it: its fault, or ours if we named it wrongly.
    #[error("the peer refused: {0}")]
    Refused(WindowError),
    /// Another number of bytes came than was asked for: the peer's fault.
    #[error("the peer sent {got} bytes where {wanted} were requested")]
    Length {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The session ended before they came.
    #[error("the session ended")]
    Ended,
    /// The peer's memory cannot be read: it has taken it away. Or, over RDMA, ours cannot be registered.
    #[error("the memory cannot be read or filled: {0}")]
    Io(Errno),
    /// The device was lost, and may still write to the memory: that is never used again. The session has ended.
    #[error("the device was lost before it released the memory, which stays reserved for ever")]
    GivenUp,
}

/// A get that has ended.
#[derive(Debug)]
pub struct EndedGet {
    /// The frame, which holds the bytes if the get succeeded. `None` only with [`GetError::GivenUp`].
    pub frame: Option<Frame>,
    /// What the get was begun with.
    pub context: u64,
    /// Whether it went well.
    pub result: Result<(), GetError>,
}

impl EndedGet {
    /// The frame of a get that went well.
    ///
    /// # Errors
    /// Why it did not.
    pub fn into_frame(self) -> Result<Frame, GetError> {
        self.result.and(self.frame.ok_or(GetError::GivenUp))
    }
}
