//! Memory of 64 GiB of which hardly a page is there, and offsets of more than 32 bits in it.

use byway_fabric::node::{Memory, OpError, Outcome, Rights, SubmitError};
use byway_fabric::windows::WindowError;

use crate::rig::{Rig, Turner, Wire, done, end};

crate::over_each_wire!(a_window_over_64_gib_is_put_to_and_got_from_everywhere);
crate::over_rdma!(a_window_far_into_64_gib_is_put_to_and_got_from);

const BYTES: usize = 64 << 30;
/// More than a payload, so that an operation has several parts.
const LEN: usize = (1 << 20) + 4097;

/// Memory of the server's for windows, whether or not it can be lent.
fn memory(rig: &Rig, pair: &crate::rig::Pair) -> Memory {
    if rig.wire == Wire::Lent { pair.server.register_shared(BYTES) } else { pair.server.register(BYTES) }.unwrap()
}

fn bytes(seed: usize) -> Vec<u8> {
    (0..LEN).map(|at| (at * 31 + at / 251 + seed * 7) as u8).collect()
}

fn a_window_over_64_gib_is_put_to_and_got_from_everywhere(rig: &Rig) {
    let pair = rig.pair();
    let memory = memory(rig, &pair);
    let window = pair.server.open_window(pair.to_client, &memory, 0..BYTES, Rights::BOTH).unwrap();
    let descriptor = window.descriptor();
    assert_eq!(descriptor.len(), BYTES as u64);
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(LEN).unwrap();
    // At both ends, across 4 GiB, and across the parts in which a peer maps what it was lent.
    let places = [0, (4 << 30) - 5000, (33 << 30) + (64 << 20) - 70_000, BYTES - LEN];
    for (seed, at) in places.into_iter().enumerate() {
        mine.write(0, &bytes(seed)).unwrap();
        done(&pair.client.put(pair.to_server, &[mine.segment(0..LEN)], &descriptor, at as u64).unwrap());
        let mut found = vec![0; LEN];
        memory.read(at, &mut found).unwrap();
        assert!(found == bytes(seed), "put at {at}");
    }
    for (seed, at) in places.into_iter().enumerate() {
        mine.write(0, &[0; LEN]).unwrap();
        done(&pair.client.get(pair.to_server, &descriptor, at as u64, &[mine.segment(0..LEN)]).unwrap());
        let mut found = vec![0; LEN];
        mine.read(0, &mut found).unwrap();
        assert!(found == bytes(seed), "got at {at}");
    }
    let beyond = (BYTES - LEN + 1) as u64;
    let refused = pair.client.get(pair.to_server, &descriptor, beyond, &[mine.segment(0..LEN)]);
    match refused {
        Err(error) => assert_eq!(error, SubmitError::OutOfRange),
        Ok(op) => assert_eq!(end(&op), Err::<Outcome, _>(OpError::Refused(WindowError::Bounds))),
    }
    drop(turner);
    pair.close(window);
    assert!(!memory.is_in_use());
}

/// A device has all pages of a window, so there the memory is large and the window is not.
fn a_window_far_into_64_gib_is_put_to_and_got_from(rig: &Rig) {
    let pair = rig.pair();
    let memory = memory(rig, &pair);
    let at = BYTES - 2 * LEN;
    let window = pair.server.open_window(pair.to_client, &memory, at..at + LEN, Rights::BOTH).unwrap();
    pair.hear();
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(LEN).unwrap();
    mine.write(0, &bytes(1)).unwrap();
    done(&pair.client.put(pair.to_server, &[mine.segment(0..LEN)], &window.descriptor(), 0).unwrap());
    let mut found = vec![0; LEN];
    memory.read(at, &mut found).unwrap();
    assert!(found == bytes(1));
    mine.write(0, &[0; LEN]).unwrap();
    done(&pair.client.get(pair.to_server, &window.descriptor(), 0, &[mine.segment(0..LEN)]).unwrap());
    mine.read(0, &mut found).unwrap();
    assert!(found == bytes(1));
    drop(turner);
    pair.close(window);
    assert!(!memory.is_in_use());
}
