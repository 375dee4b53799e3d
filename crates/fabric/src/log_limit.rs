//! Rate limit for log lines that clients can cause: one line now and then, with the number left out.

use byway_reactor::Instant;

use crate::limits::LOG_PAUSE;

/// Bounds how often one kind of event is logged.
#[derive(Debug, Default)]
pub struct LogLimit {
    next: Option<Instant>,
    events: u64,
}

impl LogLimit {
    /// Counts an event. Gives the number of events since the last line, this one included, if it is time for another line.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        self.events += 1;
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        self.next = Some(now + LOG_PAUSE);
        Some(std::mem::take(&mut self.events))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn of_a_thousand_events_in_a_second_one_is_logged_and_the_next_line_counts_the_rest() {
        let mut limit = LogLimit::default();
        let lines: Vec<_> = (0..1001).filter_map(|ms| limit.admit(Instant::ZERO + Duration::from_millis(ms))).collect();
        assert_eq!(lines, [1, 1000]);
    }
}
