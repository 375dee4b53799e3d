//! Far memory keeps its promises in many simulated worlds: see [`far_simulated`].
//!
//! `BYWAY_SIM_SEEDS=N` runs N seeds (1,000 by default) from `BYWAY_SIM_FIRST=S` on (1 by default); `BYWAY_SIM_SEED=S` runs that one.

mod far_simulated;

use byway_skip::seeds;
use far_simulated::{Broken, Report};

#[test]
fn a_page_has_what_was_written_last_or_is_lost_by_name() {
    let one = |seed| far_simulated::run(seed).map_err(|Broken(rule)| rule);
    let (count, total) = seeds::run(3, one, Report::add);
    if count >= 100 {
        assert!(total.accesses > 300 * count && total.far_pages > 50 * count, "{total:?}");
        assert!(total.forks > count, "{total:?}");
        assert!(total.crashes > count / 4 && total.cut_off > count / 8 && total.taken_back > count / 8, "{total:?}");
        assert!(total.flips > count / 2 && total.lost > count && total.pool.given_up > count / 2, "{total:?}");
        assert!(total.pool.copied > 20 * count && total.pool.corrupt > count / 4, "{total:?}");
        assert!(total.pool.failed_over > count && total.pool.moved > count / 8, "{total:?}");
    }
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    for seed in 1..10 {
        let runs = [(); 2].map(|()| far_simulated::run(seed).map_err(|Broken(rule)| rule));
        assert_eq!(runs[0], runs[1], "seed {seed}");
    }
}
