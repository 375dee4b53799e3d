//! What becomes of what comes too late for who waited for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use byway_fabric::node::{Deadline, Node, NodeError, Op, OpError, Outcome, WaitError};

use crate::rig::{Rig, connect, done, end, soon};

crate::over_each_wire!(
    receives_with_deadlines_lose_nothing,
    a_connect_that_took_too_long_leaves_nothing,
    a_connect_that_nobody_waits_for_leaves_nothing,
    a_connect_can_be_cancelled,
    a_node_that_stops_listening_keeps_its_sessions,
);

crate::over_rdma!(receives_with_deadlines_lose_nothing);

const LATE: NodeError = NodeError::Wait(WaitError::Deadline);

/// Another thread turns the loop when a deadline passes.
fn receives_with_deadlines_lose_nothing(rig: &Rig) {
    const MESSAGES: u32 = 500;
    let pair = rig.pair();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                pair.server.progress().unwrap();
            }
        });
        scope.spawn(|| {
            for number in 0..MESSAGES {
                done(&pair.client.send(pair.to_server, &number.to_le_bytes(), &[]).unwrap());
                assert_eq!(pair.client.receive(soon()).unwrap().header, number.to_le_bytes());
            }
        });
        let limit = soon();
        for number in 0..MESSAGES {
            let message = loop {
                // Short ones, so that many pass just when the message comes.
                let deadline = Deadline::after(Duration::from_micros(u64::from(number % 20)));
                let came = if number % 2 == 0 {
                    pair.server.receive(deadline)
                } else {
                    pair.server.receive_from(pair.to_client, deadline)
                };
                match came {
                    Ok(message) => break Some(message),
                    Err(error) => assert_eq!(error, LATE),
                }
                if limit.left().is_some_and(|left| left.is_zero()) {
                    break None;
                }
            };
            let Some(message) = message else {
                is_over.store(true, Ordering::Relaxed);
                panic!("message {number} is lost");
            };
            assert_eq!(message.header, number.to_le_bytes());
            done(&pair.server.send(pair.to_client, &message.header, &[]).unwrap());
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Turns two nodes until neither has a session.
fn no_session_stays(client: &Node, server: &Node) {
    let limit = soon();
    let sessions = |node: &Node| node.counters().unwrap().sessions;
    while (sessions(client), sessions(server)) != (0, 0) {
        assert!(!limit.left().is_some_and(|left| left.is_zero()), "a session stays open");
        client.progress().unwrap();
        server.progress().unwrap();
        // A server's program learns that one has ended.
        let _ = server.start_receive(None).unwrap().test();
    }
}

/// The server's program turns its loop when the client has given up.
fn a_connect_that_took_too_long_leaves_nothing(rig: &Rig) {
    let (server, client) = (rig.node(), rig.node());
    let address = rig.listen(&server);
    for _ in 0..3 {
        assert_eq!(client.connect(&address, Duration::from_millis(20)), Err(LATE));
    }
    let accept = client.start_accept().unwrap();
    no_session_stays(&client, &server);
    for _ in 0..100 {
        client.progress().unwrap();
        server.progress().unwrap();
    }
    assert_eq!(accept.test(), Err(WaitError::Deadline), "what we began ourselves");
    no_session_stays(&client, &server);
    assert_eq!(client.counters().unwrap().ops, 1);
    // Another is not in its way.
    drop(accept);
    connect(&server, &client, &address);
}

/// Turns both until the one operation of the client's that can end has.
fn until_one_has_ended(client: &Node, server: &Node) {
    let limit = soon();
    while !client.progress().unwrap() {
        assert!(!limit.left().is_some_and(|left| left.is_zero()), "it does not connect");
        server.progress().unwrap();
    }
}

fn a_connect_that_nobody_waits_for_leaves_nothing(rig: &Rig) {
    let (server, client) = (rig.node(), rig.node());
    let address = rig.listen(&server);
    let accept = client.start_accept().unwrap();
    let ways: [fn(&Node, &Node, Op); 4] = [
        |_, _, connect| drop(connect),
        |client, _, connect| {
            let group = client.group(1).unwrap();
            group.add(connect, 1).unwrap();
        },
        |client, server, connect| {
            until_one_has_ended(client, server);
            drop(connect);
        },
        |client, server, connect| {
            let group = client.group(1).unwrap();
            group.add(connect, 1).unwrap();
            until_one_has_ended(client, server);
        },
    ];
    for (number, way) in ways.into_iter().enumerate() {
        client.progress().unwrap();
        way(&client, &server, client.start_connect(&address).unwrap());
        no_session_stays(&client, &server);
        assert_eq!(accept.test(), Err(WaitError::Deadline), "way {number}");
        assert_eq!(client.counters().unwrap().ops, 1, "way {number}");
    }
}

fn a_connect_can_be_cancelled(rig: &Rig) {
    let (server, client) = (rig.node(), rig.node());
    let address = rig.listen(&server);
    let connect = client.start_connect(&address).unwrap();
    connect.cancel().unwrap();
    assert_eq!(end(&connect), Err(OpError::Cancelled));
    no_session_stays(&client, &server);
    // One that has ended is not.
    client.progress().unwrap();
    let connect = client.start_connect(&address).unwrap();
    until_one_has_ended(&client, &server);
    connect.cancel().unwrap();
    let Ok(Outcome::Session(to_server)) = end(&connect) else { panic!("cancelled") };
    client.send(to_server, b"there?", &[]).unwrap();
    assert_eq!(server.receive(soon()).unwrap().header, b"there?");
}

fn a_node_that_stops_listening_keeps_its_sessions(rig: &Rig) {
    let (server, client, late) = (rig.node(), rig.node(), rig.node());
    let address = rig.listen(&server);
    let (to_client, to_server) = connect(&server, &client, &address);
    server.stop_listening().unwrap();
    assert!(late.connect(&address, soon()).is_err(), "a node that does not listen has accepted");
    done(&client.send(to_server, b"still there?", &[]).unwrap());
    assert_eq!(server.receive_from(to_client, soon()).unwrap().header, b"still there?");
    done(&server.send(to_client, b"yes", &[]).unwrap());
    assert_eq!(client.receive_from(to_server, soon()).unwrap().header, b"yes");
}
