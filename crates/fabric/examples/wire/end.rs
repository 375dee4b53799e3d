//! What both ends have: a loop and a fabric, and the words that they say to each other.

use std::error::Error;
use std::time::Duration;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{Fabric, Handler, Options};
use byway_reactor::{Completion, IoChoice, Reactor, Wait};

/// What a call asks for, in the first byte of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ask {
    /// Answer with `reply` bytes: into the window, if the call has one.
    Call = 1,
    /// Answer with the payload.
    Echo = 2,
    /// Remember the window as the one that is got from.
    Source = 3,
    /// Remember the window as the one that is put into.
    Target = 4,
    /// Get the source, put it into the target.
    EchoLarge = 5,
    /// Get the source, then answer. A payload in the message is answered if `depth` is not 0.
    Give = 6,
    /// Get from the source again and again, and tell how long it takes.
    Get = 7,
}

/// Body: what is asked for (1), zeroes (3), bytes of the answer (4), places in each source that are got in turn or
/// zero (4), depth (4), for how long in
/// nanoseconds (8). An answer to [`Ask::Get`]: how many (8), the median in nanoseconds (8), how long they took in nanoseconds (8).
#[derive(Clone, Copy, Debug, Default)]
pub struct Body {
    pub ask: u8,
    pub len: u32,
    pub places: u32,
    pub depth: u32,
    pub nanos: u64,
}

impl Body {
    pub fn of(header: &Header) -> Self {
        let word = |at: usize| {
            let bytes: [u8; 4] = header.body[at..at + 4].try_into().unwrap_or_default();
            u32::from_le_bytes(bytes)
        };
        let nanos = u64::from(word(16)) | u64::from(word(20)) << 32;
        Self { ask: header.body[0], len: word(4), places: word(8), depth: word(12), nanos }
    }

    pub fn header(self, kind: Kind) -> Header {
        let mut header = Header::new(kind);
        header.body[0] = self.ask;
        header.body[4..8].copy_from_slice(&self.len.to_le_bytes());
        header.body[8..12].copy_from_slice(&self.places.to_le_bytes());
        header.body[12..16].copy_from_slice(&self.depth.to_le_bytes());
        header.body[16..24].copy_from_slice(&self.nanos.to_le_bytes());
        header
    }
}

pub struct WireEnd {
    pub reactor: Reactor,
    pub fabric: Fabric,
    wait: Wait,
    completions: Vec<Completion>,
}

impl WireEnd {
    pub fn new(io: IoChoice, polling: bool) -> Result<Self, Box<dyn Error>> {
        let reactor = Reactor::open(io, 160 << 20)?;
        let wait = if polling { Wait::Poll } else { Wait::Block };
        Ok(Self { reactor, fabric: Fabric::new(Options::new(1)), wait, completions: Vec::new() })
    }

    /// Sends, waits, and hands out what came.
    pub fn turn<H: Handler>(&mut self, handler: &mut H) -> Result<(), Box<dyn Error>> {
        self.fabric.feed_starved(&mut self.reactor, handler);
        self.fabric.flush(&mut self.reactor, handler);
        self.reactor.reap(&mut self.completions, self.wait)?;
        for completion in self.completions.drain(..) {
            self.fabric.handle(&mut self.reactor, completion, handler);
        }
        Ok(())
    }
}

/// Latencies of which no more are kept than take no time to sort.
pub struct Latencies {
    nanos: Vec<u64>,
    seen: usize,
    /// Each so-manieth is kept.
    stride: usize,
}

impl Latencies {
    const KEPT_MAX: usize = 1 << 16;

    pub fn new() -> Self {
        Self { nanos: Vec::with_capacity(Self::KEPT_MAX), seen: 0, stride: 1 }
    }

    pub fn push(&mut self, time: Duration) {
        if self.seen.is_multiple_of(self.stride) {
            if self.nanos.len() == Self::KEPT_MAX {
                let mut keeps = false;
                self.nanos.retain(|_| {
                    keeps = !keeps;
                    keeps
                });
                self.stride *= 2;
            }
            self.nanos.push(time.as_nanos() as u64);
        }
        self.seen += 1;
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.seen as u64
    }

    /// The median and the 99th percentile, in nanoseconds.
    pub fn p50_p99(&mut self) -> (u64, u64) {
        self.nanos.sort_unstable();
        let at = |percent: usize| self.nanos.get(self.nanos.len() * percent / 100).copied().unwrap_or(0);
        (at(50), at(99))
    }
}

/// CPU time of this process.
pub fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
