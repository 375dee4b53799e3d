//! What waits until less is under way over its session.
//!
//! A peer has an answer to send for each part of a put or get, and bounds how many wait for us
//! ([`ANSWERS_MAX`](crate::limits::ANSWERS_MAX)). So no more is asked for at a time than it must take: further operations wait here,
//! and behind them the messages and flushes of their session, since all of those are in order.

use std::collections::VecDeque;

use byway_reactor::Reactor;

use super::command::Command;
use super::engine::{Core, Waiting};
use super::error::OpError;
use super::wire::Class;
use super::{OpId, Session};
use crate::Fabric;
use crate::limits::ASKED_MAX;
use crate::session::CloseReason;
use crate::slots::Slot;

/// The commands of one session that wait, in order.
#[derive(Default)]
pub(super) struct Deferred(VecDeque<Command>);

impl Command {
    /// The session with whose other commands it is in order.
    fn in_order_of(&self) -> Option<Session> {
        match self {
            Self::Send { class: Class::Now, .. } => None,
            Self::Send { session, .. }
            | Self::Put { session, .. }
            | Self::Get { session, .. }
            | Self::Flush { session, .. } => Some(*session),
            _ => None,
        }
    }

    /// Whether the peer will have something to answer.
    fn asks(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Get { .. })
    }

    /// Its operation, if that can be cancelled before it begins.
    fn cancellable(&self) -> Option<Slot> {
        match self {
            Self::Send { op, .. } => *op,
            Self::Put { op, .. } | Self::Get { op, .. } => Some(*op),
            _ => None,
        }
    }
}

impl Core {
    /// Does what was asked for, or has it wait.
    pub(super) fn run(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, command: Command) {
        if let Some(session) = command.in_order_of()
            && let Some(link) = self.links.get_mut(&session).filter(|link| link.ended.is_none())
            && (!link.deferred.0.is_empty() || (command.asks() && link.asked >= ASKED_MAX))
        {
            link.deferred.0.push_back(command);
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
        for session in std::mem::take(&mut self.crowded) {
            let Some(link) = self.links.get(&session) else { continue };
            if link.asked >= ASKED_MAX {
                self.note_crowded(session);
                continue;
            }
            ran = true;
            self.send_waiting(fabric, reactor, session);
            while let Some(link) = self.links.get_mut(&session)
                && let Some(next) = link.deferred.0.pop_front_if(|next| !next.asks() || link.asked < ASKED_MAX)
            {
                self.run_now(fabric, reactor, next);
            }
            if self.links.get(&session).is_some_and(|link| !link.deferred.0.is_empty()) {
                self.note_crowded(session);
            }
        }
        ran
    }

    /// The session has ended, or is about to: messages go out if they still can, the rest ends with that.
    pub(super) fn end_deferred(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session) {
        let Some(link) = self.links.get_mut(&session) else { return };
        let reason = link.ended.unwrap_or(CloseReason::Closed);
        for command in std::mem::take(&mut link.deferred).0 {
            match command {
                Command::Put { op, segments, to, message: Some(message), .. } => {
                    self.end_waiting(session, Waiting::Put { op, segments, to, message }, reason);
                }
                Command::Put { op, segments, .. } | Command::Get { op, segments, .. } => {
                    drop(segments);
                    self.complete(op, Err(OpError::Ended(reason)));
                }
                other => self.run_now(fabric, reactor, other),
            }
        }
    }

    /// Takes out what has not begun. False if there is no such thing.
    pub(super) fn cancel_deferred(&mut self, session: Session, op: OpId) -> bool {
        let Some(link) = self.links.get_mut(&session) else { return false };
        let is = |command: &Command| command.cancellable() == Some(op.0);
        let place = link.deferred.0.iter().position(is);
        place.and_then(|place| link.deferred.0.remove(place)).is_some()
    }
}
