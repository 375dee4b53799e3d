//! A client's files and locks after its session has ended.
//!
//! A client names itself at each attach. When its session ends without a `Detach`, its state is kept for the grace time:
//! nodes, open files, locks and answers. The client's next session continues with it, on any loop; no other client has had
//! the locks meanwhile. A second session of a client ends the first, and begins when all calls of the first have ended: no
//! old write lands over a new one.
//!
//! A new server process remembers nothing. For the grace time after its start it gives back the locks that clients say they
//! had, and gives no others. A client that was disconnected while a third process could have given its locks away does not
//! ask (`client/`).

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use byway_fabric::SessionId;
use byway_fabric::access::Identity;
use byway_reactor::Instant;

use super::super::wire::ClientName;
use super::Mailbox;
use super::table::Client;
use crate::limits::{FILE_CLIENTS_AWAY_MAX, FILE_GRACE};

/// A client in all its sessions. A name counts for the peer that gave it.
pub(super) type ClientKey = (ClientName, Identity);

/// Where a client's session lives.
#[derive(Clone, Debug)]
pub(super) struct Home {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) session: SessionId,
}

/// What all loops of a server process know of its clients of files.
#[derive(Debug)]
pub struct Recovery {
    instance: u64,
    grace_at_start: Duration,
    kept_for: Duration,
    started: OnceLock<Instant>,
    known: Mutex<Known<ClientKey, Home, Client>>,
}

impl Recovery {
    /// A server process; `instance` tells it from all others, also from this program's next start.
    pub fn new(instance: u64) -> Self {
        Self::with_times(instance, FILE_GRACE, FILE_GRACE)
    }

    /// The same with other grace times, for tests: how long after its start it gives no new locks, and how long it keeps what a client had.
    pub fn with_times(instance: u64, grace_at_start: Duration, kept_for: Duration) -> Self {
        Self { instance, grace_at_start, kept_for, started: OnceLock::new(), known: Mutex::default() }
    }

    /// How long what a client had is kept.
    pub(super) fn kept_for(&self) -> Duration {
        self.kept_for
    }

    pub(super) fn instance(&self) -> u64 {
        self.instance
    }

    /// A loop serves files from now on; the first one's time counts.
    pub(super) fn start(&self, now: Instant) {
        self.started.get_or_init(|| now);
    }

    pub(super) fn uptime(&self, now: Instant) -> Duration {
        self.started.get().map_or(Duration::ZERO, |started| now.since(*started))
    }

    /// Whether locks are for those alone who had them before this process began.
    pub(super) fn is_in_grace(&self, now: Instant) -> bool {
        self.uptime(now) < self.grace_at_start
    }

    pub(super) fn known(&self) -> MutexGuard<'_, Known<ClientKey, Home, Client>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Clients with a session, at a home `H`, and clients without one, of whom `T` is kept. Pure.
#[derive(Debug)]
pub(super) struct Known<K, H, T> {
    clients: HashMap<K, State<H, T>>,
    away: usize,
}

#[derive(Debug)]
enum State<H, T> {
    Here(H),
    Away { kept: T, until: Instant },
}

/// What a client finds that attaches.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim<H, T> {
    /// Nothing is kept of it.
    New,
    /// This.
    Resumed(T),
    /// Its session there has to end first.
    Wait(H),
}

impl<K, H, T> Default for Known<K, H, T> {
    fn default() -> Self {
        Self { clients: HashMap::new(), away: 0 }
    }
}

impl<K: Clone + Eq + Hash, H: Clone, T> Known<K, H, T> {
    /// A client attaches in a session at `home`.
    pub(super) fn claim(&mut self, key: &K, home: H) -> Claim<H, T> {
        if let Some(State::Here(old)) = self.clients.get(key) {
            return Claim::Wait(old.clone());
        }
        match self.clients.insert(key.clone(), State::Here(home)) {
            Some(State::Away { kept, .. }) => {
                self.away -= 1;
                Claim::Resumed(kept)
            }
            _ => Claim::New,
        }
    }

    /// A client's session has ended. Gives what is kept too long by now: that of the client that would be let go first, where too many are
    /// away.
    pub(super) fn keep(&mut self, key: K, kept: T, until: Instant) -> Option<T> {
        let first = |(key, state): (&K, &State<H, T>)| match state {
            State::Away { until, .. } => Some((key.clone(), *until)),
            State::Here(_) => None,
        };
        let full = self.away >= FILE_CLIENTS_AWAY_MAX;
        let displaced = full.then(|| self.clients.iter().filter_map(first).min_by_key(|(_, until)| *until)).flatten();
        let displaced = displaced.and_then(|(key, _)| self.take(&key));
        self.clients.insert(key, State::Away { kept, until });
        self.away += 1;
        displaced
    }

    fn take(&mut self, key: &K) -> Option<T> {
        match self.clients.remove(key) {
            Some(State::Away { kept, .. }) => {
                self.away -= 1;
                Some(kept)
            }
            _ => None,
        }
    }

    /// A client does not come back.
    pub(super) fn leave(&mut self, key: &K) {
        self.take(key);
    }

    /// What was kept long enough.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<T> {
        let due = |state: &State<H, T>| matches!(state, State::Away { until, .. } if *until <= now);
        let due: Vec<K> = self.clients.iter().filter(|(_, state)| due(state)).map(|(key, _)| key.clone()).collect();
        due.iter().filter_map(|key| self.take(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_client_goes_on_where_it_was_after_its_old_session_has_ended() {
        let mut known = Known::default();
        assert_eq!(known.claim(&1, "first"), Claim::New);
        assert_eq!(known.claim(&1, "second"), Claim::Wait("first"));
        assert_eq!(known.keep(1, "files", at(15)), None);
        assert!(known.expired(at(14)).is_empty());
        assert_eq!(known.claim(&1, "second"), Claim::Resumed("files"));
        assert_eq!(known.keep(1, "files", at(35)), None);
        assert_eq!(known.expired(at(35)), ["files"]);
        assert_eq!(known.claim(&1, "third"), Claim::New);
        known.leave(&1);
        assert_eq!(known.claim(&1, "fourth"), Claim::New, "it said that it would not come back");
    }

    #[test]
    fn clients_that_are_away_have_a_bound() {
        let mut known: Known<usize, (), usize> = Known::default();
        for client in 0..FILE_CLIENTS_AWAY_MAX {
            assert_eq!(known.keep(client, client, at(1000 - client as u64 % 7)), None);
        }
        let displaced = known.keep(5000, 5000, at(2000)).unwrap();
        assert_eq!(displaced % 7, 6, "one of those whose time ends first");
        assert_eq!(known.expired(at(2000)).len(), FILE_CLIENTS_AWAY_MAX);
        assert_eq!((known.away, known.clients.len()), (0, 0));
    }

    #[test]
    fn a_new_process_gives_locks_back_for_a_while() {
        let recovery = Recovery::new(7);
        recovery.start(at(100));
        recovery.start(at(110));
        assert!(recovery.is_in_grace(at(114)) && !recovery.is_in_grace(at(115)));
        assert_eq!(recovery.uptime(at(130)), Duration::from_secs(30));
    }
}
