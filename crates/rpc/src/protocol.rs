//! The numbers of protocols. docs/wire.md has the list.

use crate::session::{Spoken, Versions};

/// Block volumes, as `byway serve` serves them.
pub const VOLUMES: u8 = 1;
/// The versions of [`VOLUMES`] that are spoken here.
pub const VOLUMES_VERSIONS: Versions = Versions::only(1);

/// Files, as `byway serve` shares them.
pub const FILES: u8 = 2;
/// The versions of [`FILES`] that are spoken here.
pub const FILES_VERSIONS: Versions = Versions::only(3);

/// Lent memory.
pub const MEMORY: u8 = 3;
/// The versions of [`MEMORY`] that are spoken here.
pub const MEMORY_VERSIONS: Versions = Versions::only(3);

/// The protocol of programs that need only one of their own.
pub const PROGRAM: u8 = 16;

/// The entry of a program that calls servers of volumes.
pub const CALLS_VOLUMES: Spoken = Spoken { protocol: VOLUMES, versions: VOLUMES_VERSIONS, grant: None };

/// The entry of a program that calls servers of files.
pub const CALLS_FILES: Spoken = Spoken { protocol: FILES, versions: FILES_VERSIONS, grant: None };
