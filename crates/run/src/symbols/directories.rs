//! Listings. A `DIR` of a share is this library's own structure: it begins with what no `DIR` of glibc begins with.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::sync::Arc;

use byway_service::file::client::Listed;
use libc::{DIR, O_CLOEXEC, O_DIRECTORY, O_RDONLY, dirent, dirent64};
use rustix::fs::{SeekFrom, seek, tell};
use rustix::io::Errno;

use super::interpose::Answer;
use super::{descriptors, opening};
use crate::c::{output, put};
use crate::inside::inside;
use crate::open::{self, Open, borrowed, on};
use crate::target::is_ours;

/// Bytes of a listing that are asked for at once.
const LISTING_BYTES: usize = 16 << 10;

/// glibc begins with the descriptor, which is never below 0, and a lock.
const MARK: [c_int; 2] = [-1, 0x4279_7761];

#[repr(C)]
struct Directory {
    mark: [c_int; 2],
    number: c_int,
    /// Entries that came, and how many of them the program has had.
    entries: Vec<Listed>,
    taken: usize,
    /// Where the listing goes on behind the entries.
    next: u64,
    /// Of the last entry that the program has had.
    position: u64,
    entry: dirent64,
}

fn directory<'a>(at: *mut DIR) -> Option<&'a mut Directory> {
    // SAFETY: a `DIR` of glibc or of this library, both of which have two numbers at their start. A program uses one in one thread at
    // a time.
    let mark = (!at.is_null()).then(|| unsafe { at.cast::<[c_int; 2]>().read() })?;
    // SAFETY: the mark says that it is this library's.
    (mark == MARK).then(|| unsafe { &mut *at.cast::<Directory>() })
}

fn open_on(number: c_int) -> *mut DIR {
    // SAFETY: numbers and bytes alone, of which all bits may be 0.
    let entry = unsafe { std::mem::zeroed() };
    let (entries, mark) = (Vec::new(), MARK);
    let made = Directory { mark, number, entries, taken: 0, next: 0, position: 0, entry };
    Box::into_raw(Box::new(made)).cast()
}

impl Directory {
    /// The next entry.
    fn next(&mut self) -> Result<Option<&mut dirent64>, Errno> {
        if self.taken == self.entries.len() {
            let open = open::of(self.number).ok_or(Errno::BADF)?;
            self.entries = list(&open, self.next)?;
            self.taken = 0;
        }
        let Some(listed) = self.entries.get(self.taken) else { return Ok(None) };
        self.taken += 1;
        self.next = listed.cookie;
        self.position = listed.cookie;
        fill(&mut self.entry, listed)?;
        Ok(Some(&mut self.entry))
    }

    fn go_to(&mut self, position: u64) {
        self.entries.clear();
        (self.taken, self.next, self.position) = (0, position, position);
    }
}

fn list(open: &Open, from: u64) -> Result<Vec<Listed>, Errno> {
    let live = open.live()?;
    live.client().read_directory(live.caller(), live.handle()?, from, LISTING_BYTES, false)
}

/// Bytes of an entry before its name.
const NAME_AT: usize = std::mem::offset_of!(dirent64, d_name);

fn fill(entry: &mut dirent64, listed: &Listed) -> Result<(), Errno> {
    if listed.name.len() >= entry.d_name.len() {
        return Err(Errno::NAMETOOLONG);
    }
    entry.d_ino = listed.attributes.ino.get();
    entry.d_off = listed.cookie as i64;
    entry.d_reclen = (NAME_AT + listed.name.len() + 1).next_multiple_of(8) as u16;
    entry.d_type = (listed.attributes.mode.get() >> 12) as u8;
    let places = entry.d_name.iter_mut();
    places.zip(listed.name.iter().chain([&0])).for_each(|(place, byte)| *place = *byte as c_char);
    Ok(())
}

/// Opens a directory to list it.
pub(super) fn open_listing(directory: c_int, path: *const c_char) -> Answer<*mut DIR> {
    if !is_ours(directory, path) {
        return None;
    }
    let number = match opening::open_at(directory, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0)? {
        Ok(number) => number,
        Err(error) => return Some(Err(error)),
    };
    if open::is_ours(number) {
        return Some(inside(|| Ok(open_on(number))));
    }
    // A symbolic link led out of the share.
    // SAFETY: the number was just opened.
    Some(Ok(unsafe { libc::fdopendir(number) }))
}

interpose! {
    fn opendir(path: *const c_char) -> *mut DIR {
        open_listing(libc::AT_FDCWD, path)
    }

    fn fdopendir(number: c_int) -> *mut DIR {
        on(number, |open| {
            if open.live()?.is_directory { Ok(open_on(number)) } else { Err(Errno::NOTDIR) }
        })
    }

    fn readdir(at: *mut DIR) -> *mut dirent {
        let directory = directory(at)?;
        Some(entry_of(directory).map(<*mut libc::dirent64>::cast))
    }

    fn readdir64(at: *mut DIR) -> *mut dirent64 {
        let directory = directory(at)?;
        Some(entry_of(directory))
    }

    fn dirfd(at: *mut DIR) -> c_int {
        directory(at).map(|directory| Ok(directory.number))
    }

    fn closedir(at: *mut DIR) -> c_int {
        let number = directory(at)?.number;
        Some(inside(|| {
            // SAFETY: it was made by `open_on`, and the program has given it up.
            drop(unsafe { Box::from_raw(at.cast::<Directory>()) });
            Ok(number)
        }).map(|number| {
            // SAFETY: the number ends with the listing.
            unsafe { descriptors::close(number) }
        }))
    }

    fn telldir(at: *mut DIR) -> c_long {
        directory(at).map(|directory| Ok(directory.position as c_long))
    }

    fn readdir_r | readdir64_r(at: *mut DIR, into: *mut dirent64, result: *mut *mut dirent64) -> c_int {
        let directory = directory(at)?;
        let found = inside(|| match directory.next()? {
            Some(entry) => put(into, *entry).and_then(|()| put(result, into)),
            None => put(result, std::ptr::null_mut()),
        });
        // It gives the error itself.
        Some(Ok(found.map_or_else(Errno::raw_os_error, |()| 0)))
    }

    fn getdents64(number: c_int, at: *mut c_void, len: usize) -> isize {
        on(number, |open| entries(number, open, output(at, len)?))
    }
}

/// The end of a listing is null without an error.
fn entry_of(directory: &mut Directory) -> Result<*mut dirent64, Errno> {
    inside(|| directory.next().map(|entry| entry.map_or(std::ptr::null_mut(), std::ptr::from_mut)))
}

/// Goes to a position, or has libc do that. These functions have no result, so that the macro does not fit.
fn go_to(at: *mut DIR, position: u64, by_libc: impl FnOnce()) {
    let Some(directory) = directory(at) else { return by_libc() };
    let _ = inside(|| {
        directory.go_to(position);
        Ok(())
    });
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(super) unsafe extern "C" fn rewinddir(at: *mut DIR) {
    static NEXT: super::interpose::Next = super::interpose::Next::new(c"rewinddir");
    go_to(at, 0, || {
        // SAFETY: libc's function of this name and type.
        let next = unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut DIR)>>(NEXT.get()) };
        if let Some(next) = next {
            // SAFETY: what the program gave.
            unsafe { next(at) };
        }
    });
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(super) unsafe extern "C" fn seekdir(at: *mut DIR, position: c_long) {
    static NEXT: super::interpose::Next = super::interpose::Next::new(c"seekdir");
    go_to(at, position as u64, || {
        // SAFETY: libc's function of this name and type.
        let next =
            unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut DIR, c_long)>>(NEXT.get()) };
        if let Some(next) = next {
            // SAFETY: what the program gave.
            unsafe { next(at, position) };
        }
    });
}

/// The entries behind the descriptor's position, as the kernel gives them.
fn entries(number: c_int, open: &Arc<Open>, into: &mut [u8]) -> Result<isize, Errno> {
    let mut position = tell(borrowed(number))?;
    // SAFETY: numbers and bytes alone, of which all bits may be 0.
    let mut entry: dirent64 = unsafe { std::mem::zeroed() };
    let mut done = 0;
    for listed in list(open, position)? {
        fill(&mut entry, &listed)?;
        let len = usize::from(entry.d_reclen);
        let Some(room) = into.get_mut(done..done + len) else { break };
        // SAFETY: the entry's first bytes, of which it has at least so many.
        room.copy_from_slice(unsafe { std::slice::from_raw_parts((&raw const entry).cast(), len) });
        (done, position) = (done + len, listed.cookie);
    }
    if done == 0 && !list(open, position)?.is_empty() {
        return Err(Errno::INVAL);
    }
    seek(borrowed(number), SeekFrom::Start(position))?;
    Ok(done as isize)
}
