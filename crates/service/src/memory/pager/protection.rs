//! Pages that leave without a put: they have not changed since they came.
//!
//! A page that comes from its place may be filled write-protected ([`Contents::Protected`]); its place is kept. The first write
//! raises a fault: the pager forgets the place and lifts the protection. A page that is still protected when it is moved out is
//! what lies at its place.
//!
//! Such a fault costs a program's thread more than a put costs the pager (7.5 us even if the pager waits in the same process, Linux
//! 6.18). So pages of a program are protected only as long as few of them are written.

use byway_reactor::seeded::{self, Bug};

use super::frames::Frame;
use super::table::{Entry, Space};
use super::{Action, Contents, FillOutcome, PageId, Pager, Place};

/// A moving average over 8 pages counts in shares of this.
const WHOLE: i32 = 256;

/// Pages are protected while less than this share of them is written.
const WRITTEN_MAX: i32 = WHOLE / 4;

/// One of so many pages is protected also if most are written: the program may write less now.
const PROBE_EVERY: u32 = 32;

/// What share of a program's far pages is written before they leave again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Writes {
    share: i32,
    fills: u32,
}

impl Writes {
    fn note(&mut self, written: bool) {
        let now = if written { WHOLE } else { 0 };
        self.share += (now - self.share) / 8;
    }

    /// Whether the next page is to be protected.
    fn protects(&mut self) -> bool {
        self.fills = self.fills.wrapping_add(1);
        self.share < WRITTEN_MAX || self.fills.is_multiple_of(PROBE_EVERY)
    }
}

impl Pager {
    /// A thread waits to write to a page that is there, and write-protected.
    pub fn write_fault(&mut self, at: PageId) {
        match self.entry(at) {
            Some(Entry::Protected(_)) => {
                self.counters.unprotected += 1;
                self.note_write(at, true);
                if !seeded::is(Bug::PagerWriteNotNoted) {
                    self.forget_place(at);
                }
                self.actions.push_back(Action::Unprotect(at));
            }
            // Protected when it came, and forgotten since.
            Some(Entry::Local) | None => self.actions.push_back(Action::Unprotect(at)),
            // It has left meanwhile.
            Some(_) => self.fault(at, true),
        }
        self.pump();
    }

    /// The end of [`Action::Unprotect`].
    pub fn unprotected(&mut self, at: PageId, outcome: FillOutcome) {
        if outcome == FillOutcome::Changing {
            // The thread is woken with the next try, and faults again.
            self.changing.push_back(at);
        }
    }

    /// Whether pages may be write-protected from now on. If not, no page that is in a program counts as unchanged any more.
    pub fn protect_pages(&mut self, protects: bool) {
        if !std::mem::replace(&mut self.protects, protects) || protects {
            return;
        }
        for space in self.spaces.values_mut().filter(|space| space.protected > 0) {
            space.protected = 0;
            space.for_each(|entry| {
                if let Entry::Protected(place) = *entry {
                    self.places.release(place);
                    *entry = Entry::Local;
                }
            });
        }
        for (frame, at, place) in self.frames.moving_protected() {
            self.places.release(place);
            self.frames.set(frame, Frame::Moving(at, None));
            self.moving_to_new += 1;
        }
    }

    /// Whether a page is write-protected: to be asked before anything else is protected or unprotected in its mapping.
    pub fn is_protected(&self, at: PageId) -> bool {
        match self.entry(at) {
            Some(Entry::Protected(_)) => true,
            Some(Entry::Moving(frame)) => matches!(self.frames.get(frame), Frame::Moving(_, Some(_))),
            _ => false,
        }
    }

    pub(super) fn note_access(&mut self, at: PageId, writes: bool) {
        let is_far = |entry| matches!(entry, Entry::Far(_) | Entry::Held(_) | Entry::Fetching(_) | Entry::Moving(_));
        if writes && self.entry(at).is_some_and(is_far) {
            self.set_flag(at, Space::WRITES, true);
            self.note_write(at, true);
        }
    }

    fn note_write(&mut self, at: PageId, written: bool) {
        if let Some(space) = self.spaces.get_mut(&at.space) {
            space.writes.note(written);
        }
    }

    /// Whether the page is to be filled write-protected from a frame. Asked once for each fill.
    pub(super) fn is_to_be_protected(&mut self, at: PageId, frame: u32) -> bool {
        let writes = self.set_flag(at, Space::WRITES, false);
        let is_clean = matches!(self.frames.get(frame), Frame::Clean(..)) && self.entry(at) == Some(Entry::Held(frame));
        // Few places are left: one that a page needs only perhaps is left to another.
        if writes || !is_clean || !self.protects || self.places.is_scarce() {
            return false;
        }
        self.spaces.get_mut(&at.space).is_some_and(|space| space.can_move && space.writes.protects())
    }

    /// A page was filled from a frame; false: it is not protected.
    pub(super) fn filled_protected(&mut self, at: PageId, contents: Contents, outcome: FillOutcome) -> bool {
        let Contents::Protected(frame) = contents else { return false };
        let (Frame::Clean(_, place), FillOutcome::Done(_)) = (self.frames.get(frame), outcome) else { return false };
        // The place is the page's now, and not the frame's.
        self.frames.free(frame);
        self.arrived(at);
        self.set(at, Entry::Protected(place));
        true
    }

    /// A page that is in its program may differ from what lies at its place.
    pub(super) fn forget_place(&mut self, at: PageId) {
        if let Some(Entry::Protected(place)) = self.entry(at) {
            self.places.release(place);
            self.set(at, Entry::Local);
        }
    }

    /// A page was moved out to a frame. If it was protected, its place has it already.
    pub(super) fn put_or_keep(&mut self, at: PageId, frame: u32, kept: Option<Place>) {
        let Some(place) = kept else { return self.put(at, frame) };
        self.counters.unchanged += 1;
        self.note_write(at, false);
        self.frames.set(frame, Frame::Putting(Some(at), place));
        self.actions.push_back(Action::Keep(frame, place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_protected_while_few_of_them_are_written() {
        let mut writes = Writes::default();
        assert!(writes.protects(), "a program begins as one that reads");
        (0..100).for_each(|_| writes.note(true));
        let probes = (0..320).filter(|_| writes.protects()).count();
        assert_eq!(probes, 10, "one of {PROBE_EVERY} finds out whether that has changed");
        (0..100).for_each(|_| writes.note(false));
        assert!(writes.protects());
    }
}
