//! Shared read-only mappings of files, sent without a copy in user space, and their cached residency.
//!
//! The process never reads a mapping of a file that could be truncated. The kernel reads it during a send, and answers
//! `EFAULT` (never a signal) where the file was cut off. A page that is not in memory would make the loop wait for a disk,
//! so senders ask [`FileMap::resident`] first. Asking the kernel costs a system call; the answer is kept for about a second
//! per block of 64 pages. A page that leaves memory within that time costs one wait, never wrong data.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{ByteRange, Instant};

const PAGE: u64 = 4096;
const PAGES_PER_BLOCK: u64 = 64;
const BLOCK: u64 = PAGE * PAGES_PER_BLOCK;
/// An answer is kept for the rest of a period of 2^30 ns.
const PERIOD_SHIFT: u32 = 30;

/// A shared mapping of a whole file.
#[derive(Debug)]
pub(crate) struct FileMap {
    base: NonNull<u8>,
    len: u64,
    writable: bool,
    /// The file cannot become shorter: reading it is safe.
    lasting: bool,
    blocks: Vec<Block>,
    /// The file's, which is open for as long as the mapping is there.
    fd: i32,
    /// Whether the kernel tells us what is in memory: a period, and in the lowest bit the answer in it.
    trust: AtomicU64,
}

/// Blocks of which something is known at once: 16 GiB in 1 MiB of memory, however large the file. Of two blocks that
/// share a place the one that was asked about last is known.
const BLOCKS_MAX: u64 = 1 << 16;

/// What is known of 64 pages: a bit each, good while `key` is that of the block in the present period.
#[derive(Debug, Default)]
struct Block {
    key: AtomicU64,
    pages: AtomicU64,
}

// SAFETY: the mapping is never seen through references; its address is handed to system calls, which may use it from any
// thread, and to raw copies of what may change meanwhile. The rest is atomics.
unsafe impl Send for FileMap {}
// SAFETY: as for `Send`.
unsafe impl Sync for FileMap {}

impl FileMap {
    /// Maps `len` bytes of a file; `writable` only for files that live in memory, whose pages can be received into.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: u64, writable: bool) -> std::io::Result<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let bytes = usize::try_from(len).map_err(|_| rustix::io::Errno::FBIG)?;
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice, which is never dereferenced.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED | MapFlags::NORESERVE, fd, 0)? };
        // SAFETY: the range was just mapped. Not in core dumps: it is the file's content.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        let mut blocks = Vec::new();
        blocks.resize_with(len.div_ceil(BLOCK).min(BLOCKS_MAX).next_power_of_two() as usize, Block::default);
        crate::mapped::register(base.as_ptr() as usize, len);
        tracing::trace!(fd = fd.as_raw_fd(), len, "mapped");
        let lasting = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
        Ok(Self { base, len, writable, lasting, blocks, fd: fd.as_raw_fd(), trust: AtomicU64::new(0) })
    }

    /// The address of `offset`, if the range lies inside.
    pub(crate) fn address(&self, offset: u64, len: usize) -> Option<*mut u8> {
        if !ByteRange::new(offset, len as u64).ends_by(self.len) {
            return None;
        }
        // SAFETY: within the mapping, as just checked.
        Some(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// The address of `offset`, if the range lies inside and can be read without the kernel's help: the file cannot become
    /// shorter. Others may write it meanwhile, so it is copied, and never seen through a reference.
    pub(crate) fn readable(&self, offset: u64, len: usize) -> Option<*const u8> {
        self.address(offset, len).filter(|_| self.lasting).map(<*mut u8>::cast_const)
    }

    /// Whether it may be received into.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether all pages of the range are in memory, as far as was known within the last second.
    pub(crate) fn resident(&self, offset: u64, len: usize, now: Instant) -> bool {
        if len == 0 || !ByteRange::new(offset, len as u64).ends_by(self.len) {
            return false;
        }
        let period = now.nanos() >> PERIOD_SHIFT | 1 << 31;
        let first_page = offset / PAGE;
        let last_page = (offset + len as u64 - 1) / PAGE;
        (first_page / PAGES_PER_BLOCK..=last_page / PAGES_PER_BLOCK).all(|block| {
            let from = first_page.max(block * PAGES_PER_BLOCK) % PAGES_PER_BLOCK;
            let to = last_page.min(block * PAGES_PER_BLOCK + PAGES_PER_BLOCK - 1) % PAGES_PER_BLOCK;
            let wanted = u64::MAX << from & u64::MAX >> (PAGES_PER_BLOCK - 1 - to);
            let (known, key) = self.place(block, period);
            if known.key.load(Ordering::Acquire) == key && known.pages.load(Ordering::Relaxed) & wanted == wanted {
                return true;
            }
            self.ask(block, period, wanted) & wanted == wanted
        })
    }

    /// Where it is written down what is known of a block, and by which key in this period. Two threads that write down
    /// two blocks in one place may mix them up: that costs a wait for a disk, no more.
    fn place(&self, block: u64, period: u64) -> (&Block, u64) {
        let places = self.blocks.len();
        let tag = block >> places.trailing_zeros();
        (&self.blocks[block as usize & (places - 1)], (period & 0xffff_ffff) << 32 | tag & 0xffff_ffff)
    }

    /// Asks the kernel which pages of a block are in memory: all of the block's by `mincore(2)`; where that does not tell the
    /// truth, those of `wanted`, by reading a byte of each without waiting.
    fn ask(&self, block: u64, period: u64, wanted: u64) -> u64 {
        let (known, key) = self.place(block, period);
        let pages = if self.mincore_trustworthy(period) {
            self.pages_by_mincore(block)
        } else {
            let before = if known.key.load(Ordering::Acquire) == key { known.pages.load(Ordering::Relaxed) } else { 0 };
            before | self.pages_by_reading(block, wanted & !before)
        };
        known.pages.store(pages, Ordering::Relaxed);
        known.key.store(key, Ordering::Release);
        pages
    }

    fn pages_by_mincore(&self, block: u64) -> u64 {
        let start = block * BLOCK;
        let bytes = (self.len - start).min(BLOCK) as usize;
        let mut present = [0u8; PAGES_PER_BLOCK as usize];
        // SAFETY: the range lies in the mapping, and `present` has a byte for each of its pages.
        let rc = unsafe { libc::mincore(self.base.as_ptr().add(start as usize).cast(), bytes, present.as_mut_ptr()) };
        if rc != 0 {
            return 0;
        }
        present.iter().enumerate().fold(0, |bits, (page, byte)| bits | u64::from(byte & 1) << page)
    }

    /// Up to the first of them that is not in memory. None where the file system cannot read without waiting (tmpfs).
    fn pages_by_reading(&self, block: u64, wanted: u64) -> u64 {
        use rustix::io::{ReadWriteFlags, preadv2};
        // SAFETY: the file owns both the descriptor and this mapping, and is there while it is asked.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let (mut present, mut left) = (0, wanted);
        while left != 0 {
            let page = u64::from(left.trailing_zeros());
            let mut byte = [0];
            let buffers = &mut [std::io::IoSliceMut::new(&mut byte)];
            if preadv2(fd, buffers, block * BLOCK + page * PAGE, ReadWriteFlags::NOWAIT) != Ok(1) {
                break;
            }
            present |= 1 << page;
            left &= left - 1;
        }
        present
    }

    /// Whether `mincore` tells the truth. To a process that neither owns the file nor may write it, it reports all pages as
    /// resident (a node that gave up root, an image of root's). Asked once a period.
    fn mincore_trustworthy(&self, period: u64) -> bool {
        let known = self.trust.load(Ordering::Relaxed);
        if known >> 1 == period {
            return known & 1 == 1;
        }
        // SAFETY: the file owns both the descriptor and this mapping, and is there while it is asked.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let me = rustix::process::geteuid();
        let trusted =
            me.is_root() || rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_uid == me.as_raw()) || may_write(self.fd);
        self.trust.store(period << 1 | u64::from(trusted), Ordering::Relaxed);
        trusted
    }

    /// Forgets what is known of a range: its pages were given back.
    pub(crate) fn forget(&self, offset: u64, len: u64) {
        let last = offset.saturating_add(len).min(self.len).div_ceil(BLOCK);
        let first = offset / BLOCK;
        for block in first..last.min(first.saturating_add(self.blocks.len() as u64)) {
            self.place(block, 0).0.key.store(0, Ordering::Release);
        }
    }
}

/// Whether the process may write the file behind a descriptor, whatever it was opened for.
fn may_write(fd: i32) -> bool {
    let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
    // SAFETY: the path is an empty string, and the kernel only looks at the descriptor.
    unsafe { libc::syscall(libc::SYS_faccessat2, fd, c"".as_ptr(), libc::W_OK, flags) == 0 }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        crate::mapped::unregister(self.base.as_ptr() as usize);
        // SAFETY: mapped in `new` with this length; a loop drops a file only when no operation uses it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn blocks_that_share_a_place_are_told_apart() {
        let far = BLOCKS_MAX * BLOCK;
        let file = rustix::fs::memfd_create("far", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, far + BLOCK).unwrap();
        rustix::io::pwrite(&file, b"here", 0).unwrap();
        let mapping = FileMap::new(file.as_fd(), far + BLOCK, false).unwrap();
        let now = Instant::from_nanos(5);
        let near_then_far = || (mapping.resident(0, 4096, now), mapping.resident(far, 4096, now));
        assert_eq!((near_then_far(), near_then_far()), ((true, false), (true, false)));
        rustix::io::pwrite(&file, b"and there", far).unwrap();
        assert_eq!((near_then_far(), near_then_far()), ((true, true), (true, true)));
    }

    #[test]
    fn what_was_given_back_is_forgotten_within_the_period() {
        use rustix::fs::FallocateFlags;
        let file = rustix::fs::memfd_create("punched", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&file, &[1; 3 * BLOCK as usize], 0).unwrap();
        let mapping = FileMap::new(file.as_fd(), 3 * BLOCK, false).unwrap();
        let now = Instant::from_nanos(5);
        let known = || [0, 1, 2].map(|block| mapping.resident(block * BLOCK, 4096, now));
        assert_eq!(known(), [true; 3]);
        rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, BLOCK, BLOCK).unwrap();
        assert_eq!(known(), [true; 3], "known for the rest of the period");
        mapping.forget(BLOCK, BLOCK);
        assert_eq!(known(), [true, false, true]);
    }

    #[test]
    fn only_what_cannot_become_shorter_is_read_without_the_kernel() {
        use rustix::fs::{MemfdFlags, SealFlags};
        let file = rustix::fs::memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::io::pwrite(&file, &[1; 8192], 0).unwrap();
        assert_eq!(FileMap::new(file.as_fd(), 8192, false).unwrap().readable(0, 8192), None);
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let mapping = FileMap::new(file.as_fd(), 8192, false).unwrap();
        assert_eq!(mapping.readable(4096, 4096), mapping.address(4096, 4096).map(<*mut u8>::cast_const));
        assert!(mapping.readable(0, 8192).is_some());
        assert_eq!((mapping.readable(1, 8192), mapping.readable(u64::MAX, 2)), (None, None));
    }

    /// A node that became `--user` serves files that this user neither owns nor may write.
    #[test]
    fn a_process_that_mincore_tells_nothing_asks_by_reading() {
        if !rustix::process::geteuid().is_root() {
            return byway_skip::skip_this(byway_skip::SkipReason::Machine("not root"));
        }
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &[1; 3 * BLOCK as usize]).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        if rustix::io::preadv2(&file, &mut [std::io::IoSliceMut::new(&mut [0])], 0, rustix::io::ReadWriteFlags::NOWAIT)
            == Err(rustix::io::Errno::OPNOTSUPP)
        {
            let reason = "no reads without waiting where temporary files lie";
            return byway_skip::skip_this(byway_skip::SkipReason::Machine(reason));
        }
        // Away from memory, but for the first page of the second block.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::io::pread(&file, &mut [0; 1], BLOCK).unwrap();
        let mapping = FileMap::new(file.as_fd(), 3 * BLOCK, false).unwrap();
        let now = Instant::from_nanos(5);
        let told = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // SAFETY: the system call, not libc's wrapper: it changes this thread alone, which ends here.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
                [(BLOCK, 4096), (2 * BLOCK, 4096), (BLOCK, 2 * 4096)].map(|(at, len)| mapping.resident(at, len, now))
            });
            other.join().unwrap()
        });
        assert_eq!(told, [true, false, false]);
    }

    #[test]
    fn nothing_is_believed_to_be_in_memory_by_a_process_that_is_not_told() {
        if !rustix::process::geteuid().is_root() {
            return byway_skip::skip_this(byway_skip::SkipReason::Machine("not root"));
        }
        let file = rustix::fs::memfd_create("of-root", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        rustix::io::pwrite(&file, &[1; 8192], 0).unwrap();
        let mapping = FileMap::new(file.as_fd(), 8192, false).unwrap();
        assert!(mapping.resident(0, 4096, Instant::from_nanos(5)));
        // In the next period, on a thread with other rights.
        let later = Instant::from_nanos(5 + (1 << PERIOD_SHIFT));
        let told = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // SAFETY: the system call, not libc's wrapper: it changes this thread alone, which ends here.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
                mapping.resident(0, 4096, later)
            });
            other.join().unwrap()
        });
        assert!(!told, "the kernel would say yes to everything");
    }
}
