//! The state of sessions that all loops of a server share: the loop of each session, and the one session of each client that
//! may work.
//!
//! A client's new session starts only when all I/O of its old one has ended, so that an old write cannot land after the
//! client has repeated it. Only handshakes come here, so a mutex is enough.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Detached, Waker};

use crate::limits::CLIENTS_REMEMBERED_MAX;
use crate::rdma::transport::Asked;
use crate::session::{ClientId, Identity};
use crate::tls::TlsStream;
use crate::wire::{Header, Hello};

/// A loop of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopId(usize);

/// The result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The session may start.
    Granted,
    /// The client's old session has I/O in flight: ask again when woken.
    Wait,
    /// A newer session of this client exists.
    Stale,
}

/// A lane that arrived at another loop than its session's, or than the one that its session is to begin on.
#[derive(Debug)]
pub struct HandedLane {
    /// The connection, from which the `Hello` was read and nothing else.
    pub connection: Detached,
    /// The `Hello`.
    pub hello: Header,
    /// Its TLS, if it has it.
    pub tls: Option<TlsStream>,
    /// Of one that begins a session: the loop that it goes back to, if there is no room for it.
    pub from: Option<LoopId>,
}

/// A session that has not begun, and is counted for its loop until this is dropped.
#[derive(Debug)]
pub struct SessionReservation {
    registry: Arc<Registry>,
    home: LoopId,
}

impl SessionReservation {
    /// The loop.
    pub fn home(&self) -> LoopId {
        self.home
    }
}

impl Drop for SessionReservation {
    fn drop(&mut self) {
        self.registry.lock().loops[self.home.0].reservations -= 1;
    }
}

/// The sessions of a server process.
#[derive(Debug)]
pub struct Registry {
    instance: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    clients: HashMap<ClientId, Client>,
    /// Clients without a session, longest first.
    gone: VecDeque<ClientId>,
    /// By nonce: where a session lives, and whose it is.
    homes: HashMap<[u8; 16], (LoopId, ClientId)>,
    loops: Vec<Loop>,
}

#[derive(Debug)]
struct Client {
    /// The highest session number seen.
    newest: u64,
    /// The session that may work, and its loop.
    active: Option<(u64, LoopId)>,
    /// The loop that waits for the end of the active one.
    waiting: Option<LoopId>,
}

#[derive(Debug)]
struct Loop {
    waker: Waker,
    /// Sessions that live there.
    sessions: usize,
    /// Sessions that are to begin there.
    reservations: usize,
    /// Handed to it and not taken.
    lanes: Vec<HandedLane>,
    /// Connections over RDMA that were asked for at another loop's listener, handed to it and not taken; their sessions are among
    /// those that are to begin.
    connections: Vec<Asked>,
}

impl Registry {
    /// A server process; `instance` tells it from all others, also from this program's next start.
    pub fn new(instance: u64) -> Self {
        Self { instance, inner: Mutex::default() }
    }

    /// The id of this server process.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code in here leaves the tables half changed by a panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A loop starts to serve.
    pub fn join(&self, waker: Waker) -> LoopId {
        let mut inner = self.lock();
        inner.loops.push(Loop { waker, sessions: 0, reservations: 0, lanes: Vec::new(), connections: Vec::new() });
        LoopId(inner.loops.len() - 1)
    }

    /// Asks for `identity`'s session to start on a loop.
    pub fn claim(&self, identity: &Identity, home: LoopId) -> Claim {
        let mut inner = self.lock();
        // Another client's session with that nonce is up: no client draws the same one twice.
        if inner.homes.get(&identity.nonce).is_some_and(|(_, client)| *client != identity.client) {
            return Claim::Stale;
        }
        let client = inner.clients.entry(identity.client).or_insert(Client { newest: 0, active: None, waiting: None });
        if identity.number < client.newest {
            return Claim::Stale;
        }
        client.newest = identity.number;
        if let Some((_, old_home)) = client.active.filter(|_| !seeded::is(Bug::LateStaleWrite)) {
            // Once is enough, and the loop that asks looks at its own sessions: a wake for each question would be a spin.
            let told = client.waiting.replace(home).is_some();
            if !told && old_home != home {
                inner.wake(old_home);
            }
            return Claim::Wait;
        }
        client.active = Some((identity.number, home));
        client.waiting = None;
        inner.homes.insert(identity.nonce, (home, identity.client));
        inner.loops[home.0].sessions += 1;
        Claim::Granted
    }

    /// Whether a newer session waits for the end of this one.
    pub fn superseded(&self, identity: &Identity) -> bool {
        let inner = self.lock();
        inner.clients.get(&identity.client).is_some_and(|client| client.newest > identity.number)
    }

    /// All I/O of a session has ended.
    pub fn ended(&self, identity: &Identity) {
        let mut inner = self.lock();
        if let Some((home, _)) = inner.homes.remove(&identity.nonce) {
            inner.loops[home.0].sessions -= 1;
        }
        let Some(client) = inner.clients.get_mut(&identity.client) else { return };
        if client.active.is_some_and(|(number, _)| number == identity.number) {
            client.active = None;
            match client.waiting {
                Some(home) => inner.wake(home),
                None => inner.note_gone(identity.client),
            }
        }
    }

    /// The connection that asked for `identity`'s session has gone, or will not wait any longer.
    pub fn stopped_waiting(&self, identity: &Identity) {
        let mut inner = self.lock();
        let Some(client) = inner.clients.get_mut(&identity.client) else { return };
        if client.newest == identity.number && client.waiting.take().is_some() && client.active.is_none() {
            inner.note_gone(identity.client);
        }
    }

    /// The loop on which the session of that nonce lives.
    pub fn home(&self, nonce: &[u8; 16]) -> Option<LoopId> {
        self.lock().homes.get(nonce).map(|(home, _)| *home)
    }

    /// The loop with the fewest sessions, those on their way to it included; `here` if no other has fewer.
    pub fn least_loaded(&self, here: LoopId) -> LoopId {
        self.lock().least_loaded(here)
    }

    /// Counts a session that is to begin, for the loop with the fewest.
    pub fn reserve(self: &Arc<Self>, here: LoopId) -> SessionReservation {
        let mut inner = self.lock();
        let home = inner.least_loaded(here);
        inner.loops[home.0].reservations += 1;
        SessionReservation { registry: Arc::clone(self), home }
    }

    /// Passes a lane to its session's loop.
    pub fn hand_over(&self, to: LoopId, lane: HandedLane) {
        let mut inner = self.lock();
        inner.loops[to.0].lanes.push(lane);
        inner.wake(to);
    }

    /// The lanes that other loops have passed to this one.
    pub fn take_lanes(&self, home: LoopId) -> Vec<HandedLane> {
        std::mem::take(&mut self.lock().loops[home.0].lanes)
    }

    /// Passes a connection over RDMA, which was asked for and not answered, to the loop where its session is to begin.
    pub fn hand_over_connection(&self, asked: Asked, place: &SessionReservation) {
        let mut inner = self.lock();
        let home = &mut inner.loops[place.home.0];
        home.connections.push(asked);
        home.reservations += 1;
        inner.wake(place.home);
    }

    /// The connections over RDMA that other loops have passed to this one.
    pub fn take_connections(self: &Arc<Self>, home: LoopId) -> Vec<(Asked, SessionReservation)> {
        let connections = std::mem::take(&mut self.lock().loops[home.0].connections);
        connections.into_iter().map(|asked| (asked, SessionReservation { registry: Arc::clone(self), home })).collect()
    }
}

impl Inner {
    fn least_loaded(&self, here: LoopId) -> LoopId {
        let load = |one: &Loop| {
            let begins = |lane: &&HandedLane| lane.hello.body::<Hello>().lane.get() == 0;
            one.sessions + one.reservations + one.lanes.iter().filter(begins).count()
        };
        let least = (0..self.loops.len()).min_by_key(|at| (load(&self.loops[*at]), *at != here.0));
        LoopId(least.unwrap_or(here.0))
    }

    fn wake(&self, home: LoopId) {
        self.loops[home.0].waker.wake();
    }

    fn note_gone(&mut self, client: ClientId) {
        self.gone.push_back(client);
        if self.gone.len() > CLIENTS_REMEMBERED_MAX
            && let Some(oldest) = self.gone.pop_front()
            && self.clients.get(&oldest).is_some_and(|client| client.active.is_none() && client.waiting.is_none())
        {
            self.clients.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::{IoChoice, Reactor};

    use super::*;

    fn identity(number: u64) -> Identity {
        Identity { client: ClientId([7; 16]), number, nonce: [number as u8; 16] }
    }

    #[test]
    fn who_no_longer_waits_is_forgotten_like_any_other() {
        let reactor = Reactor::open(IoChoice::Epoll, 1).unwrap();
        let registry = Registry::new(5);
        let home = registry.join(reactor.waker());
        let of = |client: usize, number| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&client.to_le_bytes());
            Identity { client: ClientId(id), number, nonce: id }
        };
        for client in 0..2 * CLIENTS_REMEMBERED_MAX {
            assert_eq!(registry.claim(&of(client, 1), home), Claim::Granted);
            assert_eq!(registry.claim(&of(client, 2), home), Claim::Wait);
            if client % 2 == 0 {
                registry.stopped_waiting(&of(client, 2));
                registry.ended(&of(client, 1));
            } else {
                registry.ended(&of(client, 1));
                registry.stopped_waiting(&of(client, 1));
                registry.stopped_waiting(&of(client, 2));
            }
        }
        assert_eq!(registry.lock().clients.len(), CLIENTS_REMEMBERED_MAX);
    }

    #[test]
    fn a_session_under_the_name_of_one_that_lives_is_refused_and_not_counted() {
        let reactor = Reactor::open(IoChoice::Epoll, 1).unwrap();
        let registry = Registry::new(5);
        let loops = [0; 2].map(|_| registry.join(reactor.waker()));
        let of = |client: u8| Identity { client: ClientId([client; 16]), number: 1, nonce: [9; 16] };
        assert_eq!(registry.claim(&of(1), loops[0]), Claim::Granted);
        assert_eq!(registry.claim(&of(2), loops[1]), Claim::Stale);
        registry.ended(&of(1));
        assert_eq!(registry.lock().loops.iter().map(|one| one.sessions).collect::<Vec<_>>(), [0, 0]);
        assert_eq!(registry.claim(&of(2), loops[1]), Claim::Granted);
    }

    #[test]
    fn the_loop_with_the_fewest_sessions_is_named_and_the_one_that_asks_among_equals() {
        let reactor = Reactor::open(IoChoice::Epoll, 1).unwrap();
        let registry = Registry::new(5);
        let loops = [0; 3].map(|_| registry.join(reactor.waker()));
        let of = |client: u8| Identity { client: ClientId([client; 16]), number: 1, nonce: [client; 16] };
        assert_eq!(registry.least_loaded(loops[1]), loops[1]);
        registry.claim(&of(1), loops[1]);
        assert_eq!(registry.least_loaded(loops[1]), loops[0]);
        assert_eq!(registry.least_loaded(loops[2]), loops[2]);
        registry.claim(&of(2), loops[0]);
        registry.claim(&of(3), loops[2]);
        assert_eq!(registry.least_loaded(loops[2]), loops[2], "all have one");
        registry.ended(&of(2));
        registry.ended(&of(2));
        assert_eq!(registry.least_loaded(loops[2]), loops[0]);
    }

    #[test]
    fn a_session_that_is_to_begin_counts_until_it_has_begun_or_will_not() {
        let reactor = Reactor::open(IoChoice::Epoll, 1).unwrap();
        let registry = Arc::new(Registry::new(5));
        let loops = [0; 2].map(|_| registry.join(reactor.waker()));
        let reservations = [0; 4].map(|_| registry.reserve(loops[0]));
        assert_eq!(reservations.each_ref().map(SessionReservation::home), [loops[0], loops[1], loops[0], loops[1]]);
        let [first, ..] = reservations;
        assert_eq!(registry.claim(&identity(1), first.home()), Claim::Granted);
        drop(first);
        assert_eq!(registry.least_loaded(loops[1]), loops[1], "the others are dropped, the first has begun");
        registry.ended(&identity(1));
        assert_eq!(registry.reserve(loops[0]).home(), loops[0]);
    }

    #[test]
    fn a_new_session_waits_for_the_old_one_and_a_late_old_one_is_stale() {
        let reactor = Reactor::open(IoChoice::Epoll, 1).unwrap();
        let registry = Registry::new(5);
        let home = registry.join(reactor.waker());
        assert_eq!(registry.claim(&identity(1), home), Claim::Granted);
        assert_eq!(registry.home(&identity(1).nonce), Some(home));
        assert!(!registry.superseded(&identity(1)));
        assert_eq!(registry.claim(&identity(2), home), Claim::Wait);
        assert!(registry.superseded(&identity(1)));
        assert_eq!(registry.claim(&identity(2), home), Claim::Wait);
        registry.ended(&identity(1));
        assert_eq!(registry.home(&identity(1).nonce), None);
        assert_eq!(registry.claim(&identity(1), home), Claim::Stale);
        assert_eq!(registry.claim(&identity(2), home), Claim::Granted);
    }
}
