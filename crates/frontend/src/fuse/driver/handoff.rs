//! Requests that may wait for others, kept from taking all threads that read requests.
//!
//! Some of the reading threads serve such requests themselves, which costs no hand-over. Further requests go to threads of their own,
//! and further ones wait in a queue. So the other reading threads always go on with requests that do not wait.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Reply, Request, hand_over, notify};
use crate::limits::FUSE_WAITING_THREADS_MAX;

type Job = (Request, Reply);

/// See the module. The queue is bounded by the requests under way ([`FUSE_REQUESTS_MAX`](crate::limits::FUSE_REQUESTS_MAX)).
pub(super) struct Handoff {
    /// Reading threads that may serve such requests at a time.
    readers_max: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    readers: usize,
    queue: VecDeque<Job>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    has_ended: bool,
}

impl Handoff {
    pub(super) fn new(readers_max: usize) -> Arc<Self> {
        Arc::new(Self { readers_max, state: Mutex::default(), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a request, on the calling thread or on another one. The calling thread reads requests.
    pub(super) fn serve(self: &Arc<Self>, request: Request, reply: Reply) {
        let mut state = self.state();
        if state.readers >= self.readers_max || !state.queue.is_empty() {
            return self.queue(state, (request, reply));
        }
        state.readers += 1;
        drop(state);
        let mut next = Some((request, reply));
        while let Some((request, reply)) = next {
            hand_over(request, reply);
            let mut state = self.state();
            next = state.queue.pop_front();
            if next.is_none() {
                state.readers -= 1;
            }
        }
    }

    fn queue(self: &Arc<Self>, mut state: MutexGuard<'_, State>, job: Job) {
        if state.idle <= state.queue.len() && state.threads.len() < FUSE_WAITING_THREADS_MAX {
            let this = Arc::clone(self);
            let name = format!("fuse-wait-{}", state.threads.len());
            match std::thread::Builder::new().name(name).spawn(move || this.run()) {
                Ok(thread) => state.threads.push(thread),
                // This thread serves the request, and reads no other meanwhile.
                Err(_) if state.threads.is_empty() => {
                    drop(state);
                    return hand_over(job.0, job.1);
                }
                Err(_) => {}
            }
        }
        state.queue.push_back(job);
        drop(state);
        self.changed.notify_one();
    }

    fn run(&self) {
        notify::note_serving();
        let mut state = self.state();
        loop {
            if let Some((request, reply)) = state.queue.pop_front() {
                drop(state);
                hand_over(request, reply);
                state = self.state();
            } else if state.has_ended {
                return;
            } else {
                state.idle += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }

    /// No request follows: the threads end when the queue is empty.
    pub(super) fn end(&self) {
        self.state().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits for the end of the threads.
    pub(super) fn wait(&self) {
        let threads = std::mem::take(&mut self.state().threads);
        for thread in threads {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}
