//! What waits for frames, and who gets them.
//!
//! Two rings, since two things can be short: reads and small writes wait for frames, large writes for the share of the pool
//! that pulls may have. Each is fair between sessions by bytes ([`Deficit`]), and the two take turns at being fed first.
//! What comes while others wait in its ring goes to its end, also if there would be frames for it: else small requests
//! would go past a large one for ever.
//!
//! A session may not take all frames either, by asking for much and then taking it slowly: it gets more only while what it
//! holds (at the stores, and in answers that it has not taken) is no more than what is free. So one session gets half of
//! the pool at most, two a third each, and there is always something left for those who come. This is the dynamic
//! threshold of shared-memory switches (Choudhury and Hahne, 1998). Whoever is over it has something under way, whose end
//! feeds the rings again.

use byway_fabric::{Fabric, Slot};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Instant, Reactor};
use byway_rpc::session::CallRef;

use super::super::engine::{Step, VolumeId, WriteFlags};
use super::jobs::{Job, Read, Write};
use super::writes::Pulled;
use super::{Core, Deficit, Serving};

/// Something that waits for frames.
#[derive(Debug)]
pub(super) enum Queued {
    Read(Read),
    Small { call: CallRef, volume: VolumeId, offset: u64, bytes: Box<[u8]>, durable: bool },
    Pull(Slot),
}

/// It, and since when.
#[derive(Debug)]
pub(super) struct Waiting {
    queued: Queued,
    since: Instant,
    /// Some of it was begun.
    begun: bool,
}

/// What became of something whose turn it was.
enum Tried {
    /// So many bytes of it were begun, and that was all.
    All(u64),
    /// So many bytes of it were begun; there is more.
    Part(u64, Queued),
    /// There are no frames.
    Nothing(Queued),
}

impl Core {
    fn ring(&mut self, pulls: bool) -> &mut Deficit<Waiting> {
        if pulls { &mut self.pulls } else { &mut self.requests }
    }

    /// A session has ended: nothing of it is begun any more.
    pub(super) fn leave(&mut self, session: Slot) {
        for pulls in [false, true] {
            for waiting in self.ring(pulls).leave(session.index as usize) {
                self.forget(waiting.queued);
            }
        }
    }

    /// Something that waited is no longer wanted.
    fn forget(&mut self, queued: Queued) {
        match queued {
            Queued::Read(_) => {}
            Queued::Small { bytes, .. } => self.waiting_bytes -= bytes.len(),
            Queued::Pull(write) => {
                let Some(Job::Write(state)) = self.jobs.get_mut(write) else { return };
                // What was asked for will end; the rest never was.
                state.left -= state.len - state.asked;
                state.asked = state.len;
                let (session, left) = (state.call.session, state.left);
                if left == 0 {
                    self.jobs.remove(write);
                    if let Some(session) = self.session(session) {
                        session.jobs -= 1;
                    }
                }
            }
        }
    }
}

impl Serving<'_> {
    /// Reads, now or when it is its turn and there are frames.
    pub(super) fn read(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, read: Read) {
        let session = read.call.session;
        let free = self.core.requests.is_empty() && !self.holds_too_much(fabric, reactor, session);
        if !free || !self.try_read(fabric, reactor, read) {
            self.wait(reactor, session, Queued::Read(read));
        }
    }

    /// Puts something at the end of its session's queue.
    pub(super) fn wait(&mut self, reactor: &Reactor, slot: Slot, queued: Queued) {
        if self.core.session(slot).is_none_or(|session| session.down) {
            return self.core.forget(queued);
        }
        let ring = self.core.ring(matches!(queued, Queued::Pull(_)));
        ring.push(slot.index as usize, Waiting { queued, since: reactor.now(), begun: false });
    }

    /// A request of a session holds frames from now on.
    pub(super) fn note_held(&mut self, session: Slot, bytes: usize) {
        if let Some(session) = self.core.session(session) {
            session.held_bytes += bytes;
        }
    }

    /// It does not any more, or an answer does.
    pub(super) fn note_let_go(&mut self, session: Slot, bytes: usize) {
        if let Some(session) = self.core.session(session) {
            session.held_bytes -= bytes;
        }
    }

    /// Whether a session holds more frames than there are free ones.
    pub(super) fn holds_too_much(&mut self, fabric: &Fabric, reactor: &Reactor, slot: Slot) -> bool {
        let held = self.core.session(slot).map_or(0, |session| session.held_bytes);
        let held = held + fabric.queued_frame_bytes(slot);
        held > 0 && held > reactor.frames().free_bytes()
    }

    /// Whether something waits for frames.
    pub(super) fn is_waited(&self) -> bool {
        !(self.core.requests.is_empty() && self.core.pulls.is_empty())
    }

    /// Gives those that wait their turns, as long as there are frames.
    pub(super) fn feed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        if !self.is_waited() {
            return;
        }
        self.core.pulls_first = !self.core.pulls_first;
        let pulls_first = self.core.pulls_first;
        self.feed_ring(fabric, reactor, pulls_first);
        self.feed_ring(fabric, reactor, !pulls_first);
        // Not before: what is tried in vain gives frames back too.
        self.core.given_back = reactor.frames().given_back();
    }

    /// Feeds one ring. Sessions that must wait for something of their own are passed over: those whose volume has had its
    /// bytes for now, and those that hold too much.
    fn feed_ring(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, pulls: bool) {
        let mut passed_over = 0;
        loop {
            let Some((flow, _)) = self.core.ring(pulls).front() else { return };
            let Some(session) = self.core.sessions.get(flow).and_then(Option::as_ref).map(|session| session.slot)
            else {
                debug_assert!(false, "who is gone waits for nothing");
                self.core.ring(pulls).leave(flow);
                continue;
            };
            let holds_too_much = self.holds_too_much(fabric, reactor, session);
            let Some(Waiting { queued, since, begun }) = self.core.ring(pulls).take(flow) else { return };
            let tried = if holds_too_much { Tried::Nothing(queued) } else { self.try_queued(fabric, reactor, queued) };
            if !begun && !matches!(tried, Tried::Nothing(_)) {
                fabric.note_start(session, reactor.now().since(since));
            }
            match tried {
                Tried::All(bytes) => {
                    self.core.ring(pulls).charge(flow, bytes);
                    passed_over = 0;
                }
                Tried::Part(bytes, queued) => {
                    self.core.ring(pulls).put_back(flow, Waiting { queued, since, begun: true });
                    self.core.ring(pulls).charge(flow, bytes);
                    passed_over = 0;
                }
                Tried::Nothing(queued) => {
                    let throttled =
                        self.volume_of(&queued).is_some_and(|volume| self.engine.is_throttled(reactor, volume));
                    self.core.ring(pulls).put_back(flow, Waiting { queued, since, begun });
                    if !holds_too_much && !throttled {
                        if seeded::is(Bug::LostWakeUp) {
                            self.core.ring(pulls).leave(flow);
                        }
                        return;
                    }
                    self.core.ring(pulls).pass_over();
                    passed_over += 1;
                    if passed_over >= self.core.ring(pulls).flows() {
                        return;
                    }
                }
            }
        }
    }

    fn volume_of(&self, queued: &Queued) -> Option<VolumeId> {
        match queued {
            Queued::Read(Read { volume, .. }) | Queued::Small { volume, .. } => Some(*volume),
            Queued::Pull(write) => match self.core.jobs.get(*write) {
                Some(Job::Write(write)) => Some(write.volume),
                _ => None,
            },
        }
    }

    /// Tries something that waited.
    fn try_queued(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, queued: Queued) -> Tried {
        match queued {
            Queued::Read(read) if self.try_read(fabric, reactor, read) => Tried::All(read.len as u64),
            Queued::Read(read) => Tried::Nothing(Queued::Read(read)),
            Queued::Pull(write) => match self.pull_piece(fabric, reactor, write) {
                Pulled::Piece(len) => match self.core.jobs.get(write) {
                    Some(Job::Write(Write { asked, len: all, .. })) if asked < all => {
                        Tried::Part(len as u64, Queued::Pull(write))
                    }
                    _ => Tried::All(len as u64),
                },
                Pulled::All => Tried::All(0),
                Pulled::Nothing => Tried::Nothing(Queued::Pull(write)),
            },
            Queued::Small { call, volume, offset, bytes, durable } => {
                let job = self.start_job(call.session, Job::Plain(call));
                let tag = self.core.tag(job);
                let step = self.engine.write_small(reactor, volume, offset, &bytes, WriteFlags { durable }, tag);
                if matches!(step, Ok(Step::Busy)) {
                    self.end_job(fabric, call.session, job);
                    return Tried::Nothing(Queued::Small { call, volume, offset, bytes, durable });
                }
                self.core.waiting_bytes -= bytes.len();
                self.first_step(fabric, call, job, &step);
                Tried::All(bytes.len() as u64)
            }
        }
    }
}
