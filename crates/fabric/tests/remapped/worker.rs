//! One thread of the workload.

use std::os::fd::OwnedFd;

use byway_fabric::registration::{GetError, Guard, Limits, Mode, PinnedBuffers, RegistrationCache, Unavailable};

use super::memory::{self, PAGE, Region};
use super::{Unmapping, World, found_stale};

/// Regions of a thread.
const REGIONS_MAX: usize = 6;
/// Blocks that a thread takes and gives back in a row.
const BLOCKS: usize = 8;
/// Their length.
const BLOCK_PAGES: usize = 2;
/// Uses that go on while the memory's mapping changes.
const HELD_MAX: usize = 4;
/// Ballast of all threads.
const BALLAST_PAGES_MAX: usize = 16;
/// Steps from one fork of a thread to the next.
const STEPS_PER_FORK: u64 = 400;
/// Checks of the memory that was registered before a fork, while the child is there.
const CHECKS_PER_FORK: usize = 4;
/// What parent and child write to tell each other.
const READY: u64 = 0x5eed;

pub struct Worker<'a> {
    world: &'a World,
    random: u64,
    thread: u64,
    stamp: u64,
    scratch: OwnedFd,
    regions: Vec<Region>,
    held: Vec<Guard<Unmapping>>,
}

impl<'a> Worker<'a> {
    pub fn new(world: &'a World, seed: u64, thread: u64) -> Self {
        let random = (seed << 8 | thread).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let scratch = memory::memfd(1);
        Self { world, random, thread, stamp: 0, scratch, regions: Vec::new(), held: Vec::new() }
    }

    pub fn run(mut self, steps: u64) {
        for step in 0..steps {
            if self.regions.len() < REGIONS_MAX {
                self.map();
            }
            match self.below(20) {
                0..2 => self.unmap(),
                2 => self.shrink(),
                3 if self.below(2) == 0 => self.resize(),
                3 => self.move_pages_out(),
                4 => self.move_over(),
                5 => self.replace(),
                6 => self.discard(),
                7 => self.unmap_and_map(),
                8 => self.hold(),
                9 => self.end_use(),
                10..13 => self.change_and_check_shared(),
                13..16 => self.get_shared(),
                16 => self.leave_ballast(),
                _ => self.check_any(),
            }
            if step % STEPS_PER_FORK == STEPS_PER_FORK / 2 {
                self.fork();
            }
        }
        self.held.clear();
        self.regions.drain(..).for_each(Region::unmap);
    }

    /// A number below `bound` (xorshift).
    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 33) as usize % bound
    }

    fn any(&mut self) -> usize {
        self.below(self.regions.len())
    }

    fn map(&mut self) {
        let pages = 1 + self.below(15);
        let region = if self.below(4) == 0 { Region::of_file(pages) } else { Region::anonymous(pages) };
        self.regions.push(region);
        self.check(region);
    }

    fn unmap(&mut self) {
        let at = self.any();
        self.regions.swap_remove(at).unmap();
    }

    /// What `free` and `malloc` of large blocks do: the same addresses, and other pages. All threads take blocks of one
    /// size, so one often gets the addresses of another, whose unmapping may not be through yet.
    fn unmap_and_map(&mut self) {
        for _ in 0..BLOCKS {
            let block = Region::anonymous(BLOCK_PAGES);
            self.check(block);
            block.unmap();
        }
    }

    fn shrink(&mut self) {
        let at = self.any();
        let region = self.regions[at];
        if region.pages > 1 {
            self.regions[at] = region.without_first(1 + self.below(region.pages - 1));
            self.check(self.regions[at]);
        }
    }

    fn resize(&mut self) {
        let at = self.any();
        let pages = 1 + self.below(15);
        let region = self.regions[at];
        // A mapping of a file that grows has no file behind what is new.
        if !region.is_file || pages < region.pages {
            self.regions[at] = region.resize(pages);
            self.check(self.regions[at]);
        }
    }

    fn move_pages_out(&mut self) {
        let at = self.any();
        let region = self.regions[at];
        if !region.is_file {
            self.check(region);
            let moved = region.move_pages_out();
            self.regions.extend(moved);
            self.check(region);
            if let Some(moved) = moved {
                self.check(moved);
            }
        }
    }

    fn move_over(&mut self) {
        let (from, to) = (self.any(), self.any());
        if from == to || self.regions[from].pages != self.regions[to].pages {
            return self.replace();
        }
        if let Some(moved) = self.regions[from].move_over(self.regions[to]) {
            self.regions[to] = moved;
            self.regions.swap_remove(from);
            self.check(moved);
        } else {
            self.regions[to].is_file = false;
        }
    }

    fn replace(&mut self) {
        let at = self.any();
        self.regions[at] = self.regions[at].replace();
        self.check(self.regions[at]);
    }

    fn discard(&mut self) {
        let at = self.any();
        let region = self.regions[at];
        let first = self.below(region.pages);
        self.check(region);
        region.discard(first, 1 + self.below(region.pages - first));
        self.check(region);
    }

    fn check_any(&mut self) {
        let at = self.any();
        self.check(self.regions[at]);
    }

    /// What is written at an address is what its registration reads.
    fn check(&mut self, region: Region) {
        let first = self.below(region.pages);
        let part = region.part(first, 1 + self.below(region.pages - first));
        let cache = &self.world.cache;
        let guard = if region.is_file { cache.get_stable(part) } else { cache.get(part) }.unwrap();
        assert!(guard.range().contains(part));
        // In all pages: one that is another's shows.
        for page in (part.start()..part.end()).step_by(PAGE) {
            self.stamp += 1;
            let stamp = self.thread << 56 | self.stamp;
            let address = page + self.stamp as usize * 8 % PAGE;
            memory::write(address, stamp);
            if !cache.registrar().sees(&guard, address, stamp, &self.scratch) {
                let kept = guard.is_kept();
                found_stale(&format!("stale: {region:?}, {part:?}, registered {:?}, kept {kept}", guard.range()));
            }
        }
    }

    /// A use during which anything may happen to the mapping.
    fn hold(&mut self) {
        if self.held.len() < HELD_MAX {
            let at = self.any();
            let region = self.regions[at];
            self.held.push(self.world.cache.get(region.range()).unwrap());
        }
    }

    fn end_use(&mut self) {
        if !self.held.is_empty() {
            let at = self.below(self.held.len());
            self.held.swap_remove(at);
        }
    }

    /// Others register this memory at the same moment.
    fn change_and_check_shared(&mut self) {
        let at = self.below(self.world.shared.len());
        let shared = self.world.shared[at].lock().unwrap();
        match self.below(3) {
            0 => drop(shared.replace()),
            1 => shared.discard(0, shared.pages),
            _ => {}
        }
        self.check(*shared);
    }

    /// Registers memory that another thread may be changing; what it sees there is nobody's business.
    fn get_shared(&mut self) {
        let at = self.below(self.world.shared.len());
        let region = {
            let shared = self.world.shared[at].lock().unwrap();
            *shared
        };
        let first = self.below(region.pages);
        for _ in 0..4 {
            drop(self.world.cache.get(region.part(first, 1 + self.below(region.pages - first))).unwrap());
        }
    }

    fn leave_ballast(&mut self) {
        if memory::ballast_pages() < BALLAST_PAGES_MAX {
            let page = Region::anonymous(1);
            drop(self.world.plain.get(page.range()).unwrap());
            memory::leave_ballast(page);
        }
    }

    /// Forks while registered memory is in use. The child is not served, does with its copy of the memory as it likes, and
    /// stays until the parent, which writes to the same pages meanwhile, has found that its registrations still name them
    /// and that those which do not survive a fork are gone.
    fn fork(&mut self) {
        let (watched, page) = (Region::anonymous(4), Region::anonymous(1));
        self.check(watched);
        let held = self.world.cache.get(watched.part(0, 1)).unwrap();
        let before = *self.world.plain.get(page.range()).unwrap();
        let meeting = Region::of_file(1);
        let parent = std::process::id();
        // SAFETY: the child calls nothing that allocates or locks, unless it has found a fault, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            be_child(self.world, watched, meeting, parent);
        }
        assert!(child > 0);
        let pid = rustix::process::Pid::from_raw(child).unwrap();
        let mut ended = None;
        while ended.is_none() && memory::read(meeting.address) != READY {
            std::thread::yield_now();
            ended = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG).unwrap();
        }
        if ended.is_none() {
            // The first write to each page after the fork: whose is the copy?
            for _ in 0..CHECKS_PER_FORK {
                self.check(watched);
            }
            self.stamp += 1;
            memory::write(watched.address, self.stamp);
            if !self.world.cache.registrar().sees(&held, watched.address, self.stamp, &self.scratch) {
                found_stale("memory in use while the process forked is registered as another's");
            }
            memory::write(meeting.address + 8, READY);
            ended = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
        }
        let status = ended.unwrap().1;
        if status.exit_status() != Some(0) {
            found_stale(&format!("a forked child was served: {status:?}"));
        }
        if *self.world.plain.get(page.range()).unwrap() == before {
            found_stale("a registration that does not survive a fork was found after it");
        }
        drop(held);
        [watched, page, meeting].into_iter().for_each(Region::unmap);
    }
}

/// The child of a fork: asks both caches, changes its copy of the memory in each way that the parent would have to be told
/// of, and waits for the parent's leave to go, or its end.
fn be_child(world: &World, watched: Region, meeting: Region, parent: u32) -> ! {
    let mut is_refused = matches!(world.cache.get(watched.range()), Err(GetError::ForkedChild));
    is_refused &= matches!(world.plain.get(watched.range()), Err(GetError::ForkedChild));
    // Whether or not the parent's threads were in the midst of something.
    if let Ok(registrar) = PinnedBuffers::new(1) {
        let own = RegistrationCache::new(registrar, Limits::default());
        is_refused &= own.mode() == Mode::EachTime(Unavailable::ForkedChild);
        is_refused &= matches!(own.get(watched.range()), Err(GetError::ForkedChild));
    }
    for page in 0..watched.pages {
        memory::write(watched.address + page * PAGE, READY);
    }
    watched.discard(1, 1);
    watched.replace().without_first(2).unmap();
    memory::write(meeting.address, READY);
    while memory::read(meeting.address + 8) != READY && std::os::unix::process::parent_id() == parent {
        std::thread::yield_now();
    }
    // SAFETY: ends the child.
    unsafe { libc::_exit(i32::from(!is_refused)) };
}
