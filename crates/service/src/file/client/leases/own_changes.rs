//! Changes by this client.
//!
//! A change ends the lease on what it changes, at the server too. One that adds or removes a name leaves a directory's other names as they
//! are; one of a file's data or attributes leaves its extended attributes. The server says so if it was the only change of the directory or
//! file between the lease that ended and a new one: then the client goes on with what it knew, and what its change has done. Of two own
//! changes at the same time it cannot know which was first.

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::{HeldLease, Leases, NewName};

/// The client does not use what it knows of a node until its own change of the node has ended, which may leave some of it as it was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspended {
    epoch: u64,
    event: u64,
}

/// What an own change has done to a directory's names.
#[derive(Clone, Copy, Debug)]
pub struct NameChange<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// What the name leads to now.
    pub new: NewName,
}

/// The answer to an own change of names, after which the server has left the lease on the directory to the client.
#[derive(Clone, Copy, Debug)]
pub struct NamesChanged<'a, A> {
    /// The directory.
    pub directory: u64,
    /// The lease's new version.
    pub version: u64,
    /// The directory's attributes after the change.
    pub attributes: A,
    /// Whose change, if users differ in the names that they may look up.
    pub user: &'a [u32],
    /// What it has done.
    pub names: &'a [NameChange<'a>],
}

/// The answer to an own change of a file's data or attributes, after which the server has left the lease on the file to the client.
#[derive(Clone, Copy, Debug)]
pub struct FileChanged<A> {
    /// The file.
    pub node: u64,
    /// The lease's new version.
    pub version: u64,
    /// Its attributes after the change, if the answer has them.
    pub attributes: Option<A>,
}

impl<A: Clone> Leases<A> {
    /// This client is about to change nodes: nothing of them is believed, from before the call is sent until it has ended. Gives those
    /// whose attributes the kernel has to drop before the call is sent. `kept`: the directory of which names are changed and nothing
    /// else, or the file of which data or attributes are.
    pub fn begin_change(&mut self, nodes: &[u64], kept: Option<u64>, now: Instant) -> Vec<u64> {
        let mut invalid = Vec::new();
        for node in nodes {
            let is_lone = self.node(*node).changes == 0;
            self.node(*node).changes += 1;
            if kept == Some(*node) && is_lone {
                self.suspend(*node);
            } else if !seeded::is(Bug::LeaseDuringOwnChange) {
                self.give_up(*node);
            }
            let kept = seeded::is(Bug::KernelAttributesDuringOwnChange);
            if self.node(*node).has_kernel_attributes(now) && !kept {
                invalid.push(*node);
            }
        }
        invalid
    }

    /// The call has ended, as far as this client knows.
    pub fn end_change(&mut self, nodes: &[u64], changed: Option<NamesChanged<'_, A>>, now: Instant) {
        for node in nodes {
            match &changed {
                Some(changed) if changed.directory == *node => self.resume_names(changed, now),
                _ => self.give_up(*node),
            }
            if let Some(known) = self.nodes.get_mut(node) {
                known.changes -= 1;
            }
        }
    }

    /// A call that changes one file, and nothing else, has ended.
    pub fn end_change_of_file(&mut self, changed: FileChanged<A>, now: Instant) {
        let FileChanged { node, version, attributes } = changed;
        if self.resume(node, version, attributes, now)
            && let Some(known) = self.nodes.get_mut(&node)
        {
            // Attributes say who may do what, and look up which name.
            known.facts.retain(|(_, fact)| fact.is_so_without_rights());
            self.name_count -= known.names.clear();
        }
        if let Some(known) = self.nodes.get_mut(&node) {
            known.changes -= 1;
        }
    }

    fn suspend(&mut self, node: u64) {
        let is_held = self.has_lease(node);
        if !is_held {
            return self.give_up(node);
        }
        self.events += 1;
        let (epoch, event) = (self.epoch, self.events);
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.event = event;
        known.lease = None;
        if !seeded::is(Bug::AttributesKeptThroughOwnChange) {
            known.attributes = None;
        }
        known.suspended = Some(Suspended { epoch, event });
        known.pages.untrusted |= known.pages.filled;
    }

    fn resume_names(&mut self, changed: &NamesChanged<'_, A>, now: Instant) {
        let directory = changed.directory;
        let is_as_before = self.resume(directory, changed.version, Some(changed.attributes.clone()), now);
        if is_as_before && !seeded::is(Bug::OwnChangeOfNamesNotNoted) {
            for NameChange { name, new } in changed.names {
                self.change_name(directory, changed.user, name, *new);
            }
        }
    }

    /// The client uses again what it knew of a node before its own change, unless a recall, another own change or the session's end has come
    /// between: then it forgets that. Gives whether it uses it.
    fn resume(&mut self, node: u64, version: u64, attributes: Option<A>, now: Instant) -> bool {
        let suspended = self.nodes.get(&node).and_then(|known| known.suspended);
        let is_as_before =
            |suspended: &Suspended| suspended.epoch == self.epoch && self.unknown_event <= suspended.event;
        if !suspended.as_ref().is_some_and(is_as_before) {
            self.give_up(node);
            return false;
        }
        self.events += 1;
        let (epoch, event, is_valid) = (self.epoch, self.events, now < self.until);
        let Some(known) = self.nodes.get_mut(&node) else { return false };
        (known.event, known.suspended) = (event, None);
        known.lease = Some(HeldLease { epoch, version });
        if attributes.is_some() || !seeded::is(Bug::AttributesKeptThroughOwnChange) {
            known.attributes = attributes.filter(|_| is_valid);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::Fact;
    use super::*;

    const FILE: u64 = 7;
    const NOW: Instant = Instant::from_nanos(1);

    /// Has a lease, attributes and facts of a file.
    fn leases() -> Leases<u64> {
        let mut leases = Leases::default();
        leases.begin_session(1);
        leases.answered(1, NOW, NOW);
        let ticket = leases.ask(FILE);
        leases.learn(ticket, FILE, Some(5), Some(100), NOW);
        let ticket = leases.ask(FILE);
        for fact in [Fact::Right(4), Fact::NoXattrs, Fact::NoXattr(b"user.mark".to_vec())] {
            leases.learn_fact(ticket, FILE, &[], fact);
        }
        leases
    }

    fn known(leases: &Leases<u64>) -> (Option<u64>, bool, bool) {
        let knows = |fact: &Fact| leases.knows(FILE, &[], fact, NOW);
        (leases.attributes(FILE, NOW), knows(&Fact::Right(4)), knows(&Fact::NoXattrs))
    }

    #[test]
    fn a_change_of_a_file_leaves_its_extended_attributes_and_no_rights() {
        let mut leases = leases();
        assert_eq!(known(&leases), (Some(100), true, true));
        for attributes in [Some(200), None] {
            leases.begin_change(&[FILE], Some(FILE), NOW);
            assert_eq!(known(&leases), (None, false, false), "nothing is believed meanwhile");
            leases.end_change_of_file(FileChanged { node: FILE, version: 6, attributes }, NOW);
            assert_eq!(known(&leases), (attributes, false, true));
            let of_readers = Fact::NoXattr(b"user.mark".to_vec());
            assert!(
                !leases.knows(FILE, &[], &of_readers, NOW),
                "who may not read the file any more gets another error"
            );
        }
    }

    #[test]
    fn of_two_changes_at_once_nothing_stays() {
        let mut leases = leases();
        leases.begin_change(&[FILE], Some(FILE), NOW);
        leases.begin_change(&[FILE], Some(FILE), NOW);
        leases.end_change_of_file(FileChanged { node: FILE, version: 6, attributes: Some(200) }, NOW);
        leases.end_change_of_file(FileChanged { node: FILE, version: 7, attributes: Some(300) }, NOW);
        assert_eq!(known(&leases), (None, false, false));
        assert!(!leases.has_lease(FILE));
    }
}
