//! How long threads wait for pages.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use byway_service::memory::pager::PageId;
use serde::{Deserialize, Serialize};

use crate::limits::FAR_FAULTS_TIMED_MAX;

/// Buckets of the histogram: of the first the longest wait is 1 us, of each further one it is twice as long; of the last it is not bounded.
const BUCKETS: usize = 24;

/// Waits of threads for pages, from the pager's reading of the fault to its answer: wake-ups of pager and program come on top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latencies {
    counts: [u64; BUCKETS],
}

impl Latencies {
    pub(super) fn note(&mut self, wait: Duration) {
        let us = wait.as_nanos().div_ceil(1000).clamp(1, 1 << BUCKETS);
        let bucket = us.next_power_of_two().trailing_zeros() as usize;
        self.counts[bucket.min(BUCKETS - 1)] += 1;
    }

    /// Buckets that are not empty: their longest wait in microseconds, and how many waits they have.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let all = self.counts.iter().enumerate().map(|(at, count)| (1 << at, *count));
        all.filter(|(_, count)| *count > 0)
    }

    /// The bound in microseconds that this percentage of the waits kept; `None` without waits.
    pub fn percentile_us(&self, percent: u64) -> Option<u64> {
        let all: u64 = self.counts.iter().sum();
        let wanted = (all * percent).div_ceil(100).max(1);
        let mut sum = 0;
        self.buckets().find_map(|(us, count)| {
            sum += count;
            (sum >= wanted).then_some(us)
        })
    }
}

/// Faults that are not answered yet.
#[derive(Debug, Default)]
pub(super) struct Waits {
    since: HashMap<PageId, Instant>,
    pub(super) latencies: Latencies,
    /// All waits that have ended.
    pub(super) total: Duration,
}

impl Waits {
    pub(super) fn begin(&mut self, at: PageId) {
        if self.since.len() < FAR_FAULTS_TIMED_MAX {
            self.since.entry(at).or_insert_with(Instant::now);
        }
    }

    /// The page is answered for, whether or not a thread waits for it.
    pub(super) fn end(&mut self, at: PageId) {
        if let Some(since) = self.since.remove(&at) {
            let wait = since.elapsed();
            self.latencies.note(wait);
            self.total += wait;
        }
    }

    /// Forgets the faults of which `is_over`.
    pub(super) fn forget(&mut self, is_over: impl Fn(PageId) -> bool) {
        self.since.retain(|at, _| !is_over(*at));
    }
}

#[cfg(test)]
mod tests {
    use byway_service::memory::pager::SpaceId;

    use super::*;

    #[test]
    fn percentiles_are_the_bounds_of_their_buckets() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentile_us(50), None);
        for us in [0, 1, 3, 3, 3, 3, 3, 3, 3, 1000] {
            latencies.note(Duration::from_micros(us));
        }
        latencies.note(Duration::from_secs(1 << 40));
        assert_eq!(latencies.buckets().collect::<Vec<_>>(), [(1, 2), (4, 7), (1024, 1), (1 << 23, 1)]);
        assert_eq!([10, 50, 99].map(|percent| latencies.percentile_us(percent)), [Some(1), Some(4), Some(1 << 23)]);
    }

    #[test]
    fn a_page_that_no_thread_waits_for_is_no_wait() {
        let (mut waits, at) = (Waits::default(), PageId { space: SpaceId(1), page: 7 });
        waits.end(at);
        waits.begin(at);
        waits.forget(|at| at.space == SpaceId(1));
        waits.end(at);
        assert_eq!(waits.latencies, Latencies::default());
        waits.begin(at);
        waits.end(at);
        assert!(waits.latencies.percentile_us(100).is_some());
    }
}
