//! The block device of a volume, as the main thread has it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use byway_frontend::fuse::channel::Channel;
use byway_frontend::fuse::session::Terms;
use byway_frontend::fuse::{Notifier, NotifyError};
use byway_frontend::loop_device::{DevicePlace, LoopDevice, LoopOptions, claim};
use byway_frontend::nbd_device::{NbdDevice, NbdDeviceOptions};
use byway_frontend::ublk::UblkDevice;
use byway_service::block::client::VolumeInfo;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

use super::command::AttachError;
use super::keeper::{KeeperLink, KeptDevice};
use super::nbd_socket::KernelSocket;
use super::registry::{self, ClientRecord, FileRecord, KeeperRecord, UblkRecord};
use super::serving::DeviceAsked;
use super::ublk_queue::AddedDevice;
use super::volume_file::{self, MountedFile, TakenFile};

/// What a device is made of, and the loop's thread serves.
pub(super) enum Backing {
    File(MountedFile),
    Taken(TakenFile),
    Ublk(AddedDevice),
    Nbd(KernelSocket),
}

/// A device that is there.
pub(super) enum AttachedDevice {
    Loop(FileDevice),
    Ublk(AddedDevice),
    Nbd(NbdDevice),
}

/// A loop device on the volume's file.
///
/// The channel goes first: with it goes the last of `/dev/fuse` if the loop has died, so that writing out what the device still has fails
/// instead of waiting for that loop.
pub(super) struct FileDevice {
    channel: Arc<Channel>,
    file: File,
    device: LoopDevice,
    /// What process and kernel agreed on at FUSE's INIT.
    terms: Option<Terms>,
    client: ClientRecord,
    /// No process has served it before.
    is_new: bool,
}

/// A device that the kernel removes, or has removed.
pub(super) struct Detaching {
    ublk: Option<UblkDevice>,
    /// Why the kernel could not write all that it still had.
    unwritten: Option<String>,
}

/// The logical block of a volume's device.
///
/// # Errors
/// A volume that cannot be a block device.
pub(super) fn block_bytes(info: &VolumeInfo) -> Result<u32, AttachError> {
    let block_bytes = info.block_bytes.max(512);
    if block_bytes > 4096 {
        return Err(AttachError::Block(block_bytes));
    }
    if info.len < u64::from(block_bytes) {
        return Err(AttachError::Empty(info.len));
    }
    Ok(block_bytes)
}

impl AttachedDevice {
    /// Makes the device; one of loop gets the descriptor `place`. One of ublk is usable from [`AttachedDevice::start`] on, others from now on. The loop's thread must serve
    /// requests by then.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn make(
        backing: Backing,
        info: &VolumeInfo,
        asked: &DeviceAsked<'_>,
        place: DevicePlace,
    ) -> Result<Self, AttachError> {
        let &DeviceAsked { name, uri, .. } = asked;
        match backing {
            Backing::Ublk(added) => Ok(Self::Ublk(added)),
            Backing::Nbd(KernelSocket { socket, flags, request_bytes_max }) => {
                let (bytes, block_bytes) = (info.len, block_bytes(info)?);
                let identifier = &registry::identifier(name, std::process::id() as i32);
                let options = NbdDeviceOptions { bytes, block_bytes, request_bytes_max, flags, identifier };
                Ok(Self::Nbd(NbdDevice::connect(socket.as_fd(), &options)?))
            }
            Backing::Taken(_) => Err(AttachError::NoRecord),
            Backing::File(MountedFile { mount, channel, terms, client }) => {
                let access = if info.read_only { OFlags::RDONLY } else { OFlags::RDWR };
                let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&mount, name, flags, Mode::empty());
                let file = File::from(file.map_err(|error| AttachError::File(error.into()))?);
                let block_bytes = block_bytes(info)?;
                let options = LoopOptions { block_bytes, read_only: info.read_only, name: &uri.to_string() };
                let device = LoopDevice::over(file.as_fd(), options, place)?;
                // The file is enough from here on.
                drop(mount);
                let terms = terms.get().copied();
                Ok(Self::Loop(FileDevice { channel, file, device, terms, client, is_new: true }))
            }
        }
    }

    /// A loop device that a process has served that has died. `path` is its node.
    pub(super) fn taken_over(taken: TakenFile, kept: KeptDevice, path: PathBuf) -> Self {
        let TakenFile { channel, terms, client } = taken;
        let (file, device) = (File::from(kept.file), LoopDevice::adopt(kept.device, path));
        Self::Loop(FileDevice { channel, file, device, terms: Some(terms), client, is_new: false })
    }

    /// Lets the kernel use the device.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn start(&mut self) -> Result<(), AttachError> {
        match self {
            Self::Loop(_) | Self::Nbd(_) => Ok(()),
            Self::Ublk(added) => Ok(added.device.start()?),
        }
    }

    /// It cannot be started, or nothing tells of it: a new device goes, and one that was taken over waits for another successor.
    /// Whether it goes.
    pub(super) fn give_up(self) -> bool {
        let is_new = self.is_new();
        if is_new && let Err(error) = self.abandon() {
            tracing::warn!(error, "giving the device up");
        }
        is_new
    }

    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Loop(on_file) => on_file.device.path().to_owned(),
            Self::Ublk(added) => added.device.path(),
            Self::Nbd(device) => device.path(),
        }
    }

    pub(super) fn ublk_record(&self) -> Option<UblkRecord> {
        match self {
            Self::Loop(_) | Self::Nbd(_) => None,
            Self::Ublk(added) => Some(added.record),
        }
    }

    /// What a successor needs to take over the file under a loop device, if it can.
    pub(super) fn file_record(&self, keeper: KeeperRecord) -> Option<FileRecord> {
        let Self::Loop(on_file) = self else { return None };
        let terms = on_file.terms.filter(Terms::resends);
        if terms.is_none() {
            tracing::warn!(
                "the kernel cannot send requests again (FUSE_NOTIFY_RESEND, Linux 6.9): if this process is killed, the device's requests fail"
            );
        }
        Some(FileRecord::new(keeper, terms?, on_file.client))
    }

    /// Has the keeper of a loop device keep it, if it can have a successor.
    pub(super) fn keep_by(&self, keeper: &KeeperLink) {
        if let Self::Loop(FileDevice { channel, file, device, terms, .. }) = self
            && terms.is_some_and(|terms| terms.resends())
        {
            keeper.keep([channel.as_fd(), file.as_fd(), device.as_fd()]);
        }
    }

    /// Whether no process has served it before.
    pub(super) fn is_new(&self) -> bool {
        match self {
            Self::Loop(on_file) => on_file.is_new,
            Self::Ublk(added) => added.is_new,
            Self::Nbd(_) => true,
        }
    }

    /// Has a loop device that was taken over take the volume's size, in bytes, if that has changed meanwhile.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn take_size(&mut self, bytes: u64) -> Result<(), AttachError> {
        let Self::Loop(on_file) = &*self else { return Ok(()) };
        let before = on_file.device.bytes().map_err(AttachError::File)?;
        if before / 512 == bytes / 512 { Ok(()) } else { self.resize(bytes) }
    }

    /// Has the device take the volume's size, in bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn resize(&mut self, bytes: u64) -> Result<(), AttachError> {
        match self {
            Self::Ublk(added) => added.device.resize(bytes)?,
            Self::Nbd(device) => device.resize(bytes)?,
            Self::Loop(FileDevice { channel, file, device, .. }) => {
                // The kernel asks for the file's size, and the device takes it.
                let told = Notifier::new(Arc::clone(channel)).invalidate_inode(volume_file::NODE, -1, 0);
                told.map_err(|error: NotifyError| AttachError::File(io::Error::other(error)))?;
                let how = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                let stat = rustix::fs::statx(file, c"", how, StatxFlags::SIZE);
                stat.map_err(|error| AttachError::File(error.into()))?;
                device.renew_size().map_err(AttachError::File)?;
            }
        }
        tracing::info!(device = %self.path().display(), bytes, "resized");
        Ok(())
    }

    /// Has the kernel remove the device, unless it is in use: mounted, swap, or part of another device. `stopping` is called before.
    pub(super) fn detach(self, stopping: impl FnOnce()) -> Result<Detaching, Self> {
        let claimed = match claim(&self.path()) {
            Ok(None) => return Err(self),
            Ok(claimed) => claimed,
            // The node in /dev is gone.
            Err(_) => None,
        };
        stopping();
        if let Self::Loop(_) = self {
            // The kernel takes it apart when its last user closes it: at once, unless a program has it open.
            return Ok(Detaching::of_loop());
        }
        // No program can mount the device at this moment. Programs that have it open get errors from now on.
        let written = claimed.as_ref().map_or(Ok(()), File::sync_all);
        let unwritten = written.err().map(|error| format!("not all could be written out: {error}"));
        Ok(Detaching { ublk: self.stop(), unwritten })
    }

    /// Has the kernel end the device, with errors for its users. Gives one of ublk, which is to be removed.
    fn stop(self) -> Option<UblkDevice> {
        let (stopped, ublk) = match self {
            Self::Loop(_) => (Ok(()), None),
            Self::Ublk(AddedDevice { mut device, .. }) => (device.stop().map_err(AttachError::from), Some(device)),
            Self::Nbd(mut device) => (device.disconnect().map_err(AttachError::from), None),
        };
        if let Err(error) = stopped {
            tracing::error!(%error, "the device cannot be removed");
        }
        ublk
    }

    /// The loop has ended before the device was to go.
    pub(super) fn abandon(self) -> Result<(), String> {
        Detaching { ublk: self.stop(), unwritten: None }.finish()
    }
}

impl Detaching {
    /// The kernel takes a loop device apart when its last user closes it.
    pub(super) fn of_loop() -> Self {
        Self { ublk: None, unwritten: None }
    }

    /// The loop has ended: nothing of the device stays.
    ///
    /// # Errors
    /// What the kernel had could not all be written.
    pub(super) fn finish(self) -> Result<(), String> {
        if let Some(Err(error)) = self.ublk.map(UblkDevice::remove) {
            tracing::warn!(%error, "the device has ended, and its character device is still there");
        }
        self.unwritten.map_or(Ok(()), Err)
    }
}
