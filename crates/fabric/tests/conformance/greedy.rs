//! Peers that ask and take nothing, in simulated time: what waits for them is bounded at either end.

use std::time::Duration;

use byway_fabric::limits::{ANSWERS_MAX, SESSION_HEAP_BYTES_MAX, SMALL_BYTES_MAX, TAKE_TIME_MAX};
use byway_fabric::wire::{Header, Kind, Pull, WindowAdvert};
use byway_fabric::{CloseReason, Options, PayloadMeta, Remote, SessionId};
use byway_reactor::{Gather, Wait};
use zerocopy::FromZeros;

use crate::rig::{CLIENT, Event, Rig, RigEnd, SERVER, Wire, pattern};

fn simulated() -> Rig {
    let mut options = Options::new(7);
    options.seed = Some(1);
    Rig::new(Wire::Sim, options).expect("a simulation")
}

fn down(rig: &mut Rig) -> Option<CloseReason> {
    rig.client().take(|event| if let Event::Down(reason) = event { Some(*reason) } else { None })
}

/// The server sends so many of these.
fn ask(rig: &mut Rig, server: SessionId, header: Header, count: usize) {
    for _ in 0..count {
        rig.server().fabric.send(server, header);
    }
    rig.server().turn(Wait::Poll);
}

fn questions(from: Remote) -> Vec<Header> {
    let mut pull = Pull::new_zeroed();
    pull.len.set(100);
    let mut good = Header::with_body(Kind::Pull, &pull);
    good.window.set(from.window.0);
    let closed = WindowAdvert::of(WindowAdvert::CLOSED).about(7);
    vec![good, Header::with_body(Kind::Pull, &pull), Header::new(Kind::Ping), closed]
}

#[test]
fn a_server_that_asks_again_and_again_and_takes_nothing_is_given_up() {
    for which in 0..4 {
        let mut rig = simulated();
        let (server, client) = rig.session();
        let window = rig.client().open_source(client, &pattern(1, 100));
        let question = questions(rig.offer(client, window))[which];
        ask(&mut rig, server, question, ANSWERS_MAX + 20_000);
        let mut most = 0;
        let reason = (0..1000).find_map(|_| {
            // It goes on with its questions, and while it has many it reads nothing.
            if rig.server().fabric.queued_heap_bytes() > SESSION_HEAP_BYTES_MAX {
                rig.server().turn(Wait::Poll);
            }
            rig.pass(Duration::from_millis(10), CLIENT);
            most = most.max(rig.client().fabric.queued_heap_bytes());
            down(&mut rig)
        });
        assert_eq!(reason, Some(CloseReason::AsksTooMuch), "question {which}; {most} bytes waited");
        assert!(most < 8 << 20, "{most} bytes waited");
        rig.pass(Duration::from_millis(10), CLIENT);
        assert_eq!(rig.client().fabric.queued_heap_bytes(), 0);
    }
}

#[test]
fn a_server_that_asks_for_much_and_takes_it_is_served_for_ever() {
    let mut rig = simulated();
    let (server, client) = rig.session();
    let window = rig.client().open_source(client, &pattern(1, 100));
    let question = questions(rig.offer(client, window))[0];
    // So many at a time that the queue at the client is never empty, and all of them together more than may wait.
    for round in 1..=20 {
        ask(&mut rig, server, question, ANSWERS_MAX / 10);
        rig.until("its answers", |rig| {
            // What comes is thrown away by the server, which has no such window.
            (rig.server().fabric.windows().refused() > (round * ANSWERS_MAX / 10 - 500) as u64).then_some(())
        });
    }
    assert_eq!(down(&mut rig), None);
}

#[test]
fn a_server_that_takes_nothing_of_what_a_client_says_is_given_up_after_a_minute() {
    for (count, ends) in [(SESSION_HEAP_BYTES_MAX / 4096 + 200, true), (10, false)] {
        let mut rig = simulated();
        let (_, client) = rig.session();
        let payload = pattern(2, 4096);
        for _ in 0..count {
            let meta = PayloadMeta { len: payload.len(), checksum: None };
            let push = |gather: &mut Gather| gather.push_head(&payload);
            rig.client().fabric.send_with(client, Header::new(Kind::Notice), meta, push);
        }
        rig.pass(TAKE_TIME_MAX / 2, CLIENT);
        assert_eq!(down(&mut rig), None);
        rig.pass(TAKE_TIME_MAX, CLIENT);
        assert_eq!(down(&mut rig), ends.then_some(CloseReason::TakesNothing));
    }
}

#[test]
fn a_peer_that_takes_slowly_is_not_taken_for_one_that_has_stopped_or_died() {
    const COUNT: usize = 1500;
    let mut rig = simulated();
    let (server, client) = rig.session();
    let window = rig.client().open_source(client, &pattern(1, 100));
    let from = rig.offer(client, window);
    // More than may wait without a look at who takes it, which takes more than a minute and a half each way.
    rig.slow_down(250_000);
    for (end, session) in [(CLIENT, client), (SERVER, server)] {
        let frame = std::rc::Rc::new(rig.ends[end].framed(&pattern(3, SMALL_BYTES_MAX)));
        for _ in 0..COUNT {
            let meta = PayloadMeta { len: SMALL_BYTES_MAX, checksum: None };
            let push = |gather: &mut Gather| gather.push_shared(std::rc::Rc::clone(&frame), 0, SMALL_BYTES_MAX);
            rig.ends[end].fabric.send_with(session, Header::new(Kind::Notice), meta, push);
        }
        assert!(rig.ends[end].fabric.queued_heap_bytes() > SESSION_HEAP_BYTES_MAX);
    }
    // The client owes this all the time, and the server does not hear it: it waits until its own queue is short.
    let into = rig.server().reactor.frames().alloc(100).unwrap();
    let RigEnd { reactor, fabric, .. } = rig.server();
    assert!(fabric.get(reactor, server, from, into, 9).is_ok());
    let mut came = [0; 2];
    rig.until("all of it", |rig| {
        for (end, came) in rig.ends.iter_mut().zip(&mut came) {
            let before = end.log.events.len();
            end.log.events.retain(|event| !matches!(event, Event::Message { kind: Kind::Notice, .. }));
            *came += before - end.log.events.len();
            let down = end.take(|event| if let Event::Down(reason) = event { Some(*reason) } else { None });
            assert_eq!(down, None, "{came} came");
        }
        (came == [COUNT; 2]).then_some(())
    });
    assert!(matches!(rig.server().take_got(), Some((9, _, Ok(())))));
}
