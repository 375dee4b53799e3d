//! The simulation of leases catches bugs: each of [`Bug::LEASES`] is put in, and the rule must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod leases_simulated;

use byway_reactor::seeded::{self, Bug};
use byway_skip::seeds;
use leases_simulated::run;

/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

fn run_with(bug: Bug, seed: u64) -> Result<(), String> {
    seeded::select(Some(bug));
    run(seed).map(drop).map_err(|broken| broken.0)
}

#[test]
fn every_seeded_bug_is_caught() {
    seeds::hunt(2, &Bug::LEASES, run_with);
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
