//! `cargo xtask test`: the whole test suite, with nothing skipped in silence.
//!
//! A test that cannot run on a machine appends a line to the file named by `BYWAY_SKIP_LOG` (see `crates/skip`), and so does one
//! that runs only in part. Those lines are printed at the end, by their reasons; what did not run is counted as skipped, not
//! as passed, though the runner's own summary knows nothing of it. With CI=true a skip for want of a program that could have
//! been installed is an error, and so is running fewer tests than `crates/xtask/tests-minimum` says: a suite that shrinks by accident
//! (a crate left out, a filter, a feature) fails. When tests are added, raise that number to what
//! the last line of a run calls passed, less those that need a kernel which others may lack.

mod steps;

use self::steps::Steps;
use crate::{fuzz, guest, packages, process};
use anyhow::{Context, Result};
use clap::Args;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::SystemTime;

/// What `byway_skip` writes for a program that is not there.
const MISSING_TOOL: &str = "missing tool: ";
/// So many tests are named of those with one reason; the log has all.
const NAMED: usize = 3;
/// How long each target is fuzzed in a long run.
const LONG_FUZZ_SECONDS: u32 = 300;
/// How many seeds the simulation tries in a long run, from the time of day on.
const LONG_SIMULATION_SEEDS: u32 = 20_000;

#[derive(Args)]
pub struct Options {
    /// Install the foreign clients and the test runner that are missing (also with CI=true).
    #[arg(long)]
    install: bool,
    /// Also fuzz each target for 5 minutes, simulate 20,000 new seeds, and run the guests.
    #[arg(long)]
    long: bool,
    /// Arguments for cargo-nextest, such as a filter; then the recorded minimum is not checked.
    #[arg(last = true)]
    runner: Vec<String>,
}

/// What ran and how it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// What a runner's output tells.
#[derive(Debug, Default)]
struct Told {
    counts: Counts,
    /// The tests that failed, by the runner's names.
    failed: BTreeSet<String>,
    /// Those that passed at the second try (`.config/nextest.toml` says which have one).
    flaky: BTreeSet<String>,
}

/// What a runner's line tells.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// How many tests passed, failed and were skipped.
    Summary(Counts),
    /// A test failed.
    Failed(String),
    /// A test failed, then passed.
    Flaky(String),
}

/// Tests that said why they did not run, or not in all their cases, in the order of their names.
#[derive(Debug, Default, PartialEq, Eq)]
struct Skips {
    /// One reason each.
    whole: BTreeMap<String, String>,
    /// Those that ran, but for some cases.
    in_part: BTreeMap<String, String>,
}

/// Runs the suite; the last line printed is the summary of it all.
pub fn run(options: &Options) -> Result<()> {
    let is_ci = std::env::var("CI").is_ok_and(|value| value == "true" || value == "1");
    if options.install || is_ci {
        packages::install()?;
    }
    for (tool, package) in packages::missing() {
        println!("not here: {tool} (package {package}); tests that need it are skipped; --install gets it");
    }
    let has_nextest = provide_nextest(options.install || is_ci)?;
    let mut steps = Steps::begin(step_names(options), process::target_directory()?);
    steps.next();
    let packages = ["byway", "byway-preload", "byway-run"].map(|package| ["--package", package]);
    process::run(process::cargo().args(["build", "--release"]).args(packages.as_flattened()))?;
    let skip_log = process::target_directory()?.join("skipped-tests");
    std::fs::write(&skip_log, "").with_context(|| format!("cannot write {}", skip_log.display()))?;
    let (Told { mut counts, failed: names, flaky }, is_good) = run_tests(options, has_nextest, &skip_log, &mut steps)?;
    // Also if a test failed, and before the summary: a run of hours tells all that it can.
    let long_parts = if options.long { run_long_parts(&mut steps) } else { Ok(()) };
    steps.end();
    let skips = read_skips(&skip_log)?;
    counts.passed = counts.passed.saturating_sub(skips.whole.len());
    counts.skipped += skips.whole.len();
    let complaints = judge(counts, &skips, is_ci, options.runner.is_empty());
    for line in grouped("SKIP", &skips.whole).into_iter().chain(grouped("PART", &skips.in_part)) {
        println!("{line}");
    }
    if !skips.whole.is_empty() || !skips.in_part.is_empty() {
        println!("all that did not run, or only in part: {}", skip_log.display());
    }
    for complaint in &complaints {
        println!("error: {complaint}");
    }
    let Counts { passed, failed, skipped } = counts;
    let which = named(&names);
    if !flaky.is_empty() {
        println!("passed at the second try only, to be looked into{}", named(&flaky));
    }
    println!(
        "{passed} passed, {} of them in part, {} at the second try, {failed} failed{which}, {skipped} skipped",
        skips.in_part.len(),
        flaky.len()
    );
    long_parts?;
    if !is_good || counts.failed > 0 || !complaints.is_empty() {
        // The summary is the last line: the status says the rest.
        std::process::exit(1);
    }
    Ok(())
}

/// What only a long run does, after the tests: these fail more often, and sooner.
fn run_long_parts(steps: &mut Steps) -> Result<()> {
    steps.next();
    fuzz::run(&fuzz::Options { seconds: LONG_FUZZ_SECONDS })?;
    steps.next();
    guest::run_all()
}

/// The steps of a run, in order. A filter and a long run have times of their own.
fn step_names(options: &Options) -> Vec<&'static str> {
    let long: &[_] = if options.long { &["fuzz targets", "guests"] } else { &[] };
    let tests: &[_] = match (options.runner.is_empty(), options.long) {
        (false, _) => &["chosen tests"],
        (true, false) => &["tests", "seeded bugs"],
        (true, true) => &["tests with more seeds", "seeded bugs with more seeds"],
    };
    [&["release build", "tests of the documentation"], tests, long].concat()
}

/// Runs the documentation's tests, which nextest does not, then all others, then (unless only some tests are asked for)
/// those that need the bugs of `byway_reactor::seeded` built in. The second value is whether all runs succeeded.
fn run_tests(options: &Options, has_nextest: bool, skip_log: &Path, steps: &mut Steps) -> Result<(Told, bool)> {
    let target = process::target_directory()?;
    // Other seeds in each long run.
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let first_seed = since_1970.as_millis();
    if options.long {
        println!("the simulation runs {LONG_SIMULATION_SEEDS} seeds from BYWAY_SIM_FIRST={first_seed} on");
    }
    let command = |arguments: &[&str]| {
        let mut command = process::cargo();
        command
            .args(arguments)
            .args(["--workspace", "--no-fail-fast"])
            .env("BYWAY_BIN", target.join("release/byway"))
            .env("BYWAY_SKIP_LOG", skip_log)
            .stdin(Stdio::null());
        if options.long {
            command.env("BYWAY_SIM_SEEDS", LONG_SIMULATION_SEEDS.to_string()).env("BYWAY_LONG", "1");
            command.env("BYWAY_SIM_FIRST", first_seed.to_string());
        }
        command
    };
    steps.next();
    let (mut told, documented) = run_and_count(&mut command(&["test", "--doc"]), read_cargo_test)?;
    let (mut runner, read): (_, fn(&str) -> Option<Line>) = if has_nextest {
        let profile = if options.long { "long" } else { "default" };
        (command(&["nextest", "run", "--profile", profile]), read_nextest)
    } else {
        (command(&["test", "--all-targets"]), read_cargo_test)
    };
    steps.next();
    let (ran, tested) = run_and_count(runner.args(&options.runner), read)?;
    told.add(ran);
    let hunted = if options.runner.is_empty() {
        steps.next();
        // The whole workspace, for the features of the other crates to be those of the run before: little is built again.
        let tests = ["seeded_bugs", "dsm_seeded_bugs", "leases_seeded_bugs", "far_seeded_bugs"];
        let tests = tests.iter().flat_map(|test| ["--test", test]);
        let seeded: Vec<&str> = ["--features", "byway-service/seeded-bugs"].into_iter().chain(tests).collect();
        let runner: &[&str] = if has_nextest { &["nextest", "run", "--success-output", "final"] } else { &["test"] };
        let (ran, hunted) = run_and_count(command(runner).args(seeded), read)?;
        told.add(ran);
        hunted
    } else {
        true
    };
    Ok((told, documented && tested && hunted))
}

/// Whether cargo-nextest can be used, installing it where that is wanted.
fn provide_nextest(install: bool) -> Result<bool> {
    let is_present = || process::succeeds(process::cargo().args(["nextest", "--version"]));
    if is_present() {
        return Ok(true);
    }
    if install {
        process::run(process::cargo().args(["install", "--locked", "cargo-nextest"]))?;
        return Ok(is_present());
    }
    println!("not here: cargo-nextest; running plain cargo test; --install gets it");
    Ok(false)
}

/// Runs a command with its output shown, and takes from it what `read` finds in its lines.
/// The second value is whether the command succeeded.
fn run_and_count(command: &mut Command, read: fn(&str) -> Option<Line>) -> Result<(Told, bool)> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let out = child.stdout.take().context("no standard output")?;
    let err = child.stderr.take().context("no standard error")?;
    let told = std::thread::scope(|scope| {
        let from_err = scope.spawn(move || show_and_count(err, read));
        let mut told = show_and_count(out, read);
        told.add(from_err.join().unwrap_or_default());
        told
    });
    Ok((told, child.wait()?.success()))
}

fn show_and_count(stream: impl Read, read: fn(&str) -> Option<Line>) -> Told {
    let mut told = Told::default();
    // Tests may print anything: a line that is not UTF-8 must not end the loop.
    for line in BufReader::new(stream).split(b'\n').map_while(std::result::Result::ok) {
        let line = String::from_utf8_lossy(&line);
        match read(&line) {
            // A runner knows neither of the other runs nor of tests that say that they do not run: those count as passed there.
            Some(Line::Summary(counts)) => {
                println!(
                    "{line}  [of one run, tests that skip themselves taken for passed; the sum of all is the last line]"
                );
                told.counts.add(counts);
            }
            Some(Line::Failed(test)) => {
                println!("{line}");
                told.failed.insert(test);
            }
            Some(Line::Flaky(test)) => {
                println!("{line}");
                told.flaky.insert(test);
            }
            None => println!("{line}"),
        }
    }
    told
}

/// The tests that failed, for the last line; nothing if none did.
fn named(failed: &BTreeSet<String>) -> String {
    if failed.is_empty() {
        return String::new();
    }
    let names: Vec<&str> = failed.iter().map(String::as_str).collect();
    format!(" ({})", names.join(", "))
}

impl Told {
    fn add(&mut self, other: Self) {
        self.counts.add(other.counts);
        self.failed.extend(other.failed);
        self.flaky.extend(other.flaky);
    }
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// `Summary [ 1.2s] 5 tests run: 3 passed (1 slow), 1 failed, 1 timed out, 2 skipped`, or a test that failed:
/// `FAIL [ 1.2s] (3/5) crate::binary a::test`.
fn read_nextest(line: &str) -> Option<Line> {
    let (status, rest) = line.trim_start().split_once(" [")?;
    let (_, rest) = rest.split_once("] ")?;
    match status {
        "Summary" => {
            let tail = rest.split_once(" run: ")?.1;
            let of = |word: &str| number_before(tail, word);
            let failed = of("failed") + of("timed out") + of("exec failed");
            Some(Line::Summary(Counts { passed: of("passed"), failed, skipped: of("skipped") }))
        }
        // A first try decides nothing: a second one follows it.
        first if first.starts_with("TRY 1 ") => None,
        flaky if flaky.starts_with("FLAKY") => Some(Line::Flaky(test_of(rest))),
        "FAIL" | "TIMEOUT" | "ABORT" | "LEAK-FAIL" | "XFAIL" => Some(Line::Failed(test_of(rest))),
        second if second.starts_with("TRY 2 ") && second != "TRY 2 PASS" => Some(Line::Failed(test_of(rest))),
        signal if signal.starts_with("SIG") => Some(Line::Failed(test_of(rest))),
        _ => None,
    }
}

/// Behind `(3/5)`, which not all versions print.
fn test_of(rest: &str) -> String {
    let rest = rest.trim();
    rest.strip_prefix('(').and_then(|rest| rest.split_once(") ")).map_or(rest, |(_, test)| test).to_owned()
}

/// `test result: ok. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s`, or `test a::b ... FAILED`.
fn read_cargo_test(line: &str) -> Option<Line> {
    if let Some(test) = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED")) {
        return Some(Line::Failed(test.to_owned()));
    }
    let tail = line.strip_prefix("test result: ")?;
    let of = |word: &str| number_before(tail, word);
    let skipped = of("ignored") + of("filtered out");
    Some(Line::Summary(Counts { passed: of("passed"), failed: of("failed"), skipped }))
}

/// The number right before `word` in a list; 0 where it is not there.
fn number_before(list: &str, word: &str) -> usize {
    list.split([',', ';', '.', '('])
        .find_map(|part| part.trim().strip_suffix(')').unwrap_or(part.trim()).strip_suffix(word)?.trim().parse().ok())
        .unwrap_or(0)
}

fn read_skips(log: &Path) -> Result<Skips> {
    let text = std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    let those = |how: &str| -> BTreeMap<String, String> {
        let said = text.lines().filter_map(|line| line.strip_prefix(how)?.split_once(": "));
        said.map(|(test, reason)| (test.to_owned(), reason.to_owned())).collect()
    };
    let (whole, mut in_part) = (those("SKIP "), those("PART "));
    in_part.retain(|test, _| !whole.contains_key(test));
    Ok(Skips { whole, in_part })
}

/// A line for each reason, with the first tests that gave it.
fn grouped(how: &str, skips: &BTreeMap<String, String>) -> Vec<String> {
    let mut tests: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (test, reason) in skips {
        tests.entry(reason).or_default().push(test);
    }
    let line = |(reason, tests): (&str, Vec<&str>)| {
        let named = tests[..tests.len().min(NAMED)].join(", ");
        match tests.len() {
            n if n > NAMED => format!("{how} {n} tests: {reason}: {named} and {} more", n - NAMED),
            _ => format!("{how} {named}: {reason}"),
        }
    };
    tests.into_iter().map(line).collect()
}

/// What CI does not let pass, besides failures.
fn judge(counts: Counts, skips: &Skips, is_ci: bool, is_whole: bool) -> Vec<String> {
    // A number that nobody can read is one that nobody reaches.
    let minimum = include_str!("../tests-minimum").trim().parse().unwrap_or(usize::MAX);
    if is_ci { judge_against(if is_whole { minimum } else { 0 }, counts, skips) } else { Vec::new() }
}

fn judge_against(minimum: usize, counts: Counts, skips: &Skips) -> Vec<String> {
    let mut complaints = Vec::new();
    let ran = counts.passed + counts.failed;
    if ran < minimum {
        complaints.push(format!(
            "{ran} tests ran, fewer than the {minimum} of crates/xtask/tests-minimum: find out \
             which are gone"
        ));
    }
    let avoidable: Vec<&str> = skips
        .whole
        .iter()
        .chain(&skips.in_part)
        .filter(|(_, reason)| reason.strip_prefix(MISSING_TOOL).is_some_and(packages::is_installable))
        .map(|(test, _)| test.as_str())
        .collect();
    if !avoidable.is_empty() {
        let tests = avoidable.join(", ");
        complaints.push(format!("skipped for want of a program that can be installed: {tests}"));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summaries_of_both_runners_are_understood() {
        let counts = |passed, failed, skipped| Some(Line::Summary(Counts { passed, failed, skipped }));
        let line = "     Summary [   1.234s] 9 tests run: 5 passed (1 slow, 2 leaky), 3 failed, 1 timed out, 2 skipped";
        assert_eq!(read_nextest(line), counts(5, 4, 2));
        let line = "     Summary [   0.010s] 1 test run: 1 passed, 0 skipped";
        assert_eq!(read_nextest(line), counts(1, 0, 0));
        assert_eq!(read_nextest("a test run: 3 passed"), None);
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.1s";
        assert_eq!(read_cargo_test(line), counts(3, 1, 2));
    }

    #[test]
    fn what_failed_is_named_once_in_the_last_line() {
        // As nextest and cargo test print them, nextest twice.
        let nextest = "        FAIL [   0.243s] (1/5) byway-e2e::bench a_test\n     TIMEOUT [  60.001s] byway b::c\n     \
                       SIGABRT [   0.1s] (2/5) byway-e2e::bench d\n        PASS [   0.2s] (3/5) byway e\n    TRY 1 FAIL [   0.1s] byway f\n     \
                       Summary [   1.2s] 4 tests run: 1 passed, 2 failed, 1 timed out, 0 skipped\n        \
                       FAIL [   0.243s] (1/5) byway-e2e::bench a_test\n";
        let mut told = show_and_count(nextest.as_bytes(), read_nextest);
        told.add(show_and_count(
            "test src/lib.rs - g (line 3) ... FAILED\ntest h ... ok\n".as_bytes(),
            read_cargo_test,
        ));
        assert_eq!(told.counts, Counts { passed: 1, failed: 3, skipped: 0 });
        let names = " (byway b::c, byway-e2e::bench a_test, byway-e2e::bench d, src/lib.rs - g (line 3))";
        assert_eq!(named(&told.failed), names);
        assert_eq!(named(&BTreeSet::new()), "");
    }

    #[test]
    fn what_passed_at_the_second_try_is_named_apart_from_what_failed_twice() {
        let nextest = "  TRY 1 ABRT [   0.010s] (───) byway::a b\n  TRY 2 ABRT [   0.008s] (2/4) byway::a b\n  \
                       TRY 1 FAIL [   0.119s] (───) byway::a c\n  TRY 2 PASS [   0.012s] (3/4) byway::a c\n     \
                       Summary [   0.507s] 3 tests run: 2 passed (1 flaky), 1 failed, 0 skipped\n   \
                       FLAKY 2/2 [   0.012s] (3/4) byway::a c\n  TRY 2 ABRT [   0.008s] (2/4) byway::a b\n";
        let told = show_and_count(nextest.as_bytes(), read_nextest);
        assert_eq!(told.counts, Counts { passed: 2, failed: 1, skipped: 0 });
        assert_eq!([named(&told.failed), named(&told.flaky)], [" (byway::a b)", " (byway::a c)"]);
    }

    #[test]
    fn ci_accepts_neither_a_shrunken_suite_nor_a_skip_that_an_installation_mends() {
        let counts = Counts { passed: 9, failed: 0, skipped: 1 };
        let of = |reason: &str| BTreeMap::from([("a".to_owned(), reason.to_owned())]);
        let skip = |reason: &str| Skips { whole: of(reason), ..Skips::default() };
        let missing = skip("missing tool: nbdinfo");
        let kernel = skip("no io_uring here");
        assert!(judge_against(9, counts, &kernel).is_empty());
        assert_eq!(judge_against(10, counts, &kernel).len(), 1);
        assert_eq!(judge_against(9, counts, &missing).len(), 1);
        let in_part = Skips { in_part: of("missing tool: pkg-config"), ..Skips::default() };
        assert_eq!(judge_against(9, counts, &in_part).len(), 1);
    }

    #[test]
    fn a_test_that_says_twice_that_it_skips_is_one_skip() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, "SKIP a: x\nnoise\nPART a: z\nSKIP b c::d: y: z\nSKIP a: x\nPART e: x\nPART e: x\n")
            .unwrap();
        let skips = read_skips(&log).unwrap();
        assert_eq!(skips.whole.len(), 2);
        assert_eq!(skips.whole["b c::d"], "y: z");
        // What did not run at all did not run in part either.
        assert_eq!(skips.in_part, BTreeMap::from([("e".to_owned(), "x".to_owned())]));
    }

    #[test]
    fn a_hundred_skips_for_one_reason_are_one_line() {
        let mut skips: BTreeMap<String, String> =
            (0..100).map(|n| (format!("t{n:02}"), "no RDMA device".to_owned())).collect();
        skips.insert("u".to_owned(), "not root".to_owned());
        let lines = ["SKIP 100 tests: no RDMA device: t00, t01, t02 and 97 more", "SKIP u: not root"];
        assert_eq!(grouped("SKIP", &skips), lines);
    }
}
