//! The room of removed files, which the server's disk gets back later than the removal is answered.
//!
//! A file keeps its blocks while the server has it open. The kernel of a mount tells of closed and unused files after the program's
//! calls have returned, and the server lets go of them beside other calls. A program that removes a file of a full disk and then
//! writes another one would fail now and then, as it does on no local disk.

use std::sync::atomic::{AtomicU64, Ordering};

use byway_reactor::{Errno, Instant};

use super::Client;
use super::caches::now;
use super::files::NamedIn;
use crate::limits::{BUSY_PAUSE_MIN, FILE_FREED_AFTER};

/// When the client last removed a name, in nanoseconds of [`now`]; 0 if it has not.
#[derive(Debug, Default)]
pub(super) struct LastRemoval(pub(super) AtomicU64);

impl Client {
    /// A name was removed, or is about to be another file's.
    pub(super) fn note_removed(&self, place: NamedIn<'_>) {
        self.table().removed(place);
        self.last_removal.0.store(now().nanos(), Ordering::Relaxed);
    }

    /// Makes a call; again while there is no room at the server and this client has just removed a file.
    pub(super) fn with_freed_room<T>(&self, mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
        let mut until = None;
        loop {
            let answered = call();
            // Nothing was done.
            if !matches!(answered, Err(Errno::NOSPC | Errno::DQUOT)) {
                return answered;
            }
            let until = *until.get_or_insert_with(|| {
                Instant::from_nanos(self.last_removal.0.load(Ordering::Relaxed)) + FILE_FREED_AFTER
            });
            if now() >= until {
                return answered;
            }
            std::thread::park_timeout(BUSY_PAUSE_MIN);
        }
    }
}
