//! The world: its clock, its nodes, and its owner's actions on them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::disk::SimFile;
use super::events::{Event, Events};
use super::faults::{FaultCount, FaultPlan};
use super::net::Net;
use super::node::{Node, SimLoop};
use super::rng::Rng;
use crate::frame::FramePool;
use crate::{Instant, Reactor};

/// How often chance is asked whether the fault plan strikes.
const FAULT_TICK: Duration = Duration::from_millis(10);

/// How a node dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process alone. Completed writes are kept; each one in flight happened, or a prefix of its sectors, or not.
    Process,
    /// The power fails. Each sector keeps its last durable value or, by chance, one written later.
    Power,
}

/// What lies between two nodes, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProfile {
    /// Time that each segment takes.
    pub latency: Duration,
    /// At most so much is added to it, by chance, segment by segment.
    pub jitter: Duration,
    /// Bytes per second in each direction, shared by the link's connections; at least 1.
    pub bandwidth: u64,
    /// Bytes that a stream's send buffer holds, and that may wait unread at its other end; at least 1.
    pub buffer_bytes: usize,
}

impl Default for LinkProfile {
    /// A 10 Gbit/s network.
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(30),
            jitter: Duration::from_micros(20),
            bandwidth: 1_250_000_000,
            buffer_bytes: 256 << 10,
        }
    }
}

/// A simulated world. Cloning it gives another handle to the same one.
#[derive(Clone, Debug)]
pub struct World {
    inner: Rc<RefCell<Inner>>,
}

/// A simulated node's disk; it outlives the node's crashes.
#[derive(Clone, Debug)]
pub struct Disk {
    world: World,
    ip: IpAddr,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) now: Instant,
    /// The same, for clocks that are read from outside of the world.
    pub(super) clock: Arc<AtomicU64>,
    pub(super) rng: Rng,
    pub(super) events: Events,
    /// Every loop that has not been dropped, also of nodes that crashed.
    pub(super) nodes: BTreeMap<u64, Node>,
    /// Every address that ever was a node, with the loop that lives there now.
    pub(super) addresses: BTreeMap<IpAddr, Option<u64>>,
    pub(super) net: Net,
    pub(super) plan: FaultPlan,
    pub(super) count: FaultCount,
    /// Into and out of memory that nodes have lent each other.
    pub(super) copies: u64,
    disks: BTreeMap<IpAddr, BTreeMap<String, SimFile>>,
    next_tick: Option<Instant>,
    next_id: u64,
}

impl World {
    /// A world without nodes, at time zero.
    pub fn new(seed: u64) -> Self {
        let inner = Inner {
            now: Instant::ZERO,
            clock: Arc::default(),
            rng: Rng::new(seed),
            events: Events::default(),
            nodes: BTreeMap::new(),
            addresses: BTreeMap::new(),
            net: Net::default(),
            plan: FaultPlan::default(),
            count: FaultCount::default(),
            copies: 0,
            disks: BTreeMap::new(),
            next_tick: None,
            next_id: 0,
        };
        Self { inner: Rc::new(RefCell::new(inner)) }
    }

    /// Starts a node, or starts one again after its crash: a loop with a pool of `frame_bytes`.
    ///
    /// # Panics
    /// If a loop already lives at this address, or the pool's memory cannot be mapped.
    pub fn node(&self, ip: IpAddr, frame_bytes: usize) -> Reactor {
        let frames = FramePool::new(frame_bytes).expect("memory for the frames of a simulated node");
        let mut inner = self.inner.borrow_mut();
        assert!(inner.live(ip).is_none(), "a simulated node has one loop");
        let id = inner.new_id();
        let node = Node::new(ip);
        let waker = node.waker.clone();
        inner.nodes.insert(id, node);
        inner.addresses.insert(ip, Some(id));
        Reactor::simulated(SimLoop::new(Rc::clone(&self.inner), id, waker), frames)
    }

    /// Kills a node: its operations answer `ECANCELED`. Peers see resets or, where only the process died and chance so
    /// decides, what its kernel makes of open streams: all that was taken to be sent, then the end, wherever that falls.
    /// The owner drops the node's [`Reactor`], which is of no more use, and may start the node again.
    pub fn crash(&self, ip: IpAddr, how: Crash) {
        let mut inner = self.inner.borrow_mut();
        let node = inner.addresses.get(&ip).copied().flatten();
        if let Some(node) = node {
            inner.count.crashes += 1;
            inner.crash(node, how);
        }
    }

    /// Whether completions wait for the next reap of the loop that lives at `ip`.
    pub fn has_ready(&self, ip: IpAddr) -> bool {
        let inner = self.inner.borrow();
        let node = inner.live(ip).and_then(|id| inner.nodes.get(&id));
        node.is_some_and(|node| !node.ready.is_empty())
    }

    /// Moves the clock to the next event and makes ready what it causes. False when nothing is planned; completions may
    /// be waiting in the loops all the same.
    pub fn step(&self) -> bool {
        self.inner.borrow_mut().step(Instant::FAR)
    }

    /// Turns the loops and steps until the time `at`: calls `turn`, which reaps and handles what is ready in every loop
    /// (again and again until nothing is), after each step. The clock then shows `at`.
    pub fn run_until(&self, at: Instant, mut turn: impl FnMut()) {
        turn();
        while self.inner.borrow_mut().step(at) {
            turn();
        }
        self.inner.borrow_mut().advance(at);
    }

    /// The simulated time.
    pub fn now(&self) -> Instant {
        self.inner.borrow().now
    }

    /// Sets what lies between two nodes (or a node and itself); streams made later follow it entirely.
    pub fn link(&self, a: IpAddr, b: IpAddr, profile: LinkProfile) {
        self.inner.borrow_mut().net.set_link(a, b, profile);
    }

    /// Cuts two nodes off from each other. Bytes are held until [`World::heal`]; a stream that is held for longer than
    /// its [keep-alive](Reactor::keep_alive), or than a minute, times out.
    pub fn partition(&self, a: IpAddr, b: IpAddr) {
        self.inner.borrow_mut().partition(a, b);
    }

    /// Ends a partition.
    pub fn heal(&self, a: IpAddr, b: IpAddr) {
        self.inner.borrow_mut().heal(a, b);
    }

    /// Breaks a connection of the world's choice at both ends. False if there is none.
    pub fn reset_random_connection(&self) -> bool {
        self.inner.borrow_mut().reset_random_connection()
    }

    /// What chance does from now on.
    pub fn faults(&self, plan: FaultPlan) {
        let mut inner = self.inner.borrow_mut();
        inner.plan = plan;
        let strikes = plan.partitions_per_second + plan.resets_per_second + plan.delays_per_second > 0.0;
        inner.next_tick = strikes.then_some(inner.now + FAULT_TICK);
    }

    /// What went wrong so far.
    pub fn fault_count(&self) -> FaultCount {
        self.inner.borrow().count
    }

    /// Copies into and out of memory that nodes have lent each other, so far.
    pub fn lent_copies(&self) -> u64 {
        self.inner.borrow().copies
    }

    /// The disk of a node; the node need not run.
    pub fn disk(&self, ip: IpAddr) -> Disk {
        Disk { world: self.clone(), ip }
    }
}

impl Disk {
    /// The file of that name; made, sparse and of `len` bytes, if it is not there.
    pub fn file(&self, name: &str, len: u64) -> SimFile {
        let mut inner = self.world.inner.borrow_mut();
        let files = inner.disks.entry(self.ip).or_default();
        files.entry(name.to_owned()).or_insert_with(|| SimFile::new(len)).clone()
    }
}

impl Inner {
    pub(super) fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The loop that lives at `ip`.
    pub(super) fn live(&self, ip: IpAddr) -> Option<u64> {
        self.addresses.get(&ip).copied().flatten()
    }

    /// The next event up to `limit`.
    fn step(&mut self, limit: Instant) -> bool {
        let Some(at) = self.events.next_at().filter(|at| *at <= limit) else { return false };
        // Chance strikes only while something goes on, so that a world at rest comes to an end.
        if let Some(tick) = self.next_tick.filter(|tick| *tick <= at) {
            self.advance(tick);
            self.next_tick = Some(self.now + FAULT_TICK);
            self.strike();
            return true;
        }
        if let Some((at, event)) = self.events.pop() {
            self.advance(at);
            self.happen(&event);
        }
        true
    }

    /// Moves the clock forward, if it does not show `at` already.
    fn advance(&mut self, at: Instant) {
        self.now = self.now.max(at);
        self.clock.store(self.now.nanos(), Ordering::Relaxed);
    }

    fn happen(&mut self, event: &Event) {
        match *event {
            Event::Timer { node, op } => self.timer_due(node, op),
            Event::Disk { node, op } => self.disk_done(node, op),
            Event::Syn { node, op } => self.syn(node, op),
            Event::SynAck { node, op, connection } => self.syn_ack(node, op, connection),
            Event::ConnectTimeout { node, op } => self.connect_timeout(node, op),
            Event::Arrive { connection, from } => self.arrive(connection, from),
            Event::Silent { connection, end } => self.silent(connection, end),
            Event::Heal { a, b } => self.heal(a, b),
        }
    }

    /// One tick of the fault plan.
    fn strike(&mut self) {
        let per_tick = FAULT_TICK.as_secs_f64();
        let plan = self.plan;
        if self.rng.chance(plan.partitions_per_second * per_tick)
            && let Some((a, b)) = self.random_pair()
        {
            self.partition(a, b);
            let until = self.now + self.up_to(plan.partition_max);
            self.events.add(until, Event::Heal { a, b });
        }
        if self.rng.chance(plan.resets_per_second * per_tick) {
            self.reset_random_connection();
        }
        if self.rng.chance(plan.delays_per_second * per_tick)
            && let Some((a, b)) = self.random_pair()
        {
            let until = self.now + self.up_to(plan.delay_max);
            self.net.stall(a, b, until);
            self.count.delays += 1;
        }
    }

    pub(super) fn up_to(&mut self, max: Duration) -> Duration {
        Duration::from_nanos(self.rng.below(u64::try_from(max.as_nanos()).unwrap_or(u64::MAX)))
    }

    fn random_pair(&mut self) -> Option<(IpAddr, IpAddr)> {
        let count = self.addresses.len() as u64;
        if count < 2 {
            return None;
        }
        let first = self.rng.below(count);
        let second = (first + 1 + self.rng.below(count - 1)) % count;
        let ip = |index| self.addresses.keys().nth(index as usize).copied();
        Some((ip(first)?, ip(second)?))
    }

    /// The end of a loop: by a crash, or because its owner dropped it.
    pub(super) fn crash(&mut self, id: u64, how: Crash) {
        let Some(node) = self.nodes.get_mut(&id).filter(|node| !node.dead) else { return };
        node.dead = true;
        let ip = node.ip;
        self.addresses.insert(ip, None);
        self.cancel_everything(id);
        self.end_connections(id, how);
        if let Some(files) = self.disks.get(&ip) {
            for file in files.values() {
                self.count.lost_sectors += file.crash(how, &mut self.rng);
            }
        }
    }
}
