//! The number of receives: those reserved for peers must exist, also if a device loses some.
//!
//! A device may lose the receive that a message had begun to fill when its connection ended. soft-RoCE does so at every kind
//! of end, so a peer can cause it at will. The receive never completes, and its memory returns only with the whole queue. A
//! lost receive must not count as a reserved one. So one receive is *doubted* for each connection that ends: it does not
//! count, and the next connection, or the next message whose memory returns, has another posted in its place.
//!
//! Most doubts are unfounded, and without an end to them a peer that reconnects again and again would fill the queue. A
//! message that began after a connection had ended settles its doubt. Receives are taken in the order of posting, so a
//! receive lost before is older than that message's, and the lost ones are at most as many as the older ones that are still
//! at the device. A message is known to have begun later if it came on a later queue pair, or is not the first to complete
//! on an older one, because a queue pair takes one message after the other.
//!
//! So the posted receives are the reserved ones, the lost ones, and one for each connection that ended since messages
//! arrived, together at most the room of the queue. A peer that loses receives on purpose can fill that room: then no
//! further connections are accepted until all have ended, and existing ones keep their receives.
//!
//! This module calls no verbs, so that its tests need no device.

use std::collections::BTreeSet;

use crate::limits::RDMA_RECEIVES;

/// How many connections had ended at some moment.
pub(super) type Epoch = u64;

#[derive(Debug)]
pub(super) struct RecvCredits {
    /// Receives that the queue has room for.
    max: u32,
    /// Receives that connections have reserved.
    reserved: u32,
    /// Those whose memory is out: posted, lost, or held while their message is handled.
    out: u32,
    /// The number of the next receive to be posted.
    next: u64,
    /// Numbers of the receives that were posted and have not completed.
    posted: BTreeSet<u64>,
    /// Connections that have ended.
    ended: Epoch,
    /// How many of these have no doubt left.
    settled: Epoch,
    /// Receives that those may have lost together.
    lost: u32,
}

impl RecvCredits {
    pub(super) const fn new(max: u32) -> Self {
        Self { max, reserved: 0, out: 0, next: 0, posted: BTreeSet::new(), ended: 0, settled: 0, lost: 0 }
    }

    /// Receives that may be lost.
    pub(super) fn doubted(&self) -> u32 {
        // At most one for each ended connection, and not more than are in use.
        let fresh = u32::try_from(self.ended - self.settled).unwrap_or(u32::MAX);
        self.lost.saturating_add(fresh).min(self.out)
    }

    /// Receives that are certainly not lost.
    fn existing(&self) -> u32 {
        self.out - self.doubted()
    }

    /// Receives to post before one more connection can be accepted. None if the queue has no room for them.
    pub(super) fn lacking(&self) -> Option<u32> {
        let lacking = (self.reserved + RDMA_RECEIVES).saturating_sub(self.existing());
        (self.reserved + RDMA_RECEIVES <= self.max && lacking <= self.max - self.out).then_some(lacking)
    }

    /// Reserves the receives of one more connection.
    pub(super) fn reserve(&mut self) {
        self.reserved += RDMA_RECEIVES;
    }

    /// Gives back the receives of a connection that has ended. True if it was the last.
    pub(super) fn release(&mut self) -> bool {
        self.reserved -= RDMA_RECEIVES;
        self.reserved == 0
    }

    /// Takes the number under which a receive is posted.
    pub(super) fn post(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.out += 1;
        self.posted.insert(number);
        number
    }

    /// The memory of a receive is in the pool again: the device did not take it, or the queue has ended.
    pub(super) fn drop_posted(&mut self, number: u64) {
        if self.posted.remove(&number) {
            self.out -= 1;
        }
    }

    /// The memory of a message is free. True if it is needed and must be posted again.
    pub(super) fn take_back(&mut self) -> bool {
        let is_needed = self.existing() <= self.reserved;
        self.out -= 1;
        is_needed
    }

    /// A receive has completed. Its message, if it has one, began after `begun` connections had ended.
    pub(super) fn complete(&mut self, number: u64, begun: Option<Epoch>) {
        self.posted.remove(&number);
        let Some(begun) = begun.filter(|begun| *begun > self.settled) else { return };
        let fresh = u32::try_from(begun - self.settled).unwrap_or(u32::MAX);
        // Once for each connection that ended, at most.
        let overtaken = self.posted.range(..number).count() as u32;
        self.lost = self.lost.saturating_add(fresh).min(overtaken);
        self.settled = begun;
    }

    /// A queue pair has ended, with all its completions seen.
    pub(super) fn end(&mut self) {
        self.ended += 1;
    }

    /// How many queue pairs have ended.
    pub(super) const fn epoch(&self) -> Epoch {
        self.ended
    }

    /// The queue has ended and all of its memory is free: nothing is lost any more.
    pub(super) fn forget(&mut self) {
        (self.settled, self.lost) = (self.ended, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    /// A device that takes receives in their order and loses those that its connections had begun to fill.
    struct Rig {
        credits: RecvCredits,
        queue: VecDeque<u64>,
        /// What each connection fills, and as of when it is told to have begun.
        connections: HashMap<u32, (Option<u64>, Epoch)>,
        lost: u32,
        next: u32,
    }

    impl Rig {
        fn new(max: u32) -> Self {
            let (queue, connections) = Default::default();
            Self { credits: RecvCredits::new(max), queue, connections, lost: 0, next: 0 }
        }

        fn connect(&mut self) -> Option<u32> {
            for _ in 0..self.credits.lacking()? {
                self.queue.push_back(self.credits.post());
            }
            self.credits.reserve();
            self.next += 1;
            self.connections.insert(self.next, (None, self.credits.epoch()));
            Some(self.next)
        }

        fn begin(&mut self, connection: u32) {
            let (filled, _) = self.connections.get_mut(&connection).unwrap();
            if filled.is_none() {
                *filled = Some(self.queue.pop_front().expect("a receive is posted"));
            }
        }

        /// A message comes whole, and is dealt with.
        fn message(&mut self, connection: u32) {
            self.begin(connection);
            let (filled, epoch) = self.connections.get_mut(&connection).unwrap();
            let begun = std::mem::replace(epoch, self.credits.epoch());
            self.credits.complete(filled.take().unwrap(), Some(begun));
            if self.credits.take_back() {
                self.queue.push_back(self.credits.post());
            }
        }

        fn end(&mut self, connection: u32) {
            let (filled, _) = self.connections.remove(&connection).unwrap();
            self.lost += u32::from(filled.is_some());
            self.credits.end();
            if self.credits.release() {
                self.queue.clear();
                for number in std::mem::take(&mut self.credits.posted) {
                    self.credits.posted.insert(number);
                    self.credits.drop_posted(number);
                }
                self.credits.forget();
                self.lost = 0;
            }
        }

        /// There must be a receive for each message that a peer may send.
        fn check(&self) {
            let begun = self.connections.values().filter(|(filled, _)| filled.is_some()).count();
            let there = self.queue.len() + begun;
            assert!(there >= self.connections.len() * RDMA_RECEIVES as usize, "{self:?}");
            assert!(self.credits.out <= self.credits.max, "{self:?}");
        }
    }

    impl std::fmt::Debug for Rig {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let RecvCredits { reserved, out, ended, settled, lost, .. } = &self.credits;
            write!(f, "queue {}, lost {}; {reserved} of {out}, {ended}, {settled}, {lost}", self.queue.len(), self.lost)
        }
    }

    #[test]
    fn what_is_lost_is_posted_anew_while_somebody_stays() {
        let mut rig = Rig::new(400);
        let stays = rig.connect().unwrap();
        for round in 0..200 {
            let killed = rig.connect().unwrap();
            rig.begin(killed);
            rig.end(killed);
            rig.message(stays);
            rig.check();
            assert!(rig.credits.out <= 3 * RDMA_RECEIVES + round + 1, "{rig:?}");
        }
        rig.end(stays);
        assert_eq!((rig.credits.out, rig.credits.doubted()), (0, 0), "{rig:?}");
    }

    #[test]
    fn what_was_not_lost_is_not_posted_for_ever() {
        // The one that stays says nothing; those that come and go say little, but go cleanly.
        for messages in [1, 2, 20] {
            let mut rig = Rig::new(100);
            rig.connect().unwrap();
            for _ in 0..1000 {
                let other = rig.connect().expect("there is room");
                (0..messages).for_each(|_| rig.message(other));
                rig.end(other);
                rig.check();
            }
            assert!(rig.credits.out <= 3 * RDMA_RECEIVES, "{rig:?}");
        }
    }

    #[test]
    fn those_who_say_nothing_are_doubted_until_somebody_does() {
        let mut rig = Rig::new(100);
        let stays = rig.connect().unwrap();
        for _ in 0..1000 {
            let Some(silent) = rig.connect() else { break };
            rig.end(silent);
            rig.check();
        }
        assert!(rig.connect().is_none(), "each may have lost one: {rig:?}");
        // The first may have begun before they ended.
        rig.message(stays);
        rig.message(stays);
        assert_eq!(rig.credits.doubted(), 0);
        assert!(rig.connect().is_some(), "{rig:?}");
    }

    #[test]
    fn who_loses_all_there_are_keeps_out_others_and_takes_nothing_from_those_who_are_there() {
        let mut rig = Rig::new(100);
        let stays = rig.connect().unwrap();
        while let Some(killed) = rig.connect() {
            rig.message(killed);
            rig.begin(killed);
            rig.end(killed);
            rig.check();
        }
        assert_eq!(rig.lost, 100 - 2 * RDMA_RECEIVES + 1, "{rig:?}");
        (0..1000).for_each(|_| rig.message(stays));
        rig.check();
        rig.end(stays);
        assert!(rig.connect().is_some(), "the queue was given up with the last");
    }

    proptest! {
        #[test]
        fn there_is_a_receive_for_whatever_a_peer_may_send(
            steps in proptest::collection::vec((0u8..8, any::<prop::sample::Index>()), 0..600),
        ) {
            let mut rig = Rig::new(300);
            for (what, which) in steps {
                let mut all: Vec<u32> = rig.connections.keys().copied().collect();
                all.sort_unstable();
                match (what, all.is_empty()) {
                    (0 | 1, _) | (_, true) => drop(rig.connect()),
                    (2, false) => rig.end(*which.get(&all)),
                    (3, false) => rig.begin(*which.get(&all)),
                    (_, false) => rig.message(*which.get(&all)),
                }
                rig.check();
                prop_assert!(rig.credits.doubted() >= rig.lost, "{rig:?}");
            }
        }
    }
}
