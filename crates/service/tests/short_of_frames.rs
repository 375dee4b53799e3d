//! Requests for more frames than there are.

mod harness;

use std::rc::Rc;
use std::time::{Duration, Instant};

use byway_fabric::Options;
use byway_fabric::tls::ServerTls;
use byway_reactor::{Reactor, Wait};
use byway_service::block::client::{Request, Volume, VolumeOptions};
use harness::{Running, SERVER, each_wire, memory, pattern};

/// No probe wakes anybody up.
const KEEP_ALIVE: Duration = Duration::from_mins(10);
const LEN: usize = 1 << 20;
/// Room for half of what is asked for, at most.
const FRAMES: usize = 4 << 20;

/// Over shared memory a piece is fetched, written and given back without a completion: whoever waits for its frame is not to wait
/// for something else to happen.
#[test]
fn what_waits_for_frames_goes_on_when_they_are_back_and_nobody_says_more() {
    each_wire(|wire| {
        let count = 8;
        let options = Options { keep_alive: KEEP_ALIVE, ..Options::new(SERVER) };
        let server = Running::start_short(wire, None, 1, (options, ServerTls::Off), FRAMES, vec![memory(16 << 20)]);
        let mut reactor = Reactor::open(wire.io, 64 << 20).unwrap();
        let mut options = VolumeOptions::new(0x30);
        options.fabric.keep_alive = KEEP_ALIVE;
        let mut client = Volume::connect(&reactor, server.address.clone(), "disk", options);
        let (mut done, mut completions) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut asked = false;
        while done.len() < count {
            client.flush(&mut reactor);
            client.reap(&mut done);
            if client.info().is_some() && !std::mem::replace(&mut asked, true) {
                for slot in 0..count {
                    let mut frame = client.alloc(&reactor, LEN).unwrap();
                    frame.write(0, &pattern(LEN, slot as u64));
                    let offset = (slot * LEN) as u64;
                    let write = Request::Write { offset, len: LEN, from: Rc::new(frame), durable: false };
                    client.submit(write, slot as u64).unwrap();
                }
                continue;
            }
            assert!(Instant::now() < deadline, "{wire:?}: {} of {count} are done", done.len());
            let wait = Wait::Until(reactor.now() + Duration::from_millis(20));
            reactor.reap(&mut completions, wait).unwrap();
            for completion in completions.drain(..) {
                client.handle(&mut reactor, completion);
            }
        }
        assert!(done.iter().all(|done| done.result.is_ok()), "{wire:?}");
    });
}
