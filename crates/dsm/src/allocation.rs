//! Memory within a segment, for data that processes make while they run.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::job::{CallError, Job, Segment};

/// The lock under which memory is allocated. Programs have the numbers below.
pub(crate) const LOCK_ALLOCATION: u32 = u32::MAX;

/// Bytes at the beginning of a segment that say how much of it is allocated: a cache line.
const HEADER_BYTES: usize = 64;

impl Job {
    /// Allocates bytes in a segment, for all processes: nobody else gets them, and they are never given back. Gives where they lie in the segment. Their
    /// address is a multiple of `alignment`, a power of two: 4,096 keeps them from pages of other allocations, if their number is a multiple too. They
    /// hold zeroes, unless the program has stored there.
    ///
    /// The first 64 bytes of the segment say how much is allocated: a program that allocates in a segment stores only to what it got.
    /// A call takes a lock of the job and a page that other processes may have, some faults in all.
    ///
    /// # Errors
    /// `Full` if the segment has no room; `Alignment`; `Misuse`: too many calls wait.
    pub fn allocate(&self, segment: Segment<'_>, bytes: usize, alignment: usize) -> Result<Range<usize>, CallError> {
        if !alignment.is_power_of_two() {
            return Err(CallError::Alignment(alignment));
        }
        // A lock of the job, and no atomic instruction: with release consistency two processes may store to one page.
        let _lock = self.lock_of_job(LOCK_ALLOCATION)?;
        let used = &segment.words()[0];
        let begin = (used.load(Ordering::Relaxed) as usize).max(HEADER_BYTES);
        // A segment begins at a page, which is no multiple of larger alignments.
        let first = segment.as_ptr().addr();
        let aligned = (first + begin).checked_next_multiple_of(alignment).map(|at| at - first);
        let place = aligned.and_then(|at| Some(at..at.checked_add(bytes)?));
        let Some(place) = place.filter(|place| place.end <= segment.len()) else {
            return Err(CallError::Full { bytes, left: segment.len().saturating_sub(begin) });
        };
        used.store(place.end as u64, Ordering::Relaxed);
        Ok(place)
    }
}
