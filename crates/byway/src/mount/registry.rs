//! The mounts of this user on this machine: a socket of each in a folder, on which its process answers.

use std::fs::Permissions;
use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Take, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use byway_fabric::random::Random;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::status::MountStatus;
use crate::limits::{MOUNT_ANSWER_BYTES_MAX, MOUNTS_LISTED_MAX};

/// Not in /run/byway, which systemd removes when a node of this machine stops (`RuntimeDirectory`).
const FOLDER: &str = "byway-mounts";

/// How long a process may take to answer. One that is stopped is passed over.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a mount's process is asked, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Question {
    /// [`MountAnswer::Status`].
    Status,
    /// [`MountAnswer::Handover`], or a failure. The version is that of the document.
    TakeOver {
        /// The version that the asking process reads.
        version: u32,
    },
    /// [`MountAnswer::Awaits`], [`MountAnswer::Ending`] when the mount ends, and [`MountAnswer::Ended`]; or a failure.
    AwaitEnd,
}

/// What it answers, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum MountAnswer {
    /// How it is.
    Status(Box<MountStatus>),
    /// The mount: with descriptors of the document and of so many channels.
    Handover {
        /// Channels of the mount.
        channels: usize,
    },
    /// The end of the mount will be told.
    Awaits,
    /// The kernel has ended the mount. Its process asks the server for a sync now.
    Ending,
    /// The sync is done, or has failed.
    Ended {
        /// Why what was written may not be durable at the server.
        not_durable: Option<String>,
    },
    /// No.
    Failed(String),
}

fn folder() -> PathBuf {
    let user = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !rustix::process::geteuid().is_root());
    user.map_or_else(|| PathBuf::from("/run"), PathBuf::from).join(FOLDER)
}

/// A directory as mounts are known by it. The directory itself is not looked at: its mount may not answer.
pub(super) fn path_of(directory: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(directory)?;
    Ok(match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize()?.join(name),
        _ => path,
    })
}

/// A mount's socket, whose file goes with it.
#[derive(Debug)]
pub(super) struct MountSocket {
    pub(super) listener: UnixListener,
    path: PathBuf,
}

impl MountSocket {
    /// Binds a new one in the folder.
    pub(super) fn bind() -> io::Result<Self> {
        Self::bind_in(&folder())
    }

    fn bind_in(folder: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        // Until it listens, the socket refuses connections as that of an ended process does, which `list_in` removes.
        let _listens_soon = lock(folder, FlockOperation::LockShared)?;
        let number = u32::from_le_bytes(*Random::from_kernel().bytes16().first_chunk().unwrap_or(&[0; 4]));
        let path = folder.join(format!("{}-{number:08x}.sock", std::process::id()));
        let socket = Self { listener: UnixListener::bind(&path)?, path };
        fs::set_permissions(&socket.path, Permissions::from_mode(0o600))?;
        Ok(socket)
    }
}

/// Locks the folder for as long as what this gives lives.
fn lock(folder: &Path, how: FlockOperation) -> io::Result<File> {
    let folder = File::open(folder)?;
    rustix::fs::flock(&folder, how)?;
    Ok(folder)
}

/// Removes the socket of a process that has ended, unless a process of this moment makes one.
fn remove_stale(folder: &Path, socket: &Path) {
    let Ok(_locked) = lock(folder, FlockOperation::NonBlockingLockExclusive) else { return };
    // It may listen by now.
    let refused = UnixStream::connect(socket).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    if refused {
        let _ = fs::remove_file(socket);
    }
}

impl Drop for MountSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Sends a line of JSON.
pub(super) fn tell(mut stream: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Lines of JSON that a connection brings, of [`MOUNT_ANSWER_BYTES_MAX`] together.
pub(super) struct Lines<S>(BufReader<Take<S>>);

impl<S: Read> Lines<S> {
    pub(super) fn of(stream: S) -> Self {
        Self(BufReader::new(stream.take(MOUNT_ANSWER_BYTES_MAX)))
    }

    pub(super) fn stream(&self) -> &S {
        self.0.get_ref().get_ref()
    }

    /// Waits for the next one. After an error of kind `WouldBlock` that found nothing of it, it can be waited for again.
    pub(super) fn hear<T: for<'de> Deserialize<'de>>(&mut self) -> io::Result<T> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        if !line.ends_with('\n') {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// Reads a line of JSON, after which no further one is sent before it is answered.
pub(super) fn hear<T: for<'de> Deserialize<'de>>(stream: &UnixStream) -> io::Result<T> {
    Lines::of(stream).hear()
}

fn status_at(path: &Path) -> io::Result<MountStatus> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    tell(&stream, &Question::Status)?;
    match hear(&stream)? {
        MountAnswer::Status(status) => Ok(*status),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// All mounts of this user whose processes answer, by directory. Sockets of processes that have ended are removed.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn all() -> io::Result<Vec<(PathBuf, MountStatus)>> {
    list_in(&folder())
}

fn list_in(folder: &Path) -> io::Result<Vec<(PathBuf, MountStatus)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut all = Vec::new();
    for entry in entries.take(MOUNTS_LISTED_MAX) {
        let path = entry?.path();
        match status_at(&path) {
            Ok(status) => all.push((path, status)),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => remove_stale(folder, &path),
            Err(error) => tracing::warn!(%error, path = %path.display(), "a mount's process does not answer"),
        }
    }
    all.sort_by(|(_, one), (_, other)| one.directory.cmp(&other.directory).then(one.since.cmp(&other.since)));
    Ok(all)
}

/// The socket and the state of the mount on a directory: of several, the one that was mounted last.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn find(directory: &Path) -> io::Result<Option<(PathBuf, MountStatus)>> {
    let path = path_of(directory)?;
    Ok(all()?.into_iter().rfind(|(_, status)| status.directory == path))
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};

    use super::*;

    #[test]
    fn a_socket_that_does_not_listen_yet_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("1-0.sock");
        let begins = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        // As `bind_in` does, up to `listen`.
        let binding = lock(folder.path(), FlockOperation::LockShared).unwrap();
        bind(&begins, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(list_in(folder.path()).unwrap().is_empty());
        assert!(path.exists(), "its process is about to listen");
        drop(binding);
        assert!(list_in(folder.path()).unwrap().is_empty());
        assert!(!path.exists(), "no process makes a socket, so this one's has ended");
    }

    #[test]
    fn sockets_stay_while_others_list_them() {
        let folder = tempfile::tempdir().unwrap();
        let rounds = 2000;
        std::thread::scope(|scope| {
            let binding = scope.spawn(|| {
                for _ in 0..rounds {
                    let socket = MountSocket::bind_in(folder.path()).unwrap();
                    assert!(socket.path.exists());
                }
            });
            while !binding.is_finished() {
                // None of them answers: each connection ends with its socket.
                let _ = list_in(folder.path());
            }
        });
    }
}
