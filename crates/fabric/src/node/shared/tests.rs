//! What had come to an operation that nobody takes it from.

use std::time::Duration;

use super::*;
use crate::node::{Deadline, Node, NodeOptions, Op, WaitError};

fn node() -> Node {
    Node::open(&NodeOptions::default()).unwrap()
}

/// A session with nobody at its other end.
fn session(node: &Node) -> Session {
    node.inner.lock().unwrap().add_session(Phase::Up, 64)
}

/// A session that somebody else has begun.
fn arrives(node: &Node) -> Session {
    let mut shared = node.inner.lock().unwrap();
    let session = shared.add_session(Phase::Arriving, 64);
    assert!(shared.session_up(session, None, None));
    session
}

fn came(node: &Node, session: Session, header: &[u8]) {
    let message = Message { session, header: header.to_vec(), payload: Vec::new() };
    node.inner.lock().unwrap().message_came(message);
}

fn ends(node: &Node, session: Session) {
    node.inner.lock().unwrap().session_ended(session, CloseReason::Closed);
}

fn taken(node: &Node, session: Session) -> i64 {
    node.inner.lock().unwrap().sessions.get(session.0).map(|state| state.taken).unwrap()
}

/// What a receive brings that finds something at once.
fn next(node: &Node, from: Option<Session>) -> Vec<u8> {
    match node.start_receive(from).unwrap().test() {
        Ok(Ok(Outcome::Message(message))) => message.header,
        other => panic!("{other:?}"),
    }
}

/// As for who has found nothing by his deadline, while somebody else turned the loop since.
#[test]
fn a_message_that_comes_before_its_receive_is_dropped_is_received() {
    let node = node();
    let session = session(&node);
    for from in [None, Some(session)] {
        let receive = node.start_receive(from).unwrap();
        assert_eq!(receive.test(), Err(WaitError::Deadline));
        came(&node, session, b"in between");
        drop(receive);
        assert_eq!(node.receive(Duration::ZERO).unwrap().header, b"in between");
        assert_eq!(node.receive(Duration::ZERO), Err(WaitError::Deadline.into()));
    }
    assert_eq!(node.counters().unwrap().ops, 0);
}

#[test]
fn messages_that_nobody_took_keep_their_order() {
    let node = node();
    let (first, second) = (session(&node), session(&node));
    let mut receives: Vec<Op> = (0..4).map(|_| node.start_receive(None).unwrap()).collect();
    for number in 0..3u8 {
        came(&node, first, &[number]);
    }
    came(&node, second, b"other");
    came(&node, first, &[3]);
    // One of them through a group, and in any order.
    let group = node.group(1).unwrap();
    group.add(receives.remove(1), 7).unwrap();
    drop(group);
    receives.into_iter().for_each(drop);
    for expected in [&[0][..], &[1], &[2], b"other", &[3]] {
        assert_eq!(next(&node, None), expected);
    }
}

/// It says that the program has taken a message.
#[test]
fn credit_is_given_once_for_a_message_that_is_received_twice() {
    let node = node();
    let session = session(&node);
    let receives: Vec<Op> = (0..40).map(|_| node.start_receive(None).unwrap()).collect();
    for number in 0..40u8 {
        came(&node, session, &[number]);
    }
    assert_eq!(taken(&node, session), 40);
    let given = node.inner.lock().unwrap().settle_credit(session);
    drop(receives);
    assert_eq!((given, taken(&node, session)), (40, -40));
    let again = node.inner.lock().unwrap().settle_credit(session);
    for number in 0..40u8 {
        assert_eq!(next(&node, None), [number]);
    }
    assert_eq!((again, taken(&node, session)), (0, 0));
}

#[test]
fn what_nobody_took_goes_to_who_waits_for_it() {
    let node = node();
    let session = session(&node);
    let (first, second) = (node.start_receive(None).unwrap(), node.start_receive(None).unwrap());
    came(&node, session, b"once");
    drop(first);
    assert!(matches!(second.test(), Ok(Ok(Outcome::Message(message))) if message.header == b"once"));

    let (first, second) = (node.start_receive(None).unwrap(), node.start_receive(None).unwrap());
    ends(&node, session);
    drop(first);
    let ended = Ok(Ok(Outcome::Ended(session, CloseReason::Closed)));
    assert_eq!(second.test(), ended);
    assert_eq!(node.counters().unwrap().ops, 0);
}

#[test]
fn the_end_of_a_session_is_told_also_if_its_receive_is_dropped() {
    let node = node();
    let (first, second) = (session(&node), session(&node));
    let receive = node.start_receive(None).unwrap();
    ends(&node, first);
    ends(&node, second);
    drop(receive);
    for session in [first, second] {
        let told = node.start_receive(None).unwrap().test();
        assert_eq!(told, Ok(Ok(Outcome::Ended(session, CloseReason::Closed))));
    }
    let receive = node.start_receive(None).unwrap();
    let third = session(&node);
    ends(&node, third);
    drop(receive);
    // Who closes it need not be told.
    node.close(third).unwrap();
    assert_eq!(node.start_receive(None).unwrap().test(), Err(WaitError::Deadline));
}

#[test]
fn a_session_that_nobody_took_goes_to_who_waits_for_one() {
    let node = node();
    let (first, second) = (node.start_accept().unwrap(), node.start_accept().unwrap());
    let (older, newer) = (arrives(&node), node.inner.lock().unwrap().add_session(Phase::Arriving, 64));
    drop(first);
    assert!(node.inner.lock().unwrap().session_up(newer, None, None));
    assert_eq!(second.test(), Ok(Ok(Outcome::Session(older))));
    assert_eq!(node.accept(Duration::ZERO), Ok(newer));

    // It is known by its end then.
    let first = node.start_accept().unwrap();
    let ended = arrives(&node);
    ends(&node, ended);
    drop(first);
    assert_eq!(node.accept(Duration::ZERO), Err(WaitError::Deadline.into()));
}

/// The thread that waits may be the one that turns the loop, and sleeps there.
#[test]
fn who_waits_is_woken_for_what_nobody_took() {
    let node = node();
    let session = session(&node);
    let limit = || Deadline::after(Duration::from_secs(5));
    let all_wait = || while node.counters().unwrap().ops < 4 {};
    let (accept, receive) = (node.start_accept().unwrap(), node.start_receive(None).unwrap());
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| node.accept(limit()));
        let receiving = scope.spawn(|| node.receive(limit()));
        all_wait();
        let accepted = arrives(&node);
        came(&node, session, b"for the other");
        drop((accept, receive));
        assert_eq!(accepting.join().unwrap(), Ok(accepted));
        assert_eq!(receiving.join().unwrap().unwrap().header, b"for the other");
    });
}

#[test]
fn a_group_that_is_dropped_gives_up_what_waits_in_it_and_gives_back_what_came() {
    let node = node();
    let session = session(&node);
    let group = node.group(1 << 16).unwrap();
    // As many as would be too deep for a stack, were each to hand on to the next.
    for _ in 0..20_000 {
        group.add(node.start_receive(None).unwrap(), 0).unwrap();
        group.add(node.start_accept().unwrap(), 0).unwrap();
    }
    came(&node, session, b"in the group");
    let accepted = arrives(&node);
    drop(group);
    assert_eq!(node.counters().unwrap().ops, 0);
    assert_eq!(node.receive(Duration::ZERO).unwrap().header, b"in the group");
    assert_eq!(node.accept(Duration::ZERO), Ok(accepted));
}

/// What a deadline does, if the operation has ended after the last look.
#[test]
fn what_is_called_off_too_late_is_what_came() {
    let node = node();
    let session = session(&node);
    let receive = node.start_receive(None).unwrap();
    came(&node, session, b"late");
    let ended = node.inner.lock().unwrap().call_off(receive.slot);
    assert!(matches!(ended, Some(Ok(Outcome::Message(message))) if message.header == b"late"));
    let receive = node.start_receive(Some(session)).unwrap();
    assert_eq!(node.inner.lock().unwrap().call_off(receive.slot), None);
    came(&node, session, b"later");
    drop(receive);
    assert_eq!(next(&node, None), b"later");
}
