//! Which pages a program will want next: streams of faults that go through its memory in equal steps.
//!
//! The kernel tells of missing pages alone, so a page that was brought ahead is never seen to be used. A stream tells: its next fault lies behind
//! what was brought for the last one only if the program has gone through that.

use std::collections::VecDeque;

use super::table::Entry;
use super::{Action, Overdue, PageId, Pager};
use crate::limits::{PAGER_AHEAD_PAGES, PAGER_FRAMES_KEPT, PAGER_STREAMS_MAX, PAGER_WINDOW_MAX, PAGER_WINDOW_MIN};

/// A fault so near to a stream's last one goes on with it in steps of one page: pages between them were there.
const NEAR_PAGES: u64 = 16;

/// Faults in equal steps.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The page of its last fault.
    last: u64,
    /// Pages from one step to the next; 0: not known.
    stride: i64,
    /// Steps to be ahead of the last fault; 0: it may be chance.
    window: u64,
    /// Steps behind the last fault that were looked after.
    asked: u64,
    /// Pages that were brought for it and are not known to be used.
    open: u64,
}

/// Pages to be brought, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ahead {
    first: u64,
    stride: i64,
    pub(super) count: u64,
}

impl Ahead {
    fn pages(self) -> impl Iterator<Item = u64> {
        (0..self.count as i64).map_while(move |step| self.first.checked_add_signed(self.stride.checked_mul(step)?))
    }
}

/// The streams of one program; the one used last is at the back.
#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    all: VecDeque<Stream>,
    last: Option<u64>,
}

impl Stream {
    /// How many steps a page lies behind the last fault: 1 and more.
    fn steps_to(&self, page: u64) -> Option<u64> {
        let delta = page.checked_signed_diff(self.last)?;
        let steps = delta.checked_div(self.stride).filter(|_| delta % self.stride == 0)?;
        u64::try_from(steps).ok().filter(|steps| *steps > 0)
    }

    /// Takes the page as its next one, if it is: how many pages that were brought have been used.
    fn take(&mut self, page: u64) -> Option<u64> {
        let steps = self.steps_to(page).filter(|steps| match self.window {
            0 => *steps == 1,
            _ => *steps <= self.asked + NEAR_PAGES,
        });
        if let Some(steps) = steps {
            let used = if steps > self.asked { self.open } else { self.open.min(steps - 1) };
            self.open -= used;
            self.window = (2 * self.window).clamp(PAGER_WINDOW_MIN, PAGER_WINDOW_MAX);
            (self.asked, self.last) = (self.asked.saturating_sub(steps), page);
            return Some(used);
        }
        self.may_be_next(page).then_some(0)
    }

    /// Of a stream that is not known yet: two steps of the same length make it one, or two short ones in one direction, since pages between may be there.
    fn may_be_next(&mut self, page: u64) -> bool {
        let delta = page.checked_signed_diff(self.last).unwrap_or(0);
        let is_near = |delta: i64| delta != 0 && delta.unsigned_abs() <= NEAR_PAGES;
        if self.window > 0 || !is_near(delta) {
            return false;
        }
        let is_second = is_near(self.stride) && delta.signum() == self.stride.signum();
        let (stride, window) = if is_second { (delta.signum(), PAGER_WINDOW_MIN) } else { (delta, 0) };
        *self = Self { last: page, stride, window, ..Self::default() };
        true
    }
}

impl Streams {
    /// A thread waits for a page that is at a lender or comes from there. Gives what to bring with it, and how many pages that were brought before have been used.
    pub(super) fn note(&mut self, page: u64) -> (Option<Ahead>, u64) {
        let before = self.last.replace(page);
        let found = self.all.iter_mut().enumerate().rev().find_map(|(at, stream)| Some((at, stream.take(page)?)));
        let Some((at, used)) = found else {
            if self.all.len() >= PAGER_STREAMS_MAX {
                self.all.pop_front();
            }
            // The step from the fault before may be the stride of a stream.
            let stride = before.and_then(|before| page.checked_signed_diff(before)).unwrap_or(0);
            self.all.push_back(Stream { last: page, stride, ..Stream::default() });
            return (None, 0);
        };
        let Some(stream) = self.all.remove(at) else { return (None, used) };
        self.all.push_back(stream);
        // Few pages at a time cost as many messages as many do.
        if stream.window == 0 || stream.asked > stream.window / 2 {
            return (None, used);
        }
        let first = stream.stride.checked_mul(stream.asked as i64 + 1).and_then(|delta| page.checked_add_signed(delta));
        let ahead = |first| Ahead { first, stride: stream.stride, count: stream.window - stream.asked };
        (first.map(ahead), used)
    }

    /// Of what was to be brought, so many steps were looked after, and so many pages are brought.
    fn brought(&mut self, steps: u64, pages: u64) {
        if let Some(stream) = self.all.back_mut() {
            stream.asked += steps;
            stream.open += pages;
        }
    }
}

impl Pager {
    /// A thread waits for a page: brings those that it will want next, while there is room. Nobody waits for them, so nothing waits for room.
    pub(super) fn bring_ahead(&mut self, at: PageId) {
        let is_far = matches!(self.entry(at), Some(Entry::Far(_) | Entry::Held(_) | Entry::Fetching(_)));
        let Some(space) = self.spaces.get_mut(&at.space).filter(|_| is_far) else { return };
        let (ahead, used) = space.streams.note(at.page);
        self.counters.ahead_used += used;
        let Some(ahead) = ahead else { return };
        let (mut steps, mut brought) = (0, 0);
        for page in ahead.pages() {
            let next = PageId { page, ..at };
            let has_room = self.local + self.frames.fetching() < self.budget && self.waiting.is_empty();
            if !has_room || self.overdue != Overdue::Nothing || self.places.is_scarce() {
                break;
            }
            match self.entry(next) {
                Some(Entry::Far(place)) if !self.places.is_lost(place) && self.frames.holder(place).is_none() => {
                    let Some(frame) = self.take_frame(PAGER_FRAMES_KEPT) else { break };
                    self.get(next, frame, place);
                    brought += 1;
                }
                Some(_) => {}
                None => break,
            }
            steps += 1;
        }
        self.counters.ahead += brought;
        if let Some(space) = self.spaces.get_mut(&at.space) {
            space.streams.brought(steps, brought);
        }
    }

    /// Fills a page that was never touched with zeroes; and those behind it, where the one before is there: new memory is used in order.
    pub(super) fn fill_new(&mut self, at: PageId) {
        let Some(space) = self.spaces.get(&at.space) else { return };
        let before = at.page.checked_sub(1).and_then(|page| space.get(page));
        let room = self.budget.saturating_sub(self.local) as u64;
        let mut count = 1;
        if before.is_some_and(Entry::is_here) && !self.places.is_scarce() {
            let is_new = |ahead: &u64| space.get(at.page + ahead) == Some(Entry::None);
            count += (1..PAGER_AHEAD_PAGES.min(room)).take_while(is_new).count() as u64;
        }
        self.actions.push_back(Action::Fill(at, super::Contents::Zeroes(count)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes faults as a pager that brings all that is asked for; gives the pages that it brings.
    fn brought(streams: &mut Streams, page: u64) -> Vec<u64> {
        let (ahead, _) = streams.note(page);
        let pages: Vec<u64> = ahead.map(|ahead| ahead.pages().collect()).unwrap_or_default();
        streams.brought(pages.len() as u64, pages.len() as u64);
        pages
    }

    #[test]
    fn a_scan_has_a_window_that_grows_and_each_page_is_brought_once() {
        let (mut streams, mut here, mut faults) = (Streams::default(), std::collections::HashSet::new(), 0);
        for page in 1000..3000 {
            if here.insert(page) {
                faults += 1;
                for page in brought(&mut streams, page) {
                    assert!(here.insert(page), "page {page} is brought once");
                }
            }
        }
        assert!((30..50).contains(&faults), "{faults} faults of 2,000 pages");
    }

    #[test]
    fn strides_backwards_and_two_scans_that_take_turns_are_found() {
        for (stride, start) in [(-1, 5000u64), (7, 5000), (-300, 900_000)] {
            let (mut streams, mut here, mut faults) = (Streams::default(), std::collections::HashSet::new(), 0);
            for step in 0..1000i64 {
                for (other, start) in [(0, start), (1, start + 1_000_000_000)] {
                    let page = start.checked_add_signed(step * stride).unwrap();
                    if other == 0 && here.insert(page) {
                        faults += 1;
                        here.extend(brought(&mut streams, page));
                    }
                }
            }
            assert!(faults < 40, "stride {stride}: {faults} faults");
        }
        let (mut streams, mut here, mut faults) = (Streams::default(), std::collections::HashSet::new(), 0);
        for step in 0..1000u64 {
            for page in [10_000 + step, 90_000 + step, 70_000 - step] {
                if here.insert(page) {
                    faults += 1;
                    here.extend(brought(&mut streams, page));
                }
            }
        }
        assert!(faults < 100, "three scans: {faults} faults");
    }

    #[test]
    fn touches_at_random_bring_next_to_nothing() {
        let (mut streams, mut pages, mut number) = (Streams::default(), 0, 1u64);
        for _ in 0..10_000 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            pages += brought(&mut streams, (number >> 33) % 1_000_000).len();
        }
        assert!(pages < 100, "{pages} pages");
    }

    #[test]
    fn what_a_scan_went_through_is_used_and_what_it_left_is_not() {
        let (mut streams, mut used_in_all, mut brought_in_all) = (Streams::default(), 0, 0);
        let mut page = 100;
        for _ in 0..20 {
            let (ahead, used) = streams.note(page);
            used_in_all += used;
            let count = ahead.map_or(0, |ahead| ahead.count);
            streams.brought(count, count);
            brought_in_all += count;
            page += count + 1;
        }
        assert_eq!(brought_in_all - used_in_all, PAGER_WINDOW_MAX, "all but the last window");
    }
}
