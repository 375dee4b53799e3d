//! The functions of libc that this library has too.
//!
//! Each asks whether its path or descriptor is of a share, and answers the call then; otherwise it calls the next function of its name,
//! as if this library were not there.

#[macro_use]
mod interpose;
mod attributes;
mod data;
mod descriptors;
mod directories;
mod matching;
mod names;
mod opening;
pub(crate) mod process;
mod refused;
pub(crate) mod streams;
mod working_directory;
