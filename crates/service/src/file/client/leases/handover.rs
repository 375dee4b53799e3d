//! What the kernel of a mount has cached, as another process and operators are told.

use super::Leases;

impl<A: Clone> Leases<A> {
    /// Whether the server has given a lease once.
    pub fn has_granted(&self) -> bool {
        self.granted
    }

    /// How many leases are held.
    pub fn count(&self) -> usize {
        self.nodes.values().filter(|node| node.lease.is_some_and(|lease| lease.epoch == self.epoch)).count()
    }

    /// Nodes of which the kernel may have pages.
    pub fn filled(&self) -> Vec<u64> {
        let filled = self.nodes.iter().filter(|(_, node)| node.pages.filled || node.pages.dropping > 0);
        filled.map(|(number, _)| *number).collect()
    }

    /// The kernel has pages of a node that were read under no lease of this process.
    pub fn take_over_pages(&mut self, node: u64) {
        let pages = &mut self.node(node).pages;
        (pages.filled, pages.untrusted) = (true, true);
    }

    /// A file is open for reading, through the page cache or past it.
    pub fn take_over_reader(&mut self, node: u64, cached: bool) {
        let pages = &mut self.node(node).pages;
        *(if cached { &mut pages.cached } else { &mut pages.direct }) += 1;
    }

    /// The server of the process before has given leases.
    pub fn take_over_granted(&mut self) {
        self.granted = true;
    }
}
