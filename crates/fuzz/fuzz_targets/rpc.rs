//! The tables of calls: whatever messages come, in whatever order, every call ends at most once.
#![no_main]

use byway_fabric::wire::{BODY_BYTES, Header, Kind};
use byway_reactor::Instant;
use byway_rpc::wire::ReplyBody;
use byway_rpc::{Calls, Inbound, Progress};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut calls = Calls::default();
    calls.grant(8);
    let mut inbound = Inbound::new(8);
    let mut ended = Vec::new();
    for step in bytes.chunks_exact(4) {
        let id = u64::from(step[1] % 10) | u64::from(step[2]) << 32;
        match step[0] % 5 {
            0 if calls.may_start() => {
                let next = ended.len();
                ended.push(false);
                calls.start(next, Instant::from_nanos(0));
            }
            1 => {
                let mut header = Header::new(Kind::Reply);
                header.body = [step[3]; BODY_BYTES];
                let mut reply: ReplyBody = header.body();
                reply.call.set(id);
                reply.total.set(u32::from(step[3]));
                end(&mut ended, calls.replied(&reply, usize::from(step[3] / 2)));
            }
            2 => end(&mut ended, calls.placed(id, usize::from(step[3]))),
            3 => drop(inbound.begin(id)),
            _ => inbound.end(id),
        }
        assert!(inbound.count() <= 8 && calls.len() <= 8);
    }
});

fn end(ended: &mut [bool], progress: Progress<usize>) {
    if let Progress::Complete(call, _) = progress {
        assert!(!std::mem::replace(&mut ended[call], true), "a call ended twice");
    }
}
