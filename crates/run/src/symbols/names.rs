//! Names: made, removed, renamed; symbolic links; temporary files.

use std::ffi::{c_char, c_int, c_uint};

use byway_service::file::client::{NamedIn, NewMode};
use libc::{AT_FDCWD, AT_REMOVEDIR, AT_SYMLINK_FOLLOW, O_CREAT, O_EXCL, O_RDWR, mode_t};
use rustix::io::Errno;

use super::interpose::Answer;
use super::opening;
use crate::c::{output, put, text};
use crate::inside::inside;
use crate::target::{Target, is_ours, on_path};
use crate::walk::{Place, is};

/// The directory and the name of something to be made.
fn new_name(place: &Place) -> Result<(u64, &[u8]), Errno> {
    match (&place.found, &place.name) {
        (None, Some(name)) => Ok((place.directory, name)),
        _ => Err(Errno::EXIST),
    }
}

/// The directory and the name of what is there.
fn old_name(place: &Place) -> Result<(u64, &[u8]), Errno> {
    place.there()?;
    Ok((place.directory, place.name.as_deref().ok_or(Errno::BUSY)?))
}

fn make_directory(directory: c_int, path: *const c_char, mode: mode_t) -> Answer<c_int> {
    on_path(directory, path, |target| {
        let (place, names) = (target.place(false)?, &target.names);
        let (parent, name) = new_name(&place)?;
        let mode = NewMode { mode: mode & 0o7777, umask: crate::umask::now() };
        names
            .session
            .client
            .make_directory(names.caller(), parent, name, mode)
            .map(|found| names.hold(found))
            .map(|_| 0)
    })
}

/// Removes the name of a file or, with `AT_REMOVEDIR`, of an empty directory.
fn remove_name(directory: c_int, path: *const c_char, flags: c_int) -> Answer<c_int> {
    on_path(directory, path, |target| {
        let (place, names) = (target.place(false)?, &target.names);
        let (parent, name) = old_name(&place)?;
        let client = &names.session.client;
        if flags & AT_REMOVEDIR != 0 {
            client.remove_directory(names.caller(), parent, name).map(|()| 0)
        } else {
            client.unlink(names.caller(), parent, name).map(|()| 0)
        }
    })
}

/// A path that the program has given.
#[derive(Clone, Copy)]
struct PathAt {
    /// Where it begins if it is relative.
    directory: c_int,
    path: *const c_char,
}

impl PathAt {
    fn new(directory: c_int, path: *const c_char) -> Self {
        Self { directory, path }
    }
}

/// Two paths of one share; what the kernel says of two file systems if they are not.
fn on_two<T>(from: PathAt, to: PathAt, work: impl FnOnce(&Target<'_>, &Target<'_>) -> Result<T, Errno>) -> Answer<T> {
    if !is_ours(from.directory, from.path) && !is_ours(to.directory, to.path) {
        return None;
    }
    let both = on_path(from.directory, from.path, |from| {
        on_path(to.directory, to.path, |to| if from.map == to.map { work(&from, &to) } else { Err(Errno::XDEV) })
            .unwrap_or(Err(Errno::XDEV))
    });
    Some(both.unwrap_or(Err(Errno::XDEV)))
}

fn rename_at(from: PathAt, to: PathAt, flags: c_uint) -> Answer<c_int> {
    on_two(from, to, |from, to| {
        let (old, new) = (from.place(false)?, to.place(false)?);
        let (directory, name) = old_name(&old)?;
        let is_file = old.found.is_some_and(|found| !is(&found, libc::S_IFDIR));
        if new.wants_directory && is_file {
            return Err(Errno::NOTDIR);
        }
        let new_name = new.name.as_deref().ok_or(Errno::BUSY)?;
        let names = &from.names;
        let client = &names.session.client;
        let (from, to) = (NamedIn::new(directory, name), NamedIn::new(new.directory, new_name));
        client.rename(names.caller(), from, to, flags).map(|()| 0)
    })
}

fn link_at(from: PathAt, to: PathAt, flags: c_int) -> Answer<c_int> {
    on_two(from, to, |from, to| {
        let (old, new) = (from.there(flags & AT_SYMLINK_FOLLOW != 0)?, to.place(false)?);
        let (directory, name) = new_name(&new)?;
        let names = &to.names;
        names.session.client.link(names.caller(), old.node, directory, name).map(|found| names.hold(found)).map(|_| 0)
    })
}

fn make_link(target: *const c_char, directory: c_int, path: *const c_char) -> Answer<c_int> {
    on_path(directory, path, |at| {
        let (place, names) = (at.place(false)?, &at.names);
        let (parent, name) = new_name(&place)?;
        let target = text(target).filter(|target| !target.is_empty()).ok_or(Errno::NOENT)?;
        names
            .session
            .client
            .make_symlink(names.caller(), parent, name, target)
            .map(|found| names.hold(found))
            .map(|_| 0)
    })
}

fn read_link(directory: c_int, path: *const c_char, into: *mut c_char, len: usize) -> Answer<isize> {
    on_path(directory, path, |target| {
        let (found, names) = (target.there(false)?, &target.names);
        if !is(&found, libc::S_IFLNK) || len == 0 {
            return Err(Errno::INVAL);
        }
        let bytes = names.session.client.read_link(names.caller(), found.node)?;
        let count = bytes.len().min(len);
        output(into.cast(), count)?.copy_from_slice(&bytes[..count]);
        Ok(count as isize)
    })
}

fn make_node(directory: c_int, path: *const c_char, mode: mode_t) -> Answer<c_int> {
    on_path(directory, path, |target| {
        let (place, names) = (target.place(false)?, &target.names);
        let (parent, name) = new_name(&place)?;
        let mode = NewMode { mode, umask: crate::umask::now() };
        names.session.client.make_node(names.caller(), parent, name, mode).map(|found| names.hold(found)).map(|_| 0)
    })
}

/// The path without symbolic links, in memory of `malloc` if none is given.
fn real_path(path: *const c_char, into: *mut c_char) -> Answer<*mut c_char> {
    on_path(AT_FDCWD, path, |target| {
        let place = target.place(true)?;
        place.there()?;
        let prefix = &target.names.session.map.prefix;
        let (below, mut full) = (place.path(), prefix.clone());
        if !below.is_empty() {
            full.push(b'/');
            full.extend_from_slice(&below);
        }
        full.push(0);
        if full.len() > libc::PATH_MAX as usize {
            return Err(Errno::NAMETOOLONG);
        }
        // SAFETY: the program frees it.
        let into = if into.is_null() { unsafe { libc::malloc(full.len()) }.cast() } else { into };
        output(into.cast(), full.len())?.copy_from_slice(&full);
        Ok(into)
    })
}

interpose! {
    fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
        make_directory(AT_FDCWD, path, mode)
    }

    fn mkdirat(directory: c_int, path: *const c_char, mode: mode_t) -> c_int {
        make_directory(directory, path, mode)
    }

    fn rmdir(path: *const c_char) -> c_int {
        remove_name(AT_FDCWD, path, AT_REMOVEDIR)
    }

    fn unlink(path: *const c_char) -> c_int {
        remove_name(AT_FDCWD, path, 0)
    }

    fn unlinkat(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        remove_name(directory, path, flags)
    }

    fn remove(path: *const c_char) -> c_int {
        let is_directory = on_path(AT_FDCWD, path, |target| Ok(is(&target.there(false)?, libc::S_IFDIR)))?;
        match is_directory {
            Ok(is_directory) => remove_name(AT_FDCWD, path, if is_directory { AT_REMOVEDIR } else { 0 }),
            Err(error) => Some(Err(error)),
        }
    }

    fn rename(from: *const c_char, to: *const c_char) -> c_int {
        rename_at(PathAt::new(AT_FDCWD, from), PathAt::new(AT_FDCWD, to), 0)
    }

    fn renameat(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char) -> c_int {
        rename_at(PathAt::new(directory, from), PathAt::new(to_directory, to), 0)
    }

    fn renameat2(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_uint) -> c_int {
        rename_at(PathAt::new(directory, from), PathAt::new(to_directory, to), flags)
    }

    fn link(from: *const c_char, to: *const c_char) -> c_int {
        link_at(PathAt::new(AT_FDCWD, from), PathAt::new(AT_FDCWD, to), 0)
    }

    fn linkat(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_int) -> c_int {
        link_at(PathAt::new(directory, from), PathAt::new(to_directory, to), flags)
    }

    fn symlink(target: *const c_char, path: *const c_char) -> c_int {
        make_link(target, AT_FDCWD, path)
    }

    fn symlinkat(target: *const c_char, directory: c_int, path: *const c_char) -> c_int {
        make_link(target, directory, path)
    }

    fn readlink(path: *const c_char, into: *mut c_char, len: usize) -> isize {
        read_link(AT_FDCWD, path, into, len)
    }

    fn readlinkat(directory: c_int, path: *const c_char, into: *mut c_char, len: usize) -> isize {
        read_link(directory, path, into, len)
    }

    fn __readlink_chk(path: *const c_char, into: *mut c_char, len: usize, room: usize) -> isize {
        read_link(AT_FDCWD, path, into, len)
    }

    fn __readlinkat_chk(directory: c_int, path: *const c_char, into: *mut c_char, len: usize, room: usize) -> isize {
        read_link(directory, path, into, len)
    }

    fn mkfifo(path: *const c_char, mode: mode_t) -> c_int {
        make_node(AT_FDCWD, path, mode & 0o7777 | libc::S_IFIFO)
    }

    fn mkfifoat(directory: c_int, path: *const c_char, mode: mode_t) -> c_int {
        make_node(directory, path, mode & 0o7777 | libc::S_IFIFO)
    }

    fn mknod(path: *const c_char, mode: mode_t, device: libc::dev_t) -> c_int {
        make_node(AT_FDCWD, path, mode)
    }

    fn mknodat(directory: c_int, path: *const c_char, mode: mode_t, device: libc::dev_t) -> c_int {
        make_node(directory, path, mode)
    }

    fn realpath(path: *const c_char, into: *mut c_char) -> *mut c_char {
        real_path(path, into)
    }

    fn __realpath_chk(path: *const c_char, into: *mut c_char, room: usize) -> *mut c_char {
        real_path(path, into)
    }

    fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
        real_path(path, std::ptr::null_mut())
    }

    fn mkstemp | mkstemp64(template: *mut c_char) -> c_int {
        make_temporary(template, 0, |path| opening::open_at(AT_FDCWD, path, O_RDWR | O_CREAT | O_EXCL, 0o600))
    }

    fn mkostemp | mkostemp64(template: *mut c_char, flags: c_int) -> c_int {
        make_temporary(template, 0, |path| opening::open_at(AT_FDCWD, path, flags | O_RDWR | O_CREAT | O_EXCL, 0o600))
    }

    fn mkstemps | mkstemps64(template: *mut c_char, suffix: c_int) -> c_int {
        make_temporary(template, suffix, |path| opening::open_at(AT_FDCWD, path, O_RDWR | O_CREAT | O_EXCL, 0o600))
    }

    fn mkdtemp(template: *mut c_char) -> *mut c_char {
        make_temporary(template, 0, |path| make_directory(AT_FDCWD, path, 0o700)).map(|made| made.map(|_| template))
    }
}

/// The letters that are replaced in the name of a temporary file.
const LETTERS: usize = 6;

/// Names that are tried.
const TRIES: u32 = 100;

fn make_temporary(
    template: *mut c_char,
    suffix: c_int,
    make: impl Fn(*const c_char) -> Answer<c_int>,
) -> Answer<c_int> {
    if !is_ours(AT_FDCWD, template) {
        return None;
    }
    Some(try_names(template, suffix, make))
}

fn try_names(
    template: *mut c_char,
    suffix: c_int,
    make: impl Fn(*const c_char) -> Answer<c_int>,
) -> Result<c_int, Errno> {
    let len = text(template).map_or(0, <[u8]>::len);
    let suffix = usize::try_from(suffix).map_err(|_| Errno::INVAL)?;
    let start = len.checked_sub(suffix).and_then(|end| end.checked_sub(LETTERS)).ok_or(Errno::INVAL)?;
    let at = template.wrapping_add(start);
    if output(at.cast(), LETTERS)? != b"XXXXXX" {
        return Err(Errno::INVAL);
    }
    for _ in 0..TRIES {
        let mut random = [0; LETTERS];
        inside(|| rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty()))?;
        let letters = random.map(|byte| b"abcdefghijklmnopqrstuvwxyz012345"[usize::from(byte % 32)]);
        for (index, letter) in letters.into_iter().enumerate() {
            put(at.wrapping_add(index), letter as c_char)?;
        }
        match make(template) {
            Some(Err(Errno::EXIST)) => {}
            made => return made.unwrap_or(Err(Errno::INVAL)),
        }
    }
    Err(Errno::EXIST)
}
