//! Peers that die, and forks.

use byway_fabric::node::{NodeOptions, OpError, Outcome, Rights, SubmitError, WaitError};

use crate::rig::{CANARY, Rig, Turner, Wire, canaries_are_whole, copy_of, done, end, pattern, soon};

crate::over_each_wire!(
    every_operation_ends_when_the_peer_dies,
    a_peer_that_dies_leaves_nothing_open,
    a_child_is_told_so_and_leaves_the_parents_sessions_alone,
);

crate::over_rdma!(
    every_operation_ends_when_the_peer_dies,
    a_peer_that_dies_leaves_nothing_open,
    a_child_is_told_so_and_leaves_the_parents_sessions_alone,
);

fn every_operation_ends_when_the_peer_dies(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { messages: 1, ..rig.options() });
    let (memory, window) = pair.open(4 << 20, Rights::BOTH);
    let remote = window.descriptor();
    let mut mine = pair.client.register(8 << 20).unwrap();
    // Nobody turns the server: nothing of this ends.
    let mut ops = vec![
        pair.client.put(pair.to_server, &[mine.segment(4 << 20..8 << 20)], &remote, 0).unwrap(),
        pair.client.flush(pair.to_server).unwrap(),
        pair.client.start_receive(Some(pair.to_server)).unwrap(),
    ];
    // Over RDMA its device serves them.
    if rig.wire != Wire::Rdma {
        ops.push(pair.client.get(pair.to_server, &remote, 0, &[mine.segment(0..4 << 20)]).unwrap());
    }
    done(&pair.client.send(pair.to_server, b"the one credit", &[]).unwrap());
    ops.push(pair.client.send(pair.to_server, b"no credit", &[]).unwrap());
    let put = pair.client.put_with_message(pair.to_server, &[mine.segment(0..100)], &remote, 0, b"no credit");
    ops.push(put.unwrap());
    if rig.wire == Wire::Lent {
        // The get needs nobody.
        done(&ops.remove(3));
    }
    for op in &ops {
        assert_eq!(op.test(), Err(WaitError::Deadline));
    }
    drop(window);
    drop(pair.server);
    for (index, op) in ops.iter().enumerate() {
        let result = end(op);
        // The bytes of a put into lent memory are there before anybody is told; its window's end may have told, and then a
        // flush is over too.
        let told = rig.wire == Wire::Lent && index < 2 && matches!(result, Ok(Outcome::Done));
        assert!(told || matches!(result, Err(OpError::Ended(_))), "operation {index}: {result:?}");
    }
    mine.bytes_mut().expect("nothing uses the memory any more");
    canaries_are_whole(&memory);
    let ended = pair.client.start_receive(None).unwrap();
    assert!(matches!(end(&ended), Ok(Outcome::Ended(session, _)) if session == pair.to_server));
    assert!(matches!(pair.client.send(pair.to_server, &[], &[]), Err(SubmitError::NoSession)));
    drop((ops, ended));
    let counters = pair.client.counters().unwrap();
    assert_eq!((counters.ops, counters.sessions, counters.windows), (0, 0, 0));
}

fn a_peer_that_dies_leaves_nothing_open(rig: &Rig) {
    for round in 0..10 {
        let pair = rig.pair();
        let (mut memory, window) = pair.open(1 << 20, Rights::BOTH);
        let mine = pair.client.register(1 << 20).unwrap();
        mine.write(0, &[0xb7; 1 << 20]).unwrap();
        let puts: Vec<_> = (0..round)
            .map(|_| pair.client.put(pair.to_server, &[mine.segment(0..1 << 20)], &window.descriptor(), 0).unwrap())
            .collect();
        pair.client.progress().unwrap();
        drop((puts, pair.client));
        let ended = pair.server.start_receive(None).unwrap();
        assert!(matches!(end(&ended), Ok(Outcome::Ended(session, _)) if session == pair.to_client));
        done(&window.close().unwrap());
        assert!(!memory.is_in_use());
        assert_eq!(
            memory.bytes_mut().is_ok(),
            rig.wire != Wire::Lent,
            "nobody can reach it, or who says so is believed"
        );
        canaries_are_whole(&memory);
        // As much as had come, and what lay there before.
        let is_right = |(at, byte): (usize, &u8)| *byte == 0xb7 || *byte == pattern(CANARY + at);
        assert!(copy_of(&memory)[CANARY..CANARY + (1 << 20)].iter().enumerate().all(is_right));
        let counters = pair.server.counters().unwrap();
        assert_eq!((counters.ops, counters.sessions, counters.windows), (0, 0, 0));
    }
}

/// The child's part: true if all is as it should be.
fn is_told_so(pair: &crate::rig::Pair, window: byway_fabric::node::Window, op: byway_fabric::node::Op) -> bool {
    let told = matches!(pair.client.send(pair.to_server, &[], &[]), Err(SubmitError::Forked))
        && pair.client.progress() == Err(WaitError::Forked)
        && op.wait(soon()) == Err(WaitError::Forked)
        && matches!(pair.client.group(1), Err(SubmitError::Forked));
    drop((window, op));
    let (server, client) = (pair.server.clone(), pair.client.clone());
    drop((server, client));
    told && byway_fabric::node::Node::open(&NodeOptions::default()).is_ok_and(|node| node.progress().is_ok())
}

fn a_child_is_told_so_and_leaves_the_parents_sessions_alone(rig: &Rig) {
    let pair = rig.pair();
    let (memory, window) = pair.open(4096, Rights::PUT);
    let op = pair.client.start_receive(None).unwrap();
    // SAFETY: no other thread runs, and the child ends by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let good = is_told_so(&pair, window, op);
            drop((pair, memory));
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        child => {
            assert!(child > 0);
            let mut status = 0;
            // SAFETY: our own child.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child found something else");
        }
    }
    // What the child dropped is the parent's still.
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(4096).unwrap();
    mine.write(0, &[1; 4096]).unwrap();
    done(&pair.client.put(pair.to_server, &[mine.segment(0..100)], &window.descriptor(), 0).unwrap());
    done(&pair.server.send(pair.to_client, b"still here", &[]).unwrap());
    assert!(matches!(end(&op), Ok(Outcome::Message(message)) if message.header == b"still here"));
    drop(turner);
    assert_eq!(copy_of(&memory)[crate::rig::CANARY..][..100], [1; 100]);
}
