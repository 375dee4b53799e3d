//! `stat` and its like, rights, owners, times, sizes of the file system.

use std::ffi::{CString, c_char, c_int, c_uint};

use byway_service::file::client::{Caller, Client};
use byway_service::file::wire::{Attributes, FileSystem, NewAttributes};
use libc::{AT_EMPTY_PATH, AT_FDCWD, AT_SYMLINK_NOFOLLOW, gid_t, mode_t, timespec, timeval, uid_t};
use rustix::io::Errno;

use super::interpose::Answer;
use super::opening::last_error;
use crate::attributes::{self, of_mode, of_owner, of_times};
use crate::c::{put, take, text};
use crate::open::on;
use crate::target::on_path;
use crate::walk::Walked;
use crate::working_directory::resolve;

/// The attributes of an open file, and its map.
fn of_descriptor<T>(number: c_int, give: impl FnOnce(usize, &Attributes) -> Result<T, Errno>) -> Answer<T> {
    on(number, |open| {
        let live = open.live()?;
        let found = live.client().attributes(live.caller(), live.node, live.handle_if_any())?;
        give(open.map()?, &found)
    })
}

fn is_empty(path: *const c_char, flags: c_int) -> bool {
    flags & AT_EMPTY_PATH != 0 && text(path).is_none_or(<[u8]>::is_empty)
}

fn stat_at(directory: c_int, path: *const c_char, into: *mut libc::stat, flags: c_int) -> Answer<c_int> {
    let give = |map, found: &Attributes| put(into, attributes::stat(map, found)).map(|()| 0);
    if is_empty(path, flags) {
        return of_descriptor(resolve(directory), give);
    }
    on_path(directory, path, |target| match target.walked(flags & AT_SYMLINK_NOFOLLOW == 0)? {
        Walked::Inside(place) => give(target.map, &place.there()?.attributes),
        Walked::Outside(path) => {
            let path = CString::new(path).map_err(|_| Errno::INVAL)?;
            // SAFETY: the path ends with a 0 byte; the program's structure is of this type.
            let done = unsafe { libc::syscall(libc::SYS_newfstatat, AT_FDCWD, path.as_ptr(), into, flags) };
            if done < 0 { Err(last_error()) } else { Ok(0) }
        }
    })
}

interpose! {
    fn stat | stat64(path: *const c_char, into: *mut libc::stat) -> c_int {
        stat_at(AT_FDCWD, path, into, 0)
    }

    fn lstat | lstat64(path: *const c_char, into: *mut libc::stat) -> c_int {
        stat_at(AT_FDCWD, path, into, AT_SYMLINK_NOFOLLOW)
    }

    fn fstat | fstat64(number: c_int, into: *mut libc::stat) -> c_int {
        of_descriptor(number, |map, found| put(into, attributes::stat(map, found)).map(|()| 0))
    }

    fn fstatat | fstatat64(directory: c_int, path: *const c_char, into: *mut libc::stat, flags: c_int) -> c_int {
        stat_at(directory, path, into, flags)
    }

    fn __xstat | __xstat64(version: c_int, path: *const c_char, into: *mut libc::stat) -> c_int {
        stat_at(AT_FDCWD, path, into, 0)
    }

    fn __lxstat | __lxstat64(version: c_int, path: *const c_char, into: *mut libc::stat) -> c_int {
        stat_at(AT_FDCWD, path, into, AT_SYMLINK_NOFOLLOW)
    }

    fn __fxstat | __fxstat64(version: c_int, number: c_int, into: *mut libc::stat) -> c_int {
        of_descriptor(number, |map, found| put(into, attributes::stat(map, found)).map(|()| 0))
    }

    fn __fxstatat | __fxstatat64(version: c_int, directory: c_int, path: *const c_char, into: *mut libc::stat, flags: c_int) -> c_int {
        stat_at(directory, path, into, flags)
    }

    fn statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, into: *mut libc::statx) -> c_int {
        let give = |map, found: &Attributes| put(into, attributes::statx(map, found)).map(|()| 0);
        if is_empty(path, flags) {
            return of_descriptor(resolve(directory), give);
        }
        on_path(directory, path, |target| match target.walked(flags & AT_SYMLINK_NOFOLLOW == 0)? {
            Walked::Inside(place) => give(target.map, &place.there()?.attributes),
            Walked::Outside(path) => {
                let path = CString::new(path).map_err(|_| Errno::INVAL)?;
                // SAFETY: as in `stat_at`.
                let done = unsafe { libc::syscall(libc::SYS_statx, AT_FDCWD, path.as_ptr(), flags, mask, into) };
                if done < 0 { Err(last_error()) } else { Ok(0) }
            }
        })
    }

    fn access(path: *const c_char, mode: c_int) -> c_int {
        access_at(AT_FDCWD, path, mode, 0)
    }

    fn eaccess | euidaccess(path: *const c_char, mode: c_int) -> c_int {
        access_at(AT_FDCWD, path, mode, 0)
    }

    fn faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        access_at(directory, path, mode, flags)
    }
}

/// The effective user's rights: the server checks no other's.
fn access_at(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> Answer<c_int> {
    on_path(directory, path, |target| match target.walked(flags & AT_SYMLINK_NOFOLLOW == 0)? {
        Walked::Inside(place) => {
            let (found, names) = (place.there()?, &target.names);
            if mode == libc::F_OK {
                return Ok(0);
            }
            names.session.client.access(names.caller(), found.node, mode as u32).map(|()| 0)
        }
        Walked::Outside(path) => {
            let path = CString::new(path).map_err(|_| Errno::INVAL)?;
            // SAFETY: the path ends with a 0 byte.
            let done = unsafe { libc::syscall(libc::SYS_faccessat, AT_FDCWD, path.as_ptr(), mode) };
            if done < 0 { Err(last_error()) } else { Ok(0) }
        }
    })
}

/// Changes attributes of an open file.
fn set(number: c_int, new: impl FnOnce() -> Result<NewAttributes, Errno>) -> Answer<c_int> {
    on(number, |open| {
        let live = open.live()?;
        live.client().set_attributes(live.caller(), live.node, live.handle_if_any(), &new()?).map(|_| 0)
    })
}

/// Changes attributes of a path, or with an empty one of the open file.
fn set_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    new: impl FnOnce() -> Result<NewAttributes, Errno>,
) -> Answer<c_int> {
    if is_empty(path, flags) {
        return set(resolve(directory), new);
    }
    on_path(directory, path, |target| {
        let (found, names) = (target.there(flags & AT_SYMLINK_NOFOLLOW == 0)?, &target.names);
        names.session.client.set_attributes(names.caller(), found.node, None, &new()?).map(|_| 0)
    })
}

/// Microseconds, as nanoseconds.
fn of_microseconds(times: *const timeval) -> Result<Option<[timespec; 2]>, Errno> {
    let Some(times) = take(times.cast::<[timeval; 2]>()) else { return Ok(None) };
    if times.iter().any(|time| !(0..1_000_000).contains(&time.tv_usec)) {
        return Err(Errno::INVAL);
    }
    Ok(Some(times.map(|time| timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec * 1000 })))
}

fn of_nanoseconds(times: *const timespec) -> Result<NewAttributes, Errno> {
    of_times(take(times.cast::<[timespec; 2]>()))
}

interpose! {
    fn chmod(path: *const c_char, mode: mode_t) -> c_int {
        set_at(AT_FDCWD, path, 0, || Ok(of_mode(mode)))
    }

    fn fchmod(number: c_int, mode: mode_t) -> c_int {
        set(number, || Ok(of_mode(mode)))
    }

    fn fchmodat(directory: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int {
        set_at(directory, path, flags, || Ok(of_mode(mode)))
    }

    fn chown(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
        set_at(AT_FDCWD, path, 0, || Ok(of_owner(uid, gid)))
    }

    fn lchown(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
        set_at(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, || Ok(of_owner(uid, gid)))
    }

    fn fchown(number: c_int, uid: uid_t, gid: gid_t) -> c_int {
        set(number, || Ok(of_owner(uid, gid)))
    }

    fn fchownat(directory: c_int, path: *const c_char, uid: uid_t, gid: gid_t, flags: c_int) -> c_int {
        set_at(directory, path, flags, || Ok(of_owner(uid, gid)))
    }

    fn utimensat(directory: c_int, path: *const c_char, times: *const timespec, flags: c_int) -> c_int {
        if path.is_null() {
            return set(directory, || of_nanoseconds(times));
        }
        set_at(directory, path, flags, || of_nanoseconds(times))
    }

    fn futimens(number: c_int, times: *const timespec) -> c_int {
        set(number, || of_nanoseconds(times))
    }

    fn utimes(path: *const c_char, times: *const timeval) -> c_int {
        set_at(AT_FDCWD, path, 0, || of_times(of_microseconds(times)?))
    }

    fn lutimes(path: *const c_char, times: *const timeval) -> c_int {
        set_at(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, || of_times(of_microseconds(times)?))
    }

    fn futimes(number: c_int, times: *const timeval) -> c_int {
        set(number, || of_times(of_microseconds(times)?))
    }

    fn futimesat(directory: c_int, path: *const c_char, times: *const timeval) -> c_int {
        set_at(directory, path, 0, || of_times(of_microseconds(times)?))
    }

    fn utime(path: *const c_char, times: *const libc::utimbuf) -> c_int {
        let second = |seconds| timespec { tv_sec: seconds, tv_nsec: 0 };
        set_at(AT_FDCWD, path, 0, || of_times(take(times).map(|times| [second(times.actime), second(times.modtime)])))
    }

    fn statfs | statfs64(path: *const c_char, into: *mut libc::statfs) -> c_int {
        sizes_at(path, |map, sizes| put(into, attributes::statfs(map, sizes)))
    }

    fn statvfs | statvfs64(path: *const c_char, into: *mut libc::statvfs) -> c_int {
        sizes_at(path, |map, sizes| put(into, attributes::statvfs(map, sizes)))
    }

    fn fstatfs | fstatfs64(number: c_int, into: *mut libc::statfs) -> c_int {
        sizes_of(number, |map, sizes| put(into, attributes::statfs(map, sizes)))
    }

    fn fstatvfs | fstatvfs64(number: c_int, into: *mut libc::statvfs) -> c_int {
        sizes_of(number, |map, sizes| put(into, attributes::statvfs(map, sizes)))
    }
}

fn sizes(
    client: &Client,
    caller: Caller<'_>,
    node: u64,
    give: impl FnOnce(&FileSystem) -> Result<(), Errno>,
) -> Result<c_int, Errno> {
    client.stat_file_system(caller, node).and_then(|sizes| give(&sizes)).map(|()| 0)
}

fn sizes_at(path: *const c_char, give: impl FnOnce(usize, &FileSystem) -> Result<(), Errno>) -> Answer<c_int> {
    on_path(AT_FDCWD, path, |target| {
        let (found, names) = (target.there(true)?, &target.names);
        sizes(&names.session.client, names.caller(), found.node, |sizes| give(target.map, sizes))
    })
}

fn sizes_of(number: c_int, give: impl FnOnce(usize, &FileSystem) -> Result<(), Errno>) -> Answer<c_int> {
    on(number, |open| {
        let live = open.live()?;
        sizes(live.client(), live.caller(), live.node, |sizes| give(open.map()?, sizes))
    })
}
