//! The results of an earlier run: which pieces are still valid, which are compared with the source first, and which records
//! must be dropped before the source's new contents are written.

use byway_fabric::payload_checksum;
use byway_reactor::Frame;

use super::super::resume::Record;
use super::{CHECKPOINT_BYTES, CopyError, Engine, Work};

impl Engine<'_> {
    /// Plans a piece of the source: it is passed over, read, or made a hole.
    pub(super) fn add_piece(&mut self, offset: u64, len: u64, hole: bool) -> Result<(), CopyError> {
        let is_done = self.records.get(&offset).is_some_and(|done| done.len == len && done.crc.is_none() == hole);
        let last = self.records.range(..offset + len).next_back();
        let overlaps = last.is_some_and(|(at, record)| at + record.len > offset);
        if overlaps && !is_done && !self.source.shows_changes() {
            self.forget_from(offset, len)?;
        }
        if is_done && (hole || self.source.shows_changes()) {
            self.resumed(offset, Record { len, crc: self.records.get(&offset).and_then(|done| done.crc) });
        } else if !hole {
            let before = self.records.get(&offset).filter(|_| is_done).and_then(|done| done.crc);
            self.work.push_back(Work::Read { offset, len, before });
        } else if self.destination.is_blank() {
            self.copied.zero_bytes += len;
            self.record(offset, Record { len, crc: None });
        } else {
            self.work.push_back(Work::Zero { offset, len });
        }
        Ok(())
    }

    /// Writes the bytes that were read, unless an earlier run has written the same ones.
    pub(super) fn compare(&mut self, offset: u64, frame: Frame, before: Option<u32>) -> Result<(), CopyError> {
        let len = frame.len() as u64;
        let Some(before) = before else {
            self.work.push_front(Work::Write { offset, frame });
            return Ok(());
        };
        if payload_checksum(&frame, 0..frame.len()) != before {
            // Drop the record before its data is overwritten: the source may have its old contents again at the next run.
            self.forget_from(offset, len)?;
            self.work.push_front(Work::Write { offset, frame });
            return Ok(());
        }
        self.resumed(offset, Record { len, crc: Some(before) });
        Ok(())
    }

    /// Counts a piece that an earlier run had done, and records it again if that was dropped.
    fn resumed(&mut self, offset: u64, record: Record) {
        self.copied.resumed_bytes += record.len;
        if self.forgotten.contains(&offset) {
            self.record(offset, record);
        } else {
            self.done_bytes += record.len;
        }
    }

    /// Drops the records of a checkpoint's worth of bytes from a changed piece on: one flush of the file for many changed
    /// pieces. Those behind it that turn out to be the same are recorded again.
    fn forget_from(&mut self, offset: u64, len: u64) -> Result<(), CopyError> {
        if self.forgotten.contains(&offset) {
            return Ok(());
        }
        let end = (offset + len.max(CHECKPOINT_BYTES)).min(self.copied.bytes);
        if let Some(log) = &mut self.resume {
            log.forget(&[(offset, end - offset)]).map_err(CopyError::Resume)?;
        }
        self.forgotten = offset..end;
        Ok(())
    }
}
