//! Memory that a program fills before its job begins.
//!
//! Programs written with the ANL macros allocate and fill shared memory first, and then create processes, which inherit everything. The
//! processes of a job inherit nothing: each runs the program from its beginning. So each has private memory at the addresses of the
//! segments, and all fill it alike. When they join, the memory of rank 0 becomes the job's (docs/decisions/0050).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};

use crate::area::AreaError;
use crate::environment::Environment;
use crate::join::JoinError;
use crate::limits::{AREA_ADDRESS, PAGE_BYTES};
use crate::{CallError, Job};

/// Bytes of a page's entry in `/proc/PID/pagemap`.
const ENTRY_BYTES: usize = size_of::<u64>();
/// A page that is in memory (bit 63) or swapped out (bit 62): Documentation/admin-guide/mm/pagemap.rst of the kernel.
const IN_USE: u64 = 0b11 << 62;
/// Entries that are read at a time.
const PAGES_PER_LOOK: usize = 512;

/// The segment that the memory becomes.
const SEGMENT: &str = "prepared";

/// Why a job did not begin with prepared memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreparedError {
    /// The process could not join.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The memory could not become a segment.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Private memory at the addresses where the job's segments will lie: as much as all segments together may have. It holds zeroes
/// at first, and pages that are not touched take no memory.
#[derive(Debug)]
pub struct Prepared {
    rank: u8,
    ranks: u8,
    memory: Private,
}

/// Private memory.
#[derive(Debug)]
struct Private {
    at: usize,
    bytes: usize,
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: mapped by this module. What the program stored here is not used any more, by the caller's word (`Prepared::join`).
        let _ = unsafe { munmap(with_exposed_provenance_mut(self.at), self.bytes) };
    }
}

impl Prepared {
    /// Maps the memory of the job that the environment names. Nothing is said to the other processes yet.
    ///
    /// # Errors
    /// `Environment`: no job. `Area`: the addresses are in use, or the kernel refuses memory.
    pub fn map() -> Result<Self, JoinError> {
        let Environment { rank, ranks, pages, .. } = Environment::of_process()?;
        let bytes = pages as usize * PAGE_BYTES;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let place = with_exposed_provenance_mut(AREA_ADDRESS);
        // SAFETY: a new mapping that replaces none.
        let at = unsafe { mmap_anonymous(place, bytes, rights, flags | MapFlags::FIXED_NOREPLACE) };
        let at = at.map_err(|error| if error == Errno::EXIST { AreaError::Address } else { error.into() })?;
        let memory = Private { at: at.expose_provenance(), bytes };
        if memory.at != AREA_ADDRESS {
            return Err(AreaError::Address.into());
        }
        Ok(Self { rank, ranks, memory })
    }

    /// The rank that this process will have.
    pub fn rank(&self) -> u8 {
        self.rank
    }

    /// How many processes the job has.
    pub fn ranks(&self) -> u8 {
        self.ranks
    }

    /// Where the memory begins, the same address in every process, before and after the join.
    pub fn as_ptr(&self) -> *mut u8 {
        with_exposed_provenance_mut(self.memory.at)
    }

    /// Its size in bytes: whole pages.
    pub fn len(&self) -> usize {
        self.memory.bytes
    }

    /// Never: a job has at least a page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Joins the job. At the addresses of the memory lies a segment then, which holds the first `used` bytes of rank 0's memory, and
    /// zeroes behind. What other ranks have stored is dropped. All ranks are behind the copy when this returns.
    ///
    /// # Safety
    /// No reference into the memory is used any more, and no other thread uses the memory meanwhile. Pointers that the program
    /// has may be used again afterwards: they point into the segment.
    ///
    /// # Errors
    /// `Join`, `Call`. The memory is gone then.
    pub unsafe fn join(self, used: usize) -> Result<Job, PreparedError> {
        let Self { rank, memory, .. } = self;
        let bytes = memory.bytes;
        let used = used.div_ceil(PAGE_BYTES).min(bytes / PAGE_BYTES) * PAGE_BYTES;
        let filled = if rank == 0 && used > 0 { Some(move_away(&memory, used)?) } else { None };
        drop(memory);
        let job = Job::join()?;
        let segment = job.segment(SEGMENT, bytes)?;
        debug_assert_eq!(segment.as_ptr().addr(), AREA_ADDRESS, "the first segment of a job begins with its area");
        if let Some(filled) = filled {
            touched_pages(filled.at, filled.bytes, |page| {
                // SAFETY: a page of the memory that was moved away, which nothing changes.
                let from = unsafe { &*with_exposed_provenance::<[u8; PAGE_BYTES]>(filled.at + page) };
                if *from != [0; PAGE_BYTES] {
                    // SAFETY: a page of the segment, which is mapped as long as the job; no other process uses it before the barrier.
                    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), segment.as_ptr().add(page), PAGE_BYTES) };
                }
            });
        }
        job.meet_of_job()?;
        Ok(job)
    }
}

/// Gives the offset of each page of memory at `at` that the program has touched; of all pages if the kernel does not tell. Ocean of SPLASH allocates
/// 15 GiB and fills 1 of 1,000 pages: to read the others would make the kernel map a page of zeroes for each.
fn touched_pages(at: usize, bytes: usize, mut touched: impl FnMut(usize)) {
    let pagemap = File::open("/proc/self/pagemap").ok();
    let mut entries = [0; PAGES_PER_LOOK * ENTRY_BYTES];
    for first in (0..bytes).step_by(PAGES_PER_LOOK * PAGE_BYTES) {
        let pages = ((bytes - first) / PAGE_BYTES).min(PAGES_PER_LOOK);
        let entries = &mut entries[..pages * ENTRY_BYTES];
        let place = ((at + first) / PAGE_BYTES * ENTRY_BYTES) as u64;
        let is_known = pagemap.as_ref().is_some_and(|pagemap| pagemap.read_exact_at(entries, place).is_ok());
        for (page, entry) in entries.as_chunks::<ENTRY_BYTES>().0.iter().enumerate() {
            if !is_known || u64::from_ne_bytes(*entry) & IN_USE != 0 {
                touched(first + page * PAGE_BYTES);
            }
        }
    }
}

/// Moves the first bytes of the memory elsewhere, without a copy.
fn move_away(memory: &Private, bytes: usize) -> Result<Private, JoinError> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let place = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
    let place = place.map_err(AreaError::Kernel)?;
    let from = with_exposed_provenance_mut(memory.at);
    // SAFETY: the first part of the memory, to which nothing refers, takes the place of the mapping just made.
    let moved = unsafe { mremap_fixed(from, bytes, bytes, MremapFlags::MAYMOVE, place) }.map_err(AreaError::Kernel)?;
    Ok(Private { at: moved.expose_provenance(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_were_touched_are_told_from_the_others() {
        let bytes = 3 * PAGES_PER_LOOK * PAGE_BYTES;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, flags) }.unwrap();
        let memory = Private { at: at.expose_provenance(), bytes };
        let stored = [0, 7, PAGES_PER_LOOK, 3 * PAGES_PER_LOOK - 1].map(|page| page * PAGE_BYTES);
        for page in stored {
            // SAFETY: a word of the mapping, which nothing refers to.
            unsafe { with_exposed_provenance_mut::<u64>(memory.at + page).write(1) };
        }
        let mut found = Vec::new();
        touched_pages(memory.at, memory.bytes, |page| found.push(page));
        // A page of the kernel's larger sizes counts as many.
        assert!(stored.iter().all(|page| found.contains(page)), "{found:?}");
        assert!(found.len() < bytes / PAGE_BYTES, "pages that nobody has touched are told too");
    }
}
