//! Waiting without a thread of the library: one waiting thread drives the loop, and the others sleep until their operations
//! have ended or they must drive it.
//!
//! Two locks. That of the *engine* is held by the thread that drives the loop, also while it sleeps in the kernel, and is only ever
//! tried. That of the *tables* is held for moments. The engine is tried and released only with the tables locked. So a thread that
//! finds the engine taken leaves its command in the tables, or enters itself there and sleeps, before the driver can release the
//! engine; and the driver releases it only when no command is left, and wakes one of the sleepers to drive the loop in its place.
//!
//! If the driver panics, the loop's state is no longer whole and no thread drives it again: all sleepers are woken, and each wait and
//! each new operation fails with `Panicked`.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use byway_reactor::Wait;

use super::engine::Engine;
use super::error::{SubmitError, WaitError};
use super::group::GroupSlot;
use super::op::{Completed, Op};
use super::shared::Shared;
use super::{Inner, Node, lock};
use crate::limits::{BACKGROUND_PAUSE, BACKGROUND_PAUSE_MAX};

/// When a wait ends at the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// None: for as long as it takes.
    pub const NEVER: Self = Self(None);

    /// At once: a look.
    pub fn now() -> Self {
        Self(Some(Instant::now()))
    }

    /// So long from now.
    pub fn after(time: Duration) -> Self {
        Self(Instant::now().checked_add(time))
    }

    fn has_passed(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }

    /// How long from now; `None` for [`Deadline::NEVER`].
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// So long from now, or this if it is earlier.
    fn or_after(self, time: Duration) -> Self {
        if self.left().is_some_and(|left| left < time) { self } else { Self::after(time) }
    }

    /// On the loop's clock.
    pub(super) fn on_loop(self, now: byway_reactor::Instant) -> Option<byway_reactor::Instant> {
        self.left().map(|left| now + left)
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Self {
        Self(Some(at))
    }
}

impl From<Duration> for Deadline {
    fn from(time: Duration) -> Self {
        Self::after(time)
    }
}

/// What a thread sleeps on.
#[derive(Debug, Default)]
pub(super) struct Parker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Parker {
    pub(super) fn wake(&self) {
        lock::count_wake();
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    /// Whether it was woken since the last call.
    #[cfg(test)]
    pub(super) fn take_woken(&self) -> bool {
        std::mem::take(&mut self.woken.lock().unwrap())
    }

    fn sleep(&self, deadline: Deadline) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        while !*woken && !deadline.has_passed() {
            woken = match deadline.left() {
                Some(left) => self.changed.wait_timeout(woken, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(woken).unwrap_or_else(PoisonError::into_inner),
            };
        }
        *woken = false;
    }
}

/// What a sleeper is entered with.
#[derive(Clone, Copy)]
enum On<'a> {
    Ops(&'a [&'a Op]),
    Group(GroupSlot),
}

impl On<'_> {
    fn enter(self, shared: &mut Shared, parker: &Arc<Parker>) {
        match self {
            On::Ops(ops) => {
                for op in ops {
                    if let Some(state) = shared.ops.get_mut(op.slot)
                        && !state.waiters.iter().any(|other| Arc::ptr_eq(other, parker))
                    {
                        state.waiters.push(Arc::clone(parker));
                    }
                }
            }
            On::Group(group) => shared.groups.add_waiter(group, parker),
        }
        if !shared.followers.iter().any(|other| Arc::ptr_eq(other, parker)) {
            shared.followers.push_back(Arc::clone(parker));
        }
    }

    /// True if the engine was offered to the sleeper.
    fn leave(self, shared: &mut Shared, parker: &Arc<Parker>) -> bool {
        match self {
            On::Ops(ops) => {
                for op in ops {
                    if let Some(state) = shared.ops.get_mut(op.slot) {
                        state.waiters.retain(|other| !Arc::ptr_eq(other, parker));
                    }
                }
            }
            On::Group(group) => shared.groups.remove_waiter(group, parker),
        }
        let place = shared.followers.iter().position(|other| Arc::ptr_eq(other, parker));
        place.and_then(|place| shared.followers.remove(place)).is_none()
    }

    /// The thread that waits turns the loop from now on, or does so no longer.
    fn set_driven(self, shared: &mut Shared, is_driven: bool) {
        match self {
            // What ends one of them is for this thread; a group that takes one must tell it.
            On::Ops(ops) => ops.iter().for_each(|op| shared.set_driven(op.slot, is_driven)),
            On::Group(group) => shared.groups.set_driven(group, is_driven),
        }
    }
}

/// The engine, while a thread drives the loop.
pub(super) struct Driver<'a> {
    inner: &'a Inner,
    /// None while this is dropped.
    engine: Option<MutexGuard<'a, Engine>>,
}

impl Driver<'_> {
    /// Takes the commands out of the tables, and writes there what has ended. The tables are unlocked, also by a panic: before the
    /// engine, whose end locks them.
    pub(super) fn take_commands(&mut self, mut shared: MutexGuard<'_, Shared>) {
        self.settle(&mut shared);
    }
}

impl Deref for Driver<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        self.engine.as_ref().expect("only the end of the driver takes it")
    }
}

impl DerefMut for Driver<'_> {
    fn deref_mut(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("only the end of the driver takes it")
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        // The mutex notes a panic when it is unlocked.
        self.engine = None;
        if self.inner.has_panicked() {
            // Other threads hold it for a moment only, to see that.
            self.inner.engine.lock().drop_commands();
            self.inner.end_waits();
        }
    }
}

impl Inner {
    /// The tables; not in a child, where a thread of the parent may have had them.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Shared>, SubmitError> {
        if self.mark.is_child() {
            return Err(SubmitError::Forked);
        }
        let shared = self.tables();
        // With the tables locked: what is entered after a panic, no thread would take out.
        if self.has_panicked() { Err(SubmitError::Panicked) } else { Ok(shared) }
    }

    /// Whether a thread has panicked while it drove the loop.
    fn has_panicked(&self) -> bool {
        self.engine.is_poisoned()
    }

    /// Wakes all threads that wait for something of the loop, which it does not do any more.
    fn end_waits(&self) {
        let mut shared = self.tables();
        // A thread that waits for one of these to run is told by its end, as for those that the engine had.
        shared.commands.clear();
        for follower in std::mem::take(&mut shared.followers) {
            follower.wake();
        }
        drop(shared);
        self.signal_poll();
    }

    fn tables(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// Whether this thread may not use the engine, see [`Inner::home`].
    pub(super) fn is_away(&self) -> bool {
        self.home.is_some_and(|home| home != std::thread::current().id())
    }

    pub(super) fn try_engine(&self) -> Option<Driver<'_>> {
        assert!(!self.is_away(), "a node on a simulated loop belongs to the thread that made it");
        Some(Driver { inner: self, engine: Some(self.engine.try_lock_whole()?) })
    }

    /// Has the thread that drives the loop look at the tables.
    fn wake_driver(&self) {
        lock::count_wake();
        self.waker.wake();
    }

    /// There are new commands in the tables, or something for the driver to look at: takes them to the loop, or has the thread that
    /// drives it do so.
    pub(super) fn nudge(&self, shared: MutexGuard<'_, Shared>) {
        let Some(mut engine) = self.try_engine() else {
            drop(shared);
            return self.wake_driver();
        };
        engine.take_commands(shared);
        engine.reap_known();
        engine.pass_on();
        let shared = self.settle(&mut engine);
        self.release_engine(engine, shared);
    }

    /// The tables, with what has ended on the loop. The engine has their commands.
    pub(super) fn settle(&self, engine: &mut Engine) -> MutexGuard<'_, Shared> {
        let mut shared = self.tables();
        engine.settle(&mut shared);
        shared
    }

    /// Releases the engine when it has done all that was asked for, and offers it to a thread that sleeps.
    pub(super) fn release_engine<'a>(&'a self, mut engine: Driver<'_>, mut shared: MutexGuard<'a, Shared>) {
        // Not with the tables locked: the kernel may copy what is sent. What it does not take now it takes with the next turn.
        if engine.has_unsubmitted() {
            drop(shared);
            engine.hand_over();
            shared = self.settle(&mut engine);
        }
        while engine.has_commands() {
            drop(shared);
            // As in `nudge`: a lane sends the next message when the end of the last send is known.
            engine.reap_known();
            engine.pass_on();
            shared = self.settle(&mut engine);
        }
        let quiet = self.arm_poll(&mut engine);
        drop(engine);
        let news = shared.news;
        offer_engine(&mut shared);
        drop(shared);
        // The descriptor may have been asked for in between.
        if news || !quiet {
            self.signal_poll();
        }
    }

    /// Makes the poll descriptor readable, if something has ended.
    pub(super) fn tell_poll(&self, shared: MutexGuard<'_, Shared>) {
        let news = shared.news;
        drop(shared);
        if news {
            self.signal_poll();
        }
    }

    /// Turns the loop until `look` finds something or the deadline has passed. It has looked, and the engine has all commands. Gives
    /// the tables as they are after the last look.
    fn drive<'a, T>(
        &'a self,
        engine: &mut Engine,
        deadline: Deadline,
        look: &mut impl FnMut(&mut Shared) -> Option<T>,
    ) -> (Result<T, WaitError>, MutexGuard<'a, Shared>) {
        loop {
            while engine.has_commands() {
                engine.run_commands();
                let mut shared = self.settle(engine);
                if let Some(found) = look(&mut shared) {
                    return (Ok(found), shared);
                }
                // What ended without the kernel must not wait for a turn of the loop.
                self.tell_poll(shared);
                // Other threads may leave commands without a pause.
                if deadline.has_passed() {
                    break;
                }
            }
            let wait = match deadline.on_loop(engine.now()) {
                _ if deadline.has_passed() => Wait::Poll,
                Some(at) => Wait::Until(at),
                None => Wait::Block,
            };
            if let Some(poll) = self.poll.get().filter(|_| wait != Wait::Poll) {
                poll.disarm();
            }
            let turned = engine.reap(wait);
            let mut shared = self.settle(engine);
            if let Err(error) = turned {
                return (Err(WaitError::Io(error)), shared);
            }
            if let Some(found) = look(&mut shared) {
                return (Ok(found), shared);
            }
            if deadline.has_passed() {
                return (Err(WaitError::Deadline), shared);
            }
            self.tell_poll(shared);
        }
    }

    /// Waits until `look` finds something.
    fn wait<T>(
        &self,
        on: On<'_>,
        deadline: Deadline,
        mut look: impl FnMut(&mut Shared) -> Option<T>,
    ) -> Result<T, WaitError> {
        if self.mark.is_child() {
            return Err(WaitError::Forked);
        }
        let mut parker: Option<Arc<Parker>> = None;
        loop {
            let mut shared = self.tables();
            // What wakes a sleeper is for the others: this thread looks for itself now, or drives.
            let was_offered = parker.as_ref().is_some_and(|parker| on.leave(&mut shared, parker));
            let found = look(&mut shared);
            if found.is_none()
                && let Some(mut engine) = self.try_engine()
            {
                on.set_driven(&mut shared, true);
                shared.drives = shared.drives.wrapping_add(1);
                engine.take_commands(shared);
                let (found, mut shared) = self.drive(&mut engine, deadline, &mut look);
                on.set_driven(&mut shared, false);
                self.release_engine(engine, shared);
                return found;
            }
            let found = found.map(Ok).or_else(|| self.has_panicked().then_some(Err(WaitError::Panicked)));
            let found = found.or_else(|| deadline.has_passed().then_some(Err(WaitError::Deadline)));
            if let Some(found) = found {
                if was_offered {
                    offer_engine(&mut shared);
                }
                return found;
            }
            let parker = parker.get_or_insert_default();
            on.enter(&mut shared, parker);
            drop(shared);
            parker.sleep(deadline);
        }
    }
}

impl Inner {
    /// Waits until `look` finds something, and leaves the loop to other threads as far as they drive it.
    fn wait_in_background<T>(
        &self,
        op: &Op,
        deadline: Deadline,
        mut look: impl FnMut(&mut Shared) -> Option<T>,
    ) -> Result<T, WaitError> {
        if self.mark.is_child() {
            return Err(WaitError::Forked);
        }
        let parker = Arc::<Parker>::default();
        // How often other threads had begun to drive when this one last slept.
        let (mut drives_before, mut pause) = (None, BACKGROUND_PAUSE);
        loop {
            let mut shared = self.tables();
            if let Some(state) = shared.ops.get_mut(op.slot) {
                state.waiters.retain(|other| !Arc::ptr_eq(other, &parker));
            }
            if let Some(found) = look(&mut shared) {
                return Ok(found);
            }
            if self.has_panicked() {
                return Err(WaitError::Panicked);
            }
            if deadline.has_passed() {
                return Err(WaitError::Deadline);
            }
            let is_left_alone = drives_before == Some(shared.drives);
            if is_left_alone && let Some(mut engine) = self.try_engine() {
                shared.set_driven(op.slot, true);
                engine.take_commands(shared);
                let (turned, mut shared) = self.drive(&mut engine, deadline, &mut |shared| Some(look(shared)));
                shared.set_driven(op.slot, false);
                self.release_engine(engine, shared);
                if let Some(found) = turned? {
                    return Ok(found);
                }
                // The turn was another thread's command, or an event that may be the first of several.
                drives_before = None;
                continue;
            }
            // Still the same thread that drives: it wakes this one when the operation has ended.
            pause = if is_left_alone { (pause * 2).min(BACKGROUND_PAUSE_MAX) } else { BACKGROUND_PAUSE };
            drives_before = Some(shared.drives);
            if let Some(state) = shared.ops.get_mut(op.slot) {
                state.waiters.push(Arc::clone(&parker));
            }
            drop(shared);
            parker.sleep(deadline.or_after(pause));
        }
    }
}

/// Wakes a thread that sleeps, to drive the loop. If another thread does by then, it sleeps again.
fn offer_engine(shared: &mut Shared) {
    if let Some(follower) = shared.followers.pop_front() {
        follower.wake();
    }
}

impl Node {
    /// Waits for one of several operations, and takes its result; gives which.
    ///
    /// # Errors
    /// See [`WaitError`]; `Taken` if the result of one of them was taken; `OtherNode`.
    pub fn wait_any(&self, ops: &[&Op], deadline: impl Into<Deadline>) -> Result<(usize, Completed), WaitError> {
        if ops.iter().any(|op| op.node.number() != self.number()) {
            return Err(WaitError::OtherNode);
        }
        let take = |shared: &mut Shared| {
            let ended = |(index, op): (usize, &&Op)| Some((index, shared.take(op.slot)?));
            ops.iter().enumerate().find_map(ended)
        };
        let (index, result) = self.inner.wait(On::Ops(ops), deadline.into(), take)?;
        ops[index].release();
        Ok((index, result?))
    }

    pub(super) fn wait_in_background(&self, op: &Op, deadline: Deadline) -> Result<Completed, WaitError> {
        let result = self.inner.wait_in_background(op, deadline, |shared| shared.take(op.slot))?;
        op.release();
        result
    }

    pub(super) fn wait_in_group<T>(
        &self,
        group: GroupSlot,
        deadline: Deadline,
        take: impl FnMut(&mut Shared) -> Option<T>,
    ) -> Result<T, WaitError> {
        self.inner.wait(On::Group(group), deadline, take)
    }
}

#[cfg(test)]
mod tests;
