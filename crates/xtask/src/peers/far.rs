//! `peers far`: programs with far memory, beside the same programs with all of their memory and beside the kernel's swap; and
//! faults beside the operations that they consist of.

mod programs;
mod stores;
mod swap;

use super::report::median;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use programs::BLOCKS;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stores::Store;

const TOUCHES: &str = include_str!("far.c");
const PORT: u16 = 4712;
/// Memory of the program that touches pages, in MiB, and what of it may be here.
const TOUCHED_MIB: &str = "128";
const TOUCHED_LIMIT: &str = "64M";

/// A figure: the median of the rounds.
#[derive(Debug, Serialize)]
pub struct Row {
    pub(super) case: &'static str,
    pub(super) who: String,
    /// Where far pages are kept; empty where there are none, or where it makes no difference.
    pub(super) class: &'static str,
    pub(super) value: f64,
    pub(super) unit: &'static str,
    /// What is asked, and whether it is met.
    pub(super) target: Option<(String, bool)>,
}

/// Where pages are kept: at a lender, or there and in a file.
const CLASSES: [&str; 2] = ["none", "disk"];

/// What measures: the programs, and a node that lends memory and has a volume.
struct Bench<'a> {
    byway: &'a Path,
    touches: PathBuf,
    uris: [(&'static str, String); 2],
    /// For the file of class disk.
    spill: &'a Path,
    seconds: u32,
}

/// Measures all, in turns.
pub fn run(byway: &Path, folder: &Path, disk: &Path, rounds: usize, seconds: u32) -> Result<Vec<Row>> {
    let library = byway.with_file_name("libbyway_preload.so");
    if !library.is_file() {
        bail!("no {}: run `cargo build --release -p byway-preload`", library.display());
    }
    let touches = folder.join("far");
    std::fs::write(folder.join("far.c"), TOUCHES)?;
    let mut compiler = Command::new("cc");
    process::output(compiler.args(["-O2", "-pthread", "-o"]).arg(&touches).arg(folder.join("far.c")))
        .context("a C compiler")?;
    let (tcp, shm) = (format!("tcp://127.0.0.1:{PORT}"), format!("shm://{}", folder.join("shm").display()));
    let flags = [
        "serve",
        "--threads",
        "1",
        "--lend",
        "1G,guard=0",
        "--volume",
        "v=mem:64M",
        "--listen",
        &tcp,
        "--listen",
        &shm,
    ];
    let _node = Background::start(Command::new(byway).args(flags), &folder.join("far.log"))?;
    process::wait_for("the lender", Duration::from_secs(10), || {
        Ok(std::net::TcpStream::connect(("127.0.0.1", PORT)).is_ok().then_some(()))
    })?;
    let socket = folder.join("shm").display().to_string();
    let uris = [("tcp", format!("byway://127.0.0.1:{PORT}")), ("shm", format!("byway+shm:///?socket={socket}"))];
    let bench = Bench { byway, touches, uris, spill: disk, seconds };
    let mut rows = bench.faults(rounds)?;
    rows.extend(bench.stores(folder, rounds)?);
    rows.extend(bench.writes(rounds)?);
    rows.extend(bench.scans(rounds)?);
    rows.extend(bench.threads(rounds)?);
    let swaps = swap::available(disk, folder);
    for program in programs::all(folder)? {
        rows.extend(bench.program(&program, swaps.as_ref(), rounds)?);
    }
    rows.extend(bench.what_fits(rounds)?);
    Ok(rows)
}

impl Bench<'_> {
    fn faults(&self, rounds: usize) -> Result<Vec<Row>> {
        let (mut local, mut reads, mut faults) = (Vec::new(), [Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let mut slow = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            local.push(numbers(Command::new(&self.touches).arg("local"))?.0);
            for (at, (_, uri)) in self.uris.iter().enumerate() {
                reads[at].push(self.volume(uri, "4K", "1")?.0);
                let (p50, p99) = self.touch(uri, "none", "faults", "1")?;
                faults[at].push(p50);
                slow[at].push(p99);
            }
        }
        let local = median(local);
        let mut rows = vec![row("fault", "in this process, by MOVE", local, "us p50")];
        for (at, (wire, _)) in self.uris.iter().enumerate() {
            let (read, fault) = (median(std::mem::take(&mut reads[at])), median(std::mem::take(&mut faults[at])));
            let slow = median(std::mem::take(&mut slow[at]));
            rows.push(row("fault", &format!("read of 4 KiB, {wire}"), read, "us p50"));
            let asked = format!("{:.2} of the sum of both, <= 1.25", fault / (local + read));
            rows.push(Row {
                target: Some((asked, fault <= 1.25 * (local + read))),
                ..row("fault", wire, fault, "us p50")
            });
            let asked = format!("{:.1} of p50, <= 3", slow / fault);
            rows.push(Row { target: Some((asked, slow <= 3.0 * fault)), ..row("fault", wire, slow, "us p99") });
        }
        Ok(rows)
    }

    /// A read of a page from other stores: what a pager over them would wait for in place of byway's read.
    fn stores(&self, folder: &Path, rounds: usize) -> Result<Vec<Row>> {
        let mut stores = Vec::new();
        for kind in stores::KINDS {
            stores.extend(Store::start(kind, folder)?.map(|store| (kind, store, Vec::new())));
        }
        for _ in 0..rounds {
            for (_, store, times) in &mut stores {
                times.push(store.read_micros(self.seconds)?);
            }
        }
        let row = |(kind, _, times): (stores::Kind, Store, Vec<f64>)| {
            row("fault", &format!("read of 4 KiB, {} over tcp", kind.name()), median(times), "us p50")
        };
        Ok(stores.into_iter().map(row).collect())
    }

    /// Faults while each page that comes sends a changed one away.
    fn writes(&self, rounds: usize) -> Result<Vec<Row>> {
        let cases: Vec<_> = self.uris.iter().flat_map(|(wire, uri)| CLASSES.map(|class| (*wire, uri, class))).collect();
        let mut times = vec![(Vec::new(), Vec::new()); cases.len()];
        for _ in 0..rounds {
            for ((_, uri, class), (p50s, p99s)) in cases.iter().zip(&mut times) {
                let (p50, p99) = self.touch(uri, class, "writes", "2")?;
                p50s.push(p50);
                p99s.push(p99);
            }
        }
        let mut rows = Vec::new();
        for ((wire, _, class), (p50s, p99s)) in cases.into_iter().zip(times) {
            let (fault, slow) = (median(p50s), median(p99s));
            rows.push(Row { class, ..row("writes", wire, fault, "us p50") });
            let asked = format!("{:.1} of p50, <= 3", slow / fault);
            let target = Some((asked, slow <= 3.0 * fault));
            rows.push(Row { class, target, ..row("writes", wire, slow, "us p99") });
        }
        Ok(rows)
    }

    fn scans(&self, rounds: usize) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (wire, uri) in &self.uris {
            let (mut reads, mut scans) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                reads.push(self.volume(uri, "1M", "4")?.1);
                scans.push(self.touch(uri, "none", "scan", "1")?.0);
            }
            let (read, scan) = (median(reads), median(scans));
            rows.push(row("scan", &format!("reads of 1 MiB, {wire}"), read, "MB/s"));
            let asked = format!("{:.2} of the reads, >= 0.6", scan / read);
            rows.push(Row { target: Some((asked, scan >= 0.6 * read)), ..row("scan", wire, scan, "MB/s") });
        }
        Ok(rows)
    }

    fn threads(&self, rounds: usize) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (wire, uri) in &self.uris {
            let (mut one, mut four) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                one.push(self.touch(uri, "none", "threads", "1")?.0);
                four.push(self.touch(uri, "none", "threads", "4")?.0);
            }
            let (one, four) = (median(one), median(four));
            rows.push(row("random", &format!("1 thread, {wire}"), one, "touches/s"));
            let asked = format!("{:.2} of one thread, >= 3", four / one);
            let target = Some((asked, four >= 3.0 * one));
            rows.push(Row { target, ..row("random", &format!("4 threads, {wire}"), four, "touches/s") });
        }
        Ok(rows)
    }

    /// What it costs where all memory fits.
    fn what_fits(&self, rounds: usize) -> Result<Vec<Row>> {
        let uri = &self.uris[0].1;
        let (mut starts, mut plain, mut far) = (Vec::new(), Vec::new(), Vec::new());
        let words = ["/usr/bin/python3", "-c", BLOCKS];
        for _ in 0..rounds {
            let (bare, _) = timed(&mut Command::new("true"))?;
            starts.push((timed(&mut self.far(uri, "none", "64M", &["true"]))?.0 - bare) * 1e3);
            plain.push(timed(Command::new(words[0]).args(&words[1..]))?.0);
            far.push(timed(&mut self.far(uri, "none", "512M", &words))?.0);
        }
        let (start, ratio) = (median(starts), median(far) / median(plain));
        let asked = |met| Some(("< 20".to_owned(), met));
        Ok(vec![
            Row { target: asked(start < 20.0), ..row("start", "longer than plain", start, "ms") },
            Row {
                target: Some(("< 1.02".to_owned(), ratio < 1.02)),
                ..row("all fits", "python, of the plain run", ratio, "x")
            },
        ])
    }

    fn far(&self, uri: &str, class: &str, limit: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.byway);
        command.args(["far", "--class", class, "--limit", limit, "--from", uri, "--spill"]).arg(self.spill);
        command.arg("--").args(words);
        command
    }

    /// Two numbers of the program that touches far memory.
    fn touch(&self, uri: &str, class: &str, what: &str, threads: &str) -> Result<(f64, f64)> {
        let touches = self.touches.display().to_string();
        let seconds = self.seconds.to_string();
        numbers(&mut self.far(uri, class, TOUCHED_LIMIT, &[&touches, what, TOUCHED_MIB, threads, &seconds]))
    }

    /// Reads at random of a volume in memory, over the same wire: median latency and MB/s.
    fn volume(&self, uri: &str, block: &str, depth: &str) -> Result<(f64, f64)> {
        let uri = match uri.split_once(":///") {
            Some((scheme, rest)) => format!("{scheme}:///v{rest}"),
            None => format!("{uri}/v"),
        };
        let mut command = Command::new(self.byway);
        command.args(["bench", "volume", "--json", "--rw", "randread", "--bs", block, "--depth", depth]);
        let text = process::output(command.args(["--seconds", &self.seconds.to_string()]).arg(&uri))?;
        let result: Value = serde_json::from_str(&text)?;
        let number = |value: &Value| value.as_f64().context("a figure is missing in byway's JSON");
        Ok((number(&result["latency_us"]["p50"])?, number(&result["megabytes_per_second"])?))
    }
}

pub(super) fn row(case: &'static str, who: &str, value: f64, unit: &'static str) -> Row {
    Row { case, who: who.to_owned(), class: "", value, unit, target: None }
}

fn numbers(command: &mut Command) -> Result<(f64, f64)> {
    let said = process::output(command)?;
    let numbers: Vec<f64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [one, other] = numbers[..] else { bail!("two numbers are missing: {said}") };
    Ok((one, other))
}

/// A program was ended by SIGKILL.
#[derive(Debug)]
struct Killed;

impl std::fmt::Display for Killed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("killed by SIGKILL")
    }
}

impl std::error::Error for Killed {}

/// Seconds, and what it printed.
fn timed(command: &mut Command) -> Result<(f64, Vec<u8>)> {
    let began = Instant::now();
    let done = command.stdin(Stdio::null()).output()?;
    if done.status.signal() == Some(libc::SIGKILL) {
        return Err(Killed).with_context(|| format!("{command:?}"));
    }
    if !done.status.success() {
        bail!("{command:?}: {}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok((began.elapsed().as_secs_f64(), done.stdout))
}

/// As a table for a document.
pub fn markdown(rows: &[Row]) -> String {
    let has_classes = rows.iter().any(|row| !row.class.is_empty());
    let class = |text: &str| if has_classes { format!("{text} | ") } else { String::new() };
    let mut text = format!("| case | with | {}median | unit | target |\n", class("class"));
    let _ = writeln!(text, "|---|---|{}---|---|---|", if has_classes { "---|" } else { "" });
    for row in rows {
        let verdict =
            row.target.as_ref().map(|(asked, met)| format!("{asked} {}", if *met { "met" } else { "MISSED" }));
        let Row { case, who, value, unit, .. } = row;
        let digits = if *value < 10.0 { 2 } else { 0 };
        let class = class(row.class);
        let _ =
            writeln!(text, "| {case} | {who} | {class}{value:.digits$} | {unit} | {} |", verdict.unwrap_or_default());
    }
    text
}
