//! Reading, writing and the position of open files.

use std::os::fd::RawFd;

use rustix::fs::{OFlags, SeekFrom, fcntl_getfl, seek, tell};
use rustix::io::Errno;

use crate::open::{Live, Open, borrowed};
use crate::process::locked;

/// Bytes that one call of `sendfile` or `copy_file_range` moves at most through this program.
const COPY_BYTES_MAX: usize = 1 << 20;

/// Where a read or write begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// At the position, which moves.
    Position,
    /// At this byte.
    Offset(u64),
}

impl At {
    /// Of an argument of `pread` and the like.
    ///
    /// # Errors
    /// `EINVAL` for one below 0.
    pub(crate) fn offset(offset: i64) -> Result<Self, Errno> {
        u64::try_from(offset).map(Self::Offset).map_err(|_| Errno::INVAL)
    }
}

/// Reads into several parts, one after another.
///
/// # Errors
/// As `readv(2)`.
pub(crate) fn read(number: RawFd, open: &Open, at: At, parts: &mut [&mut [u8]]) -> Result<usize, Errno> {
    if !open.is_readable() {
        return Err(Errno::BADF);
    }
    let live = open.live()?;
    if live.is_directory {
        return Err(Errno::ISDIR);
    }
    let work = |start: u64| {
        let mut done = 0;
        for part in parts.iter_mut() {
            match live.client().read(live.caller(), live.handle()?, start + done as u64, part) {
                Ok(count) => {
                    done += count;
                    if count < part.len() {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    };
    at_position(number, open, at, work)
}

/// Does the work at the position, and moves it.
fn at_position(
    number: RawFd,
    open: &Open,
    at: At,
    work: impl FnOnce(u64) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    match at {
        At::Offset(offset) => work(offset),
        At::Position => {
            let _moving = locked(&open.position);
            let start = tell(borrowed(number))?;
            let count = work(start)?;
            if count > 0 {
                seek(borrowed(number), SeekFrom::Start(start + count as u64))?;
            }
            Ok(count)
        }
    }
}

/// Writes several parts, one after another.
///
/// # Errors
/// As `writev(2)`.
pub(crate) fn write(number: RawFd, open: &Open, at: At, parts: &[&[u8]]) -> Result<usize, Errno> {
    if !open.is_writable() {
        return Err(Errno::BADF);
    }
    let live = open.live()?;
    if fcntl_getfl(borrowed(number))?.contains(OFlags::APPEND) {
        return append(number, open, at, &live, parts);
    }
    let write_at =
        |start| each(parts, |done, piece| live.client().write(live.caller(), live.handle()?, start + done, piece));
    if let At::Offset(offset) = at {
        return write_at(offset);
    }
    let _moving = locked(&open.position);
    // One call moves the position past the bytes: other processes that share it write behind them.
    let len = parts.iter().map(|part| part.len() as u64).sum::<u64>();
    let end = seek(borrowed(number), SeekFrom::Current(len as i64))?;
    let written = write_at(end - len);
    let missing = len - written.as_ref().map_or(0, |count| *count as u64);
    if missing > 0 {
        seek(borrowed(number), SeekFrom::Current(-(missing as i64)))?;
    }
    written
}

/// Writes at the end of the file as it is at the server then: appends of several programs do not overlap.
fn append(number: RawFd, open: &Open, at: At, live: &Live, parts: &[&[u8]]) -> Result<usize, Errno> {
    let _moving = locked(&open.position);
    // A small write is one append, whatever its parts.
    let whole = parts.concat();
    let done = each(&[&whole], |_, piece| live.client().append(live.caller(), live.handle()?, piece))?;
    if at == At::Position {
        let end = live.client().attributes(live.caller(), live.node, live.handle_if_any())?.size.get();
        seek(borrowed(number), SeekFrom::Start(end))?;
    }
    Ok(done)
}

/// Writes all pieces of all parts; an error counts only if nothing was written before it.
fn each(parts: &[&[u8]], mut write: impl FnMut(u64, &[u8]) -> Result<usize, Errno>) -> Result<usize, Errno> {
    let mut done = 0;
    for part in parts {
        let mut left = *part;
        while !left.is_empty() {
            match write(done as u64, left) {
                Ok(0) => return Ok(done),
                Ok(count) => {
                    done += count;
                    left = left.get(count..).ok_or(Errno::PROTO)?;
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
            }
        }
    }
    Ok(done)
}

/// Moves the position.
///
/// # Errors
/// As `lseek(2)`.
pub(crate) fn move_position(number: RawFd, open: &Open, offset: i64, whence: i32) -> Result<i64, Errno> {
    if open.is_path() {
        return Err(Errno::BADF);
    }
    let _moving = locked(&open.position);
    let placeholder = borrowed(number);
    let from = |base: u64| {
        let to = i64::try_from(base).ok().and_then(|base| base.checked_add(offset)).ok_or(Errno::OVERFLOW)?;
        u64::try_from(to).map_err(|_| Errno::INVAL)
    };
    let to = match whence {
        libc::SEEK_SET => from(0)?,
        libc::SEEK_CUR if offset == 0 => return Ok(tell(placeholder)? as i64),
        libc::SEEK_CUR => from(tell(placeholder)?)?,
        libc::SEEK_END => {
            let live = open.live()?;
            from(live.client().attributes(live.caller(), live.node, live.handle_if_any())?.size.get())?
        }
        libc::SEEK_DATA | libc::SEEK_HOLE => {
            let live = open.live()?;
            let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
            live.client().seek(live.caller(), live.handle()?, offset, whence as u32)?
        }
        _ => return Err(Errno::INVAL),
    };
    Ok(seek(placeholder, SeekFrom::Start(to))? as i64)
}

/// Copies through this program, between two positions of which each belongs to a descriptor; `read` and `write` are this library's own
/// or the kernel's, as the descriptors are.
///
/// # Errors
/// Those of the two, if nothing was copied before.
pub(crate) fn copy(
    len: usize,
    read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
    write: impl FnOnce(&[u8]) -> Result<usize, Errno>,
) -> Result<(usize, usize), Errno> {
    let mut bytes = vec![0; len.min(COPY_BYTES_MAX)];
    let count = read(&mut bytes)?;
    let written = write(&bytes[..count])?;
    Ok((count, written))
}
