//! Which changes of a volume are at its store, on any loop: so that a new client can wait for those that began before it
//! came (docs/decisions/0033).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The changes of a volume on all loops.
#[derive(Debug, Default)]
pub(super) struct Changes {
    loops: Mutex<Vec<Weak<Progress>>>,
    /// Clients that have come.
    arrivals: AtomicU64,
}

/// How far one loop is. Only that loop writes it.
#[derive(Debug, Default)]
struct Progress {
    begun: AtomicU64,
    /// Every change up to this number has ended.
    ended: AtomicU64,
}

/// The changes of a volume on one loop, numbered as they begin.
#[derive(Debug)]
pub(super) struct LoopChanges {
    progress: Arc<Progress>,
    in_flight: BTreeSet<u64>,
}

/// The changes of a volume that were at the store when a client came.
#[derive(Debug)]
pub struct EarlierChanges {
    /// Loops with such changes, and the number of the last.
    left: Vec<(Weak<Progress>, u64)>,
    arrivals: u64,
}

impl Changes {
    /// A loop begins to serve the volume.
    pub(super) fn join(&self) -> LoopChanges {
        let progress = Arc::<Progress>::default();
        let mut loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        loops.retain(|one| one.strong_count() > 0);
        loops.push(Arc::downgrade(&progress));
        LoopChanges { progress, in_flight: BTreeSet::new() }
    }

    /// A client has come: gives the changes that began before.
    pub(super) fn arrive(&self) -> EarlierChanges {
        let arrivals = self.arrivals.fetch_add(1, Ordering::SeqCst) + 1;
        let loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        let mark = |one: &Weak<Progress>| {
            let begun = one.upgrade()?.begun.load(Ordering::SeqCst);
            Some((Weak::clone(one), begun))
        };
        EarlierChanges { left: loops.iter().filter_map(mark).collect(), arrivals }
    }

    pub(super) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Acquire)
    }
}

impl LoopChanges {
    /// A change is about to be submitted; gives its number.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.progress.begun.load(Ordering::Relaxed) + 1;
        self.in_flight.insert(number);
        self.progress.begun.store(number, Ordering::SeqCst);
        number
    }

    /// A change has ended.
    pub(super) fn end(&mut self, number: u64) {
        self.in_flight.remove(&number);
        let begun = self.progress.begun.load(Ordering::Relaxed);
        let ended = self.in_flight.first().map_or(begun, |oldest| oldest - 1);
        self.progress.ended.store(ended, Ordering::Release);
    }
}

impl EarlierChanges {
    /// Whether all of them have ended.
    pub fn have_ended(&mut self) -> bool {
        self.left
            .retain(|(one, mark)| one.upgrade().is_some_and(|progress| progress.ended.load(Ordering::Acquire) < *mark));
        self.left.is_empty()
    }

    /// How many clients of the volume had come, with the one that this was made for.
    pub fn arrivals(&self) -> u64 {
        self.arrivals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_waits_for_what_began_before_it_on_any_loop_and_for_nothing_else() {
        let changes = Changes::default();
        let (mut one, mut other) = (changes.join(), changes.join());
        let (first, second, third) = (one.begin(), one.begin(), other.begin());
        let mut earlier = changes.arrive();
        let later = one.begin();
        one.end(second);
        other.end(third);
        assert!(!earlier.have_ended(), "the first is at the store");
        one.end(first);
        assert!(earlier.have_ended(), "what began later does not count");
        one.end(later);
        assert!(changes.arrive().have_ended());
    }

    #[test]
    fn a_loop_that_is_gone_holds_up_no_client() {
        let changes = Changes::default();
        let mut gone = changes.join();
        gone.begin();
        let mut earlier = changes.arrive();
        assert!(!earlier.have_ended());
        drop(gone);
        assert!(earlier.have_ended());
    }
}
