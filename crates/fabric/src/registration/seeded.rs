//! Bugs put in on purpose, to show that the tests of real memory catch such bugs. As [`byway_reactor::seeded`], but for the
//! whole process, so that the monitor's threads have them too.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// A look-up believes the tables without asking whether a change is pending.
    LookUpUnsettled = 1,
    /// It reads what is pending, and does not ask whether a change is on its way.
    OnTheWayForgotten,
    /// An unmapping is read and forgotten.
    UnmapForgotten,
    /// A remapping is.
    RemapForgotten,
    /// A discarding is.
    RemoveForgotten,
    /// A range is registered without being watched.
    Unwatched,
    /// The watch over a range ends though others need it.
    WatchEndedForOthers,
    /// What changed while it was being registered is found afterwards.
    SpoiledKept,
    /// Deregistration happens under the lock.
    DeregisteredUnderLock,
    /// The thread that reads events deregisters.
    DeregisteredByMonitor,
    /// The child of a fork does not know that it is one.
    ChildUnaware,
    /// What does not survive a fork is found after it.
    KeptOverFork,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::LookUpUnsettled,
        Self::OnTheWayForgotten,
        Self::UnmapForgotten,
        Self::RemapForgotten,
        Self::RemoveForgotten,
        Self::Unwatched,
        Self::WatchEndedForOthers,
        Self::SpoiledKept,
        Self::DeregisteredUnderLock,
        Self::DeregisteredByMonitor,
        Self::ChildUnaware,
        Self::KeptOverFork,
    ];
}

/// Whether this build has that bug.
#[cfg(not(feature = "seeded-bugs"))]
#[inline]
pub(super) const fn is(_bug: Bug) -> bool {
    false
}

#[cfg(feature = "seeded-bugs")]
pub use self::selected::select;

#[cfg(feature = "seeded-bugs")]
pub(super) use self::selected::is;

#[cfg(feature = "seeded-bugs")]
mod selected {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Bug;

    static SELECTED: AtomicU8 = AtomicU8::new(0);

    /// Whether this process has that bug.
    pub fn is(bug: Bug) -> bool {
        SELECTED.load(Ordering::Relaxed) == bug as u8
    }

    /// Puts a bug into everything that this process does with registered memory from now on.
    pub fn select(bug: Bug) {
        SELECTED.store(bug as u8, Ordering::Relaxed);
    }
}
