//! How sessions end: all lanes are closed, operations in flight end, and the owner releases the session.

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Instant, Reactor};

use super::inbound::LentFrame;
use super::lane::{Lane, LaneId};
use super::sessions::{Role, Session, Sessions};
use super::{EndedGet, Fabric, GetError, Handler};
use crate::limits::FAREWELL_TIME_MAX;
use crate::session::{self, CloseReason};
use crate::slots::SessionId;
use crate::windows::{Closed, WindowKey};
use crate::wire::{Kind, RefuseCode};

/// A session that was told goodbye, and that its peer closes.
struct Farewell {
    session: SessionId,
    code: RefuseCode,
    until: Instant,
}

/// The sessions that their peers are to close, and that are closed here at the latest when their time is over.
#[derive(Default)]
pub(super) struct Farewells {
    waiting: Vec<Farewell>,
}

impl Farewells {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn begin(&mut self, now: Instant, session: SessionId, code: RefuseCode) {
        self.waiting.push(Farewell { session, code, until: now + FAREWELL_TIME_MAX });
    }

    /// Takes those that are over, and those whose sessions have ended.
    fn take_due(&mut self, now: Instant, sessions: &Sessions) -> Vec<Farewell> {
        let is_due = |farewell: &mut Farewell| farewell.until <= now || sessions.open(farewell.session).is_none();
        self.waiting.extract_if(.., is_due).collect()
    }
}

impl Fabric {
    /// Ends a session; [`Handler::down`](super::Handler::down) and [`Handler::drained`](super::Handler::drained) follow.
    pub fn close(&mut self, reactor: &mut Reactor, session: SessionId, reason: CloseReason) {
        let Some(lanes) = self.sessions.end(reactor, session, reason) else { return };
        self.tally.note_closed(reason);
        for lane in lanes {
            self.close_lane(reactor, lane);
        }
    }

    /// Says goodbye with `code`, and ends the session when that was sent.
    pub fn say_goodbye(&mut self, reactor: &mut Reactor, session: SessionId, code: RefuseCode) {
        self.send(session, session::refuse(Kind::Goodbye, code));
        let lane = self.sessions.control_lane(session);
        match lane.and_then(|slot| self.lanes.get_mut(slot)) {
            Some(lane) => lane.close_when_sent = Some(CloseReason::WeRefused(code)),
            None => self.close(reactor, session, CloseReason::WeRefused(code)),
        }
    }

    /// Says goodbye with `code`, and has the peer end the session when it has read that. Closed by this end, a lane with unread calls is
    /// reset, and another lane may end first: then the peer does not learn the code. After [`FAREWELL_TIME_MAX`] this end closes all the same.
    pub fn bid_farewell(&mut self, reactor: &Reactor, session: SessionId, code: RefuseCode) {
        self.send(session, session::refuse(Kind::Goodbye, code));
        self.farewells.begin(reactor.now(), session, code);
    }

    /// Closes the sessions whose peers have not done so in time.
    pub(super) fn end_farewells(&mut self, reactor: &mut Reactor) {
        for farewell in self.farewells.take_due(reactor.now(), &self.sessions) {
            self.close(reactor, farewell.session, CloseReason::WeRefused(farewell.code));
        }
    }

    /// All that the owner did for an ended session has ended too: a server's client may start its next one.
    pub fn release(&mut self, session: SessionId) {
        self.sessions.release(session);
        self.forget_if_done(session);
    }

    pub(super) fn forget_if_done(&mut self, session: SessionId) {
        let Some(state) = self.sessions.remove_if_done(session) else { return };
        if state.role == Role::Server {
            self.admission.session_ended(&state.identity);
        }
    }

    /// The lanes of a session are gone: what the peer may still be writing is taken from it, and what was asked for will not come.
    pub(super) fn end_transfers<H: Handler>(&mut self, reactor: &mut Reactor, session: SessionId, handler: &mut H) {
        if let Some(state) = self.sessions.get_mut(session)
            && let Some(shm) = state.wire.shm_mut()
        {
            self.shm_direct.revoke(shm, self.windows.targets_of(session));
            for window in std::mem::take(&mut shm.loans).end(state.peer_disconnected) {
                handler.recalled(self, reactor, session, window);
            }
        }
        if !seeded::is(Bug::PiecesOfTheDead) && self.sessions.get(session).is_some_and(Session::has_gets) {
            for target in self.windows.gets_of(session) {
                self.end_get(reactor, session, target, Err(GetError::Ended), handler);
            }
        }
    }

    /// Ends a get whose frame lies in its window.
    pub(super) fn end_get<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        target: WindowKey,
        result: Result<(), GetError>,
        handler: &mut H,
    ) {
        let context = self.windows.context(target).unwrap_or(0);
        let Closed::Target(frame) = self.windows.close(target) else { return };
        self.sessions.end_get(reactor, session);
        handler.got(self, reactor, session, EndedGet { frame: Some(frame), context, result });
    }

    /// Ends the sessions whose peers were lent memory. To be called before a fabric is dropped that has lent some by
    /// [`Fabric::lend_window`]: dropping takes it back, and a peer that looks at memory which was taken back is told so by the end of
    /// its stream.
    pub fn end_lent(&mut self, reactor: &mut Reactor) {
        for session in self.sessions.lenders() {
            self.close(reactor, session, CloseReason::Closed);
        }
    }

    /// Starts to close a lane; it is gone when what is in flight on it has come back.
    pub(super) fn close_lane(&mut self, reactor: &mut Reactor, slot: LaneId) {
        self.leave_fence(slot);
        if self.lanes.close(reactor, slot) {
            self.take_gots(reactor);
        }
        let payload = self.lanes.get_mut(slot).and_then(Lane::take_paused_payload);
        if let Some(LentFrame { window, frame }) = payload {
            let _ = self.windows.give_back(window, frame);
        }
        self.forget_lane_if_done(slot);
    }

    pub(super) fn forget_lane_if_done(&mut self, slot: LaneId) {
        if let Some(session) = self.lanes.remove_if_done(slot).and_then(|lane| lane.session) {
            self.sessions.remove_lane(session, slot);
        }
    }

    /// A lane broke, and its session with it.
    pub(super) fn lane_failed(&mut self, reactor: &mut Reactor, slot: LaneId, reason: CloseReason) {
        let Some(lane) = self.lanes.get(slot) else { return };
        let session = lane.session;
        if matches!(reason, CloseReason::Tls(_)) {
            // The operator's files are at fault more often than an attacker, so it is said aloud.
            let peer = lane.socket.and_then(|socket| reactor.peer_address(socket));
            tracing::info!(?peer, %reason, "native connection ended");
        }
        if session.is_none() {
            tracing::debug!(%reason, "connection refused");
            self.tally.note_closed(reason);
        }
        self.close_lane(reactor, slot);
        if let Some(session) = session {
            self.close(reactor, session, reason);
        }
    }

    /// Ends sessions whose client has begun a newer one.
    pub(super) fn end_superseded(&mut self, reactor: &mut Reactor) {
        let Some(home) = self.admission.home() else { return };
        for session in self.sessions.superseded(&home.registry) {
            self.close(reactor, session, CloseReason::WeRefused(RefuseCode::Superseded));
        }
    }

    /// A lane no longer waits for the end of its client's old session.
    pub(super) fn leave_fence(&mut self, slot: LaneId) {
        if let Some(hello) = self.lanes.get_mut(slot).and_then(Lane::take_hello) {
            self.admission.stop_waiting(&hello);
        }
    }

    pub(super) fn end_slow_handshakes(&mut self, reactor: &mut Reactor) {
        for slot in self.lanes.slow(reactor.now()) {
            let Some(lane) = self.lanes.get(slot) else { continue };
            if !lane.is_fenced() {
                self.lane_failed(reactor, slot, CloseReason::SlowHandshake);
                continue;
            }
            // Not the client's fault: its old session still has I/O here, that a slow store does not end.
            let peer = lane.socket.and_then(|socket| reactor.peer_address(socket));
            tracing::warn!(?peer, "a client waits for the end of its old session's I/O; its store is slow");
            self.leave_fence(slot);
            self.refuse(slot, RefuseCode::Busy);
        }
    }

    /// Ends the sessions of peers that take nothing.
    pub(super) fn end_stopped(&mut self, reactor: &mut Reactor) {
        for session in self.sessions.stopped(&self.lanes, reactor.now()) {
            self.close(reactor, session, CloseReason::TakesNothing);
        }
    }
}
