//! The native client and server over loopback, on both of the kernel's backends.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use byway_fabric::{Options, PayloadChecksum, Registry};
use byway_reactor::{Address, Io, IoChoice, Reactor, Wait, Waker};
use byway_service::block::client::{BlockingVolume, ConnectError, Request, VolumeOptions};
use byway_service::block::server::Server;
use byway_service::block::wire::CallError;
use byway_service::block::{BlockError, ENGINE_CLASS, Engine, Store, Volume, VolumeOptions as Served};

const SERVER: u8 = 0x20;
const FRAMES: usize = 32 << 20;
const IOS: [IoChoice; 2] = [IoChoice::Epoll, IoChoice::Uring];

/// A server of some volumes, on a thread of its own.
struct Running {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(io: IoChoice, at: Option<SocketAddr>, instance: u64, options: Options, volumes: Vec<Arc<Volume>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (send, receive) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut reactor = Reactor::open(io, FRAMES).unwrap();
                let mut engine = Engine::default();
                let mut server = Server::new(&reactor, Arc::new(Registry::new(instance)), options);
                let at = at.unwrap_or_else(|| "127.0.0.1:0".parse().unwrap());
                let listener = server.listen(&mut reactor, &Address::Tcp(at)).unwrap();
                for volume in volumes {
                    let id = engine.attach(&mut reactor, volume);
                    server.offer(id);
                }
                send.send((reactor.local_address(listener).unwrap(), reactor.waker())).unwrap();
                serve(&mut reactor, &mut engine, &mut server, &stop);
            }
        });
        let (address, waker) = receive.recv().unwrap();
        Self { address, stop, waker, thread: Some(thread) }
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve(reactor: &mut Reactor, engine: &mut Engine, server: &mut Server, stop: &AtomicBool) {
    let (mut completions, mut done) = (Vec::new(), Vec::new());
    while !stop.load(Ordering::Acquire) {
        server.flush(reactor, engine);
        reactor.reap(&mut completions, Wait::Block).unwrap();
        for completion in completions.drain(..) {
            match completion.token.class() {
                SERVER => server.handle(reactor, engine, completion),
                ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                _ => server.woken(reactor, engine),
            }
            for done in done.drain(..) {
                server.done(reactor, engine, done);
            }
        }
    }
}

fn memory(bytes: u64) -> Arc<Volume> {
    Arc::new(Volume::new("disk", Store::memory("disk", bytes).unwrap(), Served::default()))
}

fn client(io: IoChoice, address: SocketAddr, options: VolumeOptions) -> Result<BlockingVolume, ConnectError> {
    BlockingVolume::connect(Reactor::open(io, FRAMES).unwrap(), Address::Tcp(address), "disk", options)
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

fn each_io(test: impl Fn(IoChoice)) {
    for io in IOS {
        if let Err(error) = Reactor::open(io, 1) {
            eprintln!("SKIP {io:?}: {error}");
            continue;
        }
        test(io);
    }
}

#[test]
fn what_is_written_is_read_at_every_size() {
    each_io(|io| {
        let server = Running::start(io, None, 1, Options::new(SERVER), vec![memory(64 << 20)]);
        let mut volume = client(io, server.address, VolumeOptions::new(0x30)).unwrap();
        assert_eq!(volume.info().unwrap().len, 64 << 20);
        let mut offset = 512;
        for len in [512, 4096, 16 << 10, (16 << 10) + 512, 64 << 10, 300_032, 1 << 20, 8 << 20] {
            let data = pattern(len, len as u64);
            volume.write(offset, &data, false).unwrap();
            let mut back = vec![0; len];
            volume.read(offset, &mut back).unwrap();
            assert!(data == back, "{len} bytes came back changed");
            offset += len as u64;
        }
        volume.flush().unwrap();
        assert_eq!(volume.volume().unflushed_bytes(), 0);
    });
}
