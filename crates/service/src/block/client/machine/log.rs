//! The changes that were acknowledged and not flushed: kept, covered by flushes, cut by durable changes, sent again.

use byway_reactor::seeded::{self, Bug};

use super::super::super::wire::CallError;
use super::{Kind, Machine, OpId, Operation, Place, Purpose};

/// A change that was acknowledged and not flushed.
#[derive(Debug)]
pub(super) struct Unflushed<W> {
    /// Its own number.
    pub(super) id: u64,
    /// Its place in the order of acknowledgements.
    pub(super) sequence: u64,
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) from: Option<W>,
    pub(super) start: usize,
    pub(super) place: Place,
    /// It is being sent again.
    pub(super) sent: bool,
}

/// What a kept change counts as: at least a frame's smallest size.
fn log_cost(len: u64, has_payload: bool) -> usize {
    if has_payload { (len as usize).next_multiple_of(4096) } else { 64 }
}

impl<R, W: Clone> Machine<R, W> {
    /// The next entry of the log that was acknowledged in another place.
    pub(super) fn next_replay(&mut self) -> Option<OpId> {
        let place = self.place?;
        let waits = |entry: &Unflushed<W>| entry.place != place && !entry.sent;
        let backwards = seeded::is(Bug::ReplayBackwards);
        let next = if backwards { self.log.iter().rposition(waits) } else { self.log.iter().position(waits) };
        let Some(index) = next else {
            self.replaying = false;
            return None;
        };
        let entry = &self.log[index];
        let (number, kind, range, start) = (entry.id, entry.kind, (entry.offset, entry.len), entry.start);
        let payload = entry.from.clone();
        if self.overlaps_change(range.0, range.1) {
            return None;
        }
        self.log[index].sent = true;
        self.replays_in_flight += 1;
        self.replayed += 1;
        let id = self.add(kind, range, None, payload, Purpose::Replay(number));
        if let Some(operation) = self.operations.get_mut(id) {
            operation.start = start;
        }
        Some(self.send(id))
    }

    /// Keeps an acknowledged change until a flush covers it.
    pub(super) fn keep(&mut self, operation: &Operation<R, W>) {
        let Some(place) = self.place else { return };
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
        self.next_id += 1;
        self.log.push_back(Unflushed {
            id: self.next_id,
            sequence: self.next_sequence,
            kind: operation.kind,
            offset: operation.offset,
            len: operation.len,
            from: operation.from.clone(),
            start: operation.start,
            place,
            sent: false,
        });
        self.next_sequence += 1;
    }

    /// What was durably changed from `first` to `end` is no longer kept in older versions.
    fn cut(&mut self, first: u64, end: u64) {
        let mut index = 0;
        while let Some(entry) = self.log.get_mut(index) {
            let (from, to) = (entry.offset, entry.offset.saturating_add(entry.len));
            index += 1;
            if from >= end || to <= first {
                continue;
            }
            let Some(mut whole) = self.log.remove(index - 1) else { return };
            self.log_bytes -= log_cost(whole.len, whole.from.is_some());
            index -= 1;
            let mut pieces = [None, None];
            if to > end {
                self.next_id += 1;
                let (skipped, id) = ((end - from) as usize, self.next_id);
                let (kind, sequence, place) = (whole.kind, whole.sequence, whole.place);
                let (from, start) = (whole.from.clone(), whole.start + skipped);
                let (offset, len) = (end, to - end);
                pieces[1] = Some(Unflushed { id, sequence, kind, offset, len, from, start, place, sent: false });
            }
            if from < first {
                whole.len = first - from;
                pieces[0] = Some(whole);
            }
            for piece in pieces.into_iter().flatten() {
                self.log_bytes += log_cost(piece.len, piece.from.is_some());
                self.log.insert(index, piece);
                index += 1;
            }
        }
    }

    pub(super) fn replay_went(&mut self, number: u64) {
        let Some(place) = self.place else { return };
        if let Some(entry) = self.log.iter_mut().find(|entry| entry.id == number) {
            entry.place = place;
            entry.sent = false;
        }
    }

    pub(super) fn flushed(&mut self, id: OpId, result: Result<(), CallError>) -> Result<(), CallError> {
        let covered =
            self.flushing.iter().position(|(flush, _)| *flush == id).map(|at| self.flushing.swap_remove(at).1);
        let covered = if seeded::is(Bug::FlushCoversLater) { Some(self.next_sequence) } else { covered };
        result?;
        while let Some(entry) = self.log.front() {
            if covered.is_none_or(|covered| entry.sequence >= covered) {
                break;
            }
            self.log_bytes -= log_cost(entry.len, entry.from.is_some());
            self.log.pop_front();
        }
        Ok(())
    }
}
