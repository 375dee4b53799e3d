//! Peers whose programs have stopped, while their kernels still answer for them.

use std::time::{Duration, Instant};

use byway_fabric::CloseReason;
use byway_fabric::node::{Descriptor, NodeOptions, Op, OpError, Rights};

use crate::rig::{Pair, Rig, Turner, done, end};

crate::over_each_wire!(
    what_a_silent_peer_was_sent_ends,
    who_looked_away_gives_nobody_up,
    a_window_that_a_silent_peer_fills_is_closed
);
crate::over_rdma!(what_a_silent_peer_was_sent_ends, who_looked_away_gives_nobody_up);

const KEEP_ALIVE: Duration = Duration::from_millis(200);

fn pair(rig: &Rig) -> Pair {
    rig.pair_of(&NodeOptions { keep_alive: KEEP_ALIVE, messages: 1, ..rig.options() })
}

#[track_caller]
fn ends_as_silent(op: &Op) {
    assert_eq!(end(op), Err(OpError::Ended(CloseReason::Silent)));
}

type Begin<'a> = &'a dyn Fn(&Pair, &Descriptor) -> Op;

fn what_a_silent_peer_was_sent_ends(rig: &Rig) {
    // One at a time: each is watched for itself.
    let put = |pair: &Pair, window: &Descriptor| {
        let mine = pair.client.register(100).unwrap();
        pair.client.put(pair.to_server, &[mine.segment(0..100)], window, 0).unwrap()
    };
    let begins: [Begin<'_>; 3] = [
        &put,
        &|pair, window| {
            drop(put(pair, window));
            pair.client.flush(pair.to_server).unwrap()
        },
        &|pair, _| {
            done(&pair.client.send(pair.to_server, b"the one credit", &[]).unwrap());
            pair.client.send(pair.to_server, b"no credit", &[]).unwrap()
        },
    ];
    for begin in begins {
        let pair = pair(rig);
        let (_memory, window) = pair.open(4096, Rights::PUT);
        // It is turned no more.
        ends_as_silent(&begin(&pair, &window.descriptor()));
    }
}

/// The peer is well, and waits for the rest of what this program has begun.
fn who_looked_away_gives_nobody_up(rig: &Rig) {
    const BYTES: usize = 16 << 20;
    let pair = pair(rig);
    let (_memory, window) = pair.open(BYTES, Rights::PUT);
    let mine = pair.client.register(BYTES).unwrap();
    let _turner = Turner::of(&pair.server);
    let put = pair.client.put(pair.to_server, &[mine.segment(0..BYTES)], &window.descriptor(), 0).unwrap();
    // The program's own work, which takes its time.
    let began = Instant::now();
    while began.elapsed() < 3 * KEEP_ALIVE {
        std::thread::yield_now();
    }
    done(&put);
}

fn a_window_that_a_silent_peer_fills_is_closed(rig: &Rig) {
    const BYTES: usize = 64 << 20;
    let pair = pair(rig);
    let (mut memory, window) = pair.open(BYTES, Rights::PUT);
    let mine = pair.client.register(BYTES).unwrap();
    // As much goes out as the kernel takes, or the ring has room for, and no more.
    let _put = pair.client.put(pair.to_server, &[mine.segment(0..BYTES)], &window.descriptor(), 0).unwrap();
    for _ in 0..100 {
        pair.server.progress().unwrap();
    }
    done(&window.close().unwrap());
    if rig.wire != crate::rig::Wire::Lent {
        memory.bytes_mut().expect("nothing uses the memory any more");
    }
}
