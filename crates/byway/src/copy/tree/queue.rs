//! Work for the threads of a copy: entries to copy, in a bounded queue, and calls for help with large files, which go first.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::limits::COPY_TREE_QUEUE_MAX;

/// See the module. `E` is an entry, `H` a call for help.
pub(super) struct Queue<E, H> {
    waiting: Mutex<Waiting<E, H>>,
    /// Work has come, or the end.
    work: Condvar,
    /// An entry was taken, or the queue was closed.
    room: Condvar,
}

struct Waiting<E, H> {
    entries: VecDeque<E>,
    help: VecDeque<H>,
    /// Entries that were taken and have not ended: they may call for help.
    under_way: usize,
    closed: bool,
}

/// What a thread does next.
pub(super) enum Work<E, H> {
    Entry(E),
    Help(H),
}

impl<E, H> Default for Queue<E, H> {
    fn default() -> Self {
        let waiting = Waiting { entries: VecDeque::new(), help: VecDeque::new(), under_way: 0, closed: false };
        Self { waiting: Mutex::new(waiting), work: Condvar::new(), room: Condvar::new() }
    }
}

impl<E, H> Queue<E, H> {
    fn waiting(&self) -> MutexGuard<'_, Waiting<E, H>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry, once there is room. Gives it back if the queue was closed.
    pub(super) fn push(&self, entry: E) -> Result<(), E> {
        let mut waiting = self.waiting();
        while waiting.entries.len() >= COPY_TREE_QUEUE_MAX && !waiting.closed {
            waiting = self.room.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        if waiting.closed {
            return Err(entry);
        }
        waiting.entries.push_back(entry);
        drop(waiting);
        self.work.notify_one();
        Ok(())
    }

    /// Calls for help, also when the queue is full or closed.
    pub(super) fn call(&self, help: impl IntoIterator<Item = H>) {
        self.waiting().help.extend(help);
        self.work.notify_all();
    }

    /// The next work; `None` when the queue is closed, and no entry is left or under way. [`Queue::ended`] follows each entry.
    pub(super) fn next(&self) -> Option<Work<E, H>> {
        let mut waiting = self.waiting();
        loop {
            if let Some(help) = waiting.help.pop_front() {
                return Some(Work::Help(help));
            }
            if let Some(entry) = waiting.entries.pop_front() {
                waiting.under_way += 1;
                drop(waiting);
                self.room.notify_one();
                return Some(Work::Entry(entry));
            }
            if waiting.closed && waiting.under_way == 0 {
                return None;
            }
            waiting = self.work.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// An entry has ended.
    pub(super) fn ended(&self) {
        let mut waiting = self.waiting();
        waiting.under_way -= 1;
        let is_last = waiting.under_way == 0 && waiting.closed;
        drop(waiting);
        if is_last {
            self.work.notify_all();
        }
    }

    /// Nothing more comes; what waits is still taken.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        self.work.notify_all();
        self.room.notify_all();
    }

    /// Nothing more comes, and what waits is dropped.
    pub(super) fn abandon(&self) {
        let dropped = std::mem::take(&mut self.waiting().entries);
        self.close();
        // Entries hold directories, whose release may ask a server.
        drop(dropped);
    }
}
