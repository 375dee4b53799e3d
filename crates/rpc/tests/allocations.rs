//! Calls in a steady state: what they take from the allocator. A program of its own, whose allocator counts.

#[path = "../../fabric/tests/counting_allocator/mod.rs"]
mod counting_allocator;
#[allow(dead_code, reason = "other tests use the rest")]
mod rig;

use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, Session};
use byway_reactor::IoChoice;
use byway_rpc::node::{Call, Reply, Rpc};
use counting_allocator::{allocations_of, alone};
use rig::{Wire, connect, is_there, open};

/// Calls until all tables and lists have their size, and then those that are counted.
const WARM_UP: usize = 500;
const COUNTED: usize = 500;

/// Looks until there is something. One thread turns both nodes by turns, so that nothing else runs.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "it never comes to this");
    }
}

/// Calls with that many bytes of arguments and of payload, and is answered with as many.
fn exchange(client: &Rpc, server: &Rpc, to_server: Session, (inline, payload): (&[u8], &[u8])) {
    let call = Call { method: 7, arguments: inline, payload, ..Call::default() };
    let op = client.call(to_server, &call, Deadline::NEVER).unwrap();
    let request = until(|| {
        client.node().progress().unwrap();
        server.next_call(Deadline::now()).ok()
    });
    assert_eq!((&request.arguments[..], &request.payload[..]), (inline, payload));
    request.token.reply(0, inline, payload).unwrap();
    let ended = until(|| {
        server.node().progress().unwrap();
        op.test().ok()
    });
    let reply = Reply::of(ended.unwrap()).unwrap();
    assert_eq!((&reply.result[..], &reply.payload[..]), (inline, payload));
}

/// The programs own what they receive: arguments, result and payloads are an allocation each, unless they are empty. A payload is copied
/// when it is sent, because the caller's bytes are borrowed: one more. The call itself takes none.
#[test]
fn a_call_allocates_what_the_programs_own_and_no_more() {
    for (io, wire) in [IoChoice::Epoll, IoChoice::Uring].into_iter().flat_map(|io| [(io, Wire::Tcp), (io, Wire::Shm)]) {
        if !is_there(io, &[wire]) {
            continue;
        }
        let _alone = alone();
        let folder = tempfile::tempdir().unwrap();
        let (server, client) = (open(io), open(io));
        let (_, to_server) = connect(&server, &client, &wire.address(folder.path(), "socket"));
        let cases: [(&[u8], &[u8], u64); 3] = [(&[], &[], 0), (&[1; 40], &[], 2), (&[1; 40], &[2; 1000], 6)];
        for (inline, payload, each) in cases {
            let exchange = || exchange(&client, &server, to_server, (inline, payload));
            (0..WARM_UP).for_each(|_| exchange());
            let counted = allocations_of(|| (0..COUNTED).for_each(|_| exchange()));
            let (inline, payload) = (inline.len(), payload.len());
            assert_eq!(
                counted,
                each * COUNTED as u64,
                "{COUNTED} calls of {inline} and {payload} bytes, {io:?}, {wire:?}"
            );
        }
    }
}
