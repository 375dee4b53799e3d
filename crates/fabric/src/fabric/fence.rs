//! Sessions and connections that wait: a client's new session for the end of its old one, and handshakes for their time.

use byway_reactor::Reactor;

use super::lane::{LaneId, Phase};
use super::{Fabric, Role};
use crate::limits::{FENCE_TIME_MAX, HANDSHAKE_TIME_MAX};
use crate::session::{self, CloseReason};
use crate::wire::{Kind, RefuseCode};

impl Fabric {
    /// Ends sessions whose client has begun a newer one.
    pub(super) fn end_superseded(&mut self, reactor: &mut Reactor) {
        let Some((registry, _)) = self.server.clone() else { return };
        let stale: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, session)| {
                session.role == Role::Server && !session.down && registry.superseded(&session.identity)
            })
            .map(|(slot, _)| slot)
            .collect();
        for session in stale {
            self.close(reactor, session, CloseReason::WeRefused(RefuseCode::Superseded));
        }
    }

    /// Lets those in whose old session has ended.
    pub(super) fn retry_fenced(&mut self, reactor: &mut Reactor) {
        if self.handshakes == 0 {
            return;
        }
        let fenced: Vec<_> = self
            .lanes
            .iter_mut()
            .filter(|(_, lane)| lane.phase == Phase::Fenced)
            .filter_map(|(slot, lane)| {
                lane.phase = Phase::AwaitHello;
                Some((slot, lane.hello.take()?))
            })
            .collect();
        for (slot, header) in fenced {
            if let Err(reason) = self.hello_came(reactor, slot, &header, Kind::Hello) {
                self.lane_failed(reactor, slot, reason);
            }
        }
    }

    /// A lane no longer waits for the end of its client's old session.
    pub(super) fn leave_fence(&mut self, slot: LaneId) {
        let Some(header) = self.lanes.get_mut(slot).and_then(|lane| lane.hello.take()) else { return };
        if let (Some((registry, _)), Ok((hello, identity))) = (&self.server, session::read_hello(&header, Kind::Hello))
            && hello.lane.get() == 0
        {
            registry.stopped_waiting(&identity);
        }
    }

    pub(super) fn end_slow_handshakes(&mut self, reactor: &mut Reactor) {
        if self.handshakes == 0 {
            return;
        }
        let now = reactor.now();
        let slow: Vec<_> = self
            .lanes
            .iter()
            .filter(|(_, lane)| !matches!(lane.phase, Phase::Up | Phase::Closing))
            .filter(|(_, lane)| {
                let fenced = lane.hello.is_some() && !lane.is_busy() && lane.close_when_sent.is_none();
                now - lane.opened_at >= if fenced { FENCE_TIME_MAX } else { HANDSHAKE_TIME_MAX }
            })
            .map(|(slot, _)| slot)
            .collect();
        for slot in slow {
            let Some(lane) = self.lanes.get_mut(slot) else { continue };
            if lane.close_when_sent.is_some() {
                self.lane_failed(reactor, slot, CloseReason::SlowHandshake);
            } else if lane.hello.is_some() && !lane.is_busy() {
                // Not the client's fault: its old session still has I/O here, that a slow store does not end.
                let peer = lane.socket.and_then(|socket| reactor.peer_address(socket));
                tracing::warn!(?peer, "a client waits for the end of its old session's I/O; its store is slow");
                self.leave_fence(slot);
                self.refuse(slot, RefuseCode::Busy);
            } else {
                self.lane_failed(reactor, slot, CloseReason::SlowHandshake);
            }
        }
    }
}
