//! Places: pages of the slabs that are leased.

use std::collections::BTreeSet;

use super::PAGE_BYTES;
use super::rows::FreePlaces;
use crate::limits::SLAB_BYTES;

/// Pages of a slab.
pub const PLACES_PER_SLAB: u32 = (SLAB_BYTES / PAGE_BYTES) as u32;

/// Where a page can lie: a page of a slab. Slabs are numbered in the order in which they were leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place(pub(super) u32);

impl Place {
    /// That page of that slab.
    pub const fn new(slab: u32, index: u32) -> Self {
        Self(slab * PLACES_PER_SLAB + index)
    }

    /// Which page of its slab.
    pub const fn index(self) -> u32 {
        self.0 % PLACES_PER_SLAB
    }

    /// In which slab.
    pub const fn slab(self) -> u32 {
        self.0 / PLACES_PER_SLAB
    }

    /// Where in it, in bytes.
    pub const fn offset(self) -> u64 {
        (self.0 % PLACES_PER_SLAB) as u64 * PAGE_BYTES as u64
    }

    /// Where in a file that has all slabs one after the other, in bytes.
    pub const fn file_offset(self) -> u64 {
        self.0 as u64 * PAGE_BYTES as u64
    }
}

/// The places of one slab.
#[derive(Debug, Default)]
struct SlabPlaces {
    count: u32,
    free: FreePlaces,
    /// It takes no new pages for now.
    rests: bool,
    is_lost: bool,
}

#[derive(Debug)]
pub(super) struct Places {
    /// How many pages refer to each.
    references: Vec<u16>,
    slabs: Vec<SlabPlaces>,
    /// Slabs of which a place can be taken.
    open: BTreeSet<u32>,
    /// Places that can be taken, in all of them.
    free: usize,
    used: usize,
    /// A slab was asked for, and has not come.
    asked: bool,
    exhausted: bool,
    /// No place is taken for now.
    stopped: bool,
    /// Places that are best taken together.
    row: u32,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            references: Vec::new(),
            slabs: Vec::new(),
            open: BTreeSet::new(),
            free: 0,
            used: 0,
            asked: false,
            exhausted: false,
            stopped: false,
            row: 1,
        }
    }
}

impl Places {
    pub(super) fn set_row(&mut self, places: u32) {
        self.row = places;
    }

    /// Adds a slab of which so many places can be used.
    pub(super) fn add_slab(&mut self, places: u32) {
        let number = self.slabs.len() as u32;
        let first = Place::new(number, 0).0;
        self.references.resize((first + PLACES_PER_SLAB) as usize, 0);
        let count = places.min(PLACES_PER_SLAB);
        let free = FreePlaces::new(count, self.row);
        self.slabs.push(SlabPlaces { count, free, ..SlabPlaces::default() });
        self.change(number, |_| {});
        self.asked = false;
    }

    /// Changes a slab, and what is known of the places that can be taken.
    fn change(&mut self, number: u32, change: impl FnOnce(&mut SlabPlaces)) {
        let slab = &mut self.slabs[number as usize];
        if self.open.remove(&number) {
            self.free -= slab.free.len();
        }
        change(slab);
        if !slab.rests && !slab.is_lost && !slab.free.is_empty() {
            self.free += slab.free.len();
            self.open.insert(number);
        }
    }

    pub(super) fn note_none(&mut self) {
        (self.asked, self.exhausted) = (false, true);
    }

    /// Takes no places until [`Places::try_again`].
    pub(super) fn stop(&mut self) {
        self.stopped = true;
    }

    /// A slab can be asked for again, and places taken.
    pub(super) fn try_again(&mut self) {
        (self.exhausted, self.stopped) = (false, false);
    }

    pub(super) fn is_exhausted(&self) -> bool {
        self.exhausted || self.stopped
    }

    /// Whether a slab is to be asked for now.
    pub(super) fn ask(&mut self) -> bool {
        !self.is_exhausted() && !std::mem::replace(&mut self.asked, true)
    }

    pub(super) fn take(&mut self) -> Option<Place> {
        if self.stopped {
            return None;
        }
        // A row that is partly filled costs gets of its pages: a whole one is better, in whatever slab.
        let whole = self.open.iter().find(|number| self.slabs[**number as usize].free.has_whole());
        let number = *whole.or(self.open.first())?;
        let place = Place::new(number, self.slabs[number as usize].free.take()?).0;
        self.free -= 1;
        if self.slabs[number as usize].free.is_empty() {
            self.open.remove(&number);
        }
        self.references[place as usize] = 1;
        self.used += 1;
        Some(Place(place))
    }

    /// Places that can be taken.
    pub(super) fn free(&self) -> usize {
        if self.stopped { 0 } else { self.free }
    }

    /// So few are left, and no more can be had, that nothing is brought that nobody waits for.
    pub(super) fn is_scarce(&self) -> bool {
        self.is_exhausted() && self.free() < PLACES_PER_SLAB as usize / 64
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Places of each slab that a page refers to; none of a lost one.
    pub(super) fn used_in_slabs(&self) -> impl Iterator<Item = u32> {
        let used = |slab: &SlabPlaces| if slab.is_lost { 0 } else { slab.count - slab.free.len() as u32 };
        self.slabs.iter().map(used)
    }

    /// How many pages refer to it; at most 65,535, which stands for more too.
    pub(super) fn references(&self, place: Place) -> u16 {
        self.references[place.0 as usize]
    }

    /// One page more refers to it.
    pub(super) fn refer(&mut self, place: Place) {
        let count = &mut self.references[place.0 as usize];
        // A place with so many is never free again.
        *count = count.saturating_add(1);
    }

    pub(super) fn release(&mut self, place: Place) {
        let count = &mut self.references[place.0 as usize];
        if *count == u16::MAX {
            return;
        }
        debug_assert!(*count > 0, "released once");
        *count -= 1;
        if *count == 0 {
            self.used -= 1;
            if !self.is_lost(place) {
                self.change(place.slab(), |slab| slab.free.add(place.index()));
            }
        }
    }

    /// Lets a slab take no new pages, or take them again.
    pub(super) fn rest(&mut self, number: u32, rests: bool) {
        self.change(number, |slab| slab.rests = rests);
    }

    /// False if it was lost already.
    pub(super) fn lose(&mut self, number: u32) -> bool {
        let mut was_lost = true;
        self.change(number, |slab| {
            was_lost = std::mem::replace(&mut slab.is_lost, true);
            // None of them is taken again.
            slab.free = FreePlaces::default();
        });
        !was_lost
    }

    pub(super) fn is_lost(&self, place: Place) -> bool {
        self.slabs[place.slab() as usize].is_lost
    }
}
