//! Puts of pages that have left their programs, and pages whose put failed.

use byway_reactor::seeded::{self, Bug};

use super::frames::Frame;
use super::table::Entry;
use super::{Action, PageId, Pager, Place, PutEnd};

impl Pager {
    /// A put has ended. After [`PutEnd::Refused`] no page goes until [`Pager::try_places_again`].
    pub fn put_ended(&mut self, frame: u32, end: PutEnd) {
        let Frame::Putting(page, place) = self.frames.get(frame) else { return };
        let end = if seeded::is(Bug::PagerShortPutTaken) { PutEnd::Kept } else { end };
        if end == PutEnd::Refused {
            self.places.stop();
        }
        match page {
            Some(page) if end == PutEnd::Kept => {
                self.frames.set(frame, Frame::Clean(page, place));
            }
            None if end == PutEnd::Kept => {
                self.places.release(place);
                self.frames.free(frame);
            }
            _ => self.leave_place(frame, page, place),
        }
        self.pump();
    }

    /// Copies were lost. What frames have of places that `has` knows nothing of any more is put elsewhere.
    pub fn leave_lost(&mut self, mut has: impl FnMut(Place) -> bool) {
        for (frame, page, place) in self.frames.clean() {
            if !has(place) {
                self.leave_place(frame, Some(page), place);
            }
        }
        self.pump();
    }

    /// A frame alone has what all that refer to a place are to find: its page, if that is wanted still, and pages of forked children.
    pub(super) fn leave_place(&mut self, frame: u32, page: Option<PageId>, place: Place) {
        let mut owners = Vec::from_iter(page);
        if self.places.references(place) > 1 {
            for (id, space) in &self.spaces {
                owners.extend(space.pages_with(Entry::Far(place)).into_iter().map(|page| PageId { space: *id, page }));
            }
        }
        owners.sort_unstable();
        // The page's own reference is there also where the page is not wanted any more.
        let references = owners.len() + usize::from(page.is_none());
        (0..references).for_each(|_| self.places.release(place));
        for at in &owners {
            self.set(*at, Entry::Held(frame));
        }
        match owners[..] {
            [] => self.frames.free(frame),
            [at] => self.put(at, frame),
            _ => self.send_back(owners, frame),
        }
    }

    /// Puts a page that is in a frame alone to a place; without one it goes back to its program.
    pub(super) fn put(&mut self, at: PageId, frame: u32) {
        if let Some(place) = self.places.take() {
            self.counters.put += 1;
            self.frames.set(frame, Frame::Putting(Some(at), place));
            self.actions.push_back(Action::Put(frame, place));
        } else {
            self.send_back(vec![at], frame);
        }
    }

    /// The page in a frame goes back to its programs.
    fn send_back(&mut self, owners: Vec<PageId>, frame: u32) {
        self.frames.set(frame, Frame::Waiting(owners.len() as u32));
        for at in owners {
            self.fill(at, frame);
        }
    }
}
