//! The structures and numbers of the kernel's FUSE protocol, version 7.40, in the machine's byte order.
//!
//! Layouts are those of `include/uapi/linux/fuse.h`; the tests below state their sizes and bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The protocol's major version; another one is refused.
pub const MAJOR: u32 = 7;
/// The minor version that this code knows. The kernel's own may be lower or higher; the lower one holds.
pub const MINOR: u32 = 40;
/// The lowest minor version that is accepted: 7.31 has `max_pages` and 64-byte replies to INIT (Linux 5.2).
pub const MINOR_MIN: u32 = 31;
/// The node id of the root.
pub const ROOT: u64 = 1;

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident = $bytes:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[expect(missing_docs, reason = "the fields are the kernel header's")]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    )*};
}

wire! {
    /// Before every request.
    InHeader = 40 {
        len: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, pid: u32, extension_words: u16, padding: u16,
    }
    /// Before every reply, and before notifications, whose `unique` is 0.
    OutHeader = 16 { len: u32, error: i32, unique: u64, }
    /// INIT, as the kernel asks; older kernels send the first 16 bytes.
    InitIn = 64 { major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11], }
    /// INIT, the answer.
    InitOut = 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_granularity_ns: u32, max_pages: u16, map_alignment: u16, flags2: u32,
        max_stack_depth: u32, request_timeout: u16, unused: [u16; 11],
    }
    /// A file's attributes.
    Attr = 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atime_ns: u32, mtime_ns: u32,
        ctime_ns: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, block_bytes: u32, flags: u32,
    }
    /// The answer to LOOKUP and to what makes an entry.
    EntryOut = 128 {
        node: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_ns: u32, attr_valid_ns: u32, attr: Attr,
    }
    /// The answer to GETATTR and SETATTR.
    AttrOut = 104 { valid: u64, valid_ns: u32, padding: u32, attr: Attr, }
    /// FORGET.
    ForgetIn = 8 { lookups: u64, }
    /// One of BATCH_FORGET.
    ForgetOne = 16 { node: u64, lookups: u64, }
    /// BATCH_FORGET.
    BatchForgetIn = 8 { count: u32, padding: u32, }
    /// GETATTR.
    GetAttrIn = 16 { flags: u32, padding: u32, handle: u64, }
    /// SETATTR.
    SetAttrIn = 88 {
        valid: u32, padding: u32, handle: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atime_ns: u32, mtime_ns: u32, ctime_ns: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    /// MKNOD; the name follows.
    MakeNodeIn = 16 { mode: u32, rdev: u32, umask: u32, padding: u32, }
    /// MKDIR; the name follows.
    MakeDirectoryIn = 8 { mode: u32, umask: u32, }
    /// RENAME; both names follow.
    RenameIn = 8 { new_directory: u64, }
    /// RENAME2; both names follow.
    Rename2In = 16 { new_directory: u64, flags: u32, padding: u32, }
    /// LINK; the new name follows.
    LinkIn = 8 { old_node: u64, }
    /// OPEN and OPENDIR.
    OpenIn = 8 { flags: u32, open_flags: u32, }
    /// CREATE and TMPFILE; the name follows.
    CreateIn = 16 { flags: u32, mode: u32, umask: u32, open_flags: u32, }
    /// The answer to OPEN, OPENDIR, and behind an entry to CREATE.
    OpenOut = 16 { handle: u64, open_flags: u32, backing_id: i32, }
    /// RELEASE and RELEASEDIR.
    ReleaseIn = 24 { handle: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    /// FLUSH.
    FlushIn = 24 { handle: u64, unused: u32, padding: u32, lock_owner: u64, }
    /// READ, READDIR, READDIRPLUS.
    ReadIn = 40 { handle: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32, }
    /// WRITE; the bytes follow.
    WriteIn = 40 { handle: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32, }
    /// The answer to WRITE and COPY_FILE_RANGE.
    WriteOut = 8 { size: u32, padding: u32, }
    /// The answer to STATFS.
    StatFsOut = 80 {
        blocks: u64, blocks_free: u64, blocks_available: u64, files: u64, files_free: u64, block_bytes: u32,
        name_bytes_max: u32, fragment_bytes: u32, padding: u32, spare: [u32; 6],
    }
    /// FSYNC and FSYNCDIR.
    FsyncIn = 16 { handle: u64, flags: u32, padding: u32, }
    /// SETXATTR without FUSE_SETXATTR_EXT; name and value follow.
    SetXattrIn = 8 { size: u32, flags: u32, }
    /// GETXATTR and LISTXATTR; the former's name follows.
    GetXattrIn = 8 { size: u32, padding: u32, }
    /// The answer to GETXATTR and LISTXATTR with size 0.
    GetXattrOut = 8 { size: u32, padding: u32, }
    /// A byte range lock. `end` is inclusive.
    FileLock = 24 { start: u64, end: u64, kind: u32, pid: u32, }
    /// GETLK, SETLK, SETLKW.
    LockIn = 48 { handle: u64, owner: u64, lock: FileLock, flags: u32, padding: u32, }
    /// ACCESS.
    AccessIn = 8 { mask: u32, padding: u32, }
    /// INTERRUPT.
    InterruptIn = 8 { unique: u64, }
    /// FALLOCATE.
    FallocateIn = 32 { handle: u64, offset: u64, length: u64, mode: u32, padding: u32, }
    /// LSEEK.
    SeekIn = 24 { handle: u64, offset: u64, whence: u32, padding: u32, }
    /// The answer to LSEEK.
    SeekOut = 8 { offset: u64, }
    /// COPY_FILE_RANGE.
    CopyFileRangeIn = 56 {
        handle_in: u64, offset_in: u64, node_out: u64, handle_out: u64, offset_out: u64, len: u64, flags: u64,
    }
    /// One entry of READDIR; the name follows, padded to 8 bytes.
    DirEntry = 24 { ino: u64, offset: u64, name_bytes: u32, kind: u32, }
    /// A notification that attributes and perhaps pages of a node are stale.
    InvalidateInodeOut = 24 { node: u64, offset: i64, len: i64, }
    /// A notification that an entry is stale; the name and a 0 byte follow.
    InvalidateEntryOut = 16 { parent: u64, name_bytes: u32, flags: u32, }
}

/// Numbers of requests.
#[expect(missing_docs, reason = "the names are the kernel header's")]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

/// Flags of INIT; those from bit 32 on travel in `flags2`.
#[expect(missing_docs, reason = "the names are the kernel header's")]
pub mod init {
    pub const ASYNC_READ: u64 = 1;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Flags of the answer to OPEN.
pub mod open {
    /// Reads and writes pass the page cache by.
    pub const DIRECT_IO: u32 = 1;
    /// Opening does not drop the file's cached pages.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// The directory's entries may be cached.
    pub const CACHE_DIR: u32 = 1 << 3;
    /// Closing sends no FLUSH.
    pub const NO_FLUSH: u32 = 1 << 5;
    /// Direct writes to one file go on at once.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Which fields of a SETATTR are meant.
#[expect(missing_docs, reason = "the names are the kernel header's")]
pub mod setattr {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const HANDLE: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCK_OWNER: u32 = 1 << 9;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// GETATTR: the handle is valid.
pub const GETATTR_HANDLE: u32 = 1;
/// RELEASE: unlock what `flock` holds of the handle.
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// READ and WRITE: the lock owner is valid.
pub const READ_LOCK_OWNER: u32 = 1 << 1;
/// WRITE: from the page cache; the handle is some handle of the node.
pub const WRITE_CACHE: u32 = 1;
/// WRITE: the set-uid and set-gid bits go.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// OPEN and CREATE: the set-uid and set-gid bits go.
pub const OPEN_KILL_SUIDGID: u32 = 1;
/// FSYNC: only the data.
pub const FSYNC_DATA_ONLY: u32 = 1;
/// GETLK, SETLK, SETLKW: `flock`, not `fcntl`.
pub const LOCK_FLOCK: u32 = 1;
/// The notification that a node is stale, in place of an error.
pub const NOTIFY_INVALIDATE_INODE: i32 = 2;
/// The notification that an entry is stale.
pub const NOTIFY_INVALIDATE_ENTRY: i32 = 3;
/// The code of a notification: the kernel sends requests again that were read and not answered. Of kernels with [`init::HAS_RESEND`].
pub const NOTIFY_RESEND: i32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    /// Each field has a value of its own, so that two that change places are seen.
    #[test]
    fn headers_have_the_kernels_bytes() {
        let header = InHeader {
            len: 0x0102_0304,
            opcode: opcode::WRITE,
            unique: 0x1122_3344_5566_7788,
            node: 7,
            uid: 1000,
            gid: 1001,
            pid: 4242,
            extension_words: 2,
            padding: 0,
        };
        let mut golden = Vec::new();
        golden.extend(0x0102_0304u32.to_ne_bytes());
        golden.extend(16u32.to_ne_bytes());
        golden.extend(0x1122_3344_5566_7788u64.to_ne_bytes());
        golden.extend(7u64.to_ne_bytes());
        for number in [1000u32, 1001, 4242] {
            golden.extend(number.to_ne_bytes());
        }
        golden.extend(2u16.to_ne_bytes());
        golden.extend(0u16.to_ne_bytes());
        assert_eq!(header.as_bytes(), golden);
        let reply = OutHeader { len: 16, error: -2, unique: 9 };
        let mut golden = Vec::new();
        golden.extend(16u32.to_ne_bytes());
        golden.extend((-2i32).to_ne_bytes());
        golden.extend(9u64.to_ne_bytes());
        assert_eq!(reply.as_bytes(), golden);
    }

    #[test]
    fn fields_lie_where_the_kernel_header_has_them() {
        use std::mem::offset_of;
        assert_eq!(offset_of!(InitOut, max_background), 16);
        assert_eq!(offset_of!(InitOut, max_write), 20);
        assert_eq!(offset_of!(InitOut, max_pages), 28);
        assert_eq!(offset_of!(InitOut, flags2), 32);
        assert_eq!(offset_of!(InitOut, max_stack_depth), 36);
        assert_eq!(offset_of!(Attr, atime_ns), 48);
        assert_eq!(offset_of!(Attr, mode), 60);
        assert_eq!(offset_of!(Attr, rdev), 76);
        assert_eq!(offset_of!(EntryOut, entry_valid_ns), 32);
        assert_eq!(offset_of!(EntryOut, attr), 40);
        assert_eq!(offset_of!(SetAttrIn, atime_ns), 56);
        assert_eq!(offset_of!(SetAttrIn, mode), 68);
        assert_eq!(offset_of!(SetAttrIn, uid), 76);
        assert_eq!(offset_of!(WriteIn, lock_owner), 24);
        assert_eq!(offset_of!(StatFsOut, block_bytes), 40);
        assert_eq!(offset_of!(LockIn, flags), 40);
        assert_eq!(offset_of!(CopyFileRangeIn, node_out), 16);
    }
}
