//! Requests that wait for frames, and their execution when their turn comes.

use byway_fabric::{Fabric, SessionId};
use byway_reactor::Reactor;
use byway_rpc::session::CallRef;

use super::super::engine::{Step, VolumeId, WriteFlags};
use super::super::error::BlockError;
use super::requests::{BlockRequest, BlockRequestId, Read, Write};
use super::writes::Pulled;
use super::{ServerContext, Volumes};
use crate::host::{Feeds, Line, Sessions, Tried, feed};

/// Something that waits for frames.
#[derive(Debug)]
pub(super) enum Queued {
    Read(Read),
    Small { call: CallRef, volume: VolumeId, offset: u64, bytes: Box<[u8]>, durable: bool },
    Pull(BlockRequestId),
}

/// One of the two lines.
struct Feeding<'a, 'b> {
    server: &'a mut ServerContext<'b>,
    pulls: bool,
}

impl Volumes {
    fn line(&mut self, pulls: bool) -> &mut Line<Queued> {
        if pulls { &mut self.pulls } else { &mut self.requests }
    }

    /// Whether something waits for frames.
    pub(super) fn is_waited(&self) -> bool {
        !(self.requests.is_empty() && self.pulls.is_empty())
    }

    /// A session has ended: nothing of it is begun any more.
    pub(super) fn leave(&mut self, sessions: &mut Sessions, session: SessionId) {
        for pulls in [false, true] {
            for queued in self.line(pulls).leave(session) {
                self.forget(sessions, queued);
            }
        }
    }

    /// Something that waited is no longer wanted.
    fn forget(&mut self, sessions: &mut Sessions, queued: Queued) {
        match queued {
            Queued::Read(_) => {}
            Queued::Small { bytes, .. } => self.waiting_bytes -= bytes.len(),
            Queued::Pull(write) => {
                let Some(BlockRequest::Write(state)) = self.in_flight.get_mut(write) else { return };
                // What was asked for will end; the rest never was.
                state.left -= state.len - state.asked;
                state.asked = state.len;
                // What was asked for may still be written, and is no success.
                state.error.get_or_insert(BlockError::Closed.into());
                let (session, left) = (state.call.session, state.left);
                if left == 0 {
                    self.in_flight.remove(write);
                    sessions.forget_request(session);
                }
            }
        }
    }
}

impl ServerContext<'_> {
    /// Reads, now or when it is its turn and there are frames.
    pub(super) fn read(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, read: Read) {
        let session = read.call.session;
        let free = self.core.requests.is_empty() && !self.sessions.must_wait(fabric, reactor, session);
        if !free || !self.try_read(fabric, reactor, read) {
            self.wait(reactor, session, Queued::Read(read));
        }
    }

    /// Puts something at the end of its session's queue.
    pub(super) fn wait(&mut self, reactor: &Reactor, slot: SessionId, queued: Queued) {
        if !self.sessions.is_up(slot) {
            return self.core.forget(self.sessions, queued);
        }
        self.core.line(matches!(queued, Queued::Pull(_))).push(reactor, slot, queued);
    }

    /// Gives those that wait their turns, as long as there are frames.
    pub(super) fn feed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        if !self.core.is_waited() {
            return;
        }
        self.core.pulls_first = !self.core.pulls_first;
        for pulls in [self.core.pulls_first, !self.core.pulls_first] {
            feed(&mut Feeding { server: self, pulls }, fabric, reactor);
        }
        // Not before: what is tried in vain gives frames back too.
        self.core.given_back = reactor.frames().given_back();
    }

    fn volume_of(&self, queued: &Queued) -> Option<VolumeId> {
        match queued {
            Queued::Read(Read { volume, .. }) | Queued::Small { volume, .. } => Some(*volume),
            Queued::Pull(write) => match self.core.in_flight.get(*write) {
                Some(BlockRequest::Write(write)) => Some(write.volume),
                _ => None,
            },
        }
    }

    /// Tries something that waited; gives it back if there was no frame for it.
    fn try_queued(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, queued: Queued) -> Tried<Queued> {
        match queued {
            Queued::Read(read) if self.try_read(fabric, reactor, read) => Tried::All(read.len as u64),
            Queued::Read(read) => Tried::NoFrames(Queued::Read(read)),
            Queued::Pull(write) => match self.pull_piece(fabric, reactor, write) {
                Pulled::Piece(len) => match self.core.in_flight.get(write) {
                    Some(BlockRequest::Write(Write { asked, len: all, .. })) if asked < all => {
                        Tried::Part(len as u64, Queued::Pull(write))
                    }
                    _ => Tried::All(len as u64),
                },
                Pulled::All => Tried::All(0),
                Pulled::Nothing => Tried::NoFrames(Queued::Pull(write)),
            },
            Queued::Small { call, volume, offset, bytes, durable } => {
                let request = self.start_request(call.session, BlockRequest::Plain(call));
                let tag = self.core.tag(request);
                let step = self.engine.write_small(reactor, volume, offset, &bytes, WriteFlags { durable }, tag);
                if matches!(step, Ok(Step::Busy)) {
                    self.end_request(fabric, call.session, request);
                    return Tried::NoFrames(Queued::Small { call, volume, offset, bytes, durable });
                }
                self.core.waiting_bytes -= bytes.len();
                self.first_step(fabric, call, request, &step);
                Tried::All(bytes.len() as u64)
            }
        }
    }
}

impl Feeds<Queued> for Feeding<'_, '_> {
    fn line(&mut self) -> &mut Line<Queued> {
        self.server.core.line(self.pulls)
    }

    fn sessions(&self) -> &Sessions {
        self.server.sessions
    }

    fn try_one(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, queued: Queued) -> Tried<Queued> {
        match self.server.try_queued(fabric, reactor, queued) {
            // Its volume has had its bytes for now.
            Tried::NoFrames(queued) => {
                let volume = self.server.volume_of(&queued);
                let throttled = volume.is_some_and(|volume| self.server.engine.is_throttled(reactor, volume));
                if throttled { Tried::Waits(queued) } else { Tried::NoFrames(queued) }
            }
            tried => tried,
        }
    }
}
