//! Pages that a thread is about to discard, without an event when it has.
//!
//! `UFFD_EVENT_REMOVE` comes *before* `madvise(MADV_DONTNEED)` takes the pages, and the thread continues when the event is
//! read. A registration made between the two would name the old pages for ever, and no further event would say so. So these
//! pages are registered for each use, until each thread has been seen [in another call](super::sightings).

use super::range::PageRange;
use crate::limits::SUSPECT_RANGES_MAX;

/// A bounded set of ranges. When it is full a range is widened instead: more is suspected than need be, never less.
#[derive(Debug)]
pub(super) struct Suspects {
    ranges: Vec<(PageRange, u64)>,
    sequence: u64,
}

impl Suspects {
    /// None; all memory that it will ever need is taken now, since it changes under the cache's lock.
    pub(super) fn new() -> Self {
        Self { ranges: Vec::with_capacity(SUSPECT_RANGES_MAX), sequence: 0 }
    }

    /// Suspects `range` from now on.
    pub(super) fn add(&mut self, range: PageRange) {
        self.sequence += 1;
        let is_full = self.ranges.len() == SUSPECT_RANGES_MAX;
        let widening = |other: PageRange| other.hull(range).bytes() - other.bytes();
        let nearest = self.ranges.iter_mut().min_by_key(|(other, _)| widening(*other));
        match nearest.filter(|(other, _)| is_full || other.contains(range)) {
            Some(entry) => *entry = (entry.0.hull(range), self.sequence),
            None => self.ranges.push((range, self.sequence)),
        }
    }

    /// The number of the latest of them with a page of `range`.
    pub(super) fn overlap(&self, range: PageRange) -> Option<u64> {
        self.ranges.iter().filter(|(suspect, _)| suspect.overlaps(range)).map(|(_, number)| *number).max()
    }

    /// The number of the latest of all.
    pub(super) fn latest(&self) -> u64 {
        self.sequence
    }

    /// Clears all up to that number: their threads have discarded them.
    pub(super) fn lift(&mut self, sequence: u64) {
        self.ranges.retain(|(_, number)| *number > sequence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: usize, count: usize) -> PageRange {
        let page = rustix::param::page_size();
        PageRange::covering(first * page, count * page).unwrap()
    }

    #[test]
    fn those_up_to_a_number_are_lifted() {
        let mut suspects = Suspects::new();
        suspects.add(pages(1, 2));
        let first = suspects.latest();
        suspects.add(pages(8, 1));
        suspects.lift(first);
        assert_eq!([pages(1, 1), pages(2, 1), pages(8, 1)].map(|range| suspects.overlap(range)), [None, None, Some(2)]);
    }

    #[test]
    fn one_that_is_suspected_again_has_the_new_number() {
        let mut suspects = Suspects::new();
        suspects.add(pages(1, 2));
        let first = suspects.latest();
        suspects.add(pages(1, 1));
        suspects.lift(first);
        assert_eq!(suspects.overlap(pages(1, 1)), Some(2));
    }

    #[test]
    fn a_full_set_suspects_more_never_less() {
        let mut suspects = Suspects::new();
        let all: Vec<PageRange> = (0..SUSPECT_RANGES_MAX * 3).map(|index| pages(index * 10, 1)).collect();
        for range in &all {
            suspects.add(*range);
        }
        assert!(all.iter().all(|range| suspects.overlap(*range).is_some()));
        assert_eq!((suspects.ranges.len(), suspects.ranges.capacity()), (SUSPECT_RANGES_MAX, SUSPECT_RANGES_MAX));
    }
}
