//! Lenders in the simulated world: each a loop with a host, which may die and start again.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use byway_fabric::{Options, Registry};
use byway_reactor::sim::{Crash, World};
use byway_reactor::{Address, Instant, Reactor, Wait};
use byway_service::host::Host;
use byway_service::limits::SLAB_BYTES;
use byway_service::memory::{Guard, Lender, Lending, Reading};

/// Memory that a lender's machine keeps for itself.
const GUARD_BYTES: u64 = 1 << 30;

pub fn ip(lender: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, lender as u8 + 2))
}

pub fn at(lender: usize) -> Address {
    Address::Tcp(SocketAddr::new(ip(lender), 4711))
}

struct Life {
    host: Host,
    lender: Lender,
    reactor: Reactor,
}

/// One lender, over all of its lives.
pub struct SimulatedLender {
    number: usize,
    slabs: u64,
    lives: u64,
    seed: u64,
    life: Option<Life>,
    lending: Arc<Lending>,
    /// What its machine has available, beside what is lent.
    available: Arc<AtomicU64>,
}

impl SimulatedLender {
    pub fn start(world: &World, number: usize, slabs: u64, seed: u64) -> Self {
        let available = Arc::new(AtomicU64::new(0));
        let mut lender = Self {
            number,
            slabs,
            lives: 0,
            seed,
            life: None,
            lending: Arc::new(Lending::new(0, None, None)),
            available,
        };
        lender.restart(world);
        lender
    }

    /// It begins without leases.
    pub fn restart(&mut self, world: &World) {
        self.lives += 1;
        self.make_short(false);
        let available = Arc::clone(&self.available);
        let reading =
            move || Some(Reading { available_bytes: available.load(Ordering::Relaxed), stalled_percent: 0.0 });
        let guard = Guard::with_readings(GUARD_BYTES, reading);
        self.lending = Arc::new(Lending::new(self.slabs * SLAB_BYTES as u64, None, Some(guard)));
        let mut reactor = world.node(ip(self.number), 4 << 20);
        let mut options = Options::new(0x20);
        options.seed = Some(self.seed.wrapping_mul(31).wrapping_add(self.number as u64 * 7 + self.lives));
        let mut host = Host::new(&reactor, Arc::new(Registry::new(self.lives)), options, vec![Lender::spoken()]);
        host.listen(&mut reactor, &at(self.number)).expect("a simulated address is free");
        self.life = Some(Life { host, lender: Lender::new(Arc::clone(&self.lending)), reactor });
    }

    pub fn crash(&mut self, world: &World, how: Crash) {
        world.crash(ip(self.number), how);
        self.life = None;
    }

    pub fn is_up(&self) -> bool {
        self.life.is_some()
    }

    /// Whether its machine is short of memory, by one slab.
    pub fn make_short(&self, short: bool) {
        let bytes = if short { GUARD_BYTES - SLAB_BYTES as u64 } else { 1 << 40 };
        self.available.store(bytes, Ordering::Relaxed);
    }

    pub fn lent_bytes(&self) -> u64 {
        self.life.as_ref().map_or(0, |_| self.lending.status().lent_bytes)
    }

    pub fn taken_back_bytes(&self) -> u64 {
        self.lending.status().taken_back_bytes
    }

    pub fn next_look(&self) -> Option<Instant> {
        self.life.as_ref()?.lender.next_look()
    }

    /// Handles what is ready; whether something was.
    pub fn turn(&mut self, world: &World) -> bool {
        let Some(Life { host, lender, reactor }) = &mut self.life else { return false };
        if lender.next_look().is_some_and(|at| at <= world.now()) {
            host.flush(reactor, &mut [lender]);
        }
        if !world.has_ready(ip(self.number)) {
            return false;
        }
        let mut completions = Vec::new();
        reactor.reap(&mut completions, Wait::Poll).expect("a simulated loop turns");
        for completion in completions {
            host.handle(reactor, &mut [lender], completion);
        }
        host.flush(reactor, &mut [lender]);
        true
    }
}
