//! Waits that end because of what another thread does: it panics, or gives the operation away.

use std::time::Duration;

use byway_reactor::Instant as LoopInstant;

use super::{Op as NodeOp, *};
use crate::node::layer::{Layer, Turn};
use crate::node::{NodeOptions, OpId, Session};
use crate::session::CloseReason;
use crate::wire::{Header, Kind};

/// Panics when its time has come.
struct Panics;

impl Layer for Panics {
    fn began(&mut self, _: &mut Turn<'_>, _: Session, _: [u8; 16], _: bool) {}

    fn message(&mut self, _: &mut Turn<'_>, _: Session, _: Kind, _: &Header, _: &[u8]) -> bool {
        false
    }

    fn placed(&mut self, _: &mut Turn<'_>, _: Session, _: Kind, _: &Header) -> bool {
        false
    }

    fn ended(&mut self, _: &mut Turn<'_>, _: Session, _: CloseReason) {}

    fn cancelled(&mut self, _: &mut Turn<'_>, _: OpId) {}

    fn alarm(&mut self, _: &mut Turn<'_>, _: LoopInstant) {
        panic!("the layer of the test");
    }
}

/// No test waits so long unless it fails.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn until(node: &Node, mut look: impl FnMut(&mut Shared) -> bool) {
    let deadline = soon();
    while !look(&mut node.inner.tables()) {
        assert!(!deadline.has_passed(), "it never comes to this");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

const WAIT: fn(&NodeOp) -> Result<Completed, WaitError> = |op| op.wait(Deadline::NEVER);
const WAIT_IN_BACKGROUND: fn(&NodeOp) -> Result<Completed, WaitError> = |op| op.wait_in_background(Deadline::NEVER);

/// What a thread gets that waits without a deadline. The thread stays behind where the test fails.
fn waits<T: Send + 'static>(wait: impl FnOnce() -> T + Send + 'static) -> impl FnOnce() -> std::thread::Result<T> {
    let thread = std::thread::spawn(wait);
    move || {
        let deadline = soon();
        while !thread.is_finished() {
            assert!(!deadline.has_passed(), "it waits for ever");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        thread.join()
    }
}

#[test]
fn a_panic_of_the_thread_that_drives_ends_the_waits_of_the_others() {
    let node = Node::open_with(&NodeOptions::default(), Box::new(Panics)).unwrap();
    let receive = |wait: fn(&NodeOp) -> Result<Completed, WaitError>| {
        let op = node.start_receive(None).unwrap();
        waits(move || wait(&op))
    };
    let (one, other) = (receive(WAIT), receive(WAIT));
    let in_background = receive(WAIT_IN_BACKGROUND);
    until(&node, |shared| shared.followers.len() == 1);
    node.set_layer_alarm(node.now()).unwrap();
    let ended = [one().ok(), other().ok()];
    assert!(ended.contains(&None), "one has panicked: {ended:?}");
    assert!(ended.contains(&Some(Err(WaitError::Panicked))), "the other is told: {ended:?}");
    assert_eq!(in_background().unwrap(), Err(WaitError::Panicked));
    assert_eq!(node.start_receive(None).map(drop), Err(SubmitError::Panicked));
    assert_eq!(node.progress(), Err(WaitError::Panicked));
    assert_eq!(node.counters().map(drop), Err(SubmitError::Panicked));
}

#[test]
fn a_panic_ends_the_waits_for_commands_that_were_taken_and_have_not_run() {
    let node = Node::open(&NodeOptions::default()).unwrap();
    let mut engine = node.inner.try_engine().unwrap();
    let counted = waits({
        let node = node.clone();
        move || node.counters().map(drop)
    });
    until(&node, |shared| !shared.commands.is_empty());
    engine.take_commands(node.inner.tables());
    let drive = std::panic::AssertUnwindSafe(move || {
        let _engine = engine;
        panic!("the driver of the test");
    });
    assert!(std::panic::catch_unwind(drive).is_err());
    assert_eq!(counted().unwrap(), Err(SubmitError::Panicked));
}

#[test]
fn a_thread_that_drives_for_a_receive_is_told_when_a_group_gets_it() {
    let node = Node::open(&NodeOptions::default()).unwrap();
    let group = node.group(4).unwrap();
    for wait in [WAIT, WAIT_IN_BACKGROUND] {
        let op = Arc::new(node.start_receive(None).unwrap());
        let told = waits({
            let op = Arc::clone(&op);
            move || wait(&op)
        });
        until(&node, |shared| shared.ops.get(op.slot).is_some_and(|state| state.is_driven));
        group.adopt(&op, 1).unwrap();
        assert_eq!(told().unwrap(), Err(WaitError::Taken));
    }
}
