//! Changes of a connection wait for those that its client may have left in flight on another (docs/decisions/0033).
//!
//! A client whose connection broke sends unanswered requests again, on a new connection or on another that it has, and
//! continues. Requests that it left at the store must not land over those. NBD does not say which connections belong to one
//! client. So the first change of a new connection, and the first of each connection after any client has left with requests
//! at the store, waits for all changes of the volume that are at the store then. And a connection starts no more changes if
//! its client has hung up while the volume has, or had, another client.

use byway_service::block::{EarlierChanges, Engine, Presence};

use super::{CloseReason, Connection, Context};

/// Where a connection stands with the changes of others.
#[derive(Debug, Default)]
pub(super) struct Fence {
    presence: Option<Presence>,
    /// Changes that the next one waits for.
    earlier: Option<EarlierChanges>,
    /// The next change waits for `earlier`. It was sent before anything that other connections begin from now on.
    waits: bool,
    /// Clients of the volume that had left requests at the store when that was last looked at.
    departures: u64,
    /// Changes are begun: see [`Engine::begin_batch`].
    in_batch: bool,
    /// This connection's client has left requests at the store, and that was told.
    departed: bool,
}

impl Fence {
    pub(super) fn new(arrived: Option<(Presence, EarlierChanges)>) -> Self {
        let (presence, earlier) = arrived.unzip();
        let departures = earlier.as_ref().map_or(0, EarlierChanges::departures);
        Self { presence, earlier, departures, ..Self::default() }
    }
}

impl Connection {
    /// Whether a change may begin now; if not, the connection is over, or [`Connection::fenced`].
    pub(super) fn may_change(&mut self, context: &Context<'_>) -> bool {
        if !self.fence.waits {
            if !self.begin_batch(context) {
                return false;
            }
            if context.engine.departures(self.volume) != self.fence.departures {
                self.end_batch(context.engine);
                self.fence.earlier = context.engine.earlier_changes(self.volume);
                self.fence.departures = self.fence.earlier.as_ref().map_or(0, EarlierChanges::departures);
            }
        }
        if let Some(earlier) = &mut self.fence.earlier
            && !earlier.have_ended()
        {
            self.end_batch(context.engine);
            (self.fence.waits, self.fenced) = (true, true);
            return false;
        }
        (self.fence.earlier, self.fence.waits) = (None, false);
        self.begin_batch(context)
    }

    /// Begins a batch, unless it has begun. If the volume has, or had, other clients, the kernel is asked whether this one is
    /// still there; if not the connection is over.
    fn begin_batch(&mut self, context: &Context<'_>) -> bool {
        if std::mem::replace(&mut self.fence.in_batch, true) {
            return true;
        }
        context.engine.begin_batch(self.volume);
        let has_others = |client| context.engine.has_other_clients(self.volume, client);
        if self.fence.presence.as_mut().is_some_and(has_others) && context.reactor.has_hung_up(self.socket) {
            self.closing = Some(CloseReason::Superseded);
        }
        self.closing.is_none()
    }

    /// Ends the batch, if one has begun.
    pub(super) fn end_batch(&mut self, engine: &Engine) {
        if std::mem::take(&mut self.fence.in_batch) {
            engine.end_batch(self.volume);
        }
    }

    /// If the connection reads nothing more while requests of it are at the store, says so to the other connections, once.
    pub(in crate::nbd::server) fn note_departure(&mut self, engine: &Engine) {
        let is_leaving = self.draining.is_some() || self.closing.is_some();
        if is_leaving && self.has_requests() && !std::mem::replace(&mut self.fence.departed, true) {
            engine.depart(self.volume);
        }
    }
}
