//! Calls between two nodes over each wire: answered, cancelled, too late, forged.

mod rig;
mod turner;

use std::time::Duration;

use byway_fabric::node::{Deadline, Node, NodeError, OpError, Outcome, Rights, Session, SubmitError, WaitError};
use byway_fabric::wire::{FLAG_TOKEN, Header, Kind};
use byway_reactor::IoChoice;
use byway_rpc::limits::PROGRAM_CALLS;
use byway_rpc::message::{ReplyBody, Status, Token};
use byway_rpc::node::{Call, Reply, Rpc};
use rig::{Wire, answer_plain, connect, open, reply, soon};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use turner::Turner;
use zerocopy::{FromZeros, IntoBytes};

/// Modules with a test for each case, over a wire and on a backend.
macro_rules! over_each_wire {
    ([$($module:ident = $wire:ident $io:ident),* $(,)?], $cases:tt) => {
        $(over_each_wire!(@ $module, $wire, $io, $cases);)*
    };
    (@ $module:ident, $wire:ident, $io:ident, [$($case:ident),* $(,)?]) => {
        mod $module {
            $(#[test]
            fn $case() {
                let (io, wire) = (byway_reactor::IoChoice::$io, super::Wire::$wire);
                if super::rig::is_there(io, &[wire]) {
                    super::$case(super::Pair::new(io, wire));
                }
            })*
        }
    };
}

over_each_wire!(
    [
        tcp_epoll = Tcp Epoll,
        unix_epoll = Unix Epoll,
        shm_epoll = Shm Epoll,
        tcp_uring = Tcp Uring,
        unix_uring = Unix Uring,
        shm_uring = Shm Uring,
    ],
    [
        a_server_pulls_and_pushes_before_it_answers,
        a_server_calls_its_client_before_it_answers,
        late_repeated_and_forged_answers_are_counted_and_harmless,
        calls_end_at_their_deadline_by_cancelling_and_with_their_session,
        a_call_that_is_given_up_before_it_was_sent_is_never_sent,
        a_call_is_answered_while_messages_crowd_its_session,
        a_poll_loop_that_looks_for_calls_comes_to_rest,
        threads_share_the_calls_and_each_is_answered_once,
    ]
);

over_each_wire!(
    [rdma_epoll = Rdma Epoll, rdma_uring = Rdma Uring],
    [a_server_pulls_and_pushes_before_it_answers, a_server_calls_its_client_before_it_answers]
);

/// Caller and server, and their session as each of them calls it.
struct Pair {
    caller: Rpc,
    server: Rpc,
    to_server: Session,
    to_caller: Session,
}

impl Pair {
    fn new(io: IoChoice, wire: Wire) -> Self {
        let (caller, server) = (open(io), open(io));
        let folder = tempfile::tempdir().unwrap();
        let (to_caller, to_server) = connect(&server, &caller, &wire.address(folder.path(), "server"));
        Self { caller, server, to_server, to_caller }
    }
}

/// A server recalls what its client holds before it lets the client open it again.
fn a_server_calls_its_client_before_it_answers(pair: Pair) {
    const OPEN: u16 = 1;
    const RECALL: u16 = 2;
    const BYTES: usize = 100_000;
    let Pair { caller, server, to_server, to_caller } = pair;
    let memory = server.node().register(BYTES).unwrap();
    memory.write(0, &[7; BYTES]).unwrap();
    let window = server.node().open_window(to_caller, &memory, 0..BYTES, Rights::GET).unwrap();
    let opening = caller.call(to_server, &Call { method: OPEN, ..Call::default() }, soon()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let recall = caller.next_call(soon()).unwrap();
            assert_eq!((recall.method, recall.session, recall.delegated), (RECALL, to_server, false));
            let into = caller.node().register(BYTES).unwrap();
            let got = caller.node().get(recall.session, &recall.windows[0], 0, &[into.segment(0..BYTES)]).unwrap();
            assert_eq!(got.wait(soon()).unwrap(), Ok(Outcome::Done));
            let mut bytes = vec![0; BYTES];
            into.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 7));
            recall.token.reply(0, &recall.arguments, b"given back").unwrap();
        });
        let request = server.next_call(soon()).unwrap();
        assert_eq!((request.method, request.session), (OPEN, to_caller));
        let recall = Call { method: RECALL, arguments: b"lease 1", windows: &[window.descriptor()], ..Call::default() };
        let recalled = reply(&server.call(to_caller, &recall, soon()).unwrap());
        assert_eq!((&recalled.result[..], &recalled.payload[..]), (&b"lease 1"[..], &b"given back"[..]));
        request.token.reply(0, b"opened", &[]).unwrap();
    });
    let _turners = [Turner::of(server.node()), Turner::of(caller.node())];
    assert_eq!(reply(&opening).result, b"opened");
    assert_eq!(window.close().unwrap().wait(soon()).unwrap(), Ok(Outcome::Done));
}

fn a_server_pulls_and_pushes_before_it_answers(pair: Pair) {
    let Pair { caller, server, to_server, .. } = pair;
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

fn late_repeated_and_forged_answers_are_counted_and_harmless(pair: Pair) {
    let Pair { caller, server, to_server, .. } = pair;
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

fn calls_end_at_their_deadline_by_cancelling_and_with_their_session(pair: Pair) {
    let Pair { caller, server, to_server, .. } = pair;
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
fn a_call_that_is_given_up_before_it_was_sent_is_never_sent(pair: Pair) {
    let Pair { caller, server, to_server, .. } = pair;
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

/// Answers take no credit, so they do not stand behind what waits for it.
fn a_call_is_answered_while_messages_crowd_its_session(pair: Pair) {
    let Pair { caller, server, to_server, .. } = pair;
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

fn a_poll_loop_that_looks_for_calls_comes_to_rest(pair: Pair) {
    let Pair { caller, server, to_server, .. } = pair;
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

fn threads_share_the_calls_and_each_is_answered_once(pair: Pair) {
    const CALLS: u16 = 500;
    let Pair { caller, server, to_server, .. } = pair;
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
