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
    let expected = [(1, 0, 49, false), (1, 50, 59, true), (1, 60, 99, false), (2, 0, 39, false), (2, 70, 99, false)];
    assert_eq!(held(&locks), expected);
    assert_eq!(locks.test(FILE, Family::Range, &lock(2, 55, u64::MAX, false)), Some(lock(1, 50, 59, true)));
    assert_eq!(locks.test(FILE, Family::Whole, &lock(2, 0, u64::MAX, true)), None, "flock does not see ranges");
    assert_eq!(range(&mut locks, FILE, lock(1, 50, 59, false), None), Ok(Granted::Now));
    assert_eq!(held(&locks)[0], (1, 0, 99, false), "joined again");
    assert!(locks.leave(1).is_empty() && locks.leave(2).is_empty());
    assert!(locks.files.is_empty());
}

#[test]
fn the_first_lock_in_the_way_is_told() {
    let mut locks = Locks::default();
    for (start, exclusive) in [(10, true), (1, false), (5, true)] {
        range(&mut locks, FILE, lock(1, start, start + 2, exclusive), None).unwrap();
    }
    let told = |start| locks.test(FILE, Family::Range, &lock(2, start, u64::MAX, true));
    assert_eq!(told(0), Some(lock(1, 1, 3, false)));
    assert_eq!(told(4), Some(lock(1, 5, 7, true)));
    assert_eq!(told(8), Some(lock(1, 10, 12, true)));
}

#[test]
fn a_lock_up_to_the_end_is_no_neighbour_of_one_at_the_start() {
    let mut locks = Locks::default();
    range(&mut locks, FILE, lock(1, 0, 9, true), None).unwrap();
    range(&mut locks, FILE, lock(1, 100, u64::MAX, true), None).unwrap();
    assert_eq!(held(&locks), [(1, 0, 9, true), (1, 100, u64::MAX, true)]);
    assert_eq!(range(&mut locks, FILE, lock(2, 50, 59, true), None), Ok(Granted::Now));
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

#[test]
fn a_flock_that_is_asked_for_again_lets_nobody_in() {
    let mut locks: Locks<u8> = Locks::default();
    let whole = |session| lock(session, 0, u64::MAX, true);
    assert_eq!(locks.lock(FILE, Family::Whole, whole(1), None).0, Ok(Granted::Now));
    assert_eq!(locks.lock(FILE, Family::Whole, whole(2), Some(2)).0, Ok(Granted::Later));
    assert_eq!(locks.lock(FILE, Family::Whole, whole(1), None), (Ok(Granted::Now), vec![]));
    locks.end_waits(2);
    assert!(locks.leave(1).is_empty(), "its wait has ended");
    assert!(locks.files.is_empty() && locks.sessions.is_empty());
}

/// What the counters say is what a walk over all files finds, whatever was done.
#[test]
fn counts_and_waits_are_those_of_the_table() {
    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut locks: Locks<u64> = Locks::default();
    for step in 0..20_000 {
        let (start, len) = (random(20), random(8));
        let file = FileId { device: 1, ino: random(3) };
        let family = if random(4) == 0 { Family::Whole } else { Family::Range };
        let (start, last) = if family == Family::Whole { (0, u64::MAX) } else { (start, start + len) };
        let holder = Holder { session: random(4), owner: random(2) };
        let wanted = Lock { holder, pid: 1, start, last, exclusive: random(2) == 0 };
        match random(10) {
            0..6 => drop(locks.lock(file, family, wanted, (random(2) == 0).then_some(step))),
            6 | 7 => drop(locks.unlock(file, family, &wanted)),
            8 => drop(locks.cancel(file, family, &wanted)),
            _ if random(8) == 0 => drop(locks.leave(holder.session)),
            _ => {}
        }
        for session in 0..4 {
            let walked: usize = locks.files.values().map(|file| file.count(session)).sum();
            assert_eq!(locks.count(session), walked, "step {step}");
        }
        let waiting = |(id, file): (&FileId, &File<u64>)| {
            let ranges = file.waiting.iter().filter(|waiting| waiting.family == Family::Range);
            ranges.map(|waiting| (waiting.lock.holder, *id)).collect::<Vec<_>>()
        };
        let mut walked: Vec<_> = locks.files.iter().flat_map(waiting).collect();
        let indexed =
            |(holder, files): (&Holder, &Vec<FileId>)| files.iter().map(|file| (*holder, *file)).collect::<Vec<_>>();
        let mut indexed: Vec<_> = locks.waits.iter().flat_map(indexed).collect();
        let by = |(holder, file): &(Holder, FileId)| (holder.session, holder.owner, *file);
        walked.sort_by_key(by);
        indexed.sort_by_key(by);
        assert_eq!(walked, indexed, "step {step}");
    }
    assert!(locks.sessions.len() > 1, "the walk was not empty");
}
