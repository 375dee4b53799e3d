//! Locks: asked for, tested, released; and asked for again from a server that has forgotten them.

use std::collections::BTreeSet;
use std::time::Instant;

use byway_reactor::Errno;
use byway_rpc::node::Reply;
use zerocopy::FromBytes;

use super::super::wire::{CallError, FLAG_CANCEL, FLAG_RECLAIM, FLAG_TEST, FLAG_WAIT, FLAG_WHOLE, LockResult, Method};
use super::connection::{Failure, Live};
use super::held_locks::HeldLock;
use super::{Ask, Caller, Client, ROOT};
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN, FILE_CALL_TIME_MAX};

/// The type of a call that releases a lock, as `fcntl(2)` has it.
const UNLOCK: u32 = 2;

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
    /// The holder, among the users of this client.
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
        let mut now = match kind {
            LockKind::Shared => Some(false),
            LockKind::Exclusive => Some(true),
            LockKind::Unlock => None,
        };
        if wait {
            ask.flags |= FLAG_WAIT;
        }
        // Why the lock was not had, while it is made sure that the one before it is gone too.
        let mut refused = None;
        loop {
            ask.mode = now.map_or(UNLOCK, u32::from);
            let before = self.table().locks.epoch();
            let asked = self.locking(&ask, handle, range);
            let mut table = self.table();
            let Some((_, opened)) = table.handle(handle) else { return refused.map_or(asked.map(|_| ()), Err) };
            match asked {
                // A server that was started anew meanwhile has not heard of it from us, or has heard what is not so any more.
                Ok((live, _)) if !table.locks.note(live.epoch, opened.node, range, now) => {}
                Ok(_) => return refused.map_or(Ok(()), Err),
                // As flock(2) says: the old lock went before the new one was asked for. A new server may have given it back.
                Err(error) if range.whole && error != Errno::IO && refused.is_none() => {
                    if before.is_some_and(|epoch| table.locks.note(epoch, opened.node, range, None)) {
                        return Err(error);
                    }
                    (refused, now) = (Some(error), None);
                    ask.flags &= !FLAG_WAIT;
                }
                Err(error) => return Err(refused.unwrap_or(error)),
            }
        }
    }

    /// A lock has the process in the field for a second file.
    fn locking(&self, ask: &Ask<'_>, handle: u64, range: LockRange) -> Result<(Live, Reply), Errno> {
        self.repeat(Method::Lock, true, |live, slot| {
            // If the answer to a release is lost with the server, another client may have the lock: it must not be asked for again.
            if ask.mode == UNLOCK {
                let mut table = self.table();
                if let Some((_, opened)) = table.handle(handle) {
                    table.locks.note(live.epoch, opened.node, range, None);
                }
            }
            let (mut arguments, payload) = self.arguments(live, ask, slot)?;
            arguments.second = u64::from(range.pid).into();
            self.connection.call_on(live.session, Method::Lock, &arguments, &payload, None)
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

    /// Asks a server that has forgotten them for all locks. Where one is lost, so are all of its file, and those that were given back are
    /// released: programs that have the file open are told, and cannot unlock by a handle that fails.
    pub(super) fn recover_locks(&self, live: Live) -> Result<(), Failure> {
        let Some(held) = self.table().locks.begin_recovery(live.epoch) else { return Ok(()) };
        let mut lost = BTreeSet::new();
        let mut given_back = Vec::new();
        for (node, lock) in &held {
            if lost.contains(node) {
                continue;
            }
            if live.may_reclaim && self.ask_again(live, *node, lock, FLAG_RECLAIM)? {
                given_back.push((*node, *lock));
            } else {
                lost.insert(*node);
            }
        }
        for (node, lock) in given_back.iter().filter(|(node, _)| lost.contains(node)) {
            self.ask_again(live, *node, lock, 0)?;
        }
        let names = {
            let mut table = self.table();
            for node in &lost {
                table.lose_locks(*node);
            }
            table.locks.recovered(live.epoch);
            let name = |node: &u64| table.place(*node).map_or_else(Vec::new, |(_, name)| name);
            lost.iter().map(name).collect::<Vec<_>>()
        };
        for name in &names {
            tracing::error!(
                file = %String::from_utf8_lossy(name),
                "its locks were lost while the server was away: programs that have it open get EIO until they close it"
            );
        }
        if held.len() > lost.len() {
            tracing::info!(locks = held.len(), files_lost = lost.len(), "the server has given locks back");
        }
        Ok(())
    }

    /// Asks for a lock that was held, with [`FLAG_RECLAIM`]; releases it, without. False: the server refuses.
    fn ask_again(&self, live: Live, node: u64, lock: &HeldLock, how: u32) -> Result<bool, Failure> {
        let Some(handle) = self.table().handle_of(node) else { return Ok(false) };
        let HeldLock { range, exclusive } = *lock;
        let flags = how | if range.whole { FLAG_WHOLE } else { 0 };
        let mode = if how == FLAG_RECLAIM { u32::from(exclusive) } else { UNLOCK };
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
                    mode: mode.into(),
                    ..super::NONE
                };
                self.connection.call_on(live.session, Method::Lock, &arguments, &[], None)
            });
            match asked {
                Ok(_) => return Ok(true),
                Err(Failure::Call(CallError::Busy)) if since.elapsed() < FILE_CALL_TIME_MAX => {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                Err(Failure::Call(error)) => {
                    tracing::warn!(%error, "a lock could not be restored or released");
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
        self.locking(&ask, handle, range).map(|_| ())
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
        let (_, reply) = self.locking(&ask, handle, range)?;
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
