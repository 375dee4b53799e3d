//! Wrong keys, windows that are gone, and the death of either end at any moment.

use byway_fabric::{CloseReason, GetError, Remote, SessionId, WindowError, WindowKey};

use crate::rig::{CLIENT, Event, Rig, SERVER, pattern};

const LEN: usize = 50_000;

fn refused(rig: &mut Rig, server: SessionId, from: Remote, len: usize) -> WindowError {
    rig.get(server, from, len, 1);
    match rig.got() {
        (1, _, Err(GetError::Refused(error))) => error,
        other => panic!("it was not refused: {:?}", other.2),
    }
}

/// Waits until the client has refused so many in all.
fn refusals(rig: &mut Rig, count: u64) {
    rig.until("a refusal", |rig| (rig.client().fabric.windows().refused() == count).then_some(()));
}

pub fn a_window_is_not_to_be_guessed_left_or_turned_round(rig: &mut Rig) {
    let (server, client) = rig.session();
    let target = rig.client().open_target(client, LEN);
    let source = rig.client().open_source(client, &pattern(1, LEN));
    let (to, from) = (rig.offer(client, target), rig.offer(client, source));
    let guess = |remote: Remote| Remote { window: WindowKey(remote.window.0 ^ 1 << 50), ..remote };
    let beyond = |remote: Remote| Remote { offset: 1, ..remote };
    assert_eq!(refused(rig, server, guess(from), LEN), WindowError::Key);
    assert_eq!(refused(rig, server, beyond(from), LEN), WindowError::Bounds);
    assert_eq!(refused(rig, server, Remote { offset: u64::MAX, ..from }, 2), WindowError::Bounds);
    let before = rig.client().fabric.windows().refused();
    rig.put(server, guess(to), &pattern(2, LEN), 0);
    rig.put(server, beyond(to), &pattern(2, LEN), 0);
    refusals(rig, before + 2);
    // Where the server reaches the arena by itself, nothing stops it from the wrong direction; the client still notices.
    if !rig.places() {
        assert_eq!(refused(rig, server, to, LEN), WindowError::Rights);
        rig.put(server, from, &pattern(2, LEN), 0);
        refusals(rig, before + 4);
    }
    // Nothing of that did anything, and the session goes on.
    rig.put(server, to, &pattern(3, LEN), 0);
    rig.placed();
    assert!(rig.client().close_target(target) == pattern(3, LEN));
    rig.get(server, from, LEN, 4);
    let (_, frame, result) = rig.got();
    assert!(result.is_ok() && frame.to_vec()[..LEN] == pattern(1, LEN));
}

pub fn a_window_of_another_session_is_refused(rig: &mut Rig) {
    let (first_server, first) = rig.session();
    let (second_server, _) = rig.session();
    let window = rig.client().open_target(first, LEN);
    let to = rig.offer(first, window);
    rig.put(second_server, to, &pattern(1, LEN), 0);
    refusals(rig, 1);
    rig.put(first_server, to, &pattern(2, LEN), 0);
    rig.placed();
    assert!(rig.client().close_target(window) == pattern(2, LEN));
}

pub fn a_closed_window_takes_nothing_more(rig: &mut Rig) {
    let (server, client) = rig.session();
    let window = rig.client().open_source(client, &pattern(1, LEN));
    let from = rig.offer(client, window);
    rig.get(server, from, LEN, 0);
    assert_eq!(rig.got().2, Ok(()));
    assert!(rig.client().close_source(window) == pattern(1, LEN));
    let used_again = rig.client().open_source(client, &pattern(2, LEN));
    let again = rig.offer(client, used_again);
    // The slot has another user, and the old key is nobody's.
    assert_eq!(refused(rig, server, from, LEN), WindowError::Key);
    rig.get(server, again, LEN, 0);
    let (_, frame, result) = rig.got();
    assert!(result.is_ok() && frame.to_vec()[..LEN] == pattern(2, LEN));
}

/// Both directions, several at a time, until the end that is to die has had `turns`.
fn work(rig: &mut Rig, (server, client): (SessionId, SessionId), turns: usize) -> (Vec<WindowKey>, u64) {
    let (mut windows, mut gets) = (Vec::new(), 0);
    for round in 0..4 {
        let target = rig.client().open_target(client, LEN);
        let to = rig.offer(client, target);
        rig.put(server, to, &pattern(round, LEN), 0);
        let source = rig.client().open_source(client, &pattern(round, LEN));
        let from = rig.offer(client, source);
        rig.get(server, from, LEN, gets);
        gets += 1;
        windows.extend([target, source]);
    }
    for _ in 0..turns {
        rig.turn();
    }
    (windows, gets)
}

fn ended(rig: &mut Rig, end: usize) -> CloseReason {
    let reason = rig.until("the end", |rig| {
        rig.ends[end].take(|event| if let Event::Down(reason) = event { Some(*reason) } else { None })
    });
    rig.until("the last lane's end", |rig| rig.ends[end].take(|event| matches!(event, Event::Drained).then_some(())));
    reason
}

/// In how many turns the dying end is killed: every one of the first, then some.
fn moments() -> impl Iterator<Item = usize> {
    (0..12).chain([16, 24, 40])
}

pub fn whenever_the_server_dies_the_client_has_all_its_memory_again(rig: &mut Rig) {
    for turns in moments() {
        let Some(mut rig) = Rig::new(rig.wire, byway_fabric::Options::new(7)) else { return };
        let free = rig.client().reactor.frames().free_bytes();
        let session = rig.session();
        let (windows, _) = work(&mut rig, session, turns);
        rig.kill(SERVER);
        ended(&mut rig, CLIENT);
        for (round, windows) in (0..).zip(windows.chunks(2)) {
            let (put, wanted) = (rig.client().close_target(windows[0]), pattern(round, LEN));
            // As much of it as had come.
            let wrong = put.iter().zip(&wanted).position(|(byte, wanted)| byte != wanted && *byte != 0x11);
            assert_eq!(wrong, None, "{turns} turns: put {round}");
            assert!(rig.client().close_source(windows[1]) == wanted, "{turns} turns: nobody writes there");
        }
        rig.client().log.events.clear();
        assert!(rig.client().fabric.windows().is_empty());
        let back = rig.until("the lanes' frames", |rig| {
            let free_now = rig.client().reactor.frames().free_bytes();
            (free_now == free).then_some(free_now)
        });
        assert_eq!(back, free);
        assert_eq!((rig.client().fabric.session_count(), rig.client().fabric.lane_count()), (0, 0));
    }
}

pub fn whenever_the_client_dies_every_get_ends_once(rig: &mut Rig) {
    for turns in moments() {
        let Some(mut rig) = Rig::new(rig.wire, byway_fabric::Options::new(7)) else { return };
        let free = rig.server().reactor.frames().free_bytes();
        let session = rig.session();
        let (_, gets) = work(&mut rig, session, turns);
        rig.kill(CLIENT);
        ended(&mut rig, SERVER);
        let mut seen = Vec::new();
        while let Some((context, frame, result)) = rig.server().take_got() {
            match result {
                Ok(()) => assert!(frame.to_vec()[..LEN] == pattern(context, LEN), "{turns} turns: get {context}"),
                Err(error) => {
                    assert_eq!(error, GetError::Ended, "{turns} turns");
                    let wanted = pattern(context, LEN);
                    let wrong =
                        frame.to_vec().iter().zip(&wanted).position(|(byte, wanted)| byte != wanted && *byte != 0x22);
                    assert_eq!(wrong, None, "{turns} turns: get {context}");
                }
            }
            seen.push(context);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..gets).collect::<Vec<_>>(), "{turns} turns: each get ends once");
        rig.server().log.events.clear();
        assert!(rig.server().fabric.windows().is_empty());
        rig.until("the lanes' frames", |rig| (rig.server().reactor.frames().free_bytes() <= free).then_some(()));
        assert_eq!((rig.server().fabric.session_count(), rig.server().fabric.lane_count()), (0, 0));
    }
}

pub fn a_session_that_is_closed_ends_at_both_ends(rig: &mut Rig) {
    let (server, client) = rig.session();
    let window = rig.client().open_target(client, LEN);
    let to = rig.offer(client, window);
    let end = &mut rig.ends[CLIENT];
    end.fabric.close(&mut end.reactor, client, CloseReason::Closed);
    rig.put(server, to, &pattern(1, LEN), 0);
    assert_eq!(ended(rig, CLIENT), CloseReason::Closed);
    assert!(ended(rig, SERVER) != CloseReason::Closed, "the peer ended it");
    rig.client().close_target(window);
    // What is said on a session that is over is said to nobody.
    rig.put(server, to, &pattern(1, LEN), 0);
    let end = &mut rig.ends[SERVER];
    let into = end.reactor.frames().alloc(10).expect("a frame");
    assert!(end.fabric.get(&mut end.reactor, server, to, into, 0).is_err());
}

/// Over shared memory with an arena; elsewhere there is nothing to be taken back.
pub fn memory_that_a_lost_server_could_write_is_taken_from_it(rig: &mut Rig) {
    let (_, client) = rig.session();
    let window = rig.client().open_target(client, LEN);
    rig.offer(client, window);
    let arena = rig.client().fabric.arena().cloned();
    assert_eq!(arena.is_some(), rig.places());
    rig.kill(SERVER);
    ended(rig, CLIENT);
    assert!(rig.client().fabric.arena().is_none(), "a window was open: the arena is not lent again");
    if let Some(arena) = arena {
        let frame = arena.alloc(10).expect("a frame");
        assert_eq!(frame.arena_offset(), None, "it is no arena any more");
    }
    assert!(rig.client().close_target(window) == vec![0x11; LEN], "it kept its contents");
}
