//! How long operations take at the stores: histograms of fixed classes, one add for each operation.

use std::time::Duration;

use super::Operation;

/// Classes of a [`TimeHistogram`]: the first is under 8 us, each next one twice as long, the last has no end (over 8 s).
const CLASSES: usize = 22;

/// How many operations took how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeHistogram {
    counts: [u64; CLASSES],
    total_ns: u64,
}

impl TimeHistogram {
    fn note(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // Powers of two of 1.024 us would not be microseconds.
        let micros = (nanos / 1000).max(4);
        self.counts[(micros.ilog2() as usize - 2).min(CLASSES - 1)] += 1;
        self.total_ns = self.total_ns.saturating_add(nanos);
    }

    /// The operations of each class, and the time under which the class lies; `None`: it has no end.
    pub fn classes(&self) -> impl Iterator<Item = (Option<Duration>, u64)> + '_ {
        let bound = |class: usize| (class + 1 < CLASSES).then(|| Duration::from_micros(8 << class));
        self.counts.iter().enumerate().map(move |(class, count)| (bound(class), *count))
    }

    /// The time of all of them together.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.total_ns)
    }

    fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
    }
}

/// How long the operations of a volume took at its store: from their submission to their last completion, and for those
/// that say that bytes are durable to the end of the syncs beside them. What was answered from memory at once is not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreTimes([TimeHistogram; 4]);

impl StoreTimes {
    const NAMES: [&str; 4] = ["read", "write", "flush", "other"];

    pub(super) fn note(&mut self, operation: Operation, time: Duration) {
        let kind = match operation {
            Operation::Read => 0,
            Operation::Write => 1,
            Operation::Flush => 2,
            Operation::Trim | Operation::Zero | Operation::Extents | Operation::Prefetch => 3,
        };
        self.0[kind].note(time);
    }

    /// Reads, writes, flushes, and the others together.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, &TimeHistogram)> {
        Self::NAMES.into_iter().zip(&self.0)
    }

    /// The sum of two loops' times.
    #[must_use]
    pub fn plus(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, more)| sum.add(more));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_lies_under_the_bound_of_its_class_and_not_under_the_one_before() {
        for micros in [0, 1, 7, 8, 9, 15, 16, 1000, 1_000_000, 8_000_000, 9_000_000, 1_000_000_000] {
            let time = Duration::from_micros(micros);
            let mut times = StoreTimes::default();
            times.note(Operation::Flush, time);
            let times = times.plus(&StoreTimes::default());
            let (_, histogram) = times.kinds().nth(2).unwrap();
            let classes: Vec<_> = histogram.classes().collect();
            let at = classes.iter().position(|(_, count)| *count == 1).unwrap();
            assert!(classes[at].0.is_none_or(|bound| time < bound), "{micros}");
            assert!(at == 0 || classes[at - 1].0.unwrap() <= time, "{micros}");
            assert_eq!((histogram.total(), classes.len()), (time, CLASSES));
        }
    }
}
