//! Barriers, at which all ranks meet, and segments, whose places rank 0 gives out.

use std::collections::HashMap;

use super::outgoing::Outbox;
use super::wire::Message;
use super::{Action, JOB_BARRIERS, Misuse, Outcome, Page, Rank, SegmentRefused, Ticket};
use crate::limits::{DSM_CALLS_MAX, DSM_NAME_BYTES_MAX, DSM_SEGMENTS_MAX};
use byway_reactor::seeded::{self, Bug};

/// Barriers: each rank's own, and those that it manages.
#[derive(Debug)]
pub(super) struct Barriers {
    ranks: Rank,
    own: HashMap<u32, Barrier>,
    /// The round, and the ranks that have arrived, a bit each.
    managed: HashMap<u32, (u64, u64)>,
}

#[derive(Debug, Default)]
struct Barrier {
    round: u64,
    waits: Option<Ticket>,
}

impl Barriers {
    pub(super) fn new(ranks: Rank) -> Self {
        Self { ranks, own: HashMap::new(), managed: HashMap::new() }
    }

    /// A thread waits. Gives the round.
    pub(super) fn wait(&mut self, barrier: u32, ticket: Ticket) -> Result<u64, Misuse> {
        let of_job = (JOB_BARRIERS..=u32::MAX).filter(|own| self.own.contains_key(own)).count();
        let is_new = barrier < JOB_BARRIERS && !self.own.contains_key(&barrier);
        if is_new && self.own.len() - of_job >= DSM_CALLS_MAX {
            return Err(Misuse::TooMany);
        }
        let own = self.own.entry(barrier).or_default();
        if own.waits.is_some() {
            return Err(Misuse::AtBarrier { barrier });
        }
        own.waits = Some(ticket);
        Ok(own.round)
    }

    /// At the manager: a rank has arrived.
    pub(super) fn arrived(
        &mut self,
        from: Rank,
        barrier: u32,
        round: u64,
        outbox: &mut Outbox,
    ) -> Result<(), &'static str> {
        let (current, arrived) = self.managed.entry(barrier).or_default();
        if round != *current || *arrived & 1 << from != 0 {
            return Err("it arrived at a barrier out of turn");
        }
        *arrived |= 1 << from;
        let missing = u32::from(self.ranks) - arrived.count_ones();
        if missing == 0 || missing == 1 && seeded::is(Bug::DsmBarrierEarly) {
            (*current, *arrived) = (round + 1, 0);
            outbox.extend((0..self.ranks).map(|rank| (rank, Message::Pass { barrier, round }, Vec::new())));
        }
        Ok(())
    }

    pub(super) fn passed(&mut self, barrier: u32, round: u64) -> Result<Action, &'static str> {
        let own = self.own.get_mut(&barrier).filter(|own| own.round == round);
        let own = own.ok_or("it let this rank pass a barrier of another round")?;
        let ticket = own.waits.take().ok_or("it let this rank pass a barrier that it is not at")?;
        own.round += 1;
        Ok(Action::Done { ticket, outcome: Outcome::Passed })
    }
}

/// A segment's name and its place in the area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedSegment {
    /// 1 to [`DSM_NAME_BYTES_MAX`] bytes.
    pub name: Vec<u8>,
    /// Where it begins.
    pub first: Page,
    /// How long it is.
    pub pages: u64,
}

/// Between segments, so that an access beyond one is no access to the next.
const GUARD_PAGES: u64 = 1;

const OK: u8 = 0;
const OTHER_SIZE: u8 = 1;
const NO_ROOM: u8 = 2;
const TOO_MANY: u8 = 3;

/// Segments: their places, at rank 0, and the threads that wait for an answer.
#[derive(Debug)]
pub(super) struct Segments {
    /// Of the area.
    pages: u64,
    placed: HashMap<Vec<u8>, (Page, u64)>,
    used: u64,
    /// Each segment that a thread waits for: its name, its length in pages, and the thread's call.
    waiting: Vec<(Vec<u8>, u64, Ticket)>,
}

impl Segments {
    pub(super) fn new(pages: u64) -> Self {
        Self { pages, placed: HashMap::new(), used: 0, waiting: Vec::new() }
    }

    pub(super) fn wait(&mut self, name: &[u8], pages: u64, ticket: Ticket) -> Result<(), Misuse> {
        if name.is_empty() || name.len() > DSM_NAME_BYTES_MAX || pages == 0 {
            return Err(Misuse::Segment);
        }
        if self.waiting.len() >= DSM_CALLS_MAX {
            return Err(Misuse::TooMany);
        }
        self.waiting.push((name.to_vec(), pages, ticket));
        Ok(())
    }

    /// At rank 0: a rank wants a segment. The first to name it places it.
    pub(super) fn asked(
        &mut self,
        from: Rank,
        name: &[u8],
        pages: u64,
        outbox: &mut Outbox,
    ) -> Result<(), &'static str> {
        if name.is_empty() || name.len() > DSM_NAME_BYTES_MAX || pages == 0 {
            return Err("it asked for a segment without a name or without pages");
        }
        let left = self.pages - self.used;
        let answer = match self.placed.get(name) {
            Some(&(first, has)) if has == pages => (OK, first, pages),
            Some(&(_, has)) => (OTHER_SIZE, 0, has),
            None if self.placed.len() >= DSM_SEGMENTS_MAX => (TOO_MANY, 0, 0),
            None if pages > left => (NO_ROOM, 0, left),
            None => {
                let first = self.used as Page;
                self.used = (self.used + pages + GUARD_PAGES).min(self.pages);
                self.placed.insert(name.to_vec(), (first, pages));
                (OK, first, pages)
            }
        };
        let (status, first, pages) = answer;
        outbox.push((from, Message::Mapped { status, first, pages }, name.to_vec()));
        Ok(())
    }

    /// All segments, by their places.
    pub(super) fn placed(&self) -> Vec<PlacedSegment> {
        let all = self.placed.iter();
        let mut all: Vec<_> =
            all.map(|(name, &(first, pages))| PlacedSegment { name: name.clone(), first, pages }).collect();
        all.sort_unstable_by_key(|segment| segment.first);
        all
    }

    /// Gives segments the places that they had in an earlier job.
    pub(super) fn place(&mut self, segments: Vec<PlacedSegment>) {
        for PlacedSegment { name, first, pages } in segments {
            self.used = self.used.max(u64::from(first) + pages + GUARD_PAGES).min(self.pages);
            self.placed.insert(name, (first, pages));
        }
    }

    /// Rank 0 has answered: the first thread that waits for the segment is done.
    pub(super) fn answered(&mut self, name: &[u8], answer: (u8, Page, u64)) -> Result<Option<Action>, &'static str> {
        let place = self.waiting.iter().position(|(waits, ..)| waits == name);
        let (_, asked, ticket) =
            self.waiting.remove(place.ok_or("it placed a segment that this rank did not ask for")?);
        let (status, first, pages) = answer;
        let is_inside = |end: Option<u64>| end.is_some_and(|end| end <= self.pages);
        let outcome = match status {
            OK if pages == asked && is_inside(u64::from(first).checked_add(pages)) => Outcome::Mapped { first, pages },
            OTHER_SIZE => Outcome::Refused(SegmentRefused::OtherSize { pages }),
            NO_ROOM => Outcome::Refused(SegmentRefused::NoRoom { pages }),
            TOO_MANY => Outcome::Refused(SegmentRefused::TooMany),
            _ => return Err("it placed a segment outside of the area"),
        };
        Ok(Some(Action::Done { ticket, outcome }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_has_used_all_its_barriers_can_leave_the_job() {
        let mut barriers = Barriers::new(1);
        for barrier in (0..DSM_CALLS_MAX as u32).chain([JOB_BARRIERS, u32::MAX]) {
            assert_eq!(barriers.wait(barrier, 7), Ok(0), "barrier {barrier}");
        }
        assert_eq!(barriers.wait(DSM_CALLS_MAX as u32, 7), Err(Misuse::TooMany));
    }

    #[test]
    fn a_segment_is_as_long_as_was_asked_for_and_lies_in_the_area() {
        for (first, pages) in [(1, u64::MAX), (0, 0), (97, 4), (0, 5)] {
            let mut segments = Segments::new(100);
            segments.wait(b"a", 4, 7).unwrap();
            let placed = segments.answered(b"a", (OK, first, pages)).map(|_| ());
            assert_eq!(placed, Err("it placed a segment outside of the area"), "{pages} pages from {first} on");
        }
        let mut segments = Segments::new(100);
        segments.wait(b"a", 4, 7).unwrap();
        assert!(segments.answered(b"a", (OK, 96, 4)).is_ok());
    }

    #[test]
    fn segments_of_an_earlier_job_keep_their_places_and_new_ones_lie_behind_them() {
        let (mut before, mut after) = (Segments::new(100), Segments::new(100));
        let mut outbox = Outbox::new();
        for (name, pages) in [("b", 7), ("a", 3)] {
            before.asked(1, name.as_bytes(), pages, &mut outbox).unwrap();
        }
        after.place(before.placed());
        for (name, pages, first) in [("c", 1, 12), ("a", 3, 8), ("b", 7, 0)] {
            outbox.clear();
            after.asked(2, name.as_bytes(), pages, &mut outbox).unwrap();
            let placed = Message::Mapped { status: OK, first, pages };
            assert_eq!(outbox, [(2, placed, name.as_bytes().to_vec())]);
        }
    }
}
