//! Frames in the memory of a PCI device, such as an NVMe controller's memory buffer.
//!
//! Linux provides such memory page by page where a driver offers it (`CONFIG_PCI_P2PDMA`, Linux 6.2 and later). A mapping of
//! `p2pmem/allocate` in the folder of the PCI function is an allocation. Direct I/O of the function's own disks into the
//! mapping goes from the medium to the device's memory without passing through main memory. That is the data path of gmblock
//! on a stock kernel, up to the network: a sender of such a frame must declare that it can reach the memory, otherwise a CPU
//! copies it, uncached ([`Counters::sent_device_bytes`](crate::Counters)).
//!
//! Rules for such frames (docs/decisions/0019):
//!
//! - The kernel moves their bytes; no code of this process reads or writes them, because the device may be removed at any
//!   time. Then the kernel answers `EFAULT`, but a load or store would end the process.
//! - They are not registered with io_uring and not sent without a copy: both pin pages in a way that the kernel refuses for
//!   them.
//! - Their transfers are kept apart from all others (`apart.rs`).

pub(crate) mod apart;
mod sysfs;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::frame::FramePool;
use crate::limits::{FRAME_BYTES_MAX, FRAME_BYTES_MIN};

/// Where the kernel tells of devices.
const SYSFS: &str = "/sys";

/// Why a file's disk has no memory that can be used. What to do is said with each.
#[derive(Debug, thiserror::Error)]
pub enum DeviceMemoryError {
    /// The file cannot be looked at.
    #[error("{}: {source}", path.display())]
    Path {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file lies on no disk that the kernel names: tmpfs, a network file system, one over several disks.
    #[error("{} lies on no single disk; serve a block device, or a file of ext4 or xfs", path.display())]
    NoDisk {
        /// Which.
        path: PathBuf,
    },
    /// The disk is not one function on the PCI bus.
    #[error(
        "the disk {disk} is no PCI function's own (virtual, mapped, multipath, or gone); serve the NVMe namespace itself"
    )]
    NoFunction {
        /// `major:minor` of the disk.
        disk: String,
    },
    /// The function offers no memory.
    #[error(
        "PCI function {function} has no p2pmem: it takes an NVMe controller with a memory buffer (CMB), and a kernel \
         with CONFIG_PCI_P2PDMA"
    )]
    NotOffered {
        /// Its address on the bus.
        function: String,
    },
    /// The file that hands it out cannot be opened.
    #[error("{}: {source}; it is root's alone, and goes when the device is removed", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// There is memory, and none could be had.
    #[error(
        "{bytes} bytes of the memory of PCI function {function} cannot be had: {source}; what is left of it is in \
         p2pmem/available, and Linux 6.2 or later hands it out"
    )]
    Allocate {
        /// Its address on the bus.
        function: String,
        /// What was asked for.
        bytes: usize,
        /// Why not.
        source: std::io::Error,
    },
}

/// The memory of one PCI function, from which pools are made. It may be shared between loops.
#[derive(Debug)]
pub struct DeviceMemory {
    allocate: OwnedFd,
    function: String,
    /// Names the file in sysfs: a device that comes back has another.
    inode: u64,
}

/// A function on the PCI bus that offers memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its address on the bus, as in `0000:00:03.0`.
    pub function: String,
    /// Bytes of its memory.
    pub bytes: u64,
    /// Free bytes.
    pub available_bytes: u64,
}

impl DeviceMemory {
    /// The memory of the PCI function whose disk `path` names, or has its file on.
    ///
    /// # Errors
    /// See [`DeviceMemoryError`].
    pub fn of_disk(path: &Path) -> Result<Self, DeviceMemoryError> {
        let sysfs = Path::new(SYSFS);
        let device = sysfs::device_of(path)?;
        Self::open(sysfs, sysfs::function_of(sysfs, device, path)?)
    }

    /// The memory of a PCI function by its address on the bus.
    ///
    /// # Errors
    /// See [`DeviceMemoryError`].
    pub fn of_function(function: &str) -> Result<Self, DeviceMemoryError> {
        Self::open(Path::new(SYSFS), function.to_owned())
    }

    fn open(sysfs: &Path, function: String) -> Result<Self, DeviceMemoryError> {
        let path = sysfs::folder(sysfs, &function).join("p2pmem/allocate");
        match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(allocate) => Ok(Self::from_descriptor(function, allocate)),
            Err(Errno::NOENT) => Err(DeviceMemoryError::NotOffered { function }),
            Err(source) => Err(DeviceMemoryError::Open { path, source: source.into() }),
        }
    }

    /// Takes over a descriptor of a function's `p2pmem/allocate`, opened for reading and writing (for descriptors passed from
    /// elsewhere).
    pub fn from_descriptor(function: String, allocate: OwnedFd) -> Self {
        let inode = rustix::fs::fstat(&allocate).map_or(0, |stat| stat.st_ino);
        Self { allocate, function, inode }
    }

    /// Its descriptor, to be passed to another process.
    pub fn into_descriptor(self) -> OwnedFd {
        self.allocate
    }

    /// Whether it is the memory of the same device: not of one that was removed and plugged in again.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.function, self.inode) == (&other.function, other.inode)
    }

    /// The function's address on the bus.
    pub fn function(&self) -> &str {
        &self.function
    }

    /// A pool of `bytes` of it (rounded to whole frames of [`FRAME_BYTES_MAX`], at least one), or of half of that where so
    /// much is not to be had, and so on down to one frame. The memory is the device's again when the pool and all its
    /// frames are gone.
    ///
    /// # Errors
    /// [`DeviceMemoryError::Allocate`].
    pub fn pool(&self, bytes: usize) -> Result<FramePool, DeviceMemoryError> {
        let mut bytes = bytes.next_multiple_of(FRAME_BYTES_MAX).max(FRAME_BYTES_MAX);
        loop {
            match self.map(bytes) {
                // SAFETY: the mapping was just made as such a pool wants it, and is given up to it.
                Ok(base) => return Ok(unsafe { FramePool::of_device(base, bytes) }),
                Err(Errno::NOMEM) if bytes > FRAME_BYTES_MAX => bytes = (bytes / 2).next_multiple_of(FRAME_BYTES_MAX),
                Err(error) => return Err(self.refused(bytes, error)),
            }
        }
    }

    /// Allocates a page and gives it back.
    ///
    /// # Errors
    /// [`DeviceMemoryError::Allocate`].
    pub fn try_page(&self) -> Result<(), DeviceMemoryError> {
        let base = self.map(FRAME_BYTES_MIN).map_err(|error| self.refused(FRAME_BYTES_MIN, error))?;
        // SAFETY: the mapping was just made, with this length, and nothing else refers to it.
        let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), FRAME_BYTES_MIN) };
        Ok(())
    }

    /// An allocation is a shared mapping from the start of the file: the kernel refuses others.
    fn map(&self, bytes: usize) -> Result<NonNull<u8>, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, self.allocate.as_fd(), 0)? };
        NonNull::new(base.cast()).ok_or(Errno::NOMEM)
    }

    fn refused(&self, bytes: usize, error: Errno) -> DeviceMemoryError {
        DeviceMemoryError::Allocate { function: self.function.clone(), bytes, source: error.into() }
    }
}

/// The functions on the PCI bus that offer memory, in the order of their addresses.
pub fn offers() -> Vec<Offer> {
    sysfs::offers(Path::new(SYSFS))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Duration;

    use super::*;
    use crate::{FileOptions, Gather, IoChoice, Op, OpenFile, Outcome, Reactor, Scatter, Token, Wait};

    /// A function that offers memory, which is a file here: it maps alike, and is not taken from anybody.
    fn offered(bytes: u64) -> (tempfile::TempDir, DeviceMemory) {
        let sysfs = tempfile::tempdir().unwrap();
        let folder = sysfs.path().join("bus/pci/devices/0000:00:03.0/p2pmem");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::File::create(folder.join("allocate")).unwrap().set_len(bytes).unwrap();
        let memory = DeviceMemory::open(sysfs.path(), "0000:00:03.0".to_owned()).unwrap();
        (sysfs, memory)
    }

    #[test]
    fn a_pool_is_of_the_device_and_bounded() {
        let (_sysfs, memory) = offered(4 << 20);
        memory.try_page().unwrap();
        let pool = memory.pool(3 << 20).unwrap();
        assert_eq!((pool.bytes(), pool.free_bytes()), (3 << 20, 3 << 20));
        let frames: Vec<_> = std::iter::from_fn(|| pool.alloc(256 << 10)).collect();
        assert_eq!(frames.len(), 12);
        assert!(frames.iter().all(crate::Frame::is_device));
        assert!(pool.alloc(1).is_none());
        drop(frames);
        assert_eq!(pool.free_bytes(), 3 << 20);
        assert!(!FramePool::new(1).unwrap().alloc(1).unwrap().is_device());
        assert_eq!(memory.pool(1).unwrap().bytes(), FRAME_BYTES_MAX, "at least one frame");
    }

    /// Completes one operation.
    fn done(reactor: &mut Reactor, op: Op) -> Outcome {
        reactor.submit(op, Token::new(1, 0, 0, 0));
        let deadline = reactor.now() + Duration::from_secs(20);
        let mut reaped = Vec::new();
        loop {
            assert!(reactor.now() < deadline, "it does not end");
            reactor.reap(&mut reaped, Wait::Until(deadline)).unwrap();
            // A loop over epoll wakes itself when a thread of its own has done.
            let of_op = reaped.drain(..).find(|completion| completion.token != Token::WAKE);
            if let Some(completion) = of_op {
                return completion.outcome;
            }
        }
    }

    /// So many bytes went each way, all of them through the device's memory, and a CPU copied them on the way to the wire.
    fn assert_each_way_is_counted(reactor: &Reactor, bytes: u64) {
        let counters = reactor.counters();
        let moved = [
            counters.read_device_bytes,
            counters.sent_device_bytes,
            counters.received_device_bytes,
            counters.written_device_bytes,
        ];
        assert_eq!(moved, [bytes; 4]);
        assert_eq!((counters.sent_copied_bytes, counters.sent_zero_copy_bytes), (bytes, 0));
        assert_eq!((counters.read_direct_bytes, counters.written_direct_bytes), (bytes, bytes));
    }

    #[test]
    fn the_kernel_moves_the_bytes_of_device_frames_and_each_way_is_counted() {
        const BYTES: usize = 256 << 10;
        for io in [IoChoice::Uring, IoChoice::Epoll] {
            let (folder, memory) = offered(1 << 20);
            let pool = memory.pool(1 << 20).unwrap();
            let Ok(mut reactor) = Reactor::open(io, 4 << 20) else {
                assert_eq!(io, IoChoice::Uring, "every kernel has epoll");
                byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
                continue;
            };
            let content: Vec<u8> = (0..BYTES).map(|at| (at / 512 + at % 251) as u8).collect();
            let path = folder.path().join("disk");
            std::fs::write(&path, &content).unwrap();
            let options = FileOptions { direct: true, ..FileOptions::default() };
            let Ok(open) = OpenFile::open(&path, options) else {
                let reason = "no O_DIRECT where temporary files lie";
                return byway_skip::skip_this(byway_skip::SkipReason::Machine(reason));
            };
            let file = reactor.add_file(std::sync::Arc::new(open));

            let into = pool.alloc(BYTES).unwrap();
            let Outcome::Read { into, result } =
                done(&mut reactor, Op::Read { file, offset: 0, into, start: 0, len: BYTES })
            else {
                panic!("a read")
            };
            assert_eq!(result, Ok(BYTES));

            // Over TCP and longer than what is tried without a copy.
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let theirs = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let socket = reactor.adopt(OwnedFd::from(listener.accept().unwrap().0)).unwrap();
            let mut reader = theirs.try_clone().unwrap();
            let peer = std::thread::spawn(move || {
                let mut seen = vec![0; BYTES];
                reader.read_exact(&mut seen).unwrap();
                seen
            });
            let mut gather = Gather::new();
            gather.push_frame(into, 0, BYTES);
            let Outcome::Sent { mut gather, result } = done(&mut reactor, Op::Send { socket, gather }) else {
                panic!("a send")
            };
            assert_eq!(result, Ok(BYTES));
            assert!(peer.join().unwrap() == content);
            gather.clear();
            assert_eq!(pool.free_bytes(), pool.bytes());

            let news: Vec<u8> = content.iter().map(|byte| !byte).collect();
            let (mut writer, sent) = (theirs, news.clone());
            let peer = std::thread::spawn(move || writer.write_all(&sent).unwrap());
            let into = Scatter::one(pool.alloc(BYTES).unwrap(), 0, BYTES);
            let Outcome::Received { mut into, result } = done(&mut reactor, Op::Recv { socket, into, min: BYTES })
            else {
                panic!("a receive")
            };
            assert_eq!(result, Ok(BYTES));
            peer.join().unwrap();
            let from = into.drain().next().unwrap().frame;
            let op = Op::Write { file, offset: 0, from, start: 0, len: BYTES, durable: false };
            assert!(matches!(done(&mut reactor, op), Outcome::Written { result: Ok(BYTES), .. }));
            assert!(std::fs::read(&path).unwrap() == news);

            assert_each_way_is_counted(&reactor, BYTES as u64);
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let sysfs = tempfile::tempdir().unwrap();
        let error = DeviceMemory::open(sysfs.path(), "0000:00:04.0".to_owned()).unwrap_err();
        assert!(matches!(error, DeviceMemoryError::NotOffered { .. }));
        assert!(error.to_string().contains("0000:00:04.0") && error.to_string().contains("CONFIG_PCI_P2PDMA"));
        // What opens and cannot be mapped, as where the kernel is too old to hand memory out.
        let folder = sysfs.path().join("bus/pci/devices/0000:00:05.0/p2pmem");
        std::fs::create_dir_all(&folder).unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.join("allocate")).unwrap();
        let memory = DeviceMemory::open(sysfs.path(), "0000:00:05.0".to_owned()).unwrap();
        let error = memory.pool(8 << 20).unwrap_err();
        assert!(
            matches!(&error, DeviceMemoryError::Allocate { function, .. } if function == "0000:00:05.0"),
            "{error}"
        );
        assert!(memory.try_page().is_err());
        // A file that is the device's no more.
        std::fs::remove_dir_all(&folder).unwrap();
        let gone = DeviceMemory::open(sysfs.path(), "0000:00:05.0".to_owned()).unwrap_err();
        assert!(matches!(gone, DeviceMemoryError::NotOffered { .. }));
    }
}
