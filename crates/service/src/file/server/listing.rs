//! The lists of clients that a share keeps for the server's next process: who is put on them, and who is taken off.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;

use byway_fabric::SessionId;
use byway_reactor::Instant;
use rustix::io::Errno;

use super::super::grace::{ClientHolding, Holding};
use super::super::share::Share;
use super::super::state;
use super::super::wire::{CallError, ClientName};
use super::outcome::Outcome;
use super::workers::server_itself;
use super::{Call, FileRequest, FileRequestId, Recovery, Shares};
use crate::host::At;

impl Shares {
    /// Whether a client is on the lists of its shares, as it must be before it gets a lock or a lease. False: a worker puts it
    /// there, and the call will be answered busy, so that it comes again.
    pub(super) fn is_listed(&mut self, at: &mut At<'_>, call: Call, held: Holding) -> Result<bool, CallError> {
        let client = self.client(call.session)?;
        // One that has said that it goes gets nothing new.
        let entry = ClientHolding { held, client: client.known_as.as_ref().ok_or(CallError::Stale)?.0 };
        if client.listed.contains(&entry) {
            return Ok(true);
        }
        // Also if only some of the lists can be written.
        client.to_unlist.insert(entry);
        let shares: Vec<_> = client.shares.iter().filter(|share| share.can_list()).map(Arc::clone).collect();
        let request = self.start(at, FileRequest::List { call, entry });
        let recovery = Arc::clone(&self.recovery);
        let list = move || {
            let _turn = recovery.lists();
            shares.iter().try_for_each(|share| share.list().put(share.root().as_fd(), held, &entry.client))?;
            Ok(Outcome::Done)
        };
        if !self.workers.run(request, Some(server_itself()), Box::new(list)) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(false)
    }

    /// A worker has put a client on the lists, or could not.
    pub(super) fn listed(
        &mut self,
        at: &mut At<'_>,
        request: FileRequestId,
        session: SessionId,
        entry: ClientHolding<ClientName>,
        result: Result<(), Errno>,
    ) {
        let answer = match (result, self.client(session)) {
            (Ok(()), Ok(client)) => {
                client.listed.insert(entry);
                CallError::Busy
            }
            (Err(error), _) => {
                tracing::error!(%error, "cannot write {} in a share: a client gets no lock or lease", state::FOLDER);
                error.into()
            }
            (_, Err(error)) => error,
        };
        self.end(at, request, Err(answer));
    }

    /// A client has asked for all that it had from the process before this one.
    pub(super) fn reclaim_complete(
        &mut self,
        now: Instant,
        session: SessionId,
        has_all: bool,
    ) -> Result<(), CallError> {
        let recovery = Arc::clone(&self.recovery);
        let client = self.client(session)?;
        let Some((name, _)) = client.known_as.as_ref() else { return Ok(()) };
        // These entries are removed when it goes, also if it gets no lock or lease any more. They do not count as listed: before a new
        // lock or lease, this process looks for the file itself.
        client
            .to_unlist
            .extend(recovery.completed(name, now).into_iter().map(|held| ClientHolding { held, client: *name }));
        let (name, shares) = (*name, client.shares.clone());
        if has_all {
            client.unclaimed.clear();
            self.drop_unclaimed(name, &shares);
        }
        Ok(())
    }

    /// The grace time has passed: what clients had that have not come back is lost.
    pub(super) fn end_grace(&mut self, now: Instant) {
        let (missing, shares) = self.recovery.missing(now);
        if !missing.is_empty() {
            tracing::warn!(count = missing.len(), "clients with locks or leases have not come back after the restart");
            self.unlist(&shares, missing);
        }
        self.drop_kept_of_missing(now);
        let unread = self.recovery.unread(now);
        if unread.is_empty() {
            return;
        }
        let recovery = Arc::clone(&self.recovery);
        self.workers.run_later(move || {
            for share in &unread {
                match prune(share, &recovery) {
                    Ok(count) => {
                        tracing::warn!(share = share.name(), count, "removed clients that had gone from its list");
                    }
                    Err(error) => {
                        tracing::warn!(share = share.name(), %error, "clients that have gone stay on its list");
                    }
                }
            }
        });
    }

    /// Takes clients off the lists of shares.
    pub(super) fn unlist(&mut self, shares: &[Arc<Share>], clients: Vec<ClientHolding<ClientName>>) {
        let shares: Vec<_> = shares.iter().filter(|share| share.can_list()).map(Arc::clone).collect();
        if clients.is_empty() || shares.is_empty() {
            return;
        }
        let recovery = Arc::clone(&self.recovery);
        self.workers.run_later(move || {
            let _turn = recovery.lists();
            for ClientHolding { held, client } in clients.iter().filter(|holding| !recovery.knows(&holding.client)) {
                for share in &shares {
                    if let Err(error) = state::unlist(share.root().as_fd(), *held, client) {
                        tracing::warn!(share = share.name(), %error, "a client that has gone stays on the list of a share");
                    }
                }
            }
        });
    }
}

/// Removes all entries of clients that the server does not know from a list that was too long to be read. Gives how many.
fn prune(share: &Share, recovery: &Recovery) -> Result<usize, Errno> {
    let (root, mut count) = (share.root().as_fd(), 0);
    state::for_each(root, |ClientHolding { held, client }| {
        // For each alone: a client that takes its first lock does not wait for all of them.
        let _turn = recovery.lists();
        if !recovery.knows(&client) {
            state::unlist(root, held, &client)?;
            count += 1;
        }
        Ok(ControlFlow::Continue(()))
    })
    .map(drop)?;
    Ok(count)
}
