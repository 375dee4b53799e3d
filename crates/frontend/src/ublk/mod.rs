//! Block devices by ublk (Linux 6.5): the kernel hands each request of `/dev/ublkbN` to a process, through io_uring.
//!
//! A [`UblkDevice`] adds, starts, stops and removes a device, by commands that block their thread. Its [`Queue`] has the requests:
//! one thread takes and completes them, and can wait for them in its own event loop ([`Queue::readiness`]). Payloads are copied once,
//! between the kernel's pages and the server's memory, by pread and pwrite (`UBLK_F_USER_COPY`).
//!
//! When its process dies, a device waits: the kernel keeps its requests until a successor takes the device over
//! ([`UblkDevice::recover`]), which gets again all that were not completed, or until [`remove`] fails them.

mod abi;
mod control;
mod queue;

pub use control::{UblkDevice, UblkError, UblkOptions, check, is_there, remove};
pub use queue::{Operation, Queue, Taken, UblkRequest};
