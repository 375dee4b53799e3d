//! What programs do to their mappings.

use std::ops::Range;

use super::table::{Entry, Space};
use super::{PageId, Pager, SpaceId};

impl Pager {
    /// A program. Pages go only from those that can move them.
    pub fn add_space(&mut self, id: SpaceId, can_move: bool) {
        self.spaces.insert(id, Space::new(can_move));
    }

    /// Whether the pages of a program can go; no longer once it can move none.
    pub fn cannot_move(&mut self, id: SpaceId) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        if std::mem::replace(&mut space.can_move, false) {
            self.local -= space.local;
        }
    }

    /// A program has ended, or runs another file.
    pub fn remove_space(&mut self, id: SpaceId) {
        let Some(mut space) = self.spaces.remove(&id) else { return };
        if space.can_move {
            self.local -= space.local;
        }
        for (_, entry) in space.take(0..u64::MAX) {
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

    /// A mapping is watched from now on. `present` says of each page whether it is there. Pages that are known stay as they are.
    pub fn add_pages(&mut self, id: SpaceId, first: u64, present: &[bool]) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        space.insert(first, present.iter().map(|_| Entry::NONE).collect());
        for (page, _) in (first..).zip(present).filter(|(_, present)| **present) {
            self.arrived(PageId { space: id, page });
        }
        self.pump();
    }

    /// `madvise` drops a range: its pages are zeroes from now on.
    pub fn removed(&mut self, id: SpaceId, pages: Range<u64>) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let (known, can_move) = (space.take(pages.clone()), space.can_move);
        for (first, entries) in runs(&known) {
            let Some(space) = self.spaces.get_mut(&id) else { return };
            space.insert(first, entries.iter().map(|_| Entry::NONE).collect());
        }
        self.drop_all(known, can_move);
    }

    /// A range may not be watched: pages that are in the program are not known any more, until they are added again.
    pub fn forget_present(&mut self, id: SpaceId, pages: Range<u64>) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let known = space.take(pages);
        let is_here = |entry: Entry| matches!(entry, Entry::None | Entry::Local);
        let (here, far): (Vec<_>, Vec<_>) = known.into_iter().partition(|(_, entry)| is_here(*entry));
        for (first, entries) in runs(&far) {
            space.insert(first, entries);
        }
        let can_move = space.can_move;
        self.drop_all(here, can_move);
    }

    /// A range was unmapped.
    pub fn unmapped(&mut self, id: SpaceId, pages: Range<u64>) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let (known, can_move) = (space.take(pages.clone()), space.can_move);
        self.drop_all(known, can_move);
        self.waiting.append(&mut self.changing);
        self.waiting.retain(|at| at.space != id || !pages.contains(&at.page));
    }

    fn drop_all(&mut self, known: Vec<(u64, Entry)>, can_move: bool) {
        for (_, entry) in known {
            if entry == Entry::Local && can_move {
                self.local -= 1;
            }
            self.forget(entry);
        }
        self.pump();
    }

    /// `mremap`: what was at `from` is at `to`.
    pub fn remapped(&mut self, id: SpaceId, (from, to): (u64, u64), count: u64) {
        let Some(space) = self.spaces.get_mut(&id) else { return };
        let known = space.take(from..from + count);
        let can_move = space.can_move;
        let replaced = space.take(to..to + count);
        for (first, entries) in runs(&known) {
            for (page, entry) in (first - from + to..).zip(&entries) {
                self.frames.rename(*entry, PageId { space: id, page });
                if *entry == Entry::Local && can_move {
                    self.arrivals.push_back(PageId { space: id, page });
                }
            }
            let locals = entries.iter().filter(|entry| **entry == Entry::Local).count();
            if let Some(space) = self.spaces.get_mut(&id) {
                space.insert(first - from + to, entries);
                space.local += locals;
            }
        }
        self.waiting.append(&mut self.changing);
        for at in self.waiting.iter_mut().filter(|at| at.space == id && (from..from + count).contains(&at.page)) {
            at.page = at.page - from + to;
        }
        self.drop_all(replaced, can_move);
    }

    /// A program was forked: the child has what the parent has. No move of the parent's is under way.
    pub fn forked(&mut self, parent: SpaceId, child: SpaceId) {
        let Some(mut copy) = self.spaces.get(&parent).map(Space::copied) else { return };
        copy.for_each(|entry| {
            let place = match *entry {
                Entry::Held(frame) | Entry::Fetching(frame) => self.frames.place(frame),
                Entry::Far(place) => Some(place),
                _ => return,
            };
            if let Some(place) = place {
                self.places.refer(place);
                *entry = Entry::Far(place);
            }
        });
        self.spaces.insert(child, copy);
    }
}

/// Entries of neighbours together: the first page of each run.
fn runs(known: &[(u64, Entry)]) -> Vec<(u64, Vec<Entry>)> {
    let mut runs: Vec<(u64, Vec<Entry>)> = Vec::new();
    for (page, entry) in known {
        match runs.last_mut() {
            Some((first, entries)) if *first + entries.len() as u64 == *page => entries.push(*entry),
            _ => runs.push((*page, vec![*entry])),
        }
    }
    runs
}
