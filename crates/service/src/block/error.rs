//! Errors of a volume, and of requests to one.

use std::path::PathBuf;

use byway_reactor::Errno;
use byway_reactor::device_memory::DeviceMemoryError;

/// Why a request failed. Small, because it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The client's fault: the range does not lie in the volume.
    #[error("the range does not lie in the volume")]
    OutOfRange,
    /// The client's fault: a write that does not lie in the volume.
    #[error("the write does not lie in the volume")]
    PastEnd,
    /// The client's fault: offset or length is not a multiple of the volume's block.
    #[error("offset and length must be multiples of the volume's block")]
    Misaligned,
    /// The client's fault: longer than [`REQUEST_BYTES_MAX`](crate::limits::REQUEST_BYTES_MAX).
    #[error("the request is longer than the server takes")]
    TooLong,
    /// The client's fault: the volume is read-only.
    #[error("the volume is read-only")]
    ReadOnly,
    /// The store has no room: free some, or grow it.
    #[error("the store is full")]
    NoSpace,
    /// The store cannot do that, or not as fast as was asked.
    #[error("the store does not support this")]
    Unsupported,
    /// A flush failed before: the kernel may have dropped what was written. The volume must be reopened.
    #[error("an earlier flush failed, so written data may be lost; check the disk and reopen the volume")]
    FlushFailed,
    /// The volume is going away.
    #[error("the volume is closed")]
    Closed,
    /// The store failed; see the system's log.
    #[error("the store failed: {0}")]
    Io(Errno),
}

/// Whether there was no room for the bytes: on the device, for their owner, or in the file.
pub(super) fn is_no_room(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT | Errno::FBIG)
}

impl From<Errno> for BlockError {
    fn from(errno: Errno) -> Self {
        match errno {
            no_room if is_no_room(no_room) => Self::NoSpace,
            Errno::OPNOTSUPP | Errno::NOSYS => Self::Unsupported,
            Errno::CANCELED => Self::Closed,
            other => Self::Io(other),
        }
    }
}

impl BlockError {
    /// Whether the store failed the request.
    pub fn is_store_failure(self) -> bool {
        matches!(self, Self::NoSpace | Self::FlushFailed | Self::Io(_))
    }

    /// Whether the request was a mistake of the client.
    pub fn is_client_mistake(self) -> bool {
        matches!(self, Self::OutOfRange | Self::PastEnd | Self::Misaligned | Self::TooLong | Self::ReadOnly)
    }

    /// The errno that says it best.
    pub fn errno(self) -> Errno {
        match self {
            Self::OutOfRange | Self::Misaligned => Errno::INVAL,
            Self::TooLong => Errno::OVERFLOW,
            Self::ReadOnly => Errno::PERM,
            // As for the end of a disk (NBD protocol, "NBD_CMD_WRITE").
            Self::PastEnd | Self::NoSpace => Errno::NOSPC,
            Self::Unsupported => Errno::OPNOTSUPP,
            Self::FlushFailed => Errno::IO,
            Self::Closed => Errno::SHUTDOWN,
            Self::Io(errno) => errno,
        }
    }
}

/// Why a volume could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path cannot be opened.
    #[error("{path}: {source}{hint}", path = path.display(), hint = open_hint(source))]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Memory for the volume cannot be had.
    #[error("memory for the volume: {0}")]
    Memory(std::io::Error),
    /// The file is empty.
    #[error("{path} is empty: give it a size first (truncate -s 10G {path})", path = path.display())]
    Empty {
        /// Which.
        path: PathBuf,
    },
    /// An image of a virtual machine, whose bytes are no disk.
    #[error(
        "{path} is a {format} image, and volumes are served byte by byte: convert it first (qemu-img convert -O raw {path} \
         disk.raw), or say `,format=raw` if clients shall see the image's own bytes",
        path = path.display()
    )]
    Format {
        /// Which.
        path: PathBuf,
        /// Its format.
        format: &'static str,
    },
    /// The size is no multiple of the block.
    #[error(
        "{path} has {len} bytes, which is not a multiple of {block}: a direct volume is served in whole blocks; \
         truncate it to {rounded} bytes or serve it without `direct`",
        path = path.display(), rounded = len - len % block
    )]
    NotAMultiple {
        /// Which.
        path: PathBuf,
        /// Its bytes.
        len: u64,
        /// The block in bytes.
        block: u64,
    },
    /// Another process on this machine serves it writable, or has it mounted.
    #[error(
        "{path} is in use: {by}. Serve it read-only (`,ro`), stop the other user, or say `,direct,shared` if its \
         users coordinate themselves (a cluster file system)",
        path = path.display()
    )]
    InUse {
        /// Which.
        path: PathBuf,
        /// The user of the file, as far as is known.
        by: &'static str,
    },
    /// It is to be staged in its disk's memory, and that cannot be.
    #[error("stage=device: {0}. Or stage in main memory (stage=memory); see byway doctor")]
    DeviceMemory(#[from] DeviceMemoryError),
    /// A fault store over something that has no operations.
    #[error("fault: over null: has nothing to fail; put it over mem:SIZE")]
    Fault,
    /// A stripe's layout makes no sense.
    #[error("stripe: {0}")]
    Stripe(&'static str),
}

fn open_hint(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::NotFound => ": create it first (truncate -s 10G PATH makes a file), or correct the path",
        std::io::ErrorKind::PermissionDenied => ": run as a user who may open it, or serve it read-only (`,ro`)",
        std::io::ErrorKind::InvalidInput => ": serve a regular file or a block device",
        _ => "",
    }
}
