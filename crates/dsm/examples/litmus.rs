//! Litmus programs between the first two processes of a job: `byway dsm run -n 2 -- litmus 10000`. Each round has words of its own on two
//! pages that both processes have had, and the processes start it as close together as a turn-taking word allows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, fence};

use byway_dsm::Job;

type Error = Box<dyn std::error::Error>;

/// What one process does in a round, with the words x and y: what it has loaded.
type Side = fn(&AtomicU64, &AtomicU64, u64) -> [bool; 2];

struct Litmus {
    name: &'static str,
    sides: [Side; 2],
    /// By what the first side has loaded, and the second.
    forbids: fn([bool; 2], [bool; 2]) -> bool,
}

/// Whether a word has this round's value.
fn new(word: &AtomicU64, round: u64) -> bool {
    word.load(Relaxed) == round
}

const ALL: [Litmus; 4] = [
    Litmus {
        name: "MP",
        sides: [
            |x, y, round| {
                x.store(round, Relaxed);
                y.store(round, std::sync::atomic::Ordering::Release);
                [false; 2]
            },
            |x, y, round| {
                let first = y.load(std::sync::atomic::Ordering::Acquire) == round;
                [first, new(x, round)]
            },
        ],
        forbids: |_, [y, x]| y && !x,
    },
    Litmus {
        name: "SB with fences",
        sides: [
            |x, y, round| {
                x.store(round, Relaxed);
                fence(std::sync::atomic::Ordering::SeqCst);
                [new(y, round), false]
            },
            |x, y, round| {
                y.store(round, Relaxed);
                fence(std::sync::atomic::Ordering::SeqCst);
                [new(x, round), false]
            },
        ],
        forbids: |[y, _], [x, _]| !y && !x,
    },
    Litmus {
        name: "LB",
        sides: [
            |x, y, round| {
                let seen = x.load(std::sync::atomic::Ordering::Acquire) == round;
                y.store(round, Relaxed);
                [seen, false]
            },
            |x, y, round| {
                let seen = y.load(std::sync::atomic::Ordering::Acquire) == round;
                x.store(round, Relaxed);
                [seen, false]
            },
        ],
        forbids: |[x, _], [y, _]| x && y,
    },
    Litmus {
        name: "CoRR",
        sides: [
            |x, _, round| {
                x.store(round, Relaxed);
                [false; 2]
            },
            |x, _, round| {
                let first = new(x, round);
                [first, new(x, round)]
            },
        ],
        forbids: |_, [first, second]| first && !second,
    },
];

/// Words of a page.
const PAGE: usize = 512;

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
    let rounds: u64 = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?;
    let job = Job::join()?;
    let words = job.segment("litmus", 6 * PAGE * 8)?.words();
    let (me, seen) = (usize::from(job.rank()), &words[4 * PAGE..]);
    for litmus in &ALL {
        let (mut forbidden, mut kinds) = (0, std::collections::BTreeSet::new());
        for round in 1..=rounds / ALL.len() as u64 {
            let (x, y) = (&words[round as usize % PAGE], &words[PAGE + round as usize % PAGE]);
            // Both have read both pages, and go on when the other has come.
            let _ = (x.load(Relaxed), y.load(Relaxed));
            job.barrier(0)?;
            if me < 2 {
                let [first, second] = litmus.sides[me](x, y, round);
                seen[me * PAGE].store(u64::from(first) + 2 * u64::from(second), Relaxed);
            }
            job.barrier(1)?;
            if me == 0 {
                let of = |side: usize| seen[side * PAGE].load(Relaxed);
                let pair = |bits: u64| [bits & 1 != 0, bits & 2 != 0];
                forbidden += u64::from((litmus.forbids)(pair(of(0)), pair(of(1))));
                kinds.insert((of(0), of(1)));
                x.store(0, Relaxed);
                y.store(0, Relaxed);
            }
            job.barrier(2)?;
        }
        if me == 0 {
            report(litmus.name, kinds.len(), forbidden);
        }
    }
    let counter = &words[2 * PAGE];
    let each = rounds / 20;
    for _ in 0..each {
        let _guard = job.lock(7)?;
        counter.store(counter.load(Relaxed) + 1, Relaxed);
    }
    job.barrier(0)?;
    if me == 0 {
        report("lock", 1, each * u64::from(job.ranks()) - counter.load(Relaxed));
    }
    Ok(job.finish()?)
}

fn report(name: &str, kinds: usize, forbidden: u64) {
    let forbidden = if forbidden == 0 { "none".to_owned() } else { forbidden.to_string() };
    println!("{name}: {kinds} outcomes, {forbidden} forbidden");
}
