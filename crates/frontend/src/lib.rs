//! The front ends for other clients than byway's own: NBD, HTTP, the kernel by FUSE, and page faults of programs.
//!
//! The protocols are machines without I/O (`nbd`, `fuse`), separate from the drivers that move their bytes.

pub mod fault;
pub mod fuse;
pub mod http;
pub mod limits;
pub mod loop_device;
pub mod nbd;
