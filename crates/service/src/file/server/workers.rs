//! A few threads per loop for calls on files that may block. A call is a closure; each runs with the rights of one user.

use std::cell::RefCell;
use std::collections::VecDeque;

use byway_reactor::Waker;
use byway_reactor::privilege::{User, clear_umask_of_thread};
use byway_reactor::thread_pool::{Runner, ThreadPool};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use super::super::share::NOBODY;
use super::FileRequestId;
use super::outcome::Outcome;
use crate::limits::{FILE_JOBS_MAX, FILE_WORKERS_MAX};

/// What a thread does.
pub(super) type Work = Box<dyn FnOnce() -> Result<Outcome, Errno> + Send>;

/// What came of a call. None: it was something to drop.
type Ended = Option<(FileRequestId, Result<Outcome, Errno>)>;

enum Queued {
    /// A call, with the rights of a user; None: with any, since it needs none.
    Call { request: FileRequestId, user: Option<User>, work: Work },
    /// Something to drop, which may close files.
    Drop(Box<dyn Send>),
    /// Something to do with the server's own rights, whose end nobody waits for.
    Own(Box<dyn FnOnce() + Send>),
}

/// The threads and their queue of at most [`FILE_JOBS_MAX`] calls.
pub(super) struct Workers {
    pool: ThreadPool<Queued, Ended>,
    /// Calls of [`Workers::run_alone`] that wait for one another.
    alone: VecDeque<(FileRequestId, User, Work)>,
    /// The one that a thread has.
    runs_alone: Option<FileRequestId>,
}

impl Workers {
    /// No threads yet; they start when first needed. `waker` wakes the loop when a call has ended.
    pub(super) fn new(waker: Waker) -> Self {
        Self { pool: ThreadPool::new(waker, "byway-share", runner), alone: VecDeque::new(), runs_alone: None }
    }

    /// Whether there is no room for another call.
    pub(super) fn is_full(&self) -> bool {
        self.pool.pending() + self.alone.len() >= FILE_JOBS_MAX
    }

    /// Queues a call of `user`, or one that needs no rights. False if no thread runs and none can be started: it will not run.
    pub(super) fn run(&mut self, request: FileRequestId, user: Option<User>, work: Work) -> bool {
        self.pool.run(Queued::Call { request, user, work }, FILE_WORKERS_MAX).is_ok()
    }

    /// The same, for a call that may take a thread for minutes: one of these at a time, so that the other threads serve other calls.
    pub(super) fn run_alone(&mut self, request: FileRequestId, user: User, work: Work) -> bool {
        if self.runs_alone.is_some() {
            self.alone.push_back((request, user, work));
            return true;
        }
        let runs = self.run(request, Some(user), work);
        self.runs_alone = runs.then_some(request);
        runs
    }

    /// Has a thread drop something: the last close of a file may wait for the file system.
    pub(super) fn drop_later(&mut self, what: impl Send + 'static) {
        // Without a thread it is dropped here.
        let _ = self.pool.run(Queued::Drop(Box::new(what)), FILE_WORKERS_MAX);
    }

    /// Has a thread do something with the server's own rights. Nobody hears what came of it.
    pub(super) fn run_later(&mut self, work: impl FnOnce() + Send + 'static) {
        let _ = self.pool.run(Queued::Own(Box::new(work)), FILE_WORKERS_MAX);
    }

    /// Takes the calls that have ended.
    pub(super) fn collect(&mut self) -> Vec<(FileRequestId, Result<Outcome, Errno>)> {
        let mut ended = Vec::new();
        self.pool.collect(&mut ended);
        let mut ended: Vec<_> = ended.into_iter().flatten().collect();
        if ended.iter().any(|(request, _)| self.runs_alone == Some(*request)) {
            self.runs_alone = None;
            while self.runs_alone.is_none()
                && let Some((request, user, work)) = self.alone.pop_front()
            {
                if !self.run_alone(request, user, work) {
                    ended.push((request, Err(Errno::AGAIN)));
                }
            }
        }
        ended
    }
}

fn runner() -> Runner<Queued, Ended> {
    let umask = clear_umask_of_thread().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::PERM));
    Box::new(move |queued| match queued {
        // Without the user's rights, or with another mode than was asked for, nothing is done.
        Queued::Call { request, user, work } => {
            let take = |()| user.map_or(Ok(()), |user| RIGHTS.with_borrow_mut(|rights| rights.take(&user)));
            Some((request, umask.and_then(take).and_then(|()| work())))
        }
        Queued::Own(work) => {
            if RIGHTS.with_borrow_mut(|rights| rights.take(&server_itself())).is_ok() {
                work();
            }
            None
        }
        Queued::Drop(what) => {
            drop(what);
            None
        }
    })
}

/// The user that the server is, for work of its own.
pub(super) fn server_itself() -> User {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    User { uid, gid, groups: vec![gid] }
}

/// Whether a call of a user may do what a loop's thread may, which takes no other user's rights: a server that is not root has its own
/// rights for all, and root has all rights.
pub(super) fn has_rights_of_server(user: &User) -> bool {
    !rustix::process::getuid().is_root() || user.uid == 0
}

thread_local! {
    /// Of a worker.
    static RIGHTS: RefCell<Rights> = RefCell::default();
}

/// Does something on a worker's thread with the server's own rights, in the middle of a call of a user.
///
/// # Errors
/// The kernel's: it was not done, or the thread did not get the user's rights back and its call must end.
pub(super) fn as_server<T>(work: impl FnOnce() -> T) -> Result<T, Errno> {
    let before = RIGHTS.with_borrow_mut(|rights| {
        let before = rights.now.clone();
        rights.take(&server_itself()).map(|()| before)
    })?;
    let done = work();
    if let Some(before) = before {
        RIGHTS.with_borrow_mut(|rights| rights.take(&before))?;
    }
    Ok(done)
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use byway_reactor::{IoChoice, Reactor};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn collect(workers: &mut Workers, count: usize) -> Vec<FileRequestId> {
        let (mut ended, until) = (Vec::new(), Instant::now() + LIMIT);
        while ended.len() < count && Instant::now() < until {
            ended.extend(workers.collect().into_iter().map(|(request, _)| request));
            std::thread::yield_now();
        }
        ended
    }

    #[test]
    fn calls_that_take_minutes_have_one_thread_together() {
        let reactor = Reactor::open(IoChoice::Auto, 1 << 20).unwrap();
        let mut workers = Workers::new(reactor.waker());
        let number = FileRequestId::from_u64;
        let (go_on, goes_on) = channel::<()>();
        let goes_on = std::sync::Arc::new(std::sync::Mutex::new(goes_on));
        let (begin, begun) = channel();
        let long = FILE_WORKERS_MAX as u64 + 2;
        for at in 0..long {
            let (goes_on, begin) = (std::sync::Arc::clone(&goes_on), begin.clone());
            let work = move || {
                begin.send(at).unwrap();
                goes_on.lock().unwrap().recv_timeout(LIMIT).unwrap();
                Ok(Outcome::Done)
            };
            assert!(workers.run_alone(number(at), server_itself(), Box::new(work)));
        }
        assert_eq!(begun.recv_timeout(LIMIT), Ok(0));
        assert!(workers.run(number(100), None, Box::new(|| Ok(Outcome::Done))));
        assert_eq!(collect(&mut workers, 1), [number(100)], "other calls have threads");
        assert!(begun.try_recv().is_err(), "the first one has not ended");
        for at in 0..long {
            go_on.send(()).unwrap();
            assert_eq!(collect(&mut workers, 1), [number(at)]);
            if at + 1 < long {
                assert_eq!(begun.recv_timeout(LIMIT), Ok(at + 1));
            }
        }
    }
}
