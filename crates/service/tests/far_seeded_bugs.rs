//! The simulation of far memory catches bugs: each of [`Bug::MEMORY`] is put in, and a rule of [`far_simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod far_simulated;

use byway_reactor::seeded::{self, Bug};
use byway_skip::seeds;
use far_simulated::Broken;

/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

fn run_with(bug: Bug, seed: u64) -> Result<(), String> {
    seeded::select(Some(bug));
    far_simulated::run(seed).map(drop).map_err(|Broken(rule)| rule)
}

#[test]
fn every_seeded_bug_is_caught() {
    seeds::hunt(3, &Bug::MEMORY, run_with);
}

#[test]
fn without_a_bug_the_same_build_breaks_no_rule() {
    seeded::select(None);
    for seed in 1..=SOUND_SEEDS {
        if let Err(Broken(rule)) = far_simulated::run(seed) {
            panic!("seed {seed}: {rule}");
        }
    }
}
