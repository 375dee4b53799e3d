//! A client's record of its files: names by which a new server process finds them again.
//!
//! The table is pure. A node has a number of the client, which survives a restart of the server. The server's name of the
//! node is valid for one *epoch*: the sessions in which the server has kept it. A node that is used in a later epoch is
//! looked up again, by its directory and name, and is the same only if inode number and birth time are equal.

mod handover;

use std::collections::HashMap;

use rustix::fs::FileType;

use super::super::wire::Attributes;
use super::files::NamedIn;
use super::held_locks::HeldLocks;
use super::released::HeldNodes;
use super::unsynced::{Lost, Unsynced};
use crate::limits::FILE_UNSYNCED_MAX;

/// The root's number.
pub const ROOT: u64 = 1;

/// What makes a file the same in two epochs: inode number, with the subvolume that it counts in, and time of birth where the file system
/// has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    ino: u64,
    subvolume: u64,
    born_s: i64,
    born_ns: u32,
}

impl Identity {
    /// No file's: there is no inode 0.
    pub(super) const NONE: Self = Self { ino: 0, subvolume: 0, born_s: 0, born_ns: 0 };

    pub(super) fn of(attributes: &Attributes) -> Self {
        Self {
            ino: attributes.ino.get(),
            subvolume: attributes.subvolume.get(),
            born_s: attributes.born_s.get(),
            born_ns: attributes.born_ns.get(),
        }
    }
}

/// The server's name of something, and the epoch that it is good for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) epoch: u64,
    pub(super) name: u64,
}

#[derive(Debug)]
pub(super) struct Node {
    parent: u64,
    name: Vec<u8>,
    identity: Identity,
    pub(super) remote: Remote,
    /// Answers of the epoch that named it: the server is told as many when it is forgotten.
    pub(super) answers: u64,
    /// Answers to the user of this table that named it.
    look_ups: u64,
    /// A name of it was removed: while the server holds it, its blocks are not free.
    pub(super) is_removed: bool,
    pub(super) is_directory: bool,
    /// Handles of it.
    pub(super) opens: u32,
    /// It was used since it was looked at for [`Table::release`].
    pub(super) is_used: bool,
}

impl Node {
    fn new(NamedIn { parent, name }: NamedIn<'_>, remote: Remote, attributes: &Attributes) -> Self {
        Self {
            parent,
            name: name.to_vec(),
            identity: Identity::of(attributes),
            remote,
            answers: 1,
            look_ups: 1,
            is_removed: false,
            is_directory: FileType::from_raw_mode(attributes.mode.get()) == FileType::Directory,
            opens: 0,
            is_used: true,
        }
    }

    /// An answer has named it.
    fn named(&mut self, remote: Remote) {
        self.answers = if self.remote == remote { self.answers + 1 } else { 1 };
        (self.remote, self.is_used) = (remote, true);
    }
}

#[derive(Clone, Copy, Debug)]
struct Handle {
    node: u64,
    flags: u32,
    directory: bool,
    remote: Remote,
    /// The count of lost changes that its syncs have told.
    losses_seen: u64,
    /// It was open when locks of the file were lost.
    has_lost_locks: bool,
    /// No entries followed this cookie when the server read the directory.
    listing_end: Option<u64>,
}

/// What an open file was opened with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Opened {
    pub(super) node: u64,
    pub(super) flags: u32,
    pub(super) directory: bool,
}

/// A sync under way: of which file, and up to which change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Syncing {
    file: Option<Identity>,
    change: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) nodes: HashMap<u64, Node>,
    pub(super) held: HeldNodes,
    by_identity: HashMap<Identity, u64>,
    by_name: HashMap<(u64, Vec<u8>), u64>,
    handles: HashMap<u64, Handle>,
    pub(super) unsynced: Unsynced,
    pub(super) locks: HeldLocks,
    last: u64,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            nodes: HashMap::new(),
            held: HeldNodes::default(),
            by_identity: HashMap::new(),
            by_name: HashMap::new(),
            handles: HashMap::new(),
            unsynced: Unsynced::new(FILE_UNSYNCED_MAX),
            locks: HeldLocks::default(),
            last: 0,
        }
    }
}

impl Table {
    /// The root is known in an epoch. False if it is another directory than before.
    pub(super) fn attach(&mut self, remote: Remote, attributes: &Attributes) -> bool {
        let identity = Identity::of(attributes);
        self.last = self.last.max(ROOT);
        self.held.begin(remote.epoch);
        let root = self
            .nodes
            .entry(ROOT)
            .or_insert_with(|| Node { look_ups: u64::MAX, ..Node::new(NamedIn::new(ROOT, b""), remote, attributes) });
        (root.remote, root.answers) = (remote, 1);
        self.by_identity.insert(identity, ROOT);
        root.identity == identity
    }

    /// A name was looked up: gives the node's number.
    pub(super) fn hold(
        &mut self,
        NamedIn { parent, name }: NamedIn<'_>,
        remote: Remote,
        attributes: &Attributes,
    ) -> u64 {
        let identity = Identity::of(attributes);
        if let Some(&number) = self.by_identity.get(&identity)
            && let Some(node) = self.nodes.get_mut(&number)
        {
            node.look_ups = node.look_ups.saturating_add(1);
            self.held.renamed(number, node.remote, remote);
            node.named(remote);
            if number != ROOT && (node.parent != parent || node.name != name) {
                let old = (node.parent, std::mem::replace(&mut node.name, name.to_vec()));
                node.parent = parent;
                self.leave_name(&old, number);
            }
            self.by_name.insert((parent, name.to_vec()), number);
            return number;
        }
        self.last += 1;
        let number = self.last;
        self.nodes.insert(number, Node::new(NamedIn { parent, name }, remote, attributes));
        self.held.renamed(number, Remote::default(), remote);
        self.by_identity.insert(identity, number);
        self.by_name.insert((parent, name.to_vec()), number);
        number
    }

    fn leave_name(&mut self, name: &(u64, Vec<u8>), number: u64) {
        if self.by_name.get(name) == Some(&number) {
            self.by_name.remove(name);
        }
    }

    /// A node was found again without asking the server. False if it is not known any more.
    pub(super) fn found(&mut self, number: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&number) else { return false };
        node.look_ups = node.look_ups.saturating_add(1);
        true
    }

    /// So many look-ups are forgotten. With the last, gives what the server is told: its name and how many answers named it.
    pub(super) fn forget(&mut self, number: u64, look_ups: u64) -> Option<(Remote, u64)> {
        let node = self.nodes.get_mut(&number).filter(|_| number != ROOT)?;
        node.look_ups = node.look_ups.saturating_sub(look_ups);
        if node.look_ups > 0 {
            return None;
        }
        let node = self.nodes.remove(&number)?;
        self.held.renamed(number, node.remote, Remote::default());
        self.tidy_held();
        self.leave_name(&(node.parent, node.name), number);
        if self.by_identity.get(&node.identity) == Some(&number) {
            self.by_identity.remove(&node.identity);
        }
        Some((node.remote, node.answers))
    }

    /// What the server calls a node. `None`: the table does not know it.
    pub(super) fn remote(&mut self, number: u64) -> Option<Remote> {
        let node = self.nodes.get_mut(&number)?;
        node.is_used = true;
        Some(node.remote)
    }

    /// What the server calls a node that it holds.
    pub(super) fn held_as(&self, number: u64) -> Option<u64> {
        self.nodes.get(&number).filter(|node| node.remote.epoch == self.held.epoch).map(|node| node.remote.name)
    }

    /// Where a node is found again.
    pub(super) fn place(&self, number: u64) -> Option<(u64, Vec<u8>)> {
        self.nodes.get(&number).map(|node| (node.parent, node.name.clone()))
    }

    /// A node was looked up again. False if another file has its name now.
    pub(super) fn found_again(&mut self, number: u64, remote: Remote, attributes: &Attributes) -> bool {
        let Some(node) = self.nodes.get_mut(&number).filter(|node| node.identity == Identity::of(attributes)) else {
            return false;
        };
        self.held.renamed(number, node.remote, remote);
        node.named(remote);
        true
    }

    /// A new server process has kept a removed file. False if it is not known here.
    pub(super) fn claim(&mut self, remote: Remote, attributes: &Attributes) -> bool {
        let Some(&number) = self.by_identity.get(&Identity::of(attributes)) else { return false };
        let is_known = self.found_again(number, remote, attributes);
        if let Some(node) = self.nodes.get_mut(&number) {
            node.is_removed = true;
        }
        is_known
    }

    /// A name was given to another place, or exchanged with it.
    pub(super) fn renamed(&mut self, from: NamedIn<'_>, to: NamedIn<'_>, exchanged: bool) {
        let [from, to] = [from, to].map(|NamedIn { parent, name }| (parent, name.to_vec()));
        let (moved, replaced) = (self.by_name.remove(&from), self.by_name.remove(&to));
        let mut place = |number: Option<u64>, at: (u64, Vec<u8>)| {
            let Some(number) = number else { return };
            if let Some(node) = self.nodes.get_mut(&number) {
                (node.parent, node.name) = at.clone();
                self.by_name.insert(at, number);
            }
        };
        place(moved, to);
        if exchanged {
            place(replaced, from);
        }
    }

    /// A name was removed, or is about to be another file's.
    pub(super) fn removed(&mut self, NamedIn { parent, name }: NamedIn<'_>) {
        let number = self.by_name.get(&(parent, name.to_vec()));
        if let Some(node) = number.and_then(|number| self.nodes.get_mut(number)) {
            node.is_removed = true;
        }
    }

    /// The node that was last seen under a name, which counts as a look-up.
    pub(super) fn hold_named(&mut self, NamedIn { parent, name }: NamedIn<'_>) -> Option<u64> {
        let number = *self.by_name.get(&(parent, name.to_vec()))?;
        self.found(number).then_some(number)
    }

    /// Whether a name of a node was removed.
    pub(super) fn is_removed(&self, number: u64) -> bool {
        self.nodes.get(&number).is_some_and(|node| node.is_removed)
    }

    /// A file was opened: gives the handle's number.
    pub(super) fn open(&mut self, opened: Opened, remote: Remote) -> u64 {
        self.last = self.last.max(ROOT) + 1;
        let Opened { node, flags, directory } = opened;
        if let Some(node) = self.nodes.get_mut(&node) {
            node.opens += 1;
        }
        let losses_seen = self.unsynced.losses();
        let handle = Handle { node, flags, directory, remote, losses_seen, has_lost_locks: false, listing_end: None };
        self.handles.insert(self.last, handle);
        self.last
    }

    /// What the server calls an open file, and what it was opened with.
    pub(super) fn handle(&self, number: u64) -> Option<(Remote, Opened)> {
        let Handle { node, flags, directory, remote, .. } = *self.handles.get(&number)?;
        Some((remote, Opened { node, flags, directory }))
    }

    /// A file was opened again; gives what the server calls it. Another thread may have been first: then that is another name,
    /// and the given one is to be closed.
    pub(super) fn opened_again(&mut self, number: u64, remote: Remote) -> Option<Remote> {
        let handle = self.handles.get_mut(&number)?;
        if handle.remote.epoch != remote.epoch {
            handle.remote = remote;
        }
        Some(handle.remote)
    }

    pub(super) fn close(&mut self, number: u64) -> Option<Remote> {
        let closed = self.handles.remove(&number)?;
        if let Some(node) = self.nodes.get_mut(&closed.node) {
            node.opens -= 1;
        }
        if !self.locks.is_empty() && self.handle_of(closed.node).is_none() {
            self.locks.forget(closed.node);
        }
        Some(closed.remote)
    }

    /// A directory had no entries behind a cookie.
    pub(super) fn note_listing_end(&mut self, handle: u64, cookie: u64) {
        if let Some(handle) = self.handles.get_mut(&handle) {
            handle.listing_end = Some(cookie);
        }
    }

    /// Whether that was said of a cookie. Said once: there may be more by now, and a program that goes on reading finds them.
    pub(super) fn take_listing_end(&mut self, handle: u64, cookie: u64) -> bool {
        self.handles.get_mut(&handle).is_some_and(|handle| handle.listing_end.take() == Some(cookie))
    }

    /// Whether anything is open.
    pub(super) fn has_open_files(&self) -> bool {
        !self.handles.is_empty()
    }

    /// Open files and directories.
    pub(super) fn open_files(&self) -> usize {
        self.handles.len()
    }

    /// An open file of a node.
    pub(super) fn handle_of(&self, node: u64) -> Option<u64> {
        self.handles.iter().find(|(_, handle)| handle.node == node).map(|(number, _)| *number)
    }

    /// The locks of a node are lost: those who have it open do not go on as if they had them.
    pub(super) fn lose_locks(&mut self, node: u64) {
        self.locks.forget(node);
        self.handles.values_mut().filter(|handle| handle.node == node).for_each(|handle| handle.has_lost_locks = true);
    }

    /// Whether locks of its file were lost while it was open.
    pub(super) fn has_lost_locks(&self, number: u64) -> bool {
        self.handles.get(&number).is_some_and(|handle| handle.has_lost_locks)
    }

    /// A server process has taken a change of a file or directory.
    pub(super) fn changed(&mut self, node: u64, instance: u64, attributes: bool) {
        let Some(node) = self.nodes.get(&node) else { return };
        let known = |file: &Identity| self.by_identity.contains_key(file);
        self.unsynced.changed(node.identity, instance, attributes, known);
    }

    /// Begins a sync of an open file at a server process: gives what [`Table::synced`] takes when it has succeeded.
    pub(super) fn begin_sync(&mut self, handle: u64, instance: u64) -> Result<Syncing, Lost> {
        let nothing = Syncing { file: None, change: 0 };
        let Some(handle) = self.handles.get_mut(&handle) else { return Ok(nothing) };
        let Some(node) = self.nodes.get(&handle.node) else { return Ok(nothing) };
        let change = self.unsynced.begin(node.identity, instance, &mut handle.losses_seen)?;
        Ok(Syncing { file: Some(node.identity), change })
    }

    /// A sync was answered well.
    pub(super) fn synced(&mut self, Syncing { file, change }: Syncing, data_only: bool) {
        if let Some(file) = file {
            self.unsynced.synced(file, change, data_only);
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;
    use zerocopy::little_endian::{I64, U64};

    use super::*;

    fn file(ino: u64, born: i64) -> Attributes {
        Attributes { ino: U64::new(ino), born_s: I64::new(born), ..Attributes::new_zeroed() }
    }

    fn remote(epoch: u64, name: u64) -> Remote {
        Remote { epoch, name }
    }

    #[test]
    fn a_file_has_one_number_by_all_its_names_and_in_all_epochs() {
        let mut table = Table::default();
        assert!(table.attach(remote(1, 70), &file(2, 0)));
        let one = table.hold(NamedIn::new(ROOT, b"a"), remote(1, 71), &file(10, 5));
        assert_eq!(table.hold(NamedIn::new(ROOT, b"b"), remote(1, 71), &file(10, 5)), one, "a hard link");
        assert!(table.attach(remote(2, 80), &file(2, 0)));
        assert_eq!(table.place(one), Some((ROOT, b"b".to_vec())));
        assert!(table.found_again(one, remote(2, 90), &file(10, 5)));
        assert!(!table.found_again(one, remote(2, 91), &file(10, 6)), "another file with the same number");
        assert_eq!(table.forget(one, 1), None);
        assert_eq!(table.forget(one, 1), Some((remote(2, 90), 1)));
        assert_eq!(table.remote(one), None);
        assert!(
            table.by_name.is_empty()
                || !table.by_name.values().any(|number| *number == one && table.nodes.contains_key(&one))
        );
        assert!(!table.attach(remote(3, 1), &file(3, 0)), "another root");
        assert_eq!(table.forget(ROOT, 9), None);
    }

    #[test]
    fn a_renamed_file_is_found_at_its_new_place() {
        let mut table = Table::default();
        table.attach(remote(1, 70), &file(2, 0));
        let directory = table.hold(NamedIn::new(ROOT, b"d"), remote(1, 71), &file(10, 0));
        let one = table.hold(NamedIn::new(ROOT, b"a"), remote(1, 72), &file(11, 0));
        let two = table.hold(NamedIn::new(directory, b"b"), remote(1, 73), &file(12, 0));
        table.renamed(NamedIn::new(ROOT, b"a"), NamedIn::new(directory, b"b"), true);
        assert_eq!(
            (table.place(one), table.place(two)),
            (Some((directory, b"b".to_vec())), Some((ROOT, b"a".to_vec())))
        );
        table.renamed(NamedIn::new(directory, b"b"), NamedIn::new(ROOT, b"c"), false);
        assert_eq!(table.place(one), Some((ROOT, b"c".to_vec())));
    }

    #[test]
    fn changes_of_a_file_are_remembered_when_its_node_is_forgotten() {
        let mut table = Table::default();
        table.attach(remote(1, 70), &file(2, 0));
        let one = table.hold(NamedIn::new(ROOT, b"a"), remote(1, 71), &file(10, 5));
        table.changed(one, 100, false);
        table.forget(one, 1);
        let again = table.hold(NamedIn::new(ROOT, b"a"), remote(2, 71), &file(10, 5));
        assert_ne!(one, again);
        let handle = table.open(Opened { node: again, flags: 2, directory: false }, remote(2, 5));
        assert!(table.begin_sync(handle, 200).is_err());
        let syncing = table.begin_sync(handle, 200).unwrap();
        table.synced(syncing, false);
        assert!(table.begin_sync(handle, 300).is_ok());
    }

    #[test]
    fn of_two_that_open_a_file_again_the_first_is_used() {
        let mut table = Table::default();
        table.attach(remote(1, 70), &file(2, 0));
        let one = table.hold(NamedIn::new(ROOT, b"a"), remote(1, 71), &file(10, 5));
        let opened = Opened { node: one, flags: 2, directory: false };
        let handle = table.open(opened, remote(1, 5));
        assert_eq!(table.opened_again(handle, remote(2, 6)), Some(remote(2, 6)));
        assert_eq!(table.opened_again(handle, remote(2, 7)), Some(remote(2, 6)));
        assert_eq!(table.handle(handle), Some((remote(2, 6), opened)));
        assert_eq!((table.close(handle), table.handle(handle)), (Some(remote(2, 6)), None));
        assert_eq!(table.opened_again(handle, remote(2, 8)), None, "closed meanwhile");
    }
}
