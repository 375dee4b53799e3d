//! The cost of registration by size, compared with copying into registered memory, and with the cache.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::super::{Counters, Limits, Mode, PinnedBuffers, Registrar, RegistrationCache};
use super::MeasureError;
use super::populated::PopulatedMapping;

/// Hits in a row: one is shorter than what the clock can tell.
const HITS: u32 = 1000;

/// Handles of the device that stands for a network card.
const HANDLES: u32 = 1024;

/// One round of a size.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// To register the range, and to deregister it.
    pub register: Duration,
    /// To copy it into other memory.
    pub copy: Duration,
    /// To have it from a cache that does not have it.
    pub miss: Duration,
    /// From one that has.
    pub hit: Duration,
    /// To have the cache deregister it.
    pub evict: Duration,
    /// To unmap it while a cache has it.
    pub unmap_cached: Duration,
    /// To unmap it without a watch.
    pub unmap: Duration,
}

/// Measures with the fixed buffers of an io_uring as the device, and private anonymous memory.
#[derive(Debug)]
pub struct CostMeter {
    cache: RegistrationCache<PinnedBuffers>,
}

impl CostMeter {
    /// Sets the device and the cache up.
    ///
    /// # Errors
    /// The kernel's, where io_uring is not to be had.
    pub fn new() -> Result<Self, MeasureError> {
        Ok(Self { cache: RegistrationCache::new(PinnedBuffers::new(HANDLES)?, Limits::default()) })
    }

    /// Whether the cache keeps anything: if not, a hit is a registration.
    pub fn mode(&self) -> Mode {
        self.cache.mode()
    }

    /// What the cache has done.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }

    /// Measures one round of a size, with all pages present.
    ///
    /// # Errors
    /// Memory that cannot be had or registered (`RLIMIT_MEMLOCK`).
    pub fn round(&self, bytes: usize) -> Result<Cost, MeasureError> {
        let plain = PopulatedMapping::private(bytes)?;
        let ((), unmap) = timed(|| drop(plain));
        let (buffer, target) = (PopulatedMapping::private(bytes)?, PopulatedMapping::private(bytes)?);
        let range = buffer.range(0, bytes)?;
        let registrar = self.cache.registrar();
        // The first registration after much memory was unmapped waits a millisecond for what that left to be done: a size is not to pay
        // for the one before it.
        registrar.deregister(registrar.register(target.range(0, bytes)?)?);
        let (handle, register) = timed(|| registrar.register(range));
        let handle = handle?;
        let ((), deregister) = timed(|| registrar.deregister(handle));
        let ((), copy) = timed(|| target.copy_from(&buffer));
        black_box(&target);
        let (guard, miss) = timed(|| self.cache.get(range));
        drop(guard?);
        let hits = timed(|| (0..HITS).try_for_each(|_| self.cache.get(range).map(drop)));
        hits.0?;
        let ((), evict) = timed(|| self.cache.flush());
        drop(self.cache.get(range)?);
        let ((), unmap_cached) = timed(|| drop(buffer));
        Ok(Cost { register: register + deregister, copy, miss, hit: hits.1 / HITS, evict, unmap_cached, unmap })
    }
}

fn timed<T>(act: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = act();
    (result, start.elapsed())
}
