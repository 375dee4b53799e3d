//! Messages, credit, cancelling, and the ends of sessions.

use std::time::Duration;

use byway_fabric::node::{Deadline, Node, NodeError, NodeOptions, OpError, Outcome, Rights, SubmitError, WaitError};

use crate::rig::{Rig, Turner, connect, done, end, soon, window_is_all};

crate::over_each_wire!(
    messages_come_whole_and_in_order,
    who_takes_nothing_is_sent_nothing_more,
    puts_and_flushes_wait_behind_a_put_that_waits_for_credit,
    what_waits_can_be_cancelled,
    the_end_of_a_session_is_told_once,
    an_own_poll_serves,
    probes_can_be_put_off_for_ever,
    thousand_connections_idle_at_no_cost,
);

crate::over_rdma!(
    messages_come_whole_and_in_order,
    who_takes_nothing_is_sent_nothing_more,
    puts_and_flushes_wait_behind_a_put_that_waits_for_credit,
    what_waits_can_be_cancelled,
    the_end_of_a_session_is_told_once,
    an_own_poll_serves,
    probes_can_be_put_off_for_ever,
    sessions_idle_at_no_cost,
);

fn messages_come_whole_and_in_order(rig: &Rig) {
    let pair = rig.pair();
    let server = std::thread::spawn(move || {
        for _ in 0..300 {
            let message = pair.server.receive(soon()).unwrap();
            assert_eq!(message.session, pair.to_client);
            pair.server.send(pair.to_client, &message.header, &message.payload).unwrap();
        }
        // Until the client has them all.
        assert!(pair.server.receive_from(pair.to_client, soon()).is_err());
    });
    let sizes = [0, 1, 100, 4096, 16 << 10];
    for number in 0..300usize {
        let header = vec![number as u8; number % 65];
        let payload = vec![number as u8; sizes[number % sizes.len()]];
        done(&pair.client.send(pair.to_server, &header, &payload).unwrap());
        let answer = pair.client.receive_from(pair.to_server, soon()).unwrap();
        assert!(answer.header == header && answer.payload == payload, "message {number}");
    }
    assert!(matches!(pair.client.send(pair.to_server, &[0; 65], &[]), Err(SubmitError::TooLong)));
    assert!(matches!(pair.client.send(pair.to_server, &[], &[0; (16 << 10) + 1]), Err(SubmitError::TooLong)));
    pair.client.close(pair.to_server).unwrap();
    let _turner = Turner::of(&pair.client);
    server.join().unwrap();
}

fn who_takes_nothing_is_sent_nothing_more(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { messages: 4, ..rig.options() });
    let turner = Turner::of(&pair.server);
    let sent: Vec<_> = (0..4u8).map(|n| pair.client.send(pair.to_server, &[n], &[]).unwrap()).collect();
    sent.iter().for_each(done);
    let waiting: Vec<_> = (4..68u8).map(|n| pair.client.send(pair.to_server, &[n], &[n; 1000]).unwrap()).collect();
    assert!(matches!(pair.client.send(pair.to_server, &[], &[]), Err(SubmitError::Busy)));
    for op in &waiting {
        assert_eq!(op.test(), Err(WaitError::Deadline), "without credit nothing is sent");
    }
    drop(turner);
    std::thread::scope(|scope| {
        scope.spawn(|| waiting.iter().for_each(done));
        for n in 0..68u8 {
            assert_eq!(pair.server.receive(soon()).unwrap().header, [n]);
        }
    });
    done(&pair.client.send(pair.to_server, &[], &[]).unwrap());
}

/// A put that waits for credit has begun: what begins later comes later.
fn puts_and_flushes_wait_behind_a_put_that_waits_for_credit(rig: &Rig) {
    for cancels in [false, true] {
        let pair = rig.pair_of(&NodeOptions { messages: 1, ..rig.options() });
        let turner = Turner::of(&pair.server);
        let (memory, window) = pair.open(8192, Rights::BOTH);
        let mine = pair.client.register(3 * 8192).unwrap();
        mine.write(0, &[1; 8192]).unwrap();
        mine.write(8192, &[2; 8192]).unwrap();
        let remote = window.descriptor();
        done(&pair.client.send(pair.to_server, b"the one credit", &[]).unwrap());
        let told = pair.client.put_with_message(pair.to_server, &[mine.segment(0..8192)], &remote, 0, b"put");
        let told = told.unwrap();
        let flush = pair.client.flush(pair.to_server).unwrap();
        let put = pair.client.put(pair.to_server, &[mine.segment(8192..2 * 8192)], &remote, 0).unwrap();
        let all = pair.client.flush(pair.to_server).unwrap();
        // A get waits for nobody's program.
        done(&pair.client.get(pair.to_server, &remote, 0, &[mine.segment(2 * 8192..3 * 8192)]).unwrap());
        for op in [&told, &flush, &put, &all] {
            assert_eq!(op.test(), Err(WaitError::Deadline));
        }
        if cancels {
            told.cancel().unwrap();
            assert_eq!(end(&told), Err(OpError::Cancelled));
        } else {
            drop(turner);
            assert_eq!(pair.server.receive(soon()).unwrap().header, b"the one credit");
        }
        let turner = Turner::of(&pair.server);
        [&flush, &put, &all].into_iter().for_each(done);
        if !cancels {
            done(&told);
        }
        drop(turner);
        window_is_all(&memory, 2);
        pair.close(window);
    }
}

fn what_waits_can_be_cancelled(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { messages: 1, ..rig.options() });
    let _turner = Turner::of(&pair.server);
    done(&pair.client.send(pair.to_server, b"first", &[]).unwrap());
    let waiting = pair.client.send(pair.to_server, b"second", &[]).unwrap();
    let last = pair.client.send(pair.to_server, b"third", &[]).unwrap();
    let receive = pair.client.start_receive(None).unwrap();
    let from = pair.client.start_receive(Some(pair.to_server)).unwrap();
    let accept = pair.client.start_accept().unwrap();
    for op in [&waiting, &receive, &from, &accept] {
        op.cancel().unwrap();
        assert_eq!(end(op), Err(OpError::Cancelled));
        op.cancel().unwrap();
        assert_eq!(op.test(), Err(WaitError::Taken), "once");
    }
    assert_eq!(pair.server.receive(soon()).unwrap().header, b"first");
    done(&last);
    assert_eq!(pair.server.receive(soon()).unwrap().header, b"third");
    assert_eq!(pair.client.counters().unwrap().ops, 0);
}

fn the_end_of_a_session_is_told_once(rig: &Rig) {
    let pair = rig.pair();
    done(&pair.client.send(pair.to_server, b"last words", &[]).unwrap());
    let waiting = pair.client.start_receive(Some(pair.to_server)).unwrap();
    pair.client.close(pair.to_server).unwrap();
    assert!(matches!(pair.client.send(pair.to_server, &[], &[]), Err(SubmitError::NoSession)));
    let client = Turner::of(&pair.client);
    {
        // One that is not turned is cut off after a while, and may hear of that before it has read the last words.
        let _server = Turner::of(&pair.server);
        assert!(matches!(end(&waiting), Err(OpError::Ended(_))));
    }
    let last = end(&pair.server.start_receive(None).unwrap());
    assert!(matches!(&last, Ok(Outcome::Message(message)) if message.header == b"last words"), "{last:?}");
    let ended = end(&pair.server.start_receive(None).unwrap());
    assert!(matches!(ended, Ok(Outcome::Ended(session, _)) if session == pair.to_client), "{ended:?}");
    let gone = pair.server.start_receive(Some(pair.to_client));
    assert!(matches!(gone, Err(SubmitError::NoSession)));
    drop(client);
    assert_eq!((pair.server.counters().unwrap().sessions, pair.client.counters().unwrap().sessions), (0, 0));
    let nobody = rig.listen(&rig.node());
    let refused = pair.client.connect(&nobody, soon());
    assert!(matches!(refused, Err(NodeError::Op(OpError::Ended(_)))), "{refused:?}");
}

fn an_own_poll_serves(rig: &Rig) {
    let pair = rig.pair();
    let server = std::thread::spawn(move || {
        let mut receive = pair.server.start_receive(None).unwrap();
        let mut served = 0;
        loop {
            let descriptor = pair.server.descriptor().unwrap();
            let mut polled = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
            let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
            assert!(rustix::event::poll(&mut polled, Some(&limit)).unwrap() > 0, "nothing in 20 s");
            pair.server.progress().unwrap();
            while let Ok(result) = receive.test() {
                match result.unwrap() {
                    Outcome::Message(message) => {
                        pair.server.send(message.session, &message.header, &message.payload).unwrap();
                        served += 1;
                    }
                    Outcome::Ended(..) => return served,
                    other => panic!("{other:?}"),
                }
                receive = pair.server.start_receive(None).unwrap();
            }
        }
    });
    for n in 0..100u8 {
        pair.client.send(pair.to_server, &[n], &[n; 100]).unwrap();
        assert_eq!(pair.client.receive(soon()).unwrap().header, [n]);
    }
    pair.client.close(pair.to_server).unwrap();
    let _turner = Turner::of(&pair.client);
    assert_eq!(server.join().unwrap(), 100);
}

/// Who wants no probes says so by the longest time there is.
fn probes_can_be_put_off_for_ever(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { keep_alive: std::time::Duration::MAX, ..rig.options() });
    let _turner = Turner::of(&pair.server);
    pair.server.send(pair.to_client, b"here", &[]).unwrap();
    assert_eq!(pair.client.receive(soon()).unwrap().header, b"here");
}

/// 500 sessions of two connections each.
fn thousand_connections_idle_at_no_cost(rig: &Rig) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // Each connection has two ends here, and over shared memory some descriptors more.
    let each = if rig.wire == crate::rig::Wire::Shm { 8 } else { 2 };
    let sessions: u64 = 500;
    if limit.current.is_some_and(|current| current < sessions * 2 * each + 100) {
        let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
        let enough = limit.maximum.is_none_or(|maximum| maximum >= sessions * 2 * each + 100);
        if !enough || rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).is_err() {
            return byway_skip::skip_this(byway_skip::SkipReason::Machine("too few descriptors (ulimit -n)"));
        }
    }
    let options = NodeOptions { frame_bytes: 512 << 20, ..rig.options() };
    let pair = rig.pair_of(&options);
    let address = rig.listen(&pair.server);
    let all: Vec<_> = (1..sessions).map(|_| connect(&pair.server, &pair.client, &address)).collect();
    assert_eq!(pair.client.counters().unwrap().sessions, sessions as usize);
    // While all are idle both wait and find nothing; then each of them works.
    wait_at_no_cost([&pair.server, &pair.client]);
    for (to_client, to_server) in all {
        pair.client.send(to_server, b"there?", &[]).unwrap();
        assert_eq!(pair.server.receive(soon()).unwrap().session, to_client);
    }
}

/// Few of them: over RDMA each has memory of its own for what comes.
fn sessions_idle_at_no_cost(rig: &Rig) {
    let pair = rig.pair();
    let address = rig.listen(&pair.server);
    let more: Vec<_> = (0..10).map(|_| connect(&pair.server, &pair.client, &address)).collect();
    wait_at_no_cost([&pair.server, &pair.client]);
    for (to_client, to_server) in more {
        pair.client.send(to_server, b"there?", &[]).unwrap();
        assert_eq!(pair.server.receive(soon()).unwrap().session, to_client);
    }
}

/// CPU time that this process has used.
fn spent() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("it counts up from nothing")
}

/// Has nodes wait for what does not come, until two seconds of that have cost less than a twentieth of a core. Several times,
/// because others may be busy in this process; what spins never gets there, however little it gets of a busy machine.
fn wait_at_no_cost(nodes: [&Node; 2]) {
    const WAIT_TIME: Duration = Duration::from_secs(2);
    let wait = |node: &Node| {
        let nothing = node.start_receive(None).unwrap();
        assert_eq!(nothing.wait(Deadline::after(WAIT_TIME)), Err(WaitError::Deadline));
    };
    let cost = || {
        let before = spent();
        std::thread::scope(|scope| nodes.map(|node| scope.spawn(move || wait(node))).map(|it| it.join().unwrap()));
        spent().saturating_sub(before)
    };
    let costs: Vec<_> = std::iter::repeat_with(cost).take(10).take_while(|cost| *cost > WAIT_TIME / 20).collect();
    assert!(costs.len() < 10, "of {WAIT_TIME:?} of waiting, each time: {costs:?}");
}
