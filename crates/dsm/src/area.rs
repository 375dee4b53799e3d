//! The memory of a job in one process.
//!
//! The program has the *view*, at the same address in every process: private memory, of which userfaultfd hands over accesses to pages that are
//! not there, and stores to pages that are write-protected. The pager fills pages by the kernel's copy, and takes them by moving them
//! to the *stage*, a page of its own: that is atomic for the program's threads, frees the page's frame, and the kernel refuses it while a device
//! may still write to the page (docs/decisions/0039).

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use byway_reactor::userfault::{Event, FaultKind, Features, FillError, Modes, OpenError, Read, Userfault};
use byway_service::coherence::Mode;
use byway_service::dsm::Page;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};

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
    #[error("shared memory needs userfaultfd with UFFDIO_MOVE (Linux 6.8): {0}")]
    Userfault(#[from] OpenError),
    /// The kernel's pages are not those of the protocol.
    #[error("this machine has pages of {0} bytes, and shared memory needs pages of {PAGE_BYTES}")]
    PageSize(usize),
    /// The kernel's.
    #[error("the kernel refuses memory for the segments: {0}")]
    Kernel(#[from] Errno),
}

/// Why a page was not taken from the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TakeError {
    /// A device reads or writes it, or may: to be tried again.
    #[error("a device has it pinned")]
    Pinned,
    /// It is not there.
    #[error("the program has dropped it (madvise, munmap or mremap of a segment)")]
    Dropped,
    /// The kernel's.
    #[error("{0} (a segment must not be locked in memory by itself)")]
    Kernel(FillError),
}

/// A fault of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) page: Page,
    pub(crate) mode: Mode,
    /// The page is not there; else it is write-protected.
    pub(crate) is_missing: bool,
}

/// The bytes of a page.
pub(crate) type Bytes = Box<[u8; PAGE_BYTES]>;

/// A mapping that ends with this.
#[derive(Debug)]
struct MappedRange {
    at: usize,
    bytes: usize,
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        // SAFETY: a mapping that `Area::new` has made. No segment refers to it (they borrow the job), and the pager has ended.
        let _ = unsafe { munmap(with_exposed_provenance_mut(self.at), self.bytes) };
    }
}

#[derive(Debug)]
pub(crate) struct Area {
    userfault: Userfault,
    view: MappedRange,
    /// One page, of the thread that has the pager.
    stage: MappedRange,
}

/// Whether this process may handle page faults as a job's processes must. Where it lies in memory is looked at by
/// [`Job::join`](crate::Job::join).
///
/// # Errors
/// `PageSize`, `Userfault`.
pub fn check() -> Result<(), AreaError> {
    open_userfault().map(drop)
}

fn open_userfault() -> Result<Userfault, AreaError> {
    let page_bytes = rustix::param::page_size();
    if page_bytes != PAGE_BYTES {
        return Err(AreaError::PageSize(page_bytes));
    }
    let features = Features::WRITE_PROTECT.and(Features::MOVE);
    // A system call that is given a buffer in a segment faults in the kernel: only where that may be handed over it works.
    Ok(match Userfault::open(features, false) {
        Err(OpenError::NotPermitted) => Userfault::open(features, true),
        other => other,
    }?)
}

impl Area {
    /// An area of so many pages, none of which the program can use yet.
    pub(crate) fn new(pages: u64) -> Result<Self, AreaError> {
        let userfault = open_userfault()?;
        let bytes = pages as usize * PAGE_BYTES;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let fixed = flags | MapFlags::FIXED_NOREPLACE;
        // What lies beyond the segments stays so: an access there is SIGSEGV.
        // SAFETY: a new mapping that replaces none.
        let view =
            unsafe { mmap_anonymous(with_exposed_provenance_mut(AREA_ADDRESS), bytes, ProtFlags::empty(), fixed) };
        let view = view.map_err(|error| if error == Errno::EXIST { AreaError::Address } else { error.into() })?;
        let view = MappedRange { at: view.expose_provenance(), bytes };
        if view.at != AREA_ADDRESS {
            // A kernel that does not know the flag takes the address for a hint.
            return Err(AreaError::Address);
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let stage = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, rights, flags) }?;
        let stage = MappedRange { at: stage.expose_provenance(), bytes: PAGE_BYTES };
        for MappedRange { at, bytes } in [&view, &stage] {
            let at = with_exposed_provenance_mut(*at);
            // A child of a fork would have the pages and not the protocol; a page of the kernel's larger sizes would not be one of the protocol's.
            for advice in [Advice::LinuxDontFork, Advice::LinuxNoHugepage] {
                // SAFETY: one of the mappings just made, which nothing refers to; the advice changes no contents.
                match unsafe { madvise(at, *bytes, advice) } {
                    // A kernel without large pages.
                    Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => {}
                    done => done?,
                }
            }
        }
        let range = |mapping: &MappedRange| mapping.at..mapping.at + mapping.bytes;
        // SAFETY: nothing refers to the view but atomics and pointers that segments give, and the pager fills its pages with what
        // the program has stored.
        unsafe { userfault.register(range(&view), Modes::MISSING.and(Modes::WRITE_PROTECT)) }?;
        // SAFETY: the thread that has the pager reads the stage only when a page was moved there.
        unsafe { userfault.register(range(&stage), Modes::MISSING) }?;
        Ok(Self { userfault, view, stage })
    }

    /// Lets the program use the addresses of a segment. Its pages come by faults.
    pub(crate) fn open_segment(&self, first: Page, pages: u64) -> Result<(), Errno> {
        let at = self.view_of(first).start;
        let bytes = pages as usize * PAGE_BYTES;
        assert!(at + bytes <= self.view.at + self.view.bytes, "the segment lies in the area");
        let rights = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: a part of the view; more rights take nothing from what refers to it.
        unsafe { mprotect(with_exposed_provenance_mut(at), bytes, rights) }
    }

    /// Readable when the program has faulted.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.userfault.as_fd()
    }

    /// Takes the faults that are there. False if none was.
    pub(crate) fn faults(&self, mut take: impl FnMut(Fault)) -> bool {
        let read = self.userfault.read(|event| {
            if let Event::Fault { address, write, kind, .. } = event {
                let page = (address.saturating_sub(AREA_ADDRESS) / PAGE_BYTES) as Page;
                let mode = if write { Mode::Write } else { Mode::Read };
                take(Fault { page, mode, is_missing: kind != FaultKind::WriteProtected });
            }
        });
        matches!(read, Read::Messages(_))
    }

    fn view_of(&self, page: Page) -> std::ops::Range<usize> {
        let at = page as usize * PAGE_BYTES;
        assert!(at < self.view.bytes, "page {page} is not in the area");
        self.view.at + at..self.view.at + at + PAGE_BYTES
    }

    /// Takes loads and stores from the program, and gives what the page held.
    pub(crate) fn take(&self, page: Page) -> Result<Bytes, TakeError> {
        // SAFETY: accesses to the page are handed over from now on, until it is filled again; nothing lies on the stage.
        let moved = unsafe { self.userfault.move_pages(self.stage.at, self.view_of(page).start, PAGE_BYTES) };
        moved.map_err(|partly| match partly.error {
            FillError::Busy | FillError::Changing => TakeError::Pinned,
            FillError::NoMapping => TakeError::Dropped,
            error => TakeError::Kernel(error),
        })?;
        let mut bytes = Box::new([0; PAGE_BYTES]);
        // SAFETY: the stage has a page, which no other thread uses.
        unsafe {
            std::ptr::copy_nonoverlapping(with_exposed_provenance(self.stage.at), bytes.as_mut_ptr(), PAGE_BYTES);
        };
        // SAFETY: drops the page on the stage, to which nothing refers.
        let dropped = unsafe { madvise(with_exposed_provenance_mut(self.stage.at), PAGE_BYTES, Advice::LinuxDontNeed) };
        dropped.map_err(|error| TakeError::Kernel(FillError::Other(error)))?;
        Ok(bytes)
    }

    /// Takes stores from the program, and gives what the page holds.
    pub(crate) fn protect(&self, page: Page) -> Result<Bytes, TakeError> {
        // The protection alone does not tell of a device that may still write.
        let bytes = self.take(page)?;
        self.fill(page, &bytes, Mode::Read).map_err(TakeError::Kernel)?;
        Ok(bytes)
    }

    /// Lets the program store to a page that it could only load from, and gives what the page held before the first of these stores.
    pub(crate) fn open_for_stores(&self, page: Page) -> Result<Bytes, TakeError> {
        let bytes = self.take(page)?;
        self.fill(page, &bytes, Mode::Write).map_err(TakeError::Kernel)?;
        Ok(bytes)
    }

    /// Takes a copy that the program could only load from, and drops it. A device may go on reading what it held.
    pub(crate) fn drop_copy(&self, page: Page) -> Result<(), FillError> {
        let view = self.view_of(page);
        // SAFETY: a page of the view, whose contents other processes have; the program's next access is handed over.
        let dropped = unsafe { madvise(with_exposed_provenance_mut(view.start), PAGE_BYTES, Advice::LinuxDontNeed) };
        dropped.map_err(FillError::Other)
    }

    /// Gives a page that is not there to the program, for loads or for loads and stores, and wakes the threads that wait for it.
    pub(crate) fn fill(&self, page: Page, bytes: &[u8; PAGE_BYTES], mode: Mode) -> Result<(), FillError> {
        self.userfault.copy(self.view_of(page).start, bytes, mode != Mode::Write).map_err(|partly| partly.error)
    }

    /// Gives loads, or loads and stores, of a page that is there to the program, and wakes the threads that wait for it.
    pub(crate) fn allow(&self, page: Page, mode: Mode) -> Result<(), FillError> {
        let view = self.view_of(page);
        if mode == Mode::Write {
            return self.userfault.write_protect(view, false, false);
        }
        self.userfault.wake(view);
        Ok(())
    }

    /// Whether the program has a page there, perhaps swapped out.
    pub(crate) fn is_there(&self, page: Page) -> std::io::Result<bool> {
        use std::os::unix::fs::FileExt;
        /// `PM_PRESENT` and `PM_SWAP` of the kernel's pagemap.
        const THERE: u64 = 0b11 << 62;
        let mut entry = [0; 8];
        let place = (self.view_of(page).start / PAGE_BYTES * entry.len()) as u64;
        std::fs::File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, place)?;
        Ok(u64::from_ne_bytes(entry) & THERE != 0)
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // Threads that wait there go on, to the end of their process.
        self.userfault.unregister(self.view.at..self.view.at + self.view.bytes);
    }
}

#[cfg(test)]
mod tests;
