//! A node: event loops on threads of their own, the front ends that they serve, and the volumes behind them.
//!
//! The first loop accepts; a new stream goes to the loop with the fewest connections and stays there. Loops share
//! nothing but the volumes; the node talks to them by messages.

mod load;
mod report;
mod worker;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use byway_fabric::Registry;
use byway_fabric::rdma::RdmaError;
use byway_fabric::tls::ServerTls;
use byway_frontend::nbd::server::NbdOptions;
use byway_reactor::{Address, IoChoice, Waker};
use byway_service::block::Volume;
use byway_service::file::Share;
use byway_service::file::server::Recovery;
use byway_service::memory::Lending;

use self::load::Loads;
pub use self::report::NodeReport;
use self::report::SlowOperations;
use self::worker::{Message, Worker};
use crate::address::Cidr;
use crate::listening::Endpoint;
use crate::reload::Patience;

/// What a node serves, and with what.
pub struct NodeOptions {
    /// Which backend the loops use.
    pub io: IoChoice,
    /// Loops, each on a thread of its own; at least 1.
    pub threads: usize,
    /// Bytes of frames of all loops together.
    pub frame_bytes: usize,
    /// Memory that is lent; `None`: none.
    pub lending: Option<Arc<Lending>>,
    /// The volumes.
    pub volumes: Vec<Arc<Volume>>,
    /// The shares.
    pub shares: Vec<Arc<Share>>,
    /// Where clients of byway's own protocol come in.
    pub native: Vec<Endpoint>,
    /// Where NBD clients come in.
    pub nbd: Vec<Endpoint>,
    /// TLS of both front ends. Its certificate can be replaced through a clone while the node runs.
    pub tls: ServerTls,
    /// How NBD is served, but for TLS.
    pub nbd_options: NbdOptions,
    /// The addresses that may connect by TCP, besides this machine; empty: all.
    pub allow: Vec<Cidr>,
    /// Operations that take longer at the store are remembered, in microseconds.
    pub slow_us: u64,
    /// The machine's boot ([`boot`]), which a confined process cannot read.
    pub boot: Option<u32>,
    /// For measurements.
    pub measuring: Measuring,
    /// Called when a loop ends that was not told to. Its clients have lost their connections then, and no other loop takes its
    /// place: the node should end, so that its service manager restarts it.
    pub on_failure: Arc<dyn Fn() + Send + Sync>,
}

/// Settings of a node that only measurements change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measuring {
    /// Long reads from disk are told in slices of so many bytes; `None`: as ever.
    pub slice_bytes: Option<u64>,
    /// What is read lies in so many bytes of memory on its way, a loop; `None`: in the loop's frames.
    pub staging_bytes: Option<usize>,
}

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A loop could not be opened.
    #[error("cannot open an event loop: {0}; `byway doctor` says what this machine allows")]
    Loop(std::io::Error),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}{hint}", hint = listen_hint(address, source))]
    Listen {
        /// Which.
        address: Address,
        /// Why.
        source: std::io::Error,
    },
    /// An address of RDMA cannot be listened on.
    #[error("cannot listen on rdma://{address}: {source}")]
    ListenRdma {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: RdmaError,
    },
}

fn listen_hint(address: &Address, source: &std::io::Error) -> &'static str {
    let is_file = !matches!(address, Address::Tcp(_));
    // `EACCES` is of binding the socket, `EPERM` of giving it to its group.
    let not_given = source.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error());
    match source.kind() {
        std::io::ErrorKind::PermissionDenied if is_file && not_given => {
            ": the node's user may not give the socket to its group; name a group that the user is in, or start the node as root"
        }
        std::io::ErrorKind::PermissionDenied if is_file => ": the node's user may make no socket in that folder",
        std::io::ErrorKind::AddrInUse if is_file => ": another program listens there; choose another path or stop it",
        std::io::ErrorKind::AddrInUse => ": another program listens there; choose another port or stop it",
        std::io::ErrorKind::PermissionDenied => ": ports under 1024 need CAP_NET_BIND_SERVICE; choose another",
        std::io::ErrorKind::NotFound => ": make the folder that it is to be in first",
        std::io::ErrorKind::AlreadyExists => ": a file that is no socket is there; choose another path",
        _ => "",
    }
}

/// What came of [`Node::replace`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replaced {
    /// Loops that have not confirmed it yet: they do as told once they come to it.
    pub silent: usize,
    /// Sessions that were ended because their certificate is revoked by now, or because they have lost access.
    pub ended: usize,
}

/// A running node.
pub struct Node {
    loops: Vec<Loop>,
    ready: Vec<Ready>,
    report: NodeReport,
    io: String,
}

/// A front end that is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// Which front end.
    pub frontend: &'static str,
    /// Where, with the port that the kernel chose if 0 was asked for.
    pub address: Address,
}

/// Sends a loop messages.
#[derive(Clone, Debug)]
struct LoopSender {
    messages: Sender<Message>,
    waker: Waker,
}

impl LoopSender {
    /// Wakes the loop for the message. False if its thread has ended.
    fn send(&self, message: Message) -> bool {
        let sent = self.messages.send(message).is_ok();
        self.waker.wake();
        sent
    }
}

struct Loop {
    sender: LoopSender,
    thread: std::thread::JoinHandle<()>,
    ended: Receiver<()>,
}

/// What a loop tells when it has started.
struct Started {
    waker: Waker,
    ready: Vec<Ready>,
    io: String,
}

/// What a loop's thread begins with.
struct Assignment {
    index: usize,
    options: Arc<NodeOptions>,
    /// Listeners of the NBD front end: the first loop accepts from all of them.
    nbd: Vec<(OwnedFd, Address)>,
    /// Listeners of the native wire: the first loop accepts from all of them, and hands sessions to the others. Empty for other loops.
    native: Vec<(OwnedFd, Address)>,
    registry: Arc<Registry>,
    /// What the loops have in common of clients of files.
    files: Arc<Recovery>,
    loads: Arc<Loads>,
    slow: Arc<SlowOperations>,
    receiver: Receiver<Message>,
}

impl Node {
    /// Starts the loops and opens the front ends.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left running then.
    pub fn start(options: NodeOptions) -> Result<Self, StartError> {
        let mut node = Self {
            loops: Vec::new(),
            ready: Vec::new(),
            report: NodeReport::new(Vec::new(), Arc::default(), String::new(), None),
            io: String::new(),
        };
        match node.start_loops(options) {
            Ok(()) => Ok(node),
            Err(error) => {
                node.end();
                Err(error)
            }
        }
    }

    fn start_loops(&mut self, mut options: NodeOptions) -> Result<(), StartError> {
        let nbd = std::mem::take(&mut options.nbd);
        let mut nbd: Vec<_> = nbd.into_iter().filter_map(|one| Some((one.socket?, one.address))).collect();
        let threads = options.threads.max(1);
        let options = Arc::new(options);
        let registry = Arc::new(Registry::new(instance_id()?));
        let files = Arc::new(Recovery::new(in_boot(options.boot, registry.instance())));
        let loads = Arc::new(Loads::new(threads));
        let slow = Arc::new(SlowOperations::default());
        // The accepting loop starts last: it must know the others.
        let mut peers = Vec::new();
        for index in (0..threads).rev() {
            let (sender, receiver) = channel();
            // One loop accepts, and is woken for it; the sessions are spread over all. What RDMA listens on cannot be taken over by other
            // loops: the first one opens all of it.
            let sockets = options.native.iter().filter(|_| index == 0);
            let sockets = sockets.filter_map(|one| Some((one.socket.as_ref()?, &one.address)));
            let native: std::io::Result<Vec<_>> = sockets.map(|(fd, at)| Ok((fd.try_clone()?, at.clone()))).collect();
            let assignment = Assignment {
                index,
                options: Arc::clone(&options),
                nbd: if index == 0 { std::mem::take(&mut nbd) } else { Vec::new() },
                native: native.map_err(StartError::Loop)?,
                registry: Arc::clone(&registry),
                files: Arc::clone(&files),
                loads: Arc::clone(&loads),
                slow: Arc::clone(&slow),
                receiver,
            };
            let (started, one) = start_loop(assignment, sender, peers.clone())?;
            peers.insert(0, one.sender.clone());
            self.ready.extend(started.ready);
            self.io = started.io;
            self.loops.push(one);
        }
        let native = options.native.iter().filter(|one| one.socket.is_some());
        self.ready.extend(native.map(|one| Ready { frontend: "byway", address: one.address.clone() }));
        self.report = NodeReport::new(peers, slow, self.io.clone(), options.lending.clone());
        Ok(())
    }

    /// Ends what runs, at once.
    fn end(self) {
        self.tell_all(|| Message::Stop);
        for one in self.loops {
            let _ = one.thread.join();
        }
    }

    /// The front ends that are open.
    pub fn ready(&self) -> &[Ready] {
        &self.ready
    }

    /// The first TCP address of a front end.
    pub fn tcp_address(&self, frontend: &str) -> Option<SocketAddr> {
        self.ready.iter().filter(|ready| ready.frontend == frontend).find_map(|ready| match &ready.address {
            Address::Tcp(address) => Some(*address),
            Address::Unix(_) | Address::Shared(_) | Address::Rdma(_) => None,
        })
    }

    /// Which backend the loops use, and why.
    pub fn io(&self) -> &str {
        &self.io
    }

    /// Makes `volumes` the list that is served, and lets only the addresses of `allow` connect from now on, besides this
    /// machine's (empty: all). Volumes that are the same, perhaps in another size, go on; connections of those that are gone
    /// end.
    ///
    /// Waits for every loop to confirm that it is so, as long as `patience` lasts.
    pub fn replace(&self, volumes: &[Arc<Volume>], allow: &[Cidr], patience: &Patience) -> Replaced {
        let (confirm_allowed, allowed) = channel();
        // First those who may no longer come in: they are not to see what is new.
        self.tell_all(|| Message::Allow(allow.to_vec(), confirm_allowed.clone()));
        let (confirm_volumes, replaced) = channel();
        self.tell_all(|| Message::Volumes(volumes.to_vec(), confirm_volumes.clone()));
        drop((confirm_allowed, confirm_volumes));
        let allowed = self.loops.iter().map_while(|_| patience.receive(&allowed)).count();
        let ended: Vec<usize> = self.loops.iter().map_while(|_| patience.receive(&replaced)).collect();
        Replaced { silent: self.loops.len() - allowed.min(ended.len()), ended: ended.into_iter().sum() }
    }

    /// Makes `shares` the list that is served. Sessions that use one that is gone, or is another now, end. The loops have done so when
    /// they confirm a later [`Node::replace`].
    pub fn replace_shares(&self, shares: &[Arc<Share>]) {
        self.tell_all(|| Message::Shares(shares.to_vec()));
    }

    fn tell_all(&self, message: impl Fn() -> Message) {
        for one in &self.loops {
            one.sender.send(message());
        }
    }

    /// Who can be asked how the node is.
    pub fn report(&self) -> &NodeReport {
        &self.report
    }

    /// Stops: accepts nothing more, answers what is in flight, then ends. After `limit` it ends anyway. Says whether
    /// everything had been answered.
    pub fn stop(self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.report.note_draining();
        self.tell_all(|| Message::Drain);
        let mut clean = true;
        for one in &self.loops {
            let left = deadline.saturating_duration_since(Instant::now());
            if one.ended.recv_timeout(left) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                clean = false;
                one.sender.send(Message::Stop);
            }
        }
        for one in self.loops {
            let _ = one.thread.join();
        }
        clean
    }
}

/// A number that tells this process from every other that served before: clients replay when it changes.
fn instance_id() -> Result<u64, StartError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| StartError::Loop(std::io::Error::other(error.to_string())))?;
    Ok(u64::from_ne_bytes(bytes) | 1)
}

/// The same for clients of files, which also want to know whether the machine was started anew: the high half is the boot. Where that is not
/// known, each process counts as one.
fn in_boot(boot: Option<u32>, instance: u64) -> u64 {
    boot.map_or(instance, |boot| u64::from(boot) << 32 | (instance & 0xffff_ffff))
}

/// Names the machine's boot, if the kernel does.
pub fn boot() -> Option<u32> {
    let name = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // It is random: 32 bits of it are enough.
    u32::from_str_radix(name.get(..8)?, 16).ok()
}

/// Tells of the end of a loop's thread, also by a panic.
struct EndWatch {
    on_failure: Arc<dyn Fn() + Send + Sync>,
    as_told: bool,
}

impl Drop for EndWatch {
    fn drop(&mut self) {
        if !self.as_told {
            (self.on_failure)();
        }
    }
}

fn start_loop(
    assignment: Assignment,
    messages: Sender<Message>,
    peers: Vec<LoopSender>,
) -> Result<(Started, Loop), StartError> {
    let (report, reported) = channel();
    let (end, ended) = channel();
    let name = format!("byway-{}", assignment.index);
    let run = move || {
        let mut watch = EndWatch { on_failure: Arc::clone(&assignment.options.on_failure), as_told: false };
        match Worker::open(assignment, peers) {
            Ok((worker, started)) => {
                let _ = report.send(Ok(started));
                watch.as_told = worker.run();
            }
            Err(error) => {
                watch.as_told = true;
                let _ = report.send(Err(error));
            }
        }
        drop(end);
    };
    let thread = std::thread::Builder::new().name(name).spawn(run).map_err(StartError::Loop)?;
    let gone = || StartError::Loop(std::io::Error::other("its thread ended"));
    let started = match reported.recv().unwrap_or_else(|_| Err(gone())) {
        Ok(started) => started,
        Err(error) => {
            let _ = thread.join();
            return Err(error);
        }
    };
    let sender = LoopSender { messages, waker: started.waker.clone() };
    Ok((started, Loop { sender, thread, ended }))
}

#[cfg(test)]
mod tests;
