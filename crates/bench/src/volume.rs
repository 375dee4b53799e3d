//! `byway bench volume`: how fast a volume is, as its own client sees it.

mod server;

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use byway_reactor::{Counters, Frame, Instant, IoChoice, Reactor, Wait};
use byway_service::block::client::Request;
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use serde::Serialize;

use self::server::{CostError, ServerCost};
use super::own_cpu;
use byway_remote::output;
use byway_remote::tls::ClientTlsArguments;
use byway_remote::units::{parse_size, show_size};
use byway_remote::{self as remote, Remote, RemoteDone, RemoteError, RemoteOptions, RemoteUri, TransferError};
use byway_remote::{http_address, parse_io};

/// The class of the first connection's tokens; the others follow.
const CLASS: u8 = 0x30;
/// Longest transfer of one call of the native wire.
const BLOCK_BYTES_MAX: u64 = 1 << 20;
/// Streams for payloads of a native session, as its client has by default. An NBD client here is one connection.
const LANES: usize = 2;
/// Unflushed writes that a native volume keeps, as its client does by default.
const UNFLUSHED_BYTES_MAX: usize = byway_service::limits::CLIENT_UNFLUSHED_BYTES;
/// Latencies are kept to three digits up to a minute, in nanoseconds.
const LATENCY_NANOS_MAX: u64 = 60_000_000_000;

/// The flags of `byway bench volume`.
#[derive(Args, Debug)]
pub struct VolumeBenchArguments {
    /// Volume
    ///
    /// byway://HOST[:PORT]/NAME, byway+unix:///NAME?socket=PATH, byway+shm:///NAME?socket=PATH (shared memory),
    /// byway+rdma://HOST[:PORT]/NAME, nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH; for TLS byways://, nbds:// or
    /// nbds+unix://.
    pub uri: RemoteUri,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// Access pattern
    #[arg(long, value_enum, default_value = "randread")]
    pub rw: Pattern,
    /// Write to a volume that contains data, which is lost
    #[arg(long)]
    pub overwrite: bool,
    /// Write durably: each write is on stable storage before it is answered (needs a --rw that writes)
    #[arg(long)]
    pub durable: bool,
    /// Size of a request, 512 to 1M
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_size)]
    pub bs: u64,
    /// Requests in flight on each connection, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub depth: u16,
    /// Sessions (NBD: connections), 1 to 16
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub connections: u8,
    /// Duration in seconds
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Kernel interface of the event loop: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = parse_io)]
    pub io: IoChoice,
    /// The server's metrics address (its --http), to print the server's CPU time as well
    #[arg(long, value_name = "ADDRESS", value_parser = http_address)]
    pub metrics: Option<SocketAddr>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Which requests, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Random reads and writes, half of each.
    Randrw,
}

impl Pattern {
    fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::Randread)
    }
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum VolumeBenchError {
    /// The volume.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The request's size.
    #[error("--bs {0}: give 512 to 1M, a multiple of 512")]
    Block(u64),
    /// Reads are not durable.
    #[error("--durable is for writes; add --rw write, randwrite or randrw")]
    Durable,
    /// The loop.
    #[error("the event loop: {0}")]
    Loop(std::io::Error),
    /// Its contents would be lost.
    #[error(
        "{0} contains data{1}; name another volume, read with --rw randread, or add --overwrite to replace the data"
    )]
    Occupied(String, &'static str),
    /// The volume is too small for one request.
    #[error("the volume is smaller than one request; give a smaller --bs")]
    Small,
    /// The server's metrics.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// A request failed.
    #[error("a request failed: {0}")]
    Request(#[from] TransferError),
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    requests: u64,
    seconds: f64,
    requests_per_second: f64,
    megabytes_per_second: f64,
    latency_us: Latencies,
    client_cpu_us_per_request: f64,
    client_kernel_copied_bytes_per_byte: f64,
    /// Both `None` without `--metrics`. They hold whatever else the node did meanwhile.
    server_cpu_us_per_request: Option<f64>,
    server_kernel_copied_bytes_per_byte: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Latencies {
    p50: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// One session and its requests.
struct Lane {
    volume: Remote,
    /// By tag: when the request was begun.
    begun: Vec<Instant>,
    payload: Option<Rc<Frame>>,
    next: u64,
}

struct Bench {
    reactor: Reactor,
    lanes: Vec<Lane>,
    pattern: Pattern,
    durable: bool,
    block: u64,
    blocks: u64,
    random: u64,
    latencies: Histogram<u64>,
}

/// Runs it.
///
/// # Errors
/// See [`VolumeBenchError`].
pub fn run(arguments: &VolumeBenchArguments) -> Result<(), VolumeBenchError> {
    if !(512..=BLOCK_BYTES_MAX).contains(&arguments.bs) || !arguments.bs.is_multiple_of(512) {
        return Err(VolumeBenchError::Block(arguments.bs));
    }
    if arguments.durable && !arguments.rw.writes() {
        return Err(VolumeBenchError::Durable);
    }
    let mut bench = Bench::open(arguments)?;
    let measured = bench.report_on(arguments);
    bench.leave_after(&measured);
    let report = measured?;
    if arguments.json {
        output::line(serde_json::json!(report));
    } else {
        let Latencies { p50, p99, p999, max } = report.latency_us;
        output::line(format_args!(
            "{} requests of {} in {:.2} s: {:.0}/s, {:.1} MB/s\n\
             latency us: p50 {p50:.1}, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1}\n\
             client: {:.2} us of CPU for each request, {:.2} bytes copied by its kernel for each byte moved",
            report.requests,
            show_size(arguments.bs),
            report.seconds,
            report.requests_per_second,
            report.megabytes_per_second,
            report.client_cpu_us_per_request,
            report.client_kernel_copied_bytes_per_byte,
        ));
        match (report.server_cpu_us_per_request, report.server_kernel_copied_bytes_per_byte) {
            (Some(cpu), Some(copied)) => output::line(format_args!(
                "server: {cpu:.2} us of CPU for each request, {copied:.2} bytes copied by its kernel for each byte moved"
            )),
            _ => output::line("server: not asked; give --metrics the address of its --http"),
        }
    }
    Ok(())
}

/// Refuses to write to a volume that has something in it. A read-only one refuses writes by itself.
fn guard(reactor: &mut Reactor, remotes: &mut [&mut Remote]) -> Result<(), VolumeBenchError> {
    let Some((uri, info)) = remotes.first().and_then(|remote| Some((remote.uri().to_string(), remote.info()?))) else {
        return Ok(());
    };
    if info.read_only || remote::is_blank(reactor, remotes, &info)? {
        return Ok(());
    }
    Err(VolumeBenchError::Occupied(uri, info.contents_doubt()))
}

impl Report {
    fn add_server(&mut self, before: &ServerCost, after: &ServerCost, block: u64) {
        let requests = self.requests.max(1) as f64;
        self.server_cpu_us_per_request = Some((after.cpu_seconds - before.cpu_seconds) * 1e6 / requests);
        let copied = after.copied_bytes - before.copied_bytes;
        self.server_kernel_copied_bytes_per_byte = Some(copied / (requests * block as f64));
    }
}

impl Bench {
    fn open(arguments: &VolumeBenchArguments) -> Result<Self, VolumeBenchError> {
        arguments.tls.check(arguments.uri.wants_tls()).map_err(RemoteError::from)?;
        let frames = usize::from(arguments.depth) * usize::from(arguments.connections) * arguments.bs as usize;
        let mut reactor = Reactor::open(arguments.io, frames * 2 + (16 << 20)).map_err(VolumeBenchError::Loop)?;
        let no_memory = || VolumeBenchError::Loop(std::io::ErrorKind::OutOfMemory.into());
        let mut lanes = Vec::new();
        for index in 0..arguments.connections {
            let (class, unflushed_bytes_max) = (CLASS + index, UNFLUSHED_BYTES_MAX);
            let connections = if matches!(arguments.uri, RemoteUri::Native(_)) { LANES } else { 1 };
            let tls = &arguments.tls;
            let options = RemoteOptions { class, connections, read_only: false, tls, unflushed_bytes_max };
            let volume = Remote::connect(&mut reactor, &arguments.uri, options)?;
            let begun = vec![Instant::ZERO; arguments.depth.into()];
            lanes.push(Lane { volume, begun, payload: None, next: 0 });
        }
        let latencies = Histogram::new_with_bounds(1, LATENCY_NANOS_MAX, 3).map_err(|_| no_memory())?;
        let mut remotes: Vec<_> = lanes.iter_mut().map(|lane| &mut lane.volume).collect();
        remote::open(&mut reactor, &mut remotes)?;
        let (pattern, durable, block) = (arguments.rw, arguments.durable, arguments.bs);
        let bytes = lanes[0].volume.info().map_or(0, |info| info.bytes);
        Ok(Self { reactor, lanes, pattern, durable, block, blocks: bytes / block, random: 1, latencies })
    }

    /// Measures and says what it found. The caller leaves the servers.
    fn report_on(&mut self, arguments: &VolumeBenchArguments) -> Result<Report, VolumeBenchError> {
        if arguments.rw.writes() && !arguments.overwrite {
            let mut remotes: Vec<_> = self.lanes.iter_mut().map(|lane| &mut lane.volume).collect();
            guard(&mut self.reactor, &mut remotes)?;
        }
        self.fill_payloads()?;
        if self.blocks == 0 {
            return Err(VolumeBenchError::Small);
        }
        let cost_before = arguments.metrics.map(server::ask).transpose()?;
        let (cpu, counters, began) = (own_cpu(), self.reactor.counters(), self.reactor.now());
        self.measure(began + Duration::from_secs(arguments.seconds.into()), usize::from(arguments.depth))?;
        let seconds = self.reactor.now().since(began).as_secs_f64();
        let mut report = self.report(seconds, own_cpu().saturating_sub(cpu), &counters);
        let cost_after = arguments.metrics.map(server::ask).transpose()?;
        if let (Some(before), Some(after)) = (cost_before, cost_after) {
            report.add_server(&before, &after, arguments.bs);
        }
        Ok(report)
    }

    fn fill_payloads(&mut self) -> Result<(), VolumeBenchError> {
        for lane in &mut self.lanes {
            let len = self.block as usize;
            let own = lane.volume.shared_frame(len).or_else(|| self.reactor.frames().alloc(len));
            let mut payload = own.ok_or_else(|| VolumeBenchError::Loop(std::io::ErrorKind::OutOfMemory.into()))?;
            payload.fill(0x5a);
            lane.payload = Some(Rc::new(payload));
        }
        Ok(())
    }

    fn frame(&self, lane: usize) -> Option<Frame> {
        let len = self.block as usize;
        self.lanes[lane].volume.shared_frame(len).or_else(|| self.reactor.frames().alloc(len))
    }

    fn turn(&mut self, wait: Wait) -> Result<(), VolumeBenchError> {
        let mut remotes: Vec<_> = self.lanes.iter_mut().map(|lane| &mut lane.volume).collect();
        Ok(remote::turn(&mut self.reactor, &mut remotes, wait)?)
    }

    /// Keeps `depth` requests in flight on each session until `end`, then takes the last answers.
    fn measure(&mut self, end: Instant, depth: usize) -> Result<(), VolumeBenchError> {
        for lane in 0..self.lanes.len() {
            for tag in 0..depth {
                let frame = self.frame(lane);
                self.begin(lane, tag as u64, frame)?;
            }
        }
        let mut done: Vec<RemoteDone> = Vec::new();
        while self.lanes.iter().any(|lane| lane.volume.pending() > 0) {
            let mut answered = false;
            for lane in 0..self.lanes.len() {
                self.lanes[lane].volume.reap(&mut done);
                let now = self.reactor.now();
                for one in done.drain(..) {
                    one.result?;
                    answered = true;
                    let nanos = now.since(self.lanes[lane].begun[one.tag as usize]).as_nanos() as u64;
                    // The bounds hold for a minute; a longer latency counts as that.
                    self.latencies.saturating_record(nanos.max(1));
                    if now < end {
                        let frame = one.buffer.or_else(|| self.frame(lane));
                        self.begin(lane, one.tag, frame)?;
                    }
                }
            }
            self.turn(if answered { Wait::Poll } else { Wait::Block })?;
        }
        Ok(())
    }

    /// Leaves as the protocol asks, so that the server does not take it for a failure.
    fn leave_after<T, E>(&mut self, ended: &Result<T, E>) {
        let mut remotes: Vec<_> = self.lanes.iter_mut().map(|lane| &mut lane.volume).collect();
        remote::leave_after(&mut self.reactor, &mut remotes, ended);
    }

    fn begin(&mut self, lane: usize, tag: u64, frame: Option<Frame>) -> Result<(), VolumeBenchError> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let lane = &mut self.lanes[lane];
        let block = match self.pattern {
            Pattern::Read | Pattern::Write => lane.next % self.blocks,
            _ => self.random % self.blocks,
        };
        lane.next += 1;
        let (offset, len) = (block * self.block, self.block as usize);
        let writes = match self.pattern {
            Pattern::Write | Pattern::Randwrite => true,
            Pattern::Randrw => self.random >> 40 & 1 == 1,
            Pattern::Read | Pattern::Randread => false,
        };
        let no_memory = || VolumeBenchError::Loop(std::io::ErrorKind::OutOfMemory.into());
        let request = if writes {
            let from = lane.payload.clone().ok_or_else(no_memory)?;
            Request::Write { offset, len, from, durable: self.durable }
        } else {
            Request::Read { offset, len, into: frame.ok_or_else(no_memory)? }
        };
        lane.begun[tag as usize] = self.reactor.now();
        // Refused only over the machine's bound, which is above the greatest depth.
        let _ = lane.volume.submit(request, tag);
        Ok(())
    }

    fn report(&self, seconds: f64, cpu: Duration, before: &Counters) -> Report {
        let requests = self.latencies.len();
        let bytes = (requests * self.block).max(1) as f64;
        let us = |quantile| self.latencies.value_at_quantile(quantile) as f64 / 1000.0;
        let copied = self.reactor.counters().copied_bytes() - before.copied_bytes();
        Report {
            requests,
            seconds,
            requests_per_second: requests as f64 / seconds,
            megabytes_per_second: bytes / seconds / 1e6,
            latency_us: Latencies { p50: us(0.5), p99: us(0.99), p999: us(0.999), max: us(1.0) },
            client_cpu_us_per_request: cpu.as_secs_f64() * 1e6 / requests.max(1) as f64,
            client_kernel_copied_bytes_per_byte: copied as f64 / bytes,
            server_cpu_us_per_request: None,
            server_kernel_copied_bytes_per_byte: None,
        }
    }
}
