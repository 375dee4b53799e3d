//! The caller's table of the calls of one session.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use byway_fabric::{SessionId, Slot, Slots};
use byway_reactor::Instant;

use super::{Answer, LOST};
use crate::message::{Inline, ReplyBody};
use crate::seeded::{self, Bug};

/// Entries of the heap of deadlines that may be stale before it is built anew, besides one for each call.
const STALE_DEADLINES_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct Pending<C> {
    protocol: u8,
    /// Delegated by this node: whatever the callee says of other answers is for the caller.
    on_behalf: bool,
    /// `None` once the call has ended for its caller: the entry waits for the callee's reply.
    context: Option<C>,
    deadline: Instant,
    placed: u64,
    answer: Option<Answer>,
    /// The callee has replied: it uses neither the call's windows nor its memory any more.
    released: bool,
    /// The callee has said that a third node has answered over this session; the answer is on its way.
    direct: Option<SessionId>,
}

impl<C> Pending<C> {
    fn is_answered(&self) -> bool {
        let complete = |answer: &Answer| self.placed >= u64::from(answer.total) || seeded::is(Bug::EndsBeforeParts);
        self.answer.as_ref().is_some_and(complete)
    }
}

/// Calls in flight, each with the caller's context. A call's number is not used again within 2^24 uses of its slot, so a
/// late answer is not taken for another call's.
#[derive(Debug)]
pub(super) struct Outgoing<C> {
    calls: Slots<Pending<C>>,
    /// Deadlines, soonest first. Calls that ended leave theirs behind until the heap is built anew.
    deadlines: BinaryHeap<Reverse<(Instant, Slot<Pending<C>>)>>,
}

/// The effect of a message on a call.
#[derive(Debug)]
pub(super) struct Progress<C> {
    /// The call has ended for its caller.
    pub(super) ended: Option<(C, Answer)>,
    /// The credit of that protocol is free.
    pub(super) released: Option<u8>,
}

/// A call whose caller waits no longer.
#[derive(Debug)]
pub(super) struct Cancelled<C> {
    pub(super) call: u64,
    pub(super) context: C,
    /// The credit of that protocol is free: the callee has replied, and a third node's answer was waited for.
    pub(super) released: Option<u8>,
}

impl<C> Default for Outgoing<C> {
    fn default() -> Self {
        Self { calls: Slots::default(), deadlines: BinaryHeap::new() }
    }
}

impl<C> Outgoing<C> {
    pub(super) fn start(&mut self, protocol: u8, context: C, deadline: Instant, on_behalf: bool) -> u64 {
        let slot = self.calls.insert(Pending {
            protocol,
            on_behalf,
            context: Some(context),
            deadline,
            placed: 0,
            answer: None,
            released: false,
            direct: None,
        });
        if deadline < Instant::FAR {
            if self.deadlines.len() > self.calls.len() + STALE_DEADLINES_MAX {
                let live = self.calls.iter().filter(|(_, call)| call.deadline < Instant::FAR);
                self.deadlines = live.map(|(slot, call)| Reverse((call.deadline, slot))).collect();
            } else {
                self.deadlines.push(Reverse((deadline, slot)));
            }
        }
        slot.to_u64()
    }

    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn context(&mut self, call: u64) -> Option<&mut C> {
        self.calls.get_mut(Slot::from_u64(call))?.context.as_mut()
    }

    /// The callee has replied, with `len` bytes of payload. `None`: the call is not in flight.
    pub(super) fn replied(&mut self, reply: &ReplyBody, len: usize) -> Option<Progress<C>> {
        let slot = Slot::from_u64(reply.call.get());
        let call = self.calls.get_mut(slot).filter(|call| !call.released)?;
        call.released = true;
        // A third node's answer of which parts are missing does not count: the callee has lost that node.
        if !call.is_answered() {
            call.placed += len as u64;
            call.answer = Some(answer_of(reply));
        }
        Some(self.progress(slot))
    }

    /// Whether a call that is in flight was delegated by this node.
    pub(super) fn is_on_behalf(&self, call: u64) -> bool {
        self.calls.get(Slot::from_u64(call)).is_some_and(|call| call.on_behalf)
    }

    /// The callee says that a third node has answered over `session`, which has ended if `is_over`; `to_callee` is the session
    /// with the callee. An answer over that one comes before this, but for parts of it.
    pub(super) fn replied_directly(
        &mut self,
        call: u64,
        session: SessionId,
        is_over: bool,
        to_callee: SessionId,
    ) -> Option<Progress<C>> {
        let slot = Slot::from_u64(call);
        let call = self.calls.get_mut(slot).filter(|call| !call.released)?;
        call.released = true;
        let is_lost = is_over || (session == to_callee && call.answer.is_none());
        if call.is_answered() {
        } else if is_lost && !seeded::is(Bug::DirectAnswerLost) {
            call.answer = Some(LOST);
        } else {
            call.direct = Some(session);
        }
        Some(self.progress(slot))
    }

    /// A third node has answered. `None`: the call is not in flight, or answered.
    pub(super) fn answered(&mut self, reply: &ReplyBody, len: usize) -> Option<Progress<C>> {
        let slot = self.slot_of(reply.call.get());
        // As in `replied`: an answer of which parts are missing gives way to the word that the node which sent it is lost.
        let call = self.calls.get_mut(slot).filter(|call| !call.is_answered())?;
        call.placed += len as u64;
        call.answer = Some(answer_of(reply));
        Some(self.progress(slot))
    }

    /// A part of a call's answer lies in its window. `None`: the call is not in flight.
    pub(super) fn placed(&mut self, call: u64, len: usize) -> Option<Progress<C>> {
        let slot = Slot::from_u64(call);
        self.calls.get_mut(slot)?.placed += len as u64;
        Some(self.progress(slot))
    }

    /// A session has ended: a call whose answer was on its way over it.
    pub(super) fn lost_over(&mut self, session: SessionId) -> Option<Progress<C>> {
        if seeded::is(Bug::DirectAnswerLost) {
            return None;
        }
        let lost = |call: &Pending<C>| call.direct == Some(session) && !call.is_answered();
        let slot = self.calls.iter().find(|(_, call)| lost(call))?.0;
        let call = self.calls.get_mut(slot)?;
        call.answer = Some(LOST);
        Some(self.progress(slot))
    }

    fn slot_of(&self, call: u64) -> Slot<Pending<C>> {
        let slot = Slot::from_u64(call);
        let mut others = self.calls.iter().filter(|(other, _)| other.index == slot.index);
        if seeded::is(Bug::LateAnswerTaken) { others.next().map_or(slot, |other| other.0) } else { slot }
    }

    fn progress(&mut self, slot: Slot<Pending<C>>) -> Progress<C> {
        let mut progress = Progress { ended: None, released: None };
        let Some(call) = self.calls.get_mut(slot) else { return progress };
        if call.is_answered() {
            progress.ended = call.context.take().zip(call.answer);
            progress.released = call.released.then_some(call.protocol);
        } else if call.context.is_none() && call.direct.is_some() {
            // The callee is done with it, and no one waits for what a third node sends, which may never come.
            progress.released = Some(call.protocol);
        }
        if progress.released.is_some() {
            self.calls.remove(slot);
        }
        progress
    }

    /// Gives a call's context back, and its credit if it is free. Else the call stays in flight until the callee has answered: until then its windows may be used, and its credit is not free.
    pub(super) fn cancel(&mut self, call: u64) -> Option<Cancelled<C>> {
        let slot = Slot::from_u64(call);
        let context = self.calls.get_mut(slot)?.context.take()?;
        Some(Cancelled { call, context, released: self.progress(slot).released })
    }

    /// The call with such a context.
    pub(super) fn find(&self, is: impl Fn(&C) -> bool) -> Option<u64> {
        let has = |call: &Pending<C>| call.context.as_ref().is_some_and(&is);
        self.calls.iter().find(|(_, call)| has(call)).map(|(slot, _)| slot.to_u64())
    }

    /// Forgets a call that may be in flight.
    pub(super) fn remove(&mut self, call: u64) -> Option<(u8, Option<C>)> {
        self.calls.remove(Slot::from_u64(call)).map(|call| (call.protocol, call.context))
    }

    /// Cancels a call that is past its deadline.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<Cancelled<C>> {
        while let Some(&Reverse((deadline, slot))) = self.deadlines.peek() {
            if deadline > now {
                return None;
            }
            self.deadlines.pop();
            if let Some(cancelled) = self.cancel(slot.to_u64()) {
                return Some(cancelled);
            }
        }
        None
    }

    /// When [`Outgoing::overdue`] is to be asked again.
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        while let Some(&Reverse((deadline, slot))) = self.deadlines.peek() {
            if self.calls.get(slot).is_some_and(|call| call.context.is_some()) {
                return Some(deadline);
            }
            self.deadlines.pop();
        }
        None
    }

    /// The session ended: the contexts of all calls in flight.
    pub(super) fn drain(&mut self) -> Vec<C> {
        self.deadlines.clear();
        let calls = std::mem::take(&mut self.calls);
        calls.into_values().filter_map(|call| call.context).collect()
    }
}

fn answer_of(reply: &ReplyBody) -> Answer {
    // A length beyond the result's is the callee's mistake, and says nothing of the rest.
    let result = Inline::from_wire(&reply.result, reply.inline_len).unwrap_or(Inline::EMPTY);
    Answer { status: reply.status.get(), total: reply.total.get(), result }
}
