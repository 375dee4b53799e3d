//! Locks of a mount's programs, and the waits for them, which have threads of their own.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use byway_frontend::fuse::abi::FileLock;
use byway_frontend::fuse::request::Operation;
use byway_frontend::fuse::{Reply, Request};
use byway_reactor::Errno;
use byway_service::file::client::{self, LockKind, LockRange};

use super::filesystem::{Mounted, done, give};
use crate::limits::MOUNT_LOCKS_WAITING_MAX;

/// How often an interrupted wait for a lock is called off, until it has ended.
const CANCEL_PAUSE: Duration = Duration::from_millis(10);

/// Types of locks, as `fcntl(2)` has them.
const SHARED: u32 = 0;
const EXCLUSIVE: u32 = 1;
const UNLOCK: u32 = 2;

/// See the module.
#[derive(Default)]
pub(super) struct Locks {
    /// Waits, by the request's number.
    waiting: HashMap<u64, Waiting>,
    /// Waits are given back to the driver, which pauses.
    pub(super) is_paused: bool,
    /// Owners of `fcntl` locks: the file's node, the owner, and the handle that it locked through. The kernel says when a process
    /// closes the file (FLUSH, with the process as the owner); a lock of an open file description ends with its handle (RELEASE).
    pub(super) owners: BTreeSet<(u64, u64, u64)>,
    /// Held while locks are released that an open file description had: meanwhile the kernel may give its owner's number to a new one.
    ending: Arc<Mutex<()>>,
}

#[derive(Clone, Copy)]
struct Waiting {
    handle: u64,
    range: LockRange,
    /// The program does not wait any more.
    is_interrupted: bool,
}

impl Locks {
    /// A process closes a file: whether it may have locks of it.
    fn take_owner(&mut self, node: u64, owner: u64) -> bool {
        let of_owner: Vec<_> = self.owners.range((node, owner, 0)..=(node, owner, u64::MAX)).copied().collect();
        for one in &of_owner {
            self.owners.remove(one);
        }
        !of_owner.is_empty()
    }

    fn has_owner(&self, node: u64, handle: u64) -> bool {
        self.owners.range((node, 0, 0)..=(node, u64::MAX, u64::MAX)).any(|(_, _, through)| *through == handle)
    }

    /// A handle is closed: owners that may have locks which they took through it. One that has locked through another handle too stays:
    /// it is another by now that the kernel gave the same number, and this one's locks end with those of that handle.
    fn take_handle(&mut self, node: u64, handle: u64) -> Vec<u64> {
        let of_node = self.owners.range((node, 0, 0)..=(node, u64::MAX, u64::MAX));
        let mut owners: Vec<_> =
            of_node.filter(|(_, _, through)| *through == handle).map(|(_, owner, _)| *owner).collect();
        for owner in &owners {
            self.owners.remove(&(node, *owner, handle));
        }
        owners.retain(|owner| self.owners.range((node, *owner, 0)..=(node, *owner, u64::MAX)).next().is_none());
        owners
    }
}

/// The owner of a lock of `flock` is the handle. The kernel says that a file is closed when the program's call has returned, and names
/// the owner by a number that a file opened since may have: a lock of that one must not end with the first.
fn owner_of_whole(handle: u64) -> u64 {
    handle
}

/// All ranges that an owner has locked.
fn all_of(owner: u64) -> LockRange {
    LockRange { whole: false, owner, pid: 0, start: 0, last: u64::MAX }
}

impl Mounted {
    pub(super) fn locks(&self) -> MutexGuard<'_, Locks> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock(
        &self,
        me: client::Caller<'_>,
        request: &Arc<Request>,
        reply: Reply,
    ) -> Result<(), (Errno, Reply)> {
        let parsed = request.parsed();
        let of = |lock: FileLock, owner, whole| LockRange {
            whole,
            owner,
            pid: lock.pid,
            start: lock.start,
            // The kernel's end of a file is the largest signed offset.
            last: if lock.end >= i64::MAX as u64 { u64::MAX } else { lock.end },
        };
        match parsed.operation {
            Operation::Flush { handle, lock_owner } => {
                let had = self.locks().take_owner(parsed.node, lock_owner);
                if had {
                    let _ = self.client.lock(me, handle, all_of(lock_owner), LockKind::Unlock, false);
                }
                done(reply, Ok(()))
            }
            Operation::GetLock { handle, owner, lock } => {
                let found = self.client.test_lock(me, handle, of(lock, owner, false), lock.kind == EXCLUSIVE);
                give(reply, found, |reply, found| {
                    reply.lock(found.map_or(FileLock { kind: UNLOCK, ..lock }, |held| FileLock {
                        start: held.start,
                        end: held.last.min(i64::MAX as u64),
                        kind: if held.exclusive { EXCLUSIVE } else { SHARED },
                        pid: held.pid,
                    }));
                })
            }
            Operation::SetLock { handle, owner, lock, flock, wait } => {
                let range = of(lock, if flock { owner_of_whole(handle) } else { owner }, flock);
                let kind = match lock.kind {
                    SHARED => LockKind::Shared,
                    EXCLUSIVE => LockKind::Exclusive,
                    _ => LockKind::Unlock,
                };
                if !flock && kind != LockKind::Unlock {
                    self.note_owner((parsed.node, owner, handle));
                }
                if !wait || kind == LockKind::Unlock {
                    return done(reply, self.client.lock(me, handle, range, kind, false));
                }
                self.wait_for_lock(me, (handle, range, kind), request, reply)
            }
            _ => Err((Errno::NOSYS, reply)),
        }
    }

    /// An owner is about to lock. If another of its number has just ended, its locks are released first.
    fn note_owner(&self, owner: (u64, u64, u64)) {
        let ending = Arc::clone(&self.locks().ending);
        let _ended = ending.lock().unwrap_or_else(PoisonError::into_inner);
        self.locks().owners.insert(owner);
    }

    /// Releases the locks that end with a handle. `had_whole`: the kernel says that it may have one of `flock`.
    pub(super) fn end_locks(&self, me: client::Caller<'_>, node: u64, handle: u64, had_whole: bool) {
        if had_whole {
            let range = LockRange { whole: true, owner: owner_of_whole(handle), pid: 0, start: 0, last: u64::MAX };
            let _ = self.client.lock(me, handle, range, LockKind::Unlock, false);
        }
        let ending = {
            let locks = self.locks();
            if !locks.has_owner(node, handle) {
                return;
            }
            Arc::clone(&locks.ending)
        };
        let _ending = ending.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = self.locks().take_handle(node, handle);
        for owner in ended {
            let _ = self.client.lock(me, handle, all_of(owner), LockKind::Unlock, false);
        }
    }

    /// Waits for a lock in a thread of its own.
    fn wait_for_lock(
        &self,
        me: client::Caller<'_>,
        wanted: (u64, LockRange, LockKind),
        request: &Arc<Request>,
        reply: Reply,
    ) -> Result<(), (Errno, Reply)> {
        let (unique, (handle, range, _)) = (reply.unique(), wanted);
        {
            let mut locks = self.locks();
            if locks.is_paused {
                reply.keep(request);
                return Ok(());
            }
            if locks.waiting.len() >= MOUNT_LOCKS_WAITING_MAX {
                return Err((Errno::NOLCK, reply));
            }
            locks.waiting.insert(unique, Waiting { handle, range, is_interrupted: false });
        }
        let (this, request) = (self.clone(), Arc::clone(request));
        let (uid, gid, groups) = (me.uid, me.gid, me.groups.to_vec());
        let wait = move || this.end_wait(client::Caller { uid, gid, groups: &groups }, wanted, &request, reply);
        // Without a thread the reply is dropped, which answers EIO.
        if std::thread::Builder::new().name("byway-lock".to_owned()).spawn(wait).is_err() {
            self.locks().waiting.remove(&unique);
        }
        Ok(())
    }

    fn end_wait(
        &self,
        me: client::Caller<'_>,
        (handle, range, kind): (u64, LockRange, LockKind),
        request: &Request,
        reply: Reply,
    ) {
        let unique = reply.unique();
        loop {
            let locked = self.client.lock(me, handle, range, kind, true);
            let mut locks = self.locks();
            let is_interrupted = locks.waiting.get(&unique).is_none_or(|waiting| waiting.is_interrupted);
            let was_called_off = locked == Err(Errno::INTR) && !is_interrupted;
            if was_called_off && !locks.is_paused {
                // The pause was over before the wait was.
                continue;
            }
            locks.waiting.remove(&unique);
            if was_called_off {
                // Before the mount can go on: what is given back later does not come again.
                return reply.keep(request);
            }
            drop(locks);
            return match locked {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            };
        }
    }

    /// The program of a request does not wait for its lock any more.
    pub(super) fn interrupt_lock(&self, unique: u64) {
        if let Some(waiting) = self.locks().waiting.get_mut(&unique) {
            waiting.is_interrupted = true;
        }
        let this = self.clone();
        let cancel = move || {
            // The server may not have heard of the wait yet: it is told until the wait has ended.
            loop {
                let Some(Waiting { handle, range, .. }) = this.locks().waiting.get(&unique).copied() else { return };
                let _ = this.client.cancel_lock(client::Caller::default(), handle, range);
                std::thread::park_timeout(CANCEL_PAUSE);
            }
        };
        // Without a thread the wait goes on.
        let _ = std::thread::Builder::new().name("byway-interrupt".to_owned()).spawn(cancel);
    }

    /// Gives all waits back to the driver, and those that begin until it goes on.
    pub(super) fn keep_waits(&self) {
        self.locks().is_paused = true;
        let this = self.clone();
        let cancel = move || loop {
            let all: Vec<_> = {
                let locks = this.locks();
                if locks.waiting.is_empty() || !locks.is_paused {
                    return;
                }
                locks.waiting.values().copied().collect()
            };
            for Waiting { handle, range, .. } in all {
                let _ = this.client.cancel_lock(client::Caller::default(), handle, range);
            }
            std::thread::park_timeout(CANCEL_PAUSE);
        };
        // Without a thread the waits go on, and the pause fails.
        let _ = std::thread::Builder::new().name("byway-interrupt".to_owned()).spawn(cancel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_that_ends_late_takes_no_lock_of_one_whose_owner_has_the_same_number() {
        let mut locks = Locks::default();
        locks.owners.extend([(1, 7, 10), (1, 8, 10), (2, 7, 12)]);
        // The file of handle 10 is closed. Before the kernel says so, another one is opened, with the owner's number.
        locks.owners.insert((1, 7, 11));
        assert_eq!(locks.take_handle(1, 10), [8]);
        assert!(locks.take_handle(1, 10).is_empty());
        assert_eq!(locks.take_handle(1, 11), [7]);
        assert_eq!(locks.take_handle(2, 12), [7]);
    }
}
