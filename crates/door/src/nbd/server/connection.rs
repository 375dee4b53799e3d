//! One client's connection in the transmission phase: requests in, replies out.
//!
//! The connection walks over what it has received and starts each request; replies gather in `out` and go in one send,
//! while the next gather. A small write is taken from the input whole; the payload of a large one is received into
//! frames of its own, piece by piece, and a piece goes to the store when all of it is there.

use byway_reactor::{Frame, Gather, Op, Reactor, Scatter, Socket, Token};
use byway_service::block::{BlockError, Engine, Outcome, Payload, Step, Tag, VolumeId, WriteFlags, ZeroFlags};
use slab::Slab;

use super::NBD_CLASS;
use super::input::Input;
use crate::limits::{CONNECTION_IN_FLIGHT_BYTES_MAX, CONNECTION_IN_FLIGHT_MAX, SMALL_WRITE_BYTES_MAX};
use crate::nbd::block_status::Allocation;
use crate::nbd::errno::Errno;
use crate::nbd::flags::CommandFlags;
use crate::nbd::handshake::HandshakeError;
use crate::nbd::reply::Replies;
use crate::nbd::request::{Command, Request};
use crate::nbd::transmission::{Parsed, ProtocolError, Transmission};

/// The tags of a connection's tokens.
pub(super) const TAG_RECEIVE: u8 = 1;
pub(super) const TAG_SEND: u8 = 2;

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum End {
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
    /// The client took too long for its handshake.
    #[error("the handshake took too long")]
    Slow,
    /// The server has no frame for a new connection: raise `--frames`.
    #[error("no memory for another connection (raise --frames)")]
    NoMemory,
    /// The volume is no longer served.
    #[error("the volume is no longer served")]
    VolumeGone,
    /// The server stops.
    #[error("the server is shutting down")]
    Shutdown,
    /// The stream broke.
    #[error("the stream failed: {0}")]
    Stream(byway_reactor::Errno),
}

impl End {
    /// Whether something went wrong.
    pub(super) fn is_fault(self) -> bool {
        !matches!(self, Self::Disconnected | Self::Shutdown | Self::VolumeGone)
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
    /// Bytes to throw away.
    Drain(u64),
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
}

pub(super) struct Connection {
    pub(super) socket: Socket,
    token: Token,
    index: usize,
    volume: VolumeId,
    transmission: Transmission,
    replies: Replies,
    input: Input,
    expect: Expect,
    /// Replies that wait for the send in flight.
    out: Gather,
    /// An empty gather, for the next send.
    spare: Gather,
    pub(super) receiving: bool,
    pub(super) sending: bool,
    in_flight: usize,
    in_flight_bytes: u64,
    /// Requests, and the bytes that they name, of this round.
    batch: (u32, u64),
    /// No frame was free: ask again.
    pub(super) stalled: bool,
    /// Nothing more is read; what is in flight is answered, then the stream is closed.
    pub(super) end: Option<End>,
    /// The connection is to be closed now.
    pub(super) over: Option<End>,
}

impl Connection {
    pub(super) fn new(
        (socket, token, index): (Socket, Token, usize),
        volume: VolumeId,
        transmission: Transmission,
        input: Input,
    ) -> Self {
        Self {
            socket,
            token,
            index,
            volume,
            replies: Replies::new(*transmission.rules()),
            transmission,
            input,
            expect: Expect::Header,
            out: Gather::new(),
            spare: Gather::new(),
            receiving: false,
            sending: false,
            in_flight: 0,
            in_flight_bytes: 0,
            batch: (0, 0),
            stalled: false,
            end: None,
            over: None,
        }
    }

    pub(super) fn volume(&self) -> VolumeId {
        self.volume
    }

    /// Whether every reply has gone.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.out.is_empty() && !self.sending
    }

    /// Requests at the store, whose ends have to find this connection.
    pub(super) fn has_requests(&self) -> bool {
        self.in_flight > 0
    }

    /// Takes the end of a receive.
    pub(super) fn received(&mut self, into: &mut Scatter, n: usize) {
        self.receiving = false;
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
    pub(super) fn at_end_of_stream(&mut self) {
        let between = matches!(self.expect, Expect::Header) && self.input.bytes().is_empty();
        self.end.get_or_insert(if between { End::Disconnected } else { End::Truncated });
    }

    /// Takes back the memory of a send that is done.
    pub(super) fn sent(&mut self, mut gather: Gather) {
        self.sending = false;
        gather.clear();
        self.spare = gather;
    }

    /// Does all that can be done now: requests that are here, one send, one receive.
    pub(super) fn advance(&mut self, context: &mut Context<'_>) {
        self.stalled = false;
        if self.over.is_some() {
            return;
        }
        self.batch = (0, 0);
        while self.end.is_none() && !self.receiving && !self.is_full() && self.step(context) {}
        context.reactor.note_requests(self.batch.0, self.batch.1);
        self.send(context.reactor);
        if self.end.is_none() && !self.receiving && !self.stalled && !self.is_full() {
            self.receive(context.reactor);
        }
    }

    fn is_full(&self) -> bool {
        self.in_flight >= CONNECTION_IN_FLIGHT_MAX
            || self.in_flight_bytes + self.out.len() as u64 >= CONNECTION_IN_FLIGHT_BYTES_MAX
    }

    /// Uses up some of the input; false if more has to come first, or a frame has to be free.
    fn step(&mut self, context: &mut Context<'_>) -> bool {
        match &mut self.expect {
            Expect::Header => self.step_header(context),
            Expect::Payload(_) => self.step_payload(context),
            Expect::Drain(left) => {
                let n = (*left).min(self.input.bytes().len() as u64);
                *left -= n;
                if *left == 0 {
                    self.expect = Expect::Header;
                }
                self.input.consume(n as usize);
                n > 0
            }
        }
    }

    fn step_header(&mut self, context: &mut Context<'_>) -> bool {
        match self.transmission.parse(self.input.bytes()) {
            Parsed::Incomplete { need } => {
                self.input.want(need);
                false
            }
            Parsed::Request { request, header_bytes } => {
                let started = self.start(context, request, header_bytes);
                if started {
                    self.batch = (self.batch.0 + 1, self.batch.1 + request.length);
                }
                started
            }
            Parsed::Rejected { tag, violation, header_bytes, drain_bytes } => {
                self.out.push_head_with(|out| self.replies.error(out, tag, violation.errno, violation.reason));
                self.input.consume(header_bytes);
                if drain_bytes > 0 {
                    self.expect = Expect::Drain(drain_bytes);
                }
                true
            }
            Parsed::Bad(error) => {
                self.end = Some(End::Protocol(error));
                false
            }
        }
    }

    fn start(&mut self, context: &mut Context<'_>, request: Request, header_bytes: usize) -> bool {
        match request.command {
            Command::Disconnect => {
                self.end = Some(End::Disconnected);
                return false;
            }
            Command::Write => return self.start_write(context, request, header_bytes),
            _ => {}
        }
        let tag = tag_of(context.pending.vacant_key());
        let step = self.ask(context, &request, tag);
        if matches!(step, Ok(Step::Busy)) {
            self.stalled = true;
            return false;
        }
        self.input.consume(header_bytes);
        match step {
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
        true
    }

    /// Hands a request without a payload to the engine.
    fn ask(&self, context: &mut Context<'_>, request: &Request, tag: Tag) -> Result<Step<Outcome>, BlockError> {
        let Context { reactor, engine, .. } = context;
        let volume = self.volume;
        let range = (request.offset, request.length);
        let durable = request.flags.has(CommandFlags::FUA);
        match request.command {
            Command::Read => Ok(engine
                .read(reactor, volume, request.offset, request.length as usize, tag)?
                .map(|payload| Outcome::Read(Ok(payload)))),
            Command::BlockStatus => {
                let count_max = if request.flags.has(CommandFlags::REQ_ONE) { 1 } else { usize::MAX };
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

    fn start_write(&mut self, context: &mut Context<'_>, request: Request, header_bytes: usize) -> bool {
        let len = request.length as usize;
        if len > SMALL_WRITE_BYTES_MAX {
            self.input.consume(header_bytes);
            self.input.want_little();
            let pending = Pending { connection: self.index, request, left: 0, receiving: true, error: None };
            let pending = self.note_pending(context, pending);
            let incoming = Incoming { pending, offset: request.offset, left: request.length, piece: None };
            self.expect = Expect::Payload(incoming);
            return true;
        }
        let whole = header_bytes + len;
        self.input.want(whole);
        if self.input.bytes().len() < whole {
            return false;
        }
        let flags = WriteFlags { durable: request.flags.has(CommandFlags::FUA) };
        let tag = tag_of(context.pending.vacant_key());
        let payload = &self.input.bytes()[header_bytes..whole];
        let step = context.engine.write_small(context.reactor, self.volume, request.offset, payload, flags, tag);
        match step {
            Ok(Step::Busy) => {
                self.stalled = true;
                return false;
            }
            Ok(Step::Now(())) => self.reply(&request, Outcome::Unit(Ok(()))),
            Ok(Step::Later) => {
                self.note_pending(
                    context,
                    Pending { connection: self.index, request, left: 1, receiving: false, error: None },
                );
            }
            Err(error) => self.fail(&request, error),
        }
        self.input.consume(whole);
        true
    }

    /// Moves a large payload on: takes what the input has of it, gives whole pieces to the store.
    fn step_payload(&mut self, context: &mut Context<'_>) -> bool {
        let Expect::Payload(incoming) = &mut self.expect else { return false };
        if incoming.piece.is_none() {
            let left = usize::try_from(incoming.left).unwrap_or(usize::MAX);
            if self.input.bytes().is_empty() && !context.pending[incoming.pending].durable() {
                let Context { reactor, engine, .. } = context;
                let n = engine.receive_into(reactor, self.volume, self.socket, incoming.offset, left);
                if n > 0 {
                    incoming.offset += n as u64;
                    incoming.left -= n as u64;
                    if incoming.left == 0 {
                        self.end_payload(context);
                    }
                    return true;
                }
            }
            let len = context.engine.write_piece_len(self.volume, incoming.offset, left);
            let Some(frame) = context.reactor.frames().alloc(len) else {
                self.stalled = true;
                return false;
            };
            incoming.left -= len as u64;
            incoming.piece = Some(Piece { frame: Some(frame), filled: 0, len });
        }
        let Some(piece) = &mut incoming.piece else { return false };
        let Some(frame) = &mut piece.frame else { return false };
        let n = self.input.bytes().len().min(piece.len - piece.filled);
        frame[piece.filled..piece.filled + n].copy_from_slice(&self.input.bytes()[..n]);
        piece.filled += n;
        self.input.consume(n);
        if piece.filled < piece.len {
            return false;
        }
        self.store_piece(context);
        true
    }

    /// Gives the piece, all of which is here, to the store; after the last, ends the receiving of the payload.
    fn store_piece(&mut self, context: &mut Context<'_>) {
        let Expect::Payload(incoming) = &mut self.expect else { return };
        let Some(Piece { frame: Some(frame), len, .. }) = incoming.piece.take() else { return };
        let id = incoming.pending;
        let at = incoming.offset;
        incoming.offset += len as u64;
        let last = incoming.left == 0;
        let pending = &mut context.pending[id];
        let flags = WriteFlags { durable: pending.durable() };
        match context.engine.write(context.reactor, self.volume, at, (frame, len), flags, tag_of(id)) {
            Ok(Step::Later) => pending.left += 1,
            Ok(Step::Now(()) | Step::Busy) => {}
            Err(error) => {
                pending.error.get_or_insert(error);
            }
        }
        if last || pending.error.is_some() {
            self.end_payload(context);
        }
    }

    /// All of a payload is here, or the rest of it is not wanted.
    fn end_payload(&mut self, context: &mut Context<'_>) {
        let Expect::Payload(Incoming { pending: id, left, .. }) = self.expect else { return };
        context.pending[id].receiving = false;
        self.expect = if left > 0 { Expect::Drain(left) } else { Expect::Header };
        self.finish_if_done(context.pending, id);
    }

    /// Takes the end of something that the engine did for request `id`.
    pub(super) fn done(&mut self, pending: &mut Slab<Pending>, id: usize, outcome: Outcome) {
        let request = &mut pending[id];
        request.left -= 1;
        match outcome {
            Outcome::Unit(Ok(())) => {}
            Outcome::Unit(Err(error)) => {
                request.error.get_or_insert(error);
            }
            other => {
                let request = self.forget_pending(pending, id);
                return self.reply(&request, other);
            }
        }
        self.finish_if_done(pending, id);
    }

    fn finish_if_done(&mut self, pending: &mut Slab<Pending>, id: usize) {
        let Pending { left: 0, receiving: false, error, .. } = pending[id] else { return };
        let request = self.forget_pending(pending, id);
        self.reply(&request, Outcome::Unit(error.map_or(Ok(()), Err)));
    }

    fn forget_pending(&mut self, pending: &mut Slab<Pending>, id: usize) -> Request {
        let ended = pending.remove(id);
        self.in_flight -= 1;
        self.in_flight_bytes -= ended.bytes();
        ended.request
    }

    /// The connection is gone: forgets the write whose payload was being received, unless pieces of it are at the store.
    pub(super) fn abandon(&mut self, pending: &mut Slab<Pending>) {
        if let Expect::Payload(incoming) = std::mem::replace(&mut self.expect, Expect::Header) {
            pending[incoming.pending].receiving = false;
            if pending[incoming.pending].left == 0 {
                self.forget_pending(pending, incoming.pending);
            }
        }
    }

    fn reply(&mut self, request: &Request, outcome: Outcome) {
        match outcome {
            Outcome::Read(Ok(payload)) => self.reply_data(request, payload),
            Outcome::Extents(Ok(extents)) => {
                let allocations = extents.iter().map(|e| Allocation { length: e.len, hole: e.hole, zero: e.hole });
                self.out.push_head_with(|out| self.replies.block_status(out, request, allocations));
            }
            Outcome::Unit(Ok(())) => self.out.push_head_with(|out| self.replies.success(out, request.tag())),
            Outcome::Read(Err(error)) | Outcome::Extents(Err(error)) | Outcome::Unit(Err(error)) => {
                self.fail(request, error);
            }
        }
    }

    fn reply_data(&mut self, request: &Request, payload: Payload) {
        self.out.push_head_with(|out| self.replies.read_whole(out, request));
        payload.push_to(&mut self.out);
    }

    fn fail(&mut self, request: &Request, error: BlockError) {
        let errno = Errno::from_os(error.errno().raw_os_error());
        let message = error.to_string();
        self.out.push_head_with(|out| self.replies.error(out, request.tag(), errno, &message));
    }

    fn send(&mut self, reactor: &mut Reactor) {
        if self.sending || self.out.is_empty() {
            return;
        }
        self.sending = true;
        let gather = std::mem::replace(&mut self.out, std::mem::take(&mut self.spare));
        reactor.submit(Op::Send { socket: self.socket, gather }, self.token.with_tag(TAG_SEND));
    }

    /// Receives: the rest of a payload piece into its frame, with what follows it into the input; else the input alone.
    fn receive(&mut self, reactor: &mut Reactor) {
        let mut into = Scatter::new();
        let mut min = 1;
        let mut ends_payload = true;
        if let Expect::Payload(Incoming { piece: Some(piece), left, .. }) = &mut self.expect
            && let Some(frame) = piece.frame.take()
        {
            min = piece.len - piece.filled;
            ends_payload = *left == 0;
            into.push(frame, piece.filled, min);
        }
        if ends_payload {
            let Some((frame, at)) = self.input.lend(reactor.frames()) else {
                self.stalled = into.is_empty();
                if into.is_empty() {
                    return;
                }
                return self.submit_receive(reactor, into, min);
            };
            let room = frame.len() - at;
            into.push(frame, at, room);
        }
        self.submit_receive(reactor, into, min);
    }

    fn submit_receive(&mut self, reactor: &mut Reactor, into: Scatter, min: usize) {
        self.receiving = true;
        reactor.submit(Op::Recv { socket: self.socket, into, min }, self.token.with_tag(TAG_RECEIVE));
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

/// The engine's label of request `id`: the door's class, and its place in the table, which it keeps until it ends.
fn tag_of(id: usize) -> Tag {
    Tag(u64::from(NBD_CLASS) << 56 | id as u64)
}
