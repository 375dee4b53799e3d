//! File systems by the kernel's FUSE protocol: a codec, a session without I/O, and a driver with threads.
//!
//! [`request`] decodes the kernel's requests, [`reply`] encodes the replies, [`session`] has the negotiated features and the
//! requests in flight; none of them does I/O. [`channel`] is `/dev/fuse`, [`mount`] makes and removes mounts. [`Driver`]
//! reads requests in threads of its own and passes them to a [`Filesystem`], which may answer later and from any thread. A
//! file system that is driven by an event loop uses the parts without the driver.
//!
//! The kernel's write-back cache is off: with it, a write after an invalidation dirties a page of the page cache without
//! asking the file system (docs/decisions/0035).

pub mod abi;
pub mod channel;
mod driver;
pub mod mount;
mod notify;
pub mod reply;
pub mod request;
pub mod session;

pub use driver::{Answered, Control, Driver, DriverError, Filesystem, Handover, PauseError, Reply, Request};
pub use notify::{Notifier, NotifyError};
