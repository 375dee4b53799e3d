//! Litmus programs between the first processes of a job: `byway dsm run -n 4 -- litmus 10000`, so many rounds of each. A round has words of its own
//! on two pages. Behind a barrier, when all processes have copies of both, they run [`BURST`] rounds without meeting in between, and
//! some of them start each a moment later than others. Programs with more sides than the job has processes are left out, and all but one if
//! it is named behind the number. With release consistency, `fenced` has each process fence before each access.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use byway_dsm::Job;

type Error = Box<dyn std::error::Error>;

/// A word, in one round; no two programs have a round of one number. It is 0 until a side sets it to 1 or 2. Neither the compiler nor the processor
/// reorders its accesses, except for a load behind a store.
#[derive(Clone, Copy)]
struct Word<'a> {
    word: &'a AtomicU64,
    round: u64,
    /// Fences before each access.
    fences: Option<&'a Job>,
}

impl Word<'_> {
    /// Gives what a side that only stores has loaded.
    fn set(self, value: u64) -> [u64; 2] {
        self.fence();
        self.word.store(4 * self.round + value, Ordering::Release);
        [0; 2]
    }

    fn get(self) -> u64 {
        self.fence();
        let word = self.word.load(Ordering::Acquire);
        if word / 4 == self.round { word % 4 } else { 0 }
    }

    fn fence(self) {
        if let Some(Err(error)) = self.fences.map(Job::fence) {
            eprintln!("litmus: {error}");
            std::process::exit(1);
        }
    }
}

/// What one process does in a round: what it has loaded.
type Side = fn(Word<'_>, Word<'_>) -> [u64; 2];

/// The processes that the largest program has.
const SIDES_MAX: usize = 4;

/// What the sides have loaded, and the words at the end.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Outcome {
    loads: [[u64; 2]; SIDES_MAX],
    x: u64,
    y: u64,
}

struct Litmus {
    name: &'static str,
    sides: &'static [Side],
    forbids: fn(&Outcome) -> bool,
}

fn full_fence() {
    fence(Ordering::SeqCst);
}

/// The catalogue of the x86-TSO paper (Owens, Sarkar and Sewell, 2009) for two words. A load may overtake a store on these processors, so SB and R
/// forbid nothing without a fence.
const ALL: [Litmus; 9] = [
    Litmus {
        name: "MP",
        sides: &[
            |x, y| {
                x.set(1);
                y.set(1)
            },
            |x, y| [y.get(), x.get()],
        ],
        forbids: |seen| seen.loads[1] == [1, 0],
    },
    Litmus {
        name: "SB",
        sides: &[
            |x, y| {
                x.set(1);
                [y.get(), 0]
            },
            |x, y| {
                y.set(1);
                [x.get(), 0]
            },
        ],
        forbids: |_| false,
    },
    Litmus {
        name: "SB with fences",
        sides: &[
            |x, y| {
                x.set(1);
                full_fence();
                [y.get(), 0]
            },
            |x, y| {
                y.set(1);
                full_fence();
                [x.get(), 0]
            },
        ],
        forbids: |seen| seen.loads[0][0] == 0 && seen.loads[1][0] == 0,
    },
    Litmus {
        name: "LB",
        sides: &[
            |x, y| {
                let seen = x.get();
                y.set(1);
                [seen, 0]
            },
            |x, y| {
                let seen = y.get();
                x.set(1);
                [seen, 0]
            },
        ],
        forbids: |seen| seen.loads[0][0] == 1 && seen.loads[1][0] == 1,
    },
    Litmus {
        name: "R with fences",
        sides: &[
            |x, y| {
                x.set(1);
                y.set(1)
            },
            |x, y| {
                y.set(2);
                full_fence();
                [x.get(), 0]
            },
        ],
        forbids: |seen| seen.y == 2 && seen.loads[1][0] == 0,
    },
    Litmus {
        name: "S",
        sides: &[
            |x, y| {
                x.set(2);
                y.set(1)
            },
            |x, y| {
                let seen = y.get();
                x.set(1);
                [seen, 0]
            },
        ],
        forbids: |seen| seen.loads[1][0] == 1 && seen.x == 2,
    },
    Litmus {
        name: "2+2W",
        sides: &[
            |x, y| {
                x.set(1);
                y.set(2)
            },
            |x, y| {
                y.set(1);
                x.set(2)
            },
        ],
        forbids: |seen| seen.x == 1 && seen.y == 1,
    },
    Litmus {
        name: "CoRR",
        sides: &[|x, _| x.set(1), |x, _| [x.get(), x.get()]],
        forbids: |seen| seen.loads[1] == [1, 0],
    },
    Litmus {
        name: "IRIW",
        sides: &[|x, _| x.set(1), |_, y| y.set(1), |x, y| [x.get(), y.get()], |x, y| [y.get(), x.get()]],
        forbids: |seen| seen.loads[2] == [1, 0] && seen.loads[3] == [1, 0],
    },
];

/// Words of a page.
const PAGE: usize = 512;

/// Rounds without a barrier between them. With one for each round, they and the copies that all get again took seven times as long.
const BURST: usize = 16;

fn main() -> std::process::ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("litmus: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

fn run() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).peekable();
    let rounds: u64 = arguments.next().map_or(Ok(1000), |text| text.parse())?;
    let is_fenced = arguments.next_if(|word| word == "fenced").is_some();
    let only = arguments.next();
    let job = Job::join()?;
    let words = job.segment("litmus", (3 + SIDES_MAX) * PAGE * 8)?.words();
    let is_asked = |litmus: &&Litmus| {
        litmus.sides.len() <= usize::from(job.ranks()) && only.as_ref().is_none_or(|only| litmus.name == only)
    };
    let fences = is_fenced.then_some(&job);
    for (litmus, first) in ALL.iter().filter(is_asked).zip((1..).step_by(rounds.max(1) as usize)) {
        run_litmus(&job, litmus, (words, fences), first..first + rounds)?;
    }
    let counter = &words[2 * PAGE];
    let each = rounds / 20;
    for _ in 0..each {
        let _guard = job.lock(7)?;
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
    job.barrier(0)?;
    if job.rank() == 0 {
        report("lock", 1, each * u64::from(job.ranks()) - counter.load(Ordering::Relaxed));
    }
    Ok(job.finish()?)
}

fn run_litmus(
    job: &Job,
    litmus: &Litmus,
    (words, fences): (&[AtomicU64], Option<&Job>),
    rounds: Range<u64>,
) -> Result<(), Error> {
    let (me, seen) = (usize::from(job.rank()), &words[3 * PAGE..]);
    let (mut forbidden, mut kinds) = (0, BTreeSet::new());
    for first in rounds.clone().step_by(PAGE) {
        let (mut loads, mut ends) = (Vec::new(), Vec::new());
        let chunk = first..rounds.end.min(first + PAGE as u64);
        for burst in chunk.clone().step_by(BURST) {
            let burst = burst..chunk.end.min(burst + BURST as u64);
            let pair = |round: u64| {
                let word = |page: usize| Word { word: &words[page * PAGE + round as usize % PAGE], round, fences };
                (word(0), word(1))
            };
            // All have read both pages, and go on when the others have come, process 0 when it has looked at the rounds before.
            let (x, y) = pair(burst.start);
            let _ = (x.get(), y.get());
            job.barrier(0)?;
            if let Some(side) = litmus.sides.get(me) {
                for round in burst.clone() {
                    stagger(me, litmus.sides.len(), round);
                    let (x, y) = pair(round);
                    loads.push(side(x, y));
                }
            }
            job.barrier(1)?;
            if me == 0 {
                ends.extend(burst.map(|round| {
                    let (x, y) = pair(round);
                    (x.get(), y.get())
                }));
            }
        }
        // Not in each round: the page would go to process 0 and come back each time.
        for (word, [first, second]) in seen[me * PAGE..].iter().zip(loads) {
            word.store(4 * first + second, Ordering::Relaxed);
        }
        job.barrier(2)?;
        for (at, (x, y)) in ends.into_iter().enumerate() {
            let mut loads = [[0; 2]; SIDES_MAX];
            for (side, loads) in loads.iter_mut().enumerate().take(litmus.sides.len()) {
                let seen = seen[side * PAGE + at].load(Ordering::Relaxed);
                *loads = [seen / 4, seen % 4];
            }
            let outcome = Outcome { loads, x, y };
            forbidden += u64::from((litmus.forbids)(&outcome));
            kinds.insert(outcome);
        }
    }
    if me == 0 {
        report(litmus.name, kinds.len(), forbidden);
    }
    Ok(())
}

/// Holds one side back, by turns and for up to some 20 us: the process that manages a barrier passes it first.
fn stagger(me: usize, sides: usize, round: u64) {
    if me != round as usize % sides {
        (0..round * 7919 % 64 * 10 * (1 + me as u64 / 2)).for_each(|_| std::hint::spin_loop());
    }
}

fn report(name: &str, kinds: usize, forbidden: u64) {
    let forbidden = if forbidden == 0 { "none".to_owned() } else { forbidden.to_string() };
    println!("{name}: {kinds} outcomes, {forbidden} forbidden");
}
