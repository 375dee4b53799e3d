//! `cargo xtask peers`: byway beside the servers that people use today, on the same file, with the same client, in interleaved
//! rounds.
//!
//! Everything runs in a network namespace of its own, with known socket settings that are the same for all programs.

mod cases;
mod clients;
mod contest;
mod copies;
mod cpu;
mod dsm;
mod far;
mod file;
mod fio;
mod idle;
mod native;
mod nbd_device;
mod network;
mod report;
mod scale;
mod servers;
mod stub;
mod wires;

use crate::process;
use anyhow::{Context, Result, bail};
use cases::{CASES, Case};
use clap::{Args, Subcommand};
use cpu::CpuClock;
use serde::Serialize;
use servers::{Endpoint, Kind, Server};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The size of the file that is served.
const FILE_BYTES: u64 = 1 << 30;
/// How long the idle servers are watched.
const IDLE_SECONDS: u64 = 2;

#[derive(Subcommand)]
pub enum Task {
    /// Volumes: byway, nbdkit, qemu-nbd and nbd-server, with fio as the client, beside stubs that only answer.
    Block(Options),
    /// byway's own protocol beside nbdkit and iperf3, and byway copy beside nbdcopy and qemu-img.
    Native(ContestOptions),
    /// Direct volumes over byway's own protocol beside fio on the same file; `--file` on the disk to be measured.
    Direct(DirectOptions),
    /// The fabric alone beside sockets used by hand, UCX, iperf3 and a plain copy.
    Wires(WiresOptions),
    /// Few and many clients of a server with few frames, beside a program in C.
    Clients(ClientsOptions),
    /// Clients and loops: how the rate of byway's own protocol grows with both, over tcp, unix sockets and shared memory.
    Scale(ScaleOptions),
    /// Programs whose memory is far, beside plain runs and the kernel's swap; faults beside their parts. Needs root and the preload library.
    Far(DirectOptions),
    /// A mounted share beside GlusterFS, sshfs, rclone, FUSE alone and the folder itself. Needs root.
    File(FileOptions),
    /// Shared memory: faults beside their parts, programs as jobs beside threads and OpenMPI. Needs root and a C compiler.
    Dsm(ContestOptions),
    /// What idle connections cost.
    Idle(IdleOptions),
    /// A server that only answers.
    #[command(hide = true)]
    Stub(StubOptions),
}

#[derive(Args)]
pub struct ContestOptions {
    /// How often each runs; medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How long each time.
    #[arg(long, default_value_t = 3)]
    seconds: u32,
    /// Also write everything as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The byway binary; without it a release build of this workspace.
    #[arg(long)]
    byway: Option<PathBuf>,
}

#[derive(Args)]
pub struct ClientsOptions {
    /// How many; rates are also shown as shares of what is moved with the first number.
    #[arg(long, value_delimiter = ',', default_value = "16,1024", value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: Vec<u16>,
    #[command(flatten)]
    contest: ContestOptions,
}

#[derive(Args)]
pub struct ScaleOptions {
    /// Clients, each a process; by itself 1 and half of the CPUs.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: Vec<u16>,
    /// Loops of the node; by itself 1 and half of the CPUs.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=16))]
    loops: Vec<u16>,
    /// Only the cases whose name contains this, such as `tcp 64 KiB` or `durable`.
    #[arg(long)]
    only: Option<String>,
    #[command(flatten)]
    contest: ContestOptions,
}

#[derive(Args)]
pub struct DirectOptions {
    /// A file is made there, and removed: of 1 GiB to be served, or of 512 MiB to swap to.
    #[arg(long, default_value = "/var/tmp")]
    folder: PathBuf,
    #[command(flatten)]
    contest: ContestOptions,
}

#[derive(Args)]
pub struct FileOptions {
    /// The file systems, in the order in which they take turns.
    #[arg(long, value_delimiter = ',', default_value = "byway,names,gluster,sshfs,rclone,passthrough,local")]
    systems: Vec<file::FileSystem>,
    /// Only the groups whose name contains this: read, write, random, small, tar, tree, many, idle, attached, without-mount.
    #[arg(long)]
    only: Option<String>,
    #[command(flatten)]
    contest: ContestOptions,
}

#[derive(Args)]
pub struct IdleOptions {
    /// Connections.
    #[arg(long, default_value_t = 1024)]
    connections: usize,
    /// The byway binary; without it a release build of this workspace.
    #[arg(long)]
    byway: Option<PathBuf>,
}

#[derive(Args)]
pub struct WiresOptions {
    /// How often each runs; medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How long each time.
    #[arg(long, default_value_t = 1)]
    seconds: u32,
    /// Only the cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Also write everything as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Args)]
pub struct StubOptions {
    #[arg(long)]
    port: Option<u16>,
    #[arg(long)]
    unix: Option<PathBuf>,
    /// Answers with the bytes of this file, which it reads into memory first.
    #[arg(long)]
    file: Option<PathBuf>,
}

#[derive(Args)]
pub struct Options {
    /// How often each server runs each case; medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How long fio runs each time.
    #[arg(long, default_value_t = 3)]
    seconds: u32,
    /// Only the cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// The servers, in the order in which they take turns.
    #[arg(long, value_delimiter = ',', default_value = "byway,nbdkit,qemu-nbd,nbd-server,stub,stub-memory")]
    servers: Vec<Kind>,
    /// Also write everything, each round too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The byway binary; without it a release build of this workspace.
    #[arg(long)]
    byway: Option<PathBuf>,
}

/// One run of one case against one server.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub case: &'static str,
    pub server: Kind,
    pub round: usize,
    pub operations: u64,
    pub iops: f64,
    pub megabytes_per_second: f64,
    pub latency_p50_us: f64,
    pub latency_p99_us: f64,
    pub server_cpu_us_per_operation: f64,
    pub client_cpu_us_per_operation: f64,
    pub machine_cpu_us_per_operation: f64,
}

/// What a server costs while nobody asks it anything, in percent of one core.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub server: Kind,
    pub endpoint: String,
    pub cpu_percent: f64,
}

/// Runs the task, first of all in a network namespace of its own.
pub fn run(task: &Task) -> Result<()> {
    if let Task::Stub(options) = task {
        return stub::serve(options);
    }
    if !network::is_isolated() {
        return network::run_again_isolated();
    }
    let settings = network::prepare()?;
    match task {
        Task::Block(options) => block(options, settings),
        Task::Native(options) => contests(options, &settings, Path::new("/dev/shm"), native::native),
        Task::Direct(options) => contests(&options.contest, &settings, &options.folder, native::direct),
        Task::Idle(options) => watch_connections(options),
        Task::Wires(options) => compare_wires(options, &settings),
        Task::Far(options) => compare_far(options, &settings),
        Task::File(options) => compare_files(options, &settings),
        Task::Dsm(options) => compare_dsm(options, &settings),
        Task::Clients(options) => compare_clients(options, &settings),
        Task::Scale(options) => compare_scale(options, &settings),
        Task::Stub(_) => Ok(()),
    }
}

/// Runs contests: byway, the file of 1 GiB, a folder for sockets and logs, rounds, seconds.
type Contests = fn(&Path, &Path, &Path, usize, u32) -> Result<Vec<contest::Outcome>>;

fn contests(
    options: &ContestOptions,
    settings: &BTreeMap<String, String>,
    place: &Path,
    contests: Contests,
) -> Result<()> {
    let byway = provide_byway(options.byway.as_deref())?;
    let folder = process::Scratch::new(place)?;
    let file = folder.path().join("volume.img");
    write_file(&file)?;
    let outcomes = contests(&byway, &file, folder.path(), options.rounds, options.seconds)?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", contest::markdown(&outcomes));
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&outcomes)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare_wires(options: &WiresOptions, settings: &BTreeMap<String, String>) -> Result<()> {
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let outcomes = wires::run(folder.path(), options.rounds, options.seconds, options.only.as_deref())?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", wires::markdown(&outcomes));
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&outcomes)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare_far(options: &DirectOptions, settings: &BTreeMap<String, String>) -> Result<()> {
    let ContestOptions { rounds, seconds, json, byway } = &options.contest;
    if byway.is_none() {
        process::run(process::cargo().args(["build", "--release", "--package", "byway-preload"]))?;
    }
    let byway = provide_byway(byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let rows = far::run(&byway, folder.path(), &options.folder, *rounds, *seconds)?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", far::markdown(&rows));
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare_files(options: &FileOptions, settings: &BTreeMap<String, String>) -> Result<()> {
    let ContestOptions { rounds, seconds, json, byway } = &options.contest;
    let byway = provide_byway(byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let (systems, only) = (&options.systems, options.only.as_deref());
    let rows = file::run(&byway, folder.path(), &file::Plan { systems, only, rounds: *rounds, seconds: *seconds })?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", file::markdown(&rows));
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare_dsm(options: &ContestOptions, settings: &BTreeMap<String, String>) -> Result<()> {
    let byway = provide_byway(options.byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let rows = dsm::run(&byway, folder.path(), options.rounds)?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", far::markdown(&rows));
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare_clients(options: &ClientsOptions, settings: &BTreeMap<String, String>) -> Result<()> {
    let ContestOptions { rounds, seconds, json, byway } = &options.contest;
    let byway = provide_byway(byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let rows = clients::run(&byway, folder.path(), &options.clients, *rounds, *seconds)?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", clients::markdown(&rows));
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare_scale(options: &ScaleOptions, settings: &BTreeMap<String, String>) -> Result<()> {
    let ContestOptions { rounds, seconds, json, byway } = &options.contest;
    let byway = provide_byway(byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let file = folder.path().join("volume.img");
    write_file(&file)?;
    let half = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u16 / 2).clamp(1, 16);
    let or_default = |given: &[u16]| {
        let mut numbers = if given.is_empty() { vec![1, half] } else { given.to_vec() };
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    };
    let (clients, loops) = (or_default(&options.clients), or_default(&options.loops));
    let disk = process::Scratch::new(Path::new("/var/tmp"))?;
    let places = scale::Places { file: &file, folder: folder.path(), disk: disk.path() };
    let (only, rounds, seconds) = (options.only.as_deref(), *rounds, *seconds);
    let plan = scale::Plan { clients: &clients, loops: &loops, only, rounds, seconds };
    let rows = scale::run(&byway, places, plan)?;
    for (name, value) in settings {
        println!("- {name}: {value}");
    }
    print!("\n{}", scale::markdown(&rows));
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn watch_connections(options: &IdleOptions) -> Result<()> {
    let byway = provide_byway(options.byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let file = folder.path().join("volume.img");
    std::fs::File::create(&file)?.set_len(FILE_BYTES)?;
    let (port, native) = (Kind::Byway.port(), native::PORT);
    {
        let servers = Server::start(Kind::Byway, &byway, &file, folder.path(), &[Endpoint::Tcp(port)])?;
        for server in &servers {
            println!("{}", idle::nbd(server.id(), port, options.connections)?);
        }
    }
    let node = native::start_node(&byway, &format!("v={}", file.display()), folder.path())?;
    println!("{}", idle::native(node.id(), native, options.connections)?);
    Ok(())
}

fn block(options: &Options, settings: BTreeMap<String, String>) -> Result<()> {
    let cases: Vec<&Case> = CASES
        .iter()
        .filter(|case| options.only.as_ref().is_none_or(|part| case.name.contains(part.as_str())))
        .collect();
    if cases.is_empty() || options.rounds == 0 {
        let names: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        bail!("nothing to measure: the cases are {}", names.join(", "));
    }
    let byway = provide_byway(options.byway.as_deref())?;
    let folder = process::Scratch::new(Path::new("/dev/shm"))?;
    let file = folder.path().join("volume.img");
    write_file(&file)?;
    let mut servers = Vec::new();
    for kind in &options.servers {
        match kind.find(&byway) {
            Some(program) => {
                let unix = Endpoint::Unix(folder.path().join(format!("{kind}.sock")));
                let endpoints = [unix, Endpoint::Tcp(kind.port())];
                servers.extend(Server::start(*kind, &program, &file, folder.path(), &endpoints)?);
            }
            None => println!("SKIP {kind}: it is not installed (cargo xtask test --install)"),
        }
    }
    let samples = measure(&cases, &servers, options)?;
    let idle = watch_idle(&servers)?;
    let report = report::Report::new(settings, &cases, samples, idle);
    print!("{}", report.markdown());
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn provide_byway(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return path.canonicalize().with_context(|| format!("cannot find {}", path.display()));
    }
    process::run(process::cargo().args(["build", "--release", "--package", "byway"]))?;
    Ok(process::target_directory()?.join("release/byway"))
}

/// Bytes that no server can mistake for a hole.
fn write_file(path: &Path) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    let mut block = vec![0; 1 << 20];
    for number in 0..FILE_BYTES >> 20 {
        for (index, byte) in block.iter_mut().enumerate() {
            *byte = (index as u64 * 31 + number * 7 + 1) as u8;
        }
        file.write_all(&block).context("the file on /dev/shm needs 1 GiB")?;
    }
    Ok(())
}

fn measure(cases: &[&Case], servers: &[Server], options: &Options) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for round in 1..=options.rounds {
        for case in cases {
            for server in servers.iter().filter(|server| server.endpoint.transport() == case.transport) {
                let sample = measure_one(case, server, round, options.seconds)?;
                eprintln!(
                    "round {round}: {:<22} {:<10} {:>9.0} IOPS {:>7.0} MB/s",
                    case.name,
                    server.kind.to_string(),
                    sample.iops,
                    sample.megabytes_per_second
                );
                samples.push(sample);
            }
        }
    }
    Ok(samples)
}

fn measure_one(case: &Case, server: &Server, round: usize, seconds: u32) -> Result<Sample> {
    let machine = CpuClock::machine()?;
    let own = CpuClock::children()?;
    let before = CpuClock::processes(server.id())?;
    let result = fio::run(case, &server.endpoint.uri(), seconds)?;
    let server_us = CpuClock::processes(server.id())?.microseconds_since(&before);
    let client_us = CpuClock::children()?.microseconds_since(&own);
    let machine_us = CpuClock::machine()?.microseconds_since(&machine);
    let per_operation = |microseconds: f64| microseconds / result.operations.max(1) as f64;
    Ok(Sample {
        case: case.name,
        server: server.kind,
        round,
        operations: result.operations,
        iops: result.iops,
        megabytes_per_second: result.bytes_per_second / 1e6,
        latency_p50_us: result.latency_p50_us,
        latency_p99_us: result.latency_p99_us,
        server_cpu_us_per_operation: per_operation(server_us),
        client_cpu_us_per_operation: per_operation(client_us),
        machine_cpu_us_per_operation: per_operation(machine_us),
    })
}

fn watch_idle(servers: &[Server]) -> Result<Vec<Idle>> {
    let before = servers.iter().map(|server| CpuClock::processes(server.id())).collect::<Result<Vec<CpuClock>>>()?;
    process::pause(Duration::from_secs(IDLE_SECONDS));
    servers
        .iter()
        .zip(before)
        .map(|(server, before)| {
            let spent_us = CpuClock::processes(server.id())?.microseconds_since(&before);
            Ok(Idle {
                server: server.kind,
                endpoint: server.endpoint.transport().to_string(),
                cpu_percent: spent_us / (IDLE_SECONDS as f64 * 1e6) * 100.0,
            })
        })
        .collect()
}
