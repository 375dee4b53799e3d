//! A program, its helper and a lender, played at random: each page that the program reads has what it wrote last.

use std::collections::{HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::arrivals::ARRIVALS_SPARE;
use super::*;

mod forks;
mod room;
mod unchanged;

const PAGES: u64 = 600;
const FRAMES: u32 = 64;
const BUDGET: usize = 200;

/// Splitmix64: the choices of a run.
pub(super) struct Choices(pub(super) u64);

impl Choices {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)) % bound
    }
}

/// What is under way.
#[derive(Clone, Copy, Debug)]
enum Pending {
    Put(u32, Place),
    Get(u32, Place),
}

#[derive(Default)]
struct Program {
    /// Pages that are there, with what they hold; 0: zeroes.
    here: HashMap<u64, u64>,
    /// What each page has for the program; a page that is not in it has zeroes.
    wrote: HashMap<u64, u64>,
    mapped: Vec<bool>,
    /// Pages that the program cannot write to before the pager lets it.
    protected: HashSet<u64>,
    poisoned: bool,
}

impl Program {
    fn drop_page(&mut self, page: u64) {
        self.here.remove(&page);
        self.wrote.remove(&page);
        self.protected.remove(&page);
    }
}

struct World {
    pager: Pager,
    programs: HashMap<SpaceId, Program>,
    frames: HashMap<u32, u64>,
    places: HashMap<Place, u64>,
    moves: VecDeque<(PageId, u32, bool)>,
    pending: Vec<Pending>,
    slabs: u32,
    lost: bool,
    /// Puts are refused: the file has no room.
    refuses: bool,
    /// Fills and poisonings that meet a mapping which is being changed.
    changes: u32,
    writes: u64,
}

impl World {
    fn new() -> Self {
        let (pager, first) = (Pager::new(FRAMES, BUDGET), SpaceId(1));
        let mut world = Self {
            pager,
            programs: HashMap::from([(first, Program { mapped: vec![true; PAGES as usize], ..Program::default() })]),
            frames: HashMap::new(),
            places: HashMap::new(),
            moves: VecDeque::new(),
            pending: Vec::new(),
            slabs: 0,
            lost: false,
            refuses: false,
            changes: 0,
            writes: 0,
        };
        world.pager.add_space(first, true);
        world.pager.add_pages(first, 0..PAGES, &[]);
        world
    }

    fn act(&mut self) {
        while let Some(action) = self.pager.next_action() {
            match action {
                Action::MoveOut(at, frame, protected) => self.moves.push_back((at, frame, protected)),
                Action::Put(frame, place) => self.pending.push(Pending::Put(frame, place)),
                Action::Keep(frame, place) if self.refuses || self.lost && place.slab() == 0 => {
                    self.pager.put_ended(frame, PutEnd::Elsewhere);
                }
                Action::Keep(frame, place) => {
                    assert_eq!(self.frames[&frame], self.places[&place], "a page that has not changed");
                    self.pager.put_ended(frame, PutEnd::Kept);
                }
                Action::Get(frame, place) => self.pending.push(Pending::Get(frame, place)),
                Action::Unprotect(at) => {
                    let is_changing = self.is_changing();
                    if let Some(program) = self.programs.get_mut(&at.space).filter(|_| !is_changing) {
                        program.protected.remove(&at.page);
                    }
                    let outcome = if is_changing { FillOutcome::Changing } else { FillOutcome::Done(1) };
                    self.pager.unprotected(at, outcome);
                }
                Action::Fill(at, contents) => self.fill(at, contents),
                Action::Poison(at) => {
                    assert!(self.lost, "nothing is lost but with a lender");
                    let is_changing = self.is_changing();
                    self.programs.get_mut(&at.space).unwrap().poisoned |= !is_changing;
                    let outcome = if is_changing { FillOutcome::Changing } else { FillOutcome::Done(1) };
                    self.pager.poisoned(at, outcome);
                }
                Action::Wake(_) => {}
                Action::Lease if self.slabs < 4 => {
                    self.slabs += 1;
                    self.pager.add_slab(PLACES_PER_SLAB);
                }
                Action::Lease => self.pager.no_more_slabs(),
            }
        }
    }

    fn is_changing(&mut self) -> bool {
        let is_changing = self.changes > 0;
        self.changes = self.changes.saturating_sub(1);
        is_changing
    }

    fn fill(&mut self, at: PageId, contents: Contents) {
        if self.is_changing() {
            return self.pager.filled(at, contents, FillOutcome::Changing);
        }
        let frame = match contents {
            Contents::Frame(frame) | Contents::Protected(frame) => self.frames[&frame],
            Contents::Zeroes(_) => 0,
        };
        let count = if let Contents::Zeroes(count) = contents { count } else { 1 };
        let Some(program) = self.programs.get_mut(&at.space) else {
            return self.pager.filled(at, contents, FillOutcome::NoMapping);
        };
        let mut done = 0;
        while done < count {
            let page = at.page + done;
            if !program.mapped[page as usize] || program.here.contains_key(&page) {
                break;
            }
            program.here.insert(page, frame);
            if matches!(contents, Contents::Protected(_)) {
                program.protected.insert(page);
            }
            done += 1;
        }
        let outcome = match done {
            0 if !program.mapped[at.page as usize] => FillOutcome::NoMapping,
            0 => FillOutcome::Exists,
            done => FillOutcome::Done(done),
        };
        self.pager.filled(at, contents, outcome);
    }

    /// The helper does what it was told.
    fn move_out(&mut self, choices: &mut Choices) {
        while let Some((at, frame, protected)) = self.moves.pop_front() {
            let stays = choices.below(10) == 0;
            let mut program = self.programs.get_mut(&at.space);
            if let Some(program) = program.as_mut().filter(|program| !stays && program.here.contains_key(&at.page)) {
                let was_protected = program.protected.remove(&at.page);
                assert!(was_protected || !protected, "page {} could be written meanwhile", at.page);
            }
            let outcome = match program.and_then(|program| if stays { None } else { program.here.remove(&at.page) }) {
                Some(0) => Moved::Zeroes,
                Some(bytes) => {
                    self.frames.insert(frame, bytes);
                    Moved::Out
                }
                None if stays => Moved::Stays,
                None => Moved::Missing,
            };
            self.pager.moved(frame, outcome);
        }
        self.act();
    }

    /// One put or get ends.
    fn end_one(&mut self, choices: &mut Choices) {
        if self.pending.is_empty() {
            return;
        }
        let index = choices.below(self.pending.len() as u64) as usize;
        if let Pending::Get(frame, _) = self.pending[index]
            && choices.below(4) == 0
        {
            // It takes long, and is still under way.
            self.pager.get_again(frame);
            return self.act();
        }
        let is_lost = |place: Place| self.lost && place.slab() == 0;
        match self.pending.swap_remove(index) {
            Pending::Put(frame, place) if is_lost(place) => self.pager.put_ended(frame, PutEnd::Elsewhere),
            Pending::Put(frame, place) if self.refuses => {
                // Some of it was written.
                self.places.insert(place, u64::MAX);
                self.pager.put_ended(frame, PutEnd::Refused);
            }
            Pending::Put(frame, place) => {
                self.places.insert(place, self.frames[&frame]);
                self.pager.put_ended(frame, PutEnd::Kept);
            }
            Pending::Get(frame, place) if is_lost(place) => self.pager.got(frame, false),
            Pending::Get(frame, place) => {
                self.frames.insert(frame, self.places[&place]);
                self.pager.got(frame, true);
            }
        }
        self.act();
    }

    /// A program reads or writes a page, and waits for it.
    fn touch(&mut self, space: SpaceId, page: u64, writes: bool, choices: &mut Choices) {
        for turn in 0.. {
            assert!(turn < 20_000, "page {page} does not come: {:?}", self.pager.entry(PageId { space, page }));
            let program = self.programs.get_mut(&space).unwrap();
            if !program.mapped[page as usize] || std::mem::take(&mut program.poisoned) {
                return;
            }
            let is_refused = writes && program.protected.contains(&page);
            if let Some(bytes) = program.here.get_mut(&page).filter(|_| !is_refused) {
                assert_eq!(*bytes, program.wrote.get(&page).copied().unwrap_or(0), "page {page} of {space:?}");
                if writes {
                    self.writes += 1;
                    *bytes = self.writes;
                    program.wrote.insert(page, self.writes);
                }
                return;
            }
            self.move_out(choices);
            if turn == 0 || is_refused {
                let at = PageId { space, page };
                if is_refused { self.pager.write_fault(at) } else { self.pager.fault(at, writes) }
            } else {
                self.end_one(choices);
                self.pager.retry();
            }
            self.act();
        }
    }

    /// A change of mappings: no move is under way when it is told.
    fn change(&mut self, choices: &mut Choices) {
        self.pager.pause_moves(true);
        self.move_out(choices);
        let spaces: Vec<SpaceId> = self.programs.keys().copied().collect();
        let space = spaces[choices.below(spaces.len() as u64) as usize];
        let (from, count) = (choices.below(PAGES - 40), choices.below(40) + 1);
        let program = self.programs.get_mut(&space).unwrap();
        let all_mapped = program.mapped[from as usize..(from + count) as usize].iter().all(|mapped| *mapped);
        match choices.below(4) {
            0 if all_mapped => {
                self.pager.removed(space, from..from + count);
                let program = self.programs.get_mut(&space).unwrap();
                (from..from + count).for_each(|page| program.drop_page(page));
            }
            1 => {
                self.pager.unmapped(space, from..from + count);
                for page in from..from + count {
                    program.drop_page(page);
                    program.mapped[page as usize] = true;
                }
                self.pager.add_pages(space, from..from + count, &[]);
            }
            2 if all_mapped => self.remap(space, from, count, choices),
            3 if self.programs.len() < 3 => self.fork(space),
            _ => {}
        }
        self.act();
        self.pager.pause_moves(false);
        self.act();
    }

    fn remap(&mut self, space: SpaceId, from: u64, count: u64, choices: &mut Choices) {
        let to = choices.below(PAGES - 40);
        if to < from + count && from < to + count {
            return;
        }
        self.pager.remapped(space, from, to, count);
        self.pager.add_pages(space, from..from + count, &[]);
        let program = self.programs.get_mut(&space).unwrap();
        for page in 0..count {
            let moved = [program.here.remove(&(from + page)), program.wrote.remove(&(from + page))];
            for (map, value) in [&mut program.here, &mut program.wrote].into_iter().zip(moved) {
                match value {
                    Some(value) => map.insert(to + page, value),
                    None => map.remove(&(to + page)),
                };
            }
            program.mapped[(to + page) as usize] = true;
            let (was, is) = (program.protected.remove(&(from + page)), to + page);
            if was {
                program.protected.insert(is)
            } else {
                program.protected.remove(&is)
            };
        }
    }

    fn fork(&mut self, parent: SpaceId) {
        let child = SpaceId(100 + self.writes as u32);
        if self.programs.contains_key(&child) {
            return;
        }
        self.pager.forked(parent, child);
        let parent = &self.programs[&parent];
        let (here, wrote, mapped) = (parent.here.clone(), parent.wrote.clone(), parent.mapped.clone());
        let protected = parent.protected.clone();
        self.programs.insert(child, Program { here, wrote, mapped, protected, poisoned: false });
    }
}

fn play(seed: u64, loses: bool, fills_up: bool) {
    let (mut world, mut choices) = (World::new(), Choices(seed));
    for step in 0..4000u32 {
        let spaces: Vec<SpaceId> = world.programs.keys().copied().collect();
        let space = spaces[choices.below(spaces.len() as u64) as usize];
        match choices.below(100) {
            0 | 1 => world.change(&mut choices),
            2 if space != SpaceId(1) => {
                world.programs.remove(&space);
                world.pager.remove_space(space);
                world.act();
            }
            3..10 => {
                let start = choices.below(PAGES - 32);
                (start..start + 32).for_each(|page| world.touch(space, page, false, &mut choices));
            }
            10..40 => world.move_out(&mut choices),
            40..60 => world.end_one(&mut choices),
            60..62 => world.pager.retry_moves(),
            62 => {
                world.refuses = fills_up && !world.refuses;
                if !world.refuses {
                    world.pager.try_places_again();
                }
            }
            63 => world.changes = choices.below(4) as u32,
            _ => {
                let (page, writes) = (choices.below(PAGES), choices.below(2) == 0);
                world.touch(space, page, writes, &mut choices);
            }
        }
        world.act();
        if loses && step == 2000 {
            world.lost = true;
            world.pager.lose_slab(0);
            world.act();
        }
    }
    assert!(loses || world.pager.counters().lost == 0);
    (world.refuses, world.changes) = (false, 0);
    world.pager.try_places_again();
    for _ in 0..10_000 {
        world.move_out(&mut choices);
        world.end_one(&mut choices);
    }
    assert!(world.pager.local_pages() <= BUDGET, "seed {seed}: {} pages here", world.pager.local_pages());
    let spaces: Vec<SpaceId> = world.programs.keys().copied().collect();
    for space in spaces {
        world.programs.remove(&space);
        world.pager.remove_space(space);
    }
    world.act();
    while !world.pending.is_empty() || !world.moves.is_empty() {
        world.move_out(&mut choices);
        world.end_one(&mut choices);
    }
    assert_eq!((world.pager.local_pages(), world.pager.far_pages()), (0, 0), "seed {seed}: nothing is left");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_page_has_what_was_written_last(seed: u64) {
        play(seed, false, false);
    }

    #[test]
    fn a_lost_lender_poisons_its_pages_and_changes_none(seed: u64) {
        play(seed, true, false);
    }

    #[test]
    fn a_page_whose_put_is_refused_stays_here_and_its_forked_copies_too(seed: u64) {
        play(seed, false, true);
    }
}

#[test]
fn a_touch_of_a_page_on_its_way_out_costs_no_message() {
    let mut pager = Pager::new(FRAMES, 0);
    let (space, at) = (SpaceId(1), PageId { space: SpaceId(1), page: 7 });
    pager.add_space(space, true);
    pager.add_slab(PLACES_PER_SLAB);
    pager.add_pages(space, 7..8, std::slice::from_ref(&(7..8)));
    assert_eq!(pager.next_action(), Some(Action::MoveOut(at, 0, false)));
    pager.fault(at, false);
    assert_eq!(pager.next_action(), None, "it waits for the move's end");
    pager.moved(0, Moved::Out);
    assert!(matches!(pager.next_action(), Some(Action::Put(0, _))));
    assert_eq!(pager.next_action(), Some(Action::Fill(at, Contents::Frame(0))));
    pager.filled(at, Contents::Frame(0), FillOutcome::Done(1));
    pager.put_ended(0, PutEnd::Kept);
    assert_eq!((pager.far_pages(), pager.counters().returned), (0, 1), "its place is free");
}

#[test]
fn a_page_that_is_moved_about_for_ever_has_a_bounded_number_of_arrivals() {
    let mut pager = Pager::new(FRAMES, BUDGET);
    let space = SpaceId(1);
    pager.add_space(space, true);
    pager.add_pages(space, 7..8, std::slice::from_ref(&(7..8)));
    for _ in 0..2 * ARRIVALS_SPARE {
        pager.remapped(space, 7, 9, 1);
        pager.remapped(space, 9, 7, 1);
    }
    assert!(pager.arrivals.len() <= 2 + ARRIVALS_SPARE);
    pager.add_slab(PLACES_PER_SLAB);
    pager.set_budget(0);
    let at = PageId { space, page: 7 };
    assert_eq!(pager.next_action(), Some(Action::MoveOut(at, 0, false)), "it can still go");
}

/// A program with so many pages here, in the order of their numbers, and as many slabs as it takes.
fn a_pager_with(budget: usize, pages: u64) -> (Pager, SpaceId) {
    let (mut pager, space) = (Pager::new(512, budget), SpaceId(1));
    pager.add_space(space, true);
    pager.add_slab(PLACES_PER_SLAB);
    pager.add_pages(space, 0..pages, std::slice::from_ref(&(0..pages)));
    (pager, space)
}

/// Carries everything out at once; gives the pages that went and those that came, in order.
fn settle(pager: &mut Pager) -> (Vec<u64>, Vec<u64>) {
    let (mut went, mut came) = (Vec::new(), Vec::new());
    let mut moves = VecDeque::new();
    loop {
        match pager.next_action() {
            Some(Action::MoveOut(at, frame, _)) => {
                went.push(at.page);
                moves.push_back(frame);
            }
            Some(Action::Put(frame, _) | Action::Keep(frame, _)) => pager.put_ended(frame, PutEnd::Kept),
            Some(Action::Get(frame, _)) => pager.got(frame, true),
            Some(Action::Fill(at, contents)) => {
                came.push(at.page);
                pager.filled(at, contents, FillOutcome::Done(1));
            }
            Some(Action::Lease) => pager.no_more_slabs(),
            Some(Action::Poison(_) | Action::Wake(_) | Action::Unprotect(_)) => {}
            None => match moves.pop_front() {
                Some(frame) => pager.moved(frame, Moved::Out),
                None => return (went, came),
            },
        }
    }
}

/// Carries everything out, but for 19 of 20 moves: those pages stay. Gives how many.
fn refuse_most_moves(pager: &mut Pager) -> u64 {
    let (mut moves, mut tried, mut stayed) = (VecDeque::new(), 0, 0);
    loop {
        match pager.next_action() {
            Some(Action::MoveOut(_, frame, _)) => moves.push_back(frame),
            Some(Action::Put(frame, _)) => pager.put_ended(frame, PutEnd::Kept),
            Some(_) => {}
            None => {
                let Some(frame) = moves.pop_front() else { return stayed };
                tried += 1;
                let is_out = tried % 20 == 0;
                stayed += u64::from(!is_out);
                pager.moved(frame, if is_out { Moved::Out } else { Moved::Stays });
            }
        }
    }
}

#[test]
fn pages_of_which_nearly_all_stay_are_left_alone_until_they_are_to_be_tried_again() {
    let (mut pager, _) = a_pager_with(1000, 2000);
    let stayed = refuse_most_moves(&mut pager);
    assert!((1000..4000).contains(&stayed), "{stayed} moves came to nothing, of 2,000 pages");
    pager.retry_moves();
    assert!(refuse_most_moves(&mut pager) > 1000);
}

#[test]
fn a_scan_of_far_pages_is_brought_ahead_while_there_is_room() {
    let (mut pager, space) = a_pager_with(1000, 2000);
    settle(&mut pager);
    let mut faults = 0;
    for page in 0..1000 {
        let at = PageId { space, page };
        if !pager.entry(at).is_some_and(Entry::is_here) {
            faults += 1;
            pager.fault(at, false);
            assert_eq!(settle(&mut pager).1.first(), Some(&page), "the page that is waited for comes first");
        }
        assert!(pager.local_pages() <= 1000);
    }
    let counters = pager.counters();
    assert!(faults < 60, "{faults} faults of 1,000 pages: {counters:?}");
    assert!(counters.ahead > 900 && counters.ahead - counters.ahead_used <= 64, "{counters:?}");
}

#[test]
fn pages_go_in_batches_and_not_one_for_each_that_comes() {
    let (mut pager, space) = a_pager_with(1000, 2000);
    settle(&mut pager);
    let mut batches = 0;
    for page in 0..500 {
        pager.fault(PageId { space, page: page * 3 % 2000 }, false);
        batches += usize::from(!settle(&mut pager).0.is_empty());
    }
    assert!((1..20).contains(&batches), "{batches} batches for 500 pages that came");
}

#[test]
fn a_page_that_is_used_again_and_again_stays_longer_than_those_that_are_used_once() {
    let (mut pager, space) = a_pager_with(1000, 3000);
    settle(&mut pager);
    let (hot, mut bounces) = (PageId { space, page: 2999 }, 0);
    for round in 0..20_000 {
        // At random: nothing is brought ahead.
        pager.fault(PageId { space, page: round * 7919 % 2900 }, false);
        settle(&mut pager);
        if !pager.entry(hot).is_some_and(Entry::is_here) {
            bounces += 1;
            pager.fault(hot, false);
            settle(&mut pager);
        }
    }
    let arrivals = pager.counters().fetched + pager.counters().returned;
    // Without a second chance it goes with each 870 pages that come.
    assert!(bounces * 1500 < arrivals, "{bounces} times for {arrivals} pages that came");
}

#[test]
fn a_page_that_takes_long_is_got_again_into_another_frame_and_the_first_one_waits_for_its_get() {
    let (mut pager, space) = a_pager_with(1000, 2000);
    settle(&mut pager);
    let at = PageId { space, page: 0 };
    pager.fault(at, true);
    let Some(Action::Get(slow, place)) = pager.next_action() else { panic!("a get") };
    pager.get_again(slow);
    let gets: Vec<_> = std::iter::from_fn(|| pager.next_action()).collect();
    let again = gets.iter().find_map(|action| match action {
        Action::Get(frame, other) if *other == place => Some(*frame),
        _ => None,
    });
    let again = again.unwrap();
    assert_ne!(again, slow);
    pager.got(again, true);
    assert!(matches!(pager.next_action(), Some(Action::Fill(page, _)) if page == at));
    assert!(pager.places.references(place) > 1, "the place is no other page's before the first get has ended");
    pager.filled(at, Contents::Frame(again), FillOutcome::Done(1));
    pager.got(slow, true);
    assert_eq!((pager.frames.get(slow), pager.places.references(place)), (Frame::Free, 0));
}
