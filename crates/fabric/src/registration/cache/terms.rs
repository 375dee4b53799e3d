//! The words in which the cache is spoken to.

use crate::registration::range::PageRange;

/// How much stays registered after use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ranges. Above, the one that was used longest ago is deregistered; if all are in use, further ranges are registered
    /// for one use. More than [`REGISTERED_RANGES_MAX`](crate::limits::REGISTERED_RANGES_MAX) is that.
    pub ranges_max: usize,
    /// Bytes of all ranges together, likewise.
    pub bytes_max: usize,
}

/// What happened, since the cache was made, and what there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Look-ups that found a registration.
    pub hits: u64,
    /// Look-ups that did not.
    pub misses: u64,
    /// Ranges deregistered for the limits.
    pub evictions: u64,
    /// Ranges that the address space's changes made untrue.
    pub invalidations: u64,
    /// Ranges that a longer one replaced.
    pub merges: u64,
    /// Registrations that the registrar refused.
    pub refused: u64,
    /// Registrations made for one use.
    pub uncached: u64,
    /// Ranges that look-ups find now.
    pub ranges: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Those of them that are in use.
    pub in_use: usize,
    /// Ranges that look-ups do not find and that are in use still.
    pub detached: usize,
}

impl Counters {
    /// Of both caches together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            evictions: self.evictions + other.evictions,
            invalidations: self.invalidations + other.invalidations,
            merges: self.merges + other.merges,
            refused: self.refused + other.refused,
            uncached: self.uncached + other.uncached,
            ranges: self.ranges + other.ranges,
            bytes: self.bytes + other.bytes,
            in_use: self.in_use + other.in_use,
            detached: self.detached + other.detached,
        }
    }
}

/// A use of a range, or a registration under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::registration) struct Ticket {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

/// What to do about a range that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::registration) enum Plan {
    /// Watch and register this range, which may be longer than the wanted one, then say [`Cache::complete`](super::Cache::complete) or
    /// [`Cache::abandon`](super::Cache::abandon).
    Register { ticket: Ticket, range: PageRange },
    /// Register the wanted range for this use alone.
    Once(Uncached),
}

/// Why a range is registered for one use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::registration) enum Uncached {
    /// Longer than all ranges together may be.
    TooLong,
    /// The limits are reached, and everything is in use.
    Full,
    /// Its pages may be on their way out (see [`suspects`](crate::registration::suspects)): by a call with that number, or an earlier one.
    Suspect(u64),
    /// Its watch is just being taken away.
    Closing,
    /// A fork is under way.
    Forking,
    /// The address space is changing.
    Changing,
    /// It is a file's, or others share it.
    Shared,
}

/// What the kernel says of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::registration) enum Change {
    /// These pages are gone.
    Unmapped(PageRange),
    /// The pages of the first are now at the second.
    Remapped { from: PageRange, to: PageRange },
    /// These pages will be gone any moment.
    Removed(PageRange),
}

/// An unused range that no look-up finds, to be deregistered.
#[derive(Debug)]
pub(in crate::registration) struct Condemned<T> {
    /// For [`Cache::closed`](super::Cache::closed).
    pub(in crate::registration) ticket: Ticket,
    /// Dropping it deregisters; not under the lock. `None` where nothing was registered in the end.
    pub(in crate::registration) value: Option<T>,
    /// What need not be watched any more.
    pub(in crate::registration) unwatched: Option<PageRange>,
}
