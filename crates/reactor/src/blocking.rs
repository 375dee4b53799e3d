//! File calls that may wait for a device, as plain system calls: made by worker threads, or by the loop itself for
//! files that live in memory.

use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use crate::op::{Allocate, Extent, WriteAt};

/// `BLKDISCARD` of `linux/fs.h`: a range as two u64. `fallocate` of a device cannot ask for it.
const BLKDISCARD: libc::c_ulong = 0x1277;

fn last_error() -> Errno {
    Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Has a write beyond the limit on a file's size (`RLIMIT_FSIZE`) fail with `EFBIG` in this process; the kernel's default is
/// to end the process (`SIGXFSZ`). Programs that serve files call it first.
pub fn ignore_file_size_signal() {
    // SAFETY: to ignore a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Memory of a frame that a call reads from or writes to, for as long as its operation's slot keeps the frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawBuffer {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
}

/// Reads until `memory` is full or the file ends.
///
/// # Safety
/// `memory` is valid for writes of its length during the call, and nothing else accesses it.
pub(crate) unsafe fn read(fd: BorrowedFd<'_>, memory: RawBuffer, offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < memory.len {
        // SAFETY: the rest of `memory` is valid, by the caller's word.
        let n = unsafe {
            libc::pread64(fd.as_raw_fd(), memory.ptr.add(done).cast(), memory.len - done, (offset + done as u64) as i64)
        };
        match n {
            0 => break,
            n if n > 0 => done += n as usize,
            _ => match last_error() {
                Errno::INTR => {}
                error => return Err(error),
            },
        }
    }
    Ok(done)
}

/// Reads what is in the page cache, until `memory` is full or the file ends.
///
/// # Errors
/// `EAGAIN` if a page is not there, `EOPNOTSUPP` where the file system cannot tell; else the kernel's.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn read_cached(fd: BorrowedFd<'_>, memory: RawBuffer, offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < memory.len {
        // SAFETY: the rest of `memory` is valid, by the caller's word.
        let iov = libc::iovec { iov_base: unsafe { memory.ptr.add(done) }.cast(), iov_len: memory.len - done };
        // SAFETY: one iovec that describes valid memory.
        let n = unsafe {
            libc::preadv2(fd.as_raw_fd(), &raw const iov, 1, (offset + done as u64) as i64, libc::RWF_NOWAIT)
        };
        match n {
            0 => break,
            n if n > 0 => done += n as usize,
            _ => match last_error() {
                Errno::INTR => {}
                error => return Err(error),
            },
        }
    }
    Ok(done)
}

/// Writes all of `memory`; `durable` adds `RWF_DSYNC`.
///
/// # Safety
/// `memory` is valid for reads of its length during the call.
pub(crate) unsafe fn write(fd: BorrowedFd<'_>, memory: RawBuffer, offset: u64, durable: bool) -> Result<usize, Errno> {
    let mut done = 0;
    while done < memory.len {
        // SAFETY: the rest of `memory` is valid, by the caller's word.
        let iov = libc::iovec { iov_base: unsafe { memory.ptr.add(done) }.cast(), iov_len: memory.len - done };
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        // SAFETY: one iovec that describes valid memory.
        let n = unsafe { libc::pwritev2(fd.as_raw_fd(), &raw const iov, 1, (offset + done as u64) as i64, flags) };
        match n {
            0 => return Err(Errno::NOSPC),
            n if n > 0 => done += n as usize,
            _ => match last_error() {
                Errno::INTR => {}
                error => return Err(error),
            },
        }
    }
    Ok(done)
}

/// Writes as one call does; gives the bytes that the file took.
///
/// # Safety
/// `memory` is valid for reads of its length during the call.
pub(crate) unsafe fn write_once(fd: BorrowedFd<'_>, memory: RawBuffer, at: WriteAt) -> Result<usize, Errno> {
    let (offset, flags) = at.offset_and_flags();
    let iov = libc::iovec { iov_base: memory.ptr.cast(), iov_len: memory.len };
    loop {
        // SAFETY: one iovec that describes valid memory, by the caller's word.
        let n = unsafe { libc::pwritev2(fd.as_raw_fd(), &raw const iov, 1, offset as i64, flags) };
        match n {
            0 if memory.len > 0 => return Err(Errno::NOSPC),
            n if n >= 0 => return Ok(n as usize),
            _ => match last_error() {
                Errno::INTR => {}
                error => return Err(error),
            },
        }
    }
}

pub(crate) fn sync(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::fs::fdatasync(fd)
}

/// Changes how a range is backed; falls back from discard that is not supported to nothing, never to something that
/// breaks the promise of `mode`.
pub(crate) fn allocate(fd: BorrowedFd<'_>, device: bool, mode: Allocate, offset: u64, len: u64) -> Result<(), Errno> {
    if device {
        return allocate_on_device(fd, mode, offset, len);
    }
    rustix::fs::fallocate(fd, fallocate_flags(mode), offset, len)
}

/// A device does whole blocks alone, and refuses others (`blkdev_fallocate` of Linux). What is left at the ends is
/// written where it is to be zeroes.
fn allocate_on_device(fd: BorrowedFd<'_>, mode: Allocate, offset: u64, len: u64) -> Result<(), Errno> {
    let block = u64::from(rustix::fs::ioctl_blksszget(fd)?.max(512));
    let end = offset.checked_add(len).filter(|_| len > 0).ok_or(Errno::INVAL)?;
    let first = offset.checked_next_multiple_of(block).unwrap_or(end).min(end);
    let last = (end - end % block).max(first);
    if last > first {
        allocate_blocks(fd, mode, first, last - first)?;
    }
    if mode == Allocate::Discard {
        return Ok(());
    }
    write_zeroes(fd, offset, first)?;
    write_zeroes(fd, last, end)
}

fn allocate_blocks(fd: BorrowedFd<'_>, mode: Allocate, offset: u64, len: u64) -> Result<(), Errno> {
    if mode != Allocate::Discard {
        // Punching a hole ends in EOPNOTSUPP where the device has no such command; only ZERO_RANGE writes zeroes out then.
        return rustix::fs::fallocate(fd, fallocate_flags(mode), offset, len);
    }
    let range = [offset, len];
    // SAFETY: the request reads two u64 from the pointer.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if rc == 0 { Ok(()) } else { Err(last_error()) }
}

/// Writes less than a block.
fn write_zeroes(fd: BorrowedFd<'_>, start: u64, end: u64) -> Result<(), Errno> {
    let mut zeroes = vec![0; (end - start) as usize];
    let memory = RawBuffer { ptr: zeroes.as_mut_ptr(), len: zeroes.len() };
    // SAFETY: the memory is the vector's, which outlives the call.
    unsafe { write(fd, memory, start, false) }.map(|_| ())
}

pub(crate) fn fallocate_flags(mode: Allocate) -> rustix::fs::FallocateFlags {
    use rustix::fs::FallocateFlags;
    match mode {
        Allocate::PunchHole | Allocate::Discard => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        Allocate::ZeroRange => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
    }
}

/// Data and holes of a range (`SEEK_DATA`, `SEEK_HOLE`); a device or a file system that cannot tell is all data. So is
/// what lies past the end of a file that became shorter: a hole is skipped as zeroes, but a reader must meet the error.
pub(crate) fn extents(
    fd: BorrowedFd<'_>,
    device: bool,
    offset: u64,
    len: u64,
    max: usize,
) -> Result<Vec<Extent>, Errno> {
    let end = offset + len;
    if device {
        return Ok(vec![Extent { len, hole: false }]);
    }
    let mut found: Vec<Extent> = Vec::new();
    let mut at = offset;
    while at < end {
        let data = match rustix::fs::seek(fd, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            Err(Errno::NXIO) => end.min(at.max(rustix::fs::fstat(fd)?.st_size as u64)),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(error) => return Err(error),
        };
        let hole = data > at;
        let next = if hole { data } else { data_end(fd, at)?.max(at + 1).min(end) };
        let full = found.len() >= max.max(1);
        match found.last_mut() {
            Some(last) if last.hole == hole => last.len += next - at,
            _ if full => break,
            _ => found.push(Extent { len: next - at, hole }),
        }
        at = next;
    }
    Ok(found)
}

/// Where the data ends that begins at `at`.
fn data_end(fd: BorrowedFd<'_>, at: u64) -> Result<u64, Errno> {
    match rustix::fs::seek(fd, rustix::fs::SeekFrom::Hole(at)) {
        // The file became shorter, or the file system cannot tell: call the rest data.
        Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => Ok(u64::MAX),
        found => found,
    }
}

pub(crate) fn prefetch(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let len = std::num::NonZeroU64::new(len);
    rustix::fs::fadvise(fd, offset, len, rustix::fs::Advice::WillNeed)
}
