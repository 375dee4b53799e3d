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
use std::ops::Range;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Errno, Loan, Mapping, Reactor, RestingLoan, Socket};

use super::sessions::Session;
use super::{Fabric, Handler};
use crate::limits::{LOANS_MAX, RESTING_LOAN_BYTES_MAX, RESTING_LOANS_MAX};
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::WindowKey;
use crate::wire::{Grant, Kind, WindowAdvert};

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

#[derive(Debug)]
struct Resting {
    number: u32,
    loan: RestingLoan,
}

impl Loans {
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
    fn take_back(&self) {
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
    fn forget(&mut self, window: WindowKey) -> bool {
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
    fn excess(&mut self, one_more: bool) -> Vec<u32> {
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

impl Fabric {
    /// Tells the peer of a session where a window of ours lies, and lends it the memory if it has not got it yet: all of
    /// `mapping`, of which the window has `range`; for puts, if `write`, else for gets. False if that
    /// cannot be: another wire, TLS, memory that cannot be lent ([`Mapping::lend`]), too many loans ([`LOANS_MAX`]), or puts in a
    /// session with checksums: the peer's next put would change bytes before this end has checked those of the last. Then all goes
    /// as it does without.
    ///
    /// A window that the peer was told of is closed by [`Fabric::recall`].
    pub fn lend_window(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        window: WindowKey,
        mapping: &Mapping,
        range: Range<usize>,
        write: bool,
    ) -> bool {
        let Some(socket) = self.control_socket(session) else { return false };
        if self.sessions.open(session).is_none() {
            return false;
        }
        if write && self.agreed(session).is_some_and(crate::Agreed::payload_checksum) {
            return false;
        }
        // Before the memory is sealed for it, which it stays.
        let Some(loans) = self.loans_of(session) else { return false };
        if loans.find(mapping, write).is_none() {
            loans.wake(mapping, write);
        }
        if loans.find(mapping, write).is_none() {
            if loans.lent.len() >= LOANS_MAX {
                return false;
            }
            let Some(loan) = mapping.lend(write) else { return false };
            self.unmap_excess(session, true);
            let Some(loans) = self.loans_of(session) else { return false };
            match reactor.lend_memory(socket, &loan) {
                Ok(number) => loans.lent.push(Lent { number, loan, windows: 0 }),
                Err(error) => {
                    tracing::debug!(%error, "memory cannot be lent: payloads go through the stream");
                    return false;
                }
            }
        }
        let Some(loans) = self.loans_of(session) else { return false };
        let Some(lent) = loans.find(mapping, write) else { return false };
        lent.windows += 1;
        let (number, from) = (lent.number, lent.loan.offset());
        loans.windows.insert(window.0, number);
        let rights = if write { WindowAdvert::PUT } else { WindowAdvert::GET };
        let grant = Grant::new(from + range.start as u64, range.len() as u64, 0);
        self.tell_of_window(session, window, &WindowAdvert::opened(rights, number, grant));
        true
    }

    /// Ends the sessions whose peers were lent memory. To be called before a fabric is dropped that has lent some by
    /// [`Fabric::lend_window`]: dropping takes it back, and a peer that looks at memory which was taken back is told so by the end of
    /// its stream.
    pub fn end_lent(&mut self, reactor: &mut Reactor) {
        let lent: Vec<SessionId> =
            self.sessions.iter().filter(|(_, state)| state.has_lent()).map(|(slot, _)| slot).collect();
        for session in lent {
            self.close(reactor, session, CloseReason::Closed);
        }
    }

    /// How often memory is lent to peers: each piece, to each of them.
    pub fn loan_count(&self) -> usize {
        self.sessions.iter().filter_map(|(_, state)| state.wire.shm()).map(|shm| shm.loans.lent.len()).sum()
    }

    /// Has the peer unmap the memory that exceeds the bound for memory without windows.
    fn unmap_excess(&mut self, session: SessionId, one_more: bool) {
        let excess = self.loans_of(session).map(|loans| loans.excess(one_more));
        for number in excess.unwrap_or_default() {
            self.tell_of_window(session, WindowKey(0), &WindowAdvert::unmap(number));
        }
    }

    /// Has the peer forget where a window lies; [`Handler::recalled`] tells when it has, or its session has ended. False if it
    /// never knew. The window itself is to be closed too.
    pub fn recall(&mut self, reactor: &Reactor, session: SessionId, window: WindowKey) -> bool {
        let Some(loans) = self.loans_of(session) else { return false };
        let told = loans.windows.contains_key(&window.0);
        if told {
            // A peer that does not answer is not waited for for ever.
            loans.recalled.insert(window.0);
            self.sessions.watch(reactor, session);
            self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::CLOSED));
        }
        told
    }

    /// The peer tells where a window of its own lies, in memory that it has lent.
    pub(super) fn lent_window_opened(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        window: WindowKey,
        advert: &WindowAdvert,
    ) -> Result<(), CloseReason> {
        if !matches!(advert.rights, WindowAdvert::PUT | WindowAdvert::GET) {
            return Err(CloseReason::Unexpected(Kind::Window));
        }
        let Some(socket) = self.control_socket(session) else { return Ok(()) };
        let Some(shm) = self.sessions.shm_mut(session) else { return Ok(()) };
        let number = advert.memory.get();
        match reactor.take_memory(socket, number) {
            Ok(_) => {
                shm.taken_over = Some(socket);
                shm.grants.note_lent(window, advert.grant, number, advert.rights);
            }
            Err(error) => tracing::debug!(%error, "a peer's memory cannot be used"),
        }
        Ok(())
    }

    /// The peer tells that we need not keep its memory mapped.
    pub(super) fn unmap(&mut self, reactor: &mut Reactor, session: SessionId, number: u32) -> Result<(), CloseReason> {
        let Some(shm) = self.sessions.shm(session) else { return Ok(()) };
        if shm.grants.lies_in(number) {
            return Err(CloseReason::Unexpected(Kind::Window));
        }
        if let Some(socket) = shm.taken_over {
            reactor.leave_memory(socket, number);
        }
        Ok(())
    }

    /// The peer wants us to forget where a window of its own lies.
    pub(super) fn lent_window_closed(&mut self, session: SessionId, window: WindowKey) {
        if let Some(shm) = self.sessions.shm_mut(session)
            && !seeded::is(Bug::GrantKept)
        {
            shm.grants.forget_lent(window);
        }
        self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::FORGOTTEN));
    }

    /// The peer has forgotten where a window of ours lies.
    pub(super) fn lent_window_forgotten<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        window: WindowKey,
        handler: &mut H,
    ) {
        let forgotten = self.loans_of(session).is_some_and(|loans| loans.forget(window));
        self.sessions.watch(reactor, session);
        self.unmap_excess(session, false);
        if forgotten {
            handler.recalled(self, reactor, session, window);
        }
    }

    /// A session has ended: what its peer may still be writing is taken from it.
    pub(super) fn end_loans<H: Handler>(&mut self, reactor: &mut Reactor, session: SessionId, handler: &mut H) {
        let Some(state) = self.sessions.get_mut(session) else { return };
        let Some(shm) = state.wire.shm_mut() else { return };
        let loans = std::mem::take(&mut shm.loans);
        if !state.peer_disconnected && !seeded::is(Bug::LentMemoryNotTakenBack) {
            loans.take_back();
        }
        let Loans { lent, windows, .. } = loans;
        drop(lent);
        for window in windows.into_keys() {
            handler.recalled(self, reactor, session, WindowKey(window));
        }
    }

    /// What was lent to the peer of a session; `None` where nothing can be.
    fn loans_of(&mut self, session: SessionId) -> Option<&mut Loans> {
        Some(&mut self.sessions.shm_mut(session)?.loans)
    }

    /// The stream of a session's lane 0.
    fn control_socket(&self, session: SessionId) -> Option<Socket> {
        self.lanes.get(self.sessions.control_lane(session)?)?.socket
    }
}

impl Session {
    /// Whether its peer was lent memory of a program.
    fn has_lent(&self) -> bool {
        self.wire.shm().is_some_and(|shm| !shm.loans.is_empty())
    }
}

impl Drop for Fabric {
    /// Whose sessions end with it, without a word of their peers: what those can write is taken from them.
    fn drop(&mut self) {
        for (_, state) in self.sessions.iter().filter(|(_, state)| !state.peer_disconnected) {
            state.wire.shm().into_iter().for_each(|shm| shm.loans.take_back());
        }
    }
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
