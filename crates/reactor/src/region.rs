//! Memory that is mapped once and unmapped with its owner: private to this process, or shared with another through a sealed
//! anonymous file.
//!
//! Shared memory is safe to touch only if the other process cannot take it away: an access beyond the end of a truncated
//! file ends the process (`SIGBUS`). So such files are sealed when they are made, and the seals of other processes' files
//! are checked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::byte_range::ByteRange;
use crate::bytewise;
use crate::descriptor_floor;
use crate::file::TMPFS_MAGIC;

/// What every shared file is sealed with: its size stays.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// What the kernel maps in.
const PAGE_BYTES: usize = 4096;

/// Why a file cannot be memory that is registered. Nothing was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileMemoryError {
    /// It is no file in memory with ordinary pages, as `memfd_create` makes it without `MFD_HUGETLB`: the caller's fault.
    #[error("the file does not lie in memory of ordinary pages; make it with memfd_create")]
    NotMemory,
    /// It could be truncated under the mapping, and an access to the rest would end the process: the caller's fault. Its size
    /// must be set first, then `F_SEAL_SHRINK` and `F_SEAL_GROW`.
    #[error("the file can become shorter; seal it with F_SEAL_SHRINK and F_SEAL_GROW")]
    NotSealed,
    /// The range is empty or too long, does not begin with a page, or does not lie in the file: the caller's fault.
    #[error("the range has no bytes, too many, no whole pages at its start, or does not lie in the file")]
    Range,
    /// The kernel's: no memory, or a descriptor or seal that does not allow to write.
    #[error("the file cannot be mapped: {0}")]
    Io(Errno),
}

/// What may be done with a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

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
        let fd = descriptor_floor::raise(fd);
        Ok((Self::map(fd.as_fd(), 0, bytes, Access::Write)?, fd))
    }

    /// Maps all of a file that a peer has made and says to have `bytes` bytes (more than none), to be read alone or written too.
    ///
    /// # Errors
    /// `EPROTO` for one that the peer could take away again, that has another size, or whose pages may be lacking (huge
    /// ones): touching it could end this process. Else the kernel's.
    pub(crate) fn of_peer(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> Result<Self, Errno> {
        check_peer_file(fd, bytes as u64)?;
        Self::map(fd, 0, bytes, access)
    }

    /// Maps a part of a file that [`check_peer_file`] has accepted: `bytes` (whole pages) from `offset` (of a page) on. The part
    /// must lie in the file.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn of_peer_part(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> Result<Self, Errno> {
        debug_assert!(offset.is_multiple_of(PAGE_BYTES as u64) && bytes.is_multiple_of(PAGE_BYTES), "whole pages");
        Self::map(fd, offset, bytes, access)
    }

    /// Maps `bytes` (more than none) of a file that other code made in this process, from `offset` on; gives the bytes of the
    /// file too.
    ///
    /// # Errors
    /// See [`FileMemoryError`].
    pub(crate) fn of_file(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<(Self, u64), FileMemoryError> {
        let len = safe_bytes(fd)?;
        let inside = ByteRange::new(offset, bytes as u64).ends_by(len);
        if bytes == 0 || !inside || !offset.is_multiple_of(PAGE_BYTES as u64) {
            return Err(FileMemoryError::Range);
        }
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        Ok((Self::map(fd, offset, bytes, Access::Write).map_err(FileMemoryError::Io)?, len))
    }

    /// Takes over a mapping that was made elsewhere.
    ///
    /// # Safety
    /// `base` is the start of a mapping for reading and writing of `bytes`, which no other code uses or unmaps.
    pub(crate) unsafe fn of_mapping(base: NonNull<u8>, bytes: usize) -> Self {
        Self { base, bytes }
    }

    fn map(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> Result<Self, Errno> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let prot = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, flags, fd, offset)? };
        // SAFETY: the range was just mapped. Not in core dumps: it is others' data.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontDump) };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// Replaces whole pages by new ones of this process alone, with the same contents. The range must not be used meanwhile,
    /// the kernel included; other processes keep the old pages.
    pub(crate) fn make_private(&self, offset: usize, bytes: usize) -> Result<(), Errno> {
        assert!(offset.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES), "whole pages");
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "in the region");
        let at = self.at(offset);
        let mut contents = vec![0u8; bytes];
        // SAFETY: the range is mapped and readable, and `contents` has as many bytes; the peer may be writing there, so it is
        // copied without a reference to it.
        unsafe { bytewise::copy(at, contents.as_mut_ptr(), bytes) };
        let (flags, prot) =
            (MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: replaces pages of our own mapping, which the caller says nobody uses; addresses stay valid, and `drop` unmaps
        // the range whatever lies there.
        let made = unsafe { rustix::mm::mmap_anonymous(at.cast(), bytes, prot, flags)? };
        debug_assert_eq!(made.cast(), at, "where it was asked for");
        // SAFETY: the range is mapped and writable, and in no other use now.
        unsafe { std::ptr::copy_nonoverlapping(contents.as_ptr(), at, bytes) };
        Ok(())
    }

    /// Has the pages of a file's mapping be this process's own from now on, with what lies in them; other processes keep the
    /// file's. To be done once. Unlike [`Region::make_private`] it may be done while threads of this process use the memory: no
    /// byte that they write is lost. `from` is where in the file the mapping begins.
    pub(crate) fn take_pages(&self, fd: BorrowedFd<'_>, from: u64) -> Result<(), Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: replaces the pages of our own mapping by the same pages of the same file: whoever looks finds the same bytes,
        // and `drop` unmaps the range whatever lies there.
        let made = unsafe { rustix::mm::mmap(self.at(0).cast(), self.bytes, prot, flags, fd, from)? };
        debug_assert_eq!(made.cast(), self.at(0), "where it was asked for");
        for page in (0..self.bytes).step_by(PAGE_BYTES) {
            // SAFETY: in the mapping. Atomic, since others may write there: the byte stays as it is, and the page is ours then.
            let byte = unsafe { AtomicU8::from_ptr(self.at(page)) };
            // An exchange, since to add nothing is no write to the compiler.
            let mut was = byte.load(Ordering::Relaxed);
            while let Err(now) = byte.compare_exchange(was, was, Ordering::Relaxed, Ordering::Relaxed) {
                was = now;
            }
        }
        Ok(())
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
        // SAFETY: mapped with this base and length; every user of an address keeps the region.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Checks that a file which a peer has made has `bytes` bytes (more than none), now and for ever.
///
/// # Errors
/// See [`Region::of_peer`].
pub(crate) fn check_peer_file(fd: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
    match safe_bytes(fd) {
        Ok(len) if len == bytes && bytes > 0 => Ok(()),
        Err(FileMemoryError::Io(errno)) => Err(errno),
        _ => Err(Errno::PROTO),
    }
}

/// The bytes of a file that cannot be taken away under a mapping: sealed as byway's own files are, and of pages that never go
/// missing.
fn safe_bytes(fd: BorrowedFd<'_>) -> Result<u64, FileMemoryError> {
    let io = FileMemoryError::Io;
    if rustix::fs::fstatfs(fd).map_err(io)?.f_type as i64 != TMPFS_MAGIC {
        return Err(FileMemoryError::NotMemory);
    }
    // Other files of a tmpfs cannot be sealed.
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| FileMemoryError::NotMemory)?;
    if !seals.contains(SEALS) {
        return Err(FileMemoryError::NotSealed);
    }
    Ok(u64::try_from(rustix::fs::fstat(fd).map_err(io)?.st_size).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

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
        for lacking in [SealFlags::SHRINK, SealFlags::GROW] {
            let fd = file(none, BYTES, SEALS - lacking);
            assert_eq!(Region::of_peer(fd.as_fd(), BYTES, Access::Write).unwrap_err(), Errno::PROTO, "{lacking:?}");
        }
        let fd = file(none, BYTES, SEALS);
        for said in [0, 1, BYTES - 1, BYTES + 1, 2 * BYTES, usize::MAX] {
            assert_eq!(Region::of_peer(fd.as_fd(), said, Access::Write).unwrap_err(), Errno::PROTO, "{said}");
        }
        assert_eq!(Region::of_peer(fd.as_fd(), BYTES, Access::Write).unwrap().bytes(), BYTES);
        let empty = file(none, 0, SEALS);
        assert_eq!(Region::of_peer(empty.as_fd(), 0, Access::Write).unwrap_err(), Errno::PROTO);
        let plain: OwnedFd = tempfile::tempfile().unwrap().into();
        rustix::fs::ftruncate(&plain, BYTES as u64).unwrap();
        assert_eq!(Region::of_peer(plain.as_fd(), BYTES, Access::Write).unwrap_err(), Errno::PROTO);
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Region::of_peer(socket.as_fd(), BYTES, Access::Write).unwrap_err(), Errno::PROTO);
        // It may not be written: there is nothing to map.
        let fixed = file(none, BYTES, SEALS | SealFlags::WRITE);
        assert_eq!(Region::of_peer(fixed.as_fd(), BYTES, Access::Write).unwrap_err(), Errno::PERM);
    }

    #[test]
    fn memory_of_huge_pages_that_may_be_lacking_is_refused() {
        let huge = 2 << 20;
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::ALLOW_SEALING;
        let Ok(fd) = rustix::fs::memfd_create("test", flags) else {
            return byway_skip::skip_this(byway_skip::SkipReason::Machine("this kernel has no huge pages"));
        };
        rustix::fs::ftruncate(&fd, huge as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        assert_eq!(Region::of_peer(fd.as_fd(), huge, Access::Write).unwrap_err(), Errno::PROTO);
    }

    #[test]
    fn pages_made_private_keep_their_contents_and_the_peer_no_longer_reaches_them() {
        let (ours, fd) = Region::sealed("test", 4 * PAGE_BYTES).unwrap();
        let theirs = Region::of_peer(fd.as_fd(), 4 * PAGE_BYTES, Access::Write).unwrap();
        let write = |region: &Region, page: usize, byte: u8| {
            // SAFETY: in the region, whose only users are in this test.
            unsafe { region.at(page * PAGE_BYTES + 7).write_volatile(byte) };
        };
        // SAFETY: as above.
        let read = |region: &Region, page: usize| unsafe { region.at(page * PAGE_BYTES + 7).read_volatile() };
        (0..4).for_each(|page| write(&theirs, page, page as u8 + 1));
        ours.make_private(PAGE_BYTES, 2 * PAGE_BYTES).unwrap();
        assert_eq!([0, 1, 2, 3].map(|page| read(&ours, page)), [1, 2, 3, 4]);
        (0..4).for_each(|page| write(&theirs, page, 0xee));
        assert_eq!([0, 1, 2, 3].map(|page| read(&ours, page)), [0xee, 2, 3, 0xee]);
        write(&ours, 1, 9);
        assert_eq!((read(&ours, 1), read(&theirs, 1)), (9, 0xee));
    }

    #[test]
    fn pages_that_are_taken_while_they_are_written_lose_nothing_and_are_out_of_reach() {
        let (ours, fd) = Region::sealed("test", 4 * PAGE_BYTES).unwrap();
        let theirs = Region::of_peer(fd.as_fd(), 4 * PAGE_BYTES, Access::Write).unwrap();
        // SAFETY: in the region, all users of which are in this test, and atomic.
        let byte = |region: &Region, at: usize| unsafe { AtomicU8::from_ptr(region.at(at)) };
        (0..4).for_each(|page| byte(&theirs, page * PAGE_BYTES).store(page as u8 + 1, Ordering::Relaxed));
        let (turns, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let turn = |more: u64| {
            let until = turns.load(Ordering::Relaxed) + more;
            while turns.load(Ordering::Relaxed) < until {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut count = 0u8;
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(byte(&ours, PAGE_BYTES + 9).load(Ordering::Relaxed), count, "no write is lost");
                    count = count.wrapping_add(1);
                    byte(&ours, PAGE_BYTES + 9).store(count, Ordering::Relaxed);
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            });
            turn(1000);
            ours.take_pages(fd.as_fd(), 0).unwrap();
            turn(1000);
            stop.store(true, Ordering::Relaxed);
        });
        (0..4).for_each(|page| byte(&theirs, page * PAGE_BYTES).store(0xee, Ordering::Relaxed));
        assert_eq!([0, 1, 2, 3].map(|page| byte(&ours, page * PAGE_BYTES).load(Ordering::Relaxed)), [1, 2, 3, 4]);
    }

    #[test]
    fn what_is_made_is_taken_and_both_see_it() {
        let (ours, fd) = Region::sealed("test", BYTES).unwrap();
        let theirs = Region::of_peer(fd.as_fd(), BYTES, Access::Write).unwrap();
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
