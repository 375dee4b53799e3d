//! Which file or device a descriptor or a path names.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};

/// Names a file by its file system, its inode and its time of birth, which a later file with the same inode does not share;
/// and a device by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity(pub [u64; 4]);

impl FileIdentity {
    /// What a descriptor has open.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(fd: impl AsFd) -> io::Result<Self> {
        Ok(Self::new(&statx(fd, c"", AtFlags::EMPTY_PATH, Self::asked())?))
    }

    /// What a path names now, behind all symbolic links.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of_path(path: &Path) -> io::Result<Self> {
        Ok(Self::new(&statx(CWD, path, AtFlags::empty(), Self::asked())?))
    }

    fn asked() -> StatxFlags {
        StatxFlags::TYPE | StatxFlags::INO | StatxFlags::BTIME
    }

    fn new(stat: &Statx) -> Self {
        let number = |major: u32, minor: u32| u64::from(major) << 32 | u64::from(minor);
        if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice {
            return Self([1, number(stat.stx_rdev_major, stat.stx_rdev_minor), 0, 0]);
        }
        let device = number(stat.stx_dev_major, stat.stx_dev_minor);
        // A file system without times of birth says 0.
        let born = stat.stx_btime.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000);
        Self([0, device, stat.stx_ino, born.wrapping_add(stat.stx_btime.tv_nsec.into())])
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_path_names_another_file_when_one_was_moved_there() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link, new) = (folder.path().join("disk"), folder.path().join("link"), folder.path().join("new"));
        std::fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let open = File::open(&path).unwrap();
        assert_eq!(FileIdentity::of(&open).unwrap(), FileIdentity::of_path(&link).unwrap());
        std::fs::write(&path, "the same file, changed").unwrap();
        assert_eq!(FileIdentity::of(&open).unwrap(), FileIdentity::of_path(&path).unwrap());
        std::fs::write(&new, "new").unwrap();
        std::fs::rename(&new, &path).unwrap();
        assert_ne!(FileIdentity::of(&open).unwrap(), FileIdentity::of_path(&link).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(FileIdentity::of_path(&link).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
