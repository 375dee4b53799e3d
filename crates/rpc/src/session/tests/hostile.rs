//! What a node that breaks the rules cannot do to others: steps that no honest node of the simulation takes.

use byway_fabric::limits::SMALL_BYTES_MAX;

use super::*;
use crate::message::{DataBody, TOKEN_BYTES, call_number};

const ASK: Ask<'_> = Ask { protocol: PROTOCOL, method: 1, arguments: &Inline::EMPTY, windows: 0 };
const NONCE: [u8; 16] = [3; 16];
/// What each peer calls its session, by the node's name.
const PEERS_NAME: u64 = 70;

type Node = Calls<&'static str>;

/// A node that serves one call at a time.
fn node() -> Node {
    Calls::new([9; 16], spoken())
}

fn spoken() -> Vec<Spoken> {
    vec![Spoken { protocol: PROTOCOL, versions: Versions::only(1), grant: Some(Grant { calls: 1, notices: 0 }) }]
}

/// A session with the node of that name.
fn meet(calls: &mut Node, name: u8) -> SessionId {
    let session = SessionId::new(u32::from(name), 1);
    calls.up(session, NONCE, true);
    let mut body = ProtocolsBody::new_zeroed();
    (body.node, body.session, body.count) = ([name; 16], (PEERS_NAME + u64::from(name)).into(), 1.into());
    let hello = Header::with_body(Kind::Protocols, &body);
    assert!(matches!(calls.message(session, Kind::Protocols, &hello, &entries(&spoken())), Ok(Event::Ready(_))));
    calls.outbox().clear();
    session
}

/// A callee's word that a third node has answered over that session of the caller's.
fn answered_over(call: u64, session: SessionId) -> Header {
    reply_header(call, Status::AnsweredDirectly as u16, 0, &inline(session.to_u64()))
}

fn call(calls: &mut Node, session: SessionId, deadline: Instant) -> CallId {
    calls.call(session, &ASK, "its call", Instant::ZERO, deadline).expect("there is credit").0
}

/// A third node's answer, with `total` bytes of payload in other messages, and what precedes its own.
fn answered_by_token(at: CallId, status: u16, total: u32) -> (Header, Token) {
    let (session, secret) = (at.session.to_u64().into(), secret(&NONCE, at.call).into());
    let mut header = reply_header(at.call, status, total, &Inline::EMPTY);
    header.flags |= FLAG_TOKEN;
    (header, Token { caller: [9; 16], session, call: at.call.into(), secret })
}

/// Such an answer would have come before, on the same lane. The third node's end would never be noticed.
#[test]
fn an_answer_that_is_said_to_have_come_over_the_callees_own_session_is_lost() {
    let mut caller = node();
    let to_callee = meet(&mut caller, 1);
    let at = call(&mut caller, to_callee, Instant::FAR);
    let event = caller.message(to_callee, Kind::Reply, &answered_over(at.call, to_callee), &[]);
    assert!(matches!(event, Ok(Event::Ended("its call", LOST, _))), "{event:?}");
    assert_eq!((caller.calls_out(to_callee), caller.may_call(to_callee, PROTOCOL)), (0, Ok(())));
}

/// A call that came back to the node that was called first is answered there, as if by a third node.
#[test]
fn an_answer_that_did_come_over_the_callees_own_session_may_have_parts_on_their_way() {
    let mut caller = node();
    let to_callee = meet(&mut caller, 1);
    let at = call(&mut caller, to_callee, Instant::FAR);
    let (answer, token) = answered_by_token(at, 0, 100);
    assert!(matches!(caller.message(to_callee, Kind::Reply, &answer, token.as_bytes()), Ok(Event::None)));
    let told = answered_over(at.call, to_callee);
    assert!(matches!(caller.message(to_callee, Kind::Reply, &told, &[]), Ok(Event::None)));
    let mut part = Header::with_body(Kind::Data, &DataBody { call: at.call.into(), token, reserved: [0; 32] });
    part.flags |= FLAG_TOKEN;
    part.payload_len.set(100);
    let event = caller.placed(to_callee, Kind::Data, &part);
    assert!(matches!(event, Event::Ended("its call", Answer { status: 0, total: 100, .. }, _)), "{event:?}");
    assert_eq!(caller.calls_out(to_callee), 0);
}

/// The session that it names may live long, and bring nothing.
#[test]
fn a_third_nodes_answer_is_not_waited_for_when_the_caller_has_given_up() {
    let give_up: [fn(&mut Node, CallId) -> Option<&'static str>; 2] =
        [|caller, at| caller.cancel(at), |caller, _| caller.overdue(Instant::from_nanos(10))];
    for (give_up, before) in give_up.into_iter().flat_map(|how| [(how, true), (how, false)]) {
        let mut caller = node();
        let (to_callee, other) = (meet(&mut caller, 1), meet(&mut caller, 2));
        let at = call(&mut caller, to_callee, Instant::from_nanos(10));
        if before {
            assert_eq!(give_up(&mut caller, at), Some("its call"));
        }
        assert!(caller.message(to_callee, Kind::Reply, &answered_over(at.call, other), &[]).is_ok());
        if !before {
            assert_eq!((give_up(&mut caller, at), caller.outbox().len()), (Some("its call"), 0));
        }
        assert_eq!((caller.calls_out(to_callee), caller.may_call(to_callee, PROTOCOL)), (0, Ok(())));
    }
}

/// A chain of nodes has the call. The last answers and goes, with a part of its answer; the one before says so by the token.
#[test]
fn an_answer_of_which_a_part_is_lost_gives_way_to_the_word_of_that() {
    let mut caller = node();
    let [to_callee, to_last, to_one_before] = [1, 2, 3].map(|name| meet(&mut caller, name));
    let at = call(&mut caller, to_callee, Instant::FAR);
    let (answer, token) = answered_by_token(at, 0, 100);
    assert!(matches!(caller.message(to_last, Kind::Reply, &answer, token.as_bytes()), Ok(Event::None)));
    assert!(caller.down(to_last).is_empty());
    let (lost, token) = answered_by_token(at, LOST.status, 0);
    let event = caller.message(to_one_before, Kind::Reply, &lost, token.as_bytes());
    assert!(matches!(event, Ok(Event::Ended("its call", LOST, _))), "{event:?}");
}

/// A call from the peer of a session: what it came with, behind its header.
fn called(calls: &mut Node, session: SessionId, token: Option<Token>) -> CallRef {
    let number = SessionId::new(0, 1).to_u64();
    let mut header = call_header(Kind::Call, number, &ASK, None);
    header.flags |= if token.is_some() { FLAG_TOKEN } else { 0 };
    let event = calls.message(session, Kind::Call, &header, token.as_ref().map_or(&[], IntoBytes::as_bytes));
    let Ok(Event::Called(call, _)) = event else { panic!("{event:?}") };
    call
}

fn cancelled<'a>(calls: &mut Node, call: CallRef) -> Event<'a, &'static str> {
    let mut body = CancelBody::new_zeroed();
    body.call.set(call.call);
    calls.message(call.session, Kind::Cancel, &Header::with_body(Kind::Cancel, &body), &[]).expect("no breach")
}

/// Each would wait in the queue of a third node's session, which no credit of the caller's bounds.
#[test]
fn a_call_is_cancelled_once() {
    let mut server = node();
    let (to_caller, to_third) = (meet(&mut server, 1), meet(&mut server, 2));
    let call = called(&mut server, to_caller, None);
    assert!(matches!(cancelled(&mut server, call), Event::Cancelled(same) if same == call));
    assert!(matches!(cancelled(&mut server, call), Event::None));
    assert!(server.reply(call, 0, 0, &Inline::EMPTY).is_some());

    let call = called(&mut server, to_caller, None);
    server.delegate(call, to_third, &ASK, None).expect("there is credit");
    for _ in 0..3 {
        assert!(matches!(cancelled(&mut server, call), Event::None));
    }
    let told: Vec<_> = server.outbox().iter().map(|out| (out.session, out.header.kind)).collect();
    assert_eq!(told, [(to_third, Kind::Cancel as u8)]);
}

/// The message to the caller would be longer than any may be, and its session would end.
#[test]
fn an_answer_that_leaves_no_room_for_a_token_is_passed_on_as_malformed() {
    for (len, status) in [(SMALL_BYTES_MAX - TOKEN_BYTES, 0), (SMALL_BYTES_MAX, Status::Malformed as u16)] {
        let mut server = node();
        let (to_first, to_caller, to_third) = (meet(&mut server, 1), meet(&mut server, 2), meet(&mut server, 3));
        // The first node had the call from the caller, and delegates it.
        let token = Token { caller: [2; 16], session: 5.into(), call: 6.into(), secret: 7.into() };
        let from = called(&mut server, to_first, Some(token));
        let (header, _) = server.delegate(from, to_third, &ASK, None).expect("there is credit");
        let number = call_number(header.body::<CallBody>().call);
        let answer = reply_header(number, 0, len as u32, &Inline::EMPTY);
        assert!(matches!(server.message(to_third, Kind::Reply, &answer, &vec![1; len]), Ok(Event::Ready(_))));
        let passed_on = server.outbox().iter().find(|out| out.session == to_caller).expect("it is answered directly");
        let reply: ReplyBody = passed_on.header.body();
        assert_eq!(reply.status.get(), status);
        let expected = if status == 0 { SMALL_BYTES_MAX } else { TOKEN_BYTES };
        assert_eq!((passed_on.payload.len(), reply.total.get() as usize), (expected, expected - TOKEN_BYTES));
    }
}
