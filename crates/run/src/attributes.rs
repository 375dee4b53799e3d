//! What is known of a file, in the structures of libc.

use byway_service::file::wire::{self, Attributes, NewAttributes};
use rustix::io::Errno;
use zerocopy::FromZeros;

/// The major number of the devices that shares seem to be: one of those for local use, beyond those of disks.
const MAJOR: u32 = 0xfe0;

/// A share's device number.
pub(crate) fn device(map: usize) -> u64 {
    libc::makedev(MAJOR, map as u32)
}

/// For `stat`.
pub(crate) fn stat(map: usize, attributes: &Attributes) -> libc::stat {
    // SAFETY: numbers alone, of which all bits may be 0.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let device_node = attributes.device.get();
    stat.st_dev = device(map);
    stat.st_ino = attributes.ino.get();
    stat.st_mode = attributes.mode.get();
    stat.st_nlink = attributes.links.get() as _;
    stat.st_uid = attributes.uid.get();
    stat.st_gid = attributes.gid.get();
    stat.st_rdev = libc::makedev(device_node >> 16, device_node & 0xffff);
    stat.st_size = attributes.size.get() as i64;
    stat.st_blksize = attributes.block_bytes.get() as _;
    stat.st_blocks = attributes.blocks.get() as i64;
    (stat.st_atime, stat.st_atime_nsec) = (attributes.accessed_s.get(), attributes.accessed_ns.get().into());
    (stat.st_mtime, stat.st_mtime_nsec) = (attributes.modified_s.get(), attributes.modified_ns.get().into());
    (stat.st_ctime, stat.st_ctime_nsec) = (attributes.changed_s.get(), attributes.changed_ns.get().into());
    stat
}

/// For `statx`: all that `stat` has, and the time of birth if it is known.
pub(crate) fn statx(map: usize, attributes: &Attributes) -> libc::statx {
    // SAFETY: as in `stat`.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let device_node = attributes.device.get();
    let time = |seconds: i64, nanoseconds: u32| {
        // SAFETY: as in `stat`.
        let mut time: libc::statx_timestamp = unsafe { std::mem::zeroed() };
        (time.tv_sec, time.tv_nsec) = (seconds, nanoseconds);
        time
    };
    stat.stx_mask = libc::STATX_BASIC_STATS;
    (stat.stx_dev_major, stat.stx_dev_minor) = (MAJOR, map as u32);
    stat.stx_ino = attributes.ino.get();
    stat.stx_mode = attributes.mode.get() as u16;
    stat.stx_nlink = attributes.links.get();
    (stat.stx_uid, stat.stx_gid) = (attributes.uid.get(), attributes.gid.get());
    (stat.stx_rdev_major, stat.stx_rdev_minor) = (device_node >> 16, device_node & 0xffff);
    stat.stx_size = attributes.size.get();
    stat.stx_blksize = attributes.block_bytes.get();
    stat.stx_blocks = attributes.blocks.get();
    stat.stx_atime = time(attributes.accessed_s.get(), attributes.accessed_ns.get());
    stat.stx_mtime = time(attributes.modified_s.get(), attributes.modified_ns.get());
    stat.stx_ctime = time(attributes.changed_s.get(), attributes.changed_ns.get());
    if attributes.born_s.get() != 0 {
        stat.stx_mask |= libc::STATX_BTIME;
        stat.stx_btime = time(attributes.born_s.get(), attributes.born_ns.get());
    }
    stat
}

/// `FUSE_SUPER_MAGIC`: programs treat the files as those of a mount of the share.
const KIND: i64 = 0x6573_5546;

/// For `statfs`.
pub(crate) fn statfs(map: usize, sizes: &wire::FileSystem) -> libc::statfs {
    // SAFETY: as in `stat`.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    stat.f_type = KIND as _;
    stat.f_bsize = sizes.block_bytes.get() as _;
    stat.f_frsize = sizes.block_bytes.get() as _;
    stat.f_blocks = sizes.blocks.get();
    stat.f_bfree = sizes.blocks_free.get();
    stat.f_bavail = sizes.blocks_available.get();
    stat.f_files = sizes.files.get();
    stat.f_ffree = sizes.files_free.get();
    stat.f_namelen = sizes.name_max.get() as _;
    // SAFETY: two numbers of 32 bits, of which all bits may be any.
    stat.f_fsid = unsafe { std::mem::transmute::<u64, libc::fsid_t>(device(map)) };
    stat
}

/// For `statvfs`.
pub(crate) fn statvfs(map: usize, sizes: &wire::FileSystem) -> libc::statvfs {
    // SAFETY: as in `stat`.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    stat.f_bsize = sizes.block_bytes.get();
    stat.f_frsize = sizes.block_bytes.get();
    stat.f_blocks = sizes.blocks.get();
    stat.f_bfree = sizes.blocks_free.get();
    stat.f_bavail = sizes.blocks_available.get();
    stat.f_files = sizes.files.get();
    stat.f_ffree = sizes.files_free.get();
    stat.f_favail = sizes.files_free.get();
    stat.f_fsid = device(map);
    stat.f_namemax = sizes.name_max.get();
    stat
}

/// New rights.
pub(crate) fn of_mode(mode: u32) -> NewAttributes {
    let mode = (mode & 0o7777).into();
    NewAttributes { which: wire::SET_MODE.into(), mode, ..NewAttributes::new_zeroed() }
}

/// A new size.
///
/// # Errors
/// `EINVAL` for one below 0.
pub(crate) fn of_size(size: i64) -> Result<NewAttributes, Errno> {
    let size = u64::try_from(size).map_err(|_| Errno::INVAL)?.into();
    Ok(NewAttributes { which: wire::SET_SIZE.into(), size, ..NewAttributes::new_zeroed() })
}

/// New owner and group; `u32::MAX` leaves one as it is.
pub(crate) fn of_owner(uid: u32, gid: u32) -> NewAttributes {
    let mut which = 0;
    which |= if uid == u32::MAX { 0 } else { wire::SET_UID };
    which |= if gid == u32::MAX { 0 } else { wire::SET_GID };
    NewAttributes { which: which.into(), uid: uid.into(), gid: gid.into(), ..NewAttributes::new_zeroed() }
}

/// New times of access and change, as `utimensat` has them; `None` for now.
///
/// # Errors
/// `EINVAL` for nanoseconds beyond a second.
pub(crate) fn of_times(times: Option<[libc::timespec; 2]>) -> Result<NewAttributes, Errno> {
    let mut new = NewAttributes::new_zeroed();
    let Some([accessed, modified]) = times else {
        new.which = (wire::SET_ACCESSED_NOW | wire::SET_MODIFIED_NOW).into();
        return Ok(new);
    };
    let which = |time: libc::timespec, now, to| match time.tv_nsec {
        libc::UTIME_NOW => Ok(now),
        libc::UTIME_OMIT => Ok(0),
        0..1_000_000_000 => Ok(to),
        _ => Err(Errno::INVAL),
    };
    let asked = which(accessed, wire::SET_ACCESSED_NOW, wire::SET_ACCESSED)?
        | which(modified, wire::SET_MODIFIED_NOW, wire::SET_MODIFIED)?;
    new.which = asked.into();
    (new.accessed_s, new.accessed_ns) = (accessed.tv_sec.into(), (accessed.tv_nsec as u32).into());
    (new.modified_s, new.modified_ns) = (modified.tv_sec.into(), (modified.tv_nsec as u32).into());
    Ok(new)
}
