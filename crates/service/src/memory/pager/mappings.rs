//! Changes of programs' mappings.

use std::ops::Range;

use byway_reactor::seeded::{self, Bug};

use super::table::{Entry, Space};
use super::{PageId, Pager, SpaceId};

impl Pager {
    /// A program. Pages go only from those that can move them.
    pub fn add_space(&mut self, id: SpaceId, can_move: bool) {
        self.spaces.insert(id, Space::new(can_move));
    }

    /// A program has ended, or runs another file.
    pub fn remove_space(&mut self, id: SpaceId) {
        let Some(mut space) = self.spaces.remove(&id) else { return };
        if space.can_move {
            self.local -= space.local;
        }
        for (_, entry) in space.clear(0..u64::MAX) {
            self.forget(entry);
        }
        self.waiting.append(&mut self.changing);
        self.waiting.retain(|page| page.space != id);
        self.pump();
    }

    /// Whether a page's mapping is known.
    pub fn knows(&self, page: PageId) -> bool {
        self.spaces.get(&page.space).is_some_and(|space| space.get(page.page).is_some())
    }

    /// Pages of a range that are not known.
    pub fn unknown(&self, id: SpaceId, pages: Range<u64>) -> Vec<Range<u64>> {
        self.spaces.get(&id).map(|space| space.unknown(pages)).unwrap_or_default()
    }

    /// A range that was not known is watched from now on; `present` are the parts of it whose pages are there.
    pub fn add_pages(&mut self, id: SpaceId, pages: Range<u64>, present: &[Range<u64>]) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        space.add(pages.clone());
        for part in present {
            for page in part.start.max(pages.start)..part.end.min(pages.end) {
                self.arrived(PageId { space: id, page });
            }
        }
        self.pump();
    }

    /// `madvise` drops a range: its pages are zeroes from now on.
    pub fn removed(&mut self, id: SpaceId, pages: Range<u64>) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let (dropped, can_move) = (space.clear(pages), space.can_move);
        self.drop_all(dropped, can_move);
    }

    /// Pages of a range are in the program. `MADV_FREE` leaves pages that are dropped until the kernel needs memory, and the program may use
    /// them again without a fault.
    pub fn found_present(&mut self, id: SpaceId, pages: Range<u64>) {
        for page in pages {
            let at = PageId { space: id, page };
            if self.entry(at) == Some(Entry::None) {
                self.arrived(at);
            }
        }
        self.pump();
    }

    /// A range may not be watched: pages that are in the program are not known any more, until they are added again.
    pub fn forget_present(&mut self, id: SpaceId, pages: Range<u64>) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let taken = space.take(pages);
        let (here, far): (Vec<_>, Vec<_>) = taken.entries.into_iter().partition(|(_, entry)| entry.is_here());
        for (page, entry) in far {
            space.add(page..page + 1);
            space.set(page, entry);
        }
        let can_move = space.can_move;
        self.drop_all(here, can_move);
    }

    /// A range was unmapped.
    pub fn unmapped(&mut self, id: SpaceId, pages: Range<u64>) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let (taken, can_move) = (space.take(pages.clone()), space.can_move);
        self.drop_all(taken.entries, can_move);
        self.waiting.append(&mut self.changing);
        self.waiting.retain(|at| at.space != id || !pages.contains(&at.page));
    }

    fn drop_all(&mut self, known: Vec<(u64, Entry)>, can_move: bool) {
        for (_, entry) in known {
            if entry.is_here() && can_move {
                self.local -= 1;
            }
            self.forget(entry);
        }
        self.pump();
    }

    /// `mremap`: what was at `from` is at `to`.
    pub fn remapped(&mut self, id: SpaceId, from: u64, to: u64, count: u64) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let known = space.take(from..from + count);
        let can_move = space.can_move;
        let mut moved = Vec::new();
        let replaced = space.take(to..to + count);
        for range in known.ranges {
            space.add(range.start - from + to..range.end - from + to);
        }
        for (page, entry) in known.entries {
            let at = PageId { space: id, page: page - from + to };
            space.set(at.page, entry);
            self.frames.rename(entry, at);
            if entry.is_here() {
                space.local += 1;
                moved.push(at);
            }
        }
        for at in moved {
            self.queue(at);
        }
        self.waiting.append(&mut self.changing);
        for at in self.waiting.iter_mut().filter(|at| at.space == id && (from..from + count).contains(&at.page)) {
            at.page = at.page - from + to;
        }
        self.drop_all(replaced.entries, can_move);
    }

    /// A program was forked: the child has what the parent has. A page of the parent that is being moved out now is lost for the child:
    /// moves end before a fork is told, unless the parent's helper ended in the middle of one.
    ///
    /// Gives whether a page of the child is not in it: then the caller says by [`Pager::removed`] what the child does not get
    /// (`MADV_WIPEONFORK`).
    pub fn forked(&mut self, parent: SpaceId, child: SpaceId) -> bool {
        let Some(mut copy) = self.spaces.get(&parent).map(Space::copied) else { return false };
        let mut is_far = false;
        copy.for_each(|entry| {
            is_far |= !matches!(*entry, Entry::None | Entry::Local | Entry::Protected(_));
            let place = match *entry {
                Entry::Held(_) if seeded::is(Bug::PagerForkWithoutFrames) => return *entry = Entry::None,
                Entry::Held(frame) | Entry::Fetching(frame) => match self.frames.place(frame) {
                    Some(place) => place,
                    // It is on its way back to the parent, and to the child too.
                    None => return self.frames.share(frame),
                },
                Entry::Far(place) => place,
                Entry::Moving(_) => return *entry = Entry::Lost,
                // The child's pages never go, so what lies at a place is not kept for it.
                Entry::Protected(_) => return *entry = Entry::Local,
                Entry::None | Entry::Local | Entry::Lost => return,
            };
            self.places.refer(place);
            *entry = Entry::Far(place);
        });
        self.spaces.insert(child, copy);
        is_far
    }
}
