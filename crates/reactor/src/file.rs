//! Files as stores use them: opened once, shared by all loops, mapped where pages may be sent from the page cache.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::file_map::FileMap;
use crate::sim::SimFile;

/// How a file is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// Never written through this handle.
    pub read_only: bool,
    /// Past the page cache (`O_DIRECT`): transfers are multiples of [`OpenFile::block_bytes`].
    pub direct: bool,
    /// Mapped for sending; not together with `direct`.
    pub map: bool,
    /// Writes to a file in memory are a worker's, which allocates the pages while the loop goes on. Worth it for large writes
    /// where a CPU is idle. Without it the loop writes at once.
    pub write_by_worker: bool,
}

/// An open file or block device, or a simulated one.
#[derive(Debug)]
pub struct OpenFile {
    pub(crate) backing: Backing,
    len: u64,
    block_bytes: u32,
    options: FileOptions,
}

#[derive(Debug)]
pub(crate) enum Backing {
    Os(OsFile),
    Sim(SimFile),
}

#[derive(Debug)]
pub(crate) struct OsFile {
    fd: OwnedFd,
    /// Reads and writes of it never wait for a device (tmpfs, memfd): done at once, in the loop.
    pub(crate) in_memory: bool,
    /// But a worker writes to it ([`FileOptions::write_by_worker`]).
    pub(crate) write_by_worker: bool,
    /// A block device: zeroes and discards whole blocks, and cannot tell its holes.
    pub(crate) device: bool,
    pub(crate) map: Option<FileMap>,
}

/// `TMPFS_MAGIC` of `statfs(2)`.
pub(crate) const TMPFS_MAGIC: i64 = 0x0102_1994;

impl OpenFile {
    /// Opens a regular file or block device.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if the path is neither a file nor a block device.
    pub fn open(path: &Path, options: FileOptions) -> std::io::Result<Self> {
        let mut open = OpenOptions::new();
        open.read(true).write(!options.read_only);
        open.custom_flags(libc::O_CLOEXEC | if options.direct { libc::O_DIRECT } else { 0 });
        Self::from_fd(open.open(path)?.into(), options)
    }

    /// A sparse file of `len` bytes that lives in memory alone and has no name (`memfd_create`).
    ///
    /// # Errors
    /// The kernel's.
    pub fn memory(name: &str, len: u64) -> std::io::Result<Self> {
        use rustix::fs::{MemfdFlags, SealFlags};
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len)?;
        // It may grow. That it cannot shrink lets us read its mapping, which is faster than to have the kernel do it.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::SEAL)?;
        Self::from_fd(fd, FileOptions { map: true, ..FileOptions::default() })
    }

    /// Takes over a descriptor that was opened as `options` say (for descriptors passed from elsewhere).
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if it is neither a file nor a block device.
    pub fn from_fd(fd: OwnedFd, options: FileOptions) -> std::io::Result<Self> {
        let file = std::fs::File::from(fd);
        let metadata = file.metadata()?;
        let device = metadata.file_type().is_block_device();
        if !device && !metadata.is_file() {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "neither a regular file nor a block device",
            ));
        }
        let fd = OwnedFd::from(file);
        let len = if device { rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0))? } else { metadata.len() };
        let block_bytes = if options.direct { direct_block_bytes(&fd, device)? } else { 1 };
        let in_memory = !device && rustix::fs::fstatfs(&fd)?.f_type as i64 == TMPFS_MAGIC;
        let writable = in_memory && !options.read_only;
        let map = options.map && !options.direct && len > 0;
        let map = map.then(|| FileMap::new(fd.as_fd(), len, writable)).transpose()?;
        let write_by_worker = in_memory && options.write_by_worker;
        let backing = Backing::Os(OsFile { fd, in_memory, write_by_worker, device, map });
        Ok(Self { backing, len, block_bytes, options })
    }

    /// The same file again, in the size that it has now, over the same open file description: its locks stay.
    ///
    /// # Errors
    /// The kernel's.
    pub fn reopen(&self) -> std::io::Result<Self> {
        match &self.backing {
            Backing::Os(os) => Self::from_fd(os.fd.try_clone()?, self.options),
            Backing::Sim(file) => Ok(Self::simulated(file.clone(), self.options)),
        }
    }

    /// A simulated file by another open file description; `None` for others, which are opened by their path.
    #[must_use]
    pub fn simulated_again(&self) -> Option<Self> {
        match &self.backing {
            Backing::Os(_) => None,
            Backing::Sim(file) => Some(Self::simulated(file.open_again(), self.options)),
        }
    }

    /// Gives a file in memory another size; [`OpenFile::reopen`] takes note of it.
    ///
    /// # Errors
    /// The kernel's; `Unsupported` if it does not live in memory.
    pub fn resize_memory(&self, len: u64) -> std::io::Result<()> {
        match &self.backing {
            Backing::Os(os) if os.in_memory => Ok(rustix::fs::ftruncate(&os.fd, len)?),
            _ => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// A file of a simulated disk.
    pub fn simulated(file: SimFile, options: FileOptions) -> Self {
        let len = file.len();
        let block_bytes = if options.direct { SimFile::BLOCK_BYTES } else { 1 };
        Self { backing: Backing::Sim(file), len, block_bytes, options }
    }

    /// Whether both are one file of a simulated disk.
    pub fn is_same_simulated(&self, other: &Self) -> bool {
        matches!((&self.backing, &other.backing), (Backing::Sim(one), Backing::Sim(other)) if one.is_same(other))
    }

    /// Bytes, when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes now: differs from [`OpenFile::len`] after a program truncated or grew the file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn len_now(&self) -> std::io::Result<u64> {
        match &self.backing {
            Backing::Os(os) if os.device => Ok(rustix::fs::seek(&os.fd, rustix::fs::SeekFrom::End(0))?),
            Backing::Os(os) => Ok(rustix::fs::fstat(&os.fd)?.st_size as u64),
            Backing::Sim(file) => Ok(file.len()),
        }
    }

    /// What offsets, lengths and memory of a direct transfer are multiples of; 1 when cached.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// As it was opened.
    pub fn options(&self) -> FileOptions {
        self.options
    }

    /// Whether it is a block device.
    pub fn is_device(&self) -> bool {
        matches!(&self.backing, Backing::Os(os) if os.device)
    }

    /// Whether it lives in memory and can be received into
    /// ([`Reactor::receive_into_file`](crate::Reactor::receive_into_file)).
    pub fn is_receivable(&self) -> bool {
        matches!(&self.backing, Backing::Os(OsFile { map: Some(map), .. }) if map.is_writable())
    }

    /// Whether ranges of it can be sent by [`Gather::push_map`](crate::Gather::push_map).
    pub fn is_mapped(&self) -> bool {
        match &self.backing {
            Backing::Os(os) => os.map.is_some(),
            Backing::Sim(_) => self.options.map,
        }
    }

    /// Names what the bytes lie in, the same however often it is opened, also by other processes: a file by its number and
    /// time of birth, a device by its number. 0 if that is not known; all simulated files have one name.
    pub fn backing_id(&self) -> u64 {
        match &self.backing {
            Backing::Os(os) => backing_id(&os.fd, os.device).unwrap_or(0),
            Backing::Sim(_) => 1,
        }
    }

    /// The descriptor, to lock or to pass on; `None` when simulated.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.backing {
            Backing::Os(os) => Some(os.fd.as_fd()),
            Backing::Sim(_) => None,
        }
    }
}

impl OsFile {
    pub(crate) fn raw(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// See [`OpenFile::backing_id`].
fn backing_id(fd: &OwnedFd, device: bool) -> Option<u64> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let stat = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME).ok()?;
    let born = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    let words = match (device, born) {
        (true, _) => [1, u64::from(stat.stx_rdev_major), u64::from(stat.stx_rdev_minor)],
        (false, true) => [stat.stx_ino, stat.stx_btime.tv_sec as u64, u64::from(stat.stx_btime.tv_nsec)],
        (false, false) => return None,
    };
    // FNV-1a: it tells files apart; it need not withstand attackers.
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    Some(hash.max(1))
}

/// The alignment that direct I/O asks for: the logical block of a device, `statx`'s word for a file, else a page.
fn direct_block_bytes(fd: &OwnedFd, device: bool) -> std::io::Result<u32> {
    if device {
        return Ok(rustix::fs::ioctl_blksszget(fd)?.max(512));
    }
    // SAFETY: `statx` is plain data, and all zeroes is a value of it.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty string, and `stat` is writable memory of the right type.
    let rc =
        unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat) };
    let align = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align);
    Ok(if rc == 0 && align.is_power_of_two() && align >= 512 { align } else { 4096 })
}
