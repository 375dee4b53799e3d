//! What registration costs by size, against copying into memory that is registered already (Goglin, fig. 6), and what the
//! cache makes of it: a hit, a miss, and what a change of the address space costs whoever makes it.
//!
//! `cargo run --release -p byway-fabric --example registration_cost [ROUNDS]`; medians of so many rounds, in microseconds.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use byway_fabric::registration::{Limits, Mode, PageRange, PinnedBuffers, Registrar, RegistrationCache};

const ROUNDS_DEFAULT: usize = 101;
const SIZES: [usize; 8] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// Hits in a row: one is shorter than what the clock can tell.
const HITS: u32 = 1000;

/// Memory of a size, written to once: its pages are there.
struct Buffer {
    base: *mut u8,
    bytes: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Result<Self, Box<dyn Error>> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }?.cast::<u8>();
        base.expose_provenance();
        // SAFETY: the range was just mapped, for writing.
        unsafe { base.write_bytes(1, bytes) };
        Ok(Self { base, bytes })
    }

    fn range(&self) -> Result<PageRange, Box<dyn Error>> {
        Ok(PageRange::covering(self.base.addr(), self.bytes).ok_or("no range")?)
    }

    fn copy_from(&self, other: &Self) {
        // SAFETY: both mappings are so long, and two.
        unsafe { self.base.copy_from_nonoverlapping(other.base, self.bytes.min(other.bytes)) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

fn timed<T>(act: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = act();
    (result, start.elapsed())
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// One round of a size: register and deregister, copy, miss, hit, evict (deregister and unwatch), unmap while it is cached,
/// unmap where nothing is watched.
fn round(bytes: usize, cache: &RegistrationCache<PinnedBuffers>) -> Result<[Duration; 7], Box<dyn Error>> {
    let plain = Buffer::new(bytes)?;
    let ((), unmap) = timed(|| drop(plain));
    let buffer = Buffer::new(bytes)?;
    let target = Buffer::new(bytes)?;
    let range = buffer.range()?;
    let registrar = cache.registrar();
    let (handle, register) = timed(|| registrar.register(range));
    let handle = handle?;
    let ((), deregister) = timed(|| registrar.deregister(handle));
    let ((), copy) = timed(|| target.copy_from(&buffer));
    black_box(&target);
    let (guard, miss) = timed(|| cache.get(range));
    drop(guard?);
    let hits = timed(|| (0..HITS).try_for_each(|_| cache.get(range).map(drop)));
    hits.0?;
    let ((), evict) = timed(|| cache.flush());
    drop(cache.get(range)?);
    let ((), unmap_cached) = timed(|| drop(buffer));
    Ok([register + deregister, copy, miss, hits.1 / HITS, evict, unmap_cached, unmap])
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(ROUNDS_DEFAULT), |text| text.parse())?;
    let cache = RegistrationCache::new(PinnedBuffers::new(1024)?, Limits::default());
    if cache.mode() != Mode::Cached {
        println!("no cache: {:?}", cache.mode());
    }
    println!("| size | register + deregister | copy | miss | hit | evict | unmap, cached | unmap, unwatched |");
    println!("|---|---|---|---|---|---|---|---|");
    for bytes in SIZES {
        let mut columns = [const { Vec::new() }; 7];
        // Longer ones take longer to make: fewer rounds.
        for _ in 0..(rounds >> (bytes >> 22).min(3)).max(3) {
            for (column, time) in columns.iter_mut().zip(round(bytes, &cache)?) {
                column.push(time);
            }
        }
        let figures: Vec<String> = columns.into_iter().map(|column| format!("{:.2}", median(column))).collect();
        println!("| {} KiB | {} |", bytes >> 10, figures.join(" | "));
    }
    println!("{:?}", cache.counters());
    Ok(())
}
