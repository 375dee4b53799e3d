//! Calls on the directory tree, each relative to a held descriptor, and by one name.
//!
//! A node is held by a descriptor that opens nothing (`O_PATH`). A call that needs an open file opens the node again through
//! `/proc/self/fd`, where the name is the server's own number: the kernel checks the user's rights on the inode, and no name
//! of a client is looked up. Only regular files and directories are opened.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use byway_reactor::{FileOptions, OpenFile};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, ResolveFlags, Statx, StatxFlags, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT, Uid,
};
use rustix::io::Errno;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I64, U32, U64};

use super::super::locks::FileId;
use super::super::state;
use super::super::wire::{self, Arguments, Attributes, FileSystem, NewAttributes};
use super::descriptors::{Counted, check_room};
use super::outcome::{Found, Listed, MadeFile, Outcome};
use super::table::NameIn;

/// What a file is: all that decides whether it may be opened.
pub(super) fn is_openable(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::RegularFile
}

/// Below the directory, on its file system, and through no link of `/proc`.
const CONFINED: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_XDEV).union(ResolveFlags::NO_MAGICLINKS);

/// Flags of `open(2)` that a client may say. What makes or names the file is the server's to add. Not `O_APPEND`: each write says for
/// itself whether it appends.
const OPEN_FLAGS: OFlags =
    OFlags::RWMODE.union(OFlags::TRUNC).union(OFlags::DSYNC).union(OFlags::SYNC).union(OFlags::NOATIME);

/// The path by which the kernel finds an open descriptor again.
fn again(fd: BorrowedFd<'_>) -> CString {
    CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default()
}

/// `STATX_SUBVOL` (Linux 6.10).
const SUBVOLUME: StatxFlags = StatxFlags::from_bits_retain(0x8000);

fn what_counts() -> StatxFlags {
    StatxFlags::BASIC_STATS | StatxFlags::BTIME | SUBVOLUME
}

/// Attributes and identity of what `statx` has told.
fn known(stat: &Statx) -> (Attributes, FileId) {
    let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
    let attributes = Attributes {
        ino: U64::new(stat.stx_ino),
        size: U64::new(stat.stx_size),
        blocks: U64::new(stat.stx_blocks),
        accessed_s: I64::new(stat.stx_atime.tv_sec),
        modified_s: I64::new(stat.stx_mtime.tv_sec),
        changed_s: I64::new(stat.stx_ctime.tv_sec),
        born_s: I64::new(stat.stx_btime.tv_sec),
        accessed_ns: U32::new(stat.stx_atime.tv_nsec),
        modified_ns: U32::new(stat.stx_mtime.tv_nsec),
        changed_ns: U32::new(stat.stx_ctime.tv_nsec),
        born_ns: U32::new(stat.stx_btime.tv_nsec),
        mode: U32::new(u32::from(stat.stx_mode)),
        links: U32::new(stat.stx_nlink),
        uid: U32::new(stat.stx_uid),
        gid: U32::new(stat.stx_gid),
        device: U32::new(stat.stx_rdev_major << 16 | stat.stx_rdev_minor & 0xffff),
        block_bytes: U32::new(stat.stx_blksize),
        subvolume: U64::new(if stat.stx_mask & SUBVOLUME.bits() == 0 { 0 } else { stat.stx_subvol }),
    };
    (attributes, FileId { device, ino: stat.stx_ino })
}

pub(super) fn attributes(fd: impl AsFd) -> Result<Attributes, Errno> {
    Ok(known(&rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, what_counts())?).0)
}

/// The owner of a file.
pub(super) fn owner(fd: impl AsFd) -> Option<u32> {
    attributes(fd).ok().map(|attributes| attributes.uid.get())
}

/// What a descriptor that opens nothing names.
pub(super) fn found(fd: OwnedFd) -> Result<Found, Errno> {
    let counted = Counted::take().ok_or(Errno::NFILE)?;
    let stat = rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, what_counts())?;
    let (attributes, id) = known(&stat);
    Ok(Found { fd, id, attributes, counted })
}

/// Finds a name in a directory.
pub(super) fn look_up(directory: impl AsFd, name: &CStr) -> Result<Found, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    found(rustix::fs::openat2(directory, name, flags, Mode::empty(), CONFINED)?)
}

/// As [`look_up`], if that waits for nothing: the kernel has the name in memory. `None`: it might wait, or the thread lacks a right.
pub(super) fn look_up_in_memory(directory: impl AsFd, name: &CStr) -> Option<Result<Found, Errno>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat2(directory, name, flags, Mode::empty(), CONFINED | ResolveFlags::CACHED) {
        Ok(fd) => Some(found(fd)),
        Err(Errno::NOENT) => Some(Err(Errno::NOENT)),
        Err(_) => None,
    }
}

/// The open flags of a call, as far as a client may say them.
fn sanitized(flags: u32) -> OFlags {
    OFlags::from_bits_retain(flags) & OPEN_FLAGS | OFlags::CLOEXEC
}

/// Opens a regular file that a node names.
pub(super) fn open(node: BorrowedFd<'_>, flags: u32) -> Result<OpenFile, Errno> {
    let fd = match rustix::fs::open(again(node), sanitized(flags), Mode::empty()) {
        // A file that may only be appended to: each write through this open file appends, whatever it says.
        Err(Errno::PERM) if flags & OFlags::APPEND.bits() != 0 => {
            rustix::fs::open(again(node), sanitized(flags) | OFlags::APPEND, Mode::empty())
        }
        result => result,
    };
    file(fd?)
}

/// So many bytes of a file that was opened, from its start; fewer at its end, none if they cannot be read.
pub(super) fn first_bytes(file: &OpenFile, wanted: usize) -> Vec<u8> {
    let mut bytes = vec![0; wanted];
    let read = file.descriptor().filter(|_| wanted > 0).map(|fd| rustix::io::pread(fd, &mut bytes[..], 0));
    bytes.truncate(read.and_then(Result::ok).unwrap_or(0));
    bytes
}

fn file(fd: OwnedFd) -> Result<OpenFile, Errno> {
    OpenFile::from_fd(fd, FileOptions::default()).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Opens a directory that a node names. A user who may list it need not be allowed to search it, as a look-up of `.` would ask.
pub(super) fn open_directory(node: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(again(node), flags, Mode::empty())
}

/// Rights of a file that is made.
#[derive(Clone, Copy)]
pub(super) struct NewMode {
    /// As a program asked for it.
    mode: u32,
    /// Rights that the program's umask takes from it, unless the directory has a default ACL.
    umask: u32,
}

impl NewMode {
    pub(super) fn of(arguments: &Arguments) -> Self {
        let umask = arguments.extra.get() as u32 & 0o777;
        Self { mode: arguments.mode.get() | umask, umask }
    }

    /// Makes a file under the program's umask: the kernel ignores it in a directory that has a default ACL. Only for threads that have a
    /// umask of their own, of 0, as workers have.
    fn make<T>(self, make: impl FnOnce(Mode) -> T) -> T {
        rustix::process::umask(Mode::from_raw_mode(self.umask));
        let made = make(Mode::from_raw_mode(self.mode & 0o7777));
        rustix::process::umask(Mode::empty());
        made
    }
}

/// Makes and opens a file; opens the one that is there unless `O_EXCL` forbids it.
pub(super) fn create(directory: BorrowedFd<'_>, name: &CStr, flags: u32, mode: NewMode) -> Result<MadeFile, Errno> {
    check_room()?;
    let exclusive = flags & OFlags::EXCL.bits() != 0;
    let make = sanitized(flags) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    loop {
        match mode.make(|mode| rustix::fs::openat2(directory, name, make, mode, CONFINED)) {
            Ok(fd) => {
                let node = rustix::fs::open(again(fd.as_fd()), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                return Ok(MadeFile { open: file(fd)?, found: found(node)? });
            }
            Err(Errno::EXIST) if !exclusive => {}
            Err(error) => return Err(error),
        }
        match look_up(directory, name) {
            Ok(there) if is_openable(there.attributes.mode.get()) => {
                let open = open(there.fd.as_fd(), flags)?;
                // It may have been emptied.
                let attributes = attributes(&there.fd)?;
                return Ok(MadeFile { open, found: Found { attributes, ..there } });
            }
            Ok(there) if FileType::from_raw_mode(there.attributes.mode.get()) == FileType::Directory => {
                return Err(Errno::ISDIR);
            }
            Ok(_) => return Err(Errno::EXIST),
            // Removed in between: make it.
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Which file a name in a directory is.
pub(super) fn identity(directory: BorrowedFd<'_>, name: &CStr) -> Result<FileId, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    Ok(known(&rustix::fs::statx(directory, name, flags, what_counts())?).1)
}

/// Makes and opens a file that has no name yet.
pub(super) fn create_unnamed(directory: BorrowedFd<'_>, flags: u32, mode: NewMode) -> Result<MadeFile, Errno> {
    check_room()?;
    let wanted = sanitized(flags) | OFlags::TMPFILE | OFlags::from_bits_retain(flags) & OFlags::EXCL;
    let fd = mode.make(|mode| rustix::fs::openat2(directory, c".", wanted, mode, CONFINED))?;
    let node = rustix::fs::open(again(fd.as_fd()), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    Ok(MadeFile { open: file(fd)?, found: found(node)? })
}

pub(super) fn make_symlink(directory: BorrowedFd<'_>, name: &CStr, target: &CStr) -> Result<Outcome, Errno> {
    check_room()?;
    rustix::fs::symlinkat(target, directory, name)?;
    Ok(Outcome::Node(look_up(directory, name)?))
}

/// Makes a regular file, a FIFO or a socket's node. Devices are refused.
pub(super) fn make_node(directory: BorrowedFd<'_>, name: &CStr, mode: NewMode) -> Result<Outcome, Errno> {
    let kind = FileType::from_raw_mode(mode.mode);
    if !matches!(kind, FileType::RegularFile | FileType::Fifo | FileType::Socket) {
        return Err(Errno::PERM);
    }
    check_room()?;
    mode.make(|mode| rustix::fs::mknodat(directory, name, kind, mode, 0))?;
    Ok(Outcome::Node(look_up(directory, name)?))
}

pub(super) fn make_directory(directory: BorrowedFd<'_>, name: &CStr, mode: NewMode) -> Result<Outcome, Errno> {
    check_room()?;
    mode.make(|mode| rustix::fs::mkdirat(directory, name, mode))?;
    Ok(Outcome::Node(look_up(directory, name)?))
}

pub(super) fn rename(from: &NameIn, to: &NameIn, flags: u32) -> Result<Outcome, Errno> {
    // WHITEOUT makes a device node.
    let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
    let flags = RenameFlags::from_bits_retain(flags);
    if !known.contains(flags) {
        return Err(Errno::INVAL);
    }
    rustix::fs::renameat_with(&from.directory.fd, &from.name, &to.directory.fd, &to.name, flags)?;
    Ok(Outcome::Done)
}

pub(super) fn link(node: BorrowedFd<'_>, directory: BorrowedFd<'_>, name: &CStr) -> Result<Outcome, Errno> {
    check_room()?;
    rustix::fs::linkat(rustix::fs::CWD, again(node), directory, name, AtFlags::SYMLINK_FOLLOW)?;
    Ok(Outcome::Node(look_up(directory, name)?))
}

pub(super) fn read_link(node: BorrowedFd<'_>) -> Result<Outcome, Errno> {
    let target = rustix::fs::readlinkat(node, c"", Vec::new())?;
    Ok(Outcome::Bytes(target.into_bytes()))
}

/// Changes attributes: of the open file, where there is one, as `ftruncate` needs no right on the inode.
pub(super) fn set_attributes(
    node: BorrowedFd<'_>,
    open_file: Option<BorrowedFd<'_>>,
    new: &NewAttributes,
) -> Result<Attributes, Errno> {
    let which = new.which.get();
    let is = |bit| which & bit != 0;
    // The kernel takes the last number for "unchanged".
    if is(wire::SET_UID) && new.uid.get() == u32::MAX || is(wire::SET_GID) && new.gid.get() == u32::MAX {
        return Err(Errno::INVAL);
    }
    if is(wire::SET_UID | wire::SET_GID) {
        let uid = is(wire::SET_UID).then(|| Uid::from_raw(new.uid.get()));
        let gid = is(wire::SET_GID).then(|| Gid::from_raw(new.gid.get()));
        rustix::fs::chownat(node, c"", uid, gid, AtFlags::EMPTY_PATH)?;
    }
    if is(wire::SET_SIZE) {
        if let Some(file) = open_file {
            rustix::fs::ftruncate(file, new.size.get())?;
        } else {
            let stat = attributes(node)?;
            if !is_openable(stat.mode.get()) {
                return Err(Errno::INVAL);
            }
            let file = rustix::fs::open(again(node), sanitized(OFlags::WRONLY.bits()), Mode::empty())?;
            rustix::fs::ftruncate(file, new.size.get())?;
        }
    }
    if is(wire::SET_MODE) {
        rustix::fs::chmod(again(node), Mode::from_raw_mode(new.mode.get() & 0o7777))?;
    }
    let time = |given: u32, now: u32, s: I64, ns: U32| match (is(given), is(now)) {
        (_, true) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        (true, false) => Timespec { tv_sec: s.get(), tv_nsec: ns.get().min(999_999_999).into() },
        (false, false) => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    let times = Timestamps {
        last_access: time(wire::SET_ACCESSED, wire::SET_ACCESSED_NOW, new.accessed_s, new.accessed_ns),
        last_modification: time(wire::SET_MODIFIED, wire::SET_MODIFIED_NOW, new.modified_s, new.modified_ns),
    };
    if is(wire::SET_ACCESSED | wire::SET_MODIFIED | wire::SET_ACCESSED_NOW | wire::SET_MODIFIED_NOW) {
        rustix::fs::utimensat(node, c"", &times, AtFlags::EMPTY_PATH)?;
    }
    attributes(node)
}

/// What a client wants of each entry of a directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct AskedOfEntries {
    /// Its node; else its attributes alone.
    pub(super) nodes: bool,
    /// Whether the node has extended attributes.
    pub(super) xattrs: bool,
}

/// Entries of a directory from a cookie on, at most `len` bytes of them as they travel.
pub(super) fn list(
    directory: BorrowedFd<'_>,
    cookie: u64,
    len: usize,
    asked: AskedOfEntries,
) -> Result<Outcome, Errno> {
    rustix::fs::seek(directory, rustix::fs::SeekFrom::Start(cookie))?;
    let mount = rustix::fs::statx(directory, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
    let mut buffer = Vec::with_capacity(len.clamp(1024, 64 << 10));
    let mut entries = Vec::new();
    let (mut room, mut has_ended) = (len, true);
    let mut raw = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = raw.next() {
        let entry = entry?;
        let name = entry.file_name();
        let bytes = size_of::<wire::DirectoryEntry>() + name.to_bytes().len();
        if bytes > room {
            has_ended = false;
            break;
        }
        room -= bytes;
        if state::is_reserved(name.to_bytes()) {
            continue;
        }
        let is_dot = name == c"." || name == c"..";
        let mut listed = Listed {
            cookie: entry.next_entry_cookie(),
            name: name.to_bytes().to_vec(),
            ino: entry.ino(),
            kind: entry.file_type().as_raw_mode(),
            found: None,
            without_xattrs: false,
            attributes: None,
        };
        // What has gone in between, or lies on another file system, is listed by its name alone.
        if asked.nodes && !is_dot {
            listed.found = check_room().and_then(|()| look_up(directory, name)).ok();
            listed.without_xattrs = asked.xattrs && listed.found.as_ref().is_some_and(|found| has_no_xattrs(&found.fd));
        } else if !is_dot {
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
            let stat = rustix::fs::statx(directory, name, flags, what_counts() | StatxFlags::MNT_ID).ok();
            listed.attributes = stat.filter(|stat| stat.stx_mnt_id == mount).map(|stat| known(&stat).0);
        }
        entries.push(listed);
    }
    Ok(Outcome::Listing { entries, has_ended })
}

pub(super) fn stat_file_system(node: BorrowedFd<'_>) -> Result<Outcome, Errno> {
    let stat = rustix::fs::fstatvfs(node)?;
    let sizes = FileSystem {
        block_bytes: U64::new(stat.f_frsize),
        blocks: U64::new(stat.f_blocks),
        blocks_free: U64::new(stat.f_bfree),
        blocks_available: U64::new(stat.f_bavail),
        files: U64::new(stat.f_files),
        files_free: U64::new(stat.f_ffree),
        name_max: U64::new(stat.f_namemax),
    };
    Ok(Outcome::Bytes(sizes.as_bytes().to_vec()))
}

pub(super) fn access(node: BorrowedFd<'_>, rights: u32) -> Result<Outcome, Errno> {
    let rights = rustix::fs::Access::from_bits(rights & 7).ok_or(Errno::INVAL)?;
    rustix::fs::accessat(rustix::fs::CWD, again(node), rights, AtFlags::EACCESS)?;
    Ok(Outcome::Done)
}

/// Room for the longest value or list of names of extended attributes that one answer carries.
const XATTR_BYTES_MAX: usize = byway_fabric::limits::SMALL_BYTES_MAX;

pub(super) fn get_xattr(node: BorrowedFd<'_>, name: &CStr) -> Result<Outcome, Errno> {
    let mut value = Vec::with_capacity(XATTR_BYTES_MAX);
    match rustix::fs::getxattr(again(node), name, rustix::buffer::spare_capacity(&mut value)) {
        // Longer than an answer takes.
        Err(Errno::RANGE) => Err(Errno::TOOBIG),
        result => result.map(|_| Outcome::Bytes(value)),
    }
}

pub(super) fn set_xattr(node: BorrowedFd<'_>, name: &CStr, value: &[u8], flags: u32) -> Result<Outcome, Errno> {
    let flags = rustix::fs::XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
    rustix::fs::setxattr(again(node), name, value, flags)?;
    Ok(Outcome::Done)
}

/// Whether a node has no extended attribute that the thread's user may list. False also where the file system has no extended attributes:
/// a program that asks for one gets `EOPNOTSUPP` there.
pub(super) fn has_no_xattrs(node: &OwnedFd) -> bool {
    // A byte is less than any name, which is `ERANGE`.
    rustix::fs::listxattr(again(node.as_fd()), &mut [0; 1]) == Ok(0)
}

pub(super) fn list_xattrs(node: BorrowedFd<'_>) -> Result<Outcome, Errno> {
    let mut names = Vec::with_capacity(XATTR_BYTES_MAX);
    match rustix::fs::listxattr(again(node), rustix::buffer::spare_capacity(&mut names)) {
        Err(Errno::RANGE) => Err(Errno::TOOBIG),
        result => result.map(|_| Outcome::Bytes(names)),
    }
}

pub(super) fn remove_xattr(node: BorrowedFd<'_>, name: &CStr) -> Result<Outcome, Errno> {
    rustix::fs::removexattr(again(node), name)?;
    Ok(Outcome::Done)
}

/// Finds data or a hole. The descriptor's own offset is used by nothing else.
pub(super) fn seek(file: BorrowedFd<'_>, offset: u64, whence: u32) -> Result<Outcome, Errno> {
    let from = match whence {
        3 => rustix::fs::SeekFrom::Data(offset),
        4 => rustix::fs::SeekFrom::Hole(offset),
        _ => return Err(Errno::INVAL),
    };
    rustix::fs::seek(file, from).map(Outcome::Number)
}
