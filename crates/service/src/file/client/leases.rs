//! The state that a client of a share may use without asking: attributes, entries, and the pages in its kernel's cache.
//!
//! Pure: time is an argument. A lease on a node comes with an answer, and counts from when the last answered message was
//! *sent*. The contents of an answer are kept only if the lease was held from when the server read them until now. An answer
//! that was overtaken by a recall, a change of this client, or the end of the session is given to its caller and not kept.
//!
//! The kernel asks for attributes before each read through its page cache (its attributes are never valid), and that is
//! where pages are checked: [`Leases::has_fresh_pages`] says whether all pages of a node were read under a lease that is
//! still held. If not, they are dropped before the attributes are answered ([`Leases::begin_drop`]). A recall drops them
//! too, before it is answered.
//!
//! `A` is the type of a file's attributes.

use std::collections::HashMap;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use crate::limits::{FILE_ENTRIES_CACHED_MAX, FILE_LEASE_RENEWAL, FILE_LEASE_USE};

/// A call under way that reads: what was held when it was sent.
#[derive(Clone, Copy, Debug)]
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
        /// The pages that are there are good.
        keep: bool,
    },
}

/// A name that is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedEntry<A> {
    /// No file has it.
    Absent,
    /// This node has it.
    Node(u64, A),
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
    /// Open files that may write.
    writers: u32,
}

#[derive(Debug)]
struct Node<A> {
    /// The lease and its session.
    lease: Option<(u64, u64)>,
    /// When what was known of it was last given up.
    event: u64,
    /// Changes of this client that are under way.
    changes: u32,
    attributes: Option<A>,
    entries: HashMap<Vec<u8>, Option<u64>>,
    pages: Pages,
}

impl<A> Default for Node<A> {
    fn default() -> Self {
        Self { lease: None, event: 0, changes: 0, attributes: None, entries: HashMap::new(), pages: Pages::default() }
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
    entry_count: usize,
}

impl<A> Default for Leases<A> {
    fn default() -> Self {
        let nodes = HashMap::new();
        Self { nodes, epoch: 0, until: Instant::ZERO, events: 0, unknown_event: 0, entry_count: 0 }
    }
}

impl<A: Clone> Leases<A> {
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
        self.nodes.values().any(|node| node.lease.is_some_and(|(epoch, _)| epoch == self.epoch))
    }

    /// A call that reads a node is sent.
    pub fn ask(&self, node: u64) -> Ticket {
        let version = self.nodes.get(&node).and_then(|node| node.lease).filter(|lease| lease.0 == self.epoch);
        Ticket { epoch: self.epoch, event: self.events, version: version.map(|lease| lease.1) }
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
        let (epoch, valid) = (self.epoch, now < self.until);
        let known = self.node(node);
        if known.changes > 0 && !seeded::is(Bug::LeaseDuringOwnChange) {
            return;
        }
        let held = known.lease.filter(|lease| lease.0 == epoch).map(|lease| lease.1);
        let kept =
            granted.or(held.filter(|held| Some(*held) == ticket.version || seeded::is(Bug::AttributesBeforeLease)));
        let Some(version) = kept else { return };
        if held != Some(version) {
            // Nothing of an earlier lease counts, also not pages, or reads of some that are under way.
            known.pages.untrusted |= known.pages.filled && !seeded::is(Bug::PagesOfEarlierLease);
            let cleared = known.clear();
            self.entry_count -= cleared;
        }
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.lease = Some((epoch, version));
        if valid && attributes.is_some() {
            known.attributes = attributes;
        }
    }

    /// Keeps what an answer says of a name, if the directory's lease is held since then: call [`Leases::learn`] for the directory
    /// before. `child` is `None` where there is no such name.
    pub fn learn_entry(&mut self, ticket: Ticket, directory: u64, granted: bool, name: &[u8], child: Option<u64>) {
        let overtaken = ticket.epoch != self.epoch || self.event_of(directory) > ticket.event;
        if (overtaken && !seeded::is(Bug::LeaseAfterRecall)) || self.entry_count >= FILE_ENTRIES_CACHED_MAX {
            return;
        }
        let epoch = self.epoch;
        let Some(known) = self.nodes.get_mut(&directory).filter(|node| node.changes == 0) else { return };
        let Some((_, version)) = known.lease.filter(|lease| lease.0 == epoch) else { return };
        if granted || ticket.version == Some(version) {
            self.entry_count += usize::from(known.entries.insert(name.to_vec(), child).is_none());
        }
    }

    fn node(&mut self, node: u64) -> &mut Node<A> {
        self.nodes.entry(node).or_default()
    }

    fn event_of(&self, node: u64) -> u64 {
        self.nodes.get(&node).map_or(0, |node| node.event).max(self.unknown_event)
    }

    /// Whether a lease on the node holds now.
    pub fn is_leased(&self, node: u64, now: Instant) -> bool {
        self.nodes.get(&node).is_some_and(|node| self.holds(node, now))
    }

    fn holds(&self, node: &Node<A>, now: Instant) -> bool {
        let busy = node.changes > 0 && !seeded::is(Bug::LeaseDuringOwnChange);
        node.lease.is_some_and(|lease| lease.0 == self.epoch) && now < self.until && !busy
    }

    /// The attributes of a node, if they may be believed.
    pub fn attributes(&self, node: u64, now: Instant) -> Option<A> {
        self.nodes.get(&node).filter(|node| self.holds(node, now))?.attributes.clone()
    }

    /// What a directory has under a name, if that may be believed.
    pub fn entry(&self, directory: u64, name: &[u8], now: Instant) -> Option<CachedEntry<A>> {
        let known = self.nodes.get(&directory).filter(|node| self.holds(node, now))?;
        match known.entries.get(name)? {
            None => Some(CachedEntry::Absent),
            Some(child) => Some(CachedEntry::Node(*child, self.attributes(*child, now)?)),
        }
    }

    /// This client is about to change nodes: nothing of them is believed, from before the call is sent until it has ended.
    pub fn begin_change(&mut self, nodes: &[u64]) {
        for node in nodes {
            self.node(*node).changes += 1;
            if !seeded::is(Bug::LeaseDuringOwnChange) {
                self.give_up(*node);
            }
        }
    }

    /// The call has ended, as far as this client knows.
    pub fn end_change(&mut self, nodes: &[u64]) {
        for node in nodes {
            self.give_up(*node);
            if let Some(known) = self.nodes.get_mut(node) {
                known.changes -= 1;
            }
        }
    }

    /// A lease is recalled. True if the kernel's pages are to be dropped ([`Leases::begin_drop`]) before that is answered.
    pub fn recalled(&mut self, node: u64) -> bool {
        if !self.nodes.contains_key(&node) {
            self.recalled_unknown();
            return false;
        }
        let Some(pages) = self.give_up(node) else { return false };
        if seeded::is(Bug::RecallBeforeInvalidation) {
            return false;
        }
        pages.writers == 0 && (pages.filled || pages.dropping > 0)
    }

    /// A lease on a node is recalled that this client does not know: it may have been granted with an answer that comes yet.
    pub fn recalled_unknown(&mut self) {
        self.events += 1;
        self.unknown_event = self.events;
    }

    fn give_up(&mut self, node: u64) -> Option<&Pages> {
        self.events += 1;
        let known = self.nodes.get_mut(&node)?;
        known.event = self.events;
        known.lease = None;
        self.entry_count -= known.clear();
        known.pages.untrusted |= !seeded::is(Bug::RecallBeforeInvalidation);
        Some(&known.pages)
    }

    /// A node is not used any more.
    pub fn forget(&mut self, node: u64) {
        if let Some(mut known) = self.nodes.remove(&node) {
            self.entry_count -= known.clear();
            self.unknown_event = self.unknown_event.max(known.event);
        }
    }

    /// A file is to be opened for writing, or a write of it begins: pages are not believed while it is.
    pub fn begin_writer(&mut self, node: u64) {
        let known = self.node(node);
        known.pages.writers += 1;
        known.pages.untrusted = true;
    }

    /// It was closed, or not opened.
    pub fn end_writer(&mut self, node: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.writers = known.pages.writers.saturating_sub(1);
            known.pages.untrusted = true;
        }
    }

    /// A file was opened for reading: how its reads go from now on, until [`Leases::end_reader`].
    pub fn begin_reader(&mut self, node: u64, now: Instant) -> OpenMode {
        let leased = self.is_leased(node, now);
        let keep = self.has_fresh_pages(node, now);
        match self.nodes.get_mut(&node) {
            Some(known) if leased && known.pages.writers == 0 => {
                known.pages.cached += 1;
                OpenMode::Cached { keep }
            }
            _ => OpenMode::Direct,
        }
    }

    /// A file that reads through the cache was closed.
    pub fn end_reader(&mut self, node: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.cached = known.pages.cached.saturating_sub(1);
        }
    }

    /// A read for the page cache is sent.
    pub fn begin_read(&mut self, node: u64, now: Instant) -> PageRead {
        let leased = self.is_leased(node, now);
        let known = self.node(node);
        let leased = leased && known.pages.writers == 0;
        known.pages.filled = true;
        known.pages.untrusted |= !leased;
        PageRead { epoch: self.epoch, event: self.events, leased }
    }

    /// Its bytes are about to be given to the kernel. False if they should be dropped there soon: they may be old by then.
    pub fn end_read(&mut self, node: u64, read: PageRead, now: Instant) -> bool {
        let held = self.is_leased(node, now) && read.epoch == self.epoch && self.event_of(node) <= read.event;
        let good = read.leased && held;
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

    /// Whether a node has open files that read through the cache.
    pub fn has_readers(&self, node: u64) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.pages.cached > 0)
    }

    /// The kernel is about to be told to drop all pages of a node.
    pub fn begin_drop(&mut self, node: u64) {
        let pages = &mut self.node(node).pages;
        (pages.untrusted, pages.filled) = (false, false);
        pages.dropping += 1;
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
    /// Forgets attributes and entries; gives how many entries.
    fn clear(&mut self) -> usize {
        self.attributes = None;
        std::mem::take(&mut self.entries).len()
    }
}
