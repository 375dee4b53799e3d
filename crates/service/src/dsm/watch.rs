//! Which ranks are alive. A session notices a process that ends, but not one that is stopped or whose machine is cut off.
//!
//! Each rank sends [`Message::Alive`](super::wire::Message::Alive) to all others four times in each keep-alive. A rank from
//! which no message has come for 1.5 keep-alives is silent. A rank that was stopped itself starts counting anew when it
//! continues, because it received nothing meanwhile.

use std::time::Duration;

use byway_reactor::Instant;

use super::Rank;

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing.
    Nothing,
    /// Tell all ranks that this one lives.
    Alive,
    /// Nothing has come of this rank for so long.
    Silent(Rank, Duration),
}

/// See the module.
#[derive(Debug)]
pub struct Watch {
    rank: Rank,
    keep_alive: Duration,
    heard: Vec<Instant>,
    /// The last look.
    looked: Instant,
    told: Instant,
}

impl Watch {
    /// Of rank `rank` among `ranks`.
    pub fn new(rank: Rank, ranks: Rank, keep_alive: Duration, now: Instant) -> Self {
        Self { rank, keep_alive, heard: vec![now; usize::from(ranks)], looked: now, told: now }
    }

    /// A message of a rank has come.
    pub fn heard(&mut self, rank: Rank, now: Instant) {
        self.heard[usize::from(rank)] = now;
    }

    /// When to look next.
    pub fn next_time(&self) -> Instant {
        self.told + self.keep_alive / 4
    }

    /// What is due.
    pub fn look(&mut self, now: Instant) -> Due {
        if now < self.next_time() {
            return Due::Nothing;
        }
        let slept = now - self.looked > self.keep_alive;
        (self.looked, self.told) = (now, now);
        if slept {
            self.heard.fill(now);
            return Due::Alive;
        }
        let others = self.heard.iter().enumerate().filter(|(rank, _)| *rank != usize::from(self.rank));
        let silences = others.map(|(rank, heard)| (rank as Rank, now - *heard));
        match silences.max_by_key(|(_, silence)| *silence) {
            Some((rank, silence)) if silence >= self.keep_alive * 3 / 2 => Due::Silent(rank, silence),
            _ => Due::Alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + SECOND * seconds as u32
    }

    #[test]
    fn a_rank_of_which_nothing_comes_is_named_within_twice_the_keep_alive() {
        let mut watch = Watch::new(0, 3, 8 * SECOND, at(0));
        let silent = loop {
            let now = watch.next_time();
            watch.heard(1, now);
            match watch.look(now) {
                Due::Silent(rank, silence) => break (now, rank, silence),
                due => assert_eq!(due, Due::Alive),
            }
        };
        assert_eq!(silent, (at(12), 2, 12 * SECOND));
    }

    #[test]
    fn ranks_that_say_that_they_live_are_left_alone() {
        let (mut first, mut second) = (Watch::new(0, 2, 8 * SECOND, at(0)), Watch::new(1, 2, 8 * SECOND, at(1)));
        for second_passed in 1..100 {
            let now = at(second_passed);
            if first.look(now) == Due::Alive {
                second.heard(0, now);
            }
            match second.look(now) {
                Due::Alive => first.heard(1, now),
                due => assert_eq!(due, Due::Nothing),
            }
        }
    }

    #[test]
    fn a_rank_that_was_stopped_does_not_take_the_others_for_silent() {
        let mut watch = Watch::new(0, 2, 8 * SECOND, at(0));
        assert_eq!(watch.look(at(2)), Due::Alive);
        assert_eq!(watch.look(at(100)), Due::Alive);
        assert_eq!(watch.look(at(102)), Due::Alive);
        let silent = (103..200).find(|second| matches!(watch.look(at(*second)), Due::Silent(1, _)));
        assert_eq!(silent, Some(112));
    }
}
