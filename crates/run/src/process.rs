//! What the library knows in this process: maps, sessions and open files.
//!
//! A forked child begins anew at its first call, because threads of its parent may have held locks when it forked: it opens sessions of
//! its own, and opens files again by their paths. A child of `vfork` has its parent's memory, and changes nothing in it.

use std::collections::{HashMap, HashSet};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use byway_reactor::descriptor_floor;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use rustix::process::{Pid, getpid};

use crate::inside::inside;
use crate::maps::{self, Map};
use crate::open::Open;
use crate::placeholder;
use crate::session::Session;
use crate::working_directory;

/// Descriptors whose number is below this can be files of a share. More than that a program cannot open there.
pub(crate) const NUMBERS: usize = 1 << 16;

/// One bit for each number that a placeholder may have: a call on another number goes to the kernel without a look. A bit stays when
/// the number is closed, as `vfork` and `posix_spawn` hide closes; then the kernel is asked what the number is now.
static MAYBE: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

/// Of this process or, in a child that has not called yet, of its parent. Null in a program without maps.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// The mark of a process in the memory of its forked child.
const WIPED: u32 = 0;

/// The mark while a thread of the child replaces what the parent knew.
const LEAVING: u32 = 1;

/// The mark of this process.
const CURRENT: u32 = 2;

/// See the module.
pub(crate) struct Process {
    pub(crate) maps: &'static [Map],
    /// [`WIPED`], [`LEAVING`] or [`CURRENT`], in a page that a forked child sees as zeroes.
    mark: &'static AtomicU32,
    number: Pid,
    sessions: Vec<Mutex<Option<Arc<Session>>>>,
    /// By the key of the placeholder.
    pub(crate) opened: RwLock<HashMap<u64, Arc<Open>>>,
    /// Files in which this process has had locks of its own (`F_SETLK`), by map and inode number: closing any descriptor of the file
    /// releases them.
    pub(crate) locked_files: Mutex<HashSet<(usize, u64)>>,
}

/// Whether a number may be that of a placeholder.
pub(crate) fn is_maybe(number: RawFd) -> bool {
    let Some(word) = usize::try_from(number).ok().and_then(|index| MAYBE.get(index / 64)) else { return false };
    word.load(Ordering::Acquire) & (1 << (number % 64)) != 0
}

/// A number is that of a placeholder.
pub(crate) fn set_maybe(number: RawFd) {
    if let Some(word) = usize::try_from(number).ok().and_then(|index| MAYBE.get(index / 64)) {
        word.fetch_or(1 << (number % 64), Ordering::AcqRel);
    }
}

/// This process, if it has maps.
pub(crate) fn this() -> Option<&'static Process> {
    loop {
        let at = PROCESS.load(Ordering::Acquire);
        // SAFETY: it is null, or a box that was leaked in `begin`.
        let process = unsafe { at.as_ref() }?;
        match process.mark.load(Ordering::Acquire) {
            CURRENT => return Some(process),
            LEAVING => std::thread::yield_now(),
            _ => begin_child(process).ok()?,
        }
    }
}

/// A forked child, at its first call: one thread does this, and others that call meanwhile wait for it.
///
/// # Errors
/// The kernel's: there is no memory for the child.
fn begin_child(of_parent: &'static Process) -> Result<(), Errno> {
    // A signal's handler that called meanwhile would wait for the thread that it interrupts.
    inside(|| {
        if of_parent.mark.compare_exchange(WIPED, LEAVING, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Ok(());
        }
        for number in descriptor_floor::disown() {
            // SAFETY: a descriptor of the parent's node, whose memory is never used here again.
            unsafe { libc::syscall(libc::SYS_close, number) };
        }
        begin(of_parent.maps).inspect_err(|_| of_parent.mark.store(WIPED, Ordering::Release))
    })
}

/// Before `main`: reads the maps, and finds what was inherited.
pub(crate) fn begin_program() {
    let Some(maps) = maps::from_environment().filter(|maps| !maps.is_empty()) else { return };
    let inherited = placeholder::inherited();
    inherited.iter().copied().for_each(set_maybe);
    // Without memory the program finds no share.
    let _ = begin(Vec::leak(maps));
    working_directory::begin_program(&inherited);
}

fn begin(maps: &'static [Map]) -> Result<(), Errno> {
    let mark = new_mark()?;
    let sessions = maps.iter().map(|_| Mutex::new(None)).collect();
    let (opened, locked_files) = (RwLock::default(), Mutex::default());
    let process = Box::leak(Box::new(Process { maps, mark, number: getpid(), sessions, opened, locked_files }));
    PROCESS.store(std::ptr::from_mut(process), Ordering::Release);
    Ok(())
}

fn new_mark() -> Result<&'static AtomicU32, Errno> {
    let (bytes, rights) = (rustix::param::page_size(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, MapFlags::PRIVATE) }?;
    // SAFETY: the page was just mapped.
    unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }?;
    // SAFETY: the page is never unmapped, and only this reference leads to it.
    let mark: &'static AtomicU32 = unsafe { &*page.cast::<AtomicU32>() };
    mark.store(CURRENT, Ordering::Relaxed);
    Ok(mark)
}

impl Process {
    /// Whether this is a child of `vfork`, in the memory of its parent.
    pub(crate) fn is_guest(&self) -> bool {
        getpid() != self.number
    }

    /// The session of a map.
    ///
    /// # Errors
    /// `EIO`: standard error says why.
    pub(crate) fn session(&self, map: usize) -> Result<Arc<Session>, Errno> {
        let (slot, map) = (self.sessions.get(map).ok_or(Errno::IO)?, self.maps.get(map).ok_or(Errno::IO)?);
        let mut slot = locked(slot);
        if let Some(session) = &*slot {
            return Ok(Arc::clone(session));
        }
        let session = Session::open(map)?;
        *slot = Some(Arc::clone(&session));
        Ok(session)
    }

    /// The program ends: the server keeps nothing for it. A call that comes later begins anew.
    pub(crate) fn end(&self) {
        for slot in &self.sessions {
            // A thread that connects at this moment is cut off by the end of the program.
            let session = slot.try_lock().ok().and_then(|mut slot| slot.take());
            if let Some(session) = session {
                session.client.close();
            }
        }
        if let Ok(mut opened) = self.opened.try_write() {
            opened.clear();
        }
    }
}

/// A lock, also if a thread has panicked with it.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
