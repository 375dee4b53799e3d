//! How long threads wait for pages.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use byway_service::memory::pager::PageId;

use crate::latencies::Latencies;
use crate::limits::FAR_FAULTS_TIMED_MAX;

/// Faults that are not answered yet.
#[derive(Debug, Default)]
pub(super) struct Waits {
    since: HashMap<PageId, Instant>,
    /// From the pager's reading of a fault to its answer: wake-ups of pager and program come on top.
    pub(super) latencies: Latencies,
    /// All waits that have ended.
    pub(super) total: Duration,
}

impl Waits {
    pub(super) fn begin(&mut self, at: PageId) {
        if self.since.len() < FAR_FAULTS_TIMED_MAX {
            self.since.entry(at).or_insert_with(Instant::now);
        }
    }

    /// The page is answered for, whether or not a thread waits for it.
    pub(super) fn end(&mut self, at: PageId) {
        if let Some(since) = self.since.remove(&at) {
            let wait = since.elapsed();
            self.latencies.note(wait);
            self.total += wait;
        }
    }

    /// Forgets the faults of which `is_over`.
    pub(super) fn forget(&mut self, is_over: impl Fn(PageId) -> bool) {
        self.since.retain(|at, _| !is_over(*at));
    }
}

#[cfg(test)]
mod tests {
    use byway_service::memory::pager::SpaceId;

    use super::*;

    #[test]
    fn a_page_that_no_thread_waits_for_is_no_wait() {
        let (mut waits, at) = (Waits::default(), PageId { space: SpaceId(1), page: 7 });
        waits.end(at);
        waits.begin(at);
        waits.forget(|at| at.space == SpaceId(1));
        waits.end(at);
        assert_eq!(waits.latencies, Latencies::default());
        waits.begin(at);
        waits.end(at);
        assert!(waits.latencies.percentile_us(100).is_some());
    }
}
