//! Operations that wait until fewer are in flight over their session, or behind a put that waits for credit.
//!
//! The peer has to answer each part of a put or get, and bounds how many answers may wait
//! ([`ANSWERS_MAX`](crate::limits::ANSWERS_MAX)). So a node requests no more at a time than the peer must accept. Further
//! operations wait here, and behind them later messages and flushes of their session, since all of those are in order.
//!
//! Behind an operation that a turn has left unfinished (`moving.rs`), all later operations of its session wait.
//!
//! A put with a message may have to wait for credit. Later puts and flushes wait behind it too: puts arrive in the order in
//! which they began, and a flush ends after all puts before it.

use std::collections::VecDeque;

use byway_reactor::Reactor;

use super::command::Command;
use super::engine::{Core, NodeSession, Waiting};
use super::error::OpError;
use super::memory::{Places, WindowRange};
use super::shared::OpSlot;
use super::{OpId, Session};
use crate::Fabric;
use crate::fabric::Remote;
use crate::limits::{ASKED_MAX, TURN_BYTES_MAX};
use crate::session::CloseReason;

/// The commands of one session that wait, in order.
#[derive(Default)]
pub(super) struct Deferred(VecDeque<Command>);

impl Command {
    /// The session with whose other commands it is in order.
    fn in_order_of(&self) -> Option<Session> {
        match self {
            Self::Send { session, .. }
            | Self::Put { session, .. }
            | Self::Get { session, .. }
            | Self::Flush { session, .. } => Some(*session),
            _ => None,
        }
    }

    /// Whether it can begin before what is under way over its session, or waits for credit there, is done.
    fn may_begin(&self, fabric: &Fabric, state: &NodeSession) -> bool {
        match self {
            Self::Get { .. } => state.asked < ASKED_MAX,
            // One with a message waits for credit behind the others.
            Self::Put { to, message, .. } => {
                state.asked < ASKED_MAX
                    && (message.is_some() || !state.has_put_waiting())
                    && !state.is_needlessly_streamed(fabric, to)
            }
            Self::Flush { .. } => !state.has_put_waiting(),
            _ => true,
        }
    }

    /// Its operation, if that can be cancelled before it begins.
    fn cancellable(&self) -> Option<OpSlot> {
        match self {
            Self::Send { op, .. } => *op,
            Self::Put { op, .. } | Self::Get { op, .. } => Some(*op),
            _ => None,
        }
    }
}

impl NodeSession {
    /// Whether a put would go through the stream only since others into its window do. It had better wait for their end: behind
    /// it the next would have to go there too, and all that ever follow without a pause.
    fn is_needlessly_streamed(&self, fabric: &Fabric, to: &Places) -> bool {
        let is_reached = |range: &WindowRange| {
            !fabric.goes_by_route(self.fabric, Remote { window: to.window, offset: range.offset }, range.len)
        };
        self.streamed.contains_key(&to.window.0) && to.ranges.iter().all(is_reached)
    }

    /// The deferred operation that may begin: the first, or a get behind it ([`NodeSession::must_defer`]).
    fn next_to_begin(&self, fabric: &Fabric) -> Option<usize> {
        if self.moving.is_some() {
            return None;
        }
        let may_begin = |command: &Command| command.may_begin(fabric, self);
        if may_begin(self.deferred.0.front()?) {
            return Some(0);
        }
        self.deferred.0.iter().position(|next| matches!(next, Command::Get { .. }) && may_begin(next))
    }

    fn must_defer(&self, fabric: &Fabric, command: &Command) -> bool {
        let may_begin = |command: &Command| command.may_begin(fabric, self);
        match self.deferred.0.front() {
            _ if self.moving.is_some() => true,
            // Nothing orders a get behind a put that waits for the peer's program, which may wait for what is got.
            Some(first) if matches!(command, Command::Get { .. }) => !may_begin(command) || may_begin(first),
            Some(_) => true,
            None => !may_begin(command),
        }
    }
}

impl Core {
    /// Does what was asked for, or has it wait.
    pub(super) fn run(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, command: Command) {
        if let Some(session) = command.in_order_of()
            && let Some(state) = self.sessions.get_mut(&session).filter(|state| state.ended.is_none())
            && state.must_defer(fabric, &command)
        {
            state.deferred.0.push_back(command);
            return self.note_crowded(session);
        }
        self.run_now(fabric, reactor, command);
    }

    /// Something of a session waits for what is under way there.
    pub(super) fn note_crowded(&mut self, session: Session) {
        if !self.crowded.contains(&session) {
            self.crowded.push(session);
        }
    }

    /// Does what waited, as far as it may. True if it did anything.
    pub(super) fn run_deferred(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) -> bool {
        let mut ran = false;
        let copied_before = self.copied_bytes;
        for session in std::mem::take(&mut self.crowded) {
            if self.copied_bytes < TURN_BYTES_MAX
                && let Some(moving) = self.take_moving(session)
            {
                ran = true;
                self.go_on(fabric, reactor, session, moving);
            }
            let waiting = |core: &Self| core.sessions.get(&session).map_or(0, |state| state.waiting.len());
            let before = waiting(self);
            self.send_waiting(fabric, reactor, session);
            ran |= waiting(self) != before;
            if self.sessions.get(&session).is_some_and(|state| state.credit_held && state.ended.is_none()) {
                self.give_credit(fabric, session);
                ran |= self.sessions.get(&session).is_some_and(|state| !state.credit_held);
            }
            while let Some(state) = self.sessions.get_mut(&session)
                && let Some(place) = state.next_to_begin(fabric)
                && let Some(next) = state.deferred.0.remove(place)
            {
                ran = true;
                self.run_now(fabric, reactor, next);
            }
            if self.sessions.get(&session).is_some_and(|state| !state.deferred.0.is_empty() || state.moving.is_some()) {
                self.note_crowded(session);
            }
        }
        // What a turn may copy could go to the first session each time.
        if self.copied_bytes > copied_before && self.copied_bytes >= TURN_BYTES_MAX && !self.crowded.is_empty() {
            self.crowded.rotate_left(1);
        }
        ran
    }

    /// The session has ended, or is about to: messages go out if they can now, the rest ends.
    pub(super) fn end_deferred(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session) {
        let Some(state) = self.sessions.get_mut(&session) else { return };
        let reason = state.ended.unwrap_or(CloseReason::Closed);
        let (waiting, deferred) = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.deferred));
        if let Some(mut moving) = self.take_moving(session) {
            self.end_rest(session, &mut moving, OpError::Ended(reason));
            self.all_begun(moving);
        }
        self.note_liveness(session);
        for one in waiting {
            self.send_or_end(fabric, reactor, session, reason, one);
        }
        for command in deferred.0 {
            match command {
                Command::Put { op, segments, to, message: Some(message), .. } => {
                    self.end_waiting(session, Waiting::Put { op, segments, to, message }, reason);
                }
                Command::Put { op, segments, .. } | Command::Get { op, segments, .. } => {
                    drop(segments);
                    self.complete(op, Err(OpError::Ended(reason)));
                }
                Command::Send { op, header, payload, .. } => {
                    let message = Waiting::Message { op, header, payload };
                    self.send_or_end(fabric, reactor, session, reason, message);
                }
                other => self.run_now(fabric, reactor, other),
            }
        }
    }

    /// Sends a message if there is credit and the session has not ended; else ends it, and a put in any case.
    fn send_or_end(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        reason: CloseReason,
        waiting: Waiting,
    ) {
        let state = self.sessions.get_mut(&session).filter(|state| state.ended.is_none() && state.credits > 0);
        match state {
            Some(state) if matches!(waiting, Waiting::Message { .. }) => {
                state.credits -= 1;
                self.send_now(fabric, reactor, session, waiting);
            }
            _ => self.end_waiting(session, waiting, reason),
        }
    }

    /// Takes out what has not begun. False if there is no such thing.
    pub(super) fn cancel_deferred(&mut self, session: Session, op: OpId) -> bool {
        let Some(state) = self.sessions.get_mut(&session) else { return false };
        let is = |command: &Command| command.cancellable() == Some(op.0);
        remove_first(&mut state.deferred.0, is)
    }
}

fn remove_first<T>(queue: &mut VecDeque<T>, is: impl Fn(&T) -> bool) -> bool {
    let place = queue.iter().position(is);
    place.and_then(|place| queue.remove(place)).is_some()
}
