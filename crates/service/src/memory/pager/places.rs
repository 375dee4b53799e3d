//! Places: pages of the slabs that are leased.

use std::collections::HashSet;

use super::PAGE_BYTES;
use crate::limits::SLAB_BYTES;

/// Pages of a slab.
pub const PLACES_PER_SLAB: u32 = (SLAB_BYTES / PAGE_BYTES) as u32;

/// Where a page can lie: a page of a slab. Slabs are numbered in the order in which they were leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place(pub(super) u32);

impl Place {
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

#[derive(Debug, Default)]
pub(super) struct Places {
    /// How many pages refer to each.
    references: Vec<u16>,
    free: Vec<u32>,
    lost: HashSet<u32>,
    used: usize,
    /// A slab was asked for, and has not come.
    asked: bool,
    exhausted: bool,
    /// No place is taken for now.
    stopped: bool,
}

impl Places {
    pub(super) fn add_slab(&mut self) {
        let first = self.references.len() as u32;
        self.references.resize(self.references.len() + PLACES_PER_SLAB as usize, 0);
        self.free.extend((first..first + PLACES_PER_SLAB).rev());
        self.asked = false;
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
        let place = self.free.pop()?;
        self.references[place as usize] = 1;
        self.used += 1;
        Some(Place(place))
    }

    /// Places that can be taken.
    pub(super) fn free(&self) -> usize {
        if self.stopped { 0 } else { self.free.len() }
    }

    /// So few are left, and no more can be had, that nothing is brought that nobody waits for.
    pub(super) fn is_scarce(&self) -> bool {
        self.is_exhausted() && self.free() < PLACES_PER_SLAB as usize / 64
    }

    pub(super) fn used(&self) -> usize {
        self.used
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
            if !self.lost.contains(&place.slab()) {
                self.free.push(place.0);
            }
        }
    }

    /// False if it was lost already.
    pub(super) fn lose(&mut self, slab: u32) -> bool {
        self.free.retain(|place| place / PLACES_PER_SLAB != slab);
        self.lost.insert(slab)
    }

    pub(super) fn is_lost(&self, place: Place) -> bool {
        self.lost.contains(&place.slab())
    }
}
