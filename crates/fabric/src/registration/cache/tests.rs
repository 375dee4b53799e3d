//! The cache against a naive model that looks through everything, and against the rule that it is there for: what a look-up
//! finds was registered after the last change of each of its pages.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { ranges_max: 5, bytes_max: 24 * PAGE };
const PAGE: usize = 4096;
const PAGES: usize = 40;

fn pages(first: usize, count: usize) -> PageRange {
    PageRange::covering((first + 1) * PAGE, count * PAGE).unwrap()
}

fn indices(range: PageRange) -> std::ops::Range<usize> {
    range.start() / PAGE..range.end() / PAGE
}

#[derive(Clone, Debug)]
enum Step {
    Get(PageRange),
    GetSlowly(PageRange),
    Finish { which: usize, refused: bool },
    Release(usize),
    Change(Change),
    Lift,
    Flush,
    Evict(usize),
    Pop { elsewhere: bool, around: usize },
    Close(usize),
    Fork,
    ForkOver,
}

fn any_range() -> impl Strategy<Value = PageRange> {
    (0..PAGES - 8, 1..8usize).prop_map(|(first, count)| pages(first, count))
}

fn any_step() -> impl Strategy<Value = Step> {
    let which = 0..64usize;
    prop_oneof![
        12 => any_range().prop_map(Step::Get),
        4 => any_range().prop_map(Step::GetSlowly),
        4 => (which.clone(), any::<bool>()).prop_map(|(which, refused)| Step::Finish { which, refused }),
        12 => which.clone().prop_map(Step::Release),
        3 => any_range().prop_map(|range| Step::Change(Change::Unmapped(range))),
        1 => (any_range(), any_range()).prop_map(|(from, to)| Step::Change(Change::Remapped { from, to })),
        1 => any_range().prop_map(|range| Step::Change(Change::Removed(range))),
        1 => Just(Step::Lift),
        1 => Just(Step::Flush),
        1 => (1..10usize).prop_map(|count| Step::Evict(count * PAGE)),
        6 => (any::<bool>(), 0..3usize).prop_map(|(elsewhere, around)| Step::Pop { elsewhere, around }),
        4 => which.prop_map(Step::Close),
        1 => Just(Step::Fork),
        2 => Just(Step::ForkOver),
    ]
}

/// A registration, as the model sees it.
#[derive(Clone, Debug)]
struct Known {
    id: u32,
    range: PageRange,
    users: u32,
    /// When it last became idle.
    idle_since: u64,
    /// What its pages had been through when it was begun.
    versions: Vec<u64>,
    is_found: bool,
    is_spoiled: bool,
}

struct Pair {
    cache: Cache<u32>,
    registering: Vec<(Ticket, Known)>,
    made: Vec<Known>,
    uses: Vec<(Ticket, u32)>,
    closing: Vec<(Ticket, PageRange)>,
    /// How often each page changed.
    versions: Vec<u64>,
    suspects: BTreeSet<usize>,
    forks: u32,
    now: u64,
    next: u32,
}

impl Pair {
    fn new() -> Self {
        Self {
            cache: Cache::new(LIMITS),
            registering: Vec::new(),
            made: Vec::new(),
            uses: Vec::new(),
            closing: Vec::new(),
            versions: vec![0; PAGES + 2],
            suspects: BTreeSet::new(),
            forks: 0,
            now: 0,
            next: 0,
        }
    }

    fn known(&mut self, id: u32) -> &mut Known {
        self.made.iter_mut().find(|known| known.id == id).unwrap()
    }

    fn found(&self) -> impl Iterator<Item = &Known> {
        self.made.iter().filter(|known| known.is_found)
    }

    /// The model's own answer, and the cache's.
    fn get(&mut self, wanted: PageRange, at_once: bool) {
        let expected = self.found().find(|known| known.range.contains(wanted) && self.forks == 0);
        let expected = expected.map(|known| known.id);
        let hit = self.cache.look_up(wanted);
        assert_eq!(hit.map(|(_, id)| id), expected, "{wanted:?}");
        if let Some((ticket, id)) = hit {
            let known = self.known(id).clone();
            assert_eq!(known.versions, self.versions[indices(known.range)], "stale: {wanted:?}");
            self.known(id).users += 1;
            self.uses.push((ticket, id));
            return;
        }
        let merged = self.merged(wanted);
        let range = if self.obstacle(merged) { wanted } else { merged };
        let before: Vec<u32> = self.found().map(|known| known.id).collect();
        let has_room =
            !self.obstacle(range) && self.registering.len() < REGISTRATIONS_IN_FLIGHT_MAX && self.make_room(range);
        match self.cache.begin(wanted) {
            Plan::Register { ticket, range: planned } => {
                assert!(has_room, "no room for {wanted:?} beside {before:?}");
                assert_eq!(planned, range);
                let versions = self.versions[indices(range)].to_vec();
                let id = self.next;
                self.next += 1;
                let known = Known { id, range, users: 1, idle_since: 0, versions, is_found: false, is_spoiled: false };
                self.registering.push((ticket, known));
                if at_once {
                    self.finish(self.registering.len() - 1, false);
                }
            }
            Plan::Once(reason) => assert!(!has_room, "{reason:?} for {wanted:?} beside {before:?}"),
        }
    }

    fn obstacle(&self, range: PageRange) -> bool {
        let is_suspect = indices(range).any(|page| self.suspects.contains(&page));
        let is_closing = self.closing.iter().any(|(_, other)| other.overlaps(range));
        self.forks > 0 || range.bytes() > LIMITS.bytes_max || is_suspect || is_closing
    }

    fn merged(&self, wanted: PageRange) -> PageRange {
        let mut merged = wanted;
        for known in self.found().filter(|known| known.range.overlaps(wanted)) {
            merged = merged.hull(known.range);
        }
        let core = merged;
        for known in self.found().filter(|known| known.users == 0 && known.range.bytes() <= wanted.bytes()) {
            if known.range.end() == core.start() || known.range.start() == core.end() {
                merged = merged.hull(known.range);
            }
        }
        merged
    }

    fn taken_bytes(&self) -> usize {
        let found: usize = self.found().map(|known| known.range.bytes()).sum();
        found + self.registering.iter().map(|(_, known)| known.range.bytes()).sum::<usize>()
    }

    fn evict_oldest(&mut self) -> bool {
        let idle = self.made.iter_mut().filter(|known| known.is_found && known.users == 0);
        idle.min_by_key(|known| known.idle_since).map(|known| known.is_found = false).is_some()
    }

    fn make_room(&mut self, range: PageRange) -> bool {
        while self.found().count() + self.registering.len() >= LIMITS.ranges_max
            || self.taken_bytes() + range.bytes() > LIMITS.bytes_max
        {
            if !self.evict_oldest() {
                return false;
            }
        }
        true
    }

    fn finish(&mut self, which: usize, refused: bool) {
        let (ticket, mut known) = self.registering.remove(which);
        if refused {
            self.cache.abandon(ticket, known.id % 2 == 0);
            return;
        }
        let is_there = self.found().any(|other| other.range.contains(known.range));
        let expected = !known.is_spoiled && self.forks == 0 && !is_there;
        let kept = self.cache.complete(ticket, known.id);
        assert_eq!(kept, if expected { Ok(()) } else { Err(known.id) });
        if expected {
            self.hide(known.range);
            known.is_found = true;
            self.uses.push((ticket, known.id));
            self.made.push(known);
        }
    }

    fn hide(&mut self, range: PageRange) {
        self.made.iter_mut().filter(|known| known.range.overlaps(range)).for_each(|known| known.is_found = false);
    }

    fn touch(&mut self, range: PageRange) {
        self.hide(range);
        indices(range).for_each(|page| self.versions[page] += 1);
        let overlapping = self.registering.iter_mut().filter(|(_, known)| known.range.overlaps(range));
        overlapping.for_each(|(_, known)| known.is_spoiled = true);
    }

    fn change(&mut self, change: Change) {
        self.cache.change(change);
        match change {
            Change::Unmapped(range) => self.touch(range),
            Change::Remapped { from, to } => [from, to].into_iter().for_each(|range| self.touch(range)),
            Change::Removed(range) => {
                self.touch(range);
                self.suspects.extend(indices(range));
            }
        }
    }

    fn release(&mut self, which: usize) {
        if self.uses.is_empty() {
            return;
        }
        let (ticket, id) = self.uses.swap_remove(which % self.uses.len());
        self.now += 1;
        let now = self.now;
        let known = self.known(id);
        known.users -= 1;
        known.idle_since = now;
        self.cache.release(ticket);
    }

    /// `around`: the mapping is so many pages longer than the range, on both sides.
    fn pop(&mut self, elsewhere: bool, around: usize) -> bool {
        let Some(range) = self.cache.next_condemned() else { return false };
        let longer = PageRange::covering(range.start() - around.min(1) * PAGE, range.bytes() + 2 * around * PAGE);
        let mapping = longer.filter(|_| !elsewhere);
        let condemned = self.cache.pop_condemned(mapping).unwrap();
        if let Some(id) = condemned.value {
            let at = self.made.iter().position(|known| known.id == id).expect("condemned once");
            let known = self.made.remove(at);
            assert!(known.users == 0 && !known.is_found, "{known:?} is in use or found");
        }
        let in_mapping = |known: &Known| mapping.is_some_and(|mapping| known.range.overlaps(mapping));
        let needed = self.found().any(in_mapping) || self.registering.iter().any(|(_, known)| in_mapping(known));
        assert_eq!(condemned.unwatched, mapping.filter(|_| !needed));
        match condemned.unwatched {
            Some(mapping) => self.closing.push((condemned.ticket, mapping)),
            None => self.cache.closed(condemned.ticket),
        }
        true
    }

    fn flush(&mut self) {
        self.made.iter_mut().for_each(|known| known.is_found = false);
        self.registering.iter_mut().for_each(|(_, known)| known.is_spoiled = true);
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Get(range) => self.get(range, true),
            Step::GetSlowly(range) => self.get(range, false),
            Step::Finish { which, refused } if !self.registering.is_empty() => {
                self.finish(which % self.registering.len(), refused);
            }
            Step::Release(which) => self.release(which),
            Step::Change(change) => self.change(change),
            Step::Lift => {
                self.cache.lift(self.cache.suspicion());
                self.suspects.clear();
            }
            Step::Flush => {
                self.cache.flush();
                self.flush();
            }
            Step::Evict(bytes) => {
                let before = self.taken_bytes();
                while before - self.taken_bytes() < bytes && self.evict_oldest() {}
                assert_eq!(self.cache.evict(bytes), before != self.taken_bytes());
            }
            Step::Pop { elsewhere, around } => drop(self.pop(elsewhere, around)),
            Step::Close(which) if !self.closing.is_empty() => {
                let (ticket, _) = self.closing.swap_remove(which % self.closing.len());
                self.cache.closed(ticket);
            }
            Step::Fork => {
                self.cache.fork_begins();
                self.flush();
                self.forks += 1;
            }
            Step::ForkOver if self.forks > 0 => {
                self.cache.fork_ends();
                self.forks -= 1;
            }
            Step::Finish { .. } | Step::Close(_) | Step::ForkOver => {}
        }
    }

    fn check(&self) {
        let counters = self.cache.counters();
        assert_eq!(counters.ranges, self.found().count());
        assert_eq!(counters.bytes, self.found().map(|known| known.range.bytes()).sum::<usize>());
        assert_eq!(counters.in_use, self.found().filter(|known| known.users > 0).count());
        assert_eq!(counters.detached, self.made.iter().filter(|known| !known.is_found && known.users > 0).count());
        assert!(counters.ranges <= LIMITS.ranges_max && counters.bytes <= LIMITS.bytes_max, "{counters:?}");
        assert!(self.cache.live.windows(2).all(|pair| pair[0].0.end() <= pair[1].0.start()), "{:?}", self.cache.live);
    }

    /// Everything ends: each value has come out once.
    fn end(mut self) {
        while !self.registering.is_empty() {
            self.finish(0, false);
        }
        while !self.uses.is_empty() {
            self.release(0);
        }
        self.cache.flush();
        self.flush();
        while self.pop(true, 0) {}
        self.closing.drain(..).for_each(|(ticket, _)| self.cache.closed(ticket));
        assert!(self.made.is_empty() && self.cache.is_empty(), "{:?}", self.made);
        assert_eq!(self.cache.bytes, 0);
    }
}

/// The room of all tables: under the lock none may grow.
fn capacities(cache: &Cache<u32>) -> [usize; 6] {
    let lists = [cache.free.capacity(), cache.registering.capacity(), cache.closing.capacity()];
    [cache.slots.capacity(), cache.live.capacity(), cache.condemned.capacity(), lists[0], lists[1], lists[2]]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn it_does_what_the_naive_model_does(steps in prop::collection::vec(any_step(), 1..120)) {
        let mut pair = Pair::new();
        let before = capacities(&pair.cache);
        for step in steps {
            pair.take(step);
            pair.check();
        }
        prop_assert_eq!(capacities(&pair.cache), before);
        pair.end();
    }
}

fn cached(cache: &mut Cache<u32>, range: PageRange, id: u32) -> Ticket {
    let Plan::Register { ticket, .. } = cache.begin(range) else { panic!("{range:?} is not to be kept") };
    cache.complete(ticket, id).unwrap();
    ticket
}

#[test]
fn limits_of_any_size_are_taken() {
    let mut cache = Cache::new(Limits { ranges_max: usize::MAX, bytes_max: usize::MAX });
    cached(&mut cache, pages(0, 2), 7);
    assert_eq!(cache.look_up(pages(1, 1)).map(|(_, id)| id), Some(7));
}

#[test]
fn a_walk_registers_a_page_as_often_as_its_length_doubles() {
    let mut cache = Cache::new(Limits { ranges_max: 64, bytes_max: 1 << 30 });
    let mut registered = 0;
    for page in 0..1024 {
        let Plan::Register { ticket, range } = cache.begin(pages(page, 1)) else { panic!() };
        registered += range.bytes() / PAGE;
        cache.complete(ticket, 0).unwrap();
        cache.release(ticket);
        while let Some(condemned) = cache.pop_condemned(None) {
            cache.closed(condemned.ticket);
        }
    }
    assert!(registered <= 1024 * 11, "{registered} pages registered");
}

#[test]
fn what_is_in_use_is_condemned_by_its_last_user() {
    let mut cache = Cache::new(LIMITS);
    let first = cached(&mut cache, pages(0, 2), 7);
    let (second, _) = cache.look_up(pages(1, 1)).unwrap();
    cache.change(Change::Unmapped(pages(1, 1)));
    assert!(cache.look_up(pages(0, 1)).is_none());
    cache.release(first);
    assert!(cache.next_condemned().is_none());
    cache.release(second);
    assert_eq!(cache.pop_condemned(None).unwrap().value, Some(7));
}

#[test]
fn a_change_during_registration_keeps_it_from_being_found() {
    let mut cache = Cache::new(LIMITS);
    let Plan::Register { ticket, .. } = cache.begin(pages(0, 2)) else { panic!() };
    cache.change(Change::Unmapped(pages(1, 4)));
    assert_eq!(cache.complete(ticket, 7), Err(7));
    assert!(cache.look_up(pages(0, 2)).is_none());
}

#[test]
fn an_old_ticket_ends_nothing() {
    let mut cache = Cache::new(LIMITS);
    let old = cached(&mut cache, pages(0, 1), 1);
    cache.release(old);
    cache.flush();
    let condemned = cache.pop_condemned(None).unwrap();
    cache.closed(condemned.ticket);
    let new = cached(&mut cache, pages(0, 1), 2);
    assert_eq!(new.slot, old.slot, "it has the same place");
    cache.release(old);
    cache.closed(old);
    assert_eq!(cache.counters().in_use, 1);
}
