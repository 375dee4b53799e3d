//! What is refused costs the node nothing, and whoever sends what is no answer loses his own session only.

use std::sync::Arc;
use std::time::Duration;

use byway_fabric::node::{Address, Deadline, Node, NodeOptions, Op, OpError, Outcome, Session, SubmitError};
use byway_fabric::wire::{FLAG_TOKEN, Header, Kind};
use byway_rpc::message::{ReplyBody, Status};
use byway_rpc::node::{Call, PROGRAM, Rpc};
use byway_rpc::session::{Grant, Spoken, Versions};
use zerocopy::FromZeros;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn open() -> Rpc {
    Rpc::open(&NodeOptions { frame_bytes: 16 << 20, ..NodeOptions::default() }).unwrap()
}

/// A session from `client` to `server`, as the client calls it.
fn connect(server: &Rpc, client: &Rpc) -> Session {
    let at = server.node().listen(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
        let connected = client.node().connect(&Address::Tcp(at), soon()).unwrap();
        accepted.join().unwrap();
        connected
    })
}

fn turn(rpc: &Rpc) -> (Arc<Op>, std::thread::JoinHandle<()>) {
    let op = Arc::new(rpc.node().start_accept().unwrap());
    let waited = Arc::clone(&op);
    (op, std::thread::spawn(move || drop(waited.wait(Deadline::after(Duration::from_secs(100))))))
}

#[test]
fn calls_that_are_refused_leave_no_operation() {
    let (server, client) = (open(), open());
    let to_server = connect(&server, &client);
    let ops = || client.node().counters().unwrap().ops;
    let mut calls = Vec::new();
    // Nobody turns the server, so nothing is answered and no credit comes back.
    let refused = loop {
        match client.call(to_server, &Call::default(), Deadline::NEVER) {
            Ok(op) => calls.push(op),
            Err(error) => break error,
        }
    };
    assert_eq!((refused, ops()), (SubmitError::Busy, calls.len()));
    for _ in 0..1000 {
        assert_eq!(client.call(to_server, &Call::default(), soon()).unwrap_err(), SubmitError::Busy);
    }
    assert_eq!(ops(), calls.len());
    assert_eq!(client.counters().unwrap().calls, calls.len());
    client.node().close(to_server).unwrap();
    for op in &calls {
        assert!(matches!(op.wait(soon()).unwrap(), Err(OpError::Ended(_))));
    }
    for _ in 0..1000 {
        assert_eq!(client.call(to_server, &Call::default(), soon()).unwrap_err(), SubmitError::NoSession);
    }
    assert_eq!((ops(), client.counters().unwrap().calls), (0, 0));
}

/// A third node that answers a call which was delegated to it with less than its header says.
#[test]
fn a_mangled_answer_ends_the_session_of_whoever_sent_it_and_no_other() {
    let (caller, server, third) = (open(), open(), open());
    let to_server = connect(&server, &caller);
    let to_third = connect(&third, &server);
    let (caller_op, caller_turns) = turn(&caller);
    let _lost = caller.call(to_server, &Call::default(), Deadline::NEVER).unwrap();
    let handed = server.next_call(soon()).unwrap();
    handed.token.delegate(to_third, &Call::default()).map_err(|error| error.1).unwrap();
    let request = third.next_call(soon()).unwrap();
    let mut mangled = Header::with_body(Kind::Reply, &ReplyBody::new_zeroed());
    mangled.flags = FLAG_TOKEN;
    third.node().layer_send(request.session, mangled, Vec::new(), None).unwrap();
    let (third_op, third_turns) = turn(&third);
    let probe = server.call(to_third, &Call::default(), soon()).unwrap();
    assert!(matches!(probe.wait(soon()).unwrap(), Err(OpError::Ended(_))), "its session with the server is over");
    let next = caller.call(to_server, &Call::default(), soon()).unwrap();
    server.next_call(soon()).unwrap().token.reply(0, b"still here", &[]).unwrap();
    let (server_op, server_turns) = turn(&server);
    next.wait(soon()).unwrap().expect("the caller's is not");
    for (op, thread) in [(caller_op, caller_turns), (third_op, third_turns), (server_op, server_turns)] {
        op.cancel().unwrap();
        thread.join().unwrap();
    }
}

/// The first call waits for the peer's list of protocols, the second one finds it.
#[test]
fn a_call_in_another_version_of_a_protocol_ends_by_name() {
    let of = |version, grant| {
        let spoken = Spoken { protocol: PROGRAM, versions: Versions::only(version), grant };
        Rpc::open_for(&NodeOptions::default(), vec![spoken]).unwrap()
    };
    let (server, client) = (of(2, Some(Grant { calls: 1, notices: 0 })), of(1, None));
    let to_server = connect(&server, &client);
    for _ in 0..2 {
        let called = client.call(to_server, &Call::default(), soon()).unwrap();
        assert_eq!(called.wait(soon()).unwrap(), Err(OpError::Status(Status::Version as u16)));
    }
    assert_eq!((client.node().counters().unwrap().ops, client.counters().unwrap().calls), (0, 0));
}

/// No program can take them yet: they would be dropped.
#[test]
fn a_node_that_would_grant_notices_is_not_opened() {
    let open = |notices| {
        let grant = Some(Grant { calls: 1, notices });
        Rpc::open_for(&NodeOptions::default(), vec![Spoken { protocol: PROGRAM, versions: Versions::only(1), grant }])
    };
    assert_eq!(open(1).map(|_| ()).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert!(open(0).is_ok());
}

/// The peer may well serve it.
#[test]
fn a_protocol_that_the_node_was_not_opened_for_is_not_the_peers_fault() {
    let (server, client) = (open(), open());
    let to_server = connect(&server, &client);
    let unknown = Call { protocol: 99, ..Call::default() };
    assert_eq!(client.call(to_server, &unknown, soon()).unwrap_err(), SubmitError::NotSpoken);
    let _call = client.call(to_server, &Call::default(), soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    assert_eq!(request.token.hand_on(request.session, &unknown), Err(SubmitError::NotSpoken));
    assert_eq!(client.node().counters().unwrap().ops, 1);
}

/// And not that of the third node, whose session is well.
#[test]
fn a_call_whose_caller_has_gone_is_not_delegated() {
    let (caller, server, third) = (open(), open(), open());
    let to_server = connect(&server, &caller);
    let to_third = connect(&third, &server);
    let lost = caller.call(to_server, &Call::default(), soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    drop((lost, caller));
    let ended = server.node().start_receive(None).unwrap().wait(soon()).unwrap();
    assert!(matches!(ended, Ok(Outcome::Ended(session, _)) if session == request.session), "{ended:?}");
    assert_eq!(request.token.hand_on(to_third, &Call::default()), Err(SubmitError::CallerGone));
}

/// It has no layer that would say what it speaks.
#[test]
fn a_call_to_a_node_that_speaks_no_protocol_ends_by_name() {
    let (server, client) = (open(), Node::open(&NodeOptions::default()).unwrap());
    let at = server.node().listen(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap().unwrap();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| client.connect(&Address::Tcp(at), soon()).unwrap());
        let to_client = server.node().accept(soon()).unwrap();
        connecting.join().unwrap();
        let called = server.call(to_client, &Call::default(), Deadline::NEVER).unwrap();
        assert_eq!(called.wait(soon()).unwrap(), Err(OpError::Status(Status::UnknownProtocol as u16)));
    });
}
