//! The kernel's requests to a mount, passed to the share's server.
//!
//! Files that are opened for writing pass the page cache by. While the client has a lease on a file, those that are opened for reading
//! and listings go through it, and the kernel uses attributes without asking (`cached.rs`). It asks for each name.
//! Each request is answered by the thread that read it, but for waits for locks and for stale pages, which have threads of their own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use byway_frontend::fuse::abi::{StatFsOut, open};
use byway_frontend::fuse::reply::{Directory, Entry, Listed};
use byway_frontend::fuse::request::{Caller, Operation, Parsed, SetAttr, SetTime, Write};
use byway_frontend::fuse::{Answered, Filesystem, Reply, Request};
use byway_reactor::Errno;
use byway_service::file::client::leases::OpenMode;
use byway_service::file::client::{self, Client, CopyRange, FileRead, Found, Giving, NamedIn, NewMode};
use byway_service::file::wire::{self, NewAttributes};
use rustix::fs::OFlags;
use zerocopy::FromZeros;

use super::attributes::attr;
use super::cached::{StalePages, Written, leased_entry};
use super::counters::{Counters, number_of_kind};
use super::end::End;
use super::groups::groups_of;
use super::locks::Locks;
use super::mapped::{CallWrite, MappedFiles};

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
const APPEND: u32 = OFlags::APPEND.bits();

/// See the module.
#[derive(Clone)]
pub(super) struct Mounted {
    pub(super) client: Arc<Client>,
    pub(super) locks: Arc<Mutex<Locks>>,
    stale: StalePages,
    pub(super) mapped: Arc<MappedFiles>,
    pub(super) counters: Arc<Counters>,
    pub(super) end: End,
    /// How long the kernel uses a name without asking.
    entry_timeout: Duration,
}

impl Mounted {
    /// # Errors
    /// No threads.
    pub(super) fn new(client: Arc<Client>, entry_timeout: Duration) -> std::io::Result<Self> {
        let stale = StalePages::start(&client)?;
        let (locks, mapped) = (Arc::default(), Arc::default());
        let (counters, end) = (Arc::default(), End::default());
        Ok(Self { client, locks, stale, mapped, counters, end, entry_timeout })
    }

    /// An entry whose attributes the kernel asks for.
    fn entry(&self, found: &Found) -> Entry {
        let (attr, entry_valid) = (attr(&found.attributes), self.entry_timeout);
        Entry { node: found.node, attr, entry_valid, ..Entry::default() }
    }

    /// The threads that drop stale pages.
    pub(super) fn stale(&self) -> StalePages {
        self.stale.clone()
    }

    /// Answers a request. An error is answered by the caller; the reply comes back with it.
    fn answer(&self, request: &Arc<Request>, reply: Reply) -> Result<(), (Errno, Reply)> {
        let parsed = &request.parsed();
        self.counters.called(&parsed.operation);
        // The groups of the caller travel where the server asks for them.
        let groups = if self.client.wants_groups() { groups_of(&parsed.caller) } else { Vec::new() };
        let Caller { uid, gid, .. } = parsed.caller;
        let me = client::Caller { uid, gid, groups: &groups };
        match parsed.operation {
            Operation::Read { handle, offset, size, lock_owner, .. } => {
                // A read by a call names its program.
                let pages = lock_owner.is_none();
                if pages {
                    self.mapped.begin_pages_read(parsed.node);
                }
                let read = FileRead { node: parsed.node, handle, offset, len: size as usize };
                self.read(me, read, pages, reply)
            }
            Operation::Write(write) => self.write(me, (request, parsed.node), &write, reply),
            Operation::ReadDirectory { handle, offset, size, plus } => {
                let pages = self.client.begin_page_read(parsed.node);
                let part = self.list(me, handle, offset, size, plus);
                self.client.end_page_read(parsed.node, pages);
                give(reply, part, |reply, (part, _giving)| reply.directory(&part))
            }
            Operation::Lookup { name } => {
                let found = self.client.look_up(me, parsed.node, name);
                give(reply, found, |reply, found| {
                    self.stale.attributes(&self.client, found, Some(self.entry_timeout), reply);
                })
            }
            Operation::GetAttr { handle } => {
                let attributes = self.client.attributes(me, parsed.node, handle);
                give(reply, attributes, |reply, attributes| {
                    self.stale.attributes(&self.client, Found { node: parsed.node, attributes }, None, reply);
                })
            }
            Operation::SetAttr(set) => {
                let mut resizing = set.size.map(|_| self.client.resizing(parsed.node));
                let attributes = self.client.set_attributes(me, parsed.node, set.handle, &new_attributes(&set));
                if let (Some(resizing), Ok(attributes)) = (&mut resizing, &attributes) {
                    resizing.done(attributes.size.get());
                }
                give(reply, attributes, |reply, attributes| reply.attributes(attr(&attributes), Duration::ZERO))
            }
            Operation::GetLock { .. } | Operation::SetLock { .. } | Operation::Flush { .. } => {
                self.lock(me, request, reply)
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

    fn read(
        &self,
        me: client::Caller<'_>,
        read: FileRead,
        is_of_pages: bool,
        reply: Reply,
    ) -> Result<(), (Errno, Reply)> {
        let FileRead { node, handle, offset, len } = read;
        let pages = self.client.begin_page_read(node);
        let (good, given) = if let Some(bytes) = self.client.take_opened_bytes(node, handle, offset, len) {
            let good = self.client.end_page_read(node, pages);
            self.counters.has_read(bytes.len());
            (good, done_with(|| reply.data(&bytes)))
        } else {
            let answer = if is_of_pages {
                self.client.read_pages(me, read)
            } else {
                self.client.read_data(me, handle, offset, len)
            };
            let good = self.client.end_page_read(node, pages);
            self.counters.has_read(answer.as_ref().map_or(0, client::Data::len));
            let data = |reply: Reply, data: client::Data<'_>| {
                reply.data_by(data.len(), |kernel, head| data.write_to(kernel, head));
            };
            (good, give(reply, answer, data))
        };
        if !good {
            self.stale.drop_pages(node);
        }
        given
    }

    fn write(
        &self,
        me: client::Caller<'_>,
        (request, node): (&Arc<Request>, u64),
        write: &Write<'_>,
        reply: Reply,
    ) -> Result<(), (Errno, Reply)> {
        let (client, handle) = (&self.client, write.handle);
        if write.from_cache {
            // Pages have their places, whatever handle they come by.
            let (under_way, changed) = self.mapped.begin_pages_write(node, write);
            let written = client.write(me, handle, write.offset, changed.as_deref().unwrap_or(write.data));
            drop(under_way);
            self.counters.has_written(written.unwrap_or(0));
            return give(reply, written, |reply, count| reply.written(count as u32));
        }
        client.written_to(node, write.offset + write.data.len() as u64);
        let (by_call, result) = if write.flags & APPEND != 0 {
            (None, client.append(me, handle, write.data))
        } else {
            let by_call = self.mapped.begin_write(node, request, write);
            (Some(by_call), client.write(me, handle, write.offset, write.data))
        };
        self.counters.has_written(result.unwrap_or(0));
        let may_be_mapped = by_call.as_ref().is_some_and(CallWrite::may_have_old_pages);
        if may_be_mapped || client.has_stale_pages(node) {
            let range = (write.offset as i64, write.data.len() as i64);
            return done_with(|| self.stale.written(Written { node, range, by_call, result, reply }));
        }
        // Pages that come behind the answer may have newer bytes.
        drop(by_call);
        give(reply, result, |reply, count| reply.written(count as u32))
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
                let (from, to) = (NamedIn::new(node, name), NamedIn::new(new_directory, new_name));
                return done(reply, client.rename(me, from, to, flags));
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
        give(reply, made, |reply, found| reply.entry(&self.entry(&found)))
    }

    fn open_or_close(&self, me: client::Caller<'_>, parsed: &Parsed<'_>, reply: Reply) -> Result<(), (Errno, Reply)> {
        let (client, node) = (&self.client, parsed.node);
        let (created, flags) = match parsed.operation {
            Operation::Open { flags, .. } => {
                let mut resizing = (flags & OFlags::TRUNC.bits() != 0).then(|| client.resizing(node));
                let opened = client.open_for_kernel(me, node, flags);
                if let (Some(resizing), Ok(_)) = (&mut resizing, &opened) {
                    resizing.done(0);
                }
                return give(reply, opened, |reply, (handle, mode)| {
                    self.mapped.opened(node, handle, flags);
                    reply.opened(handle, open_flags(mode));
                });
            }
            Operation::OpenDirectory { .. } => {
                let opened = client.open_directory_for_kernel(me, node);
                return give(reply, opened, |reply, (handle, mode)| reply.opened(handle, open_directory_flags(mode)));
            }
            Operation::Create { name, flags, mode, umask, .. } => {
                (client.create(me, NamedIn::new(node, name), flags, NewMode { mode, umask }), flags)
            }
            Operation::TemporaryFile { flags, mode, umask } => {
                (client.create_unnamed(me, node, flags, NewMode { mode, umask }), flags)
            }
            Operation::Release { handle, flock_unlock, .. } => {
                self.end_locks(me, node, handle, flock_unlock);
                self.mapped.closed(node, handle);
                client.close_handle_later(handle);
                return done(reply, Ok(()));
            }
            Operation::ReleaseDirectory { handle, .. } => {
                client.close_handle_later(handle);
                return done(reply, Ok(()));
            }
            _ => (Err(Errno::NOSYS), 0),
        };
        give(reply, created, |reply, (found, handle)| {
            client.created_for_kernel(found.node, handle);
            self.mapped.opened(found.node, handle, flags);
            reply.created(&self.entry(&found), handle, OPENED);
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
            Operation::CopyFileRange { handle: from, offset: from_offset, to_handle: to, to_offset, len, .. } => {
                // The answer has 32 bits.
                let len = len.min(u64::from(u32::MAX));
                let copied = client.copy_range(me, CopyRange { from, from_offset, to, to_offset, len });
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
        handle: u64,
        offset: u64,
        size: u32,
        plus: bool,
    ) -> Result<(Directory, Giving<'_>), Errno> {
        let mut part = Directory::new(size, plus);
        // An entry is longer for the kernel than on the wire, by less than half.
        let listed = self.client.read_directory(me, handle, offset, size as usize * 2 / 3, plus)?;
        let (mut room, giving) = (true, self.client.giving(None));
        for one in &listed {
            let (valid, attributes) = (self.entry_timeout, one.attributes);
            let found = |node| leased_entry(&self.client, &Found { node, attributes }, valid);
            // Without attributes a name tells no size that may change at once.
            let told_node = one.node.filter(|node| !self.client.wants_sure_size(*node));
            let found = told_node.map(found);
            let (ino, kind) = (one.attributes.ino.get(), one.attributes.mode.get() >> 12);
            let told = Listed { name: &one.name, ino, kind, next: one.cookie };
            room = room && part.push(told, found.as_ref());
            // What the kernel does not hear of, it does not forget.
            if let Some(node) = one.node.filter(|_| !room || told_node.is_none()) {
                self.client.forget(node, 1);
            }
        }
        Ok((part, giving))
    }
}

fn done_with(answer: impl FnOnce()) -> Result<(), (Errno, Reply)> {
    answer();
    Ok(())
}

pub(super) fn done(reply: Reply, result: Result<(), Errno>) -> Result<(), (Errno, Reply)> {
    give(reply, result, |reply, ()| reply.ok())
}

pub(super) fn give<T>(
    reply: Reply,
    result: Result<T, Errno>,
    answer: impl FnOnce(Reply, T),
) -> Result<(), (Errno, Reply)> {
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
        // Pages that come during a write by a call get its bytes from there.
        if let Err((error, reply)) = self.answer(&Arc::new(request), reply) {
            reply.error(error);
        }
    }

    /// A change waits for other mounts' leases, a lock for the grace time of a new server, a sync for the disk.
    fn may_wait(&self, operation: &Operation<'_>) -> bool {
        let waits =
            matches!(operation, Operation::SetLock { .. } | Operation::Fsync { .. } | Operation::FsyncDirectory { .. });
        waits || operation.changes()
    }

    fn kind_of(&self, operation: &Operation<'_>) -> u8 {
        number_of_kind(operation)
    }

    fn answered(&self, answered: Answered) {
        self.counters.answered(answered);
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.client.forget(node, lookups);
    }

    fn interrupt(&self, unique: u64) {
        self.interrupt_lock(unique);
    }

    fn pause(&self) {
        self.keep_waits();
    }

    fn go_on(&self) {
        self.locks().is_paused = false;
    }

    fn ended(&self) {
        self.end();
    }
}
