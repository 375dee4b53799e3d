//! Errors by operation: whose fault it is, and what to do next.

use byway_reactor::Errno;

use crate::rdma::RdmaError;
use crate::session::CloseReason;
use crate::windows::{OpenError, WindowError};

/// Why an operation was not begun. Nothing has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// This is the child of a fork: the node is its parent's. Open another.
    #[error("this process is a child of the one that opened the node; open another node")]
    Forked,
    /// A thread panicked while it turned the node's loop, so that the loop's state is no longer whole. A bug of byway, or of the node's
    /// [`Layer`](super::Layer). Open another node.
    #[error(
        "a thread of this process panicked inside the node (a bug of byway or of a protocol on it); open another node"
    )]
    Panicked,
    /// Too many operations, or messages that wait for credit: wait for one to end.
    #[error("too many operations are in flight; wait for some to end")]
    Busy,
    /// No such session: it was closed, or its end was told already.
    #[error("the session is unknown or has ended: connect again")]
    NoSession,
    /// The session has ended.
    #[error("the session ended: {0}")]
    Ended(CloseReason),
    /// A range does not lie in its memory, or in the window as its descriptor has it; the caller's fault.
    #[error("a range does not lie in its memory or window")]
    OutOfRange,
    /// A header, a payload or a list is longer than [limits](crate::limits) say; the caller's fault.
    #[error("a header, payload or list of segments is too long")]
    TooLong,
    /// The window is not open for that; the caller's fault.
    #[error("the window does not allow this access")]
    Rights,
    /// The memory is looked at by the program: let go of what [`Memory::bytes`](super::Memory::bytes) gave first.
    #[error("the program holds references to the memory's bytes")]
    Borrowed,
    /// Operations or windows of another node use the memory, or the operation is another's; the caller's fault.
    #[error("the memory or operation belongs to another node")]
    OtherNode,
    /// The peer does not serve the protocol of a call, or not in a version that this node speaks.
    #[error("the peer does not serve that protocol, or not in a version that this node speaks")]
    Unsupported,
    /// This node was not opened for the protocol of a call; the caller's fault.
    #[error("this node does not speak that protocol; open it for the protocol")]
    NotSpoken,
    /// The call that is to be delegated needs no answer any more: its caller's session has ended.
    #[error("the call needs no answer: its caller's session has ended")]
    CallerGone,
}

/// Why an operation did not do what it was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// It was cancelled before it had begun.
    #[error("cancelled")]
    Cancelled,
    /// The session ended first. What of a put is in the peer's memory is not known.
    #[error("the session ended: {0}")]
    Ended(CloseReason),
    /// The peer refused: no such window, or not so much of it, or not for that. Its memory was not touched by that part.
    #[error("the peer refused: {0}")]
    Refused(WindowError),
    /// The peer answered with something else than was asked for; its fault.
    #[error("the peer's answer does not fit the request")]
    WrongAnswer,
    /// All windows are open ([`WINDOWS_MAX`](crate::limits::WINDOWS_MAX)); close some.
    #[error("too many windows are open")]
    Full,
    /// The kernel's: no such address, address in use, ...; `EOPNOTSUPP` for what the wire of a session cannot do; `ENODEV` where a
    /// device that is gone may still write to the memory, which stays in use for ever.
    #[error("{0}")]
    Io(Errno),
    /// Over RDMA. Listening: no library, no device at the address, or the system's. Opening a window: mostly
    /// [`RdmaError::MemoryLimit`], which says what the operator is to raise; the session goes on.
    #[error("{0}")]
    Rdma(RdmaError),
    /// It took longer than its caller allows.
    #[error("the deadline has passed")]
    Deadline,
    /// Only of calls: the server did not do it; the number is its, or the layer's.
    #[error("the call failed with status {0}")]
    Status(u16),
}

impl From<OpenError> for OpError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Full => Self::Full,
            OpenError::Rdma(error) => Self::Rdma(error),
        }
    }
}

/// Why a wait ended with nothing to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline has passed; the operation goes on.
    #[error("no operation ended before the deadline")]
    Deadline,
    /// The result was taken already, by another thread or a group.
    #[error("the result was taken already")]
    Taken,
    /// An operation is another node's; the caller's fault.
    #[error("the operation belongs to another node")]
    OtherNode,
    /// See [`SubmitError::Forked`].
    #[error("this process is a child of the one that opened the node; open another node")]
    Forked,
    /// See [`SubmitError::Panicked`]. The operation does not end.
    #[error(
        "a thread of this process panicked inside the node (a bug of byway or of a protocol on it); open another node"
    )]
    Panicked,
    /// The kernel does not let the node wait any more: it is unusable.
    #[error("the node cannot wait: {0}")]
    Io(Errno),
}

/// Why something that waits for its own end failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// It was not begun.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// It failed.
    #[error(transparent)]
    Op(#[from] OpError),
    /// It goes on: its end was not waited for.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// The memory cannot be borrowed: an operation or an open window still uses it, or the program looks at it elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory is in use by operations or open windows")]
pub struct InUse;
