//! How many pages are in programs, and which wait for room.

use super::*;

#[test]
fn a_page_comes_above_the_budget_where_a_helper_is_stopped_in_the_midst_of_its_moves() {
    let mut pager = Pager::new(FRAMES, 1);
    let [here, other] = [1, 2].map(|space| PageId { space: SpaceId(space), page: 7 });
    pager.add_slab(PLACES_PER_SLAB);
    for at in [here, other] {
        pager.add_space(at.space, true);
        pager.add_pages(at.space, at.page..at.page + 1, if at == here { std::slice::from_ref(&(7..8)) } else { &[] });
    }
    assert!(matches!(pager.next_action(), Some(Action::MoveOut(at, ..)) if at == here));
    pager.fault(other, false);
    pager.retry();
    assert_eq!(pager.next_action(), None, "it waits for room");
    pager.note_overdue(Overdue::Moves);
    pager.retry();
    assert_eq!(pager.next_action(), Some(Action::Fill(other, Contents::Zeroes(1))));
}

#[test]
fn pages_that_are_used_again_without_a_fault_after_they_were_freed_count_and_can_go() {
    let (mut pager, space) = a_pager_with(100, 50);
    pager.removed(space, 0..50);
    assert_eq!(pager.local_pages(), 0);
    pager.found_present(space, 10..60);
    assert_eq!(pager.local_pages(), 40, "what is not known is not counted");
    pager.set_budget(0);
    assert!(matches!(pager.next_action(), Some(Action::MoveOut(at, ..)) if at.page == 10));
}

#[test]
fn a_page_waits_for_room_also_while_puts_to_a_lost_lender_hold_their_frames() {
    let (mut pager, space) = a_pager_with(8, 8);
    let actions = |pager: &mut Pager| -> Vec<Action> { std::iter::from_fn(|| pager.next_action()).collect() };
    for action in actions(&mut pager) {
        let Action::MoveOut(_, frame, _) = action else { panic!("{action:?}") };
        pager.moved(frame, Moved::Out);
    }
    pager.note_overdue(Overdue::Puts);
    let puts = actions(&mut pager);
    assert!(puts.len() == 2 && puts.iter().all(|action| matches!(action, Action::Put(..))), "{puts:?}");
    pager.add_pages(space, 100..103, &[]);
    let [first, second, third] = [100, 101, 102].map(|page| PageId { space, page });
    for at in [first, second] {
        pager.fault(at, true);
        pager.filled(at, Contents::Zeroes(1), FillOutcome::Done(1));
    }
    pager.fault(third, true);
    let all = actions(&mut pager);
    let moved =
        all.iter().filter_map(|action| if let Action::MoveOut(_, frame, _) = action { Some(*frame) } else { None });
    let moved: Vec<u32> = moved.collect();
    assert!(moved.len() == 2 && !all.contains(&Action::Fill(third, Contents::Zeroes(1))), "{all:?}");
    for frame in moved {
        pager.moved(frame, Moved::Out);
    }
    assert!(actions(&mut pager).contains(&Action::Fill(third, Contents::Zeroes(1))));
}
