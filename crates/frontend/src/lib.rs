//! Where foreign clients come in: NBD, HTTP, the kernel by FUSE, and page faults of programs.
//!
//! The protocols are machines without I/O (`nbd`, `fuse`); what moves their bytes is apart from them.

pub mod fault;
pub mod fuse;
pub mod http;
pub mod limits;
pub mod loop_device;
pub mod nbd;
