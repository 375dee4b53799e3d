//! `byway bench`: what is measured on this machine.

pub mod fabric;
pub mod volume;

use std::time::Duration;

use clap::Subcommand;

use self::fabric::{FabricBenchArguments, FabricBenchError};
use self::volume::{VolumeBenchArguments, VolumeBenchError};
use crate::figures::{
    self, FiguresArguments, FiguresError, MemoryProgramArguments, ResponderArguments, ResponderError,
};
use crate::help;
use crate::serve::ServeError;

/// What is measured.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Read or write a volume of a node or an NBD server and print rate, latencies and cost
    #[command(after_long_help = help::BENCH_VOLUME)]
    Volume(VolumeBenchArguments),
    /// Many clients that write to a server with few receive frames: throughput by clients, with and without server-driven
    /// transfer
    #[command(after_long_help = help::BENCH_FABRIC)]
    Fabric(FabricBenchArguments),
    /// A process of `byway bench fabric`; started by it
    #[command(hide = true)]
    FabricPart {
        /// What to do, as JSON.
        part: String,
    },
    /// Do the figures of the papers on this machine, and write a report: whether their shape holds here, and why
    #[command(after_long_help = help::BENCH_FIGURES)]
    Figures(FiguresArguments),
    /// The memory-bound program beside a node; started by `byway bench figures`
    #[command(hide = true)]
    MemoryProgram(MemoryProgramArguments),
    /// The node that computes and answers calls; started by `byway bench figures`
    #[command(hide = true)]
    Responder(ResponderArguments),
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
    /// The program beside a node.
    #[error(transparent)]
    MemoryProgram(#[from] ServeError),
    /// The node that computes.
    #[error(transparent)]
    Responder(#[from] ResponderError),
}

/// Runs it.
///
/// # Errors
/// See [`BenchError`].
pub fn run(command: &BenchCommand) -> Result<(), BenchError> {
    match command {
        BenchCommand::Volume(arguments) => Ok(volume::run(arguments)?),
        BenchCommand::Fabric(arguments) => Ok(fabric::run(arguments)?),
        BenchCommand::FabricPart { part } => Ok(fabric::run_part(part)?),
        BenchCommand::Figures(arguments) => Ok(figures::run(arguments)?),
        BenchCommand::MemoryProgram(arguments) => Ok(figures::run_memory_program(*arguments)?),
        BenchCommand::Responder(arguments) => Ok(figures::run_responder(arguments)?),
    }
}

/// CPU time of this process, user and system.
pub(crate) fn own_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
