//! The table as it goes to another process.

use zerocopy::IntoBytes;

use super::super::handover::record::{
    self, DIRECTORY, EXCLUSIVE, Head, IDENTIFIED, LOST_LOCKS, NAMED, REMOVED, Records, StateError, WHOLE,
};
use super::super::held_locks::HeldLock;
use super::super::locking::LockRange;
use super::super::opener::Opener;
use super::{Handle, Identity, Node, Remote, Table};
use crate::limits::FILE_STATE_RECORDS_MAX;

impl From<record::File> for Identity {
    fn from(file: record::File) -> Self {
        Self {
            ino: file.ino.get(),
            subvolume: file.subvolume.get(),
            born_s: file.born_s.get(),
            born_ns: file.born_ns.get(),
        }
    }
}

impl From<Identity> for record::File {
    fn from(Identity { ino, subvolume, born_s, born_ns }: Identity) -> Self {
        Self { ino: ino.into(), subvolume: subvolume.into(), born_s: born_s.into(), born_ns: born_ns.into() }
    }
}

impl From<record::Remote> for Remote {
    fn from(remote: record::Remote) -> Self {
        Self { epoch: remote.epoch.get(), name: remote.name.get() }
    }
}

impl From<Remote> for record::Remote {
    fn from(Remote { epoch, name }: Remote) -> Self {
        Self { epoch: epoch.into(), name: name.into() }
    }
}

fn flag(is: bool, flag: u16) -> u16 {
    if is { flag } else { 0 }
}

impl Table {
    /// Writes nodes, handles, locks and unsynced changes, and counts them. `about` gives of a handle how the kernel uses it, and its
    /// opener.
    pub(in super::super) fn write(&self, head: &mut Head, bytes: &mut Vec<u8>, about: impl Fn(u64) -> (u8, Opener)) {
        (head.last, head.held_epoch) = (self.last.into(), self.held.epoch.into());
        head.nodes = (self.nodes.len() as u32).into();
        for (number, node) in &self.nodes {
            let is_named = self.by_name.get(&(node.parent, node.name.clone())) == Some(number);
            let is_identified = self.by_identity.get(&node.identity) == Some(number);
            let flags = flag(node.is_removed, REMOVED)
                | flag(node.is_directory, DIRECTORY)
                | flag(is_named, NAMED)
                | flag(is_identified, IDENTIFIED);
            let record = record::Node {
                number: (*number).into(),
                parent: node.parent.into(),
                file: node.identity.into(),
                remote: node.remote.into(),
                answers: node.answers.into(),
                look_ups: node.look_ups.into(),
                flags: flags.into(),
                name_len: (node.name.len() as u16).into(),
            };
            bytes.extend_from_slice(record.as_bytes());
            bytes.extend_from_slice(&node.name);
        }
        head.handles = (self.handles.len() as u32).into();
        for (number, handle) in &self.handles {
            let (used, Opener { uid, gid, groups }) = about(*number);
            let record = record::Handle {
                number: (*number).into(),
                node: handle.node.into(),
                remote: handle.remote.into(),
                losses_seen: handle.losses_seen.into(),
                open_flags: handle.flags.into(),
                uid: uid.into(),
                gid: gid.into(),
                flags: (flag(handle.directory, DIRECTORY) | flag(handle.has_lost_locks, LOST_LOCKS)).into(),
                used,
                group_count: groups.len() as u8,
            };
            bytes.extend_from_slice(record.as_bytes());
            bytes.extend(groups.iter().flat_map(|group| group.to_le_bytes()));
        }
        self.write_locks(head, bytes);
        self.unsynced.write(head, bytes);
    }

    fn write_locks(&self, head: &mut Head, bytes: &mut Vec<u8>) {
        let locks = self.locks.all();
        (head.locks, head.locks_epoch) = ((locks.len() as u32).into(), self.locks.epoch().unwrap_or(0).into());
        for (node, HeldLock { range, exclusive }) in locks {
            let flags = if range.whole { WHOLE } else { 0 } | if exclusive { EXCLUSIVE } else { 0 };
            let record = record::Lock {
                node: node.into(),
                owner: range.owner.into(),
                start: range.start.into(),
                last: range.last.into(),
                pid: range.pid.into(),
                flags: flags.into(),
            };
            bytes.extend_from_slice(record.as_bytes());
        }
    }

    /// Reads them. `about` gets what was said of each handle.
    pub(in super::super) fn read(
        head: &Head,
        records: &mut Records<'_>,
        mut about: impl FnMut(&record::Handle, Opener),
    ) -> Result<Self, StateError> {
        let mut table = Self { last: head.last.get(), ..Self::default() };
        table.held.begin(head.held_epoch.get());
        if head.nodes.get().max(head.handles.get()) as usize > FILE_STATE_RECORDS_MAX {
            return Err(StateError("it has too many files"));
        }
        for _ in 0..head.nodes.get() {
            let record: &record::Node = records.take()?;
            table.read_node(record, records.bytes(record.name_len.get().into())?);
        }
        for _ in 0..head.handles.get() {
            let record: &record::Handle = records.take()?;
            let groups = records.bytes(usize::from(record.group_count) * 4)?;
            let groups = groups.as_chunks().0.iter().map(|group| u32::from_le_bytes(*group)).collect();
            about(record, Opener { uid: record.uid.get(), gid: record.gid.get(), groups });
            let handle = Handle {
                node: record.node.get(),
                flags: record.open_flags.get(),
                directory: record.flags.get() & DIRECTORY != 0,
                remote: record.remote.into(),
                losses_seen: record.losses_seen.get(),
                has_lost_locks: record.flags.get() & LOST_LOCKS != 0,
                listing_end: None,
            };
            if let Some(node) = table.nodes.get_mut(&handle.node) {
                node.opens += 1;
            }
            table.handles.insert(record.number.get(), handle);
        }
        let mut locks = Vec::new();
        for record in records.take_all::<record::Lock>(head.locks)? {
            let record::Lock { node, owner, start, last, pid, flags } = record?;
            let whole = flags.get() & WHOLE != 0;
            let range = LockRange { whole, owner: owner.get(), pid: pid.get(), start: start.get(), last: last.get() };
            locks.push((node.get(), HeldLock { range, exclusive: flags.get() & EXCLUSIVE != 0 }));
        }
        table.locks.take_over(head.locks_epoch.get(), locks);
        table.unsynced.take_over_counts(head);
        for record in records.take_all(head.unsynced)? {
            table.unsynced.take_over(record?);
        }
        Ok(table)
    }

    fn read_node(&mut self, record: &record::Node, name: &[u8]) {
        let (number, flags) = (record.number.get(), record.flags.get());
        let node = Node {
            parent: record.parent.get(),
            name: name.to_vec(),
            identity: record.file.into(),
            remote: record.remote.into(),
            answers: record.answers.get(),
            look_ups: record.look_ups.get(),
            is_removed: flags & REMOVED != 0,
            is_directory: flags & DIRECTORY != 0,
            opens: 0,
            is_used: true,
        };
        if flags & NAMED != 0 {
            self.by_name.insert((node.parent, name.to_vec()), number);
        }
        if flags & IDENTIFIED != 0 {
            self.by_identity.insert(node.identity, number);
        }
        self.held.renamed(number, Remote::default(), node.remote);
        self.nodes.insert(number, node);
    }
}
