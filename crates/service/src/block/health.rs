//! What is known of a volume's open files, in any size and under any options: whether a flush failed, and which syncs are
//! under way, on any loop (docs/decisions/0030).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_fabric::random::Random;

/// See the module.
#[derive(Debug)]
pub(super) struct Health {
    /// A flush failed: what it covered may be lost, and the kernel says so only once.
    flush_failed: AtomicBool,
    /// Names these files, unlike any others.
    store_identity: u64,
    syncs: Mutex<Syncs>,
}

/// Numbered as they begin.
#[derive(Debug, Default)]
struct Syncs {
    begun: u64,
    /// By number: whose they are.
    under_way: BTreeMap<u64, Place>,
    places: u64,
}

/// One who syncs: a volume on one loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u64);

/// A moment: what began before, and what after.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark(u64);

/// A sync, or a write that syncs, from before it is submitted until what came of it is noted.
#[derive(Debug)]
pub(super) struct SyncUnderWay {
    health: Arc<Health>,
    number: u64,
    noted: bool,
}

impl Health {
    pub(super) fn new() -> Arc<Self> {
        let store_identity = Random::from_kernel().next_u64().max(1);
        Arc::new(Self { flush_failed: AtomicBool::new(false), store_identity, syncs: Mutex::default() })
    }

    pub(super) fn store_identity(&self) -> u64 {
        self.store_identity
    }

    pub(super) fn flush_failed(&self) -> bool {
        self.flush_failed.load(Ordering::Acquire)
    }

    pub(super) fn note_failed_flush(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }

    fn syncs(&self) -> MutexGuard<'_, Syncs> {
        self.syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new_place(&self) -> Place {
        let mut syncs = self.syncs();
        syncs.places += 1;
        Place(syncs.places)
    }

    pub(super) fn begin_sync(self: &Arc<Self>, place: Place) -> SyncUnderWay {
        let mut syncs = self.syncs();
        syncs.begun += 1;
        let number = syncs.begun;
        syncs.under_way.insert(number, place);
        SyncUnderWay { health: Arc::clone(self), number, noted: false }
    }

    pub(super) fn mark(&self) -> Mark {
        Mark(self.syncs().begun)
    }

    /// Whose the oldest sync is of those that began before the mark and have not ended.
    pub(super) fn under_way_at(&self, mark: Mark) -> Option<Place> {
        self.syncs().under_way.range(..=mark.0).next().map(|(_, place)| *place)
    }
}

impl SyncUnderWay {
    /// It has ended, and what came of it is noted.
    pub(super) fn end(mut self) {
        self.noted = true;
    }
}

impl Drop for SyncUnderWay {
    fn drop(&mut self) {
        // Its loop has ended before it: nobody was told what the kernel said.
        if !self.noted {
            self.health.note_failed_flush();
        }
        self.health.syncs().under_way.remove(&self.number);
    }
}
