//! Fills of pages: those that lie side by side come by one call, and their threads wake once.

use byway_service::memory::pager::{Contents, FillOutcome, PAGE_BYTES, PageId};

use super::FarJob;

/// Pages that one call fills.
pub(super) const FILL_PAGES_MAX: usize = 64;

/// Zeroes for as many pages as come at once.
static ZEROES: [u8; byway_service::limits::PAGER_AHEAD_PAGES as usize * PAGE_BYTES] =
    [0; byway_service::limits::PAGER_AHEAD_PAGES as usize * PAGE_BYTES];

impl FarJob {
    /// Fills pages from frames.
    pub(super) fn fill_all(&mut self, mut fills: Vec<(PageId, u32)>) {
        fills.sort_unstable();
        let is_next = |at: PageId, next: PageId| at.space == next.space && at.page + 1 == next.page;
        for run in fills.chunk_by(|(at, _), (next, _)| is_next(*at, *next)) {
            for some in run.chunks(FILL_PAGES_MAX) {
                self.fill_run(some);
            }
        }
    }

    fn fill_run(&mut self, run: &[(PageId, u32)]) {
        let mut bytes = std::mem::take(&mut self.fill_bytes);
        let pages = bytes.as_chunks_mut::<PAGE_BYTES>().0;
        for ((_, frame), page) in run.iter().zip(pages) {
            self.store.read(*frame, page);
        }
        let mut left = run;
        while let Some((first, frame)) = left.first().copied() {
            // After a failure one at a time: the call says why it did not fill its first page alone.
            let count = if left.len() == run.len() { run.len() } else { 1 };
            let start = (run.len() - left.len()) * PAGE_BYTES;
            let process = self.processes.iter().find(|process| process.space == first.space);
            let mut outcome = process.map_or(FillOutcome::NoMapping, |process| {
                process.fill(first, &bytes[start..start + count * PAGE_BYTES])
            });
            if count > 1
                && let Some(process) = process
                && !matches!(outcome, FillOutcome::Done(_))
            {
                outcome = process.fill(first, &bytes[start..start + PAGE_BYTES]);
            }
            let done = if let FillOutcome::Done(done) = outcome { done as usize } else { 0 };
            if done == 0 {
                self.pager.filled(first, Contents::Frame(frame), outcome);
            }
            for (at, frame) in &left[..done] {
                self.pager.filled(*at, Contents::Frame(*frame), FillOutcome::Done(1));
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
        let mut outcome = process.fill(at, &ZEROES[..count as usize * PAGE_BYTES]);
        if outcome == FillOutcome::NoMapping && count > 1 {
            // The pages behind are of another mapping: the kernel fills within one.
            outcome = process.fill(at, &ZEROES[..PAGE_BYTES]);
        }
        self.pager.filled(at, Contents::Zeroes(count), outcome);
    }
}
