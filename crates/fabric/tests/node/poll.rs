//! Programs with a poll loop of their own: the descriptor is readable for whatever the loop must do, whoever turned it last.

use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, Node, NodeOptions, Op, OpError, Outcome, Rights, WaitError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::rig::{Pair, Rig, done, soon};

crate::over_each_wire!(what_is_here_already_makes_it_readable, a_look_at_an_operation_leaves_the_peers_asked_to_ring,);

/// Of gets that nobody but the peer's loop serves.
mod unlent {
    use super::{a_dead_peer_is_found_by_what_a_request_began, a_wait_leaves_its_timers_to_who_polls};

    macro_rules! over {
        ($($name:ident),*) => {
            crate::over_each_wire!(@ tcp_epoll, Tcp, Epoll, $($name),*);
            crate::over_each_wire!(@ tcp_uring, Tcp, Uring, $($name),*);
            crate::over_each_wire!(@ shm_epoll, Shm, Epoll, $($name),*);
        };
    }

    over!(a_dead_peer_is_found_by_what_a_request_began, a_wait_leaves_its_timers_to_who_polls);
}

fn is_readable_within(node: &Node, limit: Duration) -> bool {
    let descriptor = node.descriptor().unwrap();
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    poll(&mut polled, Some(&limit)).unwrap() > 0
}

#[track_caller]
fn becomes_readable(node: &Node) {
    assert!(is_readable_within(node, Duration::from_secs(2)), "nothing made the descriptor readable");
}

/// Looks until there is nothing more to look for.
#[track_caller]
fn rest(node: &Node) {
    let rests = (0..1000).any(|_| {
        node.progress().unwrap();
        !is_readable_within(node, Duration::ZERO)
    });
    assert!(rests, "each look makes the next one due");
}

/// Looks until there is no timer of the session's beginning either, whose end would hide what else is missed.
#[track_caller]
fn idle(node: &Node) {
    let began = Instant::now();
    while is_readable_within(node, 3 * byway_fabric::limits::TICK) {
        node.progress().unwrap();
        assert!(began.elapsed() < Duration::from_secs(20), "it never comes to rest");
    }
}

/// Polls and looks as a program does, until the operation has ended for want of a peer.
#[track_caller]
fn ends_by_poll(node: &Node, op: &Op) {
    let began = Instant::now();
    loop {
        becomes_readable(node);
        if node.progress().unwrap() {
            // The news are of this one alone.
            let result = op.wait(Deadline::now()).unwrap();
            return assert!(matches!(result, Err(OpError::Ended(_))), "{result:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(20), "it never ends");
    }
}

/// Whose keep-alive is over soon, and a get that the server, which nobody turns, does not answer.
fn abandoned(rig: &Rig, keep_alive: Duration, begin: impl FnOnce(&Pair, &dyn Fn() -> Op)) {
    let pair = rig.pair_of(&NodeOptions { keep_alive, ..rig.options() });
    let (_memory, window) = pair.open(4096, Rights::BOTH);
    let mine = pair.client.register(4096).unwrap();
    idle(&pair.client);
    begin(&pair, &|| pair.client.get(pair.to_server, &window.descriptor(), 0, &[mine.segment(0..4096)]).unwrap());
}

fn a_dead_peer_is_found_by_what_a_request_began(rig: &Rig) {
    abandoned(rig, Duration::from_millis(100), |pair, get| ends_by_poll(&pair.client, &get()));
}

fn a_wait_leaves_its_timers_to_who_polls(rig: &Rig) {
    abandoned(rig, Duration::from_millis(300), |pair, get| {
        let op = get();
        let other = pair.client.start_accept().unwrap();
        rest(&pair.client);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let found = other.wait(Deadline::after(Duration::from_millis(100)));
                assert_eq!(found, Err(WaitError::Deadline));
            });
            // While the other turns the loop nobody counts the get's window.
            let counted = || pair.client.counters().unwrap().windows > 0;
            let began = Instant::now();
            while counted() && began.elapsed() < Duration::from_millis(90) {
                std::thread::yield_now();
            }
            pair.client.progress().unwrap();
        });
        ends_by_poll(&pair.client, &op);
    });
}

fn what_is_here_already_makes_it_readable(rig: &Rig) {
    let pair = rig.pair();
    for _ in 0..2 {
        done(&pair.client.send(pair.to_server, b"here", &[]).unwrap());
    }
    // The second is here with the first, or soon after it.
    assert_eq!(pair.server.receive(soon()).unwrap().header, b"here");
    idle(&pair.server);
    let receive = pair.server.start_receive(None).unwrap();
    becomes_readable(&pair.server);
    assert!(pair.server.progress().unwrap());
    assert!(matches!(receive.wait(Deadline::now()), Ok(Ok(Outcome::Message(message))) if message.header == b"here"));
    rest(&pair.server);

    // A session that nobody has accepted yet.
    let (address, other) = (rig.listen(&pair.server), rig.node());
    let connecting = other.start_connect(&address).unwrap();
    let began = Instant::now();
    while connecting.test().is_err() {
        pair.server.progress().unwrap();
        assert!(began.elapsed() < Duration::from_secs(20), "no session");
    }
    idle(&pair.server);
    let accept = pair.server.start_accept().unwrap();
    becomes_readable(&pair.server);
    while accept.test().is_err() {
        becomes_readable(&pair.server);
        pair.server.progress().unwrap();
    }
    rest(&pair.server);
}

fn a_look_at_an_operation_leaves_the_peers_asked_to_ring(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { messages: 1, ..rig.options() });
    for round in 0..20u8 {
        let receive = pair.client.start_receive(None).unwrap();
        done(&pair.client.send(pair.to_server, &[round], &[]).unwrap());
        rest(&pair.client);
        // With it goes credit for the next, which ends nothing.
        assert_eq!(pair.server.receive(soon()).unwrap().header, [round]);
        becomes_readable(&pair.client);
        assert_eq!(receive.test(), Err(WaitError::Deadline));
        done(&pair.server.send(pair.to_client, &[round], &[]).unwrap());
        loop {
            becomes_readable(&pair.client);
            pair.client.progress().unwrap();
            if let Ok(result) = receive.test() {
                assert!(matches!(result, Ok(Outcome::Message(message)) if message.header == [round]));
                break;
            }
        }
    }
}
