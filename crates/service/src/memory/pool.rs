//! The places of pages, without a network: which lenders hold which slab, and what to do when one of them fails.
//!
//! The [`Pager`](super::pager::Pager) knows a page by its [`Place`]: a slab and a page of it. The pool keeps each slab at as
//! many lenders as its [`Class`] says. The driver performs the pool's [`Action`]s and passes the pool's messages to the
//! pager ([`Told`]). Time is an argument.
//!
//! - A put succeeds ([`PutEnd::Kept`]) only when as many copies hold the page as the class says. A put that reached fewer
//!   goes to another place.
//! - The pool remembers the checksum or the seal of each page that was put. A get that brings other bytes uses another copy, and the
//!   wrong copy is written again.
//! - A lender that is silent for [`LENDER_SILENCE_MAX`], or whose session ends, is given up: its *view* number increases,
//!   and every operation of an older view counts as failed, whatever it returns later. The next session with that lender
//!   begins without slabs.
//! - A lender that is silent for [`LENDER_SLOW`], with an operation under way, is used only for pages without another copy, and
//!   gets from it are repeated at another copy.
//! - A slab that a lender takes back is used until [`TAKE_BACK_MARGIN`] before it closes.
//! - A slab that has too few copies takes no new pages, and is copied to another lender in the background,
//!   [`POOL_COPIES_MAX`] pages at a time. The same copying empties a slab that its lender takes back.
//! - With a parity, pages are put and computed by rows, at five lenders (`pool/rows.rs`).
//! - A page that no copy holds is reported as lost. No other bytes are ever returned for it.

mod action;
mod leasing;
mod repair;
mod rows;
mod slab;
mod slow;
mod sum;

use std::collections::{BTreeSet, HashMap, VecDeque};

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

pub use self::action::{Action, Class, Failure, Lease, LenderState, Note, OpId, PoolCounters, Told};
use self::leasing::{Leasing, Lender};
use self::repair::Repair;
use self::rows::{Rows, group_of};
use self::slab::{Slab, Source};
pub use self::sum::{Seal, Sum};
use super::numbers::NumberMap;
use super::pager::{Place, PutEnd};
use crate::limits::POOL_COPIES_MAX;
#[cfg(doc)]
use crate::limits::{LENDER_SILENCE_MAX, LENDER_SLOW, TAKE_BACK_MARGIN};

/// An operation that is under way.
#[derive(Clone, Copy, Debug)]
struct Op {
    kind: OpKind,
    /// The lender, and its view when the operation began; `None`: the file.
    lender: Option<(usize, u32)>,
    /// The slab that it reads or writes.
    lease: Option<Lease>,
}

#[derive(Clone, Copy, Debug)]
enum OpKind {
    Connect,
    Renew,
    Lease,
    /// A part of a put; `None`: into the file.
    Put(Place, Option<Lease>),
    /// Into a frame.
    Get(u32, Place, Source),
    /// Of the copy in that slot.
    CopyGet(u32, Source),
    CopyPut(u32),
    /// A page for the row in that slot.
    RowGet(u32, Place, Source),
    /// The page that is computed there.
    RowSum(u32),
    /// A page of the row.
    RowPut(u32, Place, Lease),
}

/// A put that the pager asked for.
#[derive(Clone, Copy, Debug)]
struct Put {
    frame: u32,
    /// Parts under way.
    left: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Pool {
    class: Class,
    /// Places of a slab.
    places: u32,
    lenders: Vec<Lender>,
    slabs: Vec<Slab>,
    leasing: Leasing,
    ops: NumberMap<OpId, Op>,
    next_op: u32,
    /// Operations of sessions that were given up: they end when those sessions have closed, which takes seconds.
    abandoned: usize,
    puts: NumberMap<Place, Put>,
    /// Puts to places that are being copied: frame and checksum.
    deferred: HashMap<Place, (u32, Sum)>,
    /// Copies under way, by slot.
    repairs: Vec<Option<Repair>>,
    rows: Rows,
    /// Slabs of which a copy misses pages.
    damaged: BTreeSet<u32>,
    /// Slabs with too few copies.
    short: BTreeSet<u32>,
    /// Slabs of which no copy is left, with tables that what is under way may need still.
    lost: Vec<u32>,
    /// Slabs that lenders take back, until when they are used.
    leaving: HashMap<Lease, (u32, Instant)>,
    /// Slabs that are not used any more, and are given back when what is under way there has ended.
    returning: BTreeSet<Lease>,
    /// When each operation is slow if it has not ended, in order; and operations that have ended.
    slow_at: VecDeque<(Instant, OpId)>,
    /// Slabs are short or damaged, and the log has said why.
    is_mending: bool,
    /// The first frame of the pool's own, one for each copy under way.
    first_frame: u32,
    actions: VecDeque<Action>,
    told: VecDeque<Told>,
    notes: VecDeque<Note>,
    counters: PoolCounters,
}

impl Pool {
    /// A pool over lenders, of which `up` says whether each has a session, with so many places in each slab. Its own frames are
    /// `first_frame..first_frame + class.frames()`.
    pub fn new(class: Class, up: &[bool], places: u32, first_frame: u32, now: Instant) -> Self {
        Self {
            class,
            places: places - places % class.row(),
            lenders: up.iter().map(|up| Lender::new(*up, now)).collect(),
            slabs: Vec::new(),
            leasing: Leasing::default(),
            ops: NumberMap::default(),
            next_op: 0,
            abandoned: 0,
            puts: NumberMap::default(),
            deferred: HashMap::new(),
            repairs: (0..POOL_COPIES_MAX).map(|_| None).collect(),
            rows: Rows::new(class),
            damaged: BTreeSet::new(),
            short: BTreeSet::new(),
            lost: Vec::new(),
            leaving: HashMap::new(),
            returning: BTreeSet::new(),
            slow_at: VecDeque::new(),
            is_mending: false,
            first_frame,
            actions: VecDeque::new(),
            told: VecDeque::new(),
            notes: VecDeque::new(),
            counters: PoolCounters::default(),
        }
    }

    /// What the driver is to do next.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// What the pager is to hear next.
    pub fn next_told(&mut self) -> Option<Told> {
        self.told.pop_front()
    }

    /// What the log is to say next.
    pub fn next_note(&mut self) -> Option<Note> {
        self.notes.pop_front()
    }

    /// What it has done.
    pub fn counters(&self) -> PoolCounters {
        self.counters
    }

    /// The lenders, in the order in which [`Pool::new`] got them.
    pub fn lenders(&self) -> Vec<LenderState> {
        let state = |lender: &Lender| LenderState { is_up: lender.is_up(), ..LenderState::default() };
        let mut all: Vec<LenderState> = self.lenders.iter().map(state).collect();
        for (number, slab) in (0..).zip(&self.slabs) {
            for copy in &slab.copies {
                let lender = &mut all[copy.lease.lender];
                lender.leased += 1;
                lender.slabs.extend(self.slabs_of_pager(number));
            }
        }
        all
    }

    /// What each page relies on.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Whether every slab is at as many lenders as the class says, with all its pages, and nothing is under way but renewals.
    pub fn is_settled(&self) -> bool {
        let is_quiet = |op: &Op| matches!(op.kind, OpKind::Renew | OpKind::Connect);
        self.short.is_empty() && self.damaged.is_empty() && self.rows.is_idle() && self.ops.values().all(is_quiet)
    }

    /// Where a copy of a place lies; with parity, where the page of that column of its row lies.
    pub(super) fn lease_of(&self, place: Place, copy: usize) -> Option<Lease> {
        let slab = self.page_at(place).slab();
        let (slab, copy) =
            if self.class == Class::Parity { (group_of(slab).start + copy as u32, 0) } else { (slab, copy) };
        self.slabs.get(slab as usize)?.copies.get(copy).map(|copy| copy.lease)
    }

    /// Puts a frame, whose bytes have that sum, to a place. No other put to that place is under way.
    pub fn put(&mut self, frame: u32, place: Place, sum: Sum, now: Instant) {
        if self.class == Class::Parity {
            return self.put_in_row(frame, self.page_at(place), sum);
        }
        let is_copied = self.repairs.iter().flatten().any(|repair| repair.place == place);
        if is_copied && !seeded::is(Bug::PoolPutDuringCopy) {
            // A copy that ends after the put would bring the old version back.
            self.deferred.insert(place, (frame, sum));
        } else {
            self.begin_put(frame, place, sum, now);
        }
    }

    /// As [`Pool::put`], of bytes that were put to that place before. Nothing is sent: it tells whether the place still has them, in as
    /// many copies as the class says. If not, they go elsewhere, as gets from the place may be under way, and its lender may be slow.
    pub fn keep(&mut self, frame: u32, place: Place) {
        let place = self.page_at(place);
        let is_kept = self.put_end(place) == PutEnd::Kept || seeded::is(Bug::PoolKeepsTooFewCopies);
        self.told.push_back(Told::Put(frame, if is_kept { PutEnd::Kept } else { PutEnd::Elsewhere }));
    }

    fn begin_put(&mut self, frame: u32, place: Place, sum: Sum, now: Instant) {
        let slab = &mut self.slabs[place.slab() as usize];
        if slab.is_lost {
            return self.told.push_back(Told::Put(frame, PutEnd::Elsewhere));
        }
        slab.write(place.index(), sum);
        let mut leases: Vec<Lease> = slab.copies.iter().map(|copy| copy.lease).collect();
        if seeded::is(Bug::PoolPutToOneCopy) {
            leases.truncate(1);
            slab.copies.iter_mut().skip(1).for_each(|copy| copy.missing.set(place.index(), false));
        }
        self.puts.insert(place, Put { frame, left: leases.len() + usize::from(self.class == Class::Disk) });
        for lease in &leases {
            let op = self.begin_at(OpKind::Put(place, Some(*lease)), Some(*lease));
            self.expect_end(op, now);
            self.actions.push_back(Action::Put(op, frame, *lease, place.index()));
        }
        if self.class == Class::Disk {
            let op = self.begin(OpKind::Put(place, None), None);
            self.actions.push_back(Action::Write(op, frame, place));
        }
        if leases.is_empty() && self.class != Class::Disk {
            self.end_put(place);
        }
    }

    fn put_part_ended(&mut self, place: Place, lease: Option<Lease>, failed: bool) {
        let slab = &mut self.slabs[place.slab() as usize];
        match lease {
            Some(lease) if !failed => {
                if let Some(copy) = slab.copy_mut(lease) {
                    copy.missing.set(place.index(), false);
                }
            }
            // It may hold the old version or the new one.
            Some(lease) => self.drop_copy(place.slab(), lease),
            None => slab.in_file.set(place.index(), !failed),
        }
        let Some(put) = self.puts.get_mut(&place) else { return };
        put.left -= 1;
        if put.left == 0 {
            self.end_put(place);
        }
    }

    fn end_put(&mut self, place: Place) {
        let Some(put) = self.puts.remove(&place) else { return };
        self.told.push_back(Told::Put(put.frame, self.put_end(place)));
    }

    /// What the copies of a place amount to.
    fn put_end(&self, place: Place) -> PutEnd {
        let slab = &self.slabs[place.slab() as usize];
        match self.class {
            Class::Disk if !slab.in_file.has(place.index()) => PutEnd::Refused,
            Class::Disk => PutEnd::Kept,
            // No copy misses a page that is gone.
            _ if !slab.is_used(place.index()) && !seeded::is(Bug::PoolKeepsGonePages) => PutEnd::Elsewhere,
            Class::Parity if !self.is_row_whole(place) => PutEnd::Elsewhere,
            class if slab.holders(place.index()) >= class.copies() => PutEnd::Kept,
            _ => PutEnd::Elsewhere,
        }
    }

    /// Gets a place into a frame. No put to that place is under way.
    pub fn get(&mut self, frame: u32, place: Place, now: Instant) {
        self.get_page(frame, self.page_at(place), now);
    }

    fn get_page(&mut self, frame: u32, page: Place, now: Instant) {
        match self.source(page) {
            source if self.class == Class::Parity && source.is_none_or(|source| self.is_slow_source(source)) => {
                self.get_by_row(frame, page, now);
            }
            Some(source) => self.get_from(frame, page, source, now),
            None => self.lose_get(frame),
        }
    }

    fn get_from(&mut self, frame: u32, page: Place, source: Source, now: Instant) {
        let op = self.begin_at(OpKind::Get(frame, page, source), lease_at(source));
        self.expect_end(op, now);
        self.actions.push_back(get_action(op, frame, page, source));
    }

    fn end_get(&mut self, frame: u32, page: Place) {
        self.told.push_back(Told::Got(frame, true));
        if !self.has_page(page) {
            self.tell_copies_lost();
        }
    }

    fn lose_get(&mut self, frame: u32) {
        self.counters.lost += 1;
        self.told.push_back(Told::Got(frame, false));
    }

    /// By what the bytes are known that an operation under way gets.
    pub fn expected(&self, op: OpId) -> Option<Sum> {
        let place = match self.ops.get(&op)?.kind {
            OpKind::Get(_, place, _) => place,
            OpKind::CopyGet(slot, _) => self.repairs[slot as usize]?.place,
            OpKind::RowGet(_, page, _) => page,
            OpKind::RowSum(slot) => return self.expected_of_row(slot),
            _ => return None,
        };
        Some(self.slabs[place.slab() as usize].sum(place.index()))
    }

    /// A put, get, write or read has ended. Of a get or read it brings the sum of the bytes in the frame.
    pub fn ended(&mut self, op: OpId, result: Result<Sum, Failure>, now: Instant) {
        let Some(Op { kind, lender, lease }) = self.take_op(op) else { return };
        if let Some(lease) = lease.filter(|lease| self.returning.remove(lease)) {
            self.give_back(lease);
        }
        let result = match lender {
            // The lender was given up meanwhile.
            Some((lender, view)) if self.lenders[lender].view != view => Err(Failure::Gone),
            Some((lender, _)) if result == Err(Failure::Gone) => {
                self.give_up(lender, false, now);
                result
            }
            Some((lender, _)) => {
                if result.is_ok() {
                    self.heard_of(lender, now);
                }
                result
            }
            None => result,
        };
        match kind {
            OpKind::Put(place, lease) => self.put_part_ended(place, lease, result.is_err()),
            OpKind::Get(frame, place, source) => {
                if self.check(place, source, result) {
                    self.end_get(frame, place);
                } else if seeded::is(Bug::PoolNoOtherCopy) {
                    self.told.push_back(Told::Got(frame, false));
                } else {
                    self.counters.failed_over += 1;
                    self.get_page(frame, place, now);
                }
            }
            OpKind::CopyGet(slot, source) => self.copy_got(slot, source, result, now),
            OpKind::CopyPut(slot) => self.copy_put(slot, result.is_err(), now),
            OpKind::RowGet(slot, page, source) => self.row_got(slot, page, source, result),
            OpKind::RowSum(slot) => self.row_computed(slot, result, now),
            OpKind::RowPut(slot, page, to) => self.row_put(slot, page, to, result.is_err()),
            OpKind::Connect | OpKind::Renew | OpKind::Lease => {}
        }
        self.pump(now);
    }

    /// Whether a get brought the bytes that were put last. Where it did not, its source is not used for that page again.
    fn check(&mut self, place: Place, source: Source, result: Result<Sum, Failure>) -> bool {
        let (number, page) = (place.slab(), place.index());
        let slab = &mut self.slabs[number as usize];
        match (result, source) {
            (Ok(sum), _) if sum == slab.sum(page) || seeded::is(Bug::PoolChecksumIgnored) => return true,
            (Ok(_), Source::Lease(lease)) => {
                self.counters.corrupt += 1;
                self.notes.push_back(Note::Corrupt(lease.lender));
                if let Some(copy) = slab.copy_mut(lease) {
                    copy.missing.set(page, true);
                    self.damaged.insert(number);
                }
                self.tell_copies_lost();
            }
            (Err(_), Source::Lease(lease)) => self.drop_copy(number, lease),
            (result, Source::File) => {
                slab.in_file.set(page, false);
                if result.is_ok() {
                    self.counters.corrupt += 1;
                    self.notes.push_back(Note::CorruptFile);
                }
            }
        }
        false
    }

    /// Forgets one copy of a slab.
    fn drop_copy(&mut self, number: u32, lease: Lease) {
        let slab = &mut self.slabs[number as usize];
        let before = slab.copies.len();
        slab.copies.retain(|copy| copy.lease != lease);
        if slab.copies.len() < before {
            self.give_back(lease);
            self.weigh(number);
            self.tell_copies_lost();
        }
    }

    fn tell_copies_lost(&mut self) {
        if self.told.back() != Some(&Told::CopiesLost) {
            self.told.push_back(Told::CopiesLost);
        }
    }

    /// Gives a slab back, once nothing is under way there: over RDMA a session ends when its peer closes a window that is in use.
    fn give_back(&mut self, lease: Lease) {
        if self.ops.values().any(|op| op.lease == Some(lease)) {
            self.returning.insert(lease);
        } else {
            self.actions.push_back(Action::Return(lease));
        }
    }

    /// Whether what lies at a place can be got, as far as is known.
    pub fn has(&self, place: Place) -> bool {
        self.has_page(self.page_at(place)) || seeded::is(Bug::PoolClaimsLostPages)
    }

    fn has_page(&self, page: Place) -> bool {
        self.source(page).is_some() || self.can_compute(page)
    }

    fn source(&self, place: Place) -> Option<Source> {
        self.slabs[place.slab() as usize].source(place.index(), |lender| self.lenders[lender].is_slow)
    }

    /// Notes whether a slab has copies enough, and tells the pager whether it takes new pages, or is lost.
    fn weigh(&mut self, number: u32) {
        let slab = &mut self.slabs[number as usize];
        let is_short = slab.lasting() < self.class.copies();
        self.leasing.is_due |= is_short;
        if is_short && !slab.is_lost {
            self.short.insert(number);
        } else {
            self.short.remove(&number);
        }
        if self.class == Class::Disk || slab.is_lost {
            return;
        }
        if self.class == Class::Parity {
            return self.weigh_group(number);
        }
        if slab.copies.is_empty() {
            slab.is_lost = true;
            self.lost.push(number);
            self.short.remove(&number);
            self.damaged.remove(&number);
            self.told.push_back(Told::Lost(number));
        } else if std::mem::replace(&mut slab.rests, is_short) != is_short {
            self.told.push_back(Told::Rests(number, is_short));
        }
    }

    /// Does what can be done now, as time passes: to be called when [`Pool::next_tick`] has come.
    pub fn tick(&mut self, now: Instant) {
        self.watch_lenders(now);
        self.watch_slow(now);
        self.watch_leaving(now);
        self.free_lost();
        self.leasing.is_due = true;
        self.pump(now);
    }

    /// Frees the tables of lost slabs where nothing is under way any more.
    fn free_lost(&mut self) {
        let is_used = |number: u32| {
            let places = self.puts.keys().chain(self.deferred.keys());
            let mut places = places.chain(self.repairs.iter().flatten().map(|repair| &repair.place));
            let gets = |op: &Op| matches!(op.kind, OpKind::Get(_, place, _) if place.slab() == number);
            places.any(|place| place.slab() == number) || self.ops.values().any(gets)
        };
        let (used, free) =
            std::mem::take(&mut self.lost).into_iter().partition::<Vec<u32>, _>(|number| is_used(*number));
        self.lost = used;
        for number in free {
            self.slabs[number as usize].free_tables();
        }
    }

    fn pump(&mut self, now: Instant) {
        self.pump_leases(now);
        if self.class == Class::Parity {
            self.pump_rows(now);
        } else {
            self.pump_repairs(now);
        }
        if self.is_mending && self.short.is_empty() && self.damaged.is_empty() {
            self.is_mending = false;
            self.notes.push_back(Note::Whole);
        }
    }

    /// Begins an operation that reads or writes a slab; without one, the file.
    fn begin_at(&mut self, kind: OpKind, lease: Option<Lease>) -> OpId {
        let op = self.begin(kind, lease.map(|lease| lease.lender));
        if let Some(op) = self.ops.get_mut(&op) {
            op.lease = lease;
        }
        op
    }

    /// An operation has ended.
    fn take_op(&mut self, op: OpId) -> Option<Op> {
        let op = self.ops.remove(&op)?;
        self.abandoned -= usize::from(op.lender.is_some_and(|(lender, view)| self.lenders[lender].view != view));
        Some(op)
    }

    fn begin(&mut self, kind: OpKind, lender: Option<usize>) -> OpId {
        let op = OpId(self.next_op);
        self.next_op = self.next_op.wrapping_add(1);
        let lender = lender.map(|lender| (lender, self.lenders[lender].view));
        self.ops.insert(op, Op { kind, lender, lease: None });
        op
    }
}

/// Where a lender has it; `None`: in the file.
fn lease_at(source: Source) -> Option<Lease> {
    match source {
        Source::Lease(lease) => Some(lease),
        Source::File => None,
    }
}

fn get_action(op: OpId, frame: u32, place: Place, source: Source) -> Action {
    match source {
        Source::Lease(lease) => Action::Get(op, frame, lease, place.index()),
        Source::File => Action::Read(op, frame, place),
    }
}

#[cfg(test)]
mod tests;
