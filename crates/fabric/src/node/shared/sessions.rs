//! Sessions that end.

use super::*;

fn message(session: Session, header: &[u8]) -> Message {
    Message { session, header: header.to_vec(), payload: Vec::new() }
}

fn began(shared: &mut Shared) -> Session {
    let session = shared.add_session(Phase::Arriving, 9);
    assert!(shared.session_up(session, None, None));
    session
}

fn received(shared: &mut Shared) -> Option<Vec<u8>> {
    let op = shared.receive(None).unwrap();
    match shared.take(op)? {
        Ok(Ok(Outcome::Message(message))) => Some(message.header),
        other => panic!("{other:?}"),
    }
}

/// Each would make a receiver wait although messages have arrived, and they would accumulate.
#[test]
fn a_session_that_never_began_leaves_no_arrivals() {
    let mut shared = Shared::default();
    let connecting = shared.begin(OpKind::Plain).unwrap();
    for phase in [Phase::Arriving, Phase::Connecting(connecting)] {
        let gone = shared.add_session(phase, 9);
        shared.message_came(message(gone, b"of nobody"));
        shared.session_ended(gone, CloseReason::Closed);
        assert_eq!((shared.arrivals.len(), shared.sessions.len()), (0, 0));
    }
    assert_eq!(shared.take(connecting), Some(Ok(Err(OpError::Ended(CloseReason::Closed)))));
}

#[test]
fn an_arrival_of_a_session_that_is_gone_is_passed_over() {
    let mut shared = Shared::default();
    let gone = shared.add_session(Phase::Arriving, 9);
    shared.sessions.remove(gone.0);
    shared.arrivals.push_back((0, gone.0));
    let session = began(&mut shared);
    shared.message_came(message(session, b"first"));
    shared.message_came(message(session, b"second"));
    assert_eq!(received(&mut shared).as_deref(), Some(&b"first"[..]));
    assert_eq!(received(&mut shared).as_deref(), Some(&b"second"[..]));
}

#[test]
fn while_a_session_ends_nothing_begins_and_its_end_is_told_last() {
    let mut shared = Shared::default();
    let (session, reason) = (began(&mut shared), CloseReason::Closed);
    let (mine, any) = (shared.receive(Some(session)).unwrap(), shared.receive(None).unwrap());
    shared.session_ends(session, reason);
    assert_eq!(shared.count_waiting(session), Err(SubmitError::Ended(reason)));
    assert!(shared.is_under_way(mine) && shared.is_under_way(any));
    shared.session_ended(session, reason);
    assert_eq!(shared.take(mine), Some(Ok(Err(OpError::Ended(reason)))));
    assert_eq!(shared.take(any), Some(Ok(Ok(Outcome::Ended(session, reason)))));
}

/// Closing it then reports nothing, as always; its receivers are told.
#[test]
fn a_session_can_be_closed_while_it_ends() {
    let mut shared = Shared::default();
    let session = began(&mut shared);
    let mine = shared.receive(Some(session)).unwrap();
    shared.session_ends(session, CloseReason::Closed);
    shared.close(session);
    shared.session_ended(session, CloseReason::Closed);
    assert_eq!(shared.take(mine), Some(Ok(Err(OpError::Ended(CloseReason::Closed)))));
    assert_eq!((shared.sessions.len(), shared.endings.len()), (0, 0));
}

/// A peer that may connect can connect and leave as often as it likes.
#[test]
fn strangers_who_come_and_go_push_out_no_message_of_others() {
    let mut shared = Shared::default();
    let accepted = began(&mut shared);
    let op = shared.accept().unwrap();
    assert_eq!(shared.take(op), Some(Ok(Ok(Outcome::Session(accepted)))));
    shared.message_came(message(accepted, b"the last"));
    shared.session_ended(accepted, CloseReason::Closed);
    for _ in 0..ENDED_SESSIONS_MAX + 10 {
        let stranger = began(&mut shared);
        shared.session_ended(stranger, CloseReason::Closed);
    }
    assert_eq!(shared.sessions.len(), ENDED_SESSIONS_MAX);
    assert_eq!(received(&mut shared).as_deref(), Some(&b"the last"[..]));
}
