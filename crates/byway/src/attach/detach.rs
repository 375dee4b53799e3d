//! `byway detach`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use byway_frontend::loop_device::is_claimed;
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::registry::{self, Attachment, KeeperRecord, Listed};
use crate::output;

/// How long a device may take to be written out and taken apart.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the successor of a killed process may take to begin.
const SUCCESSOR_LIMIT: Duration = Duration::from_secs(5);
/// How often it is looked for.
const LOOK_EACH: Duration = Duration::from_millis(20);
/// Processes that may be killed while their device is detached.
const DEATHS_MAX: usize = 8;

/// The flags of `byway detach`.
#[derive(Args, Debug)]
pub struct DetachArguments {
    /// Name of the device, as byway attach --list shows it, or its path
    #[arg(value_name = "NAME|DEVICE")]
    pub which: String,
}

/// Why a device is still there.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    /// No such attachment.
    #[error("nothing is attached as {0}; byway attach --list shows what is")]
    Unknown(String),
    /// It is in use.
    #[error("{} is in use{}; unmount it first, or end what uses it (swapoff, dmsetup remove, mdadm --stop)", device.display(), shown(mounts))]
    InUse {
        /// The device.
        device: PathBuf,
        /// Where it is mounted.
        mounts: Vec<String>,
    },
    /// A program has it open, or its server does not answer.
    #[error(
        "{} is not gone after {} s: a program has it open, or the volume's server does not answer (log: {}); it goes when that \
         ends", device.display(), LIMIT.as_secs(), log.display()
    )]
    Slow {
        /// The device.
        device: PathBuf,
        /// The process's log.
        log: PathBuf,
    },
    /// Another user's.
    #[error("cannot signal the device's process: {0}; run this as root")]
    Process(io::Error),
    /// It has ended, and its last flush failed.
    #[error("{name} is detached, and writes may be lost: {reason} (log: {})", log.display())]
    Unflushed {
        /// The attachment.
        name: String,
        /// What its process said.
        reason: String,
        /// The process's log.
        log: PathBuf,
    },
    /// The registry.
    #[error("/run/byway-attach: {0}")]
    State(io::Error),
}

fn shown(mounts: &[String]) -> String {
    if mounts.is_empty() { String::new() } else { format!(" (mounted on {})", mounts.join(", ")) }
}

/// Detaches a volume, and waits until all writes have reached the server.
///
/// # Errors
/// See [`DetachError`].
pub fn detach(arguments: &DetachArguments) -> Result<(), DetachError> {
    let which = &arguments.which;
    let mut found = find(which)?.ok_or_else(|| DetachError::Unknown(which.clone()))?;
    let mut ended = None;
    for _ in 0..DEATHS_MAX {
        // A successor has the name before its number is in the registry.
        let is_dead = !found.lives || ended == Some(found.attachment.pid);
        if is_dead && found.attachment.is_kept() {
            found = await_successor(found)?;
        }
        ended = Some(found.attachment.pid);
        let keeper = found.attachment.file.map(|file| file.keeper);
        detach_one(found)?;
        // It was killed instead, if its device is there: its keeper goes on with a successor.
        match find(which)? {
            Some(next) if next.attachment.is_kept() && next.attachment.file.map(|file| file.keeper) == keeper => {
                found = next;
            }
            _ => return Ok(()),
        }
    }
    let log = registry::log_of(&found.attachment.name);
    Err(DetachError::Slow { device: found.attachment.device, log })
}

/// An attachment by its name or device.
fn find(which: &str) -> Result<Option<Listed>, DetachError> {
    let real = std::fs::canonicalize(which).ok();
    let is_meant = |listed: &Listed| {
        let attachment = &listed.attachment;
        attachment.name == which || real.as_deref() == Some(attachment.device.as_path())
    };
    Ok(registry::list().map_err(DetachError::State)?.into_iter().find(is_meant))
}

/// Waits for the successor of a process that has died. If none comes, the keeper fails what waits, and ends.
fn await_successor(died: Listed) -> Result<Listed, DetachError> {
    let limit = Instant::now() + SUCCESSOR_LIMIT;
    let name = died.attachment.name.clone();
    while Instant::now() < limit {
        let has_begun = |found: &Listed| found.lives && found.attachment.pid != died.attachment.pid;
        let is_over = |found: &Listed| has_begun(found) || !found.attachment.is_kept();
        if let Some(found) = find(&name)?.filter(is_over) {
            return Ok(found);
        }
        std::thread::park_timeout(LOOK_EACH);
    }
    if let Some(keeper) = died.attachment.file.map(|file| file.keeper).filter(KeeperRecord::lives) {
        end(keeper.pid, &died.attachment)?;
    }
    Ok(find(&name)?.unwrap_or(died))
}

/// Detaches the devices that were found.
fn detach_one(found: Listed) -> Result<(), DetachError> {
    let Listed { attachment, lives } = found;
    if !lives {
        attachment.remove_device();
        let Some(reason) = &attachment.failed else {
            registry::remove(&attachment.name);
            output::note(
                "its process had died before, and writes after the last flush may be lost; what uses the device still gets I/O \
                 errors",
            );
            return Ok(());
        };
        return unflushed(&attachment, reason.clone());
    }
    if is_claimed(&attachment.device).unwrap_or(false) {
        let mounts = mounts_of(&attachment.device);
        return Err(DetachError::InUse { device: attachment.device, mounts });
    }
    end(attachment.pid, &attachment)?;
    flushed(&attachment)
}

/// Has a process of an attachment end, and waits for that.
fn end(pid: i32, attachment: &Attachment) -> Result<(), DetachError> {
    let failed = |error: Errno| DetachError::Process(error.into());
    let process = Pid::from_raw(pid).ok_or(DetachError::Process(io::ErrorKind::InvalidData.into()))?;
    let process = match pidfd_open(process, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(Errno::SRCH) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    match pidfd_send_signal(&process, Signal::TERM) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => return Err(failed(error)),
    }
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let ended = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)));
    match ended.map_err(failed)? {
        0 => Err(DetachError::Slow { device: attachment.device.clone(), log: registry::log_of(&attachment.name) }),
        _ => Ok(()),
    }
}

/// The process is gone: whether all that was written is at the server. If it was killed, its successor has to say that.
fn flushed(attachment: &Attachment) -> Result<(), DetachError> {
    if find(&attachment.name)?.is_some_and(|now| now.attachment.is_kept()) {
        return Ok(());
    }
    match registry::take_failure(attachment) {
        None => Ok(()),
        Some(reason) => unflushed(attachment, reason),
    }
}

fn unflushed(attachment: &Attachment, reason: String) -> Result<(), DetachError> {
    registry::remove(&attachment.name);
    let (name, log) = (attachment.name.clone(), registry::log_of(&attachment.name));
    Err(DetachError::Unflushed { name, reason, log })
}

/// Where a device is mounted, as this process sees it.
fn mounts_of(device: &Path) -> Vec<String> {
    let Ok(table) = std::fs::read_to_string("/proc/self/mounts") else { return Vec::new() };
    let of_device = |line: &str| {
        let mut words = line.split(' ');
        (words.next().map(Path::new) == Some(device)).then(|| words.next().map(str::to_owned)).flatten()
    };
    table.lines().filter_map(of_device).collect()
}
