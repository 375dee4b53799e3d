//! Fills of pages: those that lie side by side come by one call, and their threads wake once.

use byway_service::memory::pager::{Contents, FillOutcome, PAGE_BYTES, PageId};

use super::FarJob;

/// Pages that one call fills.
pub(super) const FILL_PAGES_MAX: usize = 64;

/// Zeroes for as many pages as come at once.
static ZEROES: [u8; byway_service::limits::PAGER_AHEAD_PAGES as usize * PAGE_BYTES] =
    [0; byway_service::limits::PAGER_AHEAD_PAGES as usize * PAGE_BYTES];

/// A page to be filled from a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fill {
    pub(super) at: PageId,
    pub(super) frame: u32,
    /// Writes to it are to be told.
    pub(super) protect: bool,
}

impl Fill {
    fn contents(self) -> Contents {
        if self.protect { Contents::Protected(self.frame) } else { Contents::Frame(self.frame) }
    }
}

impl FarJob {
    /// Fills pages from frames.
    pub(super) fn fill_all(&mut self, mut fills: Vec<Fill>) {
        fills.sort_unstable_by_key(|fill| fill.at);
        let is_next = |fill: &Fill, next: &Fill| {
            fill.at.space == next.at.space && fill.at.page + 1 == next.at.page && fill.protect == next.protect
        };
        for run in fills.chunk_by(is_next) {
            for some in run.chunks(FILL_PAGES_MAX) {
                self.fill_run(some);
            }
        }
    }

    fn fill_run(&mut self, run: &[Fill]) {
        let mut bytes = std::mem::take(&mut self.fill_bytes);
        let pages = bytes.as_chunks_mut::<PAGE_BYTES>().0;
        for (fill, page) in run.iter().zip(pages) {
            self.store.read(fill.frame, page);
        }
        let mut left = run;
        while let Some(fill) = left.first().copied() {
            // After a failure one at a time: the call says why it did not fill its first page alone.
            let count = if left.len() == run.len() { run.len() } else { 1 };
            let start = (run.len() - left.len()) * PAGE_BYTES;
            let process = self.processes.iter().find(|process| process.space == fill.at.space);
            let mut outcome = process.map_or(FillOutcome::NoMapping, |process| {
                process.fill(fill.at, &bytes[start..start + count * PAGE_BYTES], fill.protect)
            });
            if count > 1
                && let Some(process) = process
                && !matches!(outcome, FillOutcome::Done(_))
            {
                outcome = process.fill(fill.at, &bytes[start..start + PAGE_BYTES], fill.protect);
            }
            let done = if let FillOutcome::Done(done) = outcome { done as usize } else { 0 };
            if done == 0 {
                self.pager.filled(fill.at, fill.contents(), outcome);
            }
            for fill in &left[..done] {
                self.waits.end(fill.at);
                self.pager.filled(fill.at, fill.contents(), FillOutcome::Done(1));
            }
            left = &left[done.max(1)..];
        }
        self.fill_bytes = bytes;
    }

    /// Fills new pages.
    pub(super) fn fill_zeroes(&mut self, at: PageId, count: u64) {
        let Some(process) = self.processes.iter().find(|process| process.space == at.space) else {
            return self.pager.filled(at, Contents::Zeroes(count), FillOutcome::NoMapping);
        };
        let mut outcome = process.fill(at, &ZEROES[..count as usize * PAGE_BYTES], false);
        if outcome == FillOutcome::NoMapping && count > 1 {
            // The pages behind are of another mapping: the kernel fills within one.
            outcome = process.fill(at, &ZEROES[..PAGE_BYTES], false);
        }
        if let FillOutcome::Done(done) = outcome {
            (at.page..at.page + done).for_each(|page| self.waits.end(PageId { page, ..at }));
        }
        self.pager.filled(at, Contents::Zeroes(count), outcome);
    }
}
