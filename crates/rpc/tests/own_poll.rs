//! Calls of a program with a poll loop of its own.

use std::time::Duration;

use byway_fabric::node::{Address, Deadline, Node, NodeOptions, OpError, parse_address};
use byway_rpc::node::{Call, Rpc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn is_readable_within(node: &Node, limit: Duration) -> bool {
    let descriptor = node.descriptor().unwrap();
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    poll(&mut polled, Some(&limit)).unwrap() > 0
}

/// Nobody turns the server: the call's end is a timer of the caller's, which has none while it rests.
#[test]
fn a_deadline_makes_the_descriptor_readable() {
    let open = || Rpc::open(&NodeOptions { frame_bytes: 16 << 20, ..NodeOptions::default() }).unwrap();
    let (server, caller) = (open(), open());
    let at = server.node().listen(&parse_address("tcp://127.0.0.1:0").unwrap()).unwrap().unwrap();
    let soon = Deadline::after(Duration::from_secs(20));
    let to_server = std::thread::scope(|scope| {
        scope.spawn(|| server.node().accept(soon).unwrap());
        caller.node().connect(&Address::Tcp(at), soon).unwrap()
    });
    // No timer of the session's beginning is left either.
    while is_readable_within(caller.node(), Duration::from_millis(300)) {
        caller.node().progress().unwrap();
        assert!(soon.left().is_some_and(|left| !left.is_zero()), "it never comes to rest");
    }
    let deadline = Deadline::after(Duration::from_millis(200));
    let call = caller.call(to_server, &Call { arguments: b"x", ..Call::default() }, deadline).unwrap();
    loop {
        assert!(is_readable_within(caller.node(), Duration::from_secs(2)), "the call never ends");
        if caller.node().progress().unwrap() {
            break assert_eq!(call.wait(Deadline::now()), Ok(Err(OpError::Deadline)));
        }
    }
}
