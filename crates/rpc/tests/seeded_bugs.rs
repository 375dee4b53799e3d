//! The simulation of nodes catches bugs: each of those in [`calls::Bug`] and [`nodes::Bug`] that nodes can show is put in, and a
//! rule of [`simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod simulated;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use byway_reactor::seeded as nodes;
use byway_rpc::seeded as calls;
use simulated::{Broken, CALLS_MIN};

/// Seeds within which each is found: those of a run of the simulation.
const SEEDS: u64 = 1000;
/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

#[derive(Clone, Copy, Debug)]
enum Bug {
    OfCalls(calls::Bug),
    OfNodes(nodes::Bug),
}

/// The first seed that shows the bug, and the rule that it breaks.
fn hunt(bug: Bug) -> Option<(u64, String)> {
    let (of_calls, of_nodes) = match bug {
        Bug::OfCalls(bug) => (Some(bug), None),
        Bug::OfNodes(bug) => (None, Some(bug)),
    };
    calls::select(of_calls);
    nodes::select(of_nodes);
    (1..=SEEDS).find_map(|seed| Some((seed, simulated::run(seed).err()?.0)))
}

#[test]
fn every_seeded_bug_is_caught() {
    let of_calls = calls::Bug::NODES.map(Bug::OfCalls);
    let bugs = [&of_calls[..], &nodes::Bug::NODES.map(Bug::OfNodes)].concat();
    let next = AtomicUsize::new(0);
    let caught = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(bug) = bugs.get(place) else { return };
                    let hunted = hunt(*bug);
                    caught.lock().unwrap().push((place, *bug, hunted));
                }
            });
        }
    });
    let mut caught = caught.into_inner().unwrap();
    caught.sort_unstable_by_key(|(place, ..)| *place);
    let mut survivors = Vec::new();
    for (_, bug, hunted) in caught {
        match hunted {
            Some((seed, rule)) => println!("{bug:?}: seed {seed}: {rule:.150}"),
            None => survivors.push(bug),
        }
    }
    assert!(survivors.is_empty(), "{survivors:?} survived {SEEDS} seeds each: the simulation is too gentle");
}

#[test]
fn without_a_bug_the_same_build_breaks_no_rule() {
    for seed in 1..=SOUND_SEEDS {
        match simulated::run(seed) {
            Ok(report) => assert!(report.calls >= CALLS_MIN, "seed {seed}: {report:?}"),
            Err(Broken(rule)) => panic!("seed {seed}: {rule}"),
        }
    }
}
