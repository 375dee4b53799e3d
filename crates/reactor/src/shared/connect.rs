//! How connections get their streams: an accepted one is greeted at once, a connected one waits for its greeting, without the
//! loop waiting for it.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;

use super::shm_stream::{StreamSide, StreamState};
use super::{BackendContext, GREETING, Shared, greeting, own_token};
use crate::descriptor_floor;
use crate::limits::{SHARED_CONNECT_TIME_MAX, SHARED_RING_BYTES};
use crate::op::{Completion, Op, Outcome, Socket, Token};
use crate::time::{Instant, monotonic};

/// How often a new connection is asked for its greeting, at first and at most.
const GREETING_PAUSE_MIN: Duration = Duration::from_micros(200);
const GREETING_PAUSE_MAX: Duration = Duration::from_millis(20);

/// A connection of ours that waits for its greeting.
pub(super) struct Connecting {
    pub(super) token: Token,
    pub(super) socket: Socket,
    bell: OwnedFd,
    since: Instant,
    pause: Duration,
}

impl Shared {
    /// Gives an accepted stream its memory. False if that cannot be done; the stream is then closed.
    pub(super) fn greet(&mut self, context: &mut BackendContext<'_>, socket: Socket) -> bool {
        let given = context.backend.descriptor(socket).ok_or(Errno::BADF).and_then(|fd| {
            let bell = descriptor_floor::duplicate(fd)?;
            Ok((greeting::give(bell.as_fd(), SHARED_RING_BYTES)?, bell))
        });
        let added = given.and_then(|(greeted, bell)| {
            self.add_stream(context, socket, StreamState::new(greeted, StreamSide::Server, bell))
        });
        if let Err(error) = added {
            tracing::warn!(%error, "no memory could be shared with a client; its connection is closed");
            context.backend.close(socket);
        }
        added.is_ok()
    }

    /// A connection of ours stands; true if it has yet to be greeted.
    pub(super) fn connected(
        &mut self,
        context: &mut BackendContext<'_>,
        socket: Socket,
        token: Token,
        cancelled: bool,
    ) -> bool {
        let fd = context.backend.descriptor(socket).filter(|_| !cancelled).ok_or(Errno::CANCELED);
        let bell = match fd.and_then(|fd| descriptor_floor::duplicate(fd)) {
            Ok(bell) => bell,
            Err(error) => {
                context.backend.close(socket);
                self.ready.push(Completion { token, outcome: Outcome::Connected(Err(error)) });
                return true;
            }
        };
        let (since, pause) = (monotonic(), GREETING_PAUSE_MIN);
        self.connecting.push(Connecting { token, socket, bell, since, pause });
        self.ask_for_greeting(context, socket);
        true
    }

    pub(super) fn ask_for_greeting(&mut self, context: &mut BackendContext<'_>, socket: Socket) {
        let Some(place) = self.connecting.iter().position(|connecting| connecting.socket == socket) else { return };
        let connecting = &mut self.connecting[place];
        match greeting::take(connecting.bell.as_fd()) {
            Ok(Some(greeted)) => {
                let Ok(bell) = descriptor_floor::duplicate(connecting.bell.as_fd()) else {
                    return self.end_connect(context, place, Err(Errno::MFILE));
                };
                let added = self.add_stream(context, socket, StreamState::new(greeted, StreamSide::Client, bell));
                self.end_connect(context, place, added);
            }
            Ok(None) if monotonic().since(connecting.since) < SHARED_CONNECT_TIME_MAX => {
                let at = monotonic() + connecting.pause;
                connecting.pause = (connecting.pause * 2).min(GREETING_PAUSE_MAX);
                context.backend.submit(Op::Timer { at }, own_token(GREETING, socket));
            }
            Ok(None) => self.end_connect(context, place, Err(Errno::TIMEDOUT)),
            Err(error) => self.end_connect(context, place, Err(error)),
        }
    }

    pub(super) fn end_connect(&mut self, context: &mut BackendContext<'_>, place: usize, result: Result<(), Errno>) {
        let Connecting { token, socket, .. } = self.connecting.swap_remove(place);
        if result.is_err() {
            context.backend.close(socket);
        }
        self.ready.push(Completion { token, outcome: Outcome::Connected(result.map(|()| socket)) });
    }
}
