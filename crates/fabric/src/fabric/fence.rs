//! Sessions and connections that wait: a client's new session for the end of its old one, and handshakes for their time.

use byway_reactor::Reactor;

use super::Fabric;
use super::lane::LaneId;
use crate::session::CloseReason;
use crate::wire::{Kind, RefuseCode};

impl Fabric {
    /// Ends sessions whose client has begun a newer one.
    pub(super) fn end_superseded(&mut self, reactor: &mut Reactor) {
        let Some(home) = self.admission.home() else { return };
        for session in self.sessions.superseded(&home.registry) {
            self.close(reactor, session, CloseReason::WeRefused(RefuseCode::Superseded));
        }
    }

    /// Lets those in whose old session has ended.
    pub(super) fn retry_fenced(&mut self, reactor: &mut Reactor) {
        for (slot, header) in self.lanes.take_fenced() {
            if let Err(reason) = self.hello_came(reactor, slot, &header, Kind::Hello) {
                self.lane_failed(reactor, slot, reason);
            }
        }
    }

    /// A lane no longer waits for the end of its client's old session.
    pub(super) fn leave_fence(&mut self, slot: LaneId) {
        if let Some(hello) = self.lanes.get_mut(slot).and_then(|lane| lane.hello.take()) {
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
}
