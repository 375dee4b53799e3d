//! Messages: their order, their payloads, many sessions.

use byway_fabric::limits::{SESSION_HEAP_BYTES_MAX, SMALL_BYTES_MAX};
use byway_fabric::wire::{HEADER_BYTES, Header, Kind};
use byway_fabric::{PayloadMeta, Put, SessionId};
use byway_reactor::Wait;

use crate::rig::{CLIENT, Event, Rig, RigEnd, SERVER, pattern};

fn lens() -> Vec<usize> {
    let edges = [0, 1, 16, 127, 128, 4095, 4096, 4097, SMALL_BYTES_MAX - 1, SMALL_BYTES_MAX];
    (0..40).flat_map(|_| edges).collect()
}

fn send(rig: &mut Rig, end: usize, session: SessionId, number: usize, len: usize) {
    let kind = if end == CLIENT { Kind::Call } else { Kind::Reply };
    let mut header = Header::new(kind);
    header.body[..8].copy_from_slice(&(number as u64).to_le_bytes());
    let payload = pattern(number as u64, len);
    let meta = PayloadMeta { len, checksum: None };
    rig.ends[end].fabric.send_with(session, header, meta, |gather| gather.push_head(&payload));
}

pub fn messages_come_in_order_with_their_payloads(rig: &mut Rig) {
    let (server, client) = rig.session();
    for (number, len) in lens().into_iter().enumerate() {
        send(rig, CLIENT, client, number, len);
        send(rig, SERVER, server, number, len);
    }
    for (end, kind) in [(SERVER, Kind::Call), (CLIENT, Kind::Reply)] {
        for (number, len) in lens().into_iter().enumerate() {
            let (header, payload) = rig.until("the next message", |rig| {
                rig.ends[end].take(|event| match event {
                    Event::Message { kind: came, header, payload, .. } if *came == kind => {
                        Some((*header, payload.clone()))
                    }
                    _ => None,
                })
            });
            assert_eq!(header.body[..8], (number as u64).to_le_bytes(), "in order");
            assert_eq!(payload, pattern(number as u64, len), "message {number}");
        }
    }
}

pub fn many_sessions_are_served_together(rig: &mut Rig) {
    const SESSIONS: usize = 40;
    let sessions: Vec<(SessionId, SessionId)> = (0..SESSIONS).map(|_| rig.session()).collect();
    let windows: Vec<_> =
        sessions.iter().map(|(_, client)| (rig.client().open_target(*client, 32_768), *client)).collect();
    for (at, ((server, _), (window, client))) in sessions.iter().zip(&windows).enumerate() {
        let to = rig.offer(*client, *window);
        rig.put(*server, to, &pattern(at as u64, 32_768), at as u8);
    }
    for _ in 0..SESSIONS {
        rig.placed();
    }
    for (at, (window, _)) in windows.iter().enumerate() {
        assert!(rig.client().close_target(*window) == pattern(at as u64, 32_768), "session {at}");
    }
    assert_eq!((rig.server().fabric.session_count(), rig.client().fabric.session_count()), (SESSIONS, SESSIONS));
}

/// A put that the client does not take yet has almost all the heap that a session may have, and messages come whose answers are too
/// much for it: those are sent where they can be, and then there is room again in the middle of what was received.
pub fn messages_that_were_held_back_for_answers_are_all_answered(rig: &mut Rig) {
    const MESSAGES: usize = 40;
    // Room for four answers.
    const HEADS: usize = SESSION_HEAP_BYTES_MAX - HEADER_BYTES - 4 * HEADER_BYTES;
    // More than a ring of shared memory has room for.
    const LEN: usize = HEADS + (512 << 10);
    let (server, client) = rig.session();
    let window = rig.client().open_target(client, LEN);
    let to = rig.offer(client, window);
    rig.server().log.answers = true;
    for _ in 0..MESSAGES {
        rig.client().fabric.send(client, Header::new(Kind::Message));
    }
    rig.client().turn(Wait::Poll);
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[SERVER];
    let (route, payload) = (fabric.route(server), PayloadMeta { len: LEN, checksum: None });
    let head = vec![9; HEADS];
    let put = Put { session: server, route, to, header: Header::new(Kind::Data), payload };
    let put = fabric.put(reactor, put, |gather| {
        gather.push_head(&head);
        gather.push_zeroes(LEN - HEADS);
    });
    put.expect("heads can be read");
    for _ in 0..20 {
        rig.server().turn(Wait::Poll);
    }
    let notice = |event: &Event| matches!(event, Event::Message { kind: Kind::Notice, .. }).then_some(());
    for answer in 0..MESSAGES {
        rig.until(&format!("answer {answer}"), |rig| rig.client().take(notice));
    }
    rig.placed();
    let came = rig.client().close_target(window);
    assert!(came[..HEADS] == head && came[HEADS..].iter().all(|byte| *byte == 0));
}
