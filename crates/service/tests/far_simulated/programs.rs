//! A simulated program, or a forked child of one: which pages it has, what it wrote, and its threads.

use std::collections::{HashMap, HashSet};

use byway_reactor::Instant;
use byway_service::memory::pager::{PAGE_BYTES, SpaceId};

use super::Chance;

/// Pages of a program, and how many of them may be here. The pager aims for some fewer.
pub const PAGES: u64 = 300;
const THREADS: usize = 4;

/// What a thread is to do.
#[derive(Clone, Copy)]
pub struct Access {
    pub page: u64,
    pub writes: bool,
    pub since: Instant,
    /// It has faulted, and nothing has woken it since.
    pub sleeps: bool,
}

pub struct Program {
    pub space: SpaceId,
    /// Pages that are in the program, with the version that each holds; 0: zeroes.
    pub here: HashMap<u64, u64>,
    /// The version that the program wrote last.
    pub wrote: HashMap<u64, u64>,
    pub poisoned: HashSet<u64>,
    /// Pages of it that it cannot write to before the pager lets it.
    pub protected: HashSet<u64>,
    /// Pages that were in it, or in frames, when copies were lost the last time.
    pub here_at_loss: HashSet<u64>,
    pub threads: [Option<Access>; THREADS],
    /// Pages that a forked child has too, and neither has written since: the kernel does not move them.
    pub shared: HashSet<u64>,
    /// Accesses that the threads may begin.
    pub granted: usize,
}

impl Program {
    pub fn new(space: SpaceId) -> Self {
        Self {
            space,
            here: HashMap::new(),
            wrote: HashMap::new(),
            poisoned: HashSet::new(),
            protected: HashSet::new(),
            here_at_loss: HashSet::new(),
            threads: [None; THREADS],
            shared: HashSet::new(),
            granted: 0,
        }
    }

    /// Its child has what it has, and one thread that waits for nothing. A poisoned page is so for the child too.
    pub fn fork(&mut self, space: SpaceId) -> Self {
        self.shared = self.here.keys().copied().collect();
        let child = Self::new(space);
        let (wrote, poisoned, protected) = (self.wrote.clone(), self.poisoned.clone(), self.protected.clone());
        Self { here: self.here.clone(), wrote, poisoned, protected, ..child }
    }

    pub fn is_idle(&self) -> bool {
        self.granted == 0 && self.threads.iter().all(Option::is_none)
    }

    /// Whether a thread begins an access: if it has none, and one may begin.
    pub fn begin(&mut self, thread: usize, chance: &mut Chance, (near, now): (u64, Instant)) -> bool {
        if self.threads[thread].is_some() || self.granted == 0 {
            return false;
        }
        self.granted -= 1;
        let page = if chance.one_in(2) { near % PAGES } else { chance.below(PAGES as usize) as u64 };
        let writes = !chance.one_in(3);
        self.threads[thread] = Some(Access { page, writes, since: now, sleeps: false });
        true
    }

    /// Threads that wait for the page try again, as the kernel has it.
    pub fn wake(&mut self, page: u64) {
        self.threads.iter_mut().flatten().filter(|access| access.page == page).for_each(|access| access.sleeps = false);
    }

    /// A thread writes a version to a page that is here.
    pub fn write(&mut self, page: u64, version: u64) {
        self.shared.remove(&page);
        self.here.insert(page, version);
        self.wrote.insert(page, version);
    }

    /// A page was lost: the program maps another in its place, and no thread waits for it.
    pub fn map_anew(&mut self, page: u64) {
        self.wrote.remove(&page);
        for thread in self.threads.iter_mut().filter(|thread| thread.is_some_and(|access| access.page == page)) {
            *thread = None;
        }
    }
}

/// What a page has of a version: zeroes before the first.
pub fn bytes_of(page: u64, version: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    if version > 0 {
        let word = (version << 16 | page).to_le_bytes();
        bytes.as_chunks_mut::<8>().0.fill(word);
    }
    bytes
}
