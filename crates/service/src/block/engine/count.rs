//! Counters of a volume, and its slow requests.

use std::collections::VecDeque;
use std::time::Duration;

use byway_reactor::Instant;

use super::in_flight_io::InFlightIo;
use super::{Engine, Step, Tag, VolumeId};
use crate::block::error::BlockError;
use crate::limits::SLOW_MAX;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reads bytes.
    Read,
    /// Writes bytes.
    Write,
    /// Makes writes durable.
    Flush,
    /// Gives a range back.
    Trim,
    /// Writes zeroes.
    Zero,
    /// Asks for data and holes.
    Extents,
    /// Brings a range into memory.
    Prefetch,
}

impl Operation {
    /// Whether reads may find other bytes after it.
    pub(super) fn changes_bytes(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::Zero)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Trim => "trim",
            Self::Zero => "zero",
            Self::Extents => "extents",
            Self::Prefetch => "prefetch",
        }
    }
}

/// What was done on a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeCounters {
    /// Reads done, each as its client asked for it.
    pub reads: u64,
    /// Writes done, each as its client asked for it.
    pub writes: u64,
    /// Flushes done.
    pub flushes: u64,
    /// Trims and writes of zeroes done.
    pub trims: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations that the store failed.
    pub errors: u64,
    /// Requests that were refused for a mistake of their client.
    pub rejected: u64,
    /// Requests that are under way.
    pub in_flight: u64,
}

/// An operation that is counted.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    pub(super) operation: Operation,
    /// Bytes.
    pub(super) len: u64,
    /// Whether it is only a part of a request.
    pub(super) part: bool,
}

impl Counted {
    pub(super) const fn whole(operation: Operation, len: u64) -> Self {
        Self { operation, len, part: false }
    }

    pub(super) const fn part(operation: Operation, len: u64) -> Self {
        Self { operation, len, part: true }
    }
}

impl VolumeCounters {
    /// Counts what has ended.
    pub(super) fn ended(&mut self, counted: Counted, error: Option<BlockError>) {
        let Counted { operation, len, part } = counted;
        if let Some(error) = error {
            self.errors += u64::from(error.is_store_failure());
            self.rejected += u64::from(error.is_client_mistake());
            return;
        }
        match operation {
            Operation::Read => {
                self.reads += u64::from(!part);
                self.read_bytes += len;
            }
            Operation::Write => {
                self.writes += u64::from(!part);
                self.written_bytes += len;
            }
            Operation::Flush => self.flushes += 1,
            Operation::Trim | Operation::Zero => self.trims += 1,
            Operation::Extents | Operation::Prefetch => {}
        }
    }

    /// The sum of two loops' counts.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            flushes: self.flushes + other.flushes,
            trims: self.trims + other.trims,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
            errors: self.errors + other.errors,
            rejected: self.rejected + other.rejected,
            in_flight: self.in_flight + other.in_flight,
        }
    }
}

/// A request that took long at the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slow {
    /// The asker's label.
    pub tag: Tag,
    /// What it did.
    pub operation: Operation,
    /// On which volume.
    pub volume: VolumeId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// How long it took.
    pub took: Duration,
}

/// Those that were not taken yet: the last [`SLOW_MAX`].
#[derive(Default)]
pub(super) struct SlowLog {
    pub(super) limit: Option<Duration>,
    kept: VecDeque<Slow>,
}

impl SlowLog {
    pub(super) fn note(&mut self, io: &InFlightIo, now: Instant) {
        let took = now.since(io.started);
        if self.limit.is_none_or(|limit| took <= limit) {
            return;
        }
        if self.kept.len() == SLOW_MAX {
            self.kept.pop_front();
        }
        let InFlightIo { tag, operation, volume, offset, len, .. } = *io;
        self.kept.push_back(Slow { tag, operation, volume, offset, len, took });
    }
}

impl Engine {
    /// A request that took long and has just ended, oldest first.
    pub fn take_slow(&mut self) -> Option<Slow> {
        self.slow.kept.pop_front()
    }

    /// Counts a write that a front end has given to the store in pieces ([`Engine::write`]), once all of them are written.
    pub fn note_written(&mut self, id: VolumeId) {
        if let Some(attached) = self.attached_mut(id) {
            attached.counters.writes += 1;
        }
    }

    /// Counts a request that a front end has refused by itself, for a mistake of its client.
    pub fn note_rejected(&mut self, id: VolumeId) {
        if let Some(attached) = self.attached_mut(id) {
            attached.counters.rejected += 1;
        }
    }

    /// Counts a request that ended at once.
    pub(super) fn counted<T>(
        &mut self,
        id: VolumeId,
        counted: Counted,
        result: Result<Step<T>, BlockError>,
    ) -> Result<Step<T>, BlockError> {
        let error = result.as_ref().err().copied();
        if (error.is_some() || matches!(result, Ok(Step::Now(_))))
            && let Some(attached) = self.attached_mut(id)
        {
            attached.counters.ended(counted, error);
        }
        result
    }
}
