//! A client's files and locks after its session has ended.
//!
//! A client names itself at each attach. When its session ends without a `Detach`, its state is kept for the grace time:
//! nodes, open files, locks and answers. The client's next session continues with it, on any loop; no other client has had
//! the locks meanwhile. A second session of a client ends the first, and begins when all calls of the first have ended: no
//! old write lands over a new one.
//!
//! A new server process remembers only which clients had locks or leases ([`state`]). Until these have come back, or the grace
//! time has passed, it gives back the locks that clients say they had and gives no others, and changes no files that clients
//! may have cached ([`Grace`]). A client that was disconnected while a third process could have given its locks away does not
//! ask (`client/`).

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use byway_fabric::SessionId;
use byway_fabric::access::Identity;
use byway_reactor::Instant;

use super::super::grace::{ClientHolding, Grace, Holding};
use super::super::share::Share;
use super::super::state;
use super::super::wire::ClientName;
use super::Mailbox;
use super::leases::LeaseTable;
use super::open_files::OpenFiles;
use super::refusals::Refusals;
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
    leases: LeaseTable,
    open_files: OpenFiles,
    refusals: Mutex<Refusals<Identity>>,
    grace: Mutex<Expecting>,
    /// Set when there is no grace: asked without the lock.
    grace_is_over: AtomicBool,
    lists: Mutex<()>,
}

/// Clients of the process before, and the shares whose lists were read.
#[derive(Debug, Default)]
struct Expecting {
    grace: Grace<ClientName>,
    shares: Vec<Arc<Share>>,
    /// Shares whose list could not be read or was too long, and when their grace ends.
    unread: Vec<(Arc<Share>, Instant)>,
    /// Shares with files that were kept for clients of the process before, and when those are removed that no client came back to.
    kept: Vec<(Arc<Share>, Instant)>,
}

impl Recovery {
    /// A server process; `instance` tells it from all others, also from this program's next start.
    pub fn new(instance: u64) -> Self {
        Self::with_times(instance, FILE_GRACE, FILE_GRACE)
    }

    /// The same with other grace times, for tests: how long after its start it gives no new locks, and how long it keeps what a client had.
    pub fn with_times(instance: u64, grace_at_start: Duration, kept_for: Duration) -> Self {
        let (started, known, grace) = (OnceLock::new(), Mutex::default(), Mutex::default());
        let (leases, refusals) = (LeaseTable::default(), Mutex::default());
        Self {
            instance,
            grace_at_start,
            kept_for,
            started,
            known,
            leases,
            open_files: OpenFiles::default(),
            refusals,
            grace,
            grace_is_over: AtomicBool::new(true),
            lists: Mutex::default(),
        }
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

    /// Shares are served from now on: their clients of an earlier process are expected. Gives until when, if there are any, or a list has to
    /// be cleaned then.
    pub(super) fn expect(&self, shares: &[Arc<Share>], now: Instant) -> Option<Instant> {
        let mut expecting = self.expecting();
        let is_new = |share: &&Arc<Share>| !expecting.shares.iter().any(|known| Arc::ptr_eq(known, share));
        let new: Vec<_> = shares.iter().filter(is_new).map(Arc::clone).collect();
        for share in &new {
            share.replaces(&expecting.shares);
        }
        expecting.shares = shares.to_vec();
        let is_served = |(share, _): &(Arc<Share>, Instant)| shares.iter().any(|served| Arc::ptr_eq(share, served));
        expecting.unread.retain(is_served);
        expecting.kept.retain(is_served);
        let until = now + self.grace_at_start;
        for share in &new {
            if state::kept::for_each(share.root().as_fd(), |_, _| ControlFlow::Break(()))
                .is_ok_and(|end| end.is_break())
            {
                expecting.kept.push((Arc::clone(share), until));
            }
            let list = if share.can_list() { state::listed(share.root().as_fd()) } else { Ok(None) };
            if let Ok(Some(clients)) = list {
                // A reload finds those of this process on the list.
                let here: HashSet<_> = self.known().clients.keys().map(|(name, _)| *name).collect();
                for ClientHolding { held, client } in
                    clients.into_iter().filter(|holding| !here.contains(&holding.client))
                {
                    expecting.grace.expect(held, client, until);
                }
            } else {
                // What a reload adds had no clients of the process before.
                let until = self.started.get().map_or(until, |started| *started + self.grace_at_start);
                expecting.grace.expect_any(Holding::Locks, until);
                if share.gives_leases() {
                    expecting.grace.expect_any(Holding::Leases, until);
                }
                if share.can_list() {
                    expecting.unread.push((Arc::clone(share), until));
                }
            }
        }
        let is_over = expecting.grace.is_over(now);
        self.grace_is_over.store(is_over, Ordering::Release);
        (!is_over || !expecting.unread.is_empty() || !expecting.kept.is_empty()).then_some(until)
    }

    /// One table for all shares: they may overlap, and a reload replaces them.
    pub(super) fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    /// One table for all shares, as for leases.
    pub(super) fn open_files(&self) -> OpenFiles {
        self.open_files.clone()
    }

    /// Peers that get no leases for a while.
    pub(super) fn refusals(&self) -> MutexGuard<'_, Refusals<Identity>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while a client is put on the lists, and while it is taken off, which is done unless it is known by then: a client may come
    /// back while it is being forgotten.
    pub(super) fn lists(&self) -> MutexGuard<'_, ()> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a client has a session, or is kept.
    pub(super) fn knows(&self, client: &ClientName) -> bool {
        self.known().clients.keys().any(|(name, _)| name == client)
    }

    fn expecting(&self) -> MutexGuard<'_, Expecting> {
        self.grace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what clients held before this process began is kept for them.
    pub(super) fn is_in_grace(&self, held: Holding, now: Instant) -> bool {
        !self.grace_is_over.load(Ordering::Acquire) && self.expecting().grace.is_on(held, now)
    }

    /// A client has asked for all that it had. Gives for what it may be on a list.
    pub(super) fn completed(&self, client: &ClientName, now: Instant) -> Vec<Holding> {
        let mut expecting = self.expecting();
        let had = expecting.grace.completed(client);
        self.grace_is_over.store(expecting.grace.is_over(now), Ordering::Release);
        if expecting.unread.is_empty() { had } else { vec![Holding::Locks, Holding::Leases] }
    }

    /// The grace time may have passed: gives the clients that have not come back, and the shares whose lists they are on.
    pub(super) fn missing(&self, now: Instant) -> (Vec<ClientHolding<ClientName>>, Vec<Arc<Share>>) {
        let mut expecting = self.expecting();
        let missing = expecting.grace.missing(now);
        self.grace_is_over.store(expecting.grace.is_over(now), Ordering::Release);
        (missing, expecting.shares.clone())
    }

    /// The grace time may have passed: takes the shares whose lists were not read, to be cleaned.
    pub(super) fn unread(&self, now: Instant) -> Vec<Arc<Share>> {
        let mut expecting = self.expecting();
        expecting.unread.extract_if(.., |(_, until)| *until <= now).map(|(share, _)| share).collect()
    }

    /// The grace time may have passed: takes the shares with kept files that no client came back to.
    pub(super) fn kept(&self, now: Instant) -> Vec<Arc<Share>> {
        let mut expecting = self.expecting();
        expecting.kept.extract_if(.., |(_, until)| *until <= now).map(|(share, _)| share).collect()
    }

    /// Whether a share may have files that were kept for clients of the process before.
    pub(super) fn may_have_kept(&self, share: &Arc<Share>) -> bool {
        self.expecting().kept.iter().any(|(other, _)| Arc::ptr_eq(share, other))
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

    /// A client's session has ended. Where too many are away, gives what is kept of one of them: of the peer that has the most clients
    /// away, the one whose time ends first.
    pub(super) fn keep<P: Eq + Hash>(
        &mut self,
        key: K,
        kept: T,
        until: Instant,
        peer_of: impl Fn(&K) -> P,
    ) -> Option<T> {
        let full = self.away >= FILE_CLIENTS_AWAY_MAX;
        let displaced = full.then(|| self.first_to_displace(peer_of)).flatten().and_then(|key| self.take(&key));
        self.clients.insert(key, State::Away { kept, until });
        self.away += 1;
        displaced
    }

    fn first_to_displace<P: Eq + Hash>(&self, peer_of: impl Fn(&K) -> P) -> Option<K> {
        let away = || {
            self.clients.iter().filter_map(|(key, state)| match state {
                State::Away { until, .. } => Some((key, *until)),
                State::Here(_) => None,
            })
        };
        let mut counts: HashMap<P, usize> = HashMap::new();
        for (key, _) in away() {
            *counts.entry(peer_of(key)).or_default() += 1;
        }
        let count = |key: &K| counts.get(&peer_of(key)).copied().unwrap_or(0);
        away().max_by_key(|(key, until)| (count(key), std::cmp::Reverse(*until))).map(|(key, _)| key.clone())
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
        assert_eq!(known.keep(1, "files", at(15), |_| 0), None);
        assert!(known.expired(at(14)).is_empty());
        assert_eq!(known.claim(&1, "second"), Claim::Resumed("files"));
        assert_eq!(known.keep(1, "files", at(35), |_| 0), None);
        assert_eq!(known.expired(at(35)), ["files"]);
        assert_eq!(known.claim(&1, "third"), Claim::New);
        known.leave(&1);
        assert_eq!(known.claim(&1, "fourth"), Claim::New, "it said that it would not come back");
    }

    #[test]
    fn clients_that_are_away_have_a_bound() {
        let mut known: Known<usize, (), usize> = Known::default();
        for client in 0..FILE_CLIENTS_AWAY_MAX {
            assert_eq!(known.keep(client, client, at(1000 - client as u64 % 7), |_| 0), None);
        }
        let displaced = known.keep(5000, 5000, at(2000), |_| 0).unwrap();
        assert_eq!(displaced % 7, 6, "one of those whose time ends first");
        assert_eq!(known.expired(at(2000)).len(), FILE_CLIENTS_AWAY_MAX);
        assert_eq!((known.away, known.clients.len()), (0, 0));
    }

    #[test]
    fn a_peer_with_many_clients_displaces_its_own() {
        let mut known: Known<(u8, usize), (), &str> = Known::default();
        let peer = |key: &(u8, usize)| key.0;
        assert_eq!(known.keep((1, 0), "honest", at(10), peer), None);
        for client in 0..3 * FILE_CLIENTS_AWAY_MAX {
            assert_ne!(known.keep((2, client), "one of many", at(20), peer), Some("honest"));
        }
        assert_eq!(known.claim(&(1, 0), ()), Claim::Resumed("honest"));
    }

    #[test]
    fn the_uptime_is_that_of_the_first_loop() {
        let recovery = Recovery::new(7);
        recovery.start(at(100));
        recovery.start(at(110));
        assert_eq!(recovery.uptime(at(130)), Duration::from_secs(30));
    }
}
