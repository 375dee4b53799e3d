//! Calls of two clients at one server, in which chance says what happens next: a call is done once, and answered as it was done.
//!
//! The slots are real, at both ends, and so is what the server keeps of a client between two sessions. Around them is a model of sessions:
//! calls arrive in the order in which they were sent, and end in any. Sessions end at either side, while calls wait, run, or are answered;
//! the server is busy, forgets clients that are away for long, is killed and started again. The rules: a server process does a call once
//! while it has something of the client, and one that must not be repeated is never done twice; the answer is the call's own, and true; a
//! sync that has failed is not answered well; each call ends.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use byway_reactor::Instant;
use byway_skip::rule;
use byway_skip::seeds::{self, Chance};
use rustix::io::Errno;
use zerocopy::FromZeros;

use super::super::recovery::{Claim, Known};
use super::{Arrival, Replies, Reply, SlotUse};
use crate::file::client::slots::{Repeats, SlotPool, Taken};
use crate::file::wire::{Arguments, CallError, Method};
use crate::limits::FILE_GRACE;

const CLIENTS: usize = 2;
const PROGRAMS: usize = 4;
const STEPS: usize = 2000;
const CALM_STEPS: usize = 20_000;

/// What a programmer might get wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// Answers are not kept.
    NotKept,
    /// Answers go with the session.
    KeptForTheSession,
    /// A new session begins while calls of the one before run.
    SessionsOverlap,
    /// A call is sent again to a server that has kept nothing.
    RepeatedAnywhere,
    /// A slot's next call has the number of its last one.
    NumberGivenAgain,
    /// A sync has no slot.
    SyncWithoutSlot,
    /// What a busy server says of a call is kept.
    BusyIsKept,
}

const MISTAKES: [Mistake; 7] = [
    Mistake::NotKept,
    Mistake::KeptForTheSession,
    Mistake::SessionsOverlap,
    Mistake::RepeatedAnywhere,
    Mistake::NumberGivenAgain,
    Mistake::SyncWithoutSlot,
    Mistake::BusyIsKept,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Append,
    /// A write at an offset: it may be done twice.
    Write,
    Sync,
}

impl Kind {
    fn method(self) -> Method {
        if self == Self::Sync { Method::Sync } else { Method::Write }
    }

    fn repeatable(self) -> bool {
        self != Self::Append
    }
}

/// A call on its way to the server, or there.
#[derive(Clone, Copy, Debug)]
struct Call {
    client: usize,
    program: usize,
    number: u64,
    kind: Kind,
    slot: Option<SlotUse>,
}

/// The number of the call that was done, or why it was not.
type Done = Result<u64, CallError>;

#[derive(Clone, Copy, Debug)]
struct Answer {
    session: u64,
    call: Call,
    done: Done,
}

struct Program<'a> {
    number: u64,
    kind: Kind,
    slot: Option<Taken<'a>>,
    repeats: Repeats,
    /// The session that has the call.
    sent_in: Option<u64>,
}

#[derive(Clone, Copy)]
struct Live {
    session: u64,
    epoch: u64,
    state: u64,
}

struct Client<'a> {
    slots: &'a SlotPool,
    live: Option<Live>,
    attached: Option<Live>,
    programs: [Option<Program<'a>>; PROGRAMS],
}

/// What a server process keeps of a client.
#[derive(Debug)]
struct State {
    number: u64,
    replies: Replies,
}

struct Session {
    client: usize,
    state: State,
    arriving: VecDeque<Call>,
    running: Vec<Call>,
    is_gone: bool,
}

/// How often a call was done in a state of its client, and whether a sync failed.
#[derive(Clone, Copy, Debug)]
struct Execution {
    state: u64,
    failed: bool,
}

#[derive(Default)]
struct Server {
    known: Known<usize, u64, State>,
    sessions: BTreeMap<u64, Session>,
    /// Calls of sessions that were replaced too early, and the states that they had.
    stray: Vec<(Call, u64)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    done: u64,
    given_again: u64,
    unknown: u64,
    restarts: u64,
}

struct World<'a> {
    chance: Chance,
    mistake: Mistake,
    now: Instant,
    numbers: u64,
    server: Server,
    clients: Vec<Client<'a>>,
    answers: Vec<Answer>,
    executions: HashMap<u64, Vec<Execution>>,
    counts: Counts,
}

impl Server {
    /// The session's end; its calls that have not begun are lost. What it had is kept when those that run have ended.
    fn end(&mut self, number: u64, now: Instant, mistake: Mistake) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.is_gone = true;
        session.arriving.clear();
        if session.running.is_empty() {
            self.keep(number, now, mistake);
        }
    }

    fn keep(&mut self, number: u64, now: Instant, mistake: Mistake) {
        let Some(Session { client, mut state, running, .. }) = self.sessions.remove(&number) else { return };
        self.stray.extend(running.iter().map(|call| (*call, state.number)));
        if mistake == Mistake::KeptForTheSession {
            state.replies = Replies::default();
        }
        self.known.keep(client, state, now + FILE_GRACE, |client| *client);
    }

    /// Gives the number of the state, unless the session before has calls that run.
    fn attach(&mut self, client: usize, number: u64, now: Instant, mistake: Mistake) -> Option<u64> {
        let state = match self.known.claim(&client, number) {
            Claim::New => State { number, replies: Replies::default() },
            Claim::Resumed(state) => state,
            Claim::Wait(old) => {
                self.end(old, now, mistake);
                if mistake == Mistake::SessionsOverlap {
                    self.keep(old, now, mistake);
                }
                return None;
            }
        };
        let named = state.number;
        let (arriving, running) = (VecDeque::new(), Vec::new());
        self.sessions.insert(number, Session { client, state, arriving, running, is_gone: false });
        Some(named)
    }
}

impl<'a> World<'a> {
    fn new(seed: u64, mistake: Mistake, pools: &'a [SlotPool]) -> Self {
        let client = |slots| Client { slots, live: None, attached: None, programs: [const { None }; PROGRAMS] };
        Self {
            chance: Chance::new(seed),
            mistake,
            now: Instant::from_nanos(1_000_000_000_000),
            numbers: 0,
            server: Server::default(),
            clients: pools.iter().map(client).collect(),
            answers: Vec::new(),
            executions: HashMap::new(),
            counts: Counts::default(),
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn run(&mut self) {
        for step in 0..STEPS + CALM_STEPS {
            let is_calm = step >= STEPS;
            self.now = self.now + Duration::from_millis(self.chance.below(20) as u64);
            self.server.known.expired(self.now);
            if !is_calm && self.chance.one_in(40) {
                self.fault();
            }
            match self.chance.below(4) {
                0 => self.serve(is_calm),
                1 => self.finish(),
                2 => self.answer(),
                _ => {
                    let client = self.chance.below(CLIENTS);
                    self.work(client, is_calm);
                }
            }
            if is_calm && self.clients.iter().all(|client| client.programs.iter().all(Option::is_none)) {
                return;
            }
        }
        seeds::broken("a program's calls do not end".to_owned());
    }

    fn fault(&mut self) {
        let client = self.chance.below(CLIENTS);
        match self.chance.below(8) {
            0 => {
                // Killed: of the calls that run, some were done.
                while self.server.sessions.values().any(|session| !session.running.is_empty()) && self.chance.one_in(2)
                {
                    self.finish();
                }
                self.server = Server::default();
                self.counts.restarts += 1;
            }
            1 => self.now = self.now + FILE_GRACE,
            2 => {
                // A program is told that the server has not answered in time.
                let program = self.chance.below(PROGRAMS);
                self.clients[client].programs[program].take_if(|program| program.sent_in.is_some());
            }
            3 | 4 => self.lose(client),
            _ => {
                if let Some(live) = self.clients[client].live {
                    self.server.end(live.session, self.now, self.mistake);
                }
            }
        }
    }

    /// The client's session has ended for the client: whether its calls were done is not known.
    fn lose(&mut self, client: usize) {
        let client = &mut self.clients[client];
        let Some(Live { session, epoch, .. }) = client.live.take() else { return };
        for program in client.programs.iter_mut().flatten().filter(|program| program.sent_in == Some(session)) {
            program.sent_in = None;
            program.repeats.lost(epoch);
        }
    }

    /// A client, or a program of its, does its next thing: as `Client::repeat`.
    fn work(&mut self, at: usize, is_calm: bool) {
        let number = self.number();
        let is_up = |live: Live| self.server.sessions.get(&live.session).is_some_and(|session| !session.is_gone);
        if self.clients[at].live.is_some_and(|live| !is_up(live)) {
            return self.lose(at);
        }
        let Some(live) = self.clients[at].live else {
            let Some(state) = self.server.attach(at, number, self.now, self.mistake) else { return };
            let client = &mut self.clients[at];
            let before = client.attached.filter(|before| before.state == state);
            let live = Live { session: number, epoch: before.map_or(number, |before| before.epoch), state };
            (client.live, client.attached) = (Some(live), Some(live));
            return;
        };
        let place = self.chance.below(PROGRAMS);
        let kind = [Kind::Append, Kind::Write, Kind::Sync][self.chance.below(3)];
        let has_slot = kind.method().takes_slot() && (self.mistake, kind) != (Mistake::SyncWithoutSlot, Kind::Sync);
        let client = &mut self.clients[at];
        if client.programs[place].is_none() {
            if is_calm {
                return;
            }
            let (slot, repeats) = (has_slot.then(|| client.slots.take()), Repeats::new(kind.repeatable()));
            client.programs[place] = Some(Program { number, kind, slot, repeats, sent_in: None });
        }
        let Some(program) = &mut client.programs[place] else { return };
        if program.sent_in.is_some() {
            return;
        }
        if !program.repeats.may_be_sent(live.epoch) && self.mistake != Mistake::RepeatedAnywhere {
            // The program is told that it is not known whether it was done.
            client.programs[place] = None;
            self.counts.unknown += 1;
            return;
        }
        program.sent_in = Some(live.session);
        let slot = program.slot.as_ref().and_then(|taken| {
            let sequence = if self.mistake == Mistake::NumberGivenAgain { 1 } else { taken.slot.sequence };
            let slot = taken.slot.slot;
            SlotUse::of(&Arguments { slot, sequence: sequence.into(), ..Arguments::new_zeroed() }).ok()?
        });
        let call = Call { client: at, program: place, number: program.number, kind: program.kind, slot };
        if let Some(session) = self.server.sessions.get_mut(&live.session) {
            session.arriving.push_back(call);
        }
    }

    fn any_session(&mut self) -> Option<u64> {
        let at = self.chance.below(self.server.sessions.len());
        self.server.sessions.keys().nth(at).copied()
    }

    /// The server takes a call: as `Shares::called`.
    fn serve(&mut self, is_calm: bool) {
        let is_busy = !is_calm && self.chance.one_in(10);
        let Some(number) = self.any_session() else { return };
        let Some(session) = self.server.sessions.get_mut(&number) else { return };
        let Some(call) = session.arriving.pop_front() else { return };
        let mut again = None;
        if let Some(slot) = call.slot {
            match session.state.replies.arrive(slot) {
                Arrival::New => {}
                Arrival::Again(kept) => {
                    let number = |result: &[u8]| u64::from_le_bytes(result.try_into().unwrap_or_default());
                    again = Some(kept.as_ref().map(|kept| number(&kept.result)).map_err(|error| *error));
                    self.counts.given_again += 1;
                }
                Arrival::Running => again = Some(Err(CallError::Busy)),
            }
        }
        if let Some(done) = again {
            self.answers.push(Answer { session: number, call, done });
        } else if is_busy {
            if let Some(slot) = call.slot {
                let told = if self.mistake == Mistake::BusyIsKept { CallError::Stale } else { CallError::Busy };
                session.state.replies.keep(slot, Err(told));
            }
            self.answers.push(Answer { session: number, call, done: Err(CallError::Busy) });
        } else {
            session.running.push(call);
        }
    }

    /// A call ends that a worker runs.
    fn finish(&mut self) {
        if let Some((call, state)) = self.server.stray.pop() {
            let _ = self.execute(call, state);
            return;
        }
        let Some(number) = self.any_session() else { return };
        let Some((running, state)) = self.server.sessions.get(&number).map(|one| (one.running.len(), one.state.number))
        else {
            return;
        };
        if running == 0 {
            return;
        }
        let at = self.chance.below(running);
        let Some(session) = self.server.sessions.get_mut(&number) else { return };
        let call = session.running.swap_remove(at);
        let done = self.execute(call, state);
        let Some(session) = self.server.sessions.get_mut(&number) else { return };
        if let Some(slot) = call.slot.filter(|_| self.mistake != Mistake::NotKept) {
            let result = done.map(u64::to_le_bytes);
            session
                .state
                .replies
                .keep(slot, result.as_ref().map(|bytes| Reply::of_result(bytes)).map_err(|error| *error));
        }
        if !session.is_gone {
            self.answers.push(Answer { session: number, call, done });
        } else if session.running.is_empty() {
            self.server.keep(number, self.now, self.mistake);
        }
    }

    fn execute(&mut self, call: Call, state: u64) -> Done {
        let refused = call.kind != Kind::Sync && self.chance.one_in(8);
        if refused {
            return Err(Errno::NOSPC.into());
        }
        let failed = call.kind == Kind::Sync && self.chance.one_in(4);
        let executions = self.executions.entry(call.number).or_default();
        let is_twice = call.kind != Kind::Sync && executions.iter().any(|one| one.state == state);
        rule!(!is_twice && (call.kind.repeatable() || executions.is_empty()), "{call:?} is done twice: {executions:?}");
        executions.push(Execution { state, failed });
        if failed { Err(Errno::IO.into()) } else { Ok(call.number) }
    }

    /// A client gets an answer.
    fn answer(&mut self) {
        if self.answers.is_empty() {
            return;
        }
        let at = self.chance.below(self.answers.len());
        let Answer { session, call, done } = self.answers.swap_remove(at);
        let client = &mut self.clients[call.client];
        let Some(live) = client.live.filter(|live| live.session == session) else { return };
        let place = &mut client.programs[call.program];
        let Some(program) = place.as_mut().filter(|program| program.number == call.number) else { return };
        if done == Err(CallError::Busy) {
            program.sent_in = None;
            return;
        }
        *place = None;
        let executions = self.executions.get(&call.number).map_or(&[][..], Vec::as_slice);
        let here = || executions.iter().filter(|one| one.state == live.state);
        match done {
            Ok(number) => {
                rule!(number == call.number, "{call:?} has the answer of {number}");
                rule!(here().count() > 0, "{call:?} was not done");
                rule!(here().all(|one| !one.failed), "{call:?} has failed, and its client is told that it has not");
            }
            Err(_) if call.kind == Kind::Sync => rule!(here().any(|one| one.failed), "{call:?} has not failed"),
            Err(_) => rule!(here().count() == 0, "{call:?} was done, and its client is told that it was not"),
        }
        self.counts.done += 1;
    }
}

fn run(seed: u64, mistake: Mistake) -> Result<Counts, String> {
    let ran = seeds::catch_broken(|| {
        let pools: Vec<_> = (0..CLIENTS).map(|_| SlotPool::default()).collect();
        let mut world = World::new(seed, mistake, &pools);
        world.run();
        world.counts
    });
    ran.map_err(|broken| broken.0)
}

#[test]
fn each_call_is_done_once_and_answered_as_it_was_done() {
    let (count, total) = seeds::run(
        2,
        |seed| run(seed, Mistake::None),
        |total: &mut Counts, one| {
            total.done += one.done;
            total.given_again += one.given_again;
            total.unknown += one.unknown;
            total.restarts += one.restarts;
        },
    );
    if count >= 100 {
        let Counts { done, given_again, unknown, restarts } = total;
        assert!(
            done > 50 * count && given_again > count && unknown > count && restarts > count,
            "{total:?} in {count}"
        );
    }
}

#[test]
fn each_mistake_breaks_a_rule() {
    seeds::hunt(2, &MISTAKES, |mistake, seed| run(seed, mistake).map(drop));
}
