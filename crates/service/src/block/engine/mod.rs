//! The engine: serves requests on the volumes of one loop, by the cheapest path that each allows.
//!
//! A read of bytes that are in the page cache is answered at once with a range of the mapped file: nothing is copied in
//! user space. Other reads go to the store in pieces, into frames. Writes to memory happen at once; others on the ring.
//! The engine holds no queue: where frames run out it says [`Step::Busy`], and the front end that asked keeps the request.

mod attached;
mod change;
mod count;
mod deferred_replies;
mod fault;
mod in_flight_io;
mod read;
mod shared_syncs;
mod stage;
mod times;
mod write;
mod zero;

use std::time::Duration;

use byway_reactor::{ByteRange, Completion, Extent, FramePool, Instant, Op, Reactor, Token};
use slab::Slab;

use self::attached::Attached;
use self::count::{Counted, SlowLog};
pub use self::count::{Operation, Slow, VolumeCounters};
use self::deferred_replies::TAG_POLL_SYNCS;
use self::fault::RunFault;
pub(super) use self::fault::{Effect, Fault};
use self::in_flight_io::{InFlightIo, IoKind, RunState};
pub use self::times::{StoreTimes, TimeHistogram};
use super::error::BlockError;
use super::failures::StoreFailure;
use super::payload::Payload;
#[cfg(doc)]
use crate::limits::READ_FRAME_BYTES_MAX;
use crate::limits::{FREE_SHARE_MIN, JOBS_MAX, PULL_SHARE_MAX, SLICE_BYTES};

/// The class of the engine's tokens: completions of this class belong to [`Engine::complete`].
pub const ENGINE_CLASS: u8 = 0x10;

/// The asker's label of a request, handed back with its [`Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// A volume as one loop knows it. The id of a volume that is gone never names another: requests on it are answered
/// [`BlockError::Closed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VolumeId {
    index: u32,
    generation: u32,
}

/// How a request went on.
#[derive(Debug)]
pub enum Step<T> {
    /// It is done.
    Now(T),
    /// A [`Done`] will tell.
    Later,
    /// No frame is free, or the volume has had its bytes for now ([`Engine::throttled_until`]): ask again later.
    Busy,
    /// It needs more frames than one request may hold: ask for parts of at most
    /// [`READ_FRAME_BYTES_MAX`] bytes, one after the other.
    InParts,
}

/// How a request went on that needs nothing but what it brings: the engine never has to be asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a request that is `Later` is not done"]
pub enum Begun {
    /// It is done.
    Now,
    /// A [`Done`] will tell.
    Later,
}

impl From<Begun> for Step<()> {
    fn from(begun: Begun) -> Self {
        match begun {
            Begun::Now => Self::Now(()),
            Begun::Later => Self::Later,
        }
    }
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
    /// A read: all of it, or how it ended after the slices that were told before.
    Read(Result<Payload, BlockError>),
    /// A part of a read that is told in slices ([`ReadFlags::sliced`]), while the disk still reads the others. They come
    /// in any order.
    Slice(Slice),
    /// A write, flush, trim, zero or prefetch.
    Unit(Result<(), BlockError>),
    /// A list of extents: in order, without gaps, perhaps shorter than asked.
    Extents(Result<Vec<Extent>, BlockError>),
}

/// A part of a read.
#[derive(Debug)]
pub struct Slice {
    /// Where it begins, in bytes from the start of the read.
    pub start: u64,
    /// The bytes.
    pub payload: Payload,
    /// The read ends with it: no other outcome comes.
    pub last: bool,
}

/// How a read is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadFlags {
    /// In frames alone: nothing else can change the bytes until they are sent, so they can have a checksum.
    pub private: bool,
    /// A long read that must wait for its store is told slice by slice, each as soon as it is here
    /// ([`Outcome::Slice`]), so that the wire starts before the disk has finished (gmblock's synchronized send). If it
    /// fails in the middle, slices that are good are told all the same, and [`Outcome::Read`] with the error comes last.
    pub sliced: bool,
    /// The bytes are for the kernel alone to read, on their way into a plain socket: so they may lie in a device's memory,
    /// where the volume is staged there ([`Stage::Device`](crate::block::spec::Stage)). Not if they are
    /// `private`: encryption and checksums read them.
    pub device: bool,
    /// A part of a request, and not its last: its bytes are counted, but no read.
    pub part: bool,
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
pub struct Engine {
    volumes: Slab<Attached>,
    generation: u32,
    in_flight: Slab<InFlightIo>,
    runs: Slab<RunState>,
    slow: SlowLog,
    throttled_until: Option<Instant>,
    /// See [`Engine::slice_at`].
    slice_bytes: u64,
    /// See [`Engine::stage_in`].
    staging: Option<FramePool>,
    /// Lists of extents in flight.
    listing: usize,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            volumes: Slab::new(),
            generation: 0,
            in_flight: Slab::new(),
            runs: Slab::new(),
            slow: SlowLog::default(),
            throttled_until: None,
            slice_bytes: SLICE_BYTES,
            staging: None,
            listing: 0,
        }
    }
}

/// A request, as its I/O begins.
#[derive(Clone, Copy)]
struct Request {
    volume: VolumeId,
    operation: Operation,
    offset: u64,
    len: u64,
    tag: Tag,
}

impl Engine {
    /// Requests that take longer than `limit` at the store are kept for [`Engine::take_slow`].
    pub fn note_slow(&mut self, limit: Duration) {
        self.slow.limit = Some(limit);
    }

    /// Slices of reads have about `bytes`, instead of [`SLICE_BYTES`]: for measurements and simulations.
    pub fn slice_at(&mut self, bytes: u64) {
        self.slice_bytes = bytes.max(1);
    }

    /// What is read on its way from a store to the wire lies in frames of `pool`, and pulled writes have no more than that
    /// either, where nothing was said frames of the loop: for measurements with as little staging as a network card has.
    pub fn stage_in(&mut self, pool: FramePool) {
        self.staging = Some(pool);
    }

    /// Bytes of frames that pulled writes of the loop may take together.
    pub fn pulled_bytes_max(&self, reactor: &Reactor) -> usize {
        self.staging.as_ref().map_or(reactor.frames().bytes() / PULL_SHARE_MAX, FramePool::bytes)
    }

    /// Whether so many requests are in flight that those which take no frame must wait, too.
    pub fn is_full(&self) -> bool {
        self.in_flight.len() >= JOBS_MAX
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn check(&self, id: VolumeId, range: ByteRange, writes: bool) -> Result<&Attached, BlockError> {
        let attached = self.attached(id)?;
        let volume = &attached.volume;
        if writes && volume.is_read_only() {
            return Err(BlockError::ReadOnly);
        }
        if !range.ends_by(volume.len()) {
            return Err(if writes { BlockError::PastEnd } else { BlockError::OutOfRange });
        }
        if (range.offset | range.len) & u64::from(volume.block_bytes() - 1) != 0 {
            return Err(BlockError::Misaligned);
        }
        Ok(attached)
    }

    fn start_io(&mut self, reactor: &Reactor, request: Request, runs: usize, kind: IoKind) -> usize {
        debug_assert!(runs > 0, "nothing would ever end it");
        let Request { volume, operation, offset, len, tag } = request;
        let attached = &mut self.volumes[volume.index as usize];
        attached.in_flight += 1;
        let fault = attached.volume.fault(operation, offset, len);
        let started = reactor.now();
        let left = runs as u32;
        self.listing += usize::from(operation == Operation::Extents);
        let (error, part, synced) = (None, false, Vec::new());
        let change = operation.changes_bytes().then(|| attached.changes.begin());
        self.in_flight.insert(InFlightIo {
            tag,
            volume,
            operation,
            offset,
            len,
            started,
            left,
            change,
            error,
            part,
            fault,
            synced,
            kind,
        })
    }

    fn start_run(&mut self, reactor: &mut Reactor, io: usize, part: usize, len: usize, op: Op) {
        let attached = &self.volumes[self.in_flight[io].volume.index as usize];
        let then_sync = match (&self.in_flight[io].kind, &op) {
            (IoKind::Write { durable: true }, Op::Write { file, .. }) if attached.volume.syncs_can_fail() => {
                attached.files.iter().position(|known| known == file)
            }
            _ => None,
        };
        self.submit_run(reactor, RunState { len, then_sync, ..RunState::new(io, part) }, op);
    }

    fn submit_run(&mut self, reactor: &mut Reactor, mut run: RunState, op: Op) {
        let (fault, op) = match self.in_flight[run.io].fault {
            None => (None, op),
            Some(fault) => RunFault::put_in(fault, op, reactor.now()),
        };
        run.fault = fault;
        let run = self.runs.insert(run);
        reactor.submit(op, Token::new(ENGINE_CLASS, 0, run as u32, 0));
    }

    /// Takes a completion of [`ENGINE_CLASS`]; appends the requests that it ends, and those that waited for that.
    pub fn complete(&mut self, reactor: &mut Reactor, completion: Completion, done: &mut Vec<Done>) {
        if completion.token.tag() == TAG_POLL_SYNCS {
            return self.poll_syncs(reactor, completion.token, done);
        }
        let index = completion.token.index() as usize;
        let Some(state) = self.runs.get_mut(index) else { return };
        if let Some(fault) = &mut state.fault
            && let Some(op) = fault.delayed.take()
        {
            return reactor.submit(op, completion.token);
        }
        let run = self.runs.remove(index);
        let at = run.io;
        let id = self.in_flight[at].volume;
        let injected = run.fault.as_ref().and_then(|fault| fault.error).map_or(Ok(()), |error| Err(error.into()));
        if run.sync.is_some() {
            return self.sync_ended(reactor, run, injected, &completion.outcome, done);
        }
        if matches!(self.in_flight[at].kind, IoKind::Zero(_)) {
            self.zero_went(reactor, at, &run, injected, &completion.outcome);
        } else {
            let io = &mut self.in_flight[at];
            match (injected.and_then(|()| io.take(&run, completion.outcome)), run.then_sync) {
                (Ok(()), Some(file)) => return self.start_sync(reactor, at, run.part, file),
                (Ok(()), None) => io.left -= 1,
                (Err(error), _) => {
                    io.left -= 1;
                    io.error.get_or_insert(error);
                    self.note_failure(&run, error);
                }
            }
        }
        if let Some(slice) = self.in_flight[at].slice_of(run.part) {
            done.push(Done { tag: self.in_flight[at].tag, outcome: Outcome::Slice(slice) });
        }
        if self.in_flight[at].left == 0 && !self.hold_back(at) {
            self.answer(reactor, at, done);
        }
        self.release(reactor, id, done);
    }

    fn note_failure(&self, run: &RunState, error: BlockError) {
        run.note_failure(&self.volumes[self.in_flight[run.io].volume.index as usize].volume, error);
    }

    /// A request's last operation has ended, and nothing is left to wait for.
    fn answer(&mut self, reactor: &mut Reactor, at: usize, done: &mut Vec<Done>) {
        let io = self.in_flight.remove(at);
        let now = reactor.now();
        self.slow.note(&io, now);
        let id = io.volume;
        let attached = &mut self.volumes[id.index as usize];
        attached.in_flight -= 1;
        if let Some(number) = io.change {
            attached.changes.end(number);
        }
        let (operation, offset, len) = (io.operation, io.offset, io.len);
        let (job_started, part) = (io.started, io.part);
        let told = io.fully_streamed();
        self.listing -= usize::from(operation == Operation::Extents);
        let ended = io.end(&attached.volume);
        let error = ended.outcome.error();
        attached.times.note(operation, now.since(job_started));
        attached.counters.ended(Counted { operation, len, part }, error);
        if let Some(error) = error {
            attached.volume.note_failure(StoreFailure { operation, offset, len, error, at: now });
        }
        if !told {
            done.push(ended);
        }
        self.drop_if_unused(reactor, id);
    }
}

/// Whether frames for `len` bytes are free, though perhaps not in one piece, and many besides: then the end of what is
/// under way would not help, since the pool is cut up by what stays.
pub(super) fn is_cut_up(frames: &FramePool, len: usize) -> bool {
    frames.free_bytes() >= len.max(frames.bytes() / FREE_SHARE_MIN)
}

impl Outcome {
    fn error(&self) -> Option<BlockError> {
        match self {
            Self::Read(Err(error)) | Self::Unit(Err(error)) | Self::Extents(Err(error)) => Some(*error),
            _ => None,
        }
    }
}
