//! `byway demo`: a node, its wires and their cost on one machine, without any set-up.

mod sink;
mod workplace;

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use byway_door::http::Report;
use byway_door::nbd::server::NbdOptions;
use byway_fabric::tls::ServerTls;
use byway_reactor::socket_file::SocketAccess;
use byway_reactor::{Address, IoChoice, Reactor};
use byway_service::block::spec::{StoreSpec, VolumeName, VolumeNameError, VolumeSpec};
use byway_service::block::{OpenError, OpenHere};
use clap::Args;
use serde::Serialize;

use self::sink::Sink;
pub(crate) use self::workplace::Workplace;
use crate::config::parse_io;
use crate::confinement::raise_limits;
use crate::copy::{CopyError, CopyOptions, Endpoint, FileEndpoint, RemoteEndpoint, copy};
use crate::listening;
use crate::node::{Measuring, Node, NodeOptions, StartError};
use crate::reload::open_volume;
use crate::remote::{self, Remote, RemoteError, RemoteOptions, RemoteUri};
use crate::tls::ClientTlsArguments;
use crate::units::{parse_size, show_size};

/// The class of the client's tokens.
const CLASS: u8 = 0x30;
/// Memory of the client's loop, and of the node's.
const FRAME_BYTES: usize = 64 << 20;
/// Pieces in flight and their size, as `byway copy` has by default.
const OPTIONS: CopyOptions = CopyOptions { depth: 16, chunk_bytes: 512 << 10, verify: false };
/// How long the node may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Open files of a node with a handful of connections.
const OPEN_FILES: u64 = 1024;

/// The flags of `byway demo`.
#[derive(Args, Debug)]
pub struct DemoArguments {
    /// What to share, opened read-only: a file or block device [default: a file of --size, made and removed]
    pub path: Option<PathBuf>,
    /// Bytes of the file that is made if no path is given, 1M to 64G
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_image_size, conflicts_with = "path")]
    pub size: u64,
    /// What the event loops stand on: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = parse_io)]
    pub io: IoChoice,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn parse_image_size(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let good = (1 << 20..=64 << 30).contains(&bytes) && bytes.is_multiple_of(512);
    if good { Ok(bytes) } else { Err("give 1M to 64G, a multiple of 512".to_owned()) }
}

/// Why there was no demonstration.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The folder or the image.
    #[error("demo: {}: {source}; set TMPDIR to a folder with room, or name a file to share", std::env::temp_dir().display())]
    Make {
        /// Why not.
        source: std::io::Error,
    },
    /// The file that was named.
    #[error("demo: {}: {source}; name a file or block device that can be read", path.display())]
    Path {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It cannot be shared. Names the path.
    #[error("demo: {0}")]
    Open(#[from] OpenError),
    /// The node.
    #[error("demo: {0}")]
    Start(#[from] StartError),
    /// The name of the volume: never.
    #[error("demo: {0}")]
    Name(#[from] VolumeNameError),
    /// The client.
    #[error("demo: {0}")]
    Remote(#[from] RemoteError),
    /// A copy.
    #[error("demo: {path}: {source}")]
    Copy {
        /// Over which path.
        path: &'static str,
        /// How it failed.
        source: CopyError,
    },
    /// Bytes changed on the way.
    #[error("demo: {path}: the checksum is {found:08x}, and the file's is {wanted:08x}; please report this")]
    Differs {
        /// Over which path.
        path: &'static str,
        /// What came.
        found: u32,
        /// What went.
        wanted: u32,
    },
    /// Standard output.
    #[error("demo: standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// One way to the bytes, measured.
#[derive(Debug, Serialize)]
struct Row {
    path: &'static str,
    bytes: u64,
    seconds: f64,
    megabytes_per_second: f64,
    /// Of both ends together, the checksum included.
    cpu_seconds_per_gigabyte: f64,
    /// By the CPUs of both ends, for each byte that was delivered.
    copied_bytes_per_byte: f64,
    crc32c: String,
}

/// Shares, copies, compares, prints.
///
/// # Errors
/// See [`DemoError`]; nothing is left behind.
pub fn run(arguments: &DemoArguments) -> Result<(), DemoError> {
    raise_limits(OPEN_FILES);
    let workplace = Workplace::new(&std::env::temp_dir(), "demo").map_err(|source| DemoError::Make { source })?;
    let path = match &arguments.path {
        Some(path) => path.clone(),
        None => workplace.make_image("image", arguments.size).map_err(|source| DemoError::Make { source })?,
    };
    let node = start(&path, &workplace, arguments.io)?;
    let mut out = crate::output::stdout();
    if !arguments.json {
        let what = if arguments.path.is_some() { path.display().to_string() } else { "a new file".to_owned() };
        writeln!(out, "A node on this machine shares {what} (read-only) as the volume `demo`. Copied out of it:\n")?;
        writeln!(out, "{:<28} {:>10} {:>12} {:>14}", "path", "MB/s", "CPU s/GB", "copies/byte")?;
    }
    let rows = measure(&path, &node, arguments, &mut out);
    node.stop(STOP_LIMIT);
    let rows = rows?;
    if arguments.json {
        writeln!(out, "{}", serde_json::json!(rows))?;
    } else {
        explain(&mut out, &rows, arguments.path.as_deref())?;
    }
    Ok(())
}

fn start(path: &Path, workplace: &Workplace, io: IoChoice) -> Result<Node, DemoError> {
    let mut spec = VolumeSpec::new(VolumeName::new("demo")?, StoreSpec::Path(path.to_owned()));
    spec.read_only = true;
    // Copied and compared, whatever it is.
    spec.raw = true;
    let volume = open_volume(&spec, &OpenHere)?;
    let loopback = Address::Tcp(([127, 0, 0, 1], 0).into());
    // The socket's file goes with the folder.
    let listen = |address| listening::open(&address, SocketAccess::default(), &mut Vec::new());
    let options = NodeOptions {
        io,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        frame_bytes: FRAME_BYTES,
        volumes: vec![Arc::new(volume)],
        native: vec![listen(loopback.clone())?],
        nbd: vec![listen(loopback)?, listen(Address::Unix(workplace.folder().join("nbd")))?],
        nbd_options: NbdOptions::default(),
        tls: ServerTls::Off,
        allow: Vec::new(),
        slow_us: u64::MAX,
        measuring: Measuring::default(),
        // What it measures fails then, and says so.
        on_failure: Arc::new(|| ()),
    };
    Ok(Node::start(options)?)
}

/// The paths to the bytes: the file itself, then over each wire.
fn paths(node: &Node) -> Result<Vec<(&'static str, Option<RemoteUri>)>, RemoteError> {
    let mut paths = vec![("the file itself", None)];
    for ready in node.ready() {
        let (path, uri) = match (ready.door, &ready.address) {
            ("byway", Address::Tcp(at)) => ("byway's own wire, TCP", format!("byway://{at}/demo")),
            ("nbd", Address::Tcp(at)) => ("NBD, TCP", format!("nbd://{at}/demo")),
            ("nbd", Address::Unix(at)) => ("NBD, unix socket", format!("nbd+unix:///demo?socket={}", at.display())),
            _ => continue,
        };
        paths.push((path, Some(uri.parse()?)));
    }
    Ok(paths)
}

fn measure(file: &Path, node: &Node, arguments: &DemoArguments, out: &mut impl Write) -> Result<Vec<Row>, DemoError> {
    let mut rows: Vec<Row> = Vec::new();
    let mut wanted = None;
    for (path, uri) in paths(node)? {
        let (row, crc32c) = measure_one(path, file, uri.as_ref(), node, arguments.io)?;
        let wanted = *wanted.get_or_insert(crc32c);
        if crc32c != wanted {
            return Err(DemoError::Differs { path, found: crc32c, wanted });
        }
        if !arguments.json {
            let Row { megabytes_per_second, cpu_seconds_per_gigabyte, copied_bytes_per_byte, .. } = row;
            writeln!(
                out,
                "{path:<28} {megabytes_per_second:>10.0} {cpu_seconds_per_gigabyte:>12.3} {copied_bytes_per_byte:>14.2}"
            )?;
            out.flush()?;
        }
        rows.push(row);
    }
    Ok(rows)
}

fn measure_one(
    path: &'static str,
    file: &Path,
    uri: Option<&RemoteUri>,
    node: &Node,
    io: IoChoice,
) -> Result<(Row, u32), DemoError> {
    let mut reactor = Reactor::open(io, FRAME_BYTES).map_err(RemoteError::Loop)?;
    let Some(uri) = uri else {
        let failed = |source| DemoError::Path { path: file.to_owned(), source };
        let mut source = FileEndpoint::source(&mut reactor, file, CLASS).map_err(failed)?;
        return measure_copy(path, &mut reactor, &mut source, node);
    };
    let tls = &ClientTlsArguments::default();
    let options = RemoteOptions { class: CLASS, connections: 2, read_only: true, tls, unflushed_bytes_max: 1 << 20 };
    let mut volume = Remote::connect(&mut reactor, uri, options)?;
    remote::open(&mut reactor, &mut [&mut volume])?;
    let info = volume.info().ok_or_else(|| RemoteError::Silent(uri.to_string()))?;
    let mut source = RemoteEndpoint::new(volume, info, false);
    let measured = measure_copy(path, &mut reactor, &mut source, node);
    remote::close(&mut reactor, &mut [source.remote()]);
    measured
}

fn measure_copy(
    path: &'static str,
    reactor: &mut Reactor,
    source: &mut dyn Endpoint,
    node: &Node,
) -> Result<(Row, u32), DemoError> {
    let mut sink = Sink::new(source.bytes());
    let copied_before = reactor.counters().copied_bytes() + node.report().snapshot().counters.copied_bytes();
    let (began, cpu) = (reactor.now(), own_cpu());
    let copied = copy(reactor, source, &mut sink, OPTIONS, None, &mut |_| ControlFlow::Continue(()));
    let copied = copied.map_err(|source| DemoError::Copy { path, source })?;
    let (seconds, cpu) = (reactor.now().since(began).as_secs_f64(), own_cpu().saturating_sub(cpu).as_secs_f64());
    let by_cpus = reactor.counters().copied_bytes() + node.report().snapshot().counters.copied_bytes() - copied_before;
    // A file of holes alone moves nothing.
    let bytes = copied.moved_bytes.max(1) as f64;
    let row = Row {
        path,
        bytes: copied.moved_bytes,
        seconds,
        megabytes_per_second: bytes / seconds.max(1e-9) / 1e6,
        cpu_seconds_per_gigabyte: cpu / (bytes / 1e9),
        copied_bytes_per_byte: by_cpus as f64 / bytes,
        crc32c: format!("{:08x}", copied.crc32c),
    };
    Ok((row, copied.crc32c))
}

/// CPU time of this process, user and system: of both ends.
fn own_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn explain(out: &mut impl Write, rows: &[Row], path: Option<&Path>) -> std::io::Result<()> {
    let (bytes, crc) = rows.first().map_or((0, ""), |row| (row.bytes, row.crc32c.as_str()));
    writeln!(
        out,
        "\n{} each time, into memory; the checksums are the same (crc32c {crc}). CPU is that of server and client\n\
         together, checksum included. Copies are those that CPUs made for a byte, in the kernels of both ends.\n",
        show_size(bytes)
    )?;
    let disk = path.map_or_else(|| "disk.img".to_owned(), |path| path.display().to_string());
    writeln!(out, "Try the rest:")?;
    if path.is_none() {
        writeln!(out, "  truncate -s 1G disk.img")?;
    }
    let ro = if path.is_some() { ",ro" } else { "" };
    // As it was called: `cargo run` does not put it into the path.
    let byway = std::env::args().next().unwrap_or_else(|| "byway".to_owned());
    let lines = [
        format!("{byway} serve --volume 'disk={disk}{ro}' --listen tcp://127.0.0.1 --nbd tcp://127.0.0.1"),
        format!("{byway} ls byway://127.0.0.1"),
        format!("{byway} info nbd://127.0.0.1/disk"),
        format!("{byway} copy byway://127.0.0.1/disk copy.img --verify"),
        format!("{byway} bench volume byway://127.0.0.1/disk --rw randread --depth 32"),
        "qemu-img info nbd://127.0.0.1/disk          (or nbdcopy, nbd-client, fio, nbdfuse, ...)".to_owned(),
        format!("{byway} doctor"),
    ];
    lines.iter().try_for_each(|line| writeln!(out, "  {line}"))
}
