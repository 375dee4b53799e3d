//! Removed files that were open when the process before this one ended: given back to the clients that had them, or removed.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;

use byway_reactor::Instant;
use rustix::io::Errno;

use super::super::share::Share;
use super::super::state::kept;
use super::super::wire::{CallError, ClientName, DirectoryEntry};
use super::calls::Asked;
use super::open_files::Opening;
use super::outcome::{Listed, Outcome};
use super::workers::server_itself;
use super::{FileRequest, Shares, tree};
use crate::host::At;

/// Files of one answer: they fit into a message.
const ANSWERED_MAX: usize = byway_fabric::limits::SMALL_BYTES_MAX / size_of::<DirectoryEntry>();

impl Shares {
    /// A client asks for removed files that it had open.
    pub(super) fn kept_files(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let client = self.client(asked.call.session)?;
        let node = client.node(asked.arguments.node.get())?;
        let opening = client.opening(&node)?;
        let from = asked.arguments.offset.get();
        let request = self.start(at, FileRequest::Worker { call: asked.call, node, since: None });
        let work = Box::new(move || {
            let look = opening.files.look();
            list(&opening, from).map(|outcome| opening.files.seen_outcome(look, outcome))
        });
        if !self.workers.run(request, Some(server_itself()), work) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(())
    }

    /// A client has come back to all files that it wants: the others that were kept for it go.
    pub(super) fn drop_unclaimed(&mut self, client: ClientName, shares: &[Arc<Share>]) {
        for share in shares.iter().filter(|share| self.recovery.may_have_kept(share)) {
            let opening = Opening { files: self.recovery.open_files(), client, share: Arc::clone(share) };
            self.workers.run_later(move || drop_all_unless_open(&opening));
        }
    }

    /// A client has gone that had not come back to its files: those that were kept for it go, unless it is here again.
    pub(super) fn drop_kept_of(&mut self, client: ClientName, share: Arc<Share>) {
        let recovery = Arc::clone(&self.recovery);
        self.workers.run_later(move || {
            if !recovery.knows(&client) {
                drop_all_unless_open(&Opening { files: recovery.open_files(), client, share });
            }
        });
    }

    /// The grace time has passed: what was kept for clients that have not come back goes.
    pub(super) fn drop_kept_of_missing(&mut self, now: Instant) {
        let recovery = Arc::clone(&self.recovery);
        for share in recovery.kept(now) {
            let recovery = Arc::clone(&recovery);
            self.workers.run_later(move || {
                let dropped = kept::for_each(share.root().as_fd(), |client, ino| {
                    if !recovery.knows(&client) {
                        let (files, share) = (recovery.open_files(), Arc::clone(&share));
                        drop_unless_open(&Opening { files, client, share }, ino);
                    }
                    ControlFlow::Continue(())
                });
                if let Err(error) = dropped {
                    tracing::warn!(share = share.name(), %error, "removed files of clients that have gone stay in its state folder");
                }
            });
        }
    }

    /// Removes links that nobody needs any more.
    pub(super) fn remove_unneeded(&mut self) {
        let files = self.recovery.open_files();
        let unneeded = files.take_unneeded();
        if !unneeded.is_empty() {
            self.workers.run_later(move || unneeded.iter().for_each(|link| files.remove(link)));
        }
    }
}

/// Opens what was kept for a client, from an inode number on.
fn list(opening: &Opening, from: u64) -> Result<Outcome, Errno> {
    let (root, mut listed) = (opening.share.root().as_fd(), Vec::new());
    for ino in kept::of_client(root, &opening.client, from, ANSWERED_MAX)? {
        let found = match kept::open(root, &opening.client, ino) {
            Ok(fd) => tree::found(fd)?,
            // It was closed meanwhile.
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error),
        };
        let kind = found.attributes.mode.get();
        // Not one that another program has put there.
        if found.id.ino != ino || !tree::is_openable(kind) {
            continue;
        }
        let mark = opening.came_back(found.id);
        let file = Listed {
            cookie: ino + 1,
            name: Vec::new(),
            ino,
            kind,
            found: Some(found),
            without_xattrs: false,
            attributes: None,
        };
        listed.push((file, mark));
    }
    Ok(Outcome::Kept(listed))
}

/// Removes the links of a client to files that it has not come back to.
fn drop_all_unless_open(opening: &Opening) {
    let mut from = 0;
    // In pieces, so that the server needs no memory for all.
    while let Ok(numbers) = kept::of_client(opening.share.root().as_fd(), &opening.client, from, ANSWERED_MAX)
        && let Some(last) = numbers.last()
    {
        from = last + 1;
        for ino in numbers {
            drop_unless_open(opening, ino);
        }
    }
}

/// Removes the link of a client that has not come back to its file.
fn drop_unless_open(opening: &Opening, ino: u64) {
    let found = kept::open(opening.share.root().as_fd(), &opening.client, ino).and_then(tree::found);
    match found {
        Ok(found) => opening.files.remove(&opening.link(found.id)),
        Err(error) => {
            tracing::debug!(share = opening.share.name(), %error, "a removed file of a client that has gone stays");
        }
    }
}
