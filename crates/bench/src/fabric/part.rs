//! The processes of the benchmark: their arguments, their results, and their end.
//!
//! The benchmark starts itself again, once for the server and once for each group of clients, and talks to each over its
//! standard input and output, a line of JSON each way. A process ends when its input does, and is killed when its parent dies.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use byway_reactor::{Address, IoChoice, Reactor, Waker};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::FabricBenchError;
use crate::own_cpu;

/// How long a process is waited for: 1,024 clients connect in well under that.
const ANSWER_SECONDS_MAX: i64 = 60;

/// How payloads get to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// A request says where the payload is, and the server gets it when it has a free buffer.
    Driven,
    /// The client sends the payload unasked; without a free buffer the server drops it, and the client sends it again.
    Naive,
}

/// What carries the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Wire {
    /// TCP over loopback.
    Tcp,
    /// A unix stream socket.
    Unix,
    /// Shared memory.
    Shm,
}

/// What the server does with a block besides checking it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// Copies it into a file in memory.
    File,
    /// Nothing.
    None,
}

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    /// The server.
    Server {
        /// Receive frames.
        frames: usize,
        /// Blocks that it gets at the same time.
        ahead: usize,
        store: Store,
    },
    /// Some of the clients, each on connections of its own, all on one loop.
    Clients {
        /// The number of the first one.
        first: usize,
    },
}

/// What a process is told when it is started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) role: Role,
    pub(super) mode: Mode,
    pub(super) wire: Wire,
    /// Where the server listens: `IP:PORT`, or a path.
    pub(super) address: String,
    /// Clients of this process; for the server, all of them.
    pub(super) clients: usize,
    pub(super) block_bytes: usize,
    /// Blocks that each client writes in turn.
    pub(super) blocks_each: usize,
    pub(super) io: String,
    pub(super) parent: i32,
}

impl Part {
    pub(super) fn address(&self) -> Result<Address, FabricBenchError> {
        Ok(match self.wire {
            Wire::Tcp => Address::Tcp(self.address.parse().map_err(|_| FabricBenchError::Talk("its address"))?),
            Wire::Unix => Address::Unix(self.address.clone().into()),
            Wire::Shm => Address::Shared(self.address.clone().into()),
        })
    }

    /// A loop with that much memory.
    pub(super) fn reactor(&self, frame_bytes: usize) -> Result<Reactor, FabricBenchError> {
        let io = byway_remote::parse_io(&self.io).unwrap_or(IoChoice::Auto);
        Reactor::open(io, frame_bytes).map_err(FabricBenchError::Loop)
    }
}

/// What a process is told later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Clients: write.
    Begin,
    /// Tell what was done since the last mark, and begin to count anew.
    Mark,
}

/// What a process tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Told {
    /// A server listens there; clients are all connected.
    Ready(String),
    /// The answer to a mark.
    Tally(Box<Tally>),
    /// It cannot go on.
    Failed(String),
}

/// What a process has done between two marks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) seconds: f64,
    pub(super) cpu_seconds: f64,
    /// Server: blocks that were taken. Clients: blocks that were answered, by client.
    pub(super) blocks: Vec<u64>,
    /// Blocks that were thrown away for want of a frame.
    pub(super) drops: u64,
    /// Bytes that were received for nothing.
    pub(super) wasted_bytes: u64,
    /// Clients: blocks that were sent again.
    pub(super) repeats: u64,
    /// Clients: time from a block's first request to its answer in nanoseconds, and how often.
    pub(super) latencies: Vec<(u64, u64)>,
    /// Server: how often, and how long on average, a request waited for a frame, in microseconds.
    pub(super) waits: u64,
    pub(super) wait_mean_us: f64,
}

/// The time and CPU since the last mark.
pub(super) struct Stretch {
    began: std::time::Instant,
    cpu: std::time::Duration,
}

impl Stretch {
    pub(super) fn begin() -> Self {
        Self { began: std::time::Instant::now(), cpu: own_cpu() }
    }

    /// Ends it and begins the next: seconds, and seconds of CPU.
    pub(super) fn next(&mut self) -> (f64, f64) {
        let ended = Self::begin();
        let figures = ((ended.began - self.began).as_secs_f64(), (ended.cpu.saturating_sub(self.cpu)).as_secs_f64());
        *self = ended;
        figures
    }
}

/// In a started process: the parent's orders. The loop is woken for each.
pub(super) fn take_orders(waker: Waker) -> Receiver<Order> {
    let (sender, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { break };
            if sender.send(order).is_err() {
                break;
            }
            waker.wake();
        }
        // The parent has seen enough, or is gone.
        std::process::exit(0);
    });
    orders
}

/// In a started process: tells the parent.
pub(super) fn tell(told: &Told) {
    let line = serde_json::to_string(told).unwrap_or_default();
    let mut out = std::io::stdout().lock();
    // A parent that does not listen any more ends us by our input.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// A process that was started. It is killed and waited for when this is dropped.
pub(super) struct Started {
    child: Child,
    orders: ChildStdin,
    told: BufReader<ChildStdout>,
}

impl Started {
    pub(super) fn start(part: &Part) -> Result<Self, FabricBenchError> {
        let program = std::env::current_exe().map_err(FabricBenchError::Start)?;
        let part = serde_json::to_string(part).map_err(|_| FabricBenchError::Talk("its part"))?;
        let mut child = Command::new(program)
            .args(["bench", "fabric-part", &part])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(FabricBenchError::Start)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(told)) => Ok(Self { child, orders, told: BufReader::new(told) }),
            _ => Err(FabricBenchError::Talk("its pipes")),
        }
    }

    pub(super) fn order(&mut self, order: Order) -> Result<(), FabricBenchError> {
        let line = serde_json::to_string(&order).unwrap_or_default();
        writeln!(self.orders, "{line}").map_err(|_| FabricBenchError::Talk("an order"))
    }

    fn hear(&mut self) -> Result<Told, FabricBenchError> {
        let mut line = String::new();
        if self.told.buffer().is_empty() {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let limit = Timespec { tv_sec: ANSWER_SECONDS_MAX, tv_nsec: 0 };
            if poll(&mut [PollFd::new(self.told.get_ref(), PollFlags::IN)], Some(&limit)) == Ok(0) {
                return Err(FabricBenchError::Talk("an answer in time"));
            }
        }
        let heard = self.told.read_line(&mut line);
        match heard.ok().and_then(|_| serde_json::from_str(&line).ok()) {
            Some(Told::Failed(reason)) => Err(FabricBenchError::Failed(reason)),
            Some(told) => Ok(told),
            None => Err(FabricBenchError::Talk("an answer")),
        }
    }

    /// Waits until it is ready; gives the address that it says.
    pub(super) fn ready(&mut self) -> Result<String, FabricBenchError> {
        match self.hear()? {
            Told::Ready(address) => Ok(address),
            _ => Err(FabricBenchError::Talk("its readiness")),
        }
    }

    /// The answer to a mark.
    pub(super) fn tally(&mut self) -> Result<Tally, FabricBenchError> {
        match self.hear()? {
            Told::Tally(tally) => Ok(*tally),
            _ => Err(FabricBenchError::Talk("its figures")),
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It has ended already if these fail.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
