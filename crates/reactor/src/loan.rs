//! Memory of a mapping that is lent to peers over shared memory.
//!
//! A peer with memory for writing may be stopped in the middle of a copy, and continue it long after its session has ended.
//! So such memory is lent to one peer at a time, and can be taken back: this process's pages are replaced by copies that no
//! other process has ([`Loan::take_back`]).
//!
//! Memory that is lent for reading is sealed first (`F_SEAL_FUTURE_WRITE`, Linux 5.1). From then on the kernel permits no
//! writes, new writable mappings or holes, except through existing mappings: this process's and a caller's. A read-only
//! descriptor would not be enough, because `/proc/self/fd` can open its file again for writing. Any number of peers may have
//! such memory, and it need not be taken back; but it is never lent for writing again. Neither is memory that a device uses,
//! which is sealed for the same reason: its pages must stay those of the file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::io::Errno;

use crate::limits::WRITABLE_LOAN_BYTES_MAX;
use crate::region::Region;

/// How often memory is lent: to so many readers, or to one writer.
const WRITER: isize = -1;

/// The file that a mapping lies in.
#[derive(Debug)]
pub(crate) struct SharedFile {
    fd: OwnedFd,
    /// Where in the file the mapping begins, and the bytes of the file.
    from: u64,
    bytes: u64,
    /// No other process had it before.
    is_ours: bool,
    /// No process can map it for writing any more, nor take pages of it away.
    is_sealed: AtomicBool,
    lent: AtomicIsize,
    was_written: AtomicBool,
    taken_back: AtomicBool,
    pinned: AtomicBool,
}

/// One peer's view of a mapping; it ends when dropped.
#[derive(Debug)]
pub struct Loan {
    region: Arc<Region>,
    file: Arc<SharedFile>,
    write: bool,
}

/// What is left of a loan whose peer uses it for nothing, and has the memory mapped still: enough to lend the same memory again
/// without another mapping ([`Mapping::lend_again`](crate::Mapping::lend_again)). It does not prevent lending the memory to
/// others, and the memory from nothing.
#[derive(Debug)]
pub struct RestingLoan {
    /// Nothing else can come to lie at its address as long as this is here.
    file: Weak<SharedFile>,
    write: bool,
    bytes: u64,
}

impl SharedFile {
    /// Of a file that was just made, and is mapped as a whole.
    pub(crate) fn made(fd: OwnedFd, bytes: usize) -> Self {
        Self::new(fd, 0, bytes as u64, true)
    }

    /// Of `bytes` bytes of a file of the caller's, from byte `from` on.
    pub(crate) fn of_caller(fd: BorrowedFd<'_>, from: u64, bytes: u64) -> Result<Self, Errno> {
        Ok(Self::new(rustix::io::fcntl_dupfd_cloexec(fd, 0)?, from, bytes, false))
    }

    /// Bytes of it that take memory.
    pub(crate) fn filled_bytes(&self) -> Option<u64> {
        let blocks = rustix::fs::fstat(&self.fd).ok()?.st_blocks;
        Some(u64::try_from(blocks).ok()? * 512)
    }

    fn new(fd: OwnedFd, from: u64, bytes: u64, is_ours: bool) -> Self {
        let [is_sealed, was_written, taken_back, pinned] = [(); 4].map(|()| AtomicBool::new(false));
        Self { fd, from, bytes, is_ours, is_sealed, lent: AtomicIsize::new(0), was_written, taken_back, pinned }
    }

    /// Whether the kernel permits no process to map the file for writing any more, nor to take pages of it away.
    pub(crate) fn is_sealed(&self) -> bool {
        if !self.is_sealed.load(Ordering::Acquire) {
            let seals = rustix::fs::fcntl_get_seals(&self.fd).unwrap_or(SealFlags::empty());
            self.is_sealed.store(seals.contains(SealFlags::FUTURE_WRITE), Ordering::Release);
        }
        self.is_sealed.load(Ordering::Acquire)
    }

    fn is_small_and_ours(&self) -> bool {
        self.is_ours && self.bytes <= WRITABLE_LOAN_BYTES_MAX
    }

    /// See [`Mapping::may_be_lent_for_writing`](crate::Mapping::may_be_lent_for_writing).
    pub(crate) fn may_be_lent_for_writing(&self) -> bool {
        self.is_small_and_ours() && !self.is_sealed() && !self.taken_back.load(Ordering::Acquire)
    }

    /// Seals a file of ours so; whether it, or a caller's, is.
    fn seal(&self) -> bool {
        if self.is_ours && !self.is_sealed() {
            // Fails where a peer that could write it has sealed it against seals.
            let _ = rustix::fs::fcntl_add_seals(&self.fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        }
        self.is_sealed()
    }

    /// See [`Mapping::pin`](crate::Mapping::pin). It counts as a reader that stays.
    pub(crate) fn pin(&self) -> bool {
        if self.pinned.load(Ordering::Acquire) {
            return true;
        }
        let next = |lent: isize| (lent >= 0).then_some(lent + 1);
        let pinned = self.lent.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok();
        // Two threads at once count two readers, which does no harm.
        self.pinned.fetch_or(pinned, Ordering::AcqRel);
        if pinned {
            self.seal();
        }
        pinned
    }

    pub(crate) fn is_exposed(&self) -> bool {
        !self.is_ours || (self.was_written.load(Ordering::Acquire) && !self.taken_back.load(Ordering::Acquire))
    }
}

impl Loan {
    pub(crate) fn begin(region: &Arc<Region>, file: &Arc<SharedFile>, write: bool) -> Option<Self> {
        if (write && !file.is_small_and_ours()) || file.taken_back.load(Ordering::Acquire) {
            return None;
        }
        let next = |lent: isize| match (write, lent) {
            (true, 0) => Some(WRITER),
            (false, 0..) => Some(lent + 1),
            _ => None,
        };
        file.lent.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()?;
        let loan = Self { region: Arc::clone(region), file: Arc::clone(file), write };
        let has_right_seals = if write { !file.is_sealed() } else { file.seal() };
        // It may have been taken back from the one before meanwhile.
        (has_right_seals && !file.taken_back.load(Ordering::Acquire)).then_some(loan)
    }

    /// Whether the peer may write.
    pub fn is_writable(&self) -> bool {
        self.write
    }

    /// Where the mapping begins in what the peer has, in bytes.
    pub fn offset(&self) -> u64 {
        self.file.from
    }

    /// Whether it is a view of the same memory as `mapping`.
    pub fn is_of(&self, mapping: &crate::Mapping) -> bool {
        mapping.as_ptr() == self.region.at(0)
    }

    /// Ends the loan of a peer that has said it uses it no longer, and keeps the memory mapped.
    pub fn rest(self) -> RestingLoan {
        RestingLoan { file: Arc::downgrade(&self.file), write: self.write, bytes: self.file.bytes }
    }

    /// Takes memory that a peer could write away from it and all others: from now on it has pages of its own, with what lies
    /// there. Threads of this process may use it meanwhile. It is not lent again.
    ///
    /// # Errors
    /// The kernel's: no memory. The peer may still write then.
    pub fn take_back(&self) -> std::io::Result<()> {
        if !self.write || self.file.taken_back.load(Ordering::Acquire) {
            return Ok(());
        }
        self.region.take_pages(self.file.fd.as_fd(), self.file.from)?;
        self.file.taken_back.store(true, Ordering::Release);
        // The pages that the peer has are of no use to us. It finds zeroes, if it still looks.
        let mode = crate::blocking::fallocate_flags(crate::Allocate::PunchHole);
        let _ = rustix::fs::fallocate(&self.file.fd, mode, 0, self.file.bytes);
        Ok(())
    }

    /// The peer was sent it.
    pub(crate) fn note_sent(&self) {
        if self.write {
            self.file.was_written.store(true, Ordering::Release);
        }
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.file.bytes
    }

    /// The descriptor for the peer.
    pub(crate) fn descriptor(&self) -> Result<OwnedFd, Errno> {
        if self.write {
            return rustix::io::fcntl_dupfd_cloexec(&self.file.fd, 0);
        }
        let own = format!("/proc/self/fd/{}", self.file.fd.as_raw_fd());
        rustix::fs::open(own, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }
}

impl RestingLoan {
    /// Whether it was a view of the same memory as `mapping`, in the same way.
    pub fn is_of(&self, mapping: &crate::Mapping, write: bool) -> bool {
        self.write == write && mapping.file().is_some_and(|file| std::ptr::eq(self.file.as_ptr(), Arc::as_ptr(file)))
    }

    /// Whether the memory is no longer here, but only where the peer has it.
    pub fn is_of_nothing(&self) -> bool {
        self.file.strong_count() == 0
    }

    /// Bytes that the peer has mapped.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let change = if self.write { 1 } else { -1 };
        self.file.lent.fetch_add(change, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;
    use crate::region::Access;
    use crate::{FileMemoryError, Mapping};

    const BYTES: usize = 8192;

    fn file(bytes: usize, seals: SealFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn one_writer_or_any_number_of_readers_have_it_and_who_wrote_leaves_it_exposed() {
        assert!(Mapping::new(BYTES).unwrap().lend(false).is_none(), "nobody can be given private memory");
        let mapping = Mapping::shared(BYTES).unwrap();
        let readers = [mapping.lend(false).unwrap(), mapping.counted().lend(false).unwrap()];
        assert!(mapping.lend(true).is_none() && !mapping.is_exposed() && readers[0].is_of(&mapping));
        drop(readers);
        assert!(mapping.lend(true).is_none() && mapping.lend(false).is_some(), "it is sealed against writing");
        let mapping = Mapping::shared(BYTES).unwrap();
        let writer = mapping.lend(true).unwrap();
        assert!(mapping.lend(true).is_none() && mapping.lend(false).is_none() && !mapping.is_exposed());
        writer.note_sent();
        assert!(mapping.is_exposed() && mapping.counted().is_exposed());
        drop(writer);
        assert!(mapping.is_exposed(), "it may have it mapped still");
        assert!(mapping.lend(false).is_some());
    }

    #[test]
    fn what_a_device_has_is_not_lent_for_writing_nor_the_other_way_round() {
        let mapping = Mapping::shared(BYTES).unwrap();
        let writer = mapping.lend(true).unwrap();
        assert!(!mapping.pin(), "its pages may be taken back");
        drop(writer);
        assert!(mapping.pin() && mapping.counted().pin());
        assert!(mapping.lend(true).is_none(), "the device would be left with pages that nobody looks at");
        drop(mapping.lend(false).unwrap());
        assert!(mapping.lend(true).is_none());
        assert!(Mapping::new(BYTES).unwrap().pin(), "private memory is never lent");
    }

    #[test]
    fn what_is_lent_for_reading_cannot_be_mapped_for_writing() {
        let mapping = Mapping::shared(BYTES).unwrap();
        let fd = mapping.lend(false).unwrap().descriptor().unwrap();
        assert_eq!(Region::of_peer(fd.as_fd(), BYTES, Access::Write).unwrap_err(), Errno::ACCESS);
        assert!(Region::of_peer(fd.as_fd(), BYTES, Access::Read).is_ok());
        let mapping = Mapping::shared(BYTES).unwrap();
        let fd = mapping.lend(true).unwrap().descriptor().unwrap();
        assert!(Region::of_peer(fd.as_fd(), BYTES, Access::Write).is_ok());
    }

    /// A peer of the same user opens what it was lent for reading once more, by its name in `/proc`.
    #[test]
    fn what_is_lent_for_reading_cannot_be_written_through_proc_either() {
        let mapping = Mapping::shared(BYTES).unwrap();
        let callers = file(BYTES, SealFlags::SHRINK | SealFlags::GROW);
        let callers_mapping = Mapping::of_file(callers.as_fd(), 0, BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&callers, SealFlags::FUTURE_WRITE).unwrap();
        for mapping in [mapping, callers_mapping] {
            let lent = mapping.lend(false).unwrap().descriptor().unwrap();
            let name = format!("/proc/self/fd/{}", lent.as_raw_fd());
            if let Ok(again) = rustix::fs::open(name, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
                assert_eq!(rustix::io::pwrite(&again, &[9; 100], 0), Err(Errno::PERM));
                assert_eq!(rustix::fs::ftruncate(&again, 0), Err(Errno::PERM));
                let punch = crate::blocking::fallocate_flags(crate::Allocate::PunchHole);
                assert_eq!(rustix::fs::fallocate(&again, punch, 0, 4096), Err(Errno::PERM));
                assert_eq!(Region::of_peer(again.as_fd(), BYTES, Access::Write).unwrap_err(), Errno::PERM);
                let read = Region::of_peer(again.as_fd(), BYTES, Access::Read).unwrap();
                // SAFETY: a mapping of this test's, which nothing refers to.
                let made = unsafe {
                    let writable = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
                    rustix::mm::mprotect(read.at(0).cast(), BYTES, writable)
                };
                assert_eq!(made, Err(Errno::ACCESS));
            }
            // SAFETY: the first byte of the memory, which only this test uses. The lender's mapping is older than the seal.
            unsafe {
                assert_eq!(mapping.as_ptr().read_volatile(), 0);
                mapping.as_ptr().write_volatile(7);
            }
            let theirs = Region::of_peer(lent.as_fd(), BYTES, Access::Read).unwrap();
            // SAFETY: the first byte of the other mapping.
            assert_eq!(unsafe { theirs.at(0).read_volatile() }, 7, "what the lender writes is seen");
        }
    }

    #[test]
    fn what_a_peer_that_could_write_has_sealed_is_lent_to_no_reader() {
        let mapping = Mapping::shared(BYTES).unwrap();
        let theirs = mapping.lend(true).unwrap().descriptor().unwrap();
        rustix::fs::fcntl_add_seals(&theirs, SealFlags::SEAL).unwrap();
        assert!(mapping.lend(false).is_none(), "it could be written through /proc");
    }

    #[test]
    fn what_rests_is_lent_again_only_as_the_same_memory_in_the_same_way_and_stands_in_nobodys_way() {
        let (mapping, other) = (Mapping::shared(BYTES).unwrap(), Mapping::shared(BYTES).unwrap());
        let resting = mapping.lend(true).unwrap().rest();
        assert!(resting.is_of(&mapping, true) && resting.is_of(&mapping.counted(), true) && !resting.is_of_nothing());
        assert!(!resting.is_of(&mapping, false) && !resting.is_of(&other, true));
        let writer = mapping.lend(true).unwrap();
        assert!(mapping.lend_again(&resting).is_none(), "somebody else writes it now");
        drop(writer);
        let again = mapping.lend_again(&resting).unwrap();
        assert!(mapping.is_exposed() && mapping.lend(false).is_none(), "it is the writer's once more");
        assert!(other.lend_again(&resting).is_none());
        again.take_back().unwrap();
        drop(again);
        assert!(mapping.lend_again(&resting).is_none(), "what the peer has is other memory now");
        drop(mapping);
        assert!(resting.is_of_nothing() && resting.bytes() == BYTES as u64);
    }

    #[test]
    fn what_is_taken_back_is_out_of_the_peers_reach_and_stays_as_it_was() {
        let mapping = Mapping::shared(BYTES).unwrap();
        let loan = mapping.lend(true).unwrap();
        loan.note_sent();
        assert!(mapping.is_exposed());
        let theirs = Region::of_peer(loan.descriptor().unwrap().as_fd(), BYTES, Access::Write).unwrap();
        // SAFETY: the first and the last byte of each mapping, which only this test uses.
        unsafe {
            theirs.at(BYTES - 1).write_volatile(7);
            loan.take_back().unwrap();
            theirs.at(0).write_volatile(9);
            mapping.as_ptr().write_volatile(1);
            loan.take_back().unwrap();
            assert_eq!((mapping.as_ptr().read_volatile(), mapping.as_ptr().add(BYTES - 1).read_volatile()), (1, 7));
        }
        drop(loan);
        assert!(!mapping.is_exposed() && mapping.lend(false).is_none() && mapping.lend(true).is_none());
    }

    #[test]
    fn a_callers_file_is_taken_if_it_cannot_be_taken_away_and_lent_for_reading_alone() {
        let all = SealFlags::SHRINK | SealFlags::GROW;
        let of = |fd: &OwnedFd, offset, bytes| Mapping::of_file(fd.as_fd(), offset, bytes);
        for lacking in [SealFlags::SHRINK, SealFlags::GROW] {
            let refused = of(&file(BYTES, all - lacking), 0, BYTES).unwrap_err();
            assert_eq!(refused, FileMemoryError::NotSealed, "{lacking:?}");
        }
        let fd = file(BYTES, all);
        for (offset, bytes) in [(0, 0), (0, BYTES + 1), (4096, 4097), (1, 10), (u64::MAX - 4095, 4096), (8192, 1)] {
            assert_eq!(of(&fd, offset, bytes).unwrap_err(), FileMemoryError::Range, "{bytes} at {offset}");
        }
        let plain: OwnedFd = tempfile::tempfile().unwrap().into();
        assert_eq!(of(&plain, 0, 1).unwrap_err(), FileMemoryError::NotMemory);
        let fixed = file(BYTES, all | SealFlags::WRITE);
        assert_eq!(of(&fixed, 0, 1).unwrap_err(), FileMemoryError::Io(Errno::PERM));
        let mapping = of(&fd, 4096, 10).unwrap();
        assert!(mapping.is_exposed() && mapping.lend(true).is_none(), "whoever has the file would be left behind");
        assert!(mapping.lend(false).is_none(), "a reader could open it anew and write");
        // The caller's view and ours are one.
        rustix::io::pwrite(&fd, b"seen", 4100).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE).unwrap();
        let loan = mapping.lend(false).unwrap();
        assert_eq!((loan.offset(), loan.bytes()), (4096, BYTES as u64));
        // SAFETY: four bytes within the mapping, which nothing writes now.
        assert_eq!(unsafe { mapping.as_ptr().add(4).cast::<[u8; 4]>().read() }, *b"seen");
    }
}
