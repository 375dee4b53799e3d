//! Checks, peers and guests of the byway workspace: `cargo xtask help`.
//!
//! Everything that a developer or the CI runs beyond plain cargo lives here, in Rust, so that the
//! project needs no script language and the checks themselves have tests.
#![forbid(unsafe_code)]

mod chart;
mod dist;
mod filesystem_suites;
mod fuzz;
mod guest;
mod install;
mod packages;
mod peers;
mod process;
mod suite;
mod tidy;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks, peers and guests of the byway workspace")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the rules of this project that no compiler knows.
    Tidy,
    /// Run the whole test suite against the release binary and say what was skipped.
    Test(suite::Options),
    /// Draw the chart of README.md from docs/peers-block.json, which `peers block --json` writes.
    Chart,
    /// Build the release into target/dist: stripped, with its debug information beside it.
    Dist,
    /// Run every fuzz target for a while.
    Fuzz(fuzz::Options),
    /// Install the library for C programs: header, archive, shared object, pkg-config file.
    Install(install::Options),
    /// Measure byway beside the servers that people use today.
    #[command(subcommand)]
    Peers(peers::Task),
    /// Run xfstests and LTP on mounts, from the folders that XFSTESTS_DIR and LTP_DIR name, and compare with what passed before.
    Suites(filesystem_suites::Options),
    /// Boot a stock kernel in emulation and test in it what a test on this machine cannot.
    #[command(subcommand)]
    Guest(guest::Task),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Tidy => tidy::run(),
        Task::Test(options) => suite::run(&options),
        Task::Chart => chart::run(),
        Task::Dist => dist::run(),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Install(options) => install::run(&options),
        Task::Peers(task) => peers::run(&task),
        Task::Suites(options) => filesystem_suites::run(&options),
        Task::Guest(task) => guest::run(&task),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
