//! The state that a client of a share may use without asking: attributes, entries, and the pages in its kernel's cache.
//!
//! Pure: time is an argument. A lease on a node comes with an answer, and counts from when the last answered message was
//! *sent*. The contents of an answer are kept only if the lease was held from when the server read them until now. An answer
//! that was overtaken by a recall, a change of this client, or the end of the session is given to its caller and not kept.
//!
//! The kernel may use attributes without asking for as long as [`Leases::believed`] says: at most until the lease ends if it is not
//! renewed. A recall, a change of this client's own and the end of the session invalidate them before.
//!
//! Before a read through its page cache the kernel asks for attributes that are not valid, and that is where pages are checked:
//! [`Leases::has_fresh_pages`] says whether all pages of a node were read under a lease that holds. If not, they are dropped before
//! the attributes are answered ([`Leases::begin_drop`]), and the kernel gets no valid attributes before. So valid attributes say that
//! the pages are fresh, too. A recall drops pages before it is answered. Listings of directories are pages of these.
//!
//! `A` is the type of a file's attributes.

mod early;
mod handover;
mod names;
mod open_files;
mod own_changes;
mod sizes;

use std::collections::HashMap;
use std::time::Duration;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use self::names::Names;
pub use self::names::{CachedEntry, NewName};
use self::own_changes::Suspended;
pub use self::own_changes::{FileChanged, NameChange, NamesChanged};
use self::sizes::KernelSize;
use crate::limits::{
    FILE_ATTRIBUTES_LATE_MAX, FILE_CONTENDED_TIME, FILE_FACTS_CACHED_MAX, FILE_LEASE_RENEWAL, FILE_LEASE_USE,
};

/// A call under way that reads: what was held when it was sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ticket {
    epoch: u64,
    event: u64,
    version: Option<u64>,
}

impl Ticket {
    /// For a node that the answer has found: nothing of it was held when the call was sent, for all that is known.
    #[must_use]
    pub fn of_found(self) -> Self {
        Self { version: None, ..self }
    }
}

/// A read for the page cache under way.
#[derive(Clone, Copy, Debug)]
pub struct PageRead {
    epoch: u64,
    event: u64,
    leased: bool,
}

/// How a file is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads and writes ask the server.
    Direct,
    /// Reads go through the page cache.
    Cached {
        /// Opening drops no pages: those that are there are fresh.
        keep: bool,
    },
}

/// What a call has shown of a user and a node, for as long as the node does not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The user has these rights: bits of `access(2)`.
    Right(u32),
    /// The node has no extended attribute of this name.
    NoXattr(Vec<u8>),
    /// A list of the node's extended attributes is empty for the user.
    NoXattrs,
}

/// What the kernel has to drop of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// Attributes that it may use without asking.
    Attributes,
    /// These and all pages: [`Leases::begin_drop`] is called before, [`Leases::end_drop`] after.
    Pages,
}

#[derive(Debug, Default)]
struct Pages {
    /// Pages were read, or are being read, since they were last dropped.
    filled: bool,
    /// Some of them without a lease, or under one that has ended.
    untrusted: bool,
    /// Drops under way.
    dropping: u32,
    /// Open files that read through the cache.
    cached: u32,
    /// Open files that read past it. Programs may map them, and then have pages, too.
    direct: u32,
    /// Open files that may write.
    writers: u32,
    size: KernelSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeldLease {
    /// The session that it counts in.
    epoch: u64,
    version: u64,
}

#[derive(Debug)]
struct Node<A> {
    lease: Option<HeldLease>,
    /// When what was known of it was last given up.
    event: u64,
    /// Changes of this client that are under way.
    changes: u32,
    attributes: Option<A>,
    names: Names,
    /// The client has begun a change of its own that may leave names or facts as they are, and nothing else has changed the node since.
    suspended: Option<Suspended>,
    /// By user.
    facts: Vec<(Vec<u32>, Fact)>,
    pages: Pages,
    /// Until when the kernel may use attributes without asking; 0 if it was given none since the last session's end.
    kernel_until: Instant,
    /// Until when files are opened past the cache: others change it.
    contended_until: Instant,
    /// Until when no lease is asked for: the server has given none.
    refused_until: Instant,
}

impl<A> Default for Node<A> {
    fn default() -> Self {
        Self {
            lease: None,
            event: 0,
            changes: 0,
            attributes: None,
            names: Names::default(),
            suspended: None,
            facts: Vec::new(),
            pages: Pages::default(),
            kernel_until: Instant::ZERO,
            contended_until: Instant::ZERO,
            refused_until: Instant::ZERO,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Leases<A> {
    nodes: HashMap<u64, Node<A>>,
    epoch: u64,
    /// Until when the session's leases hold.
    until: Instant,
    /// Counts recalls, own changes and sessions.
    events: u64,
    /// The last event that may have been of any node: what was asked before is not kept.
    unknown_event: u64,
    name_count: usize,
    /// The server has given a lease once.
    granted: bool,
}

impl<A> Default for Leases<A> {
    fn default() -> Self {
        let nodes = HashMap::new();
        Self { nodes, epoch: 0, until: Instant::ZERO, events: 0, unknown_event: 0, name_count: 0, granted: false }
    }
}

impl<A: Clone> Leases<A> {
    /// The session has ended. Gives what the kernel has to drop before the next one begins: the server takes the leases for returned
    /// then. Pages of mapped files may go after that.
    ///
    /// Attributes are dropped whatever the time is: the kernel counts from when it takes them, and this process may have been stopped
    /// before.
    pub fn end_session(&mut self) -> Vec<(u64, Invalid)> {
        self.begin_session(0);
        let mut invalid = Vec::new();
        for (number, node) in &mut self.nodes {
            let given = std::mem::take(&mut node.kernel_until) != Instant::ZERO;
            let attributes = given && !seeded::is(Bug::KernelAttributesOfOldSession);
            if node.pages.is_mapped_perhaps() {
                invalid.push((*number, Invalid::Pages));
            } else if attributes {
                invalid.push((*number, Invalid::Attributes));
            }
        }
        invalid
    }

    /// Nodes whose pages programs may have mapped although they are not fresh: the pages are to be dropped.
    pub fn stale_mapped(&self, now: Instant) -> Vec<u64> {
        self.nodes.iter().filter(|(_, node)| self.maps_stale(node, now)).map(|(number, _)| *number).collect()
    }

    /// Whether that is so of a node.
    pub fn has_stale_mapped(&self, node: u64, now: Instant) -> bool {
        self.nodes.get(&node).is_some_and(|node| self.maps_stale(node, now))
    }

    /// A server that gives no leases recalls none: there pages stay.
    fn maps_stale(&self, node: &Node<A>, now: Instant) -> bool {
        self.granted && node.pages.is_mapped_perhaps() && (node.pages.untrusted || !self.holds(node, now))
    }

    /// Nodes of which the kernel was given attributes.
    pub fn given(&self) -> Vec<u64> {
        let given = |node: &Node<A>| node.kernel_until != Instant::ZERO;
        self.nodes.iter().filter(|(_, node)| given(node)).map(|(number, _)| *number).collect()
    }

    /// Whether the client knows a node.
    pub fn is_known(&self, node: u64) -> bool {
        self.nodes.contains_key(&node)
    }

    /// How long the session's leases hold if nothing renews them.
    pub fn remaining(&self, now: Instant) -> Duration {
        self.until.since(now)
    }

    /// In how long [`Leases::needs_renewal`] is so; `None` without leases.
    pub fn renewal_in(&self, now: Instant) -> Option<Duration> {
        self.has_leases().then(|| (self.until + FILE_LEASE_RENEWAL).since(now + FILE_LEASE_USE))
    }

    /// A session begins: leases of earlier ones are over.
    pub fn begin_session(&mut self, epoch: u64) {
        if seeded::is(Bug::LeaseOfOldSession) && self.epoch != 0 {
            return;
        }
        (self.epoch, self.until) = (epoch, Instant::ZERO);
        self.events += 1;
        self.unknown_event = self.events;
    }

    /// A message of a session that was sent at `sent` was answered.
    pub fn answered(&mut self, epoch: u64, sent: Instant, now: Instant) {
        let from = if seeded::is(Bug::LeaseFromAnswer) { now } else { sent };
        if epoch == self.epoch || seeded::is(Bug::LeaseOfOldSession) {
            self.until = self.until.max(from + FILE_LEASE_USE);
        }
    }

    /// Whether leases are held and no message was answered for [`FILE_LEASE_RENEWAL`].
    pub fn needs_renewal(&self, now: Instant) -> bool {
        now + FILE_LEASE_USE > self.until + FILE_LEASE_RENEWAL && self.has_leases()
    }

    /// Whether any lease is held, which has to be renewed.
    pub fn has_leases(&self) -> bool {
        self.nodes.values().any(|node| node.lease.is_some_and(|lease| lease.epoch == self.epoch))
    }

    /// A call that reads a node is sent.
    pub fn ask(&self, node: u64) -> Ticket {
        let version = self.nodes.get(&node).and_then(|node| node.lease).filter(|lease| lease.epoch == self.epoch);
        Ticket { epoch: self.epoch, event: self.events, version: version.map(|lease| lease.version) }
    }

    /// Takes a lease from an answer, and with it the attributes that the answer has. `granted` is the version, if a lease came with
    /// it. The ticket is that of the call, which was about this node or found it.
    pub fn learn(&mut self, ticket: Ticket, node: u64, granted: Option<u64>, attributes: Option<A>, now: Instant) {
        let overtaken = ticket.epoch != self.epoch || self.event_of(node) > ticket.event;
        if overtaken && !seeded::is(Bug::LeaseAfterRecall) {
            return;
        }
        if granted.is_none() && !self.nodes.contains_key(&node) {
            return;
        }
        self.granted |= granted.is_some();
        let (epoch, valid) = (self.epoch, now < self.until);
        let known = self.node(node);
        if known.changes > 0 && !seeded::is(Bug::LeaseDuringOwnChange) {
            return;
        }
        let held = known.lease.filter(|lease| lease.epoch == epoch).map(|lease| lease.version);
        let kept =
            granted.or(held.filter(|held| Some(*held) == ticket.version || seeded::is(Bug::AttributesBeforeLease)));
        let Some(version) = kept else { return };
        if held != Some(version) {
            // Nothing of an earlier lease counts, also not pages, or reads of some that are under way.
            known.pages.untrusted |= known.pages.filled && !seeded::is(Bug::PagesOfEarlierLease);
            let cleared = known.clear();
            self.name_count -= cleared;
        }
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.lease = Some(HeldLease { epoch, version });
        if valid && attributes.is_some() {
            known.attributes = attributes;
        }
    }

    fn node(&mut self, node: u64) -> &mut Node<A> {
        self.nodes.entry(node).or_default()
    }

    fn event_of(&self, node: u64) -> u64 {
        self.nodes.get(&node).map_or(0, |node| node.event).max(self.unknown_event)
    }

    /// Whether the node has a lease of this session, which answers may prolong.
    pub fn has_lease(&self, node: u64) -> bool {
        self.nodes.get(&node).and_then(|node| node.lease).is_some_and(|lease| lease.epoch == self.epoch)
    }

    /// Whether a lease on the node holds now.
    pub fn is_leased(&self, node: u64, now: Instant) -> bool {
        self.nodes.get(&node).is_some_and(|node| self.holds(node, now))
    }

    fn holds(&self, node: &Node<A>, now: Instant) -> bool {
        let busy = node.changes > 0 && !seeded::is(Bug::LeaseDuringOwnChange);
        node.lease.is_some_and(|lease| lease.epoch == self.epoch) && now < self.until && !busy
    }

    /// The attributes of a node, if they may be believed.
    pub fn attributes(&self, node: u64, now: Instant) -> Option<A> {
        self.nodes.get(&node).filter(|node| self.holds(node, now))?.attributes.clone()
    }

    /// The attributes of a node if they may be believed, and for how long the kernel may use them without asking.
    pub fn believed(&mut self, node: u64, now: Instant) -> Option<(A, Duration)> {
        let attributes = self.attributes(node, now)?;
        let fresh = self.has_fresh_pages(node, now) || seeded::is(Bug::KernelAttributesWithStalePages);
        let until = if seeded::is(Bug::KernelAttributesBeyondLease) { now + FILE_LEASE_USE } else { self.until };
        let known = self.nodes.get_mut(&node)?;
        // Reads while it is open for writing may leave pages that a recall does not drop.
        if !fresh || known.pages.writers > 0 {
            return Some((attributes, Duration::ZERO));
        }
        known.kernel_until = known.kernel_until.max(until);
        Some((attributes, until.since(now)))
    }

    /// A user's call with the ticket has shown something of a node.
    pub fn learn_fact(&mut self, ticket: Ticket, node: u64, user: &[u32], fact: Fact) {
        if ticket.epoch != self.epoch || self.event_of(node) > ticket.event {
            return;
        }
        if let Some(version) = ticket.version {
            self.learn_fact_of_found(node, version, user, fact);
        }
    }

    /// A user's call has shown something of a node that its answer gave a lease on, with this version.
    pub fn learn_fact_of_found(&mut self, node: u64, version: u64, user: &[u32], fact: Fact) {
        let held = HeldLease { epoch: self.epoch, version };
        let is_held = |node: &&mut Node<A>| node.lease == Some(held) && node.changes == 0;
        let Some(known) = self.nodes.get_mut(&node).filter(is_held) else { return };
        if known.facts.len() < FILE_FACTS_CACHED_MAX && !known.facts.iter().any(|one| one.0 == user && one.1 == fact) {
            known.facts.push((user.to_vec(), fact));
        }
    }

    /// Whether something is known of a user and a node.
    pub fn knows(&self, node: u64, user: &[u32], fact: &Fact, now: Instant) -> bool {
        let Some(known) = self.nodes.get(&node).filter(|node| self.holds(node, now)) else { return false };
        known.facts.iter().any(|(other, known)| other == user && known.implies(fact))
    }

    /// A lease is recalled. Gives what the kernel has to drop before that is answered.
    pub fn recalled(&mut self, node: u64, now: Instant) -> Option<Invalid> {
        if !self.nodes.contains_key(&node) {
            self.recalled_unknown();
            return None;
        }
        let is_suspended = self.nodes.get(&node).is_some_and(|known| known.suspended.is_some());
        if !is_suspended || !seeded::is(Bug::NamesKeptAfterRecall) {
            self.give_up(node);
        }
        let known = self.nodes.get_mut(&node)?;
        known.contended_until = now + FILE_CONTENDED_TIME;
        let pages = &known.pages;
        // Dirty pages of a mapped file would be written, which may wait for other clients' leases, and they for this one.
        // A read through the cache may be on its way here.
        let has_pages = pages.filled || pages.dropping > 0 || pages.cached > 0;
        let drops_pages = pages.writers == 0 && has_pages;
        let attributes = known.has_kernel_attributes(now) && !seeded::is(Bug::KernelAttributesAfterRecall);
        if drops_pages && !seeded::is(Bug::RecallBeforeInvalidation) {
            return Some(Invalid::Pages);
        }
        attributes.then_some(Invalid::Attributes)
    }

    /// A lease on a node is recalled that this client does not know: it may have been granted with an answer that comes yet.
    pub fn recalled_unknown(&mut self) {
        self.events += 1;
        self.unknown_event = self.events;
    }

    fn give_up(&mut self, node: u64) {
        self.events += 1;
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.event = self.events;
        known.lease = None;
        self.name_count -= known.clear();
        known.pages.untrusted |= known.pages.filled && !seeded::is(Bug::RecallBeforeInvalidation);
    }

    /// A node is not used any more.
    pub fn forget(&mut self, node: u64) {
        if let Some(mut known) = self.nodes.remove(&node) {
            self.name_count -= known.clear();
            self.unknown_event = self.unknown_event.max(known.event);
        }
    }

    /// A read for the page cache is sent.
    pub fn begin_read(&mut self, node: u64, now: Instant) -> PageRead {
        let read = self.begin_early_read(node, now);
        let pages = &mut self.node(node).pages;
        pages.filled = true;
        pages.untrusted |= !read.leased;
        read
    }

    /// Its bytes are about to be given to the kernel. False if they should be dropped there soon: they may be old by then.
    pub fn end_read(&mut self, node: u64, read: PageRead, now: Instant) -> bool {
        let good = self.is_fresh(node, read, now);
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.filled = true;
            known.pages.untrusted |= !good;
        }
        good
    }

    /// Whether every page that the kernel has of a node may be believed.
    pub fn has_fresh_pages(&self, node: u64, now: Instant) -> bool {
        let Some(known) = self.nodes.get(&node) else { return true };
        let pages = &known.pages;
        !pages.untrusted && pages.dropping == 0 && (!pages.filled || self.holds(known, now))
    }

    /// Whether the kernel could read pages of a node that are not fresh: they are to be dropped before its attributes are answered.
    pub fn has_stale_pages(&self, node: u64, now: Instant) -> bool {
        let has_readers = self.nodes.get(&node).is_some_and(|node| node.pages.cached > 0);
        has_readers && !self.has_fresh_pages(node, now)
    }

    /// Whether a lease on a node should be asked for, so that pages that are read from now on stay.
    pub fn wants_lease(&self, node: u64, now: Instant) -> bool {
        let Some(known) = self.nodes.get(&node) else { return false };
        now < self.until && !self.holds(known, now) && now >= known.refused_until
    }

    /// The server was asked for a lease and gave none. Pages without a lease are dropped later then, and not at each read.
    pub fn refused(&mut self, node: u64, now: Instant) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.refused_until = now + FILE_CONTENDED_TIME;
        }
    }

    /// Whether pages that were read without a lease are to be dropped soon.
    pub fn is_drop_due(&self, node: u64, now: Instant) -> bool {
        let refused = self.nodes.get(&node).is_some_and(|node| now < node.refused_until);
        !refused && (self.has_stale_pages(node, now) || self.has_stale_mapped(node, now))
    }

    /// The kernel is about to be told to drop all pages of a node.
    pub fn begin_drop(&mut self, node: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            (known.pages.untrusted, known.pages.filled) = (false, false);
            known.pages.dropping += 1;
        }
    }

    /// It has dropped those that were there when it was told; `false` if it could not.
    pub fn end_drop(&mut self, node: u64, dropped: bool) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.dropping -= 1;
            known.pages.untrusted |= !dropped;
        }
    }
}

impl<A> Node<A> {
    /// Whether the kernel may use attributes without asking. Stays so when it was told to drop them: another thread, for which they
    /// have to go too, cannot know that it has done so. The kernel counts from when it takes them.
    fn has_kernel_attributes(&self, now: Instant) -> bool {
        now < self.kernel_until + FILE_ATTRIBUTES_LATE_MAX
    }

    /// Forgets attributes, names and facts; gives how many names.
    fn clear(&mut self) -> usize {
        self.attributes = None;
        self.suspended = None;
        self.facts.clear();
        self.names.clear()
    }
}

/// Whether every user who lists a file's extended attributes finds those of this name in the list, and may get them. Only users who may read
/// the file get those of `user.`; some file systems leave other names out of lists.
fn is_listed_to_all(name: &[u8]) -> bool {
    name.starts_with(b"security.") || name.starts_with(b"system.posix_acl_")
}

impl Fact {
    fn implies(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Right(all), Self::Right(some)) => all & some == *some,
            (Self::NoXattrs, Self::NoXattr(name)) => is_listed_to_all(name),
            _ => self == other,
        }
    }

    /// Whether no right to the node is needed to ask for it.
    fn is_so_without_rights(&self) -> bool {
        match self {
            Self::Right(_) => false,
            Self::NoXattr(name) => is_listed_to_all(name),
            Self::NoXattrs => true,
        }
    }
}

impl Pages {
    /// Whether programs may have mapped pages. While a file is open for writing, its pages may be dirty and are not dropped.
    fn is_mapped_perhaps(&self) -> bool {
        self.filled && self.cached + self.direct > 0 && self.writers == 0
    }
}
