//! The kernel's requests to a mount, passed to the share's server.
//!
//! Files that are opened for writing pass the page cache by. While the client has a lease on a file, those that are opened for reading
//! and listings go through it, and the kernel uses attributes without asking (`cached.rs`). It asks for each name.
//! Each request is answered by the thread that read it, but for waits for locks and for stale pages, which have threads of their own.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use byway_frontend::fuse::abi::{FileLock, StatFsOut, open};
use byway_frontend::fuse::reply::{Directory, Entry, Listed};
use byway_frontend::fuse::request::{Caller, Operation, Parsed, SetAttr, SetTime};
use byway_frontend::fuse::{Filesystem, Reply, Request};
use byway_reactor::Errno;
use byway_service::file::client::leases::OpenMode;
use byway_service::file::client::{self, Client, Found, Giving, LockKind, LockRange, NewMode};
use byway_service::file::wire::{self, NewAttributes};
use zerocopy::FromZeros;

use super::attributes::attr;
use super::cached::StalePages;
use super::groups::groups_of;
use crate::limits::MOUNT_LOCKS_WAITING_MAX;

/// Reads and writes ask the server, also at once.
const OPENED: u32 = open::DIRECT_IO | open::PARALLEL_DIRECT_WRITES;

/// An extended attribute of every file: how many messages this mount has sent to the server.
const MESSAGES: &[u8] = b"byway.messages";

fn if_kept(keep: bool) -> u32 {
    if keep { open::KEEP_CACHE } else { 0 }
}

fn open_flags(mode: OpenMode) -> u32 {
    match mode {
        OpenMode::Direct => OPENED,
        OpenMode::Cached { keep } => if_kept(keep),
    }
}

fn open_directory_flags(mode: OpenMode) -> u32 {
    match mode {
        OpenMode::Direct => 0,
        OpenMode::Cached { keep } => if_kept(keep) | open::CACHE_DIR,
    }
}

/// `O_APPEND`, as the kernel tells it with each write: a program may set and clear it while the file is open.
const APPEND: u32 = rustix::fs::OFlags::APPEND.bits();

/// How often an interrupted wait for a lock is called off, until it has ended.
const CANCEL_PAUSE: Duration = Duration::from_millis(10);

/// Types of locks, as `fcntl(2)` has them.
const SHARED: u32 = 0;
const EXCLUSIVE: u32 = 1;
const UNLOCK: u32 = 2;

/// Locks of the mount's programs.
#[derive(Default)]
struct Locks {
    /// Waits, by the request's number.
    waiting: HashMap<u64, (u64, LockRange)>,
    /// Owners of `fcntl` locks: the file's node, the owner, and the handle that it locked through. The kernel says when a process
    /// closes the file (FLUSH, with the process as the owner); a lock of an open file description ends with its handle (RELEASE).
    owners: BTreeSet<(u64, u64, u64)>,
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

    /// A handle is closed: owners that may have locks which they took through it.
    fn take_handle(&mut self, node: u64, handle: u64) -> Vec<u64> {
        let of_node = self.owners.range((node, 0, 0)..=(node, u64::MAX, u64::MAX));
        let owners: Vec<_> = of_node.filter(|(_, _, through)| *through == handle).map(|(_, owner, _)| *owner).collect();
        for owner in &owners {
            self.owners.remove(&(node, *owner, handle));
        }
        owners
    }
}

/// See the module.
#[derive(Clone)]
pub(super) struct Mounted {
    client: Arc<Client>,
    locks: Arc<Mutex<Locks>>,
    stale: StalePages,
}

/// An entry that the kernel asks for again each time.
fn entry(found: &Found) -> Entry {
    Entry { node: found.node, attr: attr(&found.attributes), ..Entry::default() }
}

/// An entry whose attributes the kernel may use for a while.
fn leased_entry(client: &Client, found: &Found) -> Entry {
    let (attributes, attr_valid) = client.believed(found);
    Entry { node: found.node, attr: attr(&attributes), attr_valid, ..Entry::default() }
}

impl Mounted {
    /// # Errors
    /// No threads.
    pub(super) fn new(client: Arc<Client>) -> std::io::Result<Self> {
        let stale = StalePages::start(&client)?;
        Ok(Self { client, locks: Arc::default(), stale })
    }

    /// The threads that drop stale pages.
    pub(super) fn stale(&self) -> StalePages {
        self.stale.clone()
    }

    fn locks(&self) -> MutexGuard<'_, Locks> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a request. An error is answered by the caller; the reply comes back with it.
    fn answer(&self, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
        // The groups of the caller travel where the server asks for them.
        let groups = if self.client.wants_groups() { groups_of(&parsed.caller) } else { Vec::new() };
        let Caller { uid, gid, .. } = parsed.caller;
        let me = client::Caller { uid, gid, groups: &groups };
        match parsed.operation {
            Operation::Read { handle, offset, size, .. } => {
                let pages = self.client.begin_page_read(parsed.node);
                let read = self.client.read_data(me, handle, offset, size as usize);
                let good = self.client.end_page_read(parsed.node, pages);
                let given = give(reply, read, |reply, data| {
                    reply.data_by(data.len(), |kernel, head| data.write_to(kernel, head));
                });
                if !good {
                    self.stale.drop_pages(parsed.node);
                }
                given
            }
            Operation::Write(write) => {
                // Pages of a mapped file have their places, whatever handle they come by.
                let appends = write.flags & APPEND != 0 && !write.from_cache;
                let written = if appends {
                    self.client.append(me, write.handle, write.data)
                } else {
                    self.client.write(me, write.handle, write.offset, write.data)
                };
                give(reply, written, |reply, count| reply.written(count as u32))
            }
            Operation::ReadDirectory { handle, offset, size, plus } => {
                let pages = self.client.begin_page_read(parsed.node);
                let part = self.list(me, (handle, offset), size, plus);
                self.client.end_page_read(parsed.node, pages);
                give(reply, part, |reply, (part, _giving)| reply.directory(&part))
            }
            Operation::Lookup { name } => {
                let found = self.client.look_up(me, parsed.node, name);
                give(reply, found, |reply, found| self.give_entry(reply, &found))
            }
            Operation::GetAttr { handle } => {
                let attributes = self.client.attributes(me, parsed.node, handle);
                give(reply, attributes, |reply, attributes| {
                    self.stale.attributes(&self.client, Found { node: parsed.node, attributes }, reply);
                })
            }
            Operation::SetAttr(set) => {
                let attributes = self.client.set_attributes(me, parsed.node, set.handle, &new_attributes(&set));
                give(reply, attributes, |reply, attributes| reply.attributes(attr(&attributes), Duration::ZERO))
            }
            Operation::GetLock { .. } | Operation::SetLock { .. } | Operation::Flush { .. } => {
                self.lock(me, parsed, reply)
            }
            Operation::Open { .. }
            | Operation::OpenDirectory { .. }
            | Operation::Create { .. }
            | Operation::TemporaryFile { .. }
            | Operation::Release { .. }
            | Operation::ReleaseDirectory { .. } => self.open_or_close(me, parsed, reply),
            Operation::GetXattr { .. }
            | Operation::SetXattr { .. }
            | Operation::ListXattr { .. }
            | Operation::RemoveXattr { .. } => self.xattr(me, parsed, reply),
            Operation::Fsync { .. }
            | Operation::FsyncDirectory { .. }
            | Operation::Fallocate { .. }
            | Operation::Seek { .. }
            | Operation::CopyFileRange { .. } => self.on_handle(me, parsed, reply),
            _ => self.on_name(me, parsed, reply),
        }
    }

    fn give_entry(&self, reply: Reply, found: &Found) {
        let _giving = self.client.giving(Some(found.node));
        reply.entry(&leased_entry(&self.client, found));
    }

    /// Operations that make, remove or ask for a name or a node.
    fn on_name(&self, me: client::Caller<'_>, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
        let (client, node) = (&self.client, parsed.node);
        let made = match parsed.operation {
            Operation::SymLink { name, target } => client.make_symlink(me, node, name, target),
            Operation::MakeNode { name, mode, umask, .. } => client.make_node(me, node, name, NewMode { mode, umask }),
            Operation::MakeDirectory { name, mode, umask } => {
                client.make_directory(me, node, name, NewMode { mode, umask })
            }
            Operation::Link { old_node, name } => client.link(me, old_node, node, name),
            Operation::Unlink { name } => return done(reply, client.unlink(me, node, name)),
            Operation::RemoveDirectory { name } => return done(reply, client.remove_directory(me, node, name)),
            Operation::Rename { name, new_directory, new_name, flags } => {
                return done(reply, client.rename(me, (node, name), (new_directory, new_name), flags));
            }
            Operation::Access { mask } => return done(reply, client.access(me, node, mask)),
            Operation::ReadLink => {
                return give(reply, client.read_link(me, node), |reply, target| reply.data(&target));
            }
            Operation::StatFs => {
                return give(reply, client.stat_file_system(me, node), |reply, sizes| reply.numbers(&numbers(&sizes)));
            }
            _ => Err(Errno::NOSYS),
        };
        give(reply, made, |reply, found| reply.entry(&entry(&found)))
    }

    fn open_or_close(&self, me: client::Caller<'_>, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
        let (client, node) = (&self.client, parsed.node);
        let created = match parsed.operation {
            Operation::Open { flags, .. } => {
                let opened = client.open_for_kernel(me, node, flags);
                return give(reply, opened, |reply, (handle, mode)| reply.opened(handle, open_flags(mode)));
            }
            Operation::OpenDirectory { .. } => {
                let opened = client.open_directory_for_kernel(me, node);
                return give(reply, opened, |reply, (handle, mode)| reply.opened(handle, open_directory_flags(mode)));
            }
            Operation::Create { name, flags, mode, umask, .. } => {
                client.create(me, (node, name), flags, NewMode { mode, umask })
            }
            Operation::TemporaryFile { flags, mode, umask } => {
                client.create_unnamed(me, node, flags, NewMode { mode, umask })
            }
            Operation::Release { handle, lock_owner, flock_unlock, .. } => {
                if flock_unlock {
                    let range = LockRange { whole: true, owner: lock_owner, pid: 0, start: 0, last: u64::MAX };
                    let _ = client.lock(me, handle, range, LockKind::Unlock, false);
                }
                for owner in self.locks().take_handle(node, handle) {
                    let _ = client.lock(me, handle, all_of(owner), LockKind::Unlock, false);
                }
                client.close_handle(handle);
                return done(reply, Ok(()));
            }
            Operation::ReleaseDirectory { handle, .. } => {
                client.close_handle(handle);
                return done(reply, Ok(()));
            }
            _ => Err(Errno::NOSYS),
        };
        give(reply, created, |reply, (found, handle)| {
            client.created_for_kernel(found.node, handle);
            reply.created(&entry(&found), handle, OPENED);
        })
    }

    fn on_handle(&self, me: client::Caller<'_>, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
        let client = &self.client;
        match parsed.operation {
            Operation::Fsync { handle, data_only } | Operation::FsyncDirectory { handle, data_only } => {
                done(reply, client.sync(me, handle, data_only))
            }
            Operation::Fallocate { handle, offset, length, mode } => {
                done(reply, client.allocate(me, handle, mode, offset, length))
            }
            Operation::Seek { handle, offset, whence } => {
                give(reply, client.seek(me, handle, offset, whence), Reply::offset)
            }
            Operation::CopyFileRange { handle, offset, to_handle, to_offset, len, .. } => {
                // The answer has 32 bits.
                let len = len.min(u64::from(u32::MAX));
                let copied = client.copy_range(me, (handle, offset), (to_handle, to_offset), len);
                give(reply, copied, |reply, count| reply.written(count as u32))
            }
            _ => Err((Errno::NOSYS, reply)),
        }
    }

    fn xattr(&self, me: client::Caller<'_>, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
        let (client, node) = (&self.client, parsed.node);
        let (bytes, size) = match parsed.operation {
            Operation::SetXattr { name, value, flags } => {
                return done(reply, client.set_xattr(me, node, name, value, flags));
            }
            Operation::RemoveXattr { name } => return done(reply, client.remove_xattr(me, node, name)),
            Operation::GetXattr { name: MESSAGES, size } => {
                (Ok(client.messages().to_string().into_bytes()), size as usize)
            }
            Operation::GetXattr { name, size } => (client.get_xattr(me, node, name), size as usize),
            Operation::ListXattr { size } => (client.list_xattrs(me, node), size as usize),
            _ => (Err(Errno::NOSYS), 0),
        };
        match bytes {
            Ok(bytes) if size == 0 => done_with(|| reply.xattr_size(bytes.len() as u32)),
            Ok(bytes) if bytes.len() > size => Err((Errno::RANGE, reply)),
            Ok(bytes) => done_with(|| reply.data(&bytes)),
            Err(error) => Err((error, reply)),
        }
    }

    /// A part of a listing that fits into the kernel's buffer, and the attributes in it.
    fn list(
        &self,
        me: client::Caller<'_>,
        (handle, offset): (u64, u64),
        size: u32,
        plus: bool,
    ) -> Result<(Directory, Giving<'_>), Errno> {
        let mut part = Directory::new(size, plus);
        // An entry is longer for the kernel than on the wire, by less than half.
        let listed = self.client.read_directory(me, handle, offset, size as usize * 2 / 3, plus)?;
        let (mut room, giving) = (true, self.client.giving(None));
        for one in &listed {
            let found = |node| leased_entry(&self.client, &Found { node, attributes: one.attributes });
            let found = one.node.map(found);
            let (ino, kind) = (one.attributes.ino.get(), one.attributes.mode.get() >> 12);
            let told = Listed { name: &one.name, ino, kind, next: one.cookie };
            room = room && part.push(told, found.as_ref());
            // What the kernel does not hear of, it does not forget.
            if let Some(node) = one.node.filter(|_| !room) {
                self.client.forget(node, 1);
            }
        }
        Ok((part, giving))
    }

    fn lock(&self, me: client::Caller<'_>, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
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
                let range = of(lock, owner, flock);
                let kind = match lock.kind {
                    SHARED => LockKind::Shared,
                    EXCLUSIVE => LockKind::Exclusive,
                    _ => LockKind::Unlock,
                };
                if !flock && kind != LockKind::Unlock {
                    self.locks().owners.insert((parsed.node, owner, handle));
                }
                if !wait || kind == LockKind::Unlock {
                    return done(reply, self.client.lock(me, handle, range, kind, false));
                }
                self.wait_for_lock(me, (handle, range, kind), reply)
            }
            _ => Err((Errno::NOSYS, reply)),
        }
    }

    /// Waits for a lock in a thread of its own.
    fn wait_for_lock(
        &self,
        me: client::Caller<'_>,
        (handle, range, kind): (u64, LockRange, LockKind),
        reply: Reply,
    ) -> Result<(), (Errno, Reply)> {
        let unique = reply.unique();
        {
            let mut locks = self.locks();
            if locks.waiting.len() >= MOUNT_LOCKS_WAITING_MAX {
                return Err((Errno::NOLCK, reply));
            }
            locks.waiting.insert(unique, (handle, range));
        }
        let (this, uid, gid, groups) = (self.clone(), me.uid, me.gid, me.groups.to_vec());
        let wait = move || {
            let me = client::Caller { uid, gid, groups: &groups };
            let locked = this.client.lock(me, handle, range, kind, true);
            this.locks().waiting.remove(&unique);
            match locked {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }
        };
        // Without a thread the reply is dropped, which answers EIO.
        if std::thread::Builder::new().name("byway-lock".to_owned()).spawn(wait).is_err() {
            self.locks().waiting.remove(&unique);
        }
        Ok(())
    }
}

/// All ranges that an owner has locked.
fn all_of(owner: u64) -> LockRange {
    LockRange { whole: false, owner, pid: 0, start: 0, last: u64::MAX }
}

fn done_with(answer: impl FnOnce()) -> Result<(), (Errno, Reply)> {
    answer();
    Ok(())
}

fn done(reply: Reply, result: Result<(), Errno>) -> Result<(), (Errno, Reply)> {
    give(reply, result, |reply, ()| reply.ok())
}

fn give<T>(reply: Reply, result: Result<T, Errno>, answer: impl FnOnce(Reply, T)) -> Result<(), (Errno, Reply)> {
    match result {
        Ok(value) => done_with(|| answer(reply, value)),
        Err(error) => Err((error, reply)),
    }
}

fn new_attributes(set: &SetAttr) -> NewAttributes {
    let mut new = NewAttributes::new_zeroed();
    let mut which = 0;
    if let Some(mode) = set.mode {
        (new.mode, which) = (mode.into(), which | wire::SET_MODE);
    }
    if let Some(uid) = set.uid {
        (new.uid, which) = (uid.into(), which | wire::SET_UID);
    }
    if let Some(gid) = set.gid {
        (new.gid, which) = (gid.into(), which | wire::SET_GID);
    }
    if let Some(size) = set.size {
        (new.size, which) = (size.into(), which | wire::SET_SIZE);
    }
    match set.atime {
        Some(SetTime::Now) => which |= wire::SET_ACCESSED_NOW,
        Some(SetTime::To { seconds, nanoseconds }) => {
            (new.accessed_s, new.accessed_ns) = (seconds.into(), nanoseconds.into());
            which |= wire::SET_ACCESSED;
        }
        None => {}
    }
    match set.mtime {
        Some(SetTime::Now) => which |= wire::SET_MODIFIED_NOW,
        Some(SetTime::To { seconds, nanoseconds }) => {
            (new.modified_s, new.modified_ns) = (seconds.into(), nanoseconds.into());
            which |= wire::SET_MODIFIED;
        }
        None => {}
    }
    new.which = which.into();
    new
}

fn numbers(sizes: &wire::FileSystem) -> StatFsOut {
    StatFsOut {
        blocks: sizes.blocks.get(),
        blocks_free: sizes.blocks_free.get(),
        blocks_available: sizes.blocks_available.get(),
        files: sizes.files.get(),
        files_free: sizes.files_free.get(),
        block_bytes: sizes.block_bytes.get() as u32,
        name_bytes_max: sizes.name_max.get() as u32,
        fragment_bytes: sizes.block_bytes.get() as u32,
        ..StatFsOut::default()
    }
}

impl Filesystem for Mounted {
    fn request(&self, request: Request, reply: Reply) {
        if let Err((error, reply)) = self.answer(&request.parsed(), reply) {
            reply.error(error);
        }
    }

    /// A change waits for other mounts' leases, a lock for the grace time of a new server, a sync for the disk.
    fn may_wait(&self, operation: &Operation<'_>) -> bool {
        let waits =
            matches!(operation, Operation::SetLock { .. } | Operation::Fsync { .. } | Operation::FsyncDirectory { .. });
        waits || operation.changes()
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.client.forget(node, lookups);
    }

    fn interrupt(&self, unique: u64) {
        let this = self.clone();
        let cancel = move || {
            // The server may not have heard of the wait yet: it is told until the wait has ended.
            loop {
                let Some((handle, range)) = this.locks().waiting.get(&unique).copied() else { return };
                let _ = this.client.cancel_lock(client::Caller::default(), handle, range);
                std::thread::park_timeout(CANCEL_PAUSE);
            }
        };
        // Without a thread the wait goes on.
        let _ = std::thread::Builder::new().name("byway-interrupt".to_owned()).spawn(cancel);
    }

    fn ended(&self) {
        self.client.close();
    }
}
