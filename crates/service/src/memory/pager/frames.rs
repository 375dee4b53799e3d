//! Frames: the memory through which pages go and come.

use std::collections::VecDeque;

use super::PageId;
use super::places::Place;
use super::table::Entry;
use crate::memory::numbers::NumberMap;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Free,
    /// A page comes out of its program; it was protected, and lies at that place too.
    Moving(PageId, Option<Place>),
    /// It goes to a place; `None`: no longer wanted.
    Putting(Option<PageId>, Place),
    /// It has a page that has no place, and goes back to so many programs: forked children have the same page.
    Waiting(u32),
    /// It has a page that lies at its place too.
    Clean(PageId, Place),
    /// A page comes from its place; `None`: no longer wanted.
    Fetching(Option<PageId>, Place),
    /// A get into it from that place has not ended, and its page is got into another frame.
    Abandoned(Place),
}

#[derive(Debug)]
pub(super) struct Frames {
    all: Vec<Frame>,
    free: Vec<u32>,
    /// Those that became clean, oldest first; and some that are not any more.
    clean: VecDeque<u32>,
    /// The frame that has, or gets, what lies at a place.
    holders: NumberMap<Place, u32>,
    /// Puts under way.
    putting: usize,
    /// Pages that come from their places and are wanted.
    fetching: usize,
    /// Fills under way from each frame.
    pins: Vec<u32>,
}

impl Frames {
    pub(super) fn new(count: u32) -> Self {
        Self {
            all: vec![Frame::Free; count as usize],
            free: (0..count).rev().collect(),
            clean: VecDeque::new(),
            holders: NumberMap::default(),
            putting: 0,
            fetching: 0,
            pins: vec![0; count as usize],
        }
    }

    pub(super) fn get(&self, frame: u32) -> Frame {
        self.all.get(frame as usize).copied().unwrap_or(Frame::Free)
    }

    pub(super) fn set(&mut self, frame: u32, state: Frame) {
        let before = self.get(frame);
        if let Some(place) = self.place(frame)
            && self.holder(place) == Some(frame)
        {
            self.holders.remove(&place);
        }
        let is_putting = |state| usize::from(matches!(state, Frame::Putting(..)));
        self.putting = self.putting - is_putting(before) + is_putting(state);
        let is_fetching = |state| usize::from(matches!(state, Frame::Fetching(Some(_), _)));
        self.fetching = self.fetching - is_fetching(before) + is_fetching(state);
        if matches!(state, Frame::Clean(..)) {
            self.clean.push_back(frame);
        }
        self.all[frame as usize] = state;
        if let Some(place) = self.place(frame) {
            // A put is to be found: nothing is got from its place.
            let other = self.holder(place).filter(|other| matches!(self.get(*other), Frame::Putting(..)));
            self.holders.insert(place, other.unwrap_or(frame));
        }
    }

    /// It can be taken once no page is filled from it.
    pub(super) fn free(&mut self, frame: u32) {
        self.set(frame, Frame::Free);
        if !self.is_pinned(frame) {
            self.free.push(frame);
        }
    }

    /// A page is to be filled from a frame: the frame's bytes stay until [`Frames::unpin`].
    pub(super) fn pin(&mut self, frame: u32) {
        self.pins[frame as usize] += 1;
    }

    fn is_pinned(&self, frame: u32) -> bool {
        self.pins[frame as usize] > 0
    }

    /// A fill has ended.
    pub(super) fn unpin(&mut self, frame: u32) {
        let pins = &mut self.pins[frame as usize];
        if *pins == 0 {
            return;
        }
        *pins -= 1;
        if *pins == 0 && self.get(frame) == Frame::Free {
            self.free.push(frame);
        }
    }

    /// Puts under way.
    pub(super) fn putting(&self) -> usize {
        self.putting
    }

    /// Pages that are on their way here.
    pub(super) fn fetching(&self) -> usize {
        self.fetching
    }

    /// The frame that has what lies at a place, or gets it.
    pub(super) fn holder(&self, place: Place) -> Option<u32> {
        self.holders.get(&place).copied()
    }

    /// One program more waits for the page of a frame.
    pub(super) fn share(&mut self, frame: u32) {
        if let Frame::Waiting(count) = self.get(frame) {
            self.set(frame, Frame::Waiting(count + 1));
        }
    }

    /// Whether one could be taken.
    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty() || self.clean.iter().any(|frame| matches!(self.get(*frame), Frame::Clean(..)))
    }

    /// One, if more than `kept` are free.
    pub(super) fn take(&mut self, kept: usize) -> Option<u32> {
        if self.free.len() > kept { self.free.pop() } else { None }
    }

    /// Frees the frame that has been clean the longest, if no more than `kept` are free; gives whose page it had.
    pub(super) fn give_up_clean(&mut self, kept: usize) -> Option<(PageId, Place)> {
        for _ in 0..self.clean.len() {
            if self.free.len() > kept {
                return None;
            }
            let frame = self.clean.pop_front()?;
            match self.get(frame) {
                Frame::Clean(..) if self.is_pinned(frame) => self.clean.push_back(frame),
                Frame::Clean(page, place) => {
                    self.free(frame);
                    return Some((page, place));
                }
                _ => {}
            }
        }
        None
    }

    /// Where the page of a frame lies or will lie.
    pub(super) fn place(&self, frame: u32) -> Option<Place> {
        match self.get(frame) {
            Frame::Putting(_, place) | Frame::Clean(_, place) | Frame::Fetching(_, place) => Some(place),
            Frame::Free | Frame::Moving(..) | Frame::Waiting(_) | Frame::Abandoned(_) => None,
        }
    }

    /// Frames with pages that lie at their places too.
    pub(super) fn clean(&self) -> Vec<(u32, PageId, Place)> {
        let clean = self.all.iter().enumerate().filter_map(|(frame, state)| match state {
            Frame::Clean(page, place) => Some((frame as u32, *page, *place)),
            _ => None,
        });
        clean.collect()
    }

    /// Frames that pages are being moved to which lie at a place too.
    pub(super) fn moving_protected(&self) -> Vec<(u32, PageId, Place)> {
        let moving = self.all.iter().enumerate().filter_map(|(frame, state)| match state {
            Frame::Moving(page, Some(place)) => Some((frame as u32, *page, *place)),
            _ => None,
        });
        moving.collect()
    }

    /// The page of an entry has another address.
    pub(super) fn rename(&mut self, entry: Entry, to: PageId) {
        let (Entry::Moving(frame) | Entry::Held(frame) | Entry::Fetching(frame)) = entry else { return };
        let state = &mut self.all[frame as usize];
        match state {
            Frame::Moving(page, _)
            | Frame::Clean(page, _)
            | Frame::Putting(Some(page), _)
            | Frame::Fetching(Some(page), _) => *page = to,
            Frame::Free
            | Frame::Waiting(_)
            | Frame::Putting(None, _)
            | Frame::Fetching(None, _)
            | Frame::Abandoned(_) => {}
        }
    }
}
