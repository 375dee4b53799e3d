//! Which page goes next.
//!
//! Pages go in the order in which they came, but for *hot* ones: a page that was touched while it lay in a frame, just moved out, is one that its
//! program uses again and again. At most half of the pages here are hot; beyond, the one that has been hot the longest waits its turn with the others.
//!
//! A page that could not be moved is set aside, and tried again with all others of them a few times a second. A forked child shares nearly all pages
//! of its parent, and these stay: tried in turn with the others, they took 63 moves for each page that left.

use std::collections::VecDeque;

use super::table::{Entry, Space};
use super::{PageId, Pager};
use crate::limits::PAGER_MOVES_MAX;

/// Entries beyond two for each page, before they are looked through.
pub(super) const ARRIVALS_SPARE: usize = 4096;

/// Pages that are here and can go, in the order in which they came; and some that have gone meanwhile.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    cold: VecDeque<PageId>,
    hot: VecDeque<PageId>,
    /// Pages that could not be moved when they were tried last.
    set_aside: VecDeque<PageId>,
}

impl Arrivals {
    pub(super) fn len(&self) -> usize {
        self.cold.len() + self.hot.len() + self.set_aside.len()
    }
}

impl Pager {
    /// A page is here.
    pub(super) fn arrived(&mut self, at: PageId) {
        let Some(space) = self.spaces.get_mut(&at.space) else { return };
        space.local += 1;
        self.local += usize::from(space.can_move);
        self.set(at, Entry::Local);
        self.queue(at);
    }

    /// A page is not here any more.
    pub(super) fn left(&mut self, at: PageId, to: Entry) {
        if let Some(space) = self.spaces.get_mut(&at.space) {
            space.local -= 1;
            self.local -= usize::from(space.can_move);
        }
        self.set(at, to);
    }

    pub(super) fn queue(&mut self, at: PageId) {
        let can_move = self.spaces.get(&at.space).is_some_and(|space| space.can_move);
        if can_move && self.set_queued(at, true) {
            let is_hot = self.flag(at, Space::HOT);
            let queue = if is_hot { &mut self.arrivals.hot } else { &mut self.arrivals.cold };
            queue.push_back(at);
        }
        if self.arrivals.len() > 2 * self.local + ARRIVALS_SPARE {
            self.compact();
        }
    }

    /// A page could not be moved: it waits for [`Pager::queue_set_aside`].
    pub(super) fn set_aside(&mut self, at: PageId) {
        if self.set_queued(at, true) {
            self.arrivals.set_aside.push_back(at);
        }
    }

    /// Pages that could not be moved are among those that can go again.
    pub(super) fn queue_set_aside(&mut self) {
        for at in std::mem::take(&mut self.arrivals.set_aside) {
            self.set_queued(at, false);
            if self.entry(at).is_some_and(Entry::is_here) {
                self.queue(at);
            }
        }
    }

    /// A page that was to go first could not, and is the next again.
    pub(super) fn put_back(&mut self, at: PageId) {
        self.arrivals.cold.push_front(at);
        self.set_queued(at, true);
    }

    /// The page that is to go next.
    pub(super) fn next_to_go(&mut self) -> Option<PageId> {
        while self.arrivals.hot.len() > self.local / 2
            && let Some(at) = self.arrivals.hot.pop_front()
        {
            self.set_flag(at, Space::HOT, false);
            self.arrivals.cold.push_back(at);
        }
        while let Some(at) = self.arrivals.cold.pop_front().or_else(|| self.arrivals.hot.pop_front()) {
            self.set_queued(at, false);
            if self.entry(at).is_some_and(Entry::is_here)
                && self.spaces.get(&at.space).is_some_and(|space| space.can_move)
            {
                return Some(at);
            }
        }
        None
    }

    /// The next page that needs no new place to go to, of those that would go soon. The others wait their turn again.
    pub(super) fn next_protected_to_go(&mut self) -> Option<PageId> {
        if self.protected_pages() == 0 {
            return None;
        }
        for _ in 0..PAGER_MOVES_MAX {
            let at = self.next_to_go()?;
            if matches!(self.entry(at), Some(Entry::Protected(_))) {
                return Some(at);
            }
            self.queue(at);
        }
        None
    }

    /// Forgets arrivals of pages that have gone.
    fn compact(&mut self) {
        let Arrivals { cold, hot, set_aside } = std::mem::take(&mut self.arrivals);
        for at in cold.iter().chain(&hot).chain(&set_aside) {
            self.set_queued(*at, false);
        }
        self.arrivals.cold = self.still_here(cold);
        self.arrivals.hot = self.still_here(hot);
        self.arrivals.set_aside = self.still_here(set_aside);
    }

    fn still_here(&mut self, arrivals: VecDeque<PageId>) -> VecDeque<PageId> {
        let mut kept = VecDeque::with_capacity(arrivals.len().min(self.local));
        for at in arrivals {
            if self.entry(at).is_some_and(Entry::is_here) && self.set_queued(at, true) {
                kept.push_back(at);
            }
        }
        kept
    }
}
