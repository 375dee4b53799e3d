//! Time as the event loops see it: nanoseconds since the loop's epoch.
//!
//! Real backends read the monotonic clock; the simulation has its own. Protocol machines get the time as an
//! argument and never ask for it.

use std::ops::{Add, Sub};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A point in time, in nanoseconds since an epoch shared by all loops of one process (or one simulated world).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The epoch itself.
    pub const ZERO: Self = Self(0);
    /// Later than any time that a loop reaches.
    pub const FAR: Self = Self(u64::MAX);

    /// The time `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the epoch.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// Time since `earlier`; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, after: Duration) -> Self {
        let nanos = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}

/// The clock of a loop, for any thread: the machine's monotonic clock, or that of a simulated world.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Nanoseconds of virtual time, which the world moves.
    simulated: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// The clock of a simulated world.
    pub(crate) fn simulated(nanos: &Arc<AtomicU64>) -> Self {
        Self { simulated: Some(Arc::clone(nanos)) }
    }

    /// The time now.
    pub fn now(&self) -> Instant {
        // Relaxed: a simulated world and its nodes live on one thread.
        self.simulated.as_ref().map_or_else(monotonic, |nanos| Instant(nanos.load(Ordering::Relaxed)))
    }
}

/// The monotonic clock of this machine, which all loops but simulated ones go by.
pub fn monotonic() -> Instant {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Instant(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}
