//! `/dev/fuse`: requests are read from it, replies and notifications written to it.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Setter, opcode};
use zerocopy::IntoBytes;

use super::abi::OutHeader;
use super::reply;

/// Parts of one reply's payload; more are refused with `EINVAL`.
const PARTS_MAX: usize = 64;

/// One descriptor of a mount. A reply goes to the channel that its request was read from.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// What a read of a channel gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A request of so many bytes.
    Request(usize),
    /// None, or one that was withdrawn before it was read: read again, after waiting if the channel does not block.
    Nothing,
    /// The mount is gone.
    Ended,
}

impl Channel {
    /// A channel without a mount, for [`mount`](super::mount).
    ///
    /// # Errors
    /// The kernel's: no FUSE here, or no right to it.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self(File::options().read(true).write(true).open("/dev/fuse")?.into()))
    }

    /// A channel of a mount that another process made.
    pub fn adopt(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// The same channel with a descriptor above those of block devices, for a process that holds one over the mount: see
    /// [`DevicePlace`](crate::loop_device::DevicePlace).
    ///
    /// # Errors
    /// The kernel's: too many descriptors are open.
    pub fn above_devices(self) -> io::Result<Self> {
        Ok(Self(rustix::io::fcntl_dupfd_cloexec(&self.0, HIGH_DESCRIPTOR_MIN)?))
    }

    /// Another channel of the same mount, for another thread.
    ///
    /// # Errors
    /// The kernel's.
    pub fn another(&self) -> io::Result<Self> {
        /// `FUSE_DEV_IOC_CLONE` of `linux/fuse.h`.
        const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);
        let other = Self::open()?;
        // SAFETY: the ioctl reads a u32, the descriptor of the channel, which `Setter` points to for the length of the call.
        let clone = unsafe { Setter::<CLONE, u32>::new(self.0.as_raw_fd() as u32) };
        // SAFETY: the opcode and the type of its argument are those of `linux/fuse.h`.
        unsafe { rustix::ioctl::ioctl(&other.0, clone)? };
        Ok(other)
    }

    /// Has reads of a channel without requests say so at once, for event loops.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.0)?;
        Ok(rustix::fs::fcntl_setfl(&self.0, flags | rustix::fs::OFlags::NONBLOCK)?)
    }

    /// Reads a request. `into` holds the longest WRITE and the 80 bytes before it at least, in one or more parts.
    ///
    /// # Errors
    /// The kernel's, where it is neither the mount's end nor a request that was withdrawn.
    pub fn read(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        match rustix::io::readv(&self.0, into) {
            Ok(bytes) => Ok(Received::Request(bytes)),
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => Ok(Received::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Received::Ended),
            Err(error) => Err(error.into()),
        }
    }

    /// Answers a request: with a payload, or with an error, which is a positive errno.
    ///
    /// # Errors
    /// The kernel's. A request that was withdrawn, or whose mount is gone, needs no answer: that is none.
    pub fn reply(&self, unique: u64, answer: Result<&[&[u8]], i32>) -> io::Result<()> {
        let (error, parts) = match answer {
            Ok(parts) => (0, parts),
            Err(errno) => (-errno, &[][..]),
        };
        let bytes = parts.iter().map(|part| part.len()).sum();
        unless_withdrawn(self.write(reply::header(unique, error, bytes), parts).map_err(io::Error::from))
    }

    /// Answers a request with a payload that `write` sends: it gets the descriptor and the bytes to send before the payload, all by one
    /// system call.
    ///
    /// # Errors
    /// See [`Channel::reply`].
    pub fn reply_by(
        &self,
        unique: u64,
        payload_bytes: usize,
        write: impl FnOnce(BorrowedFd<'_>, &[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        unless_withdrawn(write(self.0.as_fd(), reply::header(unique, 0, payload_bytes).as_bytes()).map(|_| ()))
    }

    /// Writes a reply or a notification, which the kernel takes as a whole.
    pub(super) fn write(&self, header: OutHeader, parts: &[&[u8]]) -> Result<(), Errno> {
        if parts.len() > PARTS_MAX {
            return Err(Errno::INVAL);
        }
        let empty = IoSlice::new(&[]);
        let mut slices = [empty; PARTS_MAX + 1];
        slices[0] = IoSlice::new(header.as_bytes());
        for (slice, part) in slices[1..].iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        rustix::io::retry_on_intr(|| rustix::io::writev(&self.0, &slices[..=parts.len()])).map(|_| ())
    }
}

/// More than a keeper of a block device has other descriptors.
const HIGH_DESCRIPTOR_MIN: i32 = 512;

fn unless_withdrawn(answered: io::Result<()>) -> io::Result<()> {
    let is_withdrawn = |error| matches!(error, Errno::NOENT | Errno::NODEV | Errno::CONNABORTED);
    match answered {
        Err(error) if Errno::from_io_error(&error).is_some_and(is_withdrawn) => Ok(()),
        answered => answered,
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
