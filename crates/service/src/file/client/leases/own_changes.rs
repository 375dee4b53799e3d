//! Changes by this client.
//!
//! A change ends the lease on what it changes, at the server too. One that adds or removes a name leaves a directory's other names as they
//! are. The server says so if it was the directory's only change between the lease that ended and a new one: then the
//! client goes on with what it knew, and what its change has done. Of two own changes at the same time it cannot know which was first.

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::{HeldLease, Leases, NewName};

/// What is known of a directory's names is put aside for an own change.
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

impl<A: Clone> Leases<A> {
    /// This client is about to change nodes: nothing of them is believed, from before the call is sent until it has ended. Gives those
    /// whose attributes the kernel has to drop before the call is sent. `names_of`: the directory of which names are changed and nothing
    /// else.
    pub fn begin_change(&mut self, nodes: &[u64], names_of: Option<u64>, now: Instant) -> Vec<u64> {
        let mut invalid = Vec::new();
        for node in nodes {
            let is_lone = self.node(*node).changes == 0;
            self.node(*node).changes += 1;
            if names_of == Some(*node) && is_lone {
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
                Some(changed) if changed.directory == *node => self.resume(changed, now),
                _ => self.give_up(*node),
            }
            if let Some(known) = self.nodes.get_mut(node) {
                known.changes -= 1;
            }
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
        (known.lease, known.attributes) = (None, None);
        known.suspended = Some(Suspended { epoch, event });
        known.pages.untrusted |= known.pages.filled;
    }

    fn resume(&mut self, changed: &NamesChanged<'_, A>, now: Instant) {
        let directory = changed.directory;
        let suspended = self.nodes.get(&directory).and_then(|known| known.suspended);
        let is_as_before =
            |suspended: &Suspended| suspended.epoch == self.epoch && self.unknown_event <= suspended.event;
        if !suspended.as_ref().is_some_and(is_as_before) {
            return self.give_up(directory);
        }
        self.events += 1;
        let (epoch, event, is_valid) = (self.epoch, self.events, now < self.until);
        let Some(known) = self.nodes.get_mut(&directory) else { return };
        (known.event, known.suspended) = (event, None);
        known.lease = Some(HeldLease { epoch, version: changed.version });
        known.attributes = is_valid.then(|| changed.attributes.clone());
        if !seeded::is(Bug::OwnChangeOfNamesNotNoted) {
            for NameChange { name, new } in changed.names {
                self.change_name(directory, changed.user, name, *new);
            }
        }
    }
}
