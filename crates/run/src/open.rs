//! Open files: what a descriptor stands for, and what the server calls it.

use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use byway_service::file::client::{Caller, Client, Found, NamedIn, NewMode, ROOT};
use rustix::io::Errno;

use crate::inside::inside;
use crate::placeholder::{self, Described};
use crate::process::{self, Process, locked};
use crate::session::{Held, Lookups, Session, User};
use crate::walk::{Place, Step, Walked, is, walk};

/// Flags of `open` that the server is to know.
const SENT: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_CREAT
    | libc::O_DIRECT
    | libc::O_EXCL
    | libc::O_NOATIME
    | libc::O_SYNC
    | libc::O_TRUNC;

/// An open file description: all duplicates of a descriptor in this process.
pub(crate) struct Open {
    pub(crate) described: Described,
    key: u64,
    /// Descriptors of this process that are known to stand for it.
    users: AtomicI32,
    /// A thread moves the position.
    pub(crate) position: Mutex<()>,
    live: Mutex<Option<Arc<Live>>>,
}

/// The same, at the server.
pub(crate) struct Live {
    pub(crate) session: Arc<Session>,
    pub(crate) user: User,
    pub(crate) node: u64,
    pub(crate) is_directory: bool,
    /// Of what was opened; 0 is never one. `None` for `O_PATH`.
    handle: Option<u64>,
    /// The directories above it and itself, from below the root: where names in it begin.
    pub(crate) steps: Vec<Step>,
    _held: Held,
}

impl Drop for Live {
    fn drop(&mut self) {
        let Some(handle) = self.handle else { return };
        let _ = inside(|| {
            self.session.client.close_handle(handle);
            Ok(())
        });
    }
}

impl Live {
    pub(crate) fn client(&self) -> &Client {
        &self.session.client
    }

    pub(crate) fn caller(&self) -> Caller<'_> {
        self.user.caller()
    }

    /// The open file at the server.
    ///
    /// # Errors
    /// `EBADF` for a file that was opened with `O_PATH`.
    pub(crate) fn handle(&self) -> Result<u64, Errno> {
        self.handle.ok_or(Errno::BADF)
    }

    /// The same, where a node alone serves too.
    pub(crate) fn handle_if_any(&self) -> Option<u64> {
        self.handle
    }
}

impl Open {
    /// The file at the server: opened there again if this process has inherited the descriptor.
    ///
    /// # Errors
    /// `ESTALE` if another file is at the path now, or this program has no map of the share; the server's.
    pub(crate) fn live(&self) -> Result<Arc<Live>, Errno> {
        let mut live = locked(&self.live);
        if let Some(live) = &*live {
            return Ok(Arc::clone(live));
        }
        let process = process::this().ok_or(Errno::IO)?;
        let names = Lookups::new(process.session(self.map()?)?);
        let walked = walk(&names, &[], ROOT, &self.described.path, false)?;
        let Walked::Inside(place) = walked else { return Err(Errno::STALE) };
        let found = place.there().map_err(|_| Errno::STALE)?;
        if found.attributes.ino.get() != self.described.ino {
            return Err(Errno::STALE);
        }
        let made = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;
        let opened = Arc::new(open_there(names, &place, found, self.described.flags & !made)?);
        *live = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// The index of the share's map.
    ///
    /// # Errors
    /// `ESTALE` if this program has no map of the share.
    pub(crate) fn map(&self) -> Result<usize, Errno> {
        self.described.map.ok_or(Errno::STALE)
    }

    /// The holder of locks that belong to the open file; no process of this client is it.
    pub(crate) fn owner(&self) -> u64 {
        self.key | 1 << 63
    }

    /// Whether the descriptor was opened for reading.
    pub(crate) fn is_readable(&self) -> bool {
        matches!(self.described.flags & libc::O_ACCMODE, libc::O_RDONLY | libc::O_RDWR) && !self.is_path()
    }

    /// Whether the descriptor was opened for writing.
    pub(crate) fn is_writable(&self) -> bool {
        matches!(self.described.flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR) && !self.is_path()
    }

    /// Whether it is an `O_PATH` descriptor.
    pub(crate) fn is_path(&self) -> bool {
        self.described.flags & libc::O_PATH != 0
    }

    /// A descriptor of this process has come to stand for it.
    pub(crate) fn add(&self, number: RawFd) {
        arrived(number);
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// One has been closed. With the last one the server closes the file.
    pub(crate) fn remove(&self, process: &Process) {
        if self.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            // If the count is wrong, because a descriptor came by another way, the file is opened again by its path.
            let mut opened = process.opened.write().unwrap_or_else(PoisonError::into_inner);
            opened.remove(&self.key);
        }
    }
}

/// Does the work of a call on a descriptor of a share; `None` if the descriptor is of another file.
pub(crate) fn on<T>(number: RawFd, work: impl FnOnce(&Arc<Open>) -> Result<T, Errno>) -> Option<Result<T, Errno>> {
    if !process::is_maybe(number) {
        return None;
    }
    inside(|| of(number).map(|open| work(&open)).transpose()).transpose()
}

/// What a descriptor stands for; `None` if it is of another file.
pub(crate) fn of(number: RawFd) -> Option<Arc<Open>> {
    if !process::is_maybe(number) {
        return None;
    }
    let process = process::this()?;
    let key = placeholder::key(number)?;
    let opened = process.opened.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(open) = opened.get(&key) {
        return Some(Arc::clone(open));
    }
    drop(opened);
    let described = placeholder::read(number, process.maps)?;
    Some(note(process, key, described, None))
}

fn note(process: &Process, key: u64, described: Described, live: Option<Live>) -> Arc<Open> {
    let live = Mutex::new(live.map(Arc::new));
    let open = Open { described, key, users: AtomicI32::new(1), position: Mutex::new(()), live };
    let mut opened = process.opened.write().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(opened.entry(key).or_insert_with(|| Arc::new(open)))
}

/// Opens a path of a share; gives the descriptor's number.
///
/// # Errors
/// As `open(2)`.
pub(crate) fn open_place(map: usize, names: Lookups, place: Place, flags: i32, mode: u32) -> Result<RawFd, Errno> {
    let process = process::this().ok_or(Errno::IO)?;
    let Opened { live, ino, path } = match place.found {
        _ if flags & libc::O_TMPFILE == libc::O_TMPFILE => make_unnamed(names, &place, flags, mode)?,
        Some(_) if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL => return Err(Errno::EXIST),
        None if flags & libc::O_CREAT != 0 => create(names, &place, flags, mode)?,
        _ => {
            let found = place.there()?;
            let live = open_there(names, &place, found, flags)?;
            Opened { live, ino: found.attributes.ino.get(), path: place.path() }
        }
    };
    let described = Described { map: Some(map), flags, ino, path };
    let (placeholder, key) = placeholder::make(&described, process.maps)?;
    let number = placeholder.as_raw_fd();
    if number as usize >= process::NUMBERS {
        return Err(Errno::MFILE);
    }
    note(process, key, described, Some(live));
    arrived(number);
    Ok(placeholder.into_raw_fd())
}

/// A file that the server has opened.
struct Opened {
    live: Live,
    ino: u64,
    /// Where other processes find it.
    path: Vec<u8>,
}

fn steps(place: &Place, found: Found) -> Vec<Step> {
    let last = place.name.as_ref().map(|name| Step { name: name.clone(), found });
    place.above.iter().cloned().chain(last).collect()
}

fn open_there(names: Lookups, place: &Place, found: Found, flags: i32) -> Result<Live, Errno> {
    let caller = names.caller();
    let client = &names.session.client;
    let is_directory = is(&found, libc::S_IFDIR);
    let handle = if flags & libc::O_PATH != 0 {
        None
    } else if is(&found, libc::S_IFLNK) {
        return Err(Errno::LOOP);
    } else if is_directory {
        if flags & (libc::O_ACCMODE | libc::O_CREAT) != 0 {
            return Err(Errno::ISDIR);
        }
        Some(client.open_directory(caller, found.node)?)
    } else if flags & libc::O_DIRECTORY != 0 {
        return Err(Errno::NOTDIR);
    } else {
        Some(client.open(caller, found.node, (flags & SENT & !libc::O_CREAT) as u32)?)
    };
    let steps = steps(place, found);
    let (session, user, held) = names.into_held();
    Ok(Live { session, user, node: found.node, is_directory, handle, steps, _held: held })
}

fn create(names: Lookups, place: &Place, flags: i32, mode: u32) -> Result<Opened, Errno> {
    let name = place.name.as_ref().filter(|_| !place.wants_directory).ok_or(Errno::ISDIR)?;
    let mode = NewMode { mode: libc::S_IFREG | mode & 0o7777, umask: crate::umask::now() };
    let (found, handle) = names.session.client.create(
        names.caller(),
        NamedIn::new(place.directory, name),
        (flags & SENT) as u32,
        mode,
    )?;
    let found = names.hold(found);
    let steps = steps(place, found);
    let (session, user, held) = names.into_held();
    let (handle, is_directory) = (Some(handle), false);
    let live = Live { session, user, node: found.node, is_directory, handle, steps, _held: held };
    Ok(Opened { live, ino: found.attributes.ino.get(), path: place.path() })
}

fn make_unnamed(names: Lookups, place: &Place, flags: i32, mode: u32) -> Result<Opened, Errno> {
    let directory = place.there()?.node;
    let mode = NewMode { mode: libc::S_IFREG | mode & 0o7777, umask: crate::umask::now() };
    let (found, handle) =
        names.session.client.create_unnamed(names.caller(), directory, (flags & SENT) as u32, mode)?;
    let found = names.hold(found);
    let (session, user, held) = names.into_held();
    let (handle, steps, is_directory) = (Some(handle), Vec::new(), false);
    let live = Live { session, user, node: found.node, is_directory, handle, steps, _held: held };
    // No other process finds it by a path.
    Ok(Opened { live, ino: found.attributes.ino.get(), path: b"..".to_vec() })
}

/// Closes a descriptor of a file; gives what the kernel says.
pub(crate) fn close(number: RawFd, open: &Open) -> Result<(), Errno> {
    let process = process::this().ok_or(Errno::IO)?;
    // SAFETY: the program has given up the number with this call.
    let closed = unsafe { libc::syscall(libc::SYS_close, number) };
    if !process.is_guest() {
        crate::locks::closed(open);
        open.remove(process);
    }
    if closed == 0 { Ok(()) } else { Err(Errno::BADF) }
}

/// A descriptor of the program, for one call of the kernel.
pub(crate) fn borrowed<'a>(number: RawFd) -> BorrowedFd<'a> {
    // SAFETY: it is used during the program's call, which names it. A program that closes it meanwhile in another thread gets what the
    // kernel would do then.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// A number stands for a file of a share now.
pub(crate) fn arrived(number: RawFd) {
    process::set_maybe(number);
    #[cfg(not(test))]
    crate::symbols::streams::is_now(number, true);
}

/// Whether a descriptor is of a share.
pub(crate) fn is_ours(number: RawFd) -> bool {
    on(number, |_| Ok(())).is_some()
}

/// What a descriptor stands for, for a call that waits outside of this library.
pub(crate) fn taken(number: RawFd) -> Option<Arc<Open>> {
    on(number, |open| Ok(Arc::clone(open)))?.ok()
}
