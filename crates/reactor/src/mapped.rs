//! A limit on the bytes of mapped files in the process's page tables.
//!
//! A page that was sent from a mapping stays in the process's page tables until the kernel is short of memory. So a node
//! that has served a large file has all of it as resident memory. The OOM killer counts it, and the kernel reclaims it with
//! more effort than pages of the cache alone. Above the limit a thread passes over all mappings like the hand of a clock and
//! releases pages (`madvise(2)`, `MADV_DONTNEED`), down to 7/8 of the limit. No byte of a shared mapping is lost: the page
//! cache keeps the page, and the next send maps it again, with 16 neighbours.
//!
//! The limit is for the process, as resident memory is. Loops do not ask how much that is: each adds up the bytes that its
//! sends and receives may have mapped, and wakes the thread once in a quantum. Nothing else wakes it. If a round does not
//! help, because the resident memory is something else, it is not repeated before the next wake-up.
//!
//! The limit does not cover:
//!
//! - Sends in flight, less than a quantum for each loop, and pages that the loops map until the thread gets a core. With all
//!   cores busy and 64 KiB mapped for every read of 4 KiB that was up to 56 MiB (docs/decisions/0013).
//! - Page tables. Kernels before 6.14 keep empty ones: 8 bytes for each page that was ever touched, 0.2 %.
//! - Files in huge pages: one fault maps 2 MiB where the loops count 64 KiB, so wake-ups come late.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use rustix::param::page_size;

/// One fault maps what is in the page cache of the aligned range of so many bytes around it (the kernel's `fault_around_bytes`,
/// unless it was changed).
const FAULT_AROUND_BYTES: u64 = 64 << 10;

/// Bytes that a loop maps between two pokes: a 64th of the limit, within these bounds.
const QUANTUM_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;

/// Bytes of address space that one call lets go of, an eighth of the limit within these bounds: other threads can map
/// and unmap in between.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 2 << 20..=64 << 20;

/// Every mapping by its address, with its bytes in whole pages. A thread that holds the lock keeps them mapped.
static MAPPINGS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

static KEEPER: OnceLock<Keeper> = OnceLock::new();

static DROPPED_BYTES: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Keeper {
    limit_bytes: u64,
    thread: Thread,
}

/// What is known of the process's mapped files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedMemory {
    /// As given to [`limit_mapped`].
    pub limit_bytes: u64,
    /// Bytes that left the page tables to keep to it, since the start: at least so many, since others may have come at
    /// the same time.
    pub dropped_bytes: u64,
}

/// Limits the bytes of mapped files in the page tables of this process (`RssFile` and `RssShmem` of
/// proc_pid_status(5), the program's own code among them). Starts a thread. Loops that were opened before do not know
/// of the limit. The module's documentation says what may stand above it.
///
/// # Errors
/// `AlreadyExists` if there is a limit; the kernel's if there is no `/proc` or no thread can be started.
pub fn limit_mapped(limit_bytes: u64) -> io::Result<()> {
    // Opened now: later the process may be confined.
    let statm = File::open("/proc/self/statm")?;
    resident_bytes(&statm)?;
    let _alone = mappings();
    if KEEPER.get().is_some() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let keep = move || {
        let mut hand = Hand::default();
        loop {
            if let Err(error) = hand.keep(&statm, limit_bytes) {
                tracing::warn!(%error, "the limit on mapped files is not kept");
            }
            std::thread::park();
        }
    };
    let thread = std::thread::Builder::new().name("byway-mapped".to_owned()).spawn(keep)?.thread().clone();
    KEEPER.set(Keeper { limit_bytes, thread }).map_err(|_| io::ErrorKind::AlreadyExists.into())
}

/// The limit, and what was done to keep to it; `None` without a limit.
pub fn mapped_memory() -> Option<MappedMemory> {
    let limit_bytes = KEEPER.get()?.limit_bytes;
    Some(MappedMemory { limit_bytes, dropped_bytes: DROPPED_BYTES.load(Ordering::Relaxed) })
}

/// A mapping is there.
pub(crate) fn register(base: usize, len: u64) {
    mappings().insert(base, (len as usize).next_multiple_of(page_size()));
}

/// A mapping is to go: when this returns the keeper does not work on it and never will.
pub(crate) fn unregister(base: usize) {
    mappings().remove(&base);
}

/// How many bytes the page tables may have more after a range of a mapping was used.
pub(crate) fn touched_bytes(offset: u64, len: u64) -> u64 {
    if len == 0 {
        return 0;
    }
    let first = offset / FAULT_AROUND_BYTES;
    let last = offset.saturating_add(len - 1) / FAULT_AROUND_BYTES;
    (last - first + 1) * FAULT_AROUND_BYTES
}

/// A loop's count of what it may have mapped since it poked the keeper.
#[derive(Debug)]
pub(crate) struct Touched {
    bytes: u64,
    quantum_bytes: u64,
}

impl Touched {
    /// Of a new loop.
    pub(crate) fn new() -> Self {
        let quantum = KEEPER.get().map(|keeper| bounded(keeper.limit_bytes / 64, &QUANTUM_BYTES));
        Self { bytes: 0, quantum_bytes: quantum.unwrap_or(u64::MAX) }
    }

    /// Adds to it; pokes the keeper once in a quantum.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= self.quantum_bytes
            && let Some(keeper) = KEEPER.get()
        {
            self.bytes = 0;
            keeper.thread.unpark();
        }
    }
}

/// Where the keeper stopped: an address, in whole pages.
#[derive(Debug, Default)]
struct Hand(usize);

impl Hand {
    /// If there is more than the limit, goes on until 7/8 of it are left, at most once round.
    fn keep(&mut self, statm: &File, limit_bytes: u64) -> io::Result<()> {
        let mut resident = resident_bytes(statm)?;
        if resident <= limit_bytes {
            return Ok(());
        }
        let goal = limit_bytes / 8 * 7;
        let chunk = (bounded(limit_bytes / 8, &CHUNK_BYTES) as usize).next_multiple_of(page_size());
        let mut round = Round { start: self.0, wrapped: false };
        while resident > goal && self.drop_next(&mut round, chunk) {
            let left = resident_bytes(statm)?;
            DROPPED_BYTES.fetch_add(resident.saturating_sub(left), Ordering::Relaxed);
            resident = left;
        }
        tracing::trace!(resident, limit_bytes, "dropped mapped pages");
        Ok(())
    }

    /// Lets go of the next chunk. False when the round is over.
    fn drop_next(&mut self, round: &mut Round, chunk: usize) -> bool {
        let mappings = mappings();
        let Some((at, bytes)) = self.next(round, &mappings, chunk) else { return false };
        // SAFETY: the range lies in a registered mapping, which is not unmapped while we hold the lock. It is shared and
        // of a file, so that whoever uses it at the moment only faults its pages in again, with the same bytes.
        let done = unsafe { rustix::mm::madvise(at as *mut _, bytes, rustix::mm::Advice::LinuxDontNeed) };
        if let Err(error) = done {
            tracing::trace!(%error, at, bytes, "not dropped");
        }
        true
    }

    /// The next chunk, no longer than one mapping; moves behind it.
    fn next(&mut self, round: &mut Round, mappings: &BTreeMap<usize, usize>, chunk: usize) -> Option<(usize, usize)> {
        let end = |(base, len): (&usize, &usize)| base + len;
        let under = |hand: usize| mappings.range(..=hand).next_back().filter(|&mapping| hand < end(mapping));
        let mut found = under(self.0).or_else(|| mappings.range(self.0..).next());
        if found.is_none() && !round.wrapped {
            (self.0, round.wrapped) = (0, true);
            found = mappings.iter().next();
        }
        let (base, len) = found?;
        let at = self.0.max(*base);
        if round.wrapped && at >= round.start {
            return None;
        }
        let bytes = chunk.min(base + len - at);
        self.0 = at + bytes;
        Some((at, bytes))
    }
}

/// One round of the hand.
#[derive(Debug)]
struct Round {
    start: usize,
    wrapped: bool,
}

fn mappings() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bounded(bytes: u64, bounds: &std::ops::RangeInclusive<u64>) -> u64 {
    bytes.clamp(*bounds.start(), *bounds.end())
}

/// Bytes of files in the page tables: the third field of `/proc/PID/statm`, in pages.
fn resident_bytes(statm: &File) -> io::Result<u64> {
    let mut text = [0; 256];
    let len = statm.read_at(&mut text, 0)?;
    let pages = shared_pages(&text[..len]).ok_or(io::ErrorKind::InvalidData)?;
    Ok(pages.saturating_mul(page_size() as u64))
}

fn shared_pages(statm: &[u8]) -> Option<u64> {
    std::str::from_utf8(statm).ok()?.split_ascii_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn round(hand: &mut Hand, mappings: &BTreeMap<usize, usize>, chunk: usize) -> Vec<(usize, usize)> {
        let mut round = Round { start: hand.0, wrapped: false };
        std::iter::from_fn(|| hand.next(&mut round, mappings, chunk)).take(100).collect()
    }

    #[test]
    fn a_round_meets_every_byte_once_wherever_it_starts() {
        let mappings = BTreeMap::from([(10 * PAGE, 5 * PAGE), (15 * PAGE, PAGE), (30 * PAGE, 2 * PAGE)]);
        for start in [0, 9, 10, 12, 14, 15, 16, 20, 31, 32, 40] {
            let mut hand = Hand(start * PAGE);
            let mut met: Vec<_> = round(&mut hand, &mappings, 2 * PAGE)
                .iter()
                .flat_map(|(at, bytes)| (at / PAGE..(at + bytes) / PAGE).collect::<Vec<_>>())
                .collect();
            met.sort_unstable();
            met.dedup();
            assert_eq!(met, [10, 11, 12, 13, 14, 15, 30, 31], "from page {start}");
        }
        assert_eq!(round(&mut Hand(7 * PAGE), &BTreeMap::new(), PAGE), []);
    }

    #[test]
    fn the_hand_goes_on_where_it_stopped() {
        let mappings = BTreeMap::from([(PAGE, 3 * PAGE)]);
        let mut hand = Hand::default();
        let mut step = || {
            let mut round = Round { start: hand.0, wrapped: false };
            hand.next(&mut round, &mappings, 2 * PAGE)
        };
        assert_eq!([step(), step(), step()], [Some((PAGE, 2 * PAGE)), Some((3 * PAGE, PAGE)), Some((PAGE, 2 * PAGE))]);
    }

    #[test]
    fn a_range_is_counted_with_what_a_fault_maps_around_it() {
        let around = FAULT_AROUND_BYTES;
        assert_eq!(touched_bytes(5, 0), 0);
        assert_eq!(touched_bytes(4096, 4096), around);
        assert_eq!(touched_bytes(around - 1, 2), 2 * around);
        assert_eq!(touched_bytes(around, 1 << 20), 1 << 20);
    }

    #[test]
    fn the_third_field_counts() {
        assert_eq!(shared_pages(b"9 8 7 6 0 5 0\n"), Some(7));
        assert_eq!(shared_pages(b"9 8"), None);
        assert!(resident_bytes(&File::open("/proc/self/statm").unwrap()).unwrap() > 0, "this program's code");
    }

    #[test]
    fn a_mapping_is_registered_while_it_is_there() {
        use std::os::fd::AsFd;
        let file = rustix::fs::memfd_create("here", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 12_345).unwrap();
        let mapping = crate::file_map::FileMap::new(file.as_fd(), 12_345, false).unwrap();
        let base = mapping.address(0, 1).unwrap() as usize;
        let len = 12_345_usize.next_multiple_of(page_size());
        assert_eq!(mappings().get(&base), Some(&len));
        drop(mapping);
        // Another test's mapping may have taken its place; it is of another length.
        assert_ne!(mappings().get(&base), Some(&len));
    }
}
