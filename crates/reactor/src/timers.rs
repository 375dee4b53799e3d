//! Timers of one loop: a heap ordered by time, then by order of submission.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::{Instant, Token};

/// Pending timers. Cancelling is lazy: the heap forgets a cancelled one when it comes up, or when those outnumber
/// the rest.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u64)>>,
    live: std::collections::HashMap<u64, Token>,
    next: u64,
}

impl Timers {
    pub(crate) fn add(&mut self, at: Instant, token: Token) {
        self.next += 1;
        self.heap.push(Reverse((at, self.next)));
        self.live.insert(self.next, token);
    }

    /// Removes all timers of `token`; says how many there were.
    pub(crate) fn cancel(&mut self, token: Token) -> usize {
        let before = self.live.len();
        self.live.retain(|_, live| *live != token);
        if self.heap.len() > 64 && self.heap.len() > 2 * self.live.len() {
            let live = &self.live;
            self.heap.retain(|Reverse((_, id))| live.contains_key(id));
        }
        before - self.live.len()
    }

    /// The next timer that is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Token> {
        while let Some(&Reverse((at, id))) = self.heap.peek() {
            if at > now && self.live.contains_key(&id) {
                return None;
            }
            self.heap.pop();
            if let Some(token) = self.live.remove(&id) {
                return Some(token);
            }
        }
        None
    }

    /// When the next one is due.
    pub(crate) fn next_at(&mut self) -> Option<Instant> {
        while let Some(&Reverse((at, id))) = self.heap.peek() {
            if self.live.contains_key(&id) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(index: u32) -> Token {
        Token::new(1, 0, index, 0)
    }

    #[test]
    fn timers_come_in_order_and_cancelled_ones_do_not() {
        let mut timers = Timers::default();
        for at in [30, 10, 20, 10] {
            timers.add(Instant::from_nanos(at), token(at as u32));
        }
        assert_eq!(timers.cancel(token(20)), 1);
        assert_eq!(timers.next_at(), Some(Instant::from_nanos(10)));
        assert_eq!(timers.pop_due(Instant::from_nanos(5)), None);
        let due: Vec<_> = std::iter::from_fn(|| timers.pop_due(Instant::from_nanos(40))).collect();
        assert_eq!(due, [token(10), token(10), token(30)]);
        assert_eq!(timers.len(), 0);
    }
}
