//! The keeper of a loop device: a second process, which sleeps, holds the descriptors of the device, and starts a successor when the
//! serving process dies.
//!
//! As long as one process has `/dev/fuse` open, the kernel keeps the requests. The keeper is the process that was started; it starts the
//! one that serves, and gets the descriptors from it. It has another name than that one, so `killall byway` and `pkill byway` do not
//! kill both. If the keeper itself is killed, the serving process starts another one.

mod command;
mod link;
mod message;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::MlockAllFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::command::AttachError;
pub(super) use command::ServingCommand;
pub(super) use link::KeeperLink;
pub(super) use message::{Kept, KeptDevice};
use message::{Message, receive, send};

/// Successors begin at least so long after the process before, however often they die.
const PAUSE: Duration = Duration::from_secs(1);

/// The serving process.
struct Process {
    /// Readable once it has died.
    pidfd: OwnedFd,
    /// `None`: it has started this keeper.
    child: Option<Child>,
    socket: OwnedFd,
    /// It may say something on the socket.
    speaks: bool,
    begun: Instant,
}

struct Keeper {
    command: ServingCommand,
    /// Readable after a signal to end.
    signals: UnixStream,
    kept: Option<Kept>,
    /// `None`: it has died, and a successor is to begin.
    process: Option<Process>,
    /// The process has said that its device has ended.
    ended: bool,
    successor_at: Instant,
}

enum Woken {
    Signal,
    Message(Message, Vec<OwnedFd>),
    Death,
    /// A successor is to begin.
    Time,
}

/// Starts the process that serves a device, keeps the device, and ends as that process or its last successor does.
///
/// # Errors
/// The process cannot be started.
pub(super) fn run(command: ServingCommand) -> Result<ExitCode, AttachError> {
    let signals = settle().map_err(AttachError::Thread)?;
    let process = start(&command, Stdio::inherit(), &[]).map_err(|source| AttachError::Background { source })?;
    Keeper { command, signals, kept: None, process: Some(process), ended: false, successor_at: Instant::now() }.keep()
}

/// Keeps the device of a process whose keeper has died. Standard input is a socket to it.
///
/// # Errors
/// The kernel's.
pub(super) fn keep_for(command: ServingCommand, pid: i32) -> Result<ExitCode, AttachError> {
    let signals = settle().map_err(AttachError::Thread)?;
    let process = || {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        io::Result::Ok(Process { pidfd, child: None, socket, speaks: true, begun: Instant::now() })
    };
    let process = Some(process().map_err(AttachError::Thread)?);
    Keeper { command, signals, kept: None, process, ended: false, successor_at: Instant::now() }.keep()
}

/// Gives what is readable after a signal to end.
fn settle() -> io::Result<UnixStream> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    rustix::thread::set_name(c"attach-keeper")?;
    // It starts a successor while the kernel waits for that one to write pages back.
    if let Err(error) = rustix::mm::mlockall(MlockAllFlags::CURRENT) {
        tracing::warn!(%error, "the keeper's memory cannot be locked: do not swap to this device");
    }
    let (heard, told) = UnixStream::pair()?;
    heard.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(SIGTERM, told.try_clone()?)?;
    signal_hook::low_level::pipe::register(SIGINT, told)?;
    // A terminal that goes does not end a device.
    signal_hook::flag::register(SIGHUP, Arc::new(AtomicBool::new(false)))?;
    Ok(heard)
}

fn start(command: &ServingCommand, output: Stdio, kept: &[BorrowedFd<'_>]) -> io::Result<Process> {
    let (mut child, socket) = command.start_serving(output)?;
    let prepared = || {
        send(&socket, Message::Begin, kept)?;
        io::Result::Ok(pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?)
    };
    match prepared() {
        Ok(pidfd) => Ok(Process { pidfd, child: Some(child), socket, speaks: true, begun: Instant::now() }),
        Err(error) => {
            let _ = child.kill().and_then(|()| child.wait());
            Err(error)
        }
    }
}

impl Keeper {
    fn keep(mut self) -> Result<ExitCode, AttachError> {
        loop {
            match self.wait().map_err(AttachError::Thread)? {
                Woken::Signal => {
                    let Some(process) = &self.process else {
                        tracing::warn!("the device ends while no process serves it: requests that wait fail");
                        return Ok(ExitCode::FAILURE);
                    };
                    let _ = pidfd_send_signal(&process.pidfd, Signal::TERM);
                }
                Woken::Message(message, fds) => self.hear(message, fds),
                Woken::Death => {
                    if let Some(code) = self.bury() {
                        return Ok(code);
                    }
                }
                Woken::Time => self.start_successor(),
            }
        }
    }

    /// What happens next. What the process has said comes before its death.
    fn wait(&mut self) -> io::Result<Woken> {
        loop {
            let mut awaited = vec![PollFd::new(&self.signals, PollFlags::IN)];
            if let Some(process) = &self.process {
                awaited.push(PollFd::new(&process.pidfd, PollFlags::IN));
                if process.speaks {
                    awaited.push(PollFd::new(&process.socket, PollFlags::IN));
                }
            }
            let left = self.successor_at.saturating_duration_since(Instant::now());
            let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut awaited, self.process.is_none().then_some(&limit)) {
                Ok(0) => return Ok(Woken::Time),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let is_ready = |at: usize| awaited.get(at).is_some_and(|awaited| !awaited.revents().is_empty());
            let (signal, death, word) = (is_ready(0), is_ready(1), is_ready(2));
            if signal {
                while io::Read::read(&mut self.signals, &mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
                return Ok(Woken::Signal);
            }
            let Some(process) = self.process.as_mut().filter(|_| word || death) else { continue };
            if !word {
                return Ok(Woken::Death);
            }
            match receive(&process.socket) {
                Ok(Some((message, fds))) => return Ok(Woken::Message(message, fds)),
                Ok(None) => process.speaks = false,
                Err(error) => {
                    tracing::error!(%error, "the device's process cannot be understood");
                    process.speaks = false;
                }
            }
        }
    }

    fn hear(&mut self, message: Message, fds: Vec<OwnedFd>) {
        match message {
            Message::Begin => {}
            Message::Keep => match Kept::of(fds) {
                Ok(kept) => self.kept = kept,
                Err(error) => tracing::error!(%error, "the keeper cannot keep the device"),
            },
            Message::LetGo => {
                let device = self.kept.as_mut().and_then(|kept| kept.device.take());
                // The last user of a device waits until it is written, and that may need a successor.
                let closing = std::thread::Builder::new().name("byway-closing".to_owned()).spawn(move || drop(device));
                if let Err(error) = closing {
                    tracing::warn!(%error, "the device was let go without a thread");
                }
            }
            Message::End => self.ended = true,
        }
    }

    /// The process is dead. Gives the status of this one if no successor is to begin.
    fn bury(&mut self) -> Option<ExitCode> {
        let Process { child, begun, .. } = self.process.take()?;
        let status = child.map(|mut child| child.wait());
        if self.ended || self.kept.is_none() {
            let code = match status {
                None => Some(0),
                Some(status) => status.ok().and_then(|status| status.code()),
            };
            return Some(code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from));
        }
        tracing::warn!("the process of the device has died; requests wait for its successor, which begins");
        self.successor_at = begun + PAUSE;
        None
    }

    fn start_successor(&mut self) {
        let Some(kept) = &self.kept else { return };
        match start(&self.command, Stdio::null(), &kept.descriptors()) {
            Ok(process) => self.process = Some(process),
            Err(error) => {
                tracing::error!(%error, "a successor cannot be started; the keeper tries again");
                self.successor_at = Instant::now() + PAUSE;
            }
        }
    }
}
