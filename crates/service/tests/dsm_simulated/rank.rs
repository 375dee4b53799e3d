//! A rank: its machine, the pager that does the machine's actions, and the program's threads with their view of the pages.

use std::collections::VecDeque;
use std::ops::Range;

use byway_reactor::Instant;
use byway_service::coherence::Mode;
use byway_service::dsm::wire::Message;
use byway_service::dsm::{
    Action, Actions, Consistency, Contents, JobEnd, Machine, Outcome, Page, PinnedPages, Rank, Ticket, Twins,
};

use super::programs::Op;
use super::{PAGE_WORDS, Truth};

/// What a machine takes.
pub enum Input {
    Message(Rank, Message, Vec<u8>),
    Fault(Page, Mode),
    Lock(u32, Ticket),
    Unlock(u32),
    Barrier(u32, Ticket),
    Fence(Ticket),
    Fetch(Range<Page>, Ticket),
    Gone(Rank),
    Leave,
}

/// What a page that is not here holds: no program may see it.
const ABSENT: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// It has faulted.
    Needs(Page),
    /// It waits for a call.
    Waits,
    /// It waits for a device, which has pinned the page.
    Device,
}

struct Thread {
    program: Vec<Op>,
    at: usize,
    state: State,
}

#[derive(Clone)]
struct SimulatedPage {
    mode: Mode,
    words: [u64; PAGE_WORDS],
    /// Set aside to be sent.
    aside: Option<[u64; PAGE_WORDS]>,
    /// By how many devices.
    pins: usize,
}

pub struct SimulatedRank {
    rank: Rank,
    machine: Machine,
    inbox: VecDeque<Input>,
    actions: Actions,
    /// What is left of the run of pages that is under way.
    run: VecDeque<Action>,
    pinned: PinnedPages,
    memory: Vec<SimulatedPage>,
    twins: Twins,
    threads: Vec<Thread>,
    /// The number of its first thread among those of all ranks.
    first: usize,
    is_killed: bool,
    has_left: bool,
    /// Ranks whose session has ended, a bit each.
    noticed: u64,
    ended: Option<JobEnd>,
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

type Sent = (Rank, Message, Vec<u8>);

impl SimulatedRank {
    pub fn new(
        (rank, ranks): (Rank, Rank),
        (pages, consistency): (usize, Consistency),
        programs: &[Vec<Op>],
        first: usize,
    ) -> Self {
        let thread = |program: &Vec<Op>| Thread { program: program.clone(), at: 0, state: State::Ready };
        Self {
            rank,
            machine: Machine::new(rank, ranks, pages as u64, consistency),
            inbox: VecDeque::new(),
            actions: Actions::default(),
            run: VecDeque::new(),
            pinned: PinnedPages::default(),
            memory: vec![SimulatedPage { mode: Mode::None, words: [ABSENT; PAGE_WORDS], aside: None, pins: 0 }; pages],
            twins: Twins::default(),
            threads: programs.iter().map(thread).collect(),
            first,
            is_killed: false,
            has_left: false,
            noticed: 0,
            ended: None,
        }
    }

    pub fn runs(&self) -> bool {
        !self.is_killed && !self.is_closed() && self.ended.is_none()
    }

    /// Its process has left the job and closed its sessions.
    pub fn is_closed(&self) -> bool {
        self.has_left && self.machine.is_alone() && !self.has_work()
    }

    /// The end of the session with another rank.
    pub fn notice(&mut self, rank: Rank) {
        self.noticed |= 1 << rank;
        self.inbox.push_back(Input::Gone(rank));
    }

    pub fn has_noticed(&self, rank: Rank) -> bool {
        self.noticed & 1 << rank != 0
    }

    pub fn has_left(&self) -> bool {
        self.has_left
    }

    pub fn leave(&mut self) {
        self.has_left = true;
        self.inbox.push_back(Input::Leave);
    }

    pub fn kill(&mut self) {
        self.is_killed = true;
    }

    pub fn ended(&self) -> Option<&JobEnd> {
        self.ended.as_ref()
    }

    pub fn is_done(&self) -> bool {
        self.threads.iter().all(|thread| thread.at == thread.program.len())
    }

    pub fn pages_sent(&self) -> u64 {
        self.machine.counters().pages_sent
    }

    pub fn can_load(&self, page: usize) -> bool {
        self.memory[page].mode >= Mode::Read
    }

    pub fn ready_threads(&self) -> impl Iterator<Item = usize> {
        let can = |state| matches!(state, State::Ready | State::Device);
        let is_ready = move |thread: &Thread| can(thread.state) && thread.at < thread.program.len();
        self.threads.iter().enumerate().filter(move |(_, thread)| is_ready(thread)).map(|(place, _)| place)
    }

    /// Whether the pager is busy.
    pub fn has_work(&self) -> bool {
        self.has_actions() || self.has_input() || self.can_retry()
    }

    pub fn has_actions(&self) -> bool {
        !self.run.is_empty() || !self.actions.is_empty()
    }

    pub fn has_input(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Whether a page waits that no device has pinned any more.
    fn can_retry(&self) -> bool {
        self.pinned.oldest().is_some() && self.memory.iter().all(|memory| memory.pins == 0)
    }

    pub fn take(&mut self, input: Input) {
        self.inbox.push_back(input);
    }

    /// The page that a thread's store would change now.
    pub fn page_of_store(&self, thread: usize) -> Option<usize> {
        let thread = &self.threads[thread];
        match thread.program[thread.at] {
            Op::Store(word, _) => Some(word / PAGE_WORDS).filter(|page| self.memory[*page].mode == Mode::Write),
            Op::Receive(word, _) => Some(word / PAGE_WORDS).filter(|_| thread.state == State::Device),
            _ => None,
        }
    }

    pub fn run_thread(&mut self, place: usize, truth: &mut Truth, others: Vec<usize>) {
        let number = self.first + place;
        let thread = &mut self.threads[place];
        let op = thread.program[thread.at];
        match op {
            Op::Load(word) | Op::Store(word, _) => {
                let needs = if matches!(op, Op::Load(_)) { Mode::Read } else { Mode::Write };
                let page = word / PAGE_WORDS;
                let memory = &mut self.memory[page];
                if memory.mode < needs {
                    thread.state = State::Needs(page as Page);
                    self.inbox.push_back(Input::Fault(page as Page, needs));
                    return;
                }
                let slot = &mut memory.words[word % PAGE_WORDS];
                if let Op::Store(_, value) = op {
                    *slot = value;
                    truth.store((number, "it"), (word, value), &others);
                } else {
                    truth.load(number, word, *slot);
                }
            }
            Op::Receive(word, value) => {
                let page = word / PAGE_WORDS;
                let memory = &mut self.memory[page];
                if thread.state == State::Ready {
                    if memory.mode < Mode::Write {
                        thread.state = State::Needs(page as Page);
                        self.inbox.push_back(Input::Fault(page as Page, Mode::Write));
                    } else {
                        thread.state = State::Device;
                        memory.pins += 1;
                    }
                    return;
                }
                // The device does not look whether the program still has the page.
                memory.words[word % PAGE_WORDS] = value;
                memory.pins -= 1;
                thread.state = State::Ready;
                truth.store((number, "its device"), (word, value), &others);
            }
            Op::Unlock(lock) => {
                truth.locks.remove(&lock);
                truth.order.unlocks(number, lock);
                self.inbox.push_back(Input::Unlock(lock));
            }
            Op::Lock(_) | Op::Fence | Op::Fetch(..) | Op::Barrier(_) => {
                thread.state = State::Waits;
                return self.inbox.push_back(wait_of(op, (number, place as Ticket), truth));
            }
        }
        thread.at += 1;
    }

    /// Does the next action, or what waited for a device; if there is none, the machine takes the next input.
    pub fn run_pager(&mut self, truth: &mut Truth) -> Vec<Sent> {
        let mut sent = Vec::new();
        if let Some(action) = self.next_action() {
            if let Some(action) = self.pinned.admit(action)
                && let Some(action) = self.act(action, truth, &mut sent)
            {
                self.pinned.wait(action, Instant::ZERO);
            }
        } else if self.can_retry() {
            let mut pinned = std::mem::take(&mut self.pinned);
            pinned.retry(|action| self.act(action, truth, &mut sent));
            self.pinned = pinned;
        } else {
            self.feed();
        }
        self.actions.gather(&mut self.machine);
        sent
    }

    /// Gives the machine the next input.
    pub fn gather(&mut self) {
        self.feed();
        self.actions.gather(&mut self.machine);
    }

    fn next_action(&mut self) -> Option<Action> {
        if self.run.is_empty() {
            let mut run = Vec::new();
            self.actions.next_run(&mut run);
            self.run.extend(run);
        }
        self.run.pop_front()
    }

    fn feed(&mut self) {
        let misuse = "the programs of these tests use locks and barriers well";
        match self.inbox.pop_front() {
            Some(Input::Message(from, message, payload)) => self.machine.received(from, message, payload),
            Some(Input::Fault(page, mode)) => self.machine.fault(page, mode),
            Some(Input::Lock(lock, ticket)) => self.machine.lock(lock, ticket).expect(misuse),
            Some(Input::Unlock(lock)) => self.machine.unlock(lock).expect(misuse),
            Some(Input::Barrier(barrier, ticket)) => self.machine.barrier(barrier, ticket).expect(misuse),
            Some(Input::Fetch(pages, ticket)) => self.machine.fetch(pages, ticket).expect(misuse),
            Some(Input::Fence(ticket)) => self.machine.fence(ticket).expect(misuse),
            Some(Input::Gone(rank)) => self.machine.gone(rank),
            Some(Input::Leave) => self.machine.leave(),
            None => {}
        }
    }

    /// Does an action, or gives it back if a device has pinned its page.
    fn act(&mut self, action: Action, truth: &mut Truth, sent: &mut Vec<Sent>) -> Option<Action> {
        match action {
            Action::Send { to, message, payload } => sent.push((to, message, payload)),
            Action::SendPage { to, page, message } => {
                let memory = &mut self.memory[page as usize];
                let words = memory.aside.take().unwrap_or(memory.words);
                self.send(to, message, bytes_of(&words), sent);
            }
            Action::Protect { page }
            | Action::Take { page }
            | Action::Flush { page, .. }
            | Action::Twin { page, .. }
                if self.memory[page as usize].pins > 0 =>
            {
                return Some(action);
            }
            Action::Twin { page, contents } => {
                let before = match &contents {
                    Contents::Received(bytes) => bytes.clone(),
                    _ => bytes_of(&self.memory[page as usize].words),
                };
                self.twins.keep(page, before.into());
                self.install(page, Mode::Write, &contents);
            }
            Action::ForgetTwin { page } => self.twins.forget(page),
            Action::Flush { to, page, message, keeps } => {
                let memory = &mut self.memory[page as usize];
                let bytes = bytes_of(&memory.words);
                memory.mode = if keeps { Mode::Read } else { Mode::None };
                if !keeps {
                    memory.words = [ABSENT; PAGE_WORDS];
                }
                let difference = self.twins.difference(page, &bytes);
                self.send(to, message, difference, sent);
                self.machine.flushed(page);
            }
            Action::Protect { page } => {
                let memory = &mut self.memory[page as usize];
                (memory.mode, memory.aside) = (Mode::Read, Some(memory.words));
            }
            Action::Take { page } => {
                let memory = &mut self.memory[page as usize];
                (memory.mode, memory.aside) = (Mode::None, Some(memory.words));
                memory.words = [ABSENT; PAGE_WORDS];
            }
            Action::Unmap { page } => {
                let memory = &mut self.memory[page as usize];
                (memory.mode, memory.words) = (Mode::None, [ABSENT; PAGE_WORDS]);
            }
            Action::Install { page, mode, contents } => self.install(page, mode, &contents),
            Action::Done { ticket, outcome } => self.done(ticket as usize, outcome, truth),
            Action::End { reason } => self.ended = Some(reason),
        }
        None
    }

    fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>, sent: &mut Vec<Sent>) {
        if to == self.rank {
            self.machine.received(to, message, payload);
        } else {
            sent.push((to, message, payload));
        }
    }

    fn install(&mut self, page: Page, mode: Mode, contents: &Contents) {
        let memory = &mut self.memory[page as usize];
        match contents {
            Contents::Zero => memory.words = [0; PAGE_WORDS],
            Contents::Received(bytes) => {
                let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
                memory.words.iter_mut().zip(words).for_each(|(slot, word)| *slot = word);
            }
            Contents::Kept => {}
        }
        memory.mode = mode;
        for thread in self.threads.iter_mut().filter(|thread| thread.state == State::Needs(page)) {
            thread.state = State::Ready;
        }
    }

    fn done(&mut self, place: usize, outcome: Outcome, truth: &mut Truth) {
        let number = self.first + place;
        let thread = &mut self.threads[place];
        match (thread.program[thread.at], outcome) {
            (Op::Lock(lock), Outcome::Locked) => {
                if let Some(other) = truth.locks.insert(lock, number) {
                    truth.breaks(|| format!("threads {other} and {number} have lock {lock}"));
                }
                truth.order.locks(number, lock);
            }
            (Op::Barrier(barrier), Outcome::Passed) => {
                // Each barrier of these programs is used once, by one thread of each rank.
                let (arrived, ranks) = (truth.arrived[&barrier], self.machine.ranks());
                if arrived < usize::from(ranks) {
                    truth.breaks(|| format!("barrier {barrier} opened when {arrived} of {ranks} were there"));
                }
                truth.order.passes(number, barrier);
            }
            (Op::Fetch(..), Outcome::Fetched) => {}
            (Op::Fence, Outcome::Fenced) => truth.order.ends_fence(number),
            (op, outcome) => truth.breaks(|| format!("thread {number} at {op:?} got {outcome:?}")),
        }
        thread.state = State::Ready;
        thread.at += 1;
    }
}

/// What the machine is given for an operation that a thread waits for.
fn wait_of(op: Op, (number, ticket): (usize, Ticket), truth: &mut Truth) -> Input {
    match op {
        Op::Lock(lock) => Input::Lock(lock, ticket),
        Op::Fence => {
            truth.order.begins_fence(number);
            Input::Fence(ticket)
        }
        Op::Fetch(first, count) => Input::Fetch(first as Page..(first + count) as Page, ticket),
        Op::Barrier(barrier) => {
            *truth.arrived.entry(barrier).or_default() += 1;
            truth.order.arrives(number, barrier);
            Input::Barrier(barrier, ticket)
        }
        other => unreachable!("{other:?} does not wait"),
    }
}
