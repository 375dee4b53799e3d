//! The process's one reader of address space events, and the lock under which events are read and look-ups made.
//!
//! # Why no look-up finds a stale registration
//!
//! 1. A range is watched before it is registered, and look-ups find it only after that. So a change of its mapping that
//!    begins after the registration is an event.
//! 2. `munmap`, `mremap` and `mmap` over a watched range raise the kernel's count of changes while they hold the address
//!    space's lock, before a page goes; they lower it when their event has been read. So a thread that has the address from
//!    a later `mmap`, even if the `munmap` still waits in another thread, finds the count raised or the event read.
//! 3. **The unmapping thread continues when its event is read, not when it is handled.** So the event is read under the
//!    lock, and the ranges are removed from the look-up before the lock is released.
//! 4. A look-up takes the lock and asks whether the count is zero ([`Userfault::is_quiet`]). If it is, all events of earlier
//!    changes have been read, by (3) under this lock, and so handled. If not, it reads pending events, and if a change is
//!    still in progress it waits its turn, or registers anew for this one use.
//! 5. `madvise(MADV_DONTNEED)` reports before it acts: see [`suspects`](super::suspects).
//!
//! # Why no thread waits for ever
//!
//! A thread that changes a watched mapping waits until its event is read; `free` may be such a thread. So a thread that
//! holds the lock, or is needed for reading events, must do nothing that may free or allocate:
//!
//! - under the lock no memory is allocated or freed ([`Cache`] has all it needs from the start), nothing is registered or
//!   deregistered, and no code of a registrar runs;
//! - the monitor's thread only reads events and marks ranges, with or without the lock: if it deregistered, and the
//!   registrar unmapped something, it would wait for itself (libfabric #5554). It blocks all signals, since a handler might
//!   free;
//! - a second thread, the reaper, deregisters the ranges of changed mappings, and holds no lock then. Look-ups deregister
//!   the ranges that they evict after they have released the lock;
//! - the lock is not held while the process forks ([`fork`]).
//!
//! `munmap` never takes the lock: only its event's reader does (libfabric #5580 had it the other way round).

use std::any::Any;
use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use byway_reactor::blocked_signals::BlockedSignals;

use super::backing::{Backing, Mappings};
use super::cache::{Cache, Condemned, Limits, Plan, Ticket, Uncached};
use super::range::PageRange;
use super::seeded::{self, Bug};
use super::userfault::{Read, Userfault};
use super::{Unavailable, fork};
use crate::limits::{REGISTRATION_CACHES_MAX, SETTLE_TRIES_MAX, UNWATCHED_BYTES_MAX};

/// A registration of any registrar. Dropping the last clone deregisters.
pub(super) type Registered = Arc<dyn Any + Send + Sync>;

/// One for each process, for as long as it lives: were the descriptor closed, a child that has inherited it would keep the
/// watch alive, and no thread would read its events.
#[derive(Debug)]
pub(super) struct Monitor {
    userfault: Userfault,
    mappings: Mappings,
    state: Mutex<State>,
    /// Something was condemned by an event.
    condemned: Condvar,
    /// A condemned range was deregistered.
    closed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    members: [Option<Box<Member>>; REGISTRATION_CACHES_MAX],
    forks: u32,
    /// No events come any more: nothing is found again.
    is_broken: bool,
}

#[derive(Debug)]
struct Member {
    cache: Cache<Registered>,
    survives_fork: bool,
}

static MONITOR: OnceLock<Result<&'static Monitor, Unavailable>> = OnceLock::new();

/// The process's monitor, which is started when it is first asked for.
pub(super) fn get() -> Result<&'static Monitor, Unavailable> {
    *MONITOR.get_or_init(start)
}

fn running() -> Option<&'static Monitor> {
    MONITOR.get()?.as_ref().ok().copied()
}

fn start() -> Result<&'static Monitor, Unavailable> {
    fork::prepare()?;
    let userfault = Userfault::open()?;
    let mappings = Mappings::open()?;
    let monitor: &'static Monitor = Box::leak(Box::new(Monitor {
        userfault,
        mappings,
        state: Mutex::default(),
        condemned: Condvar::new(),
        closed: Condvar::new(),
    }));
    let signals = BlockedSignals::new();
    let reader = std::thread::Builder::new().name("byway-regevent".to_owned()).spawn(|| monitor.read_events());
    let reaper = std::thread::Builder::new().name("byway-regreap".to_owned()).spawn(|| monitor.reap());
    drop(signals);
    match (reader, reaper) {
        (Ok(_), Ok(_)) => Ok(monitor),
        _ => Err(Unavailable::NoThread),
    }
}

thread_local! {
    /// Whether this thread, which forks, has told the caches so: a monitor may come between the two.
    static FORKING: Cell<bool> = const { Cell::new(false) };
}

/// Before a fork of this process; see [`fork`].
pub(super) fn fork_begins() {
    if let Some(monitor) = running() {
        let mut state = monitor.lock();
        state.forks += 1;
        state.members.iter_mut().flatten().for_each(|member| member.fork_begins());
        monitor.condemned.notify_one();
        FORKING.set(true);
    }
}

/// After it.
pub(super) fn fork_ends() {
    if let Some(monitor) = running().filter(|_| FORKING.replace(false)) {
        let mut state = monitor.lock();
        state.forks -= 1;
        state
            .members
            .iter_mut()
            .flatten()
            .filter(|member| member.minds_forks())
            .for_each(|member| member.cache.fork_ends());
    }
}

/// In the child: its copies of the descriptors end.
pub(super) fn forget_in_child() {
    FORKING.set(false);
    if let Some(monitor) = running() {
        for fd in [monitor.userfault.raw_fd(), monitor.mappings.raw_fd()] {
            // SAFETY: nobody in this process uses them any more: all that would looks first whether it is a child.
            unsafe { libc::close(fd) };
        }
    }
}

/// A cache's place at the monitor.
#[derive(Debug)]
pub(super) struct Seat {
    monitor: &'static Monitor,
    index: usize,
}

/// What a look-up came to.
#[derive(Debug)]
pub(super) enum Found {
    Hit(Ticket, Registered),
    Miss(Plan),
}

impl Seat {
    /// Makes a cache.
    pub(super) fn take(limits: Limits, survives_fork: bool) -> Result<Self, Unavailable> {
        // Before the lock: the parent may have held it when it forked.
        if fork::is_child() {
            return Err(Unavailable::ForkedChild);
        }
        let monitor = get()?;
        let mut member = Box::new(Member { cache: Cache::new(limits), survives_fork });
        let mut state = monitor.lock();
        let Some(index) = state.members.iter().position(Option::is_none) else {
            drop(state);
            return Err(Unavailable::TooManyCaches);
        };
        (0..state.forks).for_each(|_| member.fork_begins());
        state.members[index] = Some(member);
        Ok(Self { monitor, index })
    }

    /// Finds a registration of `wanted`, or says what to do. Only private memory is kept, unless the caller says that this is stable.
    pub(super) fn look_up(&self, wanted: PageRange, is_stable: bool) -> Found {
        for _ in 0..SETTLE_TRIES_MAX {
            let mut state = self.monitor.lock();
            if self.monitor.settle(&mut state) {
                return self.find(&mut state, wanted, is_stable);
            }
            drop(state);
            // Whoever makes the change has been told to go on, or is about to tell of it: it needs a core.
            std::thread::yield_now();
        }
        let mut state = self.monitor.lock();
        state.with(self.index, |cache| Found::Miss(cache.pass(Uncached::Changing)))
    }

    fn find(&self, state: &mut State, wanted: PageRange, is_stable: bool) -> Found {
        let is_obstructed = state.is_obstructed(self.index, wanted);
        state.with(self.index, |cache| match cache.look_up(wanted) {
            Some((ticket, registered)) => Found::Hit(ticket, registered),
            None if is_obstructed => Found::Miss(cache.pass(Uncached::Closing)),
            // Asked before it makes room among what is kept, and is watched. The question is as those of `Monitor::pop`.
            None if !is_stable && self.monitor.mappings.backing(wanted) == Backing::Shared => {
                Found::Miss(cache.pass(Uncached::Shared))
            }
            None => Found::Miss(cache.begin(wanted)),
        })
    }

    /// Once more, for a range that could not be registered with what it was merged with.
    pub(super) fn begin_alone(&self, wanted: PageRange) -> Plan {
        self.monitor.lock().begin_alone(self.index, wanted)
    }

    /// Asks for events about the mappings that a range lies in: not about the range alone, since the kernel would divide them
    /// at its ends, and a program's `mremap` over both parts would fail. (If a neighbour that the kernel had joined with
    /// them is replaced by something longer at this moment, that is divided. It costs such an `mremap`, no truth.)
    pub(super) fn watch(&self, range: PageRange) -> bool {
        let around = self.monitor.mappings.around(range);
        seeded::is(Bug::Unwatched) || around.is_some_and(|around| self.monitor.userfault.watch(around).is_ok())
    }

    /// See [`Cache::complete`].
    pub(super) fn complete(&self, ticket: Ticket, value: Registered) -> Result<(), Registered> {
        let kept = self.with(|cache| cache.complete(ticket, value));
        self.close_condemned();
        kept
    }

    /// Does one thing to the cache under the lock. It must not allocate, free, or call anybody else.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Cache<Registered>) -> R) -> R {
        self.monitor.lock().with(self.index, act)
    }

    /// Whether no page of this range can go without an event.
    pub(super) fn is_private(&self, range: PageRange) -> bool {
        self.monitor.mappings.backing(range) == Backing::Private
    }

    /// Whether all of this range is mapped.
    pub(super) fn is_mapped(&self, range: PageRange) -> bool {
        self.monitor.mappings.backing(range) != Backing::Unknown
    }

    /// Lets `how_far`, which is called without the lock and given the latest suspicion, say which are over. Whether any is.
    pub(super) fn lift_suspicions(&self, how_far: impl FnOnce(u64) -> Option<u64>) -> bool {
        let lifted = how_far(self.with(|cache| cache.suspicion()));
        if let Some(number) = lifted {
            self.with(|cache| cache.lift(number));
        }
        lifted.is_some()
    }

    /// Ends a registration that came to nothing, and its watch.
    pub(super) fn abandon(&self, ticket: Ticket, is_watched: bool) {
        self.with(|cache| cache.abandon(ticket, is_watched));
        self.close_condemned();
    }

    /// Deregisters what was condemned.
    pub(super) fn close_condemned(&self) {
        while let Some((index, condemned)) = self.monitor.pop(|index| index == self.index) {
            self.monitor.close(index, condemned);
        }
    }
}

impl Drop for Seat {
    /// Nothing is in use any more, nor being registered: both hold the cache.
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.with(Cache::flush);
        self.close_condemned();
        let mut state = self.monitor.lock();
        // The reaper may be at it.
        while !state.with(self.index, |cache| cache.is_empty()) {
            state = self.monitor.closed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let member = state.members[self.index].take();
        drop(state);
        drop(member);
    }
}

impl Monitor {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock; and if, the tables are whole between any two calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all changes until now are known, after reading what is pending.
    fn settle(&self, state: &mut State) -> bool {
        if seeded::is(Bug::LookUpUnsettled) || !seeded::is(Bug::OnTheWayForgotten) && self.userfault.is_quiet() {
            return true;
        }
        self.read(state);
        seeded::is(Bug::OnTheWayForgotten) || self.userfault.is_quiet()
    }

    /// Reads and handles what is pending; the lock is held.
    fn read(&self, state: &mut State) {
        loop {
            let read = self.userfault.read(|change| state.caches().for_each(|cache| cache.change(change)));
            match read {
                Read::Changes(_) => self.condemned.notify_one(),
                Read::Nothing => return,
                Read::Broken => {
                    state.is_broken = true;
                    state.caches().for_each(Cache::flush);
                    self.condemned.notify_one();
                    return;
                }
            }
        }
    }

    /// The monitor's thread.
    fn read_events(&self) {
        loop {
            let is_alive = self.userfault.wait();
            let mut state = self.lock();
            self.read(&mut state);
            if seeded::is(Bug::DeregisteredByMonitor) {
                drop(state);
                while let Some((index, condemned)) = self.pop(|_| true) {
                    self.close(index, condemned);
                }
                continue;
            }
            if !is_alive || state.is_broken {
                return;
            }
        }
    }

    /// The reaper's thread.
    fn reap(&self) {
        loop {
            let Some((index, condemned)) = self.pop(|_| true) else {
                let state = self.lock();
                let is_idle = |state: &mut State| state.caches().all(|cache| cache.next_condemned().is_none());
                drop(self.condemned.wait_while(state, is_idle));
                continue;
            };
            self.close(index, condemned);
        }
    }

    fn pop(&self, is_meant: impl Fn(usize) -> bool) -> Option<(usize, Condemned<Registered>)> {
        let mut state = self.lock();
        for index in (0..REGISTRATION_CACHES_MAX).filter(|index| is_meant(*index)) {
            let Some(range) = state.members[index].as_ref().and_then(|member| member.cache.next_condemned()) else {
                continue;
            };
            // Two questions to the kernel under the lock. They wait for whoever changes the address space, and those wait for
            // events only when they have let go of it.
            let mapping = self.mappings.around(range).filter(|mapping| {
                mapping.bytes() <= UNWATCHED_BYTES_MAX && !state.others(index).any(|cache| cache.watches(*mapping))
            });
            let mut condemned = state.with(index, |cache| cache.pop_condemned(mapping))?;
            if seeded::is(Bug::DeregisteredUnderLock) {
                drop(condemned.value.take());
            }
            return Some((index, condemned));
        }
        None
    }

    /// Deregisters; no lock is held.
    fn close(&self, index: usize, condemned: Condemned<Registered>) {
        let Condemned { ticket, value, unwatched } = condemned;
        drop(value);
        if let Some(mapping) = unwatched {
            self.userfault.unwatch(mapping);
        }
        self.lock().with(index, |cache| cache.closed(ticket));
        self.closed.notify_all();
    }
}

impl State {
    fn caches(&mut self) -> impl Iterator<Item = &mut Cache<Registered>> {
        self.members.iter_mut().flatten().map(|member| &mut member.cache)
    }

    fn others(&self, index: usize) -> impl Iterator<Item = &Cache<Registered>> {
        let others = self.members.iter().enumerate().filter(move |(other, _)| *other != index);
        others.filter_map(|(_, member)| member.as_ref()).map(|member| &member.cache)
    }

    /// Whether nothing may be kept in `wanted` whatever that cache says: no events come, or another cache is about to end
    /// its watch of these mappings, which is one with this cache's.
    fn is_obstructed(&self, index: usize, wanted: PageRange) -> bool {
        self.is_broken || self.others(index).any(|cache| cache.is_closing(wanted))
    }

    fn begin_alone(&mut self, index: usize, wanted: PageRange) -> Plan {
        if self.is_obstructed(index, wanted) {
            return Plan::Once(Uncached::Closing);
        }
        self.with(index, |cache| cache.begin_alone(wanted))
    }

    fn with<R>(&mut self, index: usize, act: impl FnOnce(&mut Cache<Registered>) -> R) -> R {
        // A seat's member is there for as long as the seat.
        act(&mut self.members[index].as_mut().expect("the seat's cache").cache)
    }
}

impl Member {
    fn minds_forks(&self) -> bool {
        !self.survives_fork && !seeded::is(Bug::KeptOverFork)
    }

    fn fork_begins(&mut self) {
        if self.minds_forks() {
            self.cache.fork_begins();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_begins_where_another_cache_ends_its_watch() {
        let page = rustix::param::page_size();
        let pages = |first: usize, count: usize| PageRange::covering(first * page, count * page).unwrap();
        let limits = Limits { ranges_max: 8, bytes_max: 64 * page };
        let mut state = State::default();
        for member in &mut state.members[..2] {
            *member = Some(Box::new(Member { cache: Cache::new(limits), survives_fork: true }));
        }

        // The second cache's range goes, and with it the watch of the whole mapping.
        let Plan::Register { ticket, .. } = state.with(1, |cache| cache.begin(pages(8, 1))) else {
            panic!("room for it")
        };
        state.with(1, |cache| cache.complete(ticket, Arc::new(()))).unwrap();
        state.with(1, |cache| cache.release(ticket));
        state.with(1, Cache::flush);
        let condemned = state.with(1, |cache| cache.pop_condemned(Some(pages(4, 8)))).unwrap();

        assert_eq!(state.begin_alone(0, pages(5, 1)), Plan::Once(Uncached::Closing));
        assert!(matches!(state.begin_alone(0, pages(12, 1)), Plan::Register { .. }), "it lies in another mapping");
        state.with(1, |cache| cache.closed(condemned.ticket));
        assert!(matches!(state.begin_alone(0, pages(5, 1)), Plan::Register { .. }), "the watch has ended");
        state.is_broken = true;
        assert_eq!(state.begin_alone(0, pages(20, 1)), Plan::Once(Uncached::Closing));
    }
}
