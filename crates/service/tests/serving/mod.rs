//! A server and its engine in a simulated world; the clients are the test's.

#[path = "../native_server/mod.rs"]
mod native_server;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::Options;
use byway_reactor::sim::World;
use byway_reactor::{Address, FileOptions, OpenFile, Reactor, Wait};
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeId, VolumeOptions};
use native_server::Server;

pub const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// Where it listens.
pub const AT: Address = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));
pub const SERVER_CLASS: u8 = 0x20;

/// The address of the client of that number.
pub const fn client_ip(number: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 1, number))
}

pub struct TestServer {
    pub world: World,
    pub server: Server,
    pub reactor: Reactor,
    engine: Engine,
}

impl TestServer {
    /// Listens, and offers nothing yet; its messages and data have `frame_bytes`.
    pub fn new(seed: u64, frame_bytes: usize, options: Options) -> Self {
        let world = World::new(seed);
        let mut reactor = world.node(SERVER_IP, frame_bytes);
        let mut server = Server::new(&reactor, 1, options);
        server.listen(&mut reactor, &AT).unwrap();
        Self { world, server, reactor, engine: Engine::default() }
    }

    pub fn offer(&mut self, volume: Volume) -> VolumeId {
        let id = self.engine.attach(&mut self.reactor, Arc::new(volume));
        self.server.offer(id);
        id
    }

    /// Offers a file of 1 MiB as "disk".
    #[allow(dead_code, reason = "not each test has a file")]
    pub fn offer_file(&mut self, options: VolumeOptions) {
        let file = OpenFile::simulated(self.world.disk(SERVER_IP).file("disk", 1 << 20), FileOptions::default());
        self.offer(Volume::new("disk", Store::open_file(Arc::new(file)), options));
    }

    /// Lets the time pass. `clients` handles what is ready for them, and says whether something was.
    pub fn pass(&mut self, time: Duration, mut clients: impl FnMut() -> bool) {
        let (world, until) = (self.world.clone(), self.world.now() + time);
        world.run_until(until, || while self.turn() | clients() {});
    }

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
        }
        server.flush(reactor, engine);
        busy
    }
}
