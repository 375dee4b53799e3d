//! One rank of a job.

use std::collections::VecDeque;
use std::ops::Range;

use super::fetches::Fetches;
use super::locks::Locks;
use super::meetings::{Barriers, PlacedSegment, Segments};
use super::outgoing::{Handled, Outbox, Outgoing, Own};
use super::release::Release;
use super::sequential::Sequential;
use super::wire::Message;
use super::{Action, Consistency, JobEnd, Misuse, Outcome, Page, Rank, Ticket};
use crate::coherence::Mode;
use crate::limits::{DSM_CALLS_MAX, DSM_FETCH_PAGES_MAX, DSM_RANKS_MAX};
use byway_reactor::seeded::{self, Bug};

/// What a machine has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Faults by loads that asked another rank, or the home's own table.
    pub read_faults: u64,
    /// Faults by stores.
    pub write_faults: u64,
    /// Pages that came from other ranks.
    pub pages_received: u64,
    /// Pages that were sent to other ranks.
    pub pages_sent: u64,
    /// Copies that were given up for another rank's store.
    pub invalidations: u64,
    /// Messages to other ranks, pages included.
    pub messages: u64,
    /// Pages that left late, because a device was reading or writing them: see [`PinnedPages`](super::PinnedPages).
    pub pin_waits: u64,
}

/// The pages, by the consistency of the job.
#[derive(Debug)]
enum Pages {
    Sequential(Sequential),
    Release(Box<Release>),
}

/// What the program does when the homes have what it has stored before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Unlock(u32),
    Arrive { barrier: u32, round: u64 },
    Fence(Ticket),
}

/// See the module above.
#[derive(Debug)]
pub struct Machine {
    pages: Pages,
    locks: Locks,
    barriers: Barriers,
    segments: Segments,
    out: Outgoing,
    /// Waits for the homes of the pages that the program has stored to, up to so many differences.
    releasing: VecDeque<(u64, Then)>,
    /// What the program waited for has come; it goes on when pages that it must not see have left it.
    acquiring: Vec<Action>,
    fetches: Fetches,
    /// Ranks that have left, a bit each.
    left: u64,
    is_leaving: bool,
    is_over: bool,
}

impl Machine {
    /// Rank `rank` of a job of `ranks`, with an area of `pages`.
    ///
    /// # Panics
    /// If there is no such rank, or there are more than [`DSM_RANKS_MAX`].
    pub fn new(rank: Rank, ranks: Rank, pages: u64, consistency: Consistency) -> Self {
        assert!(rank < ranks && usize::from(ranks) <= DSM_RANKS_MAX, "rank {rank} of {ranks}");
        Self {
            pages: match consistency {
                Consistency::Sequential => Pages::Sequential(Sequential::default()),
                Consistency::Release => Pages::Release(Box::new(Release::new(rank, ranks))),
            },
            locks: Locks::new(rank, ranks),
            barriers: Barriers::new(ranks),
            segments: Segments::new(pages),
            out: Outgoing::new(rank, ranks),
            releasing: VecDeque::new(),
            acquiring: Vec::new(),
            fetches: Fetches::default(),
            left: 0,
            is_leaving: false,
            is_over: false,
        }
    }

    /// What to do next.
    pub fn next_action(&mut self) -> Option<Action> {
        self.out.actions.pop_front()
    }

    /// How many ranks the job has.
    pub fn ranks(&self) -> Rank {
        self.out.ranks
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        self.out.counters
    }

    /// The pages whose home this rank is, in their order. While no rank's program uses its memory, each page that was ever touched has one home.
    pub fn homes(&self) -> Vec<Page> {
        let mut homes = match &self.pages {
            Pages::Sequential(pages) => pages.homes(),
            Pages::Release(pages) => pages.homes(),
        };
        homes.sort_unstable();
        homes
    }

    /// At rank 0: all segments, in the order of their places.
    pub fn segments(&self) -> Vec<PlacedSegment> {
        self.segments.placed()
    }

    /// At rank 0, before any rank asks: gives segments the places that they had in an earlier job with an area of as many pages.
    pub fn place_segments(&mut self, segments: Vec<PlacedSegment>) {
        self.segments.place(segments);
    }

    /// The program's load (`Read`) or store (`Write`) has faulted.
    pub fn fault(&mut self, page: Page, mode: Mode) {
        if self.is_over {
            return;
        }
        match &mut self.pages {
            Pages::Sequential(pages) => pages.fault(page, mode, &mut self.out),
            Pages::Release(pages) => pages.fault(page, mode, &mut self.out),
        }
        self.take_own();
    }

    /// A message has come.
    pub fn received(&mut self, from: Rank, message: Message, payload: Vec<u8>) {
        if self.is_over {
            return;
        }
        if let Err(what) = self.handle(from, message, payload) {
            self.end(JobEnd::Misbehaved { rank: from, what });
        }
        self.take_own();
    }

    /// A rank has gone.
    pub fn gone(&mut self, rank: Rank) {
        if self.is_leaving {
            self.left |= 1 << rank;
        } else if self.left & 1 << rank == 0 {
            self.end(JobEnd::Gone { rank });
        }
    }

    /// Nothing has come of a rank for so long that it is taken for stopped or cut off.
    pub fn silent(&mut self, rank: Rank, seconds: u64) {
        if !self.is_leaving && self.left & 1 << rank == 0 {
            self.end(JobEnd::Silent { rank, seconds });
        }
    }

    /// Tells every rank that this one lives.
    pub fn tell_alive(&mut self) {
        let rank = self.out.rank;
        for to in (0..self.out.ranks).filter(|to| *to != rank && self.left & 1 << to == 0) {
            self.out.actions.push_back(Action::Send { to, message: Message::Alive, payload: Vec::new() });
        }
    }

    /// What the program may do with a page.
    pub fn mode(&self, page: Page) -> Mode {
        match &self.pages {
            Pages::Sequential(pages) => pages.mode(page),
            Pages::Release(pages) => pages.mode(page),
        }
    }

    /// The program leaves the job, and no other rank needs anything of this one any more: all have met at a barrier.
    pub fn leave(&mut self) {
        let rank = self.out.rank;
        for to in (0..self.out.ranks).filter(|to| *to != rank) {
            self.out.send(to, Message::Leave, Vec::new());
        }
        self.left |= 1 << rank;
        self.is_leaving = true;
    }

    /// Whether all ranks leave: no message comes any more.
    pub fn is_alone(&self) -> bool {
        self.left.count_ones() == u32::from(self.out.ranks)
    }

    /// The program wants a lock: [`Outcome::Locked`](super::Outcome::Locked).
    ///
    /// # Errors
    /// `TooMany`.
    pub fn lock(&mut self, lock: u32, ticket: Ticket) -> Result<(), Misuse> {
        let mut outbox = Outbox::new();
        self.locks.lock(lock, ticket, &mut outbox)?;
        self.send_all(outbox);
        Ok(())
    }

    /// The program gives a lock back.
    ///
    /// # Errors
    /// `NotLocked`.
    pub fn unlock(&mut self, lock: u32) -> Result<(), Misuse> {
        let is_returned = self.releasing.iter().any(|(_, then)| *then == Then::Unlock(lock));
        if is_returned || !self.locks.is_held(lock) {
            return Err(Misuse::NotLocked { lock });
        }
        self.release(Then::Unlock(lock));
        Ok(())
    }

    /// The program has reached a barrier: [`Outcome::Passed`](super::Outcome::Passed).
    ///
    /// # Errors
    /// `AtBarrier`.
    pub fn barrier(&mut self, barrier: u32, ticket: Ticket) -> Result<(), Misuse> {
        let round = self.barriers.wait(barrier, ticket)?;
        self.release(Then::Arrive { barrier, round });
        Ok(())
    }

    /// The program orders its accesses before this with those behind: [`Outcome::Fenced`]. Accesses of a job with sequential consistency are
    /// ordered as they are.
    ///
    /// # Errors
    /// `TooMany`.
    pub fn fence(&mut self, ticket: Ticket) -> Result<(), Misuse> {
        if self.releasing.len() >= DSM_CALLS_MAX {
            return Err(Misuse::TooMany);
        }
        self.release(Then::Fence(ticket));
        Ok(())
    }

    /// The program is about to load from pages: asks for all that it has not, as loads would one after the other. [`Outcome::Fetched`] when
    /// each has come once; another rank may have taken it again.
    ///
    /// # Errors
    /// `Fetch`, `TooMany`.
    pub fn fetch(&mut self, pages: Range<Page>, ticket: Ticket) -> Result<(), Misuse> {
        if pages.len() > DSM_FETCH_PAGES_MAX {
            return Err(Misuse::Fetch);
        }
        let missing: Vec<Page> = pages.filter(|page| self.mode(*page) == Mode::None).collect();
        self.fetches.wait(missing.iter().copied().collect(), ticket)?;
        self.out.arrived.get_or_insert_default();
        for page in missing {
            self.fault(page, Mode::Read);
        }
        self.take_own();
        Ok(())
    }

    /// Ends the fetches all of whose pages have come.
    fn end_fetches(&mut self) {
        let Some(arrived) = &mut self.out.arrived else { return };
        let done = |ticket| Action::Done { ticket, outcome: Outcome::Fetched };
        self.out.actions.extend(self.fetches.arrived(arrived).into_iter().map(done));
        arrived.clear();
        if self.fetches.is_empty() {
            self.out.arrived = None;
        }
    }

    /// An [`Action::Flush`] of the page is done.
    pub fn flushed(&mut self, page: Page) {
        let Pages::Release(pages) = &mut self.pages else { return };
        pages.flushed(page);
        self.end_acquiring();
    }

    /// The program goes on where all pages that it had to lose have left it.
    fn end_acquiring(&mut self) {
        if let Pages::Release(pages) = &self.pages
            && pages.is_acquired()
        {
            self.out.actions.extend(self.acquiring.drain(..));
        }
    }

    /// The program wants a segment: [`Outcome::Mapped`](super::Outcome::Mapped), or why not.
    ///
    /// # Errors
    /// `TooMany`, `Segment`.
    pub fn map(&mut self, name: &[u8], pages: u64, ticket: Ticket) -> Result<(), Misuse> {
        self.segments.wait(name, pages, ticket)?;
        self.send_all(vec![(0, Message::Map { pages }, name.to_vec())]);
        Ok(())
    }

    fn manager(&self, id: u32) -> Rank {
        (id % u32::from(self.out.ranks)) as Rank
    }

    fn end(&mut self, reason: JobEnd) {
        if !self.is_over {
            self.is_over = true;
            self.out.actions.clear();
            self.out.own.clear();
            self.releasing.clear();
            self.acquiring.clear();
            (self.fetches, self.out.arrived) = (Fetches::default(), None);
            let ended = match reason {
                JobEnd::Gone { rank } => Some((rank, 0)),
                JobEnd::Silent { rank, seconds } => Some((rank, seconds)),
                JobEnd::Misbehaved { .. } => None,
            };
            if let Some((rank, seconds)) = ended {
                let (me, left) = (self.out.rank, self.left);
                let others = (0..self.out.ranks).filter(|to| ![me, rank].contains(to) && left & 1 << to == 0);
                let message = Message::Ended { rank, seconds };
                self.out.actions.extend(others.map(|to| Action::Send { to, message, payload: Vec::new() }));
            }
            self.out.actions.push_back(Action::End { reason });
        }
    }

    fn send_all(&mut self, outbox: Outbox) {
        self.deliver(outbox);
        self.take_own();
    }

    /// Sends messages. One that lets a rank go on follows the notices that it has to know.
    fn deliver(&mut self, outbox: Outbox) {
        for (to, message, payload) in outbox {
            if let (Pages::Release(pages), true) = (&mut self.pages, to != self.out.rank && is_synchronizing(&message))
            {
                for news in pages.news_for(to) {
                    self.out.send(to, Message::Notices, news);
                }
            }
            self.out.send(to, message, payload);
        }
    }

    fn take_own(&mut self) {
        loop {
            while let Some(own) = self.out.own.pop_front() {
                let done = match own {
                    Own::Message(message, payload) => self.handle(self.out.rank, message, payload),
                    Own::Step(page, step) => match &mut self.pages {
                        Pages::Sequential(pages) => pages.take_step(page, step, &mut self.out),
                        Pages::Release(_) => Ok(()),
                    },
                };
                if let Err(what) = done {
                    self.end(JobEnd::Misbehaved { rank: self.out.rank, what });
                }
            }
            let Some(then) = self.next_released() else { return self.end_fetches() };
            self.go_on(then);
        }
    }

    /// What the program does before others go on behind it: the homes get what it has stored, then `then` is done.
    fn release(&mut self, then: Then) {
        let before = match &mut self.pages {
            Pages::Sequential(_) => 0,
            Pages::Release(pages) => pages.release(&mut self.out),
        };
        self.releasing.push_back((before, then));
        self.take_own();
    }

    fn next_released(&mut self) -> Option<Then> {
        let pages = &self.pages;
        let is_ready = |(before, then): &(u64, Then)| match (pages, then) {
            (Pages::Sequential(_), _) => true,
            // No copy with a difference on its way is dropped: the home may leave the page to this rank.
            (Pages::Release(pages), Then::Fence(_)) => pages.is_settled(),
            (Pages::Release(pages), _) => pages.is_released(*before),
        };
        let place = self.releasing.iter().position(is_ready)?;
        self.releasing.remove(place).map(|(_, then)| then)
    }

    fn go_on(&mut self, then: Then) {
        match then {
            Then::Unlock(lock) => {
                let mut outbox = Outbox::new();
                // The caller has seen that this rank has it.
                if let Ok(Some(done)) = self.locks.unlock(lock, &mut outbox) {
                    self.acquired(done);
                }
                self.deliver(outbox);
            }
            Then::Arrive { barrier, round } => {
                if let Pages::Release(pages) = &mut self.pages {
                    pages.arrive(barrier);
                }
                self.deliver(vec![(self.manager(barrier), Message::Arrive { barrier, round }, Vec::new())]);
            }
            Then::Fence(ticket) => {
                if let Pages::Release(pages) = &mut self.pages {
                    pages.acquire_all(&mut self.out);
                }
                self.finish(Action::Done { ticket, outcome: Outcome::Fenced });
            }
        }
    }

    /// The program goes on behind what other ranks have done.
    fn acquired(&mut self, done: Action) {
        if let Pages::Release(pages) = &mut self.pages {
            pages.acquire(&mut self.out);
        }
        self.finish(done);
    }

    fn finish(&mut self, done: Action) {
        match &self.pages {
            Pages::Release(pages) if !pages.is_acquired() && !seeded::is(Bug::DsmFlushNotAwaited) => {
                self.acquiring.push(done);
            }
            _ => self.out.actions.push_back(done),
        }
    }

    fn handle(&mut self, from: Rank, message: Message, payload: Vec<u8>) -> Handled {
        let mut outbox = Outbox::new();
        if message.named_rank().is_some_and(|rank| rank >= self.out.ranks) {
            return Err("it named a rank that the job does not have");
        }
        match message {
            Message::Hello { .. } => return Err("it said hello twice"),
            Message::Batch => return Err("it sent a batch in a batch"),
            Message::Ask { .. }
            | Message::Own { .. }
            | Message::Forward { .. }
            | Message::Page { .. }
            | Message::Upgrade { .. }
            | Message::Invalidate { .. }
            | Message::Acknowledge { .. }
            | Message::Confirm { .. }
            | Message::Contents { .. }
            | Message::Difference { .. }
            | Message::Differed { .. }
            | Message::Notices => {
                let done = match &mut self.pages {
                    Pages::Sequential(pages) => pages.handle(from, message, payload, &mut self.out),
                    Pages::Release(pages) => pages.handle(from, message, payload, &mut self.out),
                };
                self.end_acquiring();
                return done;
            }
            Message::Lock { lock } => self.locks.asked(from, lock, &mut outbox)?,
            Message::Unlock { lock } => self.locks.returned(from, lock, &mut outbox),
            Message::Next { lock, waiter } => self.locks.next(lock, waiter, &mut outbox)?,
            Message::Locked { lock } => {
                let done = self.locks.locked(lock)?;
                self.acquired(done);
            }
            Message::Unlocked { lock } => self.locks.freed(lock, &mut outbox)?,
            Message::Arrive { barrier, round } => self.barriers.arrived(from, barrier, round, &mut outbox)?,
            Message::Pass { barrier, round } => {
                let done = self.barriers.passed(barrier, round)?;
                self.acquired(done);
                if let Pages::Release(pages) = &mut self.pages {
                    pages.pass(barrier);
                }
            }
            Message::Leave if seeded::is(Bug::DsmLeaveForgotten) => {}
            Message::Leave => self.left |= 1 << from,
            Message::Alive => {}
            Message::Ended { .. } if self.is_leaving => {}
            Message::Ended { .. } if seeded::is(Bug::DsmMessengerNamed) => self.end(JobEnd::Gone { rank: from }),
            Message::Ended { rank, seconds: 0 } => self.end(JobEnd::Gone { rank }),
            Message::Ended { rank, seconds } => self.end(JobEnd::Silent { rank, seconds }),
            Message::Map { .. } if self.out.rank != 0 => return Err("it took this rank for rank 0"),
            Message::Map { pages } => self.segments.asked(from, &payload, pages, &mut outbox)?,
            Message::Mapped { status, first, pages } => {
                self.out.actions.extend(self.segments.answered(&payload, (status, first, pages))?);
            }
        }
        self.deliver(outbox);
        Ok(())
    }
}

/// Whether a message lets a rank go on behind what the sender, or those that it speaks for, have done.
fn is_synchronizing(message: &Message) -> bool {
    matches!(message, Message::Locked { .. } | Message::Unlock { .. } | Message::Arrive { .. } | Message::Pass { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_names_a_rank_which_the_job_does_not_have_ends_the_job() {
        const NOBODY: Rank = 2;
        let (page, mode, version) = (1, Mode::Read, 1);
        let messages = [
            Message::Ask { page, mode, requester: NOBODY },
            Message::Forward { page, mode, requester: NOBODY, version },
            Message::Page { page, mode, home: NOBODY, version },
            Message::Next { lock: 0, waiter: NOBODY },
            Message::Ended { rank: NOBODY, seconds: 0 },
        ];
        for message in messages {
            for consistency in [Consistency::Sequential, Consistency::Release] {
                let mut machine = Machine::new(0, 2, 10, consistency);
                machine.fault(page, mode);
                machine.received(1, message, Vec::new());
                let actions: Vec<_> = std::iter::from_fn(|| machine.next_action()).collect();
                let what = "it named a rank that the job does not have";
                let ended = Action::End { reason: JobEnd::Misbehaved { rank: 1, what } };
                assert!(actions.contains(&ended), "{message:?}: {actions:?}");
            }
        }
    }
}
