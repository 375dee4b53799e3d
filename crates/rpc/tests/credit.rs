//! Calls that wait for credit are sent when it is back, whatever brought it back.

mod turner;

use std::time::Duration;

use byway_fabric::node::{Address, Deadline, NodeOptions, Op, OpError, Session};
use byway_fabric::wire::{Header, Kind};
use byway_rpc::message::{ReplyBody, Status};
use byway_rpc::node::{Call, Reply, Request, Rpc};
use byway_rpc::session::{Grant, Spoken, Versions};
use turner::Turner;
use zerocopy::FromZeros;

const FIRST: u8 = 20;
const SECOND: u8 = 21;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// A node that takes one call of each peer in either of two protocols.
fn open() -> Rpc {
    let spoken =
        |protocol| Spoken { protocol, versions: Versions::only(1), grant: Some(Grant { calls: 1, notices: 0 }) };
    let options = NodeOptions { frame_bytes: 16 << 20, ..NodeOptions::default() };
    Rpc::open_for(&options, vec![spoken(FIRST), spoken(SECOND)]).unwrap()
}

/// A session from `client` to `server`: as each of them calls it.
fn connect(server: &Rpc, client: &Rpc) -> (Session, Session) {
    let at = server.node().listen(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
        let connected = client.node().connect(&Address::Tcp(at), soon()).unwrap();
        (accepted.join().unwrap(), connected)
    })
}

fn ask(protocol: u8, arguments: &[u8]) -> Call<'_> {
    Call { protocol, arguments, ..Call::default() }
}

fn result_of(op: &Op) -> Vec<u8> {
    Reply::of(op.wait(soon()).expect("the call ends").expect("it went well")).unwrap().result
}

/// The caller's first call is with the third node, which is to answer over `direct`; the caller knows that, has no answer yet,
/// and its second call waits for the credit of the first.
struct Delegated {
    caller: Rpc,
    server: Rpc,
    third: Rpc,
    /// As the third node calls it.
    direct: Session,
    first: Op,
    second: Op,
    request: Request,
}

fn delegated() -> Delegated {
    let (caller, server, third) = (open(), open(), open());
    let (_, to_server) = connect(&server, &caller);
    let (_, to_third) = connect(&third, &server);
    let (direct, callers_direct) = connect(&third, &caller);
    // The third node hears the caller's name before this.
    caller.node().send(callers_direct, b"hello", &[]).unwrap();
    third.node().receive(soon()).unwrap();
    let first = caller.call(to_server, &ask(FIRST, b"first"), Deadline::NEVER).unwrap();
    let second = caller.call(to_server, &ask(FIRST, b"second"), Deadline::NEVER).unwrap();
    let taken = server.next_call(soon()).unwrap();
    let to_caller = taken.session;
    taken.token.delegate(to_third, &ask(FIRST, b"first")).map_err(|error| error.1).unwrap();
    let request = third.next_call(soon()).unwrap();
    // What the third node says to the server when it has answered. It is early here, so that it comes before that answer.
    let mut body = ReplyBody::new_zeroed();
    body.call.set(1 << 32);
    body.status.set(Status::AnsweredDirectly as u16);
    body.inline_len = 8;
    body.result[..8].copy_from_slice(&callers_direct.to_u64().to_le_bytes());
    third.node().layer_send(request.session, Header::with_body(Kind::Reply, &body), Vec::new(), None).unwrap();
    third.node().send(request.session, b"behind it", &[]).unwrap();
    server.node().receive(soon()).unwrap();
    server.node().send(to_caller, b"behind what the server passed on", &[]).unwrap();
    caller.node().receive(soon()).unwrap();
    assert_eq!(caller.counters().unwrap().calls, 2);
    Delegated { caller, server, third, direct, first, second, request }
}

/// The answer comes over another session than the credit is for.
#[test]
fn a_call_goes_out_when_a_third_nodes_answer_brings_the_credit_back() {
    let Delegated { caller, server, third, first, second, request, .. } = delegated();
    let _turners = [Turner::of(caller.node()), Turner::of(third.node())];
    request.token.reply(0, b"by the third", &[]).unwrap();
    assert_eq!(result_of(&first), b"by the third");
    server.next_call(soon()).unwrap().token.reply(0, b"by the server", &[]).unwrap();
    let _server = Turner::of(server.node());
    assert_eq!(result_of(&second), b"by the server");
}

/// The call did not go over that session, and its own is well.
#[test]
fn a_call_goes_out_when_the_end_of_a_third_nodes_session_brings_the_credit_back() {
    let Delegated { caller, server, third, direct, first, second, request, .. } = delegated();
    let _turners = [Turner::of(caller.node()), Turner::of(third.node())];
    third.node().close(direct).unwrap();
    assert_eq!(first.wait(soon()), Ok(Err(OpError::Status(Status::DelegateLost as u16))));
    server.next_call(soon()).unwrap().token.reply(0, b"by the server", &[]).unwrap();
    let _server = Turner::of(server.node());
    assert_eq!(result_of(&second), b"by the server");
    drop(request);
}

#[test]
fn a_call_does_not_wait_for_the_credit_of_another_protocol() {
    let (caller, server) = (open(), open());
    let (_, to_server) = connect(&server, &caller);
    let _caller = Turner::of(caller.node());
    let call = |protocol| caller.call(to_server, &ask(protocol, &[protocol]), soon()).unwrap();
    let (under_way, waiting, other) = (call(FIRST), call(FIRST), call(SECOND));
    let requests = [(); 2].map(|()| server.next_call(soon()).unwrap());
    assert_eq!(requests.each_ref().map(|request| request.protocol), [FIRST, SECOND]);
    for request in requests {
        request.token.reply(0, &request.arguments, &[]).unwrap();
    }
    let turner = Turner::of(server.node());
    assert_eq!((result_of(&under_way), result_of(&other)), (vec![FIRST], vec![SECOND]));
    drop(turner);
    server.next_call(soon()).unwrap().token.reply(0, b"last", &[]).unwrap();
    let _server = Turner::of(server.node());
    assert_eq!(result_of(&waiting), b"last");
}
