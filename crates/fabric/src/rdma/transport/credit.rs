//! Message credits: the rule that keeps the shared receive queue from running dry.
//!
//! Each side posts [`RDMA_CREDITS`] receives for each connection before the peer may send, and tells the peer so: a credit
//! is a receive that is posted for it. A message takes one. A receive whose message was handled is posted again, and its
//! credit returns with the next message to that peer, or, when half of them are owed, with an empty message.
//!
//! An empty message takes no credit: a side that handles no messages for a while must still learn that its own were handled,
//! or both could wait for each other. At most two of them are unhandled at a time, since each returns half of all credits;
//! so two more receives are posted for each connection.
//!
//! A peer that sends without a credit would take the receives of others: its connection ends with a named reason.

use crate::limits::RDMA_CREDITS;
#[cfg(test)]
use crate::limits::RDMA_RECEIVES;

/// The credits of one connection.
#[derive(Debug)]
pub(super) struct Credits {
    /// Messages that we may send.
    ours: u32,
    /// Messages that we may have outstanding: what the peer granted.
    ours_max: u32,
    /// Messages that the peer may send.
    theirs: u32,
    /// Of those that the peer cannot send, how many have been dealt with.
    owed: u32,
}

/// How a peer broke the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CreditError {
    /// It sent without a credit.
    #[error("the peer sent a message without a credit for it")]
    Overrun,
    /// It gave a few credits back by a message of no bytes, for which there may be no receive.
    #[error("the peer sent a message of credits that returns too few")]
    Few,
    /// It gave back more than it had.
    #[error("the peer returned more credits than it received messages")]
    Surplus,
}

impl Credits {
    /// The peer, which may send [`RDMA_CREDITS`] messages, lets us send `granted`: none, if it has not said yet.
    pub(super) fn new(granted: u32) -> Self {
        Self { ours: granted, ours_max: granted, theirs: RDMA_CREDITS, owed: 0 }
    }

    /// The peer says how many messages we may send, before which we sent none. What it has sent meanwhile counts.
    pub(super) fn grant(&mut self, granted: u32) {
        (self.ours, self.ours_max) = (granted, granted);
    }

    /// Whether a message may be sent.
    pub(super) fn may_send(&self) -> bool {
        self.ours > 0
    }

    /// Whether so many are owed that they go back by themselves.
    pub(super) fn must_return(&self) -> bool {
        self.owed >= RDMA_CREDITS / 2
    }

    /// A message is sent: gives how many credits go back with it.
    pub(super) fn send(&mut self) -> u32 {
        self.ours -= 1;
        self.give_back()
    }

    /// All that is owed goes back.
    pub(super) fn give_back(&mut self) -> u32 {
        self.theirs += self.owed;
        std::mem::take(&mut self.owed)
    }

    /// A message came, with so many credits.
    pub(super) fn receive(&mut self, returned: u32) -> Result<(), CreditError> {
        self.theirs = self.theirs.checked_sub(1).ok_or(CreditError::Overrun)?;
        self.take(returned)
    }

    /// Credits came by themselves: never none, or a peer whose grant is not known yet could send such without end.
    pub(super) fn receive_back(&mut self, returned: u32) -> Result<(), CreditError> {
        if returned < (self.ours_max / 2).max(1) {
            return Err(CreditError::Few);
        }
        self.take(returned)
    }

    fn take(&mut self, returned: u32) -> Result<(), CreditError> {
        if returned > self.ours_max - self.ours {
            return Err(CreditError::Surplus);
        }
        self.ours += returned;
        Ok(())
    }

    /// The receive of a message is posted again.
    pub(super) fn repost(&mut self) {
        self.owed += 1;
    }
}

const _: () = assert!(RDMA_CREDITS >= 4);

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// One side: messages to send, messages that came and were not dealt with, and what is on the way to it.
    struct Side {
        credits: Credits,
        to_send: u32,
        unread: u32,
        way: VecDeque<(bool, u32)>,
        receives: u32,
    }

    impl Side {
        fn new(to_send: u32) -> Self {
            let (unread, way) = Default::default();
            Self { credits: Credits::new(RDMA_CREDITS), to_send, unread, way, receives: RDMA_RECEIVES }
        }

        /// Sends what may be sent.
        fn send(&mut self, to: &mut VecDeque<(bool, u32)>) {
            while self.to_send > 0 && self.credits.may_send() {
                self.to_send -= 1;
                to.push_back((true, self.credits.send()));
            }
            while self.credits.must_return() {
                to.push_back((false, self.credits.give_back()));
            }
        }

        /// A message arrives, for which there must be a receive.
        fn arrive(&mut self) {
            let Some((is_message, returned)) = self.way.pop_front() else { return };
            self.receives = self.receives.checked_sub(1).expect("a receive is posted");
            if is_message {
                self.credits.receive(returned).expect("within the credits");
                self.unread += 1;
            } else {
                self.credits.receive_back(returned).expect("half of them");
                self.receives += 1;
            }
        }

        fn read(&mut self) {
            if self.unread > 0 {
                self.unread -= 1;
                self.receives += 1;
                self.credits.repost();
            }
        }
    }

    proptest! {
        #[test]
        fn everything_arrives_and_a_receive_is_always_there(
            load in (0u32..200, 0u32..200), steps in proptest::collection::vec((0usize..2, 0u8..3), 0..2000),
        ) {
            let mut sides = [Side::new(load.0), Side::new(load.1)];
            let last = (0..2000usize).map(|step| (step % 2, (step / 2 % 3) as u8));
            for (at, what) in steps.into_iter().chain(last.cycle().take(12_000)) {
                let [a, b] = &mut sides;
                let (side, other) = if at == 0 { (a, b) } else { (b, a) };
                match what {
                    0 => side.send(&mut other.way),
                    1 => side.arrive(),
                    _ => side.read(),
                }
            }
            for side in &sides {
                prop_assert_eq!((side.to_send, side.unread, side.way.len()), (0, 0, 0));
            }
        }
    }

    #[test]
    fn a_message_without_a_credit_and_credits_out_of_nothing_are_told() {
        let mut credits = Credits::new(4);
        for _ in 0..RDMA_CREDITS {
            assert_eq!(credits.receive(0), Ok(()));
        }
        assert_eq!(credits.receive(0), Err(CreditError::Overrun));
        credits.repost();
        assert_eq!(credits.send(), 1);
        assert_eq!(credits.receive(2), Err(CreditError::Surplus));
    }

    #[test]
    fn a_side_that_deals_with_nothing_hears_that_its_messages_were_dealt_with() {
        let (mut busy, mut idle) = (Credits::new(RDMA_CREDITS), Credits::new(RDMA_CREDITS));
        // Both have sent all they may; only one deals with what came.
        for _ in 0..RDMA_CREDITS {
            let (from_busy, from_idle) = (busy.send(), idle.send());
            idle.receive(from_busy).unwrap();
            busy.receive(from_idle).unwrap();
        }
        assert!(!busy.may_send() && !idle.may_send());
        (0..RDMA_CREDITS / 2).for_each(|_| idle.repost());
        assert!(idle.must_return() && !idle.may_send());
        busy.receive_back(idle.give_back()).unwrap();
        assert!(busy.may_send() && !idle.must_return());
        assert_eq!(busy.receive_back(1), Err(CreditError::Few));
    }

    #[test]
    fn what_came_before_the_grant_counts() {
        let mut credits = Credits::new(0);
        for _ in 0..RDMA_CREDITS - 1 {
            assert_eq!(credits.receive(0), Ok(()));
        }
        credits.repost();
        credits.grant(4);
        assert_eq!(credits.receive(0), Ok(()));
        assert_eq!(credits.receive(0), Err(CreditError::Overrun));
        assert_eq!(credits.send(), 1);
        assert_eq!(credits.receive(1), Ok(()));
    }

    #[test]
    fn nothing_goes_back_of_no_messages() {
        for granted in [0, 4] {
            let mut credits = Credits::new(granted);
            assert_eq!(credits.receive_back(0), Err(CreditError::Few), "{granted} credits");
        }
        assert_eq!(Credits::new(0).receive_back(1), Err(CreditError::Surplus));
    }
}
