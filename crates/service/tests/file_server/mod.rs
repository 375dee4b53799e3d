//! A loop that serves shares, for tests.
#![allow(dead_code, reason = "each test file uses a part")]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use byway_fabric::{Options, Registry};
use byway_reactor::privilege::User;
use byway_reactor::{Address, IoChoice, Reactor, Wait};
use byway_service::block::spec::VolumeName;
use byway_service::file::server::{Recovery, Shares};
use byway_service::file::{Share, ShareSpec, Users, Writers};
use byway_service::host::Host;
use byway_service::limits::{CALLS_PER_SESSION, FILE_GRACE};

const CLASS: u8 = 0x20;
const FILE_CLASS: u8 = 0x21;

static INSTANCES: AtomicU64 = AtomicU64::new(1);

/// A share named `share` of a directory. Tests that run as root say for their directory that clients may be root there.
pub fn share(directory: &Path, users: Users, read_only: bool) -> Arc<Share> {
    let root = || User { uid: 0, gid: 0, groups: vec![0] };
    let is_roots = users == Users::Owner && std::fs::metadata(directory).unwrap().uid() == 0;
    let users = if is_roots { Users::Squash(root()) } else { users };
    let name = VolumeName::new("share").unwrap();
    let spec = ShareSpec { users, read_only, ..ShareSpec::new(name, directory.to_owned()) };
    Arc::new(Share::open(spec).unwrap())
}

/// The same, of a directory whose files only clients change.
pub fn exclusive(directory: &Path) -> Arc<Share> {
    let spec = ShareSpec { writers: Writers::Exclusive, ..share(directory, Users::Owner, false).spec().clone() };
    Arc::new(Share::open(spec).unwrap())
}

/// What a test has the loop do.
#[derive(Default)]
struct Orders {
    /// A turn begins only when this is free.
    turn: Mutex<()>,
    waits: AtomicBool,
    drain: AtomicBool,
}

impl Orders {
    fn wait_for_turn(&self) {
        if self.turn.try_lock().is_err() {
            self.waits.store(true, Ordering::Release);
            drop(self.turn.lock());
            self.waits.store(false, Ordering::Release);
        }
    }
}

/// A server of its own thread and loop; it ends when this is dropped.
pub struct Server {
    pub at: Address,
    stop: Arc<AtomicBool>,
    orders: Arc<Orders>,
    answered: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(at: Address, shares: Vec<Arc<Share>>) -> Self {
        Self::start_with(at, shares, Duration::ZERO, FILE_GRACE)
    }

    /// One that gives locks back alone for a time after its start, and keeps for another what clients had whose sessions ended.
    pub fn start_with(at: Address, shares: Vec<Arc<Share>>, grace_at_start: Duration, kept_for: Duration) -> Self {
        let (send, receive) = std::sync::mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let orders = Arc::new(Orders::default());
        let ordered = Arc::clone(&orders);
        let answered = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&answered);
        let thread = std::thread::spawn(move || {
            let mut reactor = Reactor::open(IoChoice::Auto, 32 << 20).unwrap();
            let spoken = vec![Shares::spoken(CALLS_PER_SESSION)];
            let instance = INSTANCES.fetch_add(1, Ordering::Relaxed);
            let mut host = Host::new(&reactor, Arc::new(Registry::new(instance)), Options::new(CLASS), spoken);
            let recovery = Arc::new(Recovery::with_times(instance, grace_at_start, kept_for));
            let mut files = Shares::new(&reactor, FILE_CLASS, &recovery);
            files.replace(&mut host, &mut reactor, &shares);
            let mut completions = Vec::new();
            let listener = host.listen(&mut reactor, &at).unwrap();
            let at = reactor.local_address(listener).map_or(at, Address::Tcp);
            send.send(at).unwrap();
            let mut draining = false;
            while !(stopped.load(Ordering::Acquire) || draining && host.is_idle() && files.is_idle()) {
                ordered.wait_for_turn();
                if ordered.drain.load(Ordering::Acquire) && !std::mem::replace(&mut draining, true) {
                    files.drain(&mut host, &mut reactor);
                    host.shut_down(&mut reactor);
                }
                host.flush(&mut reactor, &mut [&mut files]);
                count.store(host.sessions().answered(), Ordering::Release);
                reactor.reap(&mut completions, Wait::Until(reactor.now() + Duration::from_millis(20))).unwrap();
                for completion in completions.drain(..) {
                    match completion.token.class() {
                        FILE_CLASS => files.complete(&mut host, &mut reactor, completion),
                        _ if completion.token == byway_reactor::Token::WAKE => {
                            host.woken(&mut reactor, &mut [&mut files]);
                        }
                        _ => host.handle(&mut reactor, &mut [&mut files], completion),
                    }
                }
            }
        });
        Self { at: receive.recv().unwrap(), stop, orders, answered, thread: Some(thread) }
    }

    /// Keeps the loop from beginning another turn: it receives nothing that is sent from now on.
    pub fn hold(&self) -> MutexGuard<'_, ()> {
        let held = self.orders.turn.lock().unwrap();
        while !self.orders.waits.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        held
    }

    /// The loop ends as in an orderly shutdown, from its next turn on.
    pub fn drain(&self) {
        self.orders.drain.store(true, Ordering::Release);
    }

    /// Waits for the end of [`Server::drain`].
    pub fn drained(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    /// Calls that were answered, as of the last turn of the loop.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn tcp() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}
