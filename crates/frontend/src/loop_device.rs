//! Loop devices: the kernel's block devices over an open file.
//!
//! A [`LoopDevice`] is held by its descriptor: the kernel removes the device when its last user has closed it, also after
//! the death of this process. The structures are those of `linux/loop.h`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::io::{DupFlags, Errno};
use rustix::ioctl::{Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const CONFIGURE: Opcode = 0x4c0a;
const SET_CAPACITY: Opcode = 0x4c07;
const GET_FREE: Opcode = 0x4c82;

const READ_ONLY: u32 = 1;
const AUTOCLEAR: u32 = 4;
const PARTITION_SCAN: u32 = 8;
const DIRECT_IO: u32 = 16;

/// How often a free device is asked for: others may take the one that the kernel named.
const TRIES_MAX: usize = 64;

/// `struct loop_config`, with `struct loop_info64` in it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Config {
    file: u32,
    block_bytes: u32,
    device: u64,
    inode: u64,
    real_device: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encryption: u32,
    key_bytes: u32,
    flags: u32,
    file_name: [u8; 64],
    encryption_name: [u8; 64],
    key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<Config>() == 304);

/// Why there is no loop device.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The control device.
    #[error("/dev/loop-control: {0}; load the kernel's module (modprobe loop), and run as root")]
    Control(io::Error),
    /// The device's node.
    #[error("{}: {source}; a container needs the host's loop devices in its /dev", path.display())]
    Node {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused the file.
    #[error("{}: the kernel does not take the file: {source}", path.display())]
    Configure {
        /// The device.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// All that were free were taken by others.
    #[error("no free loop device: others took each one that was free; try again")]
    Taken,
}

/// `LOOP_CTL_GET_FREE`, which answers with the number of the device.
struct GetFree;

// SAFETY: the ioctl has no argument, and its result is a number.
unsafe impl Ioctl for GetFree {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GET_FREE
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut rustix::ffi::c_void) -> rustix::io::Result<u32> {
        u32::try_from(output).map_err(|_| Errno::RANGE)
    }
}

/// How a file becomes a device.
#[derive(Clone, Copy, Debug)]
pub struct LoopOptions<'a> {
    /// Its logical block: 512 to 4096 bytes, a power of two.
    pub block_bytes: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// What `losetup` and `/sys` show as its file; at most 63 bytes of it.
    pub name: &'a str,
}

/// A low descriptor for a device that is made later.
///
/// A process that dies gives up its descriptors in descending order (`task_work_run` of the kernel takes the newest first). Giving up
/// the last descriptor of a block device writes its dirty pages. All that keeps the channel of the file system below must be gone by
/// then, io_uring's rings too, so that these writes fail; otherwise the dead process waits for itself.
#[derive(Debug)]
pub struct DevicePlace(OwnedFd);

impl DevicePlace {
    /// Takes the lowest number that is free. The process opens rings and channels after this.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take() -> io::Result<Self> {
        Ok(Self(File::open("/dev/null")?.into()))
    }

    fn fill(mut self, device: &OwnedFd) -> rustix::io::Result<OwnedFd> {
        rustix::io::dup3(device, &mut self.0, DupFlags::CLOEXEC)?;
        Ok(self.0)
    }
}

/// A loop device that exists as long as it is open, by this object among others.
#[derive(Debug)]
pub struct LoopDevice {
    device: OwnedFd,
    path: PathBuf,
}

impl LoopDevice {
    /// A device over `file`, with direct I/O and its partitions. The file must be served by then: the kernel reads from it. The
    /// device's descriptor takes `place`.
    ///
    /// # Errors
    /// See [`LoopError`].
    pub fn over(file: impl AsFd, options: LoopOptions<'_>, place: DevicePlace) -> Result<Self, LoopError> {
        let control = File::options().read(true).write(true).open("/dev/loop-control").map_err(LoopError::Control)?;
        for _ in 0..TRIES_MAX {
            // SAFETY: see `GetFree`.
            let number = unsafe { ioctl(&control, GetFree) }.map_err(|error| LoopError::Control(error.into()))?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = match open_device(&path, options.read_only) {
                Ok(device) => device,
                Err(source) => return Err(LoopError::Node { path, source }),
            };
            match configure(&device, file.as_fd().as_raw_fd(), options) {
                Ok(()) => {
                    let placed = place.fill(&device);
                    let device =
                        placed.map_err(|error| LoopError::Node { path: path.clone(), source: error.into() })?;
                    return Ok(Self { device, path });
                }
                Err(Errno::BUSY) => {}
                Err(error) => return Err(LoopError::Configure { path, source: error.into() }),
            }
        }
        Err(LoopError::Taken)
    }

    /// A device that another process has made. `path` is its node. The descriptor is as low as a [`DevicePlace`].
    pub fn adopt(device: OwnedFd, path: PathBuf) -> Self {
        Self { device, path }
    }

    /// Its size in bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bytes(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.device, rustix::fs::SeekFrom::End(0))?)
    }

    /// `/dev/loopN`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has the kernel look at the file's size again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn renew_size(&self) -> io::Result<()> {
        // SAFETY: the ioctl has no argument.
        Ok(unsafe { ioctl(&self.device, NoArg::<SET_CAPACITY>::new()) }?)
    }
}

/// Whether a block device is mounted, part of another one, or otherwise claimed by one user alone.
///
/// # Errors
/// The kernel's.
pub fn is_claimed(path: &Path) -> io::Result<bool> {
    claim(path).map(|claimed| claimed.is_none())
}

/// Claims a block device: until the file is closed it can neither be mounted nor become part of another one. `None` if it is
/// claimed already.
///
/// # Errors
/// The kernel's.
pub fn claim(path: &Path) -> io::Result<Option<File>> {
    // O_EXCL without O_CREAT claims a block device (open(2)).
    let flags = rustix::fs::OFlags::EXCL.bits() as i32;
    match File::options().read(true).custom_flags(flags).open(path) {
        Ok(claimed) => Ok(Some(claimed)),
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

fn open_device(path: &Path, read_only: bool) -> io::Result<OwnedFd> {
    Ok(File::options().read(true).write(!read_only).open(path)?.into())
}

fn configure(device: &OwnedFd, file: i32, options: LoopOptions<'_>) -> rustix::io::Result<()> {
    let mut config = Config::new_zeroed();
    config.file = file as u32;
    config.block_bytes = options.block_bytes;
    config.flags = AUTOCLEAR | PARTITION_SCAN | DIRECT_IO | if options.read_only { READ_ONLY } else { 0 };
    let room = config.file_name.len() - 1;
    for (byte, of_name) in config.file_name[..room].iter_mut().zip(options.name.bytes()) {
        *byte = of_name;
    }
    // SAFETY: the ioctl reads a `struct loop_config`, whose layout `Config` has; it lives until the call returns.
    unsafe { ioctl(device, Setter::<CONFIGURE, Config>::new(config)) }
}
