//! Where the reader of events may no longer `poll`, who unmaps memory goes on. A process of its own: the limit is the process's.

use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::time::{Duration, Instant};

use byway_fabric::registration::{Limits, Mode, PageRange, PinnedBuffers, RegistrationCache};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const PAGE: usize = 4096;

#[test]
fn who_unmaps_goes_on_where_poll_is_refused() {
    let cache = RegistrationCache::new(PinnedBuffers::new(8).unwrap(), Limits::default());
    assert_eq!(cache.mode(), Mode::Cached);
    let pages = [(); 3].map(|()| {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { mmap_anonymous(null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        page.unwrap().expose_provenance()
    });
    for page in pages {
        drop(cache.get(PageRange::covering(page, PAGE).unwrap()).unwrap());
    }
    let before = cache.counters();
    assert!(before.ranges > 0);

    // `poll` of even one descriptor fails from here on, with EINVAL.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    // SAFETY: each was mapped above, and nothing refers to it.
    let unmap = |page| unsafe { munmap(with_exposed_provenance_mut(page), PAGE) };
    let unmapper = std::thread::spawn(move || pages.map(unmap));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !unmapper.is_finished() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(unmapper.is_finished(), "an event was not read");
    assert_eq!(unmapper.join().unwrap(), [Ok(()); 3]);
    assert_eq!(cache.counters().ranges, 0);
}
