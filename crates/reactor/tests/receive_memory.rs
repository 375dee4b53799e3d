//! Receive buffers on a machine that refuses memory for a while. A process of its own: the limit is the process's.

use byway_reactor::{IoChoice, Reactor};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn buffers_are_there_once_the_machine_has_memory_for_them() {
    let reactor = Reactor::open(IoChoice::Epoll, 1 << 20).unwrap();
    let limit = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(1 << 20), ..limit }).unwrap();
    let refused = [1, 16 << 10].map(|bytes| reactor.receive_buffers().alloc(bytes).map(|buffer| buffer.len()));
    setrlimit(Resource::As, limit).unwrap();
    // The longer one is a frame then.
    assert_eq!(refused, [None, Some(16 << 10)]);
    assert!(reactor.receive_buffers().alloc(1).is_some(), "a mapping that failed is tried again");
    let _long = reactor.receive_buffers().alloc(16 << 10).unwrap();
    assert!(reactor.receive_buffers().held_bytes() > 0);
}
