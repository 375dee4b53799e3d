//! Threads that map, unmap, move, discard and fork as they please, and after each change use registered memory: what is
//! written at an address must be what the registration of that address reads. The registrar pins pages by io_uring, so a
//! registration that is stale reads other pages, as a NIC's would.
//!
//! It runs in a process of its own: a deadlock ends with it, and a seeded bug stays in it.

pub mod memory;
mod worker;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use byway_fabric::registration::{
    Limits, Mode, PageRange, PinnedBuffer, PinnedBuffers, Refused, Registrar, RegistrationCache,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use memory::Region;

/// The variable that tells a process of this test to be the workload: its seed, steps, and the place of a bug.
const WORKLOAD: &str = "BYWAY_REGISTRATION_WORKLOAD";
/// The test that a process which is the workload runs.
const ENTRY: &str = "workload_process";

/// Threads; one more than most machines that test this have cores for.
const THREADS: u64 = 3;

/// How a process that found a stale registration ends.
const STALE: i32 = 33;

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No rule was broken.
    Sound,
    /// A registration named other pages than its addresses, or a child was served, or a use outlived a fork.
    Stale(String),
    /// It did not end in time.
    Stuck,
    /// Something else went wrong.
    Failed(String),
}

/// Runs the workload in a process, for at most `limit`.
pub fn run(seed: u64, steps: u64, bug: usize, limit: Duration) -> Verdict {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", ENTRY, "--nocapture", "--test-threads=1"])
        .env(WORKLOAD, format!("{seed},{steps},{bug}"))
        .process_group(0)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let text = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || std::io::read_to_string(text).unwrap());
    let pid = rustix::process::Pid::from_child(&child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let ended = is_ready_within(&pidfd, limit);
    // With the children of its forks: one that waits for a lock for ever would keep our end of the pipe open.
    rustix::process::kill_process_group(pid, rustix::process::Signal::KILL).unwrap();
    let status = child.wait().unwrap();
    let text = reader.join().unwrap();
    if ended { verdict(status, text) } else { Verdict::Stuck }
}

fn verdict(status: ExitStatus, text: String) -> Verdict {
    match status.code() {
        Some(0) => Verdict::Sound,
        Some(STALE) => Verdict::Stale(text.lines().last().unwrap_or_default().to_owned()),
        _ => Verdict::Failed(format!("{status}: {text}")),
    }
}

fn is_ready_within(fd: &OwnedFd, limit: Duration) -> bool {
    let timeout = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).unwrap() > 0
}

/// Is the workload, in a process that is meant to be; otherwise nothing. `select` puts in a bug by its place, from 1.
pub fn be_workload(select: impl Fn(usize)) {
    let Ok(wanted) = std::env::var(WORKLOAD) else { return };
    let numbers: Vec<u64> = wanted.split(',').map(|number| number.parse().unwrap()).collect();
    let [seed, steps, bug] = numbers[..] else { panic!("{wanted}") };
    // Before the caches: the handlers of who came first run last, when those of the caches have run.
    // SAFETY: the handler is a function.
    assert_eq!(unsafe { libc::pthread_atfork(Some(memory::unmap_ballast), None, None) }, 0);
    let world = World::new();
    if bug > 0 {
        select(bug as usize);
    }
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let world = &world;
            scope.spawn(move || worker::Worker::new(world, seed, thread).run(steps));
        }
    });
    let counters = world.cache.counters();
    assert!(counters.hits > 0 && counters.invalidations > 0 && counters.evictions > 0, "{counters:?}");
    assert_eq!((counters.in_use, counters.detached), (0, 0), "{counters:?}");
    eprintln!("{counters:?}");
}

/// Ends the process at once, whatever its other threads wait for.
fn found_stale(what: &str) -> ! {
    eprintln!("{what}");
    // SAFETY: ends the process.
    unsafe { libc::_exit(STALE) }
}

/// Memory of all threads.
pub struct World {
    pub cache: RegistrationCache<Unmapping>,
    /// A registrar whose registrations do not survive a fork.
    pub plain: RegistrationCache<Plain>,
    /// Changed and checked under the lock, and registered by threads that do not have it.
    pub shared: Vec<Mutex<Region>>,
}

impl World {
    fn new() -> Self {
        let limits = Limits { ranges_max: 12, bytes_max: 256 << 10 };
        let pinned = PinnedBuffers::new(1024).unwrap();
        let cache = RegistrationCache::new(Unmapping { pinned }, limits);
        assert_eq!(cache.mode(), Mode::Cached);
        let plain = RegistrationCache::new(Plain::default(), Limits { ranges_max: 64, bytes_max: 1 << 20 });
        let shared = (0..2).map(|_| Mutex::new(Region::anonymous(8))).collect();
        Self { cache, plain, shared }
    }
}

/// Pins pages, and unmaps watched memory on the way, as a registrar that frees may.
#[derive(Debug)]
pub struct Unmapping {
    pinned: PinnedBuffers,
}

impl Unmapping {
    /// Whether the bytes at `address` that the registration sees are `stamp`.
    pub fn sees(&self, buffer: &PinnedBuffer, address: usize, stamp: u64, scratch: &OwnedFd) -> bool {
        let mut seen = [0; 8];
        match self.pinned.write_to(buffer, address, 8, scratch.as_fd(), 0) {
            Ok(bytes) => assert_eq!(bytes, 8),
            // Somebody else has taken the registration away: what was found names no pages at all.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => return false,
            Err(error) => panic!("{error}"),
        }
        assert_eq!(rustix::io::pread(scratch, &mut seen, 0).unwrap(), 8);
        seen == stamp.to_ne_bytes()
    }
}

impl Registrar for Unmapping {
    type Handle = PinnedBuffer;

    fn register(&self, range: PageRange) -> Result<PinnedBuffer, Refused> {
        memory::unmap_one();
        self.pinned.register(range)
    }

    fn deregister(&self, handle: PinnedBuffer) {
        memory::unmap_one();
        self.pinned.deregister(handle);
    }

    fn survives_fork(&self) -> bool {
        true
    }
}

/// Numbers what it is asked to register.
#[derive(Debug, Default)]
pub struct Plain {
    next: AtomicU64,
}

impl Registrar for Plain {
    type Handle = u64;

    fn register(&self, _: PageRange) -> Result<u64, Refused> {
        Ok(self.next.fetch_add(1, Ordering::Relaxed))
    }

    fn deregister(&self, _: u64) {}
}
