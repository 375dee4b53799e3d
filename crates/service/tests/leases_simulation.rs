//! Leases of files in the simulation: what clients see from their caches is what the server had.

mod leases_simulated;

use leases_simulated::{Register, Truth, run};

/// Seeds of a run of the suite.
const SEEDS: u64 = 1000;

fn seeds() -> u64 {
    if std::env::var_os("BYWAY_LONG").is_some() { 100 * SEEDS } else { SEEDS }
}

#[test]
fn clients_with_caches_see_what_the_server_has() {
    let (mut operations, mut cached, mut fenced) = (0, 0, 0);
    for seed in 1..=seeds() {
        let report = run(seed).unwrap_or_else(|broken| panic!("seed {seed}: {}", broken.0));
        operations += report.operations as u64;
        cached += report.cached as u64;
        fenced += report.fenced as u64;
    }
    // Chance has done something.
    println!("{operations} operations, {cached} from caches, {fenced} sessions ended");
    assert!(operations > 100 * seeds(), "{operations} operations");
    assert!(cached > operations / 20, "{cached} of {operations} from caches");
    assert!(fenced > seeds() / 20, "{fenced} sessions were ended by the server");
}

/// The checker itself.
#[test]
fn the_checker_knows_old_values() {
    let mut truth = Truth::default();
    for (step, value) in [(10, 10), (20, 20)] {
        truth.step = step;
        truth.set(Register::Data(1), value);
    }
    truth.step = 30;
    for (value, start, sound) in [(20, 25, true), (10, 15, true), (0, 5, true), (10, 25, false), (0, 15, false)] {
        truth.check(Register::Data(1), value, start);
        assert_eq!(truth.broken.take().is_none(), sound, "{value} since {start}");
    }
}
