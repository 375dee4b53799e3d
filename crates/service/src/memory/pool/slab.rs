//! One slab of places, and which copies of it hold which page.

use byway_reactor::seeded::{self, Bug};

use super::action::Lease;
use super::sum::{Sum, Sums};

/// A set of a slab's pages.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    words: Box<[u64]>,
    count: u32,
}

impl Pages {
    pub(super) fn none(pages: u32) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize].into(), count: 0 }
    }

    pub(super) fn has(&self, page: u32) -> bool {
        self.words.get(page as usize / 64).is_some_and(|word| word & 1 << (page % 64) != 0)
    }

    pub(super) fn set(&mut self, page: u32, value: bool) {
        let (word, bit) = (&mut self.words[page as usize / 64], 1 << (page % 64));
        if (*word & bit != 0) != value {
            *word ^= bit;
            self.count = if value { self.count + 1 } else { self.count - 1 };
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let words = (0u32..).zip(&self.words).filter(|(_, word)| **word != 0);
        words.flat_map(|(at, word)| (0..64).filter(move |bit| word & 1 << bit != 0).map(move |bit| at * 64 + bit))
    }
}

/// A copy of a slab at a lender.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) lease: Lease,
    /// Pages that were written and that this copy does not hold in their last version.
    pub(super) missing: Pages,
    /// The lender takes it back.
    pub(super) leaves: bool,
}

/// Where a page can be got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Lease(Lease),
    File,
}

#[derive(Debug)]
pub(super) struct Slab {
    pub(super) copies: Vec<Copy>,
    /// Of each page that was written.
    sums: Sums,
    written: Pages,
    /// Pages that the file holds in their last version.
    pub(super) in_file: Pages,
    /// Pages no copy of which is left.
    pub(super) gone: Pages,
    /// The pager was told that it takes no new pages.
    pub(super) rests: bool,
    /// No copy is left, and there never will be.
    pub(super) is_lost: bool,
}

impl Slab {
    pub(super) fn new(pages: u32, leases: &[Lease]) -> Self {
        let none = || Pages::none(pages);
        let copy = |lease: &Lease| Copy { lease: *lease, missing: none(), leaves: false };
        Self {
            copies: leases.iter().map(copy).collect(),
            sums: Sums::new(pages),
            written: none(),
            in_file: none(),
            gone: none(),
            rests: false,
            is_lost: false,
        }
    }

    /// Frees its tables: no copy is left, and nothing is under way.
    pub(super) fn free_tables(&mut self) {
        *self = Self { rests: self.rests, is_lost: true, ..Self::new(0, &[]) };
    }

    /// A page is about to be put: nothing holds its new version yet.
    pub(super) fn write(&mut self, page: u32, sum: Sum) {
        if !self.written.has(page) || !seeded::is(Bug::PoolOldChecksum) {
            self.sums.set(page, sum);
        }
        self.written.set(page, true);
        self.in_file.set(page, false);
        self.gone.set(page, false);
        for copy in &mut self.copies {
            copy.missing.set(page, true);
        }
    }

    pub(super) fn sum(&self, page: u32) -> Sum {
        self.sums.get(page)
    }

    pub(super) fn copy_mut(&mut self, lease: Lease) -> Option<&mut Copy> {
        self.copies.iter_mut().find(|copy| copy.lease == lease)
    }

    /// Lenders that hold a page. One that takes a copy back may have another: it counts once.
    pub(super) fn holders(&self, page: u32) -> usize {
        let has = |lender: usize, copies: &[Copy]| {
            copies.iter().any(|copy| copy.lease.lender == lender && !copy.missing.has(page))
        };
        let counts =
            |(at, copy): &(usize, &Copy)| !copy.missing.has(page) && !has(copy.lease.lender, &self.copies[..*at]);
        self.copies.iter().enumerate().filter(counts).count()
    }

    /// Lenders that hold the slab and go on doing so.
    pub(super) fn lasting(&self) -> usize {
        self.copies.iter().filter(|copy| !copy.leaves).count()
    }

    /// Whether a page has bytes that are to be kept.
    pub(super) fn is_used(&self, page: u32) -> bool {
        self.written.has(page) && !self.gone.has(page)
    }

    /// A page is known anew.
    pub(super) fn set_sum(&mut self, page: u32, sum: Sum) {
        self.sums.set(page, sum);
    }

    /// Where a page can be got: at a lender that is slow only where no other has it, nor the file. Pages are spread over the copies by their number.
    pub(super) fn source(&self, page: u32, is_slow: impl Fn(usize) -> bool) -> Option<Source> {
        if !self.is_used(page) {
            return None;
        }
        let count = self.copies.len();
        let turned = (0..count).map(|at| &self.copies[(at + page as usize) % count]);
        let mut holders = turned.filter(|copy| !copy.missing.has(page)).map(|copy| copy.lease);
        let first = holders.clone().next().map(Source::Lease);
        let quick = holders.find(|lease| !is_slow(lease.lender)).map(Source::Lease);
        quick.or_else(|| self.in_file.has(page).then_some(Source::File)).or(first)
    }

    /// Adds an empty copy: every page that was written is missing there.
    pub(super) fn add(&mut self, lease: Lease) {
        let mut missing = self.written.clone();
        for page in self.gone.iter() {
            missing.set(page, false);
        }
        self.copies.push(Copy { lease, missing, leaves: false });
    }

    /// Whether a copy that stays misses pages.
    pub(super) fn is_damaged(&self) -> bool {
        self.copies.iter().any(|copy| !copy.leaves && !copy.missing.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_pages_counts_each_once() {
        let mut pages = Pages::none(70);
        for page in [0, 69, 69, 63, 64] {
            pages.set(page, true);
        }
        assert_eq!(pages.iter().collect::<Vec<_>>(), [0, 63, 64, 69]);
        for page in [0, 63, 64, 64, 69] {
            assert!(!pages.is_empty());
            pages.set(page, false);
        }
        assert!(pages.is_empty());
    }
}
