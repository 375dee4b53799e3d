//! The services of byway: block volumes over files, devices and memory; shared directories; lent memory; shared memory.

#![forbid(unsafe_code)]

pub mod block;
pub mod coherence;
pub mod dsm;
pub mod file;
pub mod host;
pub mod limits;
pub mod memory;
