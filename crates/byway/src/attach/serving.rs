//! The process that serves a device: its main thread makes the device, follows the volume, and takes the device apart.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use byway_frontend::fuse::channel::Channel;
use byway_frontend::loop_device::{DevicePlace, is_claimed};
use byway_service::block::client::{ClientName, VolumeInfo};
use rustix::mm::MlockAllFlags;

use super::command::{AttachError, Way};
use super::device::{AttachedDevice, Backing, Detaching};
use super::keeper::{KeeperLink, Kept, ServingCommand};
use super::nbd_socket::NbdSocket;
use super::registry::{self, Attachment, Claim};
use super::ublk_queue::UblkQueue;
use super::volume_file::VolumeFile;
use super::volume_server::{Access, KernelSide, Requests, VolumeAsked, VolumeServer};
use crate::limits::ATTACH_LOST_AFTER;
use crate::output;
use crate::remote::RemoteUri;
use crate::supervisor::Supervisor;
use crate::tls::ClientTlsArguments;

/// How long a successor waits before it tries again to reach a server that is away.
const RETRY: Duration = Duration::from_secs(1);
/// Sessions that one try may begin: a server refuses the number of an earlier session.
const SESSIONS_PER_TRY: u64 = 1 << 20;

/// The device that is asked for. Paths are absolute.
pub(super) struct DeviceAsked<'a> {
    pub name: &'a str,
    pub uri: &'a RemoteUri,
    pub tls: ClientTlsArguments,
    pub access: Access,
    pub way: Way,
    /// How further processes of the device are started.
    pub command: ServingCommand,
}

/// What the main thread hears of.
pub(super) enum Event {
    /// SIGTERM or SIGINT.
    Signal,
    /// The keeper of a loop device.
    KeeperDied,
    /// The volume is open, and its requests are served: a device can be made of this.
    Ready(VolumeInfo, Backing),
    /// The volume cannot be opened yet, and a device waits for it.
    Away,
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

/// Serves a device until it is detached. `inherited` is of a process with a keeper: that one, and what it keeps of a process that has died.
///
/// # Errors
/// See [`AttachError`].
pub(super) fn serve(
    asked: DeviceAsked<'_>,
    inherited: Option<(KeeperLink, Option<Kept>)>,
    in_background: bool,
) -> Result<(), AttachError> {
    let (mut link, kept) = inherited.map_or((None, None), |(link, kept)| (Some(link), kept));
    if link.is_some() {
        // It was started by a path that ends otherwise.
        let _ = rustix::thread::set_name(c"byway");
    }
    let is_successor = kept.is_some();
    let served = serve_device(&asked, &mut link, kept);
    // These leave the device as it was, for another successor.
    let leaves_it = is_successor && matches!(served, Err(AttachError::Taken(_) | AttachError::State(_)));
    if let (Some(link), false) = (&link, leaves_it) {
        link.end();
    }
    if served.is_ok() && in_background {
        // It has nothing to say any more.
        let _ = std::fs::remove_file(registry::log_of(asked.name));
    }
    served
}

fn serve_device(asked: &DeviceAsked<'_>, link: &mut Option<KeeperLink>, kept: Option<Kept>) -> Result<(), AttachError> {
    let &DeviceAsked { name, uri, ref tls, access, way, .. } = asked;
    // Before the loop has a ring.
    let place = DevicePlace::take().map_err(AttachError::File)?;
    let supervisor = Supervisor::from_environment().map_err(AttachError::Manager)?;
    let mut claim = Claim::new(name).map_err(AttachError::State)?.ok_or_else(|| AttachError::Taken(name.to_owned()))?;
    let left = claim.left().cloned();
    if kept.is_none() {
        check_left(left.as_ref(), name, way)?;
    }
    let (events, heard) = channel();
    watch_signals(events.clone())?;
    if let Some(link) = link {
        link.watch(events.clone()).map_err(AttachError::Thread)?;
    }
    let client = client_name(&mut claim)?;
    let volume = VolumeAsked { name: name.to_owned(), uri: uri.clone(), client, tls: tls.clone(), access };
    let waiting = kept.as_ref().and(left.as_ref()).map(|left| left.device.clone());
    let (taken, kept) = kept.map_or((None, None), |kept| (Some(kept.channel), kept.device));
    start_loop(volume, way, Left { attachment: left.clone(), channel: taken }, events.clone())?;
    let (info, backing) = match wait_until_open(&heard, waiting.as_deref(), &events) {
        Ok(Some(opened)) => opened,
        Ok(None) => return Ok(()),
        Err(error) if waiting.is_some() => return end_with(claim, error),
        Err(error) => return Err(error),
    };
    let stage = match (backing, kept, left) {
        (Backing::Taken(file), Some(kept), Some(left)) => {
            Stage::Attached(AttachedDevice::taken_over(file, kept, left.device))
        }
        (Backing::Taken(_), ..) => Stage::Detaching(Detaching::of_loop()),
        (backing, ..) => Stage::Attached(AttachedDevice::make(backing, &info, asked, place)?),
    };
    // Lock all pages, also future ones: if a page of this process were swapped to this device, reading it back would wait for this process.
    if let Err(error) = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        tracing::warn!(%error, "memory cannot be locked: do not swap to this device");
    }
    let mut attached = Attached { asked, link, claim, supervisor, events };
    let stage = match stage {
        Stage::Attached(device) => Stage::Attached(attached.begin(device, &info)?),
        detaching @ Stage::Detaching(_) => detaching,
    };
    let ended = attached.follow(&heard, stage);
    attached.claim.end(&ended);
    ended
}

/// A successor ends the device.
fn end_with(claim: Claim, error: AttachError) -> Result<(), AttachError> {
    let ended = Err(error);
    claim.end(&ended);
    ended
}

/// Whether a new device may take the place of what a dead process has left.
fn check_left(left: Option<&Attachment>, name: &str, way: Way) -> Result<(), AttachError> {
    let Some(left) = left else { return Ok(()) };
    if left.is_kept() {
        // Its keeper is about to start a successor.
        return Err(AttachError::Taken(name.to_owned()));
    }
    let waits = left.failed.is_none() && left.waits()?;
    if waits && way != Way::Ublk {
        return Err(AttachError::Waits { name: name.to_owned(), device: left.device.clone() });
    }
    if !waits {
        // One that was never started, or has failed: nothing goes on with it.
        left.remove_device();
    }
    Ok(())
}

/// Waits for the volume. `waiting` is the device that a successor is to go on with. `None`: a signal came first.
fn wait_until_open(
    heard: &Receiver<Event>,
    waiting: Option<&Path>,
    events: &Sender<Event>,
) -> Result<Option<(VolumeInfo, Backing)>, AttachError> {
    let (mut keeper_died, mut is_away, mut is_to_end) = (false, false, false);
    let opened = loop {
        match heard.recv() {
            Ok(Event::Ready(info, backing)) => break (info, backing),
            Ok(Event::Failed(error)) => return Err(error),
            Ok(Event::Signal) => is_to_end = true,
            Ok(Event::Away) => is_away = true,
            Ok(Event::KeeperDied) => keeper_died = true,
            Ok(Event::Ended(result)) => return result.map(|()| None).map_err(AttachError::Ended),
            Ok(Event::Resized(_) | Event::Repeated { .. }) => {}
            Err(_) => return Err(AttachError::Ended("its thread has died".to_owned())),
        }
        match waiting {
            // Nothing is there that would have to be taken apart.
            None if is_to_end => return Ok(None),
            // With a server the device is detached as usual, as soon as the volume is open.
            Some(device) if is_to_end && is_away => {
                if !is_claimed(device).unwrap_or(false) {
                    let why = "its server could not be reached, and what was not written is lost";
                    return Err(AttachError::Ended(why.to_owned()));
                }
                note_in_use(device);
                is_to_end = false;
            }
            _ => {}
        }
    };
    for (is_due, event) in [(keeper_died, Event::KeeperDied), (is_to_end, Event::Signal)] {
        if is_due {
            let _ = events.send(event);
        }
    }
    Ok(Some(opened))
}

fn note_in_use(device: &Path) {
    output::note(format!(
        "{} is in use (mounted, swap, or part of another device), and stays attached; unmount it first",
        device.display()
    ));
}

/// What follows of a device.
enum Stage {
    Attached(AttachedDevice),
    Detaching(Detaching),
}

/// A device that is there, as the main thread has it.
struct Attached<'a> {
    asked: &'a DeviceAsked<'a>,
    link: &'a mut Option<KeeperLink>,
    claim: Claim,
    supervisor: Supervisor,
    events: Sender<Event>,
}

impl Attached<'_> {
    /// Records the device, lets the kernel use it, and says so.
    fn begin(&mut self, mut device: AttachedDevice, info: &VolumeInfo) -> Result<AttachedDevice, AttachError> {
        let path = device.path();
        let keeper = self.link.as_ref().and_then(KeeperLink::record);
        let attachment = Attachment {
            name: self.asked.name.to_owned(),
            uri: self.asked.uri.to_string(),
            device: path.clone(),
            pid: std::process::id() as i32,
            bytes: info.len,
            ublk: device.ublk_record(),
            file: keeper.and_then(|keeper| device.file_record(keeper)),
            failed: None,
        };
        // The entry is there before the first request: if this process is killed, its device is found by it.
        let published = self.claim.publish(attachment).map_err(AttachError::State);
        if let Err(error) = published.and_then(|()| device.start()) {
            if device.give_up() {
                self.claim.withdraw();
            }
            return Err(error);
        }
        if let (Some(link), true) = (&self.link, device.is_new()) {
            device.keep_by(link);
        }
        if let Err(error) = device.take_size(info.len) {
            tracing::error!(%error, bytes = info.len, "the volume was resized, but the device could not be");
        }
        let uri = self.asked.uri;
        if device.is_new() {
            tracing::info!(volume = %uri, device = %path.display(), bytes = info.len, "attached");
        }
        output::line(path.display());
        tell(self.supervisor.ready(&format!("{} is {uri}", path.display())));
        Ok(device)
    }

    /// Follows the volume's size until the device is detached, and the kernel has no requests any more.
    fn follow(&mut self, heard: &Receiver<Event>, mut stage: Stage) -> Result<(), AttachError> {
        loop {
            stage = match (heard.recv(), stage) {
                (Ok(Event::Resized(bytes)), Stage::Attached(mut device)) => {
                    if let Err(error) = device.resize(bytes) {
                        tracing::error!(%error, bytes, "the volume was resized, but the device could not be");
                    }
                    Stage::Attached(device)
                }
                (Ok(Event::Repeated { instance, store }), stage) => {
                    if let Err(error) = self.claim.renew(instance, store) {
                        tracing::error!(%error, "cannot write to the registry: no successor of this process can take the device over");
                    }
                    stage
                }
                (Ok(Event::KeeperDied), Stage::Attached(device)) => {
                    self.replace_keeper(&device);
                    Stage::Attached(device)
                }
                (Ok(Event::Signal), Stage::Attached(device)) => self.detach(device),
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

    fn replace_keeper(&mut self, device: &AttachedDevice) {
        let Some(link) = self.link else { return };
        match link.replace(&self.asked.command, self.events.clone()) {
            Ok(()) => {
                tracing::warn!("the keeper has died; another one has begun");
                device.keep_by(link);
            }
            Err(error) => {
                tracing::error!(%error, "the keeper has died, and no other one begins: if this process is killed, the device's requests fail");
            }
        }
        if let Some(Err(error)) = link.record().map(|keeper| self.claim.renew_keeper(keeper)) {
            tracing::error!(%error, "cannot write to the registry which process is the keeper");
        }
    }

    fn detach(&self, device: AttachedDevice) -> Stage {
        let stopping = || tell(self.supervisor.stopping("writing out what is not at the server yet"));
        match device.detach(stopping) {
            Ok(detaching) => {
                // Its descriptor is the last one.
                if let Some(link) = &self.link {
                    link.let_go();
                }
                Stage::Detaching(detaching)
            }
            Err(device) => {
                note_in_use(&device.path());
                Stage::Attached(device)
            }
        }
    }
}

fn tell(told: io::Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// What a dead process has left of its device.
struct Left {
    attachment: Option<Attachment>,
    /// Of a loop device that this process is to go on with.
    channel: Option<Channel>,
}

/// Opens the volume and serves it in a thread of its own.
fn start_loop(volume: VolumeAsked, way: Way, left: Left, events: Sender<Event>) -> Result<(), AttachError> {
    let run = move || {
        let serve = || match open(volume, left.channel.is_some().then_some(&events)) {
            Ok((volume, mut requests)) => match (way, left.channel) {
                (Way::Loop, Some(channel)) => {
                    let attachment = left.attachment.ok_or(AttachError::NoRecord);
                    let made =
                        attachment.and_then(|left| VolumeFile::take_over(&volume.name, &mut requests, &left, channel));
                    serve_kernel(requests, made.map(|(kernel, file)| (kernel, Backing::Taken(file))), &events)
                }
                (Way::Loop, None) => {
                    let made = VolumeFile::mount(&volume.name, &volume.uri, &requests);
                    serve_kernel(requests, made.map(|(kernel, file)| (kernel, Backing::File(file))), &events)
                }
                (Way::Nbd, _) => {
                    let made = NbdSocket::open(&requests.info);
                    serve_kernel(requests, made.map(|(kernel, socket)| (kernel, Backing::Nbd(socket))), &events)
                }
                (Way::Ublk, _) => {
                    let made = UblkQueue::open(&mut requests, left.attachment.as_ref());
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

/// Opens the volume. A device that waits for this process waits as long as for a server that was lost; `awaited` hears of that.
fn open(mut volume: VolumeAsked, awaited: Option<&Sender<Event>>) -> Result<(VolumeAsked, Requests), AttachError> {
    let limit = Instant::now() + ATTACH_LOST_AFTER;
    let mut is_away = false;
    loop {
        match Requests::open(&volume) {
            Ok(requests) => return Ok((volume, requests)),
            Err(AttachError::Remote(error)) if Instant::now() < limit => {
                let Some(events) = awaited else { return Err(error.into()) };
                if !is_away {
                    tracing::warn!(%error, "requests wait, for at most {} s", ATTACH_LOST_AFTER.as_secs());
                    let _ = events.send(Event::Away);
                }
                is_away = true;
                volume.client.first_session += SESSIONS_PER_TRY;
                std::thread::park_timeout(RETRY);
            }
            Err(error) => return Err(error),
        }
    }
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
