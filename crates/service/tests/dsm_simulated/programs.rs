//! What simulated threads do.

use byway_service::dsm::{Consistency, Rank};

use super::{Chance, PAGE_WORDS, SimulatedJob};

/// A step of a thread's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Load(usize),
    /// Every value is stored once.
    Store(usize, u64),
    /// A device stores the value: the page is pinned first, and the value comes some time later.
    Receive(usize, u64),
    Lock(u32),
    Unlock(u32),
    Barrier(u32),
    Fence,
    /// Asks for so many pages from this one on.
    Fetch(usize, usize),
}

/// A job by chance: 2 to 8 ranks with 1 or 2 threads, 1 to 4 pages, loads, stores and direct reads, some under locks and between
/// barriers. One of four has a rank killed, and in the others half leave the job when all are done.
pub fn any(seed: u64) -> SimulatedJob {
    let mut chance = Chance::new(seed ^ 0x6a6f_6273);
    let (ranks, pages) = (2 + chance.below(7), 1 + chance.below(4));
    let (locks, barriers) = (1 + chance.below(3), chance.below(3));
    let mut value = 0;
    let programs = (0..ranks).map(|_| {
        let threads = 1 + chance.below(2);
        let thread = |place| program(&mut chance, pages, locks, if place == 0 { barriers } else { 0 }, &mut value);
        (0..threads).map(thread).collect()
    });
    let programs: Vec<_> = programs.collect();
    let killed = chance.one_in(4).then(|| (chance.below(3000), chance.below(ranks) as Rank));
    let leaves = killed.is_none() && chance.one_in(2);
    SimulatedJob { ranks: programs, pages, consistency: Consistency::Sequential, races: true, killed, leaves }
}

fn program(chance: &mut Chance, pages: usize, locks: usize, barriers: usize, value: &mut u64) -> Vec<Op> {
    let mut ops = Vec::new();
    for phase in 0..=barriers {
        for _ in 0..2 + chance.below(4) {
            let word = chance.below(pages * PAGE_WORDS);
            let mut store = |word| {
                *value += 1;
                Op::Store(word, *value)
            };
            match chance.below(9) {
                0 => {
                    let first = chance.below(pages);
                    ops.push(Op::Fetch(first, 1 + chance.below(pages - first)));
                }
                1 => {
                    let lock = chance.below(locks) as u32;
                    ops.extend([Op::Lock(lock), Op::Load(word), store(word), Op::Unlock(lock)]);
                }
                2..=3 => ops.push(store(word)),
                4 => {
                    *value += 1;
                    ops.push(Op::Receive(word, *value));
                }
                _ => ops.push(Op::Load(word)),
            }
        }
        if phase < barriers {
            ops.push(Op::Barrier(phase as u32));
        }
    }
    ops
}

/// A job by chance whose accesses race, with release consistency: 2 to 4 ranks. Any two values differ in each byte, as stores that race may
/// leave bytes of both.
pub fn racing(seed: u64) -> SimulatedJob {
    let mut chance = Chance::new(seed ^ 0x7261_6365);
    let (ranks, pages) = (2 + chance.below(3), 1 + chance.below(3));
    let (locks, barriers) = (1 + chance.below(2), chance.below(3));
    let mut value = 0;
    let mut thread = |place| {
        let ops = program(&mut chance, pages, locks, if place == 0 { barriers } else { 0 }, &mut value);
        let fenced = |op| if chance.one_in(8) { vec![Op::Fence, op] } else { vec![op] };
        ops.into_iter().flat_map(fenced).map(spread).collect::<Vec<_>>()
    };
    let programs: Vec<Vec<_>> = (0..ranks).map(|rank| (0..=rank % 2).map(&mut thread).collect()).collect();
    assert!(value < 256, "every byte of a value says which it is");
    SimulatedJob { ranks: programs, pages, consistency: Consistency::Release, races: true, killed: None, leaves: true }
}

/// Rank 2 has a copy that rank 0 changes before its fence; rank 1's fence comes later, and its lock then goes to rank 2. That rank hears of
/// no change by notices, as rank 1 never had the page.
pub fn fence_then_lock() -> SimulatedJob {
    let (lock, word, other) = (0, 1, PAGE_WORDS);
    let ranks = vec![
        vec![vec![Op::Load(word), Op::Store(word, 1), Op::Fence]],
        vec![vec![Op::Lock(lock), Op::Load(other), Op::Fence, Op::Unlock(lock)]],
        vec![vec![Op::Load(word), Op::Lock(lock), Op::Load(word), Op::Unlock(lock)]],
    ];
    let consistency = Consistency::Release;
    SimulatedJob { ranks, pages: 2, consistency, races: true, killed: None, leaves: true }
}

fn spread(op: Op) -> Op {
    const EACH_BYTE: u64 = 0x0101_0101_0101_0101;
    match op {
        Op::Store(word, value) => Op::Store(word, value * EACH_BYTE),
        Op::Receive(word, value) => Op::Receive(word, value * EACH_BYTE),
        other => other,
    }
}

/// What orders the accesses of a word.
#[derive(Clone, Copy)]
enum Guard {
    Lock(u32),
    /// In each phase between barriers one rank alone uses it, or all ranks load from it.
    Phases,
}

/// A job by chance without data races, with release consistency: 2 to 8 ranks with 1 or 2 threads, words of 1 to 4 pages that locks guard or
/// that ranks own from barrier to barrier. One of three is narrow: the threads of 3 ranks meet at two locks whose words share a page, since it
/// takes two threads of a rank to overtake a notice. One of eight has a rank killed.
pub fn race_free(seed: u64) -> SimulatedJob {
    let mut chance = Chance::new(seed ^ 0x6f72_6465);
    let is_narrow = chance.one_in(3);
    let (ranks, pages) = if is_narrow { (3, 1) } else { (2 + chance.below(7), 1 + chance.below(4)) };
    let (locks, barriers) = if is_narrow { (2, 4) } else { (1 + chance.below(3), chance.below(5)) };
    let words = pages * PAGE_WORDS;
    let mut guard = |word: usize| {
        if is_narrow {
            Guard::Lock((word % locks) as u32)
        } else if chance.one_in(2) {
            Guard::Lock(chance.below(locks) as u32)
        } else {
            Guard::Phases
        }
    };
    let guards: Vec<Guard> = (0..words).map(&mut guard).collect();
    let mut owner = || (0..words).map(|_| Some(chance.below(ranks + 2)).filter(|owner| *owner < ranks)).collect();
    let owners: Vec<Vec<Option<usize>>> = (0..=barriers).map(|_| owner()).collect();
    let mut writer = Writer { chance, value: 0 };
    let programs = (0..ranks).map(|rank| {
        let threads = if is_narrow { 2 } else { 1 + writer.chance.below(2) };
        let mut all = vec![Vec::new(); threads];
        for (phase, owners) in owners.iter().enumerate() {
            let first = &mut all[0];
            writer.phase(first, &guards, |word| (owners[word] == Some(rank), owners[word].is_none()));
            if phase < barriers {
                first.push(Op::Barrier(phase as u32));
            }
        }
        // A second thread does not meet the others at barriers.
        if let Some(second) = all.get_mut(1) {
            (0..=barriers).for_each(|_| writer.phase(second, &guards, |_| (false, false)));
        }
        all
    });
    let programs = programs.collect();
    let killed = writer.chance.one_in(8).then(|| (writer.chance.below(3000), writer.chance.below(ranks) as Rank));
    SimulatedJob {
        ranks: programs,
        pages,
        consistency: Consistency::Release,
        races: false,
        leaves: killed.is_none(),
        killed,
    }
}

struct Writer {
    chance: Chance,
    value: u64,
}

impl Writer {
    fn store(&mut self, word: usize) -> Op {
        self.value += 1;
        if self.chance.one_in(5) { Op::Receive(word, self.value) } else { Op::Store(word, self.value) }
    }

    /// Some accesses of a thread. `may` says of a word whether the thread may store to it, and whether it may load.
    fn phase(&mut self, ops: &mut Vec<Op>, guards: &[Guard], may: impl Fn(usize) -> (bool, bool)) {
        for _ in 0..2 + self.chance.below(4) {
            let word = self.chance.below(guards.len());
            match guards[word] {
                Guard::Lock(lock) => {
                    ops.extend([Op::Lock(lock), Op::Load(word), self.store(word)]);
                    let others =
                        (0..guards.len()).filter(|other| matches!(guards[*other], Guard::Lock(its) if its == lock));
                    let others: Vec<usize> = others.collect();
                    let other = others[self.chance.below(others.len())];
                    ops.extend([Op::Load(other), Op::Unlock(lock)]);
                }
                Guard::Phases => match may(word) {
                    (true, _) if self.chance.one_in(2) => ops.push(self.store(word)),
                    (true, _) | (_, true) => ops.push(Op::Load(word)),
                    // A copy that the rank may not use yet.
                    _ => ops.push(Op::Fetch(word / PAGE_WORDS, 1)),
                },
            }
        }
    }
}
