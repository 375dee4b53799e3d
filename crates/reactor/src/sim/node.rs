//! One node's loop: its handles, its operations in flight, and the completions that wait for the next reap.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::disk::SimFile;
use super::events::Key;
use super::net::ListenerEntry;
use super::world::{Crash, Inner};
use crate::counters::Counters;
use crate::file::OpenFile;
use crate::gather::{Gather, Scatter};
use crate::handles::Table;
use crate::op::{Address, Completion, Errno, File, Listener, Op, Outcome, Socket, Token, Wait};
use crate::time::{Clock, Instant};
use crate::waker::Waker;

/// One life of a node, from its start to its crash.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) ip: IpAddr,
    pub(super) dead: bool,
    pub(super) ops: BTreeMap<u64, InFlight>,
    pub(super) ready: VecDeque<Completion>,
    /// The connection and which end of it.
    pub(super) sockets: Table<(u64, usize)>,
    pub(super) listeners: Table<ListenerEntry>,
    pub(super) files: Table<Arc<OpenFile>>,
    pub(super) counters: Counters,
    pub(super) waker: Waker,
    /// The last port that was given out.
    pub(super) port: u16,
}

#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) token: Token,
    pub(super) work: Work,
    /// The event that ends it, where one does.
    pub(super) event: Option<Key>,
}

/// An operation in flight, with its memory and how far it is.
#[derive(Debug)]
pub(super) enum Work {
    Accept {
        listener: Listener,
    },
    Connect {
        to: Address,
        from: Option<SocketAddr>,
    },
    Recv {
        socket: Socket,
        into: Scatter,
        min: usize,
        got: usize,
    },
    Send {
        socket: Socket,
        sending: Sending,
    },
    Disk {
        op: Op,
        file: SimFile,
        direct: bool,
        since: u64,
    },
    /// A file operation that has ended, and whose end is not seen yet.
    Told(Outcome),
    Timer,
}

/// A gather on its way into a send buffer.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) gather: Gather,
    /// The files of its mapped segments, in order: they may be removed from the loop meanwhile.
    pub(super) maps: Vec<SimFile>,
    pub(super) segment: usize,
    /// Bytes of that segment that went.
    pub(super) offset: usize,
    /// Mapped segments before that segment.
    pub(super) mapped: usize,
    pub(super) sent: usize,
    pub(super) sent_mapped: usize,
}

impl Node {
    pub(super) fn new(ip: IpAddr) -> Self {
        Self {
            ip,
            dead: false,
            ops: BTreeMap::new(),
            ready: VecDeque::new(),
            sockets: Table::default(),
            listeners: Table::default(),
            files: Table::default(),
            counters: Counters::default(),
            waker: Waker::new(None),
            port: 32767,
        }
    }

    pub(super) fn next_port(&mut self) -> u16 {
        self.port = if self.port == u16::MAX { 32768 } else { self.port + 1 };
        self.port
    }

    pub(super) fn push(&mut self, token: Token, outcome: Outcome) {
        self.ready.push_back(Completion { token, outcome });
    }

    /// Ends an operation. Its event, if any, is the caller's to take back.
    pub(super) fn complete(&mut self, op: u64, end: impl FnOnce(Work, &mut Counters) -> Outcome) {
        if let Some(InFlight { token, work, .. }) = self.ops.remove(&op) {
            let outcome = end(work, &mut self.counters);
            self.push(token, outcome);
        }
    }
}

impl Work {
    /// Ends the operation with an error.
    pub(super) fn fail(self, error: Errno) -> Outcome {
        match self {
            Self::Accept { .. } => Outcome::Accepted(Err(error)),
            Self::Connect { .. } => Outcome::Connected(Err(error)),
            // What was taken from the stream is not lost: there is a result already.
            Self::Recv { into, got, .. } if error == Errno::CANCELED && got > 0 => {
                Outcome::Received { into, result: Ok(got) }
            }
            Self::Recv { into, .. } => Outcome::Received { into, result: Err(error) },
            Self::Send { sending, .. } => Outcome::Sent { gather: sending.gather, result: Err(error) },
            Self::Disk { op, .. } => crate::os::failed(op, error),
            Self::Told(outcome) => outcome,
            Self::Timer => Outcome::TimedOut(Err(error)),
        }
    }
}

/// The loop of one node.
#[derive(Debug)]
pub(crate) struct SimLoop {
    pub(super) world: Rc<RefCell<Inner>>,
    pub(super) id: u64,
    waker: Waker,
}

#[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "the backends have one shape")]
impl SimLoop {
    pub(super) fn new(world: Rc<RefCell<Inner>>, id: u64, waker: Waker) -> Self {
        Self { world, id, waker }
    }

    /// The node of this loop: it is there as long as the loop is.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Node) -> R) -> Option<R> {
        self.world.borrow_mut().nodes.get_mut(&self.id).map(f)
    }

    pub(crate) fn now(&self) -> Instant {
        self.world.borrow().now
    }

    pub(crate) fn clock(&self) -> Clock {
        Clock::simulated(&self.world.borrow().clock)
    }

    /// Whether completions wait for the next reap.
    pub(crate) fn has_ready(&self) -> bool {
        self.with(|node| !node.ready.is_empty()).unwrap_or_default()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.with(|node| node.counters).unwrap_or_default()
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    pub(crate) fn submit(&mut self, op: Op, token: Token) {
        self.world.borrow_mut().submit(self.id, op, token);
    }

    pub(crate) fn cancel(&mut self, token: Token) {
        self.world.borrow_mut().cancel(self.id, token);
    }

    /// Gives what is ready. Not being able to wait, it says nothing of `wait`'s time.
    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        let woken = self.waker.take();
        self.with(|node| {
            if woken {
                node.push(Token::WAKE, Outcome::Woken);
            }
            if node.ready.is_empty() && wait != Wait::Poll {
                node.counters.sleeps += 1;
            }
            into.extend(node.ready.drain(..));
        });
        Ok(())
    }

    pub(crate) fn listen(&mut self, address: &Address) -> std::io::Result<Listener> {
        Ok(self.world.borrow_mut().listen(self.id, address)?)
    }

    pub(crate) fn adopt_listener(&mut self, _fd: OwnedFd) -> std::io::Result<Listener> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn local_address(&self, listener: Listener) -> Option<SocketAddr> {
        let address = |node: &mut Node| {
            let entry = node.listeners.get(listener.index, listener.generation)?;
            entry.address.filter(|_| !entry.is_shared)
        };
        self.with(address).flatten()
    }

    pub(crate) fn close_listener(&mut self, listener: Listener) {
        self.world.borrow_mut().close_listener(self.id, listener);
    }

    pub(crate) fn adopt(&mut self, _fd: OwnedFd) -> std::io::Result<Socket> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn release(&mut self, _socket: Socket) -> Option<OwnedFd> {
        None
    }

    pub(crate) fn peer_address(&self, socket: Socket) -> Option<SocketAddr> {
        self.world.borrow().peer_address(self.id, socket)
    }

    pub(crate) fn keep_alive(&mut self, socket: Socket, idle: Duration) {
        self.world.borrow_mut().keep_alive(self.id, socket, idle);
    }

    pub(crate) fn close(&mut self, socket: Socket) {
        self.world.borrow_mut().close(self.id, socket);
    }

    pub(crate) fn shutdown_send(&mut self, socket: Socket) {
        self.world.borrow_mut().shutdown_send(self.id, socket);
    }

    pub(crate) fn add_file(&mut self, file: Arc<OpenFile>) -> File {
        let (index, generation) = self.with(|node| node.files.insert(file)).unwrap_or_default();
        File { index, generation }
    }

    pub(crate) fn remove_file(&mut self, file: File) {
        self.with(|node| node.files.remove(file.index, file.generation));
    }

    pub(crate) fn try_write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.world.borrow_mut().try_write(self.id, file, offset, bytes)
    }

    pub(crate) fn resident(&self, file: File, offset: u64, len: usize) -> bool {
        self.world.borrow_mut().resident(self.id, file, offset, len)
    }
}

impl Drop for SimLoop {
    /// As the death of the process, if the node has not crashed before.
    fn drop(&mut self) {
        // A loop dropped by a panic out of the world itself has nothing to tidy.
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.crash(self.id, Crash::Process);
            world.nodes.remove(&self.id);
        }
    }
}
