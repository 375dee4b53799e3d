//! Reads: from mapped files without a copy, otherwise into frames; also prefetch and extents.

use byway_reactor::{ByteRange, Extent, File, Frame, FramePool, Op, Reactor};

use super::in_flight_io::SliceState;
use super::stage::{Stage, in_device};
use super::{Counted, Engine, IoKind, Operation, ReadFlags, Request, Step, Tag, VolumeId, is_cut_up};
use crate::block::error::BlockError;
use crate::block::payload::{Payload, Piece};
use crate::block::store::Kind;
use crate::block::stripe::{Layout, StripeExtent};
use crate::limits::{
    EXTENT_PIECES_MAX, EXTENTS_MAX, LISTS_MAX, PIECE_BYTES_MAX, READ_FRAME_BYTES_MAX, REQUEST_BYTES_MAX,
};

impl Engine {
    /// Reads.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn read(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        range: ByteRange,
        flags: ReadFlags,
        tag: Tag,
    ) -> Result<Step<Payload>, BlockError> {
        let result = self.start_read(reactor, id, range, flags, tag);
        self.counted(id, Counted { operation: Operation::Read, len: range.len, part: flags.part }, result)
    }

    /// The longest read that takes frames all at once; a longer one is [`Step::InParts`].
    pub fn read_bytes_max(&self, reactor: &Reactor) -> usize {
        let pool_bytes = self.staging.as_ref().map_or(reactor.frames().bytes() / 2, FramePool::bytes);
        READ_FRAME_BYTES_MAX.min(pool_bytes)
    }

    fn start_read(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        range: ByteRange,
        flags: ReadFlags,
        tag: Tag,
    ) -> Result<Step<Payload>, BlockError> {
        if self.is_throttled(reactor, id) {
            return Ok(Step::Busy);
        }
        let attached = self.check(id, range, false)?;
        if range.len > REQUEST_BYTES_MAX {
            return Err(BlockError::TooLong);
        }
        let (offset, len) = (range.offset, range.len as usize);
        if len == 0 {
            return Ok(Step::Now(Payload::default()));
        }
        let &Kind::Files { layout, ref files } = attached.volume.kind() else {
            self.charge(reactor, id, len);
            return Ok(Step::Now(Payload::one(Piece::Zero { len })));
        };
        if !flags.private
            && files[0].is_mapped()
            && !attached.volume.has_faults()
            && let Some(payload) = resident_payload(reactor, layout, &attached.files, offset, len)
        {
            self.charge(reactor, id, len);
            return Ok(Step::Now(payload));
        }
        if len > self.read_bytes_max(reactor) {
            return Ok(Step::InParts);
        }
        let attached = self.attached(id)?;
        let mut longest = self.slice_bytes.min(PIECE_BYTES_MAX as u64);
        let pool = self.staging.as_ref().unwrap_or(reactor.frames());
        let stages = if flags.device && !flags.private { attached.stages.as_slice() } else { &[] };
        let frames = loop {
            match frames_for(pool, stages, layout.extents(offset, len as u64, longest)) {
                Some(frames) => break frames,
                // Where no end of anything would bring larger ones, small pieces must do.
                None if (self.in_flight.is_empty() || is_cut_up(pool, len))
                    && longest / 2 >= self.piece_bytes_min(id) as u64 =>
                {
                    longest /= 2;
                }
                None => return Ok(Step::Busy),
            }
        };
        let files = attached.files.clone();
        let pieces = std::iter::repeat_with(|| None).take(frames.len()).collect();
        self.charge(reactor, id, len);
        let request = Request { volume: id, operation: Operation::Read, offset, len: len as u64, tag };
        let slices =
            if flags.sliced { slices(frames.iter().map(|(run, _)| run.len), self.slice_bytes) } else { Vec::new() };
        let io = self.start_io(reactor, request, frames.len(), IoKind::Read { pieces, slices });
        self.in_flight[io].part = flags.part;
        for (part, (run, into)) in frames.into_iter().enumerate() {
            let len = run.len as usize;
            let op = Op::Read { file: files[run.file], offset: run.offset, into, start: 0, len };
            self.start_run(reactor, io, part, len, op);
        }
        Ok(Step::Later)
    }

    /// Brings a range into memory before it is asked for.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn prefetch(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        range: ByteRange,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let attached = self.check(id, range, false)?;
        let ByteRange { offset, len } = range;
        let Kind::Files { layout, files } = attached.volume.kind() else { return Ok(Step::Now(())) };
        if files[0].options().direct || len == 0 {
            return Ok(Step::Now(()));
        }
        let ranges = layout.ranges(offset, len);
        let files = attached.files.clone();
        let request = Request { volume: id, operation: Operation::Prefetch, offset, len, tag };
        let io = self.start_io(reactor, request, ranges.len(), IoKind::Plain);
        for (part, run) in ranges.into_iter().enumerate() {
            let op = Op::Prefetch { file: files[run.file], offset: run.offset, len: run.len };
            self.start_run(reactor, io, part, 0, op);
        }
        Ok(Step::Later)
    }

    /// Lists data and holes: at most `count_max`, whatever is left of the range then.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn extents(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        range: ByteRange,
        count_max: usize,
        tag: Tag,
    ) -> Result<Step<Vec<Extent>>, BlockError> {
        let attached = self.check(id, range, false)?;
        let ByteRange { offset, len } = range;
        if len == 0 {
            return Ok(Step::Now(Vec::new()));
        }
        let Kind::Files { layout, .. } = attached.volume.kind() else {
            return Ok(Step::Now(vec![Extent { len, hole: true }]));
        };
        if self.listing >= LISTS_MAX {
            return Ok(Step::Busy);
        }
        let count_max = count_max.clamp(1, EXTENTS_MAX);
        let runs: Vec<_> = layout.extents(offset, len, u64::MAX).take(EXTENT_PIECES_MAX).collect();
        let files = attached.files.clone();
        let wanted = runs.iter().map(|run| run.len).collect();
        let kind = IoKind::Extents { parts: vec![None; runs.len()], wanted, count_max };
        let request = Request { volume: id, operation: Operation::Extents, offset, len, tag };
        let io = self.start_io(reactor, request, runs.len(), kind);
        for (part, run) in runs.into_iter().enumerate() {
            let op = Op::Extents { file: files[run.file], offset: run.offset, len: run.len, count_max };
            self.start_run(reactor, io, part, 0, op);
        }
        Ok(Step::Later)
    }
}

/// A frame for each run, in its file's stage if one is free there, else of `pool`; `None` if there are not enough.
fn frames_for(
    pool: &FramePool,
    stages: &[Stage],
    runs: impl Iterator<Item = StripeExtent>,
) -> Option<Vec<(StripeExtent, Frame)>> {
    let frame = |run: &StripeExtent| {
        let len = run.len as usize;
        in_device(stages, run.file, len).or_else(|| pool.alloc(len))
    };
    runs.map(|run| frame(&run).map(|frame| (run, frame))).collect()
}

/// Cuts a read whose operations have those lengths into slices of about `bytes` each; none, if it would be one.
fn slices(lens: impl Iterator<Item = u64>, bytes: u64) -> Vec<SliceState> {
    let mut slices: Vec<SliceState> = Vec::new();
    let mut start = 0;
    for (first, len) in lens.enumerate() {
        match slices.last_mut() {
            Some(slice) if start + len - slice.start <= bytes => slice.left += 1,
            _ => slices.push(SliceState { start, first, left: 1 }),
        }
        start += len;
    }
    if slices.len() == 1 { Vec::new() } else { slices }
}

/// The range as pieces of the mapped files, if all of it is in memory.
fn resident_payload(reactor: &mut Reactor, layout: Layout, files: &[File], offset: u64, len: usize) -> Option<Payload> {
    if layout.files == 1 {
        let file = files[0];
        return reactor.resident(file, offset, len).then(|| Payload::one(Piece::Map { file, offset, len }));
    }
    let mut payload = Payload::default();
    for run in layout.extents(offset, len as u64, u64::MAX) {
        let (file, len) = (files[run.file], run.len as usize);
        if !reactor.resident(file, run.offset, len) {
            return None;
        }
        payload.push(Piece::Map { file, offset: run.offset, len });
    }
    Some(payload)
}
