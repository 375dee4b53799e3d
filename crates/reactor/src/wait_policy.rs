//! How a loop waits: when to spin before it sleeps, and when to let requests gather.
//!
//! Two facts of the machines that we measured (a wake-up of an idle virtual CPU costs 25 to 60 us) pull in opposite
//! directions. A lone request is answered fastest by a loop that was still awake: after an event the loop spins for a
//! moment, as long as spinning has been worth it lately. Under a deep queue of small requests the opposite holds: a loop
//! that sleeps a moment after each batch finds a larger one, and so does its client; both need less CPU per request,
//! and more requests fit. Whether the queue is deep enough for that cannot be seen from here, so it is tried: windows
//! with gathering against windows without, again and again, and the better one is kept.
//!
//! Nothing here looks at a clock: time comes in as an argument.

use crate::Instant;
use crate::op::{Completion, Outcome};

/// The longest spin, in nanoseconds: about what the wake-up that it saves would cost.
const SPIN_NANOS_MAX: u64 = 50_000;
/// Spinning goes on while events came within this time on average; a sleeping loop's own wake-up is part of it.
const SPIN_WORTH_NANOS: u64 = 120_000;
/// Where sends and receives have more bytes than this on average, nothing is spun for: what a wake-up costs is little beside
/// them, and the CPU is of use to the threads that move the bytes.
const SPIN_BYTES_MAX: u64 = 32 << 10;
/// What one observed wait can add to the average: one long pause ends spinning.
const WAIT_NANOS_MAX: u64 = 2_000_000;
/// How long requests gather, in nanoseconds.
const GATHER_NANOS: u64 = 20_000;
/// Requests of a window in which gathering, or not, is measured.
const WINDOW_REQUESTS: u32 = 512;
/// Windows for which a decision stands before it is tried again.
const WINDOWS_PER_DECISION: u32 = 48;
/// Windows of each kind in a trial; the first of each is thrown away.
const WINDOWS_PER_TRIAL: u32 = 3;
/// Gathering is kept if it moves at least this share of what it moves without, in percent: it costs less CPU.
const GATHER_WORTH_PERCENT: u64 = 97;
/// The average size of requests, in bytes, above which they are not worth gathering.
const GATHER_BYTES_MAX: u64 = 32 << 10;
/// Turns in a row that gather one request each, whatever receives they come by, after which nothing is gathered any more,
/// whatever was decided: the queue has become shallow, and each request would wait in vain.
const LONE_TURNS_MAX: u32 = 16;

/// What a loop does before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Sleep until something comes.
    Sleep,
    /// Look again and again for so many nanoseconds, then sleep.
    Spin(u64),
    /// Sleep for so many nanoseconds whatever comes, then look.
    Gather(u64),
}

/// The state of the two decisions.
#[derive(Debug)]
pub(crate) struct WaitPolicy {
    /// Moving average of how long the loop waited for an event, in nanoseconds.
    wait_nanos: u64,
    /// Moving average of the bytes that a request names.
    request_bytes: u64,
    /// Moving average of the bytes of a send or receive.
    moved_bytes: u64,
    trial: Trial,
    window: Window,
    /// Requests since the last wait: only then is there something to gather.
    noted: u32,
    /// The most that one receive has brought in this window.
    largest_batch: u32,
    /// Turns in a row that gathered and brought one request.
    lone: u32,
}

/// Requests since `since`.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    requests: u32,
    bytes: u64,
    since: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trial {
    /// Window `n` of a trial; the first half gathers.
    Trying { n: u32, with: u64, without: u64 },
    /// A decision that stands for `left` windows.
    Decided { gather: bool, left: u32 },
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self {
            wait_nanos: WAIT_NANOS_MAX,
            request_bytes: 0,
            moved_bytes: 0,
            trial: Trial::Decided { gather: false, left: 1 },
            window: Window::default(),
            noted: 0,
            largest_batch: 0,
            lone: 0,
        }
    }
}

impl WaitPolicy {
    /// Notes that a receive brought `requests` of `bytes` in all (what they ask to be moved).
    pub(crate) fn note(&mut self, requests: u32, bytes: u64, now: Instant) {
        self.noted += requests;
        let mean = (bytes / u64::from(requests.max(1))).min(1 << 32);
        self.request_bytes = self.request_bytes - self.request_bytes / 8 + mean / 8;
        self.largest_batch = self.largest_batch.max(requests);
        let window = &mut self.window;
        let since = *window.since.get_or_insert(now);
        window.requests += requests;
        window.bytes += bytes;
        if window.requests >= WINDOW_REQUESTS {
            let nanos = now.since(since).as_nanos().max(1) as u64;
            let rate = u64::from(window.requests) * 1_000_000_000 / nanos;
            let small = window.bytes / u64::from(window.requests) <= GATHER_BYTES_MAX;
            let deep = self.largest_batch > 1;
            self.end_window(rate, small && deep);
            self.window = Window { since: Some(now), ..Window::default() };
            self.largest_batch = 0;
        }
    }

    fn end_window(&mut self, rate: u64, gatherable: bool) {
        self.trial = match self.trial {
            Trial::Decided { gather: false, left } if left <= 1 && gatherable => {
                Trial::Trying { n: 0, with: 0, without: 0 }
            }
            Trial::Decided { gather: true, left } if left <= 1 => Trial::Trying { n: 0, with: 0, without: 0 },
            Trial::Decided { gather, left } => Trial::Decided { gather, left: left.saturating_sub(1) },
            Trial::Trying { n, mut with, mut without } => {
                let part = n % WINDOWS_PER_TRIAL;
                if part > 0 {
                    let sum = if n < WINDOWS_PER_TRIAL { &mut with } else { &mut without };
                    *sum += rate;
                }
                if n + 1 < 2 * WINDOWS_PER_TRIAL {
                    Trial::Trying { n: n + 1, with, without }
                } else {
                    let gather = with * 100 >= without * GATHER_WORTH_PERCENT;
                    Trial::Decided { gather, left: WINDOWS_PER_DECISION }
                }
            }
        };
    }

    fn gathers(&self) -> bool {
        match self.trial {
            Trial::Trying { n, .. } => n < WINDOWS_PER_TRIAL,
            Trial::Decided { gather, .. } => gather,
        }
    }

    /// What to do now that nothing is ready.
    pub(crate) fn plan(&mut self) -> Plan {
        let noted = std::mem::take(&mut self.noted);
        match noted {
            // A deep queue may arrive one by one as long as the loop does not wait for it to gather.
            _ if !self.gathers() => self.lone = 0,
            0 => {}
            1 => self.lone = self.lone.saturating_add(1),
            _ => self.lone = 0,
        }
        if self.lone >= LONE_TURNS_MAX {
            self.trial = Trial::Decided { gather: false, left: 1 };
        }
        if noted > 0 && self.request_bytes <= GATHER_BYTES_MAX && self.gathers() {
            Plan::Gather(GATHER_NANOS)
        } else if self.wait_nanos < SPIN_WORTH_NANOS && self.moved_bytes <= SPIN_BYTES_MAX {
            Plan::Spin(SPIN_NANOS_MAX)
        } else {
            Plan::Sleep
        }
    }

    /// Notes what a turn of the loop brought.
    pub(crate) fn completed(&mut self, completions: &[Completion]) {
        for completion in completions {
            if let Outcome::Received { result: Ok(bytes), .. } | Outcome::Sent { result: Ok(bytes), .. } =
                &completion.outcome
            {
                self.moved(*bytes);
            }
        }
    }

    /// Notes that a send or receive of so many bytes has ended.
    fn moved(&mut self, bytes: usize) {
        self.moved_bytes = self.moved_bytes - self.moved_bytes / 8 + bytes as u64 / 8;
    }

    /// Notes how long the loop then waited for an event.
    pub(crate) fn waited(&mut self, nanos: u64) {
        let nanos = nanos.min(WAIT_NANOS_MAX);
        // A quarter each: four quick events in a row start spinning, one long pause of 500 us ends it.
        self.wait_nanos = self.wait_nanos - self.wait_nanos / 4 + nanos / 4;
    }

    /// Spinning found that others want the CPU: it must earn its way back.
    pub(crate) fn contended(&mut self) {
        self.wait_nanos = SPIN_WORTH_NANOS * 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows whose rate depends on whether the loop gathers; gives the share of windows that gathered.
    fn share_gathered(
        policy: &mut WaitPolicy,
        windows: u32,
        batch: u32,
        nanos_per_request: impl Fn(bool) -> u64,
    ) -> f64 {
        let mut now = 1;
        let mut gathered = 0;
        for _ in 0..windows {
            for _ in 0..WINDOW_REQUESTS / batch {
                let gathers = matches!(policy.plan(), Plan::Gather(_));
                gathered += u32::from(gathers);
                now += nanos_per_request(gathers) * u64::from(batch);
                policy.note(batch, 4096 * u64::from(batch), Instant::from_nanos(now));
            }
        }
        f64::from(gathered) / f64::from(windows * WINDOW_REQUESTS / batch)
    }

    #[test]
    fn gathering_is_kept_where_it_moves_more_and_dropped_where_it_does_not() {
        let better = |gathers: bool| if gathers { 6_000 } else { 8_000 };
        let worse = |gathers: bool| if gathers { 20_000 } else { 8_000 };
        let mut policy = WaitPolicy::default();
        assert!(share_gathered(&mut policy, 500, 4, better) > 0.9);
        assert!(share_gathered(&mut policy, 500, 4, worse) < 0.2, "the queue became shallow");
        assert!(share_gathered(&mut policy, 500, 4, better) > 0.8, "and deep again");
    }

    /// One that has decided to gather, and gathers.
    fn gathering() -> WaitPolicy {
        let mut policy = WaitPolicy::default();
        share_gathered(&mut policy, 20, 4, |gathers| if gathers { 6_000 } else { 8_000 });
        assert!(matches!(policy.trial, Trial::Decided { gather: true, left } if left > 1));
        policy.note(4, 4 * 4096, Instant::from_nanos(1 << 40));
        assert_eq!(policy.plan(), Plan::Gather(GATHER_NANOS));
        policy
    }

    #[test]
    fn a_queue_that_becomes_shallow_soon_waits_for_nobody() {
        let mut policy = gathering();
        let mut now = 1 << 40;
        let mut turn = |policy: &mut WaitPolicy, receives: u32| {
            for _ in 0..receives {
                now += 1000;
                policy.note(1, 4096, Instant::from_nanos(now));
            }
            matches!(policy.plan(), Plan::Gather(_))
        };
        for n in 1..200 {
            assert!(turn(&mut policy, 1 + n % 4), "several requests in most turns, one in each receive: turn {n}");
        }
        for n in 1..LONE_TURNS_MAX {
            assert!(turn(&mut policy, 1), "turn {n}");
        }
        assert!(!turn(&mut policy, 1));
        let better = |gathers: bool| if gathers { 6_000 } else { 8_000 };
        assert!(share_gathered(&mut policy, 500, 4, better) > 0.8, "and deep again");
    }

    #[test]
    fn a_queue_that_comes_one_by_one_unless_it_gathers_is_tried_out_and_gathered() {
        let (mut policy, mut now, mut gathered) = (WaitPolicy::default(), 1, 0);
        for turn in 0..20_000u64 {
            let gathers = matches!(policy.plan(), Plan::Gather(_));
            let (batch, nanos) = if gathers { (4, 6_000) } else { (if turn % 64 == 0 { 2 } else { 1 }, 8_000) };
            gathered += u32::from(gathers);
            now += nanos * u64::from(batch);
            policy.note(batch, 4096 * u64::from(batch), Instant::from_nanos(now));
        }
        assert!(gathered > 10_000, "{gathered} of 20,000 turns");
    }

    #[test]
    fn long_requests_are_not_gathered_whatever_was_decided_of_short_ones() {
        let mut policy = gathering();
        policy.note(4, 4 << 20, Instant::from_nanos((1 << 40) + 1));
        assert!(!matches!(policy.plan(), Plan::Gather(_)));
    }

    #[test]
    fn nothing_is_spun_for_while_much_is_moved_at_a_time() {
        let mut policy = WaitPolicy::default();
        let mut plan = |sizes: &[usize]| {
            for bytes in sizes {
                policy.moved(*bytes);
            }
            policy.waited(20_000);
            policy.plan()
        };
        for _ in 0..100 {
            plan(&[28, 4096]);
        }
        assert_eq!(plan(&[28, 4096]), Plan::Spin(SPIN_NANOS_MAX));
        // A payload of 1 MiB, and the two small messages that go with it.
        for _ in 0..100 {
            assert_eq!(plan(&[128, 1 << 20, 128]), Plan::Sleep);
        }
        for _ in 0..20 {
            plan(&[28, 4096]);
        }
        assert_eq!(plan(&[28, 4096]), Plan::Spin(SPIN_NANOS_MAX), "and small ones again");
    }

    #[test]
    fn lone_requests_never_gather() {
        let mut policy = WaitPolicy::default();
        assert!(share_gathered(&mut policy, 200, 1, |_| 30_000) == 0.0);
    }

    #[test]
    fn spinning_starts_with_quick_events_and_ends_with_a_pause() {
        let mut policy = WaitPolicy::default();
        assert_eq!(policy.plan(), Plan::Sleep);
        for _ in 0..20 {
            policy.waited(40_000);
        }
        assert_eq!(policy.plan(), Plan::Spin(SPIN_NANOS_MAX));
        policy.waited(10_000_000);
        assert_eq!(policy.plan(), Plan::Sleep);
    }
}
