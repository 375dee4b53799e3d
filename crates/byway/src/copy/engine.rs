//! The copy itself: extents of the source become pieces, pieces go through slots, done pieces become records. `resuming.rs`
//! has the results of an earlier run, `verification.rs` reads the destination back, `ending.rs` says why a copy ended early.

mod ending;
mod resuming;
mod verification;

use std::collections::{BTreeMap, VecDeque};
use std::ops::{ControlFlow, Range};
use std::time::Duration;

use byway_fabric::payload_checksum;
use byway_reactor::{Completion, Errno, Extent, Frame, Instant, Reactor, Wait};

use super::endpoint::{Answer, Done, Endpoint, EndpointError, Request};
use super::pieces::{align_extents, whole_crc};
use super::resume::{Record, ResumeLog, supersede};
use crate::units::show_size;

/// How much of the source is asked for extents at once; also the longest hole that is one piece.
const EXTENTS_WINDOW_BYTES: u64 = 1 << 30;

/// A checkpoint (flush, then records) at least after so many bytes ...
const CHECKPOINT_BYTES: u64 = 256 << 20;

/// ... or after so much time: a killed copy repeats at most this much work.
const CHECKPOINT_TIME: Duration = Duration::from_secs(5);

/// How often a copy reports progress while no request ends.
const TICK: Duration = Duration::from_millis(250);

/// How a copy is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyOptions {
    /// Pieces in flight, at least 1.
    pub depth: usize,
    /// The largest piece, at most a frame (1 MiB); at least a block of both ends is taken. Pieces end at its multiples.
    pub chunk_bytes: usize,
    /// Read everything back from the destination and compare it.
    pub verify: bool,
}

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Copied {
    /// Size of the source.
    pub bytes: u64,
    /// Bytes read from the source and written this time.
    pub moved_bytes: u64,
    /// Bytes that were holes.
    pub zero_bytes: u64,
    /// Bytes that an earlier run had done and that were not written again.
    pub resumed_bytes: u64,
    /// CRC32C of the whole image, as read from the source.
    pub crc32c: u32,
    /// The destination was read back and is the same.
    pub verified: bool,
}

/// What a copy does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Reads the source and writes the destination.
    Copying,
    /// Reads the destination back.
    Verifying,
}

/// How far a copy is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// Bytes of the source's that this phase is done with.
    pub done_bytes: u64,
    /// The time of this report.
    pub now: Instant,
    /// When the copy gives up, while an end has no session with its server; `None` while all have one.
    pub lost_at: Option<Instant>,
}

/// Why a copy ended. Records stay in the resume file, and the same command resumes from them, except after `Changed`.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The source failed.
    #[error("reading the source at byte {offset}: {error}")]
    Source {
        /// Where.
        offset: u64,
        /// How.
        error: EndpointError,
    },
    /// The destination failed.
    #[error("writing the destination at byte {offset}: {error}")]
    Destination {
        /// Where.
        offset: u64,
        /// How.
        error: EndpointError,
    },
    /// Flushed data is missing.
    #[error("flushing the destination: {0}; data written since the last flush may be lost")]
    Flush(EndpointError),
    /// The destination does not hold what the source gave. The next run copies those pieces again.
    #[error("the destination differs from the source in pieces of {len} bytes, the first at {offset}; do not trust it")]
    Differs {
        /// First byte of the first such piece.
        offset: u64,
        /// Bytes of all such pieces.
        len: u64,
    },
    /// The caller stopped it.
    #[error("stopped at {} of {}", show_size(*recorded_bytes), show_size(*bytes))]
    Stopped {
        /// What the next run need not copy again.
        recorded_bytes: u64,
        /// The source's size.
        bytes: u64,
    },
    /// The source has changed since the copy began.
    #[error("the source changed during the copy, so the copy mixes old and new data")]
    Changed,
    /// The resume file failed.
    #[error("the resume file: {0}")]
    Resume(std::io::Error),
    /// The loop failed.
    #[error("the event loop: {0}")]
    Loop(std::io::Error),
    /// An endpoint's answer does not fit its request: a bug of byway.
    #[error("internal error: an endpoint answered another request; please report this")]
    Confused,
}

/// Copies `source` to `destination`, which is at least as large. `progress` is called with the
/// progress repeatedly, and stops the copy by breaking.
///
/// # Errors
/// The first thing that went wrong, after everything in flight has ended; a copy that is stopped while a server does not
/// answer ends at once.
pub fn copy(
    reactor: &mut Reactor,
    source: &mut dyn Endpoint,
    destination: &mut dyn Endpoint,
    options: CopyOptions,
    mut resume: Option<&mut ResumeLog>,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Copied, CopyError> {
    let (bytes, identity) = (source.bytes(), source.identity());
    let records = match &mut resume {
        Some(log) => log.load(&identity, &destination.identity(), bytes).map_err(CopyError::Resume)?,
        None => BTreeMap::new(),
    };
    let last_checkpoint = reactor.now();
    let block_bytes = u64::from(source.block_bytes().max(destination.block_bytes()));
    let options = CopyOptions { chunk_bytes: options.chunk_bytes.max(block_bytes as usize), ..options };
    let mut engine = Engine {
        reactor,
        source,
        destination,
        options,
        block_bytes,
        resume,
        progress,
        slots: Vec::new(),
        free: Vec::new(),
        work: VecDeque::from([Work::Plan { offset: 0 }]),
        records,
        unflushed: Vec::new(),
        flushing: false,
        unflushed_bytes: 0,
        last_checkpoint,
        phase: Phase::Copying,
        done_bytes: 0,
        copied: Copied { bytes, ..Copied::default() },
        stopped: false,
        failure: None,
        forgotten: 0..0,
        differing: Vec::new(),
    };
    let copied = engine.copy()?;
    if engine.source.identity() == identity {
        return Ok(copied);
    }
    // No later run may resume from it, not even if the source gets its old time of change again.
    if let Some(log) = &mut engine.resume {
        log.clear().map_err(CopyError::Resume)?;
    }
    Err(CopyError::Changed)
}

/// What is to be started.
#[derive(Debug)]
enum Work {
    Plan {
        offset: u64,
    },
    Read {
        offset: u64,
        len: u64,
        before: Option<u32>,
    },
    Write {
        offset: u64,
        frame: Frame,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    /// Zeroes, written: for a destination that cannot make holes.
    Fill {
        offset: u64,
        len: u64,
    },
    Flush,
    Check {
        offset: u64,
        record: Record,
    },
    FindData {
        offset: u64,
        len: u64,
    },
}

/// What is in flight.
#[derive(Debug)]
enum Slot {
    Planning {
        offset: u64,
    },
    /// `before`: the checksum of what an earlier run had copied, which counts if it is the same.
    Reading {
        offset: u64,
        before: Option<u32>,
    },
    Writing {
        offset: u64,
        record: Record,
    },
    Zeroing {
        offset: u64,
        len: u64,
    },
    Flushing {
        records: Vec<(u64, Record)>,
    },
    Checking {
        offset: u64,
        record: Record,
    },
    Finding {
        offset: u64,
        len: u64,
    },
}

struct Engine<'a> {
    reactor: &'a mut Reactor,
    source: &'a mut dyn Endpoint,
    destination: &'a mut dyn Endpoint,
    options: CopyOptions,
    /// What pieces are multiples of.
    block_bytes: u64,
    resume: Option<&'a mut ResumeLog>,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    work: VecDeque<Work>,
    /// Everything that is done, by offset.
    records: BTreeMap<u64, Record>,
    /// Done since the last flush began.
    unflushed: Vec<(u64, Record)>,
    unflushed_bytes: u64,
    flushing: bool,
    last_checkpoint: Instant,
    phase: Phase,
    /// Bytes done in this phase.
    done_bytes: u64,
    copied: Copied,
    /// The caller has stopped the copy.
    stopped: bool,
    /// Why nothing more is started; see [`Engine::fail`].
    failure: Option<CopyError>,
    /// Pieces whose records were dropped from the file, because the source's contents have changed.
    forgotten: Range<u64>,
    /// Ranges that verification found to differ: offset, bytes.
    differing: Vec<(u64, u64)>,
}

impl Engine<'_> {
    fn copy(&mut self) -> Result<Copied, CopyError> {
        self.drain()?;
        if self.may_flush() {
            self.work.clear();
            self.work.push_back(Work::Flush);
            self.drain()?;
        }
        self.end_early()?;
        if self.options.verify {
            self.verify()?;
        }
        self.copied.crc32c = whole_crc(&self.records);
        Ok(self.copied)
    }

    /// Starts work and takes answers until there is neither.
    fn drain(&mut self) -> Result<(), CopyError> {
        let (mut completions, mut done) = (Vec::<Completion>::new(), Vec::<Done>::new());
        loop {
            self.start_some();
            if self.slots.len() == self.free.len() {
                // Work is left only if not even one piece fits the pool.
                let starved = || CopyError::Loop(std::io::ErrorKind::OutOfMemory.into());
                return if self.work.is_empty() { Ok(()) } else { Err(starved()) };
            }
            self.turn(&mut done);
            let wait = if done.is_empty() { Wait::Until(self.reactor.now() + TICK) } else { Wait::Poll };
            self.reactor.reap(&mut completions, wait).map_err(CopyError::Loop)?;
            for completion in completions.drain(..) {
                if completion.token.class() == self.source.class() {
                    self.source.complete(self.reactor, completion, &mut done);
                } else if completion.token.class() == self.destination.class() {
                    self.destination.complete(self.reactor, completion, &mut done);
                }
            }
            self.turn(&mut done);
            for Done { id, answer } in done.drain(..) {
                let slot = self.slots.get_mut(id as usize).and_then(Option::take).ok_or(CopyError::Confused)?;
                self.free.push(id);
                if let Err(failure) = self.finish(slot, answer) {
                    self.fail(failure);
                }
                // Also what ended well after a failure has asked for more work.
                if self.failure.is_some() || self.stopped {
                    self.work.clear();
                }
            }
            if self.tell().is_break() {
                return Ok(());
            }
        }
    }

    /// Tells how far the copy is, and stops it if that is wanted; breaks if what is in flight is not to be waited for.
    fn tell(&mut self) -> ControlFlow<()> {
        let lost_at = self.source.lost_at().or_else(|| self.destination.lost_at());
        let progress = Progress { phase: self.phase, done_bytes: self.done_bytes, now: self.reactor.now(), lost_at };
        if (self.progress)(progress).is_continue() {
            return ControlFlow::Continue(());
        }
        self.stopped = true;
        self.work.clear();
        if lost_at.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn turn(&mut self, done: &mut Vec<Done>) {
        self.source.turn(self.reactor, done);
        self.destination.turn(self.reactor, done);
    }

    fn start_some(&mut self) {
        while self.slots.len() - self.free.len() < self.options.depth
            && let Some(work) = self.work.pop_front()
        {
            if let Some(not_yet) = self.start(work) {
                self.work.push_front(not_yet);
                return;
            }
        }
    }

    fn slot(&mut self, slot: Slot) -> u32 {
        if let Some(id) = self.free.pop() {
            self.slots[id as usize] = Some(slot);
            return id;
        }
        self.slots.push(Some(slot));
        self.slots.len() as u32 - 1
    }

    /// Memory for a piece: of an end that has its own, so that it costs that one less.
    fn frame(&self, len: u64) -> Option<Frame> {
        let len = len as usize;
        let own = self.source.own_frame(len).or_else(|| self.destination.own_frame(len));
        own.or_else(|| self.reactor.frames().alloc(len))
    }

    /// Starts one piece of work, or gives it back if there is no frame for it now.
    fn start(&mut self, work: Work) -> Option<Work> {
        let (slot, at_source, request) = match work {
            Work::Plan { offset } => {
                let len = (self.copied.bytes - offset).min(EXTENTS_WINDOW_BYTES);
                if len == 0 {
                    return None;
                }
                (Slot::Planning { offset }, true, Request::Extents { offset, len })
            }
            Work::Read { offset, len, before } => {
                let Some(into) = self.frame(len) else {
                    return Some(work);
                };
                (Slot::Reading { offset, before }, true, Request::Read { offset, into })
            }
            Work::Fill { offset, len } => {
                let Some(mut from) = self.frame(len) else {
                    return Some(work);
                };
                from.fill(0);
                let record = Record { len, crc: Some(payload_checksum(&from, 0..from.len())) };
                (Slot::Writing { offset, record }, false, Request::Write { offset, from })
            }
            Work::Write { offset, frame } => {
                let record = Record { len: frame.len() as u64, crc: Some(payload_checksum(&frame, 0..frame.len())) };
                (Slot::Writing { offset, record }, false, Request::Write { offset, from: frame })
            }
            Work::Zero { offset, len } => (Slot::Zeroing { offset, len }, false, Request::Zero { offset, len }),
            Work::Flush => {
                self.flushing = true;
                self.unflushed_bytes = 0;
                (Slot::Flushing { records: std::mem::take(&mut self.unflushed) }, false, Request::Flush)
            }
            Work::Check { offset, record } => {
                let Some(into) = self.frame(record.len) else {
                    return Some(work);
                };
                (Slot::Checking { offset, record }, false, Request::Read { offset, into })
            }
            Work::FindData { offset, len } => (Slot::Finding { offset, len }, false, Request::Extents { offset, len }),
        };
        let id = self.slot(slot);
        let endpoint = if at_source { &mut *self.source } else { &mut *self.destination };
        endpoint.submit(self.reactor, id, request);
        None
    }

    fn finish(&mut self, slot: Slot, answer: Answer) -> Result<(), CopyError> {
        match (slot, answer) {
            (Slot::Planning { offset }, Answer::Extents(extents)) => {
                let extents = extents.map_err(|error| CopyError::Source { offset, error })?;
                self.plan(offset, &extents)?;
            }
            (Slot::Reading { offset, before }, Answer::Read(result)) => {
                let frame = result.map_err(|error| CopyError::Source { offset, error })?;
                self.compare(offset, frame, before)?;
            }
            (Slot::Writing { offset, record }, Answer::Changed(result)) => {
                result.map_err(|error| CopyError::Destination { offset, error })?;
                self.copied.moved_bytes += record.len;
                self.record(offset, record);
            }
            (Slot::Zeroing { offset, len }, Answer::Changed(Err(EndpointError::File(Errno::OPNOTSUPP)))) => {
                self.fill(offset, len);
            }
            (Slot::Zeroing { offset, len }, Answer::Changed(result)) => {
                result.map_err(|error| CopyError::Destination { offset, error })?;
                self.copied.zero_bytes += len;
                self.record(offset, Record { len, crc: None });
            }
            (Slot::Flushing { records }, Answer::Changed(result)) => {
                result.map_err(CopyError::Flush)?;
                self.flushing = false;
                self.last_checkpoint = self.reactor.now();
                if let Some(log) = &mut self.resume {
                    log.append(&records).map_err(CopyError::Resume)?;
                }
            }
            (Slot::Checking { offset, record }, Answer::Read(result)) => {
                let frame = result.map_err(|error| CopyError::Destination { offset, error })?;
                self.check(offset, record, &frame);
            }
            (Slot::Finding { offset, len }, Answer::Extents(extents)) => {
                let extents = extents.map_err(|error| CopyError::Destination { offset, error })?;
                self.check_zeroes(offset, len, &extents);
            }
            _ => return Err(CopyError::Confused),
        }
        Ok(())
    }

    /// Cuts extents of the source, from `offset` on, into pieces, and plans on behind them.
    fn plan(&mut self, mut offset: u64, extents: &[Extent]) -> Result<(), CopyError> {
        for run in align_extents(offset, extents, self.block_bytes, self.copied.bytes) {
            let end = offset + run.len;
            while offset < end {
                let len = if run.hole { end - offset } else { self.chunk_at(offset, end) };
                self.add_piece(offset, len, run.hole)?;
                offset += len;
            }
        }
        self.work.push_back(Work::Plan { offset });
        Ok(())
    }

    /// Bytes to the next multiple of the chunk, or to `end`.
    fn chunk_at(&self, offset: u64, end: u64) -> u64 {
        let chunk = self.options.chunk_bytes as u64;
        (chunk - offset % chunk).min(end - offset)
    }

    /// Has a range written with zeroes, piece by piece.
    fn fill(&mut self, mut offset: u64, len: u64) {
        let end = offset + len;
        while offset < end {
            let len = self.chunk_at(offset, end);
            self.work.push_back(Work::Fill { offset, len });
            offset += len;
        }
    }

    fn record(&mut self, offset: u64, record: Record) {
        supersede(&mut self.records, offset, record);
        self.done_bytes += record.len;
        self.unflushed.push((offset, record));
        if record.crc.is_some() {
            self.unflushed_bytes += record.len;
        }
        let due = self.unflushed_bytes >= CHECKPOINT_BYTES
            || self.reactor.now().since(self.last_checkpoint) >= CHECKPOINT_TIME;
        if self.resume.is_some() && due && !self.flushing && self.failure.is_none() && !self.stopped {
            self.flushing = true;
            self.work.push_front(Work::Flush);
        }
    }
}
