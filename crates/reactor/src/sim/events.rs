//! The queue of future events, in order of time, then of scheduling.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::Instant;

/// Names a planned event, to take it back.
pub(super) type Key = (Instant, u64);

/// Something that happens at its time.
#[derive(Debug)]
pub(super) enum Event {
    /// A timer of a loop is due.
    Timer { node: u64, op: u64 },
    /// A file operation of a loop ends.
    Disk { node: u64, op: u64 },
    /// A connect reaches the host that it is for.
    Syn { node: u64, op: u64 },
    /// A connect's answer is back: a connection, or a refusal.
    SynAck { node: u64, op: u64, connection: Option<u64> },
    /// A connect gives up.
    ConnectTimeout { node: u64, op: u64 },
    /// The first segment that end `from` of a connection sent arrives.
    Arrive { connection: u64, from: usize },
    /// An end of a connection has heard nothing for too long.
    Silent { connection: u64, end: usize },
    /// A partition of the fault plan ends.
    Heal { a: IpAddr, b: IpAddr },
}

#[derive(Debug, Default)]
pub(super) struct Events {
    queue: BTreeMap<Key, Event>,
    next: u64,
}

impl Events {
    pub(super) fn add(&mut self, at: Instant, event: Event) -> Key {
        self.next += 1;
        let key = (at, self.next);
        self.queue.insert(key, event);
        key
    }

    /// Takes an event back, if it has not happened.
    pub(super) fn remove(&mut self, key: Option<Key>) {
        if let Some(key) = key {
            self.queue.remove(&key);
        }
    }

    pub(super) fn next_at(&self) -> Option<Instant> {
        self.queue.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn pop(&mut self) -> Option<(Instant, Event)> {
        self.queue.pop_first().map(|((at, _), event)| (at, event))
    }
}
