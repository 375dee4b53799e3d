//! The workload over real memory catches bugs of the registration cache: each is put in, and must be found.

mod remapped;

use std::time::Duration;

use byway_fabric::registration::seeded::{self, Bug};
use remapped::Verdict;

const SEEDS: u64 = 100;
const STEPS: u64 = 6_000;
/// A run without a bug takes a tenth of it.
const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn workload_process() {
    remapped::be_workload(|place| seeded::select(Bug::ALL[place - 1]));
}

#[test]
fn each_seeded_bug_is_caught() {
    let mut survivors = Vec::new();
    for (index, bug) in Bug::ALL.into_iter().enumerate() {
        let caught = (1..=SEEDS).map(|seed| (seed, remapped::run(seed, STEPS, index + 1, LIMIT)));
        match caught.into_iter().find(|(_, verdict)| *verdict != Verdict::Sound) {
            Some((seed, Verdict::Failed(text))) => panic!("{bug:?}, seed {seed}: no catch: {text}"),
            Some((seed, verdict)) => println!("{bug:?}: seed {seed}: {verdict:?}"),
            None => survivors.push(bug),
        }
    }
    assert!(survivors.is_empty(), "{survivors:?} survived {SEEDS} seeds each");
}
