//! `byway bench fabric`: many clients that write to a server with few receive frames.
//!
//! The experiment of Goglin (figure 9): clients write blocks of 64 KiB to a server with 125 receive frames. There the
//! throughput fell from 233 MB/s with 92 clients to 163 with 184 when payloads were sent without a request, and did not fall
//! when the server drove the transfers. Here the same loop over the same wire does both, and both check every block on arrival.

mod clients;
mod driven;
mod naive;
mod part;
mod pattern;
mod report;
mod sink;
mod turns;

use std::path::PathBuf;
use std::time::Duration;

use byway_reactor::IoChoice;
use clap::{Args, ValueEnum};

pub use self::part::{Mode, Store, Wire};
use self::part::{Order, Part, Role, Started, Told, tell};
use self::report::{Point, Report};
use self::sink::Sink;
use crate::limits::{BENCH_CLIENTS_MAX, BENCH_POINTS_MAX};
use crate::parent;
use byway_remote::parse_io;
use byway_remote::units::parse_size;

/// How long clients write before it counts: slow start, page faults of first use.
const WARM_UP: Duration = Duration::from_millis(500);
/// What all clients together write from, in bytes, however many they are: else few clients would write from a core's cache
/// and many from memory, and it is that that would be measured.
const DATA_BYTES: usize = 128 << 20;
/// The next block of a client while the last one may still be on its way to the wire.
const BLOCKS_EACH_MIN: usize = 2;
/// Largest block: what one frame of the fabric holds.
const BLOCK_BYTES_MAX: u64 = 1 << 20;

/// The flags of `byway bench fabric`.
#[derive(Args, Debug)]
pub struct FabricBenchArguments {
    /// Numbers of clients, 1 to 1024; one measurement for each
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256,512,1024",
          value_parser = clap::value_parser!(u16).range(1..=BENCH_CLIENTS_MAX))]
    pub clients: Vec<u16>,
    /// Client processes, at most
    ///
    /// The clients are spread over them. Each client has its own connections: two when driven (one for messages, one for payloads),
    /// one when naive. The table shows the numbers of processes and connections.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub processes: u16,
    /// Receive buffers of the server
    #[arg(long, value_name = "N", default_value_t = 125, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub frames: u16,
    /// Blocks that the server fetches at the same time, at most
    ///
    /// Enough of them keep wire and store busy; more would leave the processor's cache before the server works on them. The other
    /// buffers stay free.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub ahead: u16,
    /// Size of a block and of a buffer, 8 to 1M, a multiple of 8
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_size)]
    pub bs: u64,
    /// How payloads get to the server
    #[arg(long, value_enum, default_value = "both")]
    pub mode: Modes,
    /// Transport
    #[arg(long, value_enum, default_value = "tcp")]
    pub wire: Wire,
    /// What the server does with a block besides checking it
    #[arg(long, value_enum, default_value = "file")]
    pub store: Store,
    /// How long each point is measured, in seconds
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// Rounds over all points; medians are printed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=101))]
    pub rounds: u16,
    /// What the event loops stand on: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = parse_io)]
    pub io: IoChoice,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Which modes are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Modes {
    /// A request says where the payload is, and the server gets it when it has a free buffer
    Driven,
    /// The client sends the payload unasked; without a free buffer the server drops it, and the client sends it again
    Naive,
    /// Both
    Both,
}

impl Modes {
    fn list(self) -> &'static [Mode] {
        match self {
            Self::Driven => &[Mode::Driven],
            Self::Naive => &[Mode::Naive],
            Self::Both => &[Mode::Driven, Mode::Naive],
        }
    }
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum FabricBenchError {
    /// The block's size.
    #[error("--bs {0}: give 8 to 1M, a multiple of 8")]
    Block(u64),
    /// Too many points.
    #[error("--clients: give at most {BENCH_POINTS_MAX} numbers")]
    Points,
    /// A process could not be started.
    #[error("cannot start a process of the benchmark: {0}")]
    Start(std::io::Error),
    /// A process and its parent do not understand each other.
    #[error("a process of the benchmark is lost: it waited for {0}")]
    Talk(&'static str),
    /// A process failed.
    #[error("a process of the benchmark failed: {0}")]
    Failed(String),
    /// The loop.
    #[error("the event loop: {0}; does the machine allow enough open files (ulimit -n)?")]
    Loop(std::io::Error),
    /// No frames.
    #[error("no memory for the blocks")]
    Memory,
    /// What came is not what was written.
    #[error("block {1} of client {0} is damaged: this is a bug, or bad memory")]
    Damaged(u64, u64),
    /// The server's file.
    #[error("the server cannot keep a block: {0}")]
    Store(std::io::Error),
}

/// Runs it.
///
/// # Errors
/// See [`FabricBenchError`].
pub fn run(arguments: &FabricBenchArguments) -> Result<(), FabricBenchError> {
    if !(8..=BLOCK_BYTES_MAX).contains(&arguments.bs) || !arguments.bs.is_multiple_of(8) {
        return Err(FabricBenchError::Block(arguments.bs));
    }
    if arguments.clients.len() > BENCH_POINTS_MAX {
        return Err(FabricBenchError::Points);
    }
    let mut report = Report::new(arguments);
    // Round by round, so that what the machine does meanwhile falls on all points.
    for _ in 0..arguments.rounds {
        for &clients in &arguments.clients {
            for &mode in arguments.mode.list() {
                report.add(measure(arguments, mode, usize::from(clients))?);
            }
        }
    }
    report.print(arguments.json);
    Ok(())
}

/// A socket's file, which goes when this does.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn measure(arguments: &FabricBenchArguments, mode: Mode, clients: usize) -> Result<Point, FabricBenchError> {
    let parent = rustix::process::getpid().as_raw_nonzero().get();
    let path = SocketFile(std::env::temp_dir().join(format!("byway-bench-{parent}.sock")));
    let address = match arguments.wire {
        Wire::Tcp => "127.0.0.1:0".to_owned(),
        Wire::Unix | Wire::Shm => path.0.display().to_string(),
    };
    let role = Role::Server { frames: arguments.frames.into(), ahead: arguments.ahead.into(), store: arguments.store };
    let io = match arguments.io {
        IoChoice::Auto => "auto",
        IoChoice::Uring => "uring",
        IoChoice::Epoll => "epoll",
    };
    let block_bytes = arguments.bs as usize;
    let blocks_each = (DATA_BYTES / (clients * block_bytes)).max(BLOCKS_EACH_MIN);
    let (wire, io) = (arguments.wire, io.to_owned());
    let mut part = Part { role, mode, wire, address, clients, block_bytes, blocks_each, io, parent };
    let mut server = Started::start(&part)?;
    part.address = server.ready()?;
    let processes = clients.min(arguments.processes.into());
    let mut writers = Vec::new();
    let mut first = 0;
    for process in 0..processes {
        part.clients = clients / processes + usize::from(process < clients % processes);
        part.role = Role::Clients { first };
        first += part.clients;
        writers.push(Started::start(&part)?);
    }
    // All connect at the same time.
    writers.iter_mut().try_for_each(|writer| writer.ready().map(drop))?;
    writers.iter_mut().try_for_each(|writer| writer.order(Order::Begin))?;
    pause(WARM_UP);
    mark(&mut server, &mut writers)?;
    pause(Duration::from_secs(arguments.seconds.into()));
    let (server, writers) = mark(&mut server, &mut writers)?;
    Ok(Point::new(mode, block_bytes, &server, &writers))
}

/// What all have done since the last mark.
fn mark(server: &mut Started, writers: &mut [Started]) -> Result<(part::Tally, Vec<part::Tally>), FabricBenchError> {
    server.order(Order::Mark)?;
    writers.iter_mut().try_for_each(|writer| writer.order(Order::Mark))?;
    let done = server.tally()?;
    Ok((done, writers.iter_mut().map(Started::tally).collect::<Result<_, _>>()?))
}

/// Lets time pass.
fn pause(time: Duration) {
    let time = rustix::time::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    // Cut short by a signal it is a shorter measurement, whose time is taken anyway.
    let _ = rustix::thread::nanosleep(&time);
}

/// Is a process of the benchmark, until its parent has seen enough.
///
/// # Errors
/// See [`FabricBenchError`]; the parent is told as well.
pub fn run_part(part: &str) -> Result<(), FabricBenchError> {
    let part: Part = serde_json::from_str(part).map_err(|_| FabricBenchError::Talk("its part"))?;
    parent::end_with(part.parent).map_err(FabricBenchError::Start)?;
    let ended = match (part.role, part.mode) {
        (Role::Server { frames, ahead, store }, mode) => {
            let sink = Sink::open(store, part.blocks_each).map_err(FabricBenchError::Store)?;
            match mode {
                Mode::Driven => driven::serve(&part, frames, ahead, sink),
                Mode::Naive => naive::serve(&part, frames, sink),
            }
        }
        (Role::Clients { first }, Mode::Driven) => driven::write(&part, first),
        (Role::Clients { first }, Mode::Naive) => naive::write(&part, first),
    };
    if let Err(error) = &ended {
        tell(&Told::Failed(error.to_string()));
    }
    ended
}
