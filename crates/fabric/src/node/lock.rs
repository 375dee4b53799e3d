//! The mutexes of a node. With debug assertions each thread counts the locks that it takes and the wake-ups that it sends, for the
//! tests that bound both (`tests/cost.rs`); without, counting costs nothing.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A mutex that outlives a panic of its holder: a node's tables are whole between any two of their calls.
#[derive(Debug, Default)]
pub struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits for the mutex.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        count(|cost| cost.locks += 1);
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the mutex if no thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = match self.0.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        count(|cost| cost.locks += 1);
        Some(guard)
    }
}

impl<T> Lock<T> {
    /// As [`Self::try_lock`]; never again once a holder has panicked.
    pub(super) fn try_lock_whole(&self) -> Option<MutexGuard<'_, T>> {
        if self.is_poisoned() { None } else { self.try_lock().filter(|_| !self.is_poisoned()) }
    }

    /// Whether a holder has panicked.
    pub(super) fn is_poisoned(&self) -> bool {
        self.0.is_poisoned()
    }
}

/// What a thread has done for nodes since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Mutexes of nodes and of their layers that the thread has locked.
    pub locks: u64,
    /// Wake-ups of threads in nodes that the thread has sent.
    pub wakes: u64,
}

#[cfg(debug_assertions)]
thread_local! {
    static COST: std::cell::Cell<Cost> = const { std::cell::Cell::new(Cost { locks: 0, wakes: 0 }) };
}

/// What the calling thread has done.
#[cfg(debug_assertions)]
pub fn cost() -> Cost {
    COST.get()
}

/// Counts a wake-up, sent by the calling thread.
pub(super) fn count_wake() {
    count(|cost| cost.wakes += 1);
}

#[cfg(debug_assertions)]
fn count(change: impl FnOnce(&mut Cost)) {
    let mut cost = COST.get();
    change(&mut cost);
    COST.set(cost);
}

#[cfg(not(debug_assertions))]
fn count(_: impl FnOnce(&mut Cost)) {}
