//! The bytes of one file on their way, or compared: several threads take a piece each until none is left.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::failure::Failure;
use super::run::{Run, add, get};
use super::side::{Facts, OpenFile};

/// What is done with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Copy,
    Compare,
}

/// See the module.
pub(super) struct Moving {
    from: Arc<dyn OpenFile>,
    to: Arc<dyn OpenFile>,
    path: Vec<u8>,
    bytes: u64,
    purpose: Purpose,
    piece_bytes: u64,
    /// Bytes of the pieces that are copied.
    moved: AtomicU64,
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    next: u64,
    /// The data behind `next` ends there.
    data_end: u64,
    /// The source has holes behind `data_end`.
    is_sparse: bool,
    /// Helpers at work.
    helpers: usize,
    failure: Option<Failure>,
}

/// Two buffers of a thread.
#[derive(Default)]
pub(super) struct Buffers([Vec<u8>; 2]);

/// A piece of a copy within one server. No byte of it travels.
const SERVER_PIECE_BYTES: u64 = 16 << 20;

impl Moving {
    /// Of a source with these attributes.
    pub(super) fn new(
        run: &Run,
        from: &Arc<dyn OpenFile>,
        to: &Arc<dyn OpenFile>,
        path: &[u8],
        facts: &Facts,
        purpose: Purpose,
    ) -> Arc<Self> {
        // All bytes are compared, so that a hole at the destination that should have data is noticed, and the reverse.
        let (bytes, is_sparse) = (facts.size, facts.has_holes() && purpose == Purpose::Copy);
        let of_one_server = purpose == Purpose::Copy && from.of_share().is_some() && to.of_share().is_some();
        let request_bytes = run.options.request_bytes as u64;
        let state =
            State { next: 0, data_end: if is_sparse { 0 } else { bytes }, is_sparse, helpers: 0, failure: None };
        Arc::new(Self {
            from: Arc::clone(from),
            to: Arc::clone(to),
            path: path.to_vec(),
            bytes,
            purpose,
            piece_bytes: if of_one_server { SERVER_PIECE_BYTES } else { request_bytes },
            moved: AtomicU64::new(0),
            state: Mutex::new(state),
            left: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that were copied so far.
    pub(super) fn moved(&self) -> u64 {
        get(&self.moved)
    }

    /// Moves all pieces, with the help of threads that have nothing else to do.
    pub(super) fn run(self: &Arc<Self>, run: &Run, buffers: &mut Buffers) -> Result<(), Failure> {
        let pieces = self.bytes.div_ceil(self.piece_bytes);
        let helpers = pieces.saturating_sub(1).min(run.options.threads as u64 - 1);
        if helpers > 0 {
            run.queue.call((0..helpers).map(|_| Arc::clone(self)));
        }
        self.work(run, buffers);
        let mut state = self.state();
        while state.helpers > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failure.take().map_or(Ok(()), Err)
    }

    /// Helps until no piece is left.
    pub(super) fn help(&self, run: &Run, buffers: &mut Buffers) {
        self.state().helpers += 1;
        self.work(run, buffers);
        self.state().helpers -= 1;
        self.left.notify_all();
    }

    fn work(&self, run: &Run, buffers: &mut Buffers) {
        loop {
            let moved = match self.claim(run) {
                Ok(Some(piece)) => self.piece(run, &piece, buffers),
                Ok(None) => return,
                Err(failure) => Err(failure),
            };
            if let Err(failure) = moved {
                let mut state = self.state();
                // No further piece is taken.
                (state.next, state.data_end, state.is_sparse) = (self.bytes, self.bytes, false);
                state.failure.get_or_insert(failure);
            }
        }
    }

    fn claim(&self, run: &Run) -> Result<Option<Range<u64>>, Failure> {
        let mut state = self.state();
        if state.failure.is_none() && run.is_ending() {
            return Err(Failure::Stopped);
        }
        if state.next >= state.data_end && state.is_sparse && state.next < self.bytes {
            let range = self.from.data_from(state.next).map_err(|source| self.unread(run, source))?;
            let range = range.unwrap_or(self.bytes..self.bytes);
            (state.next, state.data_end) = (range.start.min(self.bytes), range.end.min(self.bytes));
        }
        if state.next >= state.data_end {
            return Ok(None);
        }
        let end = state.data_end.min(state.next + self.piece_bytes);
        let piece = state.next..end;
        state.next = end;
        Ok(Some(piece))
    }

    fn note(&self, run: &Run, bytes: u64) {
        add(&self.moved, bytes);
        add(&run.counts.done_bytes, bytes);
    }

    fn unread(&self, run: &Run, source: Errno) -> Failure {
        Failure::Call { place: run.source(&self.path), doing: "read", source }
    }

    fn piece(&self, run: &Run, piece: &Range<u64>, Buffers([one, other]): &mut Buffers) -> Result<(), Failure> {
        let unwritten = |source| Failure::Call { place: run.destination(&self.path), doing: "write", source };
        if let (Purpose::Copy, Some(from), Some(to)) = (self.purpose, self.from.of_share(), self.to.of_share())
            && let Some(copied) = to.copy_from(from, piece)
        {
            match copied {
                Err(Errno::NODATA) => return Err(Failure::Changed(run.source(&self.path))),
                copied => copied.map_err(unwritten)?,
            }
            self.note(run, piece.end - piece.start);
            return Ok(());
        }
        let step = run.options.request_bytes;
        one.resize(step, 0);
        for at in piece.clone().step_by(step) {
            let len = (piece.end - at).min(step as u64) as usize;
            let bytes = &mut one[..len];
            if self.from.read_at(at, bytes).map_err(|source| self.unread(run, source))? < len {
                return Err(Failure::Changed(run.source(&self.path)));
            }
            match self.purpose {
                Purpose::Copy => {
                    self.to.write_at(at, bytes).map_err(unwritten)?;
                    self.note(run, len as u64);
                }
                Purpose::Compare => {
                    other.resize(step, 0);
                    let back = &mut other[..len];
                    let unread = |source| Failure::Call { place: run.destination(&self.path), doing: "read", source };
                    let count = self.to.read_at(at, back).map_err(unread)?;
                    if count < len || back != bytes {
                        let same = bytes.iter().zip(&back[..count]).take_while(|(one, other)| one == other).count();
                        return Err(Failure::Differs { place: run.destination(&self.path), offset: at + same as u64 });
                    }
                }
            }
        }
        Ok(())
    }
}
