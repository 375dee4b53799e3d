//! `byway dsm`: jobs of processes that share memory.

mod top;

use std::ffi::OsString;
use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use byway_dsm::launch::{CheckpointFolder, HostLink, Hosts, JobEnd, JobReport, Launch, LaunchError, Stream, run_agent};
use byway_dsm::limits::{KEEP_ALIVE_MAX, KEEP_ALIVE_MIN, PAGE_BYTES};
use byway_dsm::{Consistency, Waits, Wire};
use byway_service::limits::{DSM_PAGES_MAX, DSM_RANKS_MAX};
use clap::{Args, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP};

pub use self::top::{DsmTopArguments, DsmTopError};
use crate::help;
use crate::output;
use crate::units::parse_size;

/// What to do with jobs.
#[derive(Subcommand, Debug)]
pub enum DsmCommand {
    /// Run a program as several processes that share memory, on this machine or several
    #[command(after_long_help = help::DSM_RUN)]
    Run(DsmRunArguments),
    /// Show what the processes of a running job wait for, each second on a terminal, else once
    #[command(after_long_help = help::DSM_TOP)]
    Top(DsmTopArguments),
    /// Start the process that standard input names: what `run --hosts` runs on each host
    #[command(hide = true)]
    Rank,
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
    /// Hosts that get equal parts of the processes: tcp://HOST:PORT,... (over TLS) or rdma://HOST:PORT,...; each process listens at PORT or a
    /// following port of its host
    #[arg(long, value_name = "URI,...", value_delimiter = ',', conflicts_with = "wire", value_parser = parse_host)]
    pub hosts: Vec<DsmHost>,
    /// Do not encrypt what processes send over tcp://: for networks that you trust
    #[arg(long, requires = "hosts")]
    pub plain: bool,
    /// Command that runs a command on a host; followed by the host's name and the command
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes", requires = "hosts")]
    pub rsh: String,
    /// Order of loads and stores: sc (sequential), or rc (release), faster where processes write to words of one page; for programs without data races
    #[arg(long, value_name = "NAME", default_value = "sc", value_parser = parse_consistency)]
    pub consistency: Consistency,
    /// Size limit of all segments together, at most 64G; untouched pages use no memory
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = parse_memory)]
    pub memory: u64,
    /// Seconds of silence, times 1.5, after which a process is taken for stopped or cut off and the job ends; raise it to debug a process
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(KEEP_ALIVE_MIN.as_secs()..=KEEP_ALIVE_MAX.as_secs()))]
    pub keep_alive: u64,
    /// How each process waits for the others: sleep, poll for 50 us first while cores are idle, spin, which keeps a core busy, or points, which
    /// leaves the others' requests to safe points of the program
    #[arg(long, value_name = "HOW", default_value = "sleep", value_parser = parse_waits)]
    pub pager: Waits,
    /// Folder for checkpoints, which programs write by Job::checkpoint or byway_dsm_checkpoint; all hosts must share it
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Start with the segments as the checkpoint in DIR has them; -n, --memory and --consistency must be those of its job
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,
    /// Show at the end which pages several processes stored to, how long each process waited for pages, and what they sent to each other
    #[arg(long)]
    pub report: bool,
    /// Program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// A machine of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DsmHost {
    /// For `--rsh`.
    name: String,
    /// The address that it has here.
    address: SocketAddr,
    is_rdma: bool,
}

fn parse_wire(name: &str) -> Result<Wire, String> {
    Wire::from_name(name).ok_or_else(|| format!("{name} is not one of shm, unix, tcp"))
}

fn parse_host(uri: &str) -> Result<DsmHost, String> {
    let (scheme, place) = uri.split_once("://").unwrap_or_default();
    let is_rdma = match scheme {
        "tcp" => false,
        "rdma" => true,
        _ => return Err(format!("{uri} is neither tcp://HOST:PORT nor rdma://HOST:PORT")),
    };
    let (name, _) = place.rsplit_once(':').ok_or_else(|| format!("{uri} has no port"))?;
    let address = place.to_socket_addrs().map_err(|error| format!("{uri}: {error}"))?.next();
    let address = address.ok_or_else(|| format!("{name} has no address"))?;
    Ok(DsmHost { name: name.trim_matches(['[', ']']).to_owned(), address, is_rdma })
}

fn parse_waits(name: &str) -> Result<Waits, String> {
    Waits::from_name(name).ok_or_else(|| format!("{name} is not one of sleep, poll, spin, points"))
}

fn parse_consistency(name: &str) -> Result<Consistency, String> {
    Consistency::from_name(name).ok_or_else(|| format!("{name} is neither sc nor rc"))
}

fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let (least, most) = (PAGE_BYTES as u64, DSM_PAGES_MAX * PAGE_BYTES as u64);
    if (least..=most).contains(&bytes) { Ok(bytes) } else { Err("the memory is 4K to 64G".to_owned()) }
}

/// The job that the command line describes.
fn launch(arguments: &DsmRunArguments) -> Result<Launch, LaunchError> {
    let (program, rest) = arguments.program.split_first().ok_or(LaunchError::Ranks(0))?;
    let hosts = if arguments.hosts.is_empty() {
        None
    } else {
        let start = arguments.rsh.split_whitespace().map(Into::into).collect();
        let agent = vec![std::env::current_exe()?.into(), "dsm".into(), "rank".into()];
        let link = match arguments.hosts.iter().filter(|host| host.is_rdma).count() {
            0 if arguments.plain => HostLink::Plain,
            0 => HostLink::Tls,
            rdma if rdma == arguments.hosts.len() => HostLink::Rdma,
            _ => return Err(LaunchError::Links),
        };
        let hosts = arguments.hosts.iter().map(|host| (host.name.clone(), host.address)).collect();
        Some(Hosts { hosts, start, agent, link })
    };
    Ok(Launch {
        wire: arguments.wire,
        hosts,
        bytes: arguments.memory,
        keep_alive: Duration::from_secs(arguments.keep_alive),
        waits: arguments.pager,
        consistency: arguments.consistency,
        checkpoint: arguments.checkpoint.clone().map(|folder| CheckpointFolder { folder, resume: arguments.resume }),
        reports: arguments.report,
        arguments: rest.to_vec(),
        ..Launch::new(usize::from(arguments.processes), program)
    })
}

/// Why a command did nothing.
#[derive(Debug, thiserror::Error)]
pub enum DsmError {
    /// No job was started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// No job was shown.
    #[error(transparent)]
    Top(#[from] DsmTopError),
}

/// Runs a command.
///
/// # Errors
/// See [`DsmError`].
pub fn run(command: &DsmCommand) -> Result<ExitCode, DsmError> {
    match command {
        DsmCommand::Run(arguments) => Ok(run_job(arguments)?),
        DsmCommand::Top(arguments) => Ok(top::run(arguments)?),
        DsmCommand::Rank => Ok(run_agent()),
    }
}

/// Runs a job. The exit code is 0 if every process ended with 0, else that of the first process that failed, and 130 if a signal
/// stopped the job. An error: nothing was started.
fn run_job(arguments: &DsmRunArguments) -> Result<ExitCode, LaunchError> {
    let job = launch(arguments)?;
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP, SIGTSTP])?;
    let running = job.start()?;
    let stopper = running.stopper();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        signals.forever().for_each(|signal| if signal == SIGTSTP { stopper.suspend() } else { stopper.stop() });
    })?;
    let mut report = arguments.report.then(|| JobReport::new(usize::from(arguments.processes)));
    let end = running.wait(|rank, stream, line| {
        let left = match &mut report {
            Some(report) if stream == Stream::Error => report.take(rank, line),
            _ => Some(line),
        };
        if let Some(line) = left {
            print(rank, stream, line);
        }
    });
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
    if let Some(report) = report {
        let _ = write!(std::io::stderr(), "{report}");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_uris_with_ports() {
        let (name, address) = ("127.0.0.1".to_owned(), ([127, 0, 0, 1], 7000).into());
        assert_eq!(parse_host("tcp://127.0.0.1:7000"), Ok(DsmHost { name, address, is_rdma: false }));
        assert!(parse_host("rdma://127.0.0.1:7000").unwrap().is_rdma);
        assert_eq!(parse_host("tcp://[::1]:7000").unwrap().name, "::1");
        for wrong in ["127.0.0.1:7000", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "byway://127.0.0.1:7000", ""] {
            assert!(parse_host(wrong).is_err(), "{wrong}");
        }
    }
}
