//! The page table of one program: 8 bytes a page.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use super::ahead::Streams;
use super::chunks::Chunks;
use super::places::Place;
use super::protection::Writes;

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// It was never touched, or dropped: zeroes.
    None,
    /// It is in the program.
    Local,
    /// It is in the program, write-protected, and lies at its place too.
    Protected(Place),
    /// It is being moved out to a frame.
    Moving(u32),
    /// It is in a frame, and not in the program.
    Held(u32),
    /// It lies at a place alone.
    Far(Place),
    /// It is being got into a frame.
    Fetching(u32),
    /// No copy exists any more.
    Lost,
}

/// A page in the table: kind (3 bits), flags, and in the upper half the number of frame or place.
#[derive(Clone, Copy, Debug, Default)]
struct Packed(u64);

const _: () = assert!(size_of::<Packed>() == 8);

const KIND: u64 = 7;

impl Entry {
    /// Whether the page is in the program.
    pub(super) const fn is_here(self) -> bool {
        matches!(self, Self::Local | Self::Protected(_))
    }
}

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
            6 => Entry::Lost,
            _ => Entry::Protected(Place(number)),
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
            Entry::Protected(Place(place)) => (7, place),
        };
        self.0 = self.0 & Space::FLAGS | kind | u64::from(number) << 32;
    }
}

/// Pages of a chunk of the table, which exists where a page of it is or was anything but [`Entry::None`].
const CHUNK_PAGES: u64 = 512;

type Chunk = [Packed; CHUNK_PAGES as usize];

/// The pages of one program. Its size goes by the pages that were touched, and not by what is mapped.
#[derive(Clone, Debug)]
pub(super) struct Space {
    /// What is watched: the first page of each range, and the page behind its last.
    known: BTreeMap<u64, u64>,
    /// One of these, in which the last page was that was looked for.
    known_last: Cell<(u64, u64)>,
    /// By the number of their first page / [`CHUNK_PAGES`].
    chunks: Chunks<Chunk>,
    /// Its pages can be moved out.
    pub(super) can_move: bool,
    /// Pages that are in the program.
    pub(super) local: usize,
    /// Of these, pages that are [`Entry::Protected`].
    pub(super) protected: usize,
    pub(super) streams: Streams,
    pub(super) writes: Writes,
}

/// What [`Space::take`] took out.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// The ranges that were known.
    pub(super) ranges: Vec<Range<u64>>,
    /// Their pages, but for those that are [`Entry::None`].
    pub(super) entries: Vec<(u64, Entry)>,
}

impl Space {
    /// A thread waits for the page.
    pub(super) const WANTED: u64 = 8;
    /// It is among those that can go.
    pub(super) const QUEUED: u64 = 16;
    /// It was touched when it had just been moved out: it is to stay longer.
    pub(super) const HOT: u64 = 32;
    /// The thread that waits for the page wants to write to it.
    pub(super) const WRITES: u64 = 64;
    const FLAGS: u64 = Self::WANTED | Self::QUEUED | Self::HOT | Self::WRITES;

    pub(super) fn new(can_move: bool) -> Self {
        Self {
            known: BTreeMap::new(),
            known_last: Cell::new((0, 0)),
            chunks: Chunks::default(),
            can_move,
            local: 0,
            protected: 0,
            streams: Streams::default(),
            writes: Writes::default(),
        }
    }

    /// The same for a forked child, which can move nothing.
    pub(super) fn copied(&self) -> Self {
        let mut copy = Self { can_move: false, protected: 0, streams: Streams::default(), ..self.clone() };
        let packed = copy.chunks.values_mut().flat_map(|chunk| chunk.iter_mut());
        packed.for_each(|packed| packed.0 &= !Self::FLAGS);
        copy
    }

    pub(super) fn for_each(&mut self, mut change: impl FnMut(&mut Entry)) {
        for packed in self.chunks.values_mut().flat_map(|chunk| chunk.iter_mut()) {
            let mut entry = packed.entry();
            change(&mut entry);
            packed.set(entry);
        }
    }

    /// The pages that have this entry. It looks at all.
    pub(super) fn pages_with(&self, entry: Entry) -> Vec<u64> {
        let all = self.chunks.iter().flat_map(|(number, chunk)| (number * CHUNK_PAGES..).zip(chunk));
        all.filter(|(_, packed)| packed.entry() == entry).map(|(page, _)| page).collect()
    }

    /// Some pages that are in the program, from both ends.
    pub(super) fn some_local(&self, max: usize) -> Vec<u64> {
        let chunks = self.chunks.iter().map(|(number, chunk)| (number * CHUNK_PAGES, chunk));
        let pages = chunks.flat_map(|(first, chunk)| chunk.iter().enumerate().map(move |at| (first, at)));
        let local = pages.filter(|(_, (_, packed))| packed.entry() == Entry::Local);
        let local = local.map(|(first, (index, _))| first + index as u64);
        local.clone().take(max).chain(local.rev().take(max)).collect()
    }

    fn is_known(&self, page: u64) -> bool {
        let is_in = |(first, end): (u64, u64)| first <= page && page < end;
        if is_in(self.known_last.get()) {
            return true;
        }
        let before = self.known.range(..=page).next_back().map(|(first, end)| (*first, *end));
        before.filter(|known| is_in(*known)).inspect(|known| self.known_last.set(*known)).is_some()
    }

    fn packed(&self, page: u64) -> Packed {
        let chunk = self.chunks.get(page / CHUNK_PAGES);
        chunk.map(|chunk| chunk[(page % CHUNK_PAGES) as usize]).unwrap_or_default()
    }

    fn packed_mut(&mut self, page: u64) -> &mut Packed {
        let new = || Box::new([Packed::default(); CHUNK_PAGES as usize]);
        let chunk = self.chunks.get_or_insert(page / CHUNK_PAGES, new);
        &mut chunk[(page % CHUNK_PAGES) as usize]
    }

    pub(super) fn get(&self, page: u64) -> Option<Entry> {
        self.is_known(page).then(|| self.packed(page).entry())
    }

    /// Sets what is known of a page, if its range is.
    pub(super) fn set(&mut self, page: u64, entry: Entry) {
        if self.is_known(page) {
            let is_protected = |entry: Entry| usize::from(matches!(entry, Entry::Protected(_)));
            let packed = self.packed_mut(page);
            let before = packed.entry();
            packed.set(entry);
            self.protected = self.protected + is_protected(entry) - is_protected(before);
        }
    }

    /// Sets or clears a flag; what it was.
    pub(super) fn flag(&mut self, page: u64, flag: u64, value: bool) -> bool {
        if !self.is_known(page) {
            return value;
        }
        let was = self.packed(page).0 & flag != 0;
        if was != value {
            let packed = self.packed_mut(page);
            packed.0 = if value { packed.0 | flag } else { packed.0 & !flag };
        }
        was
    }

    pub(super) fn has_flag(&self, page: u64, flag: u64) -> bool {
        self.packed(page).0 & flag != 0
    }

    /// Adds a range that is not known, of pages that were never touched.
    pub(super) fn add(&mut self, range: Range<u64>) {
        debug_assert!(self.unknown(range.clone()) == [range.clone()], "known once");
        if !range.is_empty() {
            self.known.insert(range.start, range.end);
        }
    }

    /// The known ranges that overlap a range.
    fn overlapping(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.known.range(..=range.start).next_back().map_or(range.start, |(first, _)| *first);
        let near = self.known.range(before..range.end.max(before)).map(|(first, end)| *first..*end);
        near.filter(|known| known.end > range.start && known.start < range.end).collect()
    }

    /// The parts of a range that are not known.
    pub(super) fn unknown(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut unknown, mut at) = (Vec::new(), range.start);
        for known in self.overlapping(&range) {
            if known.start > at {
                unknown.push(at..known.start);
            }
            at = at.max(known.end);
        }
        if at < range.end {
            unknown.push(at..range.end);
        }
        unknown
    }

    /// Takes the pages of a range out: nothing is known of them any more.
    pub(super) fn take(&mut self, range: Range<u64>) -> Taken {
        let mut taken = Taken::default();
        self.known_last.set((0, 0));
        for known in self.overlapping(&range) {
            self.known.remove(&known.start);
            let (from, to) = (known.start.max(range.start), known.end.min(range.end));
            for left in [known.start..from, to..known.end] {
                if !left.is_empty() {
                    self.known.insert(left.start, left.end);
                }
            }
            taken.ranges.push(from..to);
        }
        taken.entries = self.clear(range);
        taken
    }

    /// Makes the pages of a range [`Entry::None`]; gives what else they were.
    pub(super) fn clear(&mut self, range: Range<u64>) -> Vec<(u64, Entry)> {
        let mut entries = Vec::new();
        if range.is_empty() {
            return entries;
        }
        let numbers = range.start / CHUNK_PAGES..=(range.end - 1) / CHUNK_PAGES;
        for number in self.chunks.numbers(numbers) {
            let first = number * CHUNK_PAGES;
            let chunk = self.chunks.get_mut(number).into_iter().flatten();
            for (page, packed) in (first..).zip(chunk).filter(|(page, _)| range.contains(page)) {
                match std::mem::take(packed).entry() {
                    Entry::None => {}
                    entry => entries.push((page, entry)),
                }
            }
            if range.start <= first && first + CHUNK_PAGES <= range.end {
                self.chunks.remove(number);
            }
        }
        self.local -= entries.iter().filter(|(_, entry)| entry.is_here()).count();
        self.protected -= entries.iter().filter(|(_, entry)| matches!(entry, Entry::Protected(_))).count();
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Choices;
    use super::*;

    #[test]
    fn a_mapping_of_a_tebibyte_costs_what_was_touched_of_it() {
        let (mut space, pages) = (Space::new(true), 1 << 28);
        space.add(1000..1000 + pages);
        space.set(5000, Entry::Local);
        space.set(1000 + pages - 1, Entry::Lost);
        space.local = 1;
        assert_eq!(space.chunks.len(), 2);
        assert_eq!((space.get(4999), space.get(999)), (Some(Entry::None), None));
        let taken = space.take(4000..6000);
        assert_eq!((taken.entries, space.local), (vec![(5000, Entry::Local)], 0));
        assert_eq!(taken.ranges, std::slice::from_ref(&(4000..6000)));
        assert_eq!(space.unknown(0..1 << 40), [0..1000, 4000..6000, 1000 + pages..1 << 40]);
        assert_eq!(space.clear(0..1 << 40), [(1000 + pages - 1, Entry::Lost)]);
        assert!(space.chunks.len() == 0 && space.get(6000) == Some(Entry::None));
    }

    #[test]
    fn a_range_that_was_looked_at_last_is_forgotten_with_its_pages() {
        let mut space = Space::new(true);
        space.add(10..20);
        assert_eq!(space.get(15), Some(Entry::None));
        space.take(14..16);
        let known = [13, 14, 15, 16].map(|page| space.get(page).is_some());
        assert_eq!(known, [true, false, false, true]);
        // Now the range behind is the last one.
        space.take(0..100);
        space.set(16, Entry::Lost);
        assert_eq!((space.get(16), space.flag(16, Space::HOT, false)), (None, false));
        space.add(16..17);
        assert_eq!(space.get(16), Some(Entry::None), "it was not known when it was set");
    }

    const PAGES: u64 = 4 * CHUNK_PAGES;

    /// A page table, and what is known of each page.
    struct Checked {
        space: Space,
        model: Vec<Option<Entry>>,
    }

    impl Checked {
        fn new() -> Self {
            Self { space: Space::new(true), model: vec![None; PAGES as usize] }
        }

        fn forked(&self) -> Self {
            Self { space: self.space.copied(), model: self.model.clone() }
        }

        fn change(&mut self, choices: &mut Choices) {
            let first = choices.below(PAGES);
            let range = first..(first + 1 + choices.below(2 * CHUNK_PAGES)).min(PAGES);
            let pages = range.start as usize..range.end as usize;
            match choices.below(4) {
                0 => {
                    for unknown in self.space.unknown(range) {
                        self.space.add(unknown);
                    }
                    self.model[pages].iter_mut().for_each(|page| *page = page.or(Some(Entry::None)));
                }
                1 => {
                    let known = self.model[pages].iter_mut().map(Option::take);
                    let known: Vec<_> = (first..).zip(known).filter_map(|(page, entry)| Some((page, entry?))).collect();
                    let taken = self.space.take(range);
                    let ranges: u64 = taken.ranges.iter().map(|range| range.end - range.start).sum();
                    assert_eq!(ranges, known.len() as u64);
                    assert!(taken.entries.iter().eq(known.iter().filter(|(_, entry)| *entry != Entry::None)));
                }
                _ => {
                    let entry = Entry::Far(Place(choices.below(1000) as u32));
                    self.space.set(first, entry);
                    self.model[first as usize] = self.model[first as usize].and(Some(entry));
                }
            }
        }
    }

    #[test]
    fn a_look_up_finds_what_is_known_now_whatever_the_program_or_its_fork_has_looked_at() {
        for seed in 0..20 {
            let (mut choices, mut programs) = (Choices(seed), [(); 3].map(|()| Checked::new()));
            for step in 0..2000 {
                let [one, other] = [(); 2].map(|()| choices.below(3) as usize);
                if choices.below(16) == 0 {
                    programs[one] = programs[other].forked();
                }
                programs[one].change(&mut choices);
                for Checked { space, model } in &programs {
                    for page in [(); 4].map(|()| choices.below(PAGES)) {
                        assert_eq!(space.get(page), model[page as usize], "seed {seed}, step {step}, page {page}");
                    }
                }
            }
        }
    }
}
