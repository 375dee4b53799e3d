//! The pager, without a kernel or a network: which pages of which programs are local, which are at a lender, and what to do
//! next.
//!
//! A driver passes in faults, changes of mappings and the results of [`Action`]s, and takes the next actions
//! ([`Pager::next_action`]). These rules keep every page's last contents:
//!
//! - A page that leaves is *moved* out of the program into a frame in one step: no write is lost, and a page that cannot be
//!   moved (pinned, or shared by a fork) stays. During a move nothing else is done with its page.
//! - The frame may be used for another page only when the page is at its place ([`Action::Put`] has ended). A touch before
//!   that fills the page from the frame, without a message.
//! - A place may be used for another page only when no page of any program refers to it. A forked child refers to its
//!   parent's.
//! - A lost page is poisoned, never filled with zeroes.
//! - A page leaves without a put only if it was write-protected from its fill to its move: the kernel lets no write pass before
//!   the pager has lifted the protection (`protection.rs`).
//!
//! Pages leave in the order in which they came. A page that was moved out stays in its frame until the frame is needed: a
//! second chance, and a page that takes it stays longer the next time (`arrivals.rs`). Pages that a program will want next are
//! brought ahead (`ahead.rs`).

mod action;
mod ahead;
mod arrivals;
mod chunks;
mod frames;
mod mappings;
mod places;
mod protection;
mod puts;
mod rows;
mod table;

use std::collections::VecDeque;

use byway_reactor::seeded::{self, Bug};

pub use self::action::{Action, Contents, Counters, FillOutcome, Moved, Overdue, PageId, PutEnd, SpaceId};
use self::arrivals::Arrivals;
use self::frames::{Frame, Frames};
use self::places::Places;
pub use self::places::{PLACES_PER_SLAB, Place};
use self::table::{Entry, Space};
use super::numbers::NumberMap;
use crate::limits::{PAGER_FRAMES_KEPT, PAGER_HEADROOM_PAGES, PAGER_MOVES_MAX};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// See the module.
#[derive(Debug)]
pub struct Pager {
    spaces: NumberMap<SpaceId, Space>,
    frames: Frames,
    places: Places,
    arrivals: Arrivals,
    /// Pages that are here, of programs whose pages can go.
    local: usize,
    budget: usize,
    moving: usize,
    /// Of these, pages that need a new place.
    moving_to_new: usize,
    /// Pages may be write-protected.
    protects: bool,
    /// Pages are moved out until there is headroom again.
    is_evicting: bool,
    /// No move begins.
    paused: bool,
    overdue: Overdue,
    waiting: VecDeque<PageId>,
    /// Pages whose mappings are being changed: the messages about that are read before the next try.
    changing: VecDeque<PageId>,
    actions: VecDeque<Action>,
    counters: Counters,
}

impl Pager {
    /// A pager with so many frames, which lets so many pages be in the programs.
    pub fn new(frames: u32, budget: usize) -> Self {
        Self {
            spaces: NumberMap::default(),
            frames: Frames::new(frames),
            places: Places::default(),
            arrivals: Arrivals::default(),
            local: 0,
            budget,
            moving: 0,
            moving_to_new: 0,
            protects: true,
            is_evicting: false,
            paused: false,
            overdue: Overdue::Nothing,
            waiting: VecDeque::new(),
            changing: VecDeque::new(),
            actions: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Places come in rows of so many, best filled together: to be called before the first slab.
    pub fn set_row(&mut self, places: u32) {
        self.places.set_row(places);
    }

    /// What is to be done next.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// What it has done.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Pages that are in programs whose pages can go.
    pub fn local_pages(&self) -> usize {
        self.local
    }

    /// Some pages of a program that are in it: from both ends of its memory, at most so many of each. One may have been dropped since.
    pub fn some_local_pages(&self, space: SpaceId, max: usize) -> Vec<u64> {
        self.spaces.get(&space).map(|space| space.some_local(max)).unwrap_or_default()
    }

    /// Places that pages have: of pages that are there or on their way, and of [protected](Self::protected_pages) pages.
    pub fn far_pages(&self) -> usize {
        self.places.used()
    }

    /// Pages that are in programs and at their places too: write-protected.
    pub fn protected_pages(&self) -> usize {
        self.spaces.values().map(|space| space.protected).sum()
    }

    /// Pages that frames have, and that lie at their places too.
    pub fn pages_in_frames(&self) -> impl Iterator<Item = PageId> {
        self.frames.clean().into_iter().map(|(_, page, _)| page)
    }

    /// [`Pager::far_pages`] for each slab.
    pub fn used_places(&self) -> impl Iterator<Item = u32> {
        self.places.used_in_slabs()
    }

    /// Moves under way: no message about mappings is to be read meanwhile.
    pub fn moves_in_flight(&self) -> usize {
        self.moving
    }

    /// Lets no move begin, or again: messages about mappings are read while none is under way, and all of them before the next begins.
    pub fn pause_moves(&mut self, paused: bool) {
        self.paused = paused;
        self.pump();
    }

    /// What has not ended for long: pages that are wanted do not wait for that, and come above the budget if need be; and none comes ahead.
    pub fn note_overdue(&mut self, overdue: Overdue) {
        self.overdue = overdue;
    }

    /// Whether something is to be tried again soon ([`Pager::retry`]).
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.changing.is_empty()
    }

    /// How many pages may be in programs from now on.
    pub fn set_budget(&mut self, pages: usize) {
        self.budget = pages;
        self.pump();
    }

    /// A thread waits for a page, to write to it or to read it.
    pub fn fault(&mut self, at: PageId, writes: bool) {
        self.counters.faults += 1;
        self.note_access(at, writes);
        // The page that is waited for goes first.
        let was_there = self.waiting.len();
        self.serve(at);
        if self.waiting.len() == was_there {
            self.bring_ahead(at);
        }
        self.pump();
    }

    /// What is left is done when there is room, or now.
    fn serve(&mut self, at: PageId) {
        let Some(entry) = self.entry(at) else { return self.actions.push_back(Action::Wake(at)) };
        match entry {
            // When the move has ended, or what is got is here.
            Entry::Moving(_) | Entry::Fetching(_) => self.set_wanted(at),
            Entry::Held(frame) => {
                self.counters.returned += 1;
                self.set_flag(at, Space::HOT, true);
                self.fill(at, frame);
            }
            Entry::Lost => self.actions.push_back(Action::Poison(at)),
            // It is there, unless `madvise` has dropped it since: then it is zeroes, and what is there is not touched.
            Entry::Local | Entry::Protected(_) => {
                self.forget_place(at);
                self.actions.push_back(Action::Fill(at, Contents::Zeroes(1)));
            }
            _ if self.is_full() => self.waiting.push_back(at),
            Entry::None => self.fill_new(at),
            Entry::Far(place) => self.fetch(at, place),
        }
    }

    /// Whether a page may not come now: there are as many as may be, and some are on their way out.
    fn is_full(&self) -> bool {
        let is_leaving = match self.overdue {
            Overdue::Nothing => self.moving > 0 || self.frames.putting() > 0,
            // Pages go on leaving as long as frames last.
            Overdue::Puts => self.moving > 0,
            Overdue::Moves => false,
        };
        self.local + self.frames.fetching() >= self.budget && is_leaving
    }

    fn fetch(&mut self, at: PageId, place: Place) {
        // A frame has the same page for another program: they were forked.
        match self.frames.holder(place) {
            Some(frame) if matches!(self.frames.get(frame), Frame::Fetching(..)) => return self.waiting.push_back(at),
            Some(frame) => {
                self.counters.returned += 1;
                return self.fill(at, frame);
            }
            None => {}
        }
        if self.places.is_lost(place) {
            return self.lose(at, place);
        }
        let Some(frame) = self.take_frame(0) else { return self.waiting.push_back(at) };
        self.get(at, frame, place);
        self.set_wanted(at);
    }

    fn get(&mut self, at: PageId, frame: u32, place: Place) {
        self.frames.set(frame, Frame::Fetching(Some(at), place));
        self.set(at, Entry::Fetching(frame));
        self.actions.push_back(Action::Get(frame, place));
    }

    fn lose(&mut self, at: PageId, place: Place) {
        self.counters.lost += 1;
        self.places.release(place);
        if seeded::is(Bug::PagerLostIsZeroes) {
            self.set(at, Entry::None);
            return self.actions.push_back(Action::Fill(at, Contents::Zeroes(1)));
        }
        self.set(at, Entry::Lost);
        self.actions.push_back(Action::Poison(at));
    }

    /// A frame, of those of which so many are to be left for others. What lies at its place too goes from its frame first.
    fn take_frame(&mut self, kept: usize) -> Option<u32> {
        if let Some((page, place)) = self.frames.give_up_clean(kept) {
            self.set(page, Entry::Far(place));
        }
        self.frames.take(kept)
    }

    /// A move has ended.
    pub fn moved(&mut self, frame: u32, outcome: Moved) {
        let Frame::Moving(at, place) = self.frames.get(frame) else { return };
        self.moving -= 1;
        self.moving_to_new -= usize::from(place.is_none());
        let wanted = self.take_wanted(at);
        // The program has ended meanwhile.
        if self.entry(at) != Some(Entry::Moving(frame)) {
            self.frames.free(frame);
            if let Some(place) = place {
                self.places.release(place);
            }
            return self.pump();
        }
        let kept = place.filter(|_| matches!(outcome, Moved::Out | Moved::Stays));
        if let Some(place) = place.filter(|_| kept.is_none()) {
            self.places.release(place);
        }
        match outcome {
            Moved::Out => {
                self.left(at, Entry::Held(frame));
                self.put_or_keep(at, frame, kept);
            }
            Moved::Zeroes | Moved::Missing => {
                self.counters.went_zero += u64::from(outcome == Moved::Zeroes);
                self.left(at, Entry::None);
                self.frames.free(frame);
            }
            Moved::Unwatched => {
                self.frames.free(frame);
                self.set(at, Entry::Local);
                self.unmapped(at.space, at.page..at.page + 1);
            }
            Moved::Stays => {
                self.counters.stayed += 1;
                self.set(at, kept.map_or(Entry::Local, Entry::Protected));
                self.set_aside(at);
                self.frames.free(frame);
            }
        }
        if wanted {
            self.serve(at);
        }
        self.pump();
    }

    /// Fills a page from its frame, which is no other's until that has ended.
    fn fill(&mut self, at: PageId, frame: u32) {
        self.frames.pin(frame);
        let is_protected = self.is_to_be_protected(at, frame);
        let contents = if is_protected { Contents::Protected(frame) } else { Contents::Frame(frame) };
        self.actions.push_back(Action::Fill(at, contents));
    }

    /// A get takes long, and another copy of its page can be had: the page is got into another frame if a thread waits for it. The
    /// first get may write to its own frame as long as it has not ended.
    pub fn get_again(&mut self, frame: u32) {
        let (at, place) = match self.frames.get(frame) {
            Frame::Fetching(Some(at), place) => (at, place),
            // A forked child may wait for what lies there.
            Frame::Fetching(None, place) => return self.frames.set(frame, Frame::Abandoned(place)),
            _ => return,
        };
        let other = if self.flag(at, Space::WANTED) {
            let Some(other) = self.take_frame(0) else { return };
            Some(other)
        } else {
            None
        };
        self.frames.set(frame, Frame::Abandoned(place));
        self.places.refer(place);
        match other {
            Some(other) => self.get(at, other, place),
            None => self.set(at, Entry::Far(place)),
        }
    }

    /// A get has ended: the frame has the page, or it cannot be had.
    pub fn got(&mut self, frame: u32, well: bool) {
        if let Frame::Abandoned(place) = self.frames.get(frame) {
            self.places.release(place);
            self.frames.free(frame);
            return self.pump();
        }
        let Frame::Fetching(page, place) = self.frames.get(frame) else { return };
        match page {
            Some(at) if well => {
                self.counters.fetched += 1;
                self.take_wanted(at);
                self.set(at, Entry::Held(frame));
                self.frames.set(frame, Frame::Clean(at, place));
                if self.places.is_lost(place) {
                    // The slab was lost while these bytes were on their way: they are put elsewhere.
                    self.leave_place(frame, Some(at), place);
                }
                self.fill(at, frame);
            }
            Some(at) => {
                self.frames.free(frame);
                let wanted = self.take_wanted(at);
                // Another frame has it where a forked child got it while its parent's page left unchanged.
                if wanted && self.frames.holder(place).is_none() {
                    self.lose(at, place);
                } else {
                    self.set(at, Entry::Far(place));
                    if wanted {
                        self.serve(at);
                    }
                }
            }
            None => {
                self.places.release(place);
                self.frames.free(frame);
            }
        }
        self.pump();
    }

    /// A fill has ended.
    pub fn filled(&mut self, at: PageId, contents: Contents, outcome: FillOutcome) {
        if let Contents::Frame(frame) | Contents::Protected(frame) = contents {
            self.frames.unpin(frame);
        }
        match (contents, outcome) {
            (Contents::Zeroes(_), FillOutcome::Done(count)) => {
                self.counters.zeroed += count;
                for page in at.page..at.page + count {
                    let at = PageId { page, ..at };
                    if self.entry(at) == Some(Entry::None) {
                        self.arrived(at);
                    }
                }
            }
            (Contents::Zeroes(_), FillOutcome::Exists) => {
                if self.entry(at) == Some(Entry::None) {
                    self.arrived(at);
                }
                self.actions.push_back(Action::Wake(at));
            }
            (Contents::Frame(frame) | Contents::Protected(frame), FillOutcome::Done(_) | FillOutcome::Exists) => {
                match self.entry(at) {
                    Some(Entry::Held(held)) if held == frame && self.filled_protected(at, contents, outcome) => {}
                    Some(Entry::Held(held)) if held == frame => {
                        self.release_frame(frame);
                        self.arrived(at);
                    }
                    // Of a page that a forked child shares, from the frame that is put there.
                    Some(Entry::Far(place)) => {
                        self.places.release(place);
                        self.arrived(at);
                    }
                    // The same, while the page is also got for it into another frame, which nothing waits for any more.
                    Some(Entry::Fetching(other)) => {
                        self.take_wanted(at);
                        self.release_frame(other);
                        self.arrived(at);
                    }
                    _ => {}
                }
                if outcome == FillOutcome::Exists {
                    self.actions.push_back(Action::Wake(at));
                }
            }
            (_, FillOutcome::Changing) => self.changing.push_back(at),
            (_, FillOutcome::NoMapping) => self.actions.push_back(Action::Wake(at)),
        }
        self.pump();
    }

    /// A poisoning has ended.
    pub fn poisoned(&mut self, at: PageId, outcome: FillOutcome) {
        if outcome == FillOutcome::Changing {
            self.changing.push_back(at);
        }
    }

    /// There is another slab; its places, of which so many can be used, are numbered behind those of the ones before.
    pub fn add_slab(&mut self, places: u32) {
        self.places.add_slab(places);
        self.pump();
    }

    /// No slab can be had: pages stay where they are, above the budget if need be, until [`Pager::try_places_again`].
    pub fn no_more_slabs(&mut self) {
        self.places.note_none();
        self.pump();
    }

    /// Slabs may be had again, or places that were refused: to be called about once a second.
    pub fn try_places_again(&mut self) {
        if self.places.is_exhausted() {
            self.places.try_again();
            self.pump();
        }
    }

    /// A slab takes no new pages for now, or takes them again.
    pub fn rest_slab(&mut self, slab: u32, rests: bool) {
        self.places.rest(slab, rests);
        self.pump();
    }

    /// Whether no slab could be had.
    pub fn is_exhausted(&self) -> bool {
        self.places.is_exhausted()
    }

    /// A slab is lost with its lender: pages that lie there alone are lost.
    pub fn lose_slab(&mut self, slab: u32) {
        if !self.places.lose(slab) {
            return;
        }
        // Frames have the bytes of some still: these are put elsewhere.
        self.leave_lost(|place| place.slab() != slab);
    }

    /// Pages that could not be moved may be tried again: to be called a few times a second.
    pub fn retry_moves(&mut self) {
        self.queue_set_aside();
        self.pump();
    }

    /// Tries what waits again: to be called once all messages were read, at least every few milliseconds.
    pub fn retry(&mut self) {
        self.waiting.append(&mut self.changing);
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { break };
            self.serve(at);
        }
        self.pump();
    }

    /// Moves pages out, a batch at a time, and lets those wait no longer for which there is room.
    fn pump(&mut self) {
        if self.paused {
            return;
        }
        if !self.waiting.is_empty() && !self.is_full() && self.frames.has_free() {
            // One at a time: what it asks for is to be done before the next look.
            if let Some(at) = self.waiting.pop_front() {
                self.serve(at);
            }
        }
        if self.moving > 0 {
            return;
        }
        // Some at a time: each command costs two wake-ups, and faults wait for its end.
        let headroom = PAGER_HEADROOM_PAGES.min(self.budget / 8 + 1);
        let here = self.local + self.frames.fetching();
        self.is_evicting |= here > self.budget.saturating_sub(headroom.div_ceil(2));
        let aim = self.budget.saturating_sub(headroom);
        while self.is_evicting && self.moving < PAGER_MOVES_MAX {
            if self.local.saturating_sub(self.moving) + self.frames.fetching() <= aim {
                self.is_evicting = false;
                return;
            }
            let has_place = self.places.free() > self.moving_to_new;
            if !has_place && self.places.ask() {
                self.actions.push_back(Action::Lease);
            }
            let next = if has_place { self.next_to_go() } else { self.next_protected_to_go() };
            let Some(at) = next else { return };
            let Some(frame) = self.take_frame(PAGER_FRAMES_KEPT) else { return self.put_back(at) };
            let place = if let Some(Entry::Protected(place)) = self.entry(at) { Some(place) } else { None };
            self.frames.set(frame, Frame::Moving(at, place));
            self.set(at, Entry::Moving(frame));
            self.moving += 1;
            self.moving_to_new += usize::from(place.is_none());
            self.actions.push_back(Action::MoveOut(at, frame, place.is_some()));
        }
    }

    /// The program has dropped a page: what is left of it goes.
    fn forget(&mut self, entry: Entry) {
        match entry {
            Entry::Far(place) | Entry::Protected(place) => self.places.release(place),
            Entry::Held(frame) | Entry::Fetching(frame) => self.release_frame(frame),
            Entry::None | Entry::Local | Entry::Moving(_) | Entry::Lost => {}
        }
    }

    /// Nobody wants what a frame has, or is to have.
    fn release_frame(&mut self, frame: u32) {
        match self.frames.get(frame) {
            Frame::Putting(_, place) => self.frames.set(frame, Frame::Putting(None, place)),
            Frame::Fetching(_, place) => self.frames.set(frame, Frame::Fetching(None, place)),
            Frame::Clean(_, place) => {
                self.places.release(place);
                self.frames.free(frame);
            }
            Frame::Waiting(count @ 2..) => self.frames.set(frame, Frame::Waiting(count - 1)),
            Frame::Waiting(_) => self.frames.free(frame),
            Frame::Free | Frame::Moving(..) | Frame::Abandoned(_) => {}
        }
    }

    fn entry(&self, at: PageId) -> Option<Entry> {
        self.spaces.get(&at.space)?.get(at.page)
    }

    fn set(&mut self, at: PageId, entry: Entry) {
        if let Some(space) = self.spaces.get_mut(&at.space) {
            space.set(at.page, entry);
        }
    }

    fn set_wanted(&mut self, at: PageId) {
        self.set_flag(at, Space::WANTED, true);
    }

    fn take_wanted(&mut self, at: PageId) -> bool {
        self.set_flag(at, Space::WANTED, false)
    }

    /// Whether that is new.
    fn set_queued(&mut self, at: PageId, queued: bool) -> bool {
        self.spaces.contains_key(&at.space) && self.set_flag(at, Space::QUEUED, queued) != queued
    }

    /// What it was; false if the program is not known.
    fn set_flag(&mut self, at: PageId, flag: u64, value: bool) -> bool {
        self.spaces.get_mut(&at.space).is_some_and(|space| space.flag(at.page, flag, value))
    }

    fn flag(&self, at: PageId, flag: u64) -> bool {
        self.spaces.get(&at.space).is_some_and(|space| space.has_flag(at.page, flag))
    }
}

#[cfg(test)]
mod tests;
