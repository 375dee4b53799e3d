//! The litmus tests of sequential consistency: small programs, each with an outcome that no one order of loads and stores has.
//! (Names as in Alglave, Maranget and Tautschnig, "Herding cats", 2014.)

use super::history::Event;
use super::programs::Op::{self, Barrier, Load, Store};
use super::{PAGE_WORDS, SimulatedJob};
use byway_service::dsm::Consistency;

/// A program, and whether an outcome, the values of all loads in the order of threads, is forbidden.
pub struct Litmus {
    pub name: &'static str,
    threads: Vec<Vec<Op>>,
    pub forbids: fn(&[u64]) -> bool,
}

/// The words: `x` and `y`, of one page or of two.
#[derive(Clone, Copy)]
pub struct Words(usize, usize);

impl Words {
    pub const ALL: [Self; 2] = [Self(0, 1), Self(0, PAGE_WORDS)];
}

/// The catalogue. Where it asks what a word holds in the end, the first thread looks behind a barrier.
pub fn catalogue(Words(x, y): Words) -> Vec<Litmus> {
    let done = Barrier(0);
    // Each rank has a copy of both words at first, so that stale ones can show.
    let begin = [Load(x), Load(y), Barrier(1)];
    let whole = |thread: Vec<Op>| [&begin[..], &thread].concat();
    let of = |name, threads: Vec<Vec<Op>>, forbids| Litmus {
        name,
        threads: threads.into_iter().map(whole).collect(),
        forbids,
    };
    vec![
        of("SB", vec![vec![Store(x, 1), Load(y)], vec![Store(y, 1), Load(x)]], |seen| seen == [0, 0]),
        of("MP", vec![vec![Store(x, 1), Store(y, 1)], vec![Load(y), Load(x)]], |seen| seen == [1, 0]),
        of("LB", vec![vec![Load(x), Store(y, 1)], vec![Load(y), Store(x, 1)]], |seen| seen == [1, 1]),
        of("R", vec![vec![Store(x, 1), Store(y, 1), done, Load(y)], vec![Store(y, 2), Load(x), done]], |seen| {
            seen == [2, 0]
        }),
        of("S", vec![vec![Store(x, 2), Store(y, 1), done, Load(x)], vec![Load(y), Store(x, 1), done]], |seen| {
            seen == [2, 1]
        }),
        of(
            "2+2W",
            vec![vec![Store(x, 1), Store(y, 2), done, Load(x), Load(y)], vec![Store(y, 1), Store(x, 2), done]],
            |seen| seen == [1, 1],
        ),
        of(
            "IRIW",
            vec![vec![Store(x, 1)], vec![Store(y, 1)], vec![Load(x), Load(y)], vec![Load(y), Load(x)]],
            |seen| seen == [1, 0, 1, 0],
        ),
        of("CoRR", vec![vec![Store(x, 1)], vec![Load(x), Load(x)]], |seen| seen == [1, 0]),
    ]
}

impl Litmus {
    /// Each thread is a rank.
    pub fn job(&self) -> SimulatedJob {
        self.job_of(Consistency::Sequential, Vec::clone)
    }

    /// With release consistency and nothing that orders.
    pub fn released(&self) -> SimulatedJob {
        self.job_of(Consistency::Release, Vec::clone)
    }

    /// With release consistency and a fence before each access.
    pub fn fenced(&self) -> SimulatedJob {
        let fences = |thread: &Vec<Op>| thread.iter().flat_map(|op| [Op::Fence, *op]).collect();
        self.job_of(Consistency::Release, fences)
    }

    /// With release consistency and each thread's accesses between barriers under one lock.
    pub fn locked(&self) -> SimulatedJob {
        let locks = |thread: &Vec<Op>| {
            let parts = thread.split_inclusive(|op| matches!(op, Barrier(_)));
            let mut ops = Vec::new();
            for part in parts {
                let (accesses, end) = match part.split_last() {
                    Some((end @ Barrier(_), accesses)) => (accesses, Some(*end)),
                    _ => (part, None),
                };
                ops.extend([&[Op::Lock(0)], accesses, &[Op::Unlock(0)]].concat());
                ops.extend(end);
            }
            ops
        };
        self.job_of(Consistency::Release, locks)
    }

    fn job_of(&self, consistency: Consistency, change: impl Fn(&Vec<Op>) -> Vec<Op>) -> SimulatedJob {
        let ranks = self.threads.iter().map(|thread| vec![change(thread)]).collect();
        SimulatedJob { ranks, pages: 2, consistency, races: true, killed: None, leaves: false }
    }

    /// The values of all loads, thread by thread, but for the first two of each.
    pub fn outcome(&self, events: &[Event]) -> Vec<u64> {
        let loads = |thread| events.iter().filter(move |event| event.thread == thread && !event.stores).skip(2);
        (0..self.threads.len()).flat_map(loads).map(|event| event.value).collect()
    }
}
