//! The calls of a node, on its loop.

use std::sync::{Arc, MutexGuard};

use byway_fabric::node::lock::Lock;
use byway_fabric::node::{Layer, Message, OpError, OpId, Outcome, Session, Turn};
use byway_fabric::wire::{Header, Kind};
use byway_fabric::{CloseReason, SessionId};
use byway_reactor::Instant;
use zerocopy::IntoBytes;

use super::waiting::Line;
use super::{Arrived, Tables};
use crate::limits::REQUESTS_MAX;
use crate::message::{Inline, Status, Token};
use crate::seeded::{self, Bug};
use crate::session::{Answer, CallRef, CannotSend, EndedCalls, Event, Incomer};

pub(super) struct RpcLayer {
    tables: Arc<Lock<Tables>>,
}

impl RpcLayer {
    pub(super) fn new(tables: Arc<Lock<Tables>>) -> Self {
        Self { tables }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock()
    }

    /// Sends what the call protocol has to say, and behind it the calls that have credit by now. Credit comes back in more
    /// ways than by the message at hand: with a third node's answer over another session, or with the end of one.
    fn send(mut tables: MutexGuard<'_, Tables>, turn: &mut Turn<'_>) {
        // Drained, so that the list keeps its room.
        for out in tables.calls.outbox().drain(..) {
            turn.send(out.session.into(), out.header, &out.payload);
        }
        if seeded::is(Bug::WaitingCallsForgotten) {
            return;
        }
        for line in tables.waiting.lines() {
            send_waiting(&mut tables, turn, line);
        }
    }

    fn came(mut tables: MutexGuard<'_, Tables>, turn: &mut Turn<'_>, over: Session, event: Event<'_, OpId>) {
        match event {
            Event::None | Event::Ready(_) => {}
            Event::Called(call, incomer) => called(&mut tables, turn, call, &incomer),
            // A node grants none (`Rpc::open_for`).
            Event::Notified(incomer) => tables.calls.notice_taken(incomer.session, incomer.protocol),
            Event::Cancelled(call) => {
                let place = tables.queue.iter().position(|arrived| arrived.call == call);
                let was_waiting = place.and_then(|place| tables.queue.remove(place)).is_some();
                if was_waiting && !seeded::is(Bug::CancelledCallUnanswered) {
                    tables.calls.reply(call, Status::Abandoned as u16, 0, &Inline::EMPTY).into_iter().for_each(
                        |route| {
                            turn.send(route.session.into(), route.header, token_bytes(route.token.as_ref()));
                        },
                    );
                }
            }
            Event::Ended(op, answer, payload) => {
                tables.in_flight -= 1;
                turn.complete(op, outcome(over, &answer, payload));
            }
        }
        Self::send(tables, turn);
    }
}

fn token_bytes(token: Option<&Token>) -> &[u8] {
    token.map_or(&[], IntoBytes::as_bytes)
}

/// What an answer is to the program.
fn outcome(session: Session, answer: &Answer, payload: &[u8]) -> Result<Outcome, OpError> {
    match answer.status {
        0 => Ok(Outcome::Message(Message { session, header: answer.result.to_vec(), payload: payload.to_vec() })),
        status => Err(OpError::Status(status)),
    }
}

fn called(tables: &mut Tables, turn: &mut Turn<'_>, call: CallRef, incomer: &Incomer<'_>) {
    let arrived = Arrived::new(call, incomer, turn.now());
    if let Some(op) = tables.takers.pop_front() {
        let number = tables.given.insert(arrived).to_u64();
        return turn.complete(op, Ok(Outcome::Layer(number)));
    }
    if tables.queue.len() < REQUESTS_MAX {
        return tables.queue.push_back(arrived);
    }
    if let Some(route) = tables.calls.reply(call, Status::Busy as u16, 0, &Inline::EMPTY) {
        turn.send(route.session.into(), route.header, token_bytes(route.token.as_ref()));
    }
}

/// Sends calls that waited for credit of a session in a protocol, and ends those that the peer turns out not to serve.
fn send_waiting(tables: &mut Tables, turn: &mut Turn<'_>, line: Line) {
    let session = line.0;
    while let Some(call) = tables.waiting.front(line) {
        let (Some(op), deadline) = (call.op, call.deadline) else { return };
        let begun = tables.calls.call(session, &call.ask(), op, turn.now(), deadline);
        if matches!(begun, Err((_, CannotSend::NoCredit))) {
            return;
        }
        let Some(call) = tables.waiting.pop(line) else { return };
        match begun {
            Ok((_, header)) => {
                tables.in_flight += 1;
                turn.send(session.into(), header, &call.payload);
            }
            Err((op, error)) => turn.complete(op, Err(refusal(error))),
        }
    }
}

/// Why a call that waited is not sent.
fn refusal(error: CannotSend) -> OpError {
    match error {
        CannotSend::NotServed(status) => OpError::Status(status as u16),
        // Waiting calls end with their session, so this is for one that ends now.
        CannotSend::NoCredit | CannotSend::Ended => OpError::Ended(CloseReason::Closed),
    }
}

impl Layer for RpcLayer {
    fn began(&mut self, turn: &mut Turn<'_>, session: Session, nonce: [u8; 16], begins: bool) {
        let mut tables = self.tables();
        tables.calls.up(session.into(), nonce, begins);
        Self::send(tables, turn);
    }

    fn message(&mut self, turn: &mut Turn<'_>, session: Session, kind: Kind, header: &Header, payload: &[u8]) -> bool {
        let mut tables = self.tables();
        let Ok(event) = tables.calls.message(session.into(), kind, header, payload) else { return false };
        Self::came(tables, turn, session, event);
        true
    }

    fn placed(&mut self, turn: &mut Turn<'_>, session: Session, kind: Kind, header: &Header) -> bool {
        let mut tables = self.tables();
        let event = tables.calls.placed(session.into(), kind, header);
        Self::came(tables, turn, session, event);
        true
    }

    fn ended(&mut self, turn: &mut Turn<'_>, session: Session, reason: CloseReason) {
        let name = SessionId::from(session);
        let mut tables = self.tables();
        tables.queue.retain(|arrived| arrived.call.session != name);
        let EndedCalls { mut with_session, answer_lost } = tables.calls.session_ended(name);
        tables.in_flight -= with_session.len() + answer_lost.len();
        with_session.extend(tables.waiting.extract(|session, _| session == name));
        for op in with_session {
            turn.complete(op, Err(OpError::Ended(reason)));
        }
        for op in answer_lost.into_iter().filter(|_| !seeded::is(Bug::LostAnswerUntold)) {
            turn.complete(op, Err(OpError::Status(Status::DelegateLost as u16)));
        }
        Self::send(tables, turn);
    }

    fn cancelled(&mut self, turn: &mut Turn<'_>, op: OpId) {
        let mut tables = self.tables();
        let was_taker = tables.leave_takers(op);
        let waited = !tables.waiting.extract(|_, call| call.op == Some(op)).is_empty();
        let call = tables.calls.find(|other| *other == op);
        if call.is_some() && seeded::is(Bug::CancelUntold) {
            return turn.complete(op, Err(OpError::Cancelled));
        }
        let sent = call.is_some_and(|call| tables.calls.cancel(call).is_some());
        tables.in_flight -= usize::from(sent);
        if was_taker || waited || sent {
            turn.complete(op, Err(OpError::Cancelled));
        }
        Self::send(tables, turn);
    }

    fn alarm(&mut self, turn: &mut Turn<'_>, now: Instant) {
        let mut tables = self.tables();
        let mut ended = tables.waiting.extract(|_, call| call.deadline <= now);
        while let Some(op) = tables.calls.overdue(now) {
            tables.in_flight -= 1;
            ended.push(op);
        }
        for op in ended {
            turn.complete(op, Err(OpError::Deadline));
        }
        let next = [tables.calls.next_deadline(), tables.waiting.next_deadline()].into_iter().flatten().min();
        if let Some(at) = next.filter(|_| !seeded::is(Bug::AlarmNotSetAgain)) {
            turn.set_alarm(at);
        }
        Self::send(tables, turn);
    }
}
