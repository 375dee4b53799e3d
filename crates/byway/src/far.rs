//! `byway far`: runs a program with part of its memory on other machines.
//!
//! It is two processes ([`keeper`]). The first, the keeper, passes signals on and gives the program's exit status; its child is the pager.

mod signals;
pub(crate) mod status;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use byway_fabric::node::NodeOptions;
use byway_frontend::far_memory::spill_file;
use byway_frontend::fault::keeper::{self, Keeper, Side, end_descendants};
use byway_frontend::fault::{self, FarJob, FarOptions, FarReport};
use byway_reactor::owned_folder::OwnedFolder;
use byway_reactor::userfault::OpenError;
use byway_reactor::userfault::helper::SOCKET_VARIABLE;
use byway_service::memory::pool::Class;
use byway_service::memory::{BorrowError, Borrower};
use clap::Args;
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, WaitStatus, getrlimit, setrlimit, wait};

use self::signals::{PagerSignals, keep};
use crate::executable::{self, ExecutableError};
use crate::limits::FAR_LIMIT_BYTES_MIN;
use crate::remote::{RemoteUri, RemoteUriError};
use crate::units::{parse_size, show_size};

/// How long a lender may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The library's file, beside this program or where the installation has it.
pub(crate) const LIBRARY: &str = "libbyway_preload.so";

/// The flags of `byway far`.
#[derive(Args, Debug)]
pub struct FarArguments {
    /// Memory that the program and its children may keep on this machine, in total; at least 16M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub limit: u64,
    /// Lenders (byway serve --lend): byway://HOST[:PORT], byway+unix:///?socket=PATH, byway+shm:///?socket=PATH or
    /// byway+rdma://ADDRESS; several, separated by commas, are used in turn
    #[arg(long, value_name = "URI", value_delimiter = ',', required = true)]
    pub from: Vec<RemoteUri>,
    /// Where each page that left this machine is kept: disk (at a lender and in a file of this machine), mirror=2 (at two lenders),
    /// parity=4+1 (at one of five lenders, of which any four can compute it), or none (at one lender: when it is lost, a program that touches such a page gets SIGBUS)
    #[arg(long, value_name = "CLASS", default_value = "disk", value_parser = parse_class)]
    pub class: Class,
    /// Folder of the file for --class disk
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub spill: PathBuf,
    /// Seal each page that leaves this machine (AES-256-GCM), with a key that stays in this process: lenders and the file of --class disk
    /// have ciphertext alone, and a changed page is noticed
    #[arg(long)]
    pub encrypt: bool,
    /// Print statistics of local and far memory to standard error at the end
    #[arg(long)]
    pub report: bool,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

fn parse_class(text: &str) -> Result<Class, String> {
    match text {
        "none" => Ok(Class::None),
        "disk" => Ok(Class::Disk),
        "mirror=2" => Ok(Class::Mirror),
        "parity=4+1" => Ok(Class::Parity),
        _ => Err("a class is none, disk, mirror=2 or parity=4+1".to_owned()),
    }
}

/// Why a program was not run, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum FarError {
    /// The program.
    #[error(transparent)]
    Executable(#[from] ExecutableError),
    /// Too little memory to go on.
    #[error("--limit {0}: a program needs at least 16M; give more")]
    Limit(u64),
    /// The kernel.
    #[error("this machine does not let byway page programs: {0} (fork events need root or CAP_SYS_PTRACE)")]
    Userfault(#[from] OpenError),
    /// Not byway's wire, or TLS.
    #[error(
        "{0} is not the address of a lender; write byway://HOST, byway+unix:///?socket=PATH or byway+shm:///?socket=PATH"
    )]
    NoLender(String),
    /// The lender's address.
    #[error(transparent)]
    Uri(#[from] RemoteUriError),
    /// The lender.
    #[error("{uri}: {source}")]
    Lender {
        /// Which.
        uri: String,
        /// Why not.
        source: BorrowError,
    },
    /// Too few lenders for the class.
    #[error("--class mirror=2 keeps each page at two lenders: name at least two with --from")]
    Mirror,
    /// The same.
    #[error("--class parity=4+1 keeps four pages and their parity at five lenders: name at least five with --from")]
    Parity,
    /// The library.
    #[error(
        "{LIBRARY} is not beside this program, nor in ../lib/byway: build it with `cargo build -p byway-preload`, or install byway"
    )]
    NoLibrary,
    /// The file for pages.
    #[error("{}: {source}; name a folder with --spill that can be written, or keep no copies on disk with --class none", folder.display())]
    Spill {
        /// Where.
        folder: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The program cannot be started.
    #[error("{program}: {source}")]
    Start {
        /// Which.
        program: String,
        /// Why not.
        source: std::io::Error,
    },
    /// The pager.
    #[error("the pager cannot work: {0}")]
    Pager(Box<dyn std::error::Error>),
}

/// What the program's standard error says when one of the two processes was killed.
const PAGER_KILLED: &str =
    "byway far: the pager was killed; pages of its programs are lost with it, so they are killed too";
const KEEPER_KILLED: &str = "byway far: its first process was killed; so its programs are killed too";

/// Runs the program; gives its exit status, or 128 and the signal that ended it.
///
/// # Errors
/// See [`FarError`].
pub fn run(arguments: &FarArguments) -> Result<ExitCode, FarError> {
    if arguments.limit < FAR_LIMIT_BYTES_MIN {
        return Err(FarError::Limit(arguments.limit));
    }
    if arguments.class == Class::Mirror && arguments.from.len() < 2 {
        return Err(FarError::Mirror);
    }
    if arguments.class == Class::Parity && arguments.from.len() < Class::Parity.lenders() {
        return Err(FarError::Parity);
    }
    let name = arguments.command.first().ok_or(ExecutableError::NoName)?;
    let program = executable::find(name)?;
    executable::check(&program)?;
    fault::availability()?;
    let library = executable::library(LIBRARY).ok_or(FarError::NoLibrary)?;
    match keeper::split().map_err(|error| FarError::Pager(error.into()))? {
        Side::Keeper(pager) => keep(pager).map_err(|error| FarError::Pager(error.into())),
        Side::Pager(keeper) => {
            let paged = catch_unwind(AssertUnwindSafe(|| page(arguments, &program, &library, keeper)));
            // The keeper is to see that this was no exit of the program's.
            paged.unwrap_or_else(|_| std::process::abort())
        }
    }
}

/// Pages the program, and all that it starts.
fn page(arguments: &FarArguments, program: &Path, library: &Path, keeper: Keeper) -> Result<ExitCode, FarError> {
    let rpc = Borrower::open_node(&NodeOptions::default()).map_err(|error| FarError::Pager(error.into()))?;
    let lenders = borrow(&rpc, arguments)?;
    let spill = match arguments.class {
        Class::None | Class::Mirror | Class::Parity => None,
        Class::Disk => Some(
            spill_file(&arguments.spill)
                .map_err(|source| FarError::Spill { folder: arguments.spill.clone(), source })?,
        ),
    };
    let folder = OwnedFolder::make("byway-far").map_err(|error| FarError::Pager(error.into()))?;
    let socket = folder.path().join("pager");
    let options =
        FarOptions { limit_bytes: arguments.limit, class: arguments.class, spill, encrypt: arguments.encrypt };
    let job = FarJob::new(rpc, lenders, &socket, options).map_err(FarError::Pager)?;
    let signals = PagerSignals::take().map_err(|error| FarError::Pager(error.into()))?;
    let mut command = Command::new(program);
    command.args(&arguments.command[1..]).env(SOCKET_VARIABLE, &socket).env("LD_PRELOAD", executable::preload(library));
    let child = command
        .arg0(&arguments.command[0])
        .spawn()
        .map_err(|source| FarError::Start { program: program.display().to_string(), source })?;
    allow_all_descriptors();
    let mut program = Program { number: Pid::from_child(&child), status: None, is_ended: false };
    let report = job.run(|| {
        if !keeper.is_alive() && !program.is_ended {
            crate::output::note(KEEPER_KILLED.to_owned());
            end_descendants();
            program.is_ended = true;
        }
        signals.pass_on(program.status.is_none().then_some(program.number));
        if signals.take_child_ended() || program.status.is_some() {
            program.reap();
        }
        program.is_ended
    });
    if report.is_err() {
        end_descendants();
    }
    let report = report.map_err(|error| FarError::Pager(error.into()))?;
    if arguments.report {
        say(&report, arguments.limit);
    }
    Ok(code(program.status))
}

/// Raises the limit of open files to the most that this process may have: each program takes several. Programs keep the limit that they inherited.
fn allow_all_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

/// The program that was named, and all that it has started.
struct Program {
    number: Pid,
    status: Option<WaitStatus>,
    /// Nothing is left of it, also none of the programs that it left behind: one that is just starting is not paged yet.
    is_ended: bool,
}

impl Program {
    /// Takes note of children that have ended. A process whose parent has ended is a child of this one.
    fn reap(&mut self) {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((ended, status))) if ended == self.number => self.status = Some(status),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return,
                Err(_) => return self.is_ended = true,
            }
        }
    }
}

/// As a shell gives it.
fn code(status: Option<WaitStatus>) -> ExitCode {
    let Some(status) = status else { return ExitCode::FAILURE };
    let code = status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The lenders, with their addresses. One that cannot be used says so now, and not in the midst of the program.
fn borrow(rpc: &byway_rpc::node::Rpc, arguments: &FarArguments) -> Result<Vec<(String, Borrower)>, FarError> {
    let mut named = Vec::new();
    for uri in &arguments.from {
        let has_volume = uri.volume().is_some_and(|name| !name.is_empty());
        if !matches!(uri, RemoteUri::Native(_)) || has_volume || uri.wants_tls() {
            return Err(FarError::NoLender(uri.to_string()));
        }
        named.push((uri.to_string(), uri.resolve()?));
    }
    let lenders = Borrower::connect_all(rpc, &named, arguments.class, PATIENCE)
        .map_err(|unusable| FarError::Lender { uri: named[unusable.lender].0.clone(), source: unusable.source })?;
    Ok(named.into_iter().map(|(uri, _)| uri).zip(lenders).collect())
}

fn say(report: &FarReport, limit: u64) {
    let (counters, pool) = (&report.pager, &report.pool);
    crate::output::note(format!(
        "byway far: {} programs; at most {} of {} here; {} faults: {} zeroed, {} returned, {} fetched; {} brought ahead, {} of them used; {} put, {} unchanged, {} went as \
         zeroes, {} protected pages written, {} moves refused, {} lost; {} lenders given up, {} pages copied again, {} from another copy, {} with a wrong checksum",
        report.programs,
        show_size(report.resident_bytes_max as u64),
        show_size(limit),
        counters.faults,
        counters.zeroed,
        counters.returned,
        counters.fetched,
        counters.ahead,
        counters.ahead_used,
        counters.put,
        counters.unchanged,
        counters.went_zero,
        counters.unprotected,
        counters.stayed,
        counters.lost,
        pool.given_up,
        pool.copied,
        pool.failed_over,
        pool.corrupt,
    ));
    if let Some(text) = status::percentiles(&report.latencies) {
        crate::output::note(format!("byway far: waits for a page: {text}"));
    }
}
