//! One rank of a job.

use std::collections::{HashMap, VecDeque};

use super::home::{Home, Step};
use super::locks::Locks;
use super::meetings::{Barriers, Segments};
use super::wire::Message;
use super::{Action, Contents, JobEnd, Misuse, Page, Rank, Ticket};
use crate::coherence::Mode;
use crate::limits::DSM_RANKS_MAX;
use byway_reactor::seeded::{self, Bug};

/// A page as this rank has it.
#[derive(Clone, Copy, Debug)]
struct PageState {
    mode: Mode,
    /// What was asked for.
    asked: Mode,
    /// Once it is known.
    home: Option<Rank>,
}

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

/// See the module above.
pub struct Machine {
    rank: Rank,
    ranks: Rank,
    held: HashMap<Page, PageState>,
    /// Of the pages whose home this rank is.
    homes: HashMap<Page, Home>,
    /// Of the pages that this rank is the registrar of: which rank touched each first.
    first: HashMap<Page, Rank>,
    locks: Locks,
    barriers: Barriers,
    segments: Segments,
    actions: VecDeque<Action>,
    /// What this rank says to itself, and what its homes want, in one order.
    own: VecDeque<Own>,
    counters: Counters,
    /// Ranks that have left, a bit each.
    left: u64,
    is_leaving: bool,
    is_over: bool,
}

enum Own {
    Message(Message, Vec<u8>),
    Step(Page, Step),
}

/// What a part of the machine sends.
pub(super) type Outbox = Vec<(Rank, Message, Vec<u8>)>;

type Handled = Result<(), &'static str>;

impl Machine {
    /// Rank `rank` of a job of `ranks`, with an area of `pages`.
    ///
    /// # Panics
    /// If there is no such rank, or there are more than [`DSM_RANKS_MAX`].
    pub fn new(rank: Rank, ranks: Rank, pages: u64) -> Self {
        assert!(rank < ranks && usize::from(ranks) <= DSM_RANKS_MAX, "rank {rank} of {ranks}");
        Self {
            rank,
            ranks,
            held: HashMap::new(),
            homes: HashMap::new(),
            first: HashMap::new(),
            locks: Locks::new(rank, ranks),
            barriers: Barriers::new(ranks),
            segments: Segments::new(pages),
            actions: VecDeque::new(),
            own: VecDeque::new(),
            counters: Counters::default(),
            left: 0,
            is_leaving: false,
            is_over: false,
        }
    }

    /// What to do next.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// How many ranks the job has.
    pub fn ranks(&self) -> Rank {
        self.ranks
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The program's load (`Read`) or store (`Write`) has faulted.
    pub fn fault(&mut self, page: Page, mode: Mode) {
        if self.is_over {
            return;
        }
        let held = self.held(page);
        if held.mode >= mode {
            // Another thread's fault has brought it in between.
            let mode = held.mode;
            self.actions.push_back(Action::Install { page, mode, contents: Contents::Kept });
            return;
        }
        // What comes wakes all threads that wait for the page; one that needs more faults again.
        if held.asked > Mode::None {
            return;
        }
        held.asked = mode;
        let home = held.home;
        let counter =
            if mode == Mode::Write { &mut self.counters.write_faults } else { &mut self.counters.read_faults };
        *counter += 1;
        let to = home.unwrap_or_else(|| self.registrar(page));
        self.send(to, Message::Ask { page, mode, requester: self.rank }, Vec::new());
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
        let rank = self.rank;
        for to in (0..self.ranks).filter(|to| *to != rank && self.left & 1 << to == 0) {
            self.actions.push_back(Action::Send { to, message: Message::Alive, payload: Vec::new() });
        }
    }

    /// What the program may do with a page.
    pub fn mode(&self, page: Page) -> Mode {
        self.held.get(&page).map_or(Mode::None, |held| held.mode)
    }

    /// The program leaves the job, and no other rank needs anything of this one any more: all have met at a barrier.
    pub fn leave(&mut self) {
        let rank = self.rank;
        for to in (0..self.ranks).filter(|to| *to != rank) {
            self.send(to, Message::Leave, Vec::new());
        }
        self.left |= 1 << rank;
        self.is_leaving = true;
    }

    /// Whether all ranks leave: no message comes any more.
    pub fn is_alone(&self) -> bool {
        self.left.count_ones() == u32::from(self.ranks)
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
        let mut outbox = Outbox::new();
        let done = self.locks.unlock(lock, &mut outbox)?;
        self.actions.extend(done);
        self.send_all(outbox);
        Ok(())
    }

    /// The program has reached a barrier: [`Outcome::Passed`](super::Outcome::Passed).
    ///
    /// # Errors
    /// `AtBarrier`.
    pub fn barrier(&mut self, barrier: u32, ticket: Ticket) -> Result<(), Misuse> {
        let round = self.barriers.wait(barrier, ticket)?;
        let to = self.manager(barrier);
        self.send_all(vec![(to, Message::Arrive { barrier, round }, Vec::new())]);
        Ok(())
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

    fn held(&mut self, page: Page) -> &mut PageState {
        self.held.entry(page).or_insert(PageState { mode: Mode::None, asked: Mode::None, home: None })
    }

    /// The rank that remembers the home of a page.
    fn registrar(&self, page: Page) -> Rank {
        (page % u32::from(self.ranks)) as Rank
    }

    fn manager(&self, id: u32) -> Rank {
        (id % u32::from(self.ranks)) as Rank
    }

    fn end(&mut self, reason: JobEnd) {
        if !self.is_over {
            self.is_over = true;
            self.actions.clear();
            self.own.clear();
            let ended = match reason {
                JobEnd::Gone { rank } => Some((rank, 0)),
                JobEnd::Silent { rank, seconds } => Some((rank, seconds)),
                JobEnd::Misbehaved { .. } => None,
            };
            if let Some((rank, seconds)) = ended {
                let (me, left) = (self.rank, self.left);
                let others = (0..self.ranks).filter(|to| ![me, rank].contains(to) && left & 1 << to == 0);
                let message = Message::Ended { rank, seconds };
                self.actions.extend(others.map(|to| Action::Send { to, message, payload: Vec::new() }));
            }
            self.actions.push_back(Action::End { reason });
        }
    }

    fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        if to == self.rank {
            self.own.push_back(Own::Message(message, payload));
        } else {
            self.counters.messages += 1;
            self.actions.push_back(Action::Send { to, message, payload });
        }
    }

    fn send_all(&mut self, outbox: Outbox) {
        for (to, message, payload) in outbox {
            self.send(to, message, payload);
        }
        self.take_own();
    }

    fn take_own(&mut self) {
        while let Some(own) = self.own.pop_front() {
            match own {
                Own::Message(message, payload) => self.handle_own(message, payload),
                Own::Step(page, step) => self.take_step(page, step),
            }
        }
    }

    fn handle_own(&mut self, message: Message, payload: Vec<u8>) {
        if let Err(what) = self.handle(self.rank, message, payload) {
            self.end(JobEnd::Misbehaved { rank: self.rank, what });
        }
    }

    fn handle(&mut self, from: Rank, message: Message, payload: Vec<u8>) -> Handled {
        let mut outbox = Outbox::new();
        match message {
            Message::Hello { .. } => return Err("it said hello twice"),
            Message::Ask { page, mode, requester } => return self.asked(from, page, mode, requester),
            Message::Own { page } => return self.owns(from, page),
            Message::Forward { page, mode, requester, version } => {
                return self.forwarded(from, page, mode, (requester, version));
            }
            Message::Page { page, mode, home, version } => {
                return self.page_came(from, (page, mode, home, version), payload);
            }
            Message::Upgrade { page, .. } => return self.upgraded(page),
            Message::Invalidate { page, version } => return self.invalidated(from, page, version),
            Message::Acknowledge { page, version } => {
                return self.at_home(page, |home, steps| home.acknowledged(from, version, steps));
            }
            Message::Confirm { page, version } => {
                return self.at_home(page, |home, steps| home.confirmed(from, version, steps));
            }
            Message::Lock { lock } => self.locks.asked(from, lock, &mut outbox)?,
            Message::Unlock { lock } => self.locks.returned(from, lock, &mut outbox),
            Message::Next { lock, waiter } => self.locks.next(lock, waiter, &mut outbox)?,
            Message::Locked { lock } => self.actions.push_back(self.locks.locked(lock)?),
            Message::Unlocked { lock } => self.locks.freed(lock, &mut outbox)?,
            Message::Arrive { barrier, round } => self.barriers.arrived(from, barrier, round, &mut outbox)?,
            Message::Pass { barrier, round } => self.actions.push_back(self.barriers.passed(barrier, round)?),
            Message::Leave if seeded::is(Bug::DsmLeaveForgotten) => {}
            Message::Leave => self.left |= 1 << from,
            Message::Alive => {}
            Message::Ended { rank, .. } if rank >= self.ranks => {
                return Err("it named a rank that the job does not have");
            }
            Message::Ended { .. } if self.is_leaving => {}
            Message::Ended { .. } if seeded::is(Bug::DsmMessengerNamed) => self.end(JobEnd::Gone { rank: from }),
            Message::Ended { rank, seconds: 0 } => self.end(JobEnd::Gone { rank }),
            Message::Ended { rank, seconds } => self.end(JobEnd::Silent { rank, seconds }),
            Message::Map { .. } if self.rank != 0 => return Err("it took this rank for rank 0"),
            Message::Map { pages } => self.segments.asked(from, &payload, pages, &mut outbox)?,
            Message::Mapped { status, first, pages } => {
                self.actions.extend(self.segments.answered(&payload, (status, first, pages))?);
            }
        }
        for (to, message, payload) in outbox {
            self.send(to, message, payload);
        }
        Ok(())
    }

    fn asked(&mut self, from: Rank, page: Page, mode: Mode, requester: Rank) -> Handled {
        let registrar = self.registrar(page);
        if requester >= self.ranks || requester != from && from != registrar {
            return Err("it asked for a page on behalf of another rank");
        }
        if self.homes.contains_key(&page) {
            return self.at_home(page, |home, steps| home.ask(requester, mode, steps));
        }
        if registrar != self.rank {
            return Err("it asked a rank that is neither the page's home nor its registrar");
        }
        match self.first.get(&page) {
            Some(home) if *home == requester => return Err("it asked the registrar for a page whose home it is"),
            Some(home) => self.send(*home, Message::Ask { page, mode, requester }, Vec::new()),
            None => {
                if !seeded::is(Bug::DsmHomeNotRecorded) {
                    self.first.insert(page, requester);
                }
                self.send(requester, Message::Own { page }, Vec::new());
            }
        }
        Ok(())
    }

    fn owns(&mut self, from: Rank, page: Page) -> Handled {
        let is_asked = self.held(page).asked > Mode::None;
        if from != self.registrar(page) || !is_asked || self.homes.contains_key(&page) {
            return Err("it gave away a page that is not its to give");
        }
        self.held(page).home = Some(self.rank);
        let mut steps = Vec::new();
        self.homes.insert(page, Home::new(page, self.rank, &mut steps));
        self.take_steps(page, steps);
        Ok(())
    }

    fn at_home(&mut self, page: Page, change: impl FnOnce(&mut Home, &mut Vec<Step>) -> Handled) -> Handled {
        let mut steps = Vec::new();
        let home = self.homes.get_mut(&page).ok_or("it took this rank for the home of a page")?;
        change(home, &mut steps)?;
        self.take_steps(page, steps);
        Ok(())
    }

    fn take_steps(&mut self, page: Page, steps: Vec<Step>) {
        self.own.extend(steps.into_iter().map(|step| Own::Step(page, step)));
    }

    fn take_step(&mut self, page: Page, step: Step) {
        match step {
            Step::Tell(to, message) if to == self.rank => self.handle_own(message, Vec::new()),
            Step::Tell(to, message) => self.send(to, message, Vec::new()),
            Step::Lower(to) => self.lower(page, to),
            Step::SendPage(to, message) => self.send_page(to, page, message),
            Step::Begin(mode) => self.install(page, mode, Contents::Zero),
        }
    }

    fn send_page(&mut self, to: Rank, page: Page, message: Message) {
        self.counters.messages += 1;
        self.counters.pages_sent += 1;
        self.actions.push_back(Action::SendPage { to, page, message });
    }

    /// The program loses a right to a page, which is sent to another rank then.
    fn lower(&mut self, page: Page, to: Mode) {
        let held = self.held(page);
        let had = std::mem::replace(&mut held.mode, to);
        match (had, to) {
            (Mode::Write, Mode::Read) => self.actions.push_back(Action::Protect { page }),
            (_, Mode::None) => self.actions.push_back(Action::Take { page }),
            _ => {}
        }
    }

    /// The program loses a copy that another rank has too.
    fn drop_copy(&mut self, page: Page) {
        self.held(page).mode = Mode::None;
        self.actions.push_back(Action::Unmap { page });
    }

    fn install(&mut self, page: Page, mode: Mode, contents: Contents) {
        let held = self.held(page);
        held.mode = mode;
        held.asked = Mode::None;
        self.actions.push_back(Action::Install { page, mode, contents });
    }

    /// A home wants a page sent to another rank.
    fn forwarded(&mut self, from: Rank, page: Page, mode: Mode, (requester, version): (Rank, u64)) -> Handled {
        if requester >= self.ranks || requester == self.rank || self.held(page).mode == Mode::None {
            return Err("it wants a page sent that is not here");
        }
        let to = if mode == Mode::Write { Mode::None } else { Mode::Read };
        let message = Message::Page { page, mode, home: from, version };
        let early = match to {
            Mode::None => seeded::is(Bug::DsmSentBeforeUnmap),
            _ => seeded::is(Bug::DsmSentBeforeProtect),
        };
        if early {
            self.send_page(requester, page, message);
        }
        if !(to == Mode::Read && seeded::is(Bug::DsmWriterNotProtected)) {
            self.lower(page, to);
        }
        if !early {
            self.send_page(requester, page, message);
        }
        Ok(())
    }

    fn page_came(
        &mut self,
        from: Rank,
        (page, mode, home, version): (Page, Mode, Rank, u64),
        payload: Vec<u8>,
    ) -> Handled {
        let held = self.held(page);
        if held.asked == Mode::None || held.asked > mode || home != held.home.unwrap_or(home) {
            return Err("it sent a page that this rank did not ask for");
        }
        held.home = Some(home);
        self.counters.pages_received += 1;
        let installed = if seeded::is(Bug::DsmCopyWritable) { Mode::Write } else { mode };
        self.install(page, installed, Contents::Received(payload));
        // The home's own pages come in the order of its messages.
        if from != home {
            self.send(home, Message::Confirm { page, version }, Vec::new());
        }
        Ok(())
    }

    fn upgraded(&mut self, page: Page) -> Handled {
        let held = self.held(page);
        if held.asked != Mode::Write || held.mode != Mode::Read {
            return Err("it let this rank write to a page that it has no copy of");
        }
        let zeroes = seeded::is(Bug::DsmUpgradeToZeroes);
        self.install(page, Mode::Write, if zeroes { Contents::Zero } else { Contents::Kept });
        Ok(())
    }

    fn invalidated(&mut self, from: Rank, page: Page, version: u64) -> Handled {
        match self.held(page).mode {
            Mode::None => return Err("it recalled a page that this rank has no copy of"),
            Mode::Write if !seeded::is(Bug::DsmCopyWritable) => {
                return Err("it dropped the only copy of a page, which this rank may write to");
            }
            _ => {}
        }
        self.counters.invalidations += 1;
        let acknowledge = Message::Acknowledge { page, version };
        if seeded::is(Bug::DsmAcknowledgedBeforeUnmap) {
            self.send(from, acknowledge, Vec::new());
            self.drop_copy(page);
        } else {
            self.drop_copy(page);
            self.send(from, acknowledge, Vec::new());
        }
        Ok(())
    }
}
