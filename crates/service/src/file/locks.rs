//! Locks of files across all clients of a share: `flock` of whole files, and POSIX byte ranges.
//!
//! The table is pure: it has the holders and the waits, and finds deadlocks. Tickets `W` name the waits for the caller. The
//! two kinds of locks do not exclude each other, as on a local file system.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use crate::limits::FILE_LOCKS_MAX;

/// A file, as the file system below names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// The device's number.
    pub device: u64,
    /// The inode's number.
    pub ino: u64,
}

/// The holder of a lock: an owner (a process, or an open file) of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// The session.
    pub session: u64,
    /// The owner, as its client names it.
    pub owner: u64,
}

/// The two families of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `flock(2)`: the range is the whole file.
    Whole,
    /// `fcntl(2)`.
    Range,
}

/// A lock that is held or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Who.
    pub holder: Holder,
    /// The process, for `F_GETLK`.
    pub pid: u32,
    /// First byte.
    pub start: u64,
    /// Last byte; `u64::MAX` for the end of any file.
    pub last: u64,
    /// For one holder alone; else several share it.
    pub exclusive: bool,
}

/// Why a lock is not had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockError {
    /// Another holder has it, and the caller does not wait.
    Held,
    /// The wait would never end: its holder waits for this one.
    Deadlock,
    /// The session has [`FILE_LOCKS_MAX`] locks and waits.
    TooMany,
}

/// What became of a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// The lock is held.
    Now,
    /// The ticket comes back when it is.
    Later,
}

#[derive(Debug)]
struct Waiting<W> {
    family: Family,
    lock: Lock,
    ticket: W,
}

#[derive(Debug)]
struct File<W> {
    whole: Vec<Lock>,
    ranges: Vec<Lock>,
    waiting: VecDeque<Waiting<W>>,
}

/// See the module.
#[derive(Debug)]
pub struct Locks<W> {
    files: HashMap<FileId, File<W>>,
    sessions: HashMap<u64, Counts>,
    /// Files in which a holder waits for a range.
    waits: HashMap<Holder, Vec<FileId>>,
}

/// Locks and waits of a session.
#[derive(Debug, Default)]
struct Counts {
    all: usize,
    by_file: HashMap<FileId, usize>,
}

impl<W> Default for Locks<W> {
    fn default() -> Self {
        Self { files: HashMap::new(), sessions: HashMap::new(), waits: HashMap::new() }
    }
}

impl Lock {
    fn overlaps(&self, other: &Self) -> bool {
        self.start <= other.last && other.start <= self.last
    }

    fn conflicts(&self, other: &Self) -> bool {
        self.holder != other.holder && (self.exclusive || other.exclusive) && self.overlaps(other)
    }
}

impl<W> File<W> {
    fn new() -> Self {
        Self { whole: Vec::new(), ranges: Vec::new(), waiting: VecDeque::new() }
    }

    fn held(&mut self, family: Family) -> &mut Vec<Lock> {
        match family {
            Family::Whole => &mut self.whole,
            Family::Range => &mut self.ranges,
        }
    }

    /// The lock in the way that begins first: a program asks for it by `F_GETLK`, and then for those behind it.
    fn obstacle(&self, family: Family, wanted: &Lock) -> Option<&Lock> {
        let held = if family == Family::Whole { &self.whole } else { &self.ranges };
        held.iter().filter(|lock| lock.conflicts(wanted)).min_by_key(|lock| lock.start)
    }

    /// Takes a range of a holder's locks away: what overlaps is cut.
    fn cut(&mut self, family: Family, range: &Lock) {
        let held = self.held(family);
        let mut rest = Vec::new();
        held.retain(|lock| {
            let is_cut = lock.holder == range.holder && lock.overlaps(range);
            if is_cut && lock.start < range.start {
                rest.push(Lock { last: range.start - 1, ..*lock });
            }
            if is_cut && lock.last > range.last {
                rest.push(Lock { start: range.last + 1, ..*lock });
            }
            !is_cut
        });
        held.append(&mut rest);
    }

    fn grant(&mut self, family: Family, lock: Lock) {
        self.cut(family, &lock);
        let mut lock = lock;
        // Neighbours of the same kind become one, as a program that locks record after record expects.
        self.held(family).retain(|other| {
            let before = |one: &Lock, next: &Lock| one.last.checked_add(1) == Some(next.start);
            let touches = before(&lock, other) || before(other, &lock);
            let joins = other.holder == lock.holder && other.exclusive == lock.exclusive && touches;
            if joins {
                (lock.start, lock.last) = (lock.start.min(other.start), lock.last.max(other.last));
            }
            !joins
        });
        self.held(family).push(lock);
    }

    /// Grants what waits and can be had by now.
    fn serve(&mut self) -> Vec<Waiting<W>> {
        let (mut still, mut granted) = (VecDeque::new(), Vec::new());
        while let Some(waiting) = self.waiting.pop_front() {
            if self.obstacle(waiting.family, &waiting.lock).is_some() {
                still.push_back(waiting);
            } else {
                self.grant(waiting.family, waiting.lock);
                granted.push(waiting);
            }
        }
        self.waiting = still;
        granted
    }

    /// Locks and waits of a session.
    fn count(&self, session: u64) -> usize {
        let locks = self.whole.iter().chain(&self.ranges).chain(self.waiting.iter().map(|waiting| &waiting.lock));
        locks.filter(|lock| lock.holder.session == session).count()
    }

    fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.ranges.is_empty() && self.waiting.is_empty()
    }
}

impl<W> Locks<W> {
    /// What is in the way of a lock.
    pub fn test(&self, file: FileId, family: Family, wanted: &Lock) -> Option<Lock> {
        self.files.get(&file)?.obstacle(family, wanted).copied()
    }

    /// Locks. With a ticket it waits if it must. The second value has the tickets of waits that ended: a lock that was exchanged for
    /// a weaker one may let others in.
    ///
    /// # Errors
    /// See [`LockError`].
    pub fn lock(
        &mut self,
        file: FileId,
        family: Family,
        wanted: Lock,
        ticket: Option<W>,
    ) -> (Result<Granted, LockError>, Vec<W>) {
        // Cutting may make one more of what is held.
        if self.count(wanted.holder.session) + 2 > FILE_LOCKS_MAX {
            return (Err(LockError::TooMany), Vec::new());
        }
        let entry = self.files.entry(file).or_insert_with(File::new);
        if family == Family::Whole
            && let Some(held) = entry.whole.iter().find(|lock| lock.holder == wanted.holder)
        {
            if held.exclusive == wanted.exclusive {
                return (Ok(Granted::Now), Vec::new());
            }
            // As flock(2) says: the old lock is let go of before the new one is asked for.
            entry.cut(family, &Lock { start: 0, last: u64::MAX, ..wanted });
        }
        let mut others = entry.serve();
        let result = if entry.obstacle(family, &wanted).is_none() {
            entry.grant(family, wanted);
            others.append(&mut entry.serve());
            Ok(Granted::Now)
        } else {
            match ticket {
                None => Err(LockError::Held),
                Some(_) if family == Family::Range && self.would_deadlock(file, &wanted) => Err(LockError::Deadlock),
                Some(ticket) => {
                    self.wait(file, Waiting { family, lock: wanted, ticket });
                    Ok(Granted::Later)
                }
            }
        };
        self.note(file, wanted.holder.session);
        (result, self.granted(file, others))
    }

    fn wait(&mut self, file: FileId, waiting: Waiting<W>) {
        if waiting.family == Family::Range {
            self.waits.entry(waiting.lock.holder).or_default().push(file);
        }
        self.files.entry(file).or_insert_with(File::new).waiting.push_back(waiting);
    }

    /// A wait in a file is over.
    fn waits_no_more(&mut self, file: FileId, waiting: &Waiting<W>) {
        let holder = waiting.lock.holder;
        let Some(files) = self.waits.get_mut(&holder).filter(|_| waiting.family == Family::Range) else { return };
        if let Some(at) = files.iter().position(|one| *one == file) {
            files.swap_remove(at);
        }
        if files.is_empty() {
            self.waits.remove(&holder);
        }
    }

    /// Notes that waits in a file have ended with their locks; gives their tickets.
    fn granted(&mut self, file: FileId, granted: Vec<Waiting<W>>) -> Vec<W> {
        let mut tickets = Vec::with_capacity(granted.len());
        for waiting in granted {
            self.waits_no_more(file, &waiting);
            self.note(file, waiting.lock.holder.session);
            tickets.push(waiting.ticket);
        }
        tickets
    }

    /// Counts anew what a session has of a file, and forgets a file of which nobody has anything.
    fn note(&mut self, file: FileId, session: u64) {
        let now = self.files.get(&file).map_or(0, |file| file.count(session));
        let counts = self.sessions.entry(session).or_default();
        let before = if now > 0 { counts.by_file.insert(file, now) } else { counts.by_file.remove(&file) };
        counts.all = counts.all + now - before.unwrap_or(0);
        if counts.by_file.is_empty() {
            self.sessions.remove(&session);
        }
        self.drop_if_empty(file);
    }

    /// Unlocks a range; gives the tickets of waits that ended.
    pub fn unlock(&mut self, file: FileId, family: Family, range: &Lock) -> Vec<W> {
        let Some(entry) = self.files.get_mut(&file) else { return Vec::new() };
        entry.cut(family, range);
        let granted = entry.serve();
        self.note(file, range.holder.session);
        self.granted(file, granted)
    }

    /// Whether a session holds a lock.
    pub fn holds(&self, session: u64) -> bool {
        let holds = |file: &FileId| {
            let held = self.files.get(file).map(|file| file.whole.iter().chain(&file.ranges));
            held.into_iter().flatten().any(|lock| lock.holder.session == session)
        };
        self.sessions.get(&session).is_some_and(|counts| counts.by_file.keys().any(holds))
    }

    /// Ends a wait; gives its ticket.
    pub fn cancel(&mut self, file: FileId, family: Family, wanted: &Lock) -> Option<W> {
        let entry = self.files.get_mut(&file)?;
        let is_it = |waiting: &Waiting<W>| {
            let lock = &waiting.lock;
            waiting.family == family
                && (lock.holder, lock.start, lock.last) == (wanted.holder, wanted.start, wanted.last)
        };
        let at = entry.waiting.iter().position(is_it)?;
        let waiting = entry.waiting.remove(at)?;
        self.waits_no_more(file, &waiting);
        self.note(file, wanted.holder.session);
        Some(waiting.ticket)
    }

    /// The waits of a session are over; its locks stay.
    pub fn end_waits(&mut self, session: u64) {
        for file in self.files_of(session) {
            let Some(entry) = self.files.get_mut(&file) else { continue };
            let (ended, still) = entry.waiting.drain(..).partition(|waiting| waiting.lock.holder.session == session);
            entry.waiting = still;
            let ended: VecDeque<_> = ended;
            for waiting in &ended {
                self.waits_no_more(file, waiting);
            }
            self.note(file, session);
        }
    }

    /// A session has ended for good: its locks and waits are gone. Gives the tickets of others' waits that ended.
    pub fn leave(&mut self, session: u64) -> Vec<W> {
        self.end_waits(session);
        let mut tickets = Vec::new();
        for file in self.files_of(session) {
            let Some(entry) = self.files.get_mut(&file) else { continue };
            entry.whole.retain(|lock| lock.holder.session != session);
            entry.ranges.retain(|lock| lock.holder.session != session);
            let granted = entry.serve();
            self.note(file, session);
            tickets.append(&mut self.granted(file, granted));
        }
        tickets
    }

    /// Files of which a session has locks or waits, in an order that does not change from run to run.
    fn files_of(&self, session: u64) -> BTreeSet<FileId> {
        self.sessions.get(&session).into_iter().flat_map(|counts| counts.by_file.keys().copied()).collect()
    }

    /// Locks and waits of a session.
    fn count(&self, session: u64) -> usize {
        self.sessions.get(&session).map_or(0, |counts| counts.all)
    }

    /// Whether a holder in the way waits, perhaps through others, for this one.
    fn would_deadlock(&self, file: FileId, wanted: &Lock) -> bool {
        let (mut seen, mut to_see) = (HashSet::new(), vec![(file, *wanted)]);
        while let Some((file, wish)) = to_see.pop() {
            let Some(entry) = self.files.get(&file) else { continue };
            for lock in entry.ranges.iter().filter(|lock| lock.conflicts(&wish)) {
                if lock.holder == wanted.holder {
                    return true;
                }
                if !seen.insert(lock.holder) {
                    continue;
                }
                for id in self.waits.get(&lock.holder).into_iter().flatten() {
                    let waits = self.files.get(id).into_iter().flat_map(|file| &file.waiting);
                    let waits = waits.filter(|waiting| waiting.family == Family::Range);
                    let waits = waits.filter(|waiting| waiting.lock.holder == lock.holder);
                    to_see.extend(waits.map(|waiting| (*id, waiting.lock)));
                }
            }
        }
        false
    }

    fn drop_if_empty(&mut self, file: FileId) {
        if self.files.get(&file).is_some_and(File::is_empty) {
            self.files.remove(&file);
        }
    }
}

#[cfg(test)]
mod tests;
