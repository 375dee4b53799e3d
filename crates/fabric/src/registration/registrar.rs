//! The interface to the device that registers memory.

use super::range::PageRange;

/// Registers ranges of the process's memory with something that then reaches them without the process: a NIC, a ring.
///
/// Both functions are called without any lock of the cache, from any thread, several at a time. They may allocate, free
/// and unmap.
pub trait Registrar: std::fmt::Debug + Send + Sync + 'static {
    /// What a registration is known by: a key, the index of a buffer.
    type Handle: std::fmt::Debug + Send + Sync + 'static;

    /// Registers the pages of `range` as they are mapped now. Pages that are not all mapped are a
    /// [`Refused::NotMapped`], not undefined behaviour.
    fn register(&self, range: PageRange) -> Result<Self::Handle, Refused>;

    /// Ends a registration. It cannot fail: what cannot be ended is this side's to report and keep.
    fn deregister(&self, handle: Self::Handle);

    /// Whether a registration still names the parent's own pages after a fork. What pins pages (`FOLL_PIN`) does: the
    /// kernel gives the child copies of them. Otherwise the first write of the parent after a fork moves it to a new
    /// page, and the cache drops everything at a fork.
    fn survives_fork(&self) -> bool {
        false
    }
}

/// Why memory was not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// The limit on locked memory is reached.
    #[error(
        "{bytes} bytes cannot be locked: the limit on locked memory is {limit_bytes} bytes; raise it \
         (`ulimit -l`, `LimitMEMLOCK=` of the unit) or give the cache fewer bytes"
    )]
    MemoryLock {
        /// How many bytes were to be registered.
        bytes: usize,
        /// The soft limit (`RLIMIT_MEMLOCK`); `u64::MAX` for none.
        limit_bytes: u64,
    },
    /// The range has pages that are not mapped, or not for reading and writing.
    #[error("the range is not all mapped for reading and writing: the caller names memory that it does not have")]
    NotMapped,
    /// More bytes than a registration can have.
    #[error("{bytes} bytes are too many for one registration, at most {bytes_max}: divide the range")]
    TooLong {
        /// How many bytes were to be registered.
        bytes: usize,
        /// How many one can have.
        bytes_max: usize,
    },
    /// All handles are taken.
    #[error("all {handles_max} handles are taken: give the cache fewer ranges")]
    TooMany {
        /// How many there are.
        handles_max: usize,
    },
    /// The system refused for another reason.
    #[error("the system refused the registration")]
    System(#[source] std::io::Error),
}

impl Refused {
    /// What an error of a system call that pins or locks memory means.
    pub fn from_errno(error: std::io::Error, range: PageRange) -> Self {
        match error.raw_os_error() {
            // EPERM: the limit is zero.
            Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
                let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
                Self::MemoryLock { bytes: range.bytes(), limit_bytes: limit.current.unwrap_or(u64::MAX) }
            }
            Some(libc::EFAULT) => Self::NotMapped,
            _ => Self::System(error),
        }
    }
}
