//! Parity (`--class parity=4+1`): rows of four pages and their parity, at five lenders.
//!
//! Five slabs, each at a lender of its own, are a *group*. A *row* is the page of one number in all five: four pages of the pager, and
//! in the last slab their parity (exclusive or). Any page of a row is the exclusive or of the others.
//!
//! - A *job* that writes a row, or reads several of its pages, locks it. Jobs of one row follow one another.
//! - An update gets the pages of the row that stay, and computes the parity of the row as it is to be. It trusts no parity that lies at a
//!   lender. Only then are pages and parity put. A lender that fails before leaves the row as it was. One that fails during the puts
//!   misses its new page, and the new pages of the four others give it.
//! - A put has ended well when all five lenders have their pages of the row.
//! - Puts to a row that are asked for together are one update. The pager takes places by whole rows while it has such: nothing is read.
//! - A page whose lender is gone is computed for each get, until its slab's next lease has it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::mem::discriminant;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::action::{Action, Class, Failure, Lease, Note, Told};
use super::slab::Source;
use super::sum::Sum;
use super::{OpKind, Pool, get_action};
use crate::limits::{POOL_COPIES_MAX, POOL_ROW_GETS_MAX, POOL_ROW_UPDATES_MAX, POOL_ROWS_MAX};
use crate::memory::pager::{Place, PutEnd};

/// Pages of a row that are the pager's.
pub(super) const ROW_PAGES: u32 = 4;

/// Slabs of a group. The last has the parity.
pub(super) const COLUMNS: u32 = ROW_PAGES + 1;

const PARITY: u32 = ROW_PAGES;

/// Pages of a row that are got, by column, and where from.
type Reads = Vec<(u32, Lease)>;

/// A page that is to be put.
#[derive(Clone, Copy, Debug)]
struct RowPut {
    column: u32,
    frame: u32,
    sum: Sum,
}

#[derive(Clone, Debug)]
enum Work {
    /// Pages are put.
    Update(Vec<RowPut>),
    /// The page of a column comes into a frame of the pager.
    Get(u32, u32),
    /// The page of a column goes to a copy that misses it.
    Rebuild(u32, Lease),
}

#[derive(Debug)]
struct Job {
    row: Place,
    work: Work,
    /// Frames that pages of the row are got into.
    read: Vec<u32>,
    /// Operations under way.
    left: usize,
    failed: bool,
}

/// Rows under way. A row is named by its page of its group's first slab.
#[derive(Debug)]
pub(super) struct Rows {
    /// By slot; each slot has [`ROW_PAGES`] frames.
    jobs: Vec<Option<Job>>,
    locked: HashSet<Place>,
    /// Puts that have not begun.
    puts: BTreeMap<Place, Vec<RowPut>>,
    /// Gets of pages that are to be computed: frame and place.
    gets: VecDeque<(u32, Place)>,
}

impl Rows {
    pub(super) fn new(class: Class) -> Self {
        let slots = if class == Class::Parity { POOL_ROWS_MAX } else { 0 };
        let jobs = (0..slots).map(|_| None).collect();
        Self { jobs, locked: HashSet::new(), puts: BTreeMap::new(), gets: VecDeque::new() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.locked.is_empty() && self.puts.is_empty() && self.gets.is_empty()
    }

    fn free_slot(&self) -> Option<usize> {
        self.jobs.iter().position(Option::is_none)
    }

    /// Whether one more job of that kind may begin. All kinds together find slots.
    fn has_room(&self, work: &Work) -> bool {
        let max = match work {
            Work::Update(_) => POOL_ROW_UPDATES_MAX,
            Work::Get(..) => POOL_ROW_GETS_MAX,
            Work::Rebuild(..) => POOL_COPIES_MAX,
        };
        let kind = discriminant(work);
        self.jobs.iter().flatten().filter(|job| discriminant(&job.work) == kind).count() < max
    }
}

/// The slabs of a slab's group.
pub(super) fn group_of(number: u32) -> std::ops::Range<u32> {
    let first = number - number % COLUMNS;
    first..first + COLUMNS
}

/// The row of a page, and its column there.
fn row_of(page: Place) -> (Place, u32) {
    let column = page.slab() % COLUMNS;
    (Place::new(page.slab() - column, page.index()), column)
}

fn page_of(row: Place, column: u32) -> Place {
    Place::new(row.slab() + column, row.index())
}

impl Pool {
    /// The page of a slab that a place of the pager is. Four places in a row are the four pages of a row.
    pub(in crate::memory) fn page_at(&self, place: Place) -> Place {
        if self.class != Class::Parity {
            return place;
        }
        let (group, quarter) = (place.slab() / ROW_PAGES, place.slab() % ROW_PAGES);
        let (row, column) = (place.index() / ROW_PAGES, place.index() % ROW_PAGES);
        Place::new(group * COLUMNS + column, quarter * (self.places / ROW_PAGES) + row)
    }

    /// The pager's slabs that a slab has a part of.
    pub(super) fn slabs_of_pager(&self, number: u32) -> std::ops::Range<u32> {
        let first = number / COLUMNS * ROW_PAGES;
        if self.class == Class::Parity { first..first + ROW_PAGES } else { number..number + 1 }
    }

    /// Tells the pager whether a group takes no new pages: one of its slabs has no lasting copy.
    pub(super) fn weigh_group(&mut self, number: u32) {
        let group = group_of(number);
        let rests = group.clone().any(|number| self.slabs[number as usize].lasting() == 0);
        if std::mem::replace(&mut self.slabs[group.start as usize].rests, rests) != rests {
            self.told.extend(self.slabs_of_pager(number).map(|slab| Told::Rests(slab, rests)));
        }
    }

    pub(super) fn put_in_row(&mut self, frame: u32, page: Place, sum: Sum) {
        let (row, column) = row_of(page);
        self.rows.puts.entry(row).or_default().push(RowPut { column, frame, sum });
    }

    pub(super) fn get_by_row(&mut self, frame: u32, page: Place, now: Instant) {
        self.rows.gets.push_back((frame, page));
        self.begin_row_gets(now);
    }

    /// Begins the updates of rows that were gathered: to be called when no more puts come for now.
    pub fn flush_rows(&mut self, now: Instant) {
        self.pump_rows(now);
    }

    /// Begins as many jobs as may be under way.
    pub(super) fn pump_rows(&mut self, now: Instant) {
        self.begin_row_gets(now);
        self.begin_updates(now);
        while let Some((row, work, reads)) = self.next_rebuild() {
            if !self.rows.has_room(&work) {
                return;
            }
            self.begin_row(row, work, &reads, now);
        }
    }

    /// The row's pages from which the page of a column is computed, and where they are; `None` if one of them is nowhere.
    fn others(&self, row: Place, column: u32) -> Option<Reads> {
        let needed = |other: &u32| {
            let is_parity = *other == PARITY;
            *other != column && (is_parity || self.slab_of(row, *other).is_used(row.index()))
        };
        (0..COLUMNS).filter(needed).map(|other| Some((other, self.holder(row, other)?))).collect()
    }

    /// A lender that has the page of a column, a slow one only where no other has it.
    fn holder(&self, row: Place, column: u32) -> Option<Lease> {
        match self.source(page_of(row, column))? {
            Source::Lease(lease) => Some(lease),
            Source::File => None,
        }
    }

    fn slab_of(&self, row: Place, column: u32) -> &super::Slab {
        &self.slabs[(row.slab() + column) as usize]
    }

    /// Whether a page can be computed without a slow lender.
    pub(super) fn is_quick_by_row(&self, page: Place) -> bool {
        let (row, column) = row_of(page);
        let others = if self.class == Class::Parity { self.others(row, column) } else { None };
        others.is_some_and(|others| others.iter().all(|(_, lease)| !self.lenders[lease.lender].is_slow))
    }

    /// Whether a page can be computed, perhaps with a slow lender.
    pub(super) fn can_compute(&self, page: Place) -> bool {
        let (row, column) = row_of(page);
        self.class == Class::Parity
            && self.slab_of(row, column).is_used(row.index())
            && self.others(row, column).is_some()
    }

    /// Whether all lenders of a row have their pages of it.
    pub(super) fn is_row_whole(&self, page: Place) -> bool {
        let (row, _) = row_of(page);
        (0..COLUMNS).all(|column| {
            let slab = self.slab_of(row, column);
            !slab.is_used(row.index()) || slab.holders(row.index()) > 0
        })
    }

    /// Whether a page of a row can be put nowhere.
    fn is_row_short(&self, row: Place) -> bool {
        (0..COLUMNS).any(|column| self.slab_of(row, column).copies.is_empty())
    }

    /// Whether a row is not to be read now.
    fn is_locked(&self, row: Place) -> bool {
        self.rows.locked.contains(&row) && !seeded::is(Bug::PoolReadsLockedRow)
    }

    fn begin_row_gets(&mut self, now: Instant) {
        for _ in 0..self.rows.gets.len() {
            let Some((frame, page)) = self.rows.gets.pop_front() else { break };
            let (row, column) = row_of(page);
            let source = self.source(page);
            if let Some(quick) = source.filter(|source| !self.is_slow_source(*source)) {
                self.get_from(frame, page, quick, now);
                continue;
            }
            let work = Work::Get(column, frame);
            if self.is_locked(row) || !self.rows.has_room(&work) {
                self.rows.gets.push_back((frame, page));
                continue;
            }
            let others = self.others(row, column).filter(|_| self.slab_of(row, column).is_used(row.index()));
            let others = others.filter(|_| source.is_none() || self.is_quick_by_row(page));
            if let Some(others) = others {
                self.counters.failed_over += 1;
                self.begin_row(row, work, &others, now);
            } else if let Some(source) = source {
                self.get_from(frame, page, source, now);
            } else {
                self.lose_get(frame);
            }
        }
    }

    fn begin_updates(&mut self, now: Instant) {
        let rows: Vec<Place> = self.rows.puts.keys().filter(|row| !self.rows.locked.contains(row)).copied().collect();
        for row in rows {
            if !self.rows.has_room(&Work::Update(Vec::new())) {
                return;
            }
            match self.update_reads(row) {
                Ok(reads) => {
                    let puts = self.rows.puts.remove(&row).unwrap_or_default();
                    self.begin_row(row, Work::Update(puts), &reads, now);
                }
                Err(Some((work, reads))) if self.rows.has_room(&work) => self.begin_row(row, work, &reads, now),
                Err(Some(_)) => {}
                Err(None) => {
                    for put in self.rows.puts.remove(&row).unwrap_or_default() {
                        self.told.push_back(Told::Put(put.frame, PutEnd::Elsewhere));
                    }
                }
            }
        }
    }

    /// Where the pages of a row are that stay in its next update; or what is to be done before; or nothing, and the puts go elsewhere.
    fn update_reads(&mut self, row: Place) -> Result<Reads, Option<(Work, Reads)>> {
        if self.is_row_short(row) {
            return Err(None);
        }
        let mut reads = Vec::new();
        for column in 0..ROW_PAGES {
            let is_put = self.rows.puts.get(&row).is_some_and(|puts| puts.iter().any(|put| put.column == column));
            if is_put || !self.slab_of(row, column).is_used(row.index()) {
                continue;
            }
            let copy = self.slab_of(row, column).copies.last().map(|copy| copy.lease);
            match (self.holder(row, column), self.others(row, column), copy) {
                (Some(lease), ..) => reads.push((column, lease)),
                (None, Some(others), Some(copy)) => return Err(Some((Work::Rebuild(column, copy), others))),
                _ => self.set_gone(page_of(row, column)),
            }
        }
        if seeded::is(Bug::PoolParityOfPart) {
            reads.clear();
        }
        Ok(reads)
    }

    /// A page that a copy misses, and the pages from which it is made. Slabs without such pages are looked at no more.
    fn next_rebuild(&mut self) -> Option<(Place, Work, Reads)> {
        // There are none without parity.
        self.rows.free_slot()?;
        let damaged = self.damaged.iter().copied();
        for number in damaged.filter(|number| !self.parity_waits(*number)).collect::<Vec<_>>() {
            let mut gone = Vec::new();
            let found = self.find_rebuild(number, &mut gone);
            for page in gone {
                self.set_gone(page);
            }
            if found.is_some() {
                return found;
            }
            if !self.slabs[number as usize].is_damaged() {
                self.damaged.remove(&number);
                self.release_leaving(number);
            }
        }
        None
    }

    /// Whether a parity misses pages that are computed of slabs without a copy: it is rebuilt once these are leased again. Each look would
    /// go through all of its pages.
    fn parity_waits(&self, number: u32) -> bool {
        let is_alone = number % COLUMNS == PARITY && self.slabs[number as usize].copies.len() == 1;
        is_alone && group_of(number).any(|other| self.slabs[other as usize].copies.is_empty())
    }

    fn find_rebuild(&self, number: u32, gone: &mut Vec<Place>) -> Option<(Place, Work, Reads)> {
        for copy in self.slabs[number as usize].copies.iter().filter(|copy| !copy.leaves) {
            for index in copy.missing.iter() {
                let page = Place::new(number, index);
                let (row, column) = row_of(page);
                if self.is_locked(row) {
                    continue;
                }
                let own = self.holder(row, column).map(|lease| vec![(column, lease)]);
                match own.or_else(|| self.others(row, column)) {
                    Some(reads) => return Some((row, Work::Rebuild(column, copy.lease), reads)),
                    None if column == PARITY => {}
                    None => gone.push(page),
                }
            }
        }
        None
    }

    /// No lender has a page, and its row lacks another. The parity is computed anew from the pages that are left.
    fn set_gone(&mut self, page: Place) {
        let (row, _) = row_of(page);
        let slab = &mut self.slabs[page.slab() as usize];
        slab.gone.set(page.index(), true);
        slab.copies.iter_mut().for_each(|copy| copy.missing.set(page.index(), false));
        let parity = row.slab() + PARITY;
        self.slabs[parity as usize].copies.iter_mut().for_each(|copy| copy.missing.set(page.index(), true));
        self.damaged.insert(parity);
        self.tell_copies_lost();
    }

    /// The pages of a row are what was put, and their parity has another one's checksum alone: its lender has changed it.
    fn refuse_parity(&mut self, row: Place) {
        let parity = row.slab() + PARITY;
        for copy in &mut self.slabs[parity as usize].copies {
            copy.missing.set(row.index(), true);
            self.notes.push_back(Note::Corrupt(copy.lease.lender));
        }
        self.counters.corrupt += 1;
        self.damaged.insert(parity);
        self.tell_copies_lost();
    }

    /// Locks a row and gets pages of it.
    fn begin_row(&mut self, row: Place, work: Work, reads: &[(u32, Lease)], now: Instant) {
        let Some(slot) = self.rows.free_slot() else { return };
        self.rows.locked.insert(row);
        let frames: Vec<u32> = (self.slot_frame(slot)..).take(reads.len()).collect();
        for ((column, lease), frame) in reads.iter().zip(&frames) {
            let source = Source::Lease(*lease);
            let op = self.begin_at(OpKind::RowGet(slot as u32, page_of(row, *column), source), Some(*lease));
            self.expect_end(op, now);
            self.actions.push_back(get_action(op, *frame, page_of(row, *column), source));
        }
        self.rows.jobs[slot] = Some(Job { row, work, read: frames, left: reads.len(), failed: false });
        if reads.is_empty() {
            self.compute_row(slot);
        }
    }

    fn slot_frame(&self, slot: usize) -> u32 {
        self.first_frame + slot as u32 * ROW_PAGES
    }

    pub(super) fn row_got(&mut self, slot: u32, page: Place, source: Source, result: Result<Sum, Failure>) {
        let is_good = self.check(page, source, result);
        let Some(job) = &mut self.rows.jobs[slot as usize] else { return };
        job.failed |= !is_good;
        job.left -= 1;
        if job.left == 0 {
            self.compute_row(slot as usize);
        }
    }

    /// All pages that are needed are here: the driver computes the one that is not.
    fn compute_row(&mut self, slot: usize) {
        let own = self.slot_frame(slot);
        let Some(Job { work, read, failed, .. }) = &self.rows.jobs[slot] else { return };
        let failed = *failed;
        let mut from = read.clone();
        let to = match work {
            Work::Update(puts) => {
                from.extend(puts.iter().map(|put| put.frame));
                own + ROW_PAGES - 1
            }
            Work::Get(_, frame) => *frame,
            Work::Rebuild(..) => own,
        };
        if failed {
            // What is known of the row's pages has changed: it is looked at anew.
            return self.give_row_up(slot);
        }
        let mut pages = [None; ROW_PAGES as usize];
        pages.iter_mut().zip(from).for_each(|(page, frame)| *page = Some(frame));
        let op = self.begin(OpKind::RowSum(slot as u32), None);
        self.actions.push_back(Action::Xor(op, to, pages));
    }

    fn give_row_up(&mut self, slot: usize) {
        let Some(job) = self.end_row(slot) else { return };
        match job.work {
            Work::Update(puts) => self.rows.puts.entry(job.row).or_default().extend(puts),
            Work::Get(column, frame) => self.rows.gets.push_back((frame, page_of(job.row, column))),
            Work::Rebuild(..) => {}
        }
    }

    fn end_row(&mut self, slot: usize) -> Option<Job> {
        let job = self.rows.jobs[slot].take()?;
        self.rows.locked.remove(&job.row);
        Some(job)
    }

    /// By what the page is known that a job gets or computes; a parity that is computed is what it is.
    pub(super) fn expected_of_row(&self, slot: u32) -> Option<Sum> {
        let job = self.rows.jobs[slot as usize].as_ref()?;
        match job.work {
            Work::Get(column, _) | Work::Rebuild(column, _) => Some(self.slab_of(job.row, column).sum(job.row.index())),
            Work::Update(_) => None,
        }
    }

    /// The driver has computed a page.
    pub(super) fn row_computed(&mut self, slot: u32, result: Result<Sum, Failure>, now: Instant) {
        let slot = slot as usize;
        let Ok(sum) = result else { return self.give_row_up(slot) };
        let Some(Job { row, work, .. }) = &self.rows.jobs[slot] else { return };
        let row = *row;
        match work.clone() {
            // The puts go elsewhere.
            Work::Update(_) if self.is_row_short(row) => self.give_row_up(slot),
            Work::Update(puts) => self.write_row(slot, row, &puts, sum, now),
            Work::Get(column, frame) => {
                let is_good = sum == self.slab_of(row, column).sum(row.index());
                self.end_row(slot);
                if is_good {
                    self.end_get(frame, page_of(row, column));
                    return;
                }
                self.refuse_parity(row);
                if self.source(page_of(row, column)).is_some() {
                    self.rows.gets.push_back((frame, page_of(row, column)));
                } else {
                    self.set_gone(page_of(row, column));
                    self.lose_get(frame);
                }
            }
            Work::Rebuild(column, to) => {
                let page = page_of(row, column);
                let slab = &mut self.slabs[page.slab() as usize];
                if column == PARITY {
                    slab.set_sum(page.index(), sum);
                }
                let (is_good, is_there) = (sum == slab.sum(page.index()), slab.copy_mut(to).is_some());
                if !is_good {
                    self.refuse_parity(row);
                    self.set_gone(page);
                }
                if !is_good || !is_there {
                    self.end_row(slot);
                    return;
                }
                self.put_row_page(slot, page, self.slot_frame(slot), to, now);
            }
        }
    }

    /// Puts the new pages of a row and its parity.
    fn write_row(&mut self, slot: usize, row: Place, puts: &[RowPut], parity: Sum, now: Instant) {
        let frame = self.slot_frame(slot) + ROW_PAGES - 1;
        let mut all = puts.to_vec();
        if !seeded::is(Bug::PoolOldParityKept) {
            all.push(RowPut { column: PARITY, frame, sum: parity });
        }
        for put in all {
            let page = page_of(row, put.column);
            let slab = &mut self.slabs[page.slab() as usize];
            slab.write(page.index(), put.sum);
            for lease in slab.copies.iter().map(|copy| copy.lease).collect::<Vec<_>>() {
                self.put_row_page(slot, page, put.frame, lease, now);
            }
        }
        if seeded::is(Bug::PoolRowUnlockedEarly) {
            self.rows.locked.remove(&row);
        }
    }

    fn put_row_page(&mut self, slot: usize, page: Place, frame: u32, to: Lease, now: Instant) {
        let op = self.begin_at(OpKind::RowPut(slot as u32, page, to), Some(to));
        self.expect_end(op, now);
        self.actions.push_back(Action::Put(op, frame, to, page.index()));
        if let Some(job) = &mut self.rows.jobs[slot] {
            job.left += 1;
        }
    }

    pub(super) fn row_put(&mut self, slot: u32, page: Place, to: Lease, failed: bool) {
        if failed {
            // It may hold the old version or the new one.
            self.drop_copy(page.slab(), to);
        } else if let Some(copy) = self.slabs[page.slab() as usize].copy_mut(to) {
            copy.missing.set(page.index(), false);
        }
        let Some(job) = &mut self.rows.jobs[slot as usize] else { return };
        job.failed |= failed;
        job.left -= 1;
        if job.left > 0 {
            return;
        }
        let Some(job) = self.end_row(slot as usize) else { return };
        match job.work {
            Work::Update(puts) => {
                let end = if self.is_row_whole(job.row) { PutEnd::Kept } else { PutEnd::Elsewhere };
                self.told.extend(puts.iter().map(|put| Told::Put(put.frame, end)));
            }
            Work::Rebuild(..) => self.counters.copied += u64::from(!job.failed),
            Work::Get(..) => {}
        }
    }
}

#[cfg(test)]
mod tests;
