//! The lock on a file or block device that is to be overwritten, against all programs of this machine that would write to
//! it: servers and other copies, which take the same lock. Readers and sharers take another lock ([`record_lock`]), which
//! excludes no server.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use byway_reactor::{FileOptions, OpenFile, record_lock};
use byway_service::block::{OpenError, is_claimed, lock_for_writing};
use rustix::fs::OFlags;

/// An open file or block device with its lock, which goes with this.
#[derive(Debug)]
pub struct Claim {
    file: File,
    metadata: Metadata,
}

/// Why something cannot be overwritten.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The kernel's reason, or that it is neither a file nor a block device.
    #[error(transparent)]
    Open(#[from] io::Error),
    /// Another program uses the file and would lose data.
    #[error("it is in use: {0}")]
    InUse(&'static str),
}

impl Claim {
    /// Claims what is there. Changes nothing.
    ///
    /// # Errors
    /// See [`ClaimError`]; of kind `NotFound` if nothing is there.
    pub fn existing(path: &Path) -> Result<Self, ClaimError> {
        Self::open(path, false)
    }

    /// Makes a file where nothing was, and claims it.
    ///
    /// # Errors
    /// See [`ClaimError`]; `InUse` if another process has created and filled one meanwhile.
    pub fn made(path: &Path) -> Result<Self, ClaimError> {
        let claim = Self::open(path, true)?;
        sync_folder(path)?;
        if claim.metadata.len() > 0 {
            return Err(ClaimError::InUse("another process has just created it"));
        }
        Ok(claim)
    }

    fn open(path: &Path, make: bool) -> Result<Self, ClaimError> {
        let file = open_storage(path, OpenOptions::new().read(true).write(true).create(make))?;
        lock_for_writing(file.as_fd(), path).map_err(|error| match error {
            OpenError::Open { source, .. } => ClaimError::Open(source),
            _ => ClaimError::InUse("a server or another copy has it open for writing (flock)"),
        })?;
        let metadata = file.metadata()?;
        if metadata.file_type().is_block_device() && is_claimed(path) {
            return Err(ClaimError::InUse("it is mounted, or part of a device that is"));
        }
        Ok(Self { file, metadata })
    }

    /// Refuses a file that another program has open without a lock against writers: a server that only reads or shares it, or a
    /// virtual machine that locks records of its disk. The copy would empty the file under that program.
    ///
    /// # Errors
    /// [`ClaimError::InUse`].
    pub fn alone(self) -> Result<Self, ClaimError> {
        // A file system without such locks cannot report them.
        if record_lock::is_held_by_others(self.file.as_fd()).unwrap_or(false) {
            return Err(ClaimError::InUse("it is served, or another program has locked it (fcntl)"));
        }
        Ok(self)
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The name by which a server that has this file open tells what its volume lies in ([`OpenFile::backing_id`]): the same
    /// name, the same file. `None` for a device, which many machines have by the same number (and which a copy does not
    /// empty first), and where the file system does not tell a file's birth.
    ///
    /// # Errors
    /// The kernel's.
    pub fn backing_id(&self) -> io::Result<Option<u64>> {
        let file = OpenFile::from_fd(self.file.try_clone()?.into(), FileOptions::default())?;
        Ok(Some(file.backing_id()).filter(|backing_id| *backing_id != 0 && !file.is_device()))
    }

    /// The file's metadata at the time of the claim.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

/// Makes the name of a new file durable: a flush of the file alone does not (fsync(2)).
fn sync_folder(path: &Path) -> io::Result<()> {
    // A dangling symbolic link made the file in another folder.
    let file = path.canonicalize()?;
    match File::open(file.parent().unwrap_or(&file))?.sync_all() {
        // Not every file system syncs folders.
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

impl Drop for Claim {
    /// The loop may keep the file open for a while.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

/// Opens a regular file or block device, and nothing else: opening a pipe would wait for its other end, and opening some
/// devices does something.
///
/// # Errors
/// The kernel's; `InvalidInput` for what is neither.
pub fn open_storage(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let check = |metadata: Metadata| {
        if metadata.is_file() || metadata.file_type().is_block_device() {
            return Ok(());
        }
        Err(io::Error::new(ErrorKind::InvalidInput, "it is neither a regular file nor a block device"))
    };
    match std::fs::metadata(path) {
        Ok(there) => check(there)?,
        // Perhaps it is to be made.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    // NONBLOCK: the file may have been replaced by a FIFO, whose open would wait.
    let file = options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32).open(path)?;
    check(file.metadata()?)?;
    // Some file systems would have reads through io_uring answer that they would wait.
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_nothing_is_changed_by_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let missing = Claim::existing(&path).unwrap_err();
        assert!(matches!(&missing, ClaimError::Open(error) if error.kind() == ErrorKind::NotFound), "{missing}");
        let first = Claim::made(&path).unwrap();
        assert!(matches!(Claim::existing(&path), Err(ClaimError::InUse(_))));
        // A loop that still has the file open does not hold the lock.
        let open = first.file().try_clone().unwrap();
        drop(first);
        drop(Claim::made(&path).unwrap());
        std::fs::write(&path, "something").unwrap();
        assert!(matches!(Claim::made(&path), Err(ClaimError::InUse(_))), "somebody else's by now");
        let flags = rustix::fs::fcntl_getfl(Claim::existing(&path).unwrap().file()).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK));
        assert_eq!(std::fs::read(&path).unwrap(), b"something");
        drop(open);
    }

    #[test]
    fn what_others_read_is_claimed_by_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "something").unwrap();
        let reader = File::open(&path).unwrap();
        drop(Claim::existing(&path).unwrap().alone().unwrap());
        record_lock::hold_for_reading(reader.as_fd()).unwrap();
        assert!(matches!(Claim::existing(&path).unwrap().alone(), Err(ClaimError::InUse(_))));
        drop(reader);
        Claim::existing(&path).unwrap().alone().unwrap();
    }

    #[test]
    fn what_holds_no_bytes_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        for path in [pipe.as_path(), folder.path(), Path::new("/dev/null")] {
            let refused = open_storage(path, OpenOptions::new().read(true)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{}", path.display());
            assert!(matches!(Claim::existing(path), Err(ClaimError::Open(_))), "{}", path.display());
        }
    }
}
