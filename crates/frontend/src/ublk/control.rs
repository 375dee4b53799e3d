//! `/dev/ublk-control`: devices come and go.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::abi::{self, ControlCommand, DeviceInfo, Parameters};
use super::queue::Queue;
use crate::limits::{UBLK_QUEUE_DEPTH, UBLK_REQUEST_BYTES_MAX};

const CONTROL: &str = "/dev/ublk-control";
/// No device yet: the kernel chooses.
const ANY: u32 = u32::MAX;
/// How long the kernel may take to notice that a device's process has died.
const DEATH_LIMIT: Duration = Duration::from_secs(10);
const DEATH_LOOKS: Duration = Duration::from_millis(20);

/// What the driver must have.
const WANTED: u64 = abi::FEATURE_ENCODED | abi::FEATURE_USER_COPY | abi::FEATURE_RECOVERY;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The control device.
    #[error("{CONTROL}: {0}; load the kernel's module (modprobe ublk_drv), and run as root")]
    Control(io::Error),
    /// io_uring, or commands in it.
    #[error("ublk needs io_uring: {0}; set sysctl kernel.io_uring_disabled=0")]
    Ring(io::Error),
    /// A kernel before 6.5.
    #[error("this kernel's ublk is too old (features {0:#x}); it needs Linux 6.5")]
    Old(u64),
    /// A command that the kernel refused.
    #[error("ublk: the kernel refuses to {what}: {source}")]
    Command {
        /// What was asked for.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A device of another program's, or of a later byway.
    #[error("{}: its requests of {bytes} bytes, {depth} at a time, are more than this program takes; detach it", path.display())]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Its longest request.
        bytes: u32,
        /// Requests at a time.
        depth: u16,
    },
    /// The device's character device.
    #[error("{}: {source}; a container needs the host's /dev", path.display())]
    Node {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What a device is to be.
#[derive(Clone, Copy, Debug)]
pub struct UblkOptions {
    /// Its size, in bytes: at least a block; what is over a whole number of blocks is left out.
    pub bytes: u64,
    /// Its logical block: 512 to 4096 bytes, a power of two.
    pub block_bytes: u32,
    /// The longest request, in bytes: a power of two from 4096 on, at most 1 MiB.
    pub request_bytes_max: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// A number by which its maker knows the device again ([`UblkDevice::recover`], [`remove`]).
    pub cookie: u64,
}

impl UblkOptions {
    fn parameters(&self) -> Parameters {
        let sectors = self.request_bytes_max / 512;
        let caches = if self.read_only { abi::READ_ONLY } else { abi::VOLATILE_CACHE | abi::FUA };
        let physical = self.block_bytes.max(4096);
        Parameters {
            bytes: size_of::<Parameters>() as u32,
            types: abi::TYPES,
            attributes: caches,
            logical_block_shift: self.block_bytes.ilog2() as u8,
            physical_block_shift: physical.ilog2() as u8,
            io_optimal_shift: self.request_bytes_max.ilog2() as u8,
            io_minimum_shift: physical.ilog2() as u8,
            sectors_max: sectors,
            device_sectors: sectors_of(self.bytes, self.block_bytes),
            discard_granularity: physical,
            // As many as a loop device takes at once.
            discard_sectors_max: u32::MAX >> 9,
            zero_sectors_max: u32::MAX >> 9,
            discard_segments_max: 1,
            ..Parameters::new_zeroed()
        }
    }
}

/// Sectors of a device: whole blocks.
fn sectors_of(bytes: u64, block_bytes: u32) -> u64 {
    bytes / u64::from(block_bytes) * u64::from(block_bytes / 512)
}

/// The control device, and a ring for commands to it, one at a time.
#[derive(Debug)]
struct Control {
    ring: Ring,
    device: File,
}

struct Ring(Box<IoUring<squeue::Entry128, cqueue::Entry>>);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

impl Control {
    /// Opens it, and gives the driver's features.
    fn open() -> Result<(Self, u64), UblkError> {
        let device = File::options().read(true).write(true).open(CONTROL).map_err(UblkError::Control)?;
        let ring = IoUring::builder().build(1).map_err(UblkError::Ring)?;
        let mut control = Self { ring: Ring(Box::new(ring)), device };
        let mut features = 0u64;
        match control.command("tell its features", abi::GET_FEATURES, ANY, 0, &mut features) {
            Ok(()) => {}
            // Before Linux 6.5 there is no such command.
            Err(_) => return Err(UblkError::Old(0)),
        }
        if features & WANTED == WANTED { Ok((control, features)) } else { Err(UblkError::Old(features)) }
    }

    /// Has the kernel carry out a command, and waits for its end. The kernel reads `buffer` and may write it.
    fn command<T: IntoBytes + FromBytes + Immutable + Copy>(
        &mut self,
        what: &'static str,
        number: u32,
        device: u32,
        data: u64,
        buffer: &mut T,
    ) -> Result<(), UblkError> {
        let failed = |source| UblkError::Command { what, source };
        let shared = Box::into_raw(Box::new(*buffer));
        let command = ControlCommand {
            device,
            queue: u16::MAX,
            buffer_bytes: size_of::<T>() as u16,
            buffer: shared as u64,
            data,
            ..ControlCommand::new_zeroed()
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), number).cmd(bytes).build();
        // SAFETY: the command's buffer is an allocation of its own, which is freed only after the command has completed; the
        // descriptor stays open until then, since this call borrows its owner.
        unsafe { self.ring.0.submission().push(&entry) }.map_err(|full| failed(io::Error::other(full)))?;
        let result = loop {
            if let Some(completion) = self.ring.0.completion().next() {
                break completion.result();
            }
            match self.ring.0.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel may still have the buffer, which is leaked.
                Err(error) => return Err(failed(error)),
            }
        };
        // SAFETY: the pointer came from `Box::into_raw` above, and the kernel has let go of it.
        *buffer = *unsafe { Box::from_raw(shared) };
        if result < 0 { Err(failed(io::Error::from_raw_os_error(-result))) } else { Ok(()) }
    }
}

/// Whether this machine can make such devices.
///
/// # Errors
/// Why not.
pub fn check() -> Result<(), UblkError> {
    Control::open().map(drop)
}

/// A device that this process serves.
#[derive(Debug)]
pub struct UblkDevice {
    control: Control,
    number: u32,
    can_resize: bool,
    /// The disk is there, and waits.
    recovers: bool,
}

impl UblkDevice {
    /// Adds a device, and its queue, for the calling thread alone: only that thread may take requests. There is no disk before
    /// [`UblkDevice::start`].
    ///
    /// # Errors
    /// See [`UblkError`].
    pub fn add(options: &UblkOptions) -> Result<(Self, Queue), UblkError> {
        let (mut control, features) = Control::open()?;
        let mut info = DeviceInfo {
            queues: 1,
            queue_depth: UBLK_QUEUE_DEPTH,
            request_bytes_max: options.request_bytes_max,
            device: ANY,
            features: WANTED | features & abi::FEATURE_UPDATE_SIZE,
            cookie: options.cookie,
            ..DeviceInfo::new_zeroed()
        };
        control.command("add a device", abi::ADD, ANY, 0, &mut info)?;
        let can_resize = info.features & abi::FEATURE_UPDATE_SIZE != 0;
        let mut device = Self { control, number: info.device, can_resize, recovers: false };
        match device.prepare(options, info.queue_depth) {
            Ok(queue) => Ok((device, queue)),
            Err(error) => {
                let _ = device.remove();
                Err(error)
            }
        }
    }

    fn prepare(&mut self, options: &UblkOptions, depth: u16) -> Result<Queue, UblkError> {
        let mut parameters = options.parameters();
        self.control.command("take the device's parameters", abi::SET_PARAMETERS, self.number, 0, &mut parameters)?;
        self.open_queue(depth)
    }

    fn open_queue(&self, depth: u16) -> Result<Queue, UblkError> {
        let path = PathBuf::from(format!("/dev/ublkc{}", self.number));
        Queue::open(&path, depth).map_err(|source| UblkError::Node { path, source })
    }

    /// Takes over the device of a process that has died; `None` if there is none with that cookie. As with [`UblkDevice::add`], the
    /// queue is for the calling thread alone, and nothing is served before [`UblkDevice::start`].
    ///
    /// # Errors
    /// See [`UblkError`].
    pub fn recover(disk: &Path, cookie: u64) -> Result<Option<(Self, Queue)>, UblkError> {
        let Some((mut control, info)) = find(disk, cookie)? else { return Ok(None) };
        if info.state == abi::DEAD {
            return Ok(None);
        }
        let (bytes, depth) = (info.request_bytes_max, info.queue_depth);
        if bytes > UBLK_REQUEST_BYTES_MAX || depth > UBLK_QUEUE_DEPTH {
            return Err(UblkError::Foreign { path: disk.to_owned(), bytes, depth });
        }
        let limit = Instant::now() + DEATH_LIMIT;
        loop {
            match control.command("take the device over", abi::START_RECOVERY, info.device, 0, &mut [0u8; 8]) {
                Ok(()) => break,
                // The kernel has not put all away that the dead process had.
                Err(UblkError::Command { source, .. })
                    if source.raw_os_error() == Some(Errno::BUSY.raw_os_error()) && Instant::now() < limit =>
                {
                    pause(DEATH_LOOKS);
                }
                Err(error) => return Err(error),
            }
        }
        let can_resize = info.features & abi::FEATURE_UPDATE_SIZE != 0;
        let device = Self { control, number: info.device, can_resize, recovers: true };
        let queue = device.open_queue(depth)?;
        Ok(Some((device, queue)))
    }

    /// Starts the device, or lets one that was taken over go on. The thread of its queue must take requests meanwhile: the kernel
    /// looks for partitions.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(&mut self) -> Result<(), UblkError> {
        let command = if self.recovers { abi::END_RECOVERY } else { abi::START };
        let pid = u64::from(std::process::id());
        self.control.command("start the device", command, self.number, pid, &mut [0u8; 8])
    }

    /// `/dev/ublkbN`.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/ublkb{}", self.number))
    }

    /// Tells the kernel another size, in bytes: a number of whole blocks.
    ///
    /// # Errors
    /// `EOPNOTSUPP` before Linux 6.16, and the kernel's.
    pub fn resize(&mut self, bytes: u64) -> Result<(), UblkError> {
        let what = "resize the device";
        if !self.can_resize {
            return Err(UblkError::Command { what, source: Errno::OPNOTSUPP.into() });
        }
        self.control.command(what, abi::UPDATE_SIZE, self.number, bytes / 512, &mut [0u8; 8])
    }

    /// Removes the disk: its users get errors from then on, also for what the kernel has not written yet. The queue's thread must take
    /// requests meanwhile; its queue ends with this.
    ///
    /// # Errors
    /// The kernel's.
    pub fn stop(&mut self) -> Result<(), UblkError> {
        self.control.command("stop the device", abi::STOP, self.number, 0, &mut [0u8; 8])
    }

    /// Removes the device. Waits until its queue was dropped, and all programs have closed the disk.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove(mut self) -> Result<(), UblkError> {
        self.control.command("remove the device", abi::DELETE, self.number, 0, &mut [0u8; 8])
    }
}

/// The kernel tells of no event when a dead process is put away.
#[expect(clippy::disallowed_methods, reason = "the condition is looked at again, with a deadline")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Removes the device of a process that has died, unless there is none with that cookie. What waits in it fails.
///
/// # Errors
/// The kernel's.
pub fn remove(disk: &Path, cookie: u64) -> Result<(), UblkError> {
    let Some((mut control, info)) = find(disk, cookie)? else { return Ok(()) };
    let what = "remove the device";
    // A file system may be mounted on it, which the other command would wait for.
    let removed = control.command(what, abi::DELETE_LATER, info.device, 0, &mut [0u8; 8]);
    removed.or_else(|_| control.command(what, abi::DELETE, info.device, 0, &mut [0u8; 8]))
}

/// Whether a device is there, without or with a process.
///
/// # Errors
/// The kernel's.
pub fn is_there(disk: &Path, cookie: u64) -> Result<bool, UblkError> {
    Ok(find(disk, cookie)?.is_some_and(|(_, info)| info.state != abi::DEAD))
}

/// The device, unless its number is another one's by now.
fn find(disk: &Path, cookie: u64) -> Result<Option<(Control, DeviceInfo)>, UblkError> {
    let number = disk.to_str().and_then(|path| path.strip_prefix("/dev/ublkb")?.parse().ok());
    let Some(number) = number else { return Ok(None) };
    let (mut control, _) = Control::open()?;
    let mut info = DeviceInfo::new_zeroed();
    let found = control.command("tell of a device", abi::GET_DEVICE, number, 0, &mut info).is_ok();
    Ok((found && info.cookie == cookie).then_some((control, info)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_whole_blocks_and_flushes() {
        let options =
            UblkOptions { bytes: 10_000, block_bytes: 4096, request_bytes_max: 1 << 20, read_only: false, cookie: 1 };
        let parameters = options.parameters();
        assert_eq!((parameters.device_sectors, parameters.sectors_max), (16, 2048));
        assert_eq!(parameters.attributes, abi::VOLATILE_CACHE | abi::FUA);
        assert_eq!((parameters.logical_block_shift, parameters.io_optimal_shift), (12, 20));
        let read_only = UblkOptions { read_only: true, block_bytes: 512, ..options }.parameters();
        assert_eq!((read_only.attributes, read_only.device_sectors), (abi::READ_ONLY, 19));
        assert_eq!((read_only.logical_block_shift, read_only.physical_block_shift), (9, 12));
    }

    #[test]
    fn a_machine_without_ublk_is_told_what_to_load() {
        if Path::new(CONTROL).exists() {
            byway_skip::skip_this(byway_skip::SkipReason::Machine("has ublk"));
            return;
        }
        let error = check().unwrap_err().to_string();
        assert!(error.contains("modprobe ublk_drv"), "{error}");
    }
}
