//! What simulated threads do.

use byway_service::dsm::Rank;

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
    SimulatedJob { ranks: programs, pages, killed, leaves }
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
            match chance.below(8) {
                0 => {
                    let lock = chance.below(locks) as u32;
                    ops.extend([Op::Lock(lock), Op::Load(word), store(word), Op::Unlock(lock)]);
                }
                1..=2 => ops.push(store(word)),
                3 => {
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
