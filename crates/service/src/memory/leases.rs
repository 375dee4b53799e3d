//! Which borrower has which slabs of a lender, and when the lender takes them back. Pure: time and readings are arguments.
//!
//! A lease ends when its borrower returns it, when the borrower's session ends, when the borrower has not renewed its leases
//! for [`LEASE_KEEP_ALIVE`], or [`TAKE_BACK_NOTICE`] after the lender has told the borrower, in the answer to a renewal,
//! that it takes the slab back. A lender that is to end takes all slabs back, and tells its borrowers until when they stay.
//!
//! A borrower may have any number of slabs, up to its quota, while there is room. Without room, a borrower below its fair
//! share (all lent memory divided by the borrowers) gets slabs that are taken back from the borrower with the most, one at a
//! time, while that one keeps its own share.

use std::collections::BTreeMap;
use std::time::Duration;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::wire::LendError;
use crate::limits::{CONTENTION_TIME, LEASE_KEEP_ALIVE, SLABS_PER_SESSION_MAX, TAKE_BACK_NOTICE};

/// What a lender lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LendingLimits {
    /// Slabs in all.
    pub slabs: u64,
    /// Slabs of one borrower.
    pub quota: u64,
    /// Bytes of a slab.
    pub slab_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Lent,
    /// It is taken back, and its borrower is to be told.
    Wanted,
    /// Its borrower was told, and it ends then.
    Told(Instant),
}

#[derive(Debug)]
struct Lease<Id> {
    number: u64,
    state: State,
    /// The borrower below its fair share that it is taken back for.
    taken_for: Option<Id>,
}

#[derive(Debug)]
struct Borrower<Id> {
    leases: Vec<Lease<Id>>,
    renewed: Instant,
    taken_back: u64,
}

/// What a borrower has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share<Id> {
    /// Which.
    pub id: Id,
    /// Its slabs.
    pub slabs: u64,
    /// Slabs that were taken back from it.
    pub taken_back: u64,
}

/// See the module. `Id` names a borrower.
#[derive(Debug)]
pub struct Leases<Id> {
    limits: LendingLimits,
    borrowers: BTreeMap<Id, Borrower<Id>>,
    numbers: u64,
    lent: u64,
    /// A borrower below its fair share that has asked in vain: until then no borrower above its own gets a slab.
    waiting: Option<(Id, Instant)>,
    taken_back: u64,
    expired: u64,
    /// The lender ends: slabs stay until then, and none is leased.
    ends: Option<Instant>,
}

impl<Id: Copy + Ord> Leases<Id> {
    /// None are leased.
    pub fn new(limits: LendingLimits) -> Self {
        let borrowers = BTreeMap::new();
        Self { limits, borrowers, numbers: 0, lent: 0, waiting: None, taken_back: 0, expired: 0, ends: None }
    }

    /// Slabs that are leased.
    pub fn lent(&self) -> u64 {
        self.lent
    }

    /// Borrowers that have slabs.
    pub fn shares(&self) -> impl Iterator<Item = Share<Id>> + '_ {
        let share = |(id, borrower): (&Id, &Borrower<Id>)| Share {
            id: *id,
            slabs: borrower.leases.len() as u64,
            taken_back: borrower.taken_back,
        };
        self.borrowers.iter().map(share)
    }

    /// Slabs that were taken back, and slabs of borrowers that did not renew them.
    pub fn ended_early(&self) -> (u64, u64) {
        (self.taken_back, self.expired)
    }

    /// Leases a slab: its number.
    ///
    /// # Errors
    /// `TooMany`, `AllLent`, `Ending`.
    pub fn lease(&mut self, id: Id, now: Instant) -> Result<u64, LendError> {
        if self.ends.is_some() {
            return Err(LendError::Ending);
        }
        let has = self.borrowers.get(&id).map_or(0, |borrower| borrower.leases.len() as u64);
        if has >= self.limits.quota.min(SLABS_PER_SESSION_MAX as u64) {
            return Err(LendError::TooMany);
        }
        self.waiting = self.waiting.filter(|(_, until)| *until > now);
        let is_new = |id: &Id| !self.borrowers.contains_key(id);
        let waits = self.waiting.is_some_and(|(other, _)| other != id && is_new(&other));
        let sharers = self.borrowers.len() as u64 + u64::from(is_new(&id)) + u64::from(waits);
        let fair = self.limits.slabs / sharers;
        let is_below = has < fair;
        if self.lent >= self.limits.slabs {
            if is_below {
                self.waiting = Some((id, now + CONTENTION_TIME));
                let mut leases = self.borrowers.values().flat_map(|borrower| &borrower.leases);
                // It may ask again before the slab of its last request is free.
                if leases.all(|lease| lease.taken_for != Some(id)) {
                    self.take_from_richest(fair, Some(id));
                }
            }
            return Err(LendError::AllLent);
        }
        if self.waiting.is_some() && !is_below {
            return Err(LendError::AllLent);
        }
        self.numbers += 1;
        self.lent += 1;
        let new = || Borrower { leases: Vec::new(), renewed: now, taken_back: 0 };
        let borrower = self.borrowers.entry(id).or_insert_with(new);
        borrower.leases.push(Lease { number: self.numbers, state: State::Lent, taken_for: None });
        Ok(self.numbers)
    }

    /// A borrower gives a slab back.
    ///
    /// # Errors
    /// `UnknownSlab`.
    pub fn give_back(&mut self, id: Id, number: u64) -> Result<(), LendError> {
        let borrower = self.borrowers.get_mut(&id).ok_or(LendError::UnknownSlab)?;
        let place = borrower.leases.iter().position(|lease| lease.number == number).ok_or(LendError::UnknownSlab)?;
        let lease = borrower.leases.swap_remove(place);
        self.lent -= 1;
        if lease.state != State::Lent {
            borrower.taken_back += 1;
            self.taken_back += 1;
        }
        if borrower.leases.is_empty() {
            self.borrowers.remove(&id);
        }
        Ok(())
    }

    /// A borrower's session has ended, and its slabs are dropped.
    pub fn gone(&mut self, id: Id) {
        if let Some(borrower) = self.borrowers.remove(&id) {
            self.lent -= borrower.leases.len() as u64;
        }
    }

    /// A borrower renews its leases: those that are taken back, and how long until each closes.
    pub fn renew(&mut self, id: Id, now: Instant) -> Vec<(u64, Duration)> {
        let notice = self.ends.unwrap_or(now + TAKE_BACK_NOTICE).max(now);
        let Some(borrower) = self.borrowers.get_mut(&id) else { return Vec::new() };
        borrower.renewed = now;
        let mut taken = Vec::new();
        for lease in &mut borrower.leases {
            let closes = match lease.state {
                State::Lent => continue,
                State::Wanted => notice,
                State::Told(at) => at,
            };
            lease.state = State::Told(closes);
            taken.push((lease.number, closes - now));
        }
        taken
    }

    /// Takes so many bytes back, counting those that are taken back already; the borrower with the most gives first. Whether more than those
    /// are taken.
    pub fn take_back(&mut self, bytes: u64) -> bool {
        let wanted = bytes.div_ceil(self.limits.slab_bytes);
        let leases = self.borrowers.values().flat_map(|borrower| &borrower.leases);
        let under_way = leases.filter(|lease| lease.state != State::Lent).count() as u64;
        (under_way..wanted).take_while(|_| self.take_from_richest(0, None)).count() > 0
    }

    /// Leases no more, and takes all slabs back, by then at the latest. False if it was told so before.
    pub fn end(&mut self, at: Instant) -> bool {
        let is_new = self.ends.is_none();
        self.ends = self.ends.or(Some(at));
        let leases = self.borrowers.values_mut().flat_map(|borrower| &mut borrower.leases);
        leases.filter(|lease| lease.state == State::Lent).for_each(|lease| lease.state = State::Wanted);
        is_new
    }

    /// Takes a slab back from the borrower with the most, if it keeps at least so many; for another borrower, or for the lender.
    fn take_from_richest(&mut self, keeps: u64, taken_for: Option<Id>) -> bool {
        let kept =
            |borrower: &Borrower<Id>| borrower.leases.iter().filter(|lease| lease.state == State::Lent).count() as u64;
        let Some(richest) = self.borrowers.values_mut().max_by_key(|borrower| kept(borrower)) else { return false };
        if kept(richest) < keeps + 1 {
            return false;
        }
        let lasting = richest.leases.iter_mut().find(|lease| lease.state == State::Lent);
        lasting.map(|lease| (lease.state, lease.taken_for) = (State::Wanted, taken_for)).is_some()
    }

    /// Takes the leases out whose time is over, of the borrowers that `is_asked` names.
    pub fn expire(&mut self, now: Instant, is_asked: impl Fn(&Id) -> bool) -> Vec<(Id, u64)> {
        let mut over = Vec::new();
        let has_ended = self.ends.is_some_and(|at| now >= at);
        for (id, borrower) in self.borrowers.iter_mut().filter(|(id, _)| is_asked(id)) {
            let is_cut_off = now - borrower.renewed >= LEASE_KEEP_ALIVE && !seeded::is(Bug::LenderWaitsForEver);
            let is_over =
                |lease: &mut Lease<Id>| is_cut_off || has_ended || matches!(lease.state, State::Told(at) if now >= at);
            for lease in borrower.leases.extract_if(.., is_over) {
                over.push((*id, lease.number));
                if is_cut_off {
                    self.expired += 1;
                } else {
                    borrower.taken_back += 1;
                    self.taken_back += 1;
                }
            }
        }
        self.lent -= over.len() as u64;
        self.borrowers.retain(|_, borrower| !borrower.leases.is_empty());
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: LendingLimits = LendingLimits { slabs: 8, quota: 6, slab_bytes: 100 };
    const SECOND: Duration = Duration::from_secs(1);

    fn start() -> Instant {
        Instant::from_nanos(1)
    }

    #[test]
    fn a_borrower_that_is_cut_off_loses_its_slabs_when_its_time_is_over() {
        let (mut leases, start) = (Leases::new(LIMITS), start());
        let first = leases.lease('a', start).unwrap();
        leases.lease('b', start).unwrap();
        assert_eq!(leases.renew('b', start + 9 * SECOND), []);
        assert_eq!(leases.expire(start + 9 * SECOND, |_| true), []);
        let over = start + LEASE_KEEP_ALIVE;
        assert_eq!(leases.expire(over, |id| *id == 'b'), [], "it is another loop's");
        assert_eq!(leases.expire(over, |_| true), [('a', first)]);
        assert_eq!((leases.lent(), leases.ended_early()), (1, (0, 1)));
        assert_eq!(leases.give_back('a', first), Err(LendError::UnknownSlab));
    }

    #[test]
    fn a_slab_is_taken_back_after_its_borrower_was_told() {
        let (mut leases, start) = (Leases::new(LIMITS), start());
        let slabs: Vec<u64> = (0..4).map(|_| leases.lease('a', start).unwrap()).collect();
        leases.lease('b', start).unwrap();
        leases.take_back(150);
        leases.take_back(200);
        let told = start + 3 * SECOND;
        let both = [slabs[0], slabs[1]].map(|slab| (slab, TAKE_BACK_NOTICE));
        assert_eq!(leases.renew('a', told), both, "two, and from the borrower with the most");
        assert_eq!(leases.renew('b', told), []);
        leases.give_back('a', slabs[0]).unwrap();
        let end = told + TAKE_BACK_NOTICE;
        leases.take_back(200);
        let renewed = leases.renew('a', told + SECOND);
        let second = renewed.iter().find(|(slab, _)| *slab != slabs[1]).map_or(0, |(slab, _)| *slab);
        assert!(renewed.contains(&(slabs[1], Duration::from_secs(4))), "each has its own time: {renewed:?}");
        assert!(renewed.contains(&(second, TAKE_BACK_NOTICE)) && renewed.len() == 2, "{renewed:?}");
        assert_eq!(leases.expire(told + 4 * SECOND, |_| true), []);
        assert_eq!(leases.expire(end, |_| true), [('a', slabs[1])]);
        assert_eq!((leases.lent(), leases.ended_early()), (3, (2, 0)));
        assert_eq!(leases.expire(end + SECOND, |_| true), [('a', second)]);
    }

    #[test]
    fn a_lender_that_ends_leases_none_and_keeps_each_slab_until_its_borrower_gives_it_back_or_its_time_is_over() {
        let (mut leases, start) = (Leases::new(LIMITS), start());
        let [first, second] = [(); 2].map(|()| leases.lease('a', start).unwrap());
        leases.lease('b', start).unwrap();
        let end = start + 20 * SECOND;
        assert!(leases.end(end) && !leases.end(end + SECOND), "once");
        assert_eq!(leases.lease('b', start), Err(LendError::Ending));
        assert_eq!(leases.renew('a', start + SECOND), [first, second].map(|slab| (slab, 19 * SECOND)));
        leases.give_back('a', first).unwrap();
        assert_eq!(leases.renew('a', start + 11 * SECOND), [(second, 9 * SECOND)]);
        leases.renew('b', start + 19 * SECOND);
        assert_eq!(leases.expire(start + 19 * SECOND, |_| true), []);
        assert_eq!(leases.expire(end, |_| true).len(), 2);
        assert_eq!(leases.lent(), 0);
    }

    #[test]
    fn a_borrower_below_its_fair_share_gets_what_another_has_above() {
        let (mut leases, mut now) = (Leases::new(LendingLimits { quota: 8, ..LIMITS }), start());
        while leases.lease('a', now).is_ok() {}
        assert_eq!(leases.lent(), 8);
        for has in 0..4 {
            assert_eq!(leases.lease('b', now), Err(LendError::AllLent));
            let taken = leases.renew('a', now);
            assert_eq!(taken.len(), 1, "one slab for one that was asked for");
            leases.give_back('a', taken[0].0).unwrap();
            assert_eq!(leases.lease('a', now), Err(LendError::AllLent), "it is for the other");
            leases.lease('b', now).unwrap();
            assert_eq!(leases.shares().find(|share| share.id == 'b').map(|share| share.slabs), Some(has + 1));
            now = now + SECOND;
        }
        assert_eq!(leases.lease('b', now), Err(LendError::AllLent));
        assert_eq!(leases.renew('a', now), [], "both have half");
    }

    #[test]
    fn a_borrower_that_asks_again_and_again_is_waited_for_once() {
        let (mut leases, start) = (Leases::new(LendingLimits { quota: 8, ..LIMITS }), start());
        while leases.lease('a', start).is_ok() {}
        for _ in 0..10 {
            assert_eq!(leases.lease('b', start), Err(LendError::AllLent));
        }
        let taken = leases.renew('a', start);
        assert_eq!(taken.len(), 1, "one for the ten");
        assert_eq!(leases.lease('b', start + SECOND), Err(LendError::AllLent));
        let again: Vec<_> = leases.renew('a', start + SECOND).iter().map(|(number, _)| *number).collect();
        assert_eq!(again, [taken[0].0], "it is told of the same one");
    }

    #[test]
    fn a_borrower_keeps_its_fair_share_of_what_others_ask_for() {
        let (mut leases, start) = (Leases::new(LendingLimits { quota: 8, ..LIMITS }), start());
        leases.lease('b', start).unwrap();
        while leases.lease('a', start).is_ok() {}
        leases.take_back(300);
        assert_eq!(leases.lease('b', start), Err(LendError::AllLent));
        assert_eq!(leases.renew('a', start).len(), 3, "it keeps four, which is half");
    }

    #[test]
    fn a_quota_bounds_each_borrower() {
        let mut leases = Leases::new(LIMITS);
        for _ in 0..6 {
            leases.lease('a', start()).unwrap();
        }
        assert_eq!(leases.lease('a', start()), Err(LendError::TooMany));
        leases.gone('a');
        assert_eq!(leases.lent(), 0);
    }
}
