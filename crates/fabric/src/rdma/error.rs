//! Errors of RDMA: whose fault it is, and what to do about it.

use std::net::IpAddr;

use byway_reactor::Errno;

use super::memory::Payload;
use super::queue_pair::Work;
use super::verbs;

/// Why something could not be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The program was built without the feature `rdma`.
    #[error("this program was built without RDMA: use tcp, or build it with the feature rdma")]
    NotBuilt,
    /// A library is not installed, or does not load.
    #[error("{library} does not load ({reason}): install the package {package}")]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// What the loader said.
        reason: &'static str,
        /// Debian's package of it.
        package: &'static str,
    },
    /// A library is older than anything that is supported.
    #[error("{library} has no {symbol}: install rdma-core 28 or later")]
    SymbolMissing {
        /// Its file name.
        library: &'static str,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The kernel's side is not there.
    #[error("the kernel does not offer {what}: modprobe {module}, or give the container /dev/infiniband")]
    KernelMissing {
        /// What is wanted of it.
        what: &'static str,
        /// The module that has it.
        module: &'static str,
    },
    /// No RDMA device has this address.
    #[error(
        "{0} is not an address of an RDMA device: `rdma link` lists them; soft-RoCE: rdma link add NAME type rxe netdev IF"
    )]
    NoDeviceAt(IpAddr),
    /// The endpoint is on another device than the domain or queue that it was to use.
    #[error("the connection is on another RDMA device than its memory: open the device of its local address")]
    OtherDevice,
    /// The kernel does not pin so much memory for this user.
    #[error("the kernel refuses to pin {bytes} bytes: raise the memory lock limit (ulimit -l, LimitMEMLOCK=)")]
    MemoryLimit {
        /// How much was asked for.
        bytes: usize,
    },
    /// A window must have bytes, all of them in its memory.
    #[error("a window must have bytes, all of them in its memory")]
    Range,
    /// More than the device can do.
    #[error("{what}: {wanted} requested, at most {most} available")]
    Capacity {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        wanted: u32,
        /// What there is.
        most: u32,
    },
    /// The endpoint already has a queue pair, or has none.
    #[error("the endpoint's state does not allow {0}")]
    State(&'static str),
    /// Private data is longer than a connection manager's message takes.
    #[error("{bytes} bytes of private data, at most {most} fit")]
    PrivateData {
        /// How much was given.
        bytes: usize,
        /// How much may be.
        most: usize,
    },
    /// A call failed in a way that has no name here.
    #[error("{call}: {errno}")]
    System {
        /// Which function of the libraries.
        call: &'static str,
        /// What it said.
        errno: Errno,
    },
}

/// The errno of a status that a library or driver gave. Some give it negative (siw's sends), and some fail without one: that is
/// `EIO`, as is what is no errno at all.
pub(super) fn errno_of(status: i32) -> Errno {
    const ERRNO_MAX: u32 = 4095;
    match status.unsigned_abs() {
        magnitude @ 1..=ERRNO_MAX => Errno::from_raw_os_error(magnitude as i32),
        _ => Errno::IO,
    }
}

impl RdmaError {
    /// What `errno` of the thread says about a call that has just failed.
    pub(super) fn last(call: &'static str) -> Self {
        Self::System { call, errno: errno_of(std::io::Error::last_os_error().raw_os_error().unwrap_or_default()) }
    }

    /// The same for functions that return the number, or -1 and set `errno`.
    pub(super) fn returned(call: &'static str, value: i32) -> Self {
        if value > 0 { Self::System { call, errno: errno_of(value) } } else { Self::last(call) }
    }

    /// Whether it is of the memory that was to be registered, and other memory may be; else the device is at its end.
    pub fn is_of_memory(&self) -> bool {
        match self {
            Self::System { errno, .. } => !matches!(*errno, Errno::IO | Errno::NODEV | Errno::NXIO | Errno::TIMEDOUT),
            _ => true,
        }
    }

    /// Whether the kernel said this.
    pub fn is(&self, wanted: Errno) -> bool {
        matches!(self, Self::System { errno, .. } if *errno == wanted)
    }
}

/// Why an operation was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue pair, the completion queue or the shared receive queue is full: poll, and try again.
    #[error("the queue is full: poll it, then try again")]
    Full,
    /// More segments than the queue was made for.
    #[error("{segments} segments, at most {most}")]
    Segments {
        /// How many there were.
        segments: u32,
        /// How many there may be.
        most: u32,
    },
    /// Longer than a message of the device, or than may be sent inline.
    #[error("{bytes} bytes, at most {most}")]
    TooLong {
        /// How long it is.
        bytes: u32,
        /// How long it may be.
        most: u32,
    },
    /// The device would write into memory that others hold too.
    #[error("a receive or read needs memory that nothing else uses")]
    NotExclusive,
    /// The connection is not established yet, or not any more.
    #[error("not connected")]
    NotConnected,
    /// The provider refused what was well formed. Whether the device has it is not known, so that the operation keeps its
    /// memory and completes when the queue pair goes; the queue pair is in the error state.
    #[error("the device refuses work: {0}; the connection is broken")]
    Broken(Errno),
}

/// An operation that was not posted.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub error: PostError,
    /// The operation, with its memory; none with [`PostError::Broken`].
    pub work: Option<Work>,
}

/// A receive that was not posted, with its memory.
pub type ReceiveRefused = (PostError, Payload);

/// Where the fault lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This program: a mistake in what was posted.
    Ours,
    /// The peer: it has no such window, posted no receive, or broke the rules.
    Peer,
    /// The network, or a peer that is gone.
    Path,
    /// The device.
    Device,
    /// Something else failed before; this operation was only in the queue behind it.
    Earlier,
}

/// How an operation failed: the statuses of the InfiniBand specification, volume 1, 10.10.3 and 11.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum WorkError {
    /// A message longer than the receive that it met, or than the device takes.
    #[error("a message is longer than the memory for it")]
    LocalLength,
    /// The queue pair cannot do that.
    #[error("the queue pair cannot do this operation")]
    LocalOperation,
    /// A segment is not in the registration that its key names.
    #[error("a local segment is not registered")]
    LocalProtection,
    /// The queue pair went into the error state first. Whether the peer saw the operation is not known.
    #[error("the connection ended first")]
    Flushed,
    /// A memory window could not be bound.
    #[error("a memory window was not bound")]
    Bind,
    /// The peer answered something that makes no sense.
    #[error("the peer's response is invalid")]
    BadResponse,
    /// The peer wrote to where it may not.
    #[error("the peer accessed memory that is not open to it")]
    LocalAccess,
    /// The peer's device refused the request, for its length most likely.
    #[error("the peer's device refuses the request")]
    RemoteRequest,
    /// The key, range or right is wrong at the peer. Nothing was touched.
    #[error("the peer's window does not allow this")]
    RemoteAccess,
    /// The peer's device failed.
    #[error("the peer's device failed")]
    RemoteOperation,
    /// No answer after all retries.
    #[error("the peer does not answer")]
    NoAnswer,
    /// The peer had no receive posted, after all retries.
    #[error("the peer has no room for a message")]
    ReceiverNotReady,
    /// The peer gave the operation up.
    #[error("the peer aborted the operation")]
    RemoteAborted,
    /// The peer took a receive for something that is no message, as a write with a number beside it does: what lies in the
    /// receive's memory is not from that peer.
    #[error("the peer used a receive for another operation than a message")]
    NoMessage,
    /// The device does not work any more.
    #[error("the device failed")]
    Device,
    /// A status that these queue pairs do not have, by its number in `enum ibv_wc_status`.
    #[error("status {0} of the device")]
    Other(u32),
}

impl WorkError {
    /// What `status` of a work completion means.
    pub(super) fn from_status(status: u32) -> Result<(), Self> {
        Err(match status {
            verbs::IBV_WC_SUCCESS => return Ok(()),
            verbs::IBV_WC_LOC_LEN_ERR => Self::LocalLength,
            verbs::IBV_WC_LOC_QP_OP_ERR => Self::LocalOperation,
            verbs::IBV_WC_LOC_PROT_ERR => Self::LocalProtection,
            verbs::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            verbs::IBV_WC_MW_BIND_ERR => Self::Bind,
            verbs::IBV_WC_BAD_RESP_ERR => Self::BadResponse,
            verbs::IBV_WC_LOC_ACCESS_ERR => Self::LocalAccess,
            verbs::IBV_WC_REM_INV_REQ_ERR => Self::RemoteRequest,
            verbs::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            verbs::IBV_WC_REM_OP_ERR => Self::RemoteOperation,
            verbs::IBV_WC_RETRY_EXC_ERR | verbs::IBV_WC_RESP_TIMEOUT_ERR => Self::NoAnswer,
            verbs::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            verbs::IBV_WC_REM_ABORT_ERR => Self::RemoteAborted,
            verbs::IBV_WC_FATAL_ERR | verbs::IBV_WC_GENERAL_ERR => Self::Device,
            other => Self::Other(other),
        })
    }

    /// Where the fault lies.
    pub const fn fault(self) -> Fault {
        match self {
            Self::LocalLength | Self::LocalOperation | Self::LocalProtection | Self::Bind => Fault::Ours,
            Self::BadResponse
            | Self::LocalAccess
            | Self::RemoteRequest
            | Self::RemoteAccess
            | Self::RemoteOperation
            | Self::ReceiverNotReady
            | Self::RemoteAborted
            | Self::NoMessage => Fault::Peer,
            Self::NoAnswer => Fault::Path,
            Self::Device | Self::Other(_) => Fault::Device,
            Self::Flushed => Fault::Earlier,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_library_returns_is_an_errno() {
        assert_eq!(errno_of(22), Errno::INVAL);
        // So siw says it.
        assert_eq!(errno_of(-12), Errno::NOMEM);
        for odd in [0, 4096, -4096, i32::MAX, i32::MIN] {
            assert_eq!(errno_of(odd), Errno::IO, "{odd}");
        }
    }

    #[test]
    fn what_a_dying_device_says_is_not_of_the_memory() {
        let registering = |errno| RdmaError::System { call: "ibv_reg_mr", errno };
        for errno in [Errno::FAULT, Errno::NOMEM, Errno::OPNOTSUPP, Errno::INVAL, Errno::BUSY] {
            assert!(registering(errno).is_of_memory(), "{errno}");
        }
        assert!(RdmaError::MemoryLimit { bytes: 1 }.is_of_memory() && RdmaError::Range.is_of_memory());
        for errno in [Errno::IO, Errno::NODEV, Errno::NXIO, Errno::TIMEDOUT] {
            assert!(!registering(errno).is_of_memory(), "{errno}");
        }
    }
}
