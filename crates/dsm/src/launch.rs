//! Starts a job's processes on this machine, passes on what they print, and ends them all.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use byway_service::limits::DSM_RANKS_MAX;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, set_parent_process_death_signal};

use crate::EXIT_JOB_ENDED;
use crate::environment::{BYTES, FOLDER, JOB, RANK, RANKS, WIRE, Wire};
use crate::limits::{AREA_BYTES_DEFAULT, END_TIME_MAX, OUTPUT_LINE_BYTES_MAX};

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// How many processes, 1 to 64.
    pub ranks: usize,
    /// How they reach each other.
    pub wire: Wire,
    /// Bytes of memory that all segments together may have.
    pub bytes: u64,
    /// The program.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
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
    /// The program was not found, or may not be run.
    #[error("{}: {error}", program.to_string_lossy())]
    Program {
        /// Which.
        program: OsString,
        /// The kernel's.
        error: std::io::Error,
    },
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
    /// The job was stopped by [`Stopper::stop`].
    Stopped,
}

/// Stops a job from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Sender<Event>);

impl Stopper {
    /// Kills all processes of the job. Does nothing when it has ended.
    pub fn stop(&self) {
        let _ = self.0.send(Event::Stop);
    }
}

#[derive(Debug)]
enum Event {
    Line(usize, Stream, Vec<u8>),
    Exited(usize, ExitStatus),
    Stop,
}

/// A job that runs. Dropped, it is killed.
#[derive(Debug)]
pub struct Running {
    processes: Vec<OwnedFd>,
    pids: Vec<u32>,
    events: Receiver<Event>,
    stopper: Stopper,
    /// Whether each has ended, and how.
    ended: Vec<Option<ExitStatus>>,
    /// Removed at the end.
    folder: tempfile::TempDir,
}

impl Launch {
    /// A job of `ranks` processes of a program, over shared memory.
    pub fn new(ranks: usize, program: impl Into<OsString>) -> Self {
        let (wire, bytes) = (Wire::default(), AREA_BYTES_DEFAULT);
        Self { ranks, wire, bytes, program: program.into(), arguments: Vec::new() }
    }

    /// Starts the processes. They end when the thread that called this ends.
    ///
    /// # Errors
    /// See [`LaunchError`]; none of them runs then.
    pub fn start(&self) -> Result<Running, LaunchError> {
        if self.ranks == 0 || self.ranks > DSM_RANKS_MAX {
            return Err(LaunchError::Ranks(self.ranks));
        }
        let folder = tempfile::Builder::new().prefix("byway-dsm-").tempdir()?;
        let job =
            u64::from_ne_bytes(byway_fabric::random::Random::from_kernel().bytes16()[..8].try_into().unwrap_or([7; 8]));
        let (sender, events) = channel();
        let (processes, pids) = (Vec::new(), Vec::new());
        let ended = Vec::new();
        let mut running = Running { processes, pids, events, stopper: Stopper(sender.clone()), ended, folder };
        for rank in 0..self.ranks {
            let mut command = Command::new(&self.program);
            command.args(&self.arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.env(RANK, rank.to_string()).env(RANKS, self.ranks.to_string()).env(JOB, job.to_string());
            command.env(FOLDER, running.folder.path()).env(WIRE, self.wire.name()).env(BYTES, self.bytes.to_string());
            if rank > 0 {
                command.stdin(Stdio::null());
            }
            // SAFETY: one system call between fork and exec, which allocates nothing.
            unsafe {
                command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
            }
            let program = self.program.clone();
            let child = command.spawn().map_err(|error| LaunchError::Program { program, error })?;
            running.watch(rank, child, &sender)?;
        }
        Ok(running)
    }
}

impl Running {
    /// Passes on what a process prints, and tells of its end.
    fn watch(&mut self, rank: usize, mut child: Child, events: &Sender<Event>) -> std::io::Result<()> {
        self.pids.push(child.id());
        let pid = Pid::from_child(&child);
        let pipes = [
            (Stream::Output, child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>)),
            (Stream::Error, child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>)),
        ];
        self.processes.push(pidfd_open(pid, PidfdFlags::empty())?);
        self.ended.push(None);
        let mut readers = Vec::new();
        for (stream, pipe) in pipes {
            let (Some(pipe), events) = (pipe, events.clone()) else { continue };
            readers.push(std::thread::Builder::new().spawn(move || pass_on(pipe, rank, stream, &events))?);
        }
        let events = events.clone();
        std::thread::Builder::new().spawn(move || {
            let status = child.wait();
            // What it printed comes first.
            for reader in readers {
                let _ = reader.join();
            }
            if let Ok(status) = status {
                let _ = events.send(Event::Exited(rank, status));
            }
        })?;
        Ok(())
    }

    /// The processes' numbers, by rank.
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// What stops it.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Waits for the end of all processes. When one has failed, the others have [`END_TIME_MAX`] to end, and are killed then.
    /// `print` gets each line that a process prints, without its end.
    pub fn wait(mut self, mut print: impl FnMut(usize, Stream, &[u8])) -> JobEnd {
        let (mut failures, mut deadline, mut is_stopped) = (Vec::new(), None, false);
        while self.ended.iter().any(Option::is_none) {
            let event = match deadline {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => self.events.recv_timeout(Instant::saturating_duration_since(&at, Instant::now())),
            };
            match event {
                Ok(Event::Line(rank, stream, line)) => print(rank, stream, &line),
                Ok(Event::Exited(rank, status)) => {
                    self.ended[rank] = Some(status);
                    if !status.success() {
                        failures.push((rank, status));
                        deadline.get_or_insert_with(|| Instant::now() + END_TIME_MAX);
                    }
                }
                Ok(Event::Stop) => {
                    is_stopped = true;
                    self.kill();
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.kill();
                    deadline = None;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if is_stopped {
            return JobEnd::Stopped;
        }
        // Those that ended because another had gone come after that one.
        let is_cause = |(_, status): &&(usize, ExitStatus)| status.code() != Some(EXIT_JOB_ENDED);
        let first = failures.iter().find(is_cause).or(failures.first());
        first.map_or(JobEnd::Well, |(rank, status)| JobEnd::Failed { rank: *rank, status: *status })
    }

    fn kill(&self) {
        for (process, ended) in self.processes.iter().zip(&self.ended) {
            if ended.is_none() {
                // One that has just ended is no fault.
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
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
            Self::Stopped => 130,
        }
    }
}

/// Lines, the last one also without its end.
fn pass_on(pipe: Box<dyn Read + Send>, rank: usize, stream: Stream, events: &Sender<Event>) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut line = Vec::new();
        match (&mut pipe).take(OUTPUT_LINE_BYTES_MAX as u64).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if line.ends_with(b"\n") {
                    line.pop();
                }
                let _ = events.send(Event::Line(rank, stream, line));
            }
        }
    }
}
