//! A client's machine: programs, the kernel's page cache, and the real state machine of the mount between them and the server.

use std::collections::{HashMap, HashSet};

use byway_reactor::Instant;
use byway_service::file::client::leases::{
    CachedEntry, FileChanged, Invalid, Leases, NameChange, NamesChanged, NewName, OpenMode, PageRead, Ticket,
};
use byway_service::limits::{FILE_LEASE_RENEWAL, FILE_LEASE_USE};

use super::server::{changes_file, changes_names, given_up};
use super::{Answer, Body, Chance, FILES, Kind, Message, NAMES, Register, Truth};

const PROGRAMS: usize = 3;
const DIRECTORY: u64 = 0;

/// What a program's operation does next.
#[derive(Clone, Copy, Debug)]
enum Doing {
    Nothing,
    /// Its call is under way.
    Asks {
        kind: Kind,
        call: u64,
        start: usize,
    },
    /// The kernel has asked for attributes before a read: the call for them is under way.
    ReadAsks {
        node: u64,
        call: u64,
        start: usize,
    },
    /// The kernel is told to drop its pages before the attributes are answered.
    ReadDrops {
        node: u64,
        start: usize,
        since: usize,
    },
    /// The kernel looks at its pages.
    ReadLooks {
        node: u64,
        start: usize,
    },
    /// The kernel reads the page, which it has locked.
    Reads {
        node: u64,
        call: u64,
        start: usize,
        read: PageRead,
    },
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    kind: Kind,
    ticket: Ticket,
    at: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Recall {
    Came,
    Drops { since: usize },
    Dropped,
}

#[derive(Debug, Default)]
struct Page {
    value: Option<u64>,
    locked: bool,
    /// The step at which it was locked last.
    locked_at: usize,
    /// It was read under a lease that nothing has ended, and programs that have mapped it see no other bytes than the server has.
    good: bool,
}

/// Attributes in the kernel.
#[derive(Debug)]
struct KernelAttributes {
    stamp: u64,
    /// It uses them without asking.
    until: Instant,
    /// The step at which it was last told to drop them: what was asked before that is not taken.
    dropped_at: usize,
}

#[derive(Clone, Copy, Debug)]
pub enum Next {
    Program(usize),
    Recall(usize),
    Renew,
    /// A program uses what the kernel has, of which the mount hears nothing.
    Glance,
}

#[derive(Debug)]
pub struct Agent {
    place: usize,
    /// Its programs look for names more than anything else; on one machine they change them, too.
    names: bool,
    pub session: u64,
    leases: Leases<u64>,
    programs: Vec<Doing>,
    pages: HashMap<u64, Page>,
    kernel: HashMap<u64, KernelAttributes>,
    /// Files that programs have opened for reading through the page cache.
    opened: HashSet<u64>,
    recalls: Vec<(u64, u64, Recall)>,
    sent: HashMap<u64, Sent>,
    last_call: u64,
    last_sent: Instant,
    /// Until when the session's leases hold.
    until: Instant,
    cut_off: Instant,
    stopped: Instant,
    recalls_from: Instant,
    pub ended: usize,
}

/// A name, as the mount has it.
fn name_of(name: u8) -> &'static [u8] {
    const ALL: [u8; NAMES as usize] = [0, 1, 2];
    &ALL[usize::from(name)..=usize::from(name)]
}

impl Agent {
    pub fn new(place: usize, names: bool) -> Self {
        let (cut_off, stopped, recalls_from) = (Instant::ZERO, Instant::ZERO, Instant::ZERO);
        Self {
            place,
            names,
            session: 0,
            leases: Leases::default(),
            programs: vec![Doing::Nothing; PROGRAMS],
            pages: HashMap::new(),
            kernel: HashMap::new(),
            opened: HashSet::new(),
            recalls: Vec::new(),
            sent: HashMap::new(),
            last_call: 0,
            last_sent: Instant::ZERO,
            until: Instant::ZERO,
            cut_off,
            stopped,
            recalls_from,
            ended: 0,
        }
    }

    pub fn cut_off(&mut self, until: Instant) {
        self.cut_off = until;
    }

    pub fn stop(&mut self, until: Instant) {
        self.stopped = until;
    }

    pub fn recalls_late(&mut self, until: Instant) {
        self.recalls_from = until;
    }

    pub fn is_reachable(&self, now: Instant) -> bool {
        self.cut_off <= now
    }

    pub fn runs(&self, now: Instant) -> bool {
        self.stopped <= now
    }

    pub fn is_busy(&self) -> bool {
        self.programs.iter().any(|doing| !matches!(doing, Doing::Nothing))
    }

    /// The session has ended; there is no other before this.
    pub fn end_session(&mut self, step: usize) {
        for (node, what) in self.leases.end_session() {
            self.drop_attributes(node, step);
            if what == Invalid::Pages {
                self.leases.begin_drop(node);
                let drops = !self.is_locked(node);
                if drops {
                    self.drop_pages(node);
                }
                self.leases.end_drop(node, drops);
            }
        }
    }

    /// A session begins. Calls of the old one that read are sent again; what became of changes is not known.
    pub fn begin_session(&mut self, session: u64) {
        self.session = session;
        self.leases.begin_session(session);
        self.until = Instant::ZERO;
        self.pages.values_mut().for_each(|page| page.good = false);
        self.recalls.retain(|(_, _, stage)| !matches!(stage, Recall::Came));
        // What is recalled of an earlier session is returned to none: a new server process may use its version again.
        self.recalls.iter_mut().for_each(|(_, version, _)| *version = u64::MAX);
        let lost = std::mem::take(&mut self.sent);
        for program in 0..PROGRAMS {
            self.programs[program] = match self.programs[program] {
                Doing::Asks { kind, call, .. } if lost.contains_key(&call) && !given_up(kind).is_empty() => {
                    self.end_change(kind, &Answer::default(), Instant::ZERO);
                    Doing::Nothing
                }
                // Call 0 is sent at the program's next step.
                Doing::Asks { kind, start, .. } => Doing::Asks { kind, call: 0, start },
                Doing::ReadAsks { node, start, .. } => Doing::ReadAsks { node, call: 0, start },
                Doing::Reads { node, start, read, .. } => Doing::Reads { node, call: 0, start, read },
                other => other,
            };
        }
    }

    pub fn candidates(&self, now: Instant, calm: bool) -> impl Iterator<Item = Next> {
        let ready = |doing: &Doing| match doing {
            Doing::Nothing => !calm,
            Doing::Asks { call, .. } | Doing::ReadAsks { call, .. } | Doing::Reads { call, .. } => *call == 0,
            Doing::ReadDrops { node, since, .. } => self.can_drop(*node, *since),
            Doing::ReadLooks { node, .. } => !self.is_locked(*node),
        };
        let programs = self.programs.iter().enumerate().filter(move |(_, doing)| ready(doing));
        let recalls = self.recalls.iter().enumerate().filter(move |(_, (node, _, stage))| {
            let drops = match stage {
                Recall::Drops { since } => self.can_drop(*node, *since),
                Recall::Came | Recall::Dropped => true,
            };
            drops && (calm || self.recalls_from <= now)
        });
        let renews = self.leases.has_leases() && now.since(self.last_sent) >= FILE_LEASE_RENEWAL;
        let programs: Vec<_> = programs.map(|(at, _)| Next::Program(at)).collect();
        let recalls: Vec<_> = recalls.map(|(at, _)| Next::Recall(at)).collect();
        programs.into_iter().chain(recalls).chain(renews.then_some(Next::Renew))
    }

    /// Whether the kernel can go over its pages: it waits for one that was locked when it began. Behind it more may be read.
    fn can_drop(&self, node: u64, since: usize) -> bool {
        self.pages.get(&node).is_none_or(|page| !page.locked || page.locked_at > since)
    }

    fn is_locked(&self, node: u64) -> bool {
        self.pages.get(&node).is_some_and(|page| page.locked)
    }

    pub fn work(&mut self, next: Next, now: Instant, chance: &mut Chance, truth: &mut Truth, wire: &mut Vec<Message>) {
        match next {
            Next::Program(program) => self.go_on(program, now, chance, truth, wire),
            Next::Recall(at) => self.recall(at, now, truth.step, wire),
            Next::Glance => self.glance(now, chance, truth),
            Next::Renew => _ = self.send(Kind::Renew, now, wire),
        }
    }

    fn push(&self, body: Body, wire: &mut Vec<Message>) {
        wire.push(Message { to_server: true, agent: self.place, session: self.session, body });
    }

    fn send(&mut self, kind: Kind, now: Instant, wire: &mut Vec<Message>) -> u64 {
        self.last_call += 1;
        let id = self.last_call;
        let node = match kind {
            Kind::Stat(node) | Kind::Read(node) => node,
            _ => DIRECTORY,
        };
        let sent = Sent { kind, ticket: self.leases.ask(node), at: now };
        self.sent.insert(id, sent);
        self.last_sent = now;
        self.push(Body::Call { id, kind }, wire);
        id
    }

    /// A program begins an operation, or its operation goes on.
    fn go_on(&mut self, program: usize, now: Instant, chance: &mut Chance, truth: &mut Truth, wire: &mut Vec<Message>) {
        let start = truth.step;
        self.programs[program] = match self.programs[program] {
            Doing::Nothing => self.begin(start, now, chance, truth, wire),
            Doing::Asks { kind, start, .. } => Doing::Asks { kind, call: self.send(kind, now, wire), start },
            Doing::ReadAsks { node, start, .. } => {
                Doing::ReadAsks { node, call: self.send(Kind::Stat(node), now, wire), start }
            }
            Doing::ReadDrops { node, start, .. } => {
                self.drop_pages(node);
                self.drop_attributes(node, truth.step);
                self.leases.end_drop(node, true);
                self.give_attributes(node, truth.step, now);
                Doing::ReadLooks { node, start }
            }
            Doing::ReadLooks { node, start } => {
                let page = self.pages.entry(node).or_default();
                if let Some(value) = page.value {
                    truth.check(Register::Data(node), value, start);
                    truth.cached += 1;
                    self.ended += 1;
                    Doing::Nothing
                } else {
                    (page.locked, page.locked_at) = (true, truth.step);
                    let read = self.leases.begin_read(node, now);
                    Doing::Reads { node, call: self.send(Kind::Read(node), now, wire), start, read }
                }
            }
            Doing::Reads { node, start, read, .. } => {
                Doing::Reads { node, call: self.send(Kind::Read(node), now, wire), start, read }
            }
        };
    }

    fn begin(
        &mut self,
        start: usize,
        now: Instant,
        chance: &mut Chance,
        truth: &mut Truth,
        wire: &mut Vec<Message>,
    ) -> Doing {
        self.load_mapped(now, truth);
        let (file, name) = (chance.below(FILES as usize) as u64 + 1, chance.below(usize::from(NAMES)) as u8);
        self.open_or_close(file, now, chance);
        let is_changer = self.place == 0 || chance.one_in(8);
        let kind = match chance.below(20) {
            10.. if self.names && !is_changer => Kind::LookUp(name),
            0..10 if self.names => Kind::LookUp(name),
            0..6 => {
                // A read begins with the attributes, if the kernel has none.
                if self.kernel_attributes(file, now).is_some() {
                    return Doing::ReadLooks { node: file, start };
                }
                if self.leases.attributes(file, now).is_some() {
                    return self.before_read(file, start, start, now);
                }
                return Doing::ReadAsks { node: file, call: self.send(Kind::Stat(file), now, wire), start };
            }
            6..10 => Kind::Stat(file),
            10..14 => Kind::LookUp(name),
            14..16 => Kind::Write(file),
            16 => Kind::Chmod(file),
            17 => Kind::Link(file, name),
            18 => Kind::Unlink(name, self.believed_file(name, now, chance)),
            _ => {
                let to = (name + 1) % NAMES;
                Kind::Rename(name, to, [name, to].map(|name| self.believed_file(name, now, chance)))
            }
        };
        let known = match kind {
            Kind::Stat(node) => {
                let known = self.kernel_attributes(node, now).or_else(|| self.give_attributes(node, start, now));
                known.map(|stamp| CachedEntry::Node(node, stamp))
            }
            Kind::LookUp(name) => self.leases.entry(DIRECTORY, &[], &[name], now),
            _ => None,
        };
        if let Some(known) = known {
            let (found, stamp) = match known {
                CachedEntry::Absent => (0, 0),
                CachedEntry::Node(node, stamp) => {
                    self.give_attributes(node, start, now);
                    (node, stamp)
                }
            };
            self.see(kind, &Answer { stamp, found, ..Answer::default() }, start, truth);
            truth.cached += 1;
            return Doing::Nothing;
        }
        let kept = changes_names(kind).then_some(DIRECTORY).or(changes_file(kind));
        for node in self.leases.begin_change(&given_up(kind), kept, now) {
            self.drop_attributes(node, start);
        }
        for node in given_up(kind) {
            self.pages.entry(node).or_default().good = false;
        }
        if let Kind::Write(node) = kind {
            self.leases.begin_writer(node);
        }
        Doing::Asks { kind, call: self.send(kind, now, wire), start }
    }

    /// The file that a name is taken for; it may have gone to another name.
    fn believed_file(&self, name: u8, now: Instant, chance: &mut Chance) -> u64 {
        match self.leases.entry(DIRECTORY, &[], &[name], now) {
            Some(CachedEntry::Node(node, _)) => node,
            Some(CachedEntry::Absent) => 0,
            None => chance.below(FILES as usize + 1) as u64,
        }
    }

    fn glance(&self, now: Instant, chance: &mut Chance, truth: &mut Truth) {
        let node = chance.below(FILES as usize) as u64 + 1;
        let Some(stamp) = self.kernel_attributes(node, now) else { return };
        truth.check(Register::Stamp(node), stamp, truth.step);
        let page = self.pages.get(&node).filter(|page| !page.locked);
        if let Some(value) = page.and_then(|page| page.value) {
            truth.check(Register::Data(node), value, truth.step);
        }
    }

    /// Programs open files for reading and close them.
    fn open_or_close(&mut self, node: u64, now: Instant, chance: &mut Chance) {
        let reads = |doing: &Doing| {
            matches!(doing, Doing::ReadAsks { node: other, .. } | Doing::ReadDrops { node: other, .. }
                | Doing::ReadLooks { node: other, .. } | Doing::Reads { node: other, .. } if *other == node)
        };
        if !self.opened.contains(&node) {
            if self.leases.begin_reader(node, now) == OpenMode::Direct {
                self.leases.end_direct_reader(node);
            } else {
                self.opened.insert(node);
            }
        } else if chance.one_in(3) && !self.programs.iter().any(reads) {
            self.opened.remove(&node);
            self.leases.end_reader(node);
        }
    }

    fn before_read(&mut self, node: u64, start: usize, since: usize, now: Instant) -> Doing {
        if self.leases.has_fresh_pages(node, now) {
            self.give_attributes(node, start, now);
            return Doing::ReadLooks { node, start };
        }
        self.leases.begin_drop(node);
        Doing::ReadDrops { node, start, since }
    }

    /// Programs load from the pages that they have mapped.
    fn load_mapped(&self, now: Instant, truth: &mut Truth) {
        for (node, page) in self.pages.iter().filter(|(_, page)| page.good && now < self.until) {
            if let Some(value) = page.value {
                truth.check(Register::Data(*node), value, truth.step);
            }
        }
    }

    /// Attributes that the kernel uses without asking.
    fn kernel_attributes(&self, node: u64, now: Instant) -> Option<u64> {
        self.kernel.get(&node).filter(|known| now < known.until).map(|known| known.stamp)
    }

    /// Gives the kernel what is believed of a node. It has asked at a step, and takes nothing if it was told to drop it since.
    fn give_attributes(&mut self, node: u64, asked: usize, now: Instant) -> Option<u64> {
        let (stamp, valid) = self.leases.believed(node, now)?;
        let known =
            self.kernel.entry(node).or_insert(KernelAttributes { stamp: 0, until: Instant::ZERO, dropped_at: 0 });
        if known.dropped_at <= asked {
            (known.stamp, known.until) = (stamp, now + valid);
        }
        Some(stamp)
    }

    fn drop_attributes(&mut self, node: u64, step: usize) {
        if let Some(known) = self.kernel.get_mut(&node) {
            (known.until, known.dropped_at) = (Instant::ZERO, step);
        }
    }

    fn drop_pages(&mut self, node: u64) {
        self.pages.entry(node).or_default().value = None;
    }

    fn end_change(&mut self, kind: Kind, answer: &Answer, now: Instant) {
        let of = |name: &'static [u8], new| NameChange { name, new };
        let names = match kind {
            Kind::Unlink(name, _) => vec![of(name_of(name), NewName::Absent)],
            Kind::Link(node, name) => vec![of(name_of(name), NewName::Node(node))],
            Kind::Rename(from, to, _) => {
                vec![of(name_of(from), NewName::Absent), of(name_of(to), NewName::Unknown)]
            }
            _ => Vec::new(),
        };
        let version = answer.directory_lease.filter(|_| answer.made);
        let changed = version.map(|version| NamesChanged {
            directory: DIRECTORY,
            version,
            attributes: 0,
            user: &[],
            names: &names,
        });
        match (changes_file(kind), answer.lease) {
            (Some(node), Some(version)) => {
                // A write's answer has no attributes.
                let attributes = matches!(kind, Kind::Chmod(_)).then_some(answer.stamp);
                self.leases.end_change_of_file(FileChanged { node, version, attributes }, now);
            }
            _ => self.leases.end_change(&given_up(kind), changed, now),
        }
        if let Kind::Write(node) = kind {
            self.leases.end_writer(node);
        }
    }

    /// What a program has seen.
    fn see(&mut self, kind: Kind, answer: &Answer, start: usize, truth: &mut Truth) {
        match kind {
            Kind::Stat(node) => truth.check(Register::Stamp(node), answer.stamp, start),
            Kind::LookUp(name) => {
                truth.check(Register::Name(name), answer.found, start);
                if answer.found != 0 {
                    truth.check(Register::Stamp(answer.found), answer.stamp, start);
                }
            }
            _ => {}
        }
        self.ended += 1;
    }

    pub fn take(&mut self, body: Body, now: Instant, truth: &mut Truth) {
        match body {
            Body::Answer { id, answer } => self.answered(id, &answer, now, truth),
            Body::Recall { node, version } => self.recalls.push((node, version, Recall::Came)),
            Body::Call { .. } | Body::Returned { .. } => {}
        }
    }

    fn answered(&mut self, id: u64, answer: &Answer, now: Instant, truth: &mut Truth) {
        let Some(sent) = self.sent.remove(&id) else { return };
        let Sent { kind, ticket, at, .. } = sent;
        self.leases.answered(self.session, at, now);
        self.until = self.until.max(at + FILE_LEASE_USE);
        match kind {
            Kind::Stat(node) => self.leases.learn(ticket, node, answer.lease, Some(answer.stamp), now),
            Kind::LookUp(name) => {
                self.leases.learn(ticket, DIRECTORY, answer.directory_lease, None, now);
                let found = (answer.found != 0).then_some(answer.found);
                self.leases.learn_entry(ticket, DIRECTORY, answer.directory_lease.is_some(), &[], &[name], found);
                if let Some(found) = found {
                    let ticket = ticket.of_found();
                    self.leases.learn(ticket, found, answer.lease, Some(answer.stamp), now);
                }
            }
            _ => {}
        }
        let found = match kind {
            Kind::Stat(node) => node,
            Kind::LookUp(_) => answer.found,
            _ => DIRECTORY,
        };
        truth.asked += 1;
        let waits = |doing: &Doing| match doing {
            Doing::Asks { call, .. } | Doing::ReadAsks { call, .. } | Doing::Reads { call, .. } => *call == id,
            _ => false,
        };
        let Some(program) = self.programs.iter().position(waits) else { return };
        self.programs[program] = match self.programs[program] {
            Doing::Asks { kind, start, .. } => {
                if !given_up(kind).is_empty() {
                    self.end_change(kind, answer, now);
                }
                if found != DIRECTORY {
                    self.give_attributes(found, start, now);
                }
                self.see(kind, answer, start, truth);
                Doing::Nothing
            }
            Doing::ReadAsks { node, start, .. } => self.before_read(node, start, truth.step, now),
            Doing::Reads { node, start, read, .. } => {
                let good = self.leases.end_read(node, read, now);
                truth.check(Register::Data(node), answer.data, start);
                self.ended += 1;
                let page = self.pages.entry(node).or_default();
                (page.value, page.locked, page.good) = (Some(answer.data), false, good);
                Doing::Nothing
            }
            other => other,
        };
    }

    /// Works on a recall.
    fn recall(&mut self, at: usize, now: Instant, step: usize, wire: &mut Vec<Message>) {
        let (node, version, stage) = self.recalls[at];
        self.recalls[at].2 = match stage {
            Recall::Came => match self.leases.recalled(node, now) {
                Some(Invalid::Pages) => {
                    self.leases.begin_drop(node);
                    Recall::Drops { since: step }
                }
                Some(Invalid::Attributes) => {
                    self.drop_attributes(node, step);
                    Recall::Dropped
                }
                None => Recall::Dropped,
            },
            Recall::Drops { .. } => {
                self.drop_pages(node);
                self.drop_attributes(node, step);
                self.leases.end_drop(node, true);
                Recall::Dropped
            }
            Recall::Dropped => {
                self.recalls.swap_remove(at);
                return self.push(Body::Returned { node, version }, wire);
            }
        };
    }
}
