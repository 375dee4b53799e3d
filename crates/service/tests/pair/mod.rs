//! A server of a simulated file and a client of it, in a simulated world.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::{Options, Registry};
use byway_reactor::sim::World;
use byway_reactor::{Address, FileOptions, Frame, OpenFile, Reactor, Wait};
use byway_service::block::client::{Done, Request, Volume as Client, VolumeOptions};
use byway_service::block::server::Server;
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeOptions as Served};

const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const CLIENT_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1));
const SERVER_CLASS: u8 = 0x20;
const CLIENT_CLASS: u8 = 0x30;

pub struct Pair {
    pub world: World,
    pub server: Server,
    engine: Engine,
    pub at_server: Reactor,
    pub client: Client,
    at_client: Reactor,
}

impl Pair {
    /// The store takes `store_time` for the first write that reaches it.
    pub fn new(seed: u64, frames: usize, store_time: Duration, lost_after: Duration) -> Self {
        let world = World::new(seed);
        let mut at_server = world.node(SERVER_IP, frames);
        let at_client = world.node(CLIENT_IP, 1 << 20);
        let slow = FaultRule {
            operation: FaultOperation::Write,
            effect: FaultEffect::Delay(store_time),
            range: None,
            count_max: Some(1),
        };
        let file = OpenFile::simulated(world.disk(SERVER_IP).file("disk", 1 << 20), FileOptions::default());
        let served = Served { faults: FaultRules(vec![slow]), ..Served::default() };
        let mut engine = Engine::default();
        let mut server = Server::new(&at_server, Arc::new(Registry::new(1)), Options::new(SERVER_CLASS));
        let address = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));
        server.listen(&mut at_server, &address).unwrap();
        let volume = Arc::new(Volume::new("disk", Store::open_file(Arc::new(file)), served));
        server.offer(engine.attach(&mut at_server, volume));
        let mut options = VolumeOptions::new(CLIENT_CLASS);
        options.fabric.seed = Some(seed);
        options.bounds.lost_after = lost_after;
        let client = Client::connect(&at_client, address, "disk", options);
        Self { world, server, engine, at_server, client, at_client }
    }

    pub fn write(&mut self, offset: u64, len: usize, tag: u64) {
        let from = Rc::new(self.at_client.frames().alloc(len).unwrap());
        self.client.submit(Request::Write { offset, len, from, durable: false }, tag).unwrap();
    }

    /// Lets the time pass; gives the answers that came.
    pub fn pass(&mut self, time: Duration) -> Vec<Done<Frame>> {
        let (world, until) = (self.world.clone(), self.world.now() + time);
        world.run_until(until, || while self.turn() {});
        let mut answers = Vec::new();
        self.client.reap(&mut answers);
        answers
    }

    /// Handles what is ready; says whether something was.
    fn turn(&mut self) -> bool {
        let Self { server, engine, at_server, client, at_client, .. } = self;
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        server.flush(at_server, engine);
        client.flush(at_client);
        at_server.reap(&mut completions, Wait::Poll).unwrap();
        let mut busy = !completions.is_empty();
        for completion in completions.drain(..) {
            match completion.token.class() {
                SERVER_CLASS => server.handle(at_server, engine, completion),
                ENGINE_CLASS => engine.complete(at_server, completion, &mut done),
                _ => server.woken(at_server, engine),
            }
            for done in done.drain(..) {
                server.done(at_server, engine, done);
            }
        }
        at_client.reap(&mut completions, Wait::Poll).unwrap();
        busy |= !completions.is_empty();
        for completion in completions.drain(..) {
            client.handle(at_client, completion);
        }
        busy
    }
}
