//! Reads the destination back after the copy, and compares it: data by the checksums in the records, holes by asking for
//! extents of data. Pieces that differ are removed from the resume file, so that the next run copies them again.

use byway_fabric::payload_checksum;
use byway_reactor::{Extent, Frame};

use super::super::pieces::align_extents;
use super::super::resume::Record;
use super::{CopyError, Engine, Phase, Work};

impl Engine<'_> {
    /// Checks all recorded pieces. A failure or a difference ends the copy.
    pub(super) fn verify(&mut self) -> Result<(), CopyError> {
        let checks = self.records.iter().map(|(&offset, &record)| match record.crc {
            Some(_) => Work::Check { offset, record },
            None => Work::FindData { offset, len: record.len },
        });
        self.work.extend(checks);
        (self.phase, self.done_bytes) = (Phase::Verifying, 0);
        self.destination.drop_cache();
        let drained = self.drain();
        // Even if the check was stopped: the next run must copy again the pieces that differ.
        if let Some(log) = self.resume.as_mut().filter(|_| !self.differing.is_empty()) {
            log.forget(&self.differing).map_err(CopyError::Resume)?;
        }
        drained?;
        self.end_early()?;
        if let Some(&(offset, _)) = self.differing.iter().min() {
            return Err(CopyError::Differs { offset, len: self.differing.iter().map(|(_, len)| len).sum() });
        }
        self.copied.verified = true;
        Ok(())
    }

    /// Compares the bytes that were read back with their record.
    pub(super) fn check(&mut self, offset: u64, record: Record, read: &Frame) {
        let all = 0..read.len();
        let same = match record.crc {
            Some(crc) => payload_checksum(read, all) == crc,
            None => read.visit(all, |bytes| bytes.iter().all(|&byte| byte == 0)),
        };
        if !same {
            self.differing.push((offset, record.len));
        }
        self.done_bytes += record.len;
    }

    /// Reads and checks the data that the destination reports within a range of zeroes.
    pub(super) fn check_zeroes(&mut self, mut offset: u64, len: u64, extents: &[Extent]) {
        let end = offset + len;
        for run in align_extents(offset, extents, self.block_bytes, end) {
            let run_end = offset + run.len;
            while offset < run_end {
                let len = if run.hole { run_end - offset } else { self.chunk_at(offset, run_end) };
                if run.hole {
                    self.done_bytes += len;
                } else {
                    self.work.push_back(Work::Check { offset, record: Record { len, crc: None } });
                }
                offset += len;
            }
        }
        if offset < end {
            self.work.push_back(Work::FindData { offset, len: end - offset });
        }
    }
}
