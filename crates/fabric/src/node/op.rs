//! Operations as the program sees them.

use super::error::{OpError, SubmitError, WaitError};
use super::shared::OpSlot;
use super::{Deadline, Message, Node, Session};
use crate::descriptor::Descriptor;
use crate::session::CloseReason;
use crate::slots::Slot;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

/// How an operation ended.
pub type Completed = Result<Outcome, OpError>;

/// What an operation brought.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It is done: a message is on its way, the bytes are where they belong, a window is closed.
    Done,
    /// A message came, or the answer to a call.
    Message(Message),
    /// A session can be used.
    Session(Session),
    /// A session has ended, and all its messages were taken: only for receives from any session.
    Ended(Session, CloseReason),
    /// The node listens, there; the address is that of a TCP socket.
    Listening(Option<SocketAddr>),
    /// A window is open.
    Opened(Descriptor),
    /// What the layer above says of a request of its own.
    Layer(u64),
}

/// The name of an operation: constant during its life, and not used again for a long time after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub(super) OpSlot);

impl OpId {
    /// The name as a number.
    pub fn to_u64(self) -> u64 {
        self.0.to_u64()
    }

    /// The name of that number.
    pub fn from_u64(number: u64) -> Self {
        Self(Slot::from_u64(number))
    }
}

/// An operation in flight, or an ended one whose result was not taken. It ends exactly once, whichever thread waits for it and
/// however. Dropping the handle lets the operation continue and discards its result. But a receive, an accept or a connect is
/// cancelled, and a result that had arrived is not lost: a message, the end of a session, or an accepted session goes to the
/// next operation that asks for one; a connected session is closed. Only a message of a session whose end was already reported
/// is lost.
#[derive(Debug)]
pub struct Op {
    pub(super) node: Node,
    pub(super) slot: OpSlot,
    /// The tables have nothing that would go with this handle: its result was taken, or is a group's.
    released: AtomicBool,
}

impl Op {
    pub(super) fn new(node: &Node, slot: OpSlot) -> Self {
        Self { node: node.clone(), slot, released: AtomicBool::new(false) }
    }

    /// Nothing goes with this handle any more.
    pub(super) fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    /// Its name.
    pub fn id(&self) -> OpId {
        OpId(self.slot)
    }

    /// Its node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Waits for its end and takes the result. Several threads may wait; one of them gets it.
    ///
    /// # Errors
    /// See [`WaitError`]. After `Deadline` it goes on.
    pub fn wait(&self, deadline: impl Into<Deadline>) -> Result<Completed, WaitError> {
        self.node.wait_any(&[self], deadline).map(|(_, result)| result)
    }

    /// As [`Op::wait`], for a thread that waits long while other threads wait for short operations: it leaves the loop to them, and
    /// drives it when no other thread has done so for [`BACKGROUND_PAUSE`](crate::limits::BACKGROUND_PAUSE). So the result may be seen
    /// twice that time late if other threads have just stopped.
    ///
    /// # Errors
    /// See [`Op::wait`].
    pub fn wait_in_background(&self, deadline: impl Into<Deadline>) -> Result<Completed, WaitError> {
        self.node.wait_in_background(self, deadline.into())
    }

    /// Waits for the end of a receive, an accept or a connect, and calls it off if it does not come by the deadline.
    ///
    /// # Errors
    /// As for [`Op::wait`]; nothing goes on.
    pub(super) fn wait_or_call_off(self, deadline: impl Into<Deadline>) -> Result<Completed, WaitError> {
        let error = match self.wait(deadline) {
            Ok(result) => return Ok(result),
            Err(error) => error,
        };
        // Another thread may have turned the loop since the last look: then it has ended here. To ask that, and to call it off if
        // not, is one step.
        let mut shared = self.node.inner.lock()?;
        let ended = shared.call_off(self.slot);
        if !shared.commands.is_empty() {
            self.node.inner.nudge(shared);
        }
        ended.ok_or(error)
    }

    /// The result, if it has ended, after a look at what the kernel has.
    ///
    /// # Errors
    /// See [`WaitError`]; `Deadline` if it has not ended.
    pub fn test(&self) -> Result<Completed, WaitError> {
        self.wait(Deadline::now())
    }

    /// Asks for its early end. It still ends once: as cancelled, if it had not begun to move bytes, else as it would have. Of a
    /// connect nothing stays.
    ///
    /// # Errors
    /// The child of a fork.
    pub fn cancel(&self) -> Result<(), SubmitError> {
        self.node.cancel(self.id())
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if *self.released.get_mut() {
            return;
        }
        let Ok(mut shared) = self.node.inner.lock() else { return };
        if shared.detach(self.slot) {
            self.node.inner.nudge(shared);
        }
    }
}
