//! The call protocol between two ends: whatever messages come, in whatever order, every call ends at most once, and credit is kept.
#![no_main]

use byway_fabric::SessionId;
use byway_fabric::wire::{BODY_BYTES, Header, Kind};
use byway_reactor::Instant;
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, CallRef, Calls, Event, Grant, Spoken, Versions};
use libfuzzer_sys::fuzz_target;

const PROTOCOL: u8 = 1;
const CALLS: u16 = 8;
const SESSION: SessionId = SessionId::new(0, 1);
const KINDS: [Kind; 6] = [Kind::Call, Kind::Reply, Kind::Notice, Kind::Cancel, Kind::NoticeCredit, Kind::Protocols];

fuzz_target!(|bytes: &[u8]| {
    let grant = Some(Grant { calls: CALLS, notices: 4 });
    let spoken = vec![Spoken { protocol: PROTOCOL, versions: Versions { oldest: 1, newest: 2 }, grant }];
    let (mut calls, mut peer) = (Calls::<usize>::new([1; 16], spoken.clone()), Calls::<usize>::new([2; 16], spoken));
    calls.up(SESSION, [3; 16], false);
    peer.up(SESSION, [3; 16], true);
    for hello in peer.outbox().drain(..) {
        let _ = calls.message(SESSION, Kind::Protocols, &hello.header, &hello.payload);
    }
    let (mut ended, mut owed) = (Vec::new(), Vec::new());
    let ask = Ask { protocol: PROTOCOL, method: 1, arguments: &Inline::EMPTY, windows: 0 };
    for step in bytes.chunks_exact(16) {
        let outcome = match step[0] % 4 {
            0 => {
                let _ = calls.call(SESSION, &ask, ended.len(), Instant::from_nanos(0), Instant::FAR).map(|_| ended.push(false));
                continue;
            }
            1 => {
                let call: Option<CallRef> = owed.pop();
                call.and_then(|call| calls.reply(call, 0, 0, &Inline::EMPTY));
                continue;
            }
            2 => {
                let mut header = Header::new(Kind::Data);
                body_of(&mut header, step);
                calls.placed(SESSION, Kind::Data, &header)
            }
            _ => {
                let kind = KINDS[usize::from(step[1]) % KINDS.len()];
                let mut header = Header::new(kind);
                header.flags = step[2];
                body_of(&mut header, step);
                let Ok(event) = calls.message(SESSION, kind, &header, &step[..usize::from(step[3] % 16)]) else { return };
                event
            }
        };
        match outcome {
            Event::Ended(call, ..) => assert!(!std::mem::replace(&mut ended[call], true), "a call ended twice"),
            Event::Called(call, _) => owed.push(call),
            _ => {}
        }
        assert!(calls.calls_in(SESSION) <= usize::from(CALLS) && calls.calls_out(SESSION) <= usize::from(CALLS));
        calls.outbox().clear();
    }
});

/// A body whose call number is often one that is in flight, and whose other bytes are the input's.
fn body_of(header: &mut Header, step: &[u8]) {
    header.body = [step[15]; BODY_BYTES];
    header.body[..8].fill(0);
    header.body[0] = step[4] % 10;
    header.body[4] = step[5] % 3;
    header.body[7..15].copy_from_slice(&step[7..15]);
}
