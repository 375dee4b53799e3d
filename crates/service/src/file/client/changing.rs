//! Calls of this client that change files: what it knew of them before, and what it has to sync after.

use byway_reactor::Errno;
use byway_rpc::node::Reply;
use zerocopy::FromBytes;

use super::super::wire::{
    Attributes, ChangedDirectory, ENTRY_WITHOUT_XATTRS, Entry, GrantedLeases, Method, NewAttributes, SET_SIZE,
    WriteResult,
};
use super::caches::{Caches, now};
use super::connection::Live;
use super::leases::{Fact, FileChanged, Invalid, NameChange, NamesChanged, NewName, Ticket};
use super::{Ask, Client, Found};

/// A call that changes nodes: nothing is believed of them while it is under way.
pub(super) struct Changing<'a> {
    caches: &'a Caches,
    nodes: Vec<u64>,
    /// It changes names there and nothing else, or data or attributes of this file.
    kept: Option<u64>,
    ticket: Ticket,
    /// It may be done at any later time.
    is_open: bool,
}

impl Changing<'_> {
    /// The call has ended. One that was not answered may be done at any later time: its nodes are not believed again.
    pub(super) fn ended<T>(mut self, answered: &Result<T, Errno>) {
        self.is_open = matches!(answered, Err(Errno::IO));
    }

    /// The call has changed a file, and has left the client its lease.
    pub(super) fn keep_file(mut self, version: u64, attributes: Option<Attributes>) {
        let Some(node) = self.kept else { return };
        let nodes = std::mem::take(&mut self.nodes);
        self.caches.state().leases.end_change_of_file(FileChanged { node, version, attributes }, now());
        self.caches.drop_mapped_soon(&nodes);
    }
}

/// What the answer to a change of a file says of it, if it leaves the client its lease: its version, and the attributes, if it has them.
pub(super) fn file_change(method: Method, reply: &Reply) -> Option<(u64, Option<Attributes>)> {
    let version = match method {
        Method::Write => WriteResult::read_from_bytes(&reply.result[..]).ok()?.lease,
        Method::SetAttributes => GrantedLeases::read_from_bytes(&reply.result[..]).ok()?.on_node,
        _ => return None,
    };
    let attributes = Attributes::read_from_prefix(&reply.payload).ok().map(|(attributes, _)| attributes);
    (version.get() != 0).then(|| (version.get(), attributes))
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if self.nodes.is_empty() {
            return;
        }
        if !self.is_open {
            self.caches.state().leases.end_change(&self.nodes, None, now());
        }
        // The lease has gone with the change: nothing would recall what programs have mapped.
        self.caches.drop_mapped_soon(&self.nodes);
    }
}

/// The directory of which a call changes names and nothing else, or the file of which it changes data or attributes: the answer may leave the
/// client what else it knows of it.
fn kept_of(method: Method, ask: &Ask<'_>, nodes: &[u64]) -> Option<u64> {
    match method {
        Method::Write | Method::SetAttributes => nodes.first().copied(),
        Method::Create
        | Method::MakeSymlink
        | Method::MakeNode
        | Method::MakeDirectory
        | Method::Unlink
        | Method::RemoveDirectory => ask.node,
        Method::Link => ask.second_node,
        Method::Rename => ask.node.filter(|node| ask.second_node == Some(*node)),
        _ => None,
    }
}

impl Client {
    /// A call that changes files is about to be sent.
    pub(super) fn changing(&self, method: Method, ask: &Ask<'_>) -> Changing<'_> {
        let mut nodes: Vec<u64> = self.changed_nodes(method, ask).into_iter().chain(ask.given_up).flatten().collect();
        nodes.sort_unstable();
        nodes.dedup();
        let kept = kept_of(method, ask, &nodes);
        let mut ticket = Ticket::default();
        if !nodes.is_empty() {
            let (invalid, unopened) = {
                let mut state = self.caches.state();
                let unopened: Vec<u64> = nodes.iter().flat_map(|node| state.opens.take_unopened(*node)).collect();
                let invalid = state.leases.begin_change(&nodes, kept, now());
                ticket = state.leases.ask(0).of_found();
                (invalid, unopened)
            };
            for node in invalid {
                self.caches.invalidate(node, Invalid::Attributes, || false);
            }
            self.open_at_server(&unopened);
        }
        Changing { caches: &self.caches, nodes, kept, ticket, is_open: false }
    }

    /// A change was answered that may have left the client what it knows of a directory's names. `made` is the node that the answer has
    /// named.
    pub(super) fn learn_change(
        &self,
        mut changing: Changing<'_>,
        method: Method,
        ask: &Ask<'_>,
        reply: &Reply,
        made: Option<&Found>,
    ) {
        if let Some((version, attributes)) = file_change(method, reply) {
            return changing.keep_file(version, attributes);
        }
        let Some(directory) = changing.kept else { return };
        let behind = if made.is_some() { size_of::<Entry>() } else { 0 };
        let told = reply.payload.get(behind..).and_then(|rest| ChangedDirectory::read_from_bytes(rest).ok());
        let Some(ChangedDirectory { lease, made_lease, made_flags, attributes }) = told else { return };
        let user = self.user(ask.caller);
        let names = match method {
            Method::Unlink | Method::RemoveDirectory => vec![NameChange { name: ask.name, new: NewName::Absent }],
            Method::Rename => vec![
                NameChange { name: ask.name, new: NewName::Unknown },
                NameChange { name: ask.second_name, new: NewName::Unknown },
            ],
            _ => {
                let new = made.map_or(NewName::Unknown, |found| NewName::Node(found.node));
                vec![NameChange { name: ask.name, new }]
            }
        };
        let mut state = self.caches.state();
        let changed = NamesChanged { directory, version: lease.get(), attributes, user: &user, names: &names };
        let nodes = std::mem::take(&mut changing.nodes);
        state.leases.end_change(&nodes, (lease.get() != 0).then_some(changed), now());
        let made =
            made.filter(|_| made_lease.get() != 0).and_then(|found| Some((found, self.table().held_as(found.node)?)));
        if let Some((found, name)) = made {
            let version = made_lease.get();
            state.names.insert(name, found.node);
            state.leases.learn(changing.ticket, found.node, Some(version), Some(found.attributes), now());
            if made_flags.get() & u64::from(ENTRY_WITHOUT_XATTRS) != 0 {
                state.leases.learn_fact_of_found(found.node, version, &user, Fact::NoXattrs);
            }
            if method == Method::MakeDirectory {
                state.leases.learn_empty(found.node, version, &user);
            }
        }
        drop(state);
        self.caches.drop_mapped_soon(&nodes);
    }

    /// The files and directories that a call changes, as far as it names them.
    fn changed_nodes(&self, method: Method, ask: &Ask<'_>) -> [Option<u64>; 2] {
        let table = self.table();
        let of = |handle: Option<u64>| handle.and_then(|handle| table.handle(handle)).map(|(_, opened)| opened.node);
        let truncates = ask.flags & rustix::fs::OFlags::TRUNC.bits() != 0;
        match method {
            Method::Write | Method::Allocate => [of(ask.handle), None],
            Method::CopyRange => [of(ask.second_handle), None],
            Method::Open if truncates => [ask.node, None],
            Method::SetAttributes
            | Method::SetXattr
            | Method::RemoveXattr
            | Method::MakeSymlink
            | Method::MakeNode
            | Method::MakeDirectory
            | Method::Create
            | Method::Unlink
            | Method::RemoveDirectory
            | Method::Link
            | Method::Rename => [ask.node, ask.second_node],
            _ => [None, None],
        }
    }

    /// Remembers which files and directories a call has changed, until they are synced.
    pub(super) fn note_changes(&self, live: Live, method: Method, ask: &Ask<'_>) {
        let changed = self.changed_nodes(method, ask);
        let attributes = match method {
            // A sync of data alone has the size with it.
            Method::SetAttributes => {
                !NewAttributes::read_from_bytes(ask.data).is_ok_and(|new| new.which.get() == SET_SIZE)
            }
            Method::SetXattr | Method::RemoveXattr => true,
            _ => false,
        };
        let mut table = self.table();
        for node in changed.into_iter().flatten() {
            table.changed(node, live.instance, attributes);
        }
    }
}
