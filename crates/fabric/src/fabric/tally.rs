//! Counts of what has come and gone.

use crate::session::CloseReason;
use crate::wire::RefuseCode;

/// What has come and gone since the fabric was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FabricCounters {
    /// Sessions of clients.
    pub sessions: u64,
    /// Connections that were refused: too many, or from an address that is not admitted.
    pub refused: u64,
    /// Connections and sessions that ended by a fault ([`CloseReason::is_fault`]).
    pub faults: u64,
}

/// The counters, and what went last.
#[derive(Default)]
pub(super) struct Tally {
    counters: FabricCounters,
    last_closed: Option<CloseReason>,
}

impl Tally {
    pub(super) fn counters(&self) -> FabricCounters {
        self.counters
    }

    /// Why the connection or session that ended last ended.
    pub(super) fn last_closed(&self) -> Option<CloseReason> {
        self.last_closed
    }

    /// A client's session has begun.
    pub(super) fn note_session(&mut self) {
        self.counters.sessions += 1;
    }

    /// A connection is closed before a word was said on it.
    pub(super) fn note_refused(&mut self, code: RefuseCode) {
        self.counters.refused += 1;
        self.last_closed = Some(CloseReason::WeRefused(code));
    }

    /// There is no room for a connection, which will be told so.
    pub(super) fn note_turned_away(&mut self) {
        self.counters.refused += 1;
    }

    /// A connection without a session, or a session, has ended.
    pub(super) fn note_closed(&mut self, reason: CloseReason) {
        self.last_closed = Some(reason);
        self.counters.faults += u64::from(reason.is_fault());
        self.counters.refused += u64::from(reason == CloseReason::NoFrames);
    }
}
