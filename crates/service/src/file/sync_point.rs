//! What a share's file system is synced by, and how it has failed.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

/// An open directory of a share, for all of its clients. The kernel tells a failed write-back once to each descriptor that was open before.
/// So this one is open from the first client's attach on, and failures are counted: a sync fails for each client that was there before the
/// last of them, also if the answer that told it was lost, or was another client's.
#[derive(Debug)]
pub(super) struct SyncPoint {
    directory: OwnedFd,
    device: u64,
    /// Held during a sync: what the kernel tells is counted before the next sync begins.
    turn: Mutex<()>,
    failures: Mutex<Failures>,
}

/// Syncs that have failed, of the file system or of a file.
#[derive(Debug)]
struct Failures {
    count: u64,
    last: Errno,
}

impl SyncPoint {
    /// Of an open directory.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new(directory: OwnedFd) -> Result<Self, Errno> {
        let device = rustix::fs::fstat(&directory)?.st_dev;
        Ok(Self {
            directory,
            device,
            turn: Mutex::default(),
            failures: Mutex::new(Failures { count: 0, last: Errno::IO }),
        })
    }

    /// The number of the file system's device.
    pub(super) fn device(&self) -> u64 {
        self.device
    }

    /// How many syncs have failed.
    pub(super) fn failures(&self) -> u64 {
        self.counted().count
    }

    fn counted(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes durable what the file system has, for a client that came when so many syncs had failed.
    ///
    /// # Errors
    /// Of the file system, of this sync or of one since then; data that any client has written may be lost then.
    pub(super) fn sync(&self, since: u64) -> Result<(), Errno> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if !cfg!(feature = "drop-flushes")
            && let Err(error) = rustix::fs::syncfs(&self.directory)
        {
            self.note_failed(error);
        }
        drop(turn);
        let failures = self.counted();
        if failures.count == since { Ok(()) } else { Err(failures.last) }
    }

    /// A sync of the file system, or of one of its files, has failed.
    pub(super) fn note_failed(&self, error: Errno) {
        let mut failures = self.counted();
        failures.count += 1;
        failures.last = error;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel tells a failure once, and the answer that tells it may be lost, or another client's.
    #[test]
    fn a_sync_that_failed_once_fails_again_for_all_that_were_there() {
        let folder = tempfile::tempdir().unwrap();
        let point = SyncPoint::new(OwnedFd::from(std::fs::File::open(folder.path()).unwrap())).unwrap();
        let before = point.failures();
        assert_eq!(point.sync(before), Ok(()));
        point.note_failed(Errno::NOSPC);
        assert_eq!(point.sync(before), Err(Errno::NOSPC));
        assert_eq!(point.sync(before), Err(Errno::NOSPC));
        assert_eq!(point.sync(point.failures()), Ok(()), "a client that has come since then has lost nothing");
    }
}
