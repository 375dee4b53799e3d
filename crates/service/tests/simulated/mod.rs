//! A server and several clients in a simulated world, and the rules that must hold whatever happens to them.
//!
//! Faults: partitions, resets and stalls of the network; the server's process or its power fails; a client's machine
//! dies, now and then behind a partition, and a successor starts with nothing; the server replaces the volume by another
//! that has what was flushed alone, or opens its files anew; disks answer errors, tear writes and lose what was not flushed. Rules, all checked in every run:
//!
//! - a read gives, of each sector, the last value that was acknowledged before it was asked, or one submitted later;
//! - so does the store at the end; after a power loss with nobody left to write again, each sector holds its last flushed
//!   (or durable) value, or one submitted later; sectors are whole, and nobody's sectors hold another's bytes;
//! - what a dead client had flushed stays; what it had only had acknowledged stays while the server's power does;
//! - the resources of a dead client are back within twice the keep-alive time and a second;
//! - every request is answered, once; a server answers no call twice; no request fails unless a disk did;
//! - no session ends because one side found the other's messages wrong;
//! - once the faults have stopped everything ends within half a minute; when the clients have gone, so have their
//!   sessions, requests and frames.

#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../native_server/mod.rs"]
mod native_server;
mod replacement;
mod rules;
mod user;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::random::Random;
use byway_fabric::{Options, PayloadChecksum};
use byway_reactor::sim::{Crash, FaultPlan, LinkProfile, SimFile, World};
use byway_reactor::{Address, FileOptions, Frame, OpenFile, Reactor, Wait};
use byway_service::block::client::{Volume as Client, VolumeOptions};
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeId, VolumeOptions as Served};
use byway_skip::seeds::catch_broken;
use native_server::Server;

pub use self::rules::Broken;
use self::rules::{SECTOR, broken, check_end_of_session};
use self::user::{Life, User};

const CLIENTS: usize = 3;
/// Sectors of each client's part of the volume: whole chunks.
const PART: usize = 400;
const CHUNK: usize = 4096;
/// Requests of each life of a client.
const REQUESTS: u64 = 120;
/// And of each client once the faults have stopped: what hangs is no longer helped by the next reset.
const CALM_REQUESTS: u64 = 40;
const DEPTH: usize = 12;
/// Of the frames of a server that has few: 128 KiB each, of 1 MiB.
const FRAMES_TAKEN: usize = 7;
const DEATHS_MAX: usize = 2;
const ROUNDS_MAX: usize = 400;
/// What every seed does at least.
pub const REQUESTS_MIN: u64 = 400;
pub const FAULTS_MIN: u64 = 10;

const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Until the server has let go of a dead client.
const GONE_WITHIN: Duration = Duration::from_secs(5);
/// Until everything has ended once the faults have: less than a call may take.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const COPIER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 1));
const SERVER_CLASS: u8 = 0x20;
const AT: Address = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));

fn client_ip(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 1, index as u8 + 1))
}

/// Numbers of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Requests that were answered, and those of them that failed.
    pub answered: u64,
    pub errors: u64,
    /// Faults of every kind.
    pub faults: u64,
    pub disk_errors: u64,
    pub server_crashes: u64,
    pub client_deaths: u64,
    /// Volumes that were replaced under their name.
    pub replacements: u64,
    /// Volumes whose files were opened anew.
    pub reopenings: u64,
    /// Volumes that failed for their clients: they could not write again what the server had lost.
    pub failed_volumes: u64,
    /// Sectors that a power loss took back.
    pub lost_sectors: u64,
    /// Writes that were sent again.
    pub replayed: u64,
    pub sessions: u64,
}

impl Report {
    /// Adds the numbers of another run.
    pub fn add(&mut self, other: &Self) {
        self.answered += other.answered;
        self.errors += other.errors;
        self.faults += other.faults;
        self.disk_errors += other.disk_errors;
        self.server_crashes += other.server_crashes;
        self.client_deaths += other.client_deaths;
        self.replacements += other.replacements;
        self.reopenings += other.reopenings;
        self.failed_volumes += other.failed_volumes;
        self.lost_sectors += other.lost_sectors;
        self.replayed += other.replayed;
        self.sessions += other.sessions;
    }
}

/// One life of a whole world.
///
/// # Errors
/// The first rule that was broken.
///
/// # Panics
/// As the code under test does.
pub fn run(seed: u64) -> Result<Report, Broken> {
    catch_broken(|| Simulation::new(seed).run())
}

struct SimulatedServer {
    server: Server,
    engine: Engine,
    reactor: Reactor,
    instance: u64,
    volume: VolumeId,
    /// Frames that something else on its machine holds, and how many bytes are free when it does nothing.
    _taken: Vec<Frame>,
    free_bytes: usize,
}

struct Simulation {
    world: World,
    random: Random,
    seed: u64,
    /// One, or up to three that the volume is striped over.
    files: Vec<SimFile>,
    server: Option<SimulatedServer>,
    starts: u64,
    users: Vec<User>,
    deaths: usize,
    server_crashes: u64,
    replacements: u64,
    reopenings: u64,
    /// Copies stores.
    copier: Reactor,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let world = World::new(seed);
        let (bytes, count) = (CLIENTS * PART * SECTOR, seed as usize % 3 + 1);
        let disk = world.disk(SERVER_IP);
        let files = (0..count).map(|file| disk.file(&format!("disk-{file}"), (bytes / count) as u64)).collect();
        let random = Random::from_seed(seed);
        let (server, users) = (None, Vec::new());
        let copier = world.node(COPIER_IP, 1 << 20);
        let mut run = Self {
            world,
            random,
            seed,
            files,
            server,
            starts: 0,
            users,
            deaths: 0,
            server_crashes: 0,
            replacements: 0,
            reopenings: 0,
            copier,
        };
        run.start_server();
        let slow = LinkProfile { bandwidth: 50_000_000, buffer_bytes: 20_000, ..LinkProfile::default() };
        for index in 0..CLIENTS {
            if run.below(3) == 0 {
                run.world.link(SERVER_IP, client_ip(index), slow);
            }
            let life = run.start_client(index);
            let random = Random::from_seed(seed * 7919 + index as u64);
            run.users.push(User::new(index, life, random, !run.has_disk_errors()));
        }
        run
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.next_u64() % limit
    }

    fn has_disk_errors(&self) -> bool {
        self.seed.is_multiple_of(4)
    }

    fn start_client(&mut self, index: usize) -> Life {
        let reactor = self.world.node(client_ip(index), 8 << 20);
        let mut options = VolumeOptions::new(0x30);
        options.fabric.seed = Some(self.seed * 100 + (self.deaths * CLIENTS + index) as u64);
        options.fabric.keep_alive = KEEP_ALIVE;
        options.fabric.terms.checksum =
            if self.below(4) == 0 { PayloadChecksum::Required } else { PayloadChecksum::Off };
        options.bounds.unflushed_bytes_max = 256 << 10;
        options.bounds.lost_after = Duration::from_mins(10);
        let volume = Client::connect(&reactor, AT, "disk", options);
        Life { volume, reactor }
    }

    fn start_server(&mut self) {
        self.starts += 1;
        let instance = self.seed * 1000 + self.starts;
        // Some have so few frames that requests wait for them.
        let scarce = self.seed % 5 == 1;
        let mut reactor = self.world.node(SERVER_IP, if scarce { 1 << 20 } else { 8 << 20 });
        let taken = if scarce {
            (0..FRAMES_TAKEN).map_while(|_| reactor.frames().alloc(128 << 10)).collect()
        } else {
            Vec::new()
        };
        let mut engine = Engine::default();
        engine.slice_at(if self.seed % 3 == 1 { 128 << 10 } else { 8 << 10 });
        let mut options = Options::new(SERVER_CLASS);
        options.seed = Some(instance);
        options.keep_alive = KEEP_ALIVE;
        let calls = if self.seed.is_multiple_of(5) { 3 } else { 64 };
        let mut server = Server::with_calls(&reactor, instance, options, calls);
        server.listen(&mut reactor, &AT).unwrap();
        let volume = engine.attach(&mut reactor, Arc::new(self.open_volume()));
        server.offer(volume);
        let free_bytes = reactor.frames().free_bytes();
        self.server = Some(SimulatedServer { server, engine, reactor, instance, volume, _taken: taken, free_bytes });
    }

    fn open_volume(&self) -> Volume {
        let options = FileOptions { map: self.seed.is_multiple_of(2), ..FileOptions::default() };
        let open = |file: &SimFile| Arc::new(OpenFile::simulated(file.clone(), options));
        let store = match &self.files[..] {
            [file] => Store::open_file(open(file)),
            files => Store::stripe_files(files.iter().map(open).collect(), CHUNK as u64).unwrap(),
        };
        Volume::new("disk", store, Served::default())
    }

    fn crash_server(&mut self, how: Crash) {
        if let Some(serving) = self.server.take() {
            self.server_crashes += 1;
            self.world.crash(SERVER_IP, how);
            drop(serving);
            if how == Crash::Power {
                self.users.iter_mut().for_each(User::server_lost_unflushed);
            }
        }
    }

    /// The server process and the store that clients are to end up with.
    fn place(&self) -> Option<(u64, u64)> {
        let serving = self.server.as_ref()?;
        Some((serving.instance, serving.engine.volume(serving.volume)?.open_epoch()))
    }

    /// Handles everything that is ready, in every loop.
    fn turn(&mut self) {
        loop {
            let mut busy = self.server.as_mut().is_some_and(SimulatedServer::turn);
            for user in &mut self.users {
                busy |= user.turn();
            }
            if !busy {
                return;
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.world.now() + time;
        let world = self.world.clone();
        world.run_until(until, || self.turn());
    }

    fn run(&mut self) -> Report {
        self.world.faults(self.plan());
        for _ in 0..ROUNDS_MAX {
            let pause = Duration::from_micros(self.below(30_000));
            self.pass(pause);
            self.revive_the_dead();
            if self.users.iter().all(|user| user.is_done() || user.died_at.is_some()) {
                if self.users.iter().all(User::is_done) && self.world.fault_count().total() >= FAULTS_MIN {
                    break;
                }
                self.pass(Duration::from_millis(200));
                if self.users.iter().any(|user| user.died_at.is_some()) {
                    // Nothing but the server's own watch is to tell it of the dead.
                    continue;
                }
            }
            self.strike();
            if self.server.is_none() {
                let pause = Duration::from_millis(self.below(300));
                self.pass(pause);
                self.start_server();
            }
        }
        self.finish()
    }

    fn plan(&self) -> FaultPlan {
        // In some the network is well but for what strikes a single client: no reset tells the server of a death.
        let often = |rate| if self.seed % 7 == 3 { 0.0 } else { rate };
        let rare = |probability| if self.has_disk_errors() { probability } else { 0.0 };
        FaultPlan {
            partitions_per_second: often(2.0),
            partition_max: Duration::from_secs(3),
            resets_per_second: often(4.0),
            delays_per_second: 4.0,
            read_error: rare(0.01),
            write_error: rare(0.005),
            sync_error: rare(0.08),
            no_space: rare(0.005),
            ..FaultPlan::default()
        }
    }

    /// A fault besides those of the plan.
    fn strike(&mut self) {
        match self.below(8) {
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
            4 => self.kill_client(),
            5 => self.replace_volume(),
            6 => self.reopen_volume(),
            _ => {}
        }
    }

    fn kill_client(&mut self) {
        let index = self.below(CLIENTS as u64) as usize;
        if self.deaths == DEATHS_MAX || self.users[index].life.is_none() {
            return;
        }
        self.deaths += 1;
        // Behind a partition the server hears nothing of it.
        if self.below(2) == 0 {
            self.world.partition(SERVER_IP, client_ip(index));
        }
        let how = if self.below(2) == 0 { Crash::Power } else { Crash::Process };
        self.world.crash(client_ip(index), how);
        // A failed sync makes the kernel forget what it covered: only a client that lives writes that again.
        let keeps = !self.has_disk_errors() && self.users[index].is_settled_at(self.place());
        self.users[index].die(self.world.now(), keeps);
    }

    /// Clients that died some time ago: the server has let go of them, and their successors start.
    fn revive_the_dead(&mut self) {
        let now = self.world.now();
        let due = |user: &User| user.died_at.is_some_and(|at| now - at >= GONE_WITHIN);
        let Some(index) = self.users.iter().position(due) else { return };
        let alive = self.users.iter().filter(|user| user.life.is_some()).count();
        let sessions = self.server.as_ref().map_or(0, |serving| serving.server.sessions().count());
        let dying = self.users.iter().filter(|user| user.life.is_none() && !due(user)).count();
        if sessions > alive + dying {
            broken(format!("{sessions} sessions of {alive} clients: the server keeps one of a client that died"));
        }
        self.world.heal(SERVER_IP, client_ip(index));
        let life = self.start_client(index);
        self.users[index].revive(life);
        self.revive_the_dead();
    }

    /// Without faults everything must end, and the state must be right; then the power fails for the last time.
    fn finish(&mut self) -> Report {
        self.world.faults(FaultPlan::default());
        for index in 0..CLIENTS {
            self.world.heal(SERVER_IP, client_ip(index));
        }
        if self.users.iter().any(|user| user.died_at.is_some()) {
            self.pass(GONE_WITHIN);
            self.revive_the_dead();
        }
        self.users.iter_mut().for_each(|user| user.ask_more(CALM_REQUESTS));
        let until = self.world.now() + ENDS_WITHIN;
        while !self.users.iter().all(|user| user.is_done() && user.is_settled_at(self.place())) {
            // Changes that no flush has covered wait for that at the client's bound.
            if self.volume().is_some_and(|volume| volume.flush_failed()) {
                self.reopen_volume();
            }
            if self.world.now() >= until {
                let left: Vec<_> = self.users.iter().map(User::unanswered).collect();
                broken(format!(
                    "{} s after the last fault not all has ended; without an answer are {left:?}",
                    ENDS_WITHIN.as_secs()
                ));
            }
            self.pass(Duration::from_millis(100));
        }
        self.check_store(false);
        let mut report = self.report();
        self.end_clients();
        self.crash_server(Crash::Power);
        self.check_store(true);
        report.lost_sectors = self.world.fault_count().lost_sectors;
        report
    }

    fn report(&self) -> Report {
        let faults = self.world.fault_count();
        let mut report = Report {
            faults: faults.total(),
            disk_errors: faults.disk_errors,
            server_crashes: self.server_crashes,
            client_deaths: self.deaths as u64,
            replacements: self.replacements,
            reopenings: self.reopenings,
            failed_volumes: self.users.iter().map(User::failed_volumes).sum(),
            ..Report::default()
        };
        for user in &self.users {
            let (replayed, sessions) = user.volume().map_or((0, 0), |volume| (volume.replayed(), volume.sessions()));
            report.answered += user.answered;
            report.errors += user.errors;
            report.replayed += user.replayed + replayed;
            report.sessions += user.sessions + sessions;
        }
        report
    }

    /// The clients go, and leave nothing behind.
    fn end_clients(&mut self) {
        for life in self.users.iter_mut().filter_map(|user| user.life.as_mut()) {
            life.volume.close(&mut life.reactor);
        }
        self.pass(GONE_WITHIN);
        let Some(SimulatedServer { server, engine, reactor, free_bytes, .. }) = &self.server else { return };
        let kept = free_bytes - reactor.frames().free_bytes();
        if !server.is_idle() || engine.in_flight() > 0 || kept > 0 {
            let sessions = server.sessions().count();
            broken(format!("the clients have gone, and {sessions} sessions and {kept} bytes of frames are left"));
        }
    }

    fn check_store(&self, durable: bool) {
        let files: Vec<Vec<u8>> = self.files.iter().map(SimFile::contents).collect();
        let chunks = (0..CLIENTS * PART * SECTOR / CHUNK).flat_map(|chunk| {
            let (file, at) = (&files[chunk % files.len()], chunk / files.len() * CHUNK);
            &file[at..at + CHUNK]
        });
        let contents: Vec<u8> = chunks.copied().collect();
        self.users.iter().for_each(|user| user.check_contents(&contents, durable));
    }
}

impl SimulatedServer {
    /// Handles what is ready; says whether something was.
    fn turn(&mut self) -> bool {
        let Self { server, engine, reactor, .. } = self;
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        server.flush(reactor, engine);
        reactor.reap(&mut completions, Wait::Poll).unwrap();
        let busy = !completions.is_empty();
        for completion in completions {
            match completion.token.class() {
                SERVER_CLASS => server.handle(reactor, engine, completion),
                ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                _ => server.woken(reactor, engine),
            }
            for done in done.drain(..) {
                server.done(reactor, engine, done);
            }
            if let Some(reason) = server.last_closed() {
                check_end_of_session("the server", reason);
            }
        }
        server.flush(reactor, engine);
        busy
    }
}
