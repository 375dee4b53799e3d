//! Memory that is mapped once and goes when its owner goes: of this process alone, or shared with another through a sealed
//! anonymous file.
//!
//! Shared memory is safe to touch only if the other process cannot take it away: a file that became shorter than its
//! mapping ends whoever touches the rest (`SIGBUS`). So such files are sealed when they are made, and the seals of those
//! that others made are checked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::file::TMPFS_MAGIC;

/// What our own files are sealed with: their size stays, and nobody adds a seal that forbids writing.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping, given back when dropped.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread. This type itself gives out addresses alone: who makes
// references of them answers for it.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    /// Maps memory of this process alone. Pages are zeroes, touched when first used.
    pub(crate) fn private(bytes: usize) -> Result<Self, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, prot, flags)? };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// Makes a sealed file of so many bytes, and maps it. `name` is what `/proc` shows.
    pub(crate) fn sealed(name: &str, bytes: usize) -> Result<(Self, OwnedFd), Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let fd = match rustix::fs::memfd_create(name, flags) {
            // Kernels before 6.3 do not know the flag.
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags - MemfdFlags::NOEXEC_SEAL)?,
            made => made?,
        };
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok((Self::map(fd.as_fd(), bytes)?, fd))
    }

    /// Maps all of a file that a peer has made and says to have `bytes` bytes (more than none).
    ///
    /// # Errors
    /// `EPROTO` for one that the peer could take away again, that has another size, or whose pages may be lacking (huge
    /// ones): touching it could end this process. Else the kernel's.
    pub(crate) fn of_peer(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, Errno> {
        let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS));
        let len = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        let plain = rustix::fs::fstatfs(fd)?.f_type as i64 == TMPFS_MAGIC;
        if !sealed || !plain || bytes == 0 || len != bytes as u64 {
            return Err(Errno::PROTO);
        }
        Self::map(fd, bytes)
    }

    fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, Errno> {
        let (flags, prot) = (MapFlags::SHARED | MapFlags::NORESERVE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, flags, fd, 0)? };
        // SAFETY: the range was just mapped. Not in core dumps: it is others' data.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontDump) };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of byte `offset`, which must be in the region, or its end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes, "in the region");
        // SAFETY: within the mapping, by the caller's word.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped with this base and length; whoever uses an address of it keeps the region.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 8 << 10;

    fn file(flags: MemfdFlags, len: usize, seals: SealFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", flags | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn memory_that_could_be_taken_away_or_has_another_size_is_refused() {
        let none = MemfdFlags::empty();
        for lacking in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let fd = file(none, BYTES, SEALS - lacking);
            assert_eq!(Region::of_peer(fd.as_fd(), BYTES).unwrap_err(), Errno::PROTO, "{lacking:?}");
        }
        let fd = file(none, BYTES, SEALS);
        for said in [0, 1, BYTES - 1, BYTES + 1, 2 * BYTES, usize::MAX] {
            assert_eq!(Region::of_peer(fd.as_fd(), said).unwrap_err(), Errno::PROTO, "{said}");
        }
        assert_eq!(Region::of_peer(fd.as_fd(), BYTES).unwrap().bytes(), BYTES);
        let empty = file(none, 0, SEALS);
        assert_eq!(Region::of_peer(empty.as_fd(), 0).unwrap_err(), Errno::PROTO);
        let plain: OwnedFd = tempfile::tempfile().unwrap().into();
        rustix::fs::ftruncate(&plain, BYTES as u64).unwrap();
        assert_eq!(Region::of_peer(plain.as_fd(), BYTES).unwrap_err(), Errno::PROTO);
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Region::of_peer(socket.as_fd(), BYTES).unwrap_err(), Errno::PROTO);
        // It may not be written: there is nothing to map.
        let fixed = file(none, BYTES, SEALS | SealFlags::WRITE);
        assert_eq!(Region::of_peer(fixed.as_fd(), BYTES).unwrap_err(), Errno::PERM);
    }

    #[test]
    fn memory_of_huge_pages_that_may_be_lacking_is_refused() {
        let huge = 2 << 20;
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::ALLOW_SEALING;
        let Ok(fd) = rustix::fs::memfd_create("test", flags) else {
            return eprintln!("SKIP: this kernel has no huge pages");
        };
        rustix::fs::ftruncate(&fd, huge as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        assert_eq!(Region::of_peer(fd.as_fd(), huge).unwrap_err(), Errno::PROTO);
    }

    #[test]
    fn what_is_made_is_taken_and_both_see_it() {
        let (ours, fd) = Region::sealed("test", BYTES).unwrap();
        let theirs = Region::of_peer(fd.as_fd(), BYTES).unwrap();
        assert_ne!(ours.at(0), theirs.at(0));
        // SAFETY: the last byte of both mappings; no other thread knows them.
        let seen = unsafe {
            ours.at(BYTES - 1).write(7);
            theirs.at(BYTES - 1).read()
        };
        assert_eq!(seen, 7);
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM), "nobody takes it away");
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}
