//! Calls on a share that this library does not have: they fail with a name that says so, and are counted for the report.
//!
//! A program is mapped by the kernel, which does not know the share.

use std::ffi::{c_char, c_int, c_void};

use rustix::io::Errno;

use super::interpose::Answer;
use crate::report;
use crate::{open, target};

fn path(name: &str, path: *const c_char, error: Errno) -> Answer<c_int> {
    target::is_ours(libc::AT_FDCWD, path).then(|| refused(name, error))
}

fn path_of_attribute(name: &str, path: *const c_char) -> Answer<isize> {
    target::is_ours(libc::AT_FDCWD, path).then(|| refused(name, Errno::OPNOTSUPP))
}

fn descriptor<T>(name: &str, number: c_int, error: Errno) -> Answer<T> {
    open::is_ours(number).then(|| refused(name, error))
}

fn refused<T>(name: &str, error: Errno) -> Result<T, Errno> {
    report::refused(name);
    Err(error)
}

interpose! {
    fn chroot(at: *const c_char) -> c_int {
        path("chroot", at, Errno::OPNOTSUPP)
    }

    fn execve(at: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int {
        path("execve", at, Errno::ACCESS)
    }

    fn execv(at: *const c_char, arguments: *const *const c_char) -> c_int {
        path("execv", at, Errno::ACCESS)
    }

    fn fexecve(number: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int {
        descriptor("fexecve", number, Errno::ACCESS)
    }

    fn inotify_add_watch(number: c_int, at: *const c_char, mask: u32) -> c_int {
        path("inotify_add_watch", at, Errno::OPNOTSUPP)
    }

    fn syncfs(number: c_int) -> c_int {
        descriptor("syncfs", number, Errno::OPNOTSUPP)
    }

    fn getxattr | lgetxattr(at: *const c_char, name: *const c_char, value: *mut c_void, len: usize) -> isize {
        path_of_attribute("getxattr", at)
    }

    fn listxattr | llistxattr(at: *const c_char, list: *mut c_char, len: usize) -> isize {
        path_of_attribute("listxattr", at)
    }

    fn setxattr | lsetxattr(at: *const c_char, name: *const c_char, value: *const c_void, len: usize, flags: c_int) -> c_int {
        path("setxattr", at, Errno::OPNOTSUPP)
    }

    fn removexattr | lremovexattr(at: *const c_char, name: *const c_char) -> c_int {
        path("removexattr", at, Errno::OPNOTSUPP)
    }

    fn fgetxattr(number: c_int, name: *const c_char, value: *mut c_void, len: usize) -> isize {
        descriptor("fgetxattr", number, Errno::OPNOTSUPP)
    }

    fn flistxattr(number: c_int, list: *mut c_char, len: usize) -> isize {
        descriptor("flistxattr", number, Errno::OPNOTSUPP)
    }

    fn fsetxattr(number: c_int, name: *const c_char, value: *const c_void, len: usize, flags: c_int) -> c_int {
        descriptor("fsetxattr", number, Errno::OPNOTSUPP)
    }

    fn fremovexattr(number: c_int, name: *const c_char) -> c_int {
        descriptor("fremovexattr", number, Errno::OPNOTSUPP)
    }

    fn vmsplice(number: c_int, parts: *const libc::iovec, count: usize, flags: libc::c_uint) -> isize {
        descriptor("vmsplice", number, Errno::INVAL)
    }

    fn tee(from: c_int, to: c_int, len: usize, flags: libc::c_uint) -> isize {
        if open::is_ours(to) { Some(refused("tee", Errno::INVAL)) } else { descriptor("tee", from, Errno::INVAL) }
    }

    fn nftw | nftw64(at: *const c_char, each: *mut c_void, depth: c_int, flags: c_int) -> c_int {
        path("nftw", at, Errno::NOSYS)
    }

    fn ftw | ftw64(at: *const c_char, each: *mut c_void, depth: c_int) -> c_int {
        path("ftw", at, Errno::NOSYS)
    }
}
