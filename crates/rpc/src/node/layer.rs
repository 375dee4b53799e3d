//! The calls of a node, on its loop.

use std::sync::{Arc, Mutex, MutexGuard};

use byway_fabric::CloseReason;
use byway_fabric::node::{Class, Layer, Message, OpError, OpId, Outcome, Session, Turn};
use byway_reactor::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{ABANDONED, BUSY, Tables, Waiting, head, lock, unpack};
use crate::limits::REQUESTS_MAX;
use crate::token::{Head, Kind, TokenName, Unwanted};

pub(super) struct RpcLayer {
    tables: Arc<Mutex<Tables>>,
}

impl RpcLayer {
    pub(super) fn new(tables: Arc<Mutex<Tables>>) -> Self {
        Self { tables }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.tables)
    }

    /// A call came, of the peer's or handed on.
    fn called(&self, turn: &mut Turn<'_>, session: Session, head: Head, payload: &[u8]) -> bool {
        if unpack(&head, payload).is_none() {
            return false;
        }
        let now = turn.now();
        let left = u64::from(head.left_ms.get());
        let deadline = if left == 0 { Instant::FAR } else { now + std::time::Duration::from_millis(left) };
        let waiting = Waiting { session, head, payload: payload.to_vec(), deadline };
        let mut tables = self.tables();
        if let Some(op) = tables.takers.pop_front() {
            tables.held.insert(head.token, false);
            let number = tables.given.insert(waiting).to_u64();
            turn.complete(op, Ok(Outcome::Layer(number)));
            return true;
        }
        if tables.queue.len() < REQUESTS_MAX {
            tables.queue.push_back(waiting);
            return true;
        }
        // What was handed on is answered as any such call: its caller may have no session with us.
        let (to, kind) = if head.kind == Kind::Delegate as u8 {
            let way = tables.relays.take(&head.token).unwrap_or(session);
            tables.next_step(&head.token, way)
        } else {
            (session, Kind::Reply)
        };
        drop(tables);
        turn.taken(session);
        answer_without(turn, (to, kind), head.token, BUSY);
        true
    }

    /// An answer came.
    fn replied(&self, turn: &mut Turn<'_>, session: Session, head: &Head, payload: &[u8]) -> bool {
        let Some((_, result, rest)) = unpack(head, payload) else { return false };
        let mut tables = self.tables();
        match tables.pending.answered(&head.token) {
            Ok(op) => {
                let message = Message { session, header: result.to_vec(), payload: rest.to_vec() };
                let status = head.status.get();
                let outcome = if status == 0 { Ok(Outcome::Message(message)) } else { Err(OpError::Status(status)) };
                turn.complete(op, outcome);
            }
            Err(Unwanted::Late) => tables.counters.late += 1,
            Err(Unwanted::Forged) => tables.counters.forged += 1,
        }
        true
    }

    /// A caller wants no answer any more.
    fn cancelled_by(&self, turn: &mut Turn<'_>, session: Session, token: &TokenName) {
        let mut tables = self.tables();
        if let Some(held) = tables.held.get_mut(token) {
            *held = true;
        }
        let is = |waiting: &Waiting| waiting.head.token == *token && waiting.session == session;
        if let Some(place) = tables.queue.iter().position(is) {
            tables.queue.remove(place);
            drop(tables);
            turn.taken(session);
        }
    }

    /// An answer came that is somebody else's. False if it is none: who passes that on would be taken for who made it.
    fn relay(&self, turn: &mut Turn<'_>, mut head: Head, payload: &[u8]) -> bool {
        if unpack(&head, payload).is_none() {
            return false;
        }
        let step = {
            let mut tables = self.tables();
            let way = tables.relays.take(&head.token);
            match way {
                Some(_) => tables.counters.relayed += 1,
                None => tables.counters.late += 1,
            }
            way.map(|way| tables.way_back(&head.token, way))
        };
        if let Some((to, kind)) = step {
            head.kind = kind as u8;
            // A caller that is gone needs no answer.
            let _ = turn.send(to, Class::Now, head.as_bytes(), payload);
        }
        true
    }

    fn cancel_at(turn: &mut Turn<'_>, caller: [u8; 16], call: u64, secret: u64, session: Option<Session>) {
        if let Some(session) = session {
            let token = TokenName { caller, call: call.into(), secret: secret.into() };
            // Of a call that still waits for credit its server has heard nothing, and would hear this first.
            let is = |header: &[u8]| {
                Head::read_from_bytes(header).is_ok_and(|head| head.kind == Kind::Call as u8 && head.token == token)
            };
            if turn.take_back(session, is) {
                return;
            }
            let _ = turn.send(session, Class::Now, head(Kind::Cancel, token).as_bytes(), &[]);
        }
    }
}

/// Answers a call with a status alone. A caller that is gone needs none.
fn answer_without(turn: &mut Turn<'_>, (to, kind): (Session, Kind), token: TokenName, status: u16) {
    let mut reply = head(kind, token);
    reply.status.set(status);
    let _ = turn.send(to, Class::Now, reply.as_bytes(), &[]);
}

impl Layer for RpcLayer {
    fn began(&mut self, turn: &mut Turn<'_>, session: Session) {
        let mut token = TokenName::new_zeroed();
        token.caller = self.tables().id;
        let _ = turn.send(session, Class::Now, head(Kind::Hello, token).as_bytes(), &[]);
    }

    fn message(&mut self, turn: &mut Turn<'_>, session: Session, class: Class, header: &[u8], payload: &[u8]) -> bool {
        let Ok(head) = Head::read_from_bytes(header) else { return false };
        let credited = class == Class::Layer;
        match Kind::from_number(head.kind) {
            Some(Kind::Call | Kind::Delegate) if credited => return self.called(turn, session, head, payload),
            Some(Kind::Hello) if !credited => {
                let mut tables = self.tables();
                // The first name stands, and the first session of a name.
                tables.names.entry(session).or_insert(head.token.caller);
                if tables.names.get(&session) == Some(&head.token.caller) {
                    tables.peers.entry(head.token.caller).or_insert(session);
                }
            }
            Some(Kind::Reply) if !credited => return self.replied(turn, session, &head, payload),
            Some(Kind::Cancel) if !credited => self.cancelled_by(turn, session, &head.token),
            Some(Kind::Moved) if !credited => {
                // Of a call that has ended, or is not that server's, nothing changes.
                let _ = self.tables().pending.moved(&head.token, session);
            }
            Some(Kind::Relay) if !credited => return self.relay(turn, head, payload),
            _ => return false,
        }
        true
    }

    /// A call that was handed on over a session that has ended: this node answers, as the last that had it. Of a call of ours
    /// [`Layer::ended`] tells.
    fn unsent(&mut self, turn: &mut Turn<'_>, _: Session, header: &[u8]) {
        let Ok(handed) = Head::read_from_bytes(header) else { return };
        if handed.kind != Kind::Delegate as u8 {
            return;
        }
        let step = {
            let mut tables = self.tables();
            let way = tables.relays.take(&handed.token);
            way.map(|way| tables.next_step(&handed.token, way))
        };
        if let Some(step) = step {
            answer_without(turn, step, handed.token, ABANDONED);
        }
    }

    fn ended(&mut self, turn: &mut Turn<'_>, session: Session, reason: CloseReason) {
        let mut tables = self.tables();
        if let Some(name) = tables.names.remove(&session)
            && tables.peers.get(&name) == Some(&session)
        {
            tables.peers.remove(&name);
            // Another one that it has with us, the oldest.
            let other = tables.names.iter().filter(|(_, other)| **other == name).map(|(session, _)| *session).min();
            other.map(|other| tables.peers.insert(name, other));
        }
        tables.queue.retain(|waiting| waiting.session != session);
        let ended = tables.pending.session_ended(session);
        drop(tables);
        for op in ended {
            turn.complete(op, Err(OpError::Ended(reason)));
        }
    }

    fn cancelled(&mut self, turn: &mut Turn<'_>, op: OpId) {
        let mut tables = self.tables();
        let caller = tables.id;
        let taker = tables.takers.iter().position(|other| *other == op);
        let call = tables.pending.cancel(|other| *other == op);
        if let Some(place) = taker {
            tables.takers.remove(place);
        }
        drop(tables);
        if taker.is_some() || call.is_some() {
            turn.complete(op, Err(OpError::Cancelled));
        }
        if let Some((call, secret, session, _)) = call {
            Self::cancel_at(turn, caller, call, secret, session);
        }
    }

    fn alarm(&mut self, turn: &mut Turn<'_>, now: Instant) {
        let mut tables = self.tables();
        let (caller, overdue) = (tables.id, tables.pending.overdue(now));
        let next = tables.pending.next_deadline();
        drop(tables);
        for (call, secret, session, op) in overdue {
            turn.complete(op, Err(OpError::Deadline));
            Self::cancel_at(turn, caller, call, secret, session);
        }
        if let Some(at) = next {
            turn.set_alarm(at);
        }
    }
}
