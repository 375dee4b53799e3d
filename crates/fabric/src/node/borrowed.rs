//! Gets into memory that is only borrowed, and puts from it: `read` and `write` of a guest in somebody else's process (0024).
//!
//! The borrow ends when the call returns, so the call returns when nobody can touch the bytes any more, the kernel included. That
//! is counted as for all memory: a mapping over the borrowed bytes, whose uses are the operation and its frames. If the call is to
//! end before the operation (its deadline has passed, or the waiting thread unwinds), the operation is cancelled if it has not
//! begun; else the session is ended first, which ends all that is under way on it, and then that is waited for.

use std::time::Duration;

use byway_reactor::Mapping;

use super::error::{NodeError, OpError, SubmitError, WaitError};
use super::memory::{Descriptor, Held};
use super::op::{Op, OpId};
use super::wait::Deadline;
use super::{Node, Session};
use crate::limits::MEMORY_BYTES_MAX;

/// How long at most a thread sleeps that gives up an operation, and is not woken by its end.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Borrowed memory: at the end of its life nobody uses it any more.
struct Borrowed<'a> {
    node: &'a Node,
    session: Session,
    mapping: Mapping,
    /// Whose memory it is, once it was asked for.
    op: Option<OpId>,
    /// By the operation.
    is_written: bool,
}

impl Node {
    /// Gets bytes of a window of the peer, from `offset` on, into memory of the caller's, and waits for them: over a connection the
    /// kernel puts them there, over shared memory that was [lent](Node::register_shared) they are copied once.
    ///
    /// # Errors
    /// See [`SubmitError`] and [`OpError`]; of more than [`MEMORY_BYTES_MAX`] bytes `TooLong`. After [`OpError::Deadline`] the
    /// session has ended, if anything was asked of the peer: what is on its way can be kept out of the memory by nothing less. What
    /// lies in it after an error is anything. Where not even the end of the session keeps the kernel or a device out of it (the
    /// queue pair cannot be ended, or waiting itself fails, as after the program closed descriptors of ours), this ends the process:
    /// the memory would be somebody else's in a moment.
    pub fn get_into(
        &self,
        session: Session,
        from: &Descriptor,
        offset: u64,
        into: &mut [u8],
        deadline: impl Into<Deadline>,
    ) -> Result<(), NodeError> {
        let len = into.len();
        let place = from.readable()?.place(from.get_key(), offset, len)?;
        let Some(held) = Borrowed::new(self, session, (into.as_mut_ptr(), len), true)? else { return Ok(()) };
        held.wait(|node, held| node.start_get(session, place, vec![held]), deadline.into())
    }

    /// Puts bytes of the caller's into a window of the peer, from `offset` on, and waits until they lie there.
    ///
    /// # Errors
    /// As for [`Node::get_into`]; what of them lies in the window after an error is not known.
    pub fn put_from(
        &self,
        session: Session,
        from: &[u8],
        to: &Descriptor,
        offset: u64,
        deadline: impl Into<Deadline>,
    ) -> Result<(), NodeError> {
        let place = to.writable()?.place(to.put_key(), offset, from.len())?;
        // What is put is only read.
        let Some(held) = Borrowed::new(self, session, (from.as_ptr().cast_mut(), from.len()), false)? else {
            return Ok(());
        };
        held.wait(|node, held| node.start_put(session, vec![held], place), deadline.into())
    }
}

impl<'a> Borrowed<'a> {
    /// Of no bytes there is nothing to do.
    fn new(
        node: &'a Node,
        session: Session,
        (start, len): (*mut u8, usize),
        is_written: bool,
    ) -> Result<Option<Self>, SubmitError> {
        if len > MEMORY_BYTES_MAX {
            return Err(SubmitError::TooLong);
        }
        let Some(start) = std::ptr::NonNull::new(start).filter(|_| len > 0) else { return Ok(None) };
        // SAFETY: the bytes are borrowed until the caller returns, mutably if they are written; and this is dropped before, which
        // waits until nobody uses them. Nothing here makes a reference to them meanwhile.
        let mapping = unsafe { Mapping::over_borrowed(start, len) };
        Ok(Some(Self { node, session, mapping, op: None, is_written }))
    }

    fn wait(
        mut self,
        begin: impl FnOnce(&Node, Held) -> Result<Op, SubmitError>,
        deadline: Deadline,
    ) -> Result<(), NodeError> {
        let held = Held { mapping: self.mapping.counted(), start: 0, len: self.mapping.len() };
        let op = begin(self.node, held)?;
        self.op = Some(op.id());
        let ended = op.wait(deadline);
        // Now it is over, or is made to be.
        drop(self);
        match ended {
            Err(WaitError::Deadline) => Err(OpError::Deadline.into()),
            Err(error) => Err(error.into()),
            Ok(result) => Ok(result.map(|_| ())?),
        }
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if self.mapping.uses() == 0 {
            return;
        }
        // A child of a fork has the bytes for itself.
        let Ok(()) = self.node.give_up(self.op, self.session) else { return };
        loop {
            if self.mapping.is_given_up() {
                // A device was lost that may still read there, which harms nobody here, or write.
                if self.is_written {
                    std::process::abort();
                }
                return;
            }
            let nobody = |_: &mut super::shared::Shared| (self.mapping.uses() == 0).then_some(());
            match self.node.turn_until(Deadline::after(LOOK_AGAIN), nobody) {
                Ok(()) | Err(WaitError::Forked) => return,
                Err(WaitError::Deadline | WaitError::Taken | WaitError::OtherNode) => {}
                // The kernel may write into memory that is somebody else's in a moment, and nothing is left to prevent it.
                Err(WaitError::Io(_)) => std::process::abort(),
            }
        }
    }
}
