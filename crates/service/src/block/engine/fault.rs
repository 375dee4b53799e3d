//! Injected faults, as the rules of a `fault:` store say: for tests of the layers above.

use std::time::Duration;

use byway_reactor::{Errno, Instant, Op};

/// What a store's rules say of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::block) struct Fault {
    /// It waits that long first.
    pub(in crate::block) delay: Duration,
    pub(in crate::block) effect: Option<Effect>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::block) enum Effect {
    /// The store is not asked.
    Error(Errno),
    /// The store moves half of it.
    Short,
}

/// A fault of one operation of a request.
pub(super) struct RunFault {
    /// What is to be done when the delay is over.
    pub(super) delayed: Option<Op>,
    /// What it answers, whatever the store said.
    pub(super) error: Option<Errno>,
}

impl RunFault {
    /// Puts a fault into an operation: gives what is to be submitted now.
    pub(super) fn put_in(fault: Fault, op: Op, now: Instant) -> (Option<Box<Self>>, Op) {
        let timer = Op::Timer { at: now + fault.delay };
        let (op, error) = match (fault.effect, op) {
            (None, op) => (op, None),
            (Some(Effect::Short), Op::Read { file, offset, into, start, len }) if len > 1 => {
                (Op::Read { file, offset, into, start, len: len / 2 }, None)
            }
            (Some(Effect::Short), Op::Write { file, offset, from, start, len, durable }) if len > 1 => {
                (Op::Write { file, offset, from, start, len: len / 2, durable }, Some(Errno::IO))
            }
            (Some(Effect::Short), _) => return (Some(Box::new(Self { delayed: None, error: Some(Errno::IO) })), timer),
            (Some(Effect::Error(error)), _) => {
                return (Some(Box::new(Self { delayed: None, error: Some(error) })), timer);
            }
        };
        if fault.delay.is_zero() {
            return (Some(Box::new(Self { delayed: None, error })), op);
        }
        (Some(Box::new(Self { delayed: Some(op), error })), timer)
    }
}
