//! The memory of a job in one process.
//!
//! The program has the *view*, at the same address in every process: private memory, of which userfaultfd hands over accesses to pages that are
//! not there, and stores to pages that are write-protected. The pager fills pages by the kernel's copy, and takes them by moving them
//! to the *stage*, pages of its own: that is atomic for the program's threads, frees the page's frame, and the kernel refuses it while a device
//! may still write to the page (docs/decisions/0039). Neighbouring pages are filled and taken by one call.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use byway_reactor::userfault::{Event, FaultKind, Features, FillError, Modes, OpenError, Partly, Read, Userfault};
use byway_service::coherence::Mode;
use byway_service::dsm::Page;
use byway_service::limits::DSM_RUN_PAGES_MAX;
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

const STAGE_BYTES: usize = DSM_RUN_PAGES_MAX * PAGE_BYTES;

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
    /// A run of pages, of the thread that has the pager.
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

/// The only page of a run.
fn alone(taken: Vec<Bytes>) -> Result<Bytes, TakeError> {
    taken.into_iter().next().ok_or(TakeError::Dropped)
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
        let stage = unsafe { mmap_anonymous(std::ptr::null_mut(), STAGE_BYTES, rights, flags) }?;
        let stage = MappedRange { at: stage.expose_provenance(), bytes: STAGE_BYTES };
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
        let view = self.view_of(first, pages as usize);
        let rights = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: a part of the view; more rights take nothing from what refers to it.
        unsafe { mprotect(with_exposed_provenance_mut(view.start), view.len(), rights) }
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

    /// Where the program has neighbouring pages, `pages` from this one on.
    fn view_of(&self, first: Page, pages: usize) -> Range<usize> {
        let (at, bytes) = (first as usize * PAGE_BYTES, pages * PAGE_BYTES);
        assert!(at + bytes <= self.view.bytes, "{pages} pages from {first} on are not in the area");
        self.view.at + at..self.view.at + at + bytes
    }

    /// Takes loads and stores from the program, and gives what the page held.
    pub(crate) fn take(&self, page: Page) -> Result<Bytes, TakeError> {
        self.take_run(page, 1, Mode::None).and_then(alone)
    }

    /// Takes stores from the program, and gives what the page holds.
    pub(crate) fn protect(&self, page: Page) -> Result<Bytes, TakeError> {
        self.take_run(page, 1, Mode::Read).and_then(alone)
    }

    /// Lets the program store to a page that it could only load from, and gives what the page held before the first of these stores.
    pub(crate) fn open_for_stores(&self, page: Page) -> Result<Bytes, TakeError> {
        self.take_run(page, 1, Mode::Write).and_then(alone)
    }

    /// Takes at most [`DSM_RUN_PAGES_MAX`] neighbouring pages from the program, and gives what they hold. The program keeps loads of them (`Read`),
    /// loads and stores (`Write`), which begin when the bytes were read, or nothing. Stops before a page that cannot be taken: the next call, from there
    /// on, says why.
    pub(crate) fn take_run(&self, first: Page, pages: usize, keeps: Mode) -> Result<Vec<Bytes>, TakeError> {
        let bytes = self.stage_run(first, pages)?;
        // SAFETY: the stage has as many bytes in pages, which no other thread uses until they are dropped below.
        let staged = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(self.stage.at), bytes) };
        // The protection alone does not tell of a device that may still write: so a page that the program keeps was moved too.
        let filled = if keeps == Mode::None { Ok(()) } else { self.fill(first, staged, keeps) };
        let taken = staged.as_chunks::<PAGE_BYTES>().0.iter().map(|page| Box::new(*page)).collect();
        // SAFETY: drops the pages on the stage, to which nothing refers any more.
        let dropped = unsafe { madvise(with_exposed_provenance_mut(self.stage.at), bytes, Advice::LinuxDontNeed) };
        filled.and(dropped.map_err(FillError::Other)).map_err(TakeError::Kernel)?;
        Ok(taken)
    }

    /// Moves neighbouring pages to the stage, up to one that cannot be moved. Gives their bytes: those of one page at least.
    fn stage_run(&self, first: Page, pages: usize) -> Result<usize, TakeError> {
        let view = self.view_of(first, pages);
        assert!(view.len() <= self.stage.bytes, "{pages} pages are no run");
        // SAFETY: accesses to the pages are handed over from now on, until they are filled again; nothing lies on the stage.
        match unsafe { self.userfault.move_pages(self.stage.at, view.start, view.len()) } {
            Ok(()) => Ok(view.len()),
            Err(Partly { bytes, .. }) if bytes > 0 => Ok(bytes),
            // The kernel moves no run that lies in two mappings: segments may be several.
            Err(_) if pages > 1 => self.stage_run(first, 1),
            Err(Partly { error: FillError::Busy | FillError::Changing, .. }) => Err(TakeError::Pinned),
            Err(Partly { error: FillError::NoMapping, .. }) => Err(TakeError::Dropped),
            Err(Partly { error, .. }) => Err(TakeError::Kernel(error)),
        }
    }

    /// Takes copies that the program could only load from, and drops them. A device may go on reading what they held.
    pub(crate) fn drop_copies(&self, first: Page, pages: usize) -> Result<(), FillError> {
        let view = self.view_of(first, pages);
        // SAFETY: pages of the view, whose contents other processes have; the program's next accesses are handed over.
        let dropped = unsafe { madvise(with_exposed_provenance_mut(view.start), view.len(), Advice::LinuxDontNeed) };
        dropped.map_err(FillError::Other)
    }

    /// Gives neighbouring pages that are not there to the program, for loads or for loads and stores, and wakes the threads that wait for them.
    pub(crate) fn fill(&self, first: Page, bytes: &[u8], mode: Mode) -> Result<(), FillError> {
        let mut at = 0;
        while at < bytes.len() {
            let next = first + (at / PAGE_BYTES) as Page;
            at += self.fill_some(next, &bytes[at..], mode != Mode::Write)?;
        }
        Ok(())
    }

    /// Fills pages, up to one that cannot be filled with those before it. Gives their bytes: those of one page at least.
    fn fill_some(&self, first: Page, bytes: &[u8], protect: bool) -> Result<usize, FillError> {
        let view = self.view_of(first, bytes.len() / PAGE_BYTES);
        match self.userfault.copy(view.start, bytes, protect) {
            Ok(()) => Ok(bytes.len()),
            Err(Partly { bytes, .. }) if bytes > 0 => Ok(bytes),
            // As above.
            Err(_) if bytes.len() > PAGE_BYTES => self.fill_some(first, &bytes[..PAGE_BYTES], protect),
            Err(Partly { error, .. }) => Err(error),
        }
    }

    /// Gives loads, or loads and stores, of a page that is there to the program, and wakes the threads that wait for it.
    pub(crate) fn allow(&self, page: Page, mode: Mode) -> Result<(), FillError> {
        let view = self.view_of(page, 1);
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
        let place = (self.view_of(page, 1).start / PAGE_BYTES * entry.len()) as u64;
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
