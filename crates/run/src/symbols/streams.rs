//! Streams of the C library (`FILE`) on files of a share.
//!
//! Its own streams read and write by calls that no library can stand before, so these are made by `fopencookie`. The descriptor's number
//! is put into the structure, so that `fileno` works. When standard input, output or error becomes a file of a share, the variables
//! `stdin`, `stdout` and `stderr` get such a stream, and what waits in the old one's buffer goes to it.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{FILE, O_ACCMODE, O_APPEND, O_CLOEXEC, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY, off64_t};
use rustix::io::Errno;

use super::interpose::Answer;
use super::{data, descriptors, opening};
use crate::c::{put, take, text};
use crate::open;
use crate::target::is_ours;

/// The beginning of glibc's `FILE`, which programs compiled long ago rely on.
#[repr(C)]
struct Beginning {
    flags: c_int,
    read: [*mut c_char; 3],
    write_base: *mut c_char,
    rest: [*mut c_void; 9],
    number: c_int,
}

const _: () = assert!(cfg!(target_pointer_width = "64") && offset_of!(Beginning, number) == 112);

/// glibc's `cookie_io_functions_t`.
#[repr(C)]
struct Functions {
    read: extern "C" fn(*mut c_void, *mut c_char, usize) -> isize,
    write: extern "C" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int,
    close: extern "C" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn __fpending(stream: *mut FILE) -> usize;
    fn __fpurge(stream: *mut FILE);
}

fn number_of(cookie: *mut c_void) -> c_int {
    cookie.addr() as c_int
}

extern "C" fn read(cookie: *mut c_void, at: *mut c_char, len: usize) -> isize {
    // SAFETY: the C library's buffer has so many bytes.
    unsafe { data::read(number_of(cookie), at.cast(), len) }
}

extern "C" fn write(cookie: *mut c_void, at: *const c_char, len: usize) -> isize {
    // SAFETY: as for `read`. A write of 0 bytes is an error here.
    unsafe { data::write(number_of(cookie), at.cast(), len) }.max(0)
}

extern "C" fn seek(cookie: *mut c_void, offset: *mut off64_t, whence: c_int) -> c_int {
    let Some(by) = take(offset) else { return -1 };
    // SAFETY: numbers alone.
    let to = unsafe { data::lseek(number_of(cookie), by, whence) };
    if to < 0 || put(offset, to).is_err() { -1 } else { 0 }
}

extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream's number ends with the stream.
    unsafe { descriptors::close(number_of(cookie)) }
}

/// A stream on a descriptor.
fn stream_on(number: c_int, mode: *const c_char) -> Result<*mut FILE, Errno> {
    let functions = Functions { read, write, seek, close };
    // SAFETY: the functions take a number for a cookie; the mode ends with a 0 byte.
    let stream = unsafe { fopencookie(std::ptr::without_provenance_mut(number as usize), mode, functions) };
    if stream.is_null() {
        return Err(opening::last_error());
    }
    // SAFETY: a structure of glibc begins so; no other thread has it yet.
    unsafe { (*stream.cast::<Beginning>()).number = number };
    Ok(stream)
}

/// The flags of `open` for a mode of `fopen`.
fn flags_of(mode: &[u8]) -> Result<c_int, Errno> {
    let (first, more) = mode.split_first().ok_or(Errno::INVAL)?;
    let more = more.split(|byte| *byte == b',').next().unwrap_or_default();
    let mut flags = match first {
        b'r' => O_RDONLY,
        b'w' => O_WRONLY | O_CREAT | O_TRUNC,
        b'a' => O_WRONLY | O_CREAT | O_APPEND,
        _ => return Err(Errno::INVAL),
    };
    for byte in more {
        match byte {
            b'+' => flags = flags & !O_ACCMODE | O_RDWR,
            b'x' => flags |= O_EXCL,
            b'e' => flags |= O_CLOEXEC,
            _ => {}
        }
    }
    Ok(flags)
}

fn open_stream(path: *const c_char, mode: *const c_char) -> Answer<*mut FILE> {
    if !is_ours(libc::AT_FDCWD, path) {
        return None;
    }
    let flags = match flags_of(text(mode)?) {
        Ok(flags) => flags,
        Err(error) => return Some(Err(error)),
    };
    let number = match opening::open_at(libc::AT_FDCWD, path, flags, 0o666)? {
        Ok(number) => number,
        Err(error) => return Some(Err(error)),
    };
    if !open::is_ours(number) {
        // A symbolic link led out of the share.
        // SAFETY: the number was just opened; the mode ends with a 0 byte.
        return Some(Ok(unsafe { libc::fdopen(number, mode) }));
    }
    Some(stream_on(number, mode).inspect_err(|_| {
        // SAFETY: it was just opened.
        unsafe { descriptors::close(number) };
    }))
}

interpose! {
    fn fopen | fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
        open_stream(path, mode)
    }

    fn fdopen(number: c_int, mode: *const c_char) -> *mut FILE {
        open::is_ours(number).then(|| stream_on(number, mode))
    }

    fn freopen | freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
        is_ours(libc::AT_FDCWD, path).then(|| {
            crate::report::refused("freopen");
            Err(Errno::OPNOTSUPP)
        })
    }
}

/// The streams of libc and of this library, for standard input, output and error.
struct Standard {
    mode: &'static std::ffi::CStr,
    of_libc: AtomicPtr<FILE>,
    of_share: AtomicPtr<FILE>,
}

static STANDARD: [Standard; 3] = [
    Standard {
        mode: c"r",
        of_libc: AtomicPtr::new(std::ptr::null_mut()),
        of_share: AtomicPtr::new(std::ptr::null_mut()),
    },
    Standard {
        mode: c"w",
        of_libc: AtomicPtr::new(std::ptr::null_mut()),
        of_share: AtomicPtr::new(std::ptr::null_mut()),
    },
    Standard {
        mode: c"w",
        of_libc: AtomicPtr::new(std::ptr::null_mut()),
        of_share: AtomicPtr::new(std::ptr::null_mut()),
    },
];

/// The variable of libc with the stream of a number.
fn variable(number: c_int) -> *mut *mut FILE {
    match number {
        0 => &raw mut stdin,
        1 => &raw mut stdout,
        _ => &raw mut stderr,
    }
}

/// A number may have become, or ceased to be, a file of a share.
pub(crate) fn is_now(number: c_int, of_share: bool) {
    let Some(standard) = usize::try_from(number).ok().and_then(|number| STANDARD.get(number)) else { return };
    let variable = variable(number);
    // SAFETY: libc's variable, which programs change too (it may be assigned to), in one thread at a time.
    let now = unsafe { variable.read() };
    let ours = standard.of_share.load(Ordering::Acquire);
    let next = if of_share && (ours.is_null() || now != ours) {
        standard.of_libc.store(now, Ordering::Release);
        let stream = if ours.is_null() { stream_on(number, standard.mode.as_ptr()) } else { Ok(ours) };
        let Ok(stream) = stream else { return };
        if number == 2 {
            // SAFETY: the stream is this library's.
            unsafe { libc::setvbuf(stream, std::ptr::null_mut(), libc::_IONBF, 0) };
        }
        standard.of_share.store(stream, Ordering::Release);
        stream
    } else if !of_share && !ours.is_null() && now == ours {
        standard.of_libc.load(Ordering::Acquire)
    } else {
        return;
    };
    if number > 0 && !next.is_null() {
        move_pending(now, next);
    }
    // SAFETY: as above.
    unsafe { variable.write(next) };
}

/// What waits in a stream's buffer goes to the file that takes its place, as it would with one stream.
fn move_pending(from: *mut FILE, to: *mut FILE) {
    if from.is_null() {
        return;
    }
    // SAFETY: both are streams; the bytes from the base on are in the buffer until it is purged.
    unsafe {
        let len = __fpending(from);
        if len > 0 {
            libc::fwrite((*from.cast::<Beginning>()).write_base.cast(), 1, len, to);
            __fpurge(from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_of_streams_are_flags_of_open() {
        assert_eq!(flags_of(b"r"), Ok(O_RDONLY));
        assert_eq!(flags_of(b"rb+"), Ok(O_RDWR));
        assert_eq!(flags_of(b"wxe"), Ok(O_WRONLY | O_CREAT | O_TRUNC | O_EXCL | O_CLOEXEC));
        assert_eq!(flags_of(b"a+,ccs=UTF-8"), Ok(O_RDWR | O_CREAT | O_APPEND));
        assert_eq!(flags_of(b"q"), Err(Errno::INVAL));
        assert_eq!(flags_of(b""), Err(Errno::INVAL));
    }
}
