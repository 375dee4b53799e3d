//! Streams over shared memory between processes of one host: the two loops copy bytes into a ring and out of it, and use the
//! kernel only to wake a sleeping end.
//!
//! To its user such a stream is a [`Socket`] like any other. This module stands between the [`Reactor`](crate::Reactor) and
//! its backend, performs the operations of sockets that have a [`ShmStream`], and does the rest: greeting, wake-up bytes, and
//! which streams are polled. A loop that is busy finds new bytes by polling; before it sleeps, it asks the peers to wake it.
//! So a thousand idle streams cost nothing, and a busy one needs no system call.

mod arena;
mod connect;
mod greeting;
mod lending;
mod memory;
mod message;
mod peer_memory;
mod ring;
mod shm_stream;
mod shm_streams;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;

use rustix::io::Errno;

pub(crate) use self::arena::PeerMemory;
use self::connect::Connecting;
pub(crate) use self::lending::Lending;
pub use self::peer_memory::LentPlace;
use self::shm_stream::{ShmStream, StreamState};
use self::shm_streams::ShmStreams;
use crate::gather::{Gather, Scatter};
use crate::limits::ARENAS_BYTES_MAX;
use crate::op::{Address, Completion, Listener, Op, Outcome, Socket, Token};
use crate::os::Os;
use crate::reactor::Backend;
use crate::receive_buffers::ReceiveBuffers;

/// The class of the tokens of our own operations.
pub(crate) const SHARED_CLASS: u8 = 0xfe;
const BELL: u8 = 1;
const GREETING: u8 = 2;
/// How much of the bell is heard at once.
const BELL_BYTES: usize = 4096;
/// Turns in which a stream has nothing to do, before its peer is asked to ring.
const IDLE_TURNS_MAX: u32 = 512;
/// The streams of a loop.
#[derive(Default)]
pub(crate) struct Shared {
    streams: ShmStreams,
    /// Streams that are polled on every turn.
    hot: Vec<Socket>,
    listeners: Vec<Listener>,
    /// Accepts in flight whose connections get streams over shared memory.
    accepts: Vec<Token>,
    /// Connects in flight, and whether they were cancelled meanwhile.
    connects: Vec<(Token, bool)>,
    connecting: Vec<Connecting>,
    ready: Vec<Completion>,
    /// Whether there ever was an accept, a connect or a stream.
    used: bool,
    /// Peers' memories are taken whatever their size.
    takes_all: bool,
    /// Counts the uses of peers' memories.
    clock: u64,
    /// The log says that peers' memories cannot be mapped.
    is_unmapped_said: bool,
}

/// A stream that was given up by a loop, to be taken over by another (see [`Reactor::release`](crate::Reactor::release)).
#[derive(Debug)]
pub struct Detached {
    pub(crate) fd: OwnedFd,
    stream: Option<Box<StreamState>>,
}

impl From<OwnedFd> for Detached {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, stream: None }
    }
}

/// What the module uses of the loop: its backend and the memory for received bytes.
pub(crate) struct BackendContext<'a> {
    pub(crate) backend: &'a mut Backend,
    pub(crate) buffers: &'a ReceiveBuffers,
}

impl Shared {
    /// Whether the loop never had streams over shared memory: otherwise the reactor asks this module. Our own operations outlive the last stream.
    pub(crate) fn is_unused(&self) -> bool {
        !self.used
    }

    /// Connections of this listener get streams over shared memory.
    pub(crate) fn add_listener(&mut self, listener: Listener) {
        self.listeners.push(listener);
    }

    pub(crate) fn remove_listener(&mut self, listener: Listener) {
        self.listeners.retain(|other| *other != listener);
    }

    /// Takes an operation if it is ours; else gives what the backend is to do.
    pub(crate) fn submit(&mut self, context: &mut BackendContext<'_>, op: Op, token: Token) -> Option<Op> {
        match op {
            Op::Recv { socket, into, min } if self.streams.contains(socket) => {
                self.on_stream(context, socket, |stream, os| stream.start_receive(os, into, min.max(1), token));
                None
            }
            Op::Send { socket, gather } if self.streams.contains(socket) => {
                self.on_stream(context, socket, |stream, os| stream.start_send(os, gather, token));
                None
            }
            Op::Accept { listener } => {
                if self.listeners.contains(&listener) && !self.accepts.contains(&token) {
                    self.accepts.push(token);
                    self.used = true;
                }
                Some(Op::Accept { listener })
            }
            Op::Connect { to: Address::Shared(path) } => {
                self.connects.push((token, false));
                self.used = true;
                Some(Op::Connect { to: Address::Unix(path) })
            }
            op => Some(op),
        }
    }

    fn on_stream(
        &mut self,
        context: &mut BackendContext<'_>,
        socket: Socket,
        begin: impl FnOnce(&mut ShmStream, &mut Os) -> Option<Completion>,
    ) {
        let (Some(stream), Some(os)) = (self.streams.get_mut(socket), context.backend.os()) else { return };
        self.ready.extend(begin(stream, os));
        if stream.is_busy() && stream.heat() {
            self.hot.push(socket);
        }
    }

    /// Sends the whole gather on a stream over shared memory, if there is room for it now.
    pub(crate) fn send_now(&mut self, context: &mut BackendContext<'_>, socket: Socket, gather: &Gather) -> bool {
        let (Some(stream), Some(os)) = (self.streams.get_mut(socket), context.backend.os()) else { return false };
        let sent = stream.send_now(os, gather);
        // An answer may come soon.
        if sent && stream.is_busy() && stream.heat() {
            self.hot.push(socket);
        }
        sent
    }

    fn heat(&mut self, socket: Socket) {
        if self.streams.get_mut(socket).is_some_and(ShmStream::heat) {
            self.hot.push(socket);
        }
    }

    /// Ends the operations of `token`, as far as they are ours.
    pub(crate) fn cancel(&mut self, context: &mut BackendContext<'_>, token: Token) {
        let Some(os) = context.backend.os() else { return };
        for stream in self.streams.iter_mut() {
            stream.cancel(os, token, &mut self.ready);
        }
        self.connects.iter_mut().filter(|connect| connect.0 == token).for_each(|connect| connect.1 = true);
        while let Some(place) = self.connecting.iter().position(|connecting| connecting.token == token) {
            self.end_connect(context, place, Err(Errno::CANCELED));
        }
    }

    /// Looks at what the backend has reaped since `before`: takes this module's completions, and gives connections their streams. Then polls
    /// the busy streams.
    pub(crate) fn turn(&mut self, context: &mut BackendContext<'_>, into: &mut Vec<Completion>, before: usize) {
        let mut at = before;
        while at < into.len() {
            if self.takes(context, &mut into[at]) {
                into.remove(at);
            } else {
                at += 1;
            }
        }
        self.turn_streams(context, into);
    }

    /// Whether streams are polled on every turn.
    pub(crate) fn is_hot(&self) -> bool {
        !self.hot.is_empty() || !self.ready.is_empty()
    }

    /// Polls the busy streams.
    pub(crate) fn turn_streams(&mut self, context: &mut BackendContext<'_>, into: &mut Vec<Completion>) {
        if !self.ready.is_empty() {
            into.append(&mut self.ready);
        }
        if let Some(os) = context.backend.os() {
            let streams = &mut self.streams;
            self.hot.retain(|socket| {
                let Some(stream) = streams.get_mut(*socket) else { return false };
                stream.turn(os, into);
                stream.idle_turns += 1;
                if stream.idle_turns <= IDLE_TURNS_MAX && stream.is_busy() {
                    return true;
                }
                stream.sleep();
                stream.hot = stream.has_work();
                stream.hot
            });
        }
    }

    /// Before the loop sleeps: asks all peers to ring. False if there is something to do already.
    pub(crate) fn sleep(&mut self) -> bool {
        let streams = &mut self.streams;
        self.hot.retain(|socket| {
            let Some(stream) = streams.get_mut(*socket) else { return false };
            stream.sleep();
            stream.hot = stream.has_work();
            stream.hot
        });
        self.hot.is_empty() && self.ready.is_empty()
    }

    /// Whether a completion is one of ours; one of the user's may be changed.
    fn takes(&mut self, context: &mut BackendContext<'_>, completion: &mut Completion) -> bool {
        let token = completion.token;
        if token.class() == SHARED_CLASS && token != Token::WAKE {
            let Some(socket) = self.named_by(token) else { return true };
            match &mut completion.outcome {
                Outcome::Received { into, result } => self.heard(context, socket, std::mem::take(into), *result),
                Outcome::TimedOut(_) => self.ask_for_greeting(context, socket),
                _ => {}
            }
            return true;
        }
        match completion.outcome {
            Outcome::Accepted(Ok(socket)) if self.accepts.contains(&token) => !self.greet(context, socket),
            Outcome::Accepted(Err(_)) => {
                self.accepts.retain(|other| *other != token);
                false
            }
            Outcome::Connected(result) => {
                let Some(place) = self.connects.iter().position(|other| other.0 == token) else { return false };
                let (_, cancelled) = self.connects.swap_remove(place);
                result.is_ok_and(|socket| self.connected(context, socket, token, cancelled))
            }
            _ => false,
        }
    }

    /// The socket of one of our tokens, which has the low bits of its generation alone.
    fn named_by(&self, token: Token) -> Option<Socket> {
        let connecting = self.connecting.iter().map(|connecting| connecting.socket);
        let mut sockets = self.streams.socket_at(token.index()).into_iter().chain(connecting);
        sockets.find(|socket| own_token(0, *socket) == token.with_tag(0))
    }

    /// The bell has rung, or the socket has ended.
    fn heard(&mut self, context: &mut BackendContext<'_>, socket: Socket, into: Scatter, result: Result<usize, Errno>) {
        let Some(stream) = self.streams.get_mut(socket) else { return };
        match result {
            Ok(n) if n > 0 => {
                let op = Op::Recv { socket, into, min: 1 };
                context.backend.submit(op, own_token(BELL, socket));
            }
            _ => stream.peer_is_gone(),
        }
        self.heat(socket);
    }

    fn add_stream(&mut self, context: &mut BackendContext<'_>, socket: Socket, ends: StreamState) -> Result<(), Errno> {
        let frame = context.buffers.alloc(BELL_BYTES).ok_or(Errno::NOBUFS)?;
        let op = Op::Recv { socket, into: Scatter::one(frame, 0, BELL_BYTES), min: 1 };
        context.backend.submit(op, own_token(BELL, socket));
        // Bells are sent by hand, and one that finds no room is not needed.
        if let Backend::Epoll(epoll) = &mut *context.backend {
            epoll.ignore_room(socket);
        }
        self.used = true;
        self.streams.insert(socket, ShmStream::new(ends));
        Ok(())
    }

    /// Closes a socket's stream; false if it has none.
    pub(crate) fn close(&mut self, context: &mut BackendContext<'_>, socket: Socket) {
        if let (Some(mut stream), Some(os)) = (self.streams.remove(socket), context.backend.os()) {
            stream.close(os, &mut self.ready);
        }
    }

    /// Says that nothing more will be sent; false if the socket has no stream.
    pub(crate) fn shutdown_send(&mut self, socket: Socket) -> bool {
        let stream = self.streams.get_mut(socket);
        stream.map(ShmStream::shutdown_send).is_some()
    }

    /// Bytes that have arrived, if the socket has a stream.
    pub(crate) fn readable_bytes(&self, socket: Socket) -> Option<usize> {
        self.streams.get(socket).map(ShmStream::readable_bytes)
    }

    /// Whether the socket has a stream, and whether operations of it are in flight.
    pub(crate) fn is_busy(&self, socket: Socket) -> Option<bool> {
        self.streams.get(socket).map(ShmStream::is_busy)
    }

    /// What a stream has to do with lent memory.
    pub(crate) fn lending(&mut self, socket: Socket) -> Result<&mut Lending, Errno> {
        Ok(self.streams.get_mut(socket).ok_or(Errno::NOTCONN)?.lending())
    }

    /// Bytes of what a stream's peer has lent.
    pub(crate) fn arena_bytes(&self, socket: Socket) -> Option<u64> {
        self.streams.get(socket)?.arena_bytes()
    }

    /// Bytes of peers' memory that may still be taken.
    pub(crate) fn arena_room(&self) -> u64 {
        if self.takes_all {
            return u64::MAX;
        }
        let taken = self.streams.iter().filter_map(ShmStream::arena_bytes).fold(0, u64::saturating_add);
        ARENAS_BYTES_MAX.saturating_sub(taken)
    }

    /// See [`Reactor::take_all_memory`](crate::Reactor::take_all_memory).
    pub(crate) fn take_all_memory(&mut self) {
        self.takes_all = true;
    }

    /// See [`ShmStream::has_peer_ended`].
    pub(crate) fn has_peer_ended(&self, socket: Socket) -> bool {
        self.streams.get(socket).is_none_or(ShmStream::has_peer_ended)
    }

    /// Gives up a stream whose bell is no longer listened to.
    pub(crate) fn detach(&mut self, socket: Socket, fd: OwnedFd) -> Detached {
        // The other loop counts what it maps by a clock of its own.
        self.streams
            .get_mut(socket)
            .into_iter()
            .flat_map(|stream| stream.lending().memories_mut())
            .for_each(PeerMemory::unmap_all);
        let stream = self.streams.remove(socket).map(|stream| Box::new(stream.into_state()));
        Detached { fd, stream }
    }

    /// Takes over what another loop has given up.
    pub(crate) fn attach(
        &mut self,
        context: &mut BackendContext<'_>,
        socket: Socket,
        stream: Option<Box<StreamState>>,
    ) -> Result<(), Errno> {
        let Some(stream) = stream else { return Ok(()) };
        if stream.arena_bytes().unwrap_or(0) > self.arena_room() {
            return Err(Errno::NOBUFS);
        }
        self.add_stream(context, socket, *stream)?;
        self.heat(socket);
        Ok(())
    }
}

impl Detached {
    pub(crate) fn into_parts(self) -> (OwnedFd, Option<Box<StreamState>>) {
        (self.fd, self.stream)
    }
}

/// The token of the receive that listens to a socket's bell.
pub(crate) fn bell_token(socket: Socket) -> Token {
    own_token(BELL, socket)
}

fn own_token(tag: u8, socket: Socket) -> Token {
    Token::new(SHARED_CLASS, tag, socket.index, socket.generation)
}
