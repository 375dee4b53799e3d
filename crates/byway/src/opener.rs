//! Opening files for a node: at start the node does it, and once it is confined a small process that is not.
//!
//! The opener is this program again (`byway opener`, not for people), started before the node is confined; with `--user` it
//! keeps root. It serves one socket, its standard input, and touches only files that the node's own configuration names,
//! which it reads anew for each request: an intruder in the node reaches no other file by it. It ends with the node.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use byway_reactor::device_memory::DeviceMemory;
use byway_reactor::socket_file::SocketFile;
use byway_service::block::spec::{Stage, VolumeSpec};
use byway_service::block::{FileIdentity, OpenError, OpenHere, Opener, StoreOptions};
use byway_service::file::Users;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use crate::address::Listen;
use crate::cli::ServeArguments;
use crate::config::Configuration;
use crate::limits::{OPENER_MESSAGE_BYTES_MAX, OPENER_REASON_BYTES_MAX};

/// Opens the files that a node needs.
pub trait Files: Opener {
    /// Opens a file of the configuration for reading: the configuration itself, certificates.
    ///
    /// # Errors
    /// The kernel's.
    fn read(&self, path: &Path) -> io::Result<File>;

    /// Which file or device a path of a store names now.
    ///
    /// # Errors
    /// The kernel's.
    fn identify(&self, path: &Path) -> io::Result<FileIdentity>;
}

impl Files for OpenHere {
    fn read(&self, path: &Path) -> io::Result<File> {
        File::open(path)
    }

    fn identify(&self, path: &Path) -> io::Result<FileIdentity> {
        FileIdentity::of_path(path)
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Store {
        path: PathBuf,
        read_only: bool,
        direct: bool,
        shared: bool,
    },
    Read {
        path: PathBuf,
    },
    Identify {
        path: PathBuf,
    },
    /// The memory of the disk of a store with `stage=device`.
    Memory {
        path: PathBuf,
    },
    /// Remove the file of a listener, if it is still this one.
    RemoveSocket {
        path: PathBuf,
        device: u64,
        inode: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// The descriptor comes with it.
    Opened,
    /// See [`FileIdentity`].
    Identity([u64; 4]),
    /// The descriptor of a PCI function's memory comes with it.
    Memory {
        function: String,
    },
    /// A socket's file, or that it was another's.
    Removed(bool),
    InUse,
    /// The kernel's error number.
    Failed(i32),
    /// The configuration does not name it, or cannot be read.
    Refused(String),
}

/// The node's end.
#[derive(Debug)]
pub struct PrivilegedOpener(Mutex<OwnedFd>);

impl PrivilegedOpener {
    /// Starts the opener of a node: this program with `arguments`, which are the node's own with `opener` for `serve`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> io::Result<Self> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Command::new("/proc/self/exe").args(arguments).stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Self(Mutex::new(ours)))
    }

    fn ask(&self, request: &Request) -> io::Result<(Reply, Option<OwnedFd>)> {
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        send(socket.as_fd(), request, None)?;
        receive(socket.as_fd())?.ok_or_else(|| io::Error::other("the privileged opener has ended; restart the node"))
    }

    /// Removes the file of a unix socket that the node has bound, unless another is there by now.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove_socket(&self, file: &SocketFile) -> io::Result<bool> {
        let SocketFile { path, device, inode } = file.clone();
        match self.ask(&Request::RemoveSocket { path, device, inode })?.0 {
            Reply::Removed(removed) => Ok(removed),
            reply => Err(reply.into_error()),
        }
    }

    fn open_file(&self, request: &Request) -> io::Result<Result<OwnedFd, Reply>> {
        Ok(match self.ask(request)? {
            (Reply::Opened, Some(fd)) => Ok(fd),
            (Reply::Opened, None) => Err(Reply::Failed(rustix::io::Errno::BADF.raw_os_error())),
            (reply, _) => Err(reply),
        })
    }
}

impl Reply {
    fn into_error(self) -> io::Error {
        match self {
            Self::Failed(errno) => io::Error::from_raw_os_error(errno),
            Self::Refused(reason) => io::Error::new(io::ErrorKind::PermissionDenied, reason),
            Self::InUse => io::ErrorKind::ResourceBusy.into(),
            Self::Opened | Self::Identity(_) | Self::Memory { .. } | Self::Removed(_) => {
                io::ErrorKind::InvalidData.into()
            }
        }
    }
}

impl Opener for PrivilegedOpener {
    fn open(&self, path: &Path, options: StoreOptions) -> Result<OwnedFd, OpenError> {
        let StoreOptions { read_only, direct, shared, .. } = options;
        let request = Request::Store { path: path.to_owned(), read_only, direct, shared };
        let failed = |source| OpenError::Open { path: path.to_owned(), source };
        match self.open_file(&request).map_err(failed)? {
            Ok(fd) => Ok(fd),
            Err(Reply::InUse) => {
                Err(OpenError::InUse { path: path.to_owned(), by: "it is mounted, or part of a device that is" })
            }
            Err(reply) => Err(failed(reply.into_error())),
        }
    }

    fn device_memory(&self, path: &Path) -> Result<DeviceMemory, OpenError> {
        let failed = |source| OpenError::Open { path: path.to_owned(), source };
        match self.ask(&Request::Memory { path: path.to_owned() }).map_err(failed)? {
            (Reply::Memory { function }, Some(fd)) => Ok(DeviceMemory::from_descriptor(function, fd)),
            (reply, _) => Err(failed(reply.into_error())),
        }
    }
}

impl Files for PrivilegedOpener {
    fn read(&self, path: &Path) -> io::Result<File> {
        let request = Request::Read { path: path.to_owned() };
        self.open_file(&request)?.map(File::from).map_err(Reply::into_error)
    }

    fn identify(&self, path: &Path) -> io::Result<FileIdentity> {
        match self.ask(&Request::Identify { path: path.to_owned() })? {
            (Reply::Identity(identity), _) => Ok(FileIdentity(identity)),
            (reply, _) => Err(reply.into_error()),
        }
    }
}

/// Serves standard input until the node has gone.
///
/// # Errors
/// The kernel's; `InvalidInput` if standard input is no socket of a node.
pub fn run(arguments: &ServeArguments) -> io::Result<()> {
    // Signals of the terminal are for the node; this process ends when the node does.
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, std::sync::Arc::default())?;
    }
    let stdin = io::stdin();
    while let Some((request, _)) = receive::<Request>(stdin.as_fd())? {
        let (reply, fd) = answer(arguments, &request);
        send(stdin.as_fd(), &reply, fd.as_ref().map(AsFd::as_fd))?;
    }
    Ok(())
}

fn answer(arguments: &ServeArguments, request: &Request) -> (Reply, Option<OwnedFd>) {
    try_answer(arguments, request).unwrap_or_else(|reply| (reply, None))
}

fn try_answer(arguments: &ServeArguments, request: &Request) -> Result<(Reply, Option<OwnedFd>), Reply> {
    match request {
        Request::Identify { path } => {
            let read_only = StoreOptions { read_only: true, ..StoreOptions::default() };
            named_as_store(arguments, path, read_only).map_err(refused)?;
            Ok((Reply::Identity(FileIdentity::of_path(path).map_err(failed)?.0), None))
        }
        Request::Read { path } => {
            named_for_reading(arguments, path).map_err(refused)?;
            let file = File::open(path).map_err(failed)?;
            Ok((Reply::Opened, Some(file.into())))
        }
        Request::Store { path, read_only, direct, shared } => {
            let (read_only, direct, shared) = (*read_only, *direct, *shared);
            let options = StoreOptions { read_only, direct, shared, ..StoreOptions::default() };
            named_as_store(arguments, path, options).map_err(refused)?;
            let fd = OpenHere.open(path, options).map_err(|error| match error {
                OpenError::Open { source, .. } => failed(source),
                OpenError::InUse { .. } => Reply::InUse,
                other => refused(other.to_string()),
            })?;
            Ok((Reply::Opened, Some(fd)))
        }
        Request::Memory { path } => {
            named_as_staged(arguments, path).map_err(refused)?;
            let memory = OpenHere.device_memory(path).map_err(|error| refused(error.to_string()))?;
            let function = memory.function().to_owned();
            Ok((Reply::Memory { function }, Some(memory.into_descriptor())))
        }
        Request::RemoveSocket { path, device, inode } => {
            named_as_listener(arguments, path).map_err(refused)?;
            let file = SocketFile { path: path.clone(), device: *device, inode: *inode };
            Ok((Reply::Removed(file.remove().map_err(failed)?), None))
        }
    }
}

// By value so that it can stand in `map_err`.
#[allow(clippy::needless_pass_by_value)]
fn failed(error: io::Error) -> Reply {
    error.raw_os_error().map_or_else(|| refused(error.to_string()), Reply::Failed)
}

/// The reason may quote a line of the configuration, of any length, and the reply must not be too long to be sent.
fn refused(mut reason: String) -> Reply {
    reason.truncate(reason.floor_char_boundary(OPENER_REASON_BYTES_MAX));
    Reply::Refused(reason)
}

fn named_for_reading(arguments: &ServeArguments, path: &Path) -> Result<(), String> {
    if arguments.config.as_deref() == Some(path) {
        return Ok(());
    }
    let configuration = Configuration::load(arguments).map_err(|error| error.to_string())?;
    let tls = configuration.tls.as_ref();
    let named = tls.is_some_and(|tls| {
        let files = [Some(&tls.certificate), Some(&tls.key), tls.client_ca.as_ref(), tls.crl.as_ref()];
        files.into_iter().flatten().any(|file| file == path)
    });
    let is_map = configuration.shares.iter().any(|share| matches!(&share.users, Users::Map(file) if file == path));
    if named || is_map { Ok(()) } else { Err("the configuration does not name this file".to_owned()) }
}

fn named_as_store(arguments: &ServeArguments, path: &Path, options: StoreOptions) -> Result<(), String> {
    let configuration = Configuration::load(arguments).map_err(|error| error.to_string())?;
    let named = configuration.volumes.iter().any(|volume| {
        volume.store.paths().contains(&path)
            && (options.read_only || !volume.read_only)
            && (volume.shared || !options.shared)
    });
    if named { Ok(()) } else { Err("the configuration does not name this store, or only to be read".to_owned()) }
}

fn named_as_staged(arguments: &ServeArguments, path: &Path) -> Result<(), String> {
    let configuration = Configuration::load(arguments).map_err(|error| error.to_string())?;
    let is_staged = |volume: &VolumeSpec| volume.direct && volume.stage == Some(Stage::Device);
    let named = configuration.volumes.iter().any(|volume| is_staged(volume) && volume.store.paths().contains(&path));
    if named { Ok(()) } else { Err("the configuration does not stage this store in its device".to_owned()) }
}

fn named_as_listener(arguments: &ServeArguments, path: &Path) -> Result<(), String> {
    let configuration = Configuration::load(arguments).map_err(|error| error.to_string())?;
    let listeners = configuration.nbd.iter().chain(&configuration.listen).filter_map(Listen::socket_path);
    let named = listeners.chain(configuration.control_socket.as_deref()).any(|listener| listener == path);
    if named { Ok(()) } else { Err("the configuration does not name this socket".to_owned()) }
}

fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > OPENER_MESSAGE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    // A peer that has gone is an error, not a signal.
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next message; `None` when the peer has gone.
fn receive<T: for<'a> Deserialize<'a>>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = vec![0; OPENER_MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut fd = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fd = fds.last();
        }
    }
    Ok(Some((serde_json::from_slice(&bytes[..received.bytes])?, fd)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn only_what_the_configuration_names_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["served", "readable", "other"] {
            std::fs::write(path(name), [1; 4096]).unwrap();
        }
        let config = path("byway.toml");
        let write_config = |volumes: &str| std::fs::write(&config, volumes).unwrap();
        write_config(&format!(
            "volumes = [\"a={}\", \"b={},ro\"]",
            path("served").display(),
            path("readable").display()
        ));
        let arguments = ServeArguments { config: Some(config.clone()), ..ServeArguments::default() };
        let store = |name: &str, read_only| {
            let request = Request::Store { path: path(name), read_only, direct: false, shared: false };
            answer(&arguments, &request)
        };
        assert!(matches!(store("served", false), (Reply::Opened, Some(_))));
        assert!(matches!(store("readable", true), (Reply::Opened, Some(_))));
        assert!(matches!(store("readable", false), (Reply::Refused(_), None)));
        assert!(matches!(store("other", true), (Reply::Refused(_), None)));
        assert!(matches!(answer(&arguments, &Request::Read { path: config.clone() }), (Reply::Opened, Some(_))));
        assert!(matches!(answer(&arguments, &Request::Read { path: path("other") }), (Reply::Refused(_), None)));
        // What the file names now counts, not what it named when the node started.
        write_config(&format!("volumes = [\"a={}\"]", path("other").display()));
        assert!(matches!(store("other", false), (Reply::Opened, Some(_))));
        assert!(matches!(store("served", false), (Reply::Refused(_), None)));
    }

    #[test]
    fn a_long_line_that_cannot_be_read_is_refused_in_a_reply_that_can_be_sent() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("byway.toml");
        // As it is found while somebody writes it.
        std::fs::write(&config, format!("volumes = [\"{}", "\u{1}\u{e9}".repeat(OPENER_MESSAGE_BYTES_MAX))).unwrap();
        let arguments = ServeArguments { config: Some(config), ..ServeArguments::default() };
        let (ours, theirs) = pair();
        for request in [
            Request::Read { path: folder.path().join("certificate") },
            Request::Store { path: folder.path().join("disk"), read_only: true, direct: false, shared: false },
        ] {
            let (reply, _) = answer(&arguments, &request);
            send(theirs.as_fd(), &reply, None).unwrap();
            let (reply, _) = receive::<Reply>(ours.as_fd()).unwrap().unwrap();
            assert!(matches!(reply, Reply::Refused(reason) if reason.len() > 100), "it says why");
        }
    }

    #[test]
    fn a_descriptor_travels_with_its_reply() {
        let (ours, theirs) = pair();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "content").unwrap();
        let file = File::open(&path).unwrap();
        send(theirs.as_fd(), &Reply::Opened, Some(file.as_fd())).unwrap();
        let (reply, fd) = receive::<Reply>(ours.as_fd()).unwrap().unwrap();
        assert!(matches!(reply, Reply::Opened));
        assert_eq!(io::read_to_string(File::from(fd.unwrap())).unwrap(), "content");
        drop(theirs);
        assert!(receive::<Reply>(ours.as_fd()).unwrap().is_none());
    }
}
