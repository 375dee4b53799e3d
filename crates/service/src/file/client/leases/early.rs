//! Reads whose bytes come before the kernel asks for them.

use byway_reactor::Instant;

use super::{Leases, PageRead};

impl<A: Clone> Leases<A> {
    /// A call is sent whose answer may bring bytes that the kernel has not asked for yet.
    pub fn begin_early_read(&self, node: u64, now: Instant) -> PageRead {
        let has_writers = self.nodes.get(&node).is_some_and(|node| node.pages.writers > 0);
        PageRead { epoch: self.epoch, event: self.events, leased: !has_writers && self.is_leased(node, now) }
    }

    /// Whether the bytes of a read are those that the file has now.
    pub fn is_fresh(&self, node: u64, read: PageRead, now: Instant) -> bool {
        let held = self.is_leased(node, now) && read.epoch == self.epoch && self.event_of(node) <= read.event;
        read.leased && held
    }
}
