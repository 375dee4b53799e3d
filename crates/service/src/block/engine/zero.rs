//! Zeroing: by the store where it can, else by writing zeroes out, range by range.

use std::time::Duration;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Allocate, ByteRange, Op, Outcome, Reactor, Token};

use super::in_flight_io::{InFlightIo, IoKind, RunState, Way, Zeroing, unit_result};
use super::{Counted, ENGINE_CLASS, Engine, Operation, Request, Step, Tag, VolumeId, ZeroFlags};
use crate::block::error::BlockError;
use crate::block::store::Kind;

/// Bytes of zeroes that are written at once where a store cannot zero by itself.
const ZERO_BYTES: usize = 64 << 10;
/// How long zeroing that must write waits for a frame, again and again: as long as others need to end a transfer or two.
const FRAME_WAIT: Duration = Duration::from_millis(2);

impl Engine {
    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// See [`BlockError`]; [`BlockError::Unsupported`] if it must be fast and cannot be.
    pub fn zero(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        ByteRange { offset, len }: ByteRange,
        flags: ZeroFlags,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let request = Request { volume: id, operation: Operation::Zero, offset, len, tag };
        let first = if flags.keep_space { Allocate::ZeroRange } else { Allocate::PunchHole };
        let result = self.start_zeroing(reactor, request, first, flags);
        self.counted(id, Counted::whole(Operation::Zero, len), result)
    }

    /// Begins each range with `first`, goes on as `flags` say where the store cannot do that, and syncs at the end if it
    /// is to be durable.
    pub(super) fn start_zeroing(
        &mut self,
        reactor: &mut Reactor,
        request: Request,
        first: Allocate,
        flags: ZeroFlags,
    ) -> Result<Step<()>, BlockError> {
        let Request { volume: id, offset, len, .. } = request;
        if self.waits_for_replaced(reactor, id) {
            return Ok(Step::Busy);
        }
        let attached = self.check(id, ByteRange::new(offset, len), true)?;
        let Kind::Files { layout, files } = attached.volume.kind() else { return Ok(Step::Now(())) };
        if len == 0 {
            return Ok(Step::Now(()));
        }
        let ranges = layout.ranges(offset, len);
        // A device that keeps the space may write all of it, and does not say whether it will.
        if flags.fast && first == Allocate::ZeroRange && ranges.iter().any(|range| files[range.file].is_device()) {
            return Err(BlockError::Unsupported);
        }
        let synced_max = if seeded::is(Bug::OneFileSynced) { 1 } else { ranges.len() };
        let synced = ranges.iter().filter(|_| flags.durable).take(synced_max);
        let unsynced = synced.map(|range| range.file).collect();
        let piece_bytes_min = self.piece_bytes_min(id);
        let zeroing = Zeroing { flags, ranges, first, way: Way::Store(first), unsynced, piece_bytes_min };
        let io = self.start_io(reactor, request, 1, IoKind::Zero(zeroing));
        self.zero_next(reactor, io);
        Ok(Step::Later)
    }

    /// Starts the next step of zeroing: the first range that is left, by the store; or writing it; or the next file's sync.
    fn zero_next(&mut self, reactor: &mut Reactor, io: usize) {
        let InFlightIo { kind: IoKind::Zero(zeroing), volume, .. } = &mut self.in_flight[io] else { return };
        let files = &self.volumes[volume.index as usize].files;
        let Some(run) = zeroing.ranges.last().copied() else {
            // Without a file to sync it has ended already.
            let Some(file) = zeroing.unsynced.last().copied() else { return };
            return self.start_sync(reactor, io, 0, file);
        };
        let file = files[run.file];
        let op = match zeroing.way {
            Way::Store(mode) => Op::Allocate { file, mode, offset: run.offset, len: run.len },
            Way::Written(at) => {
                let len = (run.offset + run.len - at).min(ZERO_BYTES as u64) as usize;
                // It is done piece by piece anyway.
                let Some(mut from) = reactor.frames().alloc_largest(len, zeroing.piece_bytes_min) else {
                    return self.wait_for_frame(reactor, io);
                };
                from.fill(0);
                let len = from.len();
                // If it is to be durable, one sync of the file is so for all pieces.
                Op::Write { file, offset: at, from, start: 0, len, durable: false }
            }
        };
        let len = if let Op::Write { len, .. } = &op { *len } else { 0 };
        self.start_run(reactor, io, 0, len, op);
    }

    /// Goes on when others may have given frames back.
    fn wait_for_frame(&mut self, reactor: &mut Reactor, io: usize) {
        let run = self.runs.insert(RunState::new(io, 0));
        let at = reactor.now() + FRAME_WAIT;
        reactor.submit(Op::Timer { at }, Token::new(ENGINE_CLASS, 0, run as u32, 0));
    }

    /// A step has ended, as `outcome` says if the fault that was `injected` into it does not say otherwise.
    pub(super) fn zero_went(
        &mut self,
        reactor: &mut Reactor,
        io: usize,
        run: &RunState,
        injected: Result<(), BlockError>,
        outcome: &Outcome,
    ) {
        let result = match (injected, outcome) {
            (Ok(()), Outcome::TimedOut(Ok(()))) => return self.zero_next(reactor, io),
            (Ok(()), Outcome::TimedOut(Err(error))) => Err((*error).into()),
            (injected, outcome) => injected.and_then(|()| unit_result(outcome)),
        };
        if let Err(error) = result {
            self.note_failure(run, error);
        }
        let len = run.len;
        let InFlightIo { kind: IoKind::Zero(zeroing), .. } = &mut self.in_flight[io] else { return };
        let went = match (result, zeroing.way, zeroing.ranges.last().copied()) {
            (Err(BlockError::Unsupported), Way::Store(_), Some(run)) => zeroing.fall_back(run),
            (Err(error), _, _) => Err(error),
            (Ok(()), Way::Written(at), Some(run)) if at + (len as u64) < run.offset + run.len => {
                zeroing.way = Way::Written(at + len as u64);
                Ok(())
            }
            (Ok(()), _, Some(_)) => {
                zeroing.end_range();
                Ok(())
            }
            (Ok(()), _, None) => {
                zeroing.unsynced.pop();
                Ok(())
            }
        };
        if let Err(error) = went {
            return self.end_zeroing(reactor, io, Err(error));
        }
        if zeroing.ranges.is_empty() && zeroing.unsynced.is_empty() {
            return self.end_zeroing(reactor, io, Ok(()));
        }
        self.zero_next(reactor, io);
    }

    fn end_zeroing(&mut self, _reactor: &mut Reactor, io: usize, result: Result<(), BlockError>) {
        let io = &mut self.in_flight[io];
        io.left = 0;
        io.error = result.err();
    }
}
