//! Jobs of 2 to 8 ranks in which chance says what happens next, and the rules that no run may break.
//!
//! A step is one thing of one rank: a load, a store or a call of a thread, one action of the rank's pager, or one fault, call or
//! message that its machine takes, in some runs while actions of earlier ones are left. So the program's threads run between any two actions,
//! also of one run of pages, and messages of different ranks overtake each other. Every seed is one run.

pub mod history;
pub mod litmus;
pub mod order;
pub mod programs;
mod rank;

use std::collections::{HashMap, VecDeque};

use byway_service::dsm::wire::Message;
use byway_service::dsm::{Consistency, JobEnd, Rank};
pub use byway_skip::seeds::{Broken, Chance};

use self::history::Event;
use self::order::Order;
use self::programs::Op;
use self::rank::{Input, SimulatedRank};

/// Words of a simulated page.
pub const PAGE_WORDS: usize = 2;
/// Steps of a run; one that takes more never ends.
const STEPS_MAX: usize = 400_000;

/// What a job does: the threads of each rank, and when a rank is killed, if one is.
pub struct SimulatedJob {
    pub ranks: Vec<Vec<Vec<Op>>>,
    pub pages: usize,
    pub consistency: Consistency,
    /// Whether locks, barriers and fences order all accesses that conflict.
    pub races: bool,
    pub killed: Option<(usize, Rank)>,
    /// Whether the ranks leave the job when all threads are done.
    pub leaves: bool,
}

/// What a run has done.
#[derive(Debug)]
pub struct Report {
    pub events: Vec<Event>,
    /// Pages that ranks sent to each other.
    pub pages_sent: u64,
    pub killed: bool,
}

/// What all ranks share, for the rules alone.
#[derive(Default)]
pub struct Truth {
    /// The last value that was stored in each word.
    words: HashMap<usize, u64>,
    /// Which thread has each lock.
    locks: HashMap<u32, usize>,
    /// How many threads have come to each barrier.
    arrived: HashMap<u32, usize>,
    /// The first rule that was broken by what a step saw.
    broken: Option<String>,
    consistency: Consistency,
    order: Order,
    events: Vec<Event>,
}

impl Truth {
    fn breaks(&mut self, rule: impl FnOnce() -> String) {
        if self.broken.is_none() {
            self.broken = Some(rule());
        }
    }

    /// A thread, or its device, stores a value in a word while other ranks have copies of its page.
    fn store(&mut self, (thread, who): (usize, &str), (word, value): (usize, u64), others: &[usize]) {
        self.words.insert(word, value);
        self.order.stores(thread, word, value);
        if self.consistency == Consistency::Sequential && !others.is_empty() {
            self.breaks(|| format!("thread {thread}: {who} stores while ranks {others:?} have copies"));
        }
        self.events.push(Event { thread, stores: true, word, value });
    }

    fn load(&mut self, thread: usize, word: usize, value: u64) {
        match self.consistency {
            Consistency::Sequential if self.words.get(&word).copied().unwrap_or(0) != value => {
                self.breaks(|| format!("thread {thread} loads an old value of word {word}"));
            }
            Consistency::Sequential => {}
            Consistency::Release => {
                if let Err(rule) = self.order.loads(thread, word, value) {
                    self.breaks(|| rule);
                }
            }
        }
        self.events.push(Event { thread, stores: false, word, value });
    }
}

type Wire = VecDeque<(Message, Vec<u8>)>;

struct World {
    chance: Chance,
    ranks: Vec<SimulatedRank>,
    wires: HashMap<(Rank, Rank), Wire>,
    truth: Truth,
    killed: Option<Rank>,
    leaves: bool,
    races: bool,
    /// Messages from this rank to that one are late, so that those of other ranks overtake them.
    slow: Option<(Rank, Rank)>,
    /// Whether machines take further inputs before their actions are done: in one run of four, since messages are less late then.
    gathers: bool,
}

/// What can happen next.
#[derive(Clone, Copy)]
enum Next {
    Thread(usize, usize),
    Pager(usize),
    /// The machine takes a further input before its actions are done.
    Gather(usize),
    Deliver(Rank, Rank),
    /// The end of a session is noticed: of a rank that was killed, or has left.
    Gone(Rank, Rank),
    Leave(usize),
}

/// Runs a job.
pub fn run(job: &SimulatedJob, seed: u64) -> Result<Report, Broken> {
    let count = job.ranks.len() as Rank;
    let mut first = 0;
    let ranks = job.ranks.iter().enumerate().map(|(rank, threads)| {
        let made = SimulatedRank::new((rank as Rank, count), (job.pages, job.consistency), threads, first);
        first += threads.len();
        made
    });
    let (mut chance, ranks) = (Chance::new(seed), ranks.collect());
    let is_released = job.consistency == Consistency::Release;
    let any_rank = |chance: &mut Chance| chance.below(usize::from(count)) as Rank;
    let slow = (is_released && chance.one_in(2)).then(|| (any_rank(&mut chance), any_rank(&mut chance)));
    let gathers = chance.one_in(4);
    let truth = Truth { consistency: job.consistency, order: Order::new(first), ..Truth::default() };
    let (killed, leaves, races) = (None, job.leaves, job.races);
    let mut world = World { chance, ranks, wires: HashMap::new(), truth, killed, leaves, races, slow, gathers };
    for step in 0..STEPS_MAX {
        if let Some((_, rank)) = job.killed.filter(|(at, _)| *at == step) {
            world.kill(rank);
        }
        let next = world.candidates();
        if next.is_empty() {
            return world.end();
        }
        let chosen = world.choose(&next);
        world.step(chosen);
    }
    Err(Broken(world.truth.broken.take().unwrap_or_else(|| "the run never ends".to_owned())))
}

impl World {
    fn candidates(&self) -> Vec<Next> {
        let mut next = Vec::new();
        for (place, rank) in self.ranks.iter().enumerate() {
            if !rank.runs() {
                continue;
            }
            next.extend(rank.ready_threads().map(|thread| Next::Thread(place, thread)));
            if rank.has_work() {
                next.push(Next::Pager(place));
            }
            let gathers = self.gathers && rank.has_actions();
            if gathers && rank.has_input() {
                next.push(Next::Gather(place));
            }
            if !rank.has_work() || gathers {
                let to = place as Rank;
                let comes = |from: &Rank| self.wires.get(&(*from, to)).is_some_and(|wire| !wire.is_empty());
                let senders = (0..self.ranks.len() as Rank).filter(comes);
                next.extend(senders.map(|from| Next::Deliver(from, to)));
                let drained = |from: Rank| self.wires.get(&(from, to)).is_none_or(VecDeque::is_empty);
                let ended = |from: &Rank| self.killed == Some(*from) || self.ranks[usize::from(*from)].is_closed();
                let others = (0..self.ranks.len() as Rank).filter(|from| *from != to);
                let gone = others.filter(|from| ended(from) && drained(*from) && !rank.has_noticed(*from));
                next.extend(gone.map(|from| Next::Gone(from, to)));
            }
        }
        // A process leaves behind a barrier: all threads of all ranks are done.
        if self.leaves && self.ranks.iter().all(SimulatedRank::is_done) {
            let stay = self.ranks.iter().enumerate().filter(|(_, rank)| rank.runs() && !rank.has_left());
            next.extend(stay.map(|(place, _)| Next::Leave(place)));
        }
        next
    }

    fn choose(&mut self, next: &[Next]) -> Next {
        /// How often others go first, while there are any.
        const TIMES: usize = 30;
        let mut chosen = next[self.chance.below(next.len())];
        for _ in 0..TIMES {
            match chosen {
                Next::Deliver(from, to) if self.slow == Some((from, to)) => {
                    chosen = next[self.chance.below(next.len())];
                }
                _ => break,
            }
        }
        chosen
    }

    fn step(&mut self, next: Next) {
        match next {
            Next::Thread(rank, thread) => {
                let exclusive = self.others_with_copies(rank, thread);
                self.ranks[rank].run_thread(thread, &mut self.truth, exclusive);
            }
            Next::Pager(rank) => {
                let from = rank as Rank;
                for (to, message, payload) in self.ranks[rank].run_pager(&mut self.truth) {
                    self.wires.entry((from, to)).or_default().push_back((message, payload));
                }
            }
            Next::Gather(rank) => self.ranks[rank].gather(),
            Next::Deliver(from, to) => {
                let Some((message, payload)) = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front) else {
                    return;
                };
                // As it would be over a real session.
                let message = Message::from_bytes(&message.to_bytes()).expect("a rank sends what can be read");
                self.ranks[usize::from(to)].take(Input::Message(from, message, payload));
            }
            Next::Gone(from, to) => self.ranks[usize::from(to)].notice(from),
            Next::Leave(rank) => self.ranks[rank].leave(),
        }
    }

    /// Ranks beside this one that can use the page that the thread is about to store to.
    fn others_with_copies(&self, rank: usize, thread: usize) -> Vec<usize> {
        let Some(page) = self.ranks[rank].page_of_store(thread) else { return Vec::new() };
        let others = self.ranks.iter().enumerate().filter(|(place, other)| *place != rank && other.runs());
        others.filter(|(_, other)| other.can_load(page)).map(|(place, _)| place).collect()
    }

    /// The rank is gone; of what it has sent to each other rank, the beginning still arrives.
    fn kill(&mut self, rank: Rank) {
        self.killed = Some(rank);
        self.ranks[usize::from(rank)].kill();
        for ((from, to), wire) in &mut self.wires {
            if *from == rank {
                let stays = self.chance.below(wire.len() + 1);
                wire.truncate(stays);
            } else if *to == rank {
                wire.clear();
            }
        }
    }

    /// Nothing can happen any more.
    fn end(self) -> Result<Report, Broken> {
        let broken = |rule: String| Err(Broken(rule));
        let has_one_order = self.truth.consistency == Consistency::Sequential || !self.races;
        if let (true, Err(cycle)) = (has_one_order, history::check(&self.truth.events)) {
            return broken(format!("no order of all loads and stores explains what was seen: {cycle}"));
        }
        if let Some(rule) = self.truth.broken {
            return broken(rule);
        }
        for (place, rank) in self.ranks.iter().enumerate() {
            match (rank.ended(), self.killed) {
                (Some(JobEnd::Gone { rank: named }), Some(killed)) if *named == killed => {}
                (Some(reason), _) => return broken(format!("rank {place} ended the job: {reason}")),
                (None, Some(killed)) if place != usize::from(killed) => {
                    return broken(format!("rank {place} did not end the job"));
                }
                (None, None) if !rank.is_done() => return broken(format!("rank {place} waits for ever")),
                (None, None) if self.leaves && !rank.is_closed() => {
                    return broken(format!("rank {place} never leaves"));
                }
                (None, _) => {}
            }
        }
        let pages_sent = self.ranks.iter().map(SimulatedRank::pages_sent).sum();
        Ok(Report { events: self.truth.events, pages_sent, killed: self.killed.is_some() })
    }
}
