//! The memory of a [`FarMemory`](super::FarMemory): private and anonymous, with its faults handed over.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use byway_reactor::userfault::helper::MOVES_MAX;
use byway_reactor::userfault::{Event, FaultKind, Features, FillError, Filled, Modes, OpenError, Userfault};
use byway_service::memory::pager::PAGE_BYTES;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const FEATURES: Features = Features::WRITE_PROTECT.and(Features::MOVE).and(Features::POISON);

/// A fault of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// From the region's first page on.
    pub(super) page: u64,
    pub(super) writes: bool,
    /// The page is there, and write-protected.
    pub(super) is_protected: bool,
}

/// A mapping that ends with this.
#[derive(Debug)]
struct MappedRange(Range<usize>);

impl MappedRange {
    fn new(bytes: usize) -> Result<Self, Errno> {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, flags) }?;
        let range = Self(at.expose_provenance()..at.expose_provenance() + bytes);
        // A forked child has no pager; a page of the kernel's larger sizes cannot be moved alone.
        for advice in [Advice::LinuxDontFork, Advice::LinuxNoHugepage] {
            // SAFETY: the mapping just made, which nothing refers to; the advice changes no contents.
            match unsafe { madvise(at, bytes, advice) } {
                // A kernel without large pages.
                Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => {}
                done => done?,
            }
        }
        Ok(range)
    }
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        // SAFETY: `new` has mapped it, and it is owned: no reference to its bytes exists any more.
        let _ = unsafe { munmap(with_exposed_provenance_mut(self.0.start), self.0.len()) };
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Region {
    userfault: Userfault,
    view: MappedRange,
    /// Where pages are moved to, [`MOVES_MAX`] at most; the pager's thread alone uses it.
    stage: MappedRange,
}

/// Why there is no region.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegionError {
    #[error(transparent)]
    Userfault(#[from] OpenError),
    #[error(transparent)]
    Kernel(#[from] Errno),
}

impl Region {
    /// So many bytes of zeroes; whole pages.
    pub(super) fn new(bytes: usize) -> Result<Self, RegionError> {
        // A system call that is given a buffer in the region faults in the kernel: only where that may be handed over it works.
        let userfault = match Userfault::open(FEATURES, false) {
            Err(OpenError::NotPermitted) => Userfault::open(FEATURES, true),
            other => other,
        }?;
        let (view, stage) = (MappedRange::new(bytes)?, MappedRange::new(MOVES_MAX * PAGE_BYTES)?);
        // SAFETY: nothing refers to the view yet. The pager fills each page with zeroes at first, and then with what it held.
        unsafe { userfault.register(view.0.clone(), Modes::MISSING.and(Modes::WRITE_PROTECT)) }?;
        // SAFETY: the stage is read only where a page was moved to.
        unsafe { userfault.register(stage.0.clone(), Modes::MISSING) }?;
        Ok(Self { userfault, view, stage })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        with_exposed_provenance_mut(self.view.0.start)
    }

    pub(super) fn len(&self) -> usize {
        self.view.0.len()
    }

    /// Readable when the program has faulted.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.userfault.as_fd()
    }

    /// Takes the faults that are there.
    pub(super) fn faults(&self, mut take: impl FnMut(Fault)) {
        self.userfault.read(|event| {
            if let Event::Fault { address, write, kind, .. } = event {
                let page = (address.saturating_sub(self.view.0.start) / PAGE_BYTES) as u64;
                take(Fault { page, writes: write, is_protected: kind == FaultKind::WriteProtected });
            }
        });
    }

    fn pages(&self, page: u64, count: usize) -> Range<usize> {
        let start = self.view.0.start + page as usize * PAGE_BYTES;
        assert!(start + count * PAGE_BYTES <= self.view.0.end, "page {page} is in the region");
        start..start + count * PAGE_BYTES
    }

    /// Moves pages that lie side by side out of the region, and gives what each held. An error is that of the first page only if none was moved.
    pub(super) fn take(
        &self,
        page: u64,
        count: usize,
        mut give: impl FnMut(usize, &[u8; PAGE_BYTES]),
    ) -> Result<(), FillError> {
        let bytes = count.min(MOVES_MAX) * PAGE_BYTES;
        let from = self.pages(page, count.min(MOVES_MAX)).start;
        // SAFETY: accesses to the pages are handed over from now on, until they are filled again with the same bytes; nothing lies on
        // the stage.
        let moved = unsafe { self.userfault.move_pages(self.stage.0.start, from, bytes) };
        let done = moved.map_or_else(|partly| partly.bytes, |()| bytes) / PAGE_BYTES;
        for at in 0..done {
            // SAFETY: the stage has so many pages, which no other thread uses, and they stay until `give` has returned.
            give(at, unsafe { &*with_exposed_provenance(self.stage.0.start + at * PAGE_BYTES) });
        }
        let stage = with_exposed_provenance_mut(self.stage.0.start);
        // A program may have locked all of its memory.
        let drops = Advice::LinuxDontneedLocked;
        // SAFETY: drops the pages on the stage, to which nothing refers.
        let dropped = if done == 0 { Ok(()) } else { unsafe { madvise(stage, done * PAGE_BYTES, drops) } };
        dropped.map_err(FillError::Other)?;
        moved.map_err(|partly| partly.error)
    }

    /// Gives pages to the program, and wakes the threads that wait for them. With `protect`, the first write to each is told.
    pub(super) fn fill(&self, page: u64, bytes: &[u8], protect: bool) -> Filled {
        self.userfault.copy(self.pages(page, bytes.len() / PAGE_BYTES).start, bytes, protect)
    }

    /// Lets the program write to a page, and wakes its threads.
    pub(super) fn unprotect(&self, page: u64) -> Result<(), FillError> {
        self.userfault.write_protect(self.pages(page, 1), false, false)
    }

    /// Wakes the threads that wait for a page.
    pub(super) fn wake(&self, page: u64) {
        self.userfault.wake(self.pages(page, 1));
    }

    /// Has accesses to a page end in SIGBUS.
    pub(super) fn poison(&self, page: u64) -> Filled {
        self.userfault.poison(self.pages(page, 1))
    }
}
