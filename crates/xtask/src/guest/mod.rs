//! `cargo xtask guest`: byway under a stock kernel that a test may crash.
//!
//! Seven things cannot be shown on the machine that runs the tests: that the kernel's own NBD client
//! is served well (its module may be missing, and attaching needs root), that volumes are attached by ublk, that what was
//! acknowledged survives the loss of power, that RDMA and memory of PCI devices work, where there
//! is no such device, that quotas hold, which its kernel may not have, and that a cluster file system works on a volume of two machines.
//! So Debian's 6.12 kernel boots in qemu, emulated so that it runs alike on every
//! machine, with an initramfs that holds byway and one shell script.
//! Nothing is installed, no network is attached, nothing outside the guest's folder is written.
//! Speeds seen in emulation say nothing.

mod attach;
mod boot;
mod cpio;
mod groups;
mod initramfs;
mod kernel;
mod modules;
mod nbd;
mod ocfs2;
mod p2p;
mod p2p_kernel;
mod power;
mod quota;
mod rdma;
mod setup;
mod unit;

use crate::process;
use anyhow::{Context, Result};
use clap::Subcommand;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

#[derive(Subcommand)]
pub enum Task {
    /// Download and unpack a kernel, qemu and a small userland (the other tasks do it at need).
    Setup,
    /// Put ext4 on the kernel's NBD client, kill the server while files are written, check them.
    Nbd,
    /// Attach volumes by ublk: ext4 on them, kills of their server and of their own process.
    Attach,
    /// Mount OCFS2 on one volume in two guests, with its server killed.
    Ocfs2,
    /// Cut the power while blocks and files are written: nothing acknowledged may be lost, and a server
    /// built to drop flushes must be caught.
    Power {
        /// Only this part of it.
        #[arg(long)]
        only: Option<power::Part>,
    },
    /// Use up a user's quota on ext4 and xfs through a mount of a share: the write that finds none left fails with EDQUOT.
    Quota,
    /// Move data between two RDMA devices of software: messages, writes, reads, wrong keys, a killed peer.
    Rdma {
        /// Only this part of it.
        #[arg(long)]
        only: Option<rdma::Part>,
    },
    /// Stage a disk's data in the memory of its own controller: right bytes both ways, counted, and what is missing named.
    P2p,
    /// Run dist/byway.service under the systemd of Debian 12: start, clients, reload, kill, stop.
    Unit,
}

pub fn run(task: &Task) -> Result<()> {
    let start = Instant::now();
    let system = setup::provide()?;
    match task {
        Task::Setup => println!("guest setup: {}", system.folder().display()),
        Task::Nbd => nbd::run(&system)?,
        Task::Attach => attach::run(&system)?,
        Task::Ocfs2 => ocfs2::run(&system)?,
        Task::Power { only } => power::run(&system, *only)?,
        Task::Quota => quota::run(&system)?,
        Task::Rdma { only } => rdma::run(&system, *only)?,
        Task::P2p => p2p::run(&system)?,
        Task::Unit => unit::run(&system)?,
    }
    println!("{} s", start.elapsed().as_secs());
    Ok(())
}

/// All tests that need a guest.
pub fn run_all() -> Result<()> {
    run(&Task::Nbd)?;
    run(&Task::Attach)?;
    run(&Task::Ocfs2)?;
    run(&Task::Power { only: None })?;
    run(&Task::Quota)?;
    run(&Task::Rdma { only: None })?;
    run(&Task::P2p)?;
    run(&Task::Unit)
}

/// Builds byway and says where it is: for guests in which speed does not matter, since this takes a fraction of the time.
fn build_byway_for_tests() -> Result<PathBuf> {
    process::run(process::cargo().args(["build", "--package", "byway"]))?;
    Ok(process::target_directory()?.join("debug/byway"))
}

/// Builds the release binary and says where it is.
fn build_byway() -> Result<PathBuf> {
    process::run(process::cargo().args(["build", "--release", "--package", "byway"]))?;
    Ok(process::target_directory()?.join("release/byway"))
}

/// Builds an example and says where it is. Under emulation the optimised build is slow too, so that of the tests will do.
fn build_example(package: &str, name: &str) -> Result<PathBuf> {
    process::run(process::cargo().args(["build", "--package", package, "--example", name]))?;
    Ok(process::target_directory()?.join("debug/examples").join(name))
}

/// Builds a suite of tests and says where it is.
fn build_suite(package: &str, name: &str) -> Result<PathBuf> {
    let build = ["test", "--no-run", "--message-format", "json", "--package", package, "--test", name];
    let told = process::output(process::cargo().args(build))?;
    let path = told.rsplit_once(r#""executable":""#).and_then(|(_, rest)| Some(rest.split_once('"')?.0));
    Ok(path.with_context(|| format!("cargo says nothing of the suite {name}"))?.into())
}

/// Compiles an example of the C library with `cc` and says where it is; as above.
fn build_c_example(name: &str) -> Result<PathBuf> {
    process::run(process::cargo().args(["build", "--package", "byway-capi"]))?;
    let (capi, target) = (process::workspace_root().join("crates/capi"), process::target_directory()?.join("debug"));
    let program = target.join(format!("examples/c-{name}"));
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"]).arg(capi.join("include"));
    compile.arg(capi.join(format!("examples/{name}.c"))).arg(target.join("libbyway.a"));
    process::run(compile.args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program))?;
    Ok(program)
}

/// Builds the binary that acknowledges flushes and does nothing, apart from the good one; for tests, as above.
fn build_byway_that_drops_flushes() -> Result<PathBuf> {
    let target = process::target_directory()?.join("drop-flushes");
    process::run(
        process::cargo()
            .args(["build", "--package", "byway", "--features", "drop-flushes", "--target-dir"])
            .arg(&target),
    )?;
    Ok(target.join("debug/byway"))
}
