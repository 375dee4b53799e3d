//! The registration cache over real memory.

mod remapped;

use std::time::Duration;

use byway_fabric::registration::{Limits, Mode, PinnedBuffers, Registrar, RegistrationCache};
use remapped::{Region, Verdict};

/// Far more than a run takes: what is not through by then never will be.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn workload_process() {
    remapped::be_workload(|bug| panic!("this build has no bug {bug}"));
}

#[test]
fn no_registration_is_stale_and_nobody_waits_for_ever() {
    let is_long = std::env::var_os("BYWAY_LONG").is_some();
    let (seeds, steps) = if is_long { (20, 20_000) } else { (3, 4_000) };
    for seed in 1..=seeds {
        assert_eq!(remapped::run(seed, steps, 0, LIMIT), Verdict::Sound, "seed {seed}");
    }
}

fn cache_of<R: Registrar>(registrar: R) -> RegistrationCache<R> {
    let cache = RegistrationCache::new(registrar, Limits::default());
    assert_eq!(cache.mode(), Mode::Cached);
    cache
}

#[test]
fn a_range_is_registered_once_until_its_mapping_changes() {
    let cache = cache_of(PinnedBuffers::new(8).unwrap());
    let region = Region::anonymous(4);
    drop(cache.get(region.range()).unwrap());
    drop(cache.get(region.part(1, 2)).unwrap());
    assert_eq!((cache.counters().hits, cache.counters().misses), (1, 1));
    let region = region.replace();
    drop(cache.get(region.range()).unwrap());
    let counters = cache.counters();
    assert_eq!((counters.hits, counters.misses, counters.invalidations), (1, 2, 1));
    region.unmap();
    assert_eq!((cache.counters().ranges, cache.counters().invalidations), (0, 2));
}

#[test]
fn pages_of_a_file_stay_registered_only_where_the_caller_vouches_for_them() {
    let cache = cache_of(PinnedBuffers::new(8).unwrap());
    let region = Region::of_file(2);
    assert!(!cache.get(region.range()).unwrap().is_kept());
    assert_eq!((cache.counters().ranges, cache.counters().uncached), (0, 1));
    assert!(cache.get_stable(region.range()).unwrap().is_kept());
    assert!(cache.get(region.range()).unwrap().is_kept(), "it was vouched for");
    region.unmap();
    assert_eq!(cache.counters().ranges, 0);
}
