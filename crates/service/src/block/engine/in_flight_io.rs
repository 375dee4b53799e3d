//! A request that has operations in flight: the operations that it waits for, and their results.

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Allocate, Extent, Instant};

use super::fault::{Fault, RunFault};
use super::shared_syncs::SyncPart;
use super::{Done, Operation, Outcome, Slice, Tag, VolumeId, ZeroFlags};
use crate::block::error::BlockError;
use crate::block::payload::{Payload, Piece};
use crate::block::stripe::StripeExtent;
use crate::block::sync_tracker::{Description, SyncUnderWay};
use crate::block::volume::Volume;

/// A request with operations in flight.
pub(super) struct InFlightIo {
    pub(super) tag: Tag,
    pub(super) volume: VolumeId,
    pub(super) operation: Operation,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) started: Instant,
    pub(super) left: u32,
    /// Its number, if it changes bytes.
    pub(super) change: Option<u64>,
    pub(super) error: Option<BlockError>,
    /// A part of a request, which is not counted as one.
    pub(super) part: bool,
    /// Put in on purpose.
    pub(super) fault: Option<Fault>,
    /// Where it has synced, in order.
    pub(super) synced: Vec<Description>,
    pub(super) kind: IoKind,
}

pub(super) enum IoKind {
    Read {
        pieces: Vec<Option<Piece>>,
        slices: Vec<SliceState>,
    },
    Write {
        durable: bool,
    },
    Flush,
    Plain,
    Trim,
    Zero(Zeroing),
    Extents {
        parts: Vec<Option<Vec<Extent>>>,
        wanted: Vec<u64>,
        /// Of all parts together.
        count_max: usize,
    },
}

/// A slice of a read that is told as soon as it is here.
pub(super) struct SliceState {
    /// Where it begins, in bytes from the start of the read.
    pub(super) start: u64,
    /// The first of its operations.
    pub(super) first: usize,
    /// Operations that have not brought their bytes.
    pub(super) left: u32,
}

/// Zeroing, or a trim that is to be durable, range by range.
pub(super) struct Zeroing {
    pub(super) flags: ZeroFlags,
    pub(super) ranges: Vec<StripeExtent>,
    /// How each range begins.
    pub(super) first: Allocate,
    /// How the range in progress is done.
    pub(super) way: Way,
    /// The shortest piece that a range may be written in.
    pub(super) piece_bytes_min: usize,
    /// Files that are to be made durable when the last range is done.
    pub(super) unsynced: Vec<usize>,
}

/// How a range is zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By the store.
    Store(Allocate),
    /// By writing zeroes, up to here.
    Written(u64),
}

/// One operation of a request: which, and which part of it.
pub(super) struct RunState {
    pub(super) io: usize,
    pub(super) part: usize,
    pub(super) len: usize,
    /// The file to sync, by its place in the volume, when this write to it has ended well.
    pub(super) then_sync: Option<usize>,
    /// If it syncs.
    pub(super) sync: Option<SyncUnderWay>,
    /// The parts of requests that the sync is for, this one among them.
    pub(super) shared_by: Vec<SyncPart>,
    /// `None` but in tests of what stands above.
    pub(super) fault: Option<Box<RunFault>>,
}

impl RunState {
    pub(super) fn new(io: usize, part: usize) -> Self {
        Self { io, part, len: 0, then_sync: None, sync: None, shared_by: Vec::new(), fault: None }
    }

    /// It has failed. If data may be lost by that, the others that are under way, also of other requests, must know at once:
    /// the end of this request may come after theirs.
    pub(super) fn note_failure(&self, volume: &Volume, error: BlockError) {
        if self.may_have_lost(error) && !seeded::is(Bug::ForgottenFlushError) {
            volume.sync_tracker().note_failed_flush();
        }
    }

    /// Whether data may be lost that the server said, or is yet to say, is durable. Only a sync tells of that, with any
    /// errno: `ENOSPC`, too, is about bytes that were taken before. A sync that was refused has touched nothing.
    fn may_have_lost(&self, error: BlockError) -> bool {
        let refused = matches!(error, BlockError::Unsupported | BlockError::Closed) || is_refusal(error);
        let forgiven = error == BlockError::NoSpace && seeded::is(Bug::FullDiskForgiven);
        self.sync.is_some() && !refused && !forgiven
    }
}

pub(super) fn unit_result(outcome: &byway_reactor::Outcome) -> Result<(), BlockError> {
    use byway_reactor::Outcome as Went;
    match outcome {
        Went::Written { result, .. } => result.map(|_| ()).map_err(BlockError::from),
        Went::Synced(result) | Went::Allocated(result) | Went::Prefetched(result) => result.map_err(BlockError::from),
        _ => Err(BlockError::Unsupported),
    }
}

impl InFlightIo {
    /// Takes the end of one of its operations.
    pub(super) fn take(&mut self, run: &RunState, outcome: byway_reactor::Outcome) -> Result<(), BlockError> {
        use byway_reactor::Outcome as Went;
        match (&mut self.kind, outcome) {
            (IoKind::Read { pieces, slices }, Went::Read { into, result }) => {
                let n = result?;
                // The backing file became shorter than the volume: that is an error, never made-up zeroes.
                if n < run.len {
                    return Err(BlockError::Io(byway_reactor::Errno::IO));
                }
                if let Some(at) = slice_with(slices, run.part) {
                    slices[at].left -= 1;
                }
                pieces[run.part] = Some(Piece::Frame { frame: into, len: run.len });
                Ok(())
            }
            (IoKind::Extents { parts, .. }, Went::Extents(result)) => {
                parts[run.part] = Some(result?);
                Ok(())
            }
            (IoKind::Trim, Went::Allocated(Err(byway_reactor::Errno::OPNOTSUPP))) => Ok(()),
            (_, outcome) => unit_result(&outcome),
        }
    }

    /// The slice that one of its operations has completed, to be told now.
    pub(super) fn slice_of(&mut self, part: usize) -> Option<Slice> {
        let IoKind::Read { pieces, slices } = &mut self.kind else { return None };
        let at = slice_with(slices, part).filter(|at| slices[*at].left == 0)?;
        let end = slices.get(at + 1).map_or(pieces.len(), |next| next.first);
        let mut payload = Payload::default();
        pieces[slices[at].first..end].iter_mut().filter_map(Option::take).for_each(|piece| payload.push(piece));
        Some(Slice { start: slices[at].start, payload, last: self.left == 0 && self.error.is_none() })
    }

    /// Whether all of its bytes were sent in slices.
    pub(super) fn fully_streamed(&self) -> bool {
        matches!(&self.kind, IoKind::Read { slices, .. } if !slices.is_empty()) && self.error.is_none()
    }

    /// Whether its answer will say that something is durable.
    pub(super) fn says_durable(&self) -> bool {
        let durable = match &self.kind {
            IoKind::Flush | IoKind::Write { durable: true } => true,
            IoKind::Zero(zeroing) => zeroing.flags.durable,
            _ => false,
        };
        durable && self.error.is_none()
    }

    pub(super) fn end(self, volume: &Volume) -> Done {
        let tag = self.tag;
        let mut failed = self.error;
        // The kernel reports a failure to one of the syncs that were under way: the others' data may be lost as well.
        if self.says_durable() && volume.sync_tracker().flush_failed() {
            failed = Some(BlockError::FlushFailed);
        }
        let outcome = match self.kind {
            IoKind::Read { pieces, .. } => Outcome::Read(failed.map_or_else(
                || {
                    let mut payload = Payload::default();
                    pieces.into_iter().flatten().for_each(|piece| payload.push(piece));
                    Ok(payload)
                },
                Err,
            )),
            IoKind::Extents { parts, wanted, count_max } => {
                Outcome::Extents(failed.map_or_else(|| Ok(join_extents(parts, &wanted, count_max)), Err))
            }
            _ => Outcome::Unit(failed.map_or(Ok(()), Err)),
        };
        Done { tag, outcome }
    }
}

impl Zeroing {
    /// The store cannot do the range in progress that way: takes the next one that keeps what was asked for.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if there is none.
    pub(super) fn fall_back(&mut self, run: StripeExtent) -> Result<(), BlockError> {
        match self.way {
            // A trim may do nothing.
            Way::Store(Allocate::Discard) => self.end_range(),
            Way::Store(_) if self.flags.fast => return Err(BlockError::Unsupported),
            Way::Store(Allocate::PunchHole) => self.way = Way::Store(Allocate::ZeroRange),
            Way::Store(Allocate::ZeroRange) => self.way = Way::Written(run.offset),
            Way::Written(_) => return Err(BlockError::Unsupported),
        }
        Ok(())
    }

    /// The range in progress is done.
    pub(super) fn end_range(&mut self) {
        self.ranges.pop();
        self.way = Way::Store(self.first);
    }
}

/// Whether the loop did not take the operation: it was full, or the file is no longer there.
fn is_refusal(error: BlockError) -> bool {
    use byway_reactor::Errno;
    matches!(error, BlockError::Io(Errno::AGAIN | Errno::NOBUFS | Errno::BADF))
}

/// The slice to which an operation belongs.
fn slice_with(slices: &[SliceState], part: usize) -> Option<usize> {
    slices.partition_point(|slice| slice.first <= part).checked_sub(1)
}

/// Joins the lists of neighbouring parts, up to the first that covers less than was asked for.
fn join_extents(parts: Vec<Option<Vec<Extent>>>, wanted: &[u64], count_max: usize) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    for (part, wanted) in parts.into_iter().zip(wanted) {
        let mut covered = 0;
        for extent in part.into_iter().flatten() {
            covered += extent.len;
            match joined.last_mut() {
                Some(last) if last.hole == extent.hole => last.len += extent.len,
                _ => joined.push(extent),
            }
        }
        if covered < *wanted {
            break;
        }
    }
    joined.truncate(count_max);
    joined
}
