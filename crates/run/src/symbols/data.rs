//! Reading, writing, positions, sizes and syncs.

use std::ffi::{c_char, c_int, c_uint, c_void};

use byway_service::file::client::CopyRange;
use libc::{iovec, off_t};
use rustix::io::Errno;

use super::interpose::Answer;
use crate::attributes::of_size;
use crate::c::{input, output, parts, put, take};
use crate::data::{At, copy, move_position, read as read_parts, write as write_parts};
use crate::open::{Open, on};
use crate::target::on_path;
use crate::{open, report};

fn reads(number: c_int, at: *mut c_void, len: usize, offset: Option<off_t>) -> Answer<isize> {
    on(number, |open| read_at(number, open, at, len, offset))
}

fn read_at(number: c_int, open: &Open, to: *mut c_void, len: usize, offset: Option<off_t>) -> Result<isize, Errno> {
    let at = offset.map_or(Ok(At::Position), At::offset)?;
    read_parts(number, open, at, &mut [output(to, len)?]).map(|count| count as isize)
}

fn writes(number: c_int, at: *const c_void, len: usize, offset: Option<off_t>) -> Answer<isize> {
    on(number, |open| {
        let to = offset.map_or(Ok(At::Position), At::offset)?;
        write_parts(number, open, to, &[input(at, len)?]).map(|count| count as isize)
    })
}

fn reads_parts(number: c_int, at: *const iovec, count: c_int, offset: Option<off_t>) -> Answer<isize> {
    on(number, |open| {
        let from = offset.map_or(Ok(At::Position), At::offset)?;
        let outputs = parts(at, count)?.iter().map(|part| output(part.iov_base, part.iov_len));
        let mut outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        read_parts(number, open, from, &mut outputs).map(|count| count as isize)
    })
}

fn writes_parts(number: c_int, at: *const iovec, count: c_int, offset: Option<off_t>) -> Answer<isize> {
    on(number, |open| {
        let to = offset.map_or(Ok(At::Position), At::offset)?;
        let inputs = parts(at, count)?.iter().map(|part| input(part.iov_base, part.iov_len));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        write_parts(number, open, to, &inputs).map(|count| count as isize)
    })
}

/// The flags of `preadv2` are hints, or not to be had.
fn without_flags(answer: Answer<isize>, flags: c_int) -> Answer<isize> {
    if answer.is_some() && flags & !libc::RWF_HIPRI != 0 { Some(Err(Errno::OPNOTSUPP)) } else { answer }
}

/// An offset of `preadv2`: -1 is the position.
fn or_position(offset: off_t) -> Option<off_t> {
    (offset != -1).then_some(offset)
}

interpose! {
    fn read(number: c_int, at: *mut c_void, len: usize) -> isize {
        reads(number, at, len, None)
    }

    fn __read_chk(number: c_int, at: *mut c_void, len: usize, room: usize) -> isize {
        reads(number, at, len, None)
    }

    fn pread | pread64(number: c_int, at: *mut c_void, len: usize, offset: off_t) -> isize {
        reads(number, at, len, Some(offset))
    }

    fn __pread_chk | __pread64_chk(number: c_int, at: *mut c_void, len: usize, offset: off_t, room: usize) -> isize {
        reads(number, at, len, Some(offset))
    }

    fn readv(number: c_int, at: *const iovec, count: c_int) -> isize {
        reads_parts(number, at, count, None)
    }

    fn preadv | preadv64(number: c_int, at: *const iovec, count: c_int, offset: off_t) -> isize {
        reads_parts(number, at, count, Some(offset))
    }

    fn preadv2 | preadv64v2(number: c_int, at: *const iovec, count: c_int, offset: off_t, flags: c_int) -> isize {
        if flags & !libc::RWF_HIPRI != 0 && open::is_ours(number) {
            return without_flags(Some(Ok(0)), flags);
        }
        reads_parts(number, at, count, or_position(offset))
    }

    fn write(number: c_int, at: *const c_void, len: usize) -> isize {
        writes(number, at, len, None)
    }

    fn pwrite | pwrite64(number: c_int, at: *const c_void, len: usize, offset: off_t) -> isize {
        writes(number, at, len, Some(offset))
    }

    fn writev(number: c_int, at: *const iovec, count: c_int) -> isize {
        writes_parts(number, at, count, None)
    }

    fn pwritev | pwritev64(number: c_int, at: *const iovec, count: c_int, offset: off_t) -> isize {
        writes_parts(number, at, count, Some(offset))
    }

    fn pwritev2 | pwritev64v2(number: c_int, at: *const iovec, count: c_int, offset: off_t, flags: c_int) -> isize {
        if flags & !libc::RWF_HIPRI != 0 && open::is_ours(number) {
            return without_flags(Some(Ok(0)), flags);
        }
        writes_parts(number, at, count, or_position(offset))
    }

    fn lseek | lseek64(number: c_int, offset: off_t, whence: c_int) -> off_t {
        on(number, |open| move_position(number, open, offset, whence))
    }

    fn ftruncate | ftruncate64(number: c_int, size: off_t) -> c_int {
        on(number, |open| {
            if !open.is_writable() {
                return Err(Errno::INVAL);
            }
            let live = open.live()?;
            live.client().set_attributes(live.caller(), live.node, live.handle_if_any(), &of_size(size)?).map(|_| 0)
        })
    }

    fn truncate | truncate64(path: *const c_char, size: off_t) -> c_int {
        on_path(libc::AT_FDCWD, path, |target| {
            let node = target.there(true)?.node;
            let names = &target.names;
            names.session.client.access(names.caller(), node, libc::W_OK as u32)?;
            names.session.client.set_attributes(names.caller(), node, None, &of_size(size)?).map(|_| 0)
        })
    }

    fn fsync(number: c_int) -> c_int {
        sync(number, false)
    }

    fn fdatasync(number: c_int) -> c_int {
        sync(number, true)
    }

    fn sync_file_range(number: c_int, offset: off_t, len: off_t, flags: c_uint) -> c_int {
        sync(number, true)
    }

    fn fallocate | fallocate64(number: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
        on(number, |open| allocate(open, mode, offset, len))
    }

    fn posix_fadvise | posix_fadvise64(number: c_int, offset: off_t, len: off_t, advice: c_int) -> c_int {
        on(number, |_| Ok(0))
    }

    fn readahead(number: c_int, offset: off_t, len: usize) -> isize {
        on(number, |_| Ok(0))
    }

    fn sendfile | sendfile64(out: c_int, input: c_int, offset: *mut off_t, len: usize) -> isize {
        if !open::is_ours(out) && !open::is_ours(input) {
            return None;
        }
        Some(send(out, input, offset, len))
    }

    fn copy_file_range(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: usize, flags: c_uint) -> isize {
        let from = CopyEnd { number: from, given: at };
        copy_range(from, CopyEnd { number: to, given: to_at }, len, flags)
    }

    fn splice(from: c_int, at: *mut off_t, to: c_int, _to_at: *mut off_t, len: usize, flags: c_uint) -> isize {
        // As for files that the kernel cannot splice: programs read and write then.
        (open::is_ours(from) || open::is_ours(to)).then_some(Err(Errno::INVAL))
    }
}

/// `posix_fallocate` gives the error itself.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(super) unsafe extern "C" fn posix_fallocate(number: c_int, offset: off_t, len: off_t) -> c_int {
    let answer = on(number, |open| allocate(open, 0, offset, len));
    match answer {
        Some(Ok(_)) => 0,
        Some(Err(error)) => error.raw_os_error(),
        None => {
            // SAFETY: numbers alone.
            let done = unsafe { libc::syscall(libc::SYS_fallocate, number, 0, offset, len) };
            if done == 0 { 0 } else { super::opening::last_error().raw_os_error() }
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(super) unsafe extern "C" fn posix_fallocate64(number: c_int, offset: off_t, len: off_t) -> c_int {
    // SAFETY: numbers alone.
    unsafe { posix_fallocate(number, offset, len) }
}

fn allocate(open: &Open, mode: c_int, offset: off_t, len: off_t) -> Result<c_int, Errno> {
    if !open.is_writable() {
        return Err(Errno::BADF);
    }
    let (Ok(offset), Ok(len @ 1..)) = (u64::try_from(offset), u64::try_from(len)) else { return Err(Errno::INVAL) };
    let live = open.live()?;
    live.client().allocate(live.caller(), live.handle()?, mode as u32, offset, len).map(|()| 0)
}

fn sync(number: c_int, data_only: bool) -> Answer<c_int> {
    on(number, |open| {
        let live = open.live()?;
        live.client().sync(live.caller(), live.handle()?, data_only).map(|()| 0)
    })
}

/// Reads and writes as the program could itself.
fn send(out: c_int, from: c_int, offset: *mut off_t, len: usize) -> Result<isize, Errno> {
    let start = take(offset);
    let read = |bytes: &mut [u8]| {
        let (at, len) = (bytes.as_mut_ptr().cast(), bytes.len());
        let read = match start {
            // SAFETY: the buffer has so many bytes.
            Some(start) => unsafe { pread(from, at, len, start) },
            // SAFETY: as above.
            None => unsafe { self::read(from, at, len) },
        };
        usize::try_from(read).map_err(|_| super::opening::last_error())
    };
    let write_all = |bytes: &[u8]| {
        // SAFETY: the buffer has so many bytes.
        let written = unsafe { write(out, bytes.as_ptr().cast(), bytes.len()) };
        usize::try_from(written).map_err(|_| super::opening::last_error())
    };
    let (count, written) = copy(len, read, write_all)?;
    match start {
        Some(start) => put(offset, start + written as off_t)?,
        // What was read and not written is read again.
        None if written < count => {
            // SAFETY: numbers alone.
            unsafe { lseek(from, written as off_t - count as off_t, libc::SEEK_CUR) };
        }
        None => {}
    }
    Ok(written as isize)
}

/// A file that is copied from or to.
#[derive(Clone, Copy)]
struct CopyEnd {
    number: c_int,
    /// The program's offset, which moves; null for the descriptor's own.
    given: *mut off_t,
}

/// Within a share the server copies. Between a share and another file the program has to: it is told what the kernel says of two
/// file systems.
fn copy_range(from: CopyEnd, to: CopyEnd, len: usize, flags: c_uint) -> Answer<isize> {
    let source = on(from.number, |open| Ok(std::sync::Arc::clone(open)));
    let destination = on(to.number, |open| Ok(std::sync::Arc::clone(open)));
    let (source, destination) = match (source, destination) {
        (None, None) => return None,
        (Some(Ok(source)), Some(Ok(destination))) if source.described.map == destination.described.map => {
            (source, destination)
        }
        _ => return Some(Err(Errno::XDEV)),
    };
    Some(crate::inside::inside(|| {
        if flags != 0 || !source.is_readable() || !destination.is_writable() {
            return Err(if flags == 0 { Errno::BADF } else { Errno::INVAL });
        }
        let position = |end: CopyEnd, open: &Open| match take(end.given) {
            Some(offset) => Ok(offset),
            None => move_position(end.number, open, 0, libc::SEEK_CUR),
        };
        let (start, to_start) = (position(from, &source)?, position(to, &destination)?);
        let (Ok(offset), Ok(to_offset)) = (u64::try_from(start), u64::try_from(to_start)) else {
            return Err(Errno::INVAL);
        };
        let (live, to_live) = (source.live()?, destination.live()?);
        let (handle, to_handle) = (live.handle()?, to_live.handle()?);
        let range = CopyRange { from: handle, from_offset: offset, to: to_handle, to_offset, len: len as u64 };
        let copied = live.client().copy_range(live.caller(), range)?;
        for (CopyEnd { number, given }, open, start) in [(from, &source, start), (to, &destination, to_start)] {
            let end = start + copied as off_t;
            if given.is_null() {
                move_position(number, open, end, libc::SEEK_SET)?;
            } else {
                put(given, end)?;
            }
        }
        Ok(copied as isize)
    }))
}

interpose! {
    fn mmap | mmap64(at: *mut c_void, len: usize, rights: c_int, flags: c_int, number: c_int, offset: off_t) -> *mut c_void {
        // Memory without a file: whatever the number is, it does not count.
        let number = if flags & libc::MAP_ANONYMOUS != 0 { -1 } else { number };
        on(number, |open| map(open, at, len, rights, flags, offset)).map(|mapped| {
            // A mapping that fails is not null.
            Ok(mapped.unwrap_or_else(|error| {
                super::interpose::fail::<c_int>(error);
                libc::MAP_FAILED
            }))
        })
    }
}

/// A private mapping is a copy of the bytes as they are now. A shared one would have to be coherent, which takes the kernel's help: a
/// mount has it.
fn map(
    open: &Open,
    at: *mut c_void,
    len: usize,
    rights: c_int,
    flags: c_int,
    offset: off_t,
) -> Result<*mut c_void, Errno> {
    if flags & libc::MAP_TYPE != libc::MAP_PRIVATE {
        report::refused("mmap (shared)");
        return Err(Errno::NODEV);
    }
    if !open.is_readable() {
        return Err(Errno::ACCESS);
    }
    let (Ok(offset), true) = (u64::try_from(offset), len > 0) else { return Err(Errno::INVAL) };
    let live = open.live()?;
    let handle = live.handle()?;
    let (anonymous, writable) = (flags | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the program's own request, for memory instead of a file.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, at, len, writable, anonymous, -1, 0) };
    if mapped == -1 {
        return Err(super::opening::last_error());
    }
    let mapped = std::ptr::with_exposed_provenance_mut::<c_void>(mapped as usize);
    let filled = output(mapped, len).and_then(|bytes| live.client().read(live.caller(), handle, offset, bytes));
    // SAFETY: the mapping that was just made.
    let protected = unsafe { libc::mprotect(mapped, len, rights) };
    if let Err(error) = filled.and_then(|_| if protected == 0 { Ok(()) } else { Err(super::opening::last_error()) }) {
        // SAFETY: as above; the program has not seen it.
        unsafe { libc::munmap(mapped, len) };
        return Err(error);
    }
    Ok(mapped)
}
