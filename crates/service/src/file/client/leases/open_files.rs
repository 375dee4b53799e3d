//! Open files of a node: whether their reads go through the page cache.

use byway_reactor::Instant;

use super::{Leases, OpenMode};

impl<A: Clone> Leases<A> {
    /// A file is to be opened for writing, or a write of it begins: pages are not believed while it is.
    pub fn begin_writer(&mut self, node: u64) {
        let pages = &mut self.node(node).pages;
        pages.writers += 1;
        pages.untrusted |= pages.filled;
    }

    /// It was closed, or not opened.
    pub fn end_writer(&mut self, node: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.writers = known.pages.writers.saturating_sub(1);
            known.pages.untrusted |= known.pages.filled;
        }
    }

    /// A file was opened for reading: how its reads go from now on, until [`Leases::end_reader`] or
    /// [`Leases::end_direct_reader`].
    pub fn begin_reader(&mut self, node: u64, now: Instant) -> OpenMode {
        let leased = self.is_leased(node, now);
        let keep = self.has_fresh_pages(node, now);
        match self.nodes.get_mut(&node) {
            Some(known) if leased && known.pages.writers == 0 && now >= known.contended_until => {
                known.pages.cached += 1;
                OpenMode::Cached { keep }
            }
            _ => {
                self.node(node).pages.direct += 1;
                OpenMode::Direct
            }
        }
    }

    /// A file that reads past the cache was closed.
    pub fn end_direct_reader(&mut self, node: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.direct = known.pages.direct.saturating_sub(1);
        }
    }

    /// A file that reads through the cache was closed.
    pub fn end_reader(&mut self, node: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.cached = known.pages.cached.saturating_sub(1);
        }
    }
}
