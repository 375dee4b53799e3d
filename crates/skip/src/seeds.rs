//! Many runs of a simulation, one for each seed, in a few threads.
//!
//! `BYWAY_SIM_SEEDS=N` runs N seeds (1,000 by default) from `BYWAY_SIM_FIRST=S` on (1 by default); `BYWAY_SIM_SEED=S` runs that
//! one. A failure names its seed.

use std::fmt::Debug;
use std::panic::{UnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Seeds of a run of the suite.
const SEEDS: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The rule that a run broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken(pub String);

/// Ends a run under [`catch_broken`], which gives the reason. Prints nothing, unlike a panic of the code under test.
pub fn broken(rule: String) -> ! {
    resume_unwind(Box::new(Broken(rule)))
}

/// Breaks a rule unless `holds`: the run ends by [`seeds::broken`](crate::seeds::broken).
#[macro_export]
macro_rules! rule {
    ($holds:expr, $($what:tt)*) => {
        if !$holds {
            $crate::seeds::broken(format!($($what)*));
        }
    };
}

/// Runs a simulation that may end by [`broken`].
///
/// # Errors
/// The rule that it broke.
///
/// # Panics
/// As the code under test does.
pub fn catch_broken<R>(run: impl FnOnce() -> R + UnwindSafe) -> Result<R, Broken> {
    catch_unwind(run).map_err(|payload| *payload.downcast::<Broken>().unwrap_or_else(|panic| resume_unwind(panic)))
}

/// SplitMix64 (Steele, Lea, Flood 2014): what decides in a simulated run.
#[derive(Debug)]
pub struct Chance(u64);

impl Chance {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Below `n`; 0 if that is 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Runs each seed that the environment asks for, in so many threads, and gives their count and the sum of their reports, made
/// by `add`. `one` gives the rule that a seed broke.
///
/// # Panics
/// Where a seed breaks a rule.
pub fn run<R: Default + Debug + Send>(
    threads: usize,
    one: impl Fn(u64) -> Result<R, String> + Sync,
    add: impl Fn(&mut R, &R) + Sync,
) -> (u64, R) {
    let (first, count) = match number("BYWAY_SIM_SEED") {
        Some(seed) => (seed, 1),
        None => (number("BYWAY_SIM_FIRST").unwrap_or(1), number("BYWAY_SIM_SEEDS").unwrap_or(SEEDS)),
    };
    println!("{count} seeds from {first} on");
    let next = AtomicU64::new(first);
    let total = Mutex::new(R::default());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let report = must_hold(seed, &one);
                    add(&mut total.lock().expect("no other seed has failed"), &report);
                }
            });
        }
    });
    let total = total.into_inner().expect("no seed has failed");
    println!("{count} seeds: {total:?}");
    (count, total)
}

/// Runs one seed.
///
/// # Panics
/// Where it breaks a rule.
pub fn must_hold<R>(seed: u64, one: impl Fn(u64) -> Result<R, String>) -> R {
    one(seed).unwrap_or_else(|rule| panic!("seed {seed} (BYWAY_SIM_SEED={seed} replays it): {rule}"))
}

/// Puts in each of some bugs, in so many threads, and prints the first seed of 1,000 that shows it and the rule that it breaks. `one`
/// selects the bug for its thread and runs a seed.
///
/// # Panics
/// Where no seed shows a bug.
pub fn hunt<B: Copy + Debug + Send + Sync>(
    threads: usize,
    bugs: &[B],
    one: impl Fn(B, u64) -> Result<(), String> + Sync,
) {
    let next = AtomicUsize::new(0);
    let hunted: Mutex<Vec<_>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&bug) = bugs.get(place) else { return };
                    let found = (1..=SEEDS).find_map(|seed| Some((seed, one(bug, seed).err()?)));
                    hunted.lock().expect("no other hunt has failed").push((place, bug, found));
                }
            });
        }
    });
    let mut hunted = hunted.into_inner().expect("no hunt has failed");
    hunted.sort_unstable_by_key(|(place, ..)| *place);
    let mut survivors = Vec::new();
    for (_, bug, found) in hunted {
        match found {
            Some((seed, rule)) => println!("{bug:?}: seed {seed}: {rule:.150}"),
            None => survivors.push(bug),
        }
    }
    assert!(survivors.is_empty(), "{survivors:?} survived {SEEDS} seeds each: the simulation is too gentle");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_is_run_once_and_a_failure_names_its_seed() {
        let (count, mut seeds) = run(3, |seed| Ok(vec![seed]), |seeds: &mut Vec<u64>, one| seeds.extend(one));
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len() as u64, count);
        let failed = std::panic::catch_unwind(|| must_hold(7, |_| Err::<(), _>("a rule".to_owned())));
        let said = failed.unwrap_err();
        assert!(said.downcast_ref::<String>().unwrap().starts_with("seed 7 "));
    }

    #[test]
    fn a_bug_that_no_seed_shows_is_named() {
        hunt(2, &[1, 900], |bug, seed| if seed < bug { Ok(()) } else { Err("seen".to_owned()) });
        let shown_by_1001 = |_, seed| if seed < 1001 { Ok(()) } else { Err("seen".to_owned()) };
        let survived = std::panic::catch_unwind(|| {
            hunt(2, &[1001], shown_by_1001);
        });
        assert!(survived.unwrap_err().downcast_ref::<String>().unwrap().starts_with("[1001] survived"));
    }
}
