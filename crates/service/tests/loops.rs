//! Sessions are spread over the loops of a process, whichever loop accepts their connections.

mod native_server;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use byway_fabric::{Options, Registry};
use byway_reactor::{Address, IoChoice, Reactor, Wait, Waker};
use byway_service::block::client::{BlockingVolume, VolumeOptions};
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeOptions as Served};
use byway_service::limits::CALLS_PER_SESSION;
use native_server::Server;

const SERVER: u8 = 0x20;
const LOOPS: usize = 3;

/// What the loops of a process share, and tell of themselves.
struct Process {
    registry: Arc<Registry>,
    volume: Arc<Volume>,
    sessions: [AtomicUsize; LOOPS],
    stop: AtomicBool,
}

/// One loop; the first listens.
fn turn(process: &Process, io: IoChoice, number: usize, at: Address, started: &mpsc::Sender<(Address, Waker)>) {
    let mut reactor = Reactor::open(io, 4 << 20).unwrap();
    let mut engine = Engine::default();
    let mut server = Server::of(&reactor, Arc::clone(&process.registry), Options::new(SERVER), CALLS_PER_SESSION);
    server.offer(engine.attach(&mut reactor, Arc::clone(&process.volume)));
    let at = match at {
        Address::Rdma(rdma) if number == 0 => Address::Rdma(server.listen_rdma(&mut reactor, rdma).unwrap()),
        at => {
            let listener = (number == 0).then(|| server.listen(&mut reactor, &at).unwrap());
            listener.and_then(|listener| reactor.local_address(listener)).map_or(at, Address::Tcp)
        }
    };
    started.send((at, reactor.waker())).unwrap();
    let (mut completions, mut done) = (Vec::new(), Vec::new());
    while !process.stop.load(Ordering::Acquire) {
        server.flush(&mut reactor, &mut engine);
        process.sessions[number].store(server.sessions().count(), Ordering::Release);
        reactor.reap(&mut completions, Wait::Block).unwrap();
        for completion in completions.drain(..) {
            match completion.token.class() {
                SERVER => server.handle(&mut reactor, &mut engine, completion),
                ENGINE_CLASS => engine.complete(&mut reactor, completion, &mut done),
                _ => server.woken(&mut reactor, &mut engine),
            }
            for done in done.drain(..) {
                server.done(&mut reactor, &mut engine, done);
            }
        }
    }
}

fn is_spread(io: IoChoice, at: &Address) {
    let volume = Arc::new(Volume::new("disk", Store::memory("disk", 1 << 20).unwrap(), Served::default()));
    let (registry, stop) = (Arc::new(Registry::new(1)), AtomicBool::new(false));
    let process = Arc::new(Process { registry, volume, sessions: Default::default(), stop });
    let mut loops = Vec::new();
    let mut wakers = Vec::new();
    let mut listens = at.clone();
    for number in 0..LOOPS {
        let (send, receive) = mpsc::channel();
        let (process, at) = (Arc::clone(&process), at.clone());
        loops.push(std::thread::spawn(move || turn(&process, io, number, at, &send)));
        let (address, waker) = receive.recv().unwrap();
        wakers.push(waker);
        if number == 0 {
            listens = address;
        }
    }
    let count = || process.sessions.each_ref().map(|sessions| sessions.load(Ordering::Acquire));
    let until = |what: &str, is: &dyn Fn([usize; LOOPS]) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is(count()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", count());
            std::thread::yield_now();
        }
    };
    let connect = || {
        let reactor = Reactor::open(io, 4 << 20).unwrap();
        BlockingVolume::connect(reactor, listens.clone(), "disk", VolumeOptions::new(0x30)).unwrap()
    };
    let mut volumes = Vec::new();
    for each in 1..=2 {
        volumes.extend((0..LOOPS).map(|_| connect()));
        until("each loop has as many", &|sessions| sessions == [each; LOOPS]);
    }
    // Large ones, which bulk lanes carry.
    for (number, volume) in volumes.iter_mut().enumerate() {
        let bytes = vec![number as u8 + 1; 100_000];
        volume.write(0, &bytes, false).unwrap();
        let mut back = vec![0; bytes.len()];
        volume.read(0, &mut back).unwrap();
        assert!(back == bytes, "client {number}");
    }
    drop(volumes.split_off(1));
    until("one is left", &|sessions| sessions.iter().sum::<usize>() == 1);
    volumes.extend((0..2).map(|_| connect()));
    until("the loops that had none have one", &|sessions| sessions == [1; LOOPS]);
    drop(volumes);
    process.stop.store(true, Ordering::Release);
    wakers.iter().for_each(Waker::wake);
    for thread in loops {
        thread.join().unwrap();
    }
}

#[test]
fn sessions_over_rdma_go_to_the_loop_that_has_the_fewest() {
    let Some(device) = byway_skip::rdma_device() else { return byway_skip::skip_this(byway_skip::NO_RDMA) };
    for io in [IoChoice::Auto, IoChoice::Epoll] {
        is_spread(io, &Address::Rdma((device, 0).into()));
    }
}

#[test]
fn sessions_go_to_the_loop_that_has_the_fewest() {
    let folder = tempfile::tempdir().unwrap();
    for io in [IoChoice::Auto, IoChoice::Epoll] {
        is_spread(io, &Address::Tcp("127.0.0.1:0".parse().unwrap()));
        is_spread(io, &Address::Unix(folder.path().join(format!("unix{io:?}"))));
        is_spread(io, &Address::Shared(folder.path().join(format!("shm{io:?}"))));
    }
}
