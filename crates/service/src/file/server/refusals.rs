//! Peers that get no leases for a while, because one of their sessions did not return a lease in time.
//!
//! Pure. Without leases such a peer works as before, and asks for everything.

use std::collections::HashMap;
use std::hash::Hash;

use byway_reactor::Instant;

use crate::limits::{FILE_LEASES_REFUSED, FILE_PEERS_REFUSED_MAX};

/// See the module.
#[derive(Debug)]
pub(super) struct Refusals<P>(HashMap<P, Instant>);

impl<P> Default for Refusals<P> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<P: Clone + Eq + Hash> Refusals<P> {
    /// A session of a peer was ended for a lease that it did not return.
    pub(super) fn refuse(&mut self, peer: P, now: Instant) {
        self.0.retain(|_, until| now < *until);
        if self.0.len() >= FILE_PEERS_REFUSED_MAX
            && let Some((first, _)) = self.0.iter().min_by_key(|(_, until)| **until)
        {
            let first = first.clone();
            self.0.remove(&first);
        }
        self.0.insert(peer, now + FILE_LEASES_REFUSED);
    }

    /// Until when a peer gets none.
    pub(super) fn until(&self, peer: &P) -> Instant {
        self.0.get(peer).copied().unwrap_or(Instant::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_refused_for_a_while() {
        let (mut refusals, now) = (Refusals::default(), Instant::from_nanos(1));
        refusals.refuse("one", now);
        assert_eq!((refusals.until(&"one"), refusals.until(&"two")), (now + FILE_LEASES_REFUSED, Instant::ZERO));
        refusals.refuse("two", now + FILE_LEASES_REFUSED);
        assert_eq!(refusals.until(&"one"), Instant::ZERO, "forgotten");
    }

    #[test]
    fn refused_peers_have_a_bound() {
        let mut refusals = Refusals::default();
        for peer in 0..=FILE_PEERS_REFUSED_MAX {
            refusals.refuse(peer, Instant::from_nanos(peer as u64));
        }
        assert_eq!(refusals.0.len(), FILE_PEERS_REFUSED_MAX);
        assert_eq!(refusals.until(&0), Instant::ZERO, "the first");
    }
}
