//! Waiting for descriptors that something else reads.

use std::os::fd::{AsFd, OwnedFd};

use byway_reactor::{Descriptor, Errno, Op, Outcome};
use rustix::event::{EventfdFlags, eventfd};

use crate::rig::Rig;

/// An eventfd, and the loop's handle to a duplicate of it; none in a simulation, which must refuse.
fn event(rig: &mut Rig) -> Option<(OwnedFd, Descriptor)> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let added = rig.loops[0].add_descriptor(event.try_clone().expect("a duplicate"));
    if !rig.is_real() {
        assert_eq!(added.unwrap_err().kind(), std::io::ErrorKind::Unsupported);
        return None;
    }
    Some((event, added.expect("added")))
}

fn ring(event: impl AsFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).expect("an eventfd takes a count");
}

fn clear(event: impl AsFd) {
    rustix::io::read(event, &mut [0; 8]).expect("there is a count");
}

pub fn a_wait_ends_when_there_is_something_to_read(rig: &mut Rig) {
    let Some((event, descriptor)) = event(rig) else { return };
    let first = rig.submit(0, Op::Readable { descriptor });
    rig.settle();
    assert!(rig.taken(0, first).is_none(), "nothing is there");
    assert!(matches!(rig.run(0, Op::Readable { descriptor }), Outcome::Readable(Err(Errno::BUSY))));
    ring(&event);
    assert!(matches!(rig.wait(0, first), Outcome::Readable(Ok(()))));
    // It is still readable, and says so as often as it is asked, but no more than once each time.
    for _ in 0..3 {
        let again = rig.submit(0, Op::Readable { descriptor });
        assert!(matches!(rig.wait(0, again), Outcome::Readable(Ok(()))));
        rig.settle();
        assert!(rig.taken(0, again).is_none(), "a wait ends once");
    }
    clear(&event);
    let last = rig.submit(0, Op::Readable { descriptor });
    rig.settle();
    assert!(rig.taken(0, last).is_none(), "it was read empty");
    ring(&event);
    assert!(matches!(rig.wait(0, last), Outcome::Readable(Ok(()))));
}

pub fn a_wait_that_is_cancelled_or_removed_ends_once(rig: &mut Rig) {
    let Some((event, descriptor)) = event(rig) else { return };
    let cancelled = rig.submit(0, Op::Readable { descriptor });
    rig.settle();
    rig.loops[0].cancel(cancelled);
    assert!(matches!(rig.wait(0, cancelled), Outcome::Readable(Err(Errno::CANCELED))));
    ring(&event);
    rig.settle();
    assert!(rig.taken(0, cancelled).is_none(), "an operation completes once");
    // The same descriptor can be waited for again.
    assert!(matches!(rig.run(0, Op::Readable { descriptor }), Outcome::Readable(Ok(()))));
    clear(&event);
    let removed = rig.submit(0, Op::Readable { descriptor });
    rig.loops[0].remove_descriptor(descriptor);
    assert!(matches!(rig.wait(0, removed), Outcome::Readable(Err(Errno::CANCELED))));
    ring(&event);
    rig.settle();
    assert!(rig.taken(0, removed).is_none(), "an operation completes once");
    assert!(matches!(rig.run(0, Op::Readable { descriptor }), Outcome::Readable(Err(Errno::BADF))));
    rig.loops[0].remove_descriptor(descriptor);
}

pub fn a_removed_descriptor_is_closed(rig: &mut Rig) {
    if !rig.is_real() {
        return;
    }
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let descriptor = rig.loops[0].add_descriptor(theirs.into()).expect("added");
    let wait = rig.submit(0, Op::Readable { descriptor });
    rig.settle();
    rig.loops[0].remove_descriptor(descriptor);
    assert!(matches!(rig.wait(0, wait), Outcome::Readable(Err(Errno::CANCELED))));
    assert_eq!(rustix::io::read(&ours, &mut [0; 8]), Ok(0), "the other end has hung up");
}

pub fn a_hang_up_ends_a_wait(rig: &mut Rig) {
    if !rig.is_real() {
        return;
    }
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    let descriptor = rig.loops[0].add_descriptor(read).expect("added");
    let wait = rig.submit(0, Op::Readable { descriptor });
    rig.settle();
    assert!(rig.taken(0, wait).is_none(), "nothing is there");
    drop(write);
    assert!(matches!(rig.wait(0, wait), Outcome::Readable(Ok(()))));
}
