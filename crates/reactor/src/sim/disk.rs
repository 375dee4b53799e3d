//! Simulated files: the page cache, the durable sectors, and the random loss of the difference.
//!
//! Every sector remembers its last durable value and the values written since. A sync reduces these to the value that was
//! there when the sync was submitted; a power loss picks one of them, sector by sector.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::events::Event;
use super::losses::Losses;
use super::node::{InFlight, Work};
use super::rng::Rng;
use super::submit::OpenSimFile;
use super::world::{Crash, Inner};
use crate::byte_range::ByteRange;
use crate::op::{Allocate, Errno, Extent, File, Op, Outcome, Token};

/// Sectors tear independently.
const SECTOR: usize = 512;
/// Values of a sector that are remembered; of more, one is forgotten that is neither the durable one, nor the newest,
/// nor what a sync in flight will make durable.
const VALUES_MAX: usize = 8;
/// The version of a value that no later sync covers: a sync failed on it.
const NEVER: u64 = u64::MAX;

type Sector = [u8; SECTOR];

/// Which operations of a file a fault is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileOp {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Syncs.
    Sync,
}

/// An error that the next operation of a kind answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileFault {
    /// Which operation.
    pub op: FileOp,
    /// What it answers.
    pub error: Errno,
}

/// A file of a simulated disk. Cloning it gives another handle to the same one, also for another loop: all are one open
/// file description, so that one of all syncs is told of bytes that were lost. Its length is fixed: a write past its end answers
/// `EINVAL`.
#[derive(Clone, Debug)]
pub struct SimFile {
    state: Arc<Mutex<State>>,
    description: usize,
}

#[derive(Debug)]
struct State {
    data: Vec<u8>,
    /// By sector: the durable value, then those written since, with their versions.
    values: BTreeMap<usize, Vec<(u64, Sector)>>,
    /// Sectors that are no holes. A hole is all zeroes.
    allocated: BTreeSet<usize>,
    /// Counts the writes that completed.
    version: u64,
    /// Writes in flight, by operation.
    writes: BTreeMap<u64, Write>,
    /// Syncs in flight, by operation: the version up to which each makes durable.
    syncs: BTreeMap<u64, u64>,
    faults: VecDeque<FileFault>,
    losses: Losses,
    /// So many of the next writes find no room.
    full_for: u64,
}

/// A write in flight.
#[derive(Debug)]
struct Write {
    offset: usize,
    bytes: Vec<u8>,
    /// Sectors that a read has seen already: they are in the page cache, and are not written again.
    landed: BTreeSet<usize>,
}

impl SimFile {
    pub(super) fn new(len: u64) -> Self {
        let state = State {
            data: vec![0; len as usize],
            values: BTreeMap::new(),
            allocated: BTreeSet::new(),
            version: 0,
            writes: BTreeMap::new(),
            syncs: BTreeMap::new(),
            faults: VecDeque::new(),
            losses: Losses::new(),
            full_for: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), description: 0 }
    }

    /// The same file by another open file description.
    pub(crate) fn open_again(&self) -> Self {
        let description = self.lock().losses.open();
        Self { state: Arc::clone(&self.state), description }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.lock().data.len() as u64
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// What direct transfers are multiples of.
    pub(crate) const BLOCK_BYTES: u32 = SECTOR as u32;

    /// What a read would give now.
    pub fn contents(&self) -> Vec<u8> {
        self.lock().data.clone()
    }

    /// What is certain to be there after a power loss: zeroes where nothing was ever durable.
    pub fn durable(&self) -> Vec<u8> {
        let state = self.lock();
        let mut bytes = state.data.clone();
        for (sector, values) in &state.values {
            let end = ((sector + 1) * SECTOR).min(bytes.len());
            bytes[sector * SECTOR..end].copy_from_slice(&values[0].1[..end - sector * SECTOR]);
        }
        bytes
    }

    /// Has the next operation of a kind fail; several are taken in order.
    pub fn fault_next(&self, fault: FileFault) {
        self.lock().faults.push_back(fault);
    }

    /// Writing out what is not durable yet fails: it is lost, and the kernel takes it for clean. Over each description the next
    /// sync or durable write that ends receives the error, and none after it.
    pub fn fail_writeback(&self, error: Errno) {
        let mut state = self.lock();
        let version = state.version;
        state.forget_dirty(version);
        state.losses.add(error);
    }

    /// What is left after a crash; gives the number of sectors that fell back to an older value.
    pub(super) fn crash(&self, how: Crash, rng: &mut Rng) -> u64 {
        let mut state = self.lock();
        state.syncs.clear();
        for write in std::mem::take(&mut state.writes).into_values() {
            let kept = match rng.below(3) {
                0 => 0,
                1 => rng.below(write.sectors().len() as u64 + 1) as usize,
                _ => usize::MAX,
            };
            state.end_write(&write, kept);
        }
        if how == Crash::Process {
            return 0;
        }
        let mut lost = 0;
        for (sector, values) in std::mem::take(&mut state.values) {
            let kept = rng.below(values.len() as u64) as usize;
            lost += u64::from(kept + 1 < values.len());
            state.put(sector, &values[kept].1);
        }
        lost
    }

    /// Up to `into.len()` bytes at `offset`. Of writes in flight it sees, sector by sector, what chance decides; and what
    /// was seen once stays.
    pub(super) fn read(&self, offset: u64, into: &mut [u8], rng: &mut Rng) -> usize {
        let mut state = self.lock();
        state.land(offset as usize, into.len(), rng);
        let start = (offset as usize).min(state.data.len());
        let n = into.len().min(state.data.len() - start);
        into[..n].copy_from_slice(&state.data[start..start + n]);
        n
    }
}

impl Write {
    fn sectors(&self) -> std::ops::Range<usize> {
        self.offset / SECTOR..(self.offset + self.bytes.len()).div_ceil(SECTOR)
    }

    /// Its bytes in one of its sectors, and where they go.
    fn part(&self, sector: usize) -> (usize, &[u8]) {
        let from = self.offset.max(sector * SECTOR);
        let to = (self.offset + self.bytes.len()).min((sector + 1) * SECTOR);
        (from, &self.bytes[from - self.offset..to - self.offset])
    }
}

impl State {
    fn sector(&self, sector: usize) -> Sector {
        let mut value = [0; SECTOR];
        let end = ((sector + 1) * SECTOR).min(self.data.len());
        value[..end - sector * SECTOR].copy_from_slice(&self.data[sector * SECTOR..end]);
        value
    }

    fn put(&mut self, sector: usize, value: &Sector) {
        let end = ((sector + 1) * SECTOR).min(self.data.len());
        self.data[sector * SECTOR..end].copy_from_slice(&value[..end - sector * SECTOR]);
        if value.iter().any(|byte| *byte != 0) {
            self.allocated.insert(sector);
        }
    }

    /// Writes into the page cache.
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.version += 1;
        let sectors = offset / SECTOR..=(offset + bytes.len() - 1) / SECTOR;
        for sector in sectors.clone() {
            let before = self.sector(sector);
            self.values.entry(sector).or_insert_with(|| vec![(0, before)]);
        }
        self.data[offset..offset + bytes.len()].copy_from_slice(bytes);
        for sector in sectors {
            let value = self.sector(sector);
            self.allocated.insert(sector);
            if let Some(values) = self.values.get_mut(&sector) {
                if values.len() >= VALUES_MAX {
                    forget_one(values, &self.syncs);
                }
                values.push((self.version, value));
            }
        }
    }

    /// Lets some sectors of the writes in flight reach the page cache, where they lie in a range.
    fn land(&mut self, offset: usize, len: usize, rng: &mut Rng) {
        let mut writes = std::mem::take(&mut self.writes);
        for write in writes.values_mut() {
            for sector in write.sectors() {
                let asked = sector * SECTOR < offset.saturating_add(len) && (sector + 1) * SECTOR > offset;
                if asked && !write.landed.contains(&sector) && rng.one_in(4) {
                    write.landed.insert(sector);
                    let (at, bytes) = write.part(sector);
                    self.write(at, bytes);
                }
            }
        }
        self.writes = writes;
    }

    /// Ends a write: its first `sectors` are in the page cache, if they were not before.
    fn end_write(&mut self, write: &Write, sectors: usize) {
        for sector in write.sectors().take(sectors).filter(|sector| !write.landed.contains(sector)) {
            let (at, bytes) = write.part(sector);
            self.write(at, bytes);
        }
    }

    /// Makes a range read as zeroes, and whole sectors of it holes unless they are to keep their space.
    fn zero(&mut self, start: usize, end: usize, keep_space: bool) {
        let touched: Vec<usize> = (start / SECTOR..end.div_ceil(SECTOR))
            .filter(|sector| keep_space || self.allocated.contains(sector) || self.values.contains_key(sector))
            .collect();
        for sector in touched {
            let from = start.max(sector * SECTOR);
            let to = end.min((sector + 1) * SECTOR);
            self.write(from, &[0; SECTOR][..to - from]);
            if !keep_space && (to - from == SECTOR || to == self.data.len() && from.is_multiple_of(SECTOR)) {
                self.allocated.remove(&sector);
            }
        }
    }

    /// Makes durable, in some sectors, what was written up to `version`.
    fn harden(&mut self, sectors: std::ops::Range<usize>, version: u64) {
        let touched: Vec<usize> = self.values.range(sectors).map(|(sector, _)| *sector).collect();
        for sector in touched {
            let Some(values) = self.values.get_mut(&sector) else { continue };
            if let Some(last) = values.iter().rposition(|(at, _)| *at <= version) {
                values.drain(..last);
            }
            if values.len() == 1 {
                self.values.remove(&sector);
            }
        }
    }

    /// A sync failed: the kernel takes what it covered for clean all the same.
    fn forget_dirty(&mut self, version: u64) {
        for values in self.values.values_mut() {
            values.iter_mut().skip(1).filter(|(at, _)| *at <= version).for_each(|(at, _)| *at = NEVER);
        }
    }

    /// A write to a disk that is still full.
    fn finds_no_room(&mut self) -> Option<Errno> {
        self.full_for = self.full_for.checked_sub(1)?;
        Some(Errno::NOSPC)
    }

    fn fault(&mut self, op: FileOp) -> Option<Errno> {
        let place = self.faults.iter().position(|fault| fault.op == op)?;
        self.faults.remove(place).map(|fault| fault.error)
    }

    fn extents(&self, offset: usize, len: usize, count_max: usize) -> Vec<Extent> {
        let asked_end = offset.saturating_add(len);
        let end = asked_end.min(self.data.len());
        let mut found: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end {
            let part = ((at / SECTOR + 1) * SECTOR).min(end) - at;
            let hole = !self.allocated.contains(&(at / SECTOR));
            let full = found.len() == count_max.max(1);
            match found.last_mut() {
                Some(last) if last.hole == hole => last.len += part as u64,
                _ if full => break,
                _ => found.push(Extent { len: part as u64, hole }),
            }
            at += part;
        }
        // Past the end there is no hole that reads as zeroes: a reader is to meet the end.
        if at >= end && at < asked_end && found.is_empty() {
            found.push(Extent { len: (asked_end - at) as u64, hole: false });
        }
        found
    }
}

/// Forgets one value of a sector that has too many. The value that a sync in flight is going to make durable is the
/// newest up to its version; it stays, and if each is such a one (they are as few as the syncs), all stay.
fn forget_one(values: &mut Vec<(u64, Sector)>, syncs: &BTreeMap<u64, u64>) {
    let wanted: BTreeSet<usize> =
        syncs.values().filter_map(|since| values.iter().rposition(|(at, _)| at <= since)).collect();
    if let Some(place) = (1..values.len()).find(|place| !wanted.contains(place)) {
        values.remove(place);
    }
}

impl Inner {
    pub(super) fn submit_disk(&mut self, id: u64, op: Op, token: Token) {
        let (Op::Read { file, .. }
        | Op::Write { file, .. }
        | Op::Sync { file }
        | Op::Allocate { file, .. }
        | Op::Extents { file, .. }
        | Op::Prefetch { file, .. }) = op
        else {
            return self.refuse(id, op, token, Errno::INVAL);
        };
        let OpenSimFile { sim, options, block_bytes } = match self.sim_file(id, file) {
            Ok(found) => found,
            Err(error) => return self.refuse(id, op, token, error),
        };
        let aligned = |offset: u64, len: usize| (offset | len as u64).is_multiple_of(u64::from(block_bytes));
        let inside = |offset: u64, len: usize| ByteRange::new(offset, len as u64).ends_by(sim.len());
        let wrong = match &op {
            Op::Write { .. } | Op::Allocate { .. } if options.read_only => Some(Errno::BADF),
            Op::Read { offset, len, .. } if !aligned(*offset, *len) => Some(Errno::INVAL),
            Op::Write { offset, len, .. } if !aligned(*offset, *len) || !inside(*offset, *len) => Some(Errno::INVAL),
            Op::Allocate { len: 0, .. } => Some(Errno::INVAL),
            _ => None,
        };
        if let Some(error) = wrong {
            return self.refuse(id, op, token, error);
        }
        let key = self.new_id();
        let since = {
            let mut state = sim.lock();
            let version = state.version;
            match &op {
                Op::Write { offset, from, start, len, .. } => {
                    let mut bytes = vec![0; *len];
                    from.read(*start, &mut bytes);
                    state.writes.insert(key, Write { offset: *offset as usize, bytes, landed: BTreeSet::new() });
                }
                Op::Sync { .. } => {
                    state.syncs.insert(key, version);
                }
                _ => {}
            }
            version
        };
        // Now and then longer than a client needs for a new session: what an old one began must not land in the new one.
        let nanos = if self.rng.one_in(50) {
            self.rng.between(1_000_000, 100_000_000)
        } else {
            self.rng.between(5_000, 200_000)
        };
        let at = self.now + Duration::from_nanos(nanos);
        let event = Some(self.events.add(at, Event::Disk { node: id, op: key }));
        let work = Work::Disk { op, file: sim, direct: options.direct, since };
        if let Some(node) = self.nodes.get_mut(&id) {
            node.ops.insert(key, InFlight { token, work, event });
        }
    }

    /// A file operation ends.
    pub(super) fn disk_done(&mut self, id: u64, key: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(InFlight { token, work, .. }) = node.ops.remove(&key) else { return };
        let (op, file, direct, since) = match work {
            Work::Disk { op, file, direct, since } => (op, file, direct, since),
            Work::Told(outcome) => return node.push(token, outcome),
            _ => return,
        };
        let syncs = matches!(op, Op::Sync { .. } | Op::Write { durable: true, .. });
        let outcome = self.disk_outcome(key, op, &file, since);
        let failed = matches!(outcome, Outcome::Synced(Err(_)) | Outcome::Written { result: Err(_), .. });
        // Who is told that bytes were lost may say so after others who then were told that all is well.
        if syncs && failed && self.rng.one_in(2) {
            let at = self.now + Duration::from_nanos(self.rng.between(5_000, 400_000));
            let event = Some(self.events.add(at, Event::Disk { node: id, op: key }));
            return self.insert(id, key, InFlight { token, work: Work::Told(outcome), event });
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            let counters = &mut node.counters;
            let (count, bytes) = match &outcome {
                Outcome::Read { result: Ok(n), .. } if direct => (&mut counters.read_direct_bytes, *n),
                Outcome::Read { result: Ok(n), .. } => (&mut counters.read_copied_bytes, *n),
                Outcome::Written { result: Ok(n), .. } if direct => (&mut counters.written_direct_bytes, *n),
                Outcome::Written { result: Ok(n), .. } => (&mut counters.written_copied_bytes, *n),
                _ => return node.push(token, outcome),
            };
            *count += bytes as u64;
            node.push(token, outcome);
        }
    }

    fn disk_outcome(&mut self, key: u64, op: Op, file: &SimFile, since: u64) -> Outcome {
        let plan = self.plan;
        match op {
            Op::Read { offset, mut into, start, len, .. } => {
                let fault = file.lock().fault(FileOp::Read);
                let fault = fault.or_else(|| self.rng.chance(plan.read_error).then_some(Errno::IO));
                self.count.disk_errors += u64::from(fault.is_some());
                let result = match fault {
                    None => {
                        let mut bytes = vec![0; len];
                        let n = file.read(offset, &mut bytes, &mut self.rng);
                        into.write(start, &bytes[..n]);
                        Ok(n)
                    }
                    Some(error) => Err(error),
                };
                Outcome::Read { into, result }
            }
            Op::Write { from, len, durable, .. } => {
                let result = self.end_write(key, file, len, durable);
                Outcome::Written { from, result }
            }
            Op::Sync { .. } => {
                // What an earlier sync lost is told here too, and says nothing of the bytes that this one writes out.
                let is_lost = self.lose_by_sync(file);
                let mut state = file.lock();
                let told = state.losses.tell(file.description);
                self.count.disk_errors += u64::from(told.is_some());
                state.syncs.remove(&key);
                if is_lost {
                    state.forget_dirty(since);
                } else {
                    state.harden(0..usize::MAX, since);
                }
                Outcome::Synced(told.map_or(Ok(()), Err))
            }
            Op::Allocate { offset, len, mode, .. } => {
                let mut state = file.lock();
                let end = offset.saturating_add(len).min(state.data.len() as u64) as usize;
                state.zero((offset as usize).min(end), end, mode == Allocate::ZeroRange);
                Outcome::Allocated(Ok(()))
            }
            Op::Extents { offset, len, count_max, .. } => {
                // An answer may cover less than was asked, and ends with a sector then.
                let len = if self.rng.one_in(4) {
                    let first = offset / SECTOR as u64;
                    let sectors = offset.saturating_add(len).div_ceil(SECTOR as u64).saturating_sub(first).max(1);
                    len.min((first + self.rng.between(1, sectors)).saturating_mul(SECTOR as u64) - offset)
                } else {
                    len
                };
                let found = file.lock().extents(offset as usize, len as usize, count_max);
                Outcome::Extents(Ok(found))
            }
            Op::Prefetch { .. } => Outcome::Prefetched(Ok(())),
            other => crate::os::failed(other, Errno::INVAL),
        }
    }

    /// Whether a sync loses the bytes that it writes out: on purpose, or by chance. Each description is told then.
    fn lose_by_sync(&mut self, file: &SimFile) -> bool {
        let fault = file.lock().fault(FileOp::Sync);
        let Some(error) = fault else { return self.lose(file) };
        file.lock().losses.add(error);
        true
    }

    /// Whether bytes that are written out are lost, by chance: the first to sync over each description is told. A disk that had no room
    /// for them may have none for what comes next.
    fn lose(&mut self, file: &SimFile) -> bool {
        if !self.rng.chance(self.plan.sync_error) {
            return false;
        }
        let error = if self.rng.one_in(2) { Errno::NOSPC } else { Errno::IO };
        let mut state = file.lock();
        if error == Errno::NOSPC {
            state.full_for = self.rng.below(4);
        }
        state.losses.add(error);
        true
    }

    fn end_write(&mut self, key: u64, file: &SimFile, len: usize, durable: bool) -> Result<usize, Errno> {
        let plan = self.plan;
        let fault = file.lock().fault(FileOp::Write);
        let fault = fault.or_else(|| self.rng.chance(plan.write_error).then_some(Errno::IO));
        let fault = fault.or_else(|| self.rng.chance(plan.no_space).then_some(Errno::NOSPC));
        let fault = fault.or_else(|| file.lock().finds_no_room());
        // A durable write is told of others' bytes as a sync is, also that there was no room for them.
        let is_lost = durable && self.lose(file);
        let Some(write) = file.lock().writes.remove(&key) else { return Err(Errno::IO) };
        if let Some(error) = fault {
            self.count.disk_errors += 1;
            self.write_prefix(file, &write);
            return Err(error);
        }
        let mut state = file.lock();
        state.end_write(&write, usize::MAX);
        if durable && len > 0 {
            let version = state.version;
            if is_lost {
                state.forget_dirty(version);
            } else {
                state.harden(write.sectors(), version);
            }
            if let Some(error) = state.losses.tell(file.description) {
                self.count.disk_errors += 1;
                return Err(error);
            }
        }
        Ok(len)
    }

    /// Writes as many of the sectors as chance decides, from the first on.
    fn write_prefix(&mut self, file: &SimFile, write: &Write) {
        let kept = self.rng.below(write.sectors().len() as u64 + 1) as usize;
        file.lock().end_write(write, kept);
    }

    /// A cancelled file operation ends as it would have, only now, or answers `ECANCELED`: then a write happened for a
    /// prefix of its sectors, and anything else not at all.
    pub(super) fn cancel_disk(&mut self, id: u64, key: u64) {
        let Some(in_flight) = self.nodes.get(&id).and_then(|node| node.ops.get(&key)) else { return };
        let event = in_flight.event;
        let file = match &in_flight.work {
            Work::Disk { file, .. } => file.clone(),
            _ => return,
        };
        if self.rng.one_in(2) {
            self.events.remove(event);
            return self.disk_done(id, key);
        }
        let write = {
            let mut state = file.lock();
            state.syncs.remove(&key);
            state.writes.remove(&key)
        };
        if let Some(write) = write {
            self.write_prefix(&file, &write);
        }
        self.fail(id, key, Errno::CANCELED);
    }

    pub(super) fn try_write(&mut self, id: u64, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let OpenSimFile { sim, options, .. } = self.sim_file(id, file)?;
        let fits = ByteRange::new(offset, bytes.len() as u64).ends_by(sim.len());
        if options.read_only {
            return Err(Errno::BADF);
        }
        if options.direct || !fits || !self.rng.one_in(4) {
            return Err(Errno::AGAIN);
        }
        sim.lock().write(offset as usize, bytes);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.counters.written_copied_bytes += bytes.len() as u64;
        }
        Ok(())
    }
}
