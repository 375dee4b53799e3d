//! A crowd of writers at a server with few frames: all are let in, and served alike.

mod serving;

use std::rc::Rc;
use std::time::Duration;

use byway_fabric::{CloseReason, Options};
use byway_reactor::sim::World;
use byway_reactor::{Frame, Reactor, Wait};
use byway_service::block::client::{Done, Notice, Request, Volume as Client, VolumeOptions};
use byway_service::block::{Store, Volume, VolumeOptions as Served};
use serving::{AT, SERVER_CLASS, TestServer, client_ip};

const CLIENT_CLASS: u8 = 0x30;
/// Each has three connections.
const WRITERS: u8 = 40;
/// Less than the connections would need at once for their messages.
const FRAME_BYTES: usize = 1 << 20;

/// A client that keeps so many writes in flight.
struct Writer {
    volume: Client,
    reactor: Reactor,
    payload: Rc<Frame>,
    depth: usize,
    served: u32,
    ended: Option<CloseReason>,
}

impl Writer {
    fn new(world: &World, number: u8, bytes: usize, depth: usize) -> Self {
        let reactor = world.node(client_ip(number), 1 << 20);
        let mut options = VolumeOptions::new(CLIENT_CLASS);
        options.fabric.seed = Some(number.into());
        let volume = Client::connect(&reactor, AT, "disk", options);
        let payload = Rc::new(reactor.frames().alloc(bytes).unwrap());
        Self { volume, reactor, payload, depth, served: 0, ended: None }
    }

    fn turn(&mut self) -> bool {
        let mut answers: Vec<Done<Frame>> = Vec::new();
        self.volume.reap(&mut answers);
        for answer in answers {
            answer.result.unwrap();
            self.served += 1;
        }
        while self.volume.pending() < self.depth {
            let from = Rc::clone(&self.payload);
            let write = Request::Write { offset: 0, len: from.len(), from, durable: false };
            self.volume.submit(write, 0).unwrap();
        }
        let (mut completions, mut notices) = (Vec::new(), Vec::new());
        self.volume.flush(&mut self.reactor);
        self.reactor.reap(&mut completions, Wait::Poll).unwrap();
        let busy = !completions.is_empty();
        for completion in completions {
            self.volume.handle(&mut self.reactor, completion);
        }
        self.volume.take_notices(&mut notices);
        let lost = |notice| if let Notice::Disconnected(reason) = notice { Some(reason) } else { None };
        self.ended = self.ended.or(notices.into_iter().find_map(lost));
        busy
    }
}

/// How evenly something is shared: 1 if all have the same, 1/n if one of n has all (Jain, Chiu and Hawe, 1984).
fn jain(shares: &[u32]) -> f64 {
    let sum: f64 = shares.iter().map(|share| f64::from(*share)).sum();
    let squares: f64 = shares.iter().map(|share| f64::from(*share).powi(2)).sum();
    sum * sum / (shares.len() as f64 * squares)
}

fn write_together(bytes: usize, depth: usize) {
    let mut serving = TestServer::new(1, FRAME_BYTES, Options::new(SERVER_CLASS));
    // A store that takes everything at once: what is not served alike is the server's doing.
    serving.offer(Volume::new("disk", Store::null(1 << 20), Served::default()));
    let mut writers: Vec<Writer> = (0..WRITERS).map(|n| Writer::new(&serving.world, n, bytes, depth)).collect();
    let pass = |serving: &mut TestServer, writers: &mut [Writer]| {
        serving.pass(Duration::from_millis(50), || writers.iter_mut().fold(false, |busy, one| busy | one.turn()));
    };
    pass(&mut serving, &mut writers);
    let refused = serving.server.counters().refused;
    let without = writers.iter().filter(|writer| writer.volume.info().is_none()).count();
    assert_eq!((refused, without), (0, 0), "{bytes} bytes at depth {depth}: refused, without a volume");
    // From here on all of them write.
    for writer in &mut writers {
        writer.served = 0;
    }
    pass(&mut serving, &mut writers);
    let ended: Vec<CloseReason> = writers.iter().filter_map(|writer| writer.ended).collect();
    assert_eq!(ended, [], "{bytes} bytes at depth {depth}");
    let mut served: Vec<u32> = writers.iter().map(|writer| writer.served).collect();
    served.sort_unstable();
    let fair = jain(&served);
    assert!(served[0] > 0 && fair >= 0.95, "{bytes} bytes at depth {depth}: Jain {fair:.3} of {served:?}");
}

#[test]
fn more_clients_than_the_frames_have_pages_are_let_in() {
    let mut serving = TestServer::new(1, FRAME_BYTES, Options::new(SERVER_CLASS));
    serving.offer(Volume::new("disk", Store::null(1 << 20), Served::default()));
    let mut clients: Vec<Writer> = (0..100).map(|n| Writer::new(&serving.world, n, 512, 0)).collect();
    serving.pass(Duration::from_millis(20), || clients.iter_mut().fold(false, |busy, one| busy | one.turn()));
    let pages = FRAME_BYTES / 4096;
    assert!(clients.len() * 3 > pages, "too few connections to tell");
    let open = clients.iter().filter(|client| client.volume.info().is_some() && client.ended.is_none()).count();
    assert_eq!((open, serving.reactor.frames().free_bytes()), (100, FRAME_BYTES), "open, bytes for data");
}

#[test]
fn small_writes_of_many_sessions_are_served_alike() {
    write_together(16 << 10, 4);
}

#[test]
fn writes_that_are_pulled_are_served_alike() {
    write_together(64 << 10, 2);
}

#[test]
fn single_writes_of_many_sessions_are_served_alike() {
    write_together(4 << 10, 1);
}
