//! What the thread for recalls does beside them: it renews leases, drops mapped pages that are not fresh, and looks at answers that
//! no other thread waits for.
//!
//! It waits for no answer to a renewal, so recalls are answered meanwhile, and pages are dropped when the leases end.

use std::time::Duration;

use byway_fabric::node::{Deadline, Op, WaitError};
use byway_reactor::Instant;
use byway_rpc::node::Call;
use zerocopy::IntoBytes;

use super::super::wire::{Method, PROTOCOL};
use super::caches::now;
use super::leases::Invalid;
use super::{Client, NONE};
use crate::limits::{BUSY_PAUSE_MAX, FILE_LEASE_RENEWAL};

/// How often the answer to a renewal is looked for.
const ANSWER_PAUSE: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Tending {
    renewal: Option<Renewal>,
    /// When mapped pages are looked at.
    look_at: Instant,
}

/// A call whose answer renews the leases.
#[derive(Debug)]
struct Renewal {
    op: Op,
    session: u64,
    sent: Instant,
}

impl Client {
    /// Does what is due, and says how long there is nothing to do.
    pub(super) fn tend(&self, tending: &mut Tending) -> Duration {
        self.end_closes();
        tending.renewal = tending.renewal.take().and_then(|renewal| self.answered_renewal(renewal));
        if now() >= tending.look_at {
            self.drop_mapped_pages_of_all();
            let (now, remaining) = (now(), self.caches.state().leases.remaining(now()));
            let to_end = if remaining.is_zero() { FILE_LEASE_RENEWAL } else { remaining };
            tending.look_at = now + to_end.min(FILE_LEASE_RENEWAL);
        }
        if tending.renewal.is_none() && self.caches.state().leases.needs_renewal(now()) {
            tending.renewal = self.begin_renewal();
        }
        let to_look = tending.look_at.since(now());
        let to_renewal = match &tending.renewal {
            Some(_) => Some(ANSWER_PAUSE),
            // Due, and not begun: there was no room.
            None => self.caches.state().leases.renewal_in(now()).map(|pause| pause.max(BUSY_PAUSE_MAX)),
        };
        to_renewal.map_or(to_look, |to_renewal| to_renewal.min(to_look))
    }

    /// A call that the server answers at once: it forgets no node.
    fn begin_renewal(&self) -> Option<Renewal> {
        let live = self.connection.now()?;
        let (protocol, method) = (PROTOCOL, Method::Forget as u16);
        let call = Call { protocol, method, arguments: NONE.as_bytes(), ..Call::default() };
        let sent = now();
        let op = self.connection.rpc.call(live.session, &call, Deadline::after(self.connection.times.short)).ok()?;
        Some(Renewal { op, session: live.number, sent })
    }

    /// Takes the answer; gives the renewal back if there is none yet.
    fn answered_renewal(&self, renewal: Renewal) -> Option<Renewal> {
        match renewal.op.test() {
            // Of a session that has ended, none comes.
            Err(WaitError::Deadline) => {
                self.connection.now().is_some_and(|live| live.number == renewal.session).then_some(renewal)
            }
            Ok(Ok(_)) => {
                self.connection.heard(renewal.sent);
                self.caches.answered(renewal.session, renewal.sent);
                None
            }
            // The call for recalls notices the session's end, too.
            _ => None,
        }
    }

    /// Has mapped pages dropped that are not fresh. At the leases' end the threads of the mount may wait for the server: then this one
    /// drops them.
    fn drop_mapped_pages_of_all(&self) {
        let (stale, ended) = {
            let state = self.caches.state();
            (state.leases.stale_mapped(now()), state.leases.remaining(now()).is_zero())
        };
        if !ended {
            return self.caches.drop_mapped_soon(&stale);
        }
        for node in stale {
            self.caches.invalidate(node, Invalid::Pages, || false);
        }
    }
}
