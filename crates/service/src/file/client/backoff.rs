//! When a client may try to connect again.
//!
//! Pure. Attempts that fail follow each other ever more slowly, whichever thread makes them: threads that come later wait as well.

use std::time::{Duration, Instant};

use crate::limits::{RECONNECT_MAX, RECONNECT_MIN};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    /// The last pause and its end.
    pause: Option<(Duration, Instant)>,
}

impl Backoff {
    /// How long the next attempt has to wait.
    pub(super) fn remaining(&self, now: Instant) -> Duration {
        self.pause.map_or(Duration::ZERO, |(_, end)| end.saturating_duration_since(now))
    }

    /// An attempt has failed.
    pub(super) fn failed(&mut self, now: Instant) {
        let pause = self.pause.map_or(RECONNECT_MIN, |(pause, _)| (pause * 2).min(RECONNECT_MAX));
        self.pause = Some((pause, now + pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_that_come_again_and_again_try_once_a_second() {
        let (mut backoff, start) = (Backoff::default(), Instant::now());
        let mut attempts = 0;
        for milliseconds in 0..60_000 {
            let now = start + Duration::from_millis(milliseconds);
            if backoff.remaining(now).is_zero() {
                backoff.failed(now);
                attempts += 1;
            }
        }
        assert!((60..80).contains(&attempts), "{attempts} in a minute");
    }

    #[test]
    fn the_first_attempt_is_made_at_once() {
        assert!(Backoff::default().remaining(Instant::now()).is_zero());
    }
}
