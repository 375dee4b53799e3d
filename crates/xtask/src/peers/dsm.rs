//! `peers dsm`: faults, barriers, locks and fetches of a job beside what they are made of, and programs as jobs beside the same programs as
//! threads, with OpenMPI's one-sided operations, and over ArgoDSM.

mod others;

use super::far::{Row, row};
use super::report::median;
use crate::process;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Accesses of each kind in a round.
const ACCESSES: &str = "2000";
const WIRES: [&str; 2] = ["tcp", "shm"];

/// The programs of `crates/capi/examples/parmacs` with their sizes, and the least share of the threads' speed that is asked.
const PROGRAMS: [(&str, &[&str], Option<f64>); 7] = [
    ("sor", &["4096", "50"], Some(0.8)),
    ("lu", &["2048"], Some(0.8)),
    ("matrix", &["768"], None),
    ("fft", &["1024"], None),
    ("radix", &["4000000"], None),
    ("is", &["4000000"], None),
    ("tsp", &["14"], None),
];

/// What measures.
struct Bench<'a> {
    byway: &'a Path,
    examples: PathBuf,
    folder: &'a Path,
    rounds: usize,
}

/// Measures all, in turns.
pub fn run(byway: &Path, folder: &Path, rounds: usize) -> Result<Vec<Row>> {
    let build = ["build", "--release", "--package", "byway-dsm", "--package", "byway-capi", "--examples", "--lib"];
    process::run(process::cargo().args(build))?;
    let examples = process::target_directory()?.join("release/examples");
    let bench = Bench { byway, examples, folder, rounds };
    let mut rows = Vec::new();
    for wire in WIRES {
        rows.extend(bench.parts(wire)?);
    }
    rows.extend(bench.pagers()?);
    for (name, arguments, asked) in PROGRAMS {
        rows.extend(bench.program(name, arguments, asked)?);
    }
    Ok(rows)
}

/// The medians of what `parts` and `latency` print, by name: p50 and p99.
type Figures = BTreeMap<String, (f64, f64)>;

impl Bench<'_> {
    fn job(&self, processes: usize, flags: &[&str], words: &[&str]) -> Command {
        let mut command = Command::new(self.byway);
        command.args(["dsm", "run", "-n", &processes.to_string()]).args(flags).arg("--").args(words);
        command
    }

    fn example(&self, name: &str) -> String {
        self.examples.join(name).display().to_string()
    }

    fn parts(&self, wire: &str) -> Result<Vec<Row>> {
        let (mut parts, mut job, mut release, mut eight) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let latency = self.example("latency");
        for _ in 0..self.rounds {
            let mut alone = Command::new(self.example("parts"));
            parts.push(figures(&process::output(alone.args([wire, ACCESSES]))?));
            let words = [latency.as_str(), ACCESSES];
            job.push(figures(&process::output(&mut self.job(2, &["--wire", wire], &words))?));
            let flags = ["--wire", wire, "--consistency", "rc"];
            release.push(figures(&process::output(&mut self.job(2, &flags, &words))?));
            eight.push(figures(&process::output(&mut self.job(8, &["--wire", wire], &[&latency, "200"]))?));
        }
        let [parts, job, release, eight] = [parts, job, release, eight].map(|all| medians(&all));
        let value = |figures: &Figures, name: &str| {
            figures.get(name).copied().with_context(|| format!("no figure for {name:?} was printed"))
        };
        let (read, call) = (value(&parts, "local read fault")?.0, value(&parts, "call with a page in its answer")?.0);
        let (upgrade, both) = (value(&parts, "local upgrade")?.0, value(&parts, "message there and back")?.0);
        let who = |text: &str| format!("{text}, {wire}");
        let beside = |case, text: &str, value: f64, asked: f64, factor: f64| {
            let said = format!("{:.2} of {asked:.1} us, <= {factor}", value / asked);
            Row { target: Some((said, value <= factor * asked)), ..row(case, &who(text), value, "us p50") }
        };
        let fault = value(&job, "load of a page that its home has written")?;
        let mut rows = vec![
            row("parts", &who("local read fault"), read, "us p50"),
            row("parts", &who("call with a page in its answer"), call, "us p50"),
            row("parts", &who("local upgrade"), upgrade, "us p50"),
            row("parts", &who("message there and back"), both, "us p50"),
            beside("read fault", "2 processes", fault.0, read + call, 1.3),
            row("read fault", &who("2 processes"), fault.1, "us p99"),
        ];
        let store = value(&job, "store to a page that both have read")?.0;
        rows.push(beside("upgrade", "2 processes", store, upgrade + both, 1.3));
        // Of 8 processes: 2 x log2(8) messages one way.
        rows.push(beside("barrier", "8 processes", value(&eight, "barrier")?.0, both / 2.0, 6.0));
        rows.push(beside(
            "lock",
            "2 processes that both want it",
            value(&job, "lock that all want")?.0,
            both / 2.0,
            1.5,
        ));
        rows.push(beside(
            "lock",
            "8 processes that all want it",
            value(&eight, "lock that all want")?.0,
            both / 2.0,
            1.5,
        ));
        // Of one transfer at a time, as a fetch is one.
        let rate = |time: f64| f64::from(1 << 20) / time;
        let session = rate(value(&parts, "get of 1 MiB")?.0);
        rows.push(row("parts", &who("get of 1 MiB"), session, "MB/s"));
        for (text, figures) in [("sc", &job), ("rc", &release)] {
            for (case, name) in [
                ("fetch of 1 MiB", "fetch of 1 MiB that the other has written"),
                ("barrier, and fetch of 1 MiB by both", "barrier and fetch of 1 MiB by both"),
            ] {
                let rate = rate(value(figures, name)?.0);
                let target =
                    Some((format!("{:.2} of {session:.0} MB/s, >= 0.5", rate / session), rate >= 0.5 * session));
                rows.push(Row { target, ..row(case, &who(&format!("2 processes, {text}")), rate, "MB/s") });
            }
        }
        Ok(rows)
    }

    /// Each way of the pager to wait, with a process for each core: loads from one that waits, and from one that computes as all others do.
    fn pagers(&self) -> Result<Vec<Row>> {
        let ways = ["sleep", "poll", "spin", "points"];
        let mut found = vec![Vec::new(); ways.len()];
        let latency = self.example("latency");
        let cores = std::thread::available_parallelism()?.get().max(2);
        for _ in 0..self.rounds {
            for (found, way) in found.iter_mut().zip(ways) {
                let computes = if way == "points" { "polls" } else { "computes" };
                let words = [latency.as_str(), ACCESSES, computes];
                let mut command = self.job(cores, &["--wire", "tcp", "--pager", way], &words);
                found.push(figures(&process::output(&mut command)?));
            }
        }
        let mut rows = Vec::new();
        for (found, way) in found.iter().zip(ways) {
            let medians = medians(found);
            let of = |name: &str| medians.get(name).copied().context("latency printed no load");
            let (p50, _) = of("load from a process that waits")?;
            let (busy, slow) = of("load from a process that computes")?;
            rows.push(row("read fault by pager", &format!("{way}, the others wait, tcp"), p50, "us p50"));
            let who = format!("{way}, all cores computing, tcp");
            rows.push(row("read fault by pager", &who, busy, "us p50"));
            let said = format!("{:.1} x p50 while they wait, <= 5", slow / p50);
            let target = Some((said, slow <= 5.0 * p50));
            rows.push(Row { target, ..row("read fault by pager", &who, slow, "us p99") });
        }
        Ok(rows)
    }

    /// A program as threads, as jobs and over what others have, which all print the same result.
    fn program(&self, name: &'static str, arguments: &[&str], asked: Option<f64>) -> Result<Vec<Row>> {
        let folder = process::workspace_root().join("crates/capi");
        let source = folder.join("examples/parmacs").join(name).with_extension("c");
        let library = process::target_directory()?.join("release/libbyway.a");
        let threads = self.compile("cc", &source, &format!("{name}-threads"), |command| {
            command.arg("-include").arg(folder.join("examples/parmacs/threads.h"));
        })?;
        let job = self.compile("cc", &source, name, |command| {
            command.arg("-include").arg(folder.join("include/byway_anl.h")).arg("-I").arg(folder.join("include"));
            command.arg(&library);
        })?;
        let others = self.others(name, &source)?;
        let mut rows = Vec::new();
        for processes in [2, 4] {
            let arguments: Vec<String> =
                [processes.to_string()].into_iter().chain(arguments.iter().map(|text| (*text).to_owned())).collect();
            let mut times = [const { Vec::new() }; 4];
            let mut of_others = vec![Vec::new(); others.len()];
            for _ in 0..self.rounds {
                let (result, time) = outcome(&process::output(Command::new(&threads).args(&arguments))?)?;
                times[0].push(time);
                let job = job.display().to_string();
                let own: Vec<&str> = [&job].into_iter().chain(&arguments).map(String::as_str).collect();
                for (at, flags) in
                    [["--consistency", "sc"], ["--consistency", "rc"], ["--pager", "poll"]].iter().enumerate()
                {
                    let (other, time) = outcome(&process::output(&mut self.job(processes, flags, &own))?)?;
                    same(name, &result, &other)?;
                    times[1 + at].push(time);
                }
                for (other, times) in others.iter().zip(&mut of_others) {
                    let (printed, time) = outcome(&process::output(&mut other.command(processes, &arguments))?)?;
                    same(name, &result, &printed)?;
                    times.push(time);
                }
            }
            let [alone, sc, rc, poll] = times.map(median);
            let who = |text: &str| format!("{text}, {processes}");
            rows.push(row(name, &who("threads"), alone / 1e3, "ms"));
            for (text, time) in [("job, sc", sc), ("job, rc", rc), ("job, sc, --pager poll", poll)] {
                let share = alone / time;
                let target = asked.map(|asked| (format!("{share:.2} of threads, >= {asked}"), share >= asked));
                let who = who(&format!("{text} ({share:.2} of threads)"));
                rows.push(Row { target, ..row(name, &who, time / 1e3, "ms") });
            }
            for (other, times) in others.iter().zip(of_others) {
                rows.push(row(name, &who(other.name), median(times) / 1e3, "ms"));
            }
        }
        Ok(rows)
    }

    fn compile(&self, compiler: &str, source: &Path, name: &str, with: impl FnOnce(&mut Command)) -> Result<PathBuf> {
        let program = self.folder.join(name);
        let mut command = Command::new(compiler);
        command.args(["-O2", "-std=c11", "-D_POSIX_C_SOURCE=200809L"]).arg(source);
        with(&mut command);
        process::output(command.args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program)).context("a C compiler")?;
        Ok(program)
    }
}

/// The figures of lines `name: p50 X us, p99 Y us`, or `name: X us each`, perhaps with a rank before.
fn figures(said: &str) -> Figures {
    let line = |line: &str| {
        let line = line.split_once("] ").map_or(line, |(_, rest)| rest);
        let (name, rest) = line.split_once(": ")?;
        let mut numbers = rest.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok());
        let first = numbers.next()?;
        Some((name.to_owned(), (first, numbers.next().unwrap_or(first))))
    };
    said.lines().filter_map(line).collect()
}

fn medians(all: &[Figures]) -> Figures {
    let Some(first) = all.first() else { return Figures::new() };
    let of = |name: &String, part: fn(&(f64, f64)) -> f64| {
        median(all.iter().filter_map(|one| one.get(name).map(part)).collect())
    };
    first.keys().map(|name| (name.clone(), (of(name, |pair| pair.0), of(name, |pair| pair.1)))).collect()
}

/// What a program has computed, and its microseconds.
fn outcome(said: &str) -> Result<(String, f64)> {
    let mut lines = said.lines().map(|line| line.strip_prefix("[0] ").unwrap_or(line));
    let (Some(result), Some(time)) = (lines.next(), lines.next()) else { bail!("two lines are missing: {said}") };
    let time = time.strip_suffix(" us").with_context(|| format!("no time: {said}"))?;
    Ok((result.to_owned(), time.parse()?))
}

fn same(name: &str, result: &str, other: &str) -> Result<()> {
    if result != other {
        bail!("{name}: {other} instead of {result}");
    }
    Ok(())
}
