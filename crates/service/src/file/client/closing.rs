//! Files that the server is told to close, without a wait for its answer.
//!
//! The kernel of a mount releases a file after the program's `close` has returned. A thread of the mount that waited for the answer
//! would drive the loop while the program's next call comes to another thread, and each would have to wake the other.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use byway_fabric::node::{Completed, Deadline, Op, OpError, WaitError};

use super::super::wire::{Arguments, CallError, Method};
use super::connection::Failure;
use super::table::Remote;
use super::{Client, NONE};
use crate::limits::FILE_CLOSES_MAX;

/// A file to close.
#[derive(Debug)]
struct Close {
    remote: Remote,
    /// The call whose answer was not looked at, and the client's session; `None` if it has to be sent.
    sent: Option<(Op, u64)>,
}

/// What was sent and not answered, the oldest first: at most [`FILE_CLOSES_MAX`], with those that a thread looks at.
#[derive(Debug)]
struct Queue<C, N> {
    closes: VecDeque<C>,
    /// The files of those that were taken and are not back.
    in_hand: Vec<N>,
}

impl<C, N: Copy + PartialEq> Queue<C, N> {
    /// Adds one. Gives the oldest if there are too many: it is waited for.
    fn push(&mut self, close: C) -> Option<C> {
        self.closes.push_back(close);
        if self.closes.len() + self.in_hand.len() > FILE_CLOSES_MAX { self.closes.pop_front() } else { None }
    }

    /// Takes the oldest, if it has ended, and how. [`Queue::give_back`] follows.
    fn take<E>(&mut self, name: impl FnOnce(&C) -> N, end_of: impl FnOnce(&C) -> Option<E>) -> Option<(C, E)> {
        let close = self.closes.front()?;
        let end = end_of(close)?;
        self.in_hand.push(name(close));
        self.closes.pop_front().map(|close| (close, end))
    }

    /// One that was taken is done, or was sent again.
    fn give_back(&mut self, name: N, again: Option<C>) {
        if let Some(at) = self.in_hand.iter().position(|other| *other == name) {
            self.in_hand.swap_remove(at);
        }
        self.closes.extend(again);
    }

    /// The files of all, of which none stays queued. One in hand may be given back yet: it is closed twice then, which is no error.
    fn take_all(&mut self, name: impl Fn(&C) -> N) -> Vec<N> {
        let queued = self.closes.drain(..).map(|close| name(&close));
        self.in_hand.iter().copied().chain(queued).collect()
    }
}

#[derive(Debug)]
pub(super) struct Closing(Mutex<Queue<Close, Remote>>);

impl Default for Closing {
    fn default() -> Self {
        Self(Mutex::new(Queue { closes: VecDeque::new(), in_hand: Vec::new() }))
    }
}

impl Closing {
    fn queue(&self) -> MutexGuard<'_, Queue<Close, Remote>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of them: a session that ended may not have closed them.
    pub(super) fn take(&self) -> Vec<Remote> {
        self.queue().take_all(|close| close.remote)
    }
}

impl Client {
    /// As [`Client::close_handle`], but does not wait for the server. What it does next for this client it does after the close.
    pub fn close_handle_later(&self, handle: u64) {
        let Some(remote) = self.take_handle(handle) else { return };
        let Some(close) = self.send_close(remote) else { return };
        let oldest = self.closing.queue().push(close);
        let Some(Close { remote, sent }) = oldest else { return };
        let is_told = sent.is_some_and(|(op, number)| self.is_closed_by(number, &op.wait(Deadline::NEVER)));
        match self.connection.now() {
            _ if is_told => {}
            Some(live) => self.close_waiting(live, remote),
            None => self.unclosed().push(remote),
        }
    }

    /// Looks at the answers that have come, from the oldest on, and sends again what was not taken. Waits for none.
    pub(super) fn end_closes(&self) {
        let end_of = |close: &Close| match &close.sent {
            None => Some(None),
            Some((op, number)) => match op.test() {
                Err(WaitError::Deadline) => None,
                ended => Some(Some((*number, ended))),
            },
        };
        for _ in 0..FILE_CLOSES_MAX {
            let Some((Close { remote, .. }, ended)) = self.closing.queue().take(|close| close.remote, end_of) else {
                return;
            };
            let is_told = ended.is_some_and(|(number, ended)| self.is_closed_by(number, &ended));
            let again = if is_told { None } else { self.send_close(remote) };
            self.closing.queue().give_back(remote, again);
        }
    }

    /// Sends a call; `None` if the server knows nothing of the file any more.
    fn send_close(&self, remote: Remote) -> Option<Close> {
        let Some(live) = self.connection.now() else { return Some(Close { remote, sent: None }) };
        if remote.epoch != live.epoch {
            return None;
        }
        let arguments = Arguments { node: remote.name.into(), ..NONE };
        let sent = match self.connection.begin(live.session, Method::Close, &arguments, &[], None) {
            Ok(asked) => Some((asked.op, live.number)),
            Err(Failure::NotSent) => {
                self.lose(live.number);
                None
            }
            Err(_) => None,
        };
        Some(Close { remote, sent })
    }

    /// Whether the server has closed a file, or will, or has none. A session that ended before is lost.
    fn is_closed_by(&self, number: u64, ended: &Result<Completed, WaitError>) -> bool {
        match ended {
            Ok(Ok(_) | Err(OpError::Deadline)) => true,
            Ok(Err(OpError::Status(status))) => CallError::from_status(*status) != CallError::Busy,
            Ok(Err(_)) | Err(_) => {
                self.lose(number);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_holds_and_the_order_stays_while_one_is_looked_at() {
        let mut queue = Queue { closes: VecDeque::new(), in_hand: Vec::new() };
        for number in 0..FILE_CLOSES_MAX {
            assert_eq!(queue.push(number), None);
        }
        assert_eq!(queue.take(|n| *n, |_| None::<()>), None);
        assert_eq!(queue.take(|n| *n, |_| Some(())), Some((0, ())));
        // Another thread closes meanwhile: the oldest that nobody looks at is waited for.
        assert_eq!(queue.push(100), Some(1));
        queue.give_back(0, Some(200));
        assert_eq!(queue.push(101), Some(2));
        assert_eq!(queue.closes.len(), FILE_CLOSES_MAX);
        assert_eq!(queue.take(|n| *n, |_| Some(())), Some((3, ())));
        queue.give_back(3, None);
        assert_eq!(queue.push(102), None);
        let left: Vec<_> = queue.closes.into_iter().collect();
        assert_eq!(left[..2], [4, 5]);
        assert_eq!(left[left.len() - 4..], [100, 200, 101, 102]);
    }

    #[test]
    fn a_close_that_is_looked_at_is_handed_over_with_the_others() {
        let mut queue = Queue { closes: VecDeque::from([1, 2, 3]), in_hand: Vec::new() };
        assert_eq!(queue.take(|n| *n, |_| Some(())), Some((1, ())));
        assert_eq!(queue.take_all(|n| *n), [1, 2, 3]);
        queue.give_back(1, None);
        assert!(queue.take_all(|n| *n).is_empty());
    }
}
