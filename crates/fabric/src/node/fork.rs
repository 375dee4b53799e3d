//! How a node detects that it is in the child of a fork: a page that the kernel wipes there (`MADV_WIPEONFORK`, Linux 4.14).
//! The node reads it before it takes any lock that another thread of the parent may have held. This also works for forks by
//! the bare system call.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The mark of one node. A node that is opened in a child has its own.
pub(super) struct Mark {
    page: &'static AtomicU32,
    bytes: usize,
}

impl Mark {
    pub(super) fn new() -> std::io::Result<Self> {
        let bytes = rustix::param::page_size();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)? };
        // SAFETY: the range was just mapped, aligned to pages, and is this mark's until it is dropped; nothing else gets the
        // reference.
        let mark = unsafe { Self { page: &*page.cast::<AtomicU32>(), bytes } };
        // SAFETY: the range was just mapped.
        unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork)? };
        mark.page.store(1, Ordering::Relaxed);
        Ok(mark)
    }

    /// Whether this process is a child of the one that made the mark.
    pub(super) fn is_child(&self) -> bool {
        self.page.load(Ordering::Relaxed) == 0
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and the reference goes with the mark.
        let _ = unsafe { munmap(std::ptr::from_ref(self.page).cast_mut().cast(), self.bytes) };
    }
}
