//! The memory of a shared stream: an anonymous file that both ends map, sealed so that neither can take it away.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::io::Errno;

use crate::limits::{SHARED_RING_BYTES_MAX, SHARED_RING_BYTES_MIN};

/// Of the counters and flags of both rings, before the first ring's bytes.
pub(super) const CONTROL_BYTES: usize = 4096;

/// A mapping of a sealed file: the control page, then the two rings.
#[derive(Debug)]
pub(super) struct SharedMemory {
    base: NonNull<u8>,
    ring_bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread. What lies in it is read and written through atomics and
// raw copies alone, never through references, since the peer does so too.
unsafe impl Send for SharedMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes the memory of a new stream; the descriptor is for the peer.
    ///
    /// # Errors
    /// The kernel's: no descriptors, no memory.
    pub(super) fn create(ring_bytes: usize) -> Result<(Self, OwnedFd), Errno> {
        use rustix::fs::MemfdFlags;
        debug_assert!(is_ring(ring_bytes), "a power of two within the limits");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let fd = match rustix::fs::memfd_create("byway-stream", flags) {
            // Kernels before 6.3 do not know the flag.
            Err(Errno::INVAL) => rustix::fs::memfd_create("byway-stream", flags - MemfdFlags::NOEXEC_SEAL)?,
            made => made?,
        };
        rustix::fs::ftruncate(&fd, bytes(ring_bytes) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(fd.as_fd(), ring_bytes)?, fd))
    }

    /// Maps what a peer has made. Memory that it could take away again, or that has another size than it says, is refused:
    /// touching it would end this process.
    ///
    /// # Errors
    /// `EPROTO` for what is no such memory; else the kernel's.
    pub(super) fn open(fd: BorrowedFd<'_>, ring_bytes: usize) -> Result<Self, Errno> {
        let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let len = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if !sealed || !is_ring(ring_bytes) || len != bytes(ring_bytes) as u64 {
            return Err(Errno::PROTO);
        }
        Self::map(fd, ring_bytes)
    }

    fn map(fd: BorrowedFd<'_>, ring_bytes: usize) -> Result<Self, Errno> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, bytes(ring_bytes));
        // SAFETY: a new mapping at an address of the kernel's choice; it is used through raw pointers only.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED | MapFlags::NORESERVE, fd, 0)? };
        // SAFETY: the range was just mapped. Not in core dumps: it is others' data.
        let _ = unsafe { madvise(base, len, Advice::LinuxDontDump) };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, ring_bytes })
    }

    /// Bytes of each ring, a power of two.
    pub(super) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// Where a word of the control page lies, `at` bytes in; a multiple of 8.
    pub(super) fn control(&self, at: usize) -> *mut u8 {
        debug_assert!(at < CONTROL_BYTES && at.is_multiple_of(8), "in the control page");
        // SAFETY: within the mapping.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// Where the bytes of ring 0 or 1 begin.
    pub(super) fn ring(&self, number: usize) -> *mut u8 {
        debug_assert!(number < 2, "there are two");
        // SAFETY: within the mapping.
        unsafe { self.base.as_ptr().add(CONTROL_BYTES + number * self.ring_bytes) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this base and length; both ends of the stream that point into it hold this value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), bytes(self.ring_bytes)) };
    }
}

fn bytes(ring_bytes: usize) -> usize {
    CONTROL_BYTES + 2 * ring_bytes
}

fn is_ring(bytes: usize) -> bool {
    bytes.is_power_of_two() && (SHARED_RING_BYTES_MIN..=SHARED_RING_BYTES_MAX).contains(&bytes)
}
