//! Shared memory in the simulation: jobs by chance keep every rule, and litmus programs show no forbidden outcome.

mod dsm_simulated;

use std::collections::HashSet;

use dsm_simulated::history::{self, Event};
use dsm_simulated::litmus::{Words, catalogue};
use dsm_simulated::{programs, run};

/// Jobs of a run of the suite.
const SEEDS: u64 = 1000;
/// Runs of each litmus program.
const LITMUS_SEEDS: u64 = 300;

fn seeds() -> u64 {
    if std::env::var_os("BYWAY_LONG").is_some() { 100 * SEEDS } else { SEEDS }
}

#[test]
fn jobs_by_chance_keep_every_rule() {
    let (mut events, mut pages_sent, mut killed) = (0, 0, 0);
    for seed in 1..=seeds() {
        let report = run(&programs::any(seed), seed).unwrap_or_else(|broken| panic!("seed {seed}: {}", broken.0));
        events += report.events.len();
        pages_sent += report.pages_sent;
        killed += u64::from(report.killed);
    }
    // Chance has done something.
    assert!(events as u64 > 20 * seeds() && pages_sent > 10 * seeds(), "{events} events, {pages_sent} pages");
    assert!(killed > seeds() / 20, "{killed} jobs had a rank killed");
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
