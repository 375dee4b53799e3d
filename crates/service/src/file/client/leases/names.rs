//! Names in directories.

use std::collections::HashMap;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::{Leases, Ticket};
use crate::limits::FILE_ENTRIES_CACHED_MAX;

/// The longest name that every file system can have. What a longer one leads to, the server says.
const NAME_MAX: usize = 255;

/// A name that is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedEntry<A> {
    /// No file has it.
    Absent,
    /// This node has it.
    Node(u64, A),
}

/// What a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewName {
    /// No file.
    Absent,
    /// This node.
    Node(u64),
    /// A file, of which no more is known.
    Unknown,
}

/// What is known of a directory's names. Users may differ in what they may look up.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// What each of some users has found.
    by_name: HashMap<Vec<u8>, Vec<(Vec<u32>, NewName)>>,
    count: usize,
    /// For this user, the directory has no other names.
    complete: Option<Vec<u32>>,
}

impl Names {
    /// Forgets all; gives how many.
    pub(super) fn clear(&mut self) -> usize {
        self.complete = None;
        self.by_name.clear();
        std::mem::take(&mut self.count)
    }

    /// Forgets what all users have found under a name; gives how many.
    fn forget(&mut self, name: &[u8]) -> usize {
        let gone = self.by_name.remove(name).map_or(0, |users| users.len());
        self.count -= gone;
        gone
    }

    /// Takes what a user has found; gives whether that is one more.
    fn learn(&mut self, user: &[u32], name: &[u8], what: NewName) -> bool {
        let users = self.by_name.entry(name.to_vec()).or_default();
        if let Some((_, known)) = users.iter_mut().find(|(other, _)| other == user) {
            *known = what;
            return false;
        }
        users.push((user.to_vec(), what));
        self.count += 1;
        true
    }

    fn find(&self, user: &[u32], name: &[u8]) -> Option<NewName> {
        let users = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        if let Some((_, what)) = users.iter().find(|(other, _)| other == user) {
            return Some(*what);
        }
        // A name that is not ASCII may have several spellings.
        let is_complete = self.complete.as_deref() == Some(user) && name.len() <= NAME_MAX && name.is_ascii();
        is_complete.then_some(NewName::Absent)
    }
}

impl<A: Clone> Leases<A> {
    /// Keeps what an answer says of a name, if the directory's lease is held since then: call [`Leases::learn`] for the directory
    /// before. `child` is `None` where there is no such name. `user` is whose call it was, if users differ in the names that they may
    /// look up.
    pub fn learn_entry(
        &mut self,
        ticket: Ticket,
        directory: u64,
        granted: bool,
        user: &[u32],
        name: &[u8],
        child: Option<u64>,
    ) {
        let overtaken = ticket.epoch != self.epoch || self.event_of(directory) > ticket.event;
        if (overtaken && !seeded::is(Bug::LeaseAfterRecall)) || self.name_count >= FILE_ENTRIES_CACHED_MAX {
            return;
        }
        let epoch = self.epoch;
        let Some(known) = self.nodes.get_mut(&directory).filter(|node| node.changes == 0) else { return };
        let Some(lease) = known.lease.filter(|lease| lease.epoch == epoch) else { return };
        if granted || ticket.version == Some(lease.version) {
            let what = child.map_or(NewName::Absent, NewName::Node);
            self.name_count += usize::from(known.names.learn(user, name, what));
        }
    }

    /// A directory is new, and so has no names; `version` is that of the lease that came with its making. Call [`Leases::learn`] for it
    /// before.
    pub fn learn_empty(&mut self, directory: u64, version: u64, user: &[u32]) {
        let epoch = self.epoch;
        let Some(known) = self.nodes.get_mut(&directory) else { return };
        let is_held = known.lease.is_some_and(|lease| lease.epoch == epoch && lease.version == version);
        if is_held && known.changes == 0 && known.names.count == 0 {
            known.names.complete = Some(user.to_vec());
        }
    }

    /// What a directory has under a name, if that may be believed.
    pub fn entry(&self, directory: u64, user: &[u32], name: &[u8], now: Instant) -> Option<CachedEntry<A>> {
        let known = self.nodes.get(&directory).filter(|node| self.holds(node, now))?;
        match known.names.find(user, name)? {
            NewName::Absent => Some(CachedEntry::Absent),
            NewName::Node(child) => Some(CachedEntry::Node(child, self.attributes(child, now)?)),
            NewName::Unknown => None,
        }
    }

    /// A user's own change has changed a name, of which other users know nothing more.
    pub(super) fn change_name(&mut self, directory: u64, user: &[u32], name: &[u8], new: NewName) {
        let has_room = self.name_count < FILE_ENTRIES_CACHED_MAX;
        let Some(known) = self.nodes.get_mut(&directory) else { return };
        self.name_count -= known.names.forget(name);
        if has_room {
            self.name_count += usize::from(known.names.learn(user, name, new));
        } else {
            known.names.complete = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{NameChange, NamesChanged};
    use super::*;
    use std::time::Duration;

    const DIRECTORY: u64 = 7;
    const USER: &[u32] = &[1000, 1000];
    const OTHER: &[u32] = &[1001, 1001];
    const NOW: Instant = Instant::from_nanos(1_000_000_000);

    /// A directory that a user has made and that has a lease.
    fn new_directory() -> Leases<u64> {
        let mut leases = Leases::default();
        leases.begin_session(1);
        leases.answered(1, NOW, NOW);
        let ticket = leases.ask(DIRECTORY);
        leases.learn(ticket, DIRECTORY, Some(5), Some(0), NOW);
        leases.learn_empty(DIRECTORY, 5, USER);
        leases
    }

    fn change(leases: &mut Leases<u64>, name: &[u8], new: NewName) {
        leases.begin_change(&[DIRECTORY], Some(DIRECTORY), NOW);
        let names = &[NameChange { name, new }];
        let changed = NamesChanged { directory: DIRECTORY, version: 6, attributes: 1, user: USER, names };
        leases.end_change(&[DIRECTORY], Some(changed), NOW);
    }

    #[test]
    fn a_new_directory_has_no_names_but_those_that_its_user_makes() {
        let mut leases = new_directory();
        let find = |leases: &Leases<u64>, user, name: &str| leases.entry(DIRECTORY, user, name.as_bytes(), NOW);
        assert_eq!(find(&leases, USER, "file"), Some(CachedEntry::Absent));
        assert_eq!(find(&leases, OTHER, "file"), None, "who may not be allowed to look");
        assert_eq!(find(&leases, USER, "\u{e9}"), None, "which may have another spelling");
        assert_eq!(find(&leases, USER, &"x".repeat(NAME_MAX + 1)), None, "which may be too long");
        change(&mut leases, b"file", NewName::Unknown);
        assert_eq!(find(&leases, USER, "file"), None);
        assert_eq!(find(&leases, USER, "other"), Some(CachedEntry::Absent));
        assert_eq!(leases.attributes(DIRECTORY, NOW), Some(1));
    }

    #[test]
    fn what_other_users_knew_of_a_changed_name_goes() {
        let mut leases = new_directory();
        let ticket = leases.ask(DIRECTORY);
        for name in [&b"file"[..], b"other"] {
            leases.learn_entry(ticket, DIRECTORY, false, OTHER, name, None);
        }
        change(&mut leases, b"file", NewName::Unknown);
        assert_eq!(leases.entry(DIRECTORY, OTHER, b"file", NOW), None);
        assert_eq!(leases.entry(DIRECTORY, OTHER, b"other", NOW), Some(CachedEntry::Absent));
        assert_eq!(leases.name_count, 2);
        leases.forget(DIRECTORY);
        assert_eq!(leases.name_count, 0);
    }

    #[test]
    fn nothing_is_kept_through_two_changes_at_once_a_recall_or_a_new_session() {
        let spoil: [fn(&mut Leases<u64>); 4] = [
            |leases| _ = leases.begin_change(&[DIRECTORY], Some(DIRECTORY), NOW),
            |leases| _ = leases.recalled(DIRECTORY, NOW),
            Leases::recalled_unknown,
            |leases| leases.begin_session(2),
        ];
        for spoil in spoil {
            let mut leases = new_directory();
            leases.begin_change(&[DIRECTORY], Some(DIRECTORY), NOW);
            spoil(&mut leases);
            let changed = NamesChanged { directory: DIRECTORY, version: 6, attributes: 1, user: USER, names: &[] };
            leases.end_change(&[DIRECTORY], Some(changed), NOW);
            leases.answered(2, NOW, NOW + Duration::from_millis(1));
            assert!(!leases.has_lease(DIRECTORY) && leases.entry(DIRECTORY, USER, b"file", NOW).is_none());
        }
    }
}
