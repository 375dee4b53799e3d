//! Shared memory in the simulation: jobs by chance keep every rule, and litmus programs show no forbidden outcome.

mod dsm_simulated;

use std::collections::HashSet;

use byway_skip::seeds;
use dsm_simulated::history::{self, Event};
use dsm_simulated::litmus::{Words, catalogue};
use dsm_simulated::{programs, run};

/// Runs of each litmus program.
const LITMUS_SEEDS: u64 = 300;

#[test]
fn jobs_by_chance_keep_every_rule() {
    let one = |seed| match run(&programs::any(seed), seed) {
        Ok(report) => Ok((report.events.len() as u64, report.pages_sent, u64::from(report.killed))),
        Err(broken) => Err(broken.0),
    };
    let (count, (events, pages_sent, killed)) = seeds::run(2, one, |total: &mut (u64, u64, u64), one| {
        *total = (total.0 + one.0, total.1 + one.1, total.2 + one.2);
    });
    // Chance has done something.
    if count >= 100 {
        assert!(events > 20 * count && pages_sent > 10 * count, "{events} events, {pages_sent} pages");
        assert!(killed > count / 20, "{killed} jobs had a rank killed");
    }
}

#[test]
fn no_litmus_program_shows_a_forbidden_outcome() {
    for words in Words::ALL {
        for litmus in catalogue(words) {
            let mut seen = HashSet::new();
            for seed in 1..=LITMUS_SEEDS {
                let report = run(&litmus.job(), seed);
                let report = report.unwrap_or_else(|broken| panic!("{}, seed {seed}: {}", litmus.name, broken.0));
                let outcome = litmus.outcome(&report.events);
                assert!(!(litmus.forbids)(&outcome), "{}, seed {seed}: {outcome:?}", litmus.name);
                seen.insert(outcome);
            }
            assert!(seen.len() >= 2, "{} always ends as one of {seen:?}", litmus.name);
        }
    }
}

fn run_many(job: impl Fn(u64) -> dsm_simulated::SimulatedJob + Sync) {
    let one = |seed| match run(&job(seed), seed) {
        Ok(report) => Ok((report.events.len() as u64, report.pages_sent)),
        Err(broken) => Err(broken.0),
    };
    let (count, (events, pages_sent)) = seeds::run(2, one, |total: &mut (u64, u64), one| {
        *total = (total.0 + one.0, total.1 + one.1);
    });
    if count >= 100 {
        assert!(events > 20 * count && pages_sent > 5 * count, "{events} events, {pages_sent} pages");
    }
}

#[test]
fn with_release_consistency_jobs_without_races_see_one_order() {
    run_many(programs::race_free);
}

#[test]
fn with_release_consistency_loads_that_race_see_what_was_stored_and_not_replaced() {
    run_many(programs::racing);
}

#[test]
fn with_release_consistency_fences_and_locks_forbid_what_one_order_forbids() {
    let mut weak = HashSet::new();
    for words in Words::ALL {
        for litmus in catalogue(words) {
            for seed in 1..=LITMUS_SEEDS {
                for (how, job) in [("fenced", litmus.fenced()), ("locked", litmus.locked())] {
                    let report = run(&job, seed);
                    let report =
                        report.unwrap_or_else(|broken| panic!("{how} {}, seed {seed}: {broken:?}", litmus.name));
                    let outcome = litmus.outcome(&report.events);
                    assert!(!(litmus.forbids)(&outcome), "{how} {}, seed {seed}: {outcome:?}", litmus.name);
                }
                let report = run(&litmus.released(), seed).unwrap_or_else(|broken| panic!("seed {seed}: {broken:?}"));
                if (litmus.forbids)(&litmus.outcome(&report.events)) {
                    weak.insert(litmus.name);
                }
            }
        }
    }
    println!("seen without fences: {weak:?}");
    assert!(weak.contains("SB"), "without fences, release consistency shows only {weak:?}");
}

#[test]
fn a_lock_passes_on_what_a_fence_has_shown() {
    for seed in 1..=LITMUS_SEEDS {
        if let Err(broken) = run(&programs::fence_then_lock(), seed) {
            panic!("seed {seed}: {}", broken.0);
        }
    }
}

/// The checker itself: it refuses each forbidden outcome of the catalogue.
#[test]
fn the_checker_refuses_what_no_order_explains() {
    let event = |thread, stores, word, value| Event { thread, stores, word, value };
    let (store, load) = (|t, word, value| event(t, true, word, value), |t, word, value| event(t, false, word, value));
    let (x, y) = (0, 1);
    let sb = |a, b| vec![store(0, x, 1), load(0, y, a), store(1, y, 2), load(1, x, b)];
    assert!(history::check(&sb(0, 0)).is_err(), "SB");
    assert!(history::check(&sb(2, 0)).is_ok() && history::check(&sb(2, 1)).is_ok());
    let mp = |a, b| vec![store(0, x, 1), store(0, y, 2), load(1, y, a), load(1, x, b)];
    assert!(history::check(&mp(2, 0)).is_err(), "MP");
    assert!(history::check(&mp(0, 1)).is_ok());
    let iriw = |b, d| {
        let (first, second) = ([load(2, x, 1), load(2, y, b)], [load(3, y, 2), load(3, x, d)]);
        [vec![store(0, x, 1), store(1, y, 2)], first.to_vec(), second.to_vec()].concat()
    };
    assert!(history::check(&iriw(0, 0)).is_err(), "IRIW");
    assert!(history::check(&iriw(2, 0)).is_ok());
    assert!(history::check(&[store(0, x, 1), load(1, x, 1), load(1, x, 0)]).is_err(), "CoRR");
    assert!(history::check(&[load(1, x, 7)]).is_err(), "a value out of nowhere");
}
