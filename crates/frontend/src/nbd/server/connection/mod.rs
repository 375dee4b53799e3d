//! One client's connection in the transmission phase: requests in, replies out.
//!
//! The connection walks over the received bytes and starts each request; replies gather in `out` and go in one send, while
//! the next ones gather. A small write is taken from the input whole. The payload of a large write is received into frames
//! of its own, piece by piece, and a piece goes to the store when all of it has arrived.

mod answers;
mod fence;
mod long_read;
mod secure;
mod write;

use byway_fabric::tls::TlsError;
use byway_reactor::{ByteRange, Frame, Gather, Op, Reactor, Scatter, Socket, Token};
use byway_service::block::{
    BlockError, EarlierChanges, Engine, Outcome, Presence, ReadFlags, Step, Tag, VolumeId, ZeroFlags,
};
use slab::Slab;

use self::fence::Fence;
use self::long_read::PartedRead;
use super::NBD_CLASS;
use super::input::Input;
use super::secure::Secure;
use crate::limits::{
    CONNECTION_HEAP_BYTES_MAX, CONNECTION_HEAP_BYTES_MIN, CONNECTION_IN_FLIGHT_BYTES_MAX, CONNECTION_IN_FLIGHT_MAX,
    CROWDED_EXTENTS_MAX, FRONTEND_HEAP_BYTES_MAX,
};
use crate::nbd::flags::CommandFlags;
use crate::nbd::handshake::HandshakeError;
use crate::nbd::reply::Replies;
use crate::nbd::request::{Command, Request, Tag as RequestTag, Violation};
use crate::nbd::transmission::{Parsed, ProtocolError, Transmission};

/// The tags of a connection's tokens.
pub(super) const TAG_RECEIVE: u8 = 1;
pub(super) const TAG_SEND: u8 = 2;

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The client said goodbye, or closed its end between two requests.
    #[error("the client disconnected")]
    Disconnected,
    /// The client closed its end in the middle of something.
    #[error("the client's stream ended in the middle of a message")]
    Truncated,
    /// The client broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(#[from] ProtocolError),
    /// The client broke the protocol before it had chosen an export.
    #[error("handshake: {0}")]
    Handshake(#[from] HandshakeError),
    /// TLS failed: no certificate that both sides accept, or an attacker on the path.
    #[error("TLS: {0}")]
    Tls(#[from] TlsError),
    /// The client asked for what is served over TLS only, on a connection without.
    #[error("the client did not use TLS, which is required here; give it certificates (nbds://, tls-creds)")]
    PlainRefused,
    /// Plain bytes followed STARTTLS: from a client that does not wait for the answer, or from an attacker on the path.
    #[error("unencrypted bytes followed STARTTLS before TLS began; they may have been injected on the network path")]
    EarlyBytes,
    /// The client took too long for its handshake.
    #[error("the client did not finish its handshake in 10 s")]
    Slow,
    /// The server has no buffer for a new connection to receive into.
    #[error(
        "no receive buffer for another connection: the loop has too many (raise --threads), or the machine refused it the \
         memory (192 MiB a loop, beside --buffer-memory)"
    )]
    NoMemory,
    /// The store failed in the middle of a reply that leaves no place for an error.
    #[error("the store failed after part of a read had been answered: {0}")]
    HalfRead(BlockError),
    /// The volume is no longer served.
    #[error("the volume is no longer served")]
    VolumeGone,
    /// A reload took away what the client may do.
    #[error("a reload took the client's access away")]
    AccessLost,
    /// The server stops.
    #[error("the server is shutting down")]
    Shutdown,
    /// The client closed its end while requests of it waited, and may have sent them again on another connection.
    #[error("the client left before all of its requests were begun; it may have sent them again on another connection")]
    Superseded,
    /// The stream broke.
    #[error("the stream failed: {0}")]
    Stream(byway_reactor::Errno),
}

impl CloseReason {
    /// Whether something went wrong.
    pub(super) fn is_fault(self) -> bool {
        !matches!(self, Self::Disconnected | Self::Shutdown | Self::VolumeGone | Self::AccessLost)
    }
}

/// A request that waits for its store, or for the rest of its payload.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) connection: usize,
    request: Request,
    /// Pieces at the store.
    left: u32,
    /// Bytes of its payload are still to come.
    receiving: bool,
    error: Option<BlockError>,
}

/// What the connection expects next from the stream.
#[derive(Debug)]
enum Expect {
    Header,
    /// The payload of a large write.
    Payload(Incoming),
    /// The rest of a read that is answered in parts.
    Parts(PartedRead),
    /// Bytes to throw away; only then the answer goes out: clients look for it when they have sent all.
    Drain {
        left: u64,
        then: Answer,
    },
}

/// How a step over the input went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The next step may follow at once.
    Moved,
    /// The next message is not here in whole.
    NeedsInput,
    /// Something under way has to end first: a send, a request at its store, or what made the connection stall.
    Waits,
}

/// What answers a write whose payload was not wanted.
#[derive(Debug, Clone, Copy)]
enum Answer {
    /// It never became a request.
    Refuse(RequestTag, Violation),
    /// It failed on its way.
    Pending(usize),
}

/// A large write that is being received.
#[derive(Debug)]
struct Incoming {
    pending: usize,
    /// Where the next byte goes in the volume.
    offset: u64,
    /// Bytes that have not been received, without those of `piece`.
    left: u64,
    piece: Option<Piece>,
}

/// A piece of a payload: `frame[..filled]` of `len` bytes is here.
#[derive(Debug)]
struct Piece {
    /// `None` while a receive has it.
    frame: Option<Frame>,
    filled: usize,
    len: usize,
}

/// What connections share on one loop.
pub(super) struct Context<'a> {
    pub(super) reactor: &'a mut Reactor,
    pub(super) engine: &'a mut Engine,
    pub(super) pending: &'a mut Slab<Pending>,
    /// Heap memory of all connections' replies.
    pub(super) queued_heap: usize,
    /// Frames of all connections that payloads of writes are received into, in bytes.
    pub(super) payload_bytes: usize,
}

pub(super) struct Connection {
    pub(super) socket: Socket,
    token: Token,
    index: usize,
    volume: VolumeId,
    transmission: Transmission,
    replies: Replies,
    input: Input,
    /// TLS, if the connection has it: then `input` holds plaintext.
    secure: Option<Box<Secure>>,
    expect: Expect,
    /// Replies that wait for the send in flight.
    out: Gather,
    /// An empty gather, for the next send.
    spare: Gather,
    pub(super) receiving: bool,
    pub(super) sending: bool,
    /// Heap memory of the send in flight, and what the front end has counted of this connection's.
    sending_heap: usize,
    counted_heap: usize,
    /// What the front end has counted of this connection's frames for payloads.
    counted_payload: usize,
    in_flight: usize,
    in_flight_bytes: u64,
    batch: Batch,
    fence: Fence,
    /// A change waits for those of others: look again soon.
    pub(super) fenced: bool,
    /// No frame was free: ask again.
    pub(super) stalled: bool,
    /// Nothing more is read; what is in flight is answered, then the stream is closed.
    pub(super) draining: Option<CloseReason>,
    /// The connection is to be closed now.
    pub(super) closing: Option<CloseReason>,
}

/// Requests of one round.
#[derive(Default)]
struct Batch {
    requests: u32,
    /// That they name.
    bytes: u64,
}

/// What a greeting hands to the connection that it becomes.
pub(super) struct Greeted {
    pub(super) socket: Socket,
    pub(super) token: Token,
    pub(super) index: usize,
    pub(super) volume: VolumeId,
    /// What it has to wait for before its first change.
    pub(super) arrived: Option<(Presence, EarlierChanges)>,
    pub(super) transmission: Transmission,
    /// What has come behind the greeting.
    pub(super) input: Input,
    pub(super) secure: Option<Box<Secure>>,
}

impl Connection {
    pub(super) fn new(greeted: Greeted) -> Self {
        let Greeted { socket, token, index, volume, arrived, transmission, input, secure } = greeted;
        Self {
            socket,
            token,
            index,
            volume,
            replies: Replies::new(*transmission.rules()),
            transmission,
            input,
            secure,
            expect: Expect::Header,
            out: Gather::new(),
            spare: Gather::new(),
            receiving: false,
            sending: false,
            sending_heap: 0,
            counted_heap: 0,
            counted_payload: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            batch: Batch::default(),
            fence: Fence::new(arrived),
            fenced: false,
            stalled: false,
            draining: None,
            closing: None,
        }
    }

    pub(super) fn volume(&self) -> VolumeId {
        self.volume
    }

    /// Whether every reply has gone that there will be, once nothing more is read: a write of which a part has come has
    /// none.
    pub(super) fn is_idle(&self, pending: &Slab<Pending>) -> bool {
        let half_here = match self.expect {
            Expect::Payload(Incoming { pending: id, .. }) | Expect::Drain { then: Answer::Pending(id), .. } => {
                usize::from(pending[id].left == 0)
            }
            // A read of which a part has gone is owed the rest.
            Expect::Parts(_) => return false,
            _ => 0,
        };
        let answered = self.in_flight == half_here && self.out.is_empty();
        answered && !self.sending && !self.secure.as_ref().is_some_and(|secure| secure.wants_send())
    }

    /// Requests that have not been answered.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests at the store, whose ends have to find this connection.
    pub(super) fn has_requests(&self) -> bool {
        self.in_flight > 0
    }

    /// Takes the end of a receive.
    pub(super) fn received(&mut self, into: &mut Scatter, n: usize) {
        self.receiving = false;
        if self.closing.is_some() {
            // What was expected is forgotten, and a payload's frame is no input: it may lie in a device.
            into.drain().for_each(drop);
            return;
        }
        if let Some(secure) = &mut self.secure {
            into.drain().for_each(|piece| secure.give(piece.frame, n));
            return;
        }
        let mut n = n;
        for piece in into.drain() {
            let part = n.min(piece.len);
            n -= part;
            match &mut self.expect {
                Expect::Payload(Incoming { piece: Some(lent), .. }) if lent.frame.is_none() => {
                    lent.frame = Some(piece.frame);
                    lent.filled += part;
                }
                _ => self.input.give(piece.frame, part),
            }
        }
    }

    /// The stream ended: orderly, if nothing was begun.
    fn at_end_of_stream(&mut self) {
        let between = matches!(self.expect, Expect::Header) && self.input.bytes().is_empty();
        self.draining.get_or_insert(if between { CloseReason::Disconnected } else { CloseReason::Truncated });
    }

    /// Takes back the memory of a send that is done.
    pub(super) fn sent(&mut self, mut gather: Gather) {
        self.sending = false;
        self.sending_heap = 0;
        gather.clear();
        self.spare = gather;
    }

    /// Does all that can be done now: requests that are here, one send, one receive.
    pub(super) fn advance(&mut self, context: &mut Context<'_>) {
        (self.stalled, self.fenced) = (false, false);
        if self.closing.is_some() {
            return;
        }
        self.batch = Batch::default();
        let needs_input = self.walk(context);
        self.end_batch(context.engine);
        context.reactor.note_requests(self.batch.requests, self.batch.bytes);
        if self.closing.is_some() {
            return;
        }
        self.send(context.reactor);
        self.say_end(context);
        if needs_input && self.draining.is_none() && !self.stalled {
            self.receive(context.reactor);
        }
    }

    /// Walks over the input. True if it ended for want of input, and for nothing else: a receive that is posted over
    /// a whole request would leave it unanswered until the client sends more.
    fn walk(&mut self, context: &mut Context<'_>) -> bool {
        while self.may_step() && !self.is_full(context) {
            match self.step(context) {
                Progress::Moved => {}
                Progress::NeedsInput if self.decrypt(context.reactor.receive_buffers()) => {}
                Progress::NeedsInput => return true,
                Progress::Waits => return false,
            }
        }
        false
    }

    /// Whether something may be begun; when nothing more is read, only the rest of what has been begun.
    fn may_step(&self) -> bool {
        let may_begin = self.draining.is_none() || matches!(self.expect, Expect::Parts(_));
        may_begin && self.closing.is_none() && !self.receiving
    }

    /// Whether replies have to go before more requests are read.
    fn is_full(&self, context: &Context<'_>) -> bool {
        let heap = self.out.heap_bytes() + self.sending_heap;
        self.in_flight >= CONNECTION_IN_FLIGHT_MAX
            || self.in_flight_bytes + self.out.len() as u64 >= CONNECTION_IN_FLIGHT_BYTES_MAX
            || heap > CONNECTION_HEAP_BYTES_MAX
            || (context.queued_heap > FRONTEND_HEAP_BYTES_MAX && heap > CONNECTION_HEAP_BYTES_MIN)
    }

    /// Counts this connection's frames for payloads anew in those of all.
    pub(super) fn count_payload(&mut self, all: usize) -> usize {
        let now = match &self.expect {
            Expect::Payload(Incoming { piece: Some(piece), .. }) => piece.len,
            _ => 0,
        };
        all - std::mem::replace(&mut self.counted_payload, now) + now
    }

    /// Counts this connection's heap memory anew in that of all.
    pub(super) fn count_heap(&mut self, all: usize) -> usize {
        let now = if self.closing.is_some() { 0 } else { self.out.heap_bytes() + self.sending_heap };
        all - std::mem::replace(&mut self.counted_heap, now) + now
    }

    /// Uses up some of the input, or sends the next part of a long read.
    fn step(&mut self, context: &mut Context<'_>) -> Progress {
        match &mut self.expect {
            Expect::Header => self.step_header(context),
            Expect::Payload(_) => self.step_payload(context),
            Expect::Parts(_) => self.step_parts(context),
            Expect::Drain { .. } => self.step_drain(context),
        }
    }

    fn step_header(&mut self, context: &mut Context<'_>) -> Progress {
        match self.transmission.parse(self.input.bytes()) {
            Parsed::Incomplete { need } => {
                self.input.want(need);
                Progress::NeedsInput
            }
            Parsed::Request { request, header_bytes } => {
                let progress = self.start(context, request, header_bytes);
                if progress == Progress::Moved {
                    self.batch.requests += 1;
                    self.batch.bytes += request.length;
                }
                progress
            }
            Parsed::Rejected { tag, violation, header_bytes, drain_bytes } => {
                context.engine.note_rejected(self.volume);
                self.input.consume(header_bytes);
                self.expect = Expect::Drain { left: drain_bytes, then: Answer::Refuse(tag, violation) };
                Progress::Moved
            }
            Parsed::Bad(error) => {
                self.draining = Some(CloseReason::Protocol(error));
                Progress::Waits
            }
        }
    }

    fn start(&mut self, context: &mut Context<'_>, request: Request, header_bytes: usize) -> Progress {
        match request.command {
            Command::Disconnect => {
                self.draining = Some(CloseReason::Disconnected);
                return Progress::Waits;
            }
            Command::Write => return self.start_write(context, request, header_bytes),
            Command::Trim | Command::WriteZeroes if !self.may_change(context) => return Progress::Waits,
            _ => {}
        }
        let tag = tag_of(context.pending.vacant_key());
        if request.command != Command::Read && context.engine.is_full() {
            self.stalled = true;
            return Progress::Waits;
        }
        let step = self.ask(context, &request, tag);
        if matches!(step, Ok(Step::Busy)) {
            self.stalled = true;
            return Progress::Waits;
        }
        self.input.consume(header_bytes);
        match step {
            Ok(Step::InParts) => self.expect = Expect::Parts(PartedRead::new(request)),
            Ok(Step::Now(outcome)) => self.reply(&request, outcome),
            Ok(Step::Later) => {
                self.note_pending(
                    context,
                    Pending { connection: self.index, request, left: 1, receiving: false, error: None },
                );
            }
            Ok(Step::Busy) => {}
            Err(error) => self.fail(&request, error),
        }
        Progress::Moved
    }

    /// Hands a request without a payload to the engine.
    fn ask(&self, context: &mut Context<'_>, request: &Request, tag: Tag) -> Result<Step<Outcome>, BlockError> {
        let Context { reactor, engine, queued_heap, .. } = context;
        let volume = self.volume;
        let range = ByteRange::new(request.offset, request.length);
        let durable = request.flags.has(CommandFlags::FUA);
        match request.command {
            Command::Read => {
                let flags = ReadFlags { sliced: self.in_chunks(request), ..ReadFlags::default() };
                let step = self.read(reactor, engine, range, flags, tag)?;
                Ok(step.map(|payload| Outcome::Read(Ok(payload))))
            }
            Command::BlockStatus => {
                // Others' replies, which they do not take, are not to keep this client from its answer, only from a long one.
                let crowded = if *queued_heap > FRONTEND_HEAP_BYTES_MAX { CROWDED_EXTENTS_MAX } else { usize::MAX };
                let count_max = if request.flags.has(CommandFlags::REQ_ONE) { 1 } else { crowded };
                let step = engine.extents(reactor, volume, range, count_max, tag)?;
                Ok(step.map(|extents| Outcome::Extents(Ok(extents))))
            }
            Command::Flush => engine.flush(reactor, volume, tag).map(unit),
            Command::Trim => engine.trim(reactor, volume, range, durable, tag).map(unit),
            Command::Cache => engine.prefetch(reactor, volume, range, tag).map(unit),
            Command::WriteZeroes => {
                let flags = ZeroFlags {
                    keep_space: request.flags.has(CommandFlags::NO_HOLE),
                    fast: request.flags.has(CommandFlags::FAST_ZERO),
                    durable,
                };
                engine.zero(reactor, volume, range, flags, tag).map(unit)
            }
            Command::Write | Command::Disconnect => Ok(Step::Now(Outcome::Unit(Ok(())))),
        }
    }

    fn note_pending(&mut self, context: &mut Context<'_>, pending: Pending) -> usize {
        self.in_flight += 1;
        self.in_flight_bytes += pending.bytes();
        context.pending.insert(pending)
    }

    fn send(&mut self, reactor: &mut Reactor) {
        if self.sending {
            return;
        }
        let mut gather = std::mem::take(&mut self.spare);
        match &mut self.secure {
            Some(secure) => secure.seal(&mut self.out, &mut gather),
            None => std::mem::swap(&mut self.out, &mut gather),
        }
        if gather.is_empty() {
            self.spare = gather;
            return;
        }
        self.sending = true;
        self.sending_heap = gather.heap_bytes();
        reactor.submit(Op::Send { socket: self.socket, gather }, self.token.with_tag(TAG_SEND));
    }
}

impl Pending {
    fn durable(&self) -> bool {
        self.request.flags.has(CommandFlags::FUA)
    }

    /// Bytes of memory that it may hold.
    fn bytes(&self) -> u64 {
        match self.request.command {
            Command::Read | Command::Write => self.request.length,
            _ => 0,
        }
    }
}

fn unit(step: Step<()>) -> Step<Outcome> {
    step.map(|()| Outcome::Unit(Ok(())))
}

/// The engine's label of request `id`: the front end's class, and its place in the table, which it keeps until it ends.
fn tag_of(id: usize) -> Tag {
    Tag(u64::from(NBD_CLASS) << 56 | id as u64)
}
