//! `byway attach` and `byway detach`: a volume as a block device of this machine.
//!
//! One process serves one device: its loop (`volume_server.rs`) answers the kernel with the volume's native client, its main thread
//! (`serving.rs`) makes the device (`device.rs`), follows the volume's size, and takes the device apart after a signal. A loop device has
//! a second process, which starts a successor of a killed one (`keeper.rs`, `successor.rs`). The kernel asks by ublk
//! (`ublk_queue.rs`), by its NBD client (`nbd_socket.rs`), or by FUSE (`volume_file.rs`) for a file on which a loop device with direct
//! I/O stands. `registry.rs` knows the devices of this machine, `background.rs` starts the process behind a shell's back.

mod background;
mod command;
mod detach;
mod device;
mod keeper;
mod nbd_socket;
mod registry;
mod serving;
mod successor;
mod ublk_queue;
mod volume_file;
mod volume_server;

pub use command::{AttachArguments, AttachError, attach};
pub use detach::{DetachArguments, DetachError, detach};
