//! The clients of one process, with either kind of transfer: each writes block after block, one at a time.

use std::rc::Rc;

use byway_reactor::{Frame, FramePool, Instant};
use hdrhistogram::Histogram;

use super::FabricBenchError;
use super::part::{Part, Stretch, Tally, Wire};
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
    /// What is written from.
    pool: FramePool,
    /// By client, so many each: what they write in turn.
    blocks: Vec<Rc<Frame>>,
    blocks_each: usize,
    /// By client: the blocks that it has begun, and when the last one was.
    begun: Vec<(u64, Instant)>,
    tally: Tally,
    latencies: Histogram<u64>,
    stretch: Stretch,
}

impl Clients {
    pub(super) fn new(part: &Part, first: usize) -> Result<Self, FabricBenchError> {
        let latencies = Histogram::new_with_bounds(1, LATENCY_NANOS_MAX, 3).map_err(|_| FabricBenchError::Memory)?;
        let (each, bytes) = (part.blocks_each, part.block_bytes);
        // One more for a client whose last block is still on its way.
        let pool_bytes = part.clients * (each + 1) * bytes.next_power_of_two();
        let pool = if part.wire == Wire::Shm { FramePool::shared(pool_bytes) } else { FramePool::new(pool_bytes) };
        let pool = pool.map_err(FabricBenchError::Loop)?;
        let filled = |block: usize| filled(&pool, bytes, (first + block / each) as u64, (block % each) as u64);
        let blocks = (0..part.clients * each).map(filled).collect::<Result<_, _>>()?;
        let begun = vec![(0, Instant::ZERO); part.clients];
        let tally = Tally { blocks: vec![0; part.clients], ..Tally::default() };
        let stretch = Stretch::begin();
        Ok(Self { first, block_bytes: bytes, pool, blocks, blocks_each: each, begun, tally, latencies, stretch })
    }

    pub(super) fn count(&self) -> usize {
        self.begun.len()
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Where the blocks lie.
    pub(super) fn pool(&self) -> &FramePool {
        &self.pool
    }

    /// The number of a client among those of all processes.
    pub(super) fn number(&self, client: usize) -> u64 {
        (self.first + client) as u64
    }

    /// A client's next block, and its number.
    pub(super) fn begin(&mut self, client: usize, now: Instant) -> Result<(Rc<Frame>, u64), FabricBenchError> {
        let number = self.number(client);
        let begun = &mut self.begun[client];
        *begun = (begun.0 + 1, now);
        let place = begun.0 as usize % self.blocks_each;
        let block = &mut self.blocks[client * self.blocks_each + place];
        if Rc::get_mut(block).is_none() {
            // It was answered, and is still on its way to the wire for all that.
            *block = filled(&self.pool, self.block_bytes, number, place as u64)?;
        }
        if let Some(frame) = Rc::get_mut(block) {
            for (at, bytes) in pattern::stamps(self.block_bytes, number, begun.0) {
                frame.write(at, &bytes);
            }
        }
        Ok((Rc::clone(block), begun.0))
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

/// A client's block `place`.
fn filled(pool: &FramePool, bytes: usize, client: u64, place: u64) -> Result<Rc<Frame>, FabricBenchError> {
    let mut frame = pool.alloc(bytes).ok_or(FabricBenchError::Memory)?;
    let mut block = vec![0; bytes];
    pattern::fill(&mut block, client, place);
    frame.write(0, &block);
    Ok(Rc::new(frame))
}
