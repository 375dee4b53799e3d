//! Calls between nodes, as they travel in messages, and the caller's and the server's tables of them.
//!
//! A call names itself by its caller's node, a number there and a random secret: its *token*. Whoever has the token can answer,
//! whichever way the answer comes: so a server can hand a call on to a third node, which answers the caller directly. An
//! answer with a wrong secret is forged; to a number that is gone, late or repeated. Both are counted, and change nothing.

use std::collections::VecDeque;

use byway_fabric::{Slot, Slots};
use byway_reactor::Instant;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::limits::RELAYS_MAX;

/// Names a node, for as long as it lives; random.
pub type NodeId = [u8; 16];

/// What a message of the layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Names the node; the first over a session.
    Hello = 1,
    /// A call of the sender's.
    Call = 2,
    /// An answer.
    Reply = 3,
    /// The caller wants no answer any more.
    Cancel = 4,
    /// A call of somebody else's, handed on.
    Delegate = 5,
    /// To the caller: the call was handed on; the answer comes from somebody else, and need not end with this session.
    Moved = 6,
    /// An answer for somebody with whom the sender has no session.
    Relay = 7,
}

impl Kind {
    /// The kind of that number.
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Call,
            3 => Self::Reply,
            4 => Self::Cancel,
            5 => Self::Delegate,
            6 => Self::Moved,
            7 => Self::Relay,
            _ => return None,
        })
    }
}

/// A call's name and its right to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TokenName {
    /// The caller.
    pub caller: NodeId,
    /// Its number there.
    pub call: U64,
    /// Random.
    pub secret: U64,
}

/// The header of a message of the layer. docs/wire.md draws the byte map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Head {
    /// A [`Kind`].
    pub kind: u8,
    /// Windows in the payload.
    pub windows: u8,
    /// Bytes of arguments, or of the result, behind them.
    pub inline: u8,
    /// Zero.
    pub reserved: u8,
    /// What to do.
    pub method: U16,
    /// 0: it went well.
    pub status: U16,
    /// The call. In a `Hello` its caller is the sender.
    pub token: TokenName,
    /// Milliseconds that the caller still waits; 0: for ever.
    pub left_ms: U32,
    /// Zero.
    pub reserved_end: [u8; 20],
}

const _: () = assert!(size_of::<TokenName>() == 32 && size_of::<Head>() == 64);

/// Why an answer changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwanted {
    /// The call is gone: answered, cancelled or past its deadline.
    Late,
    /// The secret is another.
    Forged,
}

#[derive(Debug)]
struct Pending<S, T> {
    secret: u64,
    deadline: Instant,
    /// Over which session it went; `None` once it was handed on.
    session: Option<S>,
    context: T,
}

/// The caller's calls that have not ended; `S` names sessions, `T` is what the caller wants to know.
#[derive(Debug)]
pub struct PendingCalls<S, T>(Slots<Pending<S, T>>);

impl<S, T> Default for PendingCalls<S, T> {
    fn default() -> Self {
        Self(Slots::default())
    }
}

impl<S: Copy + PartialEq, T> PendingCalls<S, T> {
    /// Starts a call; gives its number.
    pub fn start(&mut self, secret: u64, session: S, deadline: Instant, context: T) -> u64 {
        self.0.insert(Pending { secret, deadline, session: Some(session), context }).to_u64()
    }

    /// Calls.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn find(&mut self, token: &TokenName) -> Result<Slot, Unwanted> {
        let slot = Slot::from_u64(token.call.get());
        let pending = self.0.get(slot).ok_or(Unwanted::Late)?;
        if pending.secret == token.secret.get() { Ok(slot) } else { Err(Unwanted::Forged) }
    }

    /// An answer came, over whichever session.
    ///
    /// # Errors
    /// It is nobody's.
    pub fn answered(&mut self, token: &TokenName) -> Result<T, Unwanted> {
        let slot = self.find(token)?;
        self.0.remove(slot).map(|pending| pending.context).ok_or(Unwanted::Late)
    }

    /// The server of `session` has handed a call on.
    ///
    /// # Errors
    /// It is not one of that session's.
    pub fn moved(&mut self, token: &TokenName, session: S) -> Result<(), Unwanted> {
        let slot = self.find(token)?;
        let pending = self.0.get_mut(slot).filter(|pending| pending.session == Some(session)).ok_or(Unwanted::Late)?;
        pending.session = None;
        Ok(())
    }

    /// Removes the calls that `ends` says have ended: by session and deadline; gives each with its number, secret and session.
    fn remove_where(&mut self, ends: impl Fn(&Pending<S, T>) -> bool) -> Vec<(u64, u64, Option<S>, T)> {
        let ended: Vec<Slot> = self.0.iter().filter(|(_, pending)| ends(pending)).map(|(slot, _)| slot).collect();
        let remove = |slot: Slot| {
            let pending = self.0.remove(slot)?;
            Some((slot.to_u64(), pending.secret, pending.session, pending.context))
        };
        ended.into_iter().filter_map(remove).collect()
    }

    /// A session has ended, and with it the calls that were not handed on.
    pub fn session_ended(&mut self, session: S) -> Vec<T> {
        self.remove_where(|pending| pending.session == Some(session)).into_iter().map(|ended| ended.3).collect()
    }

    /// The calls that are past their deadline.
    pub fn overdue(&mut self, now: Instant) -> Vec<(u64, u64, Option<S>, T)> {
        self.remove_where(|pending| pending.deadline <= now)
    }

    /// The next deadline.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.0.iter().map(|(_, pending)| pending.deadline).filter(|at| *at < Instant::FAR).min()
    }

    /// The caller wants no answer any more.
    pub fn cancel(&mut self, is: impl Fn(&T) -> bool) -> Option<(u64, u64, Option<S>, T)> {
        self.remove_where(|pending| is(&pending.context)).pop()
    }
}

/// Calls that a server has handed on, whose answers it passes on if need be: once each. The oldest are forgotten.
#[derive(Debug)]
pub struct Relays<S>(VecDeque<(TokenName, S)>);

impl<S> Default for Relays<S> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<S> Relays<S> {
    /// A call that came over `caller` was handed on. False if it was handed on before, which is looked for if it `may_be`: the way
    /// that it came first is the one towards its caller, and stays.
    pub fn add(&mut self, token: TokenName, caller: S, may_be: bool) -> bool {
        if may_be && self.0.iter().rev().any(|(other, _)| *other == token) {
            return false;
        }
        if self.0.len() >= RELAYS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((token, caller));
        true
    }

    /// The session to pass an answer on over; nobody's twice.
    pub fn take(&mut self, token: &TokenName) -> Option<S> {
        // What was handed on last is answered first, and many of the old ones were answered directly.
        let place = self.0.iter().rposition(|(other, _)| other == token)?;
        self.0.remove(place).map(|(_, session)| session)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(call: u64, secret: u64) -> TokenName {
        TokenName { caller: [1; 16], call: U64::new(call), secret: U64::new(secret) }
    }

    #[test]
    fn a_head_has_these_bytes() {
        let head = Head {
            kind: Kind::Delegate as u8,
            windows: 1,
            inline: 2,
            reserved: 0,
            method: U16::new(0x0403),
            status: U16::new(0x0605),
            token: TokenName { caller: [7; 16], call: U64::new(0x0f0e_0d0c_0b0a_0908), secret: U64::new(0x10) },
            left_ms: U32::new(0x1413_1211),
            reserved_end: [0; 20],
        };
        let mut golden = vec![5, 1, 2, 0, 3, 4, 5, 6];
        golden.extend([7; 16]);
        golden.extend([8, 9, 10, 11, 12, 13, 14, 15, 16, 0, 0, 0, 0, 0, 0, 0, 17, 18, 19, 20]);
        golden.extend([0; 20]);
        assert_eq!(head.as_bytes(), golden);
        assert!((0..=255).filter_map(Kind::from_number).map(|kind| kind as u8).eq(1..=7));
    }

    #[test]
    fn a_call_that_was_handed_on_outlives_its_session() {
        let mut calls = PendingCalls::default();
        let (here, moved) = (calls.start(5, 'a', Instant::FAR, 1), calls.start(6, 'a', Instant::from_nanos(9), 2));
        assert_eq!(calls.moved(&token(moved, 6), 'b'), Err(Unwanted::Late), "not that server's to hand on");
        assert_eq!(calls.moved(&token(moved, 7), 'a'), Err(Unwanted::Forged));
        assert_eq!(calls.moved(&token(moved, 6), 'a'), Ok(()));
        assert_eq!(calls.session_ended('a'), [1]);
        assert_eq!(calls.answered(&token(here, 5)), Err(Unwanted::Late));
        assert_eq!(calls.next_deadline(), Some(Instant::from_nanos(9)));
        assert!(calls.overdue(Instant::from_nanos(8)).is_empty());
        assert_eq!(calls.overdue(Instant::from_nanos(9)), [(moved, 6, None, 2)]);
    }

    #[test]
    fn an_answer_is_passed_on_once() {
        let mut relays = Relays::default();
        for call in 0..=RELAYS_MAX as u64 {
            assert!(relays.add(token(call, 1), call, true));
        }
        assert!(!relays.add(token(RELAYS_MAX as u64, 1), 0, true), "the first way stays");
        assert_eq!(relays.take(&token(0, 1)), None, "the oldest is forgotten");
        assert_eq!(relays.take(&token(1, 2)), None, "a forged one");
        assert_eq!((relays.take(&token(1, 1)), relays.take(&token(1, 1))), (Some(1), None));
    }

    proptest! {
        /// Answers, forged answers, ends of sessions, deadlines and cancellations in any order: each call ends once.
        #[test]
        fn every_call_ends_exactly_once(events in proptest::collection::vec((0u8..6, 0usize..20, 0u8..3), 1..200)) {
            let mut calls = PendingCalls::default();
            let (mut names, mut ended) = (Vec::new(), Vec::new());
            for (event, which, session) in events {
                match event {
                    0 | 1 => {
                        let number = names.len();
                        let deadline = Instant::from_nanos(number as u64 * 10);
                        let secret = number as u64 * 7 + 1;
                        names.push(token(calls.start(secret, session, deadline, number), secret));
                    }
                    _ if names.is_empty() => {}
                    2 => {
                        let name = names[which % names.len()];
                        let forged = TokenName { secret: U64::new(name.secret.get() ^ 1), ..name };
                        prop_assert!(calls.answered(&forged).is_err());
                        ended.extend(calls.answered(&name));
                    }
                    3 => ended.extend(calls.session_ended(session)),
                    4 => ended.extend(calls.overdue(Instant::from_nanos(which as u64)).into_iter().map(|call| call.3)),
                    _ => ended.extend(calls.cancel(|call| *call == which).map(|call| call.3)),
                }
            }
            ended.extend(calls.overdue(Instant::FAR).into_iter().map(|call| call.3));
            ended.sort_unstable();
            prop_assert_eq!(ended, (0..names.len()).collect::<Vec<_>>());
            prop_assert!(calls.is_empty());
        }
    }
}
