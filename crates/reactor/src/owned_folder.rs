//! Folders for the sockets of a job, below the folder for temporary files, that no other user may enter. The process that made one removes it;
//! if that process was killed, the next one that makes a folder for the same purpose does.
//!
//! The maker has a lock on its folder (`flock(2)`), which the kernel drops with the last copy of the descriptor. So a folder that another process
//! can lock is of a maker that is gone, or of one between making and locking it. The latter finds its folder removed then, and makes another.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, lstat};
use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

/// Hexadecimal digits at the end of a folder's name.
const DIGITS: usize = 16;

/// Folders that may be removed, or whose names may be taken, before one is kept.
const TRIES_MAX: usize = 16;

/// A folder of this process. It is removed with all that is in it when this is dropped.
#[derive(Debug)]
pub struct OwnedFolder {
    path: PathBuf,
    _lock: OwnedFd,
}

impl OwnedFolder {
    /// Makes a folder, mode 0700, below the one for temporary files (`TMPDIR`): its name is the purpose, a dot and digits. Those of this
    /// user with the same purpose whose makers are gone are removed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make(purpose: &str) -> io::Result<Self> {
        Self::make_in(&std::env::temp_dir(), purpose)
    }

    fn make_in(place: &Path, purpose: &str) -> io::Result<Self> {
        remove_left(place, purpose);
        for _ in 0..TRIES_MAX {
            let mut random = [0; DIGITS / 2];
            getrandom(&mut random, GetRandomFlags::empty())?;
            let path = place.join(format!("{purpose}.{:0DIGITS$x}", u64::from_ne_bytes(random)));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            if let Some(lock) = keep(&path)? {
                return Ok(Self { path, _lock: lock });
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OwnedFolder {
    fn drop(&mut self) {
        // Its owner may have removed it before.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn open(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Locks a folder that was just made; `None` if another process has removed it before.
fn keep(path: &Path) -> Result<Option<OwnedFd>, Errno> {
    let folder = match open(path) {
        Err(Errno::NOENT) => return Ok(None),
        opened => opened?,
    };
    // Where the file system has no locks, no other process gets one either.
    let _ = retry_on_intr(|| flock(&folder, FlockOperation::LockExclusive));
    match lstat(path) {
        Ok(there) if there.st_ino == fstat(&folder)?.st_ino => Ok(Some(folder)),
        Ok(_) | Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes folders of a purpose whose makers are gone. What cannot be removed stays.
fn remove_left(place: &Path, purpose: &str) {
    // Earlier versions locked nothing, and had a hyphen in place of the dot.
    let is_of_purpose = |name: &str| {
        let digits = name.strip_prefix(purpose).and_then(|rest| rest.strip_prefix('.'));
        digits.is_some_and(|digits| digits.len() == DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
    };
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_of_purpose) {
            let path = entry.path();
            // The lock is kept until the folder is removed.
            if let Some(_lock) = lock_if_left(&path) {
                let _ = std::fs::remove_dir_all(&path);
            }
        }
    }
}

fn lock_if_left(path: &Path) -> Option<OwnedFd> {
    let folder = open(path).ok()?;
    let is_mine = fstat(&folder).ok()?.st_uid == rustix::process::geteuid().as_raw();
    (is_mine && flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok()).then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_whose_makers_are_gone_are_removed_and_no_others() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let living = OwnedFolder::make_in(place.path(), "job").unwrap();
        std::fs::write(living.path().join("socket"), "").unwrap();
        // As a process leaves it that is killed.
        let left = at("job.0123456789abcdef");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("socket"), "").unwrap();
        let others = ["job.0123", "job.0123456789abcdeg", "jobs.0123456789abcdef", "job-0123456789abcdef"].map(at);
        for other in &others {
            std::fs::create_dir(other).unwrap();
        }
        let link = at("job.fedcba9876543210");
        std::os::unix::fs::symlink(&others[0], &link).unwrap();

        let second = OwnedFolder::make_in(place.path(), "job").unwrap();
        assert!(!left.exists() && living.path().join("socket").exists() && second.path().is_dir());
        assert!(others.iter().all(|other| other.is_dir()) && link.is_symlink());
        let paths = [&living, &second].map(|folder| folder.path().to_owned());
        drop((living, second));
        assert!(!paths.iter().any(|path| path.exists()));
    }

    #[test]
    fn a_folder_that_is_removed_before_it_is_locked_is_not_kept() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("job.0123456789abcdef");
        assert!(keep(&path).unwrap().is_none());
        std::fs::create_dir(&path).unwrap();
        remove_left(place.path(), "job");
        // Another process has the name now.
        std::fs::create_dir(&path).unwrap();
        let lock = keep(&path).unwrap();
        assert!(lock.is_some());
        remove_left(place.path(), "job");
        assert!(path.is_dir(), "it is locked");
        drop(lock);
        remove_left(place.path(), "job");
        assert!(!path.exists());
    }
}
