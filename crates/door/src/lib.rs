//! Where foreign clients come in: NBD and HTTP.
//!
//! The protocols are machines without I/O (`nbd`); what moves their bytes is apart from them.

pub mod http;
pub mod limits;
pub mod nbd;
