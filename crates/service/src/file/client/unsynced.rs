//! Changes that a server process took and that no sync has followed: a sync must fail if that process went before it.
//!
//! Pure. Files are known by their identity, since a program may close a file, have its node forgotten, and open it again for its
//! sync. An entry is a file or a directory.

use std::collections::HashMap;

use zerocopy::IntoBytes;

use super::handover::record::{self, ATTRIBUTES, Head, MARKED};
use super::table::Identity;

/// Whether two server processes ran in the same boot of a machine: then its kernel still had what the first one had written.
fn same_boot(one: u64, other: u64) -> bool {
    one >> 32 == other >> 32
}

/// Stands for a server process of the same boot that has gone: a sync of that boot speaks for it, but had failed before.
fn failed_process(instance: u64) -> u64 {
    instance >> 32 << 32
}

/// Stands for server processes of several boots: of whichever a sync comes, it does not speak for all of them.
const SEVERAL_BOOTS: u64 = u64::MAX;

/// What is known of a file.
#[derive(Debug, Default)]
struct File {
    mark: Option<Mark>,
    /// The count of losses when changes of this file were lost last; 0 if none were.
    lost_at: u64,
}

/// Changes that may not be durable.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// The server process that took the first of them.
    instance: u64,
    /// The number of the last of them.
    change: u64,
    /// Attributes are among them, which a sync of data alone may leave out.
    attributes: bool,
}

impl Mark {
    /// Whether a sync may have failed that was to make the changes durable.
    fn has_failed(&self) -> bool {
        self.instance == failed_process(self.instance)
    }
}

/// The server process that had taken changes of a file has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lost;

/// Files of which a sync of all files has not made the changes durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NotSynced {
    /// Another boot of a machine took the changes.
    pub(super) restarted: usize,
    /// A sync had failed.
    pub(super) failed: usize,
}

/// What a server process has told at an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attached {
    instance: u64,
    failed_syncs: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Unsynced {
    /// At the last session's begin, if this process of the client has had one.
    attached: Option<Attached>,
    files: HashMap<Identity, File>,
    changes: u64,
    losses: u64,
    /// Changes of files whose entries were dropped, as of one file.
    dropped: Option<Mark>,
    /// Entries of forgotten files are kept up to this many entries.
    max: usize,
    /// Entries at which those of unknown files are dropped next.
    prune_at: usize,
}

impl Unsynced {
    pub(super) fn new(max: usize) -> Self {
        Self { attached: None, files: HashMap::new(), changes: 0, losses: 0, dropped: None, max, prune_at: max }
    }

    /// A session has begun. `failed_syncs` had failed when the server process began to keep what it has of this client. If it had kept nothing
    /// of an earlier session, and others have failed since then, their answers went to others or were lost, and the kernel does not tell a
    /// failure twice: the changes before may be lost, as if the process had gone.
    pub(super) fn attached(&mut self, instance: u64, failed_syncs: u64) {
        let before = self.attached.replace(Attached { instance, failed_syncs });
        if before.is_none_or(|before| before.instance != instance || before.failed_syncs == failed_syncs) {
            return;
        }
        let marks = self.files.values_mut().filter_map(|entry| entry.mark.as_mut()).chain(&mut self.dropped);
        for mark in marks.filter(|mark| same_boot(mark.instance, instance)) {
            mark.instance = failed_process(instance);
        }
    }

    /// The count of losses that a file opened now does not hear of: each was told to one that had the file open before.
    pub(super) fn losses(&self) -> u64 {
        self.losses
    }

    /// A server process has taken a change. `known` says which files still have a node.
    pub(super) fn changed(
        &mut self,
        file: Identity,
        instance: u64,
        attributes: bool,
        known: impl Fn(&Identity) -> bool,
    ) {
        self.changes += 1;
        let change = self.changes;
        // Of two processes the first decides: what it held may be lost.
        let entry = self.files.entry(file).or_default();
        let mark = entry.mark.get_or_insert(Mark { instance, change, attributes });
        (mark.change, mark.attributes) = (change, mark.attributes | attributes);
        if self.files.len() > self.prune_at {
            let before = self.files.len();
            let dropped = &mut self.dropped;
            self.files.retain(|file, entry| {
                let keeps = known(file) && (entry.mark.is_some() || entry.lost_at > 0);
                if let Some(mark) = entry.mark.filter(|_| !keeps) {
                    let all = dropped.get_or_insert(mark);
                    let of_one = same_boot(all.instance, mark.instance);
                    let either = if mark.has_failed() { mark.instance } else { all.instance };
                    all.instance = if of_one { either } else { SEVERAL_BOOTS };
                    all.change = all.change.max(mark.change);
                }
                keeps
            });
            self.prune_at = self.max.max(self.files.len() * 2);
            let dropped = before - self.files.len();
            tracing::warn!(
                dropped,
                "too many files have unsynced changes: later syncs of some do not report data that a server's restart lost"
            );
        }
    }

    /// Begins a sync at a server process: gives the number of the last change, for [`Unsynced::synced`]. `seen` is the count of
    /// losses that the open file has heard of.
    ///
    /// # Errors
    /// Changes may be lost; each open file is told once.
    pub(super) fn begin(&mut self, file: Identity, instance: u64, seen: &mut u64) -> Result<u64, Lost> {
        let Some(entry) = self.files.get_mut(&file) else { return Ok(0) };
        if let Some(mark) = entry.mark.as_mut().filter(|mark| mark.instance != instance) {
            self.losses += 1;
            self.changes += 1;
            entry.lost_at = self.losses;
            // This process may have taken some of the changes.
            (mark.instance, mark.change) = (instance, self.changes);
        }
        if entry.lost_at > *seen {
            *seen = self.losses;
            return Err(Lost);
        }
        Ok(entry.mark.map_or(0, |mark| mark.change))
    }

    /// Begins a sync of all files at once, if one has changes that no sync has followed: gives the number of the last change, for
    /// [`Unsynced::all_synced`].
    pub(super) fn begin_all(&self) -> Option<u64> {
        self.marks().next().map(|_| self.changes)
    }

    /// A sync of all files that began after that change, at that server process, was answered well. It speaks also for processes of the same
    /// boot: the kernel had what they had written. Gives how many files have changes that may be lost. Those of which the entry was dropped
    /// count as one.
    pub(super) fn all_synced(&mut self, change: u64, instance: u64) -> NotSynced {
        let stays = |mark: &Mark| mark.change > change || !same_boot(mark.instance, instance) || mark.has_failed();
        for entry in self.files.values_mut() {
            entry.mark = entry.mark.filter(stays);
        }
        self.dropped = self.dropped.filter(stays);
        self.files.retain(|_, entry| entry.mark.is_some() || entry.lost_at > 0);
        let is_of_boot = |mark: &Mark| same_boot(mark.instance, instance);
        NotSynced {
            restarted: self.marks().filter(|mark| !is_of_boot(mark)).count(),
            failed: self.marks().filter(|mark| is_of_boot(mark) && mark.has_failed()).count(),
        }
    }

    /// Files with changes that no sync has followed. Those of which the entry was dropped count as one.
    pub(super) fn count(&self) -> usize {
        self.marks().count()
    }

    fn marks(&self) -> impl Iterator<Item = &Mark> {
        self.files.values().filter_map(|entry| entry.mark.as_ref()).chain(&self.dropped)
    }

    /// Writes what is known of files for another process, and counts them.
    pub(super) fn write(&self, head: &mut Head, bytes: &mut Vec<u8>) {
        (head.changes, head.losses) = (self.changes.into(), self.losses.into());
        let dropped = self.dropped.map(|mark| (Identity::NONE, Some(mark), 0));
        let files = self.files.iter().map(|(file, File { mark, lost_at })| (*file, *mark, *lost_at));
        head.unsynced = (self.files.len() as u32 + u32::from(dropped.is_some())).into();
        for (file, mark, lost_at) in files.chain(dropped) {
            let flags = mark.map_or(0, |mark| MARKED | if mark.attributes { ATTRIBUTES } else { 0 });
            let record = record::Unsynced {
                file: file.into(),
                flags: flags.into(),
                instance: mark.map_or(0, |mark| mark.instance).into(),
                change: mark.map_or(0, |mark| mark.change).into(),
                lost_at: lost_at.into(),
            };
            bytes.extend_from_slice(record.as_bytes());
        }
    }

    /// Takes the counts of another process: open files have heard of losses by them.
    pub(super) fn take_over_counts(&mut self, head: &Head) {
        (self.changes, self.losses) = (head.changes.get(), head.losses.get());
    }

    /// Takes what another process has known of a file.
    pub(super) fn take_over(&mut self, record: &record::Unsynced) {
        let flags = record.flags.get();
        let mark = (flags & MARKED != 0).then(|| Mark {
            instance: record.instance.get(),
            change: record.change.get(),
            attributes: flags & ATTRIBUTES != 0,
        });
        match record.file.into() {
            Identity::NONE => self.dropped = mark,
            file => _ = self.files.insert(file, File { mark, lost_at: record.lost_at.get() }),
        }
    }

    /// A sync that began after that change was answered well.
    pub(super) fn synced(&mut self, file: Identity, change: u64, data_only: bool) {
        let Some(entry) = self.files.get_mut(&file) else { return };
        if entry.mark.is_some_and(|mark| mark.change == change && !(data_only && mark.attributes)) {
            entry.mark = None;
            if entry.lost_at == 0 {
                self.files.remove(&file);
            }
        }
    }
}

#[cfg(test)]
mod tests;
