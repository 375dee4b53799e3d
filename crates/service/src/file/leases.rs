//! Leases of a share's files: which sessions may cache which files, and when a change may take effect.
//!
//! A lease lets a session cache the attributes, data and entries of one file or directory. Each call that changes a file is
//! a *change* of it: it begins when every other session's lease on the file has been returned or has expired, and no lease
//! is granted until the last change has ended. Reads never wait: during a change they are answered without a lease. So a
//! client whose kernel waits for a read can always answer a recall.
//!
//! A lease lasts for [`FILE_LEASE_TIME`] after the last message that the server has received from its session. A session
//! that does not answer a recall for that time is ended ([`Action::End`]): from then on nothing renews its leases, and they
//! expire. A change also waits for the leases of an ended session, because its client may not know yet that it has ended.
//!
//! The table is pure; [`crate::coherence`] decides for each file which leases conflict with a change. `R` is the way to
//! reach a session.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::locks::FileId;
use crate::coherence::{self, Delivery, Mode, Object};
use crate::limits::{FILE_CHANGES_REMEMBERED, FILE_LEASE_TIME, FILE_LEASED_FILES_MAX, FILE_LEASES_MAX};

/// When a session was heard last. Its loop notes it for each message without taking the table's lock.
#[derive(Clone, Debug)]
pub struct LastHeard(Arc<AtomicU64>);

/// Set in [`LastHeard`] once nothing renews the session's leases any more.
const ENDED: u64 = 1 << 63;

impl LastHeard {
    fn new(now: Instant) -> Self {
        Self(Arc::new(AtomicU64::new(now.nanos())))
    }

    /// A message has come. False if it comes too late: it must not be answered, and the session ends.
    pub fn note(&self, now: Instant) -> bool {
        let newer = |heard: u64| (heard & ENDED == 0).then_some(heard.max(now.nanos()));
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer).is_ok()
    }

    /// When the last message came.
    pub fn at(&self) -> Instant {
        Instant::from_nanos(self.0.load(Ordering::Acquire) & !ENDED)
    }

    fn end(&self) {
        self.0.fetch_or(ENDED, Ordering::AcqRel);
    }

    fn has_ended(&self) -> bool {
        self.0.load(Ordering::Acquire) & ENDED != 0
    }
}

/// A point in the order of changes, for [`Leases::grant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Since(u64);

/// A change that has begun, or waits to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Change(u64);

/// What the caller does next, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<R> {
    /// Ask a session to return a lease.
    Recall {
        /// Which.
        session: R,
        /// On which file.
        file: FileId,
        /// Of the grant.
        version: u64,
    },
    /// A change that waited begins now.
    Begin {
        /// Whose.
        session: R,
        /// Which.
        change: Change,
        /// What the caller gave for it.
        ticket: u64,
    },
    /// End a session: it has not answered a recall in time.
    End {
        /// Which.
        session: R,
    },
}

/// Which side of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// A session with a lease.
    Session(u64),
    /// All changes under way, together.
    Changes,
}

#[derive(Debug)]
struct File {
    object: Object<Holder>,
    /// Changes that have begun or wait.
    changes: u32,
    /// No lease stands against them any more.
    changing: bool,
    /// Changes that wait for that.
    waiting: Vec<Change>,
    /// When the last change ended.
    changed: Since,
    /// The session that gave up a lease for the change under way, which is the only one since then.
    keeper: Option<u64>,
}

#[derive(Debug)]
struct Session<R> {
    route: R,
    heard: LastHeard,
    held: HashSet<FileId>,
    /// Leases that it was asked to return and has not.
    recalled: HashSet<FileId>,
    /// When it was asked for the first of these.
    recalled_at: Instant,
    /// Its connection has gone.
    gone: bool,
}

#[derive(Debug)]
struct Waiting<R> {
    session: u64,
    route: R,
    ticket: u64,
    files: Vec<FileId>,
    /// Files on which leases stand against it.
    against: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Leases<R> {
    files: HashMap<FileId, File>,
    sessions: HashMap<u64, Session<R>>,
    changes: HashMap<Change, Waiting<R>>,
    last_change: u64,
    now: Since,
    /// Files without leases and changes, in the order of their last change.
    quiet: VecDeque<(FileId, Since)>,
    /// The last change of every file that is not in the table is not later.
    forgotten: Since,
    /// The versions of every file that is not in the table are not greater.
    version: u64,
    actions: VecDeque<Action<R>>,
}

impl<R> Default for Leases<R> {
    fn default() -> Self {
        Self {
            files: HashMap::new(),
            sessions: HashMap::new(),
            changes: HashMap::new(),
            last_change: 0,
            now: Since(0),
            quiet: VecDeque::new(),
            forgotten: Since(0),
            version: 0,
            actions: VecDeque::new(),
        }
    }
}

impl<R: Clone> Leases<R> {
    /// A session begins to use the share.
    pub fn join(&mut self, session: u64, route: R, now: Instant) -> LastHeard {
        // Those that are gone, and whose leases nobody needed since.
        let over = self.sessions.iter().filter(|(_, one)| one.gone && one.expires() <= now);
        for session in over.map(|(session, _)| *session).collect::<Vec<_>>() {
            self.drop_session(session, now);
        }
        let heard = LastHeard::new(now);
        let (held, recalled) = (HashSet::new(), HashSet::new());
        let one = Session { route, heard: heard.clone(), held, recalled, recalled_at: Instant::FAR, gone: false };
        self.sessions.insert(session, one);
        heard
    }

    /// A session has ended. Its client may not know yet, and uses its leases until they run out.
    pub fn leave(&mut self, session: u64, now: Instant) {
        let Some(one) = self.sessions.get_mut(&session) else { return };
        one.heard.end();
        one.gone = true;
        if one.held.is_empty() || seeded::is(Bug::LeaseEndsWithSession) {
            self.drop_session(session, now);
        }
    }

    /// A session uses none of its leases any more.
    pub fn returned_all(&mut self, session: u64, now: Instant) {
        self.drop_session(session, now);
    }

    /// Where the order of changes is now: said before a file is read for [`Leases::grant`].
    pub fn since(&self) -> Since {
        self.now
    }

    /// Grants a session a lease on a file that was read after `since`; gives its version. `None`: a change was or is under way, or
    /// there are too many leases.
    pub fn grant(&mut self, session: u64, id: FileId, since: Since, now: Instant) -> Option<u64> {
        let holder = self.sessions.get_mut(&session).filter(|one| !one.heard.has_ended())?;
        // One that was recalled may be on its way back.
        if holder.recalled.contains(&id) || (holder.held.len() >= FILE_LEASES_MAX && !holder.held.contains(&id)) {
            return None;
        }
        let (busy, last_change) = match self.files.get(&id) {
            Some(file) => (file.changes > 0, file.changed),
            None => (self.files.len() >= FILE_LEASED_FILES_MAX, self.forgotten),
        };
        if (busy && !seeded::is(Bug::LeaseDuringChange)) || (last_change > since && !seeded::is(Bug::LeaseOnOldAnswer))
        {
            return None;
        }
        let file = file_of(&mut self.files, id, self.version);
        if file.changing {
            return None;
        }
        holder.lease(session, id, file, now)
    }

    /// Begins a change of some files by a session, if nothing stands against it.
    pub fn try_begin(&mut self, session: u64, files: &[FileId], own: &[FileId], now: Instant) -> Option<Change> {
        let stands = |id: &FileId| {
            let Some(file) = self.files.get(id) else { return false };
            let other = |holder| holder != Holder::Changes && !(holder == Holder::Session(session) && own.contains(id));
            !file.changing && (file.changes > 0 || file.object.holders().any(|(holder, _)| other(holder)))
        };
        if files.iter().any(stands) {
            return None;
        }
        let (change, waits) = self.start(session, files, own, 0, now)?;
        debug_assert!(!waits, "nothing stood against it");
        Some(change)
    }

    /// Begins a change of some files by a session. `own` are those of which the client has dropped all that it had cached, before
    /// it asked: its own lease on them ends. True if it waits: then [`Action::Begin`] says when it has begun. `None`: the session
    /// is not known.
    pub fn begin(
        &mut self,
        session: u64,
        files: &[FileId],
        own: &[FileId],
        ticket: u64,
        now: Instant,
    ) -> Option<(Change, bool)> {
        self.start(session, files, own, ticket, now)
    }

    fn start(
        &mut self,
        session: u64,
        files: &[FileId],
        own: &[FileId],
        ticket: u64,
        now: Instant,
    ) -> Option<(Change, bool)> {
        let route = self.sessions.get(&session)?.route.clone();
        let mut files = files.to_vec();
        files.sort_unstable_by_key(|id| (id.device, id.ino));
        files.dedup();
        self.last_change += 1;
        let change = Change(self.last_change);
        self.changes.insert(change, Waiting { session, route, ticket, files: files.clone(), against: files.len() });
        for id in files {
            let held = own.contains(&id) && self.holds_unasked(session, id);
            if own.contains(&id) || seeded::is(Bug::LeaseOfChangerForgotten) {
                self.release(session, id, None, now);
            }
            if seeded::is(Bug::LeaseNotRecalled) && !own.contains(&id) {
                for session in self.sessions.keys().copied().collect::<Vec<_>>() {
                    self.release(session, id, None, now);
                }
            }
            let file = file_of(&mut self.files, id, self.version);
            if file.changes == 0 || !seeded::is(Bug::NamesKeptThroughOthersChange) {
                file.keeper = (held && file.changes == 0).then_some(session);
            }
            file.changes += 1;
            if file.changing {
                self.joined(change, false);
                continue;
            }
            file.waiting.push(change);
            if file.changes == 1 {
                let asked = file.object.ask(Holder::Changes, Mode::Write, now);
                debug_assert_eq!(asked, Ok(()), "changes ask once");
            }
            if seeded::is(Bug::ChangeBeforeReturn) {
                file.waiting.pop();
                self.joined(change, false);
            }
            self.pump(id, now);
        }
        let waits = self.changes.get(&change).is_some_and(|change| change.against > 0);
        // It is told by the result here.
        if !waits {
            let is_it = |action: &Action<R>| matches!(action, Action::Begin { change: other, .. } if *other == change);
            self.actions.retain(|action| !is_it(action));
        }
        Some((change, waits))
    }

    /// The files of a change.
    pub fn files(&self, change: Change) -> &[FileId] {
        self.changes.get(&change).map_or(&[], |one| &one.files)
    }

    /// A change has ended, done or not.
    pub fn end(&mut self, change: Change, now: Instant) {
        self.end_keeping(change, None, now);
    }

    /// The same. If it was the only change of the file `kept` since its session had a lease on it, the session has a lease again: gives its
    /// version. The client knows which of what it knew the change has left as it was.
    pub fn end_keeping(&mut self, change: Change, kept: Option<FileId>, now: Instant) -> Option<u64> {
        let ended = self.changes.remove(&change)?;
        self.now.0 += 1;
        let mut version = None;
        for id in ended.files {
            let Some(file) = self.files.get_mut(&id) else { continue };
            file.changed = self.now;
            file.changes -= 1;
            file.waiting.retain(|other| *other != change);
            if file.changes == 0 {
                file.changing = false;
                file.object.gone(Holder::Changes, now);
            }
            self.pump(id, now);
            if kept == Some(id) {
                version = self.grant_again(ended.session, id, now);
            }
            self.settle(id);
        }
        version
    }

    /// Grants a lease on a file to the session that gave one up to change it.
    fn grant_again(&mut self, session: u64, id: FileId, now: Instant) -> Option<u64> {
        let file = self.files.get_mut(&id)?;
        if file.keeper != Some(session) || file.changes > 0 {
            return None;
        }
        let is_alive = |one: &&mut Session<R>| !one.heard.has_ended() && one.held.len() < FILE_LEASES_MAX;
        self.sessions.get_mut(&session).filter(is_alive)?.lease(session, id, file, now)
    }

    /// Whether a session has a lease that it was not asked to return.
    fn holds_unasked(&self, session: u64, id: FileId) -> bool {
        self.sessions.get(&session).is_some_and(|one| one.held.contains(&id) && !one.recalled.contains(&id))
    }

    /// A session returns a lease: asked or not. An old version is passed over.
    pub fn returned(&mut self, session: u64, file: FileId, version: u64, now: Instant) {
        let version = if seeded::is(Bug::OldLeaseReturned) { None } else { Some(version) };
        self.release(session, file, version, now);
    }

    /// A session does not know a file any more, and with it no lease.
    pub fn forgotten(&mut self, session: u64, file: FileId, now: Instant) {
        self.release(session, file, None, now);
    }

    fn release(&mut self, session: u64, id: FileId, version: Option<u64>, now: Instant) {
        let Some(one) = self.sessions.get_mut(&session) else { return };
        if !one.held.contains(&id) {
            return;
        }
        let Some(file) = self.files.get_mut(&id) else { return };
        let holder = Holder::Session(session);
        match version {
            Some(version) => {
                if file.object.release(holder, version, now).is_err() {
                    return;
                }
            }
            None => file.object.gone(holder, now),
        }
        one.held.remove(&id);
        one.recalled.remove(&id);
        self.pump(id, now);
        self.settle(id);
    }

    /// Time has passed.
    pub fn time(&mut self, now: Instant) {
        let asked = self.sessions.iter().filter(|(_, one)| !one.recalled.is_empty());
        let late: Vec<u64> = asked.filter(|(_, one)| one.next_time() <= now).map(|(session, _)| *session).collect();
        for session in late {
            let Some(one) = self.sessions.get_mut(&session) else { continue };
            if !one.heard.has_ended() {
                one.heard.end();
                self.actions.push_back(Action::End { session: one.route.clone() });
            }
            if one.expires() <= now || seeded::is(Bug::LeaseFencedEarly) {
                self.drop_session(session, now);
            }
        }
    }

    /// When [`Leases::time`] has something to do.
    pub fn next_time(&self) -> Option<Instant> {
        let asked = self.sessions.values().filter(|one| !one.recalled.is_empty());
        asked.map(Session::next_time).min()
    }

    /// What to do next.
    pub fn next_action(&mut self) -> Option<Action<R>> {
        self.actions.pop_front()
    }

    /// Leases that are held.
    pub fn held(&self) -> usize {
        self.sessions.values().map(|one| one.held.len()).sum()
    }

    /// Takes all leases of a session that can use none any more.
    fn drop_session(&mut self, session: u64, now: Instant) {
        let Some(one) = self.sessions.get_mut(&session) else { return };
        let held = std::mem::take(&mut one.held);
        one.recalled.clear();
        if one.gone {
            self.sessions.remove(&session);
        }
        for id in held {
            if let Some(file) = self.files.get_mut(&id) {
                file.object.gone(Holder::Session(session), now);
            }
            self.pump(id, now);
            self.settle(id);
        }
    }

    /// Does what a file's object says.
    fn pump(&mut self, id: FileId, now: Instant) {
        while let Some(action) = self.files.get_mut(&id).and_then(|file| file.object.next_action()) {
            match action {
                coherence::Action::Recall { holder: Holder::Session(session), version, .. } => {
                    let Some(one) = self.sessions.get_mut(&session) else { continue };
                    if one.recalled.is_empty() {
                        one.recalled_at = now;
                    }
                    one.recalled.insert(id);
                    // One that has gone cannot answer: its lease runs out.
                    if !one.gone {
                        let route = one.route.clone();
                        self.actions.push_back(Action::Recall { session: route, file: id, version });
                    }
                }
                coherence::Action::Grant { holder: Holder::Changes, .. } => {
                    let Some(file) = self.files.get_mut(&id) else { continue };
                    file.changing = true;
                    for change in std::mem::take(&mut file.waiting) {
                        self.joined(change, true);
                    }
                }
                _ => {}
            }
        }
    }

    /// One file less stands against a change.
    fn joined(&mut self, change: Change, tell: bool) {
        let Some(waiting) = self.changes.get_mut(&change) else { return };
        waiting.against -= 1;
        if waiting.against == 0 && tell {
            let (session, ticket) = (waiting.route.clone(), waiting.ticket);
            self.actions.push_back(Action::Begin { session, change, ticket });
        }
    }

    /// Forgets files without leases and changes, all but the last few.
    fn settle(&mut self, id: FileId) {
        let Some(file) = self.files.get(&id).filter(|file| file.is_quiet()) else { return };
        self.quiet.push_back((id, file.changed));
        while self.quiet.len() > FILE_CHANGES_REMEMBERED {
            let Some((id, changed)) = self.quiet.pop_front() else { return };
            let quiet = |file: &&File| file.is_quiet() && file.changed == changed;
            let Some(file) = self.files.get(&id).filter(quiet) else { continue };
            self.forgotten = self.forgotten.max(changed);
            self.version = self.version.max(file.object.next_version());
            self.files.remove(&id);
        }
    }
}

fn file_of(files: &mut HashMap<FileId, File>, id: FileId, version: u64) -> &mut File {
    files.entry(id).or_insert_with(|| File {
        object: Object::resumed(None, Delivery::InOrder, version),
        changes: 0,
        changing: false,
        waiting: Vec::new(),
        changed: Since(0),
        keeper: None,
    })
}

impl File {
    fn is_quiet(&self) -> bool {
        self.changes == 0 && self.object.is_idle()
    }
}

impl<R> Session<R> {
    /// Takes a lease on a file that nothing changes; gives its version.
    fn lease(&mut self, key: u64, id: FileId, file: &mut File, now: Instant) -> Option<u64> {
        file.object.ask(Holder::Session(key), Mode::Read, now).ok()?;
        while let Some(action) = file.object.next_action() {
            if let coherence::Action::Grant { version, .. } = action {
                self.held.insert(id);
                return Some(version);
            }
        }
        None
    }

    /// When its leases run out if it says nothing more.
    fn expires(&self) -> Instant {
        self.heard.at() + FILE_LEASE_TIME
    }

    /// When something is to be done about its recalls.
    fn next_time(&self) -> Instant {
        let patience = self.recalled_at + FILE_LEASE_TIME;
        if self.heard.has_ended() { self.expires() } else { self.expires().min(patience) }
    }
}
