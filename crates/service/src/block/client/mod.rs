//! The native client of a volume.
//!
//! [`Volume`] is driven by its owner's loop: [`Volume::submit`] takes requests at any depth, [`Volume::handle`] takes
//! completions of its token class, [`Volume::reap`] gives answers. [`BlockingVolume`] owns a loop and waits. [`list()`]
//! asks a server which volumes it has.

mod blocking;
mod driver;
mod list;
mod machine;
#[cfg(test)]
mod machine_tests;
mod request;

pub use blocking::{BlockingVolume, ConnectError};
pub use driver::{ClientName, Notice, Volume, VolumeInfo, VolumeOptions};
pub use list::{ListedVolume, list};
pub use request::{Answer, Bounds, Done, Request, VolumeError};
