//! Locks: asked for, waited for, released.

use std::sync::{Arc, MutexGuard, PoisonError};

use byway_fabric::SessionId;
use byway_reactor::{Op, Token, monotonic};
use rustix::io::Errno;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::super::grace::Holding;
use super::super::locks::{Family, Granted, Holder, Lock, LockError, Locks};
use super::super::share::Share;
use super::super::wire::{
    Arguments, CallError, FLAG_CANCEL, FLAG_RECLAIM, FLAG_TEST, FLAG_WAIT, FLAG_WHOLE, LockResult,
};
use super::replies::Reply;
use super::{Call, FileRequest, Shares, Ticket};
use crate::host::At;
use crate::limits::FILE_LEASE_TIME;

/// Types of locks, as `fcntl(2)` has them.
const SHARED: u32 = 0;
const EXCLUSIVE: u32 = 1;
const UNLOCK: u32 = 2;

pub(super) fn table(share: &Share) -> MutexGuard<'_, Locks<Ticket>> {
    share.locks.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells the loops of waits that ended.
fn tell(granted: Vec<Ticket>) {
    for Ticket { mailbox, request } in granted {
        mailbox.granted.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        mailbox.waker.wake();
    }
}

impl Shares {
    /// A lock is asked for, tested, or released.
    pub(super) fn lock(&mut self, at: &mut At<'_>, call: Call, arguments: &Arguments) -> Result<(), CallError> {
        let client = self.client(call.session)?;
        let key = client.key;
        let node = Arc::clone(&client.handle(arguments.node.get())?.node);
        let is = |flag| arguments.flags.get() & flag != 0;
        let family = if is(FLAG_WHOLE) { Family::Whole } else { Family::Range };
        let (start, last) = match family {
            Family::Whole => (0, u64::MAX),
            Family::Range => (arguments.offset.get(), arguments.len.get()),
        };
        if last < start || arguments.mode.get() > UNLOCK {
            return Err(Errno::INVAL.into());
        }
        let takes = arguments.mode.get() != UNLOCK && !is(FLAG_CANCEL);
        match (is(FLAG_RECLAIM), self.recovery.is_in_grace(Holding::Locks, at.reactor.now())) {
            (true, false) => return Err(CallError::GraceOver),
            (false, true) if takes => return Err(CallError::Grace),
            _ => {}
        }
        if takes && !is(FLAG_TEST) && !self.is_listed(at, call, Holding::Locks)? {
            return Ok(());
        }
        let lock = Lock {
            holder: Holder { session: key, owner: arguments.extra.get() },
            pid: arguments.second.get() as u32,
            start,
            last,
            exclusive: arguments.mode.get() == EXCLUSIVE,
        };
        let (id, share) = (node.id, Arc::clone(&node.share));
        if is(FLAG_TEST) {
            let found = table(&share).test(id, family, &lock);
            self.reply(at, call, Ok(Reply::of_payload(described(found, key).as_bytes())));
            return Ok(());
        }
        if is(FLAG_CANCEL) {
            let waited = table(&share).cancel(id, family, &lock);
            if let Some(ticket) = waited {
                self.end(at, ticket.request, Err(Errno::INTR.into()));
            }
            self.reply(at, call, Ok(Reply::DONE));
            return Ok(());
        }
        if arguments.mode.get() == UNLOCK {
            tell(table(&share).unlock(id, family, &lock));
            self.reply(at, call, Ok(Reply::DONE));
            return Ok(());
        }
        let request = self.start(at, FileRequest::Lock { call });
        let ticket = is(FLAG_WAIT).then(|| Ticket { mailbox: Arc::clone(&self.mailbox), request });
        let (result, others) = table(&share).lock(id, family, lock, ticket);
        tell(others);
        match result {
            Ok(Granted::Later) => {}
            Ok(Granted::Now) => {
                self.note_locked(at, call.session);
                self.end(at, request, Ok(Reply::DONE));
            }
            Err(LockError::Held) => self.end(at, request, Err(Errno::AGAIN.into())),
            Err(LockError::Deadlock) => self.end(at, request, Err(Errno::DEADLK.into())),
            Err(LockError::TooMany) => self.end(at, request, Err(CallError::TooManyLocks)),
        }
        Ok(())
    }

    /// A session has got a lock.
    pub(super) fn note_locked(&mut self, at: &mut At<'_>, session: SessionId) {
        let Ok(client) = self.client(session) else { return };
        client.locked_at = monotonic();
        if client.renews_locks {
            self.watch_locks_later(at);
        }
    }

    pub(super) fn watch_locks_later(&mut self, at: &mut At<'_>) {
        if let Some(due) = self.silence.watch(at.reactor.now()) {
            at.reactor.submit(Op::Timer { at: due }, Token::new(self.class, LOCK_TIMER, 0, 0));
        }
    }

    /// Ends sessions of clients that hold locks and have been silent, although they renew their locks: others get the locks when the
    /// time has passed for which they are kept.
    pub(super) fn watch_locks(&mut self, at: &mut At<'_>) {
        let (now, mut unheard, mut holds_any) = (monotonic(), Vec::new(), false);
        for client in self.clients.iter().flatten().filter(|client| client.renews_locks && !client.is_gone) {
            let holds = client.shares.iter().any(|share| table(share).holds(client.key));
            let heard = client.leases.last_heard().max(client.locked_at);
            if holds && heard + FILE_LEASE_TIME <= now {
                unheard.push(client.session);
            }
            holds_any |= holds;
        }
        for session in self.silence.look(unheard, at.reactor.now()) {
            tracing::warn!("a client that holds locks has said nothing for 15 s: its session ends");
            at.sessions.dismiss(at.fabric, at.reactor, session);
        }
        if holds_any {
            self.watch_locks_later(at);
        }
    }
}

/// The tag of the timer for clients with locks.
pub(super) const LOCK_TIMER: u8 = 8;

/// Releases the locks of a client.
pub(super) fn release(share: &Share, key: u64) {
    tell(table(share).leave(key));
}

/// What is in the way, as `F_GETLK` tells it. A process of another client has no number here.
fn described(found: Option<Lock>, key: u64) -> LockResult {
    let Some(lock) = found else {
        return LockResult { start: U64::new(0), last: U64::new(0), kind: U32::new(UNLOCK), pid: U32::new(0) };
    };
    LockResult {
        start: U64::new(lock.start),
        last: U64::new(lock.last),
        kind: U32::new(if lock.exclusive { EXCLUSIVE } else { SHARED }),
        pid: U32::new(if lock.holder.session == key { lock.pid } else { 0 }),
    }
}
