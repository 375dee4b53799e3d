//! Leases of files in the simulation: what clients see from their caches is what the server had.

mod leases_simulated;

use byway_skip::seeds;
use leases_simulated::{Register, Truth, run};

#[test]
fn clients_with_caches_see_what_the_server_has() {
    let one =
        |seed| match run(seed) {
            Ok(report) => Ok([report.operations, report.cached, report.fenced, report.restarts, report.kept]
                .map(|count| count as u64)),
            Err(broken) => Err(broken.0),
        };
    let (count, [operations, cached, fenced, restarts, kept]) = seeds::run(2, one, |total: &mut [u64; 5], one| {
        total.iter_mut().zip(one).for_each(|(total, one)| *total += one);
    });
    // Chance has done something.
    if count >= 100 {
        assert!(operations > 100 * count, "{operations} operations");
        assert!(cached > operations / 20, "{cached} of {operations} from caches");
        assert!(fenced > count / 20, "{fenced} sessions were ended by the server");
        assert!(restarts > count, "{restarts} restarts of the server");
        assert!(kept > count, "{kept} changes left their client its lease");
    }
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
