//! Good answers that are held back.
//!
//! The kernel tells one of the syncs of an open file that bytes were lost, and the others that all is well. So who says
//! that bytes are durable waits for the syncs that were under way when its own had ended, on any loop: one of them may
//! have been told, though nobody has looked yet (docs/decisions/0030). It does not wait for those that begin later.

use std::collections::VecDeque;
use std::time::Duration;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Op, Reactor, Token};

use super::{Done, ENGINE_CLASS, Engine, VolumeId};
use crate::block::health::{Mark, Place};

/// The tag of the timer that looks for the ends of other loops' syncs.
pub(super) const TAG_LOOK: u8 = 1;
/// How soon it looks first, and how late: each time twice as long after, so that a wait is at most about doubled, and long
/// ones cost little.
const LOOK_MIN: Duration = Duration::from_micros(20);
/// See [`LOOK_MIN`].
const LOOK_MAX: Duration = Duration::from_millis(2);

/// Of one volume on one loop.
pub(super) struct Held {
    /// Jobs that have ended well, and what they wait for the ends of: in order.
    answers: VecDeque<(Mark, usize)>,
    pub(super) place: Place,
    /// Whether the timer is set.
    looks: bool,
    /// After which time it looks next.
    pause: Duration,
}

impl Held {
    pub(super) fn new(place: Place) -> Self {
        Self { answers: VecDeque::new(), place, looks: false, pause: LOOK_MIN }
    }
}

impl Engine {
    /// Keeps a job that has ended if its answer must wait; [`Engine::release`] is to be asked next.
    pub(super) fn hold_back(&mut self, at: usize) -> bool {
        let job = &self.jobs[at];
        if !job.says_durable() || seeded::is(Bug::AnswersNotHeld) {
            return false;
        }
        let attached = &mut self.volumes[job.volume.index as usize];
        if !attached.volume.syncs_can_fail() {
            return false;
        }
        let health = attached.volume.health();
        let mark = health.mark();
        if health.flush_failed() || health.under_way_at(mark).is_none() {
            return false;
        }
        attached.held.answers.push_back((mark, at));
        true
    }

    /// Answers what need not wait any longer.
    pub(super) fn release(&mut self, reactor: &mut Reactor, id: VolumeId, done: &mut Vec<Done>) {
        while let Some(attached) = self.attached_mut(id) {
            let Some((mark, at)) = attached.held.answers.front().copied() else { return };
            match attached.volume.health().under_way_at(mark) {
                None => {
                    attached.held.answers.pop_front();
                    attached.held.pause = LOOK_MIN;
                    self.answer(reactor, at, done);
                }
                // Its end will ask again.
                Some(place) if place == attached.held.place => return,
                Some(_) => return self.look_later(reactor, id),
            }
        }
    }

    fn look_later(&mut self, reactor: &mut Reactor, id: VolumeId) {
        let Some(attached) = self.attached_mut(id) else { return };
        let held = &mut attached.held;
        if !std::mem::replace(&mut held.looks, true) {
            let at = reactor.now() + held.pause;
            held.pause = (held.pause * 2).min(LOOK_MAX);
            reactor.submit(Op::Timer { at }, Token::new(ENGINE_CLASS, TAG_LOOK, id.index, id.generation));
        }
    }

    /// The timer is due.
    pub(super) fn look(&mut self, reactor: &mut Reactor, token: Token, done: &mut Vec<Done>) {
        let index = token.index();
        let Some(generation) = self.volumes.get(index as usize).map(|attached| attached.generation) else { return };
        let id = VolumeId { index, generation };
        // The volume that it was set for may be gone, with all its answers.
        if Token::new(ENGINE_CLASS, TAG_LOOK, index, generation) != token {
            return;
        }
        if let Some(attached) = self.attached_mut(id) {
            attached.held.looks = false;
        }
        self.release(reactor, id, done);
    }
}
