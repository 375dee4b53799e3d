//! `byway attach` and `byway detach`: a volume as a block device of this machine.
//!
//! A file system with one file, by FUSE, stands on the volume's native client (`volume_file.rs`), and a loop device with direct I/O on
//! that file. One process serves one device: its loop answers the kernel, its main thread makes the device, follows the volume's
//! size, and takes the device apart after a signal. `registry.rs` knows the devices of this machine, `background.rs` starts the
//! process behind a shell's back.

mod background;
mod command;
mod detach;
mod registry;
mod volume_file;

pub use command::{AttachArguments, AttachError, attach};
pub use detach::{DetachArguments, DetachError, detach};
