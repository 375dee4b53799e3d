//! Memory that stays registered between uses.
//!
//! Before a NIC, or a ring's fixed buffers, can reach memory, its pages must be pinned and their addresses passed on. For
//! small ranges that costs more than copying them (Goglin, fig. 6; `cargo run --example registration_cost`). So a range
//! stays registered after its use ([`RegistrationCache`]), as in classic pin-down caches, and is found again by its address.
//!
//! An address alone proves nothing: a program unmaps memory and gets the same addresses back with other pages. A
//! registration whose pages are no longer those of its addresses must never be found. The kernel reports `munmap`, `mremap`,
//! `mmap` over a mapping, and `madvise` by userfaultfd events; the private module `monitor` says why none is missed, and why
//! no thread waits for ever.
//!
//! No event reports the following. Therefore only private anonymous memory is kept, unless the caller vouches for more
//! ([`RegistrationCache::get_stable`]):
//!
//! - a file that is truncated or punched, by this process or another;
//! - `shmdt`: System V segments are shared memory, so not kept.
//!
//! Nor these, which the caller must avoid, or [`flush`](RegistrationCache::flush) after:
//!
//! - `MADV_GUARD_INSTALL` (Linux 6.13) over memory that was in a transfer: it takes the pages;
//! - `remap_file_pages`, which is obsolete.
//!
//! If the kernel refuses events, each use registers, and [`RegistrationCache::mode`] says why.

mod backing;
mod cache;
mod fork;
mod front;
#[doc(hidden)]
pub mod measured;
mod monitor;
mod pinned;
mod range;
mod registrar;
#[doc(hidden)]
pub mod seeded;
mod sightings;
mod suspects;
mod userfault;

pub use cache::{Counters, Limits};
pub use front::{GetError, Guard, Mode, RegistrationCache};
pub use pinned::{PinnedBuffer, PinnedBuffers};
pub use range::PageRange;
pub use registrar::{Refused, Registrar};

use byway_reactor::userfault::OpenError;

use crate::limits::{REGISTERED_BYTES_DEFAULT, REGISTERED_RANGES_DEFAULT};

/// Whether memory stays registered after its use in this process.
///
/// # Errors
/// Why not: each use registers then.
pub fn availability() -> Result<(), Unavailable> {
    if fork::is_child() {
        return Err(Unavailable::ForkedChild);
    }
    monitor::get().map(|_| ())
}

impl Default for Limits {
    fn default() -> Self {
        Self { ranges_max: REGISTERED_RANGES_DEFAULT, bytes_max: REGISTERED_BYTES_DEFAULT }
    }
}

/// Why the process is not told of changes of its address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The kernel has no userfaultfd.
    #[error("this kernel has no userfaultfd, or a filter hides it: allow the system call, or do without")]
    NoUserfaultfd,
    /// It may not be used.
    #[error("userfaultfd is refused: allow the system call in the seccomp filter of this service or container")]
    NotPermitted,
    /// The limit on descriptors or memory is reached.
    #[error("cannot open a userfaultfd, for lack of descriptors or memory: raise the limit on open files")]
    NoRoom,
    /// Some of its features are missing.
    #[error("this kernel's userfaultfd cannot watch memory without raising faults: use Linux 6.7 or later")]
    OldKernel,
    /// What it says of changes is not what we rely on.
    #[error("this kernel's userfaultfd reports changes too late")]
    Misbehaves,
    /// A mapping cannot be asked for.
    #[error("/proc/self/maps cannot be queried: use Linux 6.11 or later, with /proc mounted")]
    NoMappings,
    /// Forks would go unnoticed.
    #[error("the process cannot prepare for a fork")]
    NoForkNotice,
    /// A thread could not be started.
    #[error("no thread could be started to read events: raise the limit on threads")]
    NoThread,
    /// More caches than a process can have.
    #[error("this process has as many registration caches as it can have: share one")]
    TooManyCaches,
    /// This process was forked from one that had a cache.
    #[error("this process was forked from one that keeps registered memory: start a new program instead")]
    ForkedChild,
}

impl From<OpenError> for Unavailable {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Missing => Self::NoUserfaultfd,
            OpenError::NoRoom => Self::NoRoom,
            OpenError::Features => Self::OldKernel,
            _ => Self::NotPermitted,
        }
    }
}
