//! Measurements of a session's transfers: how long they wait, how fast they are, how often they stall.
//!
//! Trapeze reflected the network's congestion back to the host, so that it could choose a peer; this does the same for users
//! of a [`Fabric`](crate::Fabric). It is arithmetic on numbers that are at hand: noting an operation takes no system call,
//! lock or allocation. The transport's own state is read only on request ([`Fabric::path`](crate::Fabric::path)).

use std::time::Duration;

use byway_reactor::Instant;

/// How far back a rate looks: what was moved that long ago counts a third of what is moved now.
pub const RATE_TIME: Duration = Duration::from_secs(1);

/// How often a rate is brought up to date: then it costs an exponential.
const RATE_STEP: Duration = Duration::from_millis(100);

/// A send that is under way for so long has stalled: the peer or the path does not take what we have.
pub const STALL_TIME_MIN: Duration = Duration::from_millis(1);

/// Classes of a [`Histogram`]: the first is under 2 us, each next one twice as long, the last has no end (over 0.5 s).
pub const DELAY_CLASSES: usize = 20;

/// The cause of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// A request, for frames.
    Frames,
    /// A call, for credit of the server.
    Credit,
    /// Bytes, for the peer to take them: a send that took at least [`STALL_TIME_MIN`], or answers for whose sake nothing
    /// more was received.
    Take,
}

impl Stall {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Frames, Self::Credit, Self::Take];

    /// A word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frames => "frames",
            Self::Credit => "credit",
            Self::Take => "take",
        }
    }
}

/// How often, and for how long in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Times.
    pub count: u64,
    /// Time in all.
    pub total: Duration,
    /// The longest.
    pub max: Duration,
}

impl Waits {
    /// Notes one.
    pub fn note(&mut self, waited: Duration) {
        self.count += 1;
        self.total = self.total.saturating_add(waited);
        self.max = self.max.max(waited);
    }

    /// The mean; 0 without any.
    pub fn mean(&self) -> Duration {
        u32::try_from(self.count).map_or(Duration::ZERO, |count| self.total.checked_div(count).unwrap_or_default())
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            count: self.count + other.count,
            total: self.total.saturating_add(other.total),
            max: self.max.max(other.max),
        }
    }
}

/// How many delays were how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// By class; see [`DELAY_CLASSES`].
    pub counts: [u64; DELAY_CLASSES],
    /// All of them together.
    pub total: Duration,
}

impl Histogram {
    fn note(&mut self, delay: Duration) {
        let micros = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        let class = micros.max(1).ilog2() as usize;
        self.counts[class.min(DELAY_CLASSES - 1)] += 1;
        self.total = self.total.saturating_add(delay);
    }

    /// The delay under which a class lies; `None`: it has no end.
    pub fn bound(class: usize) -> Option<Duration> {
        (class + 1 < DELAY_CLASSES).then(|| Duration::from_micros(2 << class))
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut sum = *self;
        sum.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        sum.total = sum.total.saturating_add(other.total);
        sum
    }
}

/// Bytes of one direction, and how fast they go.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flow {
    bytes: u64,
    /// Bytes a second as of `at`.
    rate: f64,
    at: Instant,
    /// Bytes since then.
    since: u64,
}

impl Flow {
    /// Notes bytes that were moved.
    pub fn note(&mut self, bytes: usize, now: Instant) {
        if now.since(self.at) >= RATE_STEP {
            (self.rate, self.at, self.since) = (self.rate(now), now, 0);
        }
        self.bytes += bytes as u64;
        self.since += bytes as u64;
    }

    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes a second, over about the last [`RATE_TIME`]. What has come since `at` came evenly within a step, or until now.
    pub fn rate(&self, now: Instant) -> f64 {
        let fade = |time: Duration| (-time.as_secs_f64() / RATE_TIME.as_secs_f64()).exp();
        let passed = now.since(self.at);
        let step = passed.min(RATE_STEP);
        let new = match step.as_secs_f64() {
            0.0 => self.since as f64 / RATE_TIME.as_secs_f64(),
            seconds => self.since as f64 / seconds * (1.0 - fade(step)),
        };
        self.rate * fade(passed) + new * fade(passed.saturating_sub(step))
    }
}

/// Measurements of a session, or of all sessions of a fabric together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Feedback {
    /// Bytes that the peer, or the kernel for it, has taken.
    pub sent_bytes: u64,
    /// Bytes that came from it.
    pub received_bytes: u64,
    /// Bytes a second that it takes, over about the last [`RATE_TIME`].
    pub send_rate: f64,
    /// Bytes a second that come from it.
    pub receive_rate: f64,
    /// From a request's arrival to the start of its transfer, for those requests that could not start at once.
    pub start_delay: Waits,
    /// From when a message was queued to when the last byte of what it was sent with was taken: the oldest message of each
    /// send counts.
    pub send_delay: Waits,
    /// By [`Stall::ALL`]. A stall is counted when it is over; see [`waiting`](Self::waiting) for one that is not.
    pub stalls: [Waits; 3],
    /// Bytes that wait now for the peer, or the kernel for it, to take them.
    pub queued_bytes: u64,
    /// How long what has waited longest now has waited already: for the peer to take it, or for credit. 0 if nothing waits.
    pub waiting: Duration,
}

impl Feedback {
    /// How often, and how long, something waited for that.
    pub fn stall(&self, stall: Stall) -> Waits {
        self.stalls[stall as usize]
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut stalls = self.stalls;
        stalls.iter_mut().zip(&other.stalls).for_each(|(stall, more)| *stall = stall.plus(more));
        Self {
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
            send_rate: self.send_rate + other.send_rate,
            receive_rate: self.receive_rate + other.receive_rate,
            start_delay: self.start_delay.plus(&other.start_delay),
            send_delay: self.send_delay.plus(&other.send_delay),
            stalls,
            queued_bytes: self.queued_bytes + other.queued_bytes,
            waiting: self.waiting.max(other.waiting),
        }
    }
}

/// The measuring of one session.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Meter {
    sent: Flow,
    received: Flow,
    start_delay: Waits,
    send_delay: Waits,
    stalls: [Waits; 3],
}

impl Meter {
    pub(crate) fn received(&mut self, bytes: usize, now: Instant) {
        self.received.note(bytes, now);
    }

    pub(crate) fn sent(&mut self, bytes: usize, now: Instant) {
        self.sent.note(bytes, now);
    }

    /// What waits now is for others to say.
    pub(crate) fn read(&self, now: Instant) -> Feedback {
        Feedback {
            sent_bytes: self.sent.bytes,
            received_bytes: self.received.bytes,
            send_rate: self.sent.rate(now),
            receive_rate: self.received.rate(now),
            start_delay: self.start_delay,
            send_delay: self.send_delay,
            stalls: self.stalls,
            queued_bytes: 0,
            waiting: Duration::ZERO,
        }
    }
}

/// Counters of all sessions that a fabric ever had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// From a request's arrival to the start of its transfer, of those that could not start at once.
    pub start: Histogram,
    /// From when a message was queued to when it was taken.
    pub send: Histogram,
    /// By [`Stall::ALL`].
    pub stalls: [Waits; 3],
}

impl Delays {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut stalls = self.stalls;
        stalls.iter_mut().zip(&other.stalls).for_each(|(stall, more)| *stall = stall.plus(more));
        Self { start: self.start.plus(&other.start), send: self.send.plus(&other.send), stalls }
    }

    pub(crate) fn note_start(&mut self, meter: &mut Meter, waited: Duration) {
        self.start.note(waited);
        meter.start_delay.note(waited);
        self.note_stall(meter, Stall::Frames, waited);
    }

    /// The oldest message of a send was queued so long ago, and the send itself took so long.
    pub(crate) fn note_sent(&mut self, meter: &mut Meter, waited: Duration, took: Duration) {
        self.send.note(waited);
        meter.send_delay.note(waited);
        if took >= STALL_TIME_MIN {
            self.note_stall(meter, Stall::Take, took);
        }
    }

    pub(crate) fn note_stall(&mut self, meter: &mut Meter, stall: Stall, waited: Duration) {
        self.stalls[stall as usize].note(waited);
        meter.stalls[stall as usize].note(waited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_rate_comes_near_what_is_moved_and_fades_when_nothing_is() {
        let mut meter = Meter::default();
        let mut now = Instant::ZERO + SECOND;
        for _ in 0..1000 {
            now = now + Duration::from_millis(10);
            meter.sent(10_000, now);
        }
        let feedback = meter.read(now);
        assert_eq!((feedback.sent_bytes, feedback.received_bytes), (10_000_000, 0));
        assert!((feedback.send_rate - 1e6).abs() < 1e4, "{feedback:?}");
        let later = meter.read(now + SECOND).send_rate;
        assert!((3e5..4.5e5).contains(&later), "a third of it: {later}");
        assert!(meter.read(now + SECOND * 20).send_rate < 1.0);
    }

    #[test]
    fn delays_fall_into_classes_that_double() {
        let (mut delays, mut meter) = (Delays::default(), Meter::default());
        for micros in [0, 1, 2, 3, 4, 1000, 10_000_000] {
            delays.note_start(&mut meter, Duration::from_micros(micros));
        }
        let counts = delays.start.counts;
        assert_eq!((counts[0], counts[1], counts[2], counts[9]), (2, 2, 1, 1));
        assert_eq!(counts[DELAY_CLASSES - 1], 1, "ten seconds");
        assert_eq!(Histogram::bound(9), Some(Duration::from_micros(1024)));
        assert_eq!(Histogram::bound(DELAY_CLASSES - 1), None);
        let frames = meter.read(Instant::ZERO).stall(Stall::Frames);
        assert_eq!((frames.count, frames.max), (7, Duration::from_secs(10)));
        assert_eq!(frames, delays.stalls[0]);
    }

    #[test]
    fn a_send_that_is_taken_at_once_has_not_stalled() {
        let (mut delays, mut meter) = (Delays::default(), Meter::default());
        delays.note_sent(&mut meter, Duration::from_micros(1500), Duration::from_micros(900));
        assert_eq!(meter.read(Instant::ZERO).stall(Stall::Take), Waits::default());
        delays.note_sent(&mut meter, Duration::from_millis(3), Duration::from_millis(2));
        assert_eq!(meter.read(Instant::ZERO).stall(Stall::Take).total, Duration::from_millis(2));
        assert_eq!(delays.send.counts.iter().sum::<u64>(), 2);
    }
}
