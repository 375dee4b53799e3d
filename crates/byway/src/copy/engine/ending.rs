//! Why a copy ends early, and which of its pieces are recorded then.

use super::{CopyError, Engine, Slot};

impl CopyError {
    /// The destination, or the record of what it holds, has failed: nothing more may be recorded.
    fn is_of_destination(&self) -> bool {
        matches!(self, Self::Destination { .. } | Self::Flush(_) | Self::Resume(_))
    }
}

impl Engine<'_> {
    /// Records a failure. The first one counts, but a failure of the destination outweighs a stop and a failure of the
    /// source: a kernel reports a failed flush once, and the next flush succeeds although the bytes are lost.
    pub(super) fn fail(&mut self, failure: CopyError) {
        let earlier_is_of_destination = self.failure.as_ref().is_some_and(CopyError::is_of_destination);
        if failure.is_of_destination() && !earlier_is_of_destination || self.failure.is_none() && !self.stopped {
            self.failure = Some(failure);
        }
    }

    /// Whether the copy may flush once more and record the pieces written since. Not if the destination failed, nor while an
    /// earlier flush is under way: the kernel would tell only that one of its failure.
    pub(super) fn may_flush(&self) -> bool {
        let flushing = self.slots.iter().flatten().any(|slot| matches!(slot, Slot::Flushing { .. }));
        !flushing && !self.failure.as_ref().is_some_and(CopyError::is_of_destination)
    }

    /// Ends the copy if it has failed or was stopped.
    pub(super) fn end_early(&mut self) -> Result<(), CopyError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        if !self.stopped {
            return Ok(());
        }
        let bytes = self.copied.bytes;
        let recorded_bytes = if let Some(log) = &mut self.resume {
            log.recorded_bytes(bytes).map_err(CopyError::Resume)?
        } else {
            let unflushed: u64 = self.unflushed.iter().map(|(_, record)| record.len).sum();
            self.records.values().map(|record| record.len).sum::<u64>().saturating_sub(unflushed)
        };
        Err(CopyError::Stopped { recorded_bytes, bytes })
    }
}
