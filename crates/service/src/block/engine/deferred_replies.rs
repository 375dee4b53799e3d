//! Success replies that are held until every concurrent fdatasync has returned.
//!
//! When bytes are lost, the kernel reports it to one of the syncs over an open file description; the others succeed. So a reply that
//! promises durability waits for the syncs over the same description that were in flight when its own sync ended, on any loop: one of
//! them may have the error, and not have been reaped yet (docs/decisions/0030). It does not wait for syncs that begin later.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Op, Reactor, Token};

use super::{Done, ENGINE_CLASS, Engine, VolumeId};
use crate::block::sync_tracker::{Description, Mark, SyncOwner};

/// The tag of the timer that polls for the ends of other loops' syncs.
pub(super) const TAG_POLL_SYNCS: u8 = 1;
/// The timer's first and longest period. It doubles each time, so that a wait is at most about doubled and long waits cost
/// little.
const POLL_MIN: Duration = Duration::from_micros(20);
/// See [`POLL_MIN`].
const POLL_MAX: Duration = Duration::from_millis(2);

/// The deferred replies of one volume on one loop.
pub(super) struct DeferredReplies {
    /// Requests that succeeded, in order, by the description whose syncs they wait for and the newest of these syncs.
    answers: BTreeMap<Description, VecDeque<(Mark, usize)>>,
    pub(super) owner: SyncOwner,
    /// Whether the timer is set.
    is_polling: bool,
    /// The timer's next period.
    pause: Duration,
}

/// The state of the first of some replies.
enum Front {
    /// The request's reply can be sent.
    Clear(usize),
    /// It waits for another description now, for a sync of this loop or another.
    Moved { by_other: bool },
    /// It still waits.
    Waits { by_other: bool },
}

impl DeferredReplies {
    pub(super) fn new(owner: SyncOwner) -> Self {
        Self { answers: BTreeMap::new(), owner, is_polling: false, pause: POLL_MIN }
    }
}

impl Engine {
    /// Keeps a request that has ended if its answer must wait; [`Engine::release`] is to be asked next.
    pub(super) fn hold_back(&mut self, at: usize) -> bool {
        let io = &self.in_flight[at];
        if !io.says_durable() || seeded::is(Bug::AnswersNotHeld) {
            return false;
        }
        let attached = &mut self.volumes[io.volume.index as usize];
        if !attached.volume.syncs_can_fail() {
            return false;
        }
        let tracker = attached.volume.sync_tracker();
        if tracker.flush_failed() {
            return false;
        }
        let mark = tracker.mark();
        let Some((on, _)) = tracker.under_way_at(mark, io.synced.iter().copied()) else { return false };
        attached.deferred.answers.entry(on).or_default().push_back((mark, at));
        true
    }

    /// Answers what need not wait any longer.
    pub(super) fn release(&mut self, reactor: &mut Reactor, id: VolumeId, done: &mut Vec<Done>) {
        let Some(attached) = self.attached_mut(id).filter(|attached| !attached.deferred.answers.is_empty()) else {
            return;
        };
        let descriptions: Vec<Description> = attached.deferred.answers.keys().copied().collect();
        let mut waits_for_others = false;
        for on in descriptions {
            while let Some(next) = self.poll_front(id, on) {
                match next {
                    Front::Clear(at) => self.answer(reactor, at, done),
                    Front::Moved { by_other } => waits_for_others |= by_other,
                    Front::Waits { by_other } => {
                        waits_for_others |= by_other;
                        break;
                    }
                }
            }
        }
        if waits_for_others {
            self.poll_later(reactor, id);
        }
    }

    /// What becomes of the first of the answers that wait for syncs on a description. None if there is none.
    fn poll_front(&mut self, id: VolumeId, on: Description) -> Option<Front> {
        let attached = self.volumes.get_mut(id.index as usize).filter(|a| a.generation == id.generation)?;
        let DeferredReplies { answers, owner: own, pause, .. } = &mut attached.deferred;
        let Some((mark, at)) = answers.get(&on)?.front().copied() else {
            answers.remove(&on);
            return None;
        };
        // Those before it in the order are clear by now.
        let left = self.in_flight[at].synced.iter().copied().filter(|other| *other >= on);
        let Some((next, owner)) = attached.volume.sync_tracker().under_way_at(mark, left) else {
            answers.get_mut(&on)?.pop_front();
            *pause = POLL_MIN;
            return Some(Front::Clear(at));
        };
        // The end of one of its own asks again.
        let by_other = owner != *own;
        if next == on {
            return Some(Front::Waits { by_other });
        }
        answers.get_mut(&on)?.pop_front();
        let queue = answers.entry(next).or_default();
        queue.insert(queue.partition_point(|(other, _)| *other <= mark), (mark, at));
        Some(Front::Moved { by_other })
    }

    fn poll_later(&mut self, reactor: &mut Reactor, id: VolumeId) {
        let Some(attached) = self.attached_mut(id) else { return };
        let deferred = &mut attached.deferred;
        if !std::mem::replace(&mut deferred.is_polling, true) {
            let at = reactor.now() + deferred.pause;
            deferred.pause = (deferred.pause * 2).min(POLL_MAX);
            reactor.submit(Op::Timer { at }, Token::new(ENGINE_CLASS, TAG_POLL_SYNCS, id.index, id.generation));
        }
    }

    /// The timer is due.
    pub(super) fn poll_syncs(&mut self, reactor: &mut Reactor, token: Token, done: &mut Vec<Done>) {
        let index = token.index();
        let Some(generation) = self.volumes.get(index as usize).map(|attached| attached.generation) else { return };
        let id = VolumeId { index, generation };
        // The volume that it was set for may be gone, with all its answers.
        if Token::new(ENGINE_CLASS, TAG_POLL_SYNCS, index, generation) != token {
            return;
        }
        if let Some(attached) = self.attached_mut(id) {
            attached.deferred.is_polling = false;
        }
        self.release(reactor, id, done);
    }
}
