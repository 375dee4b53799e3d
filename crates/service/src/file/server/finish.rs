//! Results of workers: nodes and handles get their names, and the call its answer.

use std::sync::{Arc, Mutex};

use byway_fabric::SessionId;
use rustix::io::Errno;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use super::super::leases::Since;
use super::super::locks::FileId;
use super::super::wire::{
    Attributes, CallError, ChangedDirectory, DirectoryEntry, ENTRY_WITHOUT_XATTRS, Entry, GrantedLeases,
    LISTING_HAS_ENDED, OpenResult,
};
use super::descriptors::Counted;
use super::kept_names::ChangedNames;
use super::leases::Parked;
use super::open_files::OpenMark;
use super::outcome::{Found, Listed, MadeFile, Outcome};
use super::replies::Reply;
use super::table::{Handle, Node, Open};
use super::{FileRequest, FileRequestId, Shares};
use crate::host::At;

/// What a call is answered with.
#[derive(Default)]
struct OwnedReply {
    result: Vec<u8>,
    payload: Vec<u8>,
}

/// A directory whose entries a client gets.
struct ListedFor<'a> {
    session: SessionId,
    directory: &'a Node,
    /// For leases.
    since: Option<Since>,
}

impl Shares {
    /// A worker has ended a call.
    pub(super) fn finish(&mut self, at: &mut At<'_>, request: FileRequestId, result: Result<Outcome, Errno>) {
        if let Some(FileRequest::Attach { attaching, .. }) = self.requests.get(request) {
            let attaching = attaching.clone();
            return self.attached(at, request, attaching, result);
        }
        if let Some(FileRequest::List { call, entry }) = self.requests.get(request) {
            let (session, entry) = (call.session, *entry);
            return self.listed(at, request, session, entry, result.map(drop));
        }
        let Some(FileRequest::Worker { call, node, since }) = self.requests.get(request) else { return };
        let (session, node, since) = (call.session, Arc::clone(node), *since);
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(errno) => return self.end(at, request, Err(errno.into())),
        };
        let answered = match outcome {
            Outcome::Stands(files, named) => {
                let own = named.own();
                return self.change(at, request, session, &files, &own, Parked::Named(named));
            }
            Outcome::Changed(outcome, changed) => {
                let made = outcome.made().map(|made| made.id);
                self.reply_of(at, session, node, since, *outcome).map(|mut reply| {
                    reply.payload.extend_from_slice(self.changed_directory(session, made, changed).as_bytes());
                    reply
                })
            }
            // Attributes that were set.
            Outcome::Bytes(payload) if self.changes.contains_key(&request) => {
                let on_node = U64::new(self.end_change_of_file(request, session));
                let leases = GrantedLeases { on_node, on_found: U64::new(0) };
                Ok(OwnedReply { result: leases.as_bytes().to_vec(), payload })
            }
            outcome => self.reply_of(at, session, node, since, outcome),
        };
        match answered {
            Ok(reply) => self.end(at, request, Ok(Reply { result: &reply.result, payload: &reply.payload })),
            Err(error) => self.end(at, request, Err(error)),
        }
    }

    /// The answer that says what came of a call.
    fn reply_of(
        &mut self,
        at: &mut At<'_>,
        session: SessionId,
        node: Arc<Node>,
        since: Option<Since>,
        outcome: Outcome,
    ) -> Result<OwnedReply, CallError> {
        match outcome {
            Outcome::Done => Ok(OwnedReply::default()),
            Outcome::Number(number) => Ok(OwnedReply { result: number.to_le_bytes().to_vec(), payload: Vec::new() }),
            Outcome::Bytes(payload) => {
                Ok(OwnedReply { result: self.grant_leases(session, node.id, None, since), payload })
            }
            Outcome::Node(found) | Outcome::Root(found, _) => {
                let id = found.id;
                let entry = self.name(session, &node, found);
                entry
                    .map(|payload| OwnedReply { result: self.grant_leases(session, node.id, Some(id), since), payload })
            }
            Outcome::Opened(open, mark, payload) => {
                self.open(at, session, node, open, mark).map(|result| OwnedReply { result, payload })
            }
            Outcome::Directory(fd) => {
                let open = Open::Directory { fd: Arc::new(fd), listing: Arc::new(Mutex::new(())) };
                let handle = self.handle(session, open, node, None);
                handle.map(|result| OwnedReply { result, payload: Vec::new() })
            }
            Outcome::Created(made, mark) => self.created(at, session, &node, made, mark),
            Outcome::Listing { entries, has_ended } => {
                let to = ListedFor { session, directory: &node, since };
                let flags = if has_ended { LISTING_HAS_ENDED } else { 0 };
                Ok(OwnedReply { result: flags.to_le_bytes().to_vec(), payload: self.listing(&to, entries) })
            }
            Outcome::Kept(files) => self.came_back(session, &node, files),
            Outcome::Changed(..) | Outcome::Stands(..) => {
                debug_assert!(false, "`finish` has taken off what is around an outcome");
                Err(Errno::IO.into())
            }
        }
    }

    /// What a client may go on using of a directory, and of what it has made there.
    fn changed_directory(
        &mut self,
        session: SessionId,
        made: Option<FileId>,
        ChangedNames { lease, attributes, since, made_without_xattrs }: ChangedNames,
    ) -> ChangedDirectory {
        let made_lease = made.map_or(0, |made| self.grant_lease(session, made, Some(since)));
        let made_flags = if made_without_xattrs { ENTRY_WITHOUT_XATTRS } else { 0 };
        ChangedDirectory {
            lease: U64::new(lease.unwrap_or_default()),
            made_lease: U64::new(made_lease),
            made_flags: U64::new(made_flags.into()),
            attributes,
        }
    }

    /// Gives a node its name. It lies in the share of the node that it was found from.
    fn name(&mut self, session: SessionId, from: &Node, found: Found) -> Result<Vec<u8>, CallError> {
        let attributes = found.attributes;
        let node = self.client(session)?.hold(found, &from.share, from.right)?;
        Ok(Entry { node: U64::new(node), attributes }.as_bytes().to_vec())
    }

    fn open(
        &mut self,
        at: &mut At<'_>,
        session: SessionId,
        node: Arc<Node>,
        open: byway_reactor::OpenFile,
        mark: OpenMark,
    ) -> Result<Vec<u8>, CallError> {
        let open = Arc::new(open);
        let file = at.reactor.add_file(Arc::clone(&open));
        let opened = self.handle(session, Open::File { open, file }, node, Some(mark));
        if opened.is_err() {
            at.reactor.remove_file(file);
        }
        opened
    }

    fn handle(
        &mut self,
        session: SessionId,
        open: Open,
        node: Arc<Node>,
        mark: Option<OpenMark>,
    ) -> Result<Vec<u8>, CallError> {
        let counted = Arc::new(Counted::take().ok_or(Errno::NFILE)?);
        let handle = self.client(session)?.open(Handle { open, node, _counted: counted, _mark: mark.map(Arc::new) })?;
        Ok(OpenResult { handle: U64::new(handle) }.as_bytes().to_vec())
    }

    fn created(
        &mut self,
        at: &mut At<'_>,
        session: SessionId,
        directory: &Node,
        MadeFile { open, found }: MadeFile,
        mark: OpenMark,
    ) -> Result<OwnedReply, CallError> {
        let attributes = found.attributes;
        let client = self.client(session)?;
        let name = client.hold(found, &directory.share, directory.right)?;
        let node = client.node(name)?;
        match self.open(at, session, node, open, mark) {
            Ok(result) => {
                let entry = Entry { node: U64::new(name), attributes };
                Ok(OwnedReply { result, payload: entry.as_bytes().to_vec() })
            }
            Err(error) => {
                let forgotten = self.client(session)?.forget(name, 1);
                self.workers.drop_later(forgotten);
                Err(error)
            }
        }
    }

    /// Removed files that a client comes back to. They are kept until it forgets them.
    fn came_back(
        &mut self,
        session: SessionId,
        root: &Node,
        files: Vec<(Listed, OpenMark)>,
    ) -> Result<OwnedReply, CallError> {
        let client = self.client(session)?;
        let mut listed = Vec::with_capacity(files.len());
        for (file, mark) in files {
            if let Some(found) = &file.found {
                client.came_back.insert(found.id, mark);
            }
            listed.push(file);
        }
        let to = ListedFor { session, directory: root, since: None };
        Ok(OwnedReply { result: Vec::new(), payload: self.listing(&to, listed) })
    }

    /// Entries as they travel. One whose node cannot be named is listed by its name alone.
    fn listing(&mut self, to: &ListedFor<'_>, entries: Vec<Listed>) -> Vec<u8> {
        let &ListedFor { session, directory, since } = to;
        let mut bytes = Vec::new();
        for listed in entries {
            let mut head = DirectoryEntry::new_zeroed();
            head.cookie = U64::new(listed.cookie);
            head.name_len = U16::new(listed.name.len() as u16);
            head.entry.attributes = listed.attributes.unwrap_or(Attributes {
                ino: U64::new(listed.ino),
                mode: U32::new(listed.kind),
                ..Attributes::default()
            });
            if let (Some(found), Ok(client)) = (listed.found, self.client(session)) {
                let (attributes, id) = (found.attributes, found.id);
                if let Ok(node) = client.hold(found, &directory.share, directory.right) {
                    head.entry = Entry { node: U64::new(node), attributes };
                    head.lease = U64::new(self.grant_lease(session, id, since));
                    head.flags = U16::new(if listed.without_xattrs { ENTRY_WITHOUT_XATTRS } else { 0 });
                }
            }
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&listed.name);
        }
        bytes
    }
}
