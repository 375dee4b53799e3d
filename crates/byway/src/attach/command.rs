//! The command: its arguments, its errors, and what it starts.

use std::io;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::ExitCode;

use byway_frontend::fuse::mount::MountError;
use byway_frontend::loop_device::LoopError;
use byway_frontend::nbd_device::{self, NbdDeviceError};
use byway_frontend::ublk::{self, UblkError};
use byway_reactor::Address;
use byway_service::block::spec::VolumeName;
use clap::Args;

use super::background;
use super::keeper::{self, KeeperLink, ServingCommand};
use super::registry::{self, Attachment};
use super::serving::{self, DeviceAsked};
use super::volume_server::Access;
use crate::output;
use crate::remote::{RemoteError, RemoteUri};
use crate::tls::ClientTlsArguments;
use crate::units::show_size;

/// The flags of `byway attach`.
#[derive(Args, Debug)]
pub struct AttachArguments {
    /// Volume: byway://HOST[:PORT]/NAME, byways://HOST[:PORT]/NAME (TLS), byway+unix:///NAME?socket=PATH,
    /// byway+shm:///NAME?socket=PATH (shared memory) or byway+rdma://HOST[:PORT]/NAME
    #[arg(required_unless_present = "list")]
    pub uri: Option<RemoteUri>,
    /// Name of the device: in --list, for byway detach, and as /dev/byway/NAME [default: the volume's name]
    #[arg(long = "as", value_name = "NAME", value_parser = parse_name)]
    pub name: Option<VolumeName>,
    /// Kind of block device: ublk (Linux 6.5 with ublk_drv), nbd (the kernel's NBD client), or loop, a loop device on a file served by
    /// FUSE [default: the first of them that the kernel has]
    #[arg(long, value_name = "WAY", value_parser = parse_way)]
    pub via: Option<Way>,
    /// Attach the device read-only
    #[arg(long)]
    pub read_only: bool,
    /// Make each write durable before completing it; for cluster file systems
    #[arg(long, conflicts_with = "read_only")]
    pub shared: bool,
    /// Stay in the foreground until the device is detached; SIGTERM and SIGINT detach it
    #[arg(long)]
    pub foreground: bool,
    /// List the attached volumes of this machine
    #[arg(long, conflicts_with_all = ["uri", "name", "read_only", "shared", "foreground"])]
    pub list: bool,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// This is the process that was started in the background.
    #[arg(long, hide = true)]
    pub in_background: bool,
    /// This process serves a loop device; standard input is a socket to its keeper.
    #[arg(long, hide = true)]
    pub kept: bool,
    /// This process keeps the loop device of that one; standard input is a socket to it.
    #[arg(long, hide = true, value_name = "PID")]
    pub keeper_of: Option<i32>,
    /// The level of the log, for further processes.
    #[arg(skip)]
    pub log: Option<String>,
}

impl AttachArguments {
    fn access(&self) -> Access {
        Access { read_only: self.read_only, shared: self.shared }
    }
}

/// How the kernel reaches a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A device of ublk.
    Ublk,
    /// A device of the kernel's NBD client.
    Nbd,
    /// A loop device on a file served by FUSE.
    Loop,
}

impl Way {
    /// The way that was asked for, otherwise the best one that this machine has.
    fn choose(asked: Option<Self>) -> Result<Self, AttachError> {
        match asked {
            Some(Self::Ublk) => ublk::check()?,
            Some(Self::Nbd) => nbd_device::check()?,
            Some(Self::Loop) => {}
            None if ublk::check().is_ok() => return Ok(Self::Ublk),
            None if nbd_device::check().is_ok() => return Ok(Self::Nbd),
            None => return Ok(Self::Loop),
        }
        Ok(asked.unwrap_or(Self::Loop))
    }
}

fn parse_way(text: &str) -> Result<Way, String> {
    match text {
        "ublk" => Ok(Way::Ublk),
        "nbd" => Ok(Way::Nbd),
        "loop" => Ok(Way::Loop),
        _ => Err("the ways are ublk, nbd and loop".to_owned()),
    }
}

fn parse_name(text: &str) -> Result<VolumeName, String> {
    VolumeName::new(text).map_err(|error| error.to_string())
}

/// Why a volume is not attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Loop devices are root's.
    #[error("attaching a volume needs root, to create a block device; run it with sudo")]
    NotRoot,
    /// Another wire.
    #[error("{0} is an NBD address; byway attach uses byway's own protocol: write byway://, or use nbd-client")]
    NotNative(String),
    /// The server or the volume.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The name is taken.
    #[error("{0} is attached already (byway attach --list); detach it, or give another name with --as")]
    Taken(String),
    /// The registry.
    #[error("/run/byway-attach: {0}; it must be writable")]
    State(io::Error),
    /// FUSE.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The volume's file.
    #[error("the file of the volume: {0}; see byway doctor")]
    File(io::Error),
    /// The device.
    #[error(transparent)]
    Loop(#[from] LoopError),
    /// ublk.
    #[error(transparent)]
    Ublk(#[from] UblkError),
    /// The kernel's NBD client.
    #[error(transparent)]
    Nbd(#[from] NbdDeviceError),
    /// The kernel's random numbers.
    #[error("the kernel gives no random numbers: {0}")]
    Random(io::Error),
    /// A block that no block device has.
    #[error("the volume has blocks of {0} bytes; a block device takes at most 4096")]
    Block(u32),
    /// Less than a sector.
    #[error("the volume has {0} bytes, less than one sector")]
    Empty(u64),
    /// A device waits for a successor, and the server does not have all that it had acknowledged.
    #[error(
        "{} waits, and cannot go on: the server has restarted since its process died, or serves another volume by that name; writes \
         after the last flush may be lost. byway detach {name} fails what waits; then attach again, and check the file system",
        device.display()
    )]
    ServerChanged {
        /// The attachment.
        name: String,
        /// The device.
        device: PathBuf,
    },
    /// The process of a loop device has died, and the server does not have all that it had acknowledged.
    #[error(
        "{} has failed: its process was killed, and the server has restarted since, or serves another volume by that name; writes after \
         the last flush may be lost. Detach, attach again, and check the file system", device.display()
    )]
    Lost {
        /// The device.
        device: PathBuf,
    },
    /// A successor finds nothing in the registry.
    #[error("/run/byway-attach does not say how to go on with the device; what waited has failed")]
    NoRecord,
    /// A device that can be written to waits for a successor, and this one could not flush the volume.
    #[error(
        "{} waits, and has writes that may need a flush: attach without --read-only, where the server lets this machine write, to go \
         on with it; or byway detach {name} to end it", device.display()
    )]
    Writable {
        /// The attachment.
        name: String,
        /// The device.
        device: PathBuf,
    },
    /// A device waits for a successor, and another way was asked for.
    #[error("{} waits for a process: attach without --via, or with --via ublk, to go on with it, or byway detach {name} to end it", device.display())]
    Waits {
        /// The attachment.
        name: String,
        /// The device.
        device: PathBuf,
    },
    /// The service manager.
    #[error("NOTIFY_SOCKET: {0}; unset it where no service manager runs")]
    Manager(io::Error),
    /// A thread or signals.
    #[error("cannot wait for signals and requests: {0}")]
    Thread(io::Error),
    /// The background process.
    #[error("cannot start the process in the background: {source}; try --foreground")]
    Background {
        /// Why.
        source: io::Error,
    },
    /// It ended before its device was ready.
    #[error("{reason} (log: {})", log.display())]
    Started {
        /// The process's own words.
        reason: String,
        /// Where it logs.
        log: PathBuf,
    },
    /// Its loop.
    #[error("the device has ended: {0}")]
    Ended(String),
}

/// Attaches a volume.
///
/// # Errors
/// See [`AttachError`].
pub fn attach(arguments: &AttachArguments) -> Result<ExitCode, AttachError> {
    if arguments.list {
        return list().map(|()| ExitCode::SUCCESS);
    }
    // clap has seen to it that there is one.
    let Some(uri) = &arguments.uri else { return Ok(ExitCode::SUCCESS) };
    let name = match (uri, &arguments.name) {
        (RemoteUri::Nbd(_), _) => return Err(AttachError::NotNative(uri.to_string())),
        (_, Some(name)) => name.to_string(),
        (uri, None) => uri.volume().ok_or_else(|| RemoteError::NoVolume(uri.to_string()))?.to_owned(),
    };
    arguments.tls.check(uri.wants_tls()).map_err(RemoteError::from)?;
    if !rustix::process::geteuid().is_root() {
        return Err(AttachError::NotRoot);
    }
    if arguments.foreground || arguments.in_background {
        return run_process(arguments, uri, &name);
    }
    if is_local(&uri.resolve().map_err(RemoteError::from)?) {
        output::note(
            "the server is on this machine: if memory runs short, server and device may wait for each other; use this for \
             tests alone",
        );
    }
    let device = background::start(&name)?;
    output::line(device);
    Ok(ExitCode::SUCCESS)
}

/// One of the processes of a device.
fn run_process(arguments: &AttachArguments, uri: &RemoteUri, name: &str) -> Result<ExitCode, AttachError> {
    let local = |source| AttachError::Background { source };
    // A successor may have another directory.
    let (uri, tls) = (uri.absolute().map_err(local)?, arguments.tls.absolute().map_err(local)?);
    if arguments.in_background {
        background::settle().map_err(local)?;
    }
    let way = Way::choose(arguments.via)?;
    let command = ServingCommand::new(arguments, &uri, &tls, name);
    match arguments.keeper_of {
        Some(process) => return keeper::keep_for(command, process),
        None if way == Way::Loop && !arguments.kept => return keeper::run(command),
        None => {}
    }
    let asked = DeviceAsked { name, uri: &uri, tls, access: arguments.access(), way, command };
    let link = if arguments.kept { Some(KeeperLink::inherited().map_err(AttachError::Thread)?) } else { None };
    serving::serve(asked, link, arguments.in_background).map(|()| ExitCode::SUCCESS)
}

fn list() -> Result<(), AttachError> {
    for registry::Listed { attachment, lives } in registry::list().map_err(AttachError::State)? {
        let is_kept = attachment.is_kept();
        let Attachment { name, uri, device, pid, bytes, ublk, failed, .. } = attachment;
        let state = match failed {
            _ if lives => format!("process {pid}"),
            Some(failed) => format!("{failed}; byway detach"),
            None if is_kept => "its process has died, and requests wait for its successor, which begins".to_owned(),
            None if ublk.is_some() => {
                "its process has died, and requests wait; byway attach again, or byway detach".to_owned()
            }
            None => "its process has died; byway detach".to_owned(),
        };
        output::line(format!("{name}  {}  {}  {uri}  {state}", device.display(), show_size(bytes)));
    }
    Ok(())
}

/// Whether an address is one of this machine.
fn is_local(address: &Address) -> bool {
    match address {
        Address::Unix(_) | Address::Shared(_) => true,
        // One can only bind to an address of one's own.
        Address::Tcp(to) | Address::Rdma(to) => UdpSocket::bind((to.ip(), 0)).is_ok(),
    }
}
