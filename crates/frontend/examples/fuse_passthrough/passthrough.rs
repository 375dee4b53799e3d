//! A folder as a file system: each request is a system call or two on the files below, done at once.
//!
//! Nodes are held by descriptors without rights (`O_PATH`), so that renames below do not matter. All is done with the rights of
//! the process.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use byway_frontend::fuse::abi::{Attr, ROOT, StatFsOut};
use byway_frontend::fuse::reply::{Directory, Entry, Listed};
use byway_frontend::fuse::request::{Operation, SetAttr, SetTime, Write};
use byway_frontend::fuse::{Filesystem, Reply, Request};
use rustix::fs::{
    AtFlags, CWD, Dir, FallocateFlags, Gid, Mode, OFlags, RenameFlags, SeekFrom, Stat, Timespec, Timestamps, Uid,
    XattrFlags, makedev,
};
use rustix::io::Errno;

/// A node: the file below, and how often the kernel has looked it up.
struct Node {
    file: Arc<OwnedFd>,
    key: (u64, u64),
    lookups: u64,
}

/// An open file or folder. Of a folder, the names that it had when its listing began.
#[derive(Clone)]
struct Handle {
    file: Arc<OwnedFd>,
    names: Arc<Mutex<Vec<Name>>>,
}

/// A name, its inode's number and its type.
type Name = (Vec<u8>, u64, u32);

#[derive(Default)]
struct Tables {
    nodes: HashMap<u64, Node>,
    /// By device and inode: the node.
    numbers: HashMap<(u64, u64), u64>,
    handles: HashMap<u64, Handle>,
    next: u64,
}

/// See the module.
pub struct Passthrough {
    tables: Mutex<Tables>,
    /// How long the kernel believes names and attributes.
    valid: Duration,
    /// Flags of the answer to OPEN.
    open_flags: u32,
}

type Answer<T> = Result<T, Errno>;

impl Passthrough {
    /// The folder's files, believed for a second, in the page cache.
    pub fn new(folder: &Path) -> std::io::Result<Self> {
        let root = rustix::fs::open(folder, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&root)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut tables = Tables { next: ROOT + 1, ..Tables::default() };
        tables.nodes.insert(ROOT, Node { file: Arc::new(root), key, lookups: 1 });
        tables.numbers.insert(key, ROOT);
        Ok(Self { tables: Mutex::new(tables), valid: Duration::from_secs(1), open_flags: 0 })
    }

    /// Flags of the answer to OPEN, of [`byway_frontend::fuse::abi::open`].
    #[must_use]
    #[allow(dead_code, reason = "the example opens plainly")]
    pub fn with_open_flags(self, open_flags: u32) -> Self {
        Self { open_flags, ..self }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, node: u64) -> Answer<Arc<OwnedFd>> {
        self.tables().nodes.get(&node).map(|node| Arc::clone(&node.file)).ok_or(Errno::STALE)
    }

    fn handle(&self, handle: u64) -> Answer<Handle> {
        self.tables().handles.get(&handle).cloned().ok_or(Errno::BADF)
    }

    fn add_handle(&self, file: OwnedFd) -> u64 {
        let mut tables = self.tables();
        let number = tables.next;
        tables.next += 1;
        tables.handles.insert(number, Handle { file: Arc::new(file), names: Arc::default() });
        number
    }

    /// Looks a name up, which counts.
    fn entry(&self, parent: &OwnedFd, name: &[u8]) -> Answer<Entry> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.entry_of(rustix::fs::openat(parent, name, flags, Mode::empty())?)
    }

    fn entry_of(&self, file: OwnedFd) -> Answer<Entry> {
        let stat = rustix::fs::fstat(&file)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut tables = self.tables();
        let number = tables.numbers.get(&key).copied().unwrap_or_else(|| {
            let number = tables.next;
            tables.next += 1;
            tables.numbers.insert(key, number);
            tables.nodes.insert(number, Node { file: Arc::new(file), key, lookups: 0 });
            number
        });
        if let Some(node) = tables.nodes.get_mut(&number) {
            node.lookups += 1;
        }
        let (entry_valid, attr_valid) = (self.valid, self.valid);
        Ok(Entry { node: number, generation: 0, attr: attributes(&stat), entry_valid, attr_valid })
    }

    fn name_answer(&self, reply: Reply, made: Answer<Entry>) {
        match made {
            Ok(entry) => reply.entry(&entry),
            Err(errno) => reply.error(errno),
        }
    }

    /// Makes something in a folder by `make`, and looks it up.
    fn make(&self, node: u64, name: &[u8], make: impl FnOnce(&OwnedFd) -> Answer<()>) -> Answer<Entry> {
        let parent = self.file(node)?;
        make(&parent)?;
        self.entry(&parent, name)
    }

    fn set_attributes(&self, node: u64, set: &SetAttr) -> Answer<Attr> {
        let file = self.file(node)?;
        let path = own_path(&file);
        if let Some(mode) = set.mode {
            rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
        }
        if set.uid.is_some() || set.gid.is_some() {
            let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
            rustix::fs::chownat(&*file, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(size) = set.size {
            match set.handle {
                Some(handle) => rustix::fs::ftruncate(&*self.handle(handle)?.file, size)?,
                None => rustix::fs::ftruncate(rustix::fs::open(&path, OFlags::WRONLY, Mode::empty())?, size)?,
            }
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let times = Timestamps { last_access: time(set.atime), last_modification: time(set.mtime) };
            rustix::fs::utimensat(&*file, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(attributes(&rustix::fs::fstat(&*file)?))
    }

    fn open(&self, node: u64, flags: u32) -> Answer<u64> {
        let flags = OFlags::from_bits_retain(flags) - OFlags::NOFOLLOW - OFlags::DIRECT;
        let file = rustix::fs::open(own_path(&*self.file(node)?), flags | OFlags::CLOEXEC, Mode::empty())?;
        Ok(self.add_handle(file))
    }

    fn create(&self, node: u64, name: &[u8], flags: u32, mode: u32) -> Answer<(Entry, u64)> {
        let parent = self.file(node)?;
        let flags =
            (OFlags::from_bits_retain(flags) - OFlags::DIRECT) | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&*parent, name, flags, Mode::from_raw_mode(mode))?;
        let entry = self.entry(&parent, name)?;
        Ok((entry, self.add_handle(file)))
    }

    fn temporary(&self, node: u64, flags: u32, mode: u32) -> Answer<(Entry, u64)> {
        let parent = self.file(node)?;
        let flags = OFlags::from_bits_retain(flags) | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&*parent, c".", flags, Mode::from_raw_mode(mode))?;
        let entry = self.entry_of(rustix::fs::open(own_path(&file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)?;
        Ok((entry, self.add_handle(file)))
    }

    fn read(&self, handle: u64, offset: u64, size: u32) -> Answer<Vec<u8>> {
        let file = self.handle(handle)?.file;
        let mut bytes = vec![0; size as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::pread(&*file, &mut bytes[filled..], offset + filled as u64)? {
                0 => break,
                read => filled += read,
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    fn write(&self, write: Write<'_>) -> Answer<u32> {
        let file = self.handle(write.handle)?.file;
        let written = rustix::io::pwrite(&*file, write.data, write.offset)?;
        Ok(written as u32)
    }

    fn list(&self, node: u64, (handle, offset): (u64, u64), size: u32, plus: bool) -> Answer<Directory> {
        let handle = self.handle(handle)?;
        let mut names = handle.names.lock().unwrap_or_else(PoisonError::into_inner);
        if offset == 0 {
            names.clear();
            for entry in Dir::read_from(&*handle.file)? {
                let entry = entry?;
                // `mode >> 12`, which is how the kernel numbers types here too.
                let kind = entry.file_type().as_raw_mode() >> 12;
                names.push((entry.file_name().to_bytes().to_vec(), entry.ino(), kind));
            }
        }
        let parent = self.file(node)?;
        let mut listing = Directory::new(size, plus);
        for (index, (name, ino, kind)) in names.iter().enumerate().skip(offset as usize) {
            let dots = name == b"." || name == b"..";
            let entry = if plus && !dots { self.entry(&parent, name).ok() } else { None };
            let listed = Listed { name, ino: *ino, kind: *kind, next: index as u64 + 1 };
            if !listing.push(listed, entry.as_ref()) {
                if let Some(entry) = entry {
                    self.forget(entry.node, 1);
                }
                break;
            }
        }
        Ok(listing)
    }

    fn xattr(&self, reply: Reply, size: u32, get: impl FnOnce(&mut [u8]) -> Answer<usize>) {
        let mut bytes = vec![0; size as usize];
        match get(&mut bytes) {
            Ok(len) if size == 0 => reply.xattr_size(len as u32),
            Ok(len) => reply.data(&bytes[..len]),
            Err(errno) => reply.error(errno),
        }
    }

    /// Operations on names.
    fn naming(&self, node: u64, operation: Operation<'_>, reply: Reply) {
        let mode = Mode::from_raw_mode;
        match operation {
            Operation::Lookup { name } => {
                self.name_answer(reply, self.file(node).and_then(|parent| self.entry(&parent, name)));
            }
            Operation::SymLink { name, target } => {
                self.name_answer(reply, self.make(node, name, |parent| rustix::fs::symlinkat(target, parent, name)));
            }
            Operation::MakeDirectory { name, mode: bits, .. } => {
                self.name_answer(reply, self.make(node, name, |parent| rustix::fs::mkdirat(parent, name, mode(bits))));
            }
            Operation::MakeNode { name, mode: bits, device, .. } => {
                let kind = rustix::fs::FileType::from_raw_mode(bits);
                let device = makedev(device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
                let make = |parent: &OwnedFd| rustix::fs::mknodat(parent, name, kind, mode(bits & 0o7777), device);
                self.name_answer(reply, self.make(node, name, make));
            }
            Operation::Link { old_node, name } => {
                let linked = self.file(old_node).and_then(|old| {
                    let path = own_path(&old);
                    let how = AtFlags::SYMLINK_FOLLOW;
                    self.make(node, name, |parent| rustix::fs::linkat(CWD, &path, parent, name, how))
                });
                self.name_answer(reply, linked);
            }
            Operation::Unlink { name } => {
                done(reply, self.file(node).and_then(|p| rustix::fs::unlinkat(&*p, name, AtFlags::empty())));
            }
            Operation::RemoveDirectory { name } => {
                done(reply, self.file(node).and_then(|p| rustix::fs::unlinkat(&*p, name, AtFlags::REMOVEDIR)));
            }
            Operation::Rename { name, new_directory, new_name, flags } => {
                let flags = RenameFlags::from_bits_retain(flags);
                let both = self.file(node).and_then(|from| Ok((from, self.file(new_directory)?)));
                done(reply, both.and_then(|(from, to)| rustix::fs::renameat_with(&*from, name, &*to, new_name, flags)));
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    /// Operations on attributes.
    fn attributing(&self, node: u64, operation: Operation<'_>, reply: Reply) {
        let file = match self.file(node) {
            Ok(file) => file,
            Err(errno) => return reply.error(errno),
        };
        let path = own_path(&file);
        match operation {
            Operation::GetAttr { .. } => match rustix::fs::fstat(&*file) {
                Ok(stat) => reply.attributes(attributes(&stat), self.valid),
                Err(errno) => reply.error(errno),
            },
            Operation::SetAttr(set) => match self.set_attributes(node, &set) {
                Ok(attr) => reply.attributes(attr, self.valid),
                Err(errno) => reply.error(errno),
            },
            Operation::ReadLink => match rustix::fs::readlinkat(&*file, c"", Vec::new()) {
                Ok(target) => reply.data(target.as_bytes()),
                Err(errno) => reply.error(errno),
            },
            Operation::SetXattr { name, value, flags } => {
                done(reply, rustix::fs::setxattr(&path, name, value, XattrFlags::from_bits_retain(flags)));
            }
            Operation::GetXattr { name, size } => {
                self.xattr(reply, size, |into| rustix::fs::getxattr(&path, name, into));
            }
            Operation::ListXattr { size } => {
                self.xattr(reply, size, |into| rustix::fs::listxattr(&path, into));
            }
            Operation::RemoveXattr { name } => done(reply, rustix::fs::removexattr(&path, name)),
            Operation::StatFs => match rustix::fs::fstatvfs(&*file) {
                Ok(numbers) => reply.numbers(&StatFsOut {
                    blocks: numbers.f_blocks,
                    blocks_free: numbers.f_bfree,
                    blocks_available: numbers.f_bavail,
                    files: numbers.f_files,
                    files_free: numbers.f_ffree,
                    block_bytes: numbers.f_bsize as u32,
                    name_bytes_max: numbers.f_namemax as u32,
                    fragment_bytes: numbers.f_frsize as u32,
                    ..StatFsOut::default()
                }),
                Err(errno) => reply.error(errno),
            },
            _ => reply.error(Errno::NOSYS),
        }
    }

    /// Operations on open files.
    fn handling(&self, node: u64, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Open { flags, .. } | Operation::OpenDirectory { flags } => {
                self.opened(reply, self.open(node, flags));
            }
            Operation::Create { name, flags, mode, .. } => self.created(reply, self.create(node, name, flags, mode)),
            Operation::TemporaryFile { flags, mode, .. } => self.created(reply, self.temporary(node, flags, mode)),
            Operation::Read { handle, offset, size, .. } => match self.read(handle, offset, size) {
                Ok(bytes) => reply.data(&bytes),
                Err(errno) => reply.error(errno),
            },
            Operation::Write(write) => match self.write(write) {
                Ok(bytes) => reply.written(bytes),
                Err(errno) => reply.error(errno),
            },
            Operation::ReadDirectory { handle, offset, size, plus } => {
                match self.list(node, (handle, offset), size, plus) {
                    Ok(listing) => reply.directory(&listing),
                    Err(errno) => reply.error(errno),
                }
            }
            Operation::Fsync { handle, data_only } | Operation::FsyncDirectory { handle, data_only } => {
                let sync = |handle: Handle| {
                    if data_only { rustix::fs::fdatasync(&*handle.file) } else { rustix::fs::fsync(&*handle.file) }
                };
                done(reply, self.handle(handle).and_then(sync));
            }
            Operation::Release { handle, .. } | Operation::ReleaseDirectory { handle, .. } => {
                self.tables().handles.remove(&handle);
                reply.ok();
            }
            Operation::Fallocate { handle, offset, length, mode } => {
                let flags = FallocateFlags::from_bits_retain(mode);
                done(reply, self.handle(handle).and_then(|h| rustix::fs::fallocate(&*h.file, flags, offset, length)));
            }
            Operation::Seek { handle, offset, whence } => {
                let to = if whence == 3 { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) };
                match self.handle(handle).and_then(|handle| rustix::fs::seek(&*handle.file, to)) {
                    Ok(offset) => reply.offset(offset),
                    Err(errno) => reply.error(errno),
                }
            }
            Operation::CopyFileRange { handle, mut offset, to_handle, mut to_offset, len, .. } => {
                let both = self.handle(handle).and_then(|from| Ok((from, self.handle(to_handle)?)));
                let len = len.min(1 << 30) as usize;
                let copied = both.and_then(|(from, to)| {
                    rustix::fs::copy_file_range(&*from.file, Some(&mut offset), &*to.file, Some(&mut to_offset), len)
                });
                match copied {
                    Ok(bytes) => reply.written(bytes as u32),
                    Err(errno) => reply.error(errno),
                }
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn opened(&self, reply: Reply, opened: Answer<u64>) {
        match opened {
            Ok(handle) => reply.opened(handle, self.open_flags),
            Err(errno) => reply.error(errno),
        }
    }

    fn created(&self, reply: Reply, created: Answer<(Entry, u64)>) {
        match created {
            Ok((entry, handle)) => reply.created(&entry, handle, self.open_flags),
            Err(errno) => reply.error(errno),
        }
    }
}

impl Filesystem for Passthrough {
    fn request(&self, request: Request, reply: Reply) {
        let parsed = request.parsed();
        let node = parsed.node;
        match parsed.operation {
            operation @ (Operation::Lookup { .. }
            | Operation::SymLink { .. }
            | Operation::MakeDirectory { .. }
            | Operation::MakeNode { .. }
            | Operation::Link { .. }
            | Operation::Unlink { .. }
            | Operation::RemoveDirectory { .. }
            | Operation::Rename { .. }) => self.naming(node, operation, reply),
            operation @ (Operation::GetAttr { .. }
            | Operation::SetAttr(_)
            | Operation::ReadLink
            | Operation::SetXattr { .. }
            | Operation::GetXattr { .. }
            | Operation::ListXattr { .. }
            | Operation::RemoveXattr { .. }
            | Operation::StatFs) => self.attributing(node, operation, reply),
            operation => self.handling(node, operation, reply),
        }
    }

    fn forget(&self, node: u64, lookups: u64) {
        let mut tables = self.tables();
        let Some(known) = tables.nodes.get_mut(&node) else { return };
        known.lookups = known.lookups.saturating_sub(lookups);
        if known.lookups == 0 && node != ROOT {
            let key = known.key;
            tables.nodes.remove(&node);
            tables.numbers.remove(&key);
        }
    }
}

fn done(reply: Reply, result: Answer<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

/// A path that leads to the very file that a descriptor names.
fn own_path(file: impl AsFd) -> Vec<u8> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    OsStr::from_bytes(path.as_bytes()).to_owned().into_vec()
}

fn time(set: Option<SetTime>) -> Timespec {
    let (tv_sec, tv_nsec) = match set {
        None => (0, rustix::fs::UTIME_OMIT),
        Some(SetTime::Now) => (0, rustix::fs::UTIME_NOW),
        Some(SetTime::To { seconds, nanoseconds }) => (seconds, i64::from(nanoseconds)),
    };
    Timespec { tv_sec, tv_nsec }
}

fn attributes(stat: &Stat) -> Attr {
    Attr {
        ino: stat.st_ino,
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: stat.st_atime as u64,
        mtime: stat.st_mtime as u64,
        ctime: stat.st_ctime as u64,
        atime_ns: stat.st_atime_nsec as u32,
        mtime_ns: stat.st_mtime_nsec as u32,
        ctime_ns: stat.st_ctime_nsec as u32,
        mode: stat.st_mode,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        block_bytes: stat.st_blksize as u32,
        flags: 0,
    }
}
