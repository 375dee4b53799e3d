//! The interface of protocols between a node and its program: a protocol runs on the node's loop, and its requests are the
//! node's operations. The call protocol (`byway-rpc`) is one.

use byway_reactor::{Instant, Reactor};

use super::command::Command;
use super::engine::Core;
use super::error::SubmitError;
use super::op::{Completed, Op, OpId};
use super::shared::OpKind;
use super::transfers::send_small;
use super::{Node, Session};
use crate::Fabric;
use crate::limits::{ANSWER_QUEUE_BYTES_MAX, SMALL_BYTES_MAX};
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot};
use crate::wire::{Header, Kind};

/// Takes what is not the program's. Called by the thread that turns the loop, one call at a time; it must not wait, and calls the
/// node only through its [`Turn`].
pub trait Layer: Send {
    /// A session can be used. Its nonce is known to its two ends alone; the end that `begins` has connected.
    fn began(&mut self, turn: &mut Turn<'_>, session: Session, nonce: [u8; 16], begins: bool);

    /// A `Call`, `Reply`, `Notice`, `Cancel`, `NoticeCredit` or `Protocols` came. False if it breaks the protocol: the session
    /// ends.
    fn message(&mut self, turn: &mut Turn<'_>, session: Session, kind: Kind, header: &Header, payload: &[u8]) -> bool;

    /// A `Data` or `Reply` of a call came, whose payload lies in the window that the header names. False as above.
    fn placed(&mut self, turn: &mut Turn<'_>, session: Session, kind: Kind, header: &Header) -> bool;

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

    /// Sends a message; does nothing if the session has ended, which the layer is told. The layer bounds what it sends, by credit.
    /// At most 16 KiB of payload go with it ([`SMALL_BYTES_MAX`]).
    pub fn send(&mut self, session: Session, header: Header, payload: &[u8]) {
        self.core.say(self.fabric, self.reactor, session, header, payload);
    }

    /// Ends an operation; does nothing if it has ended.
    pub fn complete(&mut self, op: OpId, result: Completed) {
        // At once: a thread of the layer's that finds its own tables changed takes it for ended.
        self.core.shared().complete(op.0, result);
    }

    /// Asks for [`Layer::alarm`] at that time, or earlier where it was asked for that.
    pub fn set_alarm(&mut self, at: Instant) {
        self.core.set_alarm(self.reactor, at);
    }
}

impl Core {
    /// Sends a message of the layer's. A peer that asks and asks and reads no answer loses its session.
    pub(super) fn say(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        header: Header,
        payload: &[u8],
    ) {
        debug_assert!(payload.len() <= SMALL_BYTES_MAX, "the layer knows how much goes with a message");
        let Some(state) = self.sessions.get(&session).filter(|state| state.ended.is_none()) else { return };
        if fabric.control_queued_heap(state.fabric) > ANSWER_QUEUE_BYTES_MAX {
            return fabric.close(reactor, state.fabric, CloseReason::AsksTooMuch);
        }
        send_small(fabric, state.fabric, header, payload);
    }
}

/// For the [`Layer`] of a node, from any thread.
impl Node {
    /// The time on the loop's clock.
    pub fn now(&self) -> Instant {
        self.inner.clock.now()
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
        Ok(Op::new(self, slot))
    }

    /// Ends an operation of the layer's.
    ///
    /// # Errors
    /// `Forked`.
    pub fn complete(&self, op: OpId, result: Completed) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        shared.complete(op.0, result);
        self.inner.nudge(shared);
        Ok(())
    }

    /// As [`Turn::send`], and [`Turn::set_alarm`] for an `alarm`. Messages go out in the order in which they are given.
    ///
    /// # Errors
    /// The session is gone; `Forked`.
    pub fn layer_send(
        &self,
        session: Session,
        header: Header,
        payload: Vec<u8>,
        alarm: Option<Instant>,
    ) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        shared.usable(session)?;
        shared.commands.push_back(Command::Say { session, header, payload });
        shared.commands.extend(alarm.map(|at| Command::Alarm { at }));
        self.inner.nudge(shared);
        Ok(())
    }

    /// Why a session cannot be used any more.
    pub fn session_error(&self, session: Session) -> SubmitError {
        self.inner
            .lock()
            .and_then(|mut shared| shared.usable(session).map(|_| ()))
            .err()
            .unwrap_or(SubmitError::NoSession)
    }

    /// As [`Turn::set_alarm`].
    ///
    /// # Errors
    /// `Forked`.
    pub fn set_layer_alarm(&self, at: Instant) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        shared.commands.push_back(Command::Alarm { at });
        self.inner.nudge(shared);
        Ok(())
    }
}

/// The layer above names sessions alike wherever it stands: on a node, or on a loop's fabric.
impl From<Session> for SessionId {
    fn from(session: Session) -> Self {
        Self::new(session.0.index, session.0.generation)
    }
}

impl From<SessionId> for Session {
    fn from(session: SessionId) -> Self {
        Self(Slot::new(session.index, session.generation))
    }
}
