//! A few threads per loop for calls on files that may block. A call is a closure; each runs with the rights of one user.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

use byway_reactor::Waker;
use byway_reactor::privilege::{User, clear_umask_of_thread};
use byway_reactor::thread_pool::{Runner, ThreadPool};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use super::super::share::NOBODY;
use super::FileRequestId;
use super::outcome::Outcome;
use crate::limits::{FILE_JOBS_MAX, FILE_SYNCS_MAX, FILE_WORKERS_MAX};

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

/// A call that may take a thread for minutes.
struct LongCall {
    request: FileRequestId,
    /// The device that it is about.
    device: u64,
    user: User,
    work: Work,
}

/// Calls that may take minutes: one at a time for each device, and so many in all that other calls have threads.
#[derive(Default)]
struct LongCalls {
    waiting: VecDeque<LongCall>,
    /// Those that threads have, and their devices.
    running: HashMap<FileRequestId, u64>,
}

impl LongCalls {
    /// The next one that may begin: one whose device hangs keeps no other device's from it.
    fn next(&mut self) -> Option<LongCall> {
        if self.running.len() >= FILE_SYNCS_MAX {
            return None;
        }
        let is_free = |call: &LongCall| self.running.values().all(|device| *device != call.device);
        self.waiting.iter().position(is_free).and_then(|at| self.waiting.remove(at))
    }
}

/// The threads and their queue of at most [`FILE_JOBS_MAX`] calls.
pub(super) struct Workers {
    pool: ThreadPool<Queued, Ended>,
    long: LongCalls,
}

impl Workers {
    /// No threads yet; they start when first needed. `waker` wakes the loop when a call has ended.
    pub(super) fn new(waker: Waker) -> Self {
        Self { pool: ThreadPool::new(waker, "byway-share", runner), long: LongCalls::default() }
    }

    /// Whether there is no room for another call.
    pub(super) fn is_full(&self) -> bool {
        self.pool.pending() + self.long.waiting.len() >= FILE_JOBS_MAX
    }

    /// Queues a call of `user`, or one that needs no rights. False if no thread runs and none can be started: it will not run.
    pub(super) fn run(&mut self, request: FileRequestId, user: Option<User>, work: Work) -> bool {
        self.pool.run(Queued::Call { request, user, work }, FILE_WORKERS_MAX).is_ok()
    }

    /// The same, for a call that may take a thread for minutes: one of these at a time for each device, at most [`FILE_SYNCS_MAX`] in
    /// all, so that the other threads serve other calls.
    pub(super) fn run_long(&mut self, request: FileRequestId, device: u64, user: User, work: Work) -> bool {
        self.long.waiting.push_back(LongCall { request, device, user, work });
        !self.begin_long().contains(&request)
    }

    /// Has threads begin the long calls whose turn it is. Gives those for which no thread can be started.
    fn begin_long(&mut self) -> Vec<FileRequestId> {
        let mut refused = Vec::new();
        while let Some(LongCall { request, device, user, work }) = self.long.next() {
            if self.run(request, Some(user), work) {
                self.long.running.insert(request, device);
            } else {
                refused.push(request);
            }
        }
        refused
    }

    /// Gives the long calls whose clients have gone, for the caller to end. Those that wait do not begin. Those that threads have go on, and
    /// others about their devices wait for them; what comes of them is collected under the number of a request that has ended.
    pub(super) fn leave_long(&mut self, is_gone: impl Fn(FileRequestId) -> bool) -> Vec<FileRequestId> {
        let waiting = std::mem::take(&mut self.long.waiting);
        let (gone, stay): (VecDeque<_>, VecDeque<_>) = waiting.into_iter().partition(|call| is_gone(call.request));
        self.long.waiting = stay;
        let running = self.long.running.keys().copied().filter(|request| is_gone(*request));
        gone.iter().map(|call| call.request).chain(running).collect()
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
        let mut has_room = false;
        for (request, _) in &ended {
            has_room |= self.long.running.remove(request).is_some();
        }
        if has_room {
            ended.extend(self.begin_long().into_iter().map(|request| (request, Err(Errno::AGAIN))));
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
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};
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

    /// Calls of [`Workers::run_long`] that go on when they are told to.
    struct LongWork {
        begin: Sender<u64>,
        begun: Receiver<u64>,
        go_on: Sender<()>,
        goes_on: Arc<Mutex<Receiver<()>>>,
    }

    impl LongWork {
        fn new() -> Self {
            let ((begin, begun), (go_on, goes_on)) = (channel(), channel());
            Self { begin, begun, go_on, goes_on: Arc::new(Mutex::new(goes_on)) }
        }

        fn run(&self, workers: &mut Workers, number: u64, device: u64) {
            let (goes_on, begin) = (Arc::clone(&self.goes_on), self.begin.clone());
            let work = move || {
                begin.send(number).unwrap();
                goes_on.lock().unwrap().recv_timeout(LIMIT).unwrap();
                Ok(Outcome::Done)
            };
            assert!(workers.run_long(FileRequestId::from_u64(number), device, server_itself(), Box::new(work)));
        }

        fn begun(&self) -> u64 {
            self.begun.recv_timeout(LIMIT).unwrap()
        }
    }

    /// The workers' loop does not turn, and is woken.
    fn workers() -> (Reactor, Workers) {
        let reactor = Reactor::open(IoChoice::Auto, 1 << 20).unwrap();
        let workers = Workers::new(reactor.waker());
        (reactor, workers)
    }

    #[test]
    fn calls_that_take_minutes_have_one_thread_together() {
        let (_reactor, mut workers) = workers();
        let number = FileRequestId::from_u64;
        let (work, long) = (LongWork::new(), FILE_WORKERS_MAX as u64 + 2);
        for at in 0..long {
            work.run(&mut workers, at, 7);
        }
        assert_eq!(work.begun(), 0);
        assert!(workers.run(number(100), None, Box::new(|| Ok(Outcome::Done))));
        assert_eq!(collect(&mut workers, 1), [number(100)], "other calls have threads");
        assert!(work.begun.try_recv().is_err(), "the first one has not ended");
        for at in 0..long {
            work.go_on.send(()).unwrap();
            assert_eq!(collect(&mut workers, 1), [number(at)]);
            if at + 1 < long {
                assert_eq!(work.begun(), at + 1);
            }
        }
    }

    #[test]
    fn a_device_that_hangs_delays_no_other_s_and_not_all_threads_go_to_devices() {
        let (_reactor, mut workers) = workers();
        let number = FileRequestId::from_u64;
        let (hanging, work) = (LongWork::new(), LongWork::new());
        hanging.run(&mut workers, 0, 7);
        hanging.run(&mut workers, 1, 7);
        work.run(&mut workers, 2, 8);
        assert_eq!((hanging.begun(), work.begun()), (0, 2));
        work.go_on.send(()).unwrap();
        assert_eq!(collect(&mut workers, 1), [number(2)]);
        for at in 3..=FILE_WORKERS_MAX as u64 {
            hanging.run(&mut workers, at, 7 + at);
        }
        let mut begun: Vec<_> = (1..FILE_SYNCS_MAX).map(|_| hanging.begun()).collect();
        begun.sort_unstable();
        assert_eq!(begun, (3..2 + FILE_SYNCS_MAX as u64).collect::<Vec<_>>());
        assert!(workers.run(number(100), None, Box::new(|| Ok(Outcome::Done))));
        assert_eq!(collect(&mut workers, 1), [number(100)], "other calls have threads");
        assert!(hanging.begun.try_recv().is_err(), "no more of them");
        (0..=FILE_WORKERS_MAX).for_each(|_| hanging.go_on.send(()).unwrap());
        assert_eq!(collect(&mut workers, FILE_WORKERS_MAX).len(), FILE_WORKERS_MAX, "each of them ends");
    }

    #[test]
    fn a_call_that_waits_for_a_device_goes_with_its_client() {
        let (_reactor, mut workers) = workers();
        let number = FileRequestId::from_u64;
        let work = LongWork::new();
        (0..4).for_each(|at| work.run(&mut workers, at, 7));
        assert_eq!(work.begun(), 0);
        let gone = workers.leave_long(|request| [number(0), number(2)].contains(&request));
        assert_eq!(gone, [number(2), number(0)]);
        for (ends, begins) in [(0, 1), (1, 3)] {
            work.go_on.send(()).unwrap();
            assert_eq!(collect(&mut workers, 1), [number(ends)], "also the one that had begun");
            assert_eq!(work.begun(), begins);
        }
        work.go_on.send(()).unwrap();
        assert_eq!(collect(&mut workers, 1), [number(3)]);
    }
}
