//! Where frames are short, sessions get the same bytes, whatever the size of their requests; and one that takes none of its
//! answers leaves frames for the others.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::{Options, PayloadChecksum, Registry};
use byway_reactor::sim::{LinkProfile, World};
use byway_reactor::{Address, FileOptions, Frame, OpenFile, Reactor, Wait};
use byway_service::block::client::{Done, Request, Volume as Client, VolumeOptions};
use byway_service::block::server::Server;
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeOptions as Served};

const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const SERVER_CLASS: u8 = 0x20;
const CLIENT_CLASS: u8 = 0x30;
const TENTH: Duration = Duration::from_millis(100);

/// A client that keeps so many reads in flight.
struct Reader {
    volume: Client,
    reactor: Reactor,
    bytes: usize,
    depth: usize,
    got: u64,
    /// It does nothing any more, and takes nothing.
    stopped: bool,
}

impl Reader {
    fn new(world: &World, number: u8, bytes: usize, depth: usize) -> Self {
        let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 1, number));
        world.link(SERVER_IP, ip, LinkProfile { buffer_bytes: 256 << 10, ..LinkProfile::default() });
        let reactor = world.node(ip, 64 << 20);
        let mut options = VolumeOptions::new(CLIENT_CLASS);
        options.fabric.seed = Some(number.into());
        // What has a checksum must lie in frames.
        options.fabric.terms.checksum = PayloadChecksum::Required;
        let at = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));
        let volume = Client::connect(&reactor, at, "disk", options);
        Self { volume, reactor, bytes, depth, got: 0, stopped: false }
    }

    fn turn(&mut self) -> bool {
        if self.stopped {
            return false;
        }
        let mut answers: Vec<Done<Frame>> = Vec::new();
        self.volume.reap(&mut answers);
        for answer in answers {
            answer.result.unwrap();
            self.got += self.bytes as u64;
        }
        while self.volume.pending() < self.depth {
            let into = self.reactor.frames().alloc(self.bytes).unwrap();
            self.volume.submit(Request::Read { offset: 0, len: self.bytes, into }, 0).unwrap();
        }
        let mut completions = Vec::new();
        self.volume.flush(&mut self.reactor);
        self.reactor.reap(&mut completions, Wait::Poll).unwrap();
        let busy = !completions.is_empty();
        for completion in completions {
            self.volume.handle(&mut self.reactor, completion);
        }
        busy
    }
}

struct Serving {
    world: World,
    server: Server,
    engine: Engine,
    reactor: Reactor,
}

impl Serving {
    fn new(frames: usize) -> Self {
        let world = World::new(1);
        let mut reactor = world.node(SERVER_IP, frames);
        let mut engine = Engine::default();
        let mut options = Options::new(SERVER_CLASS);
        options.terms.checksum = PayloadChecksum::Wanted;
        let mut server = Server::new(&reactor, Arc::new(Registry::new(1)), options);
        server.listen(&mut reactor, &Address::Tcp(SocketAddr::new(SERVER_IP, 4711))).unwrap();
        let file = OpenFile::simulated(world.disk(SERVER_IP).file("disk", 1 << 20), FileOptions::default());
        let volume = Arc::new(Volume::new("disk", Store::open_file(Arc::new(file)), Served::default()));
        server.offer(engine.attach(&mut reactor, volume));
        Self { world, server, engine, reactor }
    }

    fn turn(&mut self) -> bool {
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        self.server.flush(&mut self.reactor, &mut self.engine);
        self.reactor.reap(&mut completions, Wait::Poll).unwrap();
        let busy = !completions.is_empty();
        for completion in completions {
            match completion.token.class() {
                SERVER_CLASS => self.server.handle(&mut self.reactor, &mut self.engine, completion),
                ENGINE_CLASS => self.engine.complete(&mut self.reactor, completion, &mut done),
                _ => self.server.woken(&mut self.reactor, &mut self.engine),
            }
            for done in done.drain(..) {
                self.server.done(&mut self.reactor, &mut self.engine, done);
            }
        }
        busy
    }

    fn pass(&mut self, time: Duration, readers: &mut [Reader]) {
        let (world, until) = (self.world.clone(), self.world.now() + time);
        world.run_until(until, || {
            while self.turn() | readers.iter_mut().fold(false, |busy, reader| busy | reader.turn()) {}
        });
    }
}

#[test]
fn a_session_of_large_requests_does_not_get_the_bytes_of_one_of_small_ones() {
    let mut serving = Serving::new(2 << 20);
    let mut readers = [Reader::new(&serving.world, 1, 1 << 20, 16), Reader::new(&serving.world, 2, 16 << 10, 128)];
    serving.pass(TENTH * 4, &mut readers);
    let [large, small] = readers.map(|reader| reader.got);
    assert!(large > 4 << 20, "{large} bytes: too few to tell");
    assert!(small * 3 > large, "{small} bytes for requests of 16 KiB, {large} for those of 1 MiB");
}

#[test]
fn a_session_that_takes_no_answers_leaves_frames_for_others() {
    let mut serving = Serving::new(8 << 20);
    let mut readers = vec![Reader::new(&serving.world, 1, 1 << 20, 32)];
    serving.pass(TENTH, &mut readers);
    assert!(readers[0].got > 0);
    readers[0].stopped = true;
    serving.pass(TENTH, &mut readers);
    let free = serving.reactor.frames().free_bytes();
    assert!(free < 6 << 20, "{free} bytes free: its answers wait in frames");
    readers.push(Reader::new(&serving.world, 2, 1 << 20, 1));
    serving.pass(TENTH * 10, &mut readers);
    let got = readers[1].got;
    assert!(got >= 4 << 20, "only {got} bytes beside it");
}
