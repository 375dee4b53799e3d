//! Far memory keeps its promises in many simulated worlds: see [`far_simulated`].
//!
//! `BYWAY_SIM_SEEDS=N` runs N seeds (1,000 by default) from `BYWAY_SIM_FIRST=S` on (1 by default); `BYWAY_SIM_SEED=S` runs that one.

mod far_simulated;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use far_simulated::{Broken, Report};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn a_page_has_what_was_written_last_or_is_lost_by_name() {
    let (first, count) = match number("BYWAY_SIM_SEED") {
        Some(seed) => (seed, 1),
        None => (number("BYWAY_SIM_FIRST").unwrap_or(1), number("BYWAY_SIM_SEEDS").unwrap_or(1000)),
    };
    println!("{count} seeds from {first} on");
    let next = AtomicU64::new(first);
    let total = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    match far_simulated::run(seed) {
                        Ok(report) => total.lock().unwrap().add(&report),
                        Err(Broken(rule)) => panic!("seed {seed} (BYWAY_SIM_SEED={seed} replays it): {rule}"),
                    }
                }
            });
        }
    });
    let total = total.into_inner().unwrap();
    println!("{count} seeds: {total:?}");
    if count >= 100 {
        assert!(total.accesses > 300 * count && total.far_pages > 50 * count, "{total:?}");
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
