//! Posted operations: the memory that each owns, and the room in the completion queue.
//!
//! A completion queue that overflows is lost with all its connections, so its room is counted: shared receive queues reserve
//! their whole depth, and each posted send takes one of the remaining entries until it is retired. An operation without a
//! completion of its own is retired by the next one of its queue pair that has one; devices complete the operations of a
//! queue pair in the order of posting (InfiniBand specification, volume 1, 10.8.5).
//!
//! No verbs in here: this is numbers and memory, and tested as such.

use std::collections::VecDeque;

use super::error::WorkError;
use super::memory::Payload;
use super::quarantine::Quarantine;
use super::verbs::{IBV_WC_RECV, IBV_WC_WITH_IMM, Wc};
use crate::slots::{Slot, Slots};

/// What an operation was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A message to the peer.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// A message from the peer.
    Receive,
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// The caller's label of the operation.
    pub token: u64,
    /// What it was.
    pub kind: Kind,
    /// The number of the queue pair, also of a receive; 0 for a receive that was never used.
    pub queue_pair: u32,
    /// How many bytes were transferred.
    pub result: Result<u32, WorkError>,
    /// The number beside a message that came.
    pub immediate: Option<u32>,
    /// Its memory; [`Payload::GivenUp`] if the device did not let go of it, or not yet.
    pub payload: Payload,
}

impl Completion {
    /// The same without the memory, which a device may touch for ever.
    pub(super) fn give_up(mut self) -> Self {
        self.payload = self.payload.give_up();
        self
    }

    /// The same without the memory, which a device that is being taken away may still touch for a moment.
    pub(super) fn quarantine(mut self, quarantine: &mut Quarantine) -> Self {
        let payload = std::mem::replace(&mut self.payload, Payload::GivenUp);
        if !payload.is_empty() {
            quarantine.keep(payload);
        }
        self
    }
}

/// An operation that is to be posted.
pub(super) struct Operation {
    pub(super) token: u64,
    pub(super) kind: Kind,
    pub(super) bytes: u32,
    pub(super) payload: Payload,
}

struct Posted {
    operation: Operation,
    queue: Queue,
    is_reported: bool,
}

/// What a send queue is called.
pub(super) type SendQueueId = Slot<SendQueue>;
/// What a shared receive queue is called.
pub(super) type ReceiveQueueId = Slot<ReceiveQueue>;

/// Where an operation is posted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    Send(SendQueueId),
    Receive(ReceiveQueueId),
}

pub(super) struct SendQueue {
    number: u32,
    depth: u32,
    /// In the order of posting.
    posted: VecDeque<Slot<Posted>>,
    /// How many were posted since the last that is reported.
    unreported: u32,
}

pub(super) struct ReceiveQueue {
    depth: u32,
    posted: u32,
}

/// The operations of one completion queue.
pub(super) struct Operations {
    posted: Slots<Posted>,
    sends: Slots<SendQueue>,
    receives: Slots<ReceiveQueue>,
    /// Entries that no shared receive queue has reserved.
    room: u32,
    /// Of `room`, how many are taken, and how many of these by operations that are not reported.
    taken: u32,
    unreported: u32,
}

impl Operations {
    pub(super) fn new(entries: u32) -> Self {
        let (posted, sends, receives) = Default::default();
        Self { posted, sends, receives, room: entries, taken: 0, unreported: 0 }
    }

    /// How many are posted.
    pub(super) fn len(&self) -> usize {
        self.posted.len()
    }

    /// Adds a shared receive queue. The error is how many entries there are for it.
    pub(super) fn add_receives(&mut self, depth: u32) -> Result<ReceiveQueueId, u32> {
        let free = self.room - self.taken;
        // One must be left, or nothing could ever be sent.
        if depth >= free {
            return Err(free.saturating_sub(1));
        }
        self.room -= depth;
        Ok(self.receives.insert(ReceiveQueue { depth, posted: 0 }))
    }

    /// Adds the send queue of a queue pair.
    pub(super) fn add_sends(&mut self, number: u32, depth: u32) -> SendQueueId {
        self.sends.insert(SendQueue { number, depth, posted: VecDeque::new(), unreported: 0 })
    }

    /// Whether another send may be posted.
    pub(super) fn has_room(&self, queue: SendQueueId) -> bool {
        let is_full = |queue: &SendQueue| queue.posted.len() >= queue.depth as usize;
        self.taken < self.room && self.sends.get(queue).is_some_and(|queue| !is_full(queue))
    }

    /// Puts a send in, for which there must be room; says its number for the device, and whether it must be reported
    /// whatever the caller wants: half a queue, or half of all entries, without a report could be the end of reports.
    pub(super) fn begin_send(&mut self, queue: SendQueueId, operation: Operation, wants_report: bool) -> (u64, bool) {
        let half_of_room = self.room / 2;
        let Some(sends) = self.sends.get_mut(queue) else { return (u64::MAX, true) };
        let is_reported =
            wants_report || sends.unreported + 1 >= (sends.depth / 2).max(1) || self.unreported >= half_of_room;
        sends.unreported = if is_reported { 0 } else { sends.unreported + 1 };
        self.taken += 1;
        self.unreported += u32::from(!is_reported);
        let slot = self.posted.insert(Posted { operation, queue: Queue::Send(queue), is_reported });
        sends.posted.push_back(slot);
        (slot.to_u64(), is_reported)
    }

    /// Puts a receive in and says its number, or gives the operation back if the queue is full.
    pub(super) fn begin_receive(&mut self, queue: ReceiveQueueId, operation: Operation) -> Result<u64, Operation> {
        match self.receives.get_mut(queue) {
            Some(receives) if receives.posted < receives.depth => receives.posted += 1,
            _ => return Err(operation),
        }
        Ok(self.posted.insert(Posted { operation, queue: Queue::Receive(queue), is_reported: true }).to_u64())
    }

    /// Takes a receive back that the device did not take.
    pub(super) fn withdraw_receive(&mut self, number: u64) -> Option<Operation> {
        let posted = self.posted.remove(Slot::from_u64(number))?;
        if let Queue::Receive(queue) = posted.queue
            && let Some(receives) = self.receives.get_mut(queue)
        {
            receives.posted -= 1;
        }
        Some(posted.operation)
    }

    /// A work completion: all that it retires goes into `into`. One that names nothing is ignored.
    pub(super) fn finish(&mut self, wc: &Wc, into: &mut impl Extend<Completion>) {
        let slot = Slot::from_u64(wc.wr_id);
        let result = WorkError::from_status(wc.status);
        let Some(posted) = self.posted.get(slot) else {
            tracing::error!(number = wc.wr_id, status = wc.status, "a completion of an operation that was not posted");
            return;
        };
        let Queue::Send(queue) = posted.queue else {
            let operation = self.withdraw_receive(wc.wr_id);
            // A write with a number beside it takes a receive and reports its own length, but leaves the memory as it was:
            // with what another peer sent last. What the opcode says is defined for a success alone.
            let is_message = wc.opcode == IBV_WC_RECV;
            let result = result.and(if is_message { Ok(wc.byte_len) } else { Err(WorkError::NoMessage) });
            let immediate = (wc.wc_flags & IBV_WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data));
            into.extend(operation.map(|operation| Completion { immediate, ..operation.end(wc.qp_num, result) }));
            return;
        };
        while let Some(first) = self.sends.get_mut(queue).and_then(|sends| sends.posted.pop_front()) {
            let is_last = first == slot;
            // Those before it were not reported, and would have been if they had failed.
            self.retire(first, wc.qp_num, if is_last { result } else { Ok(()) }, into);
            if is_last {
                break;
            }
        }
    }

    /// Ends a send queue whose queue pair is gone: what is left goes into `into` as flushed.
    pub(super) fn remove_sends(&mut self, queue: SendQueueId, into: &mut impl Extend<Completion>) {
        let Some(sends) = self.sends.remove(queue) else { return };
        for slot in sends.posted {
            self.retire(slot, sends.number, Err(WorkError::Flushed), into);
        }
    }

    /// The same for a shared receive queue.
    pub(super) fn remove_receives(&mut self, queue: ReceiveQueueId, into: &mut impl Extend<Completion>) {
        let Some(receives) = self.receives.remove(queue) else { return };
        self.room += receives.depth;
        let is_its = |posted: &Posted| posted.queue == Queue::Receive(queue);
        let slots: Vec<Slot<Posted>> =
            self.posted.iter_mut().filter(|(_, posted)| is_its(posted)).map(|(slot, _)| slot).collect();
        let ended = slots.into_iter().filter_map(|slot| self.posted.remove(slot));
        into.extend(ended.map(|posted| posted.operation.end(0, Err(WorkError::Flushed))));
    }

    fn retire(
        &mut self,
        slot: Slot<Posted>,
        number: u32,
        result: Result<(), WorkError>,
        into: &mut impl Extend<Completion>,
    ) {
        let Some(posted) = self.posted.remove(slot) else { return };
        self.taken -= 1;
        self.unreported -= u32::from(!posted.is_reported);
        let bytes = posted.operation.bytes;
        into.extend([posted.operation.end(number, result.map(|()| bytes))]);
    }
}

impl Operation {
    fn end(self, queue_pair: u32, result: Result<u32, WorkError>) -> Completion {
        Completion { token: self.token, kind: self.kind, queue_pair, result, immediate: None, payload: self.payload }
    }
}

#[cfg(test)]
mod tests {
    use super::super::verbs::{IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR};
    use super::*;

    fn operation(token: u64, kind: Kind) -> Operation {
        Operation { token, kind, bytes: 10, payload: Payload::Empty }
    }

    fn wc(wr_id: u64, status: u32) -> Wc {
        Wc { wr_id, status, byte_len: 7, qp_num: 3, ..Wc::default() }
    }

    /// A message came.
    fn came(number: u64) -> Wc {
        Wc { opcode: IBV_WC_RECV, ..wc(number, 0) }
    }

    fn tokens(completions: &[Completion]) -> Vec<(u64, bool)> {
        completions.iter().map(|completion| (completion.token, completion.result.is_ok())).collect()
    }

    #[test]
    fn an_unreported_operation_ends_with_the_next_that_is_reported() {
        let mut operations = Operations::new(64);
        let queue = operations.add_sends(3, 16);
        let quiet = operations.begin_send(queue, operation(1, Kind::Write), false);
        let loud = operations.begin_send(queue, operation(2, Kind::Send), true);
        let later = operations.begin_send(queue, operation(3, Kind::Read), true);
        assert_eq!((quiet.1, loud.1), (false, true));
        let mut ended = Vec::new();
        operations.finish(&wc(loud.0, 0), &mut ended);
        assert_eq!(tokens(&ended), [(1, true), (2, true)]);
        operations.finish(&wc(later.0, IBV_WC_REM_ACCESS_ERR), &mut ended);
        assert_eq!(ended[2].result, Err(WorkError::RemoteAccess));
        assert_eq!((operations.len(), operations.taken, operations.unreported), (0, 0, 0));
    }

    #[test]
    fn half_a_queue_without_a_report_is_reported() {
        let mut operations = Operations::new(1000);
        let queue = operations.add_sends(3, 8);
        let reported: Vec<bool> =
            (0..8).map(|token| operations.begin_send(queue, operation(token, Kind::Send), false).1).collect();
        assert_eq!(reported, [false, false, false, true, false, false, false, true]);
        assert!(!operations.has_room(queue));
    }

    #[test]
    fn a_completion_queue_never_has_more_posted_than_entries() {
        let mut operations = Operations::new(12);
        assert_eq!(operations.add_receives(12), Err(11));
        let receives = operations.add_receives(4).unwrap();
        let queues: Vec<SendQueueId> = (0..10).map(|number| operations.add_sends(number, 8)).collect();
        let mut numbers = Vec::new();
        for (token, queue) in (0..).zip(queues.iter().copied()) {
            if operations.has_room(queue) {
                numbers.push(operations.begin_send(queue, operation(token, Kind::Send), false));
            }
        }
        assert_eq!(numbers.len(), 8, "8 entries are left beside the receives");
        assert!(numbers.iter().any(|(_, is_reported)| *is_reported), "or nothing would ever be retired");
        for token in 0..4 {
            assert!(operations.begin_receive(receives, operation(token, Kind::Receive)).is_ok());
        }
        assert!(operations.begin_receive(receives, operation(9, Kind::Receive)).is_err());
        let reported = numbers.iter().find(|(_, is_reported)| *is_reported).unwrap();
        operations.finish(&wc(reported.0, 0), &mut Vec::new());
        assert!(operations.has_room(queues[0]));
    }

    #[test]
    fn what_a_dropped_queue_still_has_is_flushed_once() {
        let mut operations = Operations::new(64);
        let receives = operations.add_receives(4).unwrap();
        let queue = operations.add_sends(3, 8);
        let first = operations.begin_send(queue, operation(1, Kind::Write), true);
        operations.begin_send(queue, operation(2, Kind::Write), false);
        operations.begin_receive(receives, operation(3, Kind::Receive)).ok().unwrap();
        let mut ended = Vec::new();
        operations.finish(&wc(first.0, IBV_WC_WR_FLUSH_ERR), &mut ended);
        operations.remove_sends(queue, &mut ended);
        operations.finish(&wc(first.0, 0), &mut ended);
        operations.remove_receives(receives, &mut ended);
        assert_eq!(tokens(&ended), [(1, false), (2, false), (3, false)]);
        assert_eq!((operations.len(), operations.taken, operations.room), (0, 0, 64));
    }

    #[test]
    fn a_receive_says_how_much_came_and_from_which_queue_pair() {
        let mut operations = Operations::new(64);
        let receives = operations.add_receives(4).unwrap();
        let number = operations.begin_receive(receives, operation(5, Kind::Receive)).ok().unwrap();
        let mut ended = Vec::new();
        operations.finish(&came(number), &mut ended);
        assert_eq!((ended[0].token, ended[0].queue_pair, ended[0].result), (5, 3, Ok(7)));
        assert_eq!(ended[0].immediate, None);
        let number = operations.begin_receive(receives, operation(6, Kind::Receive)).ok().unwrap();
        let imm_data = 0x0102_0304_u32.to_be();
        operations.finish(&Wc { imm_data, wc_flags: IBV_WC_WITH_IMM, ..came(number) }, &mut ended);
        assert_eq!(ended[1].immediate, Some(0x0102_0304));
    }

    #[test]
    fn a_receive_that_no_message_filled_is_an_error_and_not_a_message() {
        let mut operations = Operations::new(64);
        let receives = operations.add_receives(4).unwrap();
        let mut ended = Vec::new();
        for opcode in [IBV_WC_RECV_RDMA_WITH_IMM, 0] {
            let number = operations.begin_receive(receives, operation(5, Kind::Receive)).ok().unwrap();
            operations.finish(&Wc { opcode, wc_flags: IBV_WC_WITH_IMM, byte_len: 128, ..came(number) }, &mut ended);
        }
        // Of a failure the opcode says nothing.
        let number = operations.begin_receive(receives, operation(5, Kind::Receive)).ok().unwrap();
        operations.finish(&wc(number, IBV_WC_WR_FLUSH_ERR), &mut ended);
        let results: Vec<_> = ended.iter().map(|completion| (completion.queue_pair, completion.result)).collect();
        assert_eq!(results[..2], [(3, Err(WorkError::NoMessage)); 2]);
        assert_eq!(results[2], (3, Err(WorkError::Flushed)));
    }
}
