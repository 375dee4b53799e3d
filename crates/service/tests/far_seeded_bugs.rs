//! The simulation of far memory catches bugs: each of [`Bug::MEMORY`] is put in, and a rule of [`far_simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod far_simulated;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use byway_reactor::seeded::{self, Bug};
use far_simulated::Broken;

/// Seeds within which each is found: those of a run of the simulation.
const SEEDS: u64 = 1000;
/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

/// The first seed that shows the bug, and the rule that it breaks.
fn hunt(bug: Bug) -> Option<(u64, String)> {
    seeded::select(Some(bug));
    (1..=SEEDS).find_map(|seed| Some((seed, far_simulated::run(seed).err()?.0)))
}

#[test]
fn every_seeded_bug_is_caught() {
    let next = AtomicUsize::new(0);
    let caught = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some(bug) = Bug::MEMORY.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let hunted = hunt(*bug);
                    match &hunted {
                        Some((seed, rule)) => println!("{bug:?}: seed {seed}: {rule:.150}"),
                        None => println!("{bug:?}: not found"),
                    }
                    caught.lock().unwrap().push((*bug, hunted.is_some()));
                }
            });
        }
    });
    let caught = caught.into_inner().unwrap();
    let survivors: Vec<Bug> = caught.iter().filter(|(_, caught)| !caught).map(|(bug, _)| *bug).collect();
    assert!(survivors.is_empty(), "{survivors:?} survived {SEEDS} seeds each: the simulation is too gentle");
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
