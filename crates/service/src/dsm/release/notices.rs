//! Write notices: which pages have changed, and from which version on a copy has the change.
//!
//! A fence is a notice too. After it, a rank has seen changes that no notice told it of, and whoever goes on behind one of its later locks
//! or barriers has to see them: that rank drops all copies that others may have changed.

use std::collections::{BTreeMap, HashMap};

use super::super::{Page, Rank};
use crate::limits::{DSM_NOTICES_PER_MESSAGE, DSM_PAGES_MAX, DSM_PAYLOAD_BYTES_MAX, DSM_RANKS_MAX};
use byway_reactor::seeded::{self, Bug};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A notice as it is sent.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Entry {
    page: U32,
    version: U64,
}

/// The notice of rank 0's fences has this for a page, and the count of fences for a version; that of rank 1's has the next number.
const FENCES: Page = Page::MAX - (DSM_RANKS_MAX as Page - 1);
const _: () = assert!(FENCES as u64 > DSM_PAGES_MAX);

const ENTRY_BYTES: usize = size_of::<Entry>();
const _: () = assert!(ENTRY_BYTES == 12 && DSM_NOTICES_PER_MESSAGE * ENTRY_BYTES <= DSM_PAYLOAD_BYTES_MAX);

#[derive(Clone, Copy, Debug)]
struct Notice {
    version: u64,
    /// Its place in the log.
    number: u64,
    /// The rank that told it, or this one.
    from: Rank,
}

/// The notices that a rank knows: one for each page that has changed lately. Each rank is told of each notice once.
#[derive(Debug)]
pub(super) struct Notices {
    rank: Rank,
    /// Fences of this rank's program.
    fences: u64,
    known: HashMap<Page, Notice>,
    /// The same in the order in which they became known.
    log: BTreeMap<u64, Page>,
    next: u64,
    /// Of each rank: notices with smaller numbers were sent there.
    told: Vec<u64>,
    /// What this rank's copies were not compared with yet.
    fresh: BTreeMap<Page, u64>,
}

impl Notices {
    pub(super) fn new(rank: Rank, ranks: Rank) -> Self {
        let told = vec![0; usize::from(ranks)];
        Self { rank, fences: 0, known: HashMap::new(), log: BTreeMap::new(), next: 0, told, fresh: BTreeMap::new() }
    }

    /// The place in the log of the next notice.
    pub(super) fn mark(&self) -> u64 {
        self.next
    }

    pub(super) fn learn(&mut self, page: Page, version: u64, from: Rank) {
        if let Some(known) = self.known.get(&page) {
            if known.version >= version {
                return;
            }
            self.log.remove(&known.number);
        }
        self.known.insert(page, Notice { version, number: self.next, from });
        self.log.insert(self.next, page);
        self.next += 1;
        self.fresh.insert(page, version);
    }

    /// Learns what another rank has sent.
    pub(super) fn learn_all(&mut self, from: Rank, payload: &[u8]) -> Result<(), &'static str> {
        let entries = <[Entry]>::ref_from_bytes(payload).map_err(|_| "it sent malformed notices")?;
        for Entry { page, version } in entries {
            if u64::from(page.get()) >= DSM_PAGES_MAX && page.get() < FENCES {
                return Err("it sent a notice of a page beyond the area");
            }
            self.learn(page.get(), version.get(), from);
        }
        Ok(())
    }

    /// What a rank has to be told before a lock or barrier lets it go on: payloads of messages.
    pub(super) fn news_for(&mut self, rank: Rank) -> Vec<Vec<u8>> {
        let told = std::mem::replace(&mut self.told[usize::from(rank)], self.next);
        if seeded::is(Bug::DsmNoticesLost) && told > 0 {
            return Vec::new();
        }
        let is_news = |notice: &&Notice| {
            notice.from != rank && (notice.from == self.rank || !seeded::is(Bug::DsmNoticesNotPassedOn))
        };
        let news = self.log.range(told..).filter_map(|(_, page)| {
            let notice = self.known.get(page).filter(is_news)?;
            Some(Entry { page: U32::new(*page), version: U64::new(notice.version) })
        });
        let entries: Vec<Entry> = news.collect();
        entries.chunks(DSM_NOTICES_PER_MESSAGE).map(|chunk| chunk.as_bytes().to_vec()).collect()
    }

    /// What this rank's copies are to be compared with, all that became known since the last call; `None`: another rank has fenced, so
    /// they all may be too old.
    pub(super) fn take_fresh(&mut self) -> Option<BTreeMap<Page, u64>> {
        let fresh = std::mem::take(&mut self.fresh);
        let has_fence = fresh.last_key_value().is_some_and(|(page, _)| *page >= FENCES);
        (!has_fence).then_some(fresh)
    }

    /// This rank has dropped its copies for a fence.
    pub(super) fn fenced(&mut self) {
        self.fences += 1;
        if !seeded::is(Bug::DsmFenceNotPassedOn) {
            self.learn(FENCES + Page::from(self.rank), self.fences, self.rank);
        }
        self.fresh.clear();
    }

    /// Forgets what all ranks know: notices with smaller numbers.
    pub(super) fn forget(&mut self, before: u64) {
        let later = self.log.split_off(&before);
        for page in std::mem::replace(&mut self.log, later).into_values() {
            self.known.remove(&page);
        }
    }
}
