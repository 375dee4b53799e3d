//! The working directory, which may be in a share (`crate::working_directory`).

use std::ffi::{CString, c_char, c_int};

use libc::{AT_FDCWD, size_t};
use rustix::io::Errno;

use super::interpose::Answer;
use crate::c::{output, text};
use crate::inside::inside;
use crate::open::on;
use crate::target::on_path;
use crate::walk::{Walked, is};
use crate::working_directory::{Directory, enter, left, number, path};

fn change(to: *const c_char) -> Answer<c_int> {
    let entered = on_path(AT_FDCWD, to, |target| match target.walked(true)? {
        Walked::Inside(place) => {
            let (found, names) = (place.there()?, &target.names);
            if !is(&found, libc::S_IFDIR) {
                return Err(Errno::NOTDIR);
            }
            let at = Directory { map: target.map, path: place.path(), ino: found.attributes.ino.get() };
            enter(&names.session.client, names.caller(), found.node, at).map(|()| 0)
        }
        Walked::Outside(path) => leave_to(|| rustix::process::chdir(CString::new(path).map_err(|_| Errno::INVAL)?)),
    });
    if entered.is_some() || number().is_none() {
        return entered;
    }
    let to = text(to)?;
    Some(inside(|| leave_to(|| rustix::process::chdir(to))))
}

/// Has the kernel go to a directory of this machine.
fn leave_to(go: impl FnOnce() -> Result<(), Errno>) -> Result<c_int, Errno> {
    go()?;
    left();
    Ok(0)
}

fn change_to_open(directory: c_int) -> Answer<c_int> {
    let entered = on(directory, |open| {
        let live = open.live()?;
        if !live.is_directory {
            return Err(Errno::NOTDIR);
        }
        let at = Directory { map: open.map()?, path: open.described.path.clone(), ino: open.described.ino };
        enter(live.client(), live.caller(), live.node, at).map(|()| 0)
    });
    if entered.is_some() || number().is_none() {
        return entered;
    }
    Some(inside(|| leave_to(|| rustix::process::fchdir(crate::open::borrowed(directory)))))
}

/// The path, in memory of `malloc` if none is given.
fn tell(into: *mut c_char, room: size_t) -> Answer<*mut c_char> {
    let mut path = path()?;
    path.push(0);
    if !into.is_null() && room == 0 {
        return Some(Err(Errno::INVAL));
    }
    if path.len() > room && (room > 0 || !into.is_null()) {
        return Some(Err(Errno::RANGE));
    }
    // SAFETY: the program frees it.
    let into = if into.is_null() { unsafe { libc::malloc(path.len().max(room)) }.cast() } else { into };
    let written = output(into.cast(), path.len()).map(|bytes| bytes.copy_from_slice(&path));
    Some(written.map(|()| into).map_err(|_| Errno::NOMEM))
}

interpose! {
    fn chdir(to: *const c_char) -> c_int {
        change(to)
    }

    fn fchdir(directory: c_int) -> c_int {
        change_to_open(directory)
    }

    fn getcwd(into: *mut c_char, room: size_t) -> *mut c_char {
        tell(into, room)
    }

    fn __getcwd_chk(into: *mut c_char, room: size_t, known: size_t) -> *mut c_char {
        tell(into, room)
    }

    fn get_current_dir_name() -> *mut c_char {
        tell(std::ptr::null_mut(), 0)
    }
}
