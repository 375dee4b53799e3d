//! Which connection posts next.
//!
//! Connections that had to wait, for frames or for room in the device's queues, come first, in the order of their waiting,
//! and each time another of them is at the head, because the resources that became free may suffice for one only. No
//! connection takes the last quarter of the pool for copies of unregistrable memory while such copies of its own are in
//! flight.

use std::collections::{HashSet, VecDeque};

use byway_reactor::FramePool;

use super::ConnectionId;

/// The order of a transport's connections.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Connections that have something to post.
    queue: VecDeque<ConnectionId>,
    /// Those that could not.
    waiting: Vec<ConnectionId>,
}

impl Turns {
    /// It has something to post.
    pub(super) fn add(&mut self, connection: ConnectionId) {
        self.queue.push_back(connection);
    }

    /// It cannot post all that it has.
    pub(super) fn wait(&mut self, connection: ConnectionId) {
        self.waiting.push(connection);
    }

    /// Begins a round, in which waiting connections are tried again.
    pub(super) fn begin(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut order = std::mem::take(&mut self.waiting);
        order.rotate_left(1);
        let mut seen = HashSet::new();
        let all = order.into_iter().chain(std::mem::take(&mut self.queue));
        self.queue = all.filter(|connection| seen.insert(*connection)).collect();
    }

    /// The connection that posts next in this round.
    pub(super) fn next(&mut self) -> Option<ConnectionId> {
        self.queue.pop_front()
    }

    /// Whether no connection has new work to post.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn is_waiting(&self, connection: ConnectionId) -> bool {
        self.waiting.contains(&connection)
    }
}

/// Whether a connection may take frames of the pool for a copy. One with writes in flight gets their frames back
/// and continues then; one without might wait for nothing.
pub(super) fn may_copy(pool: &FramePool, has_writes: bool) -> bool {
    !has_writes || pool.free_bytes() > pool.bytes() / 4
}

#[cfg(test)]
mod tests {
    use byway_reactor::Frame;

    use super::*;

    fn slot(index: u32) -> ConnectionId {
        ConnectionId::new(index, 1)
    }

    fn round(turns: &mut Turns) -> Vec<u32> {
        turns.begin();
        let order: Vec<ConnectionId> = std::iter::from_fn(|| turns.next()).collect();
        order.into_iter().map(|slot| slot.index).collect()
    }

    #[test]
    fn each_of_those_that_wait_is_first_in_its_turn() {
        let mut turns = Turns::default();
        for index in [0, 1, 2] {
            turns.add(slot(index));
        }
        let mut order = round(&mut turns);
        assert_eq!(order, [0, 1, 2], "first come, first served");
        let mut first = Vec::new();
        for _ in 0..3 {
            for index in &order {
                turns.wait(slot(*index));
            }
            order = round(&mut turns);
            first.push(order[0]);
        }
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2]);
    }

    #[test]
    fn who_waits_comes_before_who_is_new_and_once() {
        let mut turns = Turns::default();
        for index in [0, 1, 0] {
            turns.wait(slot(index));
        }
        for index in [5, 1, 6] {
            turns.add(slot(index));
        }
        assert!(turns.is_waiting(slot(1)) && !turns.is_waiting(slot(5)));
        assert_eq!(round(&mut turns), [1, 0, 5, 6]);
        assert!(turns.is_empty() && !turns.is_waiting(slot(1)));
    }

    #[test]
    fn the_last_quarter_of_the_pool_is_for_who_has_no_copies_under_way() {
        let pool = FramePool::new(1).unwrap();
        let mut taken: Vec<Frame> = Vec::new();
        while may_copy(&pool, true) {
            taken.push(pool.alloc(4096).expect("more than a quarter is free"));
        }
        assert!(pool.free_bytes() > 0 && pool.free_bytes() <= pool.bytes() / 4);
        assert!(may_copy(&pool, false));
        taken.pop();
        assert!(may_copy(&pool, true));
    }
}
