//! A registrar of this machine's own: the fixed buffers of an io_uring.
//!
//! The kernel pins the pages (`FOLL_PIN | FOLL_LONGTERM`) and from then on reads and writes *them*, not the addresses: the same
//! promise, and the same danger, as with a NIC. Counted against `RLIMIT_MEMLOCK`.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use io_uring::{IoUring, opcode, types};

use super::range::PageRange;
use super::registrar::{Refused, Registrar};
use crate::limits::REGISTERED_RANGE_BYTES_MAX;

/// A ring with a table of fixed buffers.
pub struct PinnedBuffers {
    ring: Mutex<IoUring>,
    free: Mutex<Vec<u32>>,
    count: usize,
}

/// A pinned range, by its place in the table.
#[derive(Debug)]
pub struct PinnedBuffer {
    index: u32,
    range: PageRange,
}

impl PinnedBuffer {
    pub(super) fn index(&self) -> u32 {
        self.index
    }

    pub(super) fn range(&self) -> PageRange {
        self.range
    }
}

impl PinnedBuffers {
    /// Room for `count` ranges, at most 16,384.
    pub fn new(count: u32) -> std::io::Result<Self> {
        let ring = IoUring::new(8)?;
        ring.submitter().register_buffers_sparse(count)?;
        let free = Mutex::new((0..count).rev().collect());
        Ok(Self { ring: Mutex::new(ring), free, count: count as usize })
    }

    /// Writes `bytes` bytes at `address`, as they are in the pinned pages, to `file` at `offset`. What a NIC's read of
    /// this memory would be.
    pub fn write_to(
        &self,
        buffer: &PinnedBuffer,
        address: usize,
        bytes: usize,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> std::io::Result<usize> {
        let part = PageRange::covering(address, bytes).filter(|part| buffer.range.contains(*part));
        let (Some(_), Ok(bytes)) = (part, u32::try_from(bytes)) else {
            return Err(rustix::io::Errno::INVAL.into());
        };
        let pointer = std::ptr::with_exposed_provenance(address);
        let index = buffer.index as u16;
        let write = opcode::WriteFixed::new(types::Fd(file.as_raw_fd()), pointer, bytes, index).offset(offset);
        let mut ring = self.ring();
        // SAFETY: the kernel reads pinned pages, which the buffer keeps pinned until after the completion below.
        unsafe { ring.submission().push(&write.build()) }.map_err(|_| rustix::io::Errno::AGAIN)?;
        loop {
            match ring.submit_and_wait(1) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) => return Err(error),
                Ok(_) => {
                    if let Some(completion) = ring.completion().next() {
                        let result = completion.result();
                        return usize::try_from(result).map_err(|_| std::io::Error::from_raw_os_error(-result));
                    }
                }
            }
        }
    }

    /// The ring in whose table the ranges are.
    pub(super) fn ring(&self) -> MutexGuard<'_, IoUring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, index: u32, base: *mut libc::c_void, bytes: usize) -> std::io::Result<()> {
        let buffer = [libc::iovec { iov_base: base, iov_len: bytes }];
        let ring = self.ring();
        // SAFETY: the pages are pinned by the call; the kernel uses them, whatever becomes of their addresses.
        unsafe { ring.submitter().register_buffers_update(index, &buffer, None) }
    }

    fn give_back(&self, index: u32) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(index);
    }
}

impl Registrar for PinnedBuffers {
    type Handle = PinnedBuffer;

    fn register(&self, range: PageRange) -> Result<PinnedBuffer, Refused> {
        if range.bytes() > REGISTERED_RANGE_BYTES_MAX {
            return Err(Refused::TooLong { bytes: range.bytes(), bytes_max: REGISTERED_RANGE_BYTES_MAX });
        }
        let index = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let index = index.ok_or(Refused::TooMany { handles_max: self.count })?;
        match self.set(index, std::ptr::with_exposed_provenance_mut(range.start()), range.bytes()) {
            Ok(()) => Ok(PinnedBuffer { index, range }),
            Err(error) => {
                self.give_back(index);
                Err(Refused::from_errno(error, range))
            }
        }
    }

    fn deregister(&self, handle: PinnedBuffer) {
        match self.set(handle.index, std::ptr::null_mut(), 0) {
            Ok(()) => self.give_back(handle.index),
            // The place is lost with what it pins; the ring's end frees both.
            Err(error) => tracing::error!(%error, index = handle.index, "a pinned range cannot be released"),
        }
    }

    fn survives_fork(&self) -> bool {
        true
    }
}

impl std::fmt::Debug for PinnedBuffers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("PinnedBuffers").field("count", &self.count).finish_non_exhaustive()
    }
}
