//! Where frames are short, sessions get the same bytes, whatever the size of their requests; and one that takes none of its
//! answers leaves frames for the others.

mod serving;

use std::time::Duration;

use byway_fabric::{Options, PayloadChecksum};
use byway_reactor::sim::{LinkProfile, World};
use byway_reactor::{Frame, Reactor, Wait};
use byway_service::block::VolumeOptions as Served;
use byway_service::block::client::{Done, Request, Volume as Client, VolumeOptions};
use serving::{AT, SERVER_CLASS, SERVER_IP, TestServer, client_ip};

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
        let ip = client_ip(number);
        world.link(SERVER_IP, ip, LinkProfile { buffer_bytes: 256 << 10, ..LinkProfile::default() });
        let reactor = world.node(ip, 64 << 20);
        let mut options = VolumeOptions::new(CLIENT_CLASS);
        options.fabric.seed = Some(number.into());
        // What has a checksum must lie in frames.
        options.fabric.terms.checksum = PayloadChecksum::Required;
        let volume = Client::connect(&reactor, AT, "disk", options);
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

/// A server that can do checksums.
fn serving(frame_bytes: usize) -> TestServer {
    let mut options = Options::new(SERVER_CLASS);
    options.terms.checksum = PayloadChecksum::Wanted;
    let mut serving = TestServer::new(1, frame_bytes, options);
    serving.offer_file(Served::default());
    serving
}

fn pass(serving: &mut TestServer, time: Duration, readers: &mut [Reader]) {
    serving.pass(time, || readers.iter_mut().fold(false, |busy, reader| busy | reader.turn()));
}

#[test]
fn a_session_of_large_requests_does_not_get_the_bytes_of_one_of_small_ones() {
    let mut serving = serving(2 << 20);
    let mut readers = [Reader::new(&serving.world, 1, 1 << 20, 16), Reader::new(&serving.world, 2, 16 << 10, 128)];
    pass(&mut serving, TENTH * 4, &mut readers);
    let [large, small] = readers.map(|reader| reader.got);
    assert!(large > 4 << 20, "{large} bytes: too few to tell");
    assert!(small * 3 > large, "{small} bytes for requests of 16 KiB, {large} for those of 1 MiB");
}

#[test]
fn a_session_that_takes_no_answers_leaves_frames_for_others() {
    let mut serving = serving(8 << 20);
    let mut readers = vec![Reader::new(&serving.world, 1, 1 << 20, 32)];
    pass(&mut serving, TENTH, &mut readers);
    assert!(readers[0].got > 0);
    readers[0].stopped = true;
    pass(&mut serving, TENTH, &mut readers);
    let free = serving.reactor.frames().free_bytes();
    assert!(free < 6 << 20, "{free} bytes free: its answers wait in frames");
    readers.push(Reader::new(&serving.world, 2, 1 << 20, 1));
    pass(&mut serving, TENTH * 10, &mut readers);
    let got = readers[1].got;
    assert!(got >= 4 << 20, "only {got} bytes beside it");
}
