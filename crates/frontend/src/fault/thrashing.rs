//! When a job thrashes: its threads wait for pages more than they work.

use std::time::{Duration, Instant};

/// What is looked at together.
const WINDOW: Duration = Duration::from_secs(10);

/// How long the log is silent after it has said so.
const PAUSE: Duration = Duration::from_secs(60);

/// Sums since the job began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    pub(super) faults: u64,
    pub(super) fetched: u64,
    /// Waits of all threads.
    pub(super) waited: Duration,
}

#[derive(Debug)]
pub(super) struct Thrashing {
    since: Instant,
    then: Window,
    silent_until: Instant,
}

impl Thrashing {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, then: Window::default(), silent_until: now }
    }

    /// How long threads have waited in the last window, if that is for the log.
    pub(super) fn look(&mut self, now: Instant, sums: Window) -> Option<Duration> {
        let time = now.duration_since(self.since);
        if time < WINDOW {
            return None;
        }
        let waited = sums.waited.saturating_sub(self.then.waited);
        // New memory makes faults too, and is no reason to raise the limit.
        let is_far = 2 * (sums.fetched - self.then.fetched) > sums.faults - self.then.faults;
        (self.since, self.then) = (now, sums);
        if 2 * waited < time || !is_far || now < self.silent_until {
            return None;
        }
        self.silent_until = now + PAUSE;
        Some(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_says_once_a_minute_that_a_job_waits_most_of_the_time() {
        let began = Instant::now();
        let mut thrashing = Thrashing::new(began);
        let at = |seconds: u64, fetched: u64, waited: u64| {
            let sums = Window { faults: 1000 * seconds, fetched, waited: Duration::from_secs(waited) };
            (began + Duration::from_secs(seconds), sums)
        };
        let mut look = |(now, sums)| thrashing.look(now, sums);
        assert_eq!(look(at(5, 5000, 5)), None, "too soon to say");
        assert_eq!(look(at(10, 1000, 9)), None, "new memory");
        assert_eq!(look(at(20, 10_000, 13)), None, "it works most of the time");
        assert_eq!(look(at(30, 19_000, 21)), Some(Duration::from_secs(8)));
        assert_eq!(look(at(40, 29_000, 31)), None, "the log has said it");
        assert_eq!(look(at(90, 69_000, 81)), Some(Duration::from_secs(50)));
    }
}
