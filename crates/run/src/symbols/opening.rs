//! `open` and its like.

use std::ffi::{CString, c_char, c_int, c_uint};

use libc::{AT_FDCWD, O_CREAT, O_NOFOLLOW, O_TRUNC, O_WRONLY};
use rustix::io::Errno;

use super::interpose::Answer;
use crate::open::open_place;
use crate::target::on_path;
use crate::walk::Walked;

/// Opens a path of a share.
pub(super) fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> Answer<c_int> {
    on_path(directory, path, |target| {
        let follow = flags & O_NOFOLLOW == 0 && flags & (O_CREAT | libc::O_EXCL) != O_CREAT | libc::O_EXCL;
        match target.walked(follow)? {
            Walked::Inside(place) => open_place(target.map, target.names, place, flags, mode),
            Walked::Outside(path) => {
                let path = CString::new(path).map_err(|_| Errno::INVAL)?;
                // SAFETY: the path ends with a 0 byte.
                let opened = unsafe { libc::syscall(libc::SYS_openat, AT_FDCWD, path.as_ptr(), flags, mode) };
                if opened < 0 { Err(last_error()) } else { Ok(opened as c_int) }
            }
        }
    })
}

/// Of a call of the kernel.
pub(super) fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

interpose! {
    fn open | open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        open_at(AT_FDCWD, path, flags, mode)
    }

    fn openat | openat64(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        open_at(directory, path, flags, mode)
    }

    fn __open_2 | __open64_2(path: *const c_char, flags: c_int) -> c_int {
        open_at(AT_FDCWD, path, flags, 0)
    }

    fn __openat_2 | __openat64_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        open_at(directory, path, flags, 0)
    }

    fn creat | creat64(path: *const c_char, mode: c_uint) -> c_int {
        open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode)
    }
}
