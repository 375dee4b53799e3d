//! Sizes of files that are read through the page cache.
//!
//! Linux fills the rest of a page with zeroes where a read of it ends, and takes this for the file's end unless it was told another
//! size while it read (`fuse_read_update_size`). A program that reads by the other size gets the zeroes for the file's bytes. So
//! while a file is open for reading through the cache,
//!
//! - the kernel is told a size only under a lease, behind which no other client has changed the file ([`Leases::wants_sure_size`]),
//! - a read that ends before the size that the kernel knows is made again, for a while ([`Leases::ends_early`]),
//! - pages that were read before a write of this client's own go before the kernel knows that the file has grown.
//!
//! A file that this client truncates is opened past the cache for a while.

use std::time::Duration;

use byway_reactor::Instant;

use super::Leases;
use crate::limits::{FILE_CONTENDED_TIME, FILE_EARLY_END_TIME_MAX, FILE_RESIZE_SETTLED, FILE_RESIZE_TIME_MAX};

/// The size of a file as the kernel knows it, in bytes.
#[derive(Debug, Default)]
pub(super) struct KernelSize {
    /// What it was told last.
    told: u64,
    /// Truncations by this client that are not answered.
    resizes: u32,
    /// The kernel was told this size by the answer to a truncation, which its thread may not have taken yet.
    resized: Option<(Instant, u64)>,
}

impl KernelSize {
    /// The longest size that the kernel may read by.
    fn longest(&self, now: Instant) -> u64 {
        match self.resized {
            Some((at, size)) if self.resizes == 0 && now >= at + FILE_RESIZE_SETTLED => size,
            _ => self.told,
        }
    }

    /// The kernel's thread has gone on since the last truncation.
    fn settle(&mut self) {
        if self.resizes == 0
            && let Some((_, size)) = self.resized.take()
        {
            self.told = size;
        }
    }
}

impl<A: Clone> Leases<A> {
    /// The kernel is told a file's size with its attributes. It ignores that while it truncates the file (`FUSE_I_SIZE_UNSTABLE`).
    pub fn told_size(&mut self, node: u64, size: u64, now: Instant) {
        if let Some(known) = self.nodes.get_mut(&node) {
            let kernel = &mut known.pages.size;
            kernel.told = kernel.longest(now);
            if kernel.resizes > 0 || kernel.resized.is_some_and(|(at, _)| now < at + FILE_RESIZE_SETTLED) {
                kernel.told = kernel.told.max(size);
            } else {
                (kernel.told, kernel.resized) = (size, None);
            }
        }
    }

    /// This client writes to a file up to an offset: the kernel has taken the answer to a truncation before.
    pub fn written_to(&mut self, node: u64, end: u64) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.size.settle();
            known.pages.size.told = known.pages.size.told.max(end);
        }
    }

    /// This client is about to change a file's size to one that may be shorter.
    pub fn begin_resize(&mut self, node: u64, now: Instant) {
        let known = self.node(node);
        known.pages.size.settle();
        known.pages.size.resizes += 1;
        known.contended_until = now + FILE_CONTENDED_TIME;
    }

    /// The kernel was answered.
    pub fn end_resize(&mut self, node: u64, size: Option<u64>, now: Instant) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.pages.size.resizes = known.pages.size.resizes.saturating_sub(1);
            known.pages.size.resized = size.map(|size| (now, size)).or(known.pages.size.resized);
        }
    }

    /// For how long a read for the page cache is made again that should end at `asked_end` and ends at `end`: `None` if that is not
    /// before the size that the kernel may read by.
    pub fn ends_early(&self, node: u64, asked_end: u64, end: u64, now: Instant) -> Option<Duration> {
        let known = self.nodes.get(&node).filter(|known| known.pages.cached > 0)?;
        let size = &known.pages.size;
        let is_early = end < asked_end.min(size.longest(now));
        let is_own = size.resizes > 0 || size.resized.is_some();
        is_early.then_some(if is_own { FILE_RESIZE_TIME_MAX } else { FILE_EARLY_END_TIME_MAX })
    }

    /// Whether a node is read through the cache, and a lease on it can be had and is not held: its size may change before the kernel
    /// has read by it.
    pub fn wants_sure_size(&self, node: u64, now: Instant) -> bool {
        self.nodes.get(&node).is_some_and(|known| known.pages.cached > 0) && self.wants_lease(node, now)
    }
}

#[cfg(test)]
mod tests {
    use super::super::OpenMode;
    use super::*;

    const FILE: u64 = 7;

    fn at(milliseconds: u64) -> Instant {
        Instant::from_nanos((1_000_000 + milliseconds) * 1_000_000)
    }

    /// Takes a lease on the file, and a size with it.
    fn learn(leases: &mut Leases<u64>, size: u64, now: Instant) {
        leases.answered(1, now, now);
        leases.learn(leases.ask(FILE), FILE, Some(now.nanos()), Some(size), now);
        leases.told_size(FILE, size, now);
    }

    /// A file of 100 bytes that is open for reading through the cache.
    fn read_through_cache() -> Leases<u64> {
        let mut leases = Leases::default();
        leases.begin_session(1);
        learn(&mut leases, 100, at(0));
        assert!(matches!(leases.begin_reader(FILE, at(0)), OpenMode::Cached { .. }));
        leases
    }

    #[test]
    fn a_read_that_ends_where_the_kernel_knows_the_end_is_not_early() {
        let mut leases = read_through_cache();
        assert_eq!(leases.ends_early(FILE, 4096, 100, at(1)), None);
        assert_eq!(leases.ends_early(FILE, 50, 50, at(1)), None);
        assert_eq!(leases.ends_early(FILE, 4096, 99, at(1)), Some(FILE_EARLY_END_TIME_MAX));
        leases.end_reader(FILE);
        assert_eq!(leases.ends_early(FILE, 4096, 0, at(1)), None, "no page of it is read by a call");
    }

    #[test]
    fn a_read_during_a_truncation_is_early_until_the_kernel_has_taken_the_answer() {
        let mut leases = read_through_cache();
        let early = |leases: &Leases<u64>, now| leases.ends_early(FILE, 4096, 0, now);
        leases.begin_resize(FILE, at(1));
        assert_eq!(early(&leases, at(2)), Some(FILE_RESIZE_TIME_MAX));
        leases.told_size(FILE, 0, at(2));
        assert_eq!(early(&leases, at(2)), Some(FILE_RESIZE_TIME_MAX), "it ignores a size meanwhile");
        leases.end_resize(FILE, Some(0), at(3));
        assert_eq!(early(&leases, at(4)), Some(FILE_RESIZE_TIME_MAX), "its thread may not have run yet");
        assert_eq!(early(&leases, at(3) + FILE_RESIZE_SETTLED), None);
        // A write comes when the thread has run, and makes the file longer.
        leases.written_to(FILE, 40);
        assert_eq!(leases.ends_early(FILE, 4096, 40, at(5)), None);
        assert_eq!(early(&leases, at(5)), Some(FILE_EARLY_END_TIME_MAX));
        // One that failed changes nothing.
        leases.begin_resize(FILE, at(6));
        leases.end_resize(FILE, None, at(7));
        assert_eq!(leases.ends_early(FILE, 4096, 40, at(8)), None);
    }

    #[test]
    fn a_file_that_is_truncated_is_opened_past_the_cache_for_a_while() {
        let mut leases = read_through_cache();
        leases.begin_resize(FILE, at(1));
        leases.end_resize(FILE, Some(0), at(2));
        learn(&mut leases, 0, at(3));
        assert_eq!(leases.begin_reader(FILE, at(4)), OpenMode::Direct);
        assert!(matches!(leases.begin_reader(FILE, at(1) + FILE_CONTENDED_TIME), OpenMode::Cached { .. }));
    }

    #[test]
    fn a_size_is_sure_under_a_lease() {
        let mut leases = read_through_cache();
        assert!(!leases.wants_sure_size(FILE, at(1)));
        leases.recalled(FILE, at(2));
        assert!(leases.wants_sure_size(FILE, at(3)));
        leases.refused(FILE, at(4));
        assert!(!leases.wants_sure_size(FILE, at(5)), "none is to be had now");
        learn(&mut leases, 100, at(6));
        leases.begin_change(&[FILE], None, at(7));
        assert!(leases.wants_sure_size(FILE, at(5) + FILE_CONTENDED_TIME), "this mount is changing it");
        leases.end_change(&[FILE], None, at(7));
        learn(&mut leases, 60, at(2000));
        assert!(!leases.wants_sure_size(FILE, at(2001)));
        leases.recalled(FILE, at(2002));
        leases.end_reader(FILE);
        assert!(!leases.wants_sure_size(FILE, at(2003)), "nobody reads it through the cache");
    }
}
