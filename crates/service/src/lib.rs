//! What byway shares: block volumes over files, devices and memory; and directories.

#![forbid(unsafe_code)]

pub mod block;
pub mod coherence;
pub mod dsm;
pub mod file;
pub mod host;
pub mod limits;
pub mod memory;
