//! Locks of three clients at one server, in which chance says what happens next: no lock is held twice.
//!
//! The tables are real: the server's locks and its grace time, and what a client remembers to ask for again. Around them is a model of
//! sessions, with messages that arrive late and in any order. Clients are cut off and killed, sessions end at either side, the server
//! is killed and started again. Programs lock ranges, and use the bytes while they have them. The rules: a program that uses a byte under
//! its lock finds that no other has used it since it first did, or that all of them share it; a client that is back in the grace time gets
//! its locks back; each operation ends.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use byway_reactor::Instant;
use byway_skip::seeds::{self, Chance};

use super::super::LockRange;
use super::{HeldLock, HeldLocks, nobody_else_had_them};
use crate::file::grace::{ClientHolding, Grace, Holding};
use crate::file::locks::{Family, FileId, Holder, Lock, Locks};
use crate::limits::{FILE_GRACE, FILE_LEASE_TIME};

const AGENTS: usize = 3;
const PROGRAMS: usize = 2;
const FILES: usize = 2;
const BYTES: usize = 4;
const STEPS: usize = 4000;
const CALM_STEPS: usize = 20_000;

/// What a programmer might get wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// Locks go with the session.
    NotKept,
    /// A new server process gives locks to all at once.
    NoGrace,
    /// A client asks a new process for its locks, however long it was away.
    ReclaimedLate,
    /// A client whose locks were given away does not tell its programs.
    LossNotTold,
    /// A client that comes back believes in the locks of another epoch.
    OldEpochBelieved,
    /// A client that takes a lock is not put on the server's list.
    NotListed,
    /// A lock is noted as released when the answer comes.
    ReleaseNotedLate,
}

const MISTAKES: [Mistake; 7] = [
    Mistake::NotKept,
    Mistake::NoGrace,
    Mistake::ReclaimedLate,
    Mistake::LossNotTold,
    Mistake::OldEpochBelieved,
    Mistake::NotListed,
    Mistake::ReleaseNotedLate,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Lock,
    Unlock,
    Use,
}

/// A range of a file that a program works with; the number tells one time from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Section {
    number: u64,
    file: usize,
    start: usize,
    last: usize,
    exclusive: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Program {
    section: Option<Section>,
    /// What it waits for, and the session that has the call.
    waits: Option<(Act, Option<u64>)>,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    session: u64,
    epoch: u64,
    may_reclaim: bool,
}

struct Recovery {
    held: Vec<(u64, HeldLock)>,
    given_back: Vec<(u64, HeldLock)>,
    lost: BTreeSet<u64>,
}

struct Agent {
    name: u64,
    held: HeldLocks,
    live: Option<Live>,
    recovery: Option<Recovery>,
    attached: Option<((u64, u64), u64)>,
    instance: Option<u64>,
    heard: Instant,
    cut_until: Instant,
    programs: [Program; PROGRAMS],
}

/// A call or its answer.
#[derive(Clone, Copy)]
struct Message {
    agent: usize,
    session: u64,
    program: usize,
    act: Act,
    section: Section,
    sent: Instant,
    /// Whether it was done; `None` for a call.
    answer: Option<bool>,
}

/// A byte: who works with it, and who has before. Programs that share it are one, until one of them works with it alone.
#[derive(Clone, Debug, Default)]
struct Byte {
    now: BTreeSet<u64>,
    is_shared: bool,
    before: BTreeSet<u64>,
}

struct Server {
    instance: u64,
    started: Instant,
    locks: Locks<()>,
    grace: Grace<u64>,
    /// Name, key, and when they were heard of.
    sessions: HashMap<u64, (u64, u64, Instant)>,
    kept: HashMap<u64, (u64, Instant)>,
    listed: BTreeSet<u64>,
}

struct World {
    chance: Chance,
    now: Instant,
    mistake: Mistake,
    numbers: u64,
    server: Server,
    agents: Vec<Agent>,
    wire: Vec<Message>,
    bytes: Vec<Byte>,
    counts: [u64; 4],
}

fn range(program: usize, section: &Section) -> LockRange {
    let (start, last) = (section.start as u64, section.last as u64);
    LockRange { whole: false, owner: program as u64, pid: 1, start, last }
}

fn lock_of(key: u64, range: &LockRange, exclusive: bool) -> Lock {
    let holder = Holder { session: key, owner: range.owner };
    Lock { holder, pid: range.pid, start: range.start, last: range.last, exclusive }
}

fn id(file: u64) -> FileId {
    FileId { device: 1, ino: file }
}

impl Server {
    /// A session has ended; its client may come back.
    fn lose(&mut self, session: u64, now: Instant, mistake: Mistake) {
        if let Some((name, key, _)) = self.sessions.remove(&session) {
            let time = if mistake == Mistake::NotKept { Duration::ZERO } else { FILE_GRACE };
            self.kept.insert(name, (key, now + time));
        }
    }

    fn time(&mut self, now: Instant, mistake: Mistake) {
        let late = |heard: Instant, locks: &Locks<()>, key| heard + FILE_LEASE_TIME <= now && locks.holds(key);
        let silent = self.sessions.iter().filter(|(_, (_, key, heard))| late(*heard, &self.locks, *key));
        let mut silent: Vec<_> = silent.map(|(session, _)| *session).collect();
        silent.sort_unstable();
        for session in silent {
            self.lose(session, now, mistake);
        }
        let expired: Vec<_> = self.kept.extract_if(|_, (_, until)| *until <= now).collect();
        for (name, (key, _)) in expired {
            self.locks.leave(key);
            self.listed.remove(&name);
        }
        // One that came back late in the grace time may have its locks again, and stays.
        let known: BTreeSet<u64> =
            self.sessions.values().map(|(name, ..)| *name).chain(self.kept.keys().copied()).collect();
        for ClientHolding { client: name, .. } in self.grace.missing(now) {
            if !known.contains(&name) {
                self.listed.remove(&name);
            }
        }
    }

    /// The process is killed, and another one begins: it knows the list of clients with locks, and nothing else.
    fn restart(&mut self, instance: u64, now: Instant, mistake: Mistake) {
        (self.instance, self.started) = (instance, now);
        (self.locks, self.sessions, self.kept) = (Locks::default(), HashMap::new(), HashMap::new());
        self.grace = Grace::default();
        if mistake != Mistake::NoGrace {
            self.listed.iter().for_each(|name| self.grace.expect(Holding::Locks, *name, now + FILE_GRACE));
        }
    }

    fn attach(&mut self, name: u64, session: u64, key: u64, now: Instant, mistake: Mistake) -> u64 {
        let old = self.sessions.iter().find(|(_, (other, ..))| *other == name).map(|(session, _)| *session);
        if let Some(old) = old {
            self.lose(old, now, mistake);
        }
        self.time(now, mistake);
        let key = self.kept.remove(&name).map_or(key, |(key, _)| key);
        self.sessions.insert(session, (name, key, now));
        key
    }

    /// `None`: not now.
    fn lock(
        &mut self,
        key: u64,
        file: u64,
        range: &LockRange,
        exclusive: bool,
        now: Instant,
        is_reclaim: bool,
    ) -> Option<bool> {
        match (is_reclaim, self.grace.is_on(Holding::Locks, now)) {
            (true, false) => return Some(false),
            (false, true) => return None,
            _ => {}
        }
        let (result, _) = self.locks.lock(id(file), Family::Range, lock_of(key, range, exclusive), None);
        Some(result.is_ok())
    }
}

impl World {
    fn new(seed: u64, mistake: Mistake) -> Self {
        let now = Instant::from_nanos(1_000_000_000_000);
        let agent = |name| Agent {
            name,
            held: HeldLocks::default(),
            live: None,
            recovery: None,
            attached: None,
            instance: None,
            heard: now,
            cut_until: now,
            programs: [Program::default(); PROGRAMS],
        };
        let server = Server {
            instance: 1,
            started: now,
            locks: Locks::default(),
            grace: Grace::default(),
            sessions: HashMap::new(),
            kept: HashMap::new(),
            listed: BTreeSet::new(),
        };
        Self {
            chance: Chance::new(seed),
            now,
            mistake,
            numbers: 100,
            server,
            agents: (0..AGENTS as u64).map(agent).collect(),
            wire: Vec::new(),
            bytes: vec![Byte::default(); FILES * BYTES],
            counts: [0; 4],
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn run(&mut self) {
        for step in 0..STEPS + CALM_STEPS {
            let is_calm = step >= STEPS;
            let pause = if !is_calm && self.chance.one_in(400) { 20_000 } else { 20 };
            self.now = self.now + Duration::from_millis(self.chance.below(pause) as u64);
            self.server.time(self.now, self.mistake);
            if !is_calm && self.chance.one_in(60) {
                self.fault();
            }
            let agent = self.chance.below(AGENTS);
            if is_calm {
                self.agents[agent].cut_until = self.now;
            }
            if !self.wire.is_empty() && self.chance.one_in(2) {
                let at = self.chance.below(self.wire.len());
                if self.agents[self.wire[at].agent].cut_until <= self.now {
                    let message = self.wire.swap_remove(at);
                    if message.answer.is_some() { self.answered(message) } else { self.serve(message) }
                }
            } else if self.agents[agent].cut_until <= self.now {
                self.work(agent, is_calm);
            }
            if is_calm && self.agents.iter().all(|agent| agent.programs.iter().all(|program| program.section.is_none()))
            {
                return;
            }
        }
        seeds::broken("a program's operations do not end".to_owned());
    }

    fn fault(&mut self) {
        let agent = self.chance.below(AGENTS);
        match self.chance.below(8) {
            0 => {
                let instance = self.number();
                self.server.restart(instance, self.now, self.mistake);
                self.counts[2] += 1;
            }
            1 => {
                let name = self.number();
                let now = self.now;
                let fresh = Agent { name, heard: now, ..Self::new(0, self.mistake).agents.remove(0) };
                self.agents[agent] = fresh;
                self.counts[3] += 1;
            }
            2..5 => {
                let time = if self.chance.one_in(2) { 50_000 } else { 4000 };
                self.agents[agent].cut_until = self.now + Duration::from_millis(self.chance.below(time) as u64);
            }
            _ => {
                if let Some(live) = self.agents[agent].live {
                    self.server.lose(live.session, self.now, self.mistake);
                }
            }
        }
    }

    /// A client, or a program of its, does its next thing.
    fn work(&mut self, at: usize, is_calm: bool) {
        let (number, key, now) = (self.number(), self.number(), self.now);
        let agent = &mut self.agents[at];
        agent.live = agent.live.filter(|live| self.server.sessions.contains_key(&live.session));
        let Some(live) = agent.live else {
            agent.recovery = None;
            let key = self.server.attach(agent.name, number, key, now, self.mistake);
            let attached = (self.server.instance, key);
            let epoch = agent.attached.filter(|(before, _)| *before == attached).map_or(number, |(_, epoch)| epoch);
            let (silent, uptime) = (
                Duration::from_nanos(now.nanos() - agent.heard.nanos()),
                Duration::from_nanos(now.nanos() - self.server.started.nanos()),
            );
            let is_new = agent.instance.is_some_and(|instance| instance != self.server.instance);
            let is_soon = nobody_else_had_them(silent, uptime) || self.mistake == Mistake::ReclaimedLate;
            agent.live = Some(Live { session: number, epoch, may_reclaim: is_new && is_soon });
            (agent.attached, agent.instance) = (Some((attached, epoch)), Some(self.server.instance));
            if self.mistake == Mistake::OldEpochBelieved {
                agent.held.recovered(epoch);
            }
            if let Some(held) = agent.held.begin_recovery(epoch) {
                agent.recovery = Some(Recovery { held, given_back: Vec::new(), lost: BTreeSet::new() });
            }
            return;
        };
        if agent.recovery.is_some() {
            return self.recover(at, live);
        }
        self.server.grace.completed(&agent.name);
        agent.heard = now;
        if let Some(session) = self.server.sessions.get_mut(&live.session) {
            session.2 = now;
        }
        let place = self.chance.below(PROGRAMS);
        let program = &mut self.agents[at].programs[place];
        if program.section.is_none() {
            if is_calm {
                return;
            }
            let (file, start) = (self.chance.below(FILES), self.chance.below(BYTES));
            let (last, exclusive) = (start + self.chance.below(BYTES - start), !self.chance.one_in(3));
            program.section = Some(Section { number, file, start, last, exclusive });
            program.waits = Some((Act::Lock, None));
        } else if program.waits.is_none() {
            let act = if is_calm || self.chance.one_in(6) { Act::Unlock } else { Act::Use };
            program.waits = Some((act, None));
        }
        let (Some(section), Some((act, sent))) = (program.section, program.waits) else { return };
        // What a session took with it is asked again.
        if sent != Some(live.session) {
            program.waits = Some((act, Some(live.session)));
            if act == Act::Unlock && self.mistake != Mistake::ReleaseNotedLate {
                self.agents[at].held.note(live.epoch, section.file as u64, range(place, &section), None);
            }
            self.wire.push(Message {
                agent: at,
                session: live.session,
                program: place,
                act,
                section,
                sent: now,
                answer: None,
            });
        }
    }

    /// As `Client::recover_locks`, one call at a time.
    fn recover(&mut self, at: usize, live: Live) {
        let agent = &mut self.agents[at];
        let Some(recovery) = &mut agent.recovery else { return };
        let Some(&(_, key, _)) = self.server.sessions.get(&live.session) else { return };
        if let Some((file, lock)) = recovery.held.pop() {
            if recovery.lost.contains(&file) {
                return;
            }
            let again = live.may_reclaim
                && self.server.lock(key, file, &lock.range, lock.exclusive, self.now, true) == Some(true);
            if again {
                self.server.listed.insert(agent.name);
                recovery.given_back.push((file, lock));
                self.counts[1] += 1;
            } else {
                let silent = Duration::from_nanos(self.now.nanos() - agent.heard.nanos());
                if live.may_reclaim && silent < FILE_GRACE {
                    seeds::broken(format!("{lock:?} is lost to a client that was away for {silent:?}"));
                }
                recovery.lost.insert(file);
            }
            return;
        }
        for (file, lock) in recovery.given_back.iter().filter(|(file, _)| recovery.lost.contains(file)) {
            self.server.locks.unlock(id(*file), Family::Range, &lock_of(key, &lock.range, lock.exclusive));
        }
        for file in &recovery.lost {
            agent.held.forget(*file);
            let of_file = |program: &&mut Program| program.section.is_some_and(|section| section.file as u64 == *file);
            if self.mistake != Mistake::LossNotTold {
                // It is told: its operations on the file fail.
                agent.programs.iter_mut().filter(of_file).for_each(|program| *program = Program::default());
            }
        }
        agent.held.recovered(live.epoch);
        agent.recovery = None;
        self.server.grace.completed(&agent.name);
    }

    fn serve(&mut self, message: Message) {
        let Message { session, program, act, section, .. } = message;
        let Some((name, key, heard)) = self.server.sessions.get_mut(&session) else { return };
        *heard = self.now;
        let (name, key, range) = (*name, *key, range(program, &section));
        let answer = match act {
            Act::Lock => {
                if self.mistake != Mistake::NotListed {
                    self.server.listed.insert(name);
                }
                self.server.lock(key, section.file as u64, &range, section.exclusive, self.now, false)
            }
            Act::Unlock => {
                self.server.locks.unlock(
                    id(section.file as u64),
                    Family::Range,
                    &lock_of(key, &range, section.exclusive),
                );
                Some(true)
            }
            Act::Use => {
                self.used(&section);
                Some(true)
            }
        };
        self.wire.push(Message { answer: Some(answer.unwrap_or(false)), ..message });
    }

    /// The rule: who works with a byte again has been alone with it, or among those that share it.
    fn used(&mut self, section: &Section) {
        for byte in section.start..=section.last {
            let byte = &mut self.bytes[section.file * BYTES + byte];
            if byte.before.contains(&section.number) {
                seeds::broken(format!("another has worked with byte {byte:?} since {section:?} began"));
            }
            let joins = byte.is_shared && !section.exclusive;
            if !joins && !byte.now.contains(&section.number) {
                byte.before.append(&mut byte.now);
            }
            byte.is_shared = !section.exclusive;
            byte.now.insert(section.number);
        }
        self.counts[0] += 1;
    }

    fn answered(&mut self, message: Message) {
        let Message { agent: at, session, program: place, act, section, sent, answer } = message;
        let agent = &mut self.agents[at];
        let Some(live) = agent.live.filter(|live| live.session == session) else { return };
        agent.heard = Instant::from_nanos(agent.heard.nanos().max(sent.nanos()));
        let program = &mut agent.programs[place];
        if program.section != Some(section) || program.waits != Some((act, Some(session))) {
            return;
        }
        program.waits = None;
        let now = match act {
            Act::Lock if answer == Some(true) => Some(section.exclusive),
            Act::Lock => {
                // Refused: it may try again.
                *program = Program::default();
                return;
            }
            Act::Unlock => None,
            Act::Use => return,
        };
        if !agent.held.note(live.epoch, section.file as u64, range(place, &section), now) {
            // The server has forgotten it.
            program.waits = Some((act, None));
        } else if act == Act::Unlock {
            *program = Program::default();
        }
    }
}

fn run(seed: u64, mistake: Mistake) -> Result<[u64; 4], String> {
    let ran = seeds::catch_broken(|| {
        let mut world = World::new(seed, mistake);
        world.run();
        world.counts
    });
    ran.map_err(|broken| broken.0)
}

#[test]
fn no_lock_is_held_twice() {
    let (count, [uses, again, restarts, killed]) = seeds::run(
        2,
        |seed| run(seed, Mistake::None),
        |total: &mut [u64; 4], one| {
            total.iter_mut().zip(one).for_each(|(total, one)| *total += one);
        },
    );
    if count >= 100 {
        assert!(uses > 100 * count && again > count && restarts > count && killed > count, "chance has done something");
    }
}

#[test]
fn each_mistake_lets_two_have_a_lock() {
    seeds::hunt(2, &MISTAKES, |mistake, seed| run(seed, mistake).map(drop));
}
