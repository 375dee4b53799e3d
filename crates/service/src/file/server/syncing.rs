//! Syncs: of an open file, and of a share's file system, which a client asks for at its end.

use byway_fabric::SessionId;
use byway_fabric::access::Right;
use rustix::io::Errno;

use super::super::wire::CallError;
use super::calls::Asked;
use super::outcome::Outcome;
use super::table::{Handle, SyncedBy};
use super::workers::server_itself;
use super::{FileRequest, Shares};
use crate::host::At;

impl Shares {
    /// Syncs the file system of a node's share. It takes the time of all new data of that file system, of whomever; so each file system
    /// has one thread for that.
    pub(super) fn sync_share(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let (call, client) = (asked.call, self.client(asked.call.session)?);
        let node = client.node(asked.arguments.node.get())?;
        if node.right == Right::Read {
            // This client has changed nothing.
            return Err(Errno::ROFS.into());
        }
        let Some(SyncedBy { point, failed_before }) = client.synced_by(&node) else {
            tracing::error!(share = node.share.name(), "not synced: this server may not list the share's directory");
            return Err(Errno::ACCESS.into());
        };
        let device = point.device();
        let work = move || point.sync(failed_before).map(|()| Outcome::Done);
        let request = self.start(at, FileRequest::Worker { call, node, since: None });
        if !self.workers.run_long(request, device, server_itself(), Box::new(work)) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(())
    }

    /// A session has ended: its syncs end too, so that a file system that hangs keeps no locks and open files of clients that have gone. One
    /// that a thread has goes on; should it fail, the client's next one fails ([`SyncPoint`](super::super::sync_point::SyncPoint)).
    pub(super) fn leave_syncs(&mut self, at: &mut At<'_>, session: SessionId) {
        let requests = &self.requests;
        let is_gone = |request| requests.get(request).is_some_and(|asked| asked.call().session == session);
        for request in self.workers.leave_long(is_gone) {
            self.end(at, request, Err(CallError::Busy));
        }
    }
}

/// Makes an open file or directory durable: its data and what is needed to read them, or all of it.
///
/// # Errors
/// Of the file system. It tells a failed write-back once to each descriptor: so the answer is kept for a client that asks again, and the
/// failure is counted for one of which nothing is kept.
pub(super) fn sync_open(handle: &Handle, data_only: bool) -> Result<Outcome, Errno> {
    let fd = handle.descriptor().ok_or(Errno::BADF)?;
    #[cfg(test)]
    let instead = tests::INSTEAD.lock().unwrap().remove(&handle.node.id.ino);
    #[cfg(not(test))]
    let instead: Option<fn() -> Result<(), Errno>> = None;
    let synced = match instead {
        Some(instead) => instead(),
        None if cfg!(feature = "drop-flushes") => Ok(()),
        None if data_only => rustix::fs::fdatasync(fd),
        None => rustix::fs::fsync(fd),
    };
    synced.inspect_err(|error| handle.node.share.note_failed_sync(*error)).map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests;
