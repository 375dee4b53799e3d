//! Large writes: pulled from the client piece by piece, when there is a frame for the piece, and written as they come.

use byway_fabric::wire::{Header, Kind as Message};
use byway_fabric::{Closed, Fabric, Slot, WindowKey};
use byway_reactor::Reactor;
use byway_reactor::seeded::{self, Bug};
use byway_rpc::wire::PullBody;
use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

use super::super::engine::{Step, WriteFlags, is_cut_up};
use super::super::wire::CallError;
use super::Serving;
use super::jobs::{Job, Queued, Write};
use crate::limits::PULL_SHARE_MAX;

impl Serving<'_> {
    /// Begins to pull.
    pub(super) fn pull(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, write: Write) {
        let session = write.call.session;
        let slot = self.start_job(session, Job::Write(write));
        if self.waits(session) || !self.pull_one(fabric, reactor, slot) {
            self.wait(session, Queued::Pull(slot));
        }
    }

    /// Asks for the next pieces of a write. False if there are no frames for all that is left.
    pub(super) fn pull_one(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: Slot) -> bool {
        loop {
            let Some(Job::Write(write)) = self.core.jobs.get(slot) else { return true };
            let (call, at, left) = (write.call, write.asked, write.len - write.asked);
            if left == 0 {
                return true;
            }
            if self.engine.is_throttled(reactor, write.volume) {
                return false;
            }
            let len = self.engine.write_run_len(write.volume, write.offset + at as u64, left);
            let (source, budget) = (write.window, reactor.frames().bytes() / PULL_SHARE_MAX);
            if fabric.windows().is_full() || (self.core.pulled_bytes > 0 && self.core.pulled_bytes + len > budget) {
                return false;
            }
            // Where no end of anything would bring larger ones, small pieces must do.
            let small = self.core.pulled_bytes == 0 || is_cut_up(reactor.frames(), len);
            let least = if small { self.engine.piece_bytes_min(write.volume) } else { len };
            let Some(frame) = reactor.frames().alloc_largest(len, least) else { return false };
            let len = frame.len();
            let part = Job::Part { write: slot, session: call.session, key: None, at, len };
            let part = self.start_job(call.session, part);
            let opened = fabric.open_target(call.session, (frame, 0, len), part.to_u64());
            let Some(target) = opened else { return false };
            if let Some(Job::Part { key, .. }) = self.core.jobs.get_mut(part) {
                *key = Some(target);
            }
            if let Some(Job::Write(write)) = self.core.jobs.get_mut(slot) {
                write.asked += len;
            }
            self.core.pulled_bytes += len;
            self.count_pulls(fabric, reactor, call.session, 1);
            let mut body = PullBody::new_zeroed();
            body.call = U64::new(call.id);
            body.target = U64::new(target.0);
            body.len = U32::new(len as u32);
            let mut header = Header::with_body(Message::Pull, &body);
            header.window.set(source.0);
            header.window_offset.set(if seeded::is(Bug::PullAtWrongOffset) { 0 } else { at as u64 });
            fabric.send(call.session, header);
        }
    }

    fn count_pulls(&mut self, fabric: &mut Fabric, reactor: &Reactor, slot: Slot, change: isize) {
        if let Some(session) = self.core.session(slot) {
            session.pulls = session.pulls.saturating_add_signed(change);
            let owes = session.pulls > 0;
            fabric.set_owes(reactor, slot, owes);
        }
    }

    /// A piece has come.
    pub(super) fn pulled(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, header: &Header) {
        let key = WindowKey(header.window.get());
        let Some(part) = fabric.windows().context(key).map(Slot::from_u64) else { return };
        let Some(&Job::Part { write, at, len, .. }) = self.core.jobs.get(part) else { return };
        if header.payload_len() != len {
            return self.part_failed(fabric, reactor, session, part, CallError::Malformed);
        }
        let Closed::Target(frame) = fabric.windows().close(key) else { return };
        if let Some(Job::Part { key, .. }) = self.core.jobs.get_mut(part) {
            *key = None;
        }
        self.count_pulls(fabric, reactor, session, -1);
        let step = match self.core.jobs.get(write) {
            Some(Job::Write(Write { error: None, volume, offset, durable, .. })) => {
                let flags = WriteFlags { durable: *durable };
                let (volume, offset, tag) = (*volume, offset + at as u64, self.core.tag(part));
                self.engine.write(reactor, volume, offset, (frame, len), flags, tag)
            }
            // Another piece has failed: the answer is known.
            _ => Ok(Step::Now(())),
        };
        let result = match step {
            Ok(Step::Later) => return,
            Ok(Step::Now(())) => Ok(()),
            Ok(Step::Busy | Step::InParts) => Err(CallError::Busy),
            Err(error) => Err(error.into()),
        };
        self.end_job(fabric, session, part);
        self.part_ended(fabric, reactor, write, len, result);
    }

    /// The client does not have what we asked it for.
    pub(super) fn pull_refused(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, header: &Header) {
        let body: PullBody = header.body();
        let context = fabric.windows().context(WindowKey(body.target.get()));
        if let Some(part) = context.map(Slot::from_u64)
            && matches!(self.core.jobs.get(part), Some(Job::Part { session: owner, .. }) if *owner == session)
        {
            self.part_failed(fabric, reactor, session, part, CallError::Malformed);
        }
    }

    /// A piece will not come.
    fn part_failed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, part: Slot, error: CallError) {
        let Some(Job::Part { write, len, key, .. }) = self.end_job(fabric, session, part) else { return };
        if let Some(key) = key {
            let _ = fabric.windows().close(key);
            self.count_pulls(fabric, reactor, session, -1);
        }
        self.part_ended(fabric, reactor, write, len, Err(error));
    }

    /// A piece was written, or will not be.
    pub(super) fn part_ended(
        &mut self,
        fabric: &mut Fabric,
        _reactor: &mut Reactor,
        write: Slot,
        len: usize,
        result: Result<(), CallError>,
    ) {
        self.core.pulled_bytes -= len;
        let Some(Job::Write(state)) = self.core.jobs.get_mut(write) else { return };
        state.left -= len;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        let (call, left, result) = (state.call, state.left, state.error.map_or(Ok(()), Err));
        if result.is_err() && seeded::is(Bug::DoubleReply) {
            self.answer(fabric, call, result);
        }
        if left > 0 && !seeded::is(Bug::EarlyAcknowledgement) {
            return;
        }
        self.answer(fabric, call, result);
        self.end_job(fabric, call.session, write);
    }

    /// A session's lanes are gone: the pieces that were on their way will not come.
    pub(super) fn end_pulls_of(&mut self, fabric: &mut Fabric, session: Slot) {
        if seeded::is(Bug::PiecesOfTheDead) {
            return;
        }
        let parts: Vec<_> = self
            .core
            .jobs
            .iter()
            .filter_map(|(slot, job)| match job {
                Job::Part { session: owner, key: Some(key), .. } if *owner == session => Some((slot, *key)),
                _ => None,
            })
            .collect();
        for (part, key) in parts {
            let _ = fabric.windows().close(key);
            let Some(Job::Part { write, len, .. }) = self.core.jobs.remove(part) else { continue };
            self.core.pulled_bytes -= len;
            if let Some(session) = self.core.session(session) {
                session.jobs -= 1;
            }
            let Some(Job::Write(state)) = self.core.jobs.get_mut(write) else { continue };
            state.left -= len;
            if state.left == 0 {
                self.core.jobs.remove(write);
                if let Some(session) = self.core.session(session) {
                    session.jobs -= 1;
                }
            }
        }
    }
}
