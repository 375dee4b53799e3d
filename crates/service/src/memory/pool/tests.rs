//! What a pool does, one step after the other; `tests/far_simulation.rs` plays it at random.

use std::time::Duration;

use super::Sum::Checksum as Crc;
use super::*;
use crate::limits::{LENDER_PAUSE, LENDER_SILENCE_MAX, LENDER_SLOW, RENEW_EVERY, TAKE_BACK_MARGIN, TAKE_BACK_NOTICE};

const PLACES: u32 = 8;
const FRAMES: u32 = 100;

/// A pool over lenders that have room and answer when they are told to.
struct Rig {
    pool: Pool,
    now: Instant,
    next_lease: u64,
}

impl Rig {
    fn new(class: Class, lenders: usize) -> Self {
        let now = Instant::from_nanos(1);
        let mut rig = Self { pool: Pool::new(class, &vec![true; lenders], PLACES, FRAMES, now), now, next_lease: 0 };
        rig.pool.want_slab(now);
        rig.lease_all();
        assert_eq!(rig.pool.next_told(), Some(Told::Slab(PLACES)));
        rig
    }

    /// Lenders answer leases, until something else is asked for. Gives the lenders that were asked.
    fn lease_all(&mut self) -> Vec<usize> {
        let mut asked = Vec::new();
        while let Some(Action::Lease(op, lender)) = self.pool.actions.front().copied() {
            self.pool.next_action();
            self.next_lease += 1;
            asked.push(lender);
            self.pool.leased(op, Ok(self.next_lease), self.now);
        }
        asked
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.pool.next_action()).collect()
    }

    /// What the pager is told, but that copies were lost.
    fn told(&mut self) -> Vec<Told> {
        let told = std::iter::from_fn(|| self.pool.next_told());
        told.filter(|told| *told != Told::CopiesLost).collect()
    }

    /// A put that all copies take.
    fn put(&mut self, frame: u32, page: u32, sum: u32) {
        self.pool.put(frame, Place::new(0, page), Crc(sum), self.now);
        for action in self.actions() {
            let Action::Put(op, ..) = action else { panic!("{action:?}") };
            self.pool.ended(op, Ok(Crc(0)), self.now);
        }
        assert_eq!(self.told(), [Told::Put(frame, PutEnd::Kept)]);
    }
}

#[test]
fn a_mirrored_put_ends_when_both_lenders_have_it() {
    let mut rig = Rig::new(Class::Mirror, 3);
    rig.pool.put(5, Place::new(0, 3), Crc(77), rig.now);
    let [Action::Put(first, 5, here, 3), Action::Put(second, 5, there, 3)] = rig.actions()[..] else { panic!() };
    assert_ne!(here.lender, there.lender);
    rig.pool.ended(first, Ok(Crc(0)), rig.now);
    assert_eq!(rig.told(), []);
    rig.pool.ended(second, Ok(Crc(0)), rig.now);
    assert_eq!(rig.told(), [Told::Put(5, PutEnd::Kept)]);
}

#[test]
fn a_put_that_one_lender_of_two_has_goes_elsewhere_and_the_slab_rests_until_it_is_copied() {
    let mut rig = Rig::new(Class::Mirror, 3);
    rig.put(1, 0, 10);
    rig.pool.put(2, Place::new(0, 1), Crc(11), rig.now);
    let [Action::Put(first, ..), Action::Put(second, ..)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(first, Ok(Crc(0)), rig.now);
    rig.pool.ended(second, Err(Failure::Gone), rig.now);
    assert_eq!(rig.told(), [Told::Rests(0, true), Told::Put(2, PutEnd::Elsewhere)]);
    assert_eq!(rig.pool.next_action(), Some(Action::Close(1)));
    assert_eq!(rig.lease_all(), [2], "the third lender");
    assert_eq!(rig.told(), [Told::Rests(0, false)]);
    // Both pages are copied.
    let gets = rig.actions();
    assert_eq!(gets.len(), 2);
    for (action, sum) in gets.into_iter().zip([10, 11]) {
        let Action::Get(op, _, Lease { lender: 0, .. }, _) = action else { panic!("{action:?}") };
        rig.pool.ended(op, Ok(Crc(sum)), rig.now);
        let Some(Action::Put(op, _, Lease { lender: 2, .. }, _)) = rig.pool.next_action() else { panic!() };
        assert!(!rig.pool.is_settled());
        rig.pool.ended(op, Ok(Crc(0)), rig.now);
    }
    assert!(rig.pool.is_settled());
    assert_eq!(rig.pool.counters().copied, 2);
}

#[test]
fn a_page_with_other_bytes_comes_from_the_other_lender_and_is_written_again() {
    let mut rig = Rig::new(Class::Mirror, 2);
    rig.put(1, 0, 10);
    rig.pool.get(3, Place::new(0, 0), rig.now);
    let [Action::Get(op, 3, wrong, 0)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(op, Ok(Crc(99)), rig.now);
    let [Action::Get(op, 3, right, 0), Action::Get(copy, FRAMES, from, 0)] = rig.actions()[..] else { panic!() };
    assert!(right == from && right != wrong);
    rig.pool.ended(op, Ok(Crc(10)), rig.now);
    assert_eq!(rig.told(), [Told::Got(3, true)]);
    rig.pool.ended(copy, Ok(Crc(10)), rig.now);
    assert!(matches!(rig.actions()[..], [Action::Put(_, FRAMES, to, 0)] if to == wrong));
}

#[test]
fn a_put_waits_for_the_copy_of_its_place() {
    let mut rig = Rig::new(Class::None, 2);
    rig.put(1, 0, 10);
    rig.now = rig.now + RENEW_EVERY;
    rig.pool.tick(rig.now);
    let [Action::Renew(renewal, 0), Action::Renew(_, 1)] = rig.actions()[..] else { panic!() };
    rig.pool.renewed(renewal, Ok(vec![(1, TAKE_BACK_NOTICE)]), rig.now);
    assert_eq!(rig.lease_all(), [1]);
    let [Action::Get(get, FRAMES, ..)] = rig.actions()[..] else { panic!() };
    rig.told();
    rig.pool.put(2, Place::new(0, 0), Crc(11), rig.now);
    assert_eq!(rig.actions(), [], "the old version is on its way");
    rig.pool.ended(get, Ok(Crc(10)), rig.now);
    let [Action::Put(put, FRAMES, ..)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(put, Ok(Crc(0)), rig.now);
    let [Action::Put(_, 2, ..), Action::Put(_, 2, ..)] = rig.actions()[..] else { panic!() };
}

#[test]
fn a_lender_that_takes_a_slab_back_may_lend_another_later_and_counts_once() {
    let mut rig = Rig::new(Class::Mirror, 2);
    rig.put(1, 0, 10);
    rig.now = rig.now + RENEW_EVERY;
    rig.pool.tick(rig.now);
    let [Action::Renew(first, 0), Action::Renew(second, 1)] = rig.actions()[..] else { panic!() };
    rig.pool.renewed(first, Ok(vec![(1, 2 * LENDER_SILENCE_MAX)]), rig.now);
    rig.pool.renewed(second, Ok(Vec::new()), rig.now);
    assert_eq!(rig.lease_all(), [], "it is short of memory, and the other has a copy");
    assert_eq!(rig.told(), [Told::Rests(0, true)]);
    rig.now = rig.now + LENDER_SILENCE_MAX;
    rig.pool.tick(rig.now);
    let mut actions = rig.actions();
    let Some(Action::Lease(op, 0)) = actions.pop() else { panic!("{actions:?}") };
    rig.pool.leased(op, Ok(9), rig.now);
    assert_eq!(rig.told(), [Told::Rests(0, false)]);
    // Both of its slabs have the page, and the other lender fails.
    rig.pool.put(2, Place::new(0, 1), Crc(11), rig.now);
    let mut puts = rig.actions();
    puts.retain(|action| matches!(action, Action::Put(..)));
    assert_eq!(puts.len(), 3);
    for action in puts {
        let Action::Put(op, _, lease, _) = action else { panic!("{action:?}") };
        rig.pool.ended(op, if lease.lender == 0 { Ok(Crc(0)) } else { Err(Failure::Refused) }, rig.now);
    }
    assert_eq!(rig.told(), [Told::Rests(0, true), Told::Put(2, PutEnd::Elsewhere)], "one lender has it");
}

#[test]
fn a_silent_lender_is_given_up_and_what_it_says_later_counts_for_nothing() {
    let mut rig = Rig::new(Class::None, 1);
    rig.put(1, 0, 10);
    rig.pool.get(3, Place::new(0, 0), rig.now);
    let [Action::Get(get, ..)] = rig.actions()[..] else { panic!() };
    rig.now = rig.now + RENEW_EVERY;
    rig.pool.tick(rig.now);
    assert!(matches!(rig.actions()[..], [Action::Renew(_, 0)]));
    rig.now = rig.now + Duration::from_secs(4);
    rig.pool.tick(rig.now);
    assert_eq!(rig.actions(), []);
    rig.now = rig.now + Duration::from_secs(1);
    assert!(rig.pool.next_tick().is_some_and(|at| at <= rig.now));
    rig.pool.tick(rig.now);
    assert_eq!((rig.actions(), rig.told()), (vec![Action::Close(0)], vec![Told::Lost(0)]));
    rig.pool.ended(get, Ok(Crc(10)), rig.now);
    assert_eq!(rig.told(), [Told::Got(3, false)]);
    assert_eq!(rig.pool.lost, [0], "its tables were of use to the get");
    rig.now = rig.now + LENDER_PAUSE;
    rig.pool.tick(rig.now);
    assert!(rig.pool.lost.is_empty());
    rig.pool.get(4, Place::new(0, 0), rig.now);
    rig.pool.put(5, Place::new(0, 0), Crc(10), rig.now);
    assert_eq!(rig.told(), [Told::Got(4, false), Told::Put(5, PutEnd::Elsewhere)]);
    assert!(matches!(rig.actions()[..], [Action::Connect(_, 0)]));
}

#[test]
fn a_late_operation_of_a_session_that_was_given_up_does_not_drop_the_new_copy_of_its_lender() {
    let mut rig = Rig::new(Class::Mirror, 2);
    rig.pool.put(1, Place::new(0, 0), Crc(10), rig.now);
    rig.pool.put(2, Place::new(0, 1), Crc(11), rig.now);
    let puts = rig.actions().into_iter().map(|action| match action {
        Action::Put(op, _, lease, _) => (op, lease),
        other => panic!("{other:?}"),
    });
    let [(first, here), (ended, there), (second, _), (late, _)] = puts.collect::<Vec<_>>()[..] else { panic!() };
    for (op, result) in [(first, Ok(Crc(0))), (second, Ok(Crc(0))), (ended, Err(Failure::Gone))] {
        rig.pool.ended(op, result, rig.now);
    }
    assert_eq!(rig.actions(), [Action::Close(there.lender)]);
    rig.now = rig.now + LENDER_PAUSE;
    rig.pool.tick(rig.now);
    let Some(Action::Connect(connect, _)) = rig.actions().pop() else { panic!() };
    rig.pool.connected(connect, true, rig.now);
    let [Action::Lease(lease, _), ..] = rig.actions()[..] else { panic!() };
    // The lender has restarted, and begins to count anew.
    rig.pool.leased(lease, Ok(there.number), rig.now);
    rig.told();
    rig.actions();
    rig.pool.ended(late, Err(Failure::Gone), rig.now);
    assert_eq!(rig.told(), [Told::Put(2, PutEnd::Elsewhere)]);
    assert!(!rig.actions().iter().any(|action| matches!(action, Action::Return(_))));
    assert!(rig.pool.lease_of(Place::new(0, 0), 0) == Some(here) && rig.pool.lease_of(Place::new(0, 0), 1).is_some());
}

#[test]
fn a_page_in_the_file_is_safe_and_one_that_the_file_refuses_stays() {
    let mut rig = Rig::new(Class::Disk, 1);
    rig.pool.put(1, Place::new(0, 0), Crc(10), rig.now);
    let [Action::Put(put, ..), Action::Write(write, 1, _)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(write, Ok(Crc(0)), rig.now);
    rig.pool.ended(put, Err(Failure::Gone), rig.now);
    assert_eq!(rig.told(), [Told::Put(1, PutEnd::Kept)]);
    rig.pool.get(2, Place::new(0, 0), rig.now);
    let [Action::Close(0), Action::Read(read, 2, _)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(read, Ok(Crc(10)), rig.now);
    rig.pool.put(1, Place::new(0, 1), Crc(11), rig.now);
    let [Action::Write(write, 1, _)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(write, Err(Failure::Refused), rig.now);
    assert_eq!(rig.told(), [Told::Got(2, true), Told::Put(1, PutEnd::Refused)]);
}

#[test]
fn a_page_whose_lender_does_not_answer_comes_from_the_other_lender_and_so_do_the_next() {
    let mut rig = Rig::new(Class::Mirror, 2);
    rig.put(1, 0, 10);
    rig.put(2, 2, 12);
    rig.pool.get(3, Place::new(0, 0), rig.now);
    let [Action::Get(slow, 3, from, 0)] = rig.actions()[..] else { panic!() };
    rig.now = rig.now + LENDER_SLOW;
    assert_eq!(rig.pool.next_tick(), Some(rig.now));
    rig.pool.tick(rig.now);
    assert_eq!((rig.told(), rig.pool.is_slow()), (vec![Told::Slow(3)], true));
    for (frame, page) in [(4, 0), (5, 2)] {
        rig.pool.get(frame, Place::new(0, page), rig.now);
        assert!(matches!(rig.actions()[..], [Action::Get(_, _, Lease { lender, .. }, _)] if lender != from.lender));
    }
    rig.pool.ended(slow, Ok(Crc(10)), rig.now);
    assert!(!rig.pool.is_slow(), "it answers again");
}

#[test]
fn a_lender_on_a_slow_path_that_answers_other_operations_is_not_slow() {
    let mut rig = Rig::new(Class::Mirror, 2);
    rig.put(1, 0, 10);
    rig.put(2, 2, 12);
    rig.pool.get(3, Place::new(0, 0), rig.now);
    rig.pool.get(4, Place::new(0, 2), rig.now);
    let [Action::Get(quick, 3, first, 0), Action::Get(_, 4, second, 2)] = rig.actions()[..] else { panic!() };
    assert_eq!(first, second);
    rig.now = rig.now + LENDER_SLOW / 2;
    rig.pool.ended(quick, Ok(Crc(10)), rig.now);
    rig.now = rig.now + LENDER_SLOW / 2;
    rig.pool.tick(rig.now);
    assert_eq!((rig.told(), rig.pool.is_slow()), (vec![Told::Got(3, true)], false));
    rig.now = rig.now + LENDER_SLOW;
    rig.pool.tick(rig.now);
    assert_eq!((rig.told(), rig.pool.is_slow()), (vec![Told::Slow(4)], true));
}

#[test]
fn a_lender_is_slow_also_where_nothing_but_a_renewal_waits_for_it() {
    let mut rig = Rig::new(Class::Mirror, 2);
    rig.now = rig.now + RENEW_EVERY;
    rig.pool.tick(rig.now);
    assert!(matches!(rig.actions()[..], [Action::Renew(_, 0), Action::Renew(_, 1)]));
    rig.now = rig.now + LENDER_SLOW;
    rig.pool.tick(rig.now);
    assert!(rig.pool.is_slow());
}

#[test]
fn a_lender_that_was_given_up_is_slow_until_its_operations_have_ended() {
    let mut rig = Rig::new(Class::Disk, 1);
    rig.pool.put(1, Place::new(0, 0), Crc(10), rig.now);
    let [Action::Put(put, ..), Action::Write(write, ..)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(write, Ok(Crc(0)), rig.now);
    rig.now = rig.now + RENEW_EVERY;
    rig.pool.tick(rig.now);
    let [Action::Renew(renewal, 0)] = rig.actions()[..] else { panic!() };
    rig.now = rig.now + LENDER_SILENCE_MAX;
    rig.pool.tick(rig.now);
    assert_eq!((rig.actions(), rig.pool.is_slow()), (vec![Action::Close(0)], true), "the put holds its frame");
    rig.pool.renewed(renewal, Err(Failure::Gone), rig.now);
    assert!(rig.pool.is_slow());
    rig.pool.ended(put, Err(Failure::Gone), rig.now);
    assert_eq!((rig.told(), rig.pool.is_slow()), (vec![Told::Put(1, PutEnd::Kept)], false));
}

#[test]
fn a_slab_that_one_lender_does_not_lease_is_had_of_another() {
    let mut rig = Rig::new(Class::None, 2);
    rig.pool.want_slab(rig.now);
    let [Action::Lease(late, 1)] = rig.actions()[..] else { panic!() };
    rig.now = rig.now + LENDER_SLOW;
    rig.pool.tick(rig.now);
    assert_eq!(rig.lease_all(), [0]);
    assert_eq!(rig.told(), [Told::Slab(PLACES)]);
    rig.pool.leased(late, Ok(77), rig.now);
    assert_eq!(rig.actions(), [Action::Return(Lease { lender: 1, view: 0, number: 77 })], "it is not needed any more");
}

#[test]
fn a_slab_that_is_taken_back_is_not_used_when_it_closes() {
    let mut rig = Rig::new(Class::Disk, 1);
    rig.now = rig.now + RENEW_EVERY;
    rig.pool.put(1, Place::new(0, 0), Crc(10), rig.now);
    let [Action::Put(put, ..), Action::Write(write, ..)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(write, Ok(Crc(0)), rig.now);
    rig.pool.tick(rig.now);
    let [Action::Renew(renewal, 0)] = rig.actions()[..] else { panic!() };
    let until = rig.now + TAKE_BACK_NOTICE.saturating_sub(TAKE_BACK_MARGIN);
    // The answer takes a while: the time of the slab begins with the question.
    rig.now = rig.now + Duration::from_millis(300);
    rig.pool.renewed(renewal, Ok(vec![(1, TAKE_BACK_NOTICE)]), rig.now);
    rig.now = until;
    rig.pool.tick(rig.now);
    assert!(
        !rig.actions().contains(&Action::Return(Lease { lender: 0, view: 0, number: 1 })),
        "a put is under way there"
    );
    rig.pool.ended(put, Ok(Crc(0)), rig.now);
    assert!(rig.actions().contains(&Action::Return(Lease { lender: 0, view: 0, number: 1 })));
    rig.pool.get(2, Place::new(0, 0), rig.now);
    assert!(matches!(rig.actions()[..], [Action::Read(_, 2, _)]));
}

#[test]
fn a_page_that_no_copy_has_is_not_kept_at_its_place() {
    let mut rig = Rig::new(Class::Mirror, 3);
    rig.put(1, 0, 10);
    rig.put(2, 1, 11);
    rig.pool.give_up(0, true, rig.now);
    rig.pool.tick(rig.now);
    let [Action::Close(0), Action::Lease(lease, 2)] = rig.actions()[..] else { panic!() };
    rig.pool.leased(lease, Ok(9), rig.now);
    let [Action::Get(first, _, _, 0), Action::Get(second, _, _, 1)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(first, Ok(Crc(10)), rig.now);
    let [Action::Put(put, ..)] = rig.actions()[..] else { panic!() };
    rig.pool.ended(put, Ok(Crc(0)), rig.now);
    // The second page has not come when the other lender is lost too.
    rig.pool.give_up(1, true, rig.now);
    assert_eq!(std::iter::from_fn(|| rig.pool.next_told()).last(), Some(Told::CopiesLost));
    assert_eq!([0, 1].map(|page| rig.pool.has(Place::new(0, page))), [true, false]);
    rig.pool.ended(second, Err(Failure::Gone), rig.now);
    rig.now = rig.now + LENDER_PAUSE;
    rig.pool.tick(rig.now);
    while let Some(action) = rig.pool.next_action() {
        match action {
            Action::Connect(op, _) => rig.pool.connected(op, true, rig.now),
            Action::Renew(op, _) => rig.pool.renewed(op, Ok(Vec::new()), rig.now),
            Action::Lease(op, _) => rig.pool.leased(op, Ok(20), rig.now),
            Action::Get(op, ..) | Action::Put(op, ..) => rig.pool.ended(op, Ok(Crc(10)), rig.now),
            _ => {}
        }
    }
    assert!(rig.pool.is_settled());
    rig.told();
    rig.pool.keep(1, Place::new(0, 0));
    rig.pool.keep(2, Place::new(0, 1));
    assert_eq!(rig.told(), [Told::Put(1, PutEnd::Kept), Told::Put(2, PutEnd::Elsewhere)]);
}
