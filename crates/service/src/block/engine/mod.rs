//! The engine: serves requests on the volumes of one loop, by the cheapest path that each allows.
//!
//! A read of bytes that are in the page cache is answered at once with a range of the mapped file: nothing is copied in
//! user space. Other reads go to the store in pieces, into frames. Writes to memory happen at once; others on the ring.
//! The engine holds no queue: where frames run out it says [`Step::Busy`], and the door that asked keeps the request.

mod job;
mod zero;

use std::sync::Arc;

use byway_reactor::{Allocate, Completion, Extent, File, Frame, Op, Reactor, Socket, Token};
use slab::Slab;

use self::job::{Job, JobKind, RunState, unit_result};
use super::error::BlockError;
use super::payload::{Payload, Piece};
use super::store::Kind;
use super::stripe::Layout;
use super::volume::Volume;
use crate::limits::{
    EXTENT_PIECES_MAX, EXTENTS_MAX, MEMORY_PIECE_BYTES, PIECE_BYTES_MAX, READ_FRAME_BYTES_MAX, REQUEST_BYTES_MAX,
};

/// The class of the engine's tokens: completions of this class belong to [`Engine::complete`].
pub const ENGINE_CLASS: u8 = 0x10;

/// The asker's label of a request, handed back with its [`Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// A volume as one loop knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VolumeId(u32);

/// How a request went on.
#[derive(Debug)]
pub enum Step<T> {
    /// It is done.
    Now(T),
    /// A [`Done`] will tell.
    Later,
    /// No frame is free: ask again when one may be.
    Busy,
    /// It needs more frames than one request may hold: ask for parts of at most
    /// [`READ_FRAME_BYTES_MAX`] bytes, one after the other.
    InParts,
}

impl<T> Step<T> {
    /// The same step with another value.
    pub fn map<U>(self, with: impl FnOnce(T) -> U) -> Step<U> {
        match self {
            Self::Now(value) => Step::Now(with(value)),
            Self::Later => Step::Later,
            Self::Busy => Step::Busy,
            Self::InParts => Step::InParts,
        }
    }
}

/// A request that has ended.
#[derive(Debug)]
pub struct Done {
    /// As it was given.
    pub tag: Tag,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a request.
#[derive(Debug)]
pub enum Outcome {
    /// A read.
    Read(Result<Payload, BlockError>),
    /// A write, flush, trim, zero or prefetch.
    Unit(Result<(), BlockError>),
    /// A list of extents: in order, without gaps, perhaps shorter than asked.
    Extents(Result<Vec<Extent>, BlockError>),
}

/// How a write is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFlags {
    /// Durable before it completes (FUA).
    pub durable: bool,
}

/// How a range is zeroed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The space stays allocated.
    pub keep_space: bool,
    /// Fail rather than write zeroes out.
    pub fast: bool,
    /// Durable before it completes.
    pub durable: bool,
}

/// See the module.
#[derive(Default)]
pub struct Engine {
    volumes: Slab<Attached>,
    jobs: Slab<Job>,
    runs: Slab<RunState>,
}

struct Attached {
    volume: Arc<Volume>,
    files: Vec<File>,
    jobs: u32,
    detached: bool,
}

impl Engine {
    /// Makes a volume ready to be served on this loop.
    pub fn attach(&mut self, reactor: &mut Reactor, volume: Arc<Volume>) -> VolumeId {
        let files = match volume.kind() {
            Kind::Files { files, .. } => files.iter().map(|file| reactor.add_file(Arc::clone(file))).collect(),
            Kind::Null => Vec::new(),
        };
        VolumeId(self.volumes.insert(Attached { volume, files, jobs: 0, detached: false }) as u32)
    }

    /// Lets go of a volume: once its requests have ended, this loop no longer holds it. New requests are an error of
    /// the caller.
    pub fn detach(&mut self, reactor: &mut Reactor, id: VolumeId) {
        self.volumes[id.0 as usize].detached = true;
        self.drop_if_unused(reactor, id);
    }

    fn drop_if_unused(&mut self, reactor: &mut Reactor, id: VolumeId) {
        let attached = &self.volumes[id.0 as usize];
        if attached.detached && attached.jobs == 0 {
            for file in self.volumes.remove(id.0 as usize).files {
                reactor.remove_file(file);
            }
        }
    }

    /// The volume behind an id.
    pub fn volume(&self, id: VolumeId) -> &Arc<Volume> {
        &self.volumes[id.0 as usize].volume
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.jobs.len()
    }

    fn check(&self, id: VolumeId, offset: u64, len: u64, writes: bool) -> Result<&Attached, BlockError> {
        let attached = &self.volumes[id.0 as usize];
        let volume = &attached.volume;
        if writes && volume.is_read_only() {
            return Err(BlockError::ReadOnly);
        }
        if offset.checked_add(len).is_none_or(|end| end > volume.len()) {
            return Err(if writes { BlockError::NoSpace } else { BlockError::OutOfRange });
        }
        if (offset | len) & u64::from(volume.block_bytes() - 1) != 0 {
            return Err(BlockError::Misaligned);
        }
        Ok(attached)
    }

    /// Reads.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn read(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        offset: u64,
        len: usize,
        tag: Tag,
    ) -> Result<Step<Payload>, BlockError> {
        self.read_into(reactor, id, (offset, len), false, tag)
    }

    /// Reads into frames alone: nobody else can change the bytes until they are sent, so they can have a checksum.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn read_private(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        range: (u64, usize),
        tag: Tag,
    ) -> Result<Step<Payload>, BlockError> {
        self.read_into(reactor, id, range, true, tag)
    }

    fn read_into(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        (offset, len): (u64, usize),
        private: bool,
        tag: Tag,
    ) -> Result<Step<Payload>, BlockError> {
        let attached = self.check(id, offset, len as u64, false)?;
        if len as u64 > REQUEST_BYTES_MAX {
            return Err(BlockError::TooLong);
        }
        let Kind::Files { layout, files } = attached.volume.kind() else {
            return Ok(Step::Now(Payload::one(Piece::Zero { len })));
        };
        if !private
            && files[0].is_mapped()
            && let Some(payload) = resident_payload(reactor, *layout, &attached.files, offset, len)
        {
            return Ok(Step::Now(payload));
        }
        if len > READ_FRAME_BYTES_MAX.min(reactor.frames().bytes() / 2) {
            return Ok(Step::InParts);
        }
        let layout = *layout;
        let runs = layout.runs(offset, len as u64, PIECE_BYTES_MAX as u64);
        let mut frames = Vec::with_capacity(len.div_ceil(PIECE_BYTES_MAX));
        for run in runs {
            let Some(frame) = reactor.frames().alloc(run.len as usize) else { return Ok(Step::Busy) };
            frames.push((run, frame));
        }
        let files = attached.files.clone();
        let pieces = std::iter::repeat_with(|| None).take(frames.len()).collect();
        let job = self.start_job(id, tag, frames.len(), JobKind::Read { pieces });
        for (part, (run, into)) in frames.into_iter().enumerate() {
            let len = run.len as usize;
            let op = Op::Read { file: files[run.file], offset: run.offset, into, start: 0, len };
            self.start_run(reactor, job, part, len, op);
        }
        Ok(Step::Later)
    }

    /// How many of the next `len` bytes at `offset` can be given to one [`Engine::write`].
    pub fn write_piece_len(&self, id: VolumeId, offset: u64, len: usize) -> usize {
        let len = len.min(PIECE_BYTES_MAX);
        match self.volumes[id.0 as usize].volume.kind() {
            Kind::Files { layout, files } => {
                let run = layout.run(offset, len as u64);
                let page = (offset % MEMORY_PIECE_BYTES as u64) as usize;
                let len = run.len as usize;
                if files[0].is_receivable() { len.min(MEMORY_PIECE_BYTES - page) } else { len }
            }
            Kind::Null => len,
        }
    }

    /// As [`Engine::write_piece_len`], for a door that receives into frames alone: pieces are as long as they may be.
    pub fn write_run_len(&self, id: VolumeId, offset: u64, len: usize) -> usize {
        let len = len.min(PIECE_BYTES_MAX);
        match self.volumes[id.0 as usize].volume.kind() {
            Kind::Files { layout, .. } => layout.run(offset, len as u64).len as usize,
            Kind::Null => len,
        }
    }

    /// Receives what is here of a write's payload straight into a volume in memory, as
    /// [`Reactor::receive_into_file`] does; gives the bytes that are thereby written. 0 means to do it by
    /// [`Engine::write`].
    pub fn receive_into(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        socket: Socket,
        offset: u64,
        len: usize,
    ) -> usize {
        let attached = &self.volumes[id.0 as usize];
        let Kind::Files { layout, .. } = attached.volume.kind() else { return 0 };
        if attached.volume.is_read_only() {
            return 0;
        }
        let run = layout.run(offset, len as u64);
        reactor.receive_into_file(socket, attached.files[run.file], run.offset, run.len as usize)
    }

    /// Whether a write of the range could succeed: to ask before its payload is received.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn check_write(&self, id: VolumeId, offset: u64, len: u64) -> Result<(), BlockError> {
        self.check(id, offset, len, true).map(|_| ())
    }

    /// Writes `from[..len]`, at most [`Engine::write_piece_len`] bytes.
    ///
    /// # Errors
    /// See [`BlockError`]; the frame is gone then.
    pub fn write(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        offset: u64,
        (from, len): (Frame, usize),
        flags: WriteFlags,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let attached = self.check(id, offset, len as u64, true)?;
        let Kind::Files { layout, .. } = attached.volume.kind() else { return Ok(Step::Now(())) };
        let run = layout.run(offset, len as u64);
        if run.len < len as u64 {
            return Err(BlockError::TooLong);
        }
        let file = attached.files[run.file];
        let durable = flags.durable && !cfg!(feature = "drop-flushes");
        if !durable {
            match reactor.try_write(file, run.offset, &from[..len]) {
                Ok(()) => return Ok(Step::Now(())),
                Err(byway_reactor::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let job = self.start_job(id, tag, 1, JobKind::Write { durable });
        let op = Op::Write { file, offset: run.offset, from, start: 0, len, durable };
        self.start_run(reactor, job, 0, len, op);
        Ok(Step::Later)
    }

    /// Writes bytes that stay the caller's: at once where the store is memory, else by way of a copy in a frame.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn write_small(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        offset: u64,
        bytes: &[u8],
        flags: WriteFlags,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let attached = self.check(id, offset, bytes.len() as u64, true)?;
        let Kind::Files { layout, .. } = attached.volume.kind() else { return Ok(Step::Now(())) };
        let durable = flags.durable && !cfg!(feature = "drop-flushes");
        let mut left = Vec::new();
        let mut done = 0;
        for run in layout.runs(offset, bytes.len() as u64, PIECE_BYTES_MAX as u64) {
            let part = &bytes[done..done + run.len as usize];
            done += part.len();
            let file = attached.files[run.file];
            let written =
                if durable { Err(byway_reactor::Errno::AGAIN) } else { reactor.try_write(file, run.offset, part) };
            match written {
                Ok(()) => {}
                Err(byway_reactor::Errno::AGAIN) => {
                    let Some(mut frame) = reactor.frames().alloc(part.len()) else { return Ok(Step::Busy) };
                    frame.copy_from_slice(part);
                    left.push((file, run, frame));
                }
                Err(error) => return Err(error.into()),
            }
        }
        if left.is_empty() {
            return Ok(Step::Now(()));
        }
        let job = self.start_job(id, tag, left.len(), JobKind::Write { durable });
        for (part, (file, run, from)) in left.into_iter().enumerate() {
            let len = run.len as usize;
            let op = Op::Write { file, offset: run.offset, from, start: 0, len, durable };
            self.start_run(reactor, job, part, len, op);
        }
        Ok(Step::Later)
    }

    /// Makes durable all writes that completed before.
    ///
    /// # Errors
    /// [`BlockError::FlushFailed`] once one has failed.
    pub fn flush(&mut self, reactor: &mut Reactor, id: VolumeId, tag: Tag) -> Result<Step<()>, BlockError> {
        let attached = &self.volumes[id.0 as usize];
        if attached.volume.flush_failed() {
            return Err(BlockError::FlushFailed);
        }
        if attached.files.is_empty() || attached.volume.is_read_only() || cfg!(feature = "drop-flushes") {
            return Ok(Step::Now(()));
        }
        let files = attached.files.clone();
        let job = self.start_job(id, tag, files.len(), JobKind::Flush);
        for (part, file) in files.into_iter().enumerate() {
            self.start_run(reactor, job, part, 0, Op::Sync { file });
        }
        Ok(Step::Later)
    }

    /// Says that a range is no longer needed. What it reads as afterwards is not defined, but is the same at each read.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn trim(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        (offset, len): (u64, u64),
        durable: bool,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        self.check(id, offset, len, true)?;
        if durable {
            // A hole that must be durable: the zeroing path syncs.
            let flags = ZeroFlags { durable, ..ZeroFlags::default() };
            return self.zero(reactor, id, (offset, len), flags, tag);
        }
        self.allocate(reactor, id, (offset, len), Allocate::Discard, JobKind::Trim, tag)
    }

    fn allocate(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        (offset, len): (u64, u64),
        mode: Allocate,
        kind: JobKind,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let attached = &self.volumes[id.0 as usize];
        let Kind::Files { layout, .. } = attached.volume.kind() else { return Ok(Step::Now(())) };
        if len == 0 {
            return Ok(Step::Now(()));
        }
        let ranges = layout.ranges(offset, len);
        let files = attached.files.clone();
        let job = self.start_job(id, tag, ranges.len(), kind);
        for (part, run) in ranges.into_iter().enumerate() {
            let op = Op::Allocate { file: files[run.file], mode, offset: run.offset, len: run.len };
            self.start_run(reactor, job, part, 0, op);
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
        (offset, len): (u64, u64),
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let attached = self.check(id, offset, len, false)?;
        let Kind::Files { layout, files } = attached.volume.kind() else { return Ok(Step::Now(())) };
        if files[0].options().direct || len == 0 {
            return Ok(Step::Now(()));
        }
        let ranges = layout.ranges(offset, len);
        let files = attached.files.clone();
        let job = self.start_job(id, tag, ranges.len(), JobKind::Plain);
        for (part, run) in ranges.into_iter().enumerate() {
            let op = Op::Prefetch { file: files[run.file], offset: run.offset, len: run.len };
            self.start_run(reactor, job, part, 0, op);
        }
        Ok(Step::Later)
    }

    /// Lists data and holes.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn extents(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        (offset, len): (u64, u64),
        count_max: usize,
        tag: Tag,
    ) -> Result<Step<Vec<Extent>>, BlockError> {
        let attached = self.check(id, offset, len, false)?;
        let Kind::Files { layout, .. } = attached.volume.kind() else {
            return Ok(Step::Now(vec![Extent { len, hole: true }]));
        };
        if len == 0 {
            return Ok(Step::Now(Vec::new()));
        }
        let count_max = count_max.clamp(1, EXTENTS_MAX);
        let runs: Vec<_> = layout.runs(offset, len, u64::MAX).take(EXTENT_PIECES_MAX).collect();
        let files = attached.files.clone();
        let wanted = runs.iter().map(|run| run.len).collect();
        let kind = JobKind::Extents { parts: vec![None; runs.len()], wanted };
        let job = self.start_job(id, tag, runs.len(), kind);
        for (part, run) in runs.into_iter().enumerate() {
            let op = Op::Extents { file: files[run.file], offset: run.offset, len: run.len, count_max };
            self.start_run(reactor, job, part, 0, op);
        }
        Ok(Step::Later)
    }

    fn start_job(&mut self, volume: VolumeId, tag: Tag, runs: usize, kind: JobKind) -> usize {
        self.volumes[volume.0 as usize].jobs += 1;
        self.jobs.insert(Job { tag, volume, left: runs as u32, error: None, kind })
    }

    fn start_run(&mut self, reactor: &mut Reactor, job: usize, part: usize, len: usize, op: Op) {
        let run = self.runs.insert(RunState { job, part, len });
        reactor.submit(op, Token::new(ENGINE_CLASS, 0, run as u32, 0));
    }

    /// Takes a completion of [`ENGINE_CLASS`]; appends the request that it ends, if it ends one.
    pub fn complete(&mut self, reactor: &mut Reactor, completion: Completion, done: &mut Vec<Done>) {
        let Some(run) = self.runs.try_remove(completion.token.index() as usize) else { return };
        if matches!(self.jobs[run.job].kind, JobKind::Zero(_)) {
            let result = unit_result(&completion.outcome);
            self.zero_went(reactor, run.job, run.len, result);
        } else {
            let job = &mut self.jobs[run.job];
            job.left -= 1;
            if let Err(error) = job.take(run, completion.outcome) {
                job.error.get_or_insert(error);
            }
        }
        if self.jobs[run.job].left == 0 {
            let job = self.jobs.remove(run.job);
            let id = job.volume;
            let attached = &mut self.volumes[id.0 as usize];
            attached.jobs -= 1;
            done.push(job.end(&attached.volume));
            self.drop_if_unused(reactor, id);
        }
    }
}

/// The range as pieces of the mapped files, if all of it is in memory.
fn resident_payload(reactor: &mut Reactor, layout: Layout, files: &[File], offset: u64, len: usize) -> Option<Payload> {
    if layout.files == 1 {
        let file = files[0];
        return reactor.resident(file, offset, len).then(|| Payload::one(Piece::Map { file, offset, len }));
    }
    let mut payload = Payload::default();
    for run in layout.runs(offset, len as u64, u64::MAX) {
        let (file, len) = (files[run.file], run.len as usize);
        if !reactor.resident(file, run.offset, len) {
            return None;
        }
        payload.push(Piece::Map { file, offset: run.offset, len });
    }
    Some(payload)
}
