//! The registration cache and forks.
//!
//! The child has the parent's tables, but neither its threads nor its events, and its pages are copies: every entry of the
//! cache would be wrong there. So in a child nothing is found, registered or deregistered. The child recognises itself by a
//! page that the kernel wipes at a fork (`MADV_WIPEONFORK`), which also works for forks by the bare system call. It reads
//! the page before it takes any lock, because the parent may have held it.
//!
//! No lock is held while a process forks. A `pthread_atfork` handler that held the cache's lock would wait for ever if
//! another library's handler frees memory meanwhile: its `munmap` waits for an event to be read, for which the lock is
//! needed. Instead the parent's handlers tell the caches when a fork begins and ends. Caches whose registrations do not
//! [survive](super::Registrar::survives_fork) a fork find and keep nothing in between.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use super::Unavailable;
use super::monitor;
use super::seeded::{self, Bug};

/// What the page has in the process that mapped it.
const ORIGINAL: u32 = 1;

static PAGE: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// Prepares to notice forks of this process.
pub(super) fn prepare() -> Result<(), Unavailable> {
    PAGE.get_or_init(map_page).ok_or(Unavailable::NoForkNotice)?;
    // SAFETY: the handlers are functions that are there for as long as the program is.
    match unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) } {
        0 => Ok(()),
        _ => Err(Unavailable::NoForkNotice),
    }
}

/// Whether this process is the child of one that had the page.
pub(super) fn is_child() -> bool {
    let page = PAGE.get().copied().flatten();
    page.is_some_and(|page| page.load(Ordering::Relaxed) != ORIGINAL) && !seeded::is(Bug::ChildUnaware)
}

fn map_page() -> Option<&'static AtomicU32> {
    let bytes = rustix::param::page_size();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the range was just mapped.
    unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }.ok()?;
    // SAFETY: it is mapped for as long as the process lives, aligned, and used as this alone.
    let page = unsafe { &*page.cast::<AtomicU32>() };
    page.store(ORIGINAL, Ordering::Relaxed);
    Some(page)
}

extern "C" fn before() {
    if !is_child() {
        monitor::fork_begins();
    }
}

extern "C" fn after_in_parent() {
    if !is_child() {
        monitor::fork_ends();
    }
}

/// Only what may be done in the child of a process with threads: it closes a descriptor.
extern "C" fn after_in_child() {
    monitor::forget_in_child();
}
