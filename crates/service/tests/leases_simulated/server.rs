//! The server: the real table of leases over a model of a file system.

use std::collections::{BTreeSet, HashMap};

use byway_reactor::Instant;
use byway_service::file::grace::{ClientHolding, Grace, Holding};
use byway_service::file::leases::{Action, Change, LastHeard, Leases, Since};
use byway_service::file::locks::FileId;
use byway_service::limits::FILE_GRACE;

use super::{Answer, Body, Kind, Message, Register, Truth};

const DIRECTORY: u64 = 0;

pub fn id(node: u64) -> FileId {
    FileId { device: 1, ino: node }
}

#[derive(Debug)]
enum Stage {
    Came(Since),
    Read(Since, Answer),
    Waits,
    Begun(Change),
    /// And whether it has changed anything, and the stamp of a file that it has changed.
    Done(Change, bool, u64),
}

#[derive(Debug)]
struct Call {
    number: u64,
    agent: usize,
    session: u64,
    id: u64,
    kind: Kind,
    stage: Stage,
}

struct Session {
    agent: usize,
    heard: LastHeard,
}

#[derive(Default)]
pub struct Server {
    leases: Leases<u64>,
    sessions: HashMap<u64, Session>,
    calls: Vec<Call>,
    last: u64,
    /// Agents on the list that the server keeps on disk.
    listed: BTreeSet<usize>,
    grace: Grace<usize>,
    pub fenced: usize,
    pub restarts: usize,
}

impl Server {
    /// A client comes, or comes again after its session `old`: it uses no lease of that any more.
    pub fn join(&mut self, (agent, old): (usize, u64), now: Instant, wire: &mut Vec<Message>) -> u64 {
        self.leases.returned_all(old, now);
        self.act(now, wire);
        self.last += 1;
        let heard = self.leases.join(self.last, self.last, now);
        self.sessions.insert(self.last, Session { agent, heard });
        self.listed.insert(agent);
        self.grace.completed(&agent);
        self.last
    }

    /// The server's process is killed, and another one begins. It knows the list, and nothing else.
    pub fn restart(&mut self, now: Instant) {
        self.restarts += 1;
        (self.leases, self.sessions, self.calls) = (Leases::default(), HashMap::new(), Vec::new());
        self.grace = Grace::default();
        for agent in &self.listed {
            self.grace.expect(Holding::Leases, *agent, now + FILE_GRACE);
        }
    }

    pub fn knows(&self, session: u64) -> bool {
        self.sessions.contains_key(&session)
    }

    /// A session's connection has gone.
    pub fn lose(&mut self, session: u64, now: Instant, wire: &mut Vec<Message>) {
        if self.sessions.remove(&session).is_some() {
            self.leases.leave(session, now);
            self.act(now, wire);
        }
    }

    pub fn time(&mut self, now: Instant, wire: &mut Vec<Message>) {
        for ClientHolding { client: agent, .. } in self.grace.missing(now) {
            self.listed.remove(&agent);
        }
        if self.leases.next_time().is_some_and(|at| at <= now) {
            self.leases.time(now);
            self.act(now, wire);
        }
    }

    fn act(&mut self, now: Instant, wire: &mut Vec<Message>) {
        while let Some(action) = self.leases.next_action() {
            match action {
                Action::Recall { session, file, version } => {
                    let Some(known) = self.sessions.get(&session) else { continue };
                    let (agent, body) = (known.agent, Body::Recall { node: file.ino, version });
                    wire.push(Message { to_server: false, agent, session, body });
                }
                Action::Begin { change, ticket, .. } => {
                    let call = self.calls.iter_mut().find(|call| call.number == ticket);
                    match call {
                        Some(call) => call.stage = Stage::Begun(change),
                        None => self.leases.end(change, now),
                    }
                }
                Action::End { session } => {
                    self.fenced += 1;
                    self.lose(session, now, wire);
                }
            }
        }
    }

    pub fn take(&mut self, message: Message, now: Instant, wire: &mut Vec<Message>) {
        let Message { agent, session, body, .. } = message;
        let Some(known) = self.sessions.get(&session) else { return };
        if !known.heard.note(now) {
            return self.lose(session, now, wire);
        }
        match body {
            Body::Call { id, kind } => {
                self.last += 1;
                let stage = Stage::Came(self.leases.since());
                self.calls.push(Call { number: self.last, agent, session, id, kind, stage });
            }
            Body::Returned { node, version } => {
                self.leases.returned(session, id(node), version, now);
                self.act(now, wire);
            }
            Body::Answer { .. } | Body::Recall { .. } => {}
        }
    }

    pub fn work_places(&self) -> impl Iterator<Item = usize> {
        let can = |call: &Call| !matches!(call.stage, Stage::Waits);
        self.calls.iter().enumerate().filter(move |(_, call)| can(call)).map(|(at, _)| at)
    }

    /// Does the next thing of a call.
    pub fn work(&mut self, at: usize, now: Instant, truth: &mut Truth, wire: &mut Vec<Message>) {
        let Call { number, session, kind, .. } = self.calls[at];
        match std::mem::replace(&mut self.calls[at].stage, Stage::Waits) {
            Stage::Came(since) => match kind {
                Kind::Renew | Kind::Stat(_) | Kind::Read(_) | Kind::LookUp(_) => {
                    self.calls[at].stage = Stage::Read(since, read(kind, truth));
                }
                // Its client asks again.
                _ if self.grace.is_on(Holding::Leases, now) => self.calls[at].stage = Stage::Came(since),
                _ => {
                    let nodes = changed(kind, truth);
                    let files: Vec<_> = nodes.iter().map(|node| id(*node)).collect();
                    let own: Vec<_> = given_up(kind).into_iter().map(id).collect();
                    match self.leases.begin(session, &files, &own, number, now) {
                        Some((change, false)) => self.calls[at].stage = Stage::Begun(change),
                        // It is told when the change has begun.
                        Some((_, true)) => {}
                        None => _ = self.calls.swap_remove(at),
                    }
                    self.act(now, wire);
                }
            },
            Stage::Read(since, mut answer) => {
                let leases = &mut self.leases;
                match kind {
                    Kind::Stat(node) => answer.lease = leases.grant(session, id(node), since, now),
                    Kind::LookUp(_) => {
                        answer.directory_lease = leases.grant(session, id(DIRECTORY), since, now);
                        if answer.found != 0 {
                            answer.lease = leases.grant(session, id(answer.found), since, now);
                        }
                    }
                    _ => {}
                }
                self.answer(at, answer, wire);
            }
            Stage::Begun(change) => {
                // A name may be another file's by now.
                let needed = changed(kind, truth);
                let held = self.leases.files(change);
                if needed.iter().all(|node| held.contains(&id(*node))) {
                    let made = apply(kind, truth);
                    let stamp = changes_file(kind).map_or(0, |node| truth.now(Register::Stamp(node)));
                    self.calls[at].stage = Stage::Done(change, made, stamp);
                } else {
                    self.calls[at].stage = Stage::Came(self.leases.since());
                    self.leases.end(change, now);
                    self.act(now, wire);
                }
            }
            Stage::Done(change, made, stamp) => {
                let directory = (made && changes_names(kind)).then_some(DIRECTORY);
                let kept = self.leases.end_keeping(change, directory.or(changes_file(kind)).map(id), now);
                truth.kept += usize::from(kept.is_some());
                let [directory_lease, lease] =
                    [kept.filter(|_| directory.is_some()), kept.filter(|_| directory.is_none())];
                self.answer(at, Answer { stamp, lease, directory_lease, made, ..Answer::default() }, wire);
                self.act(now, wire);
            }
            Stage::Waits => {}
        }
    }

    fn answer(&mut self, at: usize, answer: Answer, wire: &mut Vec<Message>) {
        let Call { agent, session, id, .. } = self.calls.swap_remove(at);
        if self.sessions.contains_key(&session) {
            wire.push(Message { to_server: false, agent, session, body: Body::Answer { id, answer } });
        }
    }
}

fn read(kind: Kind, truth: &Truth) -> Answer {
    match kind {
        Kind::Stat(node) => Answer { stamp: truth.now(Register::Stamp(node)), ..Answer::default() },
        Kind::Read(node) => Answer { data: truth.now(Register::Data(node)), ..Answer::default() },
        Kind::LookUp(name) => {
            let found = truth.now(Register::Name(name));
            Answer { found, stamp: truth.now(Register::Stamp(found)), ..Answer::default() }
        }
        _ => Answer::default(),
    }
}

/// Nodes of which the client of a call has dropped what it had cached: those that it names, and those that it takes names for.
pub fn given_up(kind: Kind) -> Vec<u64> {
    let mut nodes = named(kind);
    match kind {
        Kind::Unlink(_, file) => nodes.push(file),
        Kind::Rename(_, _, files) => nodes.extend(files),
        _ => {}
    }
    // No file is 0, which is the directory.
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// Nodes that the client of a call names itself.
fn named(kind: Kind) -> Vec<u64> {
    match kind {
        Kind::Write(node) | Kind::Chmod(node) => vec![node],
        Kind::Link(node, _) => vec![DIRECTORY, node],
        Kind::Unlink(..) | Kind::Rename(..) => vec![DIRECTORY],
        _ => Vec::new(),
    }
}

/// All nodes that a call changes.
fn changed(kind: Kind, truth: &Truth) -> Vec<u64> {
    let mut nodes = named(kind);
    let of = |name| truth.now(Register::Name(name));
    match kind {
        Kind::Rename(from, to, _) => nodes.extend([of(from), of(to)]),
        Kind::Unlink(name, _) | Kind::Link(_, name) => nodes.push(of(name)),
        _ => {}
    }
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// Whether a call changes names of the directory.
pub fn changes_names(kind: Kind) -> bool {
    matches!(kind, Kind::Unlink(..) | Kind::Link(..) | Kind::Rename(..))
}

/// The file of which a call changes data or attributes.
pub fn changes_file(kind: Kind) -> Option<u64> {
    match kind {
        Kind::Write(node) | Kind::Chmod(node) => Some(node),
        _ => None,
    }
}

/// Gives whether anything has changed.
fn apply(kind: Kind, truth: &mut Truth) -> bool {
    let value = truth.step as u64;
    let stamp = |truth: &mut Truth, node: u64| {
        if node != DIRECTORY {
            truth.set(Register::Stamp(node), value);
        }
    };
    match kind {
        Kind::Write(node) => {
            truth.set(Register::Data(node), value);
            stamp(truth, node);
        }
        Kind::Chmod(node) => stamp(truth, node),
        Kind::Unlink(name, _) => {
            let gone = truth.now(Register::Name(name));
            truth.set(Register::Name(name), 0);
            stamp(truth, gone);
            return gone != 0;
        }
        Kind::Link(node, name) => {
            if truth.now(Register::Name(name)) != 0 {
                return false;
            }
            truth.set(Register::Name(name), node);
            stamp(truth, node);
        }
        Kind::Rename(from, to, _) => {
            let (moved, replaced) = (truth.now(Register::Name(from)), truth.now(Register::Name(to)));
            if moved == 0 || moved == replaced {
                return false;
            }
            truth.set(Register::Name(from), 0);
            truth.set(Register::Name(to), moved);
            stamp(truth, moved);
            stamp(truth, replaced);
        }
        _ => {}
    }
    true
}
