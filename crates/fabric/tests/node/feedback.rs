//! What a node says of its sessions: how they fare, and what their wires can do.

use std::time::{Duration, Instant};

use byway_fabric::feedback::{Feedback, Waits};
use byway_fabric::node::{Node, NodeError, Op, Rights, Session, SubmitError, Window};
use byway_fabric::{Capabilities, Stall, WireKind};

use crate::rig::{Rig, Turner, Wire, connect, done, soon};

crate::over_each_wire!(
    a_peer_that_takes_nothing_is_told_from_one_that_does,
    what_a_session_can_do_is_known_as_long_as_it_is,
);

crate::over_rdma!(what_a_session_can_do_is_known_as_long_as_it_is);

/// More than connections and their buffers hold.
const PUT_BYTES: usize = 24 << 20;
/// Of these the program of a peer that takes none lets 64 come.
const MESSAGES: usize = 70;

fn measured(node: &Node, session: Session) -> Feedback {
    node.feedback(session).unwrap().measured
}

/// Turns a node until its feedback is so.
fn until(node: &Node, session: Session, is: impl Fn(&Feedback) -> bool) -> Feedback {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        node.progress().unwrap();
        let seen = measured(node, session);
        if is(&seen) {
            return seen;
        }
        assert!(Instant::now() < deadline, "{seen:?}");
    }
}

/// Sends messages, and puts into a window that `peer` opens.
fn ask((node, session): (&Node, Session), (peer, back): (&Node, Session), messages: usize) -> (Window, Vec<Op>) {
    let (from, to) = (node.register(PUT_BYTES).unwrap(), peer.register(PUT_BYTES).unwrap());
    let window = peer.open_window(back, &to, 0..PUT_BYTES, Rights::PUT).unwrap();
    let mut ops: Vec<Op> = (0..messages).map(|_| node.send(session, b"take this", &[1; 100]).unwrap()).collect();
    ops.push(node.put(session, &[from.segment(0..PUT_BYTES)], &window.descriptor(), 0).unwrap());
    (window, ops)
}

fn a_peer_that_takes_nothing_is_told_from_one_that_does(rig: &Rig) {
    let pair = rig.pair();
    let (fast, address) = (rig.node(), rig.listen(&pair.server));
    let (to_fast, to_server) = connect(&pair.server, &fast, &address);
    let turner = Turner::of(&fast);
    let (_open, to_slow) = ask((&pair.server, pair.to_client), (&pair.client, pair.to_server), MESSAGES);
    let slow = until(&pair.server, pair.to_client, |seen| {
        seen.queued_bytes > 1 << 20 && seen.waiting >= Duration::from_millis(20)
    });
    assert_eq!(slow.stall(Stall::Credit), Waits::default(), "it is not over");
    let (_open_too, to_fast_one) = ask((&pair.server, to_fast), (&fast, to_server), 10);
    to_fast_one.iter().for_each(done);
    let seen = until(&pair.server, to_fast, |seen| seen.queued_bytes == 0);
    assert_eq!((seen.waiting, seen.stall(Stall::Credit)), (Duration::ZERO, Waits::default()));
    assert!(seen.sent_bytes > PUT_BYTES as u64 && seen.send_rate > 0.0, "{seen:?}");
    assert!(seen.send_delay.count > 0, "{seen:?}");
    // Whoever chooses by it asks while others wait.
    let serving = Turner::of(&pair.server);
    assert!(measured(&pair.server, pair.to_client).waiting >= slow.waiting);
    // Now it takes all of it.
    for _ in 0..MESSAGES {
        pair.client.receive_from(pair.to_server, soon()).unwrap();
    }
    let taking = Turner::of(&pair.client);
    to_slow.iter().for_each(done);
    drop((serving, taking));
    let seen = until(&pair.server, pair.to_client, |seen| seen.queued_bytes == 0);
    assert_eq!(seen.waiting, Duration::ZERO);
    let (credit, take) = (seen.stall(Stall::Credit), seen.stall(Stall::Take));
    assert!(credit.count > 0 && take.count > 0, "{credit:?} {take:?}");
    assert!(credit.max.max(take.max) >= slow.waiting, "{credit:?} {take:?}");
    let path = pair.server.feedback(pair.to_client).unwrap().path;
    assert_eq!(path.is_some(), rig.wire == Wire::Tcp, "{path:?}");
    drop(turner);
}

fn what_a_session_can_do_is_known_as_long_as_it_is(rig: &Rig) {
    let pair = rig.pair();
    let wire = match rig.wire {
        Wire::Tcp => WireKind::Tcp,
        Wire::Unix => WireKind::Unix,
        Wire::Shm | Wire::Lent => WireKind::Shared,
        Wire::Rdma => WireKind::Rdma,
    };
    let all = Capabilities::of(wire, false);
    for (node, session) in [(&pair.server, pair.to_client), (&pair.client, pair.to_server)] {
        let seen = node.capabilities(session).unwrap();
        let mut expected = all;
        expected.zero_copy_send &= wire == WireKind::Rdma || node.io() == "uring";
        assert_eq!(seen, expected);
    }
    pair.server.close(pair.to_client).unwrap();
    let gone = pair.server.feedback(pair.to_client);
    assert!(matches!(gone, Err(NodeError::Submit(SubmitError::NoSession))), "{gone:?}");
    let unknown = Session::from_u64(u64::MAX);
    assert_eq!(pair.server.capabilities(unknown), Err(SubmitError::NoSession));
}
