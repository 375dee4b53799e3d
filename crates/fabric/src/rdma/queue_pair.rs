//! Queue pairs, to which endpoints post their operations.

use std::cell::Cell;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use byway_reactor::Errno;

use super::domain::WindowAddress;
use super::error::{PostError, RdmaError, Refused, errno_of};
use super::memory::Payload;
use super::operations::SendQueueId;
use super::operations::{Completion, Kind, Operation};
use super::quarantine::Ending;
use super::receive::{ReceiveInner, SharedReceiveQueue};
use super::verbs::{self, CmId, Qp, QpAttr, QpCap, QpInitAttr, SendWr, Sge};

/// What a queue pair is made for.
#[derive(Clone, Copy, Debug)]
pub struct QueuePairOptions {
    /// Operations posted and not completed, receives not counted.
    pub sends_max: u32,
    /// Segments of one operation.
    pub segments_max: u32,
    /// Bytes that are handed to the device with the operation. A device that cannot has 0, see
    /// [`Endpoint::inline_bytes_max`](super::Endpoint::inline_bytes_max).
    pub inline_bytes: u32,
}

/// An operation to be posted.
#[derive(Debug)]
pub enum Work {
    /// A message, into the receive that the peer posted first.
    Send(Payload),
    /// A message, maybe of no bytes, with a number beside it.
    SendWith {
        /// The message.
        payload: Payload,
        /// The number.
        immediate: u32,
    },
    /// Bytes into a window of the peer.
    Write {
        /// From here.
        payload: Payload,
        /// To there.
        to: WindowAddress,
    },
    /// Bytes out of a window of the peer.
    Read {
        /// To here: memory that is not shared.
        into: Payload,
        /// From there.
        from: WindowAddress,
    },
}

impl Work {
    const fn kind(&self) -> Kind {
        match self {
            Self::Send(_) | Self::SendWith { .. } => Kind::Send,
            Self::Write { .. } => Kind::Write,
            Self::Read { .. } => Kind::Read,
        }
    }

    fn payload(&mut self) -> &mut Payload {
        match self {
            Self::Send(payload)
            | Self::SendWith { payload, .. }
            | Self::Write { payload, .. }
            | Self::Read { into: payload, .. } => payload,
        }
    }
}

/// When the completion of an operation comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// As soon as it is done.
    Now,
    /// With the next operation of the queue pair that is reported; for all but the last of a batch. Some are
    /// reported all the same, so that the queue never fills up with such.
    WithNext,
}

/// A queue pair of a live identifier.
pub(super) struct QueuePair {
    id: NonNull<CmId>,
    qp: NonNull<Qp>,
    number: u32,
    key: SendQueueId,
    segments_max: u32,
    inline_bytes_max: u32,
    is_broken: Cell<bool>,
    receives: Rc<ReceiveInner>,
}

impl QueuePair {
    /// # Safety
    /// `id` is live until the queue pair has been dropped, and has no other.
    pub(super) unsafe fn create(
        id: NonNull<CmId>,
        receives: &SharedReceiveQueue,
        options: QueuePairOptions,
    ) -> Result<Self, RdmaError> {
        let receives = Rc::clone(&receives.0);
        let domain = &receives.domain;
        // SAFETY: the caller's identifier is live.
        if unsafe { (*id.as_ptr()).verbs } != domain.device.context.as_ptr() {
            return Err(RdmaError::OtherDevice);
        }
        let make = |inline_bytes: u32| {
            let cap = QpCap {
                max_send_wr: options.sends_max,
                max_send_sge: options.segments_max,
                max_inline_data: inline_bytes,
                ..QpCap::default()
            };
            let cq = receives.completions.cq.as_ptr();
            let mut attributes = QpInitAttr {
                qp_context: ptr::null_mut(),
                send_cq: cq,
                recv_cq: cq,
                srq: receives.srq.as_ptr(),
                cap,
                qp_type: verbs::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            let create = domain.device.library.connection().rdma_create_qp;
            // SAFETY: identifier, domain and queues are live and of one device; the attributes are valid for the call.
            match unsafe { create(id.as_ptr(), domain.pd.as_ptr(), &raw mut attributes) } {
                0 => Ok(attributes.cap.max_inline_data.min(inline_bytes)),
                _ => Err(RdmaError::last("rdma_create_qp")),
            }
        };
        // How much a device can have inline is not asked, but tried.
        let inline_bytes_max = match make(options.inline_bytes) {
            Err(error) if options.inline_bytes > 0 && error.is(Errno::INVAL) => make(0)?,
            made => made?,
        };
        // SAFETY: the call above succeeded, so that the identifier has a queue pair.
        let (qp, number) = unsafe { ((*id.as_ptr()).qp, (*(*id.as_ptr()).qp).qp_num) };
        let qp = NonNull::new(qp).ok_or(RdmaError::State("create_queue_pair"))?;
        let key = receives.completions.state().operations.add_sends(number, options.sends_max);
        let segments_max = options.segments_max;
        let is_broken = Cell::new(false);
        Ok(Self { id, qp, number, key, segments_max, inline_bytes_max, is_broken, receives })
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn inline_bytes_max(&self) -> u32 {
        self.inline_bytes_max
    }

    /// See [`Endpoint::post`](super::Endpoint::post).
    #[expect(clippy::result_large_err, reason = "gives the operation back, without an allocation")]
    pub(super) fn post(&self, mut work: Work, token: u64, report: Report) -> Result<(), Refused> {
        if let Err(error) = self.check(&mut work) {
            return Err(Refused { error, work: Some(work) });
        }
        let kind = work.kind();
        let (mut payload, remote, immediate) = match work {
            Work::Send(payload) => (payload, None, None),
            Work::SendWith { payload, immediate } => (payload, None, Some(immediate)),
            Work::Write { payload, to } => (payload, Some(to), None),
            Work::Read { into, from } => (into, Some(from), None),
        };
        let bytes = payload.len() as u32;
        let mut state = self.receives.completions.state();
        let mut sges = std::mem::take(&mut state.sges);
        payload.describe(&mut sges);
        let operation = Operation { token, kind, bytes, payload };
        let (number, is_reported) = state.operations.begin_send(self.key, operation, report == Report::Now);
        drop(state);
        let mut request = request(number, kind, immediate, remote, is_reported);
        if kind != Kind::Read && bytes > 0 && bytes <= self.inline_bytes_max {
            request.send_flags |= verbs::IBV_SEND_INLINE;
        }
        let posted = self.hand_over(request, &mut sges);
        self.receives.completions.state().sges = sges;
        posted.map_err(|error| Refused { error, work: None })
    }

    /// See [`Endpoint::send_inline`](super::Endpoint::send_inline).
    pub(super) fn send_inline(
        &self,
        bytes: &[u8],
        immediate: Option<u32>,
        token: u64,
        report: Report,
    ) -> Result<(), PostError> {
        let most = self.inline_bytes_max;
        if bytes.is_empty() || bytes.len() > most as usize {
            return Err(PostError::TooLong { bytes: clamp(bytes.len()), most });
        }
        self.check_room()?;
        let length = bytes.len() as u32;
        let operation = Operation { token, kind: Kind::Send, bytes: length, payload: Payload::Empty };
        let begun = self.receives.completions.state().operations.begin_send(self.key, operation, report == Report::Now);
        let mut request = request(begun.0, Kind::Send, immediate, None, begun.1);
        request.send_flags |= verbs::IBV_SEND_INLINE;
        // Inline bytes are copied during the call, and the key is not looked at.
        self.hand_over(request, &mut [Sge { addr: bytes.as_ptr() as u64, length, lkey: 0 }])
    }

    fn check(&self, work: &mut Work) -> Result<(), PostError> {
        let kind = work.kind();
        let payload = work.payload();
        let (segments, most) = (clamp(payload.segments().len()), self.segments_max);
        if segments > most {
            return Err(PostError::Segments { segments, most });
        }
        let (bytes, most) = (clamp(payload.len()), self.receives.domain.device.message_bytes_max);
        if bytes > most {
            return Err(PostError::TooLong { bytes, most });
        }
        if kind == Kind::Read && !payload.is_exclusive() {
            return Err(PostError::NotExclusive);
        }
        self.check_room()
    }

    pub(super) fn check_room(&self) -> Result<(), PostError> {
        if self.is_broken.get() {
            return Err(PostError::NotConnected);
        }
        let has_room = self.receives.completions.state().operations.has_room(self.key);
        if has_room { Ok(()) } else { Err(PostError::Full) }
    }

    /// Gives a request, whose operation is in the table, to the device.
    fn hand_over(&self, mut request: SendWr, sges: &mut [Sge]) -> Result<(), PostError> {
        request.sg_list = sges.as_mut_ptr();
        request.num_sge = sges.len() as i32;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live, the function is its provider's; request and segments are valid for the call, and
        // the memory that they name belongs to the operation in the table until it completes, or is copied in the call.
        let status =
            unsafe { (self.receives.domain.device.ops.post_send)(self.qp.as_ptr(), &raw mut request, &raw mut bad) };
        if status == 0 {
            return Ok(());
        }
        // Room was counted, so this is no full queue. soft-RoCE may have the request in its ring by now, so that it must
        // not be taken out of the table; in the error state it is never executed.
        self.fail();
        Err(PostError::Broken(errno_of(status)))
    }

    /// Puts the queue pair into the error state: what is posted completes as flushed.
    pub(super) fn fail(&self) {
        self.is_broken.set(true);
        let mut attributes = QpAttr::of_state(verbs::IBV_QPS_ERR);
        let modify = self.receives.domain.device.library.verbs().ibv_modify_qp;
        // SAFETY: the queue pair is live and the attributes are valid for the call.
        let status = unsafe { modify(self.qp.as_ptr(), &raw mut attributes, verbs::IBV_QP_STATE) };
        if status != 0 {
            // A device that is gone; dropping the queue pair completes everything.
            tracing::debug!(status, "a queue pair does not enter the error state");
        }
    }
}

/// A number that does not fit is beyond every limit.
pub(super) fn clamp(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn request(
    number: u64,
    kind: Kind,
    immediate: Option<u32>,
    remote: Option<WindowAddress>,
    is_reported: bool,
) -> SendWr {
    let opcode = match kind {
        Kind::Write => verbs::IBV_WR_RDMA_WRITE,
        Kind::Read => verbs::IBV_WR_RDMA_READ,
        Kind::Send | Kind::Receive if immediate.is_some() => verbs::IBV_WR_SEND_WITH_IMM,
        Kind::Send | Kind::Receive => verbs::IBV_WR_SEND,
    };
    let mut request = SendWr::new(number, opcode);
    // The field is in the order of the network.
    request.imm_data = immediate.unwrap_or(0).to_be();
    if is_reported {
        request.send_flags = verbs::IBV_SEND_SIGNALED;
    }
    if let Some(WindowAddress { address, rkey }) = remote {
        request.rdma.remote_addr = address;
        request.rdma.rkey = rkey;
    }
    request
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let completions = &self.receives.completions;
        self.fail();
        completions.collect();
        // SAFETY: the queue pair is live. Afterwards the identifier must not name it: rdma_destroy_qp does the same two
        // steps, but does not say whether the first one succeeded.
        let status = unsafe { (self.receives.domain.device.library.verbs().ibv_destroy_qp)(self.qp.as_ptr()) };
        completions.collect();
        let mut ended: Vec<Completion> = Vec::new();
        let mut state = completions.state();
        state.operations.remove_sends(self.key, &mut ended);
        match Ending::of(status, || self.receives.domain.device.is_taken_away()) {
            Ending::Ended => {
                // SAFETY: the identifier is live, as `create` demands.
                unsafe { (*self.id.as_ptr()).qp = ptr::null_mut() };
                state.backlog.extend(ended);
            }
            Ending::TakenAway => {
                let mut quarantine = self.receives.domain.device.quarantine();
                state.backlog.extend(ended.into_iter().map(|ended| ended.quarantine(&mut quarantine)));
            }
            Ending::Refused => {
                // The operations end for their waiters; the memory is never used again.
                tracing::error!(status, operations = ended.len(), "a queue pair does not end; its memory is given up");
                state.backlog.extend(ended.into_iter().map(Completion::give_up));
            }
        }
    }
}
