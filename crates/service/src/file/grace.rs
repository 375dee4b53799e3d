//! The time after a server's start in which what clients had from the process before is not given to others.
//!
//! A share keeps a list of the clients that have locks or leases (`state.rs`). A new server process expects those of
//! the list: until each of them has come back and has asked for its locks, no new lock is given; while one that had leases is
//! missing, no file changes, since that client may still believe what it has cached. Both end at the latest after the grace time:
//! by then the leases have run out, and the locks are lost.
//!
//! Pure: time is an argument. `C` names a client.

use std::collections::HashMap;
use std::hash::Hash;

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

/// What a client has of a share that outlives the server process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holding {
    /// Locks.
    Locks,
    /// Leases.
    Leases,
}

/// A client that has something of a share that outlives the server process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientHolding<C> {
    /// What it has.
    pub held: Holding,
    /// Its name.
    pub client: C,
}

/// See the module.
#[derive(Debug)]
pub struct Grace<C> {
    expected: HashMap<ClientHolding<C>, Instant>,
    /// Until when clients may come back of which no list says anything.
    unlisted: HashMap<Holding, Instant>,
}

impl<C> Default for Grace<C> {
    fn default() -> Self {
        Self { expected: HashMap::new(), unlisted: HashMap::new() }
    }
}

impl<C: Clone + Eq + Hash> Grace<C> {
    /// A client may come back until then.
    pub fn expect(&mut self, held: Holding, client: C, until: Instant) {
        self.expected.insert(ClientHolding { held, client }, until);
    }

    /// Clients may come back until then, and there is no list of them.
    pub fn expect_any(&mut self, held: Holding, until: Instant) {
        let latest = self.unlisted.entry(held).or_insert(until);
        *latest = (*latest).max(until);
    }

    /// A client has come back and has asked for all that it had. Gives what it was expected to have.
    pub fn completed(&mut self, client: &C) -> Vec<Holding> {
        self.expected.extract_if(|holding, _| holding.client == *client).map(|(holding, _)| holding.held).collect()
    }

    /// Whether what clients held is kept for them.
    pub fn is_on(&self, held: Holding, now: Instant) -> bool {
        if held == Holding::Leases && seeded::is(Bug::ChangeInGrace) {
            return false;
        }
        self.unlisted.get(&held).is_some_and(|until| now < *until)
            || self.expected.iter().any(|(holding, until)| holding.held == held && now < *until)
    }

    /// Whether it is over for all.
    pub fn is_over(&self, now: Instant) -> bool {
        !self.is_on(Holding::Locks, now) && !self.is_on(Holding::Leases, now)
    }

    /// Takes the clients that have not come back in time.
    pub fn missing(&mut self, now: Instant) -> Vec<ClientHolding<C>> {
        let late = self.expected.iter().filter(|(_, until)| **until <= now);
        let late: Vec<_> = late.map(|(holding, _)| holding.clone()).collect();
        for holding in &late {
            self.expected.remove(holding);
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_grace_ends_when_all_have_come_back() {
        let mut grace = Grace::default();
        grace.expect(Holding::Locks, "one", at(15));
        grace.expect(Holding::Leases, "one", at(15));
        grace.expect(Holding::Leases, "two", at(15));
        assert!(grace.is_on(Holding::Locks, at(1)) && grace.is_on(Holding::Leases, at(1)));
        let mut had = grace.completed(&"one");
        had.sort_unstable();
        assert_eq!(had, [Holding::Locks, Holding::Leases]);
        assert_eq!((grace.completed(&"one"), grace.completed(&"three")), (vec![], vec![]));
        assert!(!grace.is_on(Holding::Locks, at(1)) && grace.is_on(Holding::Leases, at(1)));
        assert_eq!(grace.completed(&"two"), [Holding::Leases]);
        assert!(grace.is_over(at(1)) && grace.missing(at(20)).is_empty());
    }

    #[test]
    fn a_grace_ends_in_time_for_clients_that_do_not_come_back() {
        let mut grace = Grace::default();
        grace.expect(Holding::Leases, 7, at(15));
        assert!(grace.is_on(Holding::Leases, at(14)) && !grace.is_on(Holding::Leases, at(15)));
        let late = ClientHolding { held: Holding::Leases, client: 7 };
        assert_eq!((grace.missing(at(14)), grace.missing(at(15))), (vec![], vec![late]));
    }

    #[test]
    fn without_a_list_all_wait_for_the_whole_time() {
        let mut grace: Grace<u8> = Grace::default();
        assert!(grace.is_over(at(0)));
        grace.expect_any(Holding::Locks, at(15));
        grace.expect_any(Holding::Locks, at(10));
        assert!(grace.is_on(Holding::Locks, at(14)) && !grace.is_on(Holding::Leases, at(14)) && grace.is_over(at(15)));
    }
}
