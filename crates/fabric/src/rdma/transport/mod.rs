//! The connections of one loop: messages, puts and gets over reliable queue pairs, without sessions.
//!
//! A *message* is a header of 128 bytes and up to 16 KiB behind it: one SEND into a receive of the peer's shared receive
//! queue, handed over inline if it is short. A *put* is an RDMA WRITE into a window of the peer; a message that is sent
//! behind it on the same connection arrives after its bytes. A *get* is an RDMA READ, which the peer's program does not
//! notice. Windows of this end are opened here too, one registration each; the layer above tells the peer where they are.
//!
//! The owner passes completions of its two tags to [`Transport::handle`], takes [`Transport::next_event`] until there is
//! none, and calls [`Transport::flush`] once it has handled all reaped completions. [`Transport::done_with`] returns a
//! message's memory: until then its sender has one credit less, so a slow owner slows down only its peers.
//!
//! Bounds: connections by the receives that the device and half of the pool have ([`Down::TooMany`], [`Down::NoFrames`]);
//! operations by the queue pair and the completion queue. Operations beyond these wait here, and the owner bounds them with
//! [`Transport::queued`] and [`Transport::queued_heap`].

mod adapter;
mod connection;
mod credit;
mod greeting;
mod meet;
mod outgoing;
mod post;
mod progress;
mod recv_credits;
mod turns;
mod watch;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use byway_reactor::{Completion, Descriptor, Errno, Frame, FrameRange, Gather, Instant, Op, Outcome, Reactor, Token};

use self::adapter::Adapter;
use self::connection::{Connection, Phase};
pub use self::connection::{Down, Received};
pub use self::credit::CreditError;
pub use self::meet::Asked;
use self::outgoing::Outgoing;
use self::turns::Turns;
use super::connection::EventChannel;
use super::domain::{Window, WindowAddress};
use super::endpoint::Listener;
use super::error::{RdmaError, WorkError};
use super::library::Library;
use super::operations::Completion as Done;
use crate::registration::{Counters, Limits, Mode};
use crate::slots::{Slot, Slots};

/// What the name of a connection is a name of: see [`ConnectionId`].
#[derive(Debug)]
pub enum ConnectionKind {}

/// A connection of a [`Transport`].
pub type ConnectionId = Slot<ConnectionKind>;

/// A device of one.
type AdapterId = Slot<Adapter>;

use crate::wire::{HEADER_BYTES, RefuseCode};

/// Emptied gathers that are kept for the next payloads.
const SPARE_GATHERS: usize = 64;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A peer asks for a connection at a listener: [`Transport::accept`] or [`Transport::refuse`].
    Asked {
        /// The connection to be.
        connection: ConnectionId,
        /// The connect request.
        peer: Option<SocketAddr>,
    },
    /// Messages can be sent.
    Connected(ConnectionId),
    /// A message came; its memory goes back by [`Transport::done_with`].
    Message(ConnectionId, Received),
    /// Some of what was queued was handed to the device, or has arrived: what, if it is known.
    Sent(ConnectionId, Option<Went>),
    /// The connection ended; nothing of it comes any more.
    Down(ConnectionId, Down),
}

/// A message, or a write of a put, that the peer has, and how long that took. A short message that is not waited for counts as
/// there when it was handed over to the device, with its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Went {
    /// How many.
    pub bytes: usize,
    /// Since it was queued.
    pub waited: Duration,
    /// Of that, since nothing of its connection was before it: it waited for credits of the peer, for frames of ours, for
    /// room in the device's queues, and went.
    pub took: Duration,
}

/// When something was queued, and when it became the next of its connection.
#[derive(Clone, Copy, Debug)]
struct Times {
    queued: Instant,
    next: Instant,
}

impl Times {
    fn went(self, bytes: usize, now: Instant) -> Went {
        Went { bytes, waited: now.since(self.queued), took: now.since(self.next) }
    }
}

/// The end of a get.
#[derive(Debug)]
pub struct Got {
    /// As it was given.
    pub token: u64,
    /// Filled, if it went well; none if a device did not let go of it.
    pub frame: Option<Frame>,
    /// How it went.
    pub result: Result<(), GetFailed>,
}

/// Why a get brought nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetFailed {
    /// The operation failed, and the connection ends with it.
    Work(WorkError),
    /// The memory that was to be filled, which is of no pool, cannot be registered. The connection goes on.
    Memory(Errno),
    /// The device was lost before it had let go of the memory, which is given up. The connection has ended.
    GivenUp,
}

/// What an operation of the device is.
struct Posted {
    connection: ConnectionId,
    bytes: usize,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    /// A message; with its times, unless it was told when it was handed over.
    Send(Option<Times>),
    /// A write of a put; with its times.
    Write(Option<Times>),
    /// Credits alone.
    Credits,
    /// A write of no bytes.
    Probe,
    Get(u64),
}

/// The connection manager's side; it exists after the first listen or connect.
struct Manager {
    channel: EventChannel,
    descriptor: Descriptor,
}

/// The addresses of listeners, without a listener while there is no device.
struct Listening {
    at: SocketAddr,
    listener: Option<Listener>,
}

/// See the module.
pub struct Transport {
    /// The tokens of its two kinds of waits: for the connection manager, and for the device of an index.
    tokens: [Token; 2],
    manager: Option<Manager>,
    adapters: Slots<Adapter>,
    listeners: Vec<Listening>,
    /// A timer runs that began when a device was removed.
    waits_after_removal: bool,
    connections: Slots<Connection, ConnectionKind>,
    posted: Slots<Posted>,
    /// What has completed and was not looked at, with its device.
    inbox: VecDeque<(AdapterId, Option<ConnectionId>, Done)>,
    events: VecDeque<Event>,
    gots: Vec<Got>,
    /// News of ends, told after all else of them.
    ends: Vec<Event>,
    turns: Turns,
    spare: Vec<Gather>,
    /// How much of a program's own memory each device keeps registered.
    limits: Limits,
    /// The time of the turn.
    clock: Instant,
}

impl Transport {
    /// One without connections, whose completions have the class of `token` and its tag, or the tag after that. Of a
    /// program's own memory so much stays registered after use, with each device.
    pub fn new(token: Token, limits: Limits) -> Self {
        Self {
            tokens: [token, token.with_tag(token.tag() + 1)],
            manager: None,
            adapters: Slots::default(),
            listeners: Vec::new(),
            waits_after_removal: false,
            connections: Slots::default(),
            posted: Slots::default(),
            inbox: VecDeque::new(),
            events: VecDeque::new(),
            gots: Vec::new(),
            ends: Vec::new(),
            turns: Turns::default(),
            spare: Vec::new(),
            limits,
            clock: Instant::ZERO,
        }
    }

    /// Loads the libraries and opens the connection manager's channel, the first time.
    fn manager(&mut self, reactor: &mut Reactor) -> Result<&Manager, RdmaError> {
        if self.manager.is_none() {
            let library = Library::load()?;
            let channel = EventChannel::new(library)?;
            let fd = channel.as_fd().try_clone_to_owned();
            let descriptor = fd.and_then(|fd| reactor.add_descriptor(fd)).map_err(|error| RdmaError::System {
                call: "a loop waiting for the connection manager",
                errno: Errno::from_io_error(&error).unwrap_or(Errno::OPNOTSUPP),
            })?;
            reactor.submit(Op::Readable { descriptor }, self.tokens[0]);
            self.manager = Some(Manager { channel, descriptor });
        }
        self.manager.as_ref().ok_or(RdmaError::State("the connection manager"))
    }

    /// Listens; gives the address, with the port that was chosen if 0 was asked for.
    ///
    /// # Errors
    /// [`RdmaError`]: no library, no device at the address, or the system's.
    pub fn listen(&mut self, reactor: &mut Reactor, address: SocketAddr) -> Result<SocketAddr, RdmaError> {
        let number = self.listeners.len() as u64;
        let listener = self.manager(reactor)?.channel.listen(address, meet::LISTENER | number)?;
        let at = listener.local_address().unwrap_or(address);
        self.listeners.push(Listening { at, listener: Some(listener) });
        Ok(at)
    }

    /// Stops listening.
    pub fn close_listeners(&mut self) {
        self.listeners.clear();
    }

    /// Starts to connect: [`Event::Connected`] or [`Event::Down`] follows.
    ///
    /// # Errors
    /// [`RdmaError`]: no library, or the system's.
    pub fn connect(&mut self, reactor: &mut Reactor, to: SocketAddr) -> Result<ConnectionId, RdmaError> {
        let endpoint = self.manager(reactor)?.channel.connect(to, None, u64::MAX)?;
        let connection = self.connections.insert(Connection::new(Phase::Resolving, Some(endpoint), 0));
        if let Some(state) = self.connections.get_mut(connection) {
            state.peer = Some(to);
            if let Some(endpoint) = &state.endpoint {
                endpoint.set_token(connection.to_u64());
            }
        }
        Ok(connection)
    }

    /// Accepts a connect request. [`Event::Connected`] or [`Event::Down`] follows.
    pub fn accept(&mut self, reactor: &mut Reactor, connection: ConnectionId) {
        if let Err(down) = self.try_accept(reactor, connection) {
            self.refuse_for(connection, RefuseCode::Busy, down);
        }
    }

    /// Refuses a connect request.
    pub fn refuse(&mut self, connection: ConnectionId, code: RefuseCode) {
        self.refuse_for(connection, code, Down::WeRefused(code));
    }

    /// Queues a message behind what was queued before. Nothing happens on a connection that has ended.
    pub fn send(&mut self, connection: ConnectionId, header: [u8; HEADER_BYTES], payload: Gather) {
        self.queue(connection, Outgoing::Message { header, payload });
    }

    /// Queues bytes for a window of the peer, behind what was queued before.
    pub fn put(&mut self, connection: ConnectionId, to: WindowAddress, payload: Gather) {
        self.queue(connection, Outgoing::Put { to, payload });
    }

    fn queue(&mut self, connection: ConnectionId, outgoing: Outgoing) {
        let Some(state) = self.connections.get_mut(connection) else { return };
        state.queue(outgoing);
        self.mark(connection);
    }

    /// Gets as many bytes of a window of the peer as `into` has. [`Transport::take_gots`] gives the frame back, with `token`.
    ///
    /// # Errors
    /// The frame, if the connection has ended.
    pub fn get(&mut self, connection: ConnectionId, from: WindowAddress, into: Frame, token: u64) -> Result<(), Frame> {
        let Some(state) = self.connections.get_mut(connection) else { return Err(into) };
        state.gets.push_back(connection::Get { from, into, token });
        self.mark(connection);
        Ok(())
    }

    /// A gather for a payload.
    pub fn gather(&mut self) -> Gather {
        self.spare.pop().unwrap_or_default()
    }

    fn keep(&mut self, mut gather: Gather) {
        if self.spare.len() < SPARE_GATHERS {
            gather.clear();
            self.spare.push(gather);
        }
    }

    /// Opens `memory` for the peer of a connection to write. Close it only when the peer has no more
    /// use for it, or its connection has ended.
    ///
    /// # Errors
    /// [`RdmaError::MemoryLimit`], [`RdmaError::State`] on a connection that is not up; with the frame.
    pub fn open_target(
        &self,
        connection: ConnectionId,
        memory: FrameRange,
    ) -> Result<Window, (RdmaError, Option<Frame>)> {
        let FrameRange { frame, start, len } = memory;
        match self.adapter_of(connection) {
            Ok(adapter) => adapter.domain().open_frame(frame, start..start + len),
            Err(error) => Err((error, Some(frame))),
        }
    }

    /// Opens `memory` for the peer of a connection to read.
    ///
    /// # Errors
    /// As for [`Self::open_target`], without the frame.
    pub fn open_source(&self, connection: ConnectionId, memory: FrameRange<Rc<Frame>>) -> Result<Window, RdmaError> {
        let FrameRange { frame, start, len } = memory;
        self.adapter_of(connection)?.domain().open_shared(frame, start..start + len)
    }

    fn adapter_of(&self, connection: ConnectionId) -> Result<&Adapter, RdmaError> {
        let number = self.connections.get(connection).and_then(|state| state.adapter);
        let adapter = number.and_then(|number| self.adapters.get(number));
        adapter.ok_or(RdmaError::State("a window"))
    }

    /// The memory of a message of a connection that has ended, or is about to, is free.
    pub fn discard(&mut self, received: Received) {
        self.take_back(received.adapter, received.payload);
    }

    /// The memory of a message is free.
    pub fn done_with(&mut self, connection: ConnectionId, received: Received) {
        self.take_back(received.adapter, received.payload);
        let Some(state) = self.connections.get_mut(connection) else { return };
        state.credits.repost();
        if state.credits.must_return() {
            self.mark(connection);
        }
    }

    /// Says that nothing more will be queued: [`Event::Sent`] comes when the peer has all of it.
    pub fn finish(&mut self, connection: ConnectionId) {
        if let Some(state) = self.connections.get_mut(connection) {
            state.finishing = true;
        }
    }

    /// Whether nothing was queued since [`Transport::flush`], so that a loop may wait.
    pub fn is_flushed(&self) -> bool {
        self.turns.is_empty() && (self.waits_after_removal || !self.has_aside())
    }

    /// Asks the device of the peer for a sign of life, unless there was one since the last call. Its program does not hear of
    /// it. [`Event::Down`] follows if there is no answer after the retries of the device, some seconds, or by the second call after
    /// this one.
    pub fn probe(&mut self, connection: ConnectionId) {
        if let Err(down) = self.post_probe(connection) {
            self.end(connection, Some(down));
            self.look();
        }
    }

    /// Whether a connection has not ended. Of one that has, [`Event::Down`] may still be to be taken.
    pub fn has(&self, connection: ConnectionId) -> bool {
        self.connections.get(connection).is_some()
    }

    /// Whether a probe is under way.
    pub fn is_probed(&self, connection: ConnectionId) -> bool {
        self.connections.get(connection).is_some_and(|state| state.watch.is_probed())
    }

    /// Whether anything waits or is under way to the peer.
    pub fn is_idle(&self, connection: ConnectionId) -> bool {
        self.connections.get(connection).is_none_or(Connection::is_idle)
    }

    /// Bytes that wait, or are under way, to the peer.
    pub fn queued(&self, connection: ConnectionId) -> usize {
        self.connections.get(connection).map_or(0, |state| state.queued + state.posted_bytes)
    }

    /// When the oldest was queued of what waits: for credits, for frames, for room in the device's queues.
    pub fn oldest(&self, connection: ConnectionId) -> Option<Instant> {
        let state = self.connections.get(connection)?;
        state.times.map(|times| times.queued).or_else(|| state.queue.front().and_then(|(_, queued)| *queued))
    }

    /// Heap memory of what waits.
    pub fn queued_heap(&self, connection: ConnectionId) -> usize {
        self.connections.get(connection).map_or(0, |state| state.queued_heap)
    }

    /// Connections.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How memory outside the pool is registered, and what has come of it: of all devices together, and the mode of one that
    /// registers each time if there is such a one. Nothing if there was no such memory.
    pub fn registrations(&self) -> Option<(Mode, Counters)> {
        let of_devices = self.adapters.iter().filter_map(|(_, adapter)| adapter.known_local());
        of_devices.fold(None, |sum, local| {
            let (mode, counters) = sum.unwrap_or((Mode::Cached, Counters::default()));
            let mode = if mode == Mode::Cached { local.mode() } else { mode };
            Some((mode, counters.plus(local.counters())))
        })
    }

    /// The peer's address.
    pub fn peer(&self, connection: ConnectionId) -> Option<SocketAddr> {
        self.connections.get(connection)?.peer
    }

    /// Ends a connection. Its gets end, see [`Transport::take_gots`]; there is no other news of it.
    pub fn close(&mut self, connection: ConnectionId) {
        self.end(connection, None);
        self.look();
    }

    /// Takes a completion of one of its two tags.
    pub fn handle(&mut self, reactor: &mut Reactor, completion: &Completion) {
        match completion.outcome {
            Outcome::Readable(Ok(())) => {}
            Outcome::TimedOut(_) => return self.after_removal(reactor),
            // One that was cancelled is of a device or channel that is gone.
            _ => return,
        }
        self.clock = reactor.now();
        if completion.token.tag() == self.tokens[0].tag() {
            self.meet(reactor);
            if let Some(manager) = &self.manager {
                reactor.submit(Op::Readable { descriptor: manager.descriptor }, self.tokens[0]);
            }
            return;
        }
        let number = Slot::of_token(completion.token);
        let Some(adapter) = self.adapters.get_mut(number) else { return };
        let mut done = Vec::new();
        adapter.rearm(&mut done);
        adapter.wait(reactor, completion.token);
        self.inbox.extend(done.into_iter().map(|(connection, done)| (number, connection, done)));
        self.look();
    }

    /// The gets that have ended. To be taken before each event, and after [`Transport::close`]: all gets of a connection have
    /// ended when its end is told.
    pub fn take_gots(&mut self) -> Vec<Got> {
        std::mem::take(&mut self.gots)
    }

    /// What happened, in order.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether memory is to be handed back a while later.
    fn has_aside(&self) -> bool {
        self.manager.as_ref().is_some_and(|manager| manager.channel.has_aside())
    }

    fn mark(&mut self, connection: ConnectionId) {
        if let Some(state) = self.connections.get_mut(connection)
            && !std::mem::replace(&mut state.is_dirty, true)
        {
            self.turns.add(connection);
        }
    }
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Transport({} connections)", self.len())
    }
}
