//! Measurements of sessions: see [`feedback`](crate::feedback).

use std::time::Duration;

use byway_reactor::{Instant, PathState, Reactor};

use super::lane::LaneId;
use super::{Fabric, Role};
use crate::feedback::{Delays, Feedback, Stall};
use crate::rdma::transport::Went;
use crate::slots::SessionId;

impl Fabric {
    /// What a session's transfers were like until now, and what waits; `None` if it is not up. A walk over its lanes, no system call.
    pub fn feedback(&self, reactor: &Reactor, session: SessionId) -> Option<Feedback> {
        let state = self.sessions.get(session).filter(|state| state.up && !state.down)?;
        let now = reactor.now();
        let mut feedback = state.meter.read(now);
        for lane in state.lanes.iter().flatten().filter_map(|slot| self.lanes.get(*slot)) {
            feedback.queued_bytes += self.lanes.queued_on(lane) as u64;
            let waiting = self.lanes.oldest_on(lane).map_or(Duration::ZERO, |at| now.since(at));
            feedback.waiting = feedback.waiting.max(waiting);
        }
        Some(feedback)
    }

    /// What the wire says of the path to a session's peer; `None` where it says nothing, as over shared memory. A system
    /// call, for the lane of payloads that has the most to send.
    pub fn path(&self, reactor: &Reactor, session: SessionId) -> Option<PathState> {
        let state = self.sessions.get(session)?;
        let lanes = state.lanes.iter().flatten().filter_map(|slot| self.lanes.get(*slot));
        reactor.path_state(lanes.max_by_key(|lane| (lane.queued(), lane.number))?.socket?)
    }

    /// The delays and stalls of all sessions, also of those that have ended.
    pub fn delays(&self) -> Delays {
        self.delays
    }

    /// The sessions of clients that are up.
    pub fn client_sessions(&self) -> impl Iterator<Item = SessionId> + '_ {
        let up = self.sessions.iter().filter(|(_, state)| state.up && !state.down && state.role == Role::Server);
        up.map(|(slot, _)| slot)
    }

    /// The owner begins a transfer that it could not begin when it was asked: so long it has waited for frames.
    pub fn note_start(&mut self, session: SessionId, waited: Duration) {
        if let Some(state) = self.sessions.get_mut(session) {
            self.delays.note_start(&mut state.meter, waited);
        }
    }

    /// Something of the owner has waited that long.
    pub fn note_stall(&mut self, session: SessionId, stall: Stall, waited: Duration) {
        if let Some(state) = self.sessions.get_mut(session) {
            self.delays.note_stall(&mut state.meter, stall, waited);
        }
    }

    /// A send has ended, of which so many bytes were taken.
    pub(super) fn note_sent(&mut self, slot: LaneId, bytes: usize, now: Instant) {
        let Some((session, times)) = self.lanes.get_mut(slot).and_then(|lane| Some((lane.session?, lane.send_times)))
        else {
            return;
        };
        if let Some(state) = self.sessions.get_mut(session) {
            state.meter.sent(bytes, now);
            self.delays.note_sent(&mut state.meter, now.since(times.queued), now.since(times.begun));
        }
    }

    /// The peer of an RDMA connection has received more bytes: see [`Went`].
    pub(super) fn note_went(&mut self, slot: LaneId, went: Option<Went>, now: Instant) {
        let session = self.lanes.get(slot).and_then(|lane| lane.session);
        let state = session.and_then(|session| self.sessions.get_mut(session));
        if let (Some(state), Some(went)) = (state, went) {
            state.meter.sent(went.bytes, now);
            self.delays.note_sent(&mut state.meter, went.waited, went.took);
        }
    }

    /// Bytes of frames that wait on a session's lanes for the peer to take them.
    pub fn queued_frame_bytes(&self, session: SessionId) -> usize {
        let Some(state) = self.sessions.get(session) else { return 0 };
        state.lanes.iter().flatten().filter_map(|slot| self.lanes.get(*slot)).map(super::Lane::queued_frames).sum()
    }
}
