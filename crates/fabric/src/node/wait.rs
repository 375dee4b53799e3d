//! Waiting without a thread of the library: one waiting thread drives the loop, and the others sleep until their operations
//! have ended or they must drive it.
//!
//! There are two locks. The driving thread holds that of the *engine*, also while it sleeps in the kernel; other threads
//! only ever try it. That of the *tables* is held for moments. A thread that finds the engine taken leaves its request in
//! the tables and wakes the loop. A thread that releases the engine checks the tables afterwards: it executes requests that
//! came too late for its last turn, and wakes one of the sleeping threads to drive the loop in its place. A sleeper was
//! entered in the tables before its last attempt at the engine, so one of the two sees the other, and no thread sleeps while
//! no thread drives.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use byway_reactor::Wait;

use super::engine::Engine;
use super::error::{SubmitError, WaitError};
use super::group::GroupSlot;
use super::op::{Completed, Op};
use super::shared::Shared;
use super::{Inner, Node};

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

    fn leave(self, shared: &mut Shared, parker: &Arc<Parker>) {
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
        shared.followers.retain(|other| !Arc::ptr_eq(other, parker));
    }

    /// The thread that waits turns the loop from now on, or does so no longer.
    fn set_driven(self, shared: &mut Shared, is_driven: bool) {
        match self {
            // Whatever ends one of them is for this thread.
            On::Ops(_) => {}
            On::Group(group) => shared.groups.set_driven(group, is_driven),
        }
    }
}

impl Inner {
    /// The tables; not in a child, where a thread of the parent may have had them.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Shared>, SubmitError> {
        if self.mark.is_child() {
            return Err(SubmitError::Forked);
        }
        Ok(self.tables())
    }

    fn tables(&self) -> MutexGuard<'_, Shared> {
        // The tables are whole between any two of their calls.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this thread may not use the engine, see [`Inner::home`].
    pub(super) fn is_away(&self) -> bool {
        self.home.is_some_and(|home| home != std::thread::current().id())
    }

    pub(super) fn try_engine(&self) -> Option<MutexGuard<'_, Engine>> {
        assert!(!self.is_away(), "a node on a simulated loop belongs to the thread that made it");
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// There are new commands: takes them to the loop, or makes the driving thread do so.
    pub(super) fn nudge(&self) {
        match self.try_engine() {
            None => self.waker.wake(),
            Some(mut engine) => {
                engine.pass_on();
                self.release_engine(engine);
                self.left_engine();
            }
        }
    }

    /// Must be called by the thread that has released the engine.
    pub(super) fn left_engine(&self) {
        loop {
            let mut shared = self.tables();
            if shared.commands.is_empty() {
                let (news, poll) = (shared.news, self.poll.get());
                if let Some(poll) = poll.filter(|_| news) {
                    poll.signal();
                }
                // Somebody may turn the loop by now. Then this wakes one in vain, who sleeps again.
                if let Some(follower) = shared.followers.pop_front() {
                    follower.wake();
                }
                return;
            }
            drop(shared);
            let Some(mut engine) = self.try_engine() else { return };
            engine.pass_on();
            self.release_engine(engine);
        }
    }

    /// Notifies programs with a poll loop of their own that an operation has ended.
    pub(super) fn tell_poll(&self) {
        if let Some(poll) = self.poll.get()
            && self.tables().news
        {
            poll.signal();
        }
    }

    /// Turns the loop until `look` finds something or the deadline has passed.
    fn drive<T>(
        &self,
        engine: &mut Engine,
        deadline: Deadline,
        look: &mut impl FnMut(&mut Shared) -> Option<T>,
    ) -> Result<T, WaitError> {
        loop {
            engine.submit();
            if let Some(found) = look(&mut self.tables()) {
                return Ok(found);
            }
            let wait = match deadline.on_loop(engine.now()) {
                _ if deadline.has_passed() => Wait::Poll,
                Some(at) => Wait::Until(at),
                None => Wait::Block,
            };
            if let Some(poll) = self.poll.get().filter(|_| wait != Wait::Poll) {
                poll.disarm();
            }
            engine.reap(wait).map_err(WaitError::Io)?;
            self.tell_poll();
            if let Some(found) = look(&mut self.tables()) {
                return Ok(found);
            }
            if deadline.has_passed() {
                return Err(WaitError::Deadline);
            }
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
        if let Some(found) = look(&mut self.tables()) {
            return Ok(found);
        }
        let mut parker: Option<Arc<Parker>> = None;
        let found = loop {
            if let Some(mut engine) = self.try_engine() {
                // It looks for itself now: what wakes a sleeper is for the others.
                if let Some(parker) = parker.take() {
                    on.leave(&mut self.tables(), &parker);
                }
                on.set_driven(&mut self.tables(), true);
                let found = self.drive(&mut engine, deadline, &mut look);
                engine.leave();
                on.set_driven(&mut self.tables(), false);
                self.release_engine(engine);
                break found;
            }
            match &parker {
                // It is entered now, and tries once more before it sleeps.
                None => parker = Some(Arc::default()),
                Some(parker) => parker.sleep(deadline),
            }
            let Some(parker) = &parker else { continue };
            let mut shared = self.tables();
            if let Some(found) = look(&mut shared) {
                break Ok(found);
            }
            if deadline.has_passed() {
                break Err(WaitError::Deadline);
            }
            on.enter(&mut shared, parker);
        };
        if let Some(parker) = &parker {
            on.leave(&mut self.tables(), parker);
        }
        self.left_engine();
        found
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
        Ok((index, result?))
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
