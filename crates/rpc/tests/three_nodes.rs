//! Calls that are delegated between three nodes, over each mix of wires: answered directly or by the delegating node.

mod rig;
mod turner;

use std::time::Duration;

use byway_fabric::node::{Deadline, OpError, Outcome, Rights, Session, SubmitError};
use byway_reactor::IoChoice;
use byway_rpc::message::Status;
use byway_rpc::node::{Call, Request, Rpc};
use rig::{Wire, answer_plain, connect, open, reply, soon};
use turner::Turner;

/// Modules with a test for each case, over a mix of wires and on a backend: the caller's session goes over the first wire, that of
/// the server with the third node over the second. `each_kind` stands for the mixes of all wires that need no device.
macro_rules! over_each_mix {
    ([each_kind, $($more:tt)*], $cases:tt) => {
        over_each_mix!([
            tcp_and_shm_epoll = Tcp Shm Epoll,
            shm_and_unix_epoll = Shm Unix Epoll,
            unix_and_tcp_epoll = Unix Tcp Epoll,
            tcp_and_shm_uring = Tcp Shm Uring,
            shm_and_unix_uring = Shm Unix Uring,
            unix_and_tcp_uring = Unix Tcp Uring,
            $($more)*
        ], $cases);
    };
    ([$($module:ident = $first:ident $second:ident $io:ident),* $(,)?], $cases:tt) => {
        $(over_each_mix!(@ $module, [$first, $second], $io, $cases);)*
    };
    (@ $module:ident, [$first:ident, $second:ident], $io:ident, [$($case:ident),* $(,)?]) => {
        mod $module {
            $(#[test]
            fn $case() {
                let (io, wires) = (byway_reactor::IoChoice::$io, [crate::Wire::$first, crate::Wire::$second]);
                if crate::rig::is_there(io, &wires) {
                    crate::$case(crate::Three::new(io, wires));
                }
            })*
        }
    };
}

over_each_mix!(
    [
        each_kind,
        rdma_and_shm_epoll = Rdma Shm Epoll,
        tcp_and_rdma_epoll = Tcp Rdma Epoll,
        rdma_and_tcp_uring = Rdma Tcp Uring,
        shm_and_rdma_uring = Shm Rdma Uring,
    ],
    [
        a_call_is_delegated_to_a_node_by_its_name,
        the_third_node_answers_the_caller_directly,
        without_a_session_of_their_own_the_server_passes_the_answer_on,
        a_node_that_has_delegated_a_call_cannot_answer_it,
    ]
);

/// A window of the caller's for one of two sessions, which no device has (0023): the caller's session is not over RDMA.
mod for_one_of_two {
    over_each_mix!(
        [each_kind, tcp_and_rdma_epoll = Tcp Rdma Epoll, shm_and_rdma_uring = Shm Rdma Uring],
        [a_page_comes_from_the_first_session_that_puts_it_and_from_no_other]
    );
}

mod comes_back {
    over_each_mix!(
        [
            tcp_and_shm_epoll = Tcp Shm Epoll,
            shm_and_unix_epoll = Shm Unix Epoll,
            unix_and_tcp_uring = Unix Tcp Uring,
        ],
        [
            a_call_that_comes_back_is_carried_on_by_its_continuation,
            a_call_that_came_back_is_answered_once,
            an_answer_is_passed_on_by_each_node_that_delegated_the_call,
            a_delegated_call_is_answered_when_the_third_node_ends,
        ]
    );
}

/// Caller, server and third node; the server's session with the third node, the caller's with the server.
struct Three {
    caller: Rpc,
    server: Rpc,
    third: Rpc,
    to_server: Session,
    to_third: Session,
    io: IoChoice,
    /// Of the caller's session.
    wire: Wire,
    folder: tempfile::TempDir,
}

impl Three {
    fn new(io: IoChoice, wires: [Wire; 2]) -> Self {
        let (caller, server, third) = (open(io), open(io), open(io));
        let folder = tempfile::tempdir().unwrap();
        let (_, to_server) = connect(&server, &caller, &wires[0].address(folder.path(), "server"));
        let (_, to_third) = connect(&third, &server, &wires[1].address(folder.path(), "third"));
        Self { caller, server, third, to_server, to_third, io, wire: wires[0], folder }
    }

    /// A session of the caller with the third node: as the third node and the caller call it. The third node knows the caller's
    /// name, which arrives before the caller's first message.
    fn connect_directly(&self) -> (Session, Session) {
        let (to_caller, direct) = connect(&self.third, &self.caller, &self.wire.address(self.folder.path(), "direct"));
        self.caller.node().send(direct, b"hello", &[]).unwrap();
        self.third.node().receive(soon()).unwrap();
        (to_caller, direct)
    }
}

/// The third node answers `n` calls with what it was given.
fn answer(third: &Rpc, n: usize) {
    for _ in 0..n {
        let request = third.next_call(soon()).unwrap();
        assert!(request.delegated);
        request.token.reply(0, &request.arguments, &request.payload).unwrap();
    }
}

/// A directory that knows nodes reaches them over whichever session there is.
fn a_call_is_delegated_to_a_node_by_its_name(three: Three) {
    let Three { caller, server, third, to_server, to_third, folder, .. } = &three;
    let until = |what: &str, look: &dyn Fn() -> bool| {
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while !look() {
            assert!(std::time::Instant::now() < deadline, "it never comes to this: {what}");
            for rpc in [caller, server, third] {
                rpc.node().progress().unwrap();
            }
        }
    };
    // Each says its name before anything else.
    let heard = |name: &Rpc| {
        until("a name", &|| server.session_with(&name.id()).is_some());
        server.session_with(&name.id()).unwrap()
    };
    assert_eq!(heard(third), *to_third);
    let to_caller = heard(caller);
    assert_eq!((server.node_of(to_caller), server.node_of(*to_third)), (Some(caller.id()), Some(third.id())));
    assert_eq!((server.session_with(&server.id()), server.session_with(&[7; 16])), (None, None));
    // A second session changes nothing, until the first has ended.
    let (_, second) = connect(third, server, &Wire::Unix.address(folder.path(), "second"));
    server.node().send(second, b"heard?", &[]).unwrap();
    third.node().receive(soon()).unwrap();
    third.node().send(third.session_with(&server.id()).unwrap(), b"the first", &[]).unwrap();
    assert_eq!(server.node().receive(soon()).unwrap().session, *to_third);
    until("the second session's name", &|| server.node_of(second).is_some());
    assert_eq!(server.session_with(&third.id()), Some(*to_third));
    server.node().close(*to_third).unwrap();
    until("the first session's end", &|| server.node_of(*to_third).is_none());
    assert_eq!(server.session_with(&third.id()), Some(second));
    std::thread::scope(|scope| {
        scope.spawn(|| answer(third, 1));
        scope.spawn(|| {
            let request = server.next_call(soon()).unwrap();
            let by_name = server.session_with(&third.id()).unwrap();
            request
                .token
                .delegate(by_name, &Call { method: 5, arguments: &request.arguments, ..Call::default() })
                .unwrap();
        });
        // Which passes the answer on.
        let _turner = Turner::of(server.node());
        let call = Call { method: 5, arguments: b"by name", ..Call::default() };
        assert_eq!(reply(&caller.call(*to_server, &call, soon()).unwrap()).result, b"by name");
    });
}

/// A directory hands a fetch on, and also fetches itself, which it should not: the page is the first one's (0023).
fn a_page_comes_from_the_first_session_that_puts_it_and_from_no_other(three: Three) {
    let (to_caller, direct) = three.connect_directly();
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let memory = caller.node().register(4096).unwrap();
    let sessions = [to_server, direct];
    let window = caller.node().open_window_for_one_of(&sessions, &memory, 0..4096, Rights::PUT).unwrap();
    let turner = Turner::of(caller.node());
    let windows = [window.descriptor()];
    let call = Call { method: 1, arguments: b"page", windows: &windows, ..Call::default() };
    let op = caller.call(to_server, &call, soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    let (page, from) = (request.windows[0], request.session);
    request
        .token
        .delegate(to_third, &Call { method: 2, arguments: b"page", windows: &[page], ..Call::default() })
        .map_err(|error| error.1)
        .unwrap();
    let answered = third.next_call(soon()).unwrap();
    let frame = third.node().register(4096).unwrap();
    frame.write(0, &[3; 4096]).unwrap();
    let put = third.node().put(to_caller, &[frame.segment(0..4096)], &answered.windows[0], 0).unwrap();
    assert_eq!(put.wait(soon()).unwrap(), Ok(Outcome::Done));
    answered.token.reply(0, b"here it is", &[]).unwrap();
    let other = server.node().register(4096).unwrap();
    let late = server.node().put(from, &[other.segment(0..4096)], &page, 0).unwrap();
    let refused = OpError::Refused(byway_fabric::windows::WindowError::Key);
    assert_eq!(late.wait(soon()).unwrap(), Err(refused));
    // The answer may be on its way still.
    let third = Turner::of(third.node());
    assert_eq!(reply(&op).result, b"here it is");
    drop((third, turner));
    let mut bytes = [0; 4096];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 4096]);
    let counters = caller.node().counters().unwrap();
    assert_eq!((counters.windows, counters.windows_refused), (0, 1));
}

fn the_third_node_answers_the_caller_directly(three: Three) {
    let (_, direct) = three.connect_directly();
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let _caller = Turner::of(caller.node());
    let op = caller.call(to_server, &Call { method: 1, arguments: b"who?", ..Call::default() }, soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    let relayed = request.token.delegate(
        to_third,
        &Call { method: 2, arguments: b"from the server", payload: b"and bytes", ..Call::default() },
    );
    relayed.map_err(|error| error.1).unwrap();
    answer(&third, 1);
    let reply = reply(&op);
    assert_eq!((reply.session, &reply.result[..]), (direct, &b"from the server"[..]), "not by the server");
    assert_eq!(reply.payload, b"and bytes");
    assert_eq!(server.counters().unwrap().protocol.relayed, 0);
}

/// A directory whose entry is stale: it tries one holder after the other, and keeps nothing of the call in between (0023).
fn a_call_that_comes_back_is_carried_on_by_its_continuation(three: Three) {
    const LOOK_UP: u16 = 1;
    const FETCH: u16 = 2;
    const NOT_HERE: u16 = 3;
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let _caller = Turner::of(caller.node());
    // Two calls at a time, so that whose continuation it is matters.
    let names: [&[u8]; 2] = [b"page one", b"page two"];
    let call = |name| Call { method: LOOK_UP, arguments: name, ..Call::default() };
    let ops = names.map(|name| caller.call(to_server, &call(name), soon()).unwrap());
    for _ in names {
        let Request { method, arguments, delegated, token, .. } = server.next_call(soon()).unwrap();
        assert_eq!((method, delegated), (LOOK_UP, false));
        // What is left to be tried, in the directory's own words.
        let continuation = [&b"tried 1 of "[..], &arguments].concat();
        token
            .delegate(
                to_third,
                &Call { method: FETCH, arguments: &arguments, payload: &continuation, ..Call::default() },
            )
            .map_err(|error| error.1)
            .unwrap();
    }
    for _ in names {
        let Request { method, session, arguments, payload, token, .. } = third.next_call(soon()).unwrap();
        assert_eq!(method, FETCH);
        token
            .delegate(session, &Call { method: NOT_HERE, arguments: &arguments, payload: &payload, ..Call::default() })
            .map_err(|error| error.1)
            .unwrap();
    }
    for _ in names {
        let Request { method, arguments, payload, delegated, token, .. } = server.next_call(soon()).unwrap();
        assert_eq!((method, delegated), (NOT_HERE, true));
        assert_eq!(payload, [&b"tried 1 of "[..], &arguments].concat(), "what the directory said");
        token.reply(0, &arguments, &payload).unwrap();
    }
    let _server = Turner::of(server.node());
    for (op, name) in ops.iter().zip(names) {
        let reply = reply(op);
        assert_eq!((reply.session, &reply.result[..]), (to_server, name));
        assert_eq!(reply.payload, [b"tried 1 of ", name].concat());
    }
    let (server, caller) = (server.counters().unwrap(), caller.counters().unwrap());
    assert_eq!((server.protocol.delegated, server.protocol.relayed), (2, 0));
    assert_eq!((caller.protocol.late, caller.calls), (0, 0));
}

fn a_call_that_came_back_is_answered_once(three: Three) {
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let caller_turned = Turner::of(caller.node());
    let op = caller.call(to_server, &Call::default(), soon()).unwrap();
    let first = server.next_call(soon()).unwrap();
    first
        .token
        .delegate(to_third, &Call { method: 1, arguments: &[], payload: b"go on", ..Call::default() })
        .map_err(|error| error.1)
        .unwrap();
    let Request { session: back, payload, token, .. } = third.next_call(soon()).unwrap();
    token
        .delegate(back, &Call { method: 2, arguments: &[], payload: &payload, ..Call::default() })
        .map_err(|error| error.1)
        .unwrap();
    server.next_call(soon()).unwrap().token.reply(0, b"by the directory", &[]).unwrap();
    assert_eq!(reply(&op).result, b"by the directory");
    let probe = third.call(back, &Call::default(), soon()).unwrap();
    // The probe is sent when the end of the send before it has been seen.
    let third_turned = Turner::of(third.node());
    answer_plain(&server);
    reply(&probe);
    drop((caller_turned, third_turned));
    let counters = server.counters().unwrap().protocol;
    assert_eq!((counters.late, counters.relayed, counters.forged), (0, 0, 0));
    assert_eq!(caller.counters().unwrap().protocol.late, 0);
}

/// Four nodes in a row, each with a session with the next alone: an answer goes all the way back.
fn an_answer_is_passed_on_by_each_node_that_delegated_the_call(three: Three) {
    let last = open(three.io);
    let (_, to_last) = connect(&last, &three.third, &Wire::Unix.address(three.folder.path(), "last"));
    let Three { caller, server, third, to_server, to_third, .. } = &three;
    let _caller = Turner::of(caller.node());
    let op = caller.call(*to_server, &Call { arguments: b"far", ..Call::default() }, soon()).unwrap();
    for (rpc, next) in [(server, *to_third), (third, to_last)] {
        let Request { arguments, token, .. } = rpc.next_call(soon()).unwrap();
        token
            .delegate(next, &Call { method: 1, arguments: &arguments, ..Call::default() })
            .map_err(|error| error.1)
            .unwrap();
    }
    answer(&last, 1);
    let _turners = [Turner::of(server.node()), Turner::of(third.node())];
    let reply = reply(&op);
    assert_eq!((reply.session, &reply.result[..]), (*to_server, &b"far"[..]));
}

fn without_a_session_of_their_own_the_server_passes_the_answer_on(three: Three) {
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let _caller = Turner::of(caller.node());
    let op = caller.call(to_server, &Call { arguments: b"1", ..Call::default() }, soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    request
        .token
        .delegate(to_third, &Call { method: 2, arguments: b"2", payload: &[5; 10_000], ..Call::default() })
        .map_err(|error| error.1)
        .unwrap();
    answer(&third, 1);
    let _server = Turner::of(server.node());
    let reply = reply(&op);
    assert_eq!((reply.session, &reply.result[..], reply.payload.len()), (to_server, &b"2"[..], 10_000));
    assert_eq!(server.counters().unwrap().protocol.relayed, 1);
}

fn a_node_that_has_delegated_a_call_cannot_answer_it(three: Three) {
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let _caller = Turner::of(caller.node());
    let op = caller.call(to_server, &Call::default(), soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    request.token.hand_on(to_third, &Call { method: 2, arguments: b"theirs", ..Call::default() }).unwrap();
    let again = Call { method: 2, arguments: b"again", ..Call::default() };
    assert_eq!(request.token.hand_on(to_third, &again), Err(SubmitError::Busy));
    assert_eq!(request.token.reply(0, b"ours", &[]), Err(SubmitError::Busy));
    answer(&third, 1);
    let _server = Turner::of(server.node());
    assert_eq!(reply(&op).result, b"theirs");
    assert_eq!((server.counters().unwrap().protocol.relayed, caller.counters().unwrap().protocol.late), (1, 0));
}

/// Its caller has no deadline, and the third node, which nobody drives, never takes the call.
fn a_delegated_call_is_answered_when_the_third_node_ends(three: Three) {
    let Three { caller, server, third, to_server, to_third, .. } = three;
    let _caller = Turner::of(caller.node());
    let op = caller.call(to_server, &Call::default(), Deadline::NEVER).unwrap();
    let request = server.next_call(soon()).unwrap();
    request.token.hand_on(to_third, &Call { method: 2, ..Call::default() }).unwrap();
    drop(third);
    let _server = Turner::of(server.node());
    assert_eq!(op.wait(soon()).unwrap(), Err(OpError::Status(Status::DelegateLost as u16)));
}
