//! The node whose threads compute: `byway bench responder`, started by the experiment.

use std::hint::black_box;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, Group, NodeError, NodeOptions, WaitError, parse_address};
use byway_fabric::scheduling::{self, SliceError};
use byway_rpc::node::{Request, Rpc};
use clap::{Args, ValueEnum};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::messages;
use crate::parent;

/// The least privilege that the kernel has: anybody may be so nice.
const NICEST: i32 = 19;
/// Of a computing thread that does not look: how often it reads the clock is the same for all.
const LONG: Duration = Duration::from_millis(1);

/// Who share a group.
const GROUP_THREADS: usize = 2;

/// Who takes the calls, and how it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// A thread that sleeps in `next_call`.
    Sleep,
    /// A thread with a poll loop of its own, over the node's descriptor.
    Loop,
    /// A thread that looks again and again, without a pause.
    Spin,
    /// The first of the computing threads, between two parts of its work.
    LookOne,
    /// All computing threads, each between two parts of its work.
    LookAll,
    /// A thread that waits for any of several operations: messages of each session, and the next session.
    Any,
    /// Two threads that wait in one group of such operations.
    Group,
}

/// Flags of the program.
#[derive(Args, Clone, Debug)]
pub struct ResponderArguments {
    /// End when this process, the parent, ends
    #[arg(long, value_name = "PID")]
    pub end_with: i32,
    /// Where it answers; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,
    /// Who takes the calls
    #[arg(long, value_enum)]
    pub way: Way,
    /// The slice that the thread which waits asks the kernel for, in microseconds
    #[arg(long, value_name = "US")]
    pub slice_us: Option<u64>,
    /// The work between two looks, in microseconds
    #[arg(long, value_name = "US", default_value_t = 1000)]
    pub look_us: u64,
    /// A thread computes on this CPU; may be repeated
    #[arg(long, value_name = "CPU")]
    pub computes_on: Vec<usize>,
    /// The computing threads are as nice as can be
    #[arg(long)]
    pub nice: bool,
}

/// Why it ended.
#[derive(Debug, thiserror::Error)]
pub enum ResponderError {
    /// The parent is gone, a thread or the node was refused.
    #[error("a program of `byway bench figures`: {0}")]
    System(#[from] std::io::Error),
    /// An address.
    #[error(transparent)]
    Address(#[from] byway_fabric::node::AddressError),
    /// It cannot listen there.
    #[error("it cannot listen: {0}")]
    Listen(NodeError),
}

/// What its threads count.
#[derive(Debug, Default)]
struct Counts {
    /// Parts of work done, about a microsecond each.
    parts: AtomicU64,
    /// Nanoseconds of CPU in waiting for calls and answering them.
    answering_nanos: AtomicU64,
}

impl Counts {
    /// Counts what the calling thread has spent since `before`, which becomes now.
    fn answered(&self, before: &mut u64) {
        let now = thread_cpu_nanos();
        self.answering_nanos.fetch_add(now - *before, Relaxed);
        *before = now;
    }
}

/// Answers calls and computes. For each line that it reads, prints the counts.
///
/// # Errors
/// See [`ResponderError`].
pub fn run(arguments: &ResponderArguments) -> Result<(), ResponderError> {
    parent::end_with(arguments.end_with)?;
    let rpc = Rpc::open(&NodeOptions::default())?;
    let mut out = std::io::stdout().lock();
    for text in &arguments.listen {
        let address = parse_address(text)?;
        match rpc.node().listen(&address).map_err(ResponderError::Listen)? {
            Some(at) => writeln!(out, "tcp://{at}")?,
            None => writeln!(out, "{address}")?,
        }
    }
    let counts = Arc::new(Counts::default());
    let (slice, looks) = (arguments.slice_us.map(Duration::from_micros), Duration::from_micros(arguments.look_us));
    let group = match arguments.way {
        Way::Group => Some(Arc::new(messages::group(rpc.node())?)),
        _ => None,
    };
    let waits = match arguments.way {
        Way::LookOne | Way::LookAll => 0,
        Way::Group => GROUP_THREADS,
        Way::Sleep | Way::Loop | Way::Spin | Way::Any => 1,
    };
    for _ in 0..waits {
        let (rpc, counts, way, group) = (rpc.clone(), Arc::clone(&counts), arguments.way, group.clone());
        thread("responder-waits", move || wait(&rpc, way, group.as_deref(), slice, &counts))?;
    }
    for (at, &cpu) in arguments.computes_on.iter().enumerate() {
        let is_looking = arguments.way == Way::LookAll || (arguments.way == Way::LookOne && at == 0);
        let looking = is_looking.then(|| rpc.clone());
        let (counts, nice) = (Arc::clone(&counts), arguments.nice);
        thread("responder-computes", move || compute(cpu, nice, looks, looking.as_ref(), &counts))?;
    }
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        line?;
        writeln!(out, "{} {}", counts.parts.load(Relaxed), counts.answering_nanos.load(Relaxed))?;
        out.flush()?;
    }
    Ok(())
}

/// Its end is the end of the program: there is no one to answer.
fn thread(name: &str, act: impl FnOnce() -> Result<(), ResponderError> + Send + 'static) -> std::io::Result<()> {
    let run = move || {
        if let Err(error) = act() {
            tracing::error!(%error, "a thread of the program ended");
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}

fn wait(
    rpc: &Rpc,
    way: Way,
    group: Option<&Group>,
    slice: Option<Duration>,
    counts: &Counts,
) -> Result<(), ResponderError> {
    match slice.map(scheduling::set_slice) {
        None | Some(Ok(())) => {}
        // As before, and the figures show it.
        Some(Err(error @ (SliceError::Unsupported | SliceError::OtherPolicy))) => tracing::warn!(%error, "no slice"),
        Some(Err(SliceError::Refused(error))) => return Err(error.into()),
    }
    let (node, mut before) = (rpc.node(), 0);
    match (way, group) {
        (Way::Any, _) => return messages::answer_any(node, || counts.answered(&mut before)),
        (_, Some(group)) => return messages::answer_group(node, group, || counts.answered(&mut before)),
        _ => {}
    }
    loop {
        match way {
            Way::Loop => {
                let mut ready = [PollFd::from_borrowed_fd(node.descriptor()?, PollFlags::IN)];
                poll(&mut ready, None).map_err(std::io::Error::from)?;
                node.progress().map_err(failed)?;
                look(rpc)?;
            }
            Way::Spin => look(rpc)?,
            _ => answer(rpc.next_call(Deadline::NEVER).map_err(failed)?),
        }
        counts.answered(&mut before);
    }
}

/// Takes what calls there are.
fn look(rpc: &Rpc) -> Result<(), ResponderError> {
    loop {
        match rpc.next_call(Deadline::now()) {
            Ok(request) => answer(request),
            Err(NodeError::Wait(WaitError::Deadline)) => return Ok(()),
            Err(error) => return Err(failed(error).into()),
        }
    }
}

fn answer(request: Request) {
    // A caller that has gone needs none.
    let _ = request.token.reply(0, &request.arguments, &[]);
}

pub(super) fn failed(error: impl std::error::Error + Send + Sync + 'static) -> std::io::Error {
    std::io::Error::other(error)
}

fn thread_cpu_nanos() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn compute(
    cpu: usize,
    nice: bool,
    looks: Duration,
    looking: Option<&Rpc>,
    counts: &Counts,
) -> Result<(), ResponderError> {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).map_err(std::io::Error::from)?;
    if nice {
        // Of 0 it is the calling thread's, on Linux.
        rustix::process::setpriority_process(None, NICEST).map_err(std::io::Error::from)?;
    }
    let (length, mut value) = (looking.map_or(LONG, |_| looks), 1.0);
    loop {
        let began = Instant::now();
        while began.elapsed() < length {
            value = part(value);
            counts.parts.fetch_add(1, Relaxed);
        }
        if let Some(rpc) = looking {
            let began = Instant::now();
            look(rpc)?;
            counts.answering_nanos.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
        }
    }
}

/// About a microsecond of work, each step of which needs the one before.
fn part(mut value: f64) -> f64 {
    for _ in 0..500 {
        value = black_box(value * 1.000_000_1 + 1e-9);
    }
    if value > 1e6 { 1.0 } else { value }
}
