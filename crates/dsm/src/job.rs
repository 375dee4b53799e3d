//! A process's part in a job.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use byway_service::dsm::{
    Counters, JOB_BARRIERS, Machine, Misuse, Outcome, Page, PlacedSegment, SegmentRefused, Ticket,
};
use byway_service::limits::DSM_FETCH_PAGES_MAX;

use crate::allocation::LOCK_ALLOCATION;
use crate::area::Area;
use crate::checkpoint::{self, Checkpoints, Manifest};
use crate::drive::Drive;
use crate::environment::Environment;
use crate::join::{JoinError, join, remove_folder};
use crate::limits::{AREA_ADDRESS, PAGE_BYTES, REPORT_PAGES_TOLD_MAX};
use crate::pager::Pager;
use crate::report::{self, teller::Teller};
use crate::sessions::Sessions;

/// Where the job itself meets, apart from its end: when all have joined, and at checkpoints.
pub(crate) const BARRIER_JOB: u32 = u32::MAX;
/// All are done.
const BARRIER_FINISHED: u32 = JOB_BARRIERS;

/// A process has one area of memory, at one address, for its whole life.
static JOINED: AtomicBool = AtomicBool::new(false);

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The caller's mistake.
    #[error(transparent)]
    Misuse(#[from] Misuse),
    /// The segment cannot be had.
    #[error(transparent)]
    Segment(#[from] SegmentRefused),
    /// The kernel's.
    #[error("the kernel refuses memory for the segment: {0}")]
    Memory(std::io::ErrorKind),
    /// The barrier's number is taken by the job itself.
    #[error("barriers have numbers below {JOB_BARRIERS}")]
    Barrier,
    /// The lock's number is taken by the job itself.
    #[error("locks have numbers below {LOCK_ALLOCATION}")]
    Lock,
    /// The segment has no room for an allocation.
    #[error("the segment has {left} bytes left, and {bytes} were asked for: make it larger")]
    Full {
        /// Asked for.
        bytes: usize,
        /// Behind the last allocation.
        left: usize,
    },
    /// No power of two.
    #[error("memory is aligned to powers of two, not to {0}")]
    Alignment(usize),
    /// The bytes do not lie in a segment of this process.
    #[error("the range does not lie in a segment that this process has mapped")]
    Range,
    /// The caller is no process of the job.
    #[error("a forked child of a process of a job has no part in it")]
    Forked,
    /// A process could not write its part of a checkpoint.
    #[error(
        "rank {rank} could not write the checkpoint: {}; the checkpoint before it is still there",
        std::io::Error::from_raw_os_error(*error)
    )]
    Checkpoint {
        /// Which; 0 also if the manifest could not be written.
        rank: u8,
        /// The kernel's number of the error.
        error: i32,
    },
}

/// A process's part in a job. Threads share it.
#[derive(Debug)]
pub struct Job {
    rank: u8,
    ranks: u8,
    drive: Arc<Drive>,
    area: Arc<Area>,
    /// Addresses of the segments that this process has mapped.
    segments: Mutex<Vec<Range<usize>>>,
    checkpoints: Option<Checkpoints>,
    pager: Mutex<Option<JoinHandle<()>>>,
    /// None where the kernel has refused its socket: `byway dsm top` knows nothing of this process then.
    teller: Mutex<Option<Teller>>,
}

impl Job {
    /// Joins the job that the environment names, and waits for all other processes of it. Once in a process.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub fn join() -> Result<Self, JoinError> {
        let environment = Environment::of_process()?;
        if JOINED.swap(true, Ordering::AcqRel) {
            return Err(JoinError::Joined);
        }
        let Environment { rank, ranks, pages, consistency, .. } = environment;
        let resumed = match &environment.checkpoint {
            Some(place) if place.resume => {
                Some(Manifest::to_resume(&place.folder, usize::from(ranks), pages, consistency)?)
            }
            _ => None,
        };
        let area = Arc::new(Area::new(pages + environment.checkpoint.as_ref().map_or(0, |_| checkpoint::PAGES))?);
        let (node, sessions) = join(&environment)?;
        let sessions = Sessions::new(node, sessions);
        let mut machine = Machine::new(rank, ranks, pages, consistency);
        if let (0, Some(manifest)) = (rank, &resumed) {
            machine.place_segments(manifest.segments.clone());
        }
        let pager = Pager::new(Arc::clone(&area), sessions, machine, &environment)?;
        let drive = Drive::new(pager, environment.waits)?;
        let pager = Mutex::new(Some(drive.start()?));
        let place = environment.checkpoint.as_ref();
        let checkpoints =
            place.map(|place| Checkpoints::new(place.folder.clone(), consistency, pages, resumed.as_ref()));
        let teller = Mutex::new(Teller::start(&drive).ok());
        let job = Self { rank, ranks, drive, area, segments: Mutex::default(), checkpoints, pager, teller };
        // Until then a rank could be named to one that has no session with it yet.
        let _ = job.meet_of_job();
        remove_folder(&environment);
        if let (Some(place), Some(manifest)) = (place, resumed) {
            job.resume(&place.folder, &manifest)?;
        }
        Ok(job)
    }

    /// This process, from 0.
    pub fn rank(&self) -> u8 {
        self.rank
    }

    /// How many processes the job has.
    pub fn ranks(&self) -> u8 {
        self.ranks
    }

    /// Maps a segment, of zeroes at first, at the same address in every process. Its size is rounded up to whole pages; all processes
    /// give the same.
    ///
    /// # Errors
    /// `Segment`; `Misuse` of a name or size; `Memory`.
    pub fn segment(&self, name: &str, bytes: usize) -> Result<Segment<'_>, CallError> {
        let pages = bytes.div_ceil(PAGE_BYTES) as u64;
        // The name may lie in a segment, and the pager waits for none.
        let name = name.as_bytes().to_vec();
        match self.call(|machine, ticket| machine.map(&name, pages, ticket))? {
            Outcome::Mapped { first, pages } => {
                let segment = self.open(first, pages)?;
                let range = segment.at..segment.at + segment.bytes;
                let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
                if !segments.contains(&range) {
                    segments.push(range);
                }
                Ok(segment)
            }
            Outcome::Refused(refused) => Err(refused.into()),
            Outcome::Locked | Outcome::Passed | Outcome::Fenced | Outcome::Fetched => {
                unreachable!("the machine answers a call with its own outcome")
            }
        }
    }

    /// Lets this process use pages.
    pub(crate) fn open(&self, first: Page, pages: u64) -> Result<Segment<'_>, CallError> {
        let opened = self.area.open_segment(first, pages);
        opened.map_err(|error| CallError::Memory(std::io::Error::from(error).kind()))?;
        let (at, bytes) = (AREA_ADDRESS + first as usize * PAGE_BYTES, pages as usize * PAGE_BYTES);
        Ok(Segment { at, bytes, job: PhantomData })
    }

    /// The words of a page that this process may use.
    pub(crate) fn words_of(&self, page: Page) -> &[AtomicU64] {
        Segment { at: AREA_ADDRESS + page as usize * PAGE_BYTES, bytes: PAGE_BYTES, job: PhantomData }.words()
    }

    /// The pages whose home this rank is; at rank 0 all segments.
    pub(crate) fn image(&self) -> (Vec<Page>, Vec<PlacedSegment>) {
        let mut image = Default::default();
        self.drive.tell(|pager| image = pager.image());
        image
    }

    pub(crate) fn checkpoints(&self) -> Option<&Checkpoints> {
        self.checkpoints.as_ref()
    }

    /// The segment of this process in which an address lies.
    pub fn segment_of(&self, address: *const u8) -> Option<Segment<'_>> {
        let segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let found = segments.iter().find(|segment| segment.contains(&address.addr()));
        found.map(|segment| Segment { at: segment.start, bytes: segment.len(), job: PhantomData })
    }

    /// Waits for a lock, and has it until the guard is dropped. Threads and processes get it one after the other.
    ///
    /// # Errors
    /// `Lock`: the number; `Misuse`: too many calls wait.
    pub fn lock(&self, lock: u32) -> Result<LockGuard<'_>, CallError> {
        self.acquire(lock)?;
        Ok(LockGuard { drive: &self.drive, lock })
    }

    pub(crate) fn lock_of_job(&self, lock: u32) -> Result<LockGuard<'_>, CallError> {
        self.call(|machine, ticket| machine.lock(lock, ticket))?;
        Ok(LockGuard { drive: &self.drive, lock })
    }

    /// As [`Job::lock`], for callers without guards: the lock is theirs until [`Job::release`].
    ///
    /// # Errors
    /// As there.
    pub fn acquire(&self, lock: u32) -> Result<(), CallError> {
        if lock == LOCK_ALLOCATION {
            return Err(CallError::Lock);
        }
        self.call(|machine, ticket| machine.lock(lock, ticket)).map(|_| ())
    }

    /// Gives a lock of [`Job::acquire`] back. One that this process does not have is left alone.
    pub fn release(&self, lock: u32) {
        if lock != LOCK_ALLOCATION {
            let _ = self.drive.tell(|pager| pager.unlock(lock));
        }
    }

    /// Waits until every process has reached the barrier. One thread of each does.
    ///
    /// # Errors
    /// `Barrier`; `Misuse` if another thread of this process is at it.
    pub fn barrier(&self, barrier: u32) -> Result<(), CallError> {
        if barrier >= JOB_BARRIERS {
            return Err(CallError::Barrier);
        }
        self.meet(barrier)
    }

    /// Orders this process's accesses before the fence with those behind it. With release consistency, what it has stored before is seen behind
    /// every fence, of any process, that begins later; it costs a message to the home of each page that was stored to, and each page that
    /// other processes may use comes anew. With sequential consistency it is the processor's fence.
    ///
    /// # Errors
    /// `Misuse`: too many calls wait.
    pub fn fence(&self) -> Result<(), CallError> {
        std::sync::atomic::fence(Ordering::SeqCst);
        self.call(Machine::fence).map(|_| ())
    }

    /// Brings bytes of a segment here: those of its pages that are not here are asked for at once, where loads would wait for one after the other.
    /// Returns when all have come. Another process may have taken a page again then, which is fetched anew when it is used.
    ///
    /// # Errors
    /// `Range`; `Misuse`: too many calls wait.
    pub fn fetch(&self, segment: Segment<'_>, bytes: Range<usize>) -> Result<(), CallError> {
        if bytes.start > bytes.end || bytes.end > segment.bytes {
            return Err(CallError::Range);
        }
        let page = |at: usize| ((segment.at - AREA_ADDRESS + at) / PAGE_BYTES) as Page;
        let end = page(bytes.end.next_multiple_of(PAGE_BYTES));
        for first in (page(bytes.start)..end).step_by(DSM_FETCH_PAGES_MAX) {
            let pages = first..end.min(first + DSM_FETCH_PAGES_MAX as Page);
            self.call(|machine, ticket| machine.fetch(pages, ticket))?;
        }
        Ok(())
    }

    /// Names bytes of a segment, such as an array, for `byway dsm run --report` and `byway dsm top`: they show the names of what lies on a page that
    /// several processes store to. Of a name the last 48 bytes are kept, and of a process the first 1,024 names.
    ///
    /// # Errors
    /// `Range`: the bytes do not lie in the segment.
    pub fn name(&self, segment: Segment<'_>, bytes: Range<usize>, name: &str) -> Result<(), CallError> {
        if bytes.start > bytes.end || bytes.end > segment.len() {
            return Err(CallError::Range);
        }
        let first = segment.as_ptr().addr();
        self.drive.tell(|pager| pager.name(first + bytes.start..first + bytes.end, name));
        Ok(())
    }

    /// A safe point of a program that computes: with [`Waits::Points`](crate::Waits::Points), answers other processes that have asked this one for
    /// something (a look of 0.5 us if none has). Otherwise it does nothing.
    pub fn poll(&self) {
        self.drive.poll();
    }

    /// What this process has counted; nothing in a forked child.
    pub fn counters(&self) -> Counters {
        self.drive.counters()
    }

    /// Waits until every process is here, and leaves the job. A process that ends without this ends the job for all.
    ///
    /// # Errors
    /// None that the program could mend.
    pub fn finish(self) -> Result<(), CallError> {
        self.meet(BARRIER_FINISHED)?;
        if let Some(counted) = self.drive.tell(Pager::report).flatten() {
            report::tell(&counted.lines(REPORT_PAGES_TOLD_MAX));
        }
        self.end(true);
        Ok(())
    }

    /// Waits for all processes, at the job's own barrier.
    pub(crate) fn meet_of_job(&self) -> Result<(), CallError> {
        self.meet(BARRIER_JOB)
    }

    fn meet(&self, barrier: u32) -> Result<(), CallError> {
        self.call(|machine, ticket| machine.barrier(barrier, ticket)).map(|_| ())
    }

    fn call(&self, begin: impl FnOnce(&mut Machine, Ticket) -> Result<(), Misuse>) -> Result<Outcome, CallError> {
        self.drive.call(begin)
    }

    fn end(&self, says_so: bool) {
        let pager = self.pager.lock().unwrap_or_else(PoisonError::into_inner).take();
        let teller = self.teller.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(pager) = pager.filter(|_| !self.drive.is_of_parent()) {
            teller.into_iter().for_each(Teller::end);
            self.drive.end(says_so);
            let _ = pager.join();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end(false);
        if self.drive.is_of_parent() {
            // Nothing of the parent's is closed or unmapped.
            let _ = (Arc::into_raw(Arc::clone(&self.drive)), Arc::into_raw(Arc::clone(&self.area)));
            return;
        }
        debug_assert_eq!(Arc::strong_count(&self.drive), 1, "the pager's thread has ended");
    }
}

/// A segment: memory of the job, as long as the process is part of it.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'job> {
    at: usize,
    bytes: usize,
    job: PhantomData<&'job Job>,
}

impl<'job> Segment<'job> {
    /// Where it begins, the same in every process.
    pub fn as_ptr(&self) -> *mut u8 {
        with_exposed_provenance_mut(self.at)
    }

    /// Its size in bytes: whole pages.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: a segment has a page at least.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Its words. Relaxed loads and stores cost what plain ones do.
    pub fn words(&self) -> &'job [AtomicU64] {
        let (at, len) = (with_exposed_provenance_mut::<AtomicU64>(self.at), self.bytes / size_of::<AtomicU64>());
        // SAFETY: the segment lies in the view, which is mapped as long as the job that it borrows; it is aligned to pages, any bytes
        // are an atomic's, and other processes change them as other threads would.
        unsafe { std::slice::from_raw_parts(at, len) }
    }
}

/// A lock that this process has.
#[derive(Debug)]
pub struct LockGuard<'job> {
    drive: &'job Drive,
    lock: u32,
}

impl Drop for LockGuard<'_> {
    fn drop(&mut self) {
        let _ = self.drive.tell(|pager| pager.unlock(self.lock));
    }
}
