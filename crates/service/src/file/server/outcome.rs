//! The result of a worker's call.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use byway_reactor::OpenFile;
use rustix::io::Errno;

use super::super::locks::FileId;
use super::super::wire::Attributes;
use super::descriptors::Counted;
use super::kept_names::ChangedNames;
use super::leases::Named;
use super::open_files::OpenMark;
use super::tree::open_directory;

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
    /// The attributes, where the client wants no node.
    pub(super) attributes: Option<Attributes>,
}

/// An open directory of a share. The kernel tells a failed write-back once to each descriptor that was open before: so a client has its
/// own, from its attach on. The answer that tells the client may be lost with its session, so what failed once fails from then on.
#[derive(Debug)]
pub(super) struct SyncPoint {
    fd: OwnedFd,
    device: u64,
    failed: OnceLock<Errno>,
    _counted: Counted,
}

impl SyncPoint {
    /// `None`: the server may not list the directory, or clients hold all descriptors that they may.
    pub(super) fn open(root: &OwnedFd) -> Option<Self> {
        let counted = Counted::take()?;
        let fd = open_directory(root.as_fd()).ok()?;
        let device = rustix::fs::fstat(&fd).ok()?.st_dev;
        Some(Self { fd, device, failed: OnceLock::new(), _counted: counted })
    }

    /// The number of the file system's device.
    pub(super) fn device(&self) -> u64 {
        self.device
    }

    /// Makes durable what the file system has.
    ///
    /// # Errors
    /// Of the file system, of this sync or of an earlier one; data that any client has written may be lost then.
    pub(super) fn sync(&self) -> Result<(), Errno> {
        self.note(if cfg!(feature = "drop-flushes") { Ok(()) } else { rustix::fs::syncfs(&self.fd) })
    }

    fn note(&self, synced: Result<(), Errno>) -> Result<(), Errno> {
        if let Err(error) = synced {
            let _ = self.failed.set(error);
        }
        self.failed.get().map_or(Ok(()), |error| Err(*error))
    }
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
    Root(Found, Option<SyncPoint>),
    /// An open file, and its first bytes, as far as they were asked for.
    Opened(OpenFile, OpenMark, Vec<u8>),
    /// An open directory.
    Directory(OwnedFd),
    /// A new file, open.
    Created(MadeFile, OpenMark),
    /// Entries.
    Listing(Vec<Listed>),
    /// Removed files that were kept for the client.
    Kept(Vec<(Listed, OpenMark)>),
    /// A call that changes names has done this.
    Changed(Box<Outcome>, ChangedNames),
    /// Nothing was done: leases on these files stand against it.
    Stands(Vec<FileId>, Arc<Named>),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel tells a failure once, and the answer that tells it may be lost.
    #[test]
    fn a_sync_that_failed_once_fails_again() {
        let folder = tempfile::tempdir().unwrap();
        let root = OwnedFd::from(std::fs::File::open(folder.path()).unwrap());
        let point = SyncPoint::open(&root).unwrap();
        assert_eq!(point.note(Ok(())), Ok(()));
        assert_eq!(point.note(Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(point.note(Ok(())), Err(Errno::IO));
        let other = SyncPoint::open(&root).unwrap();
        assert_eq!(other.note(Ok(())), Ok(()), "a client that has come since then has lost nothing");
    }
}
