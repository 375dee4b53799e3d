//! Where foreign clients come in: NBD and HTTP.

pub mod http;
