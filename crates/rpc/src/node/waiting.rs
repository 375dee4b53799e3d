//! Calls of this node that wait for credit.

use std::collections::{BTreeMap, VecDeque};

use byway_fabric::SessionId;
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

/// A session and a protocol: credit is counted for each by itself.
pub(super) type Line = (SessionId, u8);

/// Such calls by session and protocol, in order: those of one protocol do not wait behind another's.
#[derive(Debug, Default)]
pub(super) struct WaitingCalls {
    /// Ordered, so that a simulated run can be repeated.
    lines: BTreeMap<Line, VecDeque<WaitingCall>>,
    len: usize,
}

impl WaitingCalls {
    /// Whether calls wait for credit of a session in a protocol.
    pub(super) fn has(&self, line: Line) -> bool {
        self.lines.contains_key(&line)
    }

    /// Where calls wait.
    pub(super) fn lines(&self) -> Vec<Line> {
        self.lines.keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Has a call wait; gives it back if too many do.
    pub(super) fn push(&mut self, session: SessionId, call: WaitingCall) -> Result<(), WaitingCall> {
        let queue = self.lines.entry((session, call.protocol)).or_default();
        if queue.len() >= CALLS_WAITING_MAX {
            return Err(call);
        }
        queue.push_back(call);
        self.len += 1;
        Ok(())
    }

    /// The first call of a line.
    pub(super) fn front(&self, line: Line) -> Option<&WaitingCall> {
        self.lines.get(&line)?.front()
    }

    /// Takes the first call of a line out.
    pub(super) fn pop(&mut self, line: Line) -> Option<WaitingCall> {
        let queue = self.lines.get_mut(&line)?;
        let call = queue.pop_front();
        if queue.is_empty() {
            self.lines.remove(&line);
        }
        self.len -= usize::from(call.is_some());
        call
    }

    /// Takes out the calls that are to end, of any session.
    pub(super) fn extract(&mut self, ends: impl Fn(SessionId, &WaitingCall) -> bool) -> Vec<OpId> {
        let mut ended = Vec::new();
        self.lines.retain(|(session, _), queue| {
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
        let deadlines = self.lines.values().flatten().map(|call| call.deadline);
        deadlines.filter(|at| *at < Instant::FAR).min()
    }
}
