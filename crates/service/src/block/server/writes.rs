//! Large writes: pulled from the client piece by piece, when there is a frame for the piece, and written as they come.

use byway_fabric::{EndedGet, Fabric, Remote, SessionId};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{FrameRange, Reactor};

use super::super::engine::{Begun, WriteFlags, is_cut_up};
use super::super::wire::{CallError, PROTOCOL};
use super::ServerContext;
use super::requests::{BlockRequest, BlockRequestId, Write};
use super::waiting::Queued;
use crate::host::get;

/// How far a pull has come.
pub(super) enum Pulled {
    /// A piece of so many bytes was asked for.
    Piece(usize),
    /// All was asked for already.
    All,
    /// There is no frame, or no share of them, for the next piece.
    Nothing,
}

impl ServerContext<'_> {
    /// Begins to pull, unless others wait for that.
    pub(super) fn pull(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, write: Write) {
        let session = write.call.session;
        let slot = self.start_request(session, BlockRequest::Write(write));
        if self.core.pulls.is_empty() {
            while !self.sessions.must_wait(fabric, reactor, session) {
                match self.pull_piece(fabric, reactor, slot) {
                    Pulled::Piece(_) => {}
                    Pulled::All => return,
                    Pulled::Nothing => break,
                }
            }
        }
        self.wait(reactor, session, Queued::Pull(slot));
    }

    /// Asks for the next piece of a write.
    pub(super) fn pull_piece(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: BlockRequestId) -> Pulled {
        let Some(BlockRequest::Write(write)) = self.core.in_flight.get(slot) else { return Pulled::All };
        let (call, at, left) = (write.call, write.asked, write.len - write.asked);
        if left == 0 {
            return Pulled::All;
        }
        if self.engine.is_throttled(reactor, write.volume) {
            return Pulled::Nothing;
        }
        let len = self.engine.write_run_len(write.volume, write.offset + at as u64, left);
        let (source, budget) = (write.window, self.engine.pulled_bytes_max(reactor));
        if fabric.windows().is_full() || (self.core.pulled_bytes > 0 && self.core.pulled_bytes + len > budget) {
            return Pulled::Nothing;
        }
        // Where no end of anything would bring larger ones, small pieces must do.
        let small = self.core.pulled_bytes == 0 || is_cut_up(reactor.frames(), len);
        let least = if small { self.engine.piece_bytes_min(write.volume) } else { len };
        let Some(frame) = reactor.frames().alloc_largest(len, least) else { return Pulled::Nothing };
        let len = frame.len();
        let part = self.start_request(call.session, BlockRequest::Part { write: slot, session: call.session, at, len });
        let offset = if seeded::is(Bug::PullAtWrongOffset) { 0 } else { at as u64 };
        let from = Remote { window: source, offset };
        if get(fabric, reactor, call.session, from, frame, PROTOCOL, part.to_u64()).is_err() {
            self.end_request(fabric, call.session, part);
            return Pulled::Nothing;
        }
        self.sessions.note_transfer(fabric, call.session, from, len, false);
        if let Some(BlockRequest::Write(write)) = self.core.in_flight.get_mut(slot) {
            write.asked += len;
        }
        self.core.pulled_bytes += len;
        self.sessions.note_held(call.session, len);
        Pulled::Piece(len)
    }

    /// A piece has come, or will not come.
    pub(super) fn pulled(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, get: EndedGet) {
        let part = BlockRequestId::from_u64(get.context);
        let Some(&BlockRequest::Part { write, at, len, .. }) = self.core.in_flight.get(part) else { return };
        let step = match (get.into_frame(), self.core.in_flight.get(write)) {
            (Err(_), _) => Err(CallError::Malformed),
            (Ok(frame), Some(BlockRequest::Write(Write { error: None, volume, offset, durable, .. }))) => {
                let flags = WriteFlags { durable: *durable };
                let (volume, offset, tag) = (*volume, offset + at as u64, self.core.tag(part));
                self.engine
                    .write(reactor, volume, offset, FrameRange::new(frame, 0, len), flags, tag)
                    .map_err(CallError::from)
            }
            // Another piece has failed: the answer is known.
            (Ok(_), _) => Ok(Begun::Now),
        };
        let result = match step {
            Ok(Begun::Later) => return,
            Ok(Begun::Now) => Ok(()),
            Err(error) => Err(error),
        };
        self.end_request(fabric, session, part);
        self.part_ended(fabric, write, len, result);
    }

    /// A piece was written, or will not be.
    pub(super) fn part_ended(
        &mut self,
        fabric: &mut Fabric,
        write: BlockRequestId,
        len: usize,
        result: Result<(), CallError>,
    ) {
        self.core.pulled_bytes -= len;
        if let Some(BlockRequest::Write(state)) = self.core.in_flight.get(write) {
            self.sessions.note_released(state.call.session, len);
        }
        let Some(BlockRequest::Write(state)) = self.core.in_flight.get_mut(write) else { return };
        state.left -= len;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        let (call, volume, left) = (state.call, state.volume, state.left);
        let result = state.error.map_or(Ok(()), Err);
        if left > 0 && !seeded::is(Bug::EarlyAcknowledgement) {
            return;
        }
        if result.is_ok() {
            self.engine.note_written(volume);
        }
        self.answer(fabric, call, result);
        self.end_request(fabric, call.session, write);
    }
}
