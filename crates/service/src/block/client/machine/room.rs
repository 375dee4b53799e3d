//! Room for changes in the log after the client's own flush has failed.
//!
//! The client then keeps its log: the server may have lost the logged writes, and the client repeats them in the next epoch,
//! once an operator has had the volume's files reopened. Until then no flush shortens the log, so changes wait at the bound.
//! They wait for `lost_after`, as for a server that is gone; then they fail, and so does each later change. The log stays,
//! reads continue, and in the next epoch changes are accepted again.

use byway_reactor::Instant;

use super::super::super::wire::CallError;
use super::super::request::{Done, VolumeError};
use super::{Duration, Machine, Purpose};

/// How often a client whose changes wait looks at the time. The driver has one timer for this and for pauses, which are not
/// to wait long behind it.
const LOOK: Duration = Duration::from_millis(50);

/// What is known of the log's bound in the current epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// The client flushes when its log is half full.
    ByFlush,
    /// Its flush failed, and changes wait at the bound.
    Awaited {
        error: CallError,
        /// When the first change began to wait.
        since: Option<Instant>,
    },
    /// A change has waited for too long: changes fail.
    Refused(CallError),
}

impl<R, W: Clone> Machine<R, W> {
    pub(super) fn log_is_full(&self) -> bool {
        self.log_bytes >= self.bounds.unflushed_bytes_max
    }

    /// Whether the client is to flush by itself.
    pub(super) fn wants_flush(&self) -> bool {
        self.room == Room::ByFlush
            && !self.own_flush
            && self.log_bytes * 2 >= self.bounds.unflushed_bytes_max
            && self.flushing.is_empty()
    }

    /// When the loop is to turn again, since no completion tells of what happens: a change waits for room, or has failed
    /// without being sent.
    pub(super) fn looks_for_room_at(&self, now: Instant) -> Option<Instant> {
        let looks = match self.room {
            Room::ByFlush => false,
            Room::Awaited { since, .. } => since.is_some(),
            Room::Refused(_) => !self.done.is_empty(),
        };
        looks.then(|| now + LOOK)
    }

    /// Ends the changes at the head of the queue that have waited for room too long.
    pub(super) fn end_changes_without_room(&mut self, now: Instant) {
        while self.log_is_full()
            && let Some(id) = self.queue.front().copied()
            && self.operations.get(id).is_some_and(|operation| operation.kind.changes())
        {
            match &mut self.room {
                Room::ByFlush => return,
                Room::Awaited { error, since } => {
                    if now - *since.get_or_insert(now) < self.bounds.lost_after {
                        return;
                    }
                    self.room = Room::Refused(*error);
                }
                Room::Refused(error) => {
                    let error = VolumeError::FlushFailed(*error);
                    self.queue.pop_front();
                    if let Some(operation) = self.operations.remove(id)
                        && let Purpose::User(tag) = operation.purpose
                    {
                        self.done.push(Done { tag, result: Err(error), buffer: operation.into });
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::error::BlockError;
    use super::super::super::request::{Answer, Bounds, Request};
    use super::super::{Kind, ServerEpoch};
    use super::*;

    const SECTORS: u64 = 12;
    const BOUNDS: Bounds =
        Bounds { requests_max: 64, unflushed_bytes_max: SECTORS as usize * 4096, lost_after: Duration::from_secs(10) };
    const FIRST: ServerEpoch = ServerEpoch { instance: 1, store: 1 };

    /// A client whose own flush has failed, with as many changes as it keeps and one more, of tag `SECTORS`.
    fn without_room() -> Machine<(), ()> {
        let at = Instant::from_nanos(0);
        let mut machine: Machine<(), ()> = Machine::new(BOUNDS, at);
        machine.connected(FIRST, 1, false);
        for tag in 0..=SECTORS {
            let request = Request::Write { offset: tag * 4096, len: 4096, from: (), durable: false };
            machine.submit(request, tag).unwrap();
            while let Some(id) = machine.next(at) {
                let own = !machine.operation(id).unwrap().is_users();
                let result = if own { Err(BlockError::FlushFailed.into()) } else { Ok(Answer::Unit) };
                machine.complete(id, result, at);
            }
        }
        let mut done = Vec::new();
        machine.reap(&mut done);
        assert_eq!((done.len() as u64, machine.failed()), (SECTORS, None), "the last one waits");
        assert_eq!(machine.unflushed_bytes(), BOUNDS.unflushed_bytes_max);
        machine
    }

    #[test]
    fn after_a_failed_flush_of_its_own_changes_wait_until_the_volume_is_opened_anew() {
        let at = Instant::from_nanos(0);
        let mut machine = without_room();
        assert!(machine.paused_until(at).is_some(), "it is to look at the time, though nothing is in flight");
        machine.disconnected(at);
        machine.connected(FIRST, 1, false);
        assert_eq!(machine.next(at), None, "the same files: no flush works there");
        machine.disconnected(at);
        machine.connected(ServerEpoch { store: 2, ..FIRST }, 1, false);
        let mut sent = Vec::new();
        while let Some(id) = machine.next(at) {
            let operation = machine.operation(id).unwrap();
            sent.push((operation.kind, operation.offset / 4096));
            machine.complete(id, Ok(Answer::Unit), at);
        }
        let again = (0..SECTORS).map(|sector| (Kind::Write { durable: false }, sector));
        let then = [(Kind::Flush, 0), (Kind::Write { durable: false }, SECTORS)];
        assert_eq!(sent, again.chain(then).collect::<Vec<_>>(), "all is sent again and flushed, then there is room");
        assert_eq!((machine.failed(), machine.pending()), (None, 1));
    }

    #[test]
    fn changes_that_wait_too_long_for_a_flush_fail_and_nothing_else_does() {
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let mut machine = without_room();
        machine.submit(Request::Read { offset: 0, len: 4096, into: () }, 100).unwrap();
        assert_eq!(machine.next(at(9_999)), None);
        let read = machine.next(at(10_000)).expect("it waited behind the change");
        machine.complete(read, Ok(Answer::Unit), at(10_000));
        machine.submit(Request::Trim { offset: 0, len: 4096, durable: false }, 101).unwrap();
        assert_eq!(machine.next(at(10_000)), None);
        assert!(machine.paused_until(at(10_000)).is_some(), "nothing is in flight, and there are answers to take");
        let mut done = Vec::new();
        machine.reap(&mut done);
        let ended: Vec<_> = done.into_iter().map(|done| (done.tag, done.result)).collect();
        let failed = Err(VolumeError::FlushFailed(BlockError::FlushFailed.into()));
        assert_eq!(
            ended,
            [(SECTORS, failed.clone()), (100, Ok(Answer::Unit)), (101, failed)],
            "the trim fails at once"
        );
        assert_eq!(machine.paused_until(at(10_000)), None);
        assert_eq!(
            (machine.failed(), machine.unflushed_bytes()),
            (None, BOUNDS.unflushed_bytes_max),
            "what is kept stays"
        );
        machine.disconnected(at(10_000));
        machine.connected(ServerEpoch { store: 2, ..FIRST }, 1, false);
        machine.submit(Request::Trim { offset: 0, len: 4096, durable: false }, 102).unwrap();
        while let Some(id) = machine.next(at(10_000)) {
            machine.complete(id, Ok(Answer::Unit), at(10_000));
        }
        let mut done = Vec::new();
        machine.reap(&mut done);
        assert_eq!((done.len(), done[0].result.clone()), (1, Ok(Answer::Unit)), "changes are taken again");
    }

    /// The flush was refused, and nothing is lost by that.
    #[test]
    fn a_flush_that_succeeds_after_one_that_failed_makes_room() {
        let at = Instant::from_nanos(0);
        let mut machine = without_room();
        assert!(machine.cancel(SECTORS), "the change that waits");
        machine.submit(Request::Flush, 100).unwrap();
        let flush = machine.next(at).unwrap();
        machine.complete(flush, Ok(Answer::Unit), at);
        assert_eq!((machine.unflushed_bytes(), machine.paused_until(at)), (0, None));
    }
}
