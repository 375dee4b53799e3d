//! Pages copied to lenders that miss them, in the background.

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::action::{Action, Failure, Lease};
use super::slab::Source;
use super::sum::Sum;
use super::{OpKind, Pool, get_action, lease_at};
use crate::memory::pager::Place;

/// A page on its way from one copy of its slab to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repair {
    pub(super) place: Place,
    to: Lease,
}

impl Pool {
    /// Begins as many copies as may be under way.
    pub(super) fn pump_repairs(&mut self, now: Instant) {
        while let Some(slot) = self.repairs.iter().position(Option::is_none) {
            let Some((place, to, source)) = self.next_repair() else { break };
            self.repairs[slot] = Some(Repair { place, to });
            let op = self.begin_at(OpKind::CopyGet(slot as u32, source), lease_at(source));
            self.expect_end(op, now);
            let frame = self.first_frame + slot as u32;
            self.actions.push_back(get_action(op, frame, place, source));
        }
    }

    /// A page that a copy misses, and where it can be got. Slabs without such pages are looked at no more.
    fn next_repair(&mut self) -> Option<(Place, Lease, Source)> {
        let numbers: Vec<u32> = self.damaged.iter().copied().collect();
        for number in numbers {
            let mut gone = Vec::new();
            let found = self.find_repair(number, &mut gone);
            if !gone.is_empty() {
                self.tell_copies_lost();
            }
            let slab = &mut self.slabs[number as usize];
            for page in gone {
                slab.gone.set(page, true);
                slab.copies.iter_mut().for_each(|copy| copy.missing.set(page, false));
            }
            if found.is_some() {
                return found;
            }
            if !slab.is_damaged() {
                self.damaged.remove(&number);
                self.release_leaving(number);
            }
        }
        None
    }

    fn find_repair(&self, number: u32, gone: &mut Vec<u32>) -> Option<(Place, Lease, Source)> {
        let slab = &self.slabs[number as usize];
        let is_copied = |place: Place| self.repairs.iter().flatten().any(|repair| repair.place == place);
        for copy in slab.copies.iter().filter(|copy| !copy.leaves) {
            for page in copy.missing.iter() {
                let place = Place::new(number, page);
                if self.puts.contains_key(&place) || is_copied(place) {
                    continue;
                }
                match self.source(place) {
                    Some(source) => return Some((place, copy.lease, source)),
                    None => gone.push(page),
                }
            }
        }
        None
    }

    pub(super) fn copy_got(&mut self, slot: u32, source: Source, result: Result<Sum, Failure>, now: Instant) {
        let Some(Repair { place, to }) = self.repairs[slot as usize] else { return };
        let is_good = self.check(place, source, result);
        let is_there = self.slabs[place.slab() as usize].copy_mut(to).is_some();
        if !is_good || !is_there {
            return self.end_repair(slot, place, now);
        }
        let op = self.begin_at(OpKind::CopyPut(slot), Some(to));
        self.expect_end(op, now);
        let page = if seeded::is(Bug::PoolCopyAtWrongPage) { place.index() ^ 1 } else { place.index() };
        self.actions.push_back(Action::Put(op, self.first_frame + slot, to, page));
    }

    pub(super) fn copy_put(&mut self, slot: u32, failed: bool, now: Instant) {
        let Some(Repair { place, to }) = self.repairs[slot as usize] else { return };
        if failed {
            self.drop_copy(place.slab(), to);
        } else if let Some(copy) = self.slabs[place.slab() as usize].copy_mut(to) {
            copy.missing.set(place.index(), false);
            self.counters.copied += 1;
        }
        self.end_repair(slot, place, now);
    }

    fn end_repair(&mut self, slot: u32, place: Place, now: Instant) {
        self.repairs[slot as usize] = None;
        let deferred = self.deferred.remove(&place).filter(|_| !seeded::is(Bug::PoolDeferredPutDropped));
        if let Some((frame, sum)) = deferred {
            self.begin_put(frame, place, sum, now);
        }
    }

    /// Gives back copies that their lender takes back, once others hold all of their pages.
    pub(super) fn release_leaving(&mut self, number: u32) {
        let slab = &mut self.slabs[number as usize];
        if slab.lasting() < self.class.copies() && !seeded::is(Bug::PoolReturnedBeforeMoved) {
            return;
        }
        let left: Vec<Lease> = slab.copies.extract_if(.., |copy| copy.leaves).map(|copy| copy.lease).collect();
        self.counters.moved += left.len() as u64;
        for lease in left {
            self.give_back(lease);
        }
    }
}
