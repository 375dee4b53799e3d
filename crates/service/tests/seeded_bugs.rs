//! The simulation catches bugs: each of [`Bug::VOLUMES`] is put in, and a rule of [`simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test. The seeds that each took are a table in
//! docs/testing.md; a change of the simulation changes them, so what is fixed is their bound.

mod simulated;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use byway_reactor::seeded::{self, Bug};
use simulated::{Broken, FAULTS_MIN, REQUESTS_MIN};

/// Seeds within which each is found: those of a run of the simulation.
const SEEDS: u64 = 1000;
/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

/// The first seed that shows the bug, and the rule that it breaks.
fn hunt(bug: Bug) -> Option<(u64, String)> {
    seeded::select(Some(bug));
    (1..=SEEDS).find_map(|seed| Some((seed, simulated::run(seed).err()?.0)))
}

#[test]
fn every_seeded_bug_is_caught() {
    let next = AtomicUsize::new(0);
    let caught = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(bug) = Bug::VOLUMES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    caught.lock().unwrap().push((*bug as usize, *bug, hunt(*bug)));
                }
            });
        }
    });
    let mut caught = caught.into_inner().unwrap();
    caught.sort_unstable_by_key(|(place, ..)| *place);
    let mut survivors = Vec::new();
    for (_, bug, hunted) in caught {
        match hunted {
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
        match simulated::run(seed) {
            Ok(report) => assert!(report.answered >= REQUESTS_MIN && report.faults >= FAULTS_MIN, "{report:?}"),
            Err(Broken(rule)) => panic!("seed {seed}: {rule}"),
        }
    }
}
