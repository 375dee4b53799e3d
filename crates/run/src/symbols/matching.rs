//! `scandir` and `glob`: libc lists directories within itself for them.

use std::ffi::{c_char, c_int, c_void};

use libc::{AT_FDCWD, DIR, dirent};
use rustix::io::Errno;

use super::interpose::{Answer, Next};
use super::{attributes, directories};
use crate::c::put;
use crate::target::is_ours;

/// Whether an entry is wanted.
type Wanted = Option<unsafe extern "C" fn(*const dirent) -> c_int>;

/// The order of two entries.
type Order = Option<unsafe extern "C" fn(*const c_void, *const c_void) -> c_int>;

/// Entries in memory of `malloc`, which the program frees.
struct Entries {
    list: *mut *mut dirent,
    count: usize,
    room: usize,
}

impl Entries {
    fn push(&mut self, entry: *const dirent) -> Result<(), Errno> {
        if self.count == self.room {
            self.room = (self.room * 2).max(16);
            // SAFETY: the list is null or of `malloc`.
            let list = unsafe { libc::realloc(self.list.cast(), self.room * size_of::<*mut dirent>()) };
            if list.is_null() {
                return Err(Errno::NOMEM);
            }
            self.list = list.cast();
        }
        // SAFETY: the entry is this library's, which has as many bytes as it says; the list has room for one more.
        unsafe {
            let len = usize::from((*entry).d_reclen);
            let copy = libc::malloc(len);
            if copy.is_null() {
                return Err(Errno::NOMEM);
            }
            std::ptr::copy_nonoverlapping(entry.cast::<u8>(), copy.cast(), len);
            self.list.add(self.count).write(copy.cast());
        }
        self.count += 1;
        Ok(())
    }

    fn free(self) {
        // SAFETY: so many entries and the list are of `malloc`, and nobody else has them.
        unsafe {
            (0..self.count).for_each(|index| libc::free(self.list.add(index).read().cast()));
            libc::free(self.list.cast());
        }
    }
}

fn fill(listing: *mut DIR, wanted: Wanted, entries: &mut Entries) -> Result<(), Errno> {
    loop {
        // SAFETY: the place is this thread's; the listing is open.
        let entry = unsafe {
            *libc::__errno_location() = 0;
            directories::readdir(listing)
        };
        if entry.is_null() {
            let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
            return if error == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(error)) };
        }
        // SAFETY: the program's function, for an entry that stays until the next one is read.
        if wanted.is_none_or(|wanted| unsafe { wanted(entry) } != 0) {
            entries.push(entry)?;
        }
    }
}

/// The program's functions are called outside of this library: they may use files of the share themselves.
fn scan(
    directory: c_int,
    path: *const c_char,
    list: *mut *mut *mut dirent,
    wanted: Wanted,
    order: Order,
) -> Answer<c_int> {
    let listing = match directories::open_listing(directory, path)? {
        Ok(listing) => listing,
        Err(error) => return Some(Err(error)),
    };
    let mut entries = Entries { list: std::ptr::null_mut(), count: 0, room: 0 };
    let filled = fill(listing, wanted, &mut entries);
    // SAFETY: it was just opened.
    unsafe { directories::closedir(listing) };
    if let Err(error) = filled {
        entries.free();
        return Some(Err(error));
    }
    if order.is_some() && entries.count > 1 {
        // SAFETY: the list has so many pointers; the program's function compares what two of them point to.
        unsafe { libc::qsort(entries.list.cast(), entries.count, size_of::<*mut dirent>(), order) };
    }
    Some(put(list, entries.list).map(|()| entries.count as c_int))
}

/// glibc's `glob_t`.
#[repr(C)]
pub(super) struct Matches {
    count: usize,
    paths: *mut *mut c_char,
    offset: usize,
    flags: c_int,
    closedir: *mut c_void,
    readdir: *mut c_void,
    opendir: *mut c_void,
    lstat: *mut c_void,
    stat: *mut c_void,
}

const _: () = assert!(size_of::<Matches>() == size_of::<libc::glob_t>());

/// The structure has functions to list directories with.
const GLOB_ALTDIRFUNC: c_int = 1 << 9;

/// libc matches, and lists by this library's functions.
fn match_paths(pattern: *const c_char, flags: c_int, failed: *mut c_void, into: *mut Matches) -> Answer<c_int> {
    static NEXT: Next = Next::new(c"glob");
    type Glob = unsafe extern "C" fn(*const c_char, c_int, *mut c_void, *mut Matches) -> c_int;
    if flags & GLOB_ALTDIRFUNC != 0 || into.is_null() || !is_ours(AT_FDCWD, pattern) {
        return None;
    }
    // SAFETY: libc's function of this name and type.
    let next = unsafe { std::mem::transmute::<*mut c_void, Option<Glob>>(NEXT.get()) }?;
    // SAFETY: the program's structure, whose functions are the caller's to set with this flag; libc's own otherwise leaves them alone.
    Some(Ok(unsafe {
        (*into).closedir = directories::closedir as *mut c_void;
        (*into).readdir = directories::readdir as *mut c_void;
        (*into).opendir = directories::opendir as *mut c_void;
        (*into).lstat = attributes::lstat as *mut c_void;
        (*into).stat = attributes::stat as *mut c_void;
        next(pattern, flags | GLOB_ALTDIRFUNC, failed, into)
    }))
}

interpose! {
    fn scandir | scandir64(path: *const c_char, list: *mut *mut *mut dirent, wanted: Wanted, order: Order) -> c_int {
        scan(AT_FDCWD, path, list, wanted, order)
    }

    fn scandirat | scandirat64(directory: c_int, path: *const c_char, list: *mut *mut *mut dirent, wanted: Wanted, order: Order) -> c_int {
        scan(directory, path, list, wanted, order)
    }

    fn glob | glob64(pattern: *const c_char, flags: c_int, failed: *mut c_void, into: *mut Matches) -> c_int {
        match_paths(pattern, flags, failed, into)
    }
}
