//! How long things take: histograms of fixed buckets, which double.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets of a histogram: of the first the longest time is 1 us, of each further one it is twice as long; of the last (over 4 s) it is not
/// bounded.
const BUCKETS: usize = 24;

/// How many of some waits or calls took how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latencies {
    counts: [u64; BUCKETS],
}

fn bucket_of(time: Duration) -> usize {
    let us = time.as_nanos().div_ceil(1000).clamp(1, 1 << BUCKETS);
    let bucket = us.next_power_of_two().trailing_zeros() as usize;
    bucket.min(BUCKETS - 1)
}

impl Latencies {
    /// Notes one.
    pub fn note(&mut self, time: Duration) {
        self.counts[bucket_of(time)] += 1;
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// All buckets: their longest time, `None` for the last, and how many they have.
    pub fn classes(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let bound = |at: usize| (at + 1 < BUCKETS).then(|| Duration::from_micros(1 << at));
        self.counts.iter().enumerate().map(move |(at, count)| (bound(at), *count))
    }

    /// Buckets that are not empty: their longest time in microseconds, and how many they have.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let all = self.counts.iter().enumerate().map(|(at, count)| (1 << at, *count));
        all.filter(|(_, count)| *count > 0)
    }

    /// The bound in microseconds that this percentage of them kept; `None` without any.
    pub fn percentile_us(&self, percent: u64) -> Option<u64> {
        let wanted = (self.count() * percent).div_ceil(100).max(1);
        let mut sum = 0;
        self.buckets().find_map(|(us, count)| {
            sum += count;
            (sum >= wanted).then_some(us)
        })
    }
}

/// The same, noted by several threads.
#[derive(Debug, Default)]
pub struct SharedLatencies {
    counts: [AtomicU64; BUCKETS],
    total_ns: AtomicU64,
}

impl SharedLatencies {
    /// Notes one.
    pub fn note(&self, time: Duration) {
        self.counts[bucket_of(time)].fetch_add(1, Ordering::Relaxed);
        self.total_ns.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// What was noted until now, without what other threads note at this moment.
    pub fn now(&self) -> Latencies {
        Latencies { counts: self.counts.each_ref().map(|count| count.load(Ordering::Relaxed)) }
    }

    /// The time of all of them together.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.total_ns.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
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
    fn what_threads_note_is_what_one_would_have_noted() {
        let (mut one, shared) = (Latencies::default(), SharedLatencies::default());
        let times = [0, 1, 3, 1000, 70_000_000].map(Duration::from_micros);
        for time in times {
            one.note(time);
            shared.note(time);
        }
        assert_eq!((shared.now(), shared.total()), (one, times.iter().sum()));
        let classes: Vec<_> = one.classes().filter(|(_, count)| *count > 0).collect();
        let bound = |us| Some(Duration::from_micros(us));
        assert_eq!(classes, [(bound(1), 2), (bound(4), 1), (bound(1024), 1), (None, 1)]);
        assert_eq!(one.count(), 5);
    }
}
