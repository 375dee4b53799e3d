//! Pages that a forked child shares with its parent.

use super::*;

/// A page in its frame, whose put to a place is under way; a forked child has it too.
fn a_put_under_way_of_a_forked_page() -> (Pager, [PageId; 2]) {
    let mut pager = Pager::new(FRAMES, 0);
    let both = [1, 2].map(|space| PageId { space: SpaceId(space), page: 7 });
    pager.add_space(SpaceId(1), true);
    pager.add_slab(PLACES_PER_SLAB);
    pager.add_pages(SpaceId(1), 7..8, std::slice::from_ref(&(7..8)));
    pager.set_budget(BUDGET);
    pager.moved(0, Moved::Out);
    assert!(pager.forked(SpaceId(1), SpaceId(2)));
    while pager.next_action().is_some() {}
    (pager, both)
}

#[test]
fn a_refused_put_of_a_page_that_was_touched_meanwhile_still_feeds_the_child() {
    let (mut pager, [parents, childs]) = a_put_under_way_of_a_forked_page();
    pager.fault(parents, true);
    assert_eq!(pager.next_action(), Some(Action::Fill(parents, Contents::Frame(0))));
    pager.filled(parents, Contents::Frame(0), FillOutcome::Done(1));
    pager.put_ended(0, PutEnd::Refused);
    assert_eq!(pager.next_action(), Some(Action::Fill(childs, Contents::Frame(0))), "the frame alone has its bytes");
    pager.filled(childs, Contents::Frame(0), FillOutcome::Done(1));
    pager.set_budget(0);
    assert_eq!((pager.next_action(), pager.far_pages()), (None, 0), "and no page goes before there is room");
    pager.try_places_again();
    assert!(matches!(pager.next_action(), Some(Action::MoveOut(at, ..)) if at == parents));
}

#[test]
fn a_fork_while_a_page_goes_back_gives_the_frame_two_owners_and_neither_frees_it_for_the_other() {
    let (mut pager, [parents, _]) = a_put_under_way_of_a_forked_page();
    let second = PageId { space: SpaceId(3), ..parents };
    pager.remove_space(SpaceId(2));
    pager.put_ended(0, PutEnd::Refused);
    let fill = |at| Some(Action::Fill(at, Contents::Frame(0)));
    assert_eq!(pager.next_action(), fill(parents));
    pager.filled(parents, Contents::Frame(0), FillOutcome::Changing);
    pager.forked(SpaceId(1), SpaceId(3));
    pager.retry();
    assert_eq!(pager.next_action(), fill(parents));
    pager.filled(parents, Contents::Frame(0), FillOutcome::Done(1));
    assert_eq!(pager.frames.get(0), Frame::Waiting(1));
    pager.fault(second, false);
    assert_eq!(pager.next_action(), fill(second), "the frame is the child's still");
    pager.filled(second, Contents::Frame(0), FillOutcome::Done(1));
    assert_eq!(pager.frames.get(0), Frame::Free);
}

#[test]
fn a_child_that_is_forked_in_the_middle_of_a_move_is_told_that_the_page_is_lost() {
    let mut pager = Pager::new(FRAMES, 0);
    let [parents, childs] = [1, 2].map(|space| PageId { space: SpaceId(space), page: 7 });
    pager.add_space(parents.space, true);
    pager.add_slab(PLACES_PER_SLAB);
    pager.add_pages(parents.space, 7..8, std::slice::from_ref(&(7..8)));
    assert_eq!(pager.next_action(), Some(Action::MoveOut(parents, 0, false)));
    pager.forked(parents.space, childs.space);
    pager.fault(childs, false);
    assert_eq!(pager.next_action(), Some(Action::Poison(childs)), "its helper ended, so the move never does");
}

/// A page that its parent has in a frame and at a place; a forked child refers to that place.
fn a_clean_frame_of_a_forked_page() -> (Pager, [PageId; 2]) {
    let (mut pager, both) = a_put_under_way_of_a_forked_page();
    pager.put_ended(0, PutEnd::Kept);
    (pager, both)
}

#[test]
fn a_forked_child_has_a_page_from_the_frame_that_has_it_for_its_parent() {
    let (mut pager, [parents, childs]) = a_clean_frame_of_a_forked_page();
    pager.fault(childs, false);
    assert_eq!(pager.next_action(), Some(Action::Fill(childs, Contents::Frame(0))), "no lender is asked");
    pager.fault(parents, true);
    assert_eq!(pager.next_action(), Some(Action::Fill(parents, Contents::Frame(0))));
    pager.filled(parents, Contents::Frame(0), FillOutcome::Done(1));
    assert!((1..FRAMES).all(|_| pager.frames.take(0).is_some_and(|frame| frame != 0)), "the child is filled from it");
    assert_eq!(pager.frames.take(0), None);
    pager.filled(childs, Contents::Frame(0), FillOutcome::Done(1));
    assert_eq!((pager.frames.take(0), pager.far_pages()), (Some(0), 0));
}

#[test]
fn a_forked_child_waits_for_the_get_of_its_parent() {
    let (mut pager, [parents, childs]) = a_clean_frame_of_a_forked_page();
    pager.frames.give_up_clean(FRAMES as usize).unwrap();
    pager.set(parents, Entry::Far(Place::new(0, 0)));
    pager.fault(parents, true);
    let Some(Action::Get(frame, place)) = pager.next_action() else { panic!("a get") };
    pager.fault(childs, false);
    assert_eq!(pager.next_action(), None, "one get is enough");
    pager.lose_slab(place.slab());
    pager.got(frame, true);
    assert!(matches!(pager.next_action(), Some(Action::Fill(at, _)) if at == parents), "{parents:?}");
    pager.filled(parents, Contents::Frame(frame), FillOutcome::Changing);
    pager.retry();
    let filled: Vec<_> = std::iter::from_fn(|| pager.next_action()).collect();
    assert!(filled.contains(&Action::Fill(childs, Contents::Frame(frame))), "{filled:?}");
    assert_eq!(pager.counters().lost, 0);
}

#[test]
fn a_fork_tells_whether_a_page_of_the_child_is_not_in_it() {
    let mut pager = Pager::new(FRAMES, BUDGET);
    pager.add_space(SpaceId(1), true);
    pager.add_pages(SpaceId(1), 7..20, std::slice::from_ref(&(7..9)));
    assert!(!pager.forked(SpaceId(1), SpaceId(2)), "it has two pages, and the others were never touched");
    pager.set(PageId { space: SpaceId(1), page: 8 }, Entry::Lost);
    assert!(pager.forked(SpaceId(1), SpaceId(3)));
}

#[test]
fn a_child_whose_get_fails_has_a_page_that_left_its_parent_unchanged_from_the_frame() {
    let (mut pager, [parents, childs]) = a_clean_frame_of_a_forked_page();
    pager.fault(parents, false);
    assert_eq!(pager.next_action(), Some(Action::Fill(parents, Contents::Protected(0))));
    pager.filled(parents, Contents::Protected(0), FillOutcome::Done(1));
    pager.fault(childs, false);
    let Some(Action::Get(childs_frame, place)) = pager.next_action() else { panic!("a get") };
    pager.set_budget(0);
    let Some(Action::MoveOut(at, frame, true)) = pager.next_action() else { panic!("a protected page goes") };
    pager.moved(frame, Moved::Out);
    assert_eq!((at, pager.next_action()), (parents, Some(Action::Keep(frame, place))));
    pager.set_budget(BUDGET);
    pager.got(childs_frame, false);
    assert_eq!(pager.next_action(), Some(Action::Fill(childs, Contents::Frame(frame))));
    pager.filled(childs, Contents::Frame(frame), FillOutcome::Done(1));
    pager.put_ended(frame, PutEnd::Kept);
    assert_eq!((pager.counters().lost, pager.places.references(place)), (0, 1), "the place is the parent's");
}

#[test]
fn a_page_that_comes_from_a_frame_while_it_is_also_got_is_the_childs_and_its_childrens_if_the_get_fails() {
    let (mut pager, [parents, childs]) = a_clean_frame_of_a_forked_page();
    pager.fault(childs, false);
    let filling = pager.next_action();
    assert_eq!(filling, Some(Action::Fill(childs, Contents::Frame(0))));
    pager.fault(parents, true);
    assert_eq!(pager.next_action(), Some(Action::Fill(parents, Contents::Frame(0))));
    pager.filled(parents, Contents::Frame(0), FillOutcome::Done(1));
    pager.fault(childs, false);
    let Some(Action::Get(frame, place)) = pager.next_action() else {
        panic!("another thread: no frame has the page now")
    };
    pager.filled(childs, Contents::Frame(0), FillOutcome::Done(1));
    pager.lose_slab(place.slab());
    pager.got(frame, false);
    assert_eq!((pager.next_action(), pager.counters().lost), (None, 0), "the child has the page");
    assert_eq!((pager.entry(childs), pager.far_pages()), (Some(Entry::Local), 0));
    assert!(!pager.forked(childs.space, SpaceId(3)), "and so has its child");
}

#[test]
fn a_fork_leaves_the_place_of_a_protected_page_to_the_parent() {
    let (mut pager, [parents, _]) = a_clean_frame_of_a_forked_page();
    pager.remove_space(SpaceId(2));
    pager.fault(parents, false);
    pager.filled(parents, Contents::Protected(0), FillOutcome::Done(1));
    assert!(!pager.forked(parents.space, SpaceId(3)), "the child has the page");
    let childs = PageId { space: SpaceId(3), ..parents };
    assert_eq!((pager.entry(childs), pager.protected_pages(), pager.far_pages()), (Some(Entry::Local), 1, 1));
    pager.remove_space(parents.space);
    assert_eq!(pager.far_pages(), 0);
}

#[test]
fn a_protected_page_that_could_not_be_moved_keeps_its_place_and_is_tried_again() {
    let (mut pager, [parents, _]) = a_clean_frame_of_a_forked_page();
    pager.fault(parents, false);
    assert_eq!(pager.next_action(), Some(Action::Fill(parents, Contents::Protected(0))));
    pager.filled(parents, Contents::Protected(0), FillOutcome::Done(1));
    pager.set_budget(0);
    for _ in 0..2 {
        let Some(Action::MoveOut(at, frame, true)) = pager.next_action() else { panic!("it is to go") };
        pager.moved(frame, Moved::Stays);
        assert_eq!((at, pager.next_action()), (parents, None), "it is set aside");
        assert_eq!((pager.is_protected(at), pager.far_pages()), (true, 1));
        pager.retry_moves();
    }
}
