//! The command: checks, the device, and its process's main thread.

use std::io;
use std::net::UdpSocket;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

use byway_frontend::fuse::mount::MountError;
use byway_frontend::loop_device::{DevicePlace, LoopError};
use byway_frontend::nbd_device::{self, NbdDeviceError};
use byway_frontend::ublk::{self, UblkError};
use byway_reactor::Address;
use byway_service::block::client::{ClientName, VolumeInfo};
use byway_service::block::spec::VolumeName;
use clap::Args;
use rustix::mm::MlockAllFlags;

use super::background;
use super::device::{AttachedDevice, Backing, Detaching};
use super::nbd_socket::NbdSocket;
use super::registry::{self, Attachment, Claim};
use super::ublk_queue::UblkQueue;
use super::volume_file::VolumeFile;
use super::volume_server::{Access, KernelSide, Requests, VolumeAsked, VolumeServer};
use crate::output;
use crate::remote::{RemoteError, RemoteUri};
use crate::supervisor::Supervisor;
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
    #[error("{0} is an NBD address; byway attach uses byway's own wire: write byway://, or use nbd-client")]
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

/// What the main thread hears of.
pub(super) enum Event {
    /// SIGTERM or SIGINT.
    Signal,
    /// The volume is open, and its requests are served: a device can be made of this.
    Ready(VolumeInfo, Backing),
    /// The volume could not be opened.
    Failed(AttachError),
    /// Another server process, or the same with other files, has all that was acknowledged.
    Repeated {
        /// See [`VolumeInfo`].
        instance: u64,
        /// See [`VolumeInfo`].
        store: u64,
    },
    /// The volume has another size, in bytes.
    Resized(u64),
    /// The kernel has no requests any more; what the volume said to the last flush.
    Ended(Result<(), String>),
}

/// Attaches a volume.
///
/// # Errors
/// See [`AttachError`].
pub fn attach(arguments: &AttachArguments) -> Result<(), AttachError> {
    if arguments.list {
        return list();
    }
    // clap has seen to it that there is one.
    let Some(uri) = &arguments.uri else { return Ok(()) };
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
        return serve(arguments, uri, &name);
    }
    if is_local(&uri.resolve().map_err(RemoteError::from)?) {
        output::note(
            "the server is on this machine: if memory runs short, server and device may wait for each other; use this for \
             tests alone",
        );
    }
    let device = background::start(&name)?;
    output::line(device);
    Ok(())
}

fn list() -> Result<(), AttachError> {
    for registry::Listed { attachment, lives } in registry::list().map_err(AttachError::State)? {
        let Attachment { name, uri, device, pid, bytes, ublk, failed } = attachment;
        let state = match failed {
            _ if lives => format!("process {pid}"),
            Some(failed) => format!("{failed}; byway detach"),
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

/// The process of a device.
fn serve(arguments: &AttachArguments, uri: &RemoteUri, name: &str) -> Result<(), AttachError> {
    let (uri, tls) = if arguments.in_background {
        let local = |source| AttachError::Background { source };
        let absolute = (uri.absolute().map_err(local)?, arguments.tls.absolute().map_err(local)?);
        background::settle().map_err(local)?;
        absolute
    } else {
        (uri.clone(), arguments.tls.clone())
    };
    let uri = &uri;
    // Before the loop has a ring.
    let place = DevicePlace::take().map_err(AttachError::File)?;
    let supervisor = Supervisor::from_environment().map_err(AttachError::Manager)?;
    let way = Way::choose(arguments.via)?;
    let mut claim = Claim::new(name).map_err(AttachError::State)?.ok_or_else(|| AttachError::Taken(name.to_owned()))?;
    let left = claim.left().cloned();
    if let Some(left) = &left {
        let waits = left.failed.is_none() && left.waits()?;
        if waits && way != Way::Ublk {
            return Err(AttachError::Waits { name: name.to_owned(), device: left.device.clone() });
        }
        if !waits {
            // One that was never started, or has failed: nothing goes on with it.
            left.remove_device();
        }
    }
    let (events, heard) = channel();
    watch_signals(events.clone())?;
    let client = client_name(&mut claim)?;
    let volume = VolumeAsked { name: name.to_owned(), uri: uri.clone(), client, tls, access: arguments.access() };
    start_loop(volume, way, left, events)?;
    let (info, backing) = loop {
        match heard.recv() {
            Ok(Event::Ready(info, backing)) => break (info, backing),
            Ok(Event::Failed(error)) => return Err(error),
            // Nothing is there that would have to be taken apart.
            Ok(Event::Signal) => return Ok(()),
            Ok(Event::Ended(result)) => return result.map_err(AttachError::Ended),
            Ok(Event::Resized(_) | Event::Repeated { .. }) => {}
            Err(_) => return Err(AttachError::Ended("its thread has died".to_owned())),
        }
    };
    let mut device = AttachedDevice::make(backing, &info, (name, uri), place)?;
    // Lock all pages, also future ones: if a page of this process were swapped to this device, reading it back would wait for this process.
    if let Err(error) = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        tracing::warn!(%error, "memory cannot be locked: do not swap to this device");
    }
    let path = device.path();
    let (name, uri, pid) = (name.to_owned(), uri.to_string(), std::process::id() as i32);
    let (device_name, ublk) = (path.clone(), device.ublk_record());
    let attachment = Attachment { name, uri, device: device_name, pid, bytes: info.len, ublk, failed: None };
    let (name, uri) = (attachment.name.clone(), attachment.uri.clone());
    // The entry is there before the first request: if this process is killed, its device is found by it.
    let published = claim.publish(attachment).map_err(AttachError::State);
    if let Err(error) = published.and_then(|()| device.start()) {
        if device.give_up() {
            claim.withdraw();
        }
        return Err(error);
    }
    tracing::info!(volume = uri, device = %path.display(), bytes = info.len, "attached");
    output::line(path.display());
    tell(supervisor.ready(&format!("{} is {uri}", path.display())));
    let ended = follow(&heard, device, &mut claim, &supervisor);
    claim.end(&ended);
    if ended.is_ok() && arguments.in_background {
        // It has nothing to say any more.
        let _ = std::fs::remove_file(registry::log_of(&name));
    }
    ended
}

/// What follows of a device.
enum Stage {
    Attached(AttachedDevice),
    Detaching(Detaching),
}

/// Follows the volume's size until the device is detached, and the kernel has no requests any more.
fn follow(
    heard: &Receiver<Event>,
    device: AttachedDevice,
    claim: &mut Claim,
    supervisor: &Supervisor,
) -> Result<(), AttachError> {
    let mut stage = Stage::Attached(device);
    loop {
        stage = match (heard.recv(), stage) {
            (Ok(Event::Resized(bytes)), Stage::Attached(mut device)) => {
                if let Err(error) = device.resize(bytes) {
                    tracing::error!(%error, bytes, "the volume was resized, but the device could not be");
                }
                Stage::Attached(device)
            }
            (Ok(Event::Repeated { instance, store }), stage) => {
                if let Err(error) = claim.renew(instance, store) {
                    tracing::error!(%error, "cannot write to the registry: no successor of this process can take the device over");
                }
                stage
            }
            (Ok(Event::Signal), Stage::Attached(device)) => detach(device, supervisor),
            (Ok(Event::Ended(result)), stage) => {
                let detached = match stage {
                    Stage::Attached(device) => device.abandon(),
                    Stage::Detaching(detaching) => detaching.finish(),
                };
                return result.and(detached).map_err(AttachError::Ended);
            }
            (Err(_), _) => return Err(AttachError::Ended("its thread has died".to_owned())),
            (Ok(_), stage) => stage,
        }
    }
}

fn detach(device: AttachedDevice, supervisor: &Supervisor) -> Stage {
    let stopping = || tell(supervisor.stopping("writing out what is not at the server yet"));
    match device.detach(stopping) {
        Ok(detaching) => Stage::Detaching(detaching),
        Err(device) => {
            output::note(format!(
                "{} is in use (mounted, swap, or part of another device), and stays attached; unmount it first",
                device.path().display()
            ));
            Stage::Attached(device)
        }
    }
}

fn tell(told: io::Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Opens the volume and serves it in a thread of its own. `left` is what a dead process has left of its device.
fn start_loop(
    volume: VolumeAsked,
    way: Way,
    left: Option<Attachment>,
    events: Sender<Event>,
) -> Result<(), AttachError> {
    let run = move || {
        let serve = || match Requests::open(&volume) {
            Ok(mut requests) => match way {
                Way::Loop => {
                    let made = VolumeFile::mount(&volume.name, &volume.uri, &requests);
                    serve_kernel(requests, made.map(|(kernel, file)| (kernel, Backing::File(file))), &events)
                }
                Way::Nbd => {
                    let made = NbdSocket::open(&requests.info);
                    serve_kernel(requests, made.map(|(kernel, socket)| (kernel, Backing::Nbd(socket))), &events)
                }
                Way::Ublk => {
                    let made = UblkQueue::open(&mut requests, left.as_ref());
                    serve_kernel(requests, made.map(|(kernel, device)| (kernel, Backing::Ublk(device))), &events)
                }
            },
            Err(error) => Event::Failed(error),
        };
        tell_end(&events, serve);
    };
    std::thread::Builder::new().name("byway-volume".to_owned()).spawn(run).map_err(AttachError::Thread)?;
    Ok(())
}

/// A successor is the same client: the server begins its session when the I/O of the dead process's has ended.
fn client_name(claim: &mut Claim) -> Result<ClientName, AttachError> {
    if let Some(client) = claim.begin_sessions().map_err(AttachError::State)? {
        return Ok(client);
    }
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| AttachError::Random(io::Error::other(error.to_string())))?;
    Ok(ClientName { id, first_session: 1 })
}

/// Serves the kernel's requests until there are none any more.
fn serve_kernel<K: KernelSide>(
    requests: Requests,
    made: Result<(K, Backing), AttachError>,
    events: &Sender<Event>,
) -> Event {
    let (kernel, backing) = match made {
        Ok(made) => made,
        Err(error) => return Event::Failed(error),
    };
    let info = requests.info;
    match VolumeServer::new(requests, kernel, events.clone()) {
        Ok(server) => {
            let _ = events.send(Event::Ready(info, backing));
            Event::Ended(server.serve())
        }
        Err(error) => Event::Failed(AttachError::Thread(error)),
    }
}

/// Tells the main thread how the loop ended, also if it panicked.
fn tell_end(events: &Sender<Event>, serve: impl FnOnce() -> Event) {
    // Nothing of the loop is used after it has panicked: it is dropped.
    let event = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
        Event::Ended(Err("its loop has panicked, which is a fault of byway; the log says where".to_owned()))
    });
    let _ = events.send(event);
}

fn watch_signals(events: Sender<Event>) -> Result<(), AttachError> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(AttachError::Thread)?;
    let watch = move || {
        // A terminal that goes does not end a device.
        for _ in signals.forever().filter(|signal| *signal != SIGHUP) {
            if events.send(Event::Signal).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("byway-signals".to_owned()).spawn(watch).map_err(AttachError::Thread)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_panics_is_an_end() {
        // The thread for signals keeps a sender: no end comes of that by itself.
        let (events, heard) = channel();
        let serving = events.clone();
        let thread = std::thread::spawn(move || tell_end(&serving, || panic!("a fault of this test")));
        thread.join().unwrap();
        let Ok(Event::Ended(Err(said))) = heard.try_recv() else { panic!("an end") };
        assert!(said.contains("panicked"), "{said}");
        drop(events);
    }
}
