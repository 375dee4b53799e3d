//! Mappings, by address: no references to them are ever made, since they come and go.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Mutex;

use byway_fabric::registration::PageRange;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap, mremap_fixed, munmap,
};

pub const PAGE: usize = 4096;
const WRITABLE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Watched pages for whoever wants to unmap one at an awkward moment.
static BALLAST: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// A mapping of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub address: usize,
    pub pages: usize,
    pub is_file: bool,
}

impl Region {
    pub fn anonymous(pages: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(null_mut(), pages * PAGE, WRITABLE, MapFlags::PRIVATE) };
        Self { address: base.unwrap().expose_provenance(), pages, is_file: false }
    }

    pub fn of_file(pages: usize) -> Self {
        let file = memfd(pages);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(null_mut(), pages * PAGE, WRITABLE, MapFlags::SHARED, &file, 0) };
        Self { address: base.unwrap().expose_provenance(), pages, is_file: true }
    }

    pub fn range(self) -> PageRange {
        PageRange::covering(self.address, self.pages * PAGE).unwrap()
    }

    pub fn part(self, first: usize, pages: usize) -> PageRange {
        assert!(first + pages <= self.pages);
        PageRange::covering(self.address + first * PAGE, pages * PAGE).unwrap()
    }

    pub fn unmap(self) {
        unmap(self.address, self.pages);
    }

    /// Unmaps its first pages; what is left of it.
    pub fn without_first(self, pages: usize) -> Self {
        unmap(self.address, pages);
        Self { address: self.address + pages * PAGE, pages: self.pages - pages, ..self }
    }

    /// Puts other pages at its addresses, in one call.
    pub fn replace(self) -> Self {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: the mapping that this replaces is ours, and nothing refers to it.
        let base = unsafe { mmap_anonymous(self.pointer(), self.pages * PAGE, WRITABLE, flags) };
        assert_eq!(base.unwrap().addr(), self.address);
        Self { is_file: false, ..self }
    }

    pub fn discard(self, first: usize, pages: usize) {
        let part = self.part(first, pages);
        // SAFETY: the mapping is ours, and nothing refers to it.
        unsafe { madvise(with_exposed_provenance_mut(part.start()), part.bytes(), Advice::LinuxDontNeed) }.unwrap();
    }

    /// Moves or grows it, wherever the kernel likes. It stays as it is where it was divided: the watch over a neighbour's
    /// mapping that the kernel had joined with one of ours may end in the middle of what we have put there since.
    pub fn resize(self, pages: usize) -> Self {
        let (old, new) = (self.pages * PAGE, pages * PAGE);
        // SAFETY: the mapping is ours, and nothing refers to it.
        let base = unsafe { mremap(self.pointer(), old, new, MremapFlags::MAYMOVE) };
        if base == Err(rustix::io::Errno::FAULT) {
            return self;
        }
        Self { address: base.unwrap().expose_provenance(), pages, ..self }
    }

    /// Moves its pages elsewhere; it has new ones from then on. `None` where it was divided, see [`resize`](Self::resize).
    pub fn move_pages_out(self) -> Option<Self> {
        let bytes = self.pages * PAGE;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        // SAFETY: the mapping is ours, and nothing refers to it. The last argument is where it would like to be: anywhere.
        let base = unsafe { libc::mremap(self.pointer(), bytes, bytes, flags, null_mut::<std::ffi::c_void>()) };
        if base == libc::MAP_FAILED {
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
            return None;
        }
        Some(Self { address: base.expose_provenance(), ..self })
    }

    /// Moves it over another, whose pages go. `None` where it was divided, see [`resize`](Self::resize): it stays, and the
    /// other has new pages.
    pub fn move_over(self, other: Self) -> Option<Self> {
        let (old, new) = (self.pages * PAGE, other.pages * PAGE);
        // SAFETY: both mappings are ours, and nothing refers to them.
        let base = unsafe { mremap_fixed(self.pointer(), old, new, MremapFlags::MAYMOVE, other.pointer()) };
        if base == Err(rustix::io::Errno::FAULT) {
            other.replace();
            return None;
        }
        assert_eq!(base.unwrap().addr(), other.address);
        Some(Self { is_file: self.is_file, ..other })
    }

    fn pointer(self) -> *mut std::ffi::c_void {
        with_exposed_provenance_mut(self.address)
    }
}

pub fn memfd(pages: usize) -> OwnedFd {
    let file = rustix::fs::memfd_create("remapped", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(file.as_fd(), (pages * PAGE) as u64).unwrap();
    file
}

/// Writes at an address of a region of this thread's.
pub fn write(address: usize, stamp: u64) {
    // SAFETY: the address is that of eight aligned bytes of a mapping of the caller's, writable, to which nothing refers.
    unsafe { with_exposed_provenance_mut::<u64>(address).write_volatile(stamp) };
}

/// Reads what this process or another has written there.
pub fn read(address: usize) -> u64 {
    // SAFETY: as in `write`.
    unsafe { with_exposed_provenance_mut::<u64>(address).read_volatile() }
}

fn unmap(address: usize, pages: usize) {
    // SAFETY: the mapping is ours, and nothing refers to it.
    unsafe { munmap(with_exposed_provenance_mut(address), pages * PAGE) }.unwrap();
}

/// Leaves a watched page to [`unmap_one`].
pub fn leave_ballast(page: Region) {
    BALLAST.lock().unwrap().push(page.address);
}

pub fn ballast_pages() -> usize {
    BALLAST.lock().unwrap().len()
}

/// Unmaps a watched page, if there is one: waits until its event is read.
pub fn unmap_one() {
    let page = BALLAST.lock().unwrap().pop();
    if let Some(address) = page {
        unmap(address, 1);
    }
}

/// The same in a handler of a fork.
pub extern "C" fn unmap_ballast() {
    unmap_one();
}
