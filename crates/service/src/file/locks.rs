//! Locks of files across all clients of a share: `flock` of whole files, and POSIX byte ranges.
//!
//! The table is pure: it says who holds what, which waits end, and which wait would never end. Tickets `W` name the waits for the
//! caller. The two families do not see each other, as on a local file system.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::limits::FILE_LOCKS_MAX;

/// A file, as the file system below names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device's number.
    pub device: u64,
    /// The inode's number.
    pub ino: u64,
}

/// Who holds a lock: an owner (a process, or an open file) of a session.
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
}

impl<W> Default for Locks<W> {
    fn default() -> Self {
        Self { files: HashMap::new() }
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

    fn obstacle(&self, family: Family, wanted: &Lock) -> Option<&Lock> {
        let held = if family == Family::Whole { &self.whole } else { &self.ranges };
        held.iter().find(|lock| lock.conflicts(wanted))
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
            let touches = other.start == lock.last.wrapping_add(1) || lock.start == other.last.wrapping_add(1);
            let joins =
                other.holder == lock.holder && other.exclusive == lock.exclusive && touches && other.last < u64::MAX;
            if joins {
                (lock.start, lock.last) = (lock.start.min(other.start), lock.last.max(other.last));
            }
            !joins
        });
        self.held(family).push(lock);
    }

    /// Grants what waits and can be had by now.
    fn serve(&mut self, granted: &mut Vec<W>) {
        let mut still = VecDeque::new();
        while let Some(waiting) = self.waiting.pop_front() {
            if self.obstacle(waiting.family, &waiting.lock).is_some() {
                still.push_back(waiting);
            } else {
                self.grant(waiting.family, waiting.lock);
                granted.push(waiting.ticket);
            }
        }
        self.waiting = still;
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
        let mut others = Vec::new();
        // Cutting may make one more of what is held.
        if self.count(wanted.holder.session) + 2 > FILE_LOCKS_MAX {
            return (Err(LockError::TooMany), others);
        }
        let entry = self.files.entry(file).or_insert_with(File::new);
        if family == Family::Whole && entry.whole.iter().any(|lock| lock.holder == wanted.holder) {
            // As flock(2) says: the old lock is let go of before the new one is asked for.
            entry.cut(family, &Lock { start: 0, last: u64::MAX, ..wanted });
            entry.serve(&mut others);
        }
        let result = if entry.obstacle(family, &wanted).is_none() {
            entry.grant(family, wanted);
            entry.serve(&mut others);
            Ok(Granted::Now)
        } else {
            match ticket {
                None => Err(LockError::Held),
                Some(_) if family == Family::Range && self.would_deadlock(file, &wanted) => Err(LockError::Deadlock),
                Some(ticket) => {
                    if let Some(entry) = self.files.get_mut(&file) {
                        entry.waiting.push_back(Waiting { family, lock: wanted, ticket });
                    }
                    Ok(Granted::Later)
                }
            }
        };
        self.drop_if_empty(file);
        (result, others)
    }

    /// Unlocks a range; gives the tickets of waits that ended.
    pub fn unlock(&mut self, file: FileId, family: Family, range: &Lock) -> Vec<W> {
        let mut granted = Vec::new();
        if let Some(entry) = self.files.get_mut(&file) {
            entry.cut(family, range);
            entry.serve(&mut granted);
        }
        self.drop_if_empty(file);
        granted
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
        self.drop_if_empty(file);
        Some(waiting.ticket)
    }

    /// A session has ended: its locks and waits are gone. Gives the tickets of others' waits that ended.
    pub fn leave(&mut self, session: u64) -> Vec<W> {
        let mut granted = Vec::new();
        for file in self.files.values_mut() {
            let before = file.whole.len() + file.ranges.len() + file.waiting.len();
            file.whole.retain(|lock| lock.holder.session != session);
            file.ranges.retain(|lock| lock.holder.session != session);
            file.waiting.retain(|waiting| waiting.lock.holder.session != session);
            if before != file.whole.len() + file.ranges.len() + file.waiting.len() {
                file.serve(&mut granted);
            }
        }
        self.files.retain(|_, file| !file.is_empty());
        granted
    }

    /// Locks and waits of a session.
    fn count(&self, session: u64) -> usize {
        let of = |lock: &&Lock| lock.holder.session == session;
        let count = |file: &File<W>| {
            let waiting = file.waiting.iter().filter(|waiting| waiting.lock.holder.session == session).count();
            file.whole.iter().filter(of).count() + file.ranges.iter().filter(of).count() + waiting
        };
        self.files.values().map(count).sum()
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
                for (id, other) in &self.files {
                    let waits = other.waiting.iter().filter(|waiting| waiting.family == Family::Range);
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
mod tests {
    use super::*;

    const FILE: FileId = FileId { device: 1, ino: 2 };
    const OTHER: FileId = FileId { device: 1, ino: 3 };

    fn lock(session: u64, start: u64, last: u64, exclusive: bool) -> Lock {
        Lock { holder: Holder { session, owner: 7 }, pid: 1, start, last, exclusive }
    }

    fn range(locks: &mut Locks<u8>, file: FileId, wanted: Lock, ticket: Option<u8>) -> Result<Granted, LockError> {
        locks.lock(file, Family::Range, wanted, ticket).0
    }

    fn held(locks: &Locks<u8>) -> Vec<(u64, u64, u64, bool)> {
        let file = locks.files.get(&FILE);
        let mut held: Vec<_> = file.into_iter().flat_map(|file| &file.ranges).collect();
        held.sort_by_key(|lock| (lock.holder.session, lock.start));
        held.into_iter().map(|lock| (lock.holder.session, lock.start, lock.last, lock.exclusive)).collect()
    }

    #[test]
    fn ranges_are_shared_cut_and_joined() {
        let mut locks = Locks::default();
        for session in [1, 2] {
            assert_eq!(range(&mut locks, FILE, lock(session, 0, 99, false), None), Ok(Granted::Now));
        }
        assert_eq!(range(&mut locks, FILE, lock(1, 50, 59, true), None), Err(LockError::Held));
        locks.unlock(FILE, Family::Range, &lock(2, 40, 69, false));
        assert_eq!(range(&mut locks, FILE, lock(1, 50, 59, true), None), Ok(Granted::Now));
        let expected =
            [(1, 0, 49, false), (1, 50, 59, true), (1, 60, 99, false), (2, 0, 39, false), (2, 70, 99, false)];
        assert_eq!(held(&locks), expected);
        assert_eq!(locks.test(FILE, Family::Range, &lock(2, 55, u64::MAX, false)), Some(lock(1, 50, 59, true)));
        assert_eq!(locks.test(FILE, Family::Whole, &lock(2, 0, u64::MAX, true)), None, "flock does not see ranges");
        assert_eq!(range(&mut locks, FILE, lock(1, 50, 59, false), None), Ok(Granted::Now));
        assert_eq!(held(&locks)[0], (1, 0, 99, false), "joined again");
        assert!(locks.leave(1).is_empty() && locks.leave(2).is_empty());
        assert!(locks.files.is_empty());
    }

    #[test]
    fn a_wait_ends_when_the_last_obstacle_goes() {
        let mut locks = Locks::default();
        range(&mut locks, FILE, lock(1, 0, 9, false), None).unwrap();
        range(&mut locks, FILE, lock(2, 0, 9, false), None).unwrap();
        assert_eq!(range(&mut locks, FILE, lock(3, 5, 5, true), Some(3)), Ok(Granted::Later));
        assert!(locks.unlock(FILE, Family::Range, &lock(1, 0, 9, false)).is_empty());
        assert_eq!(locks.leave(2), [3]);
        assert_eq!(held(&locks), [(3, 5, 5, true)]);
        assert_eq!(range(&mut locks, FILE, lock(1, 0, 9, true), Some(1)), Ok(Granted::Later));
        assert_eq!(locks.cancel(FILE, Family::Range, &lock(1, 0, 9, true)), Some(1));
        assert_eq!(locks.cancel(FILE, Family::Range, &lock(1, 0, 9, true)), None);
        // One that has gone gets nothing.
        assert_eq!(range(&mut locks, FILE, lock(1, 0, 9, true), Some(1)), Ok(Granted::Later));
        assert!(locks.leave(1).is_empty());
        assert!(locks.leave(3).is_empty() && locks.files.is_empty());
    }

    #[test]
    fn a_circle_of_waits_is_refused() {
        let mut locks = Locks::default();
        for session in 1..=3 {
            let file = if session == 2 { OTHER } else { FILE };
            range(&mut locks, file, lock(session, session, session, true), None).unwrap();
        }
        assert_eq!(range(&mut locks, OTHER, lock(1, 2, 2, true), Some(1)), Ok(Granted::Later));
        assert_eq!(range(&mut locks, FILE, lock(2, 3, 3, true), Some(2)), Ok(Granted::Later));
        assert_eq!(range(&mut locks, FILE, lock(3, 1, 1, false), Some(3)), Err(LockError::Deadlock));
        assert_eq!(range(&mut locks, OTHER, lock(3, 9, 9, false), Some(3)), Ok(Granted::Now));
    }

    #[test]
    fn flock_is_exchanged_and_one_session_cannot_take_all_memory() {
        let mut locks: Locks<u8> = Locks::default();
        let whole = |session, exclusive| lock(session, 0, u64::MAX, exclusive);
        assert_eq!(locks.lock(FILE, Family::Whole, whole(1, true), None).0, Ok(Granted::Now));
        assert_eq!(locks.lock(FILE, Family::Whole, whole(2, false), Some(2)).0, Ok(Granted::Later));
        assert_eq!(locks.lock(FILE, Family::Whole, whole(1, false), None), (Ok(Granted::Now), vec![2]));
        for number in 0..FILE_LOCKS_MAX as u64 - 2 {
            range(&mut locks, FILE, lock(1, number * 2, number * 2, true), None).unwrap();
        }
        assert_eq!(range(&mut locks, FILE, lock(1, u64::MAX, u64::MAX, true), None), Err(LockError::TooMany));
        assert_eq!(range(&mut locks, FILE, lock(2, u64::MAX, u64::MAX, true), None), Ok(Granted::Now));
    }
}
