//! What the peer of a session owes, while which the fabric watches that it lives: its Protocols, word of puts, credit for what waits, and
//! bytes that are on their way into memory which the program wants back. (Of gets and of lent memory the fabric knows itself.)

use byway_reactor::Reactor;

use super::Session;
use super::engine::{Core, Link};
use crate::Fabric;
use crate::windows::WindowKey;

/// Sessions whose debts may have changed, and closed windows into which a peer still sends.
#[derive(Default)]
pub(super) struct Debts {
    changed: Vec<Session>,
    closed: Vec<(WindowKey, Vec<Session>)>,
}

impl Debts {
    /// Whether the fabric has not been told of all.
    pub(super) fn are_untold(&self) -> bool {
        !self.changed.is_empty()
    }
}

impl Link {
    fn is_owed(&self) -> bool {
        let owes_protocols = self.up && !self.greeted;
        owes_protocols || !self.puts.is_empty() || !self.waiting.is_empty() || self.filling > 0
    }
}

impl Core {
    /// What a session's peer owes may have changed: see [`Core::tell_debts`].
    pub(super) fn note_debts(&mut self, session: Session) {
        let changed = self.links.get_mut(&session).is_some_and(|link| {
            let changes = link.is_owed() != link.was_owed;
            changes && !std::mem::replace(&mut link.debts_noted, true)
        });
        if changed {
            self.debts.changed.push(session);
        }
    }

    /// A window was closed while the peer of one of these sessions was sending into it: who of them is not known here.
    pub(super) fn note_filling(&mut self, window: WindowKey, sessions: &[Session]) {
        for session in sessions {
            if let Some(link) = self.links.get_mut(session) {
                link.filling += 1;
            }
            self.note_debts(*session);
        }
        self.debts.closed.push((window, sessions.to_vec()));
    }

    /// Finds the closed windows into which nobody sends any more.
    pub(super) fn end_filling(&mut self, fabric: &mut Fabric) {
        let ended = self.debts.closed.extract_if(.., |(window, _)| !fabric.windows().is_lent(*window));
        for session in ended.flat_map(|(_, sessions)| sessions).collect::<Vec<_>>() {
            if let Some(link) = self.links.get_mut(&session) {
                link.filling -= 1;
            }
            self.note_debts(session);
        }
    }

    /// Tells the fabric whose peers owe something: once for all that a turn has changed.
    pub(super) fn tell_debts(&mut self, fabric: &mut Fabric, reactor: &Reactor) {
        while let Some(session) = self.debts.changed.pop() {
            let Some(link) = self.links.get_mut(&session) else { continue };
            link.debts_noted = false;
            link.was_owed = link.is_owed();
            fabric.set_owes(reactor, link.fabric, link.was_owed);
        }
    }
}
