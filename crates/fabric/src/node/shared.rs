//! The state that all threads of a node share under one short lock: operations, sessions with their received messages,
//! groups, waiting threads, and the commands for the next driving thread.
//!
//! Pure tables: nothing here waits; threads to wake are noted here and woken by the caller. Each operation ends by exactly
//! one [`Shared::complete`]. Its result is then taken once, by its handle or its group, or is dropped. A message or a
//! session whose receiver did not take it goes to the next one that asks.

use std::collections::VecDeque;
use std::sync::Arc;

use super::command::Command;
use super::error::{OpError, SubmitError, WaitError};
use super::group::GroupSlot;
use super::group::Groups;
use super::op::{Completed, Outcome};
use super::wait::Parker;
use super::{Message, Session};
use crate::Capabilities;
use crate::access::Identity;
use crate::limits::{ACCEPTED_MAX, ENDED_SESSIONS_MAX, MESSAGES_WAITING_MAX, NODE_OPS_MAX};
use crate::session::CloseReason;
use crate::slots::{Slot, Slots};

/// What an operation is, as far as cancelling it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpKind {
    Receive(Option<Session>),
    Accept,
    Connect(Session),
    /// A message, or a put with one, that may wait for credit.
    Send(Session),
    /// A put or get, which may wait until less is under way.
    Transfer(Session),
    /// Of the layer above.
    Layer,
    /// It ends by itself.
    Plain,
}

/// Where the result of an operation came from, and so where it goes if it is not taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) kind: OpKind,
    /// The place of a receive's message among all that came.
    came: u64,
}

/// What the tables call an operation.
pub(super) type OpSlot = Slot<OpState>;

pub(super) struct OpState {
    pub(super) origin: Origin,
    pub(super) result: Option<Completed>,
    /// Its handle is gone, so its result will not be taken.
    pub(super) detached: bool,
    /// Where the result goes, and what it is called there.
    pub(super) group: Option<(GroupSlot, u64)>,
    pub(super) waiters: Vec<Arc<Parker>>,
    /// The thread that turns the loop waits for it.
    pub(super) is_driven: bool,
}

#[derive(Debug)]
pub(super) enum Phase {
    Connecting(OpSlot),
    /// A server's, before its client has named its protocols.
    Arriving,
    Up,
    /// Nothing more begins, and what is under way is told.
    Ending(CloseReason),
    Ended(CloseReason),
}

pub(super) struct SessionState {
    pub(super) phase: Phase,
    /// With the place of each among all that came, in that order.
    queue: VecDeque<(u64, Message)>,
    receivers: VecDeque<OpSlot>,
    /// Messages that were sent or wait to be, without credit.
    pub(super) waiting: usize,
    /// Messages that the program has taken, whose credit was not given back; below 0 if it was given back for some that lie in the
    /// queue again.
    pub(super) taken: i64,
    /// When so many were taken their credit is given back.
    pub(super) give_back_at: u32,
    /// The program has closed it, and need not be told of its end.
    pub(super) closed: bool,
    /// What its wire can do, once it can be used.
    pub(super) capabilities: Option<Capabilities>,
    /// What is known of its peer, once it can be used.
    pub(super) peer: Option<Identity>,
}

/// A session that has ended, which the program is to be told.
struct Ending {
    session: Session,
    reason: CloseReason,
    /// It did not wait to be accepted.
    known: bool,
}

#[derive(Default)]
pub(super) struct Shared {
    pub(super) ops: Slots<OpState>,
    pub(super) sessions: Slots<SessionState>,
    pub(super) groups: Groups,
    pub(super) commands: VecDeque<Command>,
    /// Threads that wait while another turns the loop, and have not been offered to.
    pub(super) followers: VecDeque<Arc<Parker>>,
    /// How often a thread has begun to turn the loop, but for those that wait in the background.
    pub(super) drives: u64,
    /// A session for each message in a queue, with its place among all that came, in that order.
    arrivals: VecDeque<(u64, Slot<SessionState>)>,
    /// Messages that came.
    came: u64,
    receivers: VecDeque<OpSlot>,
    acceptors: VecDeque<OpSlot>,
    accepted: VecDeque<Session>,
    endings: VecDeque<Ending>,
    /// Something ended since [`super::Node::progress`] was last called.
    pub(super) news: bool,
}

impl Shared {
    pub(super) fn begin(&mut self, kind: OpKind) -> Result<OpSlot, SubmitError> {
        if self.ops.len() >= NODE_OPS_MAX {
            return Err(SubmitError::Busy);
        }
        Ok(self.begin_beyond(kind))
    }

    /// As [`Self::begin`], of what only frees: it is not refused. There are no more of them than windows.
    pub(super) fn begin_beyond(&mut self, kind: OpKind) -> OpSlot {
        let origin = Origin { kind, came: 0 };
        self.ops.insert(OpState {
            origin,
            result: None,
            detached: false,
            group: None,
            waiters: Vec::new(),
            is_driven: false,
        })
    }

    /// The end of an operation; of one that has ended nothing happens.
    pub(super) fn complete(&mut self, op: OpSlot, result: Result<Outcome, OpError>) {
        self.news = true;
        let Some(state) = self.ops.get_mut(op).filter(|state| state.result.is_none()) else { return };
        for waiter in state.waiters.drain(..) {
            waiter.wake();
        }
        let origin = state.origin;
        if let Some((group, context)) = state.group {
            self.ops.remove(op);
            if let Some(result) = self.groups.completed(group, context, origin, result) {
                self.discard(origin, result);
            }
        } else if state.detached {
            self.ops.remove(op);
            self.discard(origin, result);
        } else {
            state.result = Some(result);
        }
    }

    /// A result is not wanted: its contents must not be lost to others. True if the driving thread must check: another
    /// operation has ended by it, or there is a command.
    pub(super) fn discard(&mut self, origin: Origin, result: Completed) -> bool {
        match (origin.kind, result) {
            (OpKind::Connect(session), Ok(_)) => self.abandon(session),
            (OpKind::Accept, Ok(Outcome::Session(session))) => self.give_back_session(session),
            (OpKind::Receive(_), Ok(Outcome::Message(message))) => self.give_back_message(origin.came, message),
            (OpKind::Receive(_), Ok(Outcome::Ended(session, reason))) => self.give_back_ending(session, reason),
            _ => false,
        }
    }

    /// An accepted session that was not taken: the next `accept` gets it.
    fn give_back_session(&mut self, session: Session) -> bool {
        // Of one that has ended the program is told by its end.
        if self.usable(session).is_err() {
            return false;
        }
        if let Some(op) = self.acceptors.pop_front() {
            self.complete(op, Ok(Outcome::Session(session)));
            return true;
        }
        self.accepted.push_front(session);
        let youngest = if self.accepted.len() > ACCEPTED_MAX { self.accepted.pop_back() } else { None };
        youngest.is_some_and(|youngest| self.abandon(youngest))
    }

    /// A message that was not taken. Of a session whose end was told it is gone.
    fn give_back_message(&mut self, came: u64, message: Message) -> bool {
        if let Some(state) = self.sessions.get_mut(message.session.0) {
            state.taken -= 1;
        }
        self.hand_out(came, message)
    }

    /// The end of a session, which is reported once, and was not yet.
    fn give_back_ending(&mut self, session: Session, reason: CloseReason) -> bool {
        if let Some(op) = self.receivers.pop_front() {
            self.complete(op, Ok(Outcome::Ended(session, reason)));
            return true;
        }
        // If there are too many the first is forgotten, which is this one.
        if self.endings.len() < ENDED_SESSIONS_MAX {
            self.endings.push_front(Ending { session, reason, known: true });
        }
        false
    }

    /// Closes a session that the program does not know of. True if there is a command for it.
    fn abandon(&mut self, session: Session) -> bool {
        let is_known = self.sessions.get(session.0).is_some_and(|state| !state.closed);
        let is_left = is_known && self.close(session);
        if is_left {
            self.commands.push_back(Command::Close { session });
        }
        is_left
    }

    /// Whether the thread that turns the loop waits for an operation.
    pub(super) fn set_driven(&mut self, op: OpSlot, is_driven: bool) {
        if let Some(state) = self.ops.get_mut(op) {
            state.is_driven = is_driven;
        }
    }

    /// Whether an operation is under way.
    pub(super) fn is_under_way(&self, op: OpSlot) -> bool {
        self.ops.get(op).is_some_and(|state| state.result.is_none())
    }

    /// The result of an operation, once.
    pub(super) fn take(&mut self, op: OpSlot) -> Option<Result<Completed, WaitError>> {
        let Some(state) = self.ops.get(op) else { return Some(Err(WaitError::Taken)) };
        if state.group.is_some() {
            return Some(Err(WaitError::Taken));
        }
        state.result.as_ref()?;
        self.ops.remove(op)?.result.map(Ok)
    }

    /// Ends an operation that is waited for no longer, and takes its result: none if it was cancelled, or cannot be.
    pub(super) fn call_off(&mut self, op: OpSlot) -> Option<Completed> {
        self.cancel(op);
        self.take(op)?.ok().filter(|result| *result != Err(OpError::Cancelled))
    }

    /// The handle of an operation is gone. True as for [`Self::discard`].
    pub(super) fn detach(&mut self, op: OpSlot) -> bool {
        self.ops.get(op).is_some_and(|state| state.group.is_none()) && self.detach_op(op)
    }

    /// Discards the result of an operation when it ends: no handle is left to take it. True as for [`Self::discard`].
    fn detach_op(&mut self, op: OpSlot) -> bool {
        let Some(state) = self.ops.get_mut(op) else { return false };
        let origin = state.origin;
        if let Some(result) = state.result.take() {
            self.ops.remove(op);
            return self.discard(origin, result);
        }
        state.detached = true;
        if matches!(origin.kind, OpKind::Receive(_) | OpKind::Accept | OpKind::Connect(_)) {
            self.cancel(op);
        }
        matches!(origin.kind, OpKind::Connect(_))
    }

    /// A group is gone, and what it had with it. True as for [`Self::discard`].
    pub(super) fn end_group(&mut self, group: GroupSlot) -> bool {
        let queued = self.groups.remove(group);
        let is_member = |state: &OpState| state.group.is_some_and(|(other, _)| other == group);
        let members: Vec<OpSlot> = self.ops.iter().filter(|(_, state)| is_member(state)).map(|(op, _)| op).collect();
        // First the waiting ones, which must not get unclaimed results.
        let mut must_look = false;
        for op in members {
            must_look |= self.detach_op(op);
        }
        for (origin, result) in queued {
            must_look |= self.discard(origin, result);
        }
        must_look
    }

    /// Cancels an operation that waits here for a peer or another thread. False if the loop must be asked.
    pub(super) fn cancel(&mut self, op: OpSlot) -> bool {
        let queue = match self.ops.get(op).map(|state| state.origin.kind) {
            Some(OpKind::Receive(None)) => &mut self.receivers,
            Some(OpKind::Receive(Some(session))) => match self.sessions.get_mut(session.0) {
                Some(state) => &mut state.receivers,
                None => return true,
            },
            Some(OpKind::Accept) => &mut self.acceptors,
            Some(OpKind::Connect(session)) => {
                if self.is_under_way(op) {
                    self.abandon(session);
                    self.complete(op, Err(OpError::Cancelled));
                }
                return true;
            }
            Some(OpKind::Send(_) | OpKind::Transfer(_) | OpKind::Layer) => return false,
            Some(OpKind::Plain) | None => return true,
        };
        if let Some(place) = queue.iter().position(|other| *other == op) {
            queue.remove(place);
            self.complete(op, Err(OpError::Cancelled));
        }
        true
    }

    /// Begins to connect: the operation, and what will be its session.
    pub(super) fn connect(&mut self, credits: u16) -> Result<(OpSlot, Session), SubmitError> {
        let op = self.begin(OpKind::Plain)?;
        let session = self.add_session(Phase::Connecting(op), credits);
        if let Some(state) = self.ops.get_mut(op) {
            state.origin.kind = OpKind::Connect(session);
        }
        Ok((op, session))
    }

    pub(super) fn add_session(&mut self, phase: Phase, credits: u16) -> Session {
        Session(self.sessions.insert(SessionState {
            phase,
            queue: VecDeque::new(),
            receivers: VecDeque::new(),
            waiting: 0,
            taken: 0,
            give_back_at: u32::from(credits).div_ceil(2),
            closed: false,
            capabilities: None,
            peer: None,
        }))
    }

    /// A session that can be used.
    pub(super) fn usable(&mut self, session: Session) -> Result<&mut SessionState, SubmitError> {
        match self.sessions.get_mut(session.0) {
            None | Some(SessionState { closed: true, .. }) => Err(SubmitError::NoSession),
            Some(SessionState { phase: Phase::Ending(reason) | Phase::Ended(reason), .. }) => {
                Err(SubmitError::Ended(*reason))
            }
            Some(state) => Ok(state),
        }
    }

    /// Counts a message that will be sent, if there is room for it to wait.
    pub(super) fn count_waiting(&mut self, session: Session) -> Result<(), SubmitError> {
        let state = self.usable(session)?;
        if state.waiting >= MESSAGES_WAITING_MAX {
            return Err(SubmitError::Busy);
        }
        state.waiting += 1;
        Ok(())
    }

    /// A message that was counted.
    pub(super) fn waits_no_longer(&mut self, session: Session) {
        if let Some(state) = self.sessions.get_mut(session.0) {
            state.waiting = state.waiting.saturating_sub(1);
        }
    }

    /// A client's session can be used, or a server's: its client has named its protocols. False if it is one too many.
    pub(super) fn session_up(
        &mut self,
        session: Session,
        capabilities: Option<Capabilities>,
        peer: Option<Identity>,
    ) -> bool {
        let Some(state) = self.sessions.get_mut(session.0) else { return true };
        (state.capabilities, state.peer) = (capabilities, peer);
        match std::mem::replace(&mut state.phase, Phase::Up) {
            Phase::Connecting(op) => self.complete(op, Ok(Outcome::Session(session))),
            Phase::Arriving => match self.acceptors.pop_front() {
                Some(op) => self.complete(op, Ok(Outcome::Session(session))),
                None if self.accepted.len() >= ACCEPTED_MAX => {
                    // It will be closed, and the program was never given it.
                    state.closed = true;
                    return false;
                }
                None => self.accepted.push_back(session),
            },
            other => state.phase = other,
        }
        true
    }

    /// A session is about to end, with all that has begun by now. The program is told when that has.
    pub(super) fn session_ends(&mut self, session: Session, reason: CloseReason) {
        if let Some(state) = self.sessions.get_mut(session.0)
            && matches!(state.phase, Phase::Up)
        {
            state.phase = Phase::Ending(reason);
        }
    }

    /// A session has ended: nothing more comes. Its messages stay, if the program knows of it.
    pub(super) fn session_ended(&mut self, session: Session, reason: CloseReason) {
        let Some(state) = self.sessions.get_mut(session.0) else { return };
        let closed = state.closed;
        let receivers = std::mem::take(&mut state.receivers);
        let phase = std::mem::replace(&mut state.phase, Phase::Ended(reason));
        for op in receivers {
            self.complete(op, Err(OpError::Ended(reason)));
        }
        match phase {
            Phase::Connecting(op) => {
                self.forget_session(session);
                self.complete(op, Err(OpError::Ended(reason)));
            }
            Phase::Arriving => self.forget_session(session),
            Phase::Up | Phase::Ending(_) | Phase::Ended(_) if closed => self.forget_session(session),
            Phase::Up | Phase::Ending(_) | Phase::Ended(_) => self.note_ending(session, reason),
        }
    }

    fn note_ending(&mut self, session: Session, reason: CloseReason) {
        let known = !self.accepted.contains(&session);
        self.accepted.retain(|other| *other != session);
        if self.endings.len() >= ENDED_SESSIONS_MAX {
            // Unaccepted sessions that come and go do not displace the last messages of accepted sessions.
            let stranger = self.endings.iter().position(|ending| !ending.known);
            if !known && stranger.is_none() {
                return self.forget_session(session);
            }
            if let Some(oldest) = self.endings.remove(stranger.unwrap_or(0)) {
                self.forget_session(oldest.session);
            }
        }
        match self.receivers.pop_front() {
            Some(op) => {
                self.forget_session(session);
                self.complete(op, Ok(Outcome::Ended(session, reason)));
            }
            None => self.endings.push_back(Ending { session, reason, known }),
        }
    }

    /// The program wants a session no longer. False if it has ended already.
    pub(super) fn close(&mut self, session: Session) -> bool {
        self.accepted.retain(|other| *other != session);
        self.endings.retain(|ending| ending.session != session);
        let Some(state) = self.sessions.get_mut(session.0) else { return false };
        state.closed = true;
        let ended = matches!(state.phase, Phase::Ended(_));
        self.forget_session(session);
        !ended
    }

    /// The program knows that a session has ended.
    pub(super) fn forget_session(&mut self, session: Session) {
        if matches!(self.sessions.get(session.0), Some(SessionState { phase: Phase::Ended(_), .. })) {
            self.sessions.remove(session.0);
            self.arrivals.retain(|(_, other)| *other != session.0);
            self.endings.retain(|ending| ending.session != session);
        }
    }

    /// A message came.
    pub(super) fn message_came(&mut self, message: Message) {
        self.came += 1;
        self.hand_out(self.came, message);
    }

    /// Gives a message to an operation that waits for it, or puts it in its place. True if an operation has ended by it.
    fn hand_out(&mut self, came: u64, message: Message) -> bool {
        let session = message.session;
        let Some(state) = self.sessions.get_mut(session.0) else { return false };
        if let Some(op) = state.receivers.pop_front().or_else(|| self.receivers.pop_front()) {
            state.taken += 1;
            self.end_receive(op, came, Outcome::Message(message));
            return true;
        }
        // Mostly the last: only what was given back has a place before others.
        let place = state.queue.partition_point(|(other, _)| *other < came);
        state.queue.insert(place, (came, message));
        let place = self.arrivals.partition_point(|(other, _)| *other < came);
        self.arrivals.insert(place, (came, session.0));
        false
    }

    fn end_receive(&mut self, op: OpSlot, came: u64, outcome: Outcome) {
        if let Some(state) = self.ops.get_mut(op) {
            state.origin.came = came;
        }
        self.complete(op, Ok(outcome));
    }

    /// Begins to receive: at once, if something is here.
    pub(super) fn receive(&mut self, from: Option<Session>) -> Result<OpSlot, SubmitError> {
        if let Some(session) = from {
            let state = self.sessions.get(session.0).ok_or(SubmitError::NoSession)?;
            if let (Phase::Ended(reason), true) = (&state.phase, state.queue.is_empty()) {
                return Err(SubmitError::Ended(*reason));
            }
        }
        let op = self.begin(OpKind::Receive(from))?;
        if let Some((came, outcome)) = self.next_received(from) {
            self.end_receive(op, came, outcome);
        } else if let Some(state) = from.and_then(|session| self.sessions.get_mut(session.0)) {
            state.receivers.push_back(op);
        } else {
            self.receivers.push_back(op);
        }
        Ok(op)
    }

    fn next_received(&mut self, from: Option<Session>) -> Option<(u64, Outcome)> {
        loop {
            let arrival = match from {
                Some(session) => {
                    let place = self.arrivals.iter().position(|(_, other)| *other == session.0)?;
                    self.arrivals.remove(place)
                }
                None => self.arrivals.pop_front(),
            };
            let Some((_, session)) = arrival else {
                let Ending { session, reason, .. } = self.endings.pop_front()?;
                self.forget_session(session);
                return Some((0, Outcome::Ended(session, reason)));
            };
            // An entry without a message must not block the ones behind it.
            if let Some(state) = self.sessions.get_mut(session)
                && let Some((came, message)) = state.queue.pop_front()
            {
                state.taken += 1;
                return Some((came, Outcome::Message(message)));
            }
        }
    }

    /// For how many messages credit is given back now.
    pub(super) fn settle_credit(&mut self, session: Session) -> u32 {
        let Some(state) = self.sessions.get_mut(session.0) else { return 0 };
        let taken = u32::try_from(state.taken).unwrap_or(0);
        state.taken -= i64::from(taken);
        taken
    }

    /// Whether credit is to be given back for messages of a session.
    pub(super) fn is_credit_due(&self, session: Session) -> bool {
        self.sessions.get(session.0).is_some_and(|state| state.taken >= i64::from(state.give_back_at))
    }

    pub(super) fn accept(&mut self) -> Result<OpSlot, SubmitError> {
        let op = self.begin(OpKind::Accept)?;
        match self.accepted.pop_front() {
            Some(session) => self.complete(op, Ok(Outcome::Session(session))),
            None => self.acceptors.push_back(op),
        }
        Ok(op)
    }
}

#[cfg(test)]
mod sessions;
#[cfg(test)]
mod tests;
