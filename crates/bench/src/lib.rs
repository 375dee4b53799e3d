//! `byway bench`: measurements on this machine.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]

pub mod fabric;
pub mod figures;
mod help;
mod limits;
mod parent;
mod statistics;
pub mod volume;
mod workplace;

use std::error::Error;
use std::time::Duration;

use clap::{Args, Subcommand};

use self::fabric::{FabricBenchArguments, FabricBenchError};
use self::figures::{
    FiguresArguments, FiguresError, MemoryProgramArguments, ResponderArguments, ResponderError, SharedProgramArguments,
    SharedProgramError,
};
use self::volume::{VolumeBenchArguments, VolumeBenchError};

pub use self::workplace::Workplace;

/// What is measured.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Read or write a volume, over byway's own protocol or NBD, and print rate, latency and CPU time
    #[command(after_long_help = help::BENCH_VOLUME)]
    Volume(VolumeBenchArguments),
    /// Write to a server with few receive buffers from many clients, with and without server-driven transfer, and print the
    /// throughput for each number of clients
    #[command(after_long_help = help::BENCH_FABRIC)]
    Fabric(FabricBenchArguments),
    /// A process of `byway bench fabric`; started by it
    #[command(hide = true)]
    FabricPart {
        /// What to do, as JSON.
        part: String,
    },
    /// Repeat the experiments of the papers on this machine, and report whether their results hold here
    #[command(after_long_help = help::BENCH_FIGURES)]
    Figures(FiguresArguments),
    /// The memory-bound program beside a node; started by `byway bench figures`
    #[command(hide = true)]
    MemoryProgram(MemoryProgramArguments),
    /// A rank of a job with shared memory; started by `byway bench figures`
    #[command(hide = true)]
    SharedMemoryProgram(SharedProgramArguments),
    /// The node that computes and answers calls; started by `byway bench figures`
    #[command(hide = true)]
    Responder(ResponderArguments),
    /// A node; started by `byway bench figures` and `byway demo`
    #[command(hide = true)]
    Node(MeasuredNode),
}

/// A node that ends with the process that has started it.
#[derive(Args, Debug)]
pub struct MeasuredNode {
    /// End when this process, the parent, ends
    #[arg(long, value_name = "PID")]
    pub end_with: i32,
    /// Send long reads from disk in slices of so many bytes
    #[arg(long, value_name = "SIZE", value_parser = byway_remote::units::parse_size)]
    pub slice: Option<u64>,
    /// Memory for payloads between a store and the wire
    #[arg(long, value_name = "SIZE", value_parser = byway_remote::units::parse_size)]
    pub staging: Option<u64>,
    /// The arguments of `byway serve`
    #[arg(last = true)]
    pub serve: Vec<String>,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// `bench volume`.
    #[error(transparent)]
    Volume(#[from] VolumeBenchError),
    /// `bench fabric`.
    #[error(transparent)]
    Fabric(#[from] FabricBenchError),
    /// `bench figures`.
    #[error(transparent)]
    Figures(#[from] FiguresError),
    /// A process that a measurement has started cannot end with it.
    #[error("cannot end with the process that started this: {0}")]
    EndWith(std::io::Error),
    /// A rank of a job.
    #[error(transparent)]
    SharedProgram(#[from] SharedProgramError),
    /// The node that computes.
    #[error(transparent)]
    Responder(#[from] ResponderError),
}

impl BenchError {
    /// Whether another command line mends it.
    pub fn is_command_line(&self) -> bool {
        matches!(
            self,
            Self::Volume(VolumeBenchError::Block(_))
                | Self::Fabric(FabricBenchError::Block(_) | FabricBenchError::Points)
                | Self::Figures(FiguresError::Unknown(_))
        )
    }
}

/// Runs it; `serve` is a node, which the program on top of this crate has.
///
/// # Errors
/// See [`BenchError`]; and those of `serve`.
pub fn run(
    command: &BenchCommand,
    serve: fn(&MeasuredNode) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    if let BenchCommand::Node(node) = command {
        parent::end_with(node.end_with).map_err(BenchError::EndWith)?;
        return serve(node);
    }
    Ok(measure(command)?)
}

fn measure(command: &BenchCommand) -> Result<(), BenchError> {
    match command {
        BenchCommand::Volume(arguments) => Ok(volume::run(arguments)?),
        BenchCommand::Fabric(arguments) => Ok(fabric::run(arguments)?),
        BenchCommand::FabricPart { part } => Ok(fabric::run_part(part)?),
        BenchCommand::Figures(arguments) => Ok(figures::run(arguments)?),
        BenchCommand::MemoryProgram(arguments) => figures::run_memory_program(*arguments).map_err(BenchError::EndWith),
        BenchCommand::SharedMemoryProgram(arguments) => Ok(figures::run_shared_program(*arguments)?),
        BenchCommand::Responder(arguments) => Ok(figures::run_responder(arguments)?),
        BenchCommand::Node(_) => Ok(()),
    }
}

/// CPU time of this process, user and system.
pub fn own_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
