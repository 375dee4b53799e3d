//! A native server on a thread of its own.

#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../native_server/mod.rs"]
mod native_server;
pub mod rdma_connection;
pub mod session;
pub mod stream;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use byway_fabric::tls::ServerTls;
use byway_fabric::{CloseReason, Options};
use byway_reactor::{Address, Counters, IoChoice, Reactor, Wait, Waker};
use byway_service::block::client::{BlockingVolume, ConnectError, VolumeOptions};
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeId, VolumeOptions as Served};
use byway_skip::rdma_device;
use native_server::Server;

pub const SERVER: u8 = 0x20;
pub const FRAMES: usize = 32 << 20;

/// What goes between a client and its server, and how both wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    pub io: IoChoice,
    pub path: Path,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    Tcp,
    Unix,
    SharedMemory,
    /// Where `BYWAY_RDMA_ADDRESS` is an address of a device: `cargo xtask guest rdma` has one.
    Rdma,
}

pub const PATHS: [Path; 4] = [Path::Tcp, Path::Unix, Path::SharedMemory, Path::Rdma];

impl From<IoChoice> for Wire {
    fn from(io: IoChoice) -> Self {
        Self { io, path: Path::Tcp }
    }
}

impl Path {
    /// Where nobody listens, in a folder of the test.
    pub fn address(self, folder: &std::path::Path) -> Address {
        match self {
            Self::Tcp => Address::Tcp("127.0.0.1:0".parse().unwrap()),
            Self::Unix => Address::Unix(folder.join("socket")),
            Self::SharedMemory => Address::Shared(folder.join("socket")),
            Self::Rdma => Address::Rdma(SocketAddr::new(rdma_device().expect("the test looked for one"), 0)),
        }
    }

    /// Whether it can be taken here. If not, say so.
    pub fn is_there(self) -> bool {
        self != Self::Rdma || rdma_device().is_some()
    }
}

/// A folder on a file system that does all that a store may ask for: that of the build, or `BYWAY_TEST_FOLDER`.
pub fn disk_folder() -> tempfile::TempDir {
    let folder = std::env::var("BYWAY_TEST_FOLDER").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").to_owned());
    tempfile::tempdir_in(folder).unwrap()
}

/// A server of some volumes, on a thread of its own.
pub struct Running {
    pub address: Address,
    /// Where its socket lies, until the test is done with it.
    _folder: tempfile::TempDir,
    /// What the server said of itself after its last turn.
    pub state: Arc<Mutex<State>>,
    stop: Arc<AtomicBool>,
    drain: Arc<AtomicBool>,
    /// To be offered instead of the volume of that name.
    replacement: Arc<Mutex<Option<Arc<Volume>>>>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

/// What a server looks like from outside.
#[derive(Clone, Copy, Debug, Default)]
pub struct State {
    pub last_closed: Option<CloseReason>,
    pub sessions: usize,
    pub used_frame_bytes: usize,
    pub open_windows: usize,
    /// Calls that have begun and not been answered.
    pub calls: usize,
    /// The most that there was.
    pub queued_heap_bytes_max: usize,
    /// The most bytes that one turn of the loop has copied in its clients' memory.
    pub turn_copied_bytes_max: u64,
    pub counters: Counters,
}

impl Running {
    pub fn start(
        wire: impl Into<Wire>,
        at: Option<Address>,
        instance: u64,
        options: Options,
        volumes: Vec<Arc<Volume>>,
    ) -> Self {
        Self::start_with(wire, at, instance, (options, ServerTls::Off), volumes)
    }

    pub fn start_with(
        wire: impl Into<Wire>,
        at: Option<Address>,
        instance: u64,
        how: (Options, ServerTls),
        volumes: Vec<Arc<Volume>>,
    ) -> Self {
        Self::start_short(wire, at, instance, how, FRAMES, volumes)
    }

    /// With so much memory for frames.
    pub fn start_short(
        wire: impl Into<Wire>,
        at: Option<Address>,
        instance: u64,
        (options, tls): (Options, ServerTls),
        frame_bytes: usize,
        volumes: Vec<Arc<Volume>>,
    ) -> Self {
        let (wire, folder) = (wire.into(), tempfile::tempdir().unwrap());
        let at = at.unwrap_or_else(|| wire.path.address(folder.path()));
        let stop = Arc::new(AtomicBool::new(false));
        let drain = Arc::new(AtomicBool::new(false));
        let state = Arc::new(Mutex::new(State::default()));
        let replacement: Arc<Mutex<Option<Arc<Volume>>>> = Arc::default();
        let (send, receive) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let (stop, drain, state) = (Arc::clone(&stop), Arc::clone(&drain), Arc::clone(&state));
            let replacement = Arc::clone(&replacement);
            move || {
                let mut reactor = Reactor::open(wire.io, frame_bytes).unwrap();
                let mut engine = Engine::default();
                let mut server = Server::new(&reactor, instance, options);
                server.set_tls(tls);
                let address = if let Address::Rdma(at) = at {
                    Address::Rdma(server.listen_rdma(&mut reactor, at).unwrap())
                } else {
                    let listener = server.listen(&mut reactor, &at).unwrap();
                    reactor.local_address(listener).map_or(at, Address::Tcp)
                };
                let mut offered = Vec::new();
                for volume in volumes {
                    let id = engine.attach(&mut reactor, volume);
                    server.offer(id);
                    offered.push(id);
                }
                send.send((address, reactor.waker())).unwrap();
                serve(&mut reactor, &mut engine, &mut server, (&stop, &drain), &state, |reactor, engine, server| {
                    if let Some(volume) = replacement.lock().unwrap().take() {
                        replace(reactor, engine, server, &mut offered, volume);
                    }
                });
            }
        });
        let (address, waker) = receive.recv().unwrap();
        Self { address, _folder: folder, state, stop, drain, replacement, waker, thread: Some(thread) }
    }

    /// Offers another volume instead of the one of its name, as a reload does; returns when that is done.
    pub fn replace(&self, volume: Arc<Volume>) {
        *self.replacement.lock().unwrap() = Some(volume);
        self.waker.wake();
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.replacement.lock().unwrap().is_some() {
            assert!(Instant::now() < deadline, "the server does not take the volume");
            std::thread::yield_now();
        }
    }

    /// Begins to shut down; the thread ends when nothing is left.
    pub fn drain(&self) {
        self.drain.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Whether a drain has come to its end.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub fn stop(&mut self) {
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

fn replace(
    reactor: &mut Reactor,
    engine: &mut Engine,
    server: &mut Server,
    offered: &mut [VolumeId],
    volume: Arc<Volume>,
) {
    let named = |id: &&mut VolumeId| engine.volume(**id).is_some_and(|old| old.name() == volume.name());
    let Some(id) = offered.iter_mut().find(named) else { return };
    server.withdraw(*id);
    server.dismiss_users(reactor, *id);
    engine.detach(reactor, *id);
    *id = engine.attach(reactor, volume);
    server.offer(*id);
}

fn serve(
    reactor: &mut Reactor,
    engine: &mut Engine,
    server: &mut Server,
    (stop, drain): (&AtomicBool, &AtomicBool),
    state: &Mutex<State>,
    mut before_each_turn: impl FnMut(&mut Reactor, &mut Engine, &mut Server),
) {
    let (mut completions, mut done) = (Vec::new(), Vec::new());
    let (mut queued_heap_bytes_max, mut turn_copied_bytes_max, mut draining) = (0, 0, false);
    let mut copied_before_turn = 0;
    while !stop.load(Ordering::Acquire) {
        if drain.load(Ordering::Acquire) && !std::mem::replace(&mut draining, true) {
            server.shut_down(reactor);
        }
        before_each_turn(reactor, engine, server);
        let counters = reactor.counters();
        let copied_bytes = counters.put_bytes + counters.got_bytes;
        turn_copied_bytes_max = turn_copied_bytes_max.max(copied_bytes - copied_before_turn);
        copied_before_turn = copied_bytes;
        server.flush(reactor, engine);
        if draining && server.is_idle() {
            return;
        }
        queued_heap_bytes_max = server.queued_heap_bytes().max(queued_heap_bytes_max);
        *state.lock().unwrap() = State {
            last_closed: server.last_closed(),
            sessions: server.sessions().count(),
            used_frame_bytes: reactor.frames().bytes() - reactor.frames().free_bytes(),
            open_windows: server.open_windows(),
            calls: server.sessions().calls_in_flight(),
            queued_heap_bytes_max,
            turn_copied_bytes_max,
            counters: reactor.counters(),
        };
        reactor.reap(&mut completions, Wait::Block).unwrap();
        for completion in completions.drain(..) {
            match completion.token.class() {
                SERVER => {
                    server.handle(reactor, engine, completion);
                    queued_heap_bytes_max = server.queued_heap_bytes().max(queued_heap_bytes_max);
                }
                ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                _ => server.woken(reactor, engine),
            }
            for done in done.drain(..) {
                server.done(reactor, engine, done);
            }
        }
    }
}

pub fn memory(bytes: u64) -> Arc<Volume> {
    Arc::new(Volume::new("disk", Store::memory("disk", bytes).unwrap(), Served::default()))
}

pub fn client(
    wire: impl Into<Wire>,
    address: &Address,
    options: VolumeOptions,
) -> Result<BlockingVolume, ConnectError> {
    let reactor = Reactor::open(wire.into().io, FRAMES).unwrap();
    BlockingVolume::connect(reactor, address.clone(), "disk", options)
}

pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

pub fn each_io(test: impl Fn(IoChoice)) {
    for io in [IoChoice::Epoll, IoChoice::Uring] {
        if io == IoChoice::Uring && Reactor::open(io, 1).is_err() {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
            continue;
        }
        test(io);
    }
}

pub fn each_wire(test: impl Fn(Wire)) {
    for path in PATHS {
        if path.is_there() {
            each_io(|io| test(Wire { io, path }));
        } else {
            byway_skip::skip_part_of_this(byway_skip::NO_RDMA);
        }
    }
}

/// Over streams of bytes alone, which TLS and payload checksums need.
pub fn each_stream(test: impl Fn(Wire)) {
    for path in [Path::Tcp, Path::Unix, Path::SharedMemory] {
        each_io(|io| test(Wire { io, path }));
    }
}
