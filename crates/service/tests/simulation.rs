//! Several clients and a server in a simulated world: partitions, resets, stalls, crashes of the process and of the power,
//! disk errors. Every sector that is written says who wrote it and when, so every read and the final state are held
//! against the failure rules of the design:
//!
//! - a read gives the last acknowledged value of each sector, or one submitted later;
//! - after a power loss without anybody who would write again, each sector holds its last flushed (or durable) value, or
//!   one submitted later; sectors are never torn;
//! - no request is answered twice, and every request is answered.
//!
//! `BYWAY_SIM_SEEDS=N` runs N seeds (1,000 if not said); `BYWAY_SIM_SEED=S` runs that one.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use byway_fabric::random::Random;
use byway_fabric::{Options, PayloadChecksum, Registry};
use byway_reactor::sim::{Crash, FaultPlan, LinkProfile, SimFile, World};
use byway_reactor::{Address, FileOptions, Frame, OpenFile, Reactor, Wait};
use byway_service::block::client::{Done, Request, Volume as Client, VolumeOptions};
use byway_service::block::server::Server;
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeOptions as Served, ZeroFlags};

const SECTOR: usize = 512;
const CLIENTS: usize = 3;
/// Sectors of each client's part of the volume.
const PART: usize = 400;
const REQUESTS: u64 = 120;
const DEPTH: usize = 12;
/// What each seed does at least, on average.
const OPS_PER_SEED_MIN: u64 = 300;
const FAULTS_PER_SEED_MIN: u64 = 8;

const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const SERVER_CLASS: u8 = 0x20;

fn client_ip(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 1, index as u8 + 1))
}

struct Serving {
    server: Server,
    engine: Engine,
    reactor: Reactor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Read,
    Write { durable: bool },
    Zero,
    Flush,
}

/// A client and what its user knows.
struct User {
    volume: Client,
    reactor: Reactor,
    base: usize,
    next: u64,
    asked: BTreeMap<u64, (Asked, usize, usize, Vec<u64>)>,
    /// Of each sector: the newest acknowledged request, the newest one that is durable for sure, the newest zeroing.
    acknowledged: Vec<u64>,
    durable: Vec<u64>,
    zeroed: Vec<u64>,
    answered: u64,
    errors: u64,
    /// A flush failed, or the volume did: what was acknowledged and not flushed may be gone.
    lossy: bool,
}

struct Run {
    world: World,
    random: Random,
    seed: u64,
    file: SimFile,
    server: Option<Serving>,
    instance: u64,
    users: Vec<User>,
}

/// Numbers of a run.
#[derive(Default)]
struct Report {
    answered: u64,
    errors: u64,
    faults: u64,
    replayed: u64,
    sessions: u64,
}

fn fill(bytes: &mut [u8], client: usize, request: u64, first_sector: usize) {
    for (index, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        let words = [request, client as u64, (first_sector + index) as u64];
        for (at, word) in words.into_iter().enumerate() {
            sector[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        sector[24..504].fill(request as u8);
        sector[504..].copy_from_slice(&request.to_le_bytes());
    }
}

/// Which request wrote a sector; 0 for zeroes.
fn written_by(sector: &[u8], client: usize, number: usize) -> u64 {
    let word = |at: usize| u64::from_le_bytes(sector[at..at + 8].try_into().unwrap());
    let request = word(0);
    if request == 0 {
        assert!(sector.iter().all(|byte| *byte == 0), "a torn sector of zeroes");
        return 0;
    }
    assert_eq!((word(8), word(16)), (client as u64, number as u64), "a sector of somebody else");
    assert!(word(504) == request && sector[24..504].iter().all(|byte| *byte == request as u8), "a torn sector");
    request
}

impl Run {
    fn new(seed: u64) -> Self {
        let world = World::new(seed);
        let file = world.disk(SERVER_IP).file("disk", (CLIENTS * PART * SECTOR) as u64);
        let mut run =
            Self { world, random: Random::from_seed(seed), seed, file, server: None, instance: 0, users: Vec::new() };
        let slow = LinkProfile { bandwidth: 50_000_000, buffer_bytes: 20_000, ..LinkProfile::default() };
        run.start_server();
        for index in 0..CLIENTS {
            if run.below(3) == 0 {
                run.world.link(SERVER_IP, client_ip(index), slow);
            }
            let reactor = run.world.node(client_ip(index), 8 << 20);
            let mut options = VolumeOptions::new(0x30);
            options.fabric.seed = Some(seed * 100 + index as u64);
            options.fabric.keep_alive = Duration::from_secs(2);
            options.fabric.terms.checksum =
                if run.below(4) == 0 { PayloadChecksum::Required } else { PayloadChecksum::Off };
            options.bounds.unflushed_bytes_max = 256 << 10;
            options.bounds.lost_after = Duration::from_mins(10);
            let address = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));
            let volume = Client::connect(&reactor, address, "disk", options);
            run.users.push(User {
                volume,
                reactor,
                base: index * PART,
                next: 0,
                asked: BTreeMap::new(),
                acknowledged: vec![0; PART],
                durable: vec![0; PART],
                zeroed: vec![0; PART],
                answered: 0,
                errors: 0,
                lossy: false,
            });
        }
        run
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.next_u64() % limit
    }

    fn start_server(&mut self) {
        self.instance += 1;
        let mut reactor = self.world.node(SERVER_IP, 8 << 20);
        let options = FileOptions { map: self.seed.is_multiple_of(2), ..FileOptions::default() };
        let file = Arc::new(OpenFile::simulated(self.file.clone(), options));
        let volume = Volume::new("disk", Store::open_file(file), Served::default());
        let mut engine = Engine::default();
        let mut options = Options::new(SERVER_CLASS);
        options.seed = Some(self.seed * 1000 + self.instance);
        options.keep_alive = Duration::from_secs(2);
        options.terms.credits = if self.seed.is_multiple_of(5) { 3 } else { 64 };
        let registry = Arc::new(Registry::new(self.seed * 1000 + self.instance));
        let mut server = Server::new(&reactor, registry, options);
        server.listen(&mut reactor, &Address::Tcp(SocketAddr::new(SERVER_IP, 4711))).unwrap();
        server.offer(engine.attach(&mut reactor, Arc::new(volume)));
        self.server = Some(Serving { server, engine, reactor });
    }

    fn crash_server(&mut self, how: Crash) {
        if self.server.is_some() {
            self.world.crash(SERVER_IP, how);
            self.server = None;
        }
    }

    /// Handles everything that is ready, in every loop.
    fn turn(&mut self) {
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        loop {
            let mut idle = true;
            if let Some(Serving { server, engine, reactor }) = &mut self.server {
                server.flush(reactor, engine);
                reactor.reap(&mut completions, Wait::Poll).unwrap();
                for completion in completions.drain(..) {
                    idle = false;
                    match completion.token.class() {
                        SERVER_CLASS => server.handle(reactor, engine, completion),
                        ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                        _ => server.woken(reactor, engine),
                    }
                    for done in done.drain(..) {
                        server.done(reactor, engine, done);
                    }
                }
                server.flush(reactor, engine);
            }
            for index in 0..self.users.len() {
                let user = &mut self.users[index];
                user.volume.flush(&mut user.reactor);
                user.reactor.reap(&mut completions, Wait::Poll).unwrap();
                for completion in completions.drain(..) {
                    idle = false;
                    user.volume.handle(&mut user.reactor, completion);
                }
                user.volume.flush(&mut user.reactor);
                self.take_answers(index);
                idle &= !self.ask(index);
            }
            if idle {
                return;
            }
        }
    }

    /// Keeps a client busy; says whether it has something new to do.
    fn ask(&mut self, index: usize) -> bool {
        let mut asked = false;
        while self.users[index].next < REQUESTS && self.users[index].volume.pending() < DEPTH {
            let (kind, size) = (self.below(20), self.below(10));
            let sectors = match size {
                0 => 64 + self.below(100),
                1 => 33 + self.below(30),
                _ => 1 + self.below(12),
            } as usize;
            let start = self.below((PART - sectors) as u64) as usize;
            let durable = self.below(8) == 0;
            let user = &mut self.users[index];
            // A read that is in flight together with a change of the same sectors may see them torn.
            let reads = (3..9).contains(&kind);
            let collides = |(what, from, to, _): &(Asked, usize, usize, Vec<u64>)| {
                *what != Asked::Flush && (*what == Asked::Read) != reads && *from < start + sectors && start < *to
            };
            if kind >= 3 && user.asked.values().any(collides) {
                return asked;
            }
            let tag = user.next + 1;
            let (offset, len) = (((user.base + start) * SECTOR) as u64, sectors * SECTOR);
            let (what, request) = match kind {
                0..3 => (Asked::Flush, Request::Flush),
                3..9 => {
                    let Some(into) = user.reactor.frames().alloc(len) else { return asked };
                    (Asked::Read, Request::Read { offset, len, into })
                }
                9 => {
                    let flags = ZeroFlags { durable, ..ZeroFlags::default() };
                    (Asked::Zero, Request::Zero { offset, len: len as u64, flags })
                }
                _ => {
                    let Some(mut from) = user.reactor.frames().alloc(len) else { return asked };
                    fill(&mut from, index, tag, user.base + start);
                    (Asked::Write { durable }, Request::Write { offset, len, from: Rc::new(from), durable })
                }
            };
            let before = if what == Asked::Flush {
                user.acknowledged.clone()
            } else {
                user.acknowledged[start..start + sectors].to_vec()
            };
            if user.volume.submit(request, tag).is_err() {
                return asked;
            }
            if what == Asked::Zero {
                user.zeroed[start..start + sectors].fill(tag);
            }
            user.next = tag;
            user.asked.insert(tag, (what, start, start + sectors, before));
            user.volume.flush(&mut user.reactor);
            asked = true;
        }
        asked
    }

    fn take_answers(&mut self, index: usize) {
        let user = &mut self.users[index];
        let mut done: Vec<Done<Frame>> = Vec::new();
        user.volume.reap(&mut done);
        for done in done {
            let asked = user.asked.remove(&done.tag).expect("no request is answered twice");
            let (what, start, end, before) = asked;
            user.answered += 1;
            if let Err(_error) = &done.result {
                user.errors += 1;
                user.lossy |= what == Asked::Flush || user.volume.failed().is_some();
                continue;
            }
            match what {
                Asked::Read => {
                    let frame = done.buffer.expect("a read brings its memory back");
                    let floor = if user.lossy { &user.durable[start..end] } else { &before[..] };
                    for (at, sector) in frame.chunks_exact(SECTOR).enumerate() {
                        let by = written_by(sector, index, user.base + start + at);
                        user.check(start + at, by, floor[at].min(before[at]), "a read");
                    }
                }
                Asked::Write { durable } => {
                    for sector in start..end {
                        user.acknowledged[sector] = user.acknowledged[sector].max(done.tag);
                        if durable {
                            user.durable[sector] = user.durable[sector].max(done.tag);
                        }
                    }
                }
                Asked::Zero => {
                    user.acknowledged[start..end].iter_mut().for_each(|newest| *newest = done.tag.max(*newest));
                }
                Asked::Flush => {
                    for (durable, before) in user.durable.iter_mut().zip(before) {
                        *durable = (*durable).max(before);
                    }
                }
            }
        }
    }

    fn run(&mut self) -> Report {
        let disk_errors = self.seed.is_multiple_of(4);
        self.world.faults(FaultPlan {
            partitions_per_second: 2.0,
            partition_max: Duration::from_secs(3),
            resets_per_second: 4.0,
            delays_per_second: 4.0,
            read_error: if disk_errors { 0.01 } else { 0.0 },
            write_error: if disk_errors { 0.005 } else { 0.0 },
            sync_error: if self.seed.is_multiple_of(16) { 0.05 } else { 0.0 },
            no_space: if disk_errors { 0.005 } else { 0.0 },
            ..FaultPlan::default()
        });
        for round in 0.. {
            let pause = Duration::from_micros(self.below(30_000));
            self.pass(pause);
            let all_asked = self.users.iter().all(|user| user.next >= REQUESTS && user.asked.is_empty());
            if all_asked || round == 40 {
                break;
            }
            match self.below(6) {
                0 => self.crash_server(Crash::Power),
                1 => self.crash_server(Crash::Process),
                2 => drop(self.world.reset_random_connection()),
                3 => {
                    let client = client_ip(self.below(CLIENTS as u64) as usize);
                    self.world.partition(SERVER_IP, client);
                    let pause = Duration::from_millis(self.below(6000));
                    self.pass(pause);
                    self.world.heal(SERVER_IP, client);
                }
                _ => {}
            }
            if self.server.is_none() {
                let pause = Duration::from_millis(self.below(300));
                self.pass(pause);
                self.start_server();
            }
        }
        self.finish()
    }

    fn pass(&mut self, time: Duration) {
        let until = self.world.now() + time;
        let world = self.world.clone();
        world.run_until(until, || self.turn());
    }

    /// Without faults everything must end, and the state must be right; then the power fails for the last time.
    fn finish(&mut self) -> Report {
        self.world.faults(FaultPlan::default());
        for index in 0..CLIENTS {
            self.world.heal(SERVER_IP, client_ip(index));
        }
        for _ in 0..2000 {
            let settled = |user: &User| user.volume.is_settled() || user.volume.failed().is_some();
            if self.users.iter().all(|user| user.next >= REQUESTS && user.asked.is_empty() && settled(user)) {
                break;
            }
            self.pass(Duration::from_millis(100));
        }
        for user in &mut self.users {
            user.lossy |= user.volume.failed().is_some();
        }
        for (index, user) in self.users.iter().enumerate() {
            assert!(user.asked.is_empty(), "requests of client {index} never ended: {:?}", user.asked.keys());
        }
        self.check_file("at the end", |user| if user.lossy { &user.durable } else { &user.acknowledged });
        self.crash_server(Crash::Power);
        self.check_file("after the last power loss", |user| &user.durable);
        let mut report = Report { faults: self.world.fault_count().total(), ..Report::default() };
        for user in &self.users {
            report.answered += user.answered;
            report.errors += user.errors;
            report.replayed += user.volume.replayed();
            report.sessions += user.volume.sessions();
        }
        report
    }

    fn check_file(&self, when: &str, floor: impl Fn(&User) -> &Vec<u64>) {
        let contents = self.file.contents();
        for (index, user) in self.users.iter().enumerate() {
            for sector in 0..PART {
                let number = user.base + sector;
                let by = written_by(&contents[number * SECTOR..][..SECTOR], index, number);
                user.check(sector, by, floor(user)[sector], when);
            }
        }
    }
}

impl User {
    /// A sector must hold what request `floor` left there, or something later.
    fn check(&self, sector: usize, by: u64, floor: u64, when: &str) {
        let good = if by == 0 { floor == 0 || self.zeroed[sector] >= floor } else { by >= floor };
        assert!(good, "{when}: sector {sector} holds {by}, older than {floor}");
    }
}

#[test]
fn the_failure_rules_hold_whatever_happens() {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (first, count) = match number("BYWAY_SIM_SEED") {
        Some(seed) => (seed, 1),
        None => (1, number("BYWAY_SIM_SEEDS").unwrap_or(1000)),
    };
    let next = AtomicU64::new(first);
    let totals: [AtomicU64; 5] = Default::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let outcome = std::panic::catch_unwind(|| Run::new(seed).run());
                    let Ok(report) = outcome else {
                        panic!("seed {seed} failed; replay it with BYWAY_SIM_SEED={seed}");
                    };
                    let numbers = [report.answered, report.errors, report.faults, report.replayed, report.sessions];
                    for (total, number) in totals.iter().zip(numbers) {
                        total.fetch_add(number, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let [answered, errors, faults, replayed, sessions] = totals.map(AtomicU64::into_inner);
    println!(
        "{count} seeds: {answered} requests ({errors} failed), {faults} faults, {replayed} writes sent again, {sessions} sessions"
    );
    assert!(answered >= OPS_PER_SEED_MIN * count, "only {answered} requests");
    assert!(faults >= FAULTS_PER_SEED_MIN * count || count == 1, "only {faults} faults");
    assert!(replayed > count / 2 || count < 20, "only {replayed} writes were sent again");
}
