//! A few threads per loop for calls that block. They start when first needed, and wake the loop when a call has ended.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::waker::Waker;

/// Runs the calls of one thread: made in that thread, so that it may keep what belongs to the thread.
pub type Runner<Job, Done> = Box<dyn FnMut(Job) -> Done>;

struct State<Job, Done> {
    queue: VecDeque<Job>,
    done: Vec<Done>,
    idle: usize,
    stop: bool,
}

struct Shared<Job, Done> {
    state: Mutex<State<Job, Done>>,
    work: Condvar,
    waker: Waker,
}

impl<Job, Done> Shared<Job, Done> {
    fn lock(&self) -> MutexGuard<'_, State<Job, Done>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads and their queue. The caller bounds the queue, by [`ThreadPool::pending`].
pub struct ThreadPool<Job, Done> {
    shared: Arc<Shared<Job, Done>>,
    name: &'static str,
    runner: fn() -> Runner<Job, Done>,
    threads: Vec<std::thread::JoinHandle<()>>,
    pending: usize,
}

impl<Job: Send + 'static, Done: Send + 'static> ThreadPool<Job, Done> {
    /// A pool without threads. Each thread is called `name`, and runs its calls by a `runner` of its own.
    pub fn new(waker: Waker, name: &'static str, runner: fn() -> Runner<Job, Done>) -> Self {
        let state = State { queue: VecDeque::new(), done: Vec::new(), idle: 0, stop: false };
        let shared = Shared { state: Mutex::new(state), work: Condvar::new(), waker };
        Self { shared: Arc::new(shared), name, runner, threads: Vec::new(), pending: 0 }
    }

    /// Queues a call. A thread starts for it if none is idle and fewer than `threads_max` have started.
    ///
    /// # Errors
    /// `EAGAIN` if no thread runs and none can be started: the call will not run.
    pub fn run(&mut self, job: Job, threads_max: usize) -> Result<(), Errno> {
        let mut state = self.shared.lock();
        if state.idle <= state.queue.len() && self.threads.len() < threads_max {
            let (shared, runner) = (Arc::clone(&self.shared), self.runner);
            match std::thread::Builder::new().name(self.name.into()).spawn(move || serve(&shared, runner())) {
                Ok(thread) => self.threads.push(thread),
                Err(_) if !self.threads.is_empty() => {}
                Err(_) => return Err(Errno::AGAIN),
            }
        }
        state.queue.push_back(job);
        drop(state);
        self.pending += 1;
        self.shared.work.notify_one();
        Ok(())
    }

    /// Moves the results of ended calls to `into`.
    pub fn collect(&mut self, into: &mut Vec<Done>) {
        if self.pending > 0 {
            let mut state = self.shared.lock();
            self.pending -= state.done.len();
            into.append(&mut state.done);
        }
    }
}

impl<Job, Done> ThreadPool<Job, Done> {
    /// Calls whose results have not been collected.
    pub fn pending(&self) -> usize {
        self.pending
    }
}

impl<Job, Done> Drop for ThreadPool<Job, Done> {
    /// Waits for the calls that have begun; the others do not begin.
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.stop = true;
            state.queue.clear();
        }
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve<Job, Done>(shared: &Shared<Job, Done>, mut runner: Runner<Job, Done>) {
    let mut state = shared.lock();
    loop {
        if let Some(job) = state.queue.pop_front() {
            drop(state);
            let done = runner(job);
            state = shared.lock();
            state.done.push(done);
            shared.waker.wake();
        } else if state.stop {
            return;
        } else {
            state.idle += 1;
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}
