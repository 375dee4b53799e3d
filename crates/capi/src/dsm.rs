//! Shared memory between the processes of a job (`byway dsm run`).

use std::ffi::{CStr, c_char, c_int};

use byway_dsm::{CallError, Job, JoinError};

use crate::error::{
    BYWAY_E_BUSY, BYWAY_E_FORKED, BYWAY_E_INVALID, BYWAY_E_RANGE, BYWAY_E_SYSTEM, Code, OutPointer, borrow, guard,
};

/// A process's part in a job. Threads may share it.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_dsm_job(Job);

/// What a process has counted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_dsm_counters {
    /// Faults by loads.
    pub read_faults: u64,
    /// Faults by stores.
    pub write_faults: u64,
    /// Pages that came from other processes.
    pub pages_received: u64,
    /// Pages that were sent to other processes.
    pub pages_sent: u64,
    /// Copies that were given up for another process's store.
    pub invalidations: u64,
    /// Messages to other processes, pages included.
    pub messages: u64,
    /// Pages that left late, because direct I/O or a ring had them pinned.
    pub pin_waits: u64,
}

impl From<JoinError> for Code {
    fn from(error: JoinError) -> Self {
        Self(match error {
            JoinError::Environment(_) | JoinError::Joined => BYWAY_E_INVALID,
            _ => BYWAY_E_SYSTEM,
        })
    }
}

impl From<CallError> for Code {
    fn from(error: CallError) -> Self {
        Self(match error {
            CallError::Misuse(byway_dsm::Misuse::TooMany | byway_dsm::Misuse::AtBarrier { .. }) => BYWAY_E_BUSY,
            CallError::Segment(_) | CallError::Range | CallError::Full { .. } => BYWAY_E_RANGE,
            CallError::Forked => BYWAY_E_FORKED,
            CallError::Memory(_) | CallError::Checkpoint { .. } => BYWAY_E_SYSTEM,
            _ => BYWAY_E_INVALID,
        })
    }
}

/// A name of C's.
///
/// # Safety
/// `text` is null or ends with a zero byte, and does not change during the call.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Code> {
    if text.is_null() {
        return Err(Code(BYWAY_E_INVALID));
    }
    // SAFETY: not null, and ends with a zero byte by the caller's word.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Code(BYWAY_E_INVALID))
}

/// Joins the job that this process was started for, and waits for its other processes; once in a process. Reports on standard
/// error why it failed. End it with `byway_dsm_finish`.
///
/// # Safety
/// `job` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_init(job: *mut *mut byway_dsm_job) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let place = unsafe { OutPointer::at(job)? };
        let joined = Job::join().inspect_err(|error| eprintln!("byway: {error}"))?;
        place.give(Box::into_raw(Box::new(byway_dsm_job(joined))));
        Ok(0)
    })
}

/// This process's number, from 0; negative if `job` is null.
///
/// # Safety
/// `job` is null or of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_rank(job: *const byway_dsm_job) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(job)? }.0.rank())))
}

/// The number of processes of the job; negative if `job` is null.
///
/// # Safety
/// `job` is null or of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_ranks(job: *const byway_dsm_job) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(job)? }.0.ranks())))
}

/// Maps the segment of this name (1 to 64 bytes), zeroes at first, at the same address in every process, and gives the address. All processes
/// give the same size. It stays until `byway_dsm_finish`. `BYWAY_E_RANGE`: it has another size, or does not fit.
///
/// # Safety
/// `job` is of `byway_dsm_init`; `name` ends with a zero byte; `address` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_segment(
    job: *const byway_dsm_job,
    name: *const c_char,
    bytes: usize,
    address: *mut *mut u8,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (job, name, place) = unsafe { (borrow(job)?, text(name)?, OutPointer::at(address)?) };
        place.give(job.0.segment(name, bytes)?.as_ptr());
        Ok(0)
    })
}

/// Waits for a lock. It excludes other processes and other threads of this process.
///
/// # Safety
/// `job` is of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_lock(job: *const byway_dsm_job, lock: u32) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(job)? }.0.acquire(lock)?;
        Ok(0)
    })
}

/// Releases a lock that this process holds. Does nothing if the process does not hold it.
///
/// # Safety
/// `job` is of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_unlock(job: *const byway_dsm_job, lock: u32) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(job)? }.0.release(lock);
        Ok(0)
    })
}

/// Waits until every process has reached the barrier, whose number is below 4294967294. One thread of each process calls this.
///
/// # Safety
/// `job` is of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_barrier(job: *const byway_dsm_job, barrier: u32) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(job)? }.0.barrier(barrier)?;
        Ok(0)
    })
}

/// Orders this process's loads and stores before the fence with those behind it. With release consistency (`byway dsm run --consistency
/// rc`) what was stored before is seen behind every fence, of any process, that begins later.
///
/// # Safety
/// `job` is of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_fence(job: *const byway_dsm_job) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(job)? }.0.fence()?;
        Ok(0)
    })
}

/// Brings bytes of a segment to this process: pages that are not here are asked for at once, where loads would wait for one after the other.
/// `BYWAY_E_RANGE`: the bytes do not lie in a segment that this process has mapped.
///
/// # Safety
/// `job` is of `byway_dsm_init`. `address` may be any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_fetch(job: *const byway_dsm_job, address: *const u8, bytes: usize) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let job = &unsafe { borrow(job)? }.0;
        let segment = job.segment_of(address).ok_or(CallError::Range)?;
        let first = address.addr() - segment.as_ptr().addr();
        job.fetch(segment, first..first.checked_add(bytes).ok_or(CallError::Range)?)?;
        Ok(0)
    })
}

/// Allocates `bytes` in the segment in which `segment` lies, for all processes: nobody else gets them, and they are never given back. Writes their
/// address to `*address`: a multiple of `alignment`, a power of two. With 4096, and `bytes` a multiple too, no other allocation lies on their pages.
/// They hold zeroes, unless the program has stored there. The first 64 bytes of the segment say how much is allocated: a program that allocates in a segment
/// stores only to what it got. `BYWAY_E_RANGE` if the segment has no room.
///
/// # Safety
/// `job` is of `byway_dsm_init`; `address` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_allocate(
    job: *const byway_dsm_job,
    segment: *const u8,
    bytes: usize,
    alignment: usize,
    address: *mut *mut u8,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (job, place) = unsafe { (&borrow(job)?.0, OutPointer::at(address)?) };
        let segment = job.segment_of(segment).ok_or(CallError::Range)?;
        let allocated = job.allocate(segment, bytes, alignment)?;
        place.give(segment.as_ptr().wrapping_add(allocated.start));
        Ok(0)
    })
}

/// Names `bytes` of memory at `address`, such as an array, for `byway dsm run --report` and `byway dsm top`: they show the names of what lies on a
/// page that several processes store to. Of a name the last 48 bytes are kept, and of a process the first 1,024 names.
/// `BYWAY_E_RANGE` if the bytes do not lie in a segment.
///
/// # Safety
/// `job` is of `byway_dsm_init`; `name` is a string that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_name(
    job: *const byway_dsm_job,
    address: *const u8,
    bytes: usize,
    name: *const c_char,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (job, name) = unsafe { (&borrow(job)?.0, text(name)?) };
        let segment = job.segment_of(address).ok_or(CallError::Range)?;
        let first = address.addr() - segment.as_ptr().addr();
        job.name(segment, first..first.checked_add(bytes).ok_or(CallError::Range)?, name)?;
        Ok(0)
    })
}

/// A safe point of a program that computes: with `byway dsm run --pager points`, answers other processes that have asked this one for something.
/// Otherwise it does nothing. It costs some 0.5 us when no process has asked; call it every 10 to 100 us.
///
/// # Safety
/// `job` is of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_poll(job: *const byway_dsm_job) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(job)? }.0.poll();
        Ok(0)
    })
}

/// Waits until every process has called this, and writes the contents of all segments to the folder of `byway dsm run --checkpoint`. One thread of
/// each process calls this, and no thread stores to a segment until it returns. Gives 1 when the checkpoint is durable, 0 without that
/// flag. An error is the same in every process, and reported on standard error: the checkpoint before is still there.
///
/// # Safety
/// `job` is of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_checkpoint(job: *const byway_dsm_job) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let written = unsafe { borrow(job)? }.0.checkpoint();
        let written = written.inspect_err(|error| eprintln!("byway: {error}"))?;
        Ok(c_int::from(written))
    })
}

/// 1 if the segments hold what they held at a checkpoint of an earlier job (`byway dsm run --resume`), else 0; negative if `job` is null.
///
/// # Safety
/// `job` is null or of `byway_dsm_init`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_is_resumed(job: *const byway_dsm_job) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(job)? }.0.is_resumed())))
}

/// Writes this process's counters to `*counters`.
///
/// # Safety
/// `job` is of `byway_dsm_init`; `counters` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_statistics(job: *const byway_dsm_job, counters: *mut byway_dsm_counters) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (job, place) = unsafe { (borrow(job)?, OutPointer::at(counters)?) };
        let byway_dsm::Counters {
            read_faults,
            write_faults,
            pages_received,
            pages_sent,
            invalidations,
            messages,
            pin_waits,
        } = job.0.counters();
        place.give(byway_dsm_counters {
            read_faults,
            write_faults,
            pages_received,
            pages_sent,
            invalidations,
            messages,
            pin_waits,
        });
        Ok(0)
    })
}

/// Waits until every process has called this, leaves the job and frees `job`. A process that ends without this ends the job for
/// all.
///
/// # Safety
/// `job` is of `byway_dsm_init`; neither it nor a segment is used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_dsm_finish(job: *mut byway_dsm_job) -> c_int {
    guard(|| {
        if job.is_null() {
            return Err(Code(BYWAY_E_INVALID));
        }
        // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
        unsafe { Box::from_raw(job) }.0.finish()?;
        Ok(0)
    })
}
