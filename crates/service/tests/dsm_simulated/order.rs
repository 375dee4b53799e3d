//! Which values a load may see under release consistency: by vector clocks, those of stores that no later store before the load has replaced.
//!
//! In a program without data races that is one value, the last one.

use std::collections::HashMap;

/// Of each thread, how many of its steps come before.
type Clock = Vec<usize>;

struct Store {
    thread: usize,
    value: u64,
    /// The thread's, with the store.
    clock: Clock,
}

#[derive(Default)]
pub struct Order {
    threads: Vec<Clock>,
    locks: HashMap<u32, Clock>,
    barriers: HashMap<u32, Clock>,
    /// Of all fences that are over.
    fences: Clock,
    /// Of each thread in a fence: its own clock and that of the fences before.
    fencing: HashMap<usize, (Clock, Clock)>,
    stores: HashMap<usize, Vec<Store>>,
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.resize(clock.len().max(other.len()), 0);
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = theirs.max(mine).to_owned());
}

impl Order {
    pub fn new(threads: usize) -> Self {
        Self { threads: vec![vec![0; threads]; threads], ..Self::default() }
    }

    pub fn stores(&mut self, thread: usize, word: usize, value: u64) {
        self.threads[thread][thread] += 1;
        let clock = self.threads[thread].clone();
        self.stores.entry(word).or_default().push(Store { thread, value, clock });
    }

    /// Looks at the value that a load has seen.
    ///
    /// # Errors
    /// It must not see that one.
    pub fn loads(&self, thread: usize, word: usize, value: u64) -> Result<(), String> {
        let stores = self.stores.get(&word).map_or(&[][..], Vec::as_slice);
        let seen = stores.iter().find(|store| store.value == value);
        if seen.is_none() && value != 0 {
            return Err(format!("thread {thread} loads {value} of word {word}, which was never stored there"));
        }
        let is_after_seen = |store: &&Store| match seen {
            Some(seen) => store.value != value && store.clock[seen.thread] >= seen.clock[seen.thread],
            None => true,
        };
        let is_before_load = |store: &&Store| self.threads[thread][store.thread] >= store.clock[store.thread];
        match stores.iter().filter(is_after_seen).find(is_before_load) {
            Some(later) => Err(format!("thread {thread} loads {value} of word {word}, replaced by {}", later.value)),
            None => Ok(()),
        }
    }

    pub fn locks(&mut self, thread: usize, lock: u32) {
        join(&mut self.threads[thread], self.locks.entry(lock).or_default());
    }

    pub fn unlocks(&mut self, thread: usize, lock: u32) {
        self.locks.insert(lock, self.threads[thread].clone());
    }

    pub fn arrives(&mut self, thread: usize, barrier: u32) {
        join(self.barriers.entry(barrier).or_default(), &self.threads[thread]);
    }

    pub fn passes(&mut self, thread: usize, barrier: u32) {
        join(&mut self.threads[thread], &self.barriers[&barrier]);
    }

    pub fn begins_fence(&mut self, thread: usize) {
        self.fencing.insert(thread, (self.threads[thread].clone(), self.fences.clone()));
    }

    pub fn ends_fence(&mut self, thread: usize) {
        let (own, before) = &self.fencing[&thread];
        join(&mut self.threads[thread], before);
        join(&mut self.fences, own);
    }
}
