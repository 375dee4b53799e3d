//! Arguments of the program's calls, as Rust has them.
//!
//! The functions of [`crate::symbols`] alone call these, with what the program gave them. As in libc, a pointer that does not lead to
//! what the call's description says is the program's fault; only null is refused.

use std::ffi::{CStr, c_char, c_void};

use rustix::io::Errno;

/// A text, without the 0 byte at its end. `None` for null.
pub(crate) fn text<'a>(at: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: the program's text, which ends with a 0 byte and stays during its call.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_bytes())
}

/// Memory that the program gives a call to read from.
pub(crate) fn input<'a>(at: *const c_void, len: usize) -> Result<&'a [u8], Errno> {
    if len == 0 {
        return Ok(&[]);
    }
    if at.is_null() || len > isize::MAX as usize {
        return Err(Errno::FAULT);
    }
    // SAFETY: the program's memory, of so many bytes, which it leaves alone during its call.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), len) })
}

/// Memory that the program gives a call to write to.
pub(crate) fn output<'a>(at: *mut c_void, len: usize) -> Result<&'a mut [u8], Errno> {
    if len == 0 {
        return Ok(&mut []);
    }
    if at.is_null() || len > isize::MAX as usize {
        return Err(Errno::FAULT);
    }
    // SAFETY: as for `input`; any bytes are bytes.
    Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), len) })
}

/// Gives the program a structure.
pub(crate) fn put<T>(at: *mut T, value: T) -> Result<(), Errno> {
    if at.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the program's memory for such a structure.
    unsafe { at.write(value) };
    Ok(())
}

/// Takes a structure from the program. `None` for null.
pub(crate) fn take<T: Copy>(at: *const T) -> Option<T> {
    // SAFETY: the program's structure.
    (!at.is_null()).then(|| unsafe { at.read() })
}

/// The parts of a gathered read or write.
pub(crate) fn parts<'a>(at: *const libc::iovec, count: i32) -> Result<&'a [libc::iovec], Errno> {
    let count = usize::try_from(count).ok().filter(|count| *count <= libc::UIO_MAXIOV as usize).ok_or(Errno::INVAL)?;
    if count == 0 || at.is_null() {
        return if count == 0 { Ok(&[]) } else { Err(Errno::FAULT) };
    }
    // SAFETY: the program's array of so many parts.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}
