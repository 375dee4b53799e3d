//! How long a client leaves a server alone that had no memory for its requests.

use std::time::Duration;

use byway_reactor::Instant;

use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN};

/// Begins with the first request that is answered `Busy`; each next one is twice as long, until something else is
/// answered. All requests wait, so that they keep their order, and since those that are sent would fill the server's
/// memory again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pause {
    until: Option<Instant>,
    /// How long the last one was; zero if none has to be longer than the shortest.
    last: Duration,
}

impl Pause {
    /// The server was busy. During a pause that changes nothing: what is answered now was sent before it.
    pub(super) fn begin(&mut self, now: Instant) {
        if !self.is_on(now) {
            self.last = (self.last * 2).clamp(BUSY_PAUSE_MIN, BUSY_PAUSE_MAX);
            self.until = Some(now + self.last);
        }
    }

    /// The server answered something: the next pause is a short one again.
    pub(super) fn shorten(&mut self) {
        self.last = Duration::ZERO;
    }

    /// When the last one ends or has ended.
    pub(super) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether nothing is to be sent now.
    pub(super) fn is_on(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}
