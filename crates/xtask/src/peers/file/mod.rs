//! `peers file`: a mounted share beside other file systems over the network, FUSE alone, and the folder itself.
//!
//! All folders are on one tmpfs. A figure of a cold client is taken after a new mount: the client has nothing, the server's files are in
//! memory.

mod attached;
mod report;
mod systems;
mod without_mount;
mod work;

use crate::process;
use anyhow::{Context, Result};
use report::{Sample, Unit};
use std::path::{Path, PathBuf};
use std::process::Command;
use systems::{Mount, Places, Server, System};
use work::Small;

pub use report::{Row, markdown, rows};

/// The file that is read.
pub const BIG: &str = "big";
const WRITTEN_MIB: usize = 1024;
const SMALL_FILES: u64 = 5000;
/// Clients that read one file at once: the target relates the second number to the first.
const MANY: [usize; 2] = [4, 64];
const IDLE_SECONDS: u32 = 10;

/// What to measure.
pub struct Plan<'a> {
    pub systems: &'a [System],
    /// Only groups whose name contains this.
    pub only: Option<&'a str>,
    pub rounds: usize,
    pub seconds: u32,
}

pub use systems::System as FileSystem;

type Group = (&'static str, fn(&Server<'_>, &Bench<'_>) -> Result<Vec<Sample>>);

/// Groups of figures, each taken from every system in turn.
const GROUPS: [Group; 8] = [
    ("read", reads),
    ("write", writes),
    ("random", random_reads),
    ("small", small_files),
    ("tar", unpack),
    ("tree", tree),
    ("many", many_clients),
    ("idle", idle),
];

type OwnGroup = (&'static str, fn(&Places, u32) -> Result<Vec<Sample>>);

/// Groups of figures that start servers of their own.
const OF_BYWAY: [OwnGroup; 2] = [("attached", attached::run), ("without-mount", without_mount::run)];

struct Bench<'a> {
    seconds: u32,
    archive: Option<&'a Path>,
}

/// Measures everything in turns.
pub fn run(byway: &Path, folder: &Path, plan: &Plan<'_>) -> Result<Vec<Row>> {
    // Not in the folder of the data: a mount that is left is not emptied with it.
    let run = process::Scratch::new(&std::env::temp_dir())?;
    let places = Places {
        byway: byway.to_owned(),
        passthrough: passthrough(byway)?,
        data: folder.to_owned(),
        run: run.path().to_owned(),
    };
    let big = folder.join(BIG);
    super::write_file(&big)?;
    let (source, archive) = (folder.join("source"), folder.join("source.tar"));
    let archive = work::source_tree(&source, &archive)?.map(|()| archive.as_path());
    if archive.is_none() {
        println!("SKIP tar, tree: this is no git repository, or git is not installed");
    }
    let mut servers = Vec::new();
    for system in plan.systems {
        let folder = systems::folder_for(*system, &places)?;
        std::fs::hard_link(&big, folder.join(BIG))?;
        if archive.is_some() {
            process::output(Command::new("cp").arg("-a").arg(&source).arg(folder.join("tree")))?;
        }
        servers.extend(Server::start(*system, &places)?);
    }
    let bench = Bench { seconds: plan.seconds, archive };
    let groups = GROUPS.iter().filter(|(name, _)| plan.only.is_none_or(|part| name.contains(part)));
    let groups: Vec<&Group> = groups.collect();
    let mut samples = Vec::new();
    let of_byway: Vec<_> =
        OF_BYWAY.iter().filter(|(name, _)| plan.only.is_none_or(|part| name.contains(part))).collect();
    for round in 1..=plan.rounds {
        for (name, group) in of_byway.iter().filter(|_| plan.systems.contains(&System::Byway)) {
            let figures = group(&places, plan.seconds).context(*name)?;
            samples.extend(figures.into_iter().inspect(|one| eprintln!("round {round}: {one}")));
        }
        for (name, group) in &groups {
            for server in &servers {
                match group(server, &bench).with_context(|| format!("{name}: {}", server.system)) {
                    Ok(figures) => samples.extend(figures.into_iter().inspect(|one| eprintln!("round {round}: {one}"))),
                    // The others' figures count also without this one.
                    Err(error) => eprintln!("FAILED {error:#}"),
                }
            }
        }
    }
    Ok(rows(&samples))
}

/// byway's FUSE codec over a folder, built beside byway.
fn passthrough(byway: &Path) -> Result<PathBuf> {
    let program = byway.with_file_name("examples").join("fuse_passthrough");
    if !program.is_file() {
        let build = ["build", "--release", "--package", "byway-frontend", "--example", "fuse_passthrough"];
        process::run(process::cargo().args(build))?;
        return Ok(process::target_directory()?.join("release/examples/fuse_passthrough"));
    }
    Ok(program)
}

/// A rate of work on a mount, and the CPU time that client and server used for each of `operations`.
fn with_cpu(
    mount: &Mount<'_>,
    case: &'static str,
    unit: Unit,
    operations: f64,
    work: impl FnOnce() -> Result<f64>,
) -> Result<Sample> {
    let before = mount.cpu()?;
    let value = work()?;
    let after = mount.cpu()?;
    let spent = |side: usize| Some(after[side]?.microseconds_since(&before[side]?) / operations);
    let (client_cpu_us, server_cpu_us) = (spent(0), spent(1));
    Ok(Sample { client_cpu_us, server_cpu_us, ..Sample::new(case, mount.server.system, value, unit) })
}

fn reads(server: &Server<'_>, _: &Bench<'_>) -> Result<Vec<Sample>> {
    let mount = server.mount()?;
    let big = mount.at.join(BIG);
    let mebibytes = (std::fs::metadata(&big)?.len() >> 20) as f64;
    let first = with_cpu(&mount, "1 GiB read, cold", Unit::Megabytes, mebibytes, || work::read(&big))?;
    let messages = mount.messages();
    let again = with_cpu(&mount, "1 GiB read again", Unit::Megabytes, mebibytes, || work::read(&big))?;
    let other = ["dd", "if=big", "of=/dev/null", "bs=1M", "status=none"];
    let seconds = work::program(&other, &mount.at)?;
    let mut samples = vec![first, again];
    samples.push(Sample::new("1 GiB read by dd", server.system, mebibytes * 1.048_576 / seconds, Unit::Megabytes));
    samples.extend(messages_since(&mount, messages, "messages of further reads"));
    Ok(samples)
}

fn messages_since(mount: &Mount<'_>, before: Option<u64>, case: &'static str) -> Option<Sample> {
    let count = mount.messages()? - before?;
    Some(Sample::new(case, mount.server.system, count as f64, Unit::Messages))
}

fn writes(server: &Server<'_>, _: &Bench<'_>) -> Result<Vec<Sample>> {
    let mount = server.mount()?;
    let path = mount.at.join("written");
    let sample = with_cpu(&mount, "1 GiB write + fsync", Unit::Megabytes, WRITTEN_MIB as f64, || {
        work::write(&path, WRITTEN_MIB)
    });
    std::fs::remove_file(&path)?;
    Ok(vec![sample?])
}

fn random_reads(server: &Server<'_>, bench: &Bench<'_>) -> Result<Vec<Sample>> {
    let cases = [
        (1, "4 KiB random read, 1 thread", "4 KiB random read, 1 thread: p50"),
        (16, "4 KiB random read, 16 threads", "4 KiB random read, 16 threads: p50"),
    ];
    let mut samples = Vec::new();
    for (threads, case, latency) in cases {
        let mount = server.mount()?;
        let (rate, p50) = work::read_at_random(&mount.at.join(BIG), threads, bench.seconds)?;
        samples.push(Sample::new(case, server.system, rate, Unit::PerSecond));
        samples.push(Sample::new(latency, server.system, p50, Unit::Microseconds));
    }
    Ok(samples)
}

fn small_files(server: &Server<'_>, _: &Bench<'_>) -> Result<Vec<Sample>> {
    let cases = [
        (Small::Create, ["create, 1 thread", "create, 8 threads"]),
        (Small::Stat, ["stat, 1 thread", "stat, 8 threads"]),
        (Small::Read, ["open-read-close, 1 thread", "open-read-close, 8 threads"]),
        (Small::Remove, ["remove, 1 thread", "remove, 8 threads"]),
    ];
    let mut samples = Vec::new();
    for (at, threads) in [1, 8].into_iter().enumerate() {
        std::fs::create_dir_all(server.folder.join("small"))?;
        for (what, names) in cases {
            // Each begins without anything that the one before has learnt.
            let mount = server.mount()?;
            let work = || work::small_files(&mount.at.join("small"), what, SMALL_FILES, threads);
            samples.push(with_cpu(&mount, names[at], Unit::PerSecond, SMALL_FILES as f64, work)?);
        }
    }
    Ok(samples)
}

fn unpack(server: &Server<'_>, bench: &Bench<'_>) -> Result<Vec<Sample>> {
    let Some(archive) = bench.archive else { return Ok(Vec::new()) };
    let mount = server.mount()?;
    let into = mount.at.join("unpacked");
    std::fs::create_dir(&into)?;
    let seconds = work::program(&["tar", "-xf", &archive.display().to_string()], &into);
    std::fs::remove_dir_all(&into)?;
    Ok(vec![Sample::new("tar x of a source tree", server.system, seconds?, Unit::Seconds)])
}

fn tree(server: &Server<'_>, bench: &Bench<'_>) -> Result<Vec<Sample>> {
    if bench.archive.is_none() {
        return Ok(Vec::new());
    }
    let mount = server.mount()?;
    let tree = mount.at.join("tree");
    // It writes its index: the inode numbers are new. What follows writes nothing.
    work::program(&["git", "status", "--short"], &tree)?;
    let cases = [
        ("git status, warm", &["git", "--no-optional-locks", "status", "--short"][..]),
        ("find, warm", &["find", ".", "-type", "f"]),
        ("ls -lR, warm", &["ls", "-lR"]),
    ];
    let mut samples = Vec::new();
    for (case, words) in cases {
        work::program(words, &tree)?;
        let messages = mount.messages();
        samples.push(Sample::new(case, server.system, work::program(words, &tree)?, Unit::Seconds));
        samples.extend(messages_since(&mount, messages, "messages of a warm git status, find or ls"));
    }
    Ok(samples)
}

fn many_clients(server: &Server<'_>, bench: &Bench<'_>) -> Result<Vec<Sample>> {
    // What is asked relates byway to itself.
    if server.system != System::Byway {
        return Ok(Vec::new());
    }
    let mut samples = Vec::new();
    for (clients, case) in MANY.into_iter().zip(["4 clients read one file", "64 clients read one file"]) {
        let mounts: Vec<Mount<'_>> =
            (0..clients).map(|number| server.mount_at(&format!("client-{number}"))).collect::<Result<_>>()?;
        let files: Vec<PathBuf> = mounts.iter().map(|mount| mount.at.join(BIG)).collect();
        samples.push(Sample::new(case, server.system, work::read_by_many(&files, bench.seconds)?, Unit::Megabytes));
    }
    Ok(samples)
}

fn idle(server: &Server<'_>, _: &Bench<'_>) -> Result<Vec<Sample>> {
    if matches!(server.system, System::Local | System::Passthrough) {
        return Ok(Vec::new());
    }
    let mount = server.mount()?;
    work::program(&["ls", "-lR"], &mount.at)?;
    let (before, messages) = (mount.cpu()?, mount.messages());
    process::pause(std::time::Duration::from_secs(IDLE_SECONDS.into()));
    let after = mount.cpu()?;
    let spent = (0..2).filter_map(|side| Some(after[side]?.microseconds_since(&before[side]?))).sum::<f64>();
    let percent = spent / (f64::from(IDLE_SECONDS) * 1e6) * 100.0;
    let mut samples = vec![Sample::new("idle, both ends", server.system, percent, Unit::PercentOfCore)];
    samples.extend(messages_since(&mount, messages, "messages of an idle mount"));
    Ok(samples)
}
