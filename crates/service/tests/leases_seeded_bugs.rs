//! The simulation of leases catches bugs: each of [`Bug::LEASES`] is put in, and the rule must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod leases_simulated;

use byway_reactor::seeded::{self, Bug};
use leases_simulated::run;

/// Seeds within which each is found: those of a run of the simulation.
const SEEDS: u64 = 1000;
/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

#[test]
fn every_seeded_bug_is_caught() {
    let mut survivors = Vec::new();
    for bug in Bug::LEASES {
        seeded::select(Some(bug));
        match (1..=SEEDS).find_map(|seed| Some((seed, run(seed).err()?.0))) {
            Some((seed, rule)) => println!("{bug:?}: seed {seed}: {rule}"),
            None => survivors.push(bug),
        }
    }
    assert!(survivors.is_empty(), "{survivors:?} survived {SEEDS} seeds each: the simulation is too gentle");
}

#[test]
fn without_a_bug_the_same_build_breaks_no_rule() {
    seeded::select(None);
    for seed in 1..=SOUND_SEEDS {
        match run(seed) {
            Ok(report) => {
                assert!(report.operations > 0 && report.cached + report.fenced > 0, "seed {seed}: {report:?}");
            }
            Err(broken) => panic!("seed {seed}: {}", broken.0),
        }
    }
}
