//! Gets into borrowed memory, and puts from it: `read` and `write` of a guest library in another program's process (0024).
//!
//! The borrow ends when the call returns. The kernel's or a device's use of an operation's memory cannot always be ended by
//! then: the program may have closed the node's descriptors, or a device does not answer. So an operation never has the
//! borrowed bytes, but memory of the node's own, and the calling thread copies. Such memory is kept for the next call
//! ([`BORROWED_KEPT_MAX`], [`BORROWED_KEPT_BYTES_MAX`]), so that it is neither mapped nor registered with a device each
//! time.
//!
//! If the call must end before the operation (its deadline has passed, or the waiting thread unwinds), the operation is
//! cancelled if it has not begun. Otherwise the session is ended, so that a late put does not arrive after the caller's next
//! one.

use std::sync::{Mutex, PoisonError};

use byway_reactor::{Errno, Mapping, bytewise};
use smallvec::smallvec;

use super::error::{NodeError, OpError, SubmitError, WaitError};
use super::memory::HeldSegment;
use super::op::{Op, OpId};
use super::wait::Deadline;
use super::{Node, Session};
use crate::descriptor::Descriptor;
use crate::limits::{BORROWED_KEPT_BYTES_MAX, BORROWED_KEPT_MAX, MEMORY_BYTES_MAX};

/// Memory of operations that are over, for the next.
#[derive(Debug, Default)]
pub(super) struct Kept {
    mappings: Mutex<Vec<Mapping>>,
}

/// Memory in the place of what was borrowed. Unless the operation has ended, it is given up when this is dropped.
struct Bounce<'a> {
    node: &'a Node,
    session: Session,
    mapping: Mapping,
    len: usize,
    op: Option<OpId>,
}

impl Node {
    /// Gets bytes of a window of the peer, from `offset` on, into memory of the caller's, and waits for them.
    ///
    /// # Errors
    /// See [`SubmitError`] and [`OpError`]; of more than [`MEMORY_BYTES_MAX`] bytes `TooLong`; `Io(NOMEM)` without memory. After
    /// [`OpError::Deadline`] the session has ended, if anything was asked of the peer. After an error the memory is as it was.
    pub fn get_into(
        &self,
        session: Session,
        from: &Descriptor,
        offset: u64,
        into: &mut [u8],
        deadline: impl Into<Deadline>,
    ) -> Result<(), NodeError> {
        let place = from.readable()?.place(from.get_key(), offset, into.len())?;
        let Some(mut bounce) = Bounce::new(self, session, into.len())? else { return Ok(()) };
        bounce.wait(|node, held| node.start_get(session, place, smallvec![held]), deadline.into())?;
        // SAFETY: the mapping has so many bytes, without references to them; `into` is no part of it.
        unsafe { bytewise::copy(bounce.mapping.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
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
        let Some(mut bounce) = Bounce::new(self, session, from.len())? else { return Ok(()) };
        // SAFETY: the mapping has so many bytes, without references to them, and no operation has them yet; `from` is no part of it.
        unsafe { bytewise::copy(from.as_ptr(), bounce.mapping.as_ptr(), from.len()) };
        bounce.wait(|node, held| node.start_put(session, smallvec![held], place), deadline.into())
    }
}

impl Kept {
    /// Unused memory of at least this many bytes.
    fn take(&self, len: usize) -> std::io::Result<Mapping> {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = mappings.iter().position(|mapping| mapping.len() >= len && mapping.uses() == 0) {
            return Ok(mappings.swap_remove(at));
        }
        drop(mappings);
        Mapping::new(if len > BORROWED_KEPT_BYTES_MAX { len } else { len.next_power_of_two() })
    }

    fn keep(&self, mapping: Mapping) {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        if mapping.len() <= BORROWED_KEPT_BYTES_MAX && !mapping.is_given_up() {
            // The one kept first makes room: lengths change with what a program does.
            if mappings.len() == BORROWED_KEPT_MAX {
                mappings.remove(0);
            }
            mappings.push(mapping);
        }
    }
}

impl<'a> Bounce<'a> {
    /// Of no bytes there is nothing to do.
    fn new(node: &'a Node, session: Session, len: usize) -> Result<Option<Self>, NodeError> {
        // Before a lock that a thread of the parent may have had.
        if node.inner.mark.is_child() {
            return Err(SubmitError::Forked.into());
        }
        if len > MEMORY_BYTES_MAX {
            return Err(SubmitError::TooLong.into());
        }
        if len == 0 {
            return Ok(None);
        }
        let mapping = node.inner.kept.take(len);
        let mapping = mapping.map_err(|error| OpError::Io(Errno::from_io_error(&error).unwrap_or(Errno::NOMEM)))?;
        Ok(Some(Self { node, session, mapping, len, op: None }))
    }

    fn wait(
        &mut self,
        begin: impl FnOnce(&Node, HeldSegment) -> Result<Op, SubmitError>,
        deadline: Deadline,
    ) -> Result<(), NodeError> {
        let op = begin(self.node, HeldSegment { mapping: self.mapping.counted(), start: 0, len: self.len })?;
        self.op = Some(op.id());
        match op.wait(deadline) {
            Err(WaitError::Deadline) => Err(OpError::Deadline.into()),
            Err(error) => Err(error.into()),
            Ok(result) => {
                self.op = None;
                Ok(result.map(|_| ())?)
            }
        }
    }
}

impl Drop for Bounce<'_> {
    fn drop(&mut self) {
        if self.op.is_some() {
            // In the child of a fork: the operation is its parent's.
            let _ = self.node.give_up(self.op, self.session);
        }
        self.node.inner.kept.keep(self.mapping.clone());
    }
}
