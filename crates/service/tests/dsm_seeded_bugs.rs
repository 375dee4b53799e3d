//! The simulation of shared memory catches bugs: each of [`Bug::DSM`] is put in, and a rule must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod dsm_simulated;

use byway_reactor::seeded::{self, Bug};
use byway_skip::seeds;
use dsm_simulated::litmus::{Words, catalogue};
use dsm_simulated::{programs, run};

/// Runs of each litmus program within which a bug is found.
const SEEDS: u64 = 1000;
/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

fn run_with(bug: Bug, seed: u64) -> Result<(), String> {
    seeded::select(Some(bug));
    run(&programs::any(seed), seed).map(drop).map_err(|broken| broken.0)
}

#[test]
fn every_seeded_bug_is_caught() {
    seeds::hunt(2, &Bug::DSM, run_with);
}

/// A job without races, one with them, and a litmus program with fences and under a lock, for each seed.
fn run_released(bug: Option<Bug>, seed: u64) -> Result<(), String> {
    seeded::select(bug);
    let litmus = Words::ALL.into_iter().flat_map(catalogue).nth(seed as usize % 16).expect("8 programs twice");
    for job in [programs::race_free(seed), programs::racing(seed), programs::fence_then_lock(), litmus.released()] {
        run(&job, seed).map_err(|broken| broken.0)?;
    }
    for job in [litmus.fenced(), litmus.locked()] {
        let report = run(&job, seed).map_err(|broken| broken.0)?;
        let outcome = litmus.outcome(&report.events);
        if (litmus.forbids)(&outcome) {
            return Err(format!("{}: {outcome:?}", litmus.name));
        }
    }
    Ok(())
}

#[test]
fn every_seeded_bug_of_release_consistency_is_caught() {
    seeds::hunt(2, &Bug::DSM_RELEASE, |bug, seed| run_released(Some(bug), seed));
}

/// The litmus programs alone find what lets two ranks disagree about the order of stores.
#[test]
fn litmus_programs_show_forbidden_outcomes_of_broken_machines() {
    for bug in [Bug::DsmHomeKeepsItsCopy, Bug::DsmCopyWritable] {
        seeded::select(Some(bug));
        let shows = |seed| {
            let mut all = Words::ALL.into_iter().flat_map(catalogue);
            all.find(|litmus| match run(&litmus.job(), seed) {
                Ok(report) => (litmus.forbids)(&litmus.outcome(&report.events)),
                Err(broken) => broken.0.starts_with("no order"),
            })
        };
        let shown = (1..=SEEDS).find_map(|seed| Some((seed, shows(seed)?.name)));
        println!("{bug:?}: {shown:?}");
        assert!(shown.is_some(), "{bug:?} shows no forbidden outcome in {SEEDS} runs of each program");
    }
}

#[test]
fn without_a_bug_the_same_build_breaks_no_rule() {
    seeded::select(None);
    for seed in 1..=SOUND_SEEDS {
        match run(&programs::any(seed), seed) {
            Ok(report) => assert!(report.killed || report.pages_sent > 0, "seed {seed}: {report:?}"),
            Err(broken) => panic!("seed {seed}: {}", broken.0),
        }
        run_released(None, seed).unwrap_or_else(|rule| panic!("seed {seed}: {rule}"));
    }
}
