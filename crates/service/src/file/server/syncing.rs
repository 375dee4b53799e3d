//! The sync of a share's file system, which a client asks for at its end.

use byway_fabric::access::Right;
use rustix::io::Errno;

use super::super::wire::CallError;
use super::calls::Asked;
use super::outcome::Outcome;
use super::workers::server_itself;
use super::{FileRequest, Shares};
use crate::host::At;

impl Shares {
    /// Syncs the file system of a node's share. It takes the time of all new data of that file system, of whomever; so it has one thread.
    pub(super) fn sync_share(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let (call, client) = (asked.call, self.client(asked.call.session)?);
        let node = client.node(asked.arguments.node.get())?;
        if node.right == Right::Read {
            // This client has changed nothing.
            return Err(Errno::ROFS.into());
        }
        let Some(point) = client.sync_point(&node) else {
            tracing::error!(share = node.share.name(), "not synced: this server may not list the share's directory");
            return Err(Errno::ACCESS.into());
        };
        let work = move || point.sync().map(|()| Outcome::Done);
        let request = self.start(at, FileRequest::Worker { call, node, window: None, since: None });
        if !self.workers.run_alone(request, server_itself(), Box::new(work)) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(())
    }
}
