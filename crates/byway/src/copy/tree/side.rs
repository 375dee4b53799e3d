//! The operations of the two sides of a copy of a tree: a directory of this machine (`local.rs`), or of a share (`share.rs`).

use std::ops::Range;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::share::ShareFile;

/// What is known of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) kind: FileType,
    /// Bytes.
    pub(super) size: u64,
    /// Bytes that it takes on its disk; fewer than `size` if it has holes.
    pub(super) allocated_bytes: u64,
    /// Permission bits.
    pub(super) mode: u32,
    pub(super) accessed: Time,
    pub(super) modified: Time,
}

/// Since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Time {
    pub(super) seconds: i64,
    pub(super) nanoseconds: u32,
}

/// Set-user-ID and set-group-ID of a file: they are not copied, because the copy belongs to another user.
const PRIVILEGE_BITS: u32 = 0o6000;

impl Facts {
    /// The rights of a copy.
    pub(super) fn mode_of_copy(&self) -> u32 {
        if self.kind == FileType::Directory { self.mode } else { self.mode & !PRIVILEGE_BITS }
    }

    /// Whether a file has the contents of another, by size and time of change.
    pub(super) fn seems_equal(&self, other: &Self) -> bool {
        (self.kind, self.size, self.modified) == (other.kind, other.size, other.modified)
    }

    /// Whether it takes less room than it has bytes.
    pub(super) fn has_holes(&self) -> bool {
        self.allocated_bytes < self.size
    }
}

/// Attributes of a file or directory that is open or held.
pub(super) trait Attributed {
    /// # Errors
    /// The file system's, as for all of these.
    fn facts(&self) -> Result<Facts, Errno>;

    /// The names of the extended attributes.
    fn xattr_names(&self) -> Result<Vec<Vec<u8>>, Errno>;

    /// A value.
    fn xattr(&self, name: &[u8]) -> Result<Vec<u8>, Errno>;

    /// Sets one.
    fn set_xattr(&self, name: &[u8], value: &[u8]) -> Result<(), Errno>;

    /// Sets rights and times to those of a source.
    fn take_attributes(&self, of: &Facts) -> Result<(), Errno>;

    /// Returns when it is durable.
    fn sync(&self) -> Result<(), Errno>;
}

/// A directory of one side. Names are single ones; a symbolic link is never followed.
pub(super) trait Directory: Attributed + Send + Sync {
    /// Its entries, without `.` and `..`.
    fn list(&self) -> Result<Box<dyn Listing>, Errno>;

    fn find(&self, name: &[u8]) -> Result<Facts, Errno>;

    fn open_directory(&self, name: &[u8]) -> Result<Arc<dyn Directory>, Errno>;

    /// Makes one that only its owner may use.
    fn make_directory(&self, name: &[u8]) -> Result<(), Errno>;

    /// Opens a regular file to be read; `ELOOP` or `EOPNOTSUPP` for anything else.
    fn open_file(&self, name: &[u8]) -> Result<Box<dyn OpenFile>, Errno>;

    /// Makes a file that only its owner may use.
    fn create_file(&self, name: &[u8]) -> Result<Box<dyn OpenFile>, Errno>;

    fn read_link(&self, name: &[u8]) -> Result<Vec<u8>, Errno>;

    /// Makes a symbolic link with the times of a source.
    fn make_link(&self, name: &[u8], target: &[u8], of: &Facts) -> Result<(), Errno>;

    /// Sets the rights of a regular file.
    fn set_mode(&self, name: &[u8], mode: u32) -> Result<(), Errno>;

    /// Renames; without `replace`, `EEXIST` if the new name is taken.
    fn rename(&self, from: &[u8], to: &[u8], replace: bool) -> Result<(), Errno>;

    /// Removes an entry that is no directory.
    fn remove(&self, name: &[u8]) -> Result<(), Errno>;

    /// The server of the share does not answer.
    fn is_lost(&self) -> bool;
}

/// Entries of a directory, one after the other.
pub(super) trait Listing: Send {
    fn next(&mut self) -> Result<Option<(Vec<u8>, Facts)>, Errno>;
}

/// A regular file.
pub(super) trait OpenFile: Attributed + Send + Sync {
    /// Fewer bytes than asked for only at the end.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno>;

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno>;

    /// The next range with data from an offset on.
    fn data_from(&self, offset: u64) -> Result<Option<Range<u64>>, Errno>;

    fn set_len(&self, bytes: u64) -> Result<(), Errno>;

    /// Drops this machine's cache of the file, so that further reads come from the disk.
    fn drop_cached(&self) {}

    /// The file of a share, for copies within its server.
    fn of_share(&self) -> Option<&ShareFile> {
        None
    }
}

/// `lseek` for data and the hole behind it.
pub(super) fn data_range(
    offset: u64,
    seek_data: impl FnOnce(u64) -> Result<u64, Errno>,
    seek_hole: impl FnOnce(u64) -> Result<u64, Errno>,
) -> Result<Option<Range<u64>>, Errno> {
    match seek_data(offset) {
        Ok(start) => Ok(Some(start..seek_hole(start)?)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names of a list in which a 0 byte follows each.
pub(super) fn split_names(list: &[u8]) -> Vec<Vec<u8>> {
    list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
}
