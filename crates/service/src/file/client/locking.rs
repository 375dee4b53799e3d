//! Locks: asked for, tested, released; and asked for again from a server that has forgotten them.

use std::collections::BTreeSet;
use std::time::Instant;

use byway_reactor::Errno;
use byway_rpc::node::Reply;
use zerocopy::FromBytes;

use super::super::wire::{CallError, FLAG_CANCEL, FLAG_RECLAIM, FLAG_TEST, FLAG_WAIT, FLAG_WHOLE, LockResult, Method};
use super::held_locks::HeldLock;
use super::link::{Failure, Live};
use super::{Ask, Caller, Client, ROOT};
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN, FILE_CALL_TIME_MAX};

/// How a range is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// With others.
    Shared,
    /// Alone.
    Exclusive,
    /// Not any more.
    Unlock,
}

/// Which lock is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRange {
    /// `flock(2)` of the whole file; else a POSIX range.
    pub whole: bool,
    /// Who holds it, among the users of this client.
    pub owner: u64,
    /// The owner's process.
    pub pid: u32,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub last: u64,
}

/// A lock that is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// Alone; else with others.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub last: u64,
    /// The process; 0 if it is another client's.
    pub pid: u32,
}

impl Client {
    fn on_range(caller: Caller<'_>, handle: u64, range: LockRange) -> Ask<'_> {
        let flags = if range.whole { FLAG_WHOLE } else { 0 };
        let LockRange { owner, start, last, .. } = range;
        Ask { extra: owner, offset: start, len: last, flags, ..Self::on_handle(caller, handle) }
    }

    /// Locks or unlocks. With `wait` this may take as long as another has the lock; [`Client::cancel_lock`] ends it.
    ///
    /// # Errors
    /// `EAGAIN` if another has it, `EDEADLK`, `ENOLCK`, `EINTR` if it was cancelled; see [`Client::look_up`].
    pub fn lock(
        &self,
        caller: Caller<'_>,
        handle: u64,
        range: LockRange,
        kind: LockKind,
        wait: bool,
    ) -> Result<(), Errno> {
        let mut ask = Self::on_range(caller, handle, range);
        ask.mode = match kind {
            LockKind::Shared => 0,
            LockKind::Exclusive => 1,
            LockKind::Unlock => 2,
        };
        if wait {
            ask.flags |= FLAG_WAIT;
        }
        let now = match kind {
            LockKind::Shared => Some(false),
            LockKind::Exclusive => Some(true),
            LockKind::Unlock => None,
        };
        loop {
            let asked = self.locking(&ask, range.pid);
            let mut table = self.table();
            let Some((_, opened)) = table.handle(handle) else { return asked.map(|_| ()) };
            match asked {
                // A server that was started anew meanwhile has not heard of it from us, or has heard what is not so any more.
                Ok((live, _)) if !table.locks.note(live.epoch, opened.node, range, now) => {}
                Ok(_) => return Ok(()),
                Err(error) => {
                    // As flock(2) says: the old lock went before the new one was asked for.
                    if range.whole && error != Errno::IO {
                        let epoch = table.locks.epoch();
                        table.locks.note(epoch, opened.node, range, None);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// A lock has the process in the field for a second file.
    fn locking(&self, ask: &Ask<'_>, pid: u32) -> Result<(Live, Reply), Errno> {
        self.repeat(Method::Lock, true, |live, slot| {
            let (mut arguments, payload) = self.arguments(live, ask, slot)?;
            arguments.second = u64::from(pid).into();
            self.link.call_on(live.session, Method::Lock, &arguments, &payload, None)
        })
    }

    /// Makes a session that was lost again while users of this client hold locks, before the server gives the locks away. To be called every
    /// few seconds.
    pub fn renew(&self) {
        if !self.table().locks.is_empty() {
            // The server itself is asked: what a cache knows needs no session.
            let _ = self.ask(Method::GetAttributes, &Self::on_node(Caller::default(), ROOT));
        }
    }

    /// Asks a server that has forgotten them for all locks. What others may have had since is lost: whoever has the file open is told.
    pub(super) fn recover_locks(&self, live: Live) -> Result<(), Failure> {
        let (held, epoch) = {
            let table = self.table();
            (table.locks.all(), table.locks.epoch())
        };
        if epoch == live.epoch {
            return Ok(());
        }
        let mut lost = BTreeSet::new();
        for (node, lock) in &held {
            if !lost.contains(node) && !(live.may_reclaim && self.reclaim(live, *node, lock)?) {
                lost.insert(*node);
            }
        }
        let mut table = self.table();
        for node in &lost {
            table.lose_locks(*node);
        }
        table.locks.recovered(live.epoch);
        drop(table);
        if !lost.is_empty() {
            tracing::error!(
                files = lost.len(),
                "locks were lost while the server was away: programs that have these files open get EIO until they close them"
            );
        }
        if held.len() > lost.len() {
            tracing::info!(locks = held.len(), lost = lost.len(), "the server has given locks back");
        }
        Ok(())
    }

    /// Asks for a lock that was held. False: it is lost.
    fn reclaim(&self, live: Live, node: u64, lock: &HeldLock) -> Result<bool, Failure> {
        let Some(handle) = self.table().handle_of(node) else { return Ok(false) };
        let HeldLock { range, exclusive } = *lock;
        let flags = FLAG_RECLAIM | if range.whole { FLAG_WHOLE } else { 0 };
        let (since, mut pause) = (Instant::now(), BUSY_PAUSE_MIN);
        loop {
            let asked = self.remote_handle(live, Caller::default(), handle).and_then(|file| {
                let arguments = super::Arguments {
                    node: file.into(),
                    second: u64::from(range.pid).into(),
                    offset: range.start.into(),
                    len: range.last.into(),
                    extra: range.owner.into(),
                    flags: flags.into(),
                    mode: u32::from(exclusive).into(),
                    ..super::NONE
                };
                self.link.call_on(live.session, Method::Lock, &arguments, &[], None)
            });
            match asked {
                Ok(_) => return Ok(true),
                Err(Failure::Call(CallError::Busy)) if since.elapsed() < FILE_CALL_TIME_MAX => {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                Err(Failure::Call(error)) => {
                    tracing::warn!(%error, "a lock is not given back");
                    return Ok(false);
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Ends the wait for a lock: it fails with `EINTR`, if it has not been had.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn cancel_lock(&self, caller: Caller<'_>, handle: u64, range: LockRange) -> Result<(), Errno> {
        let mut ask = Self::on_range(caller, handle, range);
        ask.flags |= FLAG_CANCEL;
        self.locking(&ask, range.pid).map(|_| ())
    }

    /// What is in the way of a lock.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn test_lock(
        &self,
        caller: Caller<'_>,
        handle: u64,
        range: LockRange,
        exclusive: bool,
    ) -> Result<Option<Locked>, Errno> {
        let mut ask = Self::on_range(caller, handle, range);
        (ask.flags, ask.mode) = (ask.flags | FLAG_TEST, u32::from(exclusive));
        let (_, reply) = self.locking(&ask, range.pid)?;
        let (found, _) = LockResult::read_from_prefix(&reply.payload).map_err(|_| Errno::PROTO)?;
        let LockResult { start, last, kind, pid } = found;
        let locked = |exclusive| Locked { exclusive, start: start.get(), last: last.get(), pid: pid.get() };
        match kind.get() {
            0 => Ok(Some(locked(false))),
            1 => Ok(Some(locked(true))),
            2 => Ok(None),
            _ => Err(CallError::Malformed.errno()),
        }
    }
}
