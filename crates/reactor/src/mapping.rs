//! Memory that outlives any loop and belongs to no thread, with a count of its users.
//!
//! A [`Frame`](crate::Frame) lives on its loop's thread. A program's own memory, which other threads also access, is a range
//! of a mapping instead: frames over it are made when an operation starts ([`Frame::over`](crate::Frame::over)), and each is
//! a [`Use`]. So the count is exact on every path of a frame through loop and kernel. At zero only the owner can reach the
//! bytes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::loan::{Loan, RestingLoan, SharedFile};
use crate::region::{FileMemoryError, Region};

/// A handle to memory that was mapped at once; it stays mapped while a handle or a use of it lives.
#[derive(Debug)]
pub struct Mapping {
    inner: Arc<Inner>,
    /// Where the uses by this handle are counted apart. Such a handle is a use of the memory itself.
    part: Option<Arc<PartUses>>,
}

#[derive(Debug)]
struct Inner {
    region: Arc<Region>,
    /// What it lies in, if others can be given a view of it.
    file: Option<Arc<SharedFile>>,
    uses: AtomicUsize,
    is_given_up: AtomicBool,
}

/// A count of some of the uses of a memory: those of one operation, say. See [`Mapping::counted_by`].
#[derive(Debug, Default)]
pub struct PartUses {
    uses: AtomicUsize,
    is_given_up: AtomicBool,
}

/// A reason why others than the owner may touch a mapping's memory. Counted until dropped.
#[derive(Debug)]
pub struct Use {
    mapping: Mapping,
}

impl Mapping {
    /// Maps `bytes` (at least 1, rounded up to pages) of this process alone. They are zeroes.
    ///
    /// # Errors
    /// The kernel's, if the memory cannot be mapped.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(rustix::param::page_size());
        let region = Region::private(bytes.ok_or(rustix::io::Errno::NOMEM)?)?;
        Ok(Self::over(region, None))
    }

    /// As [`Mapping::new`], in a sealed anonymous file, so that peers over shared memory can be lent it ([`Mapping::lend`]).
    ///
    /// # Errors
    /// The kernel's, if the memory cannot be had.
    pub fn shared(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(rustix::param::page_size());
        let bytes = bytes.ok_or(rustix::io::Errno::NOMEM)?;
        let (region, file) = Region::sealed("byway-memory", bytes)?;
        Ok(Self::over(region, Some(SharedFile::made(file, bytes))))
    }

    /// Maps `bytes` (at least 1, rounded up to pages) of a file in memory that the caller has made, from `offset` on. The file
    /// stays the caller's, and may be mapped elsewhere as well.
    ///
    /// # Errors
    /// See [`FileMemoryError`].
    pub fn of_file(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Self, FileMemoryError> {
        let (region, all) = Region::of_file(file, offset, bytes)?;
        let file = SharedFile::of_caller(file, offset, all).map_err(FileMemoryError::Io)?;
        Ok(Self::over(region, Some(file)))
    }

    fn over(region: Region, file: Option<SharedFile>) -> Self {
        let (region, file) = (Arc::new(region), file.map(Arc::new));
        let (uses, is_given_up) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { inner: Arc::new(Inner { region, file, uses, is_given_up }), part: None }
    }

    /// A view of the memory for a peer, to be sent to it ([`Reactor::lend_memory`](crate::Reactor::lend_memory)). For writing one
    /// peer has it at a time, and then no other has it for reading; what was lent for reading once is sealed, and not lent for
    /// writing any more. `None` where that is not so, and for memory that cannot be lent so: private memory not at all, more than
    /// [`WRITABLE_LOAN_BYTES_MAX`](crate::limits::WRITABLE_LOAN_BYTES_MAX) for reading alone, a caller's file for reading alone and if it is sealed (`F_SEAL_FUTURE_WRITE`), what was [taken back](Loan::take_back) never again.
    pub fn lend(&self, write: bool) -> Option<Loan> {
        let file = self.inner.file.as_ref()?;
        Loan::begin(&self.inner.region, file, write)
    }

    /// Whether [`Mapping::lend`] can give a peer the memory for writing, now or when others have given it back. A loan for reading
    /// ends that for good.
    pub fn may_be_lent_for_writing(&self) -> bool {
        self.inner.file.as_ref().is_some_and(|file| file.may_be_lent_for_writing())
    }

    /// Lends a peer that has it mapped still the same memory in the same way again; nothing is to be sent to it. `None` as for
    /// [`Mapping::lend`], and if `resting` is of other memory.
    pub fn lend_again(&self, resting: &RestingLoan) -> Option<Loan> {
        let write = [false, true].into_iter().find(|write| resting.is_of(self, *write))?;
        let loan = self.lend(write)?;
        loan.note_sent();
        Some(loan)
    }

    /// Bytes of its file that take memory: pages that were never written to take none. 0 where it has no file, or the kernel does not tell.
    pub fn filled_bytes(&self) -> u64 {
        self.inner.file.as_ref().and_then(|file| file.filled_bytes()).unwrap_or(0)
    }

    pub(crate) fn file(&self) -> Option<&Arc<SharedFile>> {
        self.inner.file.as_ref()
    }

    /// A device may hold on to the pages from now on: so they are not lent for writing any more, since pages that were lent so
    /// are replaced when they are taken back, and the device would go on with the old ones; and a file of ours is sealed, so that
    /// no process can take its pages away. False if they are lent so now.
    pub fn pin(&self) -> bool {
        self.inner.file.as_ref().is_none_or(|file| file.pin())
    }

    /// Whether it lies in a file whose pages cannot be taken away any more: so its addresses keep their pages as long as it is
    /// mapped. `None` of private memory, where only this process can.
    pub fn is_sealed(&self) -> Option<bool> {
        self.inner.file.as_ref().map(|file| file.is_sealed())
    }

    /// Whether others may write there without the knowledge of this process: users of a caller's file, or a peer that was lent
    /// it for writing once. References to the bytes are then not to be made.
    pub fn is_exposed(&self) -> bool {
        self.inner.file.as_ref().is_some_and(|file| file.is_exposed())
    }

    /// The same memory with a count of its own, for one operation say: as long as the new handle or a use of it lives, that is
    /// one use of this.
    #[must_use]
    pub fn counted(&self) -> Self {
        self.counted_by(Arc::default())
    }

    /// As [`Mapping::counted`], by a count that is [free](PartUses::is_free).
    #[must_use]
    pub fn counted_by(&self, part: Arc<PartUses>) -> Self {
        debug_assert!(self.part.is_none(), "of the memory, and not of a part of its uses");
        self.inner.uses.fetch_add(1, Ordering::Relaxed);
        Self { inner: Arc::clone(&self.inner), part: Some(part) }
    }

    /// Bytes: whole pages.
    pub fn len(&self) -> usize {
        self.inner.region.bytes()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.region.at(0)
    }

    /// Counts a use.
    pub fn hold(&self) -> Use {
        self.counter().fetch_add(1, Ordering::Relaxed);
        Use { mapping: self.clone() }
    }

    fn counter(&self) -> &AtomicUsize {
        self.part.as_ref().map_or(&self.inner.uses, |part| &part.uses)
    }

    /// Uses that have not ended. A thread that reads zero sees all changes of the bytes by the uses that have.
    pub fn uses(&self) -> usize {
        self.counter().load(Ordering::Acquire)
    }

    /// Whether some use of it will never end, see [`Frame::note_given_up`](crate::Frame::note_given_up): then [`Mapping::uses`] never
    /// becomes zero.
    pub fn is_given_up(&self) -> bool {
        self.part.as_ref().map_or(&self.inner.is_given_up, |part| &part.is_given_up).load(Ordering::Acquire)
    }

    /// Of the part of the uses, and of the memory.
    fn give_up(&self) {
        self.inner.is_given_up.store(true, Ordering::Release);
        if let Some(part) = &self.part {
            part.is_given_up.store(true, Ordering::Release);
        }
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.inner.region.at(offset)
    }
}

impl Clone for Mapping {
    fn clone(&self) -> Self {
        if self.part.is_some() {
            self.inner.uses.fetch_add(1, Ordering::Relaxed);
        }
        Self { inner: Arc::clone(&self.inner), part: self.part.clone() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.part.is_some() {
            self.inner.uses.fetch_sub(1, Ordering::Release);
        }
    }
}

impl PartUses {
    /// Whether nothing is left of the handles and uses that it counted, and none was given up: it can count others.
    pub fn is_free(part: &mut Arc<Self>) -> bool {
        Arc::get_mut(part).is_some_and(|part| *part.uses.get_mut() == 0 && !*part.is_given_up.get_mut())
    }
}

impl Use {
    /// What is used.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.mapping.at(offset)
    }

    pub(crate) fn note_given_up(&self) {
        self.mapping.give_up();
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.mapping.counter().fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Frame, Gather};

    #[test]
    fn frames_over_a_mapping_are_counted_wherever_they_go() {
        let mapping = Mapping::new(10_000).unwrap();
        assert_eq!((mapping.len(), mapping.uses()), (12_288, 0));
        // SAFETY: nothing else looks at the mapping.
        let (mut first, second) = unsafe { (Frame::over(&mapping, 5, 100), Frame::over(&mapping, 105, 12_183)) };
        first.fill(7);
        assert_eq!((first.len(), first.capacity(), first.arena_offset()), (100, 100, None));
        assert_eq!((mapping.uses(), second.to_vec()[0]), (2, 0));
        let mut gather = Gather::new();
        gather.push_frame(first, 0, 100);
        drop(second);
        assert_eq!(mapping.uses(), 1);
        let part = mapping.counted();
        let used = part.hold();
        assert_eq!((mapping.uses(), part.uses()), (3, 1), "the part itself is a use, and so is each of its uses");
        drop(part);
        assert_eq!(mapping.uses(), 2, "its use lives");
        drop(used);
        assert_eq!(mapping.uses(), 1);
        let kept = mapping.hold();
        let base = mapping.as_ptr();
        drop(mapping);
        gather.clear();
        assert_eq!(kept.mapping().uses(), 1);
        // SAFETY: byte 104 is in the mapping, which `kept` keeps.
        assert_eq!(unsafe { base.add(104).read() }, 7);
    }

    #[test]
    fn a_count_of_uses_is_free_for_others_when_none_is_left() {
        let (memory, mut part) = (Mapping::new(8192).unwrap(), Arc::<PartUses>::default());
        assert!(PartUses::is_free(&mut part));
        for _ in 0..2 {
            let counted = memory.counted_by(Arc::clone(&part));
            let used = counted.hold();
            drop(counted);
            assert!(!PartUses::is_free(&mut part) && memory.uses() > 0);
            drop(used);
            assert!(PartUses::is_free(&mut part) && memory.uses() == 0);
        }
        let counted = memory.counted_by(Arc::clone(&part));
        counted.hold().note_given_up();
        drop(counted);
        assert!(!PartUses::is_free(&mut part), "somebody may touch the memory for ever");
    }

    #[test]
    fn a_frame_that_is_given_up_is_told_to_who_waits_for_it_and_to_nobody_else() {
        let memory = Mapping::new(8192).unwrap();
        let (lost, other) = (memory.counted(), memory.counted());
        // SAFETY: no references to the memory are made.
        let (frame, alive) = unsafe { (Frame::over(&lost, 0, 100), Frame::over(&other, 0, 100)) };
        frame.note_given_up();
        let _ = std::mem::ManuallyDrop::new(frame);
        drop(alive);
        assert!(lost.is_given_up() && lost.uses() > 0);
        assert!(!other.is_given_up() && other.uses() == 0);
        drop((lost, other));
        assert!(memory.is_given_up() && memory.uses() > 0, "it is never free again");
    }
}
