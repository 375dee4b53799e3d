//! The caller's table of calls in flight.

use byway_fabric::{Slot, Slots};
use byway_reactor::Instant;

use crate::wire::{INLINE_BYTES, ReplyBody};

/// What the server said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 0: it went well. Else the service's.
    pub status: u16,
    /// Bytes of payload of the whole answer.
    pub total: u32,
    /// The result.
    pub result: [u8; INLINE_BYTES],
}

/// Where a call is after a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress<T> {
    /// No such call: a late or repeated answer, which changes nothing.
    Unknown,
    /// More is to come: the reply, or bytes of its payload.
    Waiting,
    /// It is done.
    Complete(T, Answer),
}

#[derive(Debug)]
struct Call<T> {
    context: T,
    deadline: Instant,
    placed: u64,
    answer: Option<Answer>,
}

/// Calls in flight over one session, each with what the caller wants to know of it. A call's id is not used again within
/// 2^24 uses of its slot, so that a late answer cannot be taken for another call's.
#[derive(Debug)]
pub struct Calls<T> {
    calls: Slots<Call<T>>,
    credits: usize,
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self { calls: Slots::default(), credits: 0 }
    }
}

impl<T> Calls<T> {
    /// So many may be in flight. Each answer gives its credit back; a server may grant more later.
    pub fn grant(&mut self, credits: u16) {
        self.credits += usize::from(credits);
    }

    /// Whether another call may start.
    pub fn may_start(&self) -> bool {
        self.calls.len() < self.credits
    }

    /// Calls in flight.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Starts a call; gives its id.
    pub fn start(&mut self, context: T, deadline: Instant) -> u64 {
        debug_assert!(self.may_start(), "the caller asks first");
        self.calls.insert(Call { context, deadline, placed: 0, answer: None }).to_u64()
    }

    /// What the caller wants to know of a call.
    pub fn context(&mut self, call: u64) -> Option<&mut T> {
        self.calls.get_mut(Slot::from_u64(call)).map(|call| &mut call.context)
    }

    /// A reply came, and with it `len` bytes of payload.
    pub fn replied(&mut self, reply: &ReplyBody, len: usize) -> Progress<T> {
        let id = Slot::from_u64(reply.call.get());
        let Some(call) = self.calls.get_mut(id) else { return Progress::Unknown };
        call.placed += len as u64;
        call.answer = Some(Answer { status: reply.status.get(), total: reply.total.get(), result: reply.result });
        self.complete(id)
    }

    /// `len` bytes of a call's payload came by themselves.
    pub fn placed(&mut self, call: u64, len: usize) -> Progress<T> {
        let id = Slot::from_u64(call);
        let Some(call) = self.calls.get_mut(id) else { return Progress::Unknown };
        call.placed += len as u64;
        self.complete(id)
    }

    fn complete(&mut self, id: Slot) -> Progress<T> {
        let Some(call) = self.calls.get(id) else { return Progress::Unknown };
        match call.answer {
            Some(answer) if call.placed >= u64::from(answer.total) => match self.calls.remove(id) {
                Some(call) => Progress::Complete(call.context, answer),
                None => Progress::Unknown,
            },
            _ => Progress::Waiting,
        }
    }

    /// Whether a call is past its deadline.
    pub fn overdue(&self, now: Instant) -> bool {
        self.calls.iter().any(|(_, call)| call.deadline <= now)
    }

    /// The session ended: forgets all calls and credits, and gives back what the caller wanted to know of each.
    pub fn drain(&mut self) -> Vec<T> {
        self.credits = 0;
        let ids: Vec<_> = self.calls.iter().map(|(id, _)| id).collect();
        let contexts = ids.into_iter().filter_map(|id| self.calls.remove(id)).map(|call| call.context).collect();
        // The next session may grant less, and an id is under its credits: also those answered before are in the way.
        self.calls.order_free();
        contexts
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::little_endian::{U16, U32, U64};

    use super::*;

    fn reply(call: u64, total: u32) -> ReplyBody {
        let zero = U16::new(0);
        ReplyBody { call: U64::new(call), status: zero, reserved: zero, total: U32::new(total), result: [0; 64] }
    }

    const LATER: Instant = Instant::from_nanos(1000);

    #[test]
    fn a_call_ends_with_its_reply_and_all_bytes_in_any_order() {
        let mut calls = Calls::default();
        assert!(!calls.may_start());
        calls.grant(2);
        let (first, second) = (calls.start('a', LATER), calls.start('b', LATER));
        assert!(!calls.may_start());
        assert_eq!(calls.placed(first, 10), Progress::Waiting);
        assert_eq!(calls.replied(&reply(first, 30), 5), Progress::Waiting);
        assert!(matches!(calls.placed(first, 15), Progress::Complete('a', _)));
        assert!(matches!(calls.replied(&reply(second, 0), 0), Progress::Complete('b', _)));
        assert_eq!(calls.replied(&reply(second, 0), 0), Progress::Unknown, "a repeated reply changes nothing");
        let third = calls.start('c', LATER);
        assert_eq!(calls.placed(first, 1), Progress::Unknown);
        assert_eq!(calls.placed(second, 1), Progress::Unknown);
        assert!(!calls.overdue(Instant::from_nanos(999)));
        assert!(calls.overdue(LATER));
        assert!(matches!(calls.replied(&reply(third, 0), 0), Progress::Complete('c', _)));
    }

    #[test]
    fn a_session_that_grants_less_takes_the_first_call() {
        let mut calls = Calls::default();
        calls.grant(64);
        let ids: Vec<u64> = (0..40).map(|index| calls.start(index, LATER)).collect();
        for id in &ids[10..20] {
            calls.replied(&reply(*id, 0), 0);
        }
        assert_eq!(calls.drain().len(), 30);
        two_at_a_time(&mut calls);
    }

    #[test]
    fn a_session_that_grants_less_takes_calls_whichever_were_answered_before() {
        // In any order, and in several sessions: those answered are free already when the session ends.
        for answered in [[0..10, 10..10], [30..40, 5..5], [0..20, 20..40], [39..40, 0..1], [25..40, 5..20]] {
            let mut calls = Calls::default();
            let mut seen = std::collections::HashSet::new();
            for _ in 0..3 {
                calls.grant(64);
                let ids: Vec<u64> = (0..40).map(|index| calls.start(index, LATER)).collect();
                assert!(ids.iter().all(|id| seen.insert(*id)), "an id is used again");
                for at in answered.iter().cloned().flatten() {
                    calls.replied(&reply(ids[at], 0), 0);
                }
                assert_eq!(calls.drain().len(), 40 - answered.iter().map(ExactSizeIterator::len).sum::<usize>());
                assert_eq!(calls.replied(&reply(ids[0], 0), 0), Progress::Unknown, "of a session that ended");
                two_at_a_time(&mut calls);
                calls.drain();
            }
        }
    }

    /// A session with two credits: ids must lie under them.
    fn two_at_a_time(calls: &mut Calls<usize>) {
        calls.grant(2);
        for _ in 0..3 {
            let (first, second) = (calls.start(0, LATER), calls.start(1, LATER));
            assert!(Slot::from_u64(first).index < 2 && Slot::from_u64(second).index < 2, "under the credits");
            calls.replied(&reply(first, 0), 0);
            calls.replied(&reply(second, 0), 0);
        }
    }

    proptest! {
        #[test]
        fn every_call_ends_exactly_once(
            totals in proptest::collection::vec(0u32..5, 1..20), order in proptest::collection::vec(any::<u16>(), 200),
        ) {
            let mut calls = Calls::default();
            calls.grant(64);
            // Each call's messages: its bytes one by one, and its reply; sent twice over in any order.
            let mut messages = Vec::new();
            for (index, total) in totals.iter().enumerate() {
                let call = calls.start(index, LATER);
                messages.extend((0..*total).map(|_| (call, None)));
                messages.push((call, Some(*total)));
            }
            let mut ended = vec![0; totals.len()];
            let mut order = order.into_iter().cycle();
            while !messages.is_empty() {
                let pick = usize::from(order.next().unwrap()) % messages.len();
                let (call, total) = messages.swap_remove(pick);
                let progress = match total {
                    Some(total) => calls.replied(&reply(call, total), 0),
                    None => calls.placed(call, 1),
                };
                if let Progress::Complete(index, _) = progress {
                    ended[index] += 1;
                }
            }
            prop_assert!(ended.iter().all(|count| *count == 1));
            prop_assert!(calls.is_empty());
        }
    }
}
