//! The front ends for other clients than byway's own: NBD, HTTP, the kernel by FUSE, and page faults of programs (of all memory of a
//! program, `fault`, or of one range, `far_memory`).
//!
//! The protocols are machines without I/O (`nbd`, `fuse`), separate from the drivers that move their bytes.

pub mod far_memory;
pub mod fault;
pub mod fuse;
pub mod http;
pub mod latencies;
pub mod limits;
pub mod loop_device;
pub mod nbd;
pub mod nbd_device;
pub mod ublk;
