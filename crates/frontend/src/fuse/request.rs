//! The kernel's requests, checked and decoded.
//!
//! The kernel is trusted, but lengths are checked all the same: a request that is shorter than its structures is answered
//! with `EIO`, and one whose length differs from the bytes that were read ends the mount.

use zerocopy::FromBytes;

use super::abi::{self, FileLock, InHeader, SetAttrIn, opcode};

/// Bytes before the payload of a WRITE. A buffer whose start lies so far before a page receives payloads page-aligned.
pub const WRITE_HEAD_BYTES: usize = size_of::<InHeader>() + size_of::<abi::WriteIn>();

/// Why bytes are no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Fewer bytes than a header has, or another number than the header says. Nothing can be answered.
    #[error("the kernel sent {got} bytes for a request of {said}; unmount and mount again, and report it as a bug")]
    Length {
        /// Bytes that were read.
        got: usize,
        /// Bytes that the header says, or those of a header.
        said: usize,
    },
    /// The body is shorter than its structure, or a name does not end. Answered with `EIO`.
    #[error("the kernel sent a request of operation {opcode} that is cut short")]
    Short {
        /// The operation.
        opcode: u32,
        /// The request to answer.
        unique: u64,
    },
    /// An operation that this code does not know. Answered with `ENOSYS`, after which the kernel does not ask again.
    #[error("the kernel asked for operation {opcode}, which is not supported")]
    Unknown {
        /// The operation.
        opcode: u32,
        /// The request to answer.
        unique: u64,
    },
}

/// Whose call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user of the calling thread (its file system uid).
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// The thread, in the mount's pid namespace; 0 where it has no number there or the kernel itself asks.
    pub pid: u32,
}

/// One request: node, caller, operation. It borrows the bytes that were read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parsed<'a> {
    /// Names the request; its reply carries it.
    pub unique: u64,
    /// The node that is meant; the directory where the operation has a name.
    pub node: u64,
    /// Whose call it is.
    pub caller: Caller,
    /// What is asked.
    pub operation: Operation<'a>,
}

/// What is asked of a node. Names have no `/`, no 0 byte, and are neither empty nor longer than the kernel lets them be.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "fields are the arguments of the system call of that name")]
pub enum Operation<'a> {
    /// Answer with an entry, or `ENOENT`. An entry with node 0 says that there is none, for as long as it is valid.
    Lookup { name: &'a [u8] },
    /// So many look-ups of the node are forgotten. No answer.
    Forget { lookups: u64 },
    /// The same of many nodes. No answer.
    BatchForget { nodes: Forgets<'a> },
    /// Answer with attributes.
    GetAttr { handle: Option<u64> },
    /// Answer with attributes.
    SetAttr(SetAttr),
    /// Answer with the target as data.
    ReadLink,
    /// Answer with an entry.
    SymLink { name: &'a [u8], target: &'a [u8] },
    /// Answer with an entry.
    MakeNode { name: &'a [u8], mode: u32, device: u32, umask: u32 },
    /// Answer with an entry.
    MakeDirectory { name: &'a [u8], mode: u32, umask: u32 },
    /// Answer with nothing.
    Unlink { name: &'a [u8] },
    /// Answer with nothing.
    RemoveDirectory { name: &'a [u8] },
    /// Answer with nothing. `flags` are those of `renameat2`.
    Rename { name: &'a [u8], new_directory: u64, new_name: &'a [u8], flags: u32 },
    /// `node` is the directory of the new name. Answer with an entry.
    Link { old_node: u64, name: &'a [u8] },
    /// `flags` are those of `open` without O_CREAT and O_EXCL. Answer with a handle.
    Open { flags: u32, kill_suid_gid: bool },
    /// Answer with data; fewer than `size` bytes say that the file ends there.
    Read { handle: u64, offset: u64, size: u32, flags: u32, lock_owner: Option<u64> },
    /// Answer with the bytes that were written.
    Write(Write<'a>),
    /// Answer with the file system's numbers.
    StatFs,
    /// The last user of the handle has closed it. Answer with nothing.
    Release { handle: u64, flags: u32, lock_owner: u64, flock_unlock: bool },
    /// Answer with nothing, once it is durable.
    Fsync { handle: u64, data_only: bool },
    /// Answer with nothing.
    SetXattr { name: &'a [u8], value: &'a [u8], flags: u32 },
    /// Answer with the value as data, or for size 0 with its size; `ERANGE` if it is longer.
    GetXattr { name: &'a [u8], size: u32 },
    /// Answer with the names, each with a 0 byte, as data, or for size 0 with their size.
    ListXattr { size: u32 },
    /// Answer with nothing.
    RemoveXattr { name: &'a [u8] },
    /// One of the handle's descriptors was closed: POSIX locks of the owner go. Answer with nothing.
    Flush { handle: u64, lock_owner: u64 },
    /// Answer with a handle.
    OpenDirectory { flags: u32 },
    /// Answer with a [`Directory`](super::reply::Directory); an empty one is the end. `plus` asks for entries with attributes.
    ReadDirectory { handle: u64, offset: u64, size: u32, plus: bool },
    /// Answer with nothing.
    ReleaseDirectory { handle: u64, flags: u32 },
    /// Answer with nothing, once it is durable.
    FsyncDirectory { handle: u64, data_only: bool },
    /// Answer with the lock that is in the way, or one of kind F_UNLCK.
    GetLock { handle: u64, owner: u64, lock: FileLock },
    /// Answer with nothing. If `wait`, once the lock is held; [`Filesystem::interrupt`](super::Filesystem::interrupt) may end that.
    SetLock { handle: u64, owner: u64, lock: FileLock, flock: bool, wait: bool },
    /// Answer with nothing.
    Access { mask: u32 },
    /// Answer with an entry and a handle.
    Create { name: &'a [u8], flags: u32, mode: u32, umask: u32, kill_suid_gid: bool },
    /// A file without a name, in this directory. Answer with an entry and a handle.
    TemporaryFile { flags: u32, mode: u32, umask: u32 },
    /// Answer with nothing. `mode` is that of `fallocate`.
    Fallocate { handle: u64, offset: u64, length: u64, mode: u32 },
    /// SEEK_DATA (3) or SEEK_HOLE (4). Answer with an offset.
    Seek { handle: u64, offset: u64, whence: u32 },
    /// Answer with the bytes that were copied.
    CopyFileRange { handle: u64, offset: u64, to_node: u64, to_handle: u64, to_offset: u64, len: u64, flags: u64 },
    /// The mount begins. The session answers it.
    Init(abi::InitIn),
    /// The caller of the request of that number was interrupted.
    Interrupt { unique: u64 },
    /// The mount ends.
    Destroy,
}

impl Operation<'_> {
    /// Whether it changes a file or a name.
    pub fn changes(&self) -> bool {
        match self {
            Self::Open { flags, .. } => flags & rustix::fs::OFlags::TRUNC.bits() != 0,
            Self::SetAttr(_)
            | Self::SymLink { .. }
            | Self::MakeNode { .. }
            | Self::MakeDirectory { .. }
            | Self::Unlink { .. }
            | Self::RemoveDirectory { .. }
            | Self::Rename { .. }
            | Self::Link { .. }
            | Self::Write(_)
            | Self::SetXattr { .. }
            | Self::RemoveXattr { .. }
            | Self::Create { .. }
            | Self::TemporaryFile { .. }
            | Self::Fallocate { .. }
            | Self::CopyFileRange { .. } => true,
            _ => false,
        }
    }
}

/// A WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write<'a> {
    /// Of the open file.
    pub handle: u64,
    /// Where, in bytes. With O_APPEND in `flags` it is the kernel's idea of the end.
    pub offset: u64,
    /// What.
    pub data: &'a [u8],
    /// The file's open flags.
    pub flags: u32,
    /// Whose POSIX locks count.
    pub lock_owner: Option<u64>,
    /// The bytes come from the page cache, `handle` is some handle of the file.
    pub from_cache: bool,
    /// The set-uid and set-gid bits go.
    pub kill_suid_gid: bool,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// That of the server's clock.
    Now,
    /// This one.
    To {
        /// Seconds since 1970, negative before.
        seconds: i64,
        /// 0 to 999,999,999.
        nanoseconds: u32,
    },
}

/// A SETATTR: what is `Some` is to be set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields are attributes of files")]
pub struct SetAttr {
    pub handle: Option<u64>,
    pub lock_owner: Option<u64>,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    pub ctime: Option<SetTime>,
    pub kill_suid_gid: bool,
}

/// The nodes of a BATCH_FORGET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgets<'a>(&'a [u8]);

impl Forgets<'_> {
    /// Nodes, and how many of their look-ups are forgotten.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (each, _) = self.0.as_chunks::<{ size_of::<abi::ForgetOne>() }>();
        each.iter().filter_map(|bytes| abi::ForgetOne::read_from_bytes(bytes).ok()).map(|one| (one.node, one.lookups))
    }
}

/// Takes a request apart.
///
/// # Errors
/// See [`RequestError`].
pub fn parse(bytes: &[u8]) -> Result<Parsed<'_>, RequestError> {
    let short = RequestError::Length { got: bytes.len(), said: size_of::<InHeader>() };
    let (header, body) = InHeader::read_from_prefix(bytes).map_err(|_| short)?;
    if header.len as usize != bytes.len() {
        return Err(RequestError::Length { got: bytes.len(), said: header.len as usize });
    }
    let (code, unique) = (header.opcode, header.unique);
    // Extensions, which are not asked for at INIT, lie behind the body.
    let extensions = usize::from(header.extension_words) * 8;
    let body = body.len().checked_sub(extensions).and_then(|len| body.get(..len));
    let mut body = Body(body.ok_or(RequestError::Short { opcode: code, unique })?);
    if !is_known(code) {
        return Err(RequestError::Unknown { opcode: code, unique });
    }
    let operation = body.operation(code).ok_or(RequestError::Short { opcode: code, unique })?;
    let caller = Caller { uid: header.uid, gid: header.gid, pid: header.pid };
    Ok(Parsed { unique, node: header.node, caller, operation })
}

/// Takes apart a request that was read into two places: the first [`WRITE_HEAD_BYTES`] into `head`, what is behind them into
/// `rest`. The payload of a WRITE stays there; other requests are put together in `joined`.
///
/// # Errors
/// See [`RequestError`].
pub fn parse_parts<'a>(head: &'a [u8], rest: &'a [u8], joined: &'a mut Vec<u8>) -> Result<Parsed<'a>, RequestError> {
    if rest.is_empty() {
        return parse(head);
    }
    let short = RequestError::Length { got: head.len(), said: WRITE_HEAD_BYTES };
    let (header, body) = InHeader::read_from_prefix(head).map_err(|_| short)?;
    if header.opcode != opcode::WRITE || header.extension_words != 0 {
        joined.clear();
        joined.extend(head);
        joined.extend(rest);
        return parse(joined);
    }
    let write = abi::WriteIn::read_from_bytes(body).map_err(|_| short)?;
    let got = head.len() + rest.len();
    if header.len as usize != got {
        return Err(RequestError::Length { got, said: header.len as usize });
    }
    let unique = header.unique;
    let data = rest.get(..write.size as usize).ok_or(RequestError::Short { opcode: opcode::WRITE, unique })?;
    let caller = Caller { uid: header.uid, gid: header.gid, pid: header.pid };
    Ok(Parsed { unique, node: header.node, caller, operation: Operation::Write(Write::of(write, data)) })
}

fn is_known(code: u32) -> bool {
    // 7, 19, 37 and 39 to 41 are BMAP, IOCTL, POLL and the like, or nothing at all.
    matches!(code, 1..=6 | 8..=18 | 20..=36 | 38 | 42..=47 | opcode::TMPFILE)
}

/// What is left of a body.
struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    fn take<T: FromBytes>(&mut self) -> Option<T> {
        let (value, rest) = T::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(value)
    }

    /// A name, which ends with a 0 byte.
    fn name(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let (name, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Some(name)
    }

    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// `None` for one that is cut short.
    fn operation(&mut self, code: u32) -> Option<Operation<'a>> {
        match code {
            opcode::LOOKUP
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::CREATE
            | opcode::TMPFILE => self.naming(code),
            opcode::READ | opcode::WRITE | opcode::FALLOCATE | opcode::LSEEK | opcode::COPY_FILE_RANGE => {
                self.moving(code)
            }
            opcode::SETXATTR | opcode::GETXATTR | opcode::LISTXATTR | opcode::REMOVEXATTR => self.attributing(code),
            opcode::GETLK | opcode::SETLK | opcode::SETLKW => self.locking(code),
            opcode::FORGET => self.take::<abi::ForgetIn>().map(|forget| Operation::Forget { lookups: forget.lookups }),
            opcode::BATCH_FORGET => self.forgets(),
            opcode::GETATTR => self
                .take::<abi::GetAttrIn>()
                .map(|get| Operation::GetAttr { handle: (get.flags & abi::GETATTR_HANDLE != 0).then_some(get.handle) }),
            opcode::SETATTR => self.take::<SetAttrIn>().map(|set| Operation::SetAttr(SetAttr::from(set))),
            opcode::READLINK => Some(Operation::ReadLink),
            opcode::STATFS => Some(Operation::StatFs),
            opcode::DESTROY => Some(Operation::Destroy),
            opcode::ACCESS => self.take::<abi::AccessIn>().map(|access| Operation::Access { mask: access.mask }),
            opcode::INIT => self.init(),
            opcode::INTERRUPT => {
                self.take::<abi::InterruptIn>().map(|interrupt| Operation::Interrupt { unique: interrupt.unique })
            }
            _ => self.handling(code),
        }
    }

    /// Operations on names of a directory.
    fn naming(&mut self, code: u32) -> Option<Operation<'a>> {
        Some(match code {
            opcode::LOOKUP => Operation::Lookup { name: self.name()? },
            opcode::UNLINK => Operation::Unlink { name: self.name()? },
            opcode::RMDIR => Operation::RemoveDirectory { name: self.name()? },
            opcode::SYMLINK => Operation::SymLink { name: self.name()?, target: self.name()? },
            opcode::MKNOD => {
                let node: abi::MakeNodeIn = self.take()?;
                Operation::MakeNode { name: self.name()?, mode: node.mode, device: node.rdev, umask: node.umask }
            }
            opcode::MKDIR => {
                let made: abi::MakeDirectoryIn = self.take()?;
                Operation::MakeDirectory { name: self.name()?, mode: made.mode, umask: made.umask }
            }
            opcode::RENAME => {
                let rename: abi::RenameIn = self.take()?;
                let (name, new_name) = (self.name()?, self.name()?);
                Operation::Rename { name, new_directory: rename.new_directory, new_name, flags: 0 }
            }
            opcode::RENAME2 => {
                let rename: abi::Rename2In = self.take()?;
                let (name, new_name) = (self.name()?, self.name()?);
                Operation::Rename { name, new_directory: rename.new_directory, new_name, flags: rename.flags }
            }
            opcode::LINK => {
                let link: abi::LinkIn = self.take()?;
                Operation::Link { old_node: link.old_node, name: self.name()? }
            }
            opcode::CREATE => {
                let create: abi::CreateIn = self.take()?;
                let abi::CreateIn { flags, mode, umask, open_flags } = create;
                let kill_suid_gid = open_flags & abi::OPEN_KILL_SUIDGID != 0;
                Operation::Create { name: self.name()?, flags, mode, umask, kill_suid_gid }
            }
            _ => {
                let create: abi::CreateIn = self.take()?;
                Operation::TemporaryFile { flags: create.flags, mode: create.mode, umask: create.umask }
            }
        })
    }

    /// Operations on a file's bytes.
    fn moving(&mut self, code: u32) -> Option<Operation<'a>> {
        Some(match code {
            opcode::READ => {
                let read: abi::ReadIn = self.take()?;
                let lock_owner = (read.read_flags & abi::READ_LOCK_OWNER != 0).then_some(read.lock_owner);
                let abi::ReadIn { handle, offset, size, flags, .. } = read;
                Operation::Read { handle, offset, size, flags, lock_owner }
            }
            opcode::WRITE => {
                let write: abi::WriteIn = self.take()?;
                Operation::Write(Write::of(write, self.bytes(write.size as usize)?))
            }
            opcode::FALLOCATE => {
                let abi::FallocateIn { handle, offset, length, mode, .. } = self.take()?;
                Operation::Fallocate { handle, offset, length, mode }
            }
            opcode::LSEEK => {
                let abi::SeekIn { handle, offset, whence, .. } = self.take()?;
                Operation::Seek { handle, offset, whence }
            }
            _ => {
                let copy: abi::CopyFileRangeIn = self.take()?;
                Operation::CopyFileRange {
                    handle: copy.handle_in,
                    offset: copy.offset_in,
                    to_node: copy.node_out,
                    to_handle: copy.handle_out,
                    to_offset: copy.offset_out,
                    len: copy.len,
                    flags: copy.flags,
                }
            }
        })
    }

    /// Operations on extended attributes.
    fn attributing(&mut self, code: u32) -> Option<Operation<'a>> {
        Some(match code {
            opcode::SETXATTR => {
                let set: abi::SetXattrIn = self.take()?;
                let name = self.name()?;
                Operation::SetXattr { name, value: self.bytes(set.size as usize)?, flags: set.flags }
            }
            opcode::GETXATTR => {
                let get: abi::GetXattrIn = self.take()?;
                Operation::GetXattr { name: self.name()?, size: get.size }
            }
            opcode::LISTXATTR => Operation::ListXattr { size: self.take::<abi::GetXattrIn>()?.size },
            _ => Operation::RemoveXattr { name: self.name()? },
        })
    }

    fn locking(&mut self, code: u32) -> Option<Operation<'a>> {
        let abi::LockIn { handle, owner, lock, flags, .. } = self.take()?;
        if code == opcode::GETLK {
            return Some(Operation::GetLock { handle, owner, lock });
        }
        let (flock, wait) = (flags & abi::LOCK_FLOCK != 0, code == opcode::SETLKW);
        Some(Operation::SetLock { handle, owner, lock, flock, wait })
    }

    /// Operations that open or have a handle, and move no bytes of a file.
    fn handling(&mut self, code: u32) -> Option<Operation<'a>> {
        Some(match code {
            opcode::OPEN => {
                let open: abi::OpenIn = self.take()?;
                Operation::Open { flags: open.flags, kill_suid_gid: open.open_flags & abi::OPEN_KILL_SUIDGID != 0 }
            }
            opcode::OPENDIR => Operation::OpenDirectory { flags: self.take::<abi::OpenIn>()?.flags },
            opcode::FLUSH => {
                let flush: abi::FlushIn = self.take()?;
                Operation::Flush { handle: flush.handle, lock_owner: flush.lock_owner }
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                let abi::ReadIn { handle, offset, size, .. } = self.take()?;
                Operation::ReadDirectory { handle, offset, size, plus: code == opcode::READDIRPLUS }
            }
            opcode::RELEASE | opcode::RELEASEDIR => {
                let abi::ReleaseIn { handle, flags, release_flags, lock_owner } = self.take()?;
                let flock_unlock = release_flags & abi::RELEASE_FLOCK_UNLOCK != 0;
                if code == opcode::RELEASEDIR {
                    return Some(Operation::ReleaseDirectory { handle, flags });
                }
                Operation::Release { handle, flags, lock_owner, flock_unlock }
            }
            _ => {
                let fsync: abi::FsyncIn = self.take()?;
                let (handle, data_only) = (fsync.handle, fsync.flags & abi::FSYNC_DATA_ONLY != 0);
                if code == opcode::FSYNCDIR {
                    return Some(Operation::FsyncDirectory { handle, data_only });
                }
                Operation::Fsync { handle, data_only }
            }
        })
    }

    fn forgets(&mut self) -> Option<Operation<'a>> {
        let batch: abi::BatchForgetIn = self.take()?;
        let bytes = (batch.count as usize).checked_mul(size_of::<abi::ForgetOne>())?;
        Some(Operation::BatchForget { nodes: Forgets(self.bytes(bytes)?) })
    }

    fn init(&mut self) -> Option<Operation<'a>> {
        if let Some(whole) = self.take::<abi::InitIn>() {
            return Some(Operation::Init(whole));
        }
        let [major, minor, max_readahead, flags] = self.take::<[u32; 4]>()?;
        Some(Operation::Init(abi::InitIn { major, minor, max_readahead, flags, ..abi::InitIn::default() }))
    }
}

impl<'a> Write<'a> {
    fn of(write: abi::WriteIn, data: &'a [u8]) -> Self {
        Self {
            handle: write.handle,
            offset: write.offset,
            data,
            flags: write.flags,
            lock_owner: (write.write_flags & abi::READ_LOCK_OWNER != 0).then_some(write.lock_owner),
            from_cache: write.write_flags & abi::WRITE_CACHE != 0,
            kill_suid_gid: write.write_flags & abi::WRITE_KILL_SUIDGID != 0,
        }
    }
}

impl From<SetAttrIn> for SetAttr {
    fn from(set: SetAttrIn) -> Self {
        use abi::setattr as bit;
        let has = |bit: u32| set.valid & bit != 0;
        let time = |valid: u32, now: u32, seconds: u64, nanoseconds: u32| {
            let to = SetTime::To { seconds: seconds as i64, nanoseconds };
            has(valid).then_some(if has(now) { SetTime::Now } else { to })
        };
        Self {
            handle: has(bit::HANDLE).then_some(set.handle),
            lock_owner: has(bit::LOCK_OWNER).then_some(set.lock_owner),
            mode: has(bit::MODE).then_some(set.mode),
            uid: has(bit::UID).then_some(set.uid),
            gid: has(bit::GID).then_some(set.gid),
            size: has(bit::SIZE).then_some(set.size),
            atime: time(bit::ATIME, bit::ATIME_NOW, set.atime, set.atime_ns),
            mtime: time(bit::MTIME, bit::MTIME_NOW, set.mtime, set.mtime_ns),
            ctime: time(bit::CTIME, 0, set.ctime, set.ctime_ns),
            kill_suid_gid: has(bit::KILL_SUIDGID),
        }
    }
}

#[cfg(test)]
mod tests;
