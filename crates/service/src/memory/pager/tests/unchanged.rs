//! Pages that leave without a put.

use super::*;

#[test]
fn a_page_that_was_got_twice_keeps_its_place_while_it_is_protected_and_longer_than_that_while_a_get_is_left() {
    for writes_first in [true, false] {
        let (mut pager, space) = a_pager_with(1000, 2000);
        settle(&mut pager);
        let at = PageId { space, page: 0 };
        pager.fault(at, false);
        let Some(Action::Get(slow, place)) = pager.next_action() else { panic!("a get") };
        pager.get_again(slow);
        let gets: Vec<_> = std::iter::from_fn(|| pager.next_action()).collect();
        let is_it = |action: &&Action| matches!(action, Action::Get(_, other) if *other == place);
        let Some(Action::Get(again, _)) = gets.iter().find(is_it) else { panic!("{gets:?}") };
        pager.got(*again, true);
        let contents = Contents::Protected(*again);
        assert_eq!(pager.next_action(), Some(Action::Fill(at, contents)));
        pager.filled(at, contents, FillOutcome::Done(1));
        assert_eq!(pager.entry(at), Some(Entry::Protected(place)));
        if writes_first {
            pager.write_fault(at);
            assert_eq!(pager.places.references(place), 1, "the first get may still read there");
        }
        pager.got(slow, true);
        assert_eq!(pager.frames.get(slow), Frame::Free);
        assert_eq!(pager.places.references(place), u16::from(!writes_first));
    }
}

/// Pages that were put once and are fetched again, one at a time, so that all of them go and come.
fn read_all(pager: &mut Pager, space: SpaceId, pages: u64, step: u64) {
    for page in 0..pages {
        let at = PageId { space, page: page * step % pages };
        if !pager.entry(at).is_some_and(Entry::is_here) {
            pager.fault(at, false);
            settle(pager);
        }
    }
}

#[test]
fn pages_that_are_only_read_are_put_once() {
    let (mut pager, space) = a_pager_with(1000, 2000);
    settle(&mut pager);
    read_all(&mut pager, space, 2000, 7);
    let put = pager.counters().put;
    read_all(&mut pager, space, 2000, 7);
    let counters = pager.counters();
    assert!(counters.put - put < 100 && counters.unchanged > 1500, "{put} put before: {counters:?}");
}

#[test]
fn pages_that_are_written_after_they_came_are_soon_not_protected() {
    let (mut pager, space) = a_pager_with(1000, 2000);
    settle(&mut pager);
    for page in 0..4000 {
        let at = PageId { space, page: page * 7 % 2000 };
        if !pager.entry(at).is_some_and(Entry::is_here) {
            pager.fault(at, false);
            settle(&mut pager);
        }
        if matches!(pager.entry(at), Some(Entry::Protected(_))) {
            pager.write_fault(at);
            assert_eq!(pager.next_action(), Some(Action::Unprotect(at)));
        }
    }
    let counters = pager.counters();
    assert!(counters.fetched > 2500 && counters.unprotected < 150, "{counters:?}");
}

#[test]
fn pages_that_need_no_new_place_go_where_lenders_have_no_memory_left() {
    let (mut pager, space) = (Pager::new(512, 1000), SpaceId(1));
    pager.add_space(space, true);
    pager.add_slab(PLACES_PER_SLAB);
    pager.add_pages(space, 0..2000, std::slice::from_ref(&(0..2000)));
    settle(&mut pager);
    read_all(&mut pager, space, 2000, 7);
    // All other places are taken.
    while pager.places.take().is_some() {}
    assert!(pager.spaces[&space].protected > 500);
    pager.set_budget(600);
    settle(&mut pager);
    assert!(pager.local_pages() <= 600, "{} pages are here", pager.local_pages());
}

#[test]
fn where_protection_cannot_be_relied_on_no_page_is_protected_and_protected_pages_are_put_again() {
    let (mut pager, space) = a_pager_with(1000, 2000);
    settle(&mut pager);
    read_all(&mut pager, space, 2000, 7);
    assert!(pager.protected_pages() > 500);
    pager.set_budget(900);
    let moving = std::iter::from_fn(|| pager.next_action()).find_map(|action| match action {
        Action::MoveOut(at, frame, true) => Some((at, frame)),
        _ => None,
    });
    let (at, frame) = moving.expect("protected pages go");
    pager.protect_pages(false);
    assert_eq!(pager.protected_pages(), 0);
    pager.moved(frame, Moved::Out);
    let puts: Vec<_> = std::iter::from_fn(|| pager.next_action()).collect();
    assert!(
        puts.iter().any(|action| matches!(action, Action::Put(put, _) if *put == frame)),
        "{at:?} is put: {puts:?}"
    );
}
