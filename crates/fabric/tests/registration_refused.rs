//! Where userfaultfd is refused, memory is registered for each use. A process of its own: the refusal is the process's.

use byway_fabric::registration::{Limits, Mode, PageRange, Refused, Registrar, RegistrationCache, Unavailable};
use std::sync::atomic::{AtomicI64, Ordering};

/// Counts what is registered.
#[derive(Debug, Default)]
struct Counting {
    registered: AtomicI64,
}

impl Registrar for Counting {
    type Handle = ();

    fn register(&self, _: PageRange) -> Result<(), Refused> {
        self.registered.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn deregister(&self, (): ()) {
        self.registered.fetch_sub(1, Ordering::Relaxed);
    }
}

/// `USERFAULTFD_IOC_NEW` of /dev/userfaultfd.
const NEW: u32 = 0xaa00;

/// A filter as a container has it: `userfaultfd` is not permitted, nor is the device that gives one.
fn refuse_userfaultfd() {
    let statement = |code: u32, (jt, jf): (u8, u8), k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |offset: usize| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, (0, 0), offset as u32);
    let is = |jumps, what: u32| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jumps, what);
    let answer = |what: u32| statement(libc::BPF_RET | libc::BPF_K, (0, 0), what);
    let mut filter = [
        load(std::mem::offset_of!(libc::seccomp_data, nr)),
        is((4, 0), libc::SYS_userfaultfd as u32),
        is((0, 2), libc::SYS_ioctl as u32),
        load(std::mem::offset_of!(libc::seccomp_data, args) + size_of::<u64>()),
        is((1, 0), NEW),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program is whole, and both calls change what this thread may do and nothing else.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

#[test]
fn without_events_each_use_registers_and_the_reason_is_told() {
    refuse_userfaultfd();
    let cache = RegistrationCache::new(Counting::default(), Limits::default());
    assert_eq!(cache.mode(), Mode::EachTime(Unavailable::NotPermitted));
    let memory = vec![0u8; 4096];
    let range = PageRange::covering(memory.as_ptr().addr(), memory.len()).unwrap();
    for _ in 0..2 {
        let guard = cache.get(range).unwrap();
        assert!(!guard.is_kept());
        assert_eq!(cache.registrar().registered.load(Ordering::Relaxed), 1);
        drop(guard);
        assert_eq!(cache.registrar().registered.load(Ordering::Relaxed), 0);
    }
    let counters = cache.counters();
    assert_eq!((counters.hits, counters.misses, counters.uncached), (0, 2, 2));
}
