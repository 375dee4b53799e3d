//! The changes that were acknowledged and not flushed: kept, covered by flushes, cut by durable changes, sent again.

use byway_reactor::ByteRange;
use byway_reactor::seeded::{self, Bug};

use super::super::super::wire::CallError;
use super::{Kind, Machine, OpId, Operation, Purpose, Room, ServerEpoch};

/// Names a kept change. The log is in the order of these names: what a cut leaves of a change keeps its place in the
/// order of acknowledgements, and lies in the order of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    sequence: u64,
    offset: u64,
}

/// A change that was acknowledged and not flushed.
#[derive(Debug)]
pub(super) struct Unflushed<W> {
    /// Its place in the order of acknowledgements.
    pub(super) sequence: u64,
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) from: Option<W>,
    pub(super) start: usize,
    /// Where it is, and none newer is missing; `None` if it must be sent again wherever that is.
    pub(super) epoch: Option<ServerEpoch>,
    /// It is being sent again.
    pub(super) sent: bool,
}

impl<W> Unflushed<W> {
    fn name(&self) -> Name {
        Name { sequence: self.sequence, offset: self.offset }
    }

    fn cost(&self) -> usize {
        log_cost(self.len, self.from.is_some())
    }
}

impl<W: Clone> Unflushed<W> {
    /// What is left of it in front of `first`, and from `end` on.
    fn without(mut self, first: u64, end: u64) -> [Option<Self>; 2] {
        let (from, to) = (self.offset, self.offset.saturating_add(self.len));
        let behind = (to > end).then(|| Self {
            offset: end,
            len: to - end,
            from: self.from.clone(),
            start: self.start + (end - from) as usize,
            sent: false,
            ..self
        });
        self.len = first.saturating_sub(from);
        [(from < first).then_some(self), behind]
    }
}

/// What a kept change counts as: at least a frame's smallest size.
fn log_cost(len: u64, has_payload: bool) -> usize {
    if has_payload { (len as usize).next_multiple_of(4096) } else { 64 }
}

impl<R, W: Clone> Machine<R, W> {
    /// Begins to send again what may be missing in an epoch: from the first such change on all that are kept, since what is sent again
    /// goes over what came after it. That epoch may be one where the later ones are, if there were others in between.
    pub(super) fn begin_replay(&mut self, epoch: ServerEpoch) {
        self.replay_from = 0;
        let missing = self.log.iter().position(|entry| entry.epoch != Some(epoch));
        let from = missing.unwrap_or(self.log.len());
        self.log.iter_mut().skip(from).for_each(|entry| entry.epoch = None);
        self.replaying = missing.is_some() && !seeded::is(Bug::NoReplay);
    }

    /// The next entry of the log that may be missing in this epoch.
    pub(super) fn next_replay(&mut self) -> Option<OpId> {
        let epoch = Some(self.epoch?);
        let waits = |index: &usize| {
            self.count_step();
            self.log[*index].epoch != epoch && !self.log[*index].sent
        };
        let backwards = seeded::is(Bug::ReplayBackwards);
        let mut left = self.replay_from..self.log.len();
        let Some(index) = (if backwards { left.rfind(waits) } else { left.find(waits) }) else {
            self.replaying = false;
            return None;
        };
        if !backwards {
            self.replay_from = index;
        }
        let entry = &self.log[index];
        let (name, kind, range, start) =
            (entry.name(), entry.kind, ByteRange::new(entry.offset, entry.len), entry.start);
        let payload = entry.from.clone();
        if self.overlaps_change(range) {
            return None;
        }
        self.log[index].sent = true;
        self.replays_in_flight += 1;
        self.replayed += 1;
        let id = self.add(kind, range, None, payload, Purpose::Replay(name));
        if let Some(operation) = self.operations.get_mut(id) {
            operation.start = start;
        }
        Some(self.send(id))
    }

    /// Keeps an acknowledged change until a flush covers it.
    pub(super) fn keep(&mut self, operation: &Operation<R, W>) {
        let Some(epoch) = self.epoch else { return };
        if self.volatile {
            return;
        }
        if operation.kind.durable() {
            if !seeded::is(Bug::ReplayOverDurable) {
                self.cut(operation.offset, operation.offset.saturating_add(operation.len));
            }
            return;
        }
        self.log_bytes += log_cost(operation.len, operation.from.is_some());
        self.log.push_back(Unflushed {
            sequence: self.next_sequence,
            kind: operation.kind,
            offset: operation.offset,
            len: operation.len,
            from: operation.from.clone(),
            start: operation.start,
            epoch: Some(epoch),
            sent: false,
        });
        self.next_sequence += 1;
    }

    /// What was durably changed from `first` to `end` is no longer kept in older versions.
    fn cut(&mut self, first: u64, end: u64) {
        let is_touched = |entry: &Unflushed<W>| entry.offset < end && first < entry.offset.saturating_add(entry.len);
        if !self.log.iter().any(is_touched) {
            return;
        }
        // Rebuilt in one pass: each entry that is taken out of the middle, or put there, moves half of the others.
        for entry in std::mem::take(&mut self.log) {
            if !is_touched(&entry) {
                self.log.push_back(entry);
                continue;
            }
            self.log_bytes -= entry.cost();
            for piece in entry.without(first, end).into_iter().flatten() {
                self.log_bytes += piece.cost();
                self.log.push_back(piece);
            }
        }
        self.replay_from = 0;
    }

    /// Where a kept change is in the log, if it still is.
    fn index_of(&self, name: Name) -> Option<usize> {
        let name_of = |entry: &Unflushed<W>| {
            self.count_step();
            entry.name()
        };
        self.log.binary_search_by_key(&name, name_of).ok()
    }

    pub(super) fn replay_went(&mut self, name: Name) {
        let Some(epoch) = self.epoch else { return };
        if let Some(index) = self.index_of(name) {
            self.log[index].epoch = Some(epoch);
            self.log[index].sent = false;
        }
    }

    /// What was being sent again is not: it comes next, unless an older one has to as well.
    pub(super) fn replay_waits(&mut self, name: Name) {
        if let Some(index) = self.index_of(name) {
            self.log[index].sent = false;
            self.replay_from = self.replay_from.min(index);
        }
        self.replaying = true;
    }

    pub(super) fn flushed(&mut self, id: OpId, result: Result<(), CallError>) -> Result<(), CallError> {
        let covered =
            self.flushing.iter().position(|(flush, _)| *flush == id).map(|at| self.flushing.swap_remove(at).1);
        let covered = if seeded::is(Bug::FlushCoversLater) { Some(self.next_sequence) } else { covered };
        if seeded::is(Bug::LogForgottenAfterFailedFlush) && result.is_err() {
            self.log.clear();
            (self.log_bytes, self.replay_from) = (0, 0);
        }
        result?;
        self.room = Room::ByFlush;
        while let Some(entry) = self.log.front() {
            if covered.is_none_or(|covered| entry.sequence >= covered) {
                break;
            }
            self.log_bytes -= entry.cost();
            self.log.pop_front();
            self.replay_from = self.replay_from.saturating_sub(1);
        }
        Ok(())
    }
}
