//! The connections of a front end whose next change waits for changes of others: one timer makes all of them check again.
//!
//! Others' changes may end on another loop, which does not report it. And such a connection receives nothing, so this module
//! also checks whether its client is still connected.

use std::time::Duration;

use byway_reactor::{Op, Reactor, Token};

use super::connection::CloseReason;
use super::{LoopContext, NBD_CLASS, NbdFrontend, Phase};

/// The tag of the timer's token, which names no connection.
pub(super) const TAG_FENCE: u8 = 4;

/// How soon the first look is. Each next one comes after twice the time, so it is late by no more than what was waited before.
const PAUSE_MIN: Duration = Duration::from_millis(1);
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(32);

/// A client, or one that had its place before.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientId {
    pub(super) index: usize,
    pub(super) generation: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fenced {
    pub(super) connections: Vec<ClientId>,
    pub(super) pause: Duration,
    is_set: bool,
    is_looking: bool,
}

impl Fenced {
    pub(super) fn add(&mut self, reactor: &mut Reactor, connection: ClientId) {
        self.connections.push(connection);
        if self.is_looking {
            return;
        }
        let is_late = self.pause > PAUSE_MIN;
        self.pause = PAUSE_MIN;
        if !self.is_set {
            self.set(reactor);
        } else if is_late {
            reactor.cancel(token());
        }
    }

    fn set(&mut self, reactor: &mut Reactor) {
        self.is_set = true;
        let at = reactor.now() + self.pause;
        reactor.submit(Op::Timer { at }, token());
    }
}

fn token() -> Token {
    Token::new(NBD_CLASS, TAG_FENCE, 0, 0)
}

impl NbdFrontend {
    /// The timer has ended: goes on with the connections that may go on, and closes those whose client has gone. Their changes
    /// were never begun.
    pub(super) fn look_at_fenced(&mut self, context: &mut LoopContext<'_>) {
        (self.fenced.is_set, self.fenced.is_looking) = (false, true);
        for ClientId { index, generation } in std::mem::take(&mut self.fenced.connections) {
            let Some(client) = self.clients.get_mut(index).filter(|client| client.generation == generation) else {
                continue;
            };
            client.in_fenced = false;
            let is_fenced = matches!(&client.phase, Phase::Serving(connection, _) if connection.fenced);
            if is_fenced && !client.closed && context.reactor.has_hung_up(client.socket) {
                client.fail(CloseReason::Superseded);
            }
            self.advance(context, index);
        }
        self.fenced.is_looking = false;
        self.fenced.pause = (self.fenced.pause * 2).min(PAUSE_MAX);
        if !self.fenced.connections.is_empty() {
            self.fenced.set(context.reactor);
        }
    }
}
