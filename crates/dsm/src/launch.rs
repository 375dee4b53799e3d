//! Starts a job's processes, on this machine or on several, passes on their output, and ends them all.

mod agent;
mod hosts;
mod lines;
mod process;
mod strays;

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::owned_folder::OwnedFolder;
use byway_service::dsm::Consistency;
use byway_service::limits::DSM_RANKS_MAX;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::Signal;

use self::agent::order;
pub use self::agent::run_agent;
use self::hosts::job_key;
pub use self::hosts::{HostLink, Hosts};
use self::process::{Input, Process};
use self::strays::kill_strays;
use crate::EXIT_JOB_ENDED;
use crate::checkpoint::{CheckpointError, Manifest, pages_of_segments};
use crate::environment::{
    BYTES, CHECKPOINT, CONSISTENCY, FOLDER, JOB, KEEP_ALIVE, PEERS, RANK, RANKS, REPORT, RESUME, TLS, WAITS, WIRE,
    Waits, Wire,
};
use crate::limits::{AREA_BYTES_DEFAULT, END_TIME_MAX, KEEP_ALIVE_DEFAULT, OUTPUT_TIME_MAX, PAGE_BYTES};
pub use crate::report::JobReport;
pub use crate::report::live::{LiveJob, LiveLook, LiveRates, live_jobs};

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// How many processes, 1 to 64.
    pub ranks: usize,
    /// How they reach each other on one machine.
    pub wire: Wire,
    /// Where they run, if not here.
    pub hosts: Option<Hosts>,
    /// Bytes of memory that all segments together may have.
    pub bytes: u64,
    /// A process of which nothing has come for 1.5 times as long ends the job: from
    /// [`KEEP_ALIVE_MIN`](crate::limits::KEEP_ALIVE_MIN) to [`KEEP_ALIVE_MAX`](crate::limits::KEEP_ALIVE_MAX).
    pub keep_alive: Duration,
    /// What pagers do while there is nothing to do.
    pub waits: Waits,
    /// What the program may rely on.
    pub consistency: Consistency,
    /// Where it writes checkpoints, if it does.
    pub checkpoint: Option<CheckpointFolder>,
    /// The processes tell at the end what they have counted, in lines for [`JobReport::take`].
    pub reports: bool,
    /// The program.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// The folder of a job's checkpoints. Over several machines, all see it at the same path.
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    /// Where. It is made if it is not there.
    pub folder: PathBuf,
    /// The job resumes from the checkpoint that is there; else there must be none.
    pub resume: bool,
}

/// Where a process printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

/// Why no job was started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Too many or none.
    #[error("a job has 1 to {DSM_RANKS_MAX} processes, not {0}")]
    Ranks(usize),
    /// A machine for each process at most, and at least one.
    #[error("{0} processes cannot run on {1} machines: give at least one machine, and at least one process for each")]
    Hosts(usize, usize),
    /// The program was not found, or may not be run.
    #[error("{}: {error}", program.to_string_lossy())]
    Program {
        /// Which.
        program: OsString,
        /// The kernel's.
        error: std::io::Error,
    },
    /// Not all machines are reached alike.
    #[error("the hosts of a job are all tcp:// or all rdma://")]
    Links,
    /// The folder for checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No certificate and key for the job.
    #[error("the job's key cannot be made: {0}")]
    Key(#[from] rcgen::Error),
    /// The kernel's.
    #[error("the job cannot be started: {0}")]
    Io(#[from] std::io::Error),
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// Every process ended with status 0.
    Well,
    /// A process failed, and with it the job.
    Failed {
        /// The first that did.
        rank: usize,
        /// How.
        status: ExitStatus,
    },
    /// A process ended with status 0 before it had left the job ([`Job::finish`](crate::Job::finish)).
    Left {
        /// Which.
        rank: usize,
    },
    /// The job had failed, and a process did not end: it was stopped or hung, and was killed.
    Hung {
        /// The first.
        rank: usize,
    },
    /// The job was stopped by [`Stopper::stop`].
    Stopped,
}

/// Stops or suspends a job from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    const STOP: u64 = 1;
    const SUSPEND: u64 = 1 << 32;

    /// Kills all processes of the job. Does nothing when it has ended.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.0, &Self::STOP.to_ne_bytes());
    }

    /// Stops the processes that run on this machine, and then this process, as a shell does with a job on SIGTSTP. When this process continues
    /// (SIGCONT), so do they. Does nothing when the job has ended.
    pub fn suspend(&self) {
        let _ = rustix::io::write(&*self.0, &Self::SUSPEND.to_ne_bytes());
    }
}

/// A job that runs. Dropped, it is killed.
#[derive(Debug)]
pub struct Running {
    processes: Vec<Process>,
    pids: Vec<u32>,
    /// The job's number, by which its processes are known.
    job: String,
    stopper: Stopper,
    /// Where they find each other on one machine.
    _folder: Option<OwnedFolder>,
    /// No other job writes checkpoints there.
    _checkpoint_lock: Option<File>,
}

/// What a job's launcher waits for.
#[derive(Clone, Copy)]
enum Source {
    Stop,
    Exit(usize),
    Output(usize, Stream),
}

impl Launch {
    /// A job of `ranks` processes of a program, over shared memory.
    pub fn new(ranks: usize, program: impl Into<OsString>) -> Self {
        Self {
            ranks,
            wire: Wire::default(),
            hosts: None,
            bytes: AREA_BYTES_DEFAULT,
            keep_alive: KEEP_ALIVE_DEFAULT,
            waits: Waits::default(),
            consistency: Consistency::default(),
            checkpoint: None,
            reports: false,
            program: program.into(),
            arguments: Vec::new(),
        }
    }

    /// Starts the processes. They end when the thread that called this ends.
    ///
    /// # Errors
    /// See [`LaunchError`]; none of them runs then.
    pub fn start(&self) -> Result<Running, LaunchError> {
        if self.ranks == 0 || self.ranks > DSM_RANKS_MAX {
            return Err(LaunchError::Ranks(self.ranks));
        }
        if let Some(Hosts { hosts, .. }) = &self.hosts
            && (hosts.is_empty() || hosts.len() > self.ranks)
        {
            return Err(LaunchError::Hosts(self.ranks, hosts.len()));
        }
        let checkpoint = self.checkpoint.as_ref().map(|place| self.check_checkpoint(place)).transpose()?;
        let (checkpoint, lock) = checkpoint.unzip();
        let job =
            u64::from_ne_bytes(byway_fabric::random::Random::from_kernel().bytes16()[..8].try_into().unwrap_or([7; 8]));
        let stopper = Stopper(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?));
        let places = self.hosts.as_ref().map(|hosts| hosts.places(self.ranks)).unwrap_or_default();
        let mut shared = self.variables(job, checkpoint);
        let mut folder = None;
        if let Some(hosts) = &self.hosts {
            let addresses: Vec<String> = places.iter().map(|(_, address)| address.to_string()).collect();
            shared.push((PEERS, addresses.join(",").into()));
            shared.push((WIRE, hosts.link.wire().into()));
            if hosts.link == HostLink::Tls {
                shared.push((TLS, job_key()?.into()));
            }
        } else {
            let made = folder.insert(OwnedFolder::make("byway-dsm")?);
            shared.push((FOLDER, made.path().into()));
            shared.push((WIRE, self.wire.name().into()));
        }
        let mut running = Running {
            processes: Vec::new(),
            pids: Vec::new(),
            job: job.to_string(),
            stopper,
            _folder: folder,
            _checkpoint_lock: lock,
        };
        for rank in 0..self.ranks {
            let mut variables = shared.clone();
            variables.push((RANK, rank.to_string().into()));
            let process = self.start_process(rank, places.get(rank).map(|(host, _)| *host), &variables)?;
            running.pids.push(process.pid());
            running.processes.push(process);
        }
        Ok(running)
    }

    /// What all processes are told, apart from how they reach each other.
    fn variables(&self, job: u64, checkpoint: Option<PathBuf>) -> Vec<(&'static str, OsString)> {
        let mut variables: Vec<(&str, OsString)> = vec![
            (RANKS, self.ranks.to_string().into()),
            (JOB, job.to_string().into()),
            (BYTES, self.bytes.to_string().into()),
            (KEEP_ALIVE, self.keep_alive.as_millis().to_string().into()),
            (WAITS, self.waits.name().into()),
            (CONSISTENCY, self.consistency.name().into()),
        ];
        variables.extend(self.reports.then(|| (REPORT, "1".into())));
        if let (Some(folder), Some(CheckpointFolder { resume, .. })) = (checkpoint, &self.checkpoint) {
            variables.push((CHECKPOINT, folder.into()));
            variables.extend(resume.then(|| (RESUME, "1".into())));
        }
        variables
    }

    /// The folder's path from the root, if it has what it must have, and its lock.
    fn check_checkpoint(&self, place: &CheckpointFolder) -> Result<(PathBuf, File), CheckpointError> {
        let failed = |error| CheckpointError::Io { path: place.folder.clone(), error };
        let folder = std::path::absolute(&place.folder).map_err(failed)?;
        if !place.resume {
            std::fs::create_dir_all(&folder).map_err(failed)?;
        } else if !folder.is_dir() {
            return Err(CheckpointError::Missing { folder });
        }
        let lock = lock_folder(&folder)?;
        if place.resume {
            let pages = pages_of_segments(self.bytes / PAGE_BYTES as u64);
            Manifest::to_resume(&folder, self.ranks, pages, self.consistency)?;
        } else {
            Manifest::must_be_missing(&folder)?;
        }
        Ok((folder, lock))
    }

    fn start_process(
        &self,
        rank: usize,
        host: Option<&str>,
        variables: &[(&str, OsString)],
    ) -> Result<Process, LaunchError> {
        let of = |program: &OsString| {
            let program = program.clone();
            move |error| LaunchError::Program { program, error }
        };
        if let (Some(host), Some(Hosts { start, agent, .. })) = (host, &self.hosts) {
            let mut words = start.iter().cloned().chain([host.into()]).chain(agent.iter().cloned());
            let program = words.next().unwrap_or_default();
            let mut command = std::process::Command::new(&program);
            command.args(words);
            let order = order(variables, &self.program, &self.arguments);
            return Process::start(command, Input::Order(order)).map_err(of(&program));
        }
        let mut command = std::process::Command::new(&self.program);
        command.args(&self.arguments).envs(variables.iter().map(|(name, value)| (name, value)));
        let input = if rank == 0 { Input::Inherited } else { Input::None };
        Process::start(command, input).map_err(of(&self.program))
    }
}

/// The file of a folder of checkpoints that the launcher of a running job has locked.
const CHECKPOINT_LOCK: &str = "lock";

/// Locks a folder of checkpoints, until the file is dropped or this process ends.
fn lock_folder(folder: &Path) -> Result<File, CheckpointError> {
    let path = folder.join(CHECKPOINT_LOCK);
    let failed = |error| CheckpointError::Io { path: path.clone(), error };
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(CheckpointError::InUse { folder: folder.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

impl Running {
    /// The processes' numbers, by rank.
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// What stops it.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Waits for the end of all processes. When one has failed, the others have [`END_TIME_MAX`] to end, and are killed then. When all have
    /// ended, so are their children that are still in their process groups, or have the job's environment. `print` gets each line that a process prints, without its end;
    /// while it does not return, the processes wait that print more than a pipe holds.
    pub fn wait(mut self, mut print: impl FnMut(usize, Stream, &[u8])) -> JobEnd {
        let (mut is_stopped, mut deadline, mut output_until) = (false, None, None);
        let mut order = Vec::new();
        loop {
            if output_until.is_none() && self.processes.iter().all(|process| process.ended().is_some()) {
                self.processes.iter().for_each(Process::kill_group);
                kill_strays(&[(JOB, &self.job)]);
                output_until = Some(Instant::now() + OUTPUT_TIME_MAX);
                deadline = output_until;
            }
            let is_open = self.processes.iter().any(Process::has_output);
            if output_until.is_some_and(|until| !is_open || Instant::now() >= until) {
                break;
            }
            let ready = self.poll(deadline);
            if output_until.is_none() && deadline.is_some_and(|at| Instant::now() >= at) {
                // What runs on another machine is told first, and then no more waited for.
                if self.processes.iter().any(Process::can_be_told) {
                    deadline = Some(Instant::now() + END_TIME_MAX);
                } else {
                    deadline = None;
                }
                self.kill();
            }
            for source in ready {
                match source {
                    Source::Stop => {
                        let mut count = [0; 8];
                        let _ = rustix::io::read(&*self.stopper.0, &mut count);
                        if u64::from_ne_bytes(count) % Stopper::SUSPEND == 0 {
                            self.suspend();
                            continue;
                        }
                        is_stopped = true;
                        deadline = Some(Instant::now() + END_TIME_MAX);
                        self.kill();
                    }
                    Source::Output(rank, stream) => {
                        self.processes[rank].read(stream, |line| print(rank, stream, line));
                    }
                    Source::Exit(rank) => {
                        let Some(status) = self.processes[rank].look_for_end() else { continue };
                        order.push(rank);
                        if !status.success() && output_until.is_none() {
                            deadline.get_or_insert_with(|| Instant::now() + END_TIME_MAX);
                        }
                    }
                }
            }
        }
        if is_stopped { JobEnd::Stopped } else { self.judge(&order) }
    }

    /// Waits for what can be done, or the deadline.
    fn poll(&self, deadline: Option<Instant>) -> Vec<Source> {
        let stop = (Source::Stop, self.stopper.0.as_fd());
        let mut sources: Vec<(Source, BorrowedFd<'_>)> = vec![stop];
        for (rank, process) in self.processes.iter().enumerate() {
            if process.ended().is_none() {
                sources.push((Source::Exit(rank), process.descriptor()));
            }
            for stream in [Stream::Output, Stream::Error] {
                sources.extend(process.pipe(stream).map(|pipe| (Source::Output(rank, stream), pipe)));
            }
        }
        let mut polled: Vec<PollFd<'_>> =
            sources.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        if poll(&mut polled, left.as_ref()).is_err() {
            return Vec::new();
        }
        let is_ready = |(_, polled): &(&(Source, BorrowedFd<'_>), &PollFd<'_>)| !polled.revents().is_empty();
        sources.iter().zip(&polled).filter(is_ready).map(|((source, _), _)| *source).collect()
    }

    /// The processes ended in this order.
    fn judge(&self, order: &[usize]) -> JobEnd {
        let ended = |rank: usize| self.processes[rank].ended().map(|status| (rank, status));
        let ends: Vec<(usize, ExitStatus)> = order.iter().filter_map(|rank| ended(*rank)).collect();
        let failures = || ends.iter().filter(|(_, status)| !status.success());
        let Some((first, status)) = failures().next() else { return JobEnd::Well };
        // Most failures follow from the first one: processes end because another has gone, or are killed here.
        let is_cause = |(rank, status): &&(usize, ExitStatus)| {
            status.code() != Some(EXIT_JOB_ENDED) && !self.processes[*rank].was_killed()
        };
        if let Some((rank, status)) = failures().find(is_cause) {
            return JobEnd::Failed { rank: *rank, status: *status };
        }
        if let Some((rank, _)) = ends.iter().find(|(_, status)| status.success()) {
            return JobEnd::Left { rank: *rank };
        }
        match failures().find(|(rank, _)| self.processes[*rank].was_killed()) {
            Some((rank, _)) => JobEnd::Hung { rank: *rank },
            None => JobEnd::Failed { rank: *first, status: *status },
        }
    }

    fn kill(&mut self) {
        self.processes.iter_mut().for_each(Process::kill);
    }

    /// Stops the processes and this one, until it continues.
    fn suspend(&self) {
        self.processes.iter().for_each(|process| process.signal(Signal::STOP));
        // SAFETY: a signal without a handler to this thread, which is stopped when the call returns.
        unsafe { libc::raise(libc::SIGSTOP) };
        self.processes.iter().for_each(|process| process.signal(Signal::CONT));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        kill_strays(&[(JOB, &self.job)]);
    }
}

impl JobEnd {
    /// The exit status that says it: of the process that failed, 128 and the signal's number if a signal ended it.
    pub fn code(&self) -> u8 {
        match self {
            Self::Well => 0,
            Self::Failed { status, .. } => {
                let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
                u8::try_from(code).unwrap_or(1)
            }
            Self::Left { .. } => EXIT_JOB_ENDED as u8,
            Self::Hung { .. } => 137,
            Self::Stopped => 130,
        }
    }
}
