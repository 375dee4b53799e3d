//! Measurements of a server's peers, for its operator.

use std::collections::HashMap;
use std::net::IpAddr;

use byway_fabric::feedback::Delays;
use byway_fabric::{Feedback, SessionId};
use byway_reactor::{PathState, Reactor};

use super::Host;

/// The sessions of one machine together. Those without an address, from this machine, count as one peer.
#[derive(Clone, Debug)]
pub struct PeerFeedback {
    /// The peer's address; `None` for this machine.
    pub address: Option<IpAddr>,
    /// Its sessions.
    pub sessions: u64,
    /// Their measurements.
    pub feedback: Feedback,
    /// The network path of the busiest session, as the kernel sees it.
    pub path: Option<PathState>,
    busiest: Busiest,
}

/// The session of a peer that moves the most bytes.
#[derive(Clone, Copy, Debug)]
struct Busiest {
    session: SessionId,
    /// Bytes a second, both ways.
    rate: f64,
}

impl PeerFeedback {
    /// Bytes a second, both ways.
    pub fn rate(&self) -> f64 {
        self.feedback.send_rate + self.feedback.receive_rate
    }

    /// The sum of two measurements of one machine.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let busier = if self.busiest.rate >= other.busiest.rate {
            (self.busiest, self.path)
        } else {
            (other.busiest, other.path)
        };
        Self {
            address: self.address,
            sessions: self.sessions + other.sessions,
            feedback: self.feedback.plus(&other.feedback),
            path: busier.1,
            busiest: busier.0,
        }
    }
}

/// Keeps the `count` busiest peers, in descending order.
pub fn keep_busiest(peers: &mut Vec<PeerFeedback>, count: usize) {
    let moved = |peer: &PeerFeedback| peer.feedback.sent_bytes + peer.feedback.received_bytes;
    peers.sort_by(|a, b| b.rate().total_cmp(&a.rate()).then_with(|| moved(b).cmp(&moved(a))));
    peers.truncate(count);
}

impl Host {
    /// The `count` peers that move the most bytes now. Costs a walk over all sessions, and a system call for each peer returned.
    pub fn busiest_peers(&self, reactor: &Reactor, count: usize) -> Vec<PeerFeedback> {
        let mut peers: HashMap<Option<IpAddr>, PeerFeedback> = HashMap::new();
        for session in self.fabric.client_sessions() {
            let Some(feedback) = self.fabric.feedback(reactor, session) else { continue };
            let address = self.fabric.peer(session).map(|peer| peer.ip());
            let busiest = Busiest { session, rate: feedback.send_rate + feedback.receive_rate };
            let one = PeerFeedback { address, sessions: 1, feedback, path: None, busiest };
            let sum = match peers.remove(&address) {
                Some(sum) => sum.plus(one),
                None => one,
            };
            peers.insert(address, sum);
        }
        let mut peers: Vec<_> = peers.into_values().collect();
        keep_busiest(&mut peers, count);
        for peer in &mut peers {
            peer.path = self.fabric.path(reactor, peer.busiest.session);
        }
        peers
    }

    /// The delays and stalls of all sessions until now.
    pub fn delays(&self) -> Delays {
        self.fabric.delays()
    }
}
