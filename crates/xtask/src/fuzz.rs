//! `cargo xtask fuzz`: every fuzz target for a while.
//!
//! The pinned toolchain is a stable one and there is no nightly: `RUSTC_BOOTSTRAP=1` lets it take
//! the sanitizer flags that cargo-fuzz passes.

use crate::process;
use anyhow::{Result, bail};
use clap::Args;

/// Where the targets are, a workspace of its own.
const FOLDER: &str = "crates/fuzz";

/// Memory after which a target counts as failed, so that an unbounded buffer is found.
const MEMORY_LIMIT_MIB: u32 = 2048;

#[derive(Args)]
pub struct Options {
    /// How long each target runs.
    #[arg(long, default_value_t = 20)]
    pub seconds: u32,
}

/// Runs all targets; fails with the first that crashes, whose input cargo-fuzz keeps and names.
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
    for target in &targets {
        println!("fuzz: {target} for {} s", options.seconds);
        process::run(
            process::cargo()
                .args(["fuzz", "run", "--fuzz-dir", FOLDER, "--target-dir"])
                .arg(&built)
                .args([*target, "--"])
                .arg(format!("-max_total_time={}", options.seconds))
                .arg(format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"))
                .arg("-print_final_stats=1")
                .args(dictionary(target))
                .env("RUSTC_BOOTSTRAP", "1"),
        )?;
    }
    println!("fuzz: {} targets, {} s each, no findings", targets.len(), options.seconds);
    Ok(())
}

/// The words of a target's protocol, where somebody wrote them down.
fn dictionary(target: &str) -> Option<String> {
    let path = process::workspace_root().join(FOLDER).join("dictionaries").join(format!("{target}.dict"));
    path.is_file().then(|| format!("-dict={}", path.display()))
}
