//! Changes of a new connection wait for those that came before it (docs/decisions/0033).
//!
//! A client whose connection broke sends again what was not answered, and goes on. What its old connection left at the
//! store must not land over that. NBD does not say which connections are of one client, so each new connection waits, with
//! its first change, for all changes of the volume that were at the store when it came. And a connection begins no change
//! any more if its client has hung up and another connection has come since.

use super::{Connection, Context, End};

impl Connection {
    /// Whether a change may begin now; if not, the connection is over, or [`Connection::fenced`].
    pub(super) fn may_change(&mut self, context: &Context<'_>) -> bool {
        if let Some(earlier) = &mut self.earlier {
            if !earlier.have_ended() {
                self.fenced = true;
                return false;
            }
            self.earlier = None;
        }
        let arrivals = context.engine.arrivals(self.volume);
        if arrivals != self.arrivals {
            self.arrivals = arrivals;
            if context.reactor.has_hung_up(self.socket) {
                self.over = Some(End::Superseded);
                return false;
            }
        }
        true
    }
}
