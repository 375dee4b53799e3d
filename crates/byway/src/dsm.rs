//! `byway dsm run`: jobs of processes that share memory.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitCode;
use std::time::Duration;

use byway_dsm::launch::{JobEnd, Launch, LaunchError, Stream};
use byway_dsm::limits::{KEEP_ALIVE_MAX, KEEP_ALIVE_MIN, PAGE_BYTES};
use byway_dsm::{Waits, Wire};
use byway_service::limits::{DSM_PAGES_MAX, DSM_RANKS_MAX};
use clap::{Args, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::help;
use crate::output;
use crate::units::parse_size;

/// What to do with jobs.
#[derive(Subcommand, Debug)]
pub enum DsmCommand {
    /// Run a program as several processes that share memory, on this machine
    #[command(after_long_help = help::DSM_RUN)]
    Run(DsmRunArguments),
}

/// The flags of `byway dsm run`.
#[derive(Args, Debug)]
pub struct DsmRunArguments {
    /// Number of processes, 1 to 64
    #[arg(short = 'n', value_name = "N", value_parser = clap::value_parser!(u8).range(1..=DSM_RANKS_MAX as i64))]
    pub processes: u8,
    /// Transport between the processes: shm, unix or tcp (over loopback)
    #[arg(long, value_name = "WIRE", default_value = "shm", value_parser = parse_wire)]
    pub wire: Wire,
    /// Size limit of all segments together, at most 64G; untouched pages use no memory
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = parse_memory)]
    pub memory: u64,
    /// Seconds of silence, times 1.5, after which a process is taken for stopped or cut off and the job ends; raise it to debug a process
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(KEEP_ALIVE_MIN.as_secs()..=KEEP_ALIVE_MAX.as_secs()))]
    pub keep_alive: u64,
    /// How the pager thread of each process waits: sleep, or spin, which keeps a core busy
    #[arg(long, value_name = "HOW", default_value = "sleep", value_parser = parse_waits)]
    pub pager: Waits,
    /// Program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

fn parse_wire(name: &str) -> Result<Wire, String> {
    Wire::from_name(name).ok_or_else(|| format!("{name} is not one of shm, unix, tcp"))
}

fn parse_waits(name: &str) -> Result<Waits, String> {
    Waits::from_name(name).ok_or_else(|| format!("{name} is neither sleep nor spin"))
}

fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let (least, most) = (PAGE_BYTES as u64, DSM_PAGES_MAX * PAGE_BYTES as u64);
    if (least..=most).contains(&bytes) { Ok(bytes) } else { Err("the memory is 4K to 64G".to_owned()) }
}

/// Runs a job. The exit code is 0 if every process ended with 0, else that of the first process that failed, and 130 if a signal
/// stopped the job.
///
/// # Errors
/// Nothing was started.
pub fn run(command: &DsmCommand) -> Result<ExitCode, LaunchError> {
    let DsmCommand::Run(arguments) = command;
    let (program, rest) = arguments.program.split_first().ok_or(LaunchError::Ranks(0))?;
    let job = Launch {
        wire: arguments.wire,
        bytes: arguments.memory,
        keep_alive: Duration::from_secs(arguments.keep_alive),
        waits: arguments.pager,
        arguments: rest.to_vec(),
        ..Launch::new(usize::from(arguments.processes), program)
    };
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let running = job.start()?;
    let stopper = running.stopper();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        signals.forever().for_each(|_| stopper.stop());
    })?;
    let end = running.wait(print);
    match end {
        JobEnd::Well | JobEnd::Stopped => {}
        JobEnd::Failed { rank, status } => {
            let how = match (status.code(), status.signal()) {
                (_, Some(signal)) => format!("was killed by signal {signal}"),
                (code, None) => format!("ended with status {}", code.unwrap_or_default()),
            };
            output::note(format_args!("rank {rank} {how}, and with it the job"));
        }
        JobEnd::Left { rank } => {
            output::note(format_args!(
                "rank {rank} ended before it had left the job (Job::finish), and with it the job"
            ));
        }
        JobEnd::Hung { rank } => {
            output::note(format_args!("rank {rank} was stopped or hung when the job ended, and was killed"));
        }
    }
    Ok(ExitCode::from(end.code()))
}

/// A line of a process, with its rank before it. What the reader of the job's output does not take is the job's loss.
fn print(rank: usize, stream: Stream, line: &[u8]) {
    let whole = [format!("[{rank}] ").as_bytes(), line, b"\n"].concat();
    let _ = match stream {
        Stream::Output => output::stdout().write_all(&whole).and_then(|()| output::stdout().flush()),
        Stream::Error => std::io::stderr().write_all(&whole),
    };
}
