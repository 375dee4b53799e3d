//! Where foreign clients come in: NBD, HTTP, and the kernel by FUSE.
//!
//! The protocols are machines without I/O (`nbd`, `fuse`); what moves their bytes is apart from them.

pub mod fuse;
pub mod http;
pub mod limits;
pub mod loop_device;
pub mod nbd;
