//! The registration cache over real memory.

mod remapped;

use std::os::fd::AsFd;
use std::time::Duration;

use byway_fabric::registration::{GetError, Limits, Mode, PinnedBuffers, Refused, Registrar, RegistrationCache};
use remapped::Verdict;
use remapped::memory::{Region, memfd, write};

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
    // Who unmaps waits until the event was read, not until it was counted.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let seen = || (cache.counters().ranges, cache.counters().invalidations);
    while seen() != (0, 2) {
        assert!(std::time::Instant::now() < deadline, "{:?}", seen());
        std::thread::yield_now();
    }
}

#[test]
fn no_more_stays_registered_than_was_asked_for() {
    let regions: Vec<Region> = (0..4).map(|_| Region::anonymous(5)).collect();
    // Ranges, bytes, and how many of these stay: none is beside another, which would make them one.
    for (ranges_max, bytes_max, kept) in
        [(2, 1 << 20, 2), (64, 3 * 4 * 4096, 3), (0, 1 << 20, 0), (64, 0, 0), (64, 1 << 20, 4)]
    {
        let cache = RegistrationCache::new(PinnedBuffers::new(8).unwrap(), Limits { ranges_max, bytes_max });
        for region in &regions {
            drop(cache.get(region.part(0, 4)).unwrap());
        }
        let counters = cache.counters();
        assert_eq!(
            (counters.ranges, counters.bytes),
            (kept, kept * 4 * 4096),
            "{ranges_max} ranges, {bytes_max} bytes"
        );
        let (evicted, once) = if kept == 0 { (0, 4) } else { (4 - kept as u64, 0) };
        assert_eq!((counters.evictions, counters.uncached, counters.misses), (evicted, once, 4));
    }
    regions.into_iter().for_each(Region::unmap);
}

#[test]
fn the_limit_on_locked_memory_is_named_with_its_remedy() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let Some(limit) = limit.filter(|limit| *limit < 1 << 29) else {
        let reason = "locked memory has no limit that could be reached";
        return byway_skip::skip_this(byway_skip::SkipReason::Machine(reason));
    };
    let region = Region::anonymous(limit as usize / 4096 + 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if rustix::process::geteuid().is_root() {
                // SAFETY: the system call, not libc's wrapper: it changes this thread alone, which ends here.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
            }
            let cache = cache_of(PinnedBuffers::new(8).unwrap());
            drop(cache.get(region.part(0, 1)).unwrap());
            let refused = cache.get(region.range()).unwrap_err();
            let bytes = region.range().bytes();
            let GetError::Refused(Refused::MemoryLock { bytes: told, limit_bytes }) = &refused else {
                panic!("{refused:?}")
            };
            assert_eq!((*told, *limit_bytes), (bytes, limit));
            assert!(refused.to_string().contains("ulimit -l"), "{refused}");
            assert!(cache.counters().refused > 0);
            drop(cache.get(region.part(0, 1)).unwrap());
        });
    });
    region.unmap();
}

#[test]
fn idle_ranges_give_way_where_memory_cannot_be_locked() {
    let cache = cache_of(PinnedBuffers::new(1).unwrap());
    let regions = [Region::anonymous(1), Region::anonymous(1)];
    let first = cache.get(regions[0].range()).unwrap();
    let refused = cache.get(regions[1].range());
    assert!(matches!(refused, Err(GetError::Refused(Refused::TooMany { handles_max: 1 }))), "it is in use");
    drop(first);
    drop(cache.get(regions[1].range()).unwrap());
    assert_eq!(cache.counters().evictions, 1);
    regions.into_iter().for_each(Region::unmap);
}

#[test]
fn what_is_in_use_stays_registered_when_its_mapping_goes() {
    let cache = cache_of(PinnedBuffers::new(8).unwrap());
    let region = Region::anonymous(1);
    let guard = cache.get(region.range()).unwrap();
    write(region.address, 0x5eed);
    region.unmap();
    assert_eq!((cache.counters().ranges, cache.counters().detached), (0, 1));
    let (scratch, mut seen) = (memfd(1), [0; 8]);
    cache.registrar().write_to(&guard, region.address, 8, scratch.as_fd(), 0).unwrap();
    rustix::io::pread(&scratch, &mut seen, 0).unwrap();
    assert_eq!(u64::from_ne_bytes(seen), 0x5eed, "the pages are there for whoever uses them");
    drop(guard);
    assert_eq!(cache.counters().detached, 0);
}

#[test]
fn a_mapping_is_not_divided_by_what_is_registered_in_it() {
    let cache = cache_of(PinnedBuffers::new(8).unwrap());
    let region = Region::anonymous(8);
    drop(cache.get(region.part(2, 1)).unwrap());
    // Of a divided mapping the kernel would refuse it.
    let region = region.resize(64);
    assert_eq!(region.pages, 64);
    drop(cache.get(region.part(2, 1)).unwrap());
    region.unmap();
}

#[test]
fn what_is_not_kept_takes_no_room_of_what_is() {
    let cache = RegistrationCache::new(PinnedBuffers::new(8).unwrap(), Limits { ranges_max: 1, bytes_max: 1 << 20 });
    let (kept, shared) = (Region::anonymous(2), Region::of_file(2));
    drop(cache.get(kept.range()).unwrap());
    for _ in 0..3 {
        assert!(!cache.get(shared.range()).unwrap().is_kept());
        assert!(cache.get(kept.range()).unwrap().is_kept());
    }
    let counters = cache.counters();
    assert_eq!((counters.evictions, counters.hits, counters.uncached, counters.ranges), (0, 3, 3, 1));
    [kept, shared].into_iter().for_each(Region::unmap);
}

#[test]
fn a_flush_deregisters_what_is_idle() {
    let cache = cache_of(PinnedBuffers::new(1).unwrap());
    let regions = [Region::anonymous(1), Region::anonymous(1)];
    drop(cache.get(regions[0].range()).unwrap());
    cache.flush();
    assert_eq!(cache.counters().ranges, 0);
    drop(cache.get(regions[1].range()).unwrap());
    assert_eq!((cache.counters().evictions, cache.counters().refused), (0, 0), "the one handle was free");
    regions.into_iter().for_each(Region::unmap);
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
