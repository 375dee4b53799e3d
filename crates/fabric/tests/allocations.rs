//! Operations of nodes in a steady state: what they take from the allocator. A program of its own, whose allocator counts.

mod counting_allocator;
mod turned_pair;

use byway_fabric::node::{Address, NodeOptions, Op, Outcome, Rights, parse_address};
use byway_reactor::{IoChoice, Reactor};
use counting_allocator::{allocations_of, alone};
use turned_pair::{Pair, turn_until_ended};

/// Operations until all tables and lists have their size, and then those that are counted.
const WARM_UP: usize = 500;
const COUNTED: usize = 500;

/// Allocations of puts and of gets of that many bytes.
fn allocations(address: &Address, io: IoChoice, lends: bool, len: usize) -> [u64; 2] {
    let _alone = alone();
    let pair = Pair::new(address, &NodeOptions { io, frame_bytes: 16 << 20, ..NodeOptions::default() });
    let theirs = if lends { pair.server.register_shared(len) } else { pair.server.register(len) }.unwrap();
    let mine = pair.client.register(len).unwrap();
    let window = pair.server.open_window(pair.to_client, &theirs, 0..len, Rights::BOTH).unwrap();
    let descriptor = window.descriptor();
    let put = || pair.client.put(pair.to_server, &[mine.segment(0..len)], &descriptor, 0).unwrap();
    let get = || pair.client.get(pair.to_server, &descriptor, 0, &[mine.segment(0..len)]).unwrap();
    let count = |begin: &dyn Fn() -> Op| {
        (0..WARM_UP).for_each(|_| pair.end(&begin()));
        allocations_of(|| (0..COUNTED).for_each(|_| pair.end(&begin())))
    };
    let counted = [count(&put), count(&get)];
    let close = window.close().unwrap();
    pair.end(&close);
    counted
}

/// The backends of this machine.
fn backends() -> impl Iterator<Item = IoChoice> {
    [IoChoice::Epoll, IoChoice::Uring].into_iter().filter(|io| {
        let is_there = *io == IoChoice::Epoll || Reactor::open_for_threads(*io, 1).is_ok();
        if !is_there {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
        }
        is_there
    })
}

fn nothing_is_allocated(address: &Address, lends: bool) {
    for io in backends() {
        for len in [64, 4096, 1 << 20] {
            let counted = allocations(address, io, lends, len);
            assert_eq!(counted, [0, 0], "{COUNTED} puts and {COUNTED} gets of {len} bytes, {io:?}");
        }
    }
}

#[test]
fn puts_and_gets_over_tcp_allocate_nothing() {
    nothing_is_allocated(&parse_address("tcp://127.0.0.1:0").unwrap(), false);
}

#[test]
fn puts_and_gets_over_unix_sockets_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    nothing_is_allocated(&Address::Unix(folder.path().join("socket")), false);
}

#[test]
fn puts_and_gets_through_rings_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    nothing_is_allocated(&Address::Shared(folder.path().join("socket")), false);
}

#[test]
fn puts_and_gets_in_lent_memory_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    nothing_is_allocated(&Address::Shared(folder.path().join("socket")), true);
}

/// Allocations of a message, sent and received.
fn allocations_of_messages(address: &Address, io: IoChoice, (header, payload): (&[u8], &[u8])) -> u64 {
    let _alone = alone();
    let pair = Pair::new(address, &NodeOptions { io, frame_bytes: 16 << 20, ..NodeOptions::default() });
    let exchange = || {
        pair.end(&pair.client.send(pair.to_server, header, payload).unwrap());
        let receive = pair.server.start_receive(None).unwrap();
        let Outcome::Message(message) = turn_until_ended(&[&pair.client, &pair.server], &receive) else {
            panic!("no message")
        };
        assert_eq!((&message.header[..], &message.payload[..]), (header, payload));
    };
    (0..WARM_UP).for_each(|_| exchange());
    allocations_of(|| (0..COUNTED).for_each(|_| exchange()))
}

/// The program owns what it receives: header and payload are an allocation each, unless they are empty. A payload is copied when it
/// is sent, because the message may wait for credit, and the caller's bytes are borrowed: one more.
#[test]
fn a_message_allocates_what_the_program_owns_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let addresses = [
        parse_address("tcp://127.0.0.1:0").unwrap(),
        Address::Unix(folder.path().join("unix")),
        Address::Shared(folder.path().join("shm")),
    ];
    let (header, payload) = ([1; 40], [2; 1000]);
    for address in &addresses {
        for io in backends() {
            let cases: [(&[u8], &[u8], u64); 4] =
                [(&[], &[], 0), (&header, &[], 1), (&[], &payload, 2), (&header, &payload, 3)];
            for (header, payload, each) in cases {
                let counted = allocations_of_messages(address, io, (header, payload));
                let (header, payload) = (header.len(), payload.len());
                assert_eq!(
                    counted,
                    each * COUNTED as u64,
                    "{COUNTED} messages of {header} and {payload} bytes, {io:?}, {address:?}"
                );
            }
        }
    }
}
