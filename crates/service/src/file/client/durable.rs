//! What a client makes durable at the server when it ends.
//!
//! Names that were made, removed or renamed are durable with their directory, and most programs sync neither files nor directories. So the
//! server is asked for a sync of the file system: one call for all files, which also covers those that are closed and forgotten.

use std::cell::Cell;

use byway_reactor::Errno;

use super::connection::Failure;
use super::unsynced::NotSynced;
use super::{Ask, Client, Method, ROOT};

/// What a client has changed may not be durable at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotDurable {
    /// The server cannot be reached, or did not answer in time.
    #[error("the server did not answer; what was not synced is lost if its machine fails now")]
    NoAnswer,
    /// The server's file system, or the server, refused.
    #[error("the server's sync failed: {0}; its log and its kernel's log say why")]
    Refused(Errno),
    /// The server has synced, but its machine, or another one, took some of the changes before it was started.
    #[error(
        "the server's machine restarted after it had taken changes of {files} files or directories that were not synced: they may be lost"
    )]
    Restarted {
        /// How many.
        files: usize,
    },
    /// A sync at the server had failed while the server had nothing of this client, which was away for too long.
    #[error(
        "a sync at the server failed while this client was away: what it had changed in {files} files or directories and not synced may be \
         lost; the server's kernel log says why"
    )]
    Failed {
        /// How many.
        files: usize,
    },
}

impl Client {
    /// Makes durable what this client has changed and no sync has followed: data, names and attributes. Without such changes the server is
    /// not asked. Waits as a sync of a file does: for a server that is away the client's `lost_after`, for one that is busy
    /// [`FILE_LONG_CALL_TIME_MAX`](crate::limits::FILE_LONG_CALL_TIME_MAX).
    ///
    /// # Errors
    /// See [`NotDurable`].
    pub fn make_durable(&self) -> Result<(), NotDurable> {
        if self.table().unsynced.begin_all().is_none() {
            return Ok(());
        }
        let refused = Cell::new(None);
        let ask = Ask { node: Some(ROOT), ..Ask::default() };
        let synced = self.repeat(Method::SyncShare, true, |live, slot| {
            let change = self.table().unsynced.begin_all().unwrap_or(0);
            let answered = self.ask_once(live, Method::SyncShare, &ask, slot);
            refused.set(answered.as_ref().err().and_then(|failure| match failure {
                Failure::Call(error) => Some(error.errno()),
                _ => None,
            }));
            answered?;
            Ok(self.table().unsynced.all_synced(change, live.instance))
        });
        match (synced, refused.get()) {
            (Ok((_, NotSynced { restarted: 0, failed: 0 })), _) => Ok(()),
            (Ok((_, NotSynced { restarted: 0, failed: files })), _) => Err(NotDurable::Failed { files }),
            (Ok((_, NotSynced { restarted: files, .. })), _) => Err(NotDurable::Restarted { files }),
            (Err(_), Some(errno)) => Err(NotDurable::Refused(errno)),
            (Err(_), None) => Err(NotDurable::NoAnswer),
        }
    }
}
