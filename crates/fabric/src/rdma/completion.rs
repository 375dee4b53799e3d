//! Completion queues, one per loop, with the descriptor that says that there is something.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use byway_reactor::Errno;

use super::device::{Device, DeviceInner};
use super::error::RdmaError;
use super::operations::{Completion, Operations};
use super::verbs::{CompChannel, Cq, Sge, Wc};

/// How many completions the device is asked for at a time.
const BATCH: usize = 32;

/// A completion queue. Cloning it gives another handle.
///
/// To wait without spinning: [`arm`](Self::arm), [`poll`](Self::poll) once more (what came before the arming causes no
/// event), wait until the descriptor is readable, [`acknowledge`](Self::acknowledge), and poll.
#[derive(Clone)]
pub struct CompletionQueue(pub(super) Rc<CompletionInner>);

pub(super) struct CompletionInner {
    pub(super) cq: NonNull<Cq>,
    channel: NonNull<CompChannel>,
    state: RefCell<State>,
    /// Last, so that the device is still open when the two are destroyed.
    pub(super) device: Rc<DeviceInner>,
}

pub(super) struct State {
    pub(super) operations: Operations,
    /// Completions that were polled, or ended, outside of a poll by the owner.
    pub(super) backlog: VecDeque<Completion>,
    /// Room for the segments of the operation that is being posted.
    pub(super) sges: Vec<Sge>,
}

impl CompletionQueue {
    /// A queue with room for `entries` operations at a time, receives and sends of all its connections together.
    ///
    /// # Errors
    /// [`RdmaError::Capacity`] if the device cannot have so many.
    pub fn new(device: &Device, entries: u32) -> Result<Self, RdmaError> {
        let most = device.completions_max();
        if entries == 0 || entries > most {
            return Err(RdmaError::Capacity { what: "completion queue entries", wanted: entries, most });
        }
        let device = Rc::clone(&device.0);
        let verbs = device.library.verbs();
        // SAFETY: the context is open while `device` lives.
        let channel = unsafe { (verbs.ibv_create_comp_channel)(device.context.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(|| RdmaError::last("ibv_create_comp_channel"))?;
        // SAFETY: context and channel are live, and vector 0 is there in every device.
        let cq = unsafe {
            (verbs.ibv_create_cq)(device.context.as_ptr(), entries as i32, ptr::null_mut(), channel.as_ptr(), 0)
        };
        let Some(cq) = NonNull::new(cq) else {
            let error = RdmaError::last("ibv_create_cq");
            // SAFETY: the channel is live and no queue uses it.
            unsafe { (verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let state = State { operations: Operations::new(entries), backlog: VecDeque::new(), sges: Vec::new() };
        let queue = Self(Rc::new(CompletionInner { cq, channel, state: RefCell::new(state), device }));
        rustix::io::ioctl_fionbio(queue.as_fd(), true)
            .map_err(|errno| RdmaError::System { call: "ioctl(FIONBIO)", errno })?;
        Ok(queue)
    }

    /// Takes what has completed, at most about as many as the queue has entries, and says how many that were.
    ///
    /// # Errors
    /// The device failed.
    pub fn poll(&self, into: &mut Vec<Completion>) -> Result<usize, RdmaError> {
        let before = into.len();
        let mut state = self.0.state.borrow_mut();
        into.extend(state.backlog.drain(..));
        self.0.take(&mut state.operations, into)?;
        Ok(into.len() - before)
    }

    /// Asks for an event when the next completion comes.
    ///
    /// # Errors
    /// The device failed.
    pub fn arm(&self) -> Result<(), RdmaError> {
        // SAFETY: the queue is live, and the function is its provider's.
        let status = unsafe { (self.0.device.ops.req_notify_cq)(self.0.cq.as_ptr(), 0) };
        if status == 0 { Ok(()) } else { Err(RdmaError::returned("ibv_req_notify_cq", status)) }
    }

    /// Takes the events from the descriptor, so that it is not readable any more, and says how many there were.
    pub fn acknowledge(&self) -> usize {
        let verbs = self.0.device.library.verbs();
        let mut count = 0;
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is live, and both places are valid for the call.
            let status = unsafe { (verbs.ibv_get_cq_event)(self.0.channel.as_ptr(), &raw mut cq, &raw mut context) };
            // Not blocking: no event is an error like any other.
            if status != 0 {
                return count;
            }
            // SAFETY: the channel serves this queue alone, so the event is its; each is acknowledged once, without which
            // the queue could not be destroyed.
            unsafe { (verbs.ibv_ack_cq_events)(self.0.cq.as_ptr(), 1) };
            count += 1;
        }
    }

    /// How many operations are posted and not completed.
    pub fn posted(&self) -> usize {
        self.0.state.borrow().operations.len()
    }
}

impl CompletionInner {
    /// For posting. Do not hold it while a queue pair may be dropped.
    pub(super) fn state(&self) -> std::cell::RefMut<'_, State> {
        self.state.borrow_mut()
    }

    /// Polls everything into the backlog: before a queue is destroyed, so that no completion of it is in the device's
    /// queue afterwards (some providers throw them away with it, others leave them there).
    pub(super) fn collect(&self) {
        let State { operations, backlog, .. } = &mut *self.state.borrow_mut();
        if let Err(error) = self.take(operations, backlog) {
            tracing::warn!(%error, "a completion queue cannot be polled");
        }
    }

    fn take(&self, operations: &mut Operations, into: &mut impl Extend<Completion>) -> Result<(), RdmaError> {
        let mut batch = [Wc::default(); BATCH];
        // Everything that is posted now; what comes meanwhile is for the next time.
        for _ in 0..=operations.len() / BATCH {
            // SAFETY: the queue is live, the function is its provider's, and the batch has room for so many.
            let count = unsafe { (self.device.ops.poll_cq)(self.cq.as_ptr(), BATCH as i32, batch.as_mut_ptr()) };
            let Ok(count) = usize::try_from(count) else {
                return Err(RdmaError::System { call: "ibv_poll_cq", errno: Errno::IO });
            };
            for wc in &batch[..count.min(BATCH)] {
                operations.finish(wc, into);
            }
            if count < BATCH {
                break;
            }
        }
        Ok(())
    }
}

impl AsFd for CompletionQueue {
    /// Readable when an event came; to be polled, never read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open while this handle is, and the descriptor with it.
        unsafe { BorrowedFd::borrow_raw((*self.0.channel.as_ptr()).fd) }
    }
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CompletionQueue({} posted)", self.posted())
    }
}

impl Drop for CompletionInner {
    fn drop(&mut self) {
        let verbs = self.device.library.verbs();
        // SAFETY: queue pairs and receive queues hold an `Rc` of this, so none uses the queue; its events are acknowledged
        // as they are taken; and the channel served this queue alone.
        unsafe {
            (verbs.ibv_destroy_cq)(self.cq.as_ptr());
            (verbs.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}
