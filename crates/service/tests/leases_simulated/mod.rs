//! One server of files and three clients with caches, in which chance says what happens next.
//!
//! A step is one thing of one party: a message arrives, the server reads or changes a file, a kernel looks at a page, a recall is
//! worked on. The server is killed and started again. Clients are stopped and cut off, their sessions end, recalls are answered late. The rule: what an operation has seen
//! was so at the server at some step between its begin and its end, so all operations have one order.

pub mod agent;
pub mod server;

use std::collections::HashMap;
use std::time::Duration;

use byway_reactor::Instant;
pub use byway_skip::seeds::{Broken, Chance};

use self::agent::Agent;
use self::server::Server;

/// Clients.
pub const AGENTS: usize = 3;
/// Nodes: the directory is 0, files follow.
pub const FILES: u64 = 3;
/// Names in the directory.
pub const NAMES: u8 = 3;
/// Steps of a run, and of its end, when nothing new begins and nobody is cut off.
const STEPS: usize = 4000;
const CALM_STEPS: usize = 30_000;

/// What has a value that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// Bytes of a file: the number of its last write.
    Data(u64),
    /// Attributes of a file: the number of its last change.
    Stamp(u64),
    /// The file of a name, or 0.
    Name(u8),
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Renew,
    Stat(u64),
    Read(u64),
    LookUp(u8),
    Write(u64),
    Chmod(u64),
    /// And the file that the client takes it for, or 0.
    Unlink(u8, u64),
    Link(u64, u8),
    Rename(u8, u8, [u64; 2]),
}

/// What a call is answered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answer {
    /// Of the file that was asked for, or found; with its lease.
    pub stamp: u64,
    pub data: u64,
    pub found: u64,
    pub lease: Option<u64>,
    /// Of the directory.
    pub directory_lease: Option<u64>,
    /// The change of names was made.
    pub made: bool,
}

#[derive(Clone, Copy, Debug)]
pub enum Body {
    Call { id: u64, kind: Kind },
    Returned { node: u64, version: u64 },
    Answer { id: u64, answer: Answer },
    Recall { node: u64, version: u64 },
}

#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub to_server: bool,
    pub agent: usize,
    pub session: u64,
    pub body: Body,
}

/// All values that each register had, with the steps at which they began.
#[derive(Default)]
pub struct Truth {
    values: HashMap<Register, Vec<(usize, u64)>>,
    pub step: usize,
    pub broken: Option<String>,
    pub cached: usize,
    pub asked: usize,
    /// Changes of names after which the client went on with what it knew of the others.
    pub kept: usize,
}

impl Truth {
    pub fn set(&mut self, register: Register, value: u64) {
        self.values.entry(register).or_insert_with(|| vec![(0, 0)]).push((self.step, value));
    }

    pub fn now(&self, register: Register) -> u64 {
        self.values.get(&register).and_then(|all| all.last()).map_or(0, |last| last.1)
    }

    /// An operation that began at step `start` and ends now has seen a value.
    pub fn check(&mut self, register: Register, value: u64, start: usize) {
        let first = [(0, 0)];
        let all = self.values.get(&register).map_or(&first[..], Vec::as_slice);
        // Those whose end is not before the start.
        let from = all.iter().rposition(|(began, _)| *began <= start).unwrap_or(0);
        if !all[from..].iter().any(|(_, other)| *other == value) && self.broken.is_none() {
            let at = self.step;
            self.broken =
                Some(format!("{register:?}: {value} was seen in steps {start} to {at}, not in {:?}", &all[from..]));
        }
    }
}

pub struct World {
    pub chance: Chance,
    pub now: Instant,
    pub truth: Truth,
    pub wire: Vec<Message>,
    server: Server,
    agents: Vec<Agent>,
}

/// What a run has done.
#[derive(Debug)]
#[allow(dead_code, reason = "each test uses a part of it")]
pub struct Report {
    pub operations: usize,
    /// Operations that were answered without a message.
    pub cached: usize,
    /// Sessions that the server ended because of a recall.
    pub fenced: usize,
    /// Restarts of the server.
    pub restarts: usize,
    /// Changes of names after which their client has kept the lease.
    pub kept: usize,
}

#[derive(Clone, Copy)]
enum Next {
    Deliver(usize),
    Server(usize),
    Agent(usize, agent::Next),
}

/// Runs a seed.
pub fn run(seed: u64) -> Result<Report, Broken> {
    let mut world = World {
        chance: Chance::new(seed),
        now: Instant::from_nanos(1_000_000_000_000),
        truth: Truth::default(),
        wire: Vec::new(),
        server: Server::default(),
        agents: (0..AGENTS).map(|place| Agent::new(place, seed.is_multiple_of(2))).collect(),
    };
    for place in 0..AGENTS {
        world.join(place);
    }
    for calm in [false, true] {
        for _ in 0..if calm { CALM_STEPS } else { STEPS } {
            if !world.step(calm) {
                break;
            }
            if let Some(rule) = world.truth.broken.take() {
                return Err(Broken(rule));
            }
        }
    }
    if world.agents.iter().any(Agent::is_busy) {
        let busy: Vec<_> = world.agents.iter().filter(|agent| agent.is_busy()).collect();
        return Err(Broken(format!("operations never end: {busy:?}")));
    }
    let operations = world.agents.iter().map(|agent| agent.ended).sum();
    let Truth { cached, kept, .. } = world.truth;
    Ok(Report { operations, cached, fenced: world.server.fenced, restarts: world.server.restarts, kept })
}

impl World {
    /// One step; false if nothing is left to do.
    fn step(&mut self, calm: bool) -> bool {
        self.truth.step += 1;
        let passes = match self.chance.below(if calm { 20 } else { 120 }) {
            0 => Duration::from_millis(self.chance.below(6000) as u64),
            _ => Duration::from_micros(self.chance.below(2000) as u64),
        };
        self.now = self.now + passes;
        self.server.time(self.now, &mut self.wire);
        if !calm {
            self.trouble();
        }
        for place in 0..AGENTS {
            // A session that has ended is noticed in a while; then there is another.
            let agent = &self.agents[place];
            let ended = !self.server.knows(agent.session) && (calm || agent.is_reachable(self.now));
            if ended && (calm || self.chance.one_in(60)) {
                self.join(place);
            }
        }
        let next = self.candidates(calm);
        if next.is_empty() {
            return calm && self.agents.iter().any(Agent::is_busy) || !calm;
        }
        match next[self.chance.below(next.len())] {
            Next::Deliver(at) => {
                let message = self.wire.swap_remove(at);
                self.deliver(message);
            }
            Next::Server(at) => self.server.work(at, self.now, &mut self.truth, &mut self.wire),
            Next::Agent(place, next) => {
                let (agent, wire) = (&mut self.agents[place], &mut self.wire);
                agent.work(next, self.now, &mut self.chance, &mut self.truth, wire);
            }
        }
        true
    }

    fn join(&mut self, place: usize) {
        self.agents[place].end_session(self.truth.step);
        let session = self.server.join((place, self.agents[place].session), self.now, &mut self.wire);
        self.agents[place].begin_session(session);
    }

    fn trouble(&mut self) {
        if self.chance.one_in(150) {
            let place = self.chance.below(AGENTS);
            let lasts = Duration::from_millis(self.chance.below(25_000) as u64);
            match self.chance.below(6) {
                // Cut off, with or without the server noticing.
                0 => self.agents[place].cut_off(self.now + lasts),
                1 => {
                    self.agents[place].cut_off(self.now + lasts);
                    self.server.lose(self.agents[place].session, self.now, &mut self.wire);
                }
                2 => self.agents[place].stop(self.now + lasts),
                3 => self.agents[place].recalls_late(self.now + lasts),
                4 => {
                    self.agents[place].cut_off(self.now + lasts);
                    self.server.restart(self.now);
                }
                _ => self.server.lose(self.agents[place].session, self.now, &mut self.wire),
            }
        }
    }

    fn candidates(&self, calm: bool) -> Vec<Next> {
        let mut next: Vec<_> = self.server.work_places().map(Next::Server).collect();
        for (at, message) in self.wire.iter().enumerate() {
            let agent = &self.agents[message.agent];
            if calm || (agent.is_reachable(self.now) && (message.to_server || agent.runs(self.now))) {
                next.push(Next::Deliver(at));
            }
        }
        for (place, agent) in self.agents.iter().enumerate() {
            if calm || agent.runs(self.now) {
                next.extend(agent.candidates(self.now, calm).map(|one| Next::Agent(place, one)));
            }
            // Also while the mount is stopped.
            if !calm {
                next.push(Next::Agent(place, agent::Next::Glance));
            }
        }
        next
    }

    fn deliver(&mut self, message: Message) {
        if message.to_server {
            self.server.take(message, self.now, &mut self.wire);
        } else if self.agents[message.agent].session == message.session {
            self.agents[message.agent].take(message.body, self.now, &mut self.truth);
        }
    }
}
