//! Windows in a program's memory that the peer reaches directly, over shared memory.
//!
//! Either end lends, independently of which end listens. The owner of a window in memory that can be lent
//! ([`Mapping::shared`](Mapping::shared), a caller's file) sends its peer the memory's descriptor and a `Window` message,
//! which locates the window in it. The peer then gets and puts by one copy of its own, and a get costs the owner's loop
//! nothing.
//!
//! To close such a window the owner recalls it: the peer forgets its location, finishes its copies, and says so. The memory
//! stays mapped at the peer for further windows until the owner releases it, because a mapping costs more than most
//! transfers (decision 0029). Such a loan *rests*: it blocks no other use of the memory, and there are few
//! ([`RESTING_LOANS_MAX`], [`RESTING_LOAN_BYTES_MAX`]). A peer that ended its session itself, or is dead, copies nothing any
//! more. A peer that was given up may have been stopped in the middle of a copy: memory that it could write is taken back
//! ([`Loan::take_back`]).

use std::collections::{HashMap, HashSet, VecDeque};

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Errno, Loan, Mapping, Reactor, RestingLoan, Socket};

use crate::limits::{LOANS_MAX, RESTING_LOAN_BYTES_MAX, RESTING_LOANS_MAX};
use crate::session::CloseReason;
use crate::windows::WindowKey;

/// What was lent to the peer of a session.
#[derive(Debug, Default)]
pub(super) struct Loans {
    lent: Vec<Lent>,
    /// In which the peer knows of no window, and which it has mapped still: the one used longest ago first.
    resting: VecDeque<Resting>,
    /// By window, the number of what it lies in.
    windows: HashMap<u64, u32>,
    /// Those that the peer was told to forget, and has not said that it has.
    recalled: HashSet<u64>,
}

#[derive(Debug)]
struct Lent {
    number: u32,
    loan: Loan,
    /// Windows in it that the peer knows of.
    windows: usize,
}

/// Under which number the peer knows lent memory, and where it starts in what was lent.
pub(super) struct LentAs {
    pub(super) number: u32,
    pub(super) offset: u64,
}

#[derive(Debug)]
struct Resting {
    number: u32,
    loan: RestingLoan,
}

impl Loans {
    /// Lends memory for a window: all of `mapping`, for puts, if `write`, else for gets. `None` if that cannot be. The memory that the
    /// peer shall unmap to make room is added to `unmap`.
    pub(super) fn lend(
        &mut self,
        reactor: &mut Reactor,
        socket: Socket,
        window: WindowKey,
        mapping: &Mapping,
        write: bool,
        unmap: &mut Vec<u32>,
    ) -> Option<LentAs> {
        if self.find(mapping, write).is_none() {
            self.wake(mapping, write);
        }
        if self.find(mapping, write).is_none() {
            if self.lent.len() >= LOANS_MAX {
                return None;
            }
            let loan = mapping.lend(write)?;
            unmap.append(&mut self.excess(true));
            match reactor.lend_memory(socket, &loan) {
                Ok(number) => self.lent.push(Lent { number, loan, windows: 0 }),
                Err(error) => {
                    tracing::debug!(%error, "memory cannot be lent: payloads go through the stream");
                    return None;
                }
            }
        }
        let lent = self.find(mapping, write)?;
        lent.windows += 1;
        let lent_as = LentAs { number: lent.number, offset: lent.loan.offset() };
        self.windows.insert(window.0, lent_as.number);
        Some(lent_as)
    }

    /// The peer is to forget a window. False if it never knew of it.
    pub(super) fn recall(&mut self, window: WindowKey) -> bool {
        let told = self.windows.contains_key(&window.0);
        if told {
            self.recalled.insert(window.0);
        }
        told
    }

    /// The session has ended: what its peer may still be writing is taken from it, unless it copies nothing any more. Gives the windows
    /// that it knew.
    pub(super) fn end(self, peer_disconnected: bool) -> impl Iterator<Item = WindowKey> {
        if !peer_disconnected && !seeded::is(Bug::LentMemoryNotTakenBack) {
            self.take_back();
        }
        let Self { lent, windows, .. } = self;
        drop(lent);
        windows.into_keys().map(WindowKey)
    }

    /// How many are lent, besides those that rest.
    pub(super) fn len(&self) -> usize {
        self.lent.len()
    }

    /// Whether the peer can have placed anything.
    pub(super) fn is_empty(&self) -> bool {
        self.lent.is_empty()
    }

    /// Whether the peer owes us word that it forgets a window.
    pub(super) fn is_awaited(&self) -> bool {
        !self.recalled.is_empty()
    }

    /// Whether a window lies in what the peer may write.
    pub(super) fn is_written(&self, window: WindowKey) -> bool {
        let number = self.windows.get(&window.0);
        number.is_some_and(|number| self.lent.iter().any(|lent| lent.number == *number && lent.loan.is_writable()))
    }

    /// Takes what a peer may still be writing from it.
    pub(super) fn take_back(&self) {
        for lent in &self.lent {
            if let Err(error) = lent.loan.take_back() {
                // No memory for a page, or no mapping: then this process is at its end in other ways too.
                tracing::error!(%error, "memory that a lost peer may write cannot be taken back");
            }
        }
    }

    /// Memory that was lent already, in a way that will do.
    fn find(&mut self, mapping: &Mapping, write: bool) -> Option<&mut Lent> {
        self.lent.iter_mut().find(|lent| lent.loan.is_of(mapping) && (lent.loan.is_writable() || !write))
    }

    /// A window that the peer knows of no longer. False if it never did. What no window lies in rests.
    pub(super) fn forget(&mut self, window: WindowKey) -> bool {
        self.recalled.remove(&window.0);
        let Some(number) = self.windows.remove(&window.0) else { return false };
        if let Some(at) = self.lent.iter().position(|lent| lent.number == number) {
            self.lent[at].windows -= 1;
            if self.lent[at].windows == 0 {
                let Lent { number, loan, .. } = self.lent.swap_remove(at);
                self.resting.push_back(Resting { number, loan: loan.rest() });
            }
        }
        true
    }

    /// Memory that the peer has mapped still, and is lent again.
    fn wake(&mut self, mapping: &Mapping, write: bool) {
        let Some(at) = self.resting.iter().position(|resting| resting.loan.is_of(mapping, write)) else { return };
        let Some(loan) = mapping.lend_again(&self.resting[at].loan) else { return };
        if let Some(Resting { mut number, .. }) = self.resting.remove(at) {
            if seeded::is(Bug::WrongLoanWoken) {
                number = self.resting.back().map_or(number, |other| other.number);
            }
            self.lent.push(Lent { number, loan, windows: 0 });
        }
    }

    /// What the peer shall unmap: what is gone here, and what is over the bounds, if `one_more` is to be lent too; what is too large by
    /// itself makes no other go.
    pub(super) fn excess(&mut self, one_more: bool) -> Vec<u32> {
        let mut excess: Vec<u32> = Vec::new();
        self.resting.retain(|resting| {
            let keeps = !resting.loan.is_of_nothing() && resting.loan.bytes() <= RESTING_LOAN_BYTES_MAX;
            excess.extend((!keeps).then_some(resting.number));
            keeps
        });
        while self.resting.len() > RESTING_LOANS_MAX
            || self.resting.iter().map(|resting| resting.loan.bytes()).sum::<u64>() > RESTING_LOAN_BYTES_MAX
            || self.lent.len() + self.resting.len() + usize::from(one_more) > LOANS_MAX
        {
            let Some(oldest) = self.resting.pop_front() else { break };
            excess.push(oldest.number);
        }
        excess
    }
}

/// Whether the peer ended a session that closed for this reason. Then the peer does not use lent memory any more.
pub(super) fn is_disconnect(reason: CloseReason) -> bool {
    use CloseReason::{Io, PeerClosed, Refused, Truncated};
    matches!(reason, PeerClosed | Truncated | Refused(_) | Io(Errno::CONNRESET | Errno::PIPE))
}

const _: () = assert!(LOANS_MAX <= byway_reactor::limits::ARENAS_PER_STREAM_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 4096;

    /// Lends, closes the one window, and gives what the peer is to unmap.
    fn use_once(loans: &mut Loans, mapping: &Mapping, number: u32) -> Vec<u32> {
        loans.wake(mapping, false);
        if loans.find(mapping, false).is_none() {
            loans.lent.push(Lent { number, loan: mapping.lend(false).unwrap(), windows: 0 });
        }
        loans.find(mapping, false).unwrap().windows += 1;
        let lent = loans.find(mapping, false).unwrap().number;
        loans.windows.insert(77, lent);
        assert!(loans.forget(WindowKey(77)) && loans.is_empty());
        loans.excess(false)
    }

    #[test]
    fn the_loans_used_last_rest_and_those_over_the_bounds_go() {
        let mut loans = Loans::default();
        let mappings: Vec<_> = (0..=RESTING_LOANS_MAX).map(|_| Mapping::shared(BYTES).unwrap()).collect();
        for (number, mapping) in mappings.iter().take(RESTING_LOANS_MAX).enumerate() {
            assert_eq!(use_once(&mut loans, mapping, number as u32), []);
        }
        assert_eq!(use_once(&mut loans, &mappings[0], 100), [], "it was there still");
        assert_eq!(use_once(&mut loans, &mappings[RESTING_LOANS_MAX], 101), [1], "the one used longest ago");
        assert_eq!(use_once(&mut loans, &mappings[1], 102), [2]);
        let large = Mapping::shared(RESTING_LOAN_BYTES_MAX as usize).unwrap();
        let gone = use_once(&mut loans, &large, 103);
        assert_eq!(gone.len(), RESTING_LOANS_MAX, "all others");
        let too_large = Mapping::shared(RESTING_LOAN_BYTES_MAX as usize + BYTES).unwrap();
        assert_eq!(use_once(&mut loans, &too_large, 104), [104], "it alone");
    }

    #[test]
    fn memory_that_is_gone_rests_nowhere() {
        let mut loans = Loans::default();
        let (first, second) = (Mapping::shared(BYTES).unwrap(), Mapping::shared(BYTES).unwrap());
        assert_eq!(use_once(&mut loans, &first, 0), []);
        drop(first);
        assert_eq!(use_once(&mut loans, &second, 1), [0]);
    }

    #[test]
    fn resting_loans_make_room_for_those_that_are_used() {
        let mut loans = Loans::default();
        let mappings: Vec<_> = (0..LOANS_MAX).map(|_| Mapping::shared(BYTES).unwrap()).collect();
        assert_eq!(use_once(&mut loans, &mappings[0], 0), []);
        for (number, mapping) in mappings.iter().enumerate().skip(1) {
            assert_eq!(loans.excess(true), [], "{number}");
            loans.lent.push(Lent { number: number as u32, loan: mapping.lend(false).unwrap(), windows: 1 });
        }
        assert_eq!(loans.excess(true), [0]);
    }
}
