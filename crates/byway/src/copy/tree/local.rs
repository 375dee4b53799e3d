//! A tree of this machine. Each call is relative to the descriptor of a directory and by one name.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{
    Advice, AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, SeekFrom, Stat, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;

use super::side::{Attributed, Directory, Facts, Listing, OpenFile, Time, data_range, split_names};
use crate::limits::XATTR_BYTES_MAX;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn facts(stat: &Stat) -> Facts {
    Facts {
        kind: FileType::from_raw_mode(stat.st_mode),
        size: stat.st_size as u64,
        allocated_bytes: stat.st_blocks as u64 * 512,
        mode: stat.st_mode & 0o7777,
        accessed: Time { seconds: stat.st_atime, nanoseconds: stat.st_atime_nsec as u32 },
        modified: Time { seconds: stat.st_mtime, nanoseconds: stat.st_mtime_nsec as u32 },
    }
}

fn timestamps(of: &Facts) -> Timestamps {
    let time = |of: Time| Timespec { tv_sec: of.seconds, tv_nsec: of.nanoseconds.into() };
    Timestamps { last_access: time(of.accessed), last_modification: time(of.modified) }
}

fn name_of(name: &[u8]) -> &OsStr {
    OsStr::from_bytes(name)
}

/// The attributes of the entry at a path, following symbolic links.
pub(super) fn find(path: &Path) -> Result<Facts, Errno> {
    rustix::fs::stat(path).map(|stat| facts(&stat))
}

/// Directories and files.
impl<T: AsFd> Attributed for T {
    fn facts(&self) -> Result<Facts, Errno> {
        rustix::fs::fstat(self).map(|stat| facts(&stat))
    }

    fn xattr_names(&self) -> Result<Vec<Vec<u8>>, Errno> {
        let mut list = vec![0; XATTR_BYTES_MAX];
        let len = rustix::fs::flistxattr(self, &mut list[..])?;
        Ok(split_names(&list[..len]))
    }

    fn xattr(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        let mut value = vec![0; XATTR_BYTES_MAX];
        let len = rustix::fs::fgetxattr(self, name.as_c_str(), &mut value[..])?;
        value.truncate(len);
        Ok(value)
    }

    fn set_xattr(&self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        rustix::fs::fsetxattr(self, name.as_c_str(), value, XattrFlags::empty())
    }

    fn take_attributes(&self, of: &Facts) -> Result<(), Errno> {
        rustix::fs::fchmod(self, Mode::from_raw_mode(of.mode_of_copy()))?;
        rustix::fs::futimens(self, &timestamps(of))
    }

    fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fsync(self)
    }
}

/// See the module.
pub(super) struct LocalDirectory(OwnedFd);

impl LocalDirectory {
    /// Opens the directory at a path, following symbolic links.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn open(path: &Path) -> Result<Self, Errno> {
        rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty()).map(Self)
    }
}

impl AsFd for LocalDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Directory for LocalDirectory {
    fn list(&self) -> Result<Box<dyn Listing>, Errno> {
        // A description of its own: the place in a listing belongs to it.
        let directory = rustix::fs::openat(&self.0, c".", DIRECTORY, Mode::empty())?;
        let entries = Dir::read_from(&directory)?;
        Ok(Box::new(LocalListing { directory, entries }))
    }

    fn find(&self, name: &[u8]) -> Result<Facts, Errno> {
        rustix::fs::statat(&self.0, name_of(name), AtFlags::SYMLINK_NOFOLLOW).map(|stat| facts(&stat))
    }

    fn open_directory(&self, name: &[u8]) -> Result<Arc<dyn Directory>, Errno> {
        let opened = rustix::fs::openat(&self.0, name_of(name), DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
        Ok(Arc::new(Self(opened)))
    }

    fn make_directory(&self, name: &[u8]) -> Result<(), Errno> {
        rustix::fs::mkdirat(&self.0, name_of(name), Mode::RWXU)
    }

    fn open_file(&self, name: &[u8]) -> Result<Box<dyn OpenFile>, Errno> {
        // Without waiting for a FIFO's writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = LocalFile(rustix::fs::openat(&self.0, name_of(name), flags, Mode::empty())?.into());
        if file.facts()?.kind == FileType::RegularFile { Ok(Box::new(file)) } else { Err(Errno::OPNOTSUPP) }
    }

    fn create_file(&self, name: &[u8]) -> Result<Box<dyn OpenFile>, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(Box::new(LocalFile(rustix::fs::openat(&self.0, name_of(name), flags, mode)?.into())))
    }

    fn read_link(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        rustix::fs::readlinkat(&self.0, name_of(name), Vec::new()).map(CString::into_bytes)
    }

    fn make_link(&self, name: &[u8], target: &[u8], of: &Facts) -> Result<(), Errno> {
        rustix::fs::symlinkat(name_of(target), &self.0, name_of(name))?;
        rustix::fs::utimensat(&self.0, name_of(name), &timestamps(of), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn set_mode(&self, name: &[u8], mode: u32) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.0, name_of(name), flags, Mode::empty())?;
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode))
    }

    fn rename(&self, from: &[u8], to: &[u8], replace: bool) -> Result<(), Errno> {
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        rustix::fs::renameat_with(&self.0, name_of(from), &self.0, name_of(to), flags)
    }

    fn remove(&self, name: &[u8]) -> Result<(), Errno> {
        rustix::fs::unlinkat(&self.0, name_of(name), AtFlags::empty())
    }

    fn is_lost(&self) -> bool {
        false
    }
}

struct LocalListing {
    directory: OwnedFd,
    entries: Dir,
}

impl Listing for LocalListing {
    fn next(&mut self) -> Result<Option<(Vec<u8>, Facts)>, Errno> {
        loop {
            let Some(entry) = self.entries.read() else { return Ok(None) };
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            match rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => return Ok(Some((name.to_bytes().to_vec(), facts(&stat)))),
                // Removed meanwhile.
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

struct LocalFile(File);

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl AsFd for LocalFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl OpenFile for LocalFile {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let mut done = 0;
        while done < into.len() {
            match self.0.read_at(&mut into[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(&error)),
            }
        }
        Ok(done)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.0.write_all_at(bytes, offset).map_err(|error| errno(&error))
    }

    fn data_from(&self, offset: u64) -> Result<Option<Range<u64>>, Errno> {
        let data = |offset| rustix::fs::seek(&self.0, SeekFrom::Data(offset));
        data_range(offset, data, |offset| rustix::fs::seek(&self.0, SeekFrom::Hole(offset)))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        rustix::fs::ftruncate(&self.0, bytes)
    }

    fn drop_cached(&self) {
        // Memory has no disk to read from.
        let _ = rustix::fs::fadvise(&self.0, 0, None, Advice::DontNeed);
    }
}
