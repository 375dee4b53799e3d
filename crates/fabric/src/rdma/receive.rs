//! The shared receive queue: memory for the messages of all connections.
//!
//! A message, of any peer, takes the receive that was posted first. A peer that finds none retries until there is one.
//! Messages should fit into one packet of the path: a provider may lose a receive that a longer message had begun to fill
//! when its connection ended (soft-RoCE does); its memory then comes back when the queue is dropped.

use std::ptr::{self, NonNull};
use std::rc::Rc;

use super::completion::{CompletionInner, CompletionQueue};
use super::domain::{Domain, DomainInner};
use super::error::{PostError, RdmaError, ReceiveRefused};
use super::memory::Payload;
use super::operations::ReceiveQueueId;
use super::operations::{Completion, Kind, Operation};
use super::quarantine::Ending;
use super::queue_pair::clamp;
use super::verbs::{RecvWr, Srq, SrqInitAttr};

/// A shared receive queue. Cloning it gives another handle.
#[derive(Clone)]
pub struct SharedReceiveQueue(pub(super) Rc<ReceiveInner>);

pub(super) struct ReceiveInner {
    pub(super) srq: NonNull<Srq>,
    key: ReceiveQueueId,
    segments_max: u32,
    pub(super) completions: Rc<CompletionInner>,
    pub(super) domain: Rc<DomainInner>,
}

impl SharedReceiveQueue {
    /// A queue of at most `depth` receives, each of at most `segments_max` segments, that complete on `completions`, in
    /// which `depth` entries are reserved.
    ///
    /// # Errors
    /// [`RdmaError::Capacity`] if the device or the completion queue cannot have so many.
    pub fn new(
        domain: &Domain,
        completions: &CompletionQueue,
        depth: u32,
        segments_max: u32,
    ) -> Result<Self, RdmaError> {
        let (domain, completions) = (Rc::clone(&domain.0), Rc::clone(&completions.0));
        if !Rc::ptr_eq(&domain.device, &completions.device) {
            return Err(RdmaError::OtherDevice);
        }
        let reserved = completions.state().operations.add_receives(depth);
        let capacity = |most| RdmaError::Capacity { what: "receives", wanted: depth, most };
        let key = reserved.map_err(capacity)?;
        let mut attributes =
            SrqInitAttr { srq_context: ptr::null_mut(), max_wr: depth, max_sge: segments_max, srq_limit: 0 };
        // SAFETY: the protection domain is live and the attributes are valid for the call.
        let srq = unsafe { (domain.device.library.verbs().ibv_create_srq)(domain.pd.as_ptr(), &raw mut attributes) };
        let Some(srq) = NonNull::new(srq) else {
            let error = RdmaError::last("ibv_create_srq");
            completions.state().operations.remove_receives(key, &mut Vec::new());
            return Err(error);
        };
        Ok(Self(Rc::new(ReceiveInner { srq, key, segments_max, completions, domain })))
    }

    /// Posts memory for a message. It completes when a message came, or when the queue is dropped.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::Segments`] and [`PostError::NotExclusive`], with the memory.
    pub fn post(&self, mut payload: Payload, token: u64) -> Result<(), ReceiveRefused> {
        let inner = &*self.0;
        let segments = clamp(payload.segments().len());
        if segments > inner.segments_max {
            return Err((PostError::Segments { segments, most: inner.segments_max }, payload));
        }
        if !payload.is_exclusive() {
            return Err((PostError::NotExclusive, payload));
        }
        let mut state = inner.completions.state();
        let state = &mut *state;
        payload.describe(&mut state.sges);
        let operation = Operation { token, kind: Kind::Receive, bytes: 0, payload };
        let wr_id = match state.operations.begin_receive(inner.key, operation) {
            Ok(number) => number,
            Err(operation) => return Err((PostError::Full, operation.payload)),
        };
        let (sg_list, num_sge) = (state.sges.as_mut_ptr(), state.sges.len() as i32);
        let mut request = RecvWr { wr_id, next: ptr::null_mut(), sg_list, num_sge };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is live, the function is its provider's; the request is valid for the call, and the memory of
        // its segments belongs to the operation until it completes.
        let status =
            unsafe { (inner.domain.device.ops.post_srq_recv)(inner.srq.as_ptr(), &raw mut request, &raw mut bad) };
        if status == 0 {
            return Ok(());
        }
        // A receive is a write into a ring that the provider checks first: an error means that it is not there.
        let payload = state.operations.withdraw_receive(wr_id).map(|operation| operation.payload);
        Err((PostError::Full, payload.unwrap_or_default()))
    }
}

impl std::fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedReceiveQueue")
    }
}

impl Drop for ReceiveInner {
    fn drop(&mut self) {
        // Queue pairs hold an `Rc` of this, so none can use it now, and all that it will ever complete has.
        self.completions.collect();
        // SAFETY: the queue is live and no queue pair is attached to it.
        let status = unsafe { (self.domain.device.library.verbs().ibv_destroy_srq)(self.srq.as_ptr()) };
        let mut ended: Vec<Completion> = Vec::new();
        let mut state = self.completions.state();
        state.operations.remove_receives(self.key, &mut ended);
        match Ending::of(status, || self.domain.device.is_taken_away()) {
            Ending::Ended => state.backlog.extend(ended),
            Ending::TakenAway => {
                let mut quarantine = self.domain.device.quarantine();
                state.backlog.extend(ended.into_iter().map(|ended| ended.quarantine(&mut quarantine)));
            }
            Ending::Refused => {
                tracing::error!(status, "a receive queue does not end; its memory is given up");
                state.backlog.extend(ended.into_iter().map(Completion::give_up));
            }
        }
    }
}
