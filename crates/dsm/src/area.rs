//! The memory of a job in one process: a file in memory, mapped twice.
//!
//! The program has the *view*, at the same address in every process; userfaultfd hands over its accesses to pages that are not
//! mapped there, and its stores to pages that are write-protected. The pager has the *alias*, through which it reads and fills
//! pages without faulting.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::with_exposed_provenance_mut;

use byway_reactor::userfault::{Event, Features, FillError, Modes, OpenError, Read, Userfault};
use byway_service::coherence::Mode;
use byway_service::dsm::Page;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::limits::{AREA_ADDRESS, PAGE_BYTES};

/// Why a process has no memory for its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AreaError {
    /// Something of the process lies where segments must lie.
    #[error(
        "addresses from {AREA_ADDRESS:#x} on are in use in this process, and segments must lie there in every process"
    )]
    Address,
    /// No userfaultfd.
    #[error("shared memory needs userfaultfd: {0}")]
    Userfault(#[from] OpenError),
    /// The kernel's pages are not those of the protocol.
    #[error("this machine has pages of {0} bytes, and shared memory needs pages of {PAGE_BYTES}")]
    PageSize(usize),
    /// The kernel's.
    #[error("the kernel refuses memory for the segments: {0}")]
    Kernel(#[from] Errno),
}

/// A fault of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) page: Page,
    pub(crate) mode: Mode,
}

#[derive(Debug)]
pub(crate) struct Area {
    alias: usize,
    /// Where the program's view is, once it is mapped.
    view: Option<usize>,
    bytes: usize,
    userfault: Userfault,
    _file: OwnedFd,
}

impl Area {
    /// An area of so many pages, none of which the program can use yet.
    pub(crate) fn new(pages: u64) -> Result<Self, AreaError> {
        let page_bytes = rustix::param::page_size();
        if page_bytes != PAGE_BYTES {
            return Err(AreaError::PageSize(page_bytes));
        }
        let bytes = pages as usize * PAGE_BYTES;
        let features = Features::MISSING_SHARED
            .and(Features::MINOR_SHARED)
            .and(Features::WRITE_PROTECT)
            .and(Features::WRITE_PROTECT_SHARED);
        // A system call that is given a buffer in a segment faults in the kernel: only where that may be handed over it works.
        let userfault = match Userfault::open(features, false) {
            Err(OpenError::NotPermitted) => Userfault::open(features, true),
            other => other,
        }?;
        let file = memfd_create("byway-dsm", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes as u64)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let alias = unsafe { mmap(std::ptr::null_mut(), bytes, rights, flags, &file, 0) }?.expose_provenance();
        let fixed = flags | MapFlags::FIXED_NOREPLACE;
        // SAFETY: a new mapping that replaces none.
        let view = unsafe { mmap(with_exposed_provenance_mut(AREA_ADDRESS), bytes, rights, fixed, &file, 0) };
        let mut area = Self { alias, view: None, bytes, userfault, _file: file };
        let at = view.map_err(|error| if error == Errno::EXIST { AreaError::Address } else { error.into() })?;
        if at.expose_provenance() != AREA_ADDRESS {
            // A kernel that does not know the flag takes the address for a hint.
            // SAFETY: the mapping just made.
            let _ = unsafe { munmap(at, bytes) };
            return Err(AreaError::Address);
        }
        area.view = Some(AREA_ADDRESS);
        let modes = Modes::MISSING.and(Modes::MINOR).and(Modes::WRITE_PROTECT);
        // A child of a fork would share the file's pages and not the protocol.
        // SAFETY: the view just made, which nothing refers to; advice that changes no contents.
        unsafe { madvise(at, bytes, Advice::LinuxDontFork) }?;
        // SAFETY: nothing refers to the view but atomics and pointers that segments give, and the pager fills its pages with what
        // the program has stored.
        unsafe { area.userfault.register(AREA_ADDRESS..AREA_ADDRESS + bytes, modes) }?;
        Ok(area)
    }

    /// Readable when the program has faulted.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.userfault.as_fd()
    }

    /// Takes the faults that are there. False if none was.
    pub(crate) fn faults(&self, mut take: impl FnMut(Fault)) -> bool {
        let read = self.userfault.read(|event| {
            if let Event::Fault { address, write, .. } = event {
                let page = (address.saturating_sub(AREA_ADDRESS) / PAGE_BYTES) as Page;
                take(Fault { page, mode: if write { Mode::Write } else { Mode::Read } });
            }
        });
        matches!(read, Read::Messages(_))
    }

    fn view_of(&self, page: Page) -> std::ops::Range<usize> {
        let at = page as usize * PAGE_BYTES;
        assert!(at < self.bytes, "page {page} is not in the area");
        AREA_ADDRESS + at..AREA_ADDRESS + at + PAGE_BYTES
    }

    fn alias_of(&self, page: Page) -> *mut u8 {
        let at = page as usize * PAGE_BYTES;
        assert!(at < self.bytes, "page {page} is not in the area");
        with_exposed_provenance_mut(self.alias + at)
    }

    /// What the page holds. To be called when the program cannot store to it.
    pub(crate) fn read(&self, page: Page) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        // SAFETY: the page lies in the alias, and no thread stores to it: the program's view is unmapped or write-protected.
        unsafe { std::ptr::copy_nonoverlapping(self.alias_of(page), bytes.as_mut_ptr(), PAGE_BYTES) };
        bytes
    }

    /// Fills the page. To be called when the program cannot use it.
    pub(crate) fn fill(&self, page: Page, bytes: &[u8; PAGE_BYTES]) {
        // SAFETY: the page lies in the alias, and no other thread uses it: it is not mapped in the program's view.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.alias_of(page), PAGE_BYTES) };
    }

    /// Has the file have the page, as zeroes if it was never touched.
    pub(crate) fn touch(&self, page: Page) {
        // SAFETY: as in `fill`; nothing is changed of a page that is all zeroes.
        unsafe { self.alias_of(page).write_volatile(0) };
    }

    /// Takes stores from the program.
    pub(crate) fn protect(&self, page: Page) -> Result<(), FillError> {
        self.userfault.write_protect(self.view_of(page), true, false)
    }

    /// Takes loads and stores from the program.
    pub(crate) fn unmap(&self, page: Page) -> Result<(), FillError> {
        let view = self.view_of(page);
        // SAFETY: a page of the view, whose contents stay in the file; the program's next access is handed over.
        let dropped = unsafe { madvise(with_exposed_provenance_mut(view.start), PAGE_BYTES, Advice::LinuxDontNeed) };
        dropped.map_err(FillError::Other)
    }

    /// Gives loads, or loads and stores, to the program and wakes the threads that wait for the page.
    pub(crate) fn allow(&self, page: Page, mode: Mode) -> Result<(), FillError> {
        let view = self.view_of(page);
        match self.userfault.resume(view.clone(), mode == Mode::Read).map_err(|partly| partly.error) {
            // It is mapped already, perhaps write-protected.
            Err(FillError::Exists) if mode == Mode::Write => self.userfault.write_protect(view, false, false),
            Err(FillError::Exists) => {
                self.userfault.wake(view);
                Ok(())
            }
            done => done,
        }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if let Some(view) = self.view {
            self.userfault.unregister(view..view + self.bytes);
            // SAFETY: the mapping of `new`. The job has no segments any more (they borrow it), and the pager has ended.
            let _ = unsafe { munmap(with_exposed_provenance_mut(view), self.bytes) };
        }
        // SAFETY: the other mapping of `new`, which only the pager has used.
        let _ = unsafe { munmap(with_exposed_provenance_mut(self.alias), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use byway_skip::{SkipReason, skip_this};

    use super::*;

    #[test]
    fn memory_that_lies_there_already_stays() {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE);
        let there = with_exposed_provenance_mut(AREA_ADDRESS);
        // SAFETY: a new mapping that replaces none.
        let there = unsafe { rustix::mm::mmap_anonymous(there, PAGE_BYTES, rights, flags) }.unwrap().cast::<u8>();
        // SAFETY: the mapping just made.
        unsafe { there.write_volatile(7) };
        match Area::new(4) {
            Err(AreaError::Address) => {}
            Err(AreaError::Userfault(error)) => skip_this(SkipReason::Machine(&error.to_string())),
            other => panic!("{other:?}"),
        }
        // SAFETY: the same mapping; without it, the test ends by a signal.
        assert_eq!(unsafe { there.read_volatile() }, 7);
    }
}
