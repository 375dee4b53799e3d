//! `cargo xtask fuzz`: every fuzz target for a while.
//!
//! The pinned toolchain is a stable one and there is no nightly: `RUSTC_BOOTSTRAP=1` lets it take
//! the sanitizer flags that cargo-fuzz passes.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::process;
use anyhow::{Context, Result, bail};
use clap::Args;

/// Where the targets are, a workspace of its own.
const FOLDER: &str = "crates/fuzz";

/// Memory after which a target counts as failed, so that an unbounded buffer is found.
const MEMORY_LIMIT_MIB: u32 = 2048;

/// Lines of a failed target's output that are printed.
const LINES_SHOWN: usize = 60;

#[derive(Args)]
pub struct Options {
    /// How long each target runs.
    #[arg(long, default_value_t = 20)]
    pub seconds: u32,
}

/// Runs all targets; fails if one crashes. cargo-fuzz keeps the input and names it.
pub fn run(options: &Options) -> Result<()> {
    if !process::workspace_root().join(FOLDER).join("Cargo.toml").is_file() {
        bail!("no fuzz targets: {FOLDER}/Cargo.toml is missing");
    }
    if !process::succeeds(process::cargo().args(["fuzz", "--version"])) {
        process::run(process::cargo().args(["install", "--locked", "cargo-fuzz"]))?;
    }
    let listing = process::output(process::cargo().args(["fuzz", "list", "--fuzz-dir", FOLDER]))?;
    let targets: Vec<&str> = listing.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if targets.is_empty() {
        bail!("no fuzz targets: {FOLDER}/Cargo.toml names none");
    }
    let built = process::target_directory()?.join("fuzz");
    let cargo = |what: &str| {
        let mut command = process::cargo();
        command.args(["fuzz", what, "--fuzz-dir", FOLDER, "--target-dir"]).arg(&built).env("RUSTC_BOOTSTRAP", "1");
        command
    };
    process::run(&mut cargo("build"))?;
    let runs = targets.iter().map(|target| {
        let mut command = cargo("run");
        command
            .args([*target, "--"])
            .arg(format!("-max_total_time={}", options.seconds))
            .arg(format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"))
            .arg("-print_final_stats=1")
            .args(dictionary(target));
        (*target, command)
    });
    println!("fuzz: {} targets for {} s each, one on each core", targets.len(), options.seconds);
    run_side_by_side(runs.collect(), &built)?;
    println!("fuzz: {} targets, {} s each, no findings", targets.len(), options.seconds);
    Ok(())
}

/// Runs commands, as many at a time as there are cores. The output of each goes to `folder/NAME.log`; its end is printed if the command fails.
fn run_side_by_side(commands: Vec<(&str, Command)>, folder: &Path) -> Result<()> {
    let left = Mutex::new(commands.into_iter());
    let failed = Mutex::new(Vec::new());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((name, command)) = next() {
                    let log = folder.join(format!("{name}.log"));
                    let ended = run_into(command, &log);
                    println!(
                        "fuzz: {name}: {}",
                        ended.as_ref().map_or_else(|error| format!("{error:#}"), |()| "ok".to_owned())
                    );
                    if ended.is_err() {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push((name, log));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (name, log) in &failed {
        let text = std::fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        println!("the end of {}:\n{}", log.display(), lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n"));
        println!("fuzz: {name} failed");
    }
    if !failed.is_empty() {
        bail!("{} fuzz targets failed", failed.len());
    }
    Ok(())
}

fn run_into(mut command: Command, log: &Path) -> Result<()> {
    let file = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    let errors = file.try_clone().context("cannot share the log")?;
    let status =
        command.stdin(Stdio::null()).stdout(file).stderr(errors).status().context("cannot start cargo fuzz")?;
    if !status.success() {
        bail!("failed: {status}");
    }
    Ok(())
}

/// The words of a target's protocol, where somebody wrote them down.
fn dictionary(target: &str) -> Option<String> {
    let path = process::workspace_root().join(FOLDER).join("dictionaries").join(format!("{target}.dict"));
    path.is_file().then(|| format!("-dict={}", path.display()))
}
