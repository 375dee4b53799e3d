//! `byway demo`: a node, its wires and their cost on one machine, without any set-up; and a node that is killed while it is
//! copied from; a mounted folder; memory that a node lends; and processes that share memory.

mod far;
mod mount;
mod restart;
mod rounds;
mod shared;
mod sink;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use byway_bench::Workplace;
use byway_fabric::tls::ServerTls;
use byway_frontend::far_memory::FarMemoryError;
use byway_frontend::nbd::server::NbdOptions;
use byway_reactor::socket_file::SocketAccess;
use byway_reactor::{Address, IoChoice, Reactor};
use byway_service::block::spec::{StoreSpec, VolumeName, VolumeNameError, VolumeSpec};
use byway_service::block::{OpenError, OpenHere};
use clap::Args;
use serde::Serialize;

use self::far::FarShown;
use self::mount::MountShown;
use self::restart::Restart;
use self::rounds::Row;
use self::shared::{SharedError, SharedShown};
use crate::confinement::raise_limits;
use crate::copy::{CopyError, Endpoint, FileEndpoint, RemoteEndpoint};
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
/// How long the node may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Open files of a node with a handful of connections.
const OPEN_FILES: u64 = 1024;

/// The flags of `byway demo`.
#[derive(Args, Debug)]
pub struct DemoArguments {
    /// File or block device to serve, opened read-only [default: a temporary file of --size]
    pub path: Option<PathBuf>,
    /// Size of the temporary file, 1M to 64G
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_image_size, conflicts_with = "path")]
    pub size: u64,
    /// Kernel interface of the event loops: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = byway_remote::parse_io)]
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
    /// The node that is killed.
    #[error("demo: a second node: {0}; its messages are above")]
    Child(std::io::Error),
    /// Far memory.
    #[error("demo: memory that a node lends: {0}")]
    Far(FarMemoryError),
    /// A page of it changed.
    #[error("demo: page {page} of far memory came back with other bytes than were written; please report this")]
    FarDiffers {
        /// Which, from 0.
        page: usize,
    },
    /// Shared memory.
    #[error("demo: shared memory: {0}")]
    Shared(#[from] SharedError),
    /// Its loads and stores gave something else than one process has.
    #[error("demo: processes that share memory have another result than one process; please report this")]
    SharedDiffers,
    /// The mount of a shared folder.
    #[error("demo: the mount of a shared folder: {0}")]
    Mount(crate::mount::CommandError),
    /// A call on it.
    #[error("demo: a file of a mount: {0}")]
    MountUse(std::io::Error),
    /// A file changed.
    #[error("demo: file {file} of a mount has other bytes than were written; please report this")]
    MountDiffers {
        /// Which, from 0.
        file: usize,
    },
    /// A copy.
    #[error("demo: {path}: {source}")]
    Copy {
        /// Over which path.
        path: &'static str,
        /// How it failed.
        source: CopyError,
    },
    /// Bytes changed on the way.
    #[error(
        "demo: {path}: the checksum is {found:08x}, and the file's is {wanted:08x}; if nothing has written to it meanwhile, please \
         report this"
    )]
    Differs {
        /// Over which path.
        path: &'static str,
        /// What came.
        found: u32,
        /// What went.
        wanted: u32,
    },
    /// The copies are of different states of the file.
    #[error("demo: {} was written to while it was copied; name a file or block device that nothing writes to", path.display())]
    Written {
        /// Which.
        path: PathBuf,
    },
    /// Standard output.
    #[error("demo: standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// What a demonstration shows.
#[derive(Debug, Serialize)]
struct Shown {
    rows: Vec<Row>,
    restart: Restart,
    mount: MountShown,
    far: FarShown,
    shared: SharedShown,
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
    let before = identity(&path, arguments.io)?;
    match demonstrate(arguments, &path, &workplace) {
        Err(DemoError::Differs { .. } | DemoError::Copy { source: CopyError::Changed, .. })
            if identity(&path, arguments.io)? != before =>
        {
            Err(DemoError::Written { path })
        }
        shown => shown,
    }
}

/// Names the file at a path and its state, as far as its metadata tell it.
fn identity(path: &Path, io: IoChoice) -> Result<String, DemoError> {
    let mut reactor = Reactor::open(io, 1).map_err(RemoteError::Loop)?;
    let failed = |source| DemoError::Path { path: path.to_owned(), source };
    Ok(FileEndpoint::source(&mut reactor, path, CLASS).map_err(failed)?.identity())
}

fn demonstrate(arguments: &DemoArguments, path: &Path, workplace: &Workplace) -> Result<(), DemoError> {
    let spec = volume(path)?;
    let node = start(&spec, workplace, arguments.io)?;
    let mut out = crate::output::stdout();
    if !arguments.json {
        let what = if arguments.path.is_some() { path.display().to_string() } else { "a new file".to_owned() };
        writeln!(out, "A node on this machine shares {what} (read-only) as the volume `demo`. Copied out of it:\n")?;
        out.flush()?;
    }
    let rows = rounds::measure(path, &node, arguments.io);
    node.stop(STOP_LIMIT);
    let rows = rows?;
    if !arguments.json {
        show(&mut out, &rows)?;
    }
    let (bytes, wanted) = rows.first().map_or((0, 0), |row| (row.bytes, row.crc32c));
    let restart = restart::show(&spec, workplace.folder(), arguments.io, bytes, wanted)?;
    let mount = mount::show(workplace.folder(), arguments.io)?;
    let far = far::show(workplace.folder(), arguments.io)?;
    let shared = shared::show()?;
    if arguments.json {
        writeln!(out, "{}", serde_json::json!(Shown { rows, restart, mount, far, shared }))?;
    } else {
        let sentences = [restart.sentence(), mount.sentence(), far.sentence(), shared.sentence()];
        writeln!(out, "{}\n", sentences.join("\n\n"))?;
        explain(&mut out, arguments.path.as_deref())?;
    }
    Ok(())
}

fn volume(path: &Path) -> Result<VolumeSpec, DemoError> {
    let mut spec = VolumeSpec::new(VolumeName::new("demo")?, StoreSpec::Path(path.to_owned()));
    spec.read_only = true;
    // Copied and compared, whatever it is.
    spec.raw = true;
    Ok(spec)
}

fn start(spec: &VolumeSpec, workplace: &Workplace, io: IoChoice) -> Result<Node, DemoError> {
    let volume = open_volume(spec, &OpenHere)?;
    let loopback = Address::Tcp(([127, 0, 0, 1], 0).into());
    // The socket's file goes with the folder.
    let listen = |address| listening::open(&address, SocketAccess::default(), &mut Vec::new());
    let options = NodeOptions {
        io,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        frame_bytes: FRAME_BYTES,
        lending: None,
        volumes: vec![Arc::new(volume)],
        shares: Vec::new(),
        native: vec![listen(loopback.clone())?, listen(Address::Shared(workplace.folder().join("shm")))?],
        nbd: vec![listen(loopback)?, listen(Address::Unix(workplace.folder().join("nbd")))?],
        nbd_options: NbdOptions::default(),
        tls: ServerTls::Off,
        allow: Vec::new(),
        slow_us: u64::MAX,
        boot: None,
        measuring: Measuring::default(),
        // What it measures fails then, and says so.
        on_failure: Arc::new(|| ()),
    };
    Ok(Node::start(options)?)
}

/// Opens a volume to be copied out of.
fn open_remote(reactor: &mut Reactor, uri: &RemoteUri) -> Result<RemoteEndpoint, RemoteError> {
    let tls = &ClientTlsArguments::default();
    let options = RemoteOptions { class: CLASS, connections: 2, read_only: true, tls, unflushed_bytes_max: 1 << 20 };
    let mut volume = Remote::connect(reactor, uri, options)?;
    remote::open(reactor, &mut [&mut volume])?;
    let info = volume.info().ok_or_else(|| RemoteError::Silent(uri.to_string()))?;
    Ok(RemoteEndpoint::new(volume, info, false))
}

/// The table.
fn show(out: &mut impl Write, rows: &[Row]) -> std::io::Result<()> {
    writeln!(out, "{:<36} {:>10} {:>12} {:>14}", "path", "MB/s", "CPU s/GB", "copies/byte")?;
    for Row { path, megabytes_per_second, cpu_seconds_per_gigabyte, copied_bytes_per_byte, .. } in rows {
        writeln!(
            out,
            "{path:<36} {megabytes_per_second:>10.0} {cpu_seconds_per_gigabyte:>12.3} {copied_bytes_per_byte:>14.2}"
        )?;
    }
    let Some(Row { bytes, rounds, crc32c, .. }) = rows.first() else { return Ok(()) };
    writeln!(
        out,
        "\n{} each time, into memory; medians of {rounds} interleaved rounds; the checksums are the same (crc32c {crc32c:08x}).\n\
         CPU is that of server and client together, checksum included. Copies are those that CPUs made for a byte, at\n\
         both ends.\n",
        show_size(*bytes)
    )?;
    out.flush()
}

/// What to try next.
fn explain(out: &mut impl Write, path: Option<&Path>) -> std::io::Result<()> {
    let disk = path.map_or_else(|| "disk.img".to_owned(), |path| path.display().to_string());
    writeln!(out, "Try the rest:")?;
    if path.is_none() {
        writeln!(out, "  truncate -s 1G disk.img")?;
    }
    let ro = if path.is_some() { ",ro" } else { "" };
    // As it was called: `cargo run` does not put it into the path.
    let byway = std::env::args_os().next().unwrap_or_else(|| "byway".into());
    let byway = byway.to_string_lossy();
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
