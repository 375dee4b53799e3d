//! The simulation catches bugs: each of [`Bug::VOLUMES`] is put in, and a rule of [`simulated`] must find it.
//!
//! A panic of the code under test is no catch: it ends the test. The seeds that each took are a table in
//! docs/testing.md; a change of the simulation changes them, so what is fixed is their bound.

mod simulated;

use std::net::Ipv4Addr;
use std::sync::Arc;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::sim::World;
use byway_reactor::{Errno, FileOptions, OpenFile, Reactor, Wait};
use byway_service::block::{ENGINE_CLASS, Engine, Outcome, Store, Tag, Volume, VolumeId, VolumeOptions};
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

/// Three loops flush a volume whose disk has lost bytes and has two open file descriptions: so two of the flushes share one.
/// Gives how many succeed.
fn flushes_that_succeed_over_lost_bytes(seed: u64) -> usize {
    const LOOPS: u8 = 3;
    let world = World::new(seed);
    let ip = |index: u8| Ipv4Addr::new(127, 0, 0, index + 1).into();
    let disk = world.disk(ip(0)).file("f", 1 << 20);
    let store = Store::open_file(Arc::new(OpenFile::simulated(disk.clone(), FileOptions::default())));
    let volume = Arc::new(Volume::new("v", store, VolumeOptions::default()));
    let attach = |index| {
        let (mut reactor, mut engine) = (world.node(ip(index), 1 << 20), Engine::default());
        let id = engine.attach(&mut reactor, Arc::clone(&volume));
        (reactor, engine, id)
    };
    let mut loops: Vec<(Reactor, Engine, VolumeId)> = (0..LOOPS).map(attach).collect();
    disk.fail_writeback(Errno::IO);
    for (reactor, engine, id) in &mut loops {
        engine.flush(reactor, *id, Tag(0)).expect("it begins");
    }
    let (mut completions, mut done) = (Vec::new(), Vec::new());
    while done.len() < usize::from(LOOPS) {
        assert!(world.step(), "it never ends");
        for (reactor, engine, _) in &mut loops {
            reactor.reap(&mut completions, Wait::Poll).expect("a simulation");
            for completion in completions.drain(..).filter(|completion| completion.token.class() == ENGINE_CLASS) {
                engine.complete(reactor, completion, &mut done);
            }
        }
    }
    done.iter().filter(|done| matches!(done.outcome, Outcome::Unit(Ok(())))).count()
}

/// A loop shares a description with other loops alone, and the simulation of volumes has one loop.
#[test]
fn an_answer_that_is_not_held_is_caught_on_several_loops() {
    let succeed = |bug| {
        seeded::select(bug);
        (1..=SOUND_SEEDS).map(flushes_that_succeed_over_lost_bytes).sum::<usize>()
    };
    assert_eq!(succeed(None), 0);
    assert!(succeed(Some(Bug::AnswersNotHeld)) > 0, "the simulation is too gentle");
}
