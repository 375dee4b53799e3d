//! A working directory in a share.
//!
//! The kernel's own working directory is then one that was removed: a relative path that passes this library by finds nothing, and makes
//! nothing. A placeholder with a high number stands for the directory of the share. It has no close-on-exec flag, so that programs that
//! this one starts begin in the same directory.
//!
//! What counts is in the kernel's tables, of which a child of `vfork` has its own: its `chdir` does not move the parent.

use std::ffi::CString;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use byway_reactor::descriptor_floor;
use byway_service::file::client::{Caller, Client};
use libc::AT_FDCWD;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};

use crate::inside::inside;
use crate::open::{self, Open};
use crate::placeholder::{self, Described};
use crate::process;

/// A flag of [`Described`] that no `open` has: the placeholder stands for a working directory.
const IS_WORKING_DIRECTORY: i32 = 1 << 30;

/// Where a directory is made to be removed, in this order.
const PLACES: [&std::ffi::CStr; 3] =
    [c"/tmp/byway-run-XXXXXX", c"/dev/shm/byway-run-XXXXXX", c"/var/tmp/byway-run-XXXXXX"];

/// The number that a working directory in a share has, if there is one. It may be closed, or stand for something else.
static NUMBER: AtomicI32 = AtomicI32::new(AT_FDCWD);

/// The directory of a call, where `AT_FDCWD` is the working directory.
pub(crate) fn resolve(directory: RawFd) -> RawFd {
    if directory == AT_FDCWD { number().unwrap_or(AT_FDCWD) } else { directory }
}

/// Whether a number is that of the working directory: the program has no business with it.
pub(crate) fn is_number(candidate: RawFd) -> bool {
    candidate == NUMBER.load(Ordering::Acquire) && number().is_some()
}

/// The number of the working directory, if that is in a share.
pub(crate) fn number() -> Option<RawFd> {
    now().map(|(number, _)| number)
}

/// The number, and what it stands for; `None` in a working directory of this machine.
fn now() -> Option<(RawFd, Arc<Open>)> {
    let number = NUMBER.load(Ordering::Acquire);
    if number == AT_FDCWD {
        return None;
    }
    let open = inside(|| Ok(open::of(number))).ok().flatten()?;
    (open.described.flags & IS_WORKING_DIRECTORY != 0).then_some((number, open))
}

/// The absolute path of a working directory in a share.
pub(crate) fn path() -> Option<Vec<u8>> {
    let (_, open) = now()?;
    let mut path = process::this()?.maps.get(open.map().ok()?)?.prefix.clone();
    if !open.described.path.is_empty() {
        path.push(b'/');
        path.extend_from_slice(&open.described.path);
    }
    Some(path)
}

/// A program begins that has inherited these placeholders.
pub(crate) fn begin_program(inherited: &[RawFd]) {
    let Some(process) = process::this() else { return };
    let one = |number: RawFd| {
        let described = placeholder::read(number, process.maps)?;
        (described.flags & IS_WORKING_DIRECTORY != 0).then_some((number, described.map))
    };
    let Some((number, map)) = inherited.iter().copied().find_map(one) else { return };
    // Whatever has changed the kernel's since has not asked this library. A program without a map of the share stays in the kernel's
    // removed directory, where it finds nothing.
    if map.is_some() && rustix::process::getcwd(Vec::new()) == Err(Errno::NOENT) {
        NUMBER.store(number, Ordering::Release);
    } else {
        close(number);
    }
}

/// A directory of a share.
pub(crate) struct Directory {
    /// Index of this program's map.
    pub(crate) map: usize,
    /// Below the prefix, without symbolic links.
    pub(crate) path: Vec<u8>,
    pub(crate) ino: u64,
}

/// Goes to a directory of a share.
///
/// # Errors
/// As `chdir(2)`; `EOPNOTSUPP` if no directory can be made and removed in `/tmp`, `/dev/shm` or `/var/tmp`.
pub(crate) fn enter(client: &Client, caller: Caller<'_>, node: u64, directory: Directory) -> Result<(), Errno> {
    let Directory { map, path, ino } = directory;
    client.access(caller, node, libc::X_OK as u32)?;
    let flags = libc::O_PATH | libc::O_DIRECTORY | IS_WORKING_DIRECTORY;
    let maps = process::this().ok_or(Errno::IO)?.maps;
    let (placeholder, _) = placeholder::make(&Described { map: Some(map), flags, ino, path }, maps)?;
    if let Some((number, open)) = now() {
        replace(&placeholder, number)?;
        forget(&open);
    } else {
        let high = fcntl_dupfd_cloexec(&placeholder, descriptor_floor::get())?;
        fcntl_setfd(&high, FdFlags::empty())?;
        go_nowhere()?;
        NUMBER.store(high.as_raw_fd(), Ordering::Release);
        process::set_maybe(high.into_raw_fd());
    }
    Ok(())
}

/// The kernel has gone to a directory of this machine.
pub(crate) fn left() {
    if let Some((number, open)) = now() {
        close(number);
        forget(&open);
    }
}

fn forget(open: &Open) {
    if let Some(process) = process::this().filter(|process| !process.is_guest()) {
        open.remove(process);
    }
}

fn replace(placeholder: &OwnedFd, number: RawFd) -> Result<(), Errno> {
    // SAFETY: numbers alone; the number is this library's.
    let made = unsafe { libc::syscall(libc::SYS_dup3, placeholder.as_raw_fd(), number, 0) };
    if made < 0 { Err(Errno::MFILE) } else { Ok(()) }
}

fn close(number: RawFd) {
    // SAFETY: the number is this library's.
    unsafe { libc::syscall(libc::SYS_close, number) };
}

/// Has the kernel go to a directory that does not exist any more.
fn go_nowhere() -> Result<(), Errno> {
    let before = rustix::fs::open(c".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for place in PLACES {
        let mut path = place.to_bytes_with_nul().to_vec();
        // SAFETY: the template is memory of this frame, and ends with a 0 byte.
        if unsafe { libc::mkdtemp(path.as_mut_ptr().cast()) }.is_null() {
            continue;
        }
        path.pop();
        let Ok(path) = CString::new(path) else { continue };
        let gone = rustix::process::chdir(&path);
        let removed = rustix::fs::rmdir(&path);
        if gone.and(removed).is_ok() {
            return Ok(());
        }
    }
    rustix::process::fchdir(&before)?;
    Err(Errno::OPNOTSUPP)
}
