//! What byway shares: block volumes over files, devices and memory.

#![forbid(unsafe_code)]

pub mod block;
pub mod coherence;
pub mod host;
pub mod limits;
