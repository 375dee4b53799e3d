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
mod tests {
    use zerocopy::little_endian::U64;
    use zerocopy::{FromBytes, FromZeros};

    use super::super::super::wire::Attributes;
    use super::*;

    /// A process of another boot than 70, 80 and 90.
    const BEFORE: u64 = (1 << 32) + 70;

    fn file(ino: u64) -> Identity {
        Identity::of(&Attributes { ino: U64::new(ino), ..Attributes::new_zeroed() })
    }

    fn changed(unsynced: &mut Unsynced, number: u64, instance: u64) {
        unsynced.changed(file(number), instance, false, |_| true);
    }

    fn restarted(files: usize) -> NotSynced {
        NotSynced { restarted: files, failed: 0 }
    }

    #[test]
    fn each_open_file_hears_once_of_a_process_that_went() {
        let mut unsynced = Unsynced::new(100);
        let (mut one, mut two) = (unsynced.losses(), unsynced.losses());
        changed(&mut unsynced, 1, 70);
        // A sync that brings no answer clears nothing.
        assert!(unsynced.begin(file(1), 70, &mut one).is_ok());
        changed(&mut unsynced, 1, 80);
        assert_eq!(unsynced.begin(file(1), 80, &mut one), Err(Lost), "the first process is gone");
        assert_eq!(unsynced.begin(file(1), 80, &mut two), Err(Lost), "the other open file hears of it too");
        let mut later = unsynced.losses();
        for seen in [&mut one, &mut two, &mut later] {
            let change = unsynced.begin(file(1), 80, seen).unwrap();
            unsynced.synced(file(1), change, false);
        }
        assert!(unsynced.begin(file(1), 90, &mut one).is_ok(), "all was durable");
        assert!(unsynced.begin(file(2), 90, &mut two).is_ok(), "another file");
    }

    #[test]
    fn losses_are_told_in_the_next_process_though_no_file_had_changes() {
        let mut before = Unsynced::new(0);
        let mut seen = before.losses();
        changed(&mut before, 1, 70);
        assert_eq!(before.begin(file(1), 80, &mut seen), Err(Lost));
        // Its entry goes with its node, for others.
        before.synced(file(1), before.changes, false);
        for number in [2, 3] {
            before.changed(file(number), 80, false, |_| false);
        }
        assert!(before.files.is_empty());
        let (mut head, mut bytes) = (Head::new_zeroed(), Vec::new());
        before.write(&mut head, &mut bytes);
        let mut unsynced = Unsynced::new(100);
        unsynced.take_over_counts(&head);
        changed(&mut unsynced, 4, 80);
        assert_eq!(unsynced.begin(file(4), 90, &mut seen), Err(Lost));
    }

    #[test]
    fn a_sync_speaks_for_the_changes_before_it_alone() {
        let mut unsynced = Unsynced::new(100);
        let mut seen = 0;
        changed(&mut unsynced, 1, 70);
        let change = unsynced.begin(file(1), 70, &mut seen).unwrap();
        changed(&mut unsynced, 1, 70);
        unsynced.synced(file(1), change, false);
        assert_eq!(unsynced.begin(file(1), 80, &mut seen), Err(Lost), "one came while the sync was under way");

        unsynced.changed(file(2), 80, true, |_| true);
        let change = unsynced.begin(file(2), 80, &mut seen).unwrap();
        unsynced.synced(file(2), change, true);
        assert_eq!(unsynced.begin(file(2), 90, &mut seen), Err(Lost), "attributes are no data");
    }

    #[test]
    fn a_sync_of_all_files_speaks_for_those_of_its_boot() {
        let mut unsynced = Unsynced::new(100);
        assert_eq!(unsynced.begin_all(), None, "nothing to sync");
        for (number, instance) in [(1, BEFORE), (2, BEFORE), (3, 70), (4, 80)] {
            changed(&mut unsynced, number, instance);
        }
        let change = unsynced.begin_all().unwrap();
        changed(&mut unsynced, 4, 80);
        assert_eq!(unsynced.all_synced(change, 80), restarted(2), "files 1 and 2 changed in another boot");
        assert!(unsynced.begin(file(3), 90, &mut 0).is_ok(), "it is durable");
        let change = unsynced.begin_all().unwrap();
        assert_eq!(unsynced.all_synced(change, BEFORE), restarted(1), "file 4 changed while the sync was under way");
    }

    #[test]
    fn changes_of_dropped_files_are_synced_too_also_in_the_next_process() {
        let mut before = Unsynced::new(0);
        for (number, instance) in [(1, 80), (2, BEFORE), (3, 80)] {
            before.changed(file(number), instance, false, |_| false);
        }
        assert!(before.files.is_empty());
        let (mut head, mut bytes) = (Head::new_zeroed(), Vec::new());
        before.write(&mut head, &mut bytes);
        assert_eq!(head.unsynced.get(), 1);
        let mut unsynced = Unsynced::new(100);
        unsynced.take_over_counts(&head);
        unsynced.take_over(&record::Unsynced::read_from_bytes(&bytes).unwrap());
        let change = unsynced.begin_all().unwrap();
        for instance in [80, BEFORE] {
            assert_eq!(unsynced.all_synced(change, instance), restarted(1), "some changed in another boot");
        }
        let mut unsynced = Unsynced::new(0);
        unsynced.changed(file(1), 70, false, |_| false);
        let change = unsynced.begin_all().unwrap();
        assert_eq!(unsynced.all_synced(change, 80), restarted(0));
        assert_eq!(unsynced.begin_all(), None);
    }

    #[test]
    fn a_sync_that_failed_while_the_server_had_nothing_of_the_client_is_told() {
        let mut unsynced = Unsynced::new(100);
        unsynced.attached(70, 3);
        let mut seen = unsynced.losses();
        for number in [1, 2] {
            changed(&mut unsynced, number, 70);
        }
        changed(&mut unsynced, 3, BEFORE);
        unsynced.attached(70, 3);
        assert!(unsynced.begin(file(1), 70, &mut seen).is_ok(), "none has failed");
        unsynced.attached(70, 4);
        assert_eq!(unsynced.begin(file(1), 70, &mut seen), Err(Lost));
        let change = unsynced.begin(file(1), 70, &mut seen).unwrap();
        unsynced.synced(file(1), change, false);
        changed(&mut unsynced, 4, 70);
        let change = unsynced.begin_all().unwrap();
        let lost = NotSynced { restarted: 1, failed: 1 };
        assert_eq!(unsynced.all_synced(change, 70), lost, "files 3 and 2; file 1 was told, file 4 changed since then");
        assert_eq!(unsynced.all_synced(change, 70), lost, "it stays so");
        changed(&mut unsynced, 1, 70);
        unsynced.attached(80, 9);
        assert_eq!(unsynced.all_synced(u64::MAX, 80), lost, "another process counts anew");
    }

    #[test]
    fn a_sync_that_failed_is_told_of_dropped_files() {
        let mut unsynced = Unsynced::new(0);
        unsynced.attached(70, 0);
        for number in [1, 2] {
            unsynced.changed(file(number), 70, false, |_| false);
        }
        unsynced.attached(70, 1);
        unsynced.changed(file(3), 70, false, |_| false);
        unsynced.changed(file(4), 70, false, |_| false);
        let change = unsynced.begin_all().unwrap();
        assert_eq!(unsynced.all_synced(change, 70), NotSynced { restarted: 0, failed: 1 });
    }

    #[test]
    fn files_without_a_node_are_kept_up_to_a_bound() {
        let mut unsynced = Unsynced::new(100);
        for number in 0..1000 {
            unsynced.changed(file(number), 70, false, |known| *known == file(3));
            assert!(unsynced.files.len() <= 100);
        }
        assert_eq!(unsynced.begin(file(3), 80, &mut 0), Err(Lost), "this one has a node");
    }
}
