//! `cargo xtask dist`: what is installed, stripped, with its debug information beside it.
//!
//! Cargo's `strip` would throw away what byway.dwp refers to: addresses, line tables and names of functions.

use crate::process;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// The files, as cargo names them in `target/release`.
const FILES: [&str; 3] = ["byway", "libbyway_preload.so", "libbyway_run.so"];

/// Builds the release and leaves it in `target/dist`.
pub fn run() -> Result<()> {
    let packages = ["--package", "byway", "--package", "byway-preload", "--package", "byway-run"];
    process::run(process::cargo().args(["build", "--release"]).args(packages))?;
    let target = process::target_directory()?;
    let (built, into) = (target.join("release"), target.join("dist"));
    std::fs::create_dir_all(&into).with_context(|| format!("cannot make {}", into.display()))?;
    FILES.iter().try_for_each(|name| strip(&built, &into, name))?;
    println!("{} has {}, and their debug information", into.display(), FILES.join(", "));
    Ok(())
}

/// Copies a file without symbols. `NAME.debug` gets these; the copy names it, and debuggers, perf and backtraces look for it beside the copy.
fn strip(built: &Path, into: &Path, name: &str) -> Result<()> {
    let (file, debug) = (built.join(name), format!("{name}.debug"));
    // In the folder, because the link is the name that objcopy is given.
    let objcopy = || {
        let mut command = Command::new("objcopy");
        command.current_dir(into);
        command
    };
    process::run(objcopy().arg("--only-keep-debug").arg(&file).arg(&debug))?;
    let link = format!("--add-gnu-debuglink={debug}");
    process::run(objcopy().args(["--strip-all", &link]).arg(&file).arg(name))?;
    // What `split-debuginfo` has put aside.
    let split = format!("{name}.dwp");
    if built.join(&split).exists() {
        std::fs::copy(built.join(&split), into.join(&split)).with_context(|| format!("cannot copy {split}"))?;
    }
    Ok(())
}
