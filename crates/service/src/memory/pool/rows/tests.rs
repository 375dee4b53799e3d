//! Rows, one step after the other; `tests/far_simulation.rs` plays them at random.

use super::*;
use crate::limits::LENDER_PAUSE;
use crate::memory::pool::OpId;

const PLACES: u32 = 80;
const FRAMES: u32 = 100;

/// A pool over six lenders, with one group of slabs. Each page's sum is its number, and that of a parity is 1000 and more.
struct Rig {
    pool: Pool,
    now: Instant,
    parities: u32,
}

fn sum(number: u32) -> Sum {
    Sum::Checksum(number)
}

impl Rig {
    fn new() -> Self {
        let now = Instant::from_nanos(1);
        let mut rig = Self { pool: Pool::new(Class::Parity, &[true; 6], PLACES, FRAMES, now), now, parities: 1000 };
        rig.pool.want_slab(now);
        rig.lease_all();
        assert_eq!(rig.told(), [Told::Slab(PLACES); 4]);
        rig
    }

    /// Lenders answer leases, until something else is asked for. Gives the lenders that were asked.
    fn lease_all(&mut self) -> Vec<usize> {
        let mut asked = Vec::new();
        while let Some(Action::Lease(op, lender)) = self.pool.actions.front().copied() {
            self.pool.next_action();
            asked.push(lender);
            self.pool.leased(op, Ok(asked.len() as u64), self.now);
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

    fn end(&mut self, op: OpId, result: Result<Sum, Failure>) {
        self.pool.ended(op, result, self.now);
    }

    /// Asks for puts of frames with these numbers to places of the first row.
    fn put(&mut self, puts: &[(u32, u32)]) {
        for (number, place) in puts {
            self.pool.put(*number, Place::new(0, *place), sum(*number), self.now);
        }
        self.pool.flush_rows(self.now);
    }

    /// The parity is computed, of those frames. Gives the puts that follow.
    fn compute(&mut self, of: [Option<u32>; 4]) -> Vec<(OpId, usize)> {
        let Some(Action::Xor(op, _, from)) = self.pool.next_action() else { panic!() };
        assert_eq!(from, of);
        self.parities += 1;
        self.end(op, Ok(sum(self.parities)));
        let put = |action| match action {
            Action::Put(op, _, lease, 0) => (op, lease.lender),
            other => panic!("{other:?}"),
        };
        self.actions().into_iter().map(put).collect()
    }

    /// The first row has these frames.
    fn filled() -> Self {
        let mut rig = Self::new();
        rig.put(&[(10, 0), (11, 1), (12, 2), (13, 3)]);
        let puts = rig.compute([Some(10), Some(11), Some(12), Some(13)]);
        let lenders: HashSet<usize> = puts.iter().map(|(_, lender)| *lender).collect();
        assert_eq!((puts.len(), lenders.len()), (5, 5), "each page of a row is at a lender of its own");
        for (op, _) in puts {
            assert_eq!(rig.told(), []);
            rig.end(op, Ok(sum(0)));
        }
        assert_eq!(rig.told(), [10, 11, 12, 13].map(|frame| Told::Put(frame, PutEnd::Kept)));
        rig
    }

    /// Lenders do all that they are asked for, and give what was put there. Gives the pages that were put, and their lenders.
    fn serve(&mut self) -> Vec<(u32, usize)> {
        let mut puts = Vec::new();
        while let Some(action) = self.pool.next_action() {
            match action {
                Action::Connect(op, _) => self.pool.connected(op, true, self.now),
                Action::Renew(op, _) => self.pool.renewed(op, Ok(Vec::new()), self.now),
                Action::Lease(op, lender) => self.pool.leased(op, Ok(100 + lender as u64), self.now),
                Action::Put(op, _, lease, page) => {
                    puts.push((page, lease.lender));
                    self.end(op, Ok(sum(0)));
                }
                Action::Get(op, ..) | Action::Xor(op, ..) => {
                    self.parities += 1;
                    let sum = self.pool.expected(op).unwrap_or(sum(self.parities));
                    self.end(op, Ok(sum));
                }
                Action::Close(_) | Action::Return(_) => {}
                other => panic!("{other:?}"),
            }
        }
        puts
    }

    fn lose_lender_of(&mut self, place: u32) {
        let lost = self.pool.lease_of(Place::new(0, 0), place as usize).unwrap().lender;
        self.pool.give_up(lost, true, self.now);
    }

    /// Pages that are got for a row, with the sums that are expected.
    fn got(&mut self) -> Vec<OpId> {
        let get = |action| match action {
            Action::Get(op, ..) => op,
            other => panic!("{other:?}"),
        };
        self.actions().into_iter().map(get).collect()
    }
}

#[test]
fn a_whole_row_is_put_without_a_get() {
    Rig::filled();
}

#[test]
fn an_update_of_a_part_begins_with_the_pages_that_stay_and_puts_to_its_row_wait() {
    let mut rig = Rig::filled();
    rig.put(&[(21, 1)]);
    let gets = rig.got();
    assert_eq!(gets.len(), 3);
    rig.put(&[(22, 2)]);
    assert_eq!(rig.actions(), []);
    for (op, number) in gets.into_iter().zip([10, 12, 13]) {
        rig.end(op, Ok(sum(number)));
    }
    let puts = rig.compute([Some(FRAMES), Some(FRAMES + 1), Some(FRAMES + 2), Some(21)]);
    assert_eq!(puts.len(), 2, "the page and the parity");
    for (op, _) in puts {
        rig.end(op, Ok(sum(0)));
    }
    assert_eq!(rig.told(), [Told::Put(21, PutEnd::Kept)]);
    assert_eq!(rig.got().len(), 3, "the second update");
}

#[test]
fn a_lender_that_is_lost_during_an_update_costs_no_page_of_the_row() {
    for put_ends in [true, false] {
        let mut rig = Rig::filled();
        rig.put(&[(21, 1)]);
        for (op, number) in rig.got().into_iter().zip([10, 12, 13]) {
            rig.end(op, Ok(sum(number)));
        }
        let puts = rig.compute([Some(FRAMES), Some(FRAMES + 1), Some(FRAMES + 2), Some(21)]);
        // The lender of the first page, which stays; or of the page that is put.
        let (op, lender) = puts[0];
        let lost = if put_ends { rig.pool.lease_of(Place::new(0, 0), 0).unwrap().lender } else { lender };
        rig.pool.give_up(lost, true, rig.now);
        rig.pool.get(30, Place::new(0, u32::from(!put_ends)), rig.now);
        assert_eq!(rig.actions(), [Action::Close(lost)], "the row is being written");
        rig.end(op, Ok(sum(0)));
        rig.end(puts[1].0, Ok(sum(0)));
        let told = rig.told();
        assert_eq!(told.last(), Some(&Told::Put(21, PutEnd::Elsewhere)), "the row lacks a page: {told:?}");
        assert_eq!(told[..4], [0, 1, 2, 3].map(|slab| Told::Rests(slab, true)));
        let mut gets = rig.actions();
        let Some(Action::Lease(lease, free)) = gets.iter().find(|action| matches!(action, Action::Lease(..))).copied()
        else {
            panic!("{gets:?}")
        };
        gets.retain(|action| matches!(action, Action::Get(..)));
        let (own, others) = if put_ends { (10, [21, 12, 13, 1002]) } else { (21, [10, 12, 13, 1002]) };
        for (get, number) in gets.into_iter().zip(others) {
            let Action::Get(op, ..) = get else { panic!() };
            assert_eq!(rig.pool.expected(op), Some(sum(number)));
            rig.end(op, Ok(sum(number)));
        }
        let Some(Action::Xor(op, 30, _)) = rig.pool.next_action() else { panic!() };
        rig.end(op, Ok(sum(own)));
        assert_eq!(rig.told(), [Told::Got(30, true)]);
        // The sixth lender gets it.
        rig.pool.leased(lease, Ok(9), rig.now);
        assert_eq!(rig.told(), [0, 1, 2, 3].map(|slab| Told::Rests(slab, false)));
        for (op, number) in rig.got().into_iter().zip(others) {
            rig.end(op, Ok(sum(number)));
        }
        let Some(Action::Xor(op, ..)) = rig.pool.next_action() else { panic!() };
        rig.end(op, Ok(sum(own)));
        let Some(Action::Put(op, _, to, 0)) = rig.pool.next_action() else { panic!() };
        assert!(to.lender == free && !rig.pool.is_settled());
        rig.end(op, Ok(sum(0)));
        assert!(rig.pool.is_settled());
    }
}

#[test]
fn two_pages_that_are_lost_are_lost_by_name_and_the_others_have_a_parity_again() {
    let mut rig = Rig::filled();
    rig.lose_lender_of(0);
    rig.lose_lender_of(1);
    rig.told();
    rig.pool.get(30, Place::new(0, 1), rig.now);
    assert_eq!(rig.told(), [Told::Got(30, false)]);
    rig.pool.get(31, Place::new(0, 2), rig.now);
    let last = rig.actions().pop();
    let Some(Action::Get(op, 31, ..)) = last else { panic!("{last:?}") };
    rig.end(op, Ok(sum(12)));
    assert_eq!(rig.told(), [Told::Got(31, true)]);
    // Their slabs are leased again, and the parity of the two others is put.
    rig.now = rig.now + LENDER_PAUSE;
    rig.pool.tick(rig.now);
    assert_eq!(rig.serve().len(), 1);
    assert!(rig.pool.is_settled());
    rig.lose_lender_of(3);
    rig.told();
    rig.actions();
    rig.pool.get(32, Place::new(0, 3), rig.now);
    assert_eq!(rig.got().len(), 2, "a page and the parity");
}

#[test]
fn a_page_that_no_lender_has_is_not_kept_at_its_place() {
    let mut rig = Rig::filled();
    rig.lose_lender_of(0);
    assert!(rig.pool.has(Place::new(0, 0)));
    rig.lose_lender_of(1);
    let lost = |rig: &Rig| [0, 1, 2, 3].map(|place| !rig.pool.has(Place::new(0, place)));
    assert_eq!(std::iter::from_fn(|| rig.pool.next_told()).last(), Some(Told::CopiesLost));
    assert_eq!(lost(&rig), [true, true, false, false]);
    rig.now = rig.now + LENDER_PAUSE;
    rig.pool.tick(rig.now);
    rig.serve();
    assert!(rig.pool.is_settled());
    rig.told();
    assert_eq!(lost(&rig), [true, true, false, false], "also when the row is whole again");
    rig.pool.keep(10, Place::new(0, 0));
    rig.pool.keep(12, Place::new(0, 2));
    assert_eq!(rig.told(), [Told::Put(10, PutEnd::Elsewhere), Told::Put(12, PutEnd::Kept)]);
}

#[test]
fn an_update_whose_lenders_are_all_lost_while_its_parity_is_computed_goes_elsewhere() {
    let mut rig = Rig::new();
    rig.put(&[(10, 0), (11, 1)]);
    let Some(Action::Xor(op, ..)) = rig.pool.next_action() else { panic!() };
    (0..6).for_each(|lender| rig.pool.give_up(lender, true, rig.now));
    rig.told();
    rig.end(op, Ok(sum(1000)));
    assert_eq!(rig.told(), [10, 11].map(|frame| Told::Put(frame, PutEnd::Elsewhere)));
    assert!(rig.pool.rows.is_idle());
}

#[test]
fn a_page_is_computed_while_updates_of_other_rows_wait_for_a_lender() {
    let mut rig = Rig::new();
    let rows = POOL_ROW_UPDATES_MAX as u32 + 2;
    for row in 0..rows {
        rig.put(&[0, 1, 2, 3].map(|column| (column, 4 * row + column)));
        rig.serve();
    }
    (0..rows - 2).for_each(|row| rig.put(&[(0, 4 * row)]));
    assert_eq!(rig.got().len(), 3 * POOL_ROW_UPDATES_MAX);
    let lender = rig.pool.lease_of(Place::new(0, 0), 0).unwrap().lender;
    rig.pool.lenders[lender].is_slow = true;
    for row in [rows - 2, rows - 1] {
        rig.told();
        rig.pool.get(30, Place::new(0, 4 * row), rig.now);
        assert_eq!(rig.got().len(), 4, "of the others");
    }
}

#[test]
fn a_page_that_its_parity_does_not_give_comes_from_its_own_lender() {
    let mut rig = Rig::filled();
    let lender = rig.pool.lease_of(Place::new(0, 0), 0).unwrap().lender;
    rig.pool.lenders[lender].is_slow = true;
    rig.pool.get(30, Place::new(0, 0), rig.now);
    for (op, number) in rig.got().into_iter().zip([11, 12, 13, 1001]) {
        rig.end(op, Ok(sum(number)));
    }
    let Some(Action::Xor(op, 30, _)) = rig.pool.next_action() else { panic!() };
    rig.end(op, Ok(sum(99)));
    assert_eq!(rig.told(), []);
    let Some(Action::Get(op, 30, own, 0)) = rig.pool.next_action() else { panic!() };
    assert_eq!((own.lender, rig.pool.counters().corrupt), (lender, 1));
    rig.end(op, Ok(sum(10)));
    assert_eq!(rig.told(), [Told::Got(30, true)]);
    assert_eq!(rig.serve().len(), 1, "the parity is put again");
}
