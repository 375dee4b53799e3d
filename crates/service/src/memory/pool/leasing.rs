//! The lenders: which can be used, which slab is to be leased where, and when one is given up.

use std::time::Duration;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::action::{Action, Class, Failure, Lease, Note, OpId, Told};
use super::rows::{COLUMNS, ROW_PAGES, group_of};
use super::slab::Slab;
use super::{OpKind, Pool};
use crate::limits::{LENDER_PAUSE, LENDER_SILENCE_MAX, RENEW_EVERY, TAKE_BACK_MARGIN};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has a session.
    Up,
    /// A session is being opened.
    Connecting,
    /// It is tried again then.
    Down(Instant),
}

#[derive(Debug)]
pub(super) struct Lender {
    /// Goes up each time the lender is given up.
    pub(super) view: u32,
    state: State,
    /// When a renewal that was not answered was sent, or when the next is to be sent.
    renewing: Result<Instant, Instant>,
    /// It had no slab: it is asked again then.
    refused_until: Option<Instant>,
    /// It has left an operation unanswered for [`LENDER_SLOW`](crate::limits::LENDER_SLOW), and has answered none meanwhile.
    pub(super) is_slow: bool,
    /// When it last answered an operation.
    pub(super) heard: Instant,
}

/// Slabs that are wanted. One lease is under way at a time.
#[derive(Debug, Default)]
pub(super) struct Leasing {
    /// The pager wants a slab.
    wanted: bool,
    /// Copies of that slab that are leased.
    got: Vec<Lease>,
    asked: Option<(OpId, Purpose)>,
    /// A lease may be asked for that could not be before.
    pub(super) is_due: bool,
}

#[derive(Clone, Copy, Debug)]
enum Purpose {
    New,
    /// Another copy of that slab.
    Replace(u32),
}

impl Lender {
    pub(super) fn new(is_up: bool, now: Instant) -> Self {
        let state = if is_up { State::Up } else { State::Down(now) };
        Self { view: 0, state, renewing: Err(now + RENEW_EVERY), refused_until: None, is_slow: false, heard: now }
    }

    pub(super) fn is_up(&self) -> bool {
        self.state == State::Up
    }

    fn next_look(&self) -> Option<Instant> {
        match (self.state, self.renewing) {
            (State::Up, Ok(sent)) => Some(sent + LENDER_SILENCE_MAX),
            (State::Up, Err(next)) => Some(next),
            (State::Down(until), _) => Some(until),
            (State::Connecting, _) => None,
        }
    }
}

impl Pool {
    /// The pager wants another slab: [`Told::Slab`] or [`Told::NoSlab`].
    pub fn want_slab(&mut self, now: Instant) {
        (self.leasing.wanted, self.leasing.is_due) = (true, true);
        self.pump_leases(now);
    }

    /// When [`Pool::tick`] has something to do at the latest.
    pub fn next_tick(&self) -> Option<Instant> {
        let pauses = self.lenders.iter().filter_map(|lender| lender.refused_until);
        let ends = self.leaving.values().map(|(_, until)| *until);
        self.lenders.iter().filter_map(Lender::next_look).chain(pauses).chain(ends).chain(self.next_slow()).min()
    }

    pub(super) fn watch_lenders(&mut self, now: Instant) {
        for index in 0..self.lenders.len() {
            let lender = &mut self.lenders[index];
            lender.refused_until = lender.refused_until.filter(|until| *until > now);
            match (lender.state, lender.renewing) {
                (State::Up, Ok(sent)) if now - sent >= LENDER_SILENCE_MAX => {
                    self.give_up(index, true, now);
                }
                (State::Up, Err(next)) if now >= next => {
                    lender.renewing = Ok(now);
                    let op = self.begin(OpKind::Renew, Some(index));
                    self.expect_end(op, now);
                    self.actions.push_back(Action::Renew(op, index));
                }
                (State::Down(until), _) if now >= until => {
                    lender.state = State::Connecting;
                    let op = self.begin(OpKind::Connect, Some(index));
                    self.actions.push_back(Action::Connect(op, index));
                }
                _ => {}
            }
        }
    }

    /// Uses nothing of a lender any more.
    pub(super) fn give_up(&mut self, index: usize, silent: bool, now: Instant) {
        let lender = &mut self.lenders[index];
        if lender.state != State::Up {
            return;
        }
        self.abandoned += self.ops.values().filter(|op| op.lender == Some((index, lender.view))).count();
        lender.view += 1;
        lender.is_slow = false;
        lender.state = State::Down(now + LENDER_PAUSE);
        self.counters.given_up += 1;
        self.actions.push_back(Action::Close(index));
        self.leasing.got.retain(|lease| lease.lender != index);
        self.leaving.retain(|lease, _| lease.lender != index);
        self.returning.retain(|lease| lease.lender != index);
        let mut slabs = 0;
        for number in 0..self.slabs.len() as u32 {
            let slab = &mut self.slabs[number as usize];
            let before = slab.copies.len();
            if !seeded::is(Bug::PoolCopiesOfTheDead) {
                slab.copies.retain(|copy| copy.lease.lender != index);
            }
            if slab.copies.len() < before {
                slabs += 1;
                self.weigh(number);
            }
        }
        if slabs > 0 {
            self.is_mending = true;
            self.tell_copies_lost();
        }
        self.leasing.is_due = true;
        self.notes.push_back(Note::GivenUp { lender: index, slabs, silent });
    }

    /// A session was opened, or not.
    pub fn connected(&mut self, op: OpId, well: bool, now: Instant) {
        let Some((index, _)) = self.take_op(op).and_then(|op| op.lender) else { return };
        let lender = &mut self.lenders[index];
        if well {
            (lender.state, lender.heard) = (State::Up, now);
            (lender.renewing, lender.refused_until) = (Err(now + RENEW_EVERY), None);
            self.notes.push_back(Note::Back(index));
        } else {
            lender.state = State::Down(now + LENDER_PAUSE);
        }
        self.leasing.is_due = true;
        self.pump(now);
    }

    /// A lender has answered a renewal: which slabs it takes back, and how long after its answer each closes.
    pub fn renewed(&mut self, op: OpId, result: Result<Vec<(u64, Duration)>, Failure>, now: Instant) {
        let Some((index, view)) = self.take_op(op).and_then(|op| op.lender) else { return };
        if self.lenders[index].view != view {
            return;
        }
        let Ok(mut taken) = result else { return self.give_up(index, false, now) };
        if seeded::is(Bug::PoolTakeBackIgnored) {
            taken.clear();
        }
        // The lender's answer came after the question: so the slab closes later than this reckons.
        let asked = self.lenders[index].renewing.unwrap_or(now);
        self.lenders[index].renewing = Err(now + RENEW_EVERY);
        self.heard_of(index, now);
        let mut moved = 0;
        for number in 0..self.slabs.len() as u32 {
            let slab = &mut self.slabs[number as usize];
            let mut is_taken = false;
            for copy in slab.copies.iter_mut().filter(|copy| !copy.leaves && copy.lease.lender == index) {
                if let Some((_, within)) = taken.iter().find(|(number, _)| *number == copy.lease.number) {
                    (copy.leaves, is_taken) = (true, true);
                    let until = asked + within.saturating_sub(TAKE_BACK_MARGIN);
                    self.leaving.insert(copy.lease, (number, until));
                }
            }
            if is_taken {
                moved += 1;
                self.weigh(number);
                if seeded::is(Bug::PoolReturnedBeforeMoved) {
                    self.release_leaving(number);
                }
            }
        }
        if moved > 0 {
            // It is short of memory: it is no place to move to.
            self.lenders[index].refused_until = Some(now + LENDER_SILENCE_MAX);
            self.is_mending = true;
            self.notes.push_back(Note::TakesBack(index, moved));
        }
        self.pump(now);
    }

    /// A slab was leased, or not.
    pub fn leased(&mut self, op: OpId, result: Result<u64, Failure>, now: Instant) {
        let Some((index, view)) = self.take_op(op).and_then(|op| op.lender) else { return };
        let purpose = self.leasing.asked.take_if(|(asked, _)| *asked == op).map(|(_, purpose)| purpose);
        let is_old = self.lenders[index].view != view;
        if result.is_ok() && !is_old {
            self.heard_of(index, now);
        }
        match (result, purpose) {
            (Ok(_), _) if is_old => {}
            (Ok(number), Some(purpose)) => self.use_lease(Lease { lender: index, view, number }, purpose),
            (Ok(number), None) => self.use_late_lease(Lease { lender: index, view, number }),
            (Err(Failure::Gone), _) if !is_old => self.give_up(index, false, now),
            _ => self.lenders[index].refused_until = Some(now + LENDER_PAUSE),
        }
        self.leasing.is_due = true;
        self.pump(now);
    }

    /// A lease that took long, in whose place another was asked for: it is used if a slab is wanted still.
    fn use_late_lease(&mut self, lease: Lease) {
        let is_of_use = self.leasing.wanted && self.leasing.got.iter().all(|got| got.lender != lease.lender);
        if is_of_use && self.leasing.asked.is_none() {
            self.use_lease(lease, Purpose::New);
        } else {
            self.actions.push_back(Action::Return(lease));
        }
    }

    /// A lender leaves a lease unanswered: the slab may be had of another.
    pub(super) fn ask_another(&mut self, op: OpId) {
        if self.leasing.asked.take_if(|(asked, _)| *asked == op).is_some() {
            self.leasing.is_due = true;
        }
    }

    fn use_lease(&mut self, lease: Lease, purpose: Purpose) {
        match purpose {
            Purpose::New => {
                self.leasing.got.push(lease);
                if self.leasing.got.len() >= self.class.lenders() {
                    let leases = std::mem::take(&mut self.leasing.got);
                    self.leasing.wanted = false;
                    self.add_slabs(leases);
                }
            }
            Purpose::Replace(number) => {
                let slab = &mut self.slabs[number as usize];
                if slab.is_lost {
                    return self.actions.push_back(Action::Return(lease));
                }
                slab.add(lease);
                if seeded::is(Bug::PoolCopyTakenForWhole) {
                    slab.copies.last_mut().expect("it was added").missing = super::slab::Pages::none(self.places);
                }
                self.damaged.insert(number);
                self.weigh(number);
            }
        }
    }

    /// All leases that a new slab needs are there; or a group of slabs.
    fn add_slabs(&mut self, mut leases: Vec<Lease>) {
        if self.class != Class::Parity {
            self.slabs.push(Slab::new(self.places, &leases));
            return self.told.push_back(Told::Slab(self.places));
        }
        // Each lender has the parity of some groups.
        leases.rotate_left(self.slabs.len() / COLUMNS as usize % COLUMNS as usize);
        self.slabs.extend(leases.into_iter().map(|lease| Slab::new(self.places, &[lease])));
        (0..ROW_PAGES).for_each(|_| self.told.push_back(Told::Slab(self.places)));
    }

    pub(super) fn pump_leases(&mut self, now: Instant) {
        if self.leasing.asked.is_some() || !std::mem::take(&mut self.leasing.is_due) {
            return;
        }
        let replaced = self.short.iter().find_map(|number| Some((*number, self.choose_for(*number, now)?)));
        if let Some((number, lender)) = replaced {
            return self.ask_lease(lender, Purpose::Replace(number), now);
        }
        if !self.leasing.wanted {
            return;
        }
        let mut holders: Vec<usize> = self.leasing.got.iter().map(|lease| lease.lender).collect();
        if seeded::is(Bug::PoolMirrorsAtOneLender) {
            holders.clear();
        }
        if let Some(lender) = self.choose(&holders, now) {
            return self.ask_lease(lender, Purpose::New, now);
        }
        self.leasing.wanted = false;
        let got = std::mem::take(&mut self.leasing.got);
        self.actions.extend(got.into_iter().map(Action::Return));
        self.told.push_back(Told::NoSlab);
    }

    fn ask_lease(&mut self, lender: usize, purpose: Purpose, now: Instant) {
        let op = self.begin(OpKind::Lease, Some(lender));
        self.leasing.asked = Some((op, purpose));
        self.expect_end(op, now);
        self.actions.push_back(Action::Lease(op, lender));
    }

    /// A lender for another copy of a slab: one without a copy, or else one that takes its copy back. That one may have
    /// memory again when the others are full.
    fn choose_for(&self, number: u32, now: Instant) -> Option<usize> {
        let copies = &self.slabs[number as usize].copies;
        let all: Vec<usize> = copies.iter().map(|copy| copy.lease.lender).collect();
        let lasting: Vec<usize> = copies.iter().filter(|copy| !copy.leaves).map(|copy| copy.lease.lender).collect();
        let mut row = Vec::new();
        if self.class == Class::Parity && !seeded::is(Bug::PoolRowAtOneLender) {
            let group = group_of(number).filter(|other| *other != number);
            let others = group.flat_map(|other| &self.slabs[other as usize].copies);
            row.extend(others.map(|copy| copy.lease.lender));
        }
        let without = |own: Vec<usize>| self.choose(&[own, row.clone()].concat(), now);
        without(all).or_else(|| without(lasting))
    }

    /// The lender with the fewest slabs, of those that can be asked and are not in the list.
    fn choose(&self, without: &[usize], now: Instant) -> Option<usize> {
        let can = |index: &usize| {
            let lender = &self.lenders[*index];
            lender.state == State::Up
                && !lender.is_slow
                && lender.refused_until.is_none_or(|until| until <= now)
                && !without.contains(index)
        };
        let copies = |index: usize| {
            let copies = self.slabs.iter().flat_map(|slab| &slab.copies);
            copies.filter(|copy| copy.lease.lender == index).count()
        };
        (0..self.lenders.len()).filter(can).min_by_key(|index| copies(*index))
    }

    /// Lenders that have a session.
    pub fn lenders_up(&self) -> usize {
        self.lenders.iter().filter(|lender| lender.state == State::Up).count()
    }
}
