//! The numbers of protocols. docs/wire.md has the list.

use crate::session::Spoken;

/// Block volumes, as `byway serve` serves them.
pub const VOLUMES: u8 = 1;
/// The version of [`VOLUMES`] that is spoken here, oldest and newest.
pub const VOLUMES_VERSIONS: (u16, u16) = (1, 1);

/// Files, as `byway serve` shares them.
pub const FILES: u8 = 2;
/// The version of [`FILES`] that is spoken here, oldest and newest.
pub const FILES_VERSIONS: (u16, u16) = (2, 2);

/// Lent memory.
pub const MEMORY: u8 = 3;
/// The version of [`MEMORY`] that is spoken here, oldest and newest.
pub const MEMORY_VERSIONS: (u16, u16) = (2, 2);

/// The protocol of programs that need only one of their own.
pub const PROGRAM: u8 = 16;

/// The entry of a program that calls servers of volumes.
pub const CALLS_VOLUMES: Spoken = Spoken { protocol: VOLUMES, versions: VOLUMES_VERSIONS, grant: None };

/// The entry of a program that calls servers of files.
pub const CALLS_FILES: Spoken = Spoken { protocol: FILES, versions: FILES_VERSIONS, grant: None };
