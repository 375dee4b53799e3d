//! The simulation catches bugs: each of [`Bug::VOLUMES`] is put in, and a rule of [`simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test. The seeds that each took are a table in
//! docs/testing.md; a change of the simulation changes them, so what is fixed is their bound.

mod simulated;

use byway_reactor::seeded::{self, Bug};
use byway_skip::seeds;
use simulated::{Broken, FAULTS_MIN, REQUESTS_MIN};

/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

fn run_with(bug: Bug, seed: u64) -> Result<(), String> {
    seeded::select(Some(bug));
    simulated::run(seed).map(drop).map_err(|Broken(rule)| rule)
}

#[test]
fn every_seeded_bug_is_caught() {
    seeds::hunt(2, &Bug::VOLUMES, run_with);
}

#[test]
fn without_a_bug_the_same_build_breaks_no_rule() {
    seeded::select(None);
    for seed in 1..=SOUND_SEEDS {
        match simulated::run(seed) {
            Ok(report) => assert!(report.answered >= REQUESTS_MIN && report.faults >= FAULTS_MIN, "{report:?}"),
            Err(Broken(rule)) => panic!("seed {seed}: {rule}"),
        }
    }
}
