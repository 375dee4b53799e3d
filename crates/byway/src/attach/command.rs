//! The command: checks, the device, and its process's main thread.

use std::fs::File;
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

use byway_frontend::fuse::mount::MountError;
use byway_frontend::fuse::{Notifier, NotifyError};
use byway_frontend::loop_device::{LoopDevice, LoopError, LoopOptions};
use byway_reactor::Address;
use byway_service::block::client::VolumeInfo;
use byway_service::block::spec::VolumeName;
use clap::Args;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::mm::MlockAllFlags;

use super::registry::{self, Attachment, Claim};
use super::{background, volume_file};
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
    /// Kind of block device: loop, a loop device on a file served by FUSE
    #[arg(long, value_name = "WAY", default_value = "loop", value_parser = parse_way)]
    pub via: Way,
    /// Attach the device read-only
    #[arg(long)]
    pub read_only: bool,
    /// Stay in the foreground until the device is detached; SIGTERM and SIGINT detach it
    #[arg(long)]
    pub foreground: bool,
    /// List the attached volumes of this machine
    #[arg(long, conflicts_with_all = ["uri", "name", "read_only", "foreground"])]
    pub list: bool,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// This is the process that was started in the background.
    #[arg(long, hide = true)]
    pub in_background: bool,
}

/// How the kernel reaches a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A loop device on a file served by FUSE.
    Loop,
}

fn parse_way(text: &str) -> Result<Way, String> {
    match text {
        "loop" => Ok(Way::Loop),
        "ublk" | "nbd" => Err(format!("{text} is not supported yet; leave --via out, or write --via loop")),
        _ => Err("the one way is loop".to_owned()),
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
    /// A block that no block device has.
    #[error("the volume has blocks of {0} bytes; a loop device takes at most 4096")]
    Block(u32),
    /// Less than a sector.
    #[error("the volume has {0} bytes, less than one sector")]
    Empty(u64),
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
    /// The volume is open, and its file is to be had below this mount.
    Ready(VolumeInfo, OwnedFd, Notifier),
    /// The volume could not be opened.
    Failed(AttachError),
    /// The volume has another size, in bytes.
    Resized(u64),
    /// The device's last user has closed it; what the volume said to the last flush.
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
        let Attachment { name, uri, device, pid, bytes, failed } = attachment;
        let state = match failed {
            _ if lives => format!("process {pid}"),
            Some(failed) => format!("{failed}; byway detach"),
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
    let supervisor = Supervisor::from_environment().map_err(AttachError::Manager)?;
    let mut claim = Claim::new(name).map_err(AttachError::State)?.ok_or_else(|| AttachError::Taken(name.to_owned()))?;
    let (events, heard) = channel();
    watch_signals(events.clone())?;
    start_loop((name, uri), tls, arguments.read_only, events)?;
    let (info, mount, notifier) = loop {
        match heard.recv() {
            Ok(Event::Ready(info, mount, notifier)) => break (info, mount, notifier),
            Ok(Event::Failed(error)) => return Err(error),
            // Nothing is there that would have to be taken apart.
            Ok(Event::Signal) => return Ok(()),
            Ok(Event::Ended(result)) => return result.map_err(AttachError::Ended),
            Ok(Event::Resized(_)) => {}
            Err(_) => return Err(AttachError::Ended("its thread has died".to_owned())),
        }
    };
    let (file, device) = make_device(&mount, &info, (name, uri))?;
    // The file is enough from here on.
    drop(mount);
    // Lock all pages, also future ones: if a page of this process were swapped to this device, reading it back would wait for this process.
    if let Err(error) = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        tracing::warn!(%error, "memory cannot be locked: do not swap to this device");
    }
    let path = device.path().to_owned();
    let (name, uri, pid) = (name.to_owned(), uri.to_string(), std::process::id() as i32);
    let attachment = Attachment { name, uri, device: path.clone(), pid, bytes: info.len, failed: None };
    let (name, uri) = (attachment.name.clone(), attachment.uri.clone());
    claim.publish(attachment).map_err(AttachError::State)?;
    tracing::info!(volume = uri, device = %path.display(), bytes = info.len, "attached");
    output::line(path.display());
    tell(supervisor.ready(&format!("{} is {uri}", path.display())));
    let ended = follow(&heard, AttachedDevice { notifier, file, device }, &supervisor);
    claim.end(&ended);
    if ended.is_ok() && arguments.in_background {
        // It has nothing to say any more.
        let _ = std::fs::remove_file(registry::log_of(&name));
    }
    ended
}

/// What keeps the device. The notifier goes first: with it goes the last of `/dev/fuse` if the loop has died, so that writing out
/// what the device still has fails instead of waiting for that loop.
struct AttachedDevice {
    notifier: Notifier,
    file: File,
    device: LoopDevice,
}

/// Follows the volume's size until the device is detached, and its last user has closed it.
fn follow(heard: &Receiver<Event>, held: AttachedDevice, supervisor: &Supervisor) -> Result<(), AttachError> {
    let mut held = Some(held);
    loop {
        match (heard.recv(), &held) {
            (Ok(Event::Resized(bytes)), Some(held)) => {
                if let Err(error) = renew_size(held) {
                    tracing::error!(%error, bytes, "the volume was resized, but the device could not be");
                }
            }
            (Ok(Event::Signal), Some(device)) if device.device.is_claimed().unwrap_or(false) => {
                output::note(format!(
                    "{} is in use (mounted, swap, or part of another device), and stays attached; unmount it first",
                    device.device.path().display()
                ));
            }
            (Ok(Event::Signal), Some(_)) => {
                tell(supervisor.stopping("writing out what is not at the server yet"));
                // The kernel takes it apart when its last user closes it: at once, unless a program has it open.
                held = None;
            }
            (Ok(Event::Ended(result)), _) => return result.map_err(AttachError::Ended),
            (Err(_), _) => return Err(AttachError::Ended("its thread has died".to_owned())),
            (Ok(_), _) => {}
        }
    }
}

fn tell(told: io::Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Has the kernel ask for the file's size, and the device take it.
fn renew_size(held: &AttachedDevice) -> Result<(), AttachError> {
    let told = held.notifier.invalidate_inode(volume_file::NODE, -1, 0);
    told.map_err(|error: NotifyError| AttachError::File(io::Error::other(error)))?;
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let stat = rustix::fs::statx(&held.file, c"", how, StatxFlags::SIZE).map_err(|e| AttachError::File(e.into()))?;
    held.device.renew_size().map_err(AttachError::File)?;
    tracing::info!(device = %held.device.path().display(), bytes = stat.stx_size, "resized");
    Ok(())
}

fn make_device(
    mount: &OwnedFd,
    info: &VolumeInfo,
    (name, uri): (&str, &RemoteUri),
) -> Result<(File, LoopDevice), AttachError> {
    let block_bytes = info.block_bytes.max(512);
    if block_bytes > 4096 {
        return Err(AttachError::Block(block_bytes));
    }
    if info.len < u64::from(block_bytes) {
        return Err(AttachError::Empty(info.len));
    }
    let access = if info.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::openat(mount, name, flags, Mode::empty());
    let file = File::from(file.map_err(|error| AttachError::File(error.into()))?);
    let options = LoopOptions { block_bytes, read_only: info.read_only, name: &uri.to_string() };
    let device = LoopDevice::over(file.as_fd(), options)?;
    Ok((file, device))
}

/// Opens the volume and serves its file in a thread of its own.
fn start_loop(
    (name, uri): (&str, &RemoteUri),
    tls: ClientTlsArguments,
    read_only: bool,
    events: Sender<Event>,
) -> Result<(), AttachError> {
    let (name, uri) = (name.to_owned(), uri.clone());
    let run = move || {
        let serve = || match volume_file::VolumeFile::open((&name, &uri), &tls, read_only, events.clone()) {
            Ok(file) => Event::Ended(file.serve()),
            Err(error) => Event::Failed(error),
        };
        tell_end(&events, serve);
    };
    std::thread::Builder::new().name("byway-volume".to_owned()).spawn(run).map_err(AttachError::Thread)?;
    Ok(())
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
