//! Memory to register: private and anonymous, or a file's.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::super::PageRange;
use super::MeasureError;

const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A mapping whose pages are there.
#[derive(Debug)]
pub(super) struct PopulatedMapping {
    base: *mut u8,
    bytes: usize,
    /// The file that is mapped.
    file: Option<OwnedFd>,
}

impl PopulatedMapping {
    /// Private and anonymous.
    pub(super) fn private(bytes: usize) -> Result<Self, MeasureError> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, PROTECTION, MapFlags::PRIVATE) }?;
        Ok(Self::filled(base.cast(), bytes, None))
    }

    /// A file in memory that cannot shrink, mapped.
    pub(super) fn file(bytes: usize) -> Result<Self, MeasureError> {
        let file = rustix::fs::memfd_create("byway-measured", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        // SAFETY: a new mapping at an address of the kernel's choice; the file is as long and cannot shrink.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, PROTECTION, MapFlags::SHARED, &file, 0) }?;
        Ok(Self::filled(base.cast(), bytes, Some(file)))
    }

    fn filled(base: *mut u8, bytes: usize, file: Option<OwnedFd>) -> Self {
        base.expose_provenance();
        // SAFETY: the range was just mapped, for writing.
        unsafe { base.write_bytes(1, bytes) };
        Self { base, bytes, file }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of a byte in it.
    pub(super) fn address(&self, offset: usize) -> usize {
        self.base.addr() + offset
    }

    /// Some of its pages.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<PageRange, MeasureError> {
        debug_assert!(offset + bytes <= self.bytes);
        PageRange::covering(self.address(offset), bytes).ok_or(MeasureError::Empty)
    }

    /// The file that is mapped, if one is.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Copies as much as both have.
    pub(super) fn copy_from(&self, other: &Self) {
        // SAFETY: both mappings are so long, and two.
        unsafe { self.base.copy_from_nonoverlapping(other.base, self.bytes.min(other.bytes)) };
    }

    /// Reads into a part of it.
    pub(super) fn read_from(
        &self,
        offset: usize,
        bytes: usize,
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<usize, MeasureError> {
        assert!(offset + bytes <= self.bytes, "within the mapping");
        // SAFETY: the range lies in the mapping, without references to it.
        let into = unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), bytes) };
        Ok(rustix::io::pread(file, into, at)?)
    }
}

impl Drop for PopulatedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped above; nothing refers to it any more.
        let _ = unsafe { munmap(self.base.cast(), self.bytes) };
    }
}
