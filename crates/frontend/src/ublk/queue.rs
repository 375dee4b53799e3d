//! The requests of one device.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;

use io_uring::{IoUring, opcode, types};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::param::page_size;
use zerocopy::IntoBytes;

use super::abi::{self, IoCommand, IoDescriptor};

/// What the kernel asks for. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// [`Queue::put_payload`], then complete.
    Read,
    /// [`Queue::take_payload`] gives the bytes.
    Write {
        /// Durable before it is completed.
        durable: bool,
    },
    /// Make durable what was completed before.
    Flush,
    /// Not needed any more; reads as zeroes in byway.
    Discard,
    /// Zeroes from now on.
    WriteZeroes {
        /// The space stays allocated.
        keep_space: bool,
    },
    /// One that is not known here.
    Unknown,
}

/// A request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkRequest {
    /// Its number, until it is completed.
    pub tag: u16,
    /// What.
    pub operation: Operation,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What a queue gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// A request.
    Request(UblkRequest),
    /// None at present.
    Nothing,
    /// None any more: the device was stopped.
    Ended,
}

/// The requests of a device. Only the thread that has made it may use it.
pub struct Queue {
    ring: IoUring,
    device: File,
    requests: Requests,
    /// Tags that the kernel may still use.
    live: u16,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("device", &self.device).field("live", &self.live).finish_non_exhaustive()
    }
}

/// The memory in which the kernel describes requests, by their tags.
struct Requests {
    address: NonNull<IoDescriptor>,
    bytes: usize,
    depth: u16,
}

impl Requests {
    fn map(device: &File, depth: u16) -> io::Result<Self> {
        // The kernel maps exactly this many bytes.
        let bytes = (usize::from(depth) * size_of::<IoDescriptor>()).next_multiple_of(page_size());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, device, 0) }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, bytes, depth })
    }

    fn get(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "the kernel uses the tags that were fetched");
        // SAFETY: the mapping has `depth` descriptors and lasts as long as `self`. The kernel writes a descriptor before it
        // reports its tag, and not again before the tag is completed.
        unsafe { self.address.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's, and no reference into it exists.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

impl Queue {
    /// Opens a device's character device, and asks for the first request of each tag.
    pub(super) fn open(path: &Path, depth: u16) -> io::Result<Self> {
        let device = File::options().read(true).write(true).open(path)?;
        let requests = Requests::map(&device, depth)?;
        let ring = IoUring::builder().build(u32::from(depth))?;
        let mut queue = Self { ring, device, requests, live: depth };
        for tag in 0..depth {
            queue.push(tag, abi::FETCH, 0);
        }
        queue.submit()?;
        Ok(queue)
    }

    fn push(&mut self, tag: u16, command: u32, result: i32) {
        let io = IoCommand { queue: 0, tag, result, address: 0 };
        let mut bytes = [0; size_of::<IoCommand>()];
        bytes.copy_from_slice(io.as_bytes());
        let device = types::Fd(self.device.as_raw_fd());
        let entry = opcode::UringCmd16::new(device, command).cmd(bytes).build().user_data(u64::from(tag));
        // SAFETY: the command has no memory of this process, and its file is open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "each tag has one entry at most");
    }

    /// A descriptor that can be read from when there are requests, for poll(2) and the like.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn readiness(&self) -> io::Result<OwnedFd> {
        // SAFETY: the ring's descriptor is open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }.try_clone_to_owned()
    }

    /// The next request.
    ///
    /// # Errors
    /// The kernel refused a command, which is a fault of byway or of the kernel.
    pub fn take(&mut self) -> io::Result<Taken> {
        while let Some(completion) = self.ring.completion().next() {
            let tag = completion.user_data() as u16;
            match completion.result() {
                0 => return Ok(Taken::Request(describe(tag, self.requests.get(tag)))),
                abi::ABORTED => self.live -= 1,
                refused => return Err(io::Error::from_raw_os_error(-refused)),
            }
        }
        Ok(if self.live == 0 { Taken::Ended } else { Taken::Nothing })
    }

    /// Copies the payload of a write into memory.
    ///
    /// # Errors
    /// The kernel's; the request is not the kernel's any more.
    pub fn take_payload(&self, tag: u16, into: &mut [u8]) -> io::Result<()> {
        self.device.read_exact_at(into, abi::payload_offset(tag))
    }

    /// Copies the answer of a read to the kernel.
    ///
    /// # Errors
    /// The kernel's; the request is not the kernel's any more.
    pub fn put_payload(&self, tag: u16, from: &[u8]) -> io::Result<()> {
        self.device.write_all_at(from, abi::payload_offset(tag))
    }

    /// Ends a request: with its bytes if it was a read or write, otherwise 0, or with a negative error number. The kernel hears of it
    /// at the next [`Queue::submit`].
    pub fn complete(&mut self, tag: u16, result: i32) {
        self.push(tag, abi::COMMIT_AND_FETCH, result);
    }

    /// Tells the kernel of what was completed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn describe(tag: u16, descriptor: IoDescriptor) -> UblkRequest {
    let word = descriptor.operation_and_flags;
    let operation = match word & 0xff {
        abi::OP_READ => Operation::Read,
        abi::OP_WRITE => Operation::Write { durable: word & abi::FLAG_FUA != 0 },
        abi::OP_FLUSH => Operation::Flush,
        abi::OP_DISCARD => Operation::Discard,
        abi::OP_WRITE_ZEROES => Operation::WriteZeroes { keep_space: word & abi::FLAG_NO_UNMAP != 0 },
        _ => Operation::Unknown,
    };
    // A flush has the last sector that there can be.
    let offset = descriptor.first_sector.saturating_mul(512);
    UblkRequest { tag, operation, offset, len: u64::from(descriptor.sectors) * 512 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_the_kernel_describes_them() {
        let descriptor = |word| IoDescriptor { operation_and_flags: word, sectors: 8, first_sector: 100, address: 0 };
        let described = |word| describe(5, descriptor(word));
        assert_eq!(described(0), UblkRequest { tag: 5, operation: Operation::Read, offset: 51_200, len: 4096 });
        // UBLK_IO_OP_WRITE with UBLK_IO_F_FUA and UBLK_IO_F_FAILFAST_DEV.
        assert_eq!(described(1 | 1 << 13 | 1 << 8).operation, Operation::Write { durable: true });
        assert_eq!(described(1).operation, Operation::Write { durable: false });
        let flush = IoDescriptor { operation_and_flags: 2, sectors: 0, first_sector: u64::MAX, address: 0 };
        assert_eq!(describe(5, flush).operation, Operation::Flush);
        assert_eq!(described(3).operation, Operation::Discard);
        assert_eq!(described(5).operation, Operation::WriteZeroes { keep_space: false });
        assert_eq!(described(5 | 1 << 15).operation, Operation::WriteZeroes { keep_space: true });
        assert_eq!(described(4).operation, Operation::Unknown);
    }
}
