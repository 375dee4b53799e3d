//! The page table of one program: 8 bytes a page.

use std::collections::BTreeMap;
use std::ops::Range;

use super::places::Place;

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// It was never touched, or dropped: zeroes.
    None,
    /// It is in the program.
    Local,
    /// It is being moved out to a frame.
    Moving(u32),
    /// It is in a frame, and not in the program.
    Held(u32),
    /// It lies at a place alone.
    Far(Place),
    /// It is being got into a frame.
    Fetching(u32),
    /// Nobody has it any more.
    Lost,
}

impl Entry {
    /// For tables.
    pub(super) const NONE: Self = Self::None;
}

/// A page in the table: kind (3 bits), flags, and in the upper half the number of frame or place.
#[derive(Clone, Copy, Debug, Default)]
struct Packed(u64);

const _: () = assert!(size_of::<Packed>() == 8);

const KIND: u64 = 7;

impl Packed {
    fn entry(self) -> Entry {
        let number = (self.0 >> 32) as u32;
        match self.0 & KIND {
            0 => Entry::None,
            1 => Entry::Local,
            2 => Entry::Moving(number),
            3 => Entry::Held(number),
            4 => Entry::Far(Place(number)),
            5 => Entry::Fetching(number),
            _ => Entry::Lost,
        }
    }

    fn set(&mut self, entry: Entry) {
        let (kind, number) = match entry {
            Entry::None => (0, 0),
            Entry::Local => (1, 0),
            Entry::Moving(frame) => (2, frame),
            Entry::Held(frame) => (3, frame),
            Entry::Far(Place(place)) => (4, place),
            Entry::Fetching(frame) => (5, frame),
            Entry::Lost => (6, 0),
        };
        self.0 = self.0 & (Space::WANTED | Space::QUEUED) | kind | u64::from(number) << 32;
    }
}

/// The pages of one program, by the first page of each mapping.
#[derive(Clone, Debug)]
pub(super) struct Space {
    regions: BTreeMap<u64, Vec<Packed>>,
    /// Its pages can be moved out.
    pub(super) can_move: bool,
    /// Pages that are in the program.
    pub(super) local: usize,
}

impl Space {
    /// A thread waits for the page.
    pub(super) const WANTED: u64 = 8;
    /// It is among those that can go.
    pub(super) const QUEUED: u64 = 16;

    pub(super) fn new(can_move: bool) -> Self {
        Self { regions: BTreeMap::new(), can_move, local: 0 }
    }

    /// The same for a forked child, which can move nothing.
    pub(super) fn copied(&self) -> Self {
        let mut copy = Self { can_move: false, ..self.clone() };
        copy.regions.values_mut().flatten().for_each(|packed| packed.0 &= !(Self::WANTED | Self::QUEUED));
        copy
    }

    pub(super) fn for_each(&mut self, mut change: impl FnMut(&mut Entry)) {
        for packed in self.regions.values_mut().flatten() {
            let mut entry = packed.entry();
            change(&mut entry);
            packed.set(entry);
        }
    }

    fn find(&self, page: u64) -> Option<&Packed> {
        let (first, pages) = self.regions.range(..=page).next_back()?;
        pages.get((page - first) as usize)
    }

    fn find_mut(&mut self, page: u64) -> Option<&mut Packed> {
        let (first, pages) = self.regions.range_mut(..=page).next_back()?;
        pages.get_mut((page - first) as usize)
    }

    pub(super) fn get(&self, page: u64) -> Option<Entry> {
        self.find(page).map(|packed| packed.entry())
    }

    pub(super) fn set(&mut self, page: u64, entry: Entry) {
        if let Some(packed) = self.find_mut(page) {
            packed.set(entry);
        }
    }

    /// Sets or clears a flag; what it was.
    pub(super) fn flag(&mut self, page: u64, flag: u64, value: bool) -> bool {
        let Some(packed) = self.find_mut(page) else { return value };
        let was = packed.0 & flag != 0;
        packed.0 = if value { packed.0 | flag } else { packed.0 & !flag };
        was
    }

    /// Adds pages that are not known.
    pub(super) fn insert(&mut self, first: u64, entries: Vec<Entry>) {
        let packed = |entry| {
            let mut packed = Packed::default();
            packed.set(entry);
            packed
        };
        let pages: Vec<Packed> = entries.into_iter().map(packed).collect();
        debug_assert!(self.unknown(first..first + pages.len() as u64).iter().all(|r| r.start == first), "known once");
        if !pages.is_empty() {
            self.regions.insert(first, pages);
        }
    }

    /// The parts of a range that are not known.
    pub(super) fn unknown(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut unknown = Vec::new();
        let mut at = range.start;
        let before = self.regions.range(..=at).next_back().map_or(at, |(first, _)| *first);
        for (first, pages) in self.regions.range(before..range.end) {
            let end = first + pages.len() as u64;
            if *first > at {
                unknown.push(at..*first);
            }
            at = at.max(end);
        }
        if at < range.end {
            unknown.push(at..range.end);
        }
        unknown
    }

    /// Takes the pages of a range out; gives those that were known.
    pub(super) fn take(&mut self, range: Range<u64>) -> Vec<(u64, Entry)> {
        let before = self.regions.range(..=range.start).next_back().map_or(range.start, |(first, _)| *first);
        let touched: Vec<u64> = self.regions.range(before..range.end).map(|(first, _)| *first).collect();
        let mut taken = Vec::new();
        for first in touched {
            let Some(mut pages) = self.regions.remove(&first) else { continue };
            let end = first + pages.len() as u64;
            let (from, to) = (range.start.clamp(first, end), range.end.clamp(first, end));
            let rest = pages.split_off((to - first) as usize);
            let out = pages.split_off((from - first) as usize);
            taken.extend((from..).zip(out.iter().map(|packed| packed.entry())));
            for (start, left) in [(first, pages), (to, rest)] {
                if !left.is_empty() {
                    self.regions.insert(start, left);
                }
            }
        }
        self.local -= taken.iter().filter(|(_, entry)| *entry == Entry::Local).count();
        taken
    }
}
