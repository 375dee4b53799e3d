//! Calls between three nodes over mixed wires: answered, handed on, cancelled, too late, forged.

mod turner;

use std::time::Duration;

use byway_fabric::node::{
    Address, Deadline, Node, NodeError, NodeOptions, Op, OpError, Outcome, Rights, Session, SubmitError, WaitError,
};
use byway_fabric::wire::{FLAG_TOKEN, Header, Kind};
use byway_rpc::limits::PROGRAM_CALLS;
use byway_rpc::message::{ReplyBody, Status, Token};
use byway_rpc::node::{Call, Reply, Request, Rpc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use turner::Turner;
use zerocopy::{FromZeros, IntoBytes};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn open() -> Rpc {
    Rpc::open(&NodeOptions { frame_bytes: 16 << 20, ..NodeOptions::default() }).unwrap()
}

/// A session from `client` to `server`: as each of them calls it.
fn connect(server: &Rpc, client: &Rpc, address: &Address) -> (Session, Session) {
    let at = match (server.node().listen(address).unwrap(), address) {
        (Some(at), Address::Rdma(_)) => Address::Rdma(at),
        (Some(at), _) => Address::Tcp(at),
        (None, address) => address.clone(),
    };
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
        let connected = client.node().connect(&at, soon()).unwrap();
        (accepted.join().unwrap(), connected)
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wire {
    Tcp,
    Shm,
    /// Where `BYWAY_RDMA_ADDRESS` is an address of a device: `cargo xtask guest rdma` has one.
    Rdma,
}

/// Each test with the caller and the third node on either side of these.
macro_rules! over_each_mix {
    ($($name:ident),* $(,)?) => {
        over_each_mix!(@ tcp_and_shm, Tcp, Shm, $($name),*);
        over_each_mix!(@ shm_and_tcp, Shm, Tcp, $($name),*);
        over_each_mix!(@ rdma_and_shm, Rdma, Shm, $($name),*);
        over_each_mix!(@ tcp_and_rdma, Tcp, Rdma, $($name),*);
    };
    (@ $module:ident, $first:ident, $second:ident, $($name:ident),*) => {
        mod $module {
            $(#[test]
            fn $name() {
                let wires = [super::Wire::$first, super::Wire::$second];
                if wires.contains(&super::Wire::Rdma) && byway_skip::rdma_device().is_none() {
                    return byway_skip::skip_this(byway_skip::NO_RDMA);
                }
                super::$name(super::over(wires));
            })*
        }
    };
}

over_each_mix!(
    a_server_pulls_and_pushes_before_it_answers,
    a_call_is_handed_on_to_a_node_by_its_name,
    the_third_node_answers_the_caller_directly,
    without_a_session_of_their_own_the_server_passes_the_answer_on,
    who_has_handed_a_call_on_cannot_answer_it_too,
);

// A window of the caller's for either of two, which no device has (0023): the caller's session goes over another wire.
over_each_mix!(@ tcp_and_shm_for_one_of_two, Tcp, Shm, a_page_comes_from_whoever_is_the_first_and_from_nobody_else);
over_each_mix!(@ shm_and_tcp_for_one_of_two, Shm, Tcp, a_page_comes_from_whoever_is_the_first_and_from_nobody_else);
over_each_mix!(@ tcp_and_rdma_for_one_of_two, Tcp, Rdma, a_page_comes_from_whoever_is_the_first_and_from_nobody_else);

/// Caller, server and third node; the server's sessions with both, the caller's with the server.
struct Three {
    caller: Rpc,
    server: Rpc,
    third: Rpc,
    to_server: Session,
    to_third: Session,
    folder: tempfile::TempDir,
}

fn three() -> Three {
    over([Wire::Tcp, Wire::Shm])
}

/// The caller's session goes over the first, the third node's over the second.
fn over(wires: [Wire; 2]) -> Three {
    let (caller, server, third) = (open(), open(), open());
    let folder = tempfile::tempdir().unwrap();
    let at = |wire, name: &str| match wire {
        Wire::Tcp => Address::Tcp("127.0.0.1:0".parse().unwrap()),
        Wire::Shm => Address::Shared(folder.path().join(name)),
        Wire::Rdma => Address::Rdma((byway_skip::rdma_device().expect("looked for before"), 0).into()),
    };
    let (_, to_server) = connect(&server, &caller, &at(wires[0], "server"));
    let (_, to_third) = connect(&third, &server, &at(wires[1], "third"));
    Three { caller, server, third, to_server, to_third, folder }
}

fn reply(op: &Op) -> Reply {
    Reply::of(op.wait(soon()).expect("the call ends").expect("it went well")).unwrap()
}

fn a_server_pulls_and_pushes_before_it_answers(three: Three) {
    let Three { caller, server, to_server, .. } = three;
    let serving = std::thread::spawn(move || {
        let request = server.next_call(soon()).unwrap();
        assert_eq!((request.method, &request.arguments[..], &request.payload[..]), (7, &b"copy"[..], &b"more"[..]));
        let bytes = server.node().register(1 << 20).unwrap();
        let (from, to) = (&request.windows[0], &request.windows[1]);
        // Both halves at once, then back in the other order.
        let halves = [0..1 << 19, 1 << 19..1 << 20].map(|range| [bytes.segment(range)]);
        let get = |half: usize| server.node().get(request.session, from, (half << 19) as u64, &halves[half]).unwrap();
        for op in [get(1), get(0)] {
            assert_eq!(op.wait(soon()).unwrap(), Ok(Outcome::Done));
        }
        let put =
            |half: usize| server.node().put(request.session, &halves[half], to, ((1 - half) << 19) as u64).unwrap();
        for op in [put(0), put(1)] {
            assert_eq!(op.wait(soon()).unwrap(), Ok(Outcome::Done));
        }
        request.token.reply(0, b"done", &[]).unwrap();
        drop(server.next_call(Deadline::after(Duration::from_millis(1))));
    });
    let mut memory = caller.node().register(2 << 20).unwrap();
    let bytes = memory.bytes_mut().unwrap();
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let source = caller.node().open_window(to_server, &memory, 0..1 << 20, Rights::GET).unwrap();
    let target = caller.node().open_window(to_server, &memory, 1 << 20..2 << 20, Rights::PUT).unwrap();
    let windows = [source.descriptor(), target.descriptor()];
    let call = Call { method: 7, arguments: b"copy", windows: &windows, payload: b"more", ..Call::default() };
    assert_eq!(reply(&caller.call(to_server, &call, soon()).unwrap()).result, b"done");
    for window in [source, target] {
        assert_eq!(window.close().unwrap().wait(soon()).unwrap(), Ok(Outcome::Done));
    }
    let bytes = memory.bytes().unwrap();
    let half = 1 << 19;
    assert!((0..half).all(|at| bytes[2 * half + at] == ((half + at) % 251) as u8));
    assert!((0..half).all(|at| bytes[3 * half + at] == (at % 251) as u8));
    serving.join().unwrap();
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
fn a_call_is_handed_on_to_a_node_by_its_name(three: Three) {
    let Three { caller, server, third, to_server, to_third, folder } = &three;
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
    let (_, second) = connect(third, server, &Address::Unix(folder.path().join("second")));
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
fn a_page_comes_from_whoever_is_the_first_and_from_nobody_else(three: Three) {
    let address = Address::Unix(three.folder.path().join("direct"));
    let (to_caller, direct) = connect(&three.third, &three.caller, &address);
    let Three { caller, server, third, to_server, to_third, .. } = three;
    caller.node().send(direct, b"hello", &[]).unwrap();
    third.node().receive(soon()).unwrap();
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
    let address = Address::Unix(three.folder.path().join("direct"));
    let (_, direct) = connect(&three.third, &three.caller, &address);
    let Three { caller, server, third, to_server, to_third, .. } = three;
    // The third must know the caller by name: it hears that before anything the caller sends after.
    caller.node().send(direct, b"hello", &[]).unwrap();
    third.node().receive(soon()).unwrap();
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
#[test]
fn a_call_that_comes_back_is_carried_on_by_its_continuation() {
    const LOOK_UP: u16 = 1;
    const FETCH: u16 = 2;
    const NOT_HERE: u16 = 3;
    let Three { caller, server, third, to_server, to_third, .. } = three();
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

#[test]
fn a_call_that_came_back_is_answered_once() {
    let Three { caller, server, third, to_server, to_third, .. } = three();
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
    answer_plain(&server);
    probe.wait(soon()).unwrap().unwrap();
    drop(caller_turned);
    let counters = server.counters().unwrap().protocol;
    assert_eq!((counters.late, counters.relayed, counters.forged), (0, 0, 0));
    assert_eq!(caller.counters().unwrap().protocol.late, 0);
}

/// Four nodes in a row, each with a session with the next alone: an answer goes all the way back.
#[test]
fn an_answer_is_passed_on_by_all_who_handed_the_call_on() {
    let three = three();
    let last = open();
    let (_, to_last) = connect(&last, &three.third, &Address::Unix(three.folder.path().join("last")));
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

fn answer_plain(rpc: &Rpc) {
    rpc.next_call(soon()).unwrap().token.reply(0, &[], &[]).unwrap();
}

#[test]
fn late_repeated_and_forged_answers_are_counted_and_harmless() {
    let Three { caller, server, to_server, .. } = three();
    let turner = Turner::of(caller.node());
    let first = caller.call(to_server, &Call::default(), soon()).unwrap();
    let second = caller.call(to_server, &Call::default(), soon()).unwrap();
    let (one, two) = (server.next_call(soon()).unwrap(), server.next_call(soon()).unwrap());
    let session = one.session;
    let send =
        |header: Header, payload: &[u8]| server.node().layer_send(session, header, payload.to_vec(), None).unwrap();
    // The caller's first two calls, by what they are called on the wire.
    let answer = |index: u64, flags: u8| {
        let mut body = ReplyBody::new_zeroed();
        body.call.set(1 << 32 | index);
        let mut header = Header::with_body(Kind::Reply, &body);
        header.flags = flags;
        header
    };
    // A guess at the secret of the second; then the first answer to the first, and another.
    let mut forged = Token::new_zeroed();
    (forged.caller, forged.secret) = (caller.id(), 1.into());
    (forged.call, forged.session) = ((1 << 32 | 1).into(), to_server.to_u64().into());
    send(answer(1, FLAG_TOKEN), forged.as_bytes());
    send(answer(0, 0), &[]);
    one.token.reply(0, b"again", &[]).unwrap();
    assert_eq!(reply(&first).result, b"", "the first answer is the answer");
    two.token.reply(9, b"no", &[]).unwrap();
    assert_eq!(second.wait(soon()).unwrap(), Err(OpError::Status(9)));
    drop(turner);
    let counters = caller.counters().unwrap();
    assert_eq!((counters.protocol.late, counters.protocol.forged, counters.calls), (1, 1, 0));
}

#[test]
fn calls_end_at_their_deadline_by_cancelling_and_with_their_session() {
    let Three { caller, server, to_server, .. } = three();
    let late = caller.call(to_server, &Call::default(), Duration::from_millis(20)).unwrap();
    assert_eq!(late.wait(soon()).unwrap(), Err(OpError::Deadline));
    let cancelled = caller.call(to_server, &Call { arguments: b"x", ..Call::default() }, soon()).unwrap();
    let taken = caller.call(to_server, &Call { arguments: b"y", ..Call::default() }, soon()).unwrap();
    cancelled.cancel().unwrap();
    assert_eq!(cancelled.wait(soon()).unwrap(), Err(OpError::Cancelled));
    // The others are gone before anybody has taken them: what was sent before a message has come with it.
    caller.node().send(to_server, b"behind them", &[]).unwrap();
    server.node().receive(soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    assert_eq!(request.arguments, b"y");
    assert!(!request.token.is_cancelled());
    taken.cancel().unwrap();
    let probe = caller.call(to_server, &Call { arguments: b"z", ..Call::default() }, soon()).unwrap();
    caller.node().send(to_server, b"behind it", &[]).unwrap();
    server.node().receive(soon()).unwrap();
    let next = server.next_call(soon()).unwrap();
    assert!(request.token.is_cancelled(), "the server can see it");
    request.token.reply(0, &[], &[]).unwrap();
    drop(next.token);
    assert_eq!(probe.wait(soon()).unwrap(), Err(OpError::Status(Status::Abandoned as u16)));
    // The answer to the call that was taken and cancelled is not late: its caller waited for it to free the call.
    assert_eq!(caller.counters().unwrap().protocol.late, 0);
    let nothing = server.next_call(Deadline::now());
    assert!(matches!(nothing, Err(NodeError::Wait(WaitError::Deadline))), "{nothing:?}");
    let orphan = caller.call(to_server, &Call::default(), soon()).unwrap();
    server.node().close(next.session).unwrap();
    let _server = Turner::of(server.node());
    assert!(matches!(orphan.wait(soon()).unwrap(), Err(OpError::Ended(_))));
}

/// Its turn would come all the same, and the server would serve it.
#[test]
fn a_call_that_is_given_up_before_it_was_sent_is_never_sent() {
    let Three { caller, server, to_server, .. } = three();
    let call = |arguments| Call { arguments, ..Call::default() };
    let _caller = Turner::of(caller.node());
    let known = caller.call(to_server, &call(b"known"), soon()).unwrap();
    answer_plain(&server);
    {
        let _server = Turner::of(server.node());
        reply(&known);
    }
    // The server takes no call, so the credit runs out.
    let sent: Vec<_> = (0..PROGRAM_CALLS).map(|_| caller.call(to_server, &call(b"sent"), soon()).unwrap()).collect();
    let cancelled = caller.call(to_server, &call(b"cancelled"), soon()).unwrap();
    let late = caller.call(to_server, &call(b"late"), Duration::from_millis(20)).unwrap();
    let last = caller.call(to_server, &call(b"last"), soon()).unwrap();
    cancelled.cancel().unwrap();
    assert_eq!(cancelled.wait(soon()).unwrap(), Err(OpError::Cancelled));
    assert_eq!(late.wait(soon()).unwrap(), Err(OpError::Deadline));
    for op in &sent {
        let request = server.next_call(soon()).unwrap();
        assert_eq!(request.arguments, b"sent");
        request.token.reply(0, &[], &[]).unwrap();
        let _server = Turner::of(server.node());
        reply(op);
    }
    let request = server.next_call(soon()).unwrap();
    assert_eq!(request.arguments, b"last");
    request.token.reply(0, &[], &[]).unwrap();
    let _server = Turner::of(server.node());
    reply(&last);
}

fn who_has_handed_a_call_on_cannot_answer_it_too(three: Three) {
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
#[test]
fn a_call_that_was_delegated_is_answered_when_the_third_node_goes() {
    let Three { caller, server, third, to_server, to_third, .. } = three();
    let _caller = Turner::of(caller.node());
    let op = caller.call(to_server, &Call::default(), Deadline::NEVER).unwrap();
    let request = server.next_call(soon()).unwrap();
    request.token.hand_on(to_third, &Call { method: 2, ..Call::default() }).unwrap();
    drop(third);
    let _server = Turner::of(server.node());
    assert_eq!(op.wait(soon()).unwrap(), Err(OpError::Status(Status::DelegateLost as u16)));
}

/// Answers take no credit, so they do not stand behind what waits for it.
#[test]
fn a_call_is_answered_while_messages_crowd_its_session() {
    let Three { caller, server, to_server, .. } = three();
    let turner = Turner::of(caller.node());
    let op = caller.call(to_server, &Call { arguments: b"x", ..Call::default() }, soon()).unwrap();
    let request = server.next_call(soon()).unwrap();
    let send = || server.node().send(request.session, b"not taken", &[]);
    let sent: Vec<_> = std::iter::repeat_with(send).map_while(Result::ok).collect();
    assert!(matches!(send(), Err(SubmitError::Busy)), "after {} messages", sent.len());
    request.token.reply(0, b"answer", &[]).unwrap();
    assert_eq!(reply(&op).result, b"answer");
    // Nor do they make room for what is counted.
    assert!(matches!(server.node().send(request.session, &[], &[]), Err(SubmitError::Busy)));
    drop(turner);
}

/// Whether the node's descriptor is readable now.
fn is_readable(node: &Node) -> bool {
    let descriptor = node.descriptor().unwrap();
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn a_poll_loop_that_looks_for_calls_comes_to_rest() {
    let Three { caller, server, to_server, .. } = three();
    let look = || {
        server.node().progress().unwrap();
        while let Ok(request) = server.next_call(Deadline::now()) {
            request.token.reply(0, &request.arguments, &[]).unwrap();
        }
    };
    let call = caller.call(to_server, &Call { arguments: b"x", ..Call::default() }, soon()).unwrap();
    let answer = loop {
        look();
        match call.test() {
            Ok(answer) => break Reply::of(answer.unwrap()).unwrap(),
            Err(WaitError::Deadline) => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(answer.result, b"x");
    // It may be readable for what came with the last call, but not because somebody looked.
    let rests = (0..1000).any(|_| {
        look();
        !is_readable(server.node())
    });
    assert!(rests, "each look makes the next one due");
}

#[test]
fn threads_share_the_calls_and_each_is_answered_once() {
    const CALLS: u16 = 500;
    let Three { caller, server, to_server, .. } = three();
    let group = caller.node().group(usize::from(CALLS)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Ok(request) = server.next_call(soon()) {
                    let last = request.method == CALLS;
                    request.token.reply(0, &request.arguments, &[]).unwrap();
                    if last {
                        return;
                    }
                }
            });
        }
        let mut seen = vec![0; usize::from(CALLS)];
        let take = |seen: &mut Vec<u32>| {
            let completion = group.wait(soon()).unwrap();
            let reply = Reply::of(completion.result.unwrap()).unwrap();
            assert_eq!(reply.result, (completion.context as u16).to_le_bytes());
            seen[completion.context as usize] += 1;
        };
        for method in 0..CALLS {
            let arguments = method.to_le_bytes();
            let call = Call { method, arguments: &arguments, ..Call::default() };
            let op = loop {
                match caller.call(to_server, &call, soon()) {
                    Ok(op) => break op,
                    Err(_) => take(&mut seen),
                }
            };
            group.add(op, u64::from(method)).unwrap();
        }
        while seen.iter().sum::<u32>() < u32::from(CALLS) {
            take(&mut seen);
        }
        assert!(seen.iter().all(|count| *count == 1));
        for _ in 0..4 {
            reply(&caller.call(to_server, &Call { method: CALLS, ..Call::default() }, soon()).unwrap());
        }
    });
}
