//! Which clients are silent, judged by times in which the loop has read what they sent.
//!
//! Pure. A loop that stood still (a stopped process, a stalled disk) has not read what has arrived meanwhile, so a client that it has not
//! heard may have spoken. A client is silent if it is so at two looks, and the second comes when it is due: between them the loop has
//! turned, and has read its sockets.

use std::collections::HashSet;
use std::hash::Hash;
use std::time::Duration;

use byway_reactor::Instant;

use crate::limits::FILE_LEASE_TIME;

/// How long after the first look the second is due.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A look that comes later than this after its time says that the loop has stood still.
const LATE_MAX: Duration = Duration::from_millis(500);

/// See the module. Clients are known by `K`.
#[derive(Debug)]
pub(super) struct Silence<K> {
    suspects: HashSet<K>,
    /// When the next look is due.
    due: Option<Instant>,
}

impl<K> Default for Silence<K> {
    fn default() -> Self {
        Self { suspects: HashSet::new(), due: None }
    }
}

impl<K: Copy + Eq + Hash> Silence<K> {
    /// Asks for a look. Gives its time, if none was asked for.
    pub(super) fn watch(&mut self, now: Instant) -> Option<Instant> {
        if self.due.is_some() {
            return None;
        }
        let pause = if self.suspects.is_empty() { FILE_LEASE_TIME } else { LOOK_AGAIN };
        self.due = Some(now + pause);
        self.due
    }

    /// Looks: these clients have not been heard for too long. Gives those that are silent.
    pub(super) fn look(&mut self, unheard: impl IntoIterator<Item = K>, now: Instant) -> Vec<K> {
        let on_time = self.due.take().is_some_and(|due| now <= due + LATE_MAX);
        let before = std::mem::take(&mut self.suspects);
        let (silent, suspects): (HashSet<K>, HashSet<K>) =
            unheard.into_iter().partition(|client| on_time && before.contains(client));
        self.suspects = suspects;
        silent.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Instant {
        Instant::from_nanos(milliseconds * 1_000_000)
    }

    #[test]
    fn a_client_is_silent_at_the_second_look() {
        let mut silence = Silence::default();
        assert_eq!(silence.watch(at(0)), Some(at(15_000)));
        assert_eq!(silence.watch(at(1)), None, "one look is due");
        assert!(silence.look([7, 8], at(15_001)).is_empty());
        assert_eq!(silence.watch(at(15_001)), Some(at(16_001)));
        assert_eq!(silence.look([7], at(16_002)), [7]);
        assert_eq!(silence.watch(at(16_002)), Some(at(31_002)));
    }

    #[test]
    fn a_client_whose_words_wait_behind_a_pause_is_heard_first() {
        let mut silence = Silence::default();
        silence.watch(at(0));
        assert!(silence.look([7], at(60_000)).is_empty(), "the loop has stood still");
        assert_eq!(silence.watch(at(60_000)), Some(at(61_000)));
        assert!(silence.look([], at(61_000)).is_empty(), "it has read what had arrived");
        assert_eq!(silence.watch(at(61_000)), Some(at(76_000)));
    }

    #[test]
    fn a_pause_between_two_looks_counts_for_none() {
        let mut silence = Silence::default();
        silence.watch(at(0));
        assert!(silence.look([7], at(15_000)).is_empty());
        silence.watch(at(15_000));
        assert!(silence.look([7], at(40_000)).is_empty(), "the second look came late");
        assert_eq!(silence.watch(at(40_000)), Some(at(41_000)));
        assert_eq!(silence.look([7], at(41_000)), [7]);
    }
}
