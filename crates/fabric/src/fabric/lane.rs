//! One connection of a session: its queue of sends, and the memory that it receives into.

use std::collections::VecDeque;

use byway_reactor::limits::RECEIVE_BYTES_MIN;
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Frame, FrameRange, Gather, Instant, Op, Reactor, Scatter, Socket, Token};
use zerocopy::IntoBytes;

use super::secure::Secure;
use crate::limits::{PAYLOAD_BYTES_MAX, SEND_BYTES_MAX};
use crate::node::wire::PutBody;
use crate::rdma::transport::{ConnectionId, Received, Went};
use crate::registry::SessionReservation;
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot};
use crate::tls::{PeerIdentity, TlsServer};
use crate::windows::{WindowError, WindowKey};
use crate::wire::{HEADER_BYTES, Header, Kind};

/// Bytes of the buffer that a lane receives handshakes and bulk headers into, and an idle control lane its messages.
pub(super) const HEADER_FRAME_BYTES: usize = RECEIVE_BYTES_MIN;

/// After so many answers it is looked which of them have gone.
const ANSWERS_LOOK: usize = 256;

/// How far a lane has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client's connect is in flight.
    Connecting,
    /// The server waits for the `Hello`.
    AwaitHello,
    /// The server has the `Hello`, and waits for the client's old session to end.
    Fenced,
    /// The client waits for the `Welcome`.
    AwaitWelcome,
    /// It carries messages.
    Up,
    /// It is closed; what was in flight has not all come back.
    Closing,
}

/// A payload that a bulk lane is receiving.
#[derive(Debug)]
pub(super) enum Placing {
    /// Into a window, which has lent its frame.
    Window(Header),
    /// Into nothing: so many bytes are left to throw away.
    Drain(usize),
}

/// The frame of a window, which a lane was filling.
#[derive(Debug)]
pub(super) struct LentFrame {
    pub(super) window: WindowKey,
    pub(super) frame: Frame,
}

/// A receive that waits until the peer has taken what it asked for.
#[derive(Debug)]
pub(super) enum PausedRecv {
    /// Messages that are here already have to be looked at first.
    Messages,
    /// The receive itself.
    Receive(Op),
}

/// A put of which the peer was refused a part, and whose other parts may still come.
#[derive(Clone, Copy, Debug)]
struct RefusedPut {
    number: [u8; 7],
    error: WindowError,
}

/// What a header says of a put of a program, if it is of one.
fn put_of(header: &Header) -> Option<PutBody> {
    let body: PutBody = header.body();
    let is_put = header.kind == Kind::Data as u8 && body.target.get() == 0 && body.put != [0; 7];
    is_put.then_some(body)
}

/// When a send's oldest message was queued, and when it was given to the wire.
#[derive(Clone, Copy, Debug, Default)]
struct SendTimes {
    queued: Instant,
    begun: Instant,
}

/// A connection of a fabric.
pub(super) type LaneId = Slot<Lane>;

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) socket: Option<Socket>,
    /// In place of a socket, its connection over RDMA.
    pub(super) connection: Option<ConnectionId>,
    pub(super) session: Option<SessionId>,
    /// 0 is the control lane.
    pub(super) number: u16,
    pub(super) phase: Phase,
    pub(super) opened_at: Instant,
    pub(super) connecting: bool,
    /// The `Hello` of a fenced lane.
    pub(super) hello: Option<Header>,
    pub(super) close_when_sent: Option<CloseReason>,
    /// TLS, if the lane has it.
    pub(super) secure: Option<Box<Secure>>,
    /// TLS, which the peer may begin or not: its first bytes tell.
    pub(super) tls_offered: Option<TlsServer>,

    /// What is received into; with the receive while one is in flight.
    pub(super) frame: Option<Frame>,
    pub(super) filled: usize,
    pub(super) placing: Option<Placing>,
    pub(super) scatter: Option<Scatter>,
    pub(super) receiving: bool,
    pub(super) sequence_in: u64,
    refused_put: Option<RefusedPut>,
    /// What was to be received next, when the peer had to take answers first.
    pub(super) paused: Option<PausedRecv>,
    /// Since when.
    pub(super) paused_at: Instant,
    /// It waits for a longer buffer.
    pub(super) starved: bool,
    /// Another loop has handed it over.
    pub(super) was_handed: bool,
    /// The session to be of an RDMA connection; its loop counts it already.
    pub(super) reservation: Option<SessionReservation>,
    /// Set at accept: there is no room for this connection, which its `Hello` is answered with.
    pub(super) turned_away: bool,

    /// Messages for an RDMA connection, which sends no stream.
    pub(super) outbox: Vec<(Header, Gather)>,
    /// Messages of an RDMA connection that wait until the peer has taken answers.
    pub(super) backlog: VecDeque<Received>,
    pending: Gather,
    pub(super) spare: Option<Gather>,
    sending: Option<usize>,
    /// Heap memory of the send in flight.
    sending_heap: usize,
    /// Frames of the send in flight, in bytes.
    sending_frames: usize,
    /// Of the send in flight, or the last one.
    send_times: SendTimes,
    /// When the first message was queued that is not in a send yet.
    queued_at: Option<Instant>,
    /// What the fabric has counted of this lane's heap memory.
    pub(super) counted_heap: usize,
    /// Bytes that were ever pushed.
    pushed: u64,
    /// Where in those the answers end that may not have gone.
    answers: VecDeque<u64>,
    dirty: bool,
    sequence_out: u64,
}

impl Lane {
    pub(super) fn new(socket: Option<Socket>, phase: Phase, opened_at: Instant) -> Self {
        Self {
            socket,
            connection: None,
            session: None,
            number: 0,
            phase,
            opened_at,
            connecting: false,
            hello: None,
            close_when_sent: None,
            secure: None,
            tls_offered: None,
            frame: None,
            filled: 0,
            placing: None,
            scatter: Some(Scatter::new()),
            receiving: false,
            sequence_in: 0,
            refused_put: None,
            paused: None,
            outbox: Vec::new(),
            backlog: VecDeque::new(),
            paused_at: opened_at,
            starved: false,
            was_handed: false,
            reservation: None,
            turned_away: false,
            pending: Gather::new(),
            spare: Some(Gather::new()),
            sending: None,
            sending_heap: 0,
            sending_frames: 0,
            send_times: SendTimes::default(),
            queued_at: None,
            counted_heap: 0,
            pushed: 0,
            answers: VecDeque::new(),
            dirty: false,
            sequence_out: 0,
        }
    }

    /// Takes back the lists of a receive that has ended. Gives the frame of a window, if a payload was received.
    #[inline]
    pub(super) fn received(&mut self, mut into: Scatter) -> Option<Frame> {
        self.receiving = false;
        let mut frames = into.drain();
        let first = frames.next().map(|piece| piece.frame);
        let second = frames.next().map(|piece| piece.frame);
        drop(frames);
        self.scatter = Some(into);
        // A payload and the next header, or one frame alone.
        let (lent, own) = if second.is_some() { (first, second) } else { (None, first) };
        self.frame = own;
        lent
    }

    /// Receives into its own frame, up to `len` bytes with those that it has, until at least `min` bytes more have come.
    #[inline]
    pub(super) fn receive_own(&mut self, len: usize, min: usize) -> Option<Op> {
        let (socket, frame) = (self.socket?, self.frame.take()?);
        let mut into = self.scatter.take().unwrap_or_default();
        let start = if seeded::is(Bug::ShortReadAtWrongOffset) { 0 } else { self.filled };
        into.push(frame, start, len - self.filled);
        Some(Op::Recv { socket, into, min })
    }

    /// Receives a header, of which `filled` bytes are here.
    #[inline]
    pub(super) fn receive_header(&mut self, filled: usize) -> Option<Op> {
        self.filled = filled;
        self.receive_own(HEADER_BYTES, HEADER_BYTES - filled)
    }

    /// Receives ciphertext.
    pub(super) fn receive_ciphertext(&mut self) -> Option<Op> {
        self.filled = 0;
        let len = self.frame.as_ref().map_or(0, Frame::len);
        self.receive_own(len, 1)
    }

    /// Receives the first message. From now on it is up; what the frame held is done with.
    pub(super) fn receive_first(&mut self) -> Option<Op> {
        if self.connection.is_some() {
            return None;
        }
        if self.secure.is_some() {
            return self.receive_ciphertext();
        }
        if self.number > 0 {
            return self.receive_header(0);
        }
        self.filled = 0;
        self.receive_own(HEADER_FRAME_BYTES, 1)
    }

    /// Receives a payload into its window, and behind it as much as has come of the next header.
    #[inline]
    pub(super) fn receive_payload(&mut self, header: Header, target: FrameRange) -> Option<Op> {
        let FrameRange { frame, start, len } = target;
        let (socket, own) = (self.socket?, self.frame.take()?);
        let mut into = self.scatter.take().unwrap_or_default();
        into.push(frame, start, len);
        into.push(own, 0, HEADER_BYTES);
        self.placing = Some(Placing::Window(header));
        Some(Op::Recv { socket, into, min: len })
    }

    /// Throws `left` bytes away, through the header's frame.
    pub(super) fn drain(&mut self, left: usize) -> Option<Op> {
        self.filled = 0;
        self.placing = Some(Placing::Drain(left));
        self.receive_own(left.min(HEADER_FRAME_BYTES), 1)
    }

    /// Whether a part of a message has come.
    pub(super) fn is_midway(&self) -> bool {
        let is_in_message = || self.secure.as_ref().is_some_and(|secure| secure.is_midway());
        self.placing.is_some() || self.filled > 0 || is_in_message()
    }

    /// Takes the payload that it was receiving: the frame goes back to its window.
    pub(super) fn take_payload(&mut self, lent: Option<Frame>) -> Option<LentFrame> {
        let target = || Some(self.secure.as_mut()?.target.take()?.0);
        let frame = lent.or_else(target);
        let Some(Placing::Window(header)) = self.placing.take() else { return None };
        Some(LentFrame { window: WindowKey(header.window.get()), frame: frame? })
    }

    /// The same for a lane that is closed, unless it receives: then the end of that does it.
    pub(super) fn take_paused_payload(&mut self) -> Option<LentFrame> {
        if self.receiving || !matches!(self.placing, Some(Placing::Window(_))) {
            return None;
        }
        let paused = match self.paused.take() {
            Some(PausedRecv::Receive(Op::Recv { mut into, .. })) => into.drain().next().map(|piece| piece.frame),
            _ => None,
        };
        self.take_payload(paused)
    }

    /// Reads the header at the front of `bytes`.
    #[inline]
    pub(super) fn open_header(&mut self, bytes: &[u8]) -> Result<(Header, Kind), CloseReason> {
        let bytes = bytes.first_chunk::<HEADER_BYTES>().ok_or(CloseReason::Closed)?;
        let opened = Header::open(bytes, self.sequence_in).map_err(CloseReason::Header)?;
        self.sequence_in += 1;
        Ok(opened)
    }

    /// The same for a bulk lane, which has headers of payloads alone.
    #[inline]
    pub(super) fn open_bulk_header(&mut self, bytes: &[u8]) -> Result<Header, CloseReason> {
        let (header, kind) = self.open_header(bytes)?;
        let len = header.payload_len();
        if !matches!(kind, Kind::Data | Kind::Reply) || len == 0 {
            return Err(CloseReason::Unexpected(kind));
        }
        if len > PAYLOAD_BYTES_MAX { Err(CloseReason::Oversize(len as u32)) } else { Ok(header) }
    }

    /// Reads the header that a bulk lane has in its frame. `None` if it has no frame.
    #[inline]
    pub(super) fn take_bulk_header(&mut self) -> Option<Result<Header, CloseReason>> {
        let frame = self.frame.take()?;
        let header = self.open_bulk_header(frame.bytes());
        (self.frame, self.filled) = (Some(frame), 0);
        Some(header)
    }

    /// The peer is refused a payload. All parts of a put come on one lane, one after the other.
    pub(super) fn note_refused(&mut self, header: &Header, error: WindowError) {
        if let Some(PutBody { put, .. }) = put_of(header) {
            self.refused_put = Some(RefusedPut { number: put, error });
        }
    }

    /// Why an earlier part was refused of the put that ends with this header and a message.
    #[inline]
    pub(super) fn earlier_refusal(&mut self, header: &Header) -> Option<WindowError> {
        let RefusedPut { number, error } = self.refused_put?;
        let body = put_of(header)?;
        if body.put != number {
            self.refused_put = None;
            return None;
        }
        (body.message != 0).then_some(error)
    }

    /// Whether operations are in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.receiving || self.sending.is_some() || self.connecting
    }

    /// Whether its `Hello` waits for the end of an old session, or for its own last send before it goes to another loop.
    pub(super) fn is_fenced(&self) -> bool {
        self.hello.is_some() && !self.is_busy() && self.close_when_sent.is_none()
    }

    /// Whether it has something to send, and no send in flight whose end would see to that.
    #[inline]
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// The peer's identity, as proved by TLS.
    pub(super) fn peer(&self) -> PeerIdentity {
        self.secure.as_ref().map_or(PeerIdentity::Plain, |secure| secure.peer())
    }

    /// Appends a message to what is sent next. True if the lane must be put on the list of dirty ones.
    pub(super) fn push(&mut self, mut header: Header, now: Instant, payload: impl FnOnce(&mut Gather)) -> bool {
        self.queued_at.get_or_insert(now);
        header.seal(self.sequence_out);
        self.sequence_out += 1;
        if self.connection.is_some() {
            let mut gather = self.spare.take().unwrap_or_default();
            payload(&mut gather);
            self.outbox.push((header, gather));
            return !std::mem::replace(&mut self.dirty, true);
        }
        let before = self.pending.len();
        self.pending.push_head(header.as_bytes());
        payload(&mut self.pending);
        self.pushed += (self.pending.len() - before) as u64;
        self.sending.is_none() && !std::mem::replace(&mut self.dirty, true)
    }

    /// Counts the last message as an answer to what the peer has asked for. True now and then: when it is time to look how many wait.
    pub(super) fn note_answer(&mut self) -> bool {
        self.answers.push_back(self.pushed);
        self.answers.len().is_multiple_of(ANSWERS_LOOK)
    }

    /// Answers that have not been taken by the connection, as far as is known.
    pub(super) fn answers(&mut self) -> usize {
        let gone = self.pushed.saturating_sub(self.queued() as u64);
        while self.answers.pop_front_if(|end| *end <= gone).is_some() {}
        self.answers.len()
    }

    /// Whether the queue can hold a message of that payload: a check on callers.
    pub(super) fn queued_is(&self, payload: usize) -> bool {
        if self.connection.is_some() {
            return self.outbox.last().is_some_and(|(_, gather)| gather.len() == payload);
        }
        self.pending.len() >= payload + size_of::<Header>()
    }

    /// Bytes that have not been taken by the connection, as far as is known.
    pub(super) fn queued(&self) -> usize {
        let outbox: usize = self.outbox.iter().map(|(_, gather)| size_of::<Header>() + gather.len()).sum();
        outbox + self.pending.len() + self.sending.unwrap_or(0)
    }

    /// When the oldest of that was queued.
    pub(super) fn oldest(&self) -> Option<Instant> {
        if self.sending.is_some() { Some(self.send_times.queued) } else { self.queued_at }
    }

    /// Heap memory of what has not been taken by the connection.
    pub(super) fn queued_heap(&self) -> usize {
        let outbox: usize = self.outbox.iter().map(|(_, gather)| size_of::<Header>() + gather.heap_bytes()).sum();
        outbox + self.pending.heap_bytes() + self.sending_heap
    }

    /// Takes the messages for an RDMA connection.
    pub(super) fn take_outbox(&mut self) -> Vec<(Header, Gather)> {
        self.dirty = false;
        self.queued_at = None;
        std::mem::take(&mut self.outbox)
    }

    /// Frames of what has not been taken by the connection, in bytes.
    pub(super) fn queued_frames(&self) -> usize {
        self.pending.frame_bytes() + self.sending_frames
    }

    /// Sends what has gathered over shared memory, if all of it can be sent now; gives its bytes.
    pub(super) fn send_now(&mut self, reactor: &mut Reactor, now: Instant) -> Option<usize> {
        let socket = self.socket.filter(|_| self.sending.is_none() && self.secure.is_none())?;
        let plain = self.phase == Phase::Up && self.close_when_sent.is_none() && !self.pending.is_empty();
        if !plain || !reactor.send_now(socket, &self.pending) {
            return None;
        }
        let bytes = self.pending.len();
        self.pending.clear();
        self.dirty = false;
        self.send_times = SendTimes { queued: self.queued_at.take().unwrap_or(now), begun: now };
        Some(bytes)
    }

    /// Sends what has gathered, unless a send is in flight: then that one's end does.
    pub(super) fn start_send(&mut self, reactor: &mut Reactor, token: Token, now: Instant) {
        self.dirty = false;
        let (Some(socket), None) = (self.socket, self.sending) else { return };
        if matches!(self.phase, Phase::Closing | Phase::Connecting) {
            return;
        }
        let mut gather = self.spare.take().unwrap_or_default();
        match &mut self.secure {
            Some(secure) => secure.seal(&mut self.pending, &mut gather, self.close_when_sent.is_some()),
            None if self.pending.len() > SEND_BYTES_MAX => self.pending.move_front(&mut gather, SEND_BYTES_MAX),
            None => std::mem::swap(&mut self.pending, &mut gather),
        }
        if gather.is_empty() {
            self.spare = Some(gather);
            return;
        }
        self.sending = Some(gather.len());
        self.sending_heap = gather.heap_bytes();
        self.sending_frames = gather.frame_bytes();
        let queued = self.queued_at.take().unwrap_or(now);
        self.send_times = SendTimes { queued, begun: now };
        // Only so much goes at a time.
        self.queued_at = (!self.pending.is_empty()).then_some(queued);
        reactor.submit(Op::Send { socket, gather }, token);
    }

    /// How the last send went, of which so many bytes were taken.
    #[inline]
    pub(super) fn went(&self, bytes: usize, now: Instant) -> Went {
        let SendTimes { queued, begun } = self.send_times;
        Went { bytes, waited: now.since(queued), took: now.since(begun) }
    }

    /// The end of a send, with its lists.
    pub(super) fn sent(&mut self, mut gather: Gather) {
        gather.clear();
        self.spare = Some(gather);
        self.sending = None;
        (self.sending_heap, self.sending_frames) = (0, 0);
    }
}
