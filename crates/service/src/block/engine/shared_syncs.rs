//! Syncs that several requests share (group commit).
//!
//! A sync that begins while its open file description has no other answers its requests when it ends. Syncs that are in flight
//! together over one description answer theirs when all of them have ended, since any of them may be told of lost bytes
//! ([`deferred_replies`](super::deferred_replies)). So a request that finds no free description waits while its loop has a sync
//! in flight. When that sync ends, one sync begins for all requests that wait: it covers them, because their writes have completed.

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Op, Outcome, Reactor, Token};

use super::in_flight_io::{InFlightIo, IoKind, RunState, unit_result};
use super::{Done, ENGINE_CLASS, Engine, VolumeId};
use crate::block::error::BlockError;
use crate::block::sync_tracker::Alone;

/// A part of a request that waits for a sync of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct SyncPart {
    pub(super) io: usize,
    pub(super) part: usize,
}

/// The syncs of one file of a volume by this loop.
#[derive(Debug, Default)]
pub(super) struct FileSyncs {
    in_flight: u32,
    /// Requests that wait for a sync that has not begun; at most those in flight on the loop.
    waiting: Vec<SyncPart>,
}

impl Engine {
    /// Syncs a file of the request's volume, by its place there: at once, or together with others.
    pub(super) fn start_sync(&mut self, reactor: &mut Reactor, io: usize, part: usize, file: usize) {
        let InFlightIo { volume: id, fault, kind, .. } = &self.in_flight[io];
        let (id, is_write) = (*id, matches!(kind, IoKind::Write { .. }));
        // A fault of a write is in its first step.
        let faulty = fault.is_some() && !is_write;
        let attached = &mut self.volumes[id.index as usize];
        if !attached.volume.syncs_can_fail() {
            let op = Op::Sync { file: attached.files[file] };
            return self.submit_run(reactor, RunState::new(io, part), op);
        }
        let part = SyncPart { io, part };
        if faulty {
            // It is no fault of other requests.
            let Some((run, op)) = self.begin_sync(id, file, &[part], Alone::No) else { return };
            return self.submit_run(reactor, run, op);
        }
        if seeded::is(Bug::SyncJoinedLate) {
            let of_file = |run: &&mut RunState| run.sync.as_ref().is_some_and(|sync| sync.on().file() == file);
            if let Some(run) = self.runs.iter_mut().map(|(_, run)| run).find(of_file) {
                return run.shared_by.push(part);
            }
        }
        attached.syncs[file].waiting.push(part);
        self.sync_waiting(reactor, id, file);
    }

    /// Begins a sync for all requests that wait for one of the file, if there is a free description, or the loop has none in
    /// flight whose end would begin it.
    fn sync_waiting(&mut self, reactor: &mut Reactor, id: VolumeId, file: usize) {
        let Some(syncs) = self.attached_mut(id).map(|attached| &mut attached.syncs[file]) else { return };
        if syncs.waiting.is_empty() {
            return;
        }
        let alone = if syncs.in_flight > 0 { Alone::Yes } else { Alone::No };
        let parts = std::mem::take(&mut syncs.waiting);
        match self.begin_sync(id, file, &parts, alone) {
            None => self.volumes[id.index as usize].syncs[file].waiting = parts,
            Some((run, op)) => {
                let run = self.runs.insert(run);
                reactor.submit(op, Token::new(ENGINE_CLASS, 0, run as u32, 0));
            }
        }
    }

    /// Counts a sync for some requests; gives what is to be submitted. `None` if it is to be alone and no description is free.
    fn begin_sync(&mut self, id: VolumeId, file: usize, parts: &[SyncPart], alone: Alone) -> Option<(RunState, Op)> {
        let first = *parts.first()?;
        let attached = &mut self.volumes[id.index as usize];
        let more = &attached.more_descriptions[file];
        let tracker = attached.volume.sync_tracker();
        let sync = tracker.begin_sync(attached.deferred.owner, file, 1 + more.len(), alone)?;
        attached.syncs[file].in_flight += 1;
        let by = sync.on().number().checked_sub(1).map_or(attached.files[file], |number| more[number]);
        for part in parts {
            let synced = &mut self.in_flight[part.io].synced;
            if let Err(place) = synced.binary_search(&sync.on()) {
                synced.insert(place, sync.on());
            }
        }
        let run = RunState { sync: Some(sync), shared_by: parts.to_vec(), ..RunState::new(first.io, first.part) };
        Some((run, Op::Sync { file: by }))
    }

    /// A sync has ended: so have the parts of the requests that shared it.
    pub(super) fn sync_ended(
        &mut self,
        reactor: &mut Reactor,
        mut run: RunState,
        injected: Result<(), BlockError>,
        outcome: &Outcome,
        done: &mut Vec<Done>,
    ) {
        let id = self.in_flight[run.io].volume;
        let result = injected.and_then(|()| unit_result(outcome));
        if let Err(error) = result {
            self.note_failure(&run, error);
        }
        let parts = std::mem::take(&mut run.shared_by);
        let Some(sync) = run.sync.take() else { return };
        let file = sync.on().file();
        self.volumes[id.index as usize].syncs[file].in_flight -= 1;
        // Others may go on by that, and must find what was noted.
        sync.end();
        for SyncPart { io: at, part } in parts {
            if matches!(self.in_flight[at].kind, IoKind::Zero(_)) {
                self.zero_went(reactor, at, &RunState::new(at, part), injected, outcome);
            } else {
                let io = &mut self.in_flight[at];
                io.left -= 1;
                io.error = io.error.or(result.err());
            }
            if self.in_flight[at].left == 0 && !self.hold_back(at) {
                self.answer(reactor, at, done);
            }
        }
        // Behind them: they do not wait for a sync that begins now.
        self.sync_waiting(reactor, id, file);
        self.release(reactor, id, done);
    }
}
