//! The result of a worker's call.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use byway_reactor::OpenFile;

use super::super::locks::FileId;
use super::super::sync_point::SyncPoint;
use super::super::wire::Attributes;
use super::descriptors::Counted;
use super::kept_names::ChangedNames;
use super::leases::Named;
use super::open_files::OpenMark;

/// A file that was found: a descriptor that names it and opens nothing (`O_PATH`), and what is known of it.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) fd: OwnedFd,
    pub(super) id: FileId,
    pub(super) attributes: Attributes,
    pub(super) counted: Counted,
}

/// An entry of a directory.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) cookie: u64,
    pub(super) name: Vec<u8>,
    /// The inode's number and the type, as the directory says.
    pub(super) ino: u64,
    pub(super) kind: u32,
    /// The node, where the client wants it.
    pub(super) found: Option<Found>,
    /// The node has no extended attribute that the user may list, as far as it was asked for.
    pub(super) without_xattrs: bool,
    /// The attributes, where the client wants no node.
    pub(super) attributes: Option<Attributes>,
}

/// A file that was made and opened.
pub(super) struct MadeFile {
    pub(super) open: OpenFile,
    pub(super) found: Found,
}

/// What came of a call.
pub(super) enum Outcome {
    /// It is done.
    Done,
    /// A number, for the result.
    Number(u64),
    /// Bytes, for the payload.
    Bytes(Vec<u8>),
    /// A node.
    Node(Found),
    /// The root of a share, and what its file system is synced by, if the server may list the root.
    Root(Found, Option<Arc<SyncPoint>>),
    /// An open file, and its first bytes, as far as they were asked for.
    Opened(OpenFile, OpenMark, Vec<u8>),
    /// An open directory.
    Directory(OwnedFd),
    /// A new file, open.
    Created(MadeFile, OpenMark),
    /// Entries, and whether there are no more behind them.
    Listing { entries: Vec<Listed>, has_ended: bool },
    /// Removed files that were kept for the client.
    Kept(Vec<(Listed, OpenMark)>),
    /// A call that changes names has done this.
    Changed(Box<Outcome>, ChangedNames),
    /// Nothing was done: leases on these files stand against it.
    Stands(Vec<FileId>, Arc<Named>),
}

impl Outcome {
    /// What the call has made, or found in its place.
    pub(super) fn made(&self) -> Option<&Found> {
        match self {
            Self::Node(found) | Self::Created(MadeFile { found, .. }, _) => Some(found),
            _ => None,
        }
    }
}
