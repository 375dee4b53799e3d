//! The receiving half of a lane: the buffer that it receives into, how much of a message or payload the peer has sent so far, and the
//! receives and messages that the lane holds back. TLS is in `secure.rs`.

use std::collections::VecDeque;
use std::time::Duration;

use byway_reactor::limits::RECEIVE_BYTES_MIN;
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Frame, FrameRange, Instant, Op, Scatter, Socket};

use super::lane::Lane;
use crate::limits::PAYLOAD_BYTES_MAX;
use crate::node::wire::PutBody;
use crate::rdma::transport::Received;
use crate::session::CloseReason;
use crate::windows::{WindowError, WindowKey};
use crate::wire::{HEADER_BYTES, Header, Kind};

/// Bytes of the buffer that a lane receives handshakes and bulk headers into, and an idle control lane its messages.
pub(super) const HEADER_FRAME_BYTES: usize = RECEIVE_BYTES_MIN;

/// A payload that a bulk lane is receiving.
#[derive(Debug)]
enum Placing {
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

/// A frame, and how many bytes have come into it.
pub(super) struct FilledFrame {
    pub(super) frame: Frame,
    pub(super) filled: usize,
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

/// The body of a header that belongs to a program's put; `None` for other headers.
fn put_of(header: &Header) -> Option<PutBody> {
    let body: PutBody = header.body();
    let is_put = header.kind == Kind::Data as u8 && body.target.get() == 0 && body.put != [0; 7];
    is_put.then_some(body)
}

/// See the module.
#[derive(Debug)]
pub(super) struct Inbound {
    /// The buffer for messages and headers. `None` while a receive is in flight, which has it.
    frame: Option<Frame>,
    filled: usize,
    placing: Option<Placing>,
    scatter: Option<Scatter>,
    in_flight: bool,
    sequence: u64,
    refused_put: Option<RefusedPut>,
    /// The receive that the lane holds back until the peer has taken answers, or until a longer buffer is free.
    paused: Option<PausedRecv>,
    /// When the lane began to hold it back, if it waits for answers.
    paused_at: Instant,
    /// The lane waits for a longer buffer.
    is_starved: bool,
    /// Messages of an RDMA connection that the lane handles once the peer has taken answers.
    backlog: VecDeque<Received>,
}

impl Inbound {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            frame: None,
            filled: 0,
            placing: None,
            scatter: Some(Scatter::new()),
            in_flight: false,
            sequence: 0,
            refused_put: None,
            paused: None,
            paused_at: now,
            is_starved: false,
            backlog: VecDeque::new(),
        }
    }

    /// Of a lane whose `Hello` another loop has received.
    pub(super) fn behind_hello(frame: Option<Frame>, now: Instant) -> Self {
        Self { frame, sequence: 1, ..Self::new(now) }
    }

    /// The buffer for messages and headers; `None` while a receive is in flight.
    pub(super) fn frame(&self) -> Option<&Frame> {
        self.frame.as_ref()
    }

    /// Receives into this from now on.
    pub(super) fn set_frame(&mut self, frame: Option<Frame>) {
        self.frame = frame;
    }

    /// Takes the frame, to be set again.
    pub(super) fn take_frame(&mut self) -> Option<Frame> {
        self.frame.take()
    }

    /// Takes the frame, into which `n` bytes more have come: to be [kept](Self::keep).
    #[inline]
    pub(super) fn take_filled(&mut self, n: usize) -> Option<FilledFrame> {
        let frame = self.frame.take()?;
        self.filled += n;
        Some(FilledFrame { frame, filled: self.filled })
    }

    /// Receives behind the first `filled` bytes of a frame from now on.
    #[inline]
    pub(super) fn keep(&mut self, FilledFrame { frame, filled }: FilledFrame) {
        (self.frame, self.filled) = (Some(frame), filled);
    }

    /// Bytes of a header that are here.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// A receive is in flight.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.in_flight = true;
    }

    /// Whether a receive is in flight.
    #[inline]
    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    /// Takes back the lists of a receive that has ended. Gives the frame of a window, if a payload was received.
    #[inline]
    pub(super) fn received(&mut self, mut into: Scatter) -> Option<Frame> {
        self.in_flight = false;
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

    /// Whether a payload is being received, or thrown away.
    pub(super) fn has_payload(&self) -> bool {
        self.placing.is_some()
    }

    /// The header of the payload that is being received into a window.
    pub(super) fn payload(&self) -> Option<Header> {
        if let Some(Placing::Window(header)) = self.placing { Some(header) } else { None }
    }

    /// A payload is received into a window from now on.
    pub(super) fn begin_payload(&mut self, header: Header) {
        self.placing = Some(Placing::Window(header));
    }

    /// No payload is received any more. Gives the header of one for a window.
    #[inline]
    pub(super) fn end_payload(&mut self) -> Option<Header> {
        if let Some(Placing::Window(header)) = self.placing.take() { Some(header) } else { None }
    }

    /// So many bytes that come next are thrown away.
    pub(super) fn begin_drain(&mut self, len: usize) {
        self.placing = Some(Placing::Drain(len));
    }

    /// Bytes that are left to throw away.
    #[inline]
    pub(super) fn to_drain(&self) -> Option<usize> {
        if let Some(Placing::Drain(left)) = self.placing { Some(left) } else { None }
    }

    /// So many of them have come.
    pub(super) fn drained(&mut self, n: usize) {
        self.placing = self.to_drain().filter(|left| *left > n).map(|left| Placing::Drain(left - n));
    }

    /// Reads the header at the front of `bytes`.
    #[inline]
    pub(super) fn open_header(&mut self, bytes: &[u8]) -> Result<(Header, Kind), CloseReason> {
        let bytes = bytes.first_chunk::<HEADER_BYTES>().ok_or(CloseReason::Closed)?;
        let opened = Header::open(bytes, self.sequence).map_err(CloseReason::Header)?;
        self.sequence += 1;
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

    /// Receives no more until the peer has taken answers.
    pub(super) fn pause(&mut self, next: PausedRecv, now: Instant) {
        (self.paused, self.paused_at) = (Some(next), now);
    }

    /// Receives no more until there is a longer buffer for the messages that are here.
    pub(super) fn pause_for_buffer(&mut self) {
        self.paused = Some(PausedRecv::Messages);
    }

    /// Whether it receives no more until then.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Gives back the receive that was held back.
    pub(super) fn take_paused(&mut self) -> Option<PausedRecv> {
        self.paused.take()
    }

    /// How long the peer has taken to take answers.
    pub(super) fn paused_for(&self, now: Instant) -> Duration {
        now.since(self.paused_at)
    }

    /// Notes that the lane waits for a longer buffer. False if it did before.
    pub(super) fn starve(&mut self) -> bool {
        !std::mem::replace(&mut self.is_starved, true)
    }

    /// It no longer waits for a longer buffer.
    pub(super) fn note_fed(&mut self) {
        self.is_starved = false;
    }

    /// A message of an RDMA connection has come, behind the others.
    pub(super) fn push_message(&mut self, received: Received) {
        self.backlog.push_back(received);
    }

    /// The oldest of these.
    pub(super) fn take_message(&mut self) -> Option<Received> {
        self.backlog.pop_front()
    }

    /// All of these.
    pub(super) fn take_messages(&mut self) -> VecDeque<Received> {
        std::mem::take(&mut self.backlog)
    }

    /// Whether there are any.
    pub(super) fn has_messages(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Receives into its own frame, up to `len` bytes with those that it has, until at least `min` bytes more have come.
    #[inline]
    fn receive_own(&mut self, socket: Socket, len: usize, min: usize) -> Option<Op> {
        let frame = self.frame.take()?;
        let mut into = self.scatter.take().unwrap_or_default();
        let start = if seeded::is(Bug::ShortReadAtWrongOffset) { 0 } else { self.filled };
        into.push(frame, start, len - self.filled);
        Some(Op::Recv { socket, into, min })
    }
}

/// The receives of a lane. None without a connection that is a stream, or without a frame.
impl Lane {
    /// Receives messages, up to `len` bytes with those that are here, until at least `min` bytes more have come.
    #[inline]
    pub(super) fn receive_own(&mut self, len: usize, min: usize) -> Option<Op> {
        self.inbound.receive_own(self.socket?, len, min)
    }

    /// Receives a header, of which `filled` bytes are here.
    #[inline]
    pub(super) fn receive_header(&mut self, filled: usize) -> Option<Op> {
        self.inbound.filled = filled;
        self.receive_own(HEADER_BYTES, HEADER_BYTES - filled)
    }

    /// Receives ciphertext.
    pub(super) fn receive_ciphertext(&mut self) -> Option<Op> {
        self.inbound.filled = 0;
        let len = self.inbound.frame.as_ref().map_or(0, Frame::len);
        self.receive_own(len, 1)
    }

    /// Receives the first message. From now on it is up; what the frame held is done with.
    pub(super) fn receive_first(&mut self) -> Option<Op> {
        if self.connection.is_some() {
            return None;
        }
        if self.tls.is_on() {
            return self.receive_ciphertext();
        }
        if self.number > 0 {
            return self.receive_header(0);
        }
        self.inbound.filled = 0;
        self.receive_own(HEADER_FRAME_BYTES, 1)
    }

    /// Receives a payload into its window, and behind it as much as has come of the next header.
    #[inline]
    pub(super) fn receive_payload(&mut self, header: Header, target: FrameRange) -> Option<Op> {
        let FrameRange { frame, start, len } = target;
        let (socket, own) = (self.socket?, self.inbound.frame.take()?);
        let mut into = self.inbound.scatter.take().unwrap_or_default();
        into.push(frame, start, len);
        into.push(own, 0, HEADER_BYTES);
        self.inbound.begin_payload(header);
        Some(Op::Recv { socket, into, min: len })
    }

    /// Throws `left` bytes away, through the header's frame.
    pub(super) fn drain(&mut self, left: usize) -> Option<Op> {
        self.inbound.filled = 0;
        self.inbound.begin_drain(left);
        self.receive_own(left.min(HEADER_FRAME_BYTES), 1)
    }

    /// Whether a part of a message has come.
    pub(super) fn is_midway(&self) -> bool {
        self.inbound.has_payload() || self.inbound.filled > 0 || self.tls.is_midway()
    }

    /// Takes the payload that it was receiving: the frame goes back to its window.
    pub(super) fn take_payload(&mut self, lent: Option<Frame>) -> Option<LentFrame> {
        let frame = lent.or_else(|| self.tls.take_target());
        let header = self.inbound.end_payload()?;
        Some(LentFrame { window: WindowKey(header.window.get()), frame: frame? })
    }

    /// The same for a lane that is closed, unless it receives: then the end of that does it.
    pub(super) fn take_paused_payload(&mut self) -> Option<LentFrame> {
        if self.inbound.in_flight || self.inbound.payload().is_none() {
            return None;
        }
        let paused = match self.inbound.take_paused() {
            Some(PausedRecv::Receive(Op::Recv { mut into, .. })) => into.drain().next().map(|piece| piece.frame),
            _ => None,
        };
        self.take_payload(paused)
    }
}
