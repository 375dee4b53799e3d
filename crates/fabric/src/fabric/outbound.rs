//! What a lane sends: the messages that gather for the next send, the send in flight, and how much waits.
//!
//! A lane over RDMA sends no stream: its messages wait for the transport of its device one by one.

use std::collections::VecDeque;

use byway_reactor::{Gather, Instant, Op, Reactor, Token};
use zerocopy::IntoBytes;

use super::lane::{Lane, Phase};
use crate::limits::SEND_BYTES_MAX;
use crate::rdma::transport::Went;
use crate::wire::Header;

/// After so many answers it is looked which of them have gone.
const ANSWERS_LOOK: usize = 256;

/// When a send's oldest message was queued, and when it was given to the wire.
#[derive(Clone, Copy, Debug, Default)]
struct SendTimes {
    queued: Instant,
    begun: Instant,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Outbound {
    pending: Gather,
    spare: Option<Gather>,
    /// Messages for an RDMA connection.
    outbox: Vec<(Header, Gather)>,
    /// Bytes of the send in flight.
    in_flight: Option<usize>,
    /// Heap memory of the send in flight.
    in_flight_heap: usize,
    /// Frames of the send in flight, in bytes.
    in_flight_frames: usize,
    /// Of the send in flight, or the last one.
    send_times: SendTimes,
    /// When the first message was queued that is not in a send yet.
    queued_at: Option<Instant>,
    /// What the fabric has counted of this lane's heap memory.
    counted_heap: usize,
    /// Bytes that were ever pushed.
    pushed: u64,
    /// Where in those the answers end that may not have gone.
    answers: VecDeque<u64>,
    is_dirty: bool,
    sequence: u64,
}

impl Outbound {
    pub(super) fn new() -> Self {
        Self {
            pending: Gather::new(),
            spare: Some(Gather::new()),
            outbox: Vec::new(),
            in_flight: None,
            in_flight_heap: 0,
            in_flight_frames: 0,
            send_times: SendTimes::default(),
            queued_at: None,
            counted_heap: 0,
            pushed: 0,
            answers: VecDeque::new(),
            is_dirty: false,
            sequence: 0,
        }
    }

    /// Whether it has something to send, and no send in flight whose end would see to that.
    #[inline]
    pub(super) fn is_dirty(&self) -> bool {
        self.is_dirty
    }

    /// Whether a send is in flight.
    #[inline]
    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether the next message for an RDMA connection needs a gather.
    pub(super) fn needs_spare(&self) -> bool {
        self.spare.is_none()
    }

    /// Gives it that.
    pub(super) fn set_spare(&mut self, spare: Gather) {
        self.spare = Some(spare);
    }

    /// Appends a message to what is sent next. True if the lane must be put on the list of dirty ones.
    #[inline]
    fn push(&mut self, mut header: Header, now: Instant, by_device: bool, payload: impl FnOnce(&mut Gather)) -> bool {
        self.queued_at.get_or_insert(now);
        header.seal(self.sequence);
        self.sequence += 1;
        if by_device {
            let mut gather = self.spare.take().unwrap_or_default();
            payload(&mut gather);
            self.outbox.push((header, gather));
            return !std::mem::replace(&mut self.is_dirty, true);
        }
        let before = self.pending.len();
        self.pending.push_head(header.as_bytes());
        payload(&mut self.pending);
        self.pushed += (self.pending.len() - before) as u64;
        self.in_flight.is_none() && !std::mem::replace(&mut self.is_dirty, true)
    }

    /// Counts the last message as an answer to what the peer has asked for. True now and then: when it is time to look how many wait.
    pub(super) fn note_answer(&mut self) -> bool {
        self.answers.push_back(self.pushed);
        self.answers.len().is_multiple_of(ANSWERS_LOOK)
    }

    /// Answers that have not been taken by the connection, as far as is known.
    pub(super) fn answers(&mut self) -> usize {
        let gone = self.pushed.saturating_sub(self.queued() as u64);
        while self.answers.pop_front_if(|end| *end <= gone).is_some() {}
        self.answers.len()
    }

    /// Bytes that have not been taken by the connection, as far as is known.
    pub(super) fn queued(&self) -> usize {
        let outbox: usize = self.outbox.iter().map(|(_, gather)| size_of::<Header>() + gather.len()).sum();
        outbox + self.pending.len() + self.in_flight.unwrap_or(0)
    }

    /// When the oldest of that was queued.
    pub(super) fn oldest(&self) -> Option<Instant> {
        if self.in_flight.is_some() { Some(self.send_times.queued) } else { self.queued_at }
    }

    /// Heap memory of what has not been taken by the connection.
    pub(super) fn queued_heap(&self) -> usize {
        let outbox: usize = self.outbox.iter().map(|(_, gather)| size_of::<Header>() + gather.heap_bytes()).sum();
        outbox + self.pending.heap_bytes() + self.in_flight_heap
    }

    /// Frames of what has not been taken by the connection, in bytes.
    pub(super) fn queued_frames(&self) -> usize {
        self.pending.frame_bytes() + self.in_flight_frames
    }

    /// What the fabric has counted of the heap memory.
    pub(super) fn counted_heap(&self) -> usize {
        self.counted_heap
    }

    /// The fabric counts so much from now on. Gives what it has counted.
    #[inline]
    pub(super) fn count_heap(&mut self, bytes: usize) -> usize {
        std::mem::replace(&mut self.counted_heap, bytes)
    }

    /// Takes the messages for an RDMA connection.
    pub(super) fn take_outbox(&mut self) -> Vec<(Header, Gather)> {
        self.is_dirty = false;
        self.queued_at = None;
        std::mem::take(&mut self.outbox)
    }

    /// Whether there are none.
    pub(super) fn is_outbox_empty(&self) -> bool {
        self.outbox.is_empty()
    }

    /// How the last send went, of which so many bytes were taken.
    #[inline]
    pub(super) fn went(&self, bytes: usize, now: Instant) -> Went {
        let SendTimes { queued, begun } = self.send_times;
        Went { bytes, waited: now.since(queued), took: now.since(begun) }
    }

    /// The end of a send, with its lists.
    pub(super) fn sent(&mut self, mut gather: Gather) {
        gather.clear();
        self.spare = Some(gather);
        self.in_flight = None;
        (self.in_flight_heap, self.in_flight_frames) = (0, 0);
    }
}

/// The sends of a lane.
impl Lane {
    /// Appends a message to what is sent next. True if the lane must be put on the list of dirty ones.
    #[inline]
    pub(super) fn push(&mut self, header: Header, now: Instant, payload: impl FnOnce(&mut Gather)) -> bool {
        self.outbound.push(header, now, self.connection.is_some(), payload)
    }

    /// Whether the queue can hold a message of that payload: a check on callers.
    pub(super) fn queued_is(&self, payload: usize) -> bool {
        if self.connection.is_some() {
            return self.outbound.outbox.last().is_some_and(|(_, gather)| gather.len() == payload);
        }
        self.outbound.pending.len() >= payload + size_of::<Header>()
    }

    /// Sends what has gathered over shared memory, if all of it can be sent now; gives its bytes.
    pub(super) fn send_now(&mut self, reactor: &mut Reactor, now: Instant) -> Option<usize> {
        let socket = self.socket.filter(|_| !self.outbound.is_in_flight() && !self.tls.is_on())?;
        let plain = self.phase == Phase::Up && self.close_when_sent.is_none();
        let Outbound { pending, is_dirty, send_times, queued_at, .. } = &mut self.outbound;
        if !plain || pending.is_empty() || !reactor.send_now(socket, pending) {
            return None;
        }
        let bytes = pending.len();
        pending.clear();
        *is_dirty = false;
        *send_times = SendTimes { queued: queued_at.take().unwrap_or(now), begun: now };
        Some(bytes)
    }

    /// Sends what has gathered, unless a send is in flight: then that one's end does.
    pub(super) fn start_send(&mut self, reactor: &mut Reactor, token: Token, now: Instant) {
        self.outbound.is_dirty = false;
        let (Some(socket), None) = (self.socket, self.outbound.in_flight) else { return };
        if matches!(self.phase, Phase::Closing | Phase::Connecting) {
            return;
        }
        let mut gather = self.outbound.spare.take().unwrap_or_default();
        let out = &mut self.outbound;
        match self.tls.secure() {
            Some(secure) => secure.seal(&mut out.pending, &mut gather, self.close_when_sent.is_some()),
            None if out.pending.len() > SEND_BYTES_MAX => out.pending.move_front(&mut gather, SEND_BYTES_MAX),
            None => std::mem::swap(&mut out.pending, &mut gather),
        }
        if gather.is_empty() {
            out.spare = Some(gather);
            return;
        }
        out.in_flight = Some(gather.len());
        out.in_flight_heap = gather.heap_bytes();
        out.in_flight_frames = gather.frame_bytes();
        let queued = out.queued_at.take().unwrap_or(now);
        out.send_times = SendTimes { queued, begun: now };
        // Only so much goes at a time.
        out.queued_at = (!out.pending.is_empty()).then_some(queued);
        reactor.submit(Op::Send { socket, gather }, token);
    }
}
