//! `peers far`: programs with far memory, beside the same programs with all of their memory and beside the kernel's swap; and
//! faults beside the operations that they consist of.

mod swap;

use super::report::median;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use swap::Swap;

const TOUCHES: &str = include_str!("far.c");
const PORT: u16 = 4712;
/// Memory of the program that touches pages, in MiB, and what of it may be here.
const TOUCHED_MIB: &str = "128";
const TOUCHED_LIMIT: &str = "64M";

/// Makes 64 MiB of blocks, changes them in two rounds, checks each, and prints their digest.
const BLOCKS: &str = "
import hashlib, random
blocks = [bytearray(random.Random(i).randbytes(65536)) for i in range(1000)]
digests = [hashlib.md5(block).digest() for block in blocks]
for turn in range(2):
    for i, block in enumerate(blocks):
        assert hashlib.md5(block).digest() == digests[i], (turn, i)
        block[turn * 7] ^= 255
        digests[i] = hashlib.md5(block).digest()
print(hashlib.md5(b''.join(digests)).hexdigest())
";

/// A table of 500,000 rows in memory, an index over it, and reads by the index.
const SQL: &str = "
create table t(a integer, b text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 500000)
insert into t select i * 7919 % 1000003, printf('%060d', i) from n;
create index ti on t(a);
select sum(length(b)), count(*) from t where a % 3 = 0;
select sum(a) from (select a from t order by a limit 400000);
";

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

/// A program that is run with less memory than it uses.
struct Program {
    case: &'static str,
    words: Vec<String>,
    /// About half of what it uses.
    limit: &'static str,
}

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
    rows.extend(bench.writes(rounds)?);
    rows.extend(bench.scans(rounds)?);
    rows.extend(bench.threads(rounds)?);
    let swap = Swap::on(disk);
    if let Err(error) = &swap {
        println!("SKIP swap: {error:#}");
    }
    for program in programs(folder)? {
        rows.extend(bench.program(&program, swap.as_ref().ok(), rounds)?);
    }
    rows.extend(bench.what_fits(rounds)?);
    Ok(rows)
}

fn programs(folder: &Path) -> Result<Vec<Program>> {
    let (mut lines, mut number) = (String::new(), 1u64);
    for _ in 0..1_000_000 {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        writeln!(lines, "{:016x} {:07}", number, number % 1_000_000)?;
    }
    let file = folder.join("lines");
    std::fs::write(&file, lines)?;
    let mut programs = Vec::new();
    let mut add = |case, limit, words: &[&str]| {
        if process::find_program(words[0]).is_some() {
            programs.push(Program { case, words: words.iter().map(|word| (*word).to_owned()).collect(), limit });
        } else {
            println!("SKIP {case}: there is no {}", words[0]);
        }
    };
    let file = file.display().to_string();
    add("sort", "32M", &["env", "LC_ALL=C", "sort", "-S", "64M", "--parallel=2", &file]);
    add("python", "36M", &["/usr/bin/python3", "-c", BLOCKS]);
    add("sqlite", "32M", &["sqlite3", ":memory:", SQL]);
    Ok(programs)
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

    /// A program at half of its memory: plain, far over each wire, and with the kernel's swap. All must print the same.
    fn program(&self, program: &Program, swap: Option<&Swap>, rounds: usize) -> Result<Vec<Row>> {
        let words: Vec<&str> = program.words.iter().map(String::as_str).collect();
        let cases: Vec<_> = self.uris.iter().flat_map(|(wire, uri)| CLASSES.map(|class| (*wire, uri, class))).collect();
        // Plain, with the kernel's swap, and far.
        let mut times = vec![Vec::new(); 2 + cases.len()];
        let mut killed = 0;
        for round in 1..=rounds {
            let (plain, said) = timed(Command::new(words[0]).args(&words[1..]))?;
            times[0].push(plain);
            let swapped = swap.map(|swap| (1, swap.limited(program.limit, &words)));
            let far = cases.iter().map(|(_, uri, class)| self.far(uri, class, program.limit, &words));
            for (at, mut other) in swapped.into_iter().chain((2..).zip(far)) {
                let run = timed(&mut other);
                // A kernel that cannot swap fast enough kills the program: that is a result of the comparison.
                if at == 1 && run.as_ref().is_err_and(anyhow::Error::is::<Killed>) {
                    killed += 1;
                    continue;
                }
                let (time, other) = run?;
                if other != said {
                    bail!("{}: it prints something else with less memory", program.case);
                }
                times[at].push(time);
            }
            let last: Vec<_> = times.iter().map(|times| times.last()).collect();
            eprintln!("round {round}: {:<8} {last:?}", program.case);
        }
        let medians: Vec<f64> = times.into_iter().map(median).collect();
        let (plain, swapped) = (medians[0], medians[1]);
        let mut rows = vec![row(program.case, "all of its memory", plain, "s")];
        let has_swap = swapped > 0.0;
        for ((wire, _, class), time) in cases.into_iter().zip(&medians[2..]) {
            let asked = format!("{:.2} x plain; {:.2} of swap, < 1", time / plain, time / swapped);
            let ended = format!("{:.2} x plain; with swap the kernel killed it", time / plain);
            let target = has_swap.then_some((asked, *time < swapped)).or((killed > 0).then_some((ended, true)));
            rows.push(Row { class, target, ..row(program.case, &format!("half of it, {wire}"), *time, "s") });
        }
        let runs = if killed > 0 { format!(" (killed in {killed} of {rounds} runs)") } else { String::new() };
        let swap = format!("half of it, swap on a loop device{runs}");
        rows.extend(has_swap.then(|| row(program.case, &swap, swapped, "s")));
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
