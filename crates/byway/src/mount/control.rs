//! The socket of a mount's process: it tells how the mount is, and hands the mount over to another process.
//!
//! A takeover has four steps. The process stops reading requests, answers those that it has, ends the session with the server, and sends
//! channels and state. The other process goes on with the session and says `ready`. Only then does this one say `yours` and end; until
//! that moment it goes on if anything fails, also if the other one dies.

use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use byway_frontend::fuse::{Control, Handover, PauseError};
use byway_service::file::client::SuspendError;
use byway_service::limits::FILE_GRACE;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};

use super::document::{Document, DocumentError, VERSION};
use super::filesystem::Mounted;
use super::registry::{MountAnswer, MountSocket, Question, hear, tell};
use super::status::MountStatus;
use crate::limits::{MOUNT_CONTROL_THREADS, MOUNT_HANDOVER_FDS_MAX};

/// How long a connection may take to say what it wants.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(5);

/// How long calls of programs may take that are under way when a takeover begins.
const PAUSE_TIME_MAX: Duration = Duration::from_secs(20);

/// How long the process prepares in all: it ends these calls, and opens files at the server that it has opened without it.
pub(super) const PREPARE_TIME_MAX: Duration = Duration::from_secs(40);
const _: () = assert!(PAUSE_TIME_MAX.as_secs() < PREPARE_TIME_MAX.as_secs());

/// How long the other process may take to go on with the session. Programs wait meanwhile, and the server keeps locks for longer than
/// that ([`FILE_GRACE`]). The end of a process that has files of the mount open is not noticed before: it waits for the mount to
/// close them.
pub(super) const TAKEOVER_TIME_MAX: Duration = Duration::from_secs(10);
const _: () = assert!(TAKEOVER_TIME_MAX.as_secs() < FILE_GRACE.as_secs());

/// What the other process says when it can serve the mount.
pub(super) const READY: &str = "ready";
/// What it is told then.
pub(super) const YOURS: &str = "yours";
/// What it is told if it took too long.
pub(super) const MINE: &str = "mine";

/// A mount, as its socket has it.
pub(super) struct MountControl {
    pub(super) mounted: Mounted,
    pub(super) driver: Control,
    pub(super) directory: PathBuf,
    pub(super) uri: String,
    pub(super) since: u64,
    pub(super) takeovers: u32,
    /// Held during a takeover.
    pub(super) handing_over: Mutex<()>,
}

/// Why a mount is not handed over. Its process goes on.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandoverError {
    #[error("another process is taking the mount over")]
    Busy,
    #[error(
        "this mount is handed over in version {VERSION}, and the asking program takes version {0}; unmount, and mount again"
    )]
    Version(u32),
    #[error("the server cannot be reached now, and the next process would have to; try again when it is back")]
    Away,
    #[error(transparent)]
    Pause(#[from] PauseError),
    #[error(transparent)]
    Suspend(#[from] SuspendError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("cannot hand the mount over: {0}")]
    Send(#[from] io::Error),
}

impl MountControl {
    fn status(&self) -> MountStatus {
        let (read_bytes, written_bytes) = self.mounted.counters.bytes();
        MountStatus {
            directory: self.directory.clone(),
            uri: self.uri.clone(),
            pid: std::process::id(),
            since: self.since,
            takeovers: self.takeovers,
            calls: self.mounted.counters.calls(),
            under_way: self.driver.under_way() as u64,
            times: self.mounted.counters.times(),
            errors: self.mounted.counters.errors(),
            read_bytes,
            written_bytes,
            client: self.mounted.client.report().into(),
        }
    }

    fn serve_one(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(REQUEST_TIME_MAX))?;
        stream.set_write_timeout(Some(REQUEST_TIME_MAX))?;
        let peer = sockopt::socket_peercred(stream)?.uid;
        if peer != rustix::process::geteuid() && !peer.is_root() {
            return tell(stream, &MountAnswer::Failed("the mount is another user's".to_owned()));
        }
        match hear(stream)? {
            Question::Status => tell(stream, &MountAnswer::Status(Box::new(self.status()))),
            Question::AwaitEnd => self.mounted.end.awaited_by(stream),
            Question::TakeOver { version } => match self.hand_over(stream, version) {
                Ok(()) => Ok(()),
                Err(error) => {
                    tracing::warn!(%error, "the mount is not handed over, and stays with this process");
                    tell(stream, &MountAnswer::Failed(error.to_string()))
                }
            },
        }
    }

    fn hand_over(&self, stream: &UnixStream, version: u32) -> Result<(), HandoverError> {
        let Ok(_one) = self.handing_over.try_lock() else { return Err(HandoverError::Busy) };
        self.mounted.end.set_handed_over(true);
        let handed_over = self.hand_over_alone(stream, version);
        // After a success this process ends.
        if !matches!(handed_over, Ok(true)) {
            self.mounted.end.set_handed_over(false);
        }
        handed_over.map(|_| ())
    }

    /// False: the other process has not taken the mount.
    fn hand_over_alone(&self, stream: &UnixStream, version: u32) -> Result<bool, HandoverError> {
        if version != VERSION {
            return Err(HandoverError::Version(version));
        }
        if !self.mounted.client.report().connected {
            return Err(HandoverError::Away);
        }
        let begun = Instant::now();
        self.driver.pause(PAUSE_TIME_MAX)?;
        let given = self.give(stream, PREPARE_TIME_MAX.saturating_sub(begun.elapsed()));
        if matches!(given, Ok(true)) {
            tracing::info!("another process has taken the mount over; this one ends");
            self.driver.leave();
            return given;
        }
        self.mounted.client.resume();
        self.driver.go_on();
        if given.is_ok() {
            tracing::warn!("the process that was to take the mount over has not; this one goes on");
        }
        given
    }

    /// Sends channels and state. False: the other process does not take them.
    fn give(&self, stream: &UnixStream, limit: Duration) -> Result<bool, HandoverError> {
        let client = self.mounted.client.suspend(limit)?;
        let Handover { terms, channels, requests } = self.driver.handover()?;
        let document = Document {
            terms,
            since: self.since,
            takeovers: self.takeovers + 1,
            requests,
            owners: self.mounted.locks().owners.iter().copied().collect(),
            mapped: self.mounted.mapped.all(),
            client,
        };
        let memory = memory_of(&document.encode()?)?;
        send(stream, &memory, &channels)?;
        stream.set_read_timeout(Some(TAKEOVER_TIME_MAX))?;
        let is_ready = hear::<String>(stream).is_ok_and(|word| word == READY);
        let told = tell(stream, &if is_ready { YOURS } else { MINE });
        Ok(is_ready && told.is_ok())
    }
}

fn memory_of(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create(c"byway-mount", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file.into())
}

fn send(stream: &UnixStream, memory: &OwnedFd, channels: &[OwnedFd]) -> io::Result<()> {
    let mut line = serde_json::to_vec(&MountAnswer::Handover { channels: channels.len() })?;
    line.push(b'\n');
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(memory).chain(channels).map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOUNT_HANDOVER_FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(stream, &[IoSlice::new(&line)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Answers on threads of its own until the process ends.
///
/// # Errors
/// No threads.
pub(super) fn serve(control: &Arc<MountControl>, socket: &MountSocket) -> io::Result<()> {
    for _ in 0..MOUNT_CONTROL_THREADS {
        let (control, listener) = (Arc::clone(control), socket.listener.try_clone()?);
        let serve = move || {
            for stream in listener.incoming() {
                if let Err(error) = stream.and_then(|stream| control.serve_one(&stream)) {
                    tracing::debug!(%error, "cannot answer on the mount's socket");
                    // Out of descriptors, perhaps: not again and again.
                    std::thread::park_timeout(Duration::from_millis(100));
                }
            }
        };
        std::thread::Builder::new().name("byway-ctl".to_owned()).spawn(serve)?;
    }
    Ok(())
}
