//! Which peers are watched for signs of life: a session expects a reply while the peer has to send its protocols, the end of puts,
//! credit for messages that wait, or the rest of payloads for windows that the program has closed. The fabric itself knows of gets
//! and of lent memory.

use byway_reactor::Reactor;

use super::Session;
use super::engine::{Core, NodeSession};
use crate::Fabric;
use crate::windows::WindowKey;

/// Sessions that may have begun or ceased to expect a reply, and closed windows into which a peer still sends.
#[derive(Default)]
pub(super) struct ReplyWatch {
    changed: Vec<Session>,
    closed: Vec<(WindowKey, Vec<Session>)>,
}

impl ReplyWatch {
    /// Whether the fabric does not know of all changes yet.
    pub(super) fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }
}

impl NodeSession {
    fn expects_reply(&self) -> bool {
        let expects_protocols = self.up && !self.greeted;
        expects_protocols || !self.puts.is_empty() || !self.waiting.is_empty() || self.filling > 0
    }
}

impl Core {
    /// Notes that a session may have begun or ceased to expect a reply: see [`Core::update_liveness`].
    pub(super) fn note_liveness(&mut self, session: Session) {
        let changed = self.sessions.get_mut(&session).is_some_and(|state| {
            let changes = state.expects_reply() != state.expected_reply;
            changes && !std::mem::replace(&mut state.liveness_noted, true)
        });
        if changed {
            self.reply_watch.changed.push(session);
        }
    }

    /// A window was closed while the peer of one of these sessions was sending into it: which of them is not known here.
    pub(super) fn note_filling(&mut self, window: WindowKey, sessions: &[Session]) {
        for session in sessions {
            if let Some(state) = self.sessions.get_mut(session) {
                state.filling += 1;
            }
            self.note_liveness(*session);
        }
        self.reply_watch.closed.push((window, sessions.to_vec()));
    }

    /// Finds the closed windows into which no peer sends any more.
    pub(super) fn end_filling(&mut self, fabric: &mut Fabric) {
        let ended = self.reply_watch.closed.extract_if(.., |(window, _)| !fabric.windows().is_lent(*window));
        for session in ended.flat_map(|(_, sessions)| sessions).collect::<Vec<_>>() {
            if let Some(state) = self.sessions.get_mut(&session) {
                state.filling -= 1;
            }
            self.note_liveness(session);
        }
    }

    /// Tells the fabric which sessions expect a reply: once for all changes of a turn.
    pub(super) fn update_liveness(&mut self, fabric: &mut Fabric, reactor: &Reactor) {
        while let Some(session) = self.reply_watch.changed.pop() {
            let Some(state) = self.sessions.get_mut(&session) else { continue };
            state.liveness_noted = false;
            state.expected_reply = state.expects_reply();
            fabric.set_expects_reply(reactor, state.fabric, state.expected_reply);
        }
    }
}
