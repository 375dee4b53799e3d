//! The clients of one process, whatever their transfers are: each writes block after block, one at a time.

use byway_reactor::Instant;
use hdrhistogram::Histogram;

use super::FabricBenchError;
use super::part::{Part, Stretch, Tally};
use super::pattern;

/// Latencies are kept to three digits up to a minute, in nanoseconds.
const LATENCY_NANOS_MAX: u64 = 60_000_000_000;

/// What became of a block that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The server has it.
    Taken,
    /// The server had no frame for it.
    Dropped,
}

/// See the module.
pub(super) struct Clients {
    first: usize,
    block_bytes: usize,
    /// By client: the blocks that it has begun, and when the last one was.
    begun: Vec<(u64, Instant)>,
    tally: Tally,
    latencies: Histogram<u64>,
    stretch: Stretch,
}

impl Clients {
    pub(super) fn new(part: &Part, first: usize) -> Result<Self, FabricBenchError> {
        let latencies = Histogram::new_with_bounds(1, LATENCY_NANOS_MAX, 3).map_err(|_| FabricBenchError::Memory)?;
        let begun = vec![(0, Instant::ZERO); part.clients];
        let tally = Tally { blocks: vec![0; part.clients], ..Tally::default() };
        Ok(Self { first, block_bytes: part.block_bytes, begun, tally, latencies, stretch: Stretch::begin() })
    }

    pub(super) fn count(&self) -> usize {
        self.begun.len()
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The number of a client among those of all processes.
    pub(super) fn number(&self, client: usize) -> u64 {
        (self.first + client) as u64
    }

    /// Fills a client's next block; gives its number.
    pub(super) fn begin(&mut self, client: usize, block: &mut [u8], now: Instant) -> u64 {
        let number = self.number(client);
        let begun = &mut self.begun[client];
        *begun = (begun.0 + 1, now);
        pattern::fill(block, number, begun.0);
        begun.0
    }

    /// A block was answered.
    pub(super) fn end(&mut self, client: usize, ended: Ended, now: Instant) {
        if ended == Ended::Dropped {
            self.tally.repeats += 1;
            self.tally.wasted_bytes += self.block_bytes as u64;
            return;
        }
        self.tally.blocks[client] += 1;
        let nanos = now.since(self.begun[client].1).as_nanos() as u64;
        // The bounds hold for a minute; a longer latency counts as that.
        self.latencies.saturating_record(nanos.max(1));
    }

    /// What was done since the last mark.
    pub(super) fn mark(&mut self) -> Tally {
        let blocks = vec![0; self.count()];
        let mut tally = std::mem::replace(&mut self.tally, Tally { blocks, ..Tally::default() });
        (tally.seconds, tally.cpu_seconds) = self.stretch.next();
        let recorded = self.latencies.iter_recorded();
        tally.latencies = recorded.map(|at| (at.value_iterated_to(), at.count_at_value())).collect();
        self.latencies.reset();
        tally
    }
}
