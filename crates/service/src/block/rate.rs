//! The limit on a volume's bytes per second, for all its clients and loops together.
//!
//! The generic cell rate algorithm (ITU-T I.371, annex A): one number says when the bytes moved so far would have been moved
//! at exactly the rate. A request may start while that time is at most the burst in the future. Its bytes are counted
//! afterwards, so a request larger than the burst is not refused; it makes later ones wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use byway_reactor::Instant;

/// How much of the future may be used up at once.
const BURST: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Debug)]
pub(super) struct Rate {
    bytes_per_second: u64,
    /// When the moved bytes would have been moved at the rate, in nanoseconds of the loops' clock.
    paid_at: AtomicU64,
}

impl Rate {
    pub(super) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), paid_at: AtomicU64::new(0) }
    }

    /// Whether a request may start now; else when to ask again.
    pub(super) fn may_start(&self, now: Instant) -> Result<(), Instant> {
        let paid_at = self.paid_at.load(Ordering::Relaxed);
        let earliest = Instant::from_nanos(paid_at.saturating_sub(BURST.as_nanos() as u64));
        if earliest <= now { Ok(()) } else { Err(earliest) }
    }

    /// Counts bytes that a request moves.
    pub(super) fn charge(&self, bytes: u64, now: Instant) {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        let add = |paid_at: u64| Some(paid_at.max(now.nanos()).saturating_add(nanos));
        let _ = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_time_no_more_than_the_rate_and_not_much_less() {
        let rate = Rate::new(1_000_000);
        let (mut now, mut moved) = (Instant::from_nanos(5), 0u64);
        let end = now + Duration::from_secs(10);
        while now < end {
            match rate.may_start(now) {
                Ok(()) => {
                    rate.charge(4096, now);
                    moved += 4096;
                }
                Err(until) => {
                    assert!(until > now);
                    now = until;
                }
            }
        }
        let most = 10_000_000 + 1_000_000 / 20 + 4096;
        assert!((9_900_000..=most).contains(&moved), "{moved}");
    }

    #[test]
    fn a_request_larger_than_the_burst_starts_and_is_paid_for() {
        let rate = Rate::new(1000);
        rate.charge(10_000, Instant::ZERO);
        let until = rate.may_start(Instant::ZERO).unwrap_err();
        assert_eq!(until + BURST, Instant::ZERO + Duration::from_secs(10));
        assert_eq!(rate.may_start(until), Ok(()));
    }

    #[test]
    fn time_that_was_not_used_is_not_saved_up() {
        let rate = Rate::new(1000);
        let later = Instant::ZERO + Duration::from_secs(3600);
        rate.charge(1000, later);
        assert!(rate.may_start(later).is_err());
    }
}
