//! The sync state of a volume's open files, in any size and with any options: whether a flush failed, and which syncs are in
//! flight, on any loop (docs/decisions/0030).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_fabric::random::Random;

/// See the module.
#[derive(Debug)]
pub(super) struct SyncTracker {
    /// A flush failed: what it covered may be lost, and the kernel says so only once.
    flush_failed: AtomicBool,
    /// Names these files, unlike any others.
    open_epoch: u64,
    syncs: Mutex<Syncs>,
}

/// Numbered as they begin.
#[derive(Debug, Default)]
struct Syncs {
    begun: u64,
    /// By description and number: whose they are.
    under_way: BTreeMap<Description, BTreeMap<u64, SyncOwner>>,
    owners: u64,
}

/// One of the open file descriptions of a file of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Description {
    file: usize,
    number: usize,
}

impl Description {
    /// The place of its file in the volume.
    pub(super) fn file(self) -> usize {
        self.file
    }

    /// The place among those of its file.
    pub(super) fn number(self) -> usize {
        self.number
    }
}

/// An owner of syncs: a volume on one loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SyncOwner(u64);

/// Whether a sync begins only on a description that has none in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alone {
    Yes,
    No,
}

/// A moment: what began before, and what after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark(u64);

/// A sync, or a write that syncs, from before it is submitted until what came of it is noted.
#[derive(Debug)]
pub(super) struct SyncUnderWay {
    sync_tracker: Arc<SyncTracker>,
    on: Description,
    number: u64,
    noted: bool,
}

impl SyncTracker {
    pub(super) fn new() -> Arc<Self> {
        let open_epoch = Random::from_kernel().next_u64().max(1);
        Arc::new(Self { flush_failed: AtomicBool::new(false), open_epoch, syncs: Mutex::default() })
    }

    pub(super) fn open_epoch(&self) -> u64 {
        self.open_epoch
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

    pub(super) fn new_owner(&self) -> SyncOwner {
        let mut syncs = self.syncs();
        syncs.owners += 1;
        SyncOwner(syncs.owners)
    }

    /// Begins a sync of a file on the one of its `descriptions` with the fewest in flight. `None` if it is to be alone there, and
    /// all have some.
    pub(super) fn begin_sync(
        self: &Arc<Self>,
        owner: SyncOwner,
        file: usize,
        descriptions: usize,
        alone: Alone,
    ) -> Option<SyncUnderWay> {
        let mut syncs = self.syncs();
        let under_way = |number: usize| syncs.under_way.get(&Description { file, number }).map_or(0, BTreeMap::len);
        let (count, number) = (0..descriptions).map(|number| (under_way(number), number)).min()?;
        if alone == Alone::Yes && count > 0 {
            return None;
        }
        syncs.begun += 1;
        let begun = syncs.begun;
        let on = Description { file, number };
        syncs.under_way.entry(on).or_default().insert(begun, owner);
        Some(SyncUnderWay { sync_tracker: Arc::clone(self), on, number: begun, noted: false })
    }

    pub(super) fn mark(&self) -> Mark {
        Mark(self.syncs().begun)
    }

    /// Of the syncs on these descriptions that began before the mark and have not ended: the first description that has one, and
    /// whose the oldest there is.
    pub(super) fn under_way_at(
        &self,
        mark: Mark,
        on: impl IntoIterator<Item = Description>,
    ) -> Option<(Description, SyncOwner)> {
        let syncs = self.syncs();
        on.into_iter().find_map(|on| {
            let (_, owner) = syncs.under_way.get(&on)?.range(..=mark.0).next()?;
            Some((on, *owner))
        })
    }
}

impl SyncUnderWay {
    /// Where it is.
    pub(super) fn on(&self) -> Description {
        self.on
    }

    /// It has ended, and what came of it is noted.
    pub(super) fn end(mut self) {
        self.noted = true;
    }
}

impl Drop for SyncUnderWay {
    fn drop(&mut self) {
        // Its loop has ended before it: the kernel's answer was not seen.
        if !self.noted {
            self.sync_tracker.note_failed_flush();
        }
        if let Some(under_way) = self.sync_tracker.syncs().under_way.get_mut(&self.on) {
            under_way.remove(&self.number);
        }
    }
}
