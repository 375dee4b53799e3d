//! The simulation of nodes catches bugs: each of those in [`calls::Bug`] and [`nodes::Bug`] that nodes can show is put in, and a
//! rule of [`simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test.

mod simulated;

use byway_reactor::seeded as nodes;
use byway_rpc::seeded as calls;
use byway_skip::seeds;
use simulated::{Broken, CALLS_MIN};

/// Seeds that show that it is the bugs that are found.
const SOUND_SEEDS: u64 = 100;

#[derive(Clone, Copy, Debug)]
enum Bug {
    OfCalls(calls::Bug),
    OfNodes(nodes::Bug),
}

fn run_with(bug: Bug, seed: u64) -> Result<(), String> {
    let (of_calls, of_nodes) = match bug {
        Bug::OfCalls(bug) => (Some(bug), None),
        Bug::OfNodes(bug) => (None, Some(bug)),
    };
    calls::select(of_calls);
    nodes::select(of_nodes);
    simulated::run(seed).map(drop).map_err(|Broken(rule)| rule)
}

#[test]
fn every_seeded_bug_is_caught() {
    let of_calls = calls::Bug::NODES.map(Bug::OfCalls);
    seeds::hunt(3, &[&of_calls[..], &nodes::Bug::NODES.map(Bug::OfNodes)].concat(), run_with);
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
