//! Feedback and capabilities of a session, for programs that choose between peers.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use byway_reactor::{PathState, Reactor};

use super::command::Command;
use super::engine::Core;
use super::error::{NodeError, OpError, SubmitError};
use super::{Node, Session};
use crate::access::Identity;
use crate::feedback::{Feedback, Stall};
use crate::session::CloseReason;
use crate::{Capabilities, Fabric};

/// What the transfers of a session are like.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionFeedback {
    /// What the node has measured: bytes, rates, delays, stalls, and what waits now. Of [`Stall`]s there are [`Stall::Credit`]: a
    /// message had to wait for the peer's program to take others; and [`Stall::Take`]: the peer, or the path, took longer than
    /// [`STALL_TIME_MIN`](crate::feedback::STALL_TIME_MIN) for a send. What is asked of a node has no queue there, so
    /// [`Feedback::start_delay`] is 0.
    pub measured: Feedback,
    /// What the kernel says of the path; `None` where there is none, as over shared memory.
    pub path: Option<PathState>,
}

impl Node {
    /// What a session's transfers are like now: bytes, rates, delays and stalls since it began, and what waits. The thread
    /// that drives the loop looks it up, and is woken for that; it costs no measurements of its own.
    ///
    /// # Errors
    /// The session is gone or has ended; `Busy`, `Forked`.
    pub fn feedback(&self, session: Session) -> Result<SessionFeedback, NodeError> {
        self.inner.lock()?.usable(session)?;
        let seen = Arc::new(OnceLock::new());
        let into = Arc::clone(&seen);
        self.run(|op| Command::Look { op, session, into })?;
        seen.get().copied().ok_or(OpError::Ended(CloseReason::Closed).into())
    }

    /// What the wire of a session can do: it does not change while the session lasts. A look into a table.
    ///
    /// # Errors
    /// The session is gone, or cannot be used yet; `Forked`.
    pub fn capabilities(&self, session: Session) -> Result<Capabilities, SubmitError> {
        let shared = self.inner.lock()?;
        shared.sessions.get(session.0).and_then(|state| state.capabilities).ok_or(SubmitError::NoSession)
    }

    /// What is known of a session's peer: the names of the certificate that it has shown by TLS, and where it connects from. It
    /// does not change while the session lasts. A look into a table.
    ///
    /// A peer without a certificate has no names: over plain connections, and of clients where
    /// [`ClientCertificates`](crate::tls::ClientCertificates) does not ask for one.
    ///
    /// # Errors
    /// The session is gone, or cannot be used yet; `Forked`.
    pub fn peer(&self, session: Session) -> Result<Identity, SubmitError> {
        let shared = self.inner.lock()?;
        shared.sessions.get(session.0).and_then(|state| state.peer.clone()).ok_or(SubmitError::NoSession)
    }
}

impl Core {
    /// See [`Node::feedback`].
    pub(super) fn look(
        &self,
        fabric: &Fabric,
        reactor: &Reactor,
        session: Session,
        into: &OnceLock<SessionFeedback>,
    ) -> Result<(), OpError> {
        let state = self.sessions.get(&session).ok_or(OpError::Ended(CloseReason::Closed))?;
        let measured = fabric.feedback(reactor, state.fabric);
        let mut measured = measured.ok_or(OpError::Ended(state.ended.unwrap_or(CloseReason::Closed)))?;
        let short = state.short_since.map_or(Duration::ZERO, |since| reactor.now().since(since));
        measured.waiting = measured.waiting.max(short);
        into.get_or_init(|| SessionFeedback { measured, path: fabric.path(reactor, state.fabric) });
        Ok(())
    }

    /// Notes when messages begin to wait for credit, and when none does any more.
    pub(super) fn note_credit(&mut self, fabric: &mut Fabric, reactor: &Reactor, session: Session) {
        let Some(state) = self.sessions.get_mut(&session) else { return };
        let is_short = state.credits == 0 && !state.waiting.is_empty();
        match (is_short, state.short_since) {
            (true, None) => state.short_since = Some(reactor.now()),
            (false, Some(since)) => {
                state.short_since = None;
                fabric.note_stall(state.fabric, Stall::Credit, reactor.now().since(since));
            }
            _ => {}
        }
        self.note_liveness(session);
    }
}
