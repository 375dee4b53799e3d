//! A few threads per loop for calls on files that may block. A call is a closure; each runs with the rights of one user.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use byway_fabric::Slot;
use byway_reactor::Waker;
use byway_reactor::privilege::{User, clear_umask_of_thread};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use super::super::share::NOBODY;
use super::outcome::Outcome;
use crate::limits::{FILE_JOBS_MAX, FILE_WORKERS_MAX};

/// What a thread does.
pub(super) type Work = Box<dyn FnOnce() -> Result<Outcome, Errno> + Send>;

struct Queued {
    job: Slot,
    user: User,
    work: Work,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    done: Vec<(Slot, Result<Outcome, Errno>)>,
    idle: usize,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    waker: Waker,
}

/// The threads and their queue of at most [`FILE_JOBS_MAX`] calls.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<std::thread::JoinHandle<()>>,
    pending: usize,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// No threads yet; they start when first needed. `waker` wakes the loop when a call has ended.
    pub(super) fn new(waker: Waker) -> Self {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), waker };
        Self { shared: Arc::new(shared), threads: Vec::new(), pending: 0 }
    }

    /// Whether there is no room for another call.
    pub(super) fn is_full(&self) -> bool {
        self.pending >= FILE_JOBS_MAX
    }

    /// Queues a call of `user`. False if no thread runs and none can be started: it will not run.
    pub(super) fn run(&mut self, job: Slot, user: User, work: Work) -> bool {
        let mut state = lock(&self.shared);
        if state.idle <= state.queue.len() && self.threads.len() < FILE_WORKERS_MAX {
            let shared = Arc::clone(&self.shared);
            match std::thread::Builder::new().name("byway-share".into()).spawn(move || serve(&shared)) {
                Ok(thread) => self.threads.push(thread),
                Err(_) if !self.threads.is_empty() => {}
                Err(_) => return false,
            }
        }
        state.queue.push_back(Queued { job, user, work });
        drop(state);
        self.pending += 1;
        self.shared.work.notify_one();
        true
    }

    /// Takes the calls that have ended.
    pub(super) fn collect(&mut self) -> Vec<(Slot, Result<Outcome, Errno>)> {
        if self.pending == 0 {
            return Vec::new();
        }
        let done = std::mem::take(&mut lock(&self.shared).done);
        self.pending -= done.len();
        done
    }
}

impl Drop for Workers {
    /// Waits for the calls that have begun; the others do not begin.
    fn drop(&mut self) {
        {
            let mut state = lock(&self.shared);
            state.stop = true;
            state.queue.clear();
        }
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared) {
    let umask = clear_umask_of_thread().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::PERM));
    let mut rights = Rights::default();
    let mut state = lock(shared);
    loop {
        if let Some(Queued { job, user, work }) = state.queue.pop_front() {
            drop(state);
            // Without the user's rights, or with another mode than was asked for, nothing is done.
            let result = umask.and_then(|()| rights.take(&user)).and_then(|()| work());
            state = lock(shared);
            state.done.push((job, result));
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

/// Whose rights the thread has now.
#[derive(Default)]
struct Rights {
    now: Option<User>,
}

impl Rights {
    /// Takes the rights of a user, for this thread alone. The real and the saved user stay root, so that there is a way back. A
    /// process that is not root has the rights that it has.
    fn take(&mut self, user: &User) -> Result<(), Errno> {
        if self.now.as_ref() == Some(user) || !rustix::process::getuid().is_root() {
            return Ok(());
        }
        self.now = None;
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        let groups: Vec<Gid> = user.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        // Root has all of root's rights, also in a thread that its loop started with fewer.
        for uid in [Uid::ROOT, Uid::from_raw(NOBODY), Uid::ROOT] {
            rustix::thread::set_thread_res_uid(None::<Uid>, uid, None::<Uid>)?;
        }
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(None::<Gid>, gid, None::<Gid>)?;
        rustix::thread::set_thread_res_uid(None::<Uid>, uid, None::<Uid>)?;
        self.now = Some(user.clone());
        Ok(())
    }
}
