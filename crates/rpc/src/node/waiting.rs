//! Calls of this node that wait for credit.

use std::collections::{HashMap, VecDeque};

use byway_fabric::Slot;
use byway_fabric::node::OpId;
use byway_reactor::Instant;

use crate::limits::CALLS_WAITING_MAX;
use crate::message::Inline;

/// A call that was not sent.
#[derive(Debug)]
pub(super) struct WaitingCall {
    pub(super) op: Option<OpId>,
    pub(super) protocol: u8,
    pub(super) method: u16,
    pub(super) windows: u8,
    pub(super) arguments: Inline,
    pub(super) payload: Vec<u8>,
    pub(super) deadline: Instant,
}

/// Such calls by session, in order. One protocol's calls wait behind another's of the same session.
#[derive(Debug, Default)]
pub(super) struct WaitingCalls {
    by_session: HashMap<Slot, VecDeque<WaitingCall>>,
    len: usize,
}

impl WaitingCalls {
    /// Whether calls wait for credit of a session.
    pub(super) fn has(&self, session: Slot) -> bool {
        self.by_session.contains_key(&session)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Has a call wait; gives it back if too many do.
    pub(super) fn push(&mut self, session: Slot, call: WaitingCall) -> Result<(), WaitingCall> {
        let queue = self.by_session.entry(session).or_default();
        if queue.len() >= CALLS_WAITING_MAX {
            return Err(call);
        }
        queue.push_back(call);
        self.len += 1;
        Ok(())
    }

    /// The first call of a session.
    pub(super) fn front(&self, session: Slot) -> Option<&WaitingCall> {
        self.by_session.get(&session)?.front()
    }

    /// Takes the first call of a session out.
    pub(super) fn pop(&mut self, session: Slot) -> Option<WaitingCall> {
        let queue = self.by_session.get_mut(&session)?;
        let call = queue.pop_front();
        if queue.is_empty() {
            self.by_session.remove(&session);
        }
        self.len -= usize::from(call.is_some());
        call
    }

    /// Takes out the calls that are to end, of any session.
    pub(super) fn extract(&mut self, ends: impl Fn(Slot, &WaitingCall) -> bool) -> Vec<OpId> {
        let mut ended = Vec::new();
        self.by_session.retain(|session, queue| {
            queue.retain(|call| {
                let ends = ends(*session, call);
                if ends {
                    ended.extend(call.op);
                }
                !ends
            });
            !queue.is_empty()
        });
        self.len -= ended.len();
        ended
    }

    /// The next deadline.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.by_session.values().flatten().map(|call| call.deadline);
        deadlines.filter(|at| *at < Instant::FAR).min()
    }
}
