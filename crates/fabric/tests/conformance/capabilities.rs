//! Each wire does what it says of itself.

use byway_fabric::{Capabilities, Closed, OneSided, WireKind};
use byway_reactor::Wait;

use crate::rig::{CLIENT, Rig, SERVER, Wire, pattern};

const LEN: usize = 50_000;

pub fn both_ends_know_what_their_wire_can_do(rig: &mut Rig) {
    let (server, client) = rig.session();
    let wire = match rig.wire {
        Wire::Tcp(_) | Wire::Sim => WireKind::Tcp,
        Wire::Unix(_) => WireKind::Unix,
        Wire::Shared(..) => WireKind::Shared,
        Wire::Rdma(_) => WireKind::Rdma,
    };
    let claimed = [(SERVER, server), (CLIENT, client)].map(|(end, session)| {
        let end = &rig.ends[end];
        (end.fabric.capabilities(session).expect("it is up"), end.reactor.io().name)
    });
    let table = Capabilities::of(wire, false);
    for (claimed, io) in claimed {
        let mut expected = table;
        expected.zero_copy_send &= wire == WireKind::Rdma || io == "uring";
        assert_eq!(claimed, expected);
    }
}

/// The server puts where it may only read: the memory is as it was, unless it was lent and nothing is claimed for it.
pub fn a_window_is_enforced_where_that_is_claimed(rig: &mut Rig) {
    let (server, client) = rig.session();
    let claimed = rig.client().fabric.capabilities(client).expect("it is up").window_enforced;
    let source = rig.client().open_source(client, &pattern(1, LEN));
    let from = rig.offer(client, source);
    rig.put(server, from, &pattern(2, LEN), 0);
    rig.until("a refusal", |rig| (rig.client().fabric.windows().refused() == 1).then_some(()));
    let Closed::Source(frame) = rig.client().fabric.windows().close(source) else { panic!("no source") };
    let has = |seed| frame.to_vec().windows(LEN).any(|bytes| bytes == pattern(seed, LEN));
    assert!(if rig.places() { !claimed && has(2) } else { has(1) }, "claimed: {claimed}");
    assert!(claimed || matches!(rig.wire, Wire::Shared(..)));
}

/// Nobody turns the owner of the window.
pub fn a_get_takes_the_owners_loop_where_it_is_emulated(rig: &mut Rig) {
    let (server, client) = rig.session();
    let claimed = rig.server().fabric.capabilities(server).expect("it is up").one_sided;
    let source = rig.client().open_source(client, &pattern(1, LEN));
    let from = rig.offer(client, source);
    rig.get(server, from, LEN, 7);
    let is_native = claimed == OneSided::Native || (claimed == OneSided::WhereLent && rig.places());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut got = None;
    for turns in 0.. {
        if rig.wire == Wire::Sim {
            rig.pass(std::time::Duration::from_millis(10), SERVER);
        } else {
            let until = rig.server().reactor.now() + std::time::Duration::from_micros(200);
            rig.server().turn(Wait::Until(until));
        }
        got = rig.server().take_got();
        if got.is_some() || (!is_native && turns == 50) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "it is {claimed:?}, and waits for the owner");
    }
    assert_eq!(got.is_some(), is_native, "{claimed:?}");
    let (context, frame, result) = got.unwrap_or_else(|| rig.got());
    assert!(context == 7 && result.is_ok() && frame.to_vec()[..LEN] == pattern(1, LEN));
}
