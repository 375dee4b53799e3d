//! What may stand between a node and its program: a protocol of its own, on the node's loop, whose requests are the node's
//! operations. Calls (`byway-rpc`) are one.

use byway_reactor::{Instant, Reactor};

use super::command::Header;
use super::engine::{Core, Waiting};
use super::error::SubmitError;
use super::op::{Completed, Op, OpId};
use super::shared::OpKind;
use super::wire::Class;
use super::{Node, Session};
use crate::Fabric;
use crate::limits::{MESSAGE_HEADER_BYTES_MAX, SMALL_BYTES_MAX};
use crate::session::CloseReason;

/// Hears of what is not the program's. Called on whichever thread turns the loop, one call at a time; it must not wait, and not
/// call the node but by its [`Turn`].
pub trait Layer: Send {
    /// A session can be used.
    fn began(&mut self, turn: &mut Turn<'_>, session: Session);

    /// A message of class [`Class::Layer`] or [`Class::Now`] came. For one of the first, [`Turn::taken`] or
    /// [`Node::layer_taken`] gives the credit back. False if it is no message: the session ends.
    fn message(&mut self, turn: &mut Turn<'_>, session: Session, class: Class, header: &[u8], payload: &[u8]) -> bool;

    /// A message of class [`Class::Layer`] waited for credit of the peer, and its session has ended: the peer never had it. Called
    /// before [`Layer::ended`].
    fn unsent(&mut self, turn: &mut Turn<'_>, session: Session, header: &[u8]) {
        let _ = (turn, session, header);
    }

    /// A session has ended. Nothing more comes from it.
    fn ended(&mut self, turn: &mut Turn<'_>, session: Session, reason: CloseReason);

    /// The program wants an operation of the layer's to end early.
    fn cancelled(&mut self, turn: &mut Turn<'_>, op: OpId);

    /// The time that was asked for has come.
    fn alarm(&mut self, turn: &mut Turn<'_>, now: Instant);
}

/// What a [`Layer`] can do while it is called.
pub struct Turn<'a> {
    core: &'a mut Core,
    fabric: &'a mut Fabric,
    reactor: &'a mut Reactor,
}

impl<'a> Turn<'a> {
    pub(super) fn new(core: &'a mut Core, fabric: &'a mut Fabric, reactor: &'a mut Reactor) -> Self {
        Self { core, fabric, reactor }
    }

    /// The time now.
    pub fn now(&self) -> Instant {
        self.reactor.now()
    }

    /// Sends a message; nothing happens if the session has ended, which the layer is told. One of [`Class::Now`] goes at once,
    /// others when there is credit.
    ///
    /// # Errors
    /// `TooLong`; `Busy` if too many wait for credit, which one of [`Class::Now`] does not; `NoSession` and `Ended`.
    pub fn send(&mut self, session: Session, class: Class, header: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        let header = checked(header, payload)?;
        self.core.shared().count_of_class(session, class)?;
        let message = Waiting::Message { op: None, class, header, payload: payload.to_vec() };
        self.core.send(self.fabric, self.reactor, session, message);
        Ok(())
    }

    /// Takes back a message of [`Class::Layer`] that has not been sent: the first whose header `is` it. False if there is none.
    pub fn take_back(&mut self, session: Session, is: impl Fn(&[u8]) -> bool) -> bool {
        let taken = self.core.take_back(session, |class, header| class == Class::Layer && is(header.as_slice()));
        self.core.note_credit(self.fabric, self.reactor, session);
        taken
    }

    /// Ends an operation; of one that has ended nothing happens.
    pub fn complete(&mut self, op: OpId, result: Completed) {
        self.core.complete(op.0, result);
    }

    /// A message of [`Class::Layer`] is done with.
    pub fn taken(&mut self, session: Session) {
        let owes = self.core.shared().taken(session);
        if owes {
            self.core.give_credit(self.fabric, session);
        }
    }

    /// Asks for [`Layer::alarm`] at that time, or before, if it was asked for that.
    pub fn set_alarm(&mut self, at: Instant) {
        self.core.set_alarm(self.reactor, at);
    }
}

fn checked(header: &[u8], payload: &[u8]) -> Result<Header, SubmitError> {
    debug_assert!(header.len() <= MESSAGE_HEADER_BYTES_MAX, "a layer knows its header");
    if payload.len() > SMALL_BYTES_MAX {
        return Err(SubmitError::TooLong);
    }
    Header::new(header).ok_or(SubmitError::TooLong)
}

/// For the [`Layer`] of a node, from any thread.
impl Node {
    /// The time on the loop's clock.
    pub fn now(&self) -> Instant {
        byway_reactor::monotonic()
    }

    /// Whether this is the child of a fork, where the node is of no use.
    pub fn is_forked(&self) -> bool {
        self.inner.mark.is_child()
    }

    /// An operation of the layer's, which it must end by [`Turn::complete`] or [`Node::complete`].
    ///
    /// # Errors
    /// `Busy`, `Forked`.
    pub fn layer_op(&self) -> Result<Op, SubmitError> {
        let slot = self.inner.lock()?.begin(OpKind::Layer)?;
        Ok(Op { node: self.clone(), slot })
    }

    /// Ends an operation of the layer's.
    ///
    /// # Errors
    /// `Forked`.
    pub fn complete(&self, op: OpId, result: Completed) -> Result<(), SubmitError> {
        self.inner.lock()?.complete(op.0, result);
        self.inner.nudge();
        Ok(())
    }

    /// As [`Turn::send`].
    ///
    /// # Errors
    /// As there, and `Forked`.
    pub fn layer_send(&self, session: Session, class: Class, header: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        let header = checked(header, payload)?;
        let mut shared = self.inner.lock()?;
        shared.count_of_class(session, class)?;
        let payload = payload.to_vec();
        shared.commands.push_back(super::command::Command::Send { op: None, session, class, header, payload });
        drop(shared);
        self.inner.nudge();
        Ok(())
    }

    /// As [`Turn::taken`].
    ///
    /// # Errors
    /// `Forked`.
    pub fn layer_taken(&self, session: Session) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        if shared.taken(session) {
            shared.commands.push_back(super::command::Command::GiveCredit { session });
            drop(shared);
            self.inner.nudge();
        }
        Ok(())
    }

    /// As [`Turn::set_alarm`].
    ///
    /// # Errors
    /// `Forked`.
    pub fn set_layer_alarm(&self, at: Instant) -> Result<(), SubmitError> {
        self.inner.lock()?.commands.push_back(super::command::Command::Alarm { at });
        self.inner.nudge();
        Ok(())
    }
}
