//! Byway's own NBD front end on a thread, and our client for it.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use byway_fabric::tls::{ServerTls, TlsClient};
use byway_frontend::nbd::client::{BlockingClient, ClientConfig, ClientError, ClientOptions};
use byway_frontend::nbd::server::{LoopContext, NBD_CLASS, NbdFrontend, NbdOptions};
use byway_reactor::{Address, IoChoice, Op, Outcome, Reactor, Token, Wait, Waker};
use byway_service::block::{Catalog, ENGINE_CLASS, Engine, Store, Volume, VolumeOptions};

pub const IOS: [IoChoice; 2] = [IoChoice::Uring, IoChoice::Epoll];
pub const CLIENT: u8 = 0x50;
const ACCEPT: u8 = 0x01;
const FRAMES: usize = 32 << 20;

/// A front end with some volumes on a thread of its own.
pub struct Running {
    pub address: Address,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start(io: IoChoice, at: Address, volumes: Vec<Arc<Volume>>, tls: ServerTls) -> Self {
        Self::start_with(io, at, volumes, tls, FRAMES)
    }

    pub fn start_with(
        io: IoChoice,
        at: Address,
        volumes: Vec<Arc<Volume>>,
        tls: ServerTls,
        frame_bytes: usize,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (send, started) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut reactor = Reactor::open(io, frame_bytes).unwrap();
                let listener = reactor.listen(&at).unwrap();
                let bound = reactor.local_address(listener).map_or(at, Address::Tcp);
                reactor.submit(Op::Accept { listener }, Token::new(ACCEPT, 0, 0, 0));
                send.send((bound, reactor.waker())).unwrap();
                serve(&mut reactor, &volumes, tls, &stop);
            }
        });
        let (address, waker) = started.recv().unwrap();
        Self { address, stop, waker, thread: Some(thread) }
    }

    /// An open export of it.
    pub fn connect(&self, io: IoChoice, export: &str, connections: usize, tls: Option<TlsClient>) -> BlockingClient {
        let config = ClientConfig { export: export.to_owned(), ..ClientConfig::default() };
        connect_as(io, &self.address, config, connections, tls).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_none_or(|ended| ended.is_ok()), "the server panicked");
    }
}

fn serve(reactor: &mut Reactor, volumes: &[Arc<Volume>], tls: ServerTls, stop: &AtomicBool) {
    let (mut engine, mut catalog) = (Engine::default(), Catalog::default());
    catalog.replace(&mut engine, reactor, volumes);
    let mut frontend = NbdFrontend::new(NbdOptions { tls, ..NbdOptions::default() });
    let (mut completions, mut done) = (Vec::new(), Vec::new());
    while !stop.load(Ordering::SeqCst) {
        reactor.reap(&mut completions, Wait::Block).unwrap();
        for completion in completions.drain(..) {
            match completion.token.class() {
                ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                NBD_CLASS => frontend.handle(
                    &mut LoopContext { reactor: &mut *reactor, engine: &mut engine, catalog: &catalog },
                    completion,
                ),
                _ => {
                    if let Outcome::Accepted(Ok(socket)) = completion.outcome {
                        let mut context =
                            LoopContext { reactor: &mut *reactor, engine: &mut engine, catalog: &catalog };
                        frontend.open(&mut context, socket);
                    }
                }
            }
        }
        let mut context = LoopContext { reactor: &mut *reactor, engine: &mut engine, catalog: &catalog };
        for one in done.drain(..) {
            frontend.done(&mut context, one);
        }
        frontend.turn(&mut context);
    }
}

pub fn connect_as(
    io: IoChoice,
    to: &Address,
    config: ClientConfig,
    connections: usize,
    tls: Option<TlsClient>,
) -> Result<BlockingClient, ClientError> {
    let reactor = Reactor::open(io, FRAMES).unwrap();
    BlockingClient::connect(reactor, to.clone(), config, ClientOptions { class: CLIENT, connections, tls })
}

pub fn loopback() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}

pub fn memory(name: &str, bytes: u64, read_only: bool) -> Arc<Volume> {
    let options = VolumeOptions { read_only, description: format!("about {name}"), ..VolumeOptions::default() };
    Arc::new(Volume::new(name, Store::memory(name, bytes).unwrap(), options))
}

pub fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 24) as u8 | 1).collect()
}
