//! How long a thread looks again and again before it sleeps: as long as that has been worth it lately, and keeps no other thread from its core.

use std::time::{Duration, Instant};

/// The longest time that it looks before it sleeps: about what the wake-up that it saves costs.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// It looks while there was something to do within this time on average.
const SPIN_WORTH: Duration = Duration::from_micros(120);

/// What one wait can add to the average: one long pause ends looking.
const WAIT_MAX: Duration = Duration::from_millis(2);

/// A thread that yields its core, and gets it back later than this, has let another one run.
const YIELD_ALONE: Duration = Duration::from_micros(10);

/// How long nothing is looked for twice after another thread has wanted the core.
const CROWDED: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    /// Moving average of how long it took until there was something to do.
    average: Duration,
    crowded_until: Option<Instant>,
    /// There is another core.
    is_allowed: bool,
}

impl Spin {
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { average: WAIT_MAX, crowded_until: None, is_allowed: cores > 1 }
    }

    /// How long to look before sleep.
    pub(crate) fn time(&self, now: Instant) -> Duration {
        let is_crowded = self.crowded_until.is_some_and(|until| now < until);
        if self.is_allowed && !is_crowded && self.average <= SPIN_WORTH { SPIN_MAX } else { Duration::ZERO }
    }

    /// There was something to do after so long.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.average = self.average * 7 / 8 + time.min(WAIT_MAX) / 8;
    }

    /// The core was yielded for so long. False if another thread has had it: it is time to sleep.
    pub(crate) fn yielded(&mut self, time: Duration, now: Instant) -> bool {
        let is_alone = time <= YIELD_ALONE;
        if !is_alone {
            self.crowded_until = Some(now + CROWDED);
        }
        is_alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    fn busy() -> Spin {
        let mut spin = Spin { average: WAIT_MAX, crowded_until: None, is_allowed: true };
        (0..40).for_each(|_| spin.waited(30 * MICROSECOND));
        spin
    }

    #[test]
    fn a_thread_that_waits_long_sleeps_at_once_and_a_busy_one_looks_first() {
        let now = Instant::now();
        assert_eq!(Spin { average: WAIT_MAX, ..busy() }.time(now), Duration::ZERO);
        let mut spin = busy();
        assert_eq!(spin.time(now), SPIN_MAX);
        spin.waited(Duration::from_secs(1));
        assert_eq!(spin.time(now), Duration::ZERO, "one pause ends it");
        assert_eq!(Spin { is_allowed: false, ..busy() }.time(now), Duration::ZERO, "the only core is the program's");
    }

    #[test]
    fn a_thread_whose_core_others_want_sleeps_for_a_while() {
        let (now, mut spin) = (Instant::now(), busy());
        assert!(spin.yielded(MICROSECOND, now));
        assert_eq!(spin.time(now), SPIN_MAX);
        assert!(!spin.yielded(2 * YIELD_ALONE, now));
        assert_eq!(spin.time(now + CROWDED / 2), Duration::ZERO);
        assert_eq!(spin.time(now + CROWDED), SPIN_MAX);
    }
}
