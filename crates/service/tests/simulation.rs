//! The failure rules hold in many simulated worlds: see [`simulated`].
//!
//! [`seeds`] says how seeds are chosen.

mod simulated;

use byway_skip::seeds;
use simulated::{Broken, FAULTS_MIN, REQUESTS_MIN, Report};

/// Each of these broke a rule once. 31460, 68968, 92608 and 95124: a durable write was told `ENOSPC` of bytes that another write
/// had left, and found no room for its own either; so the loss was taken for a refusal, and the next flush succeeded.
const BROKE_A_RULE: [u64; 4] = [31460, 68968, 92608, 95124];

fn run(seed: u64) -> Result<Report, String> {
    let report = simulated::run(seed).map_err(|Broken(rule)| rule)?;
    assert!(report.answered >= REQUESTS_MIN && report.faults >= FAULTS_MIN, "seed {seed}: {report:?}");
    Ok(report)
}

#[test]
fn the_failure_rules_hold_whatever_happens() {
    let (count, total) = seeds::run(2, run, Report::add);
    if count >= 100 {
        assert!(total.replayed > count / 2 && total.client_deaths > count / 2, "{total:?}");
        assert!(total.server_crashes > count && total.disk_errors > count / 4, "{total:?}");
        assert!(total.lost_sectors > count && total.replacements > count, "{total:?}");
        assert!(total.reopenings > count, "{total:?}");
    }
}

#[test]
fn the_failure_rules_hold_where_they_did_not_once() {
    for seed in BROKE_A_RULE {
        seeds::must_hold(seed, run);
    }
}
