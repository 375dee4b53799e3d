//! Receiving: many messages at once on the control lane, payloads straight into windows on bulk lanes.
//!
//! A control lane receives all available bytes into one frame, and moves an unfinished message to the frame's start. A bulk
//! lane receives a header, then in one call the payload into the window's frame and the next header behind it. So a stream
//! of large payloads costs one call each, and no byte is copied twice.

use byway_reactor::limits::{RECEIVE_BYTES_MIN, RECEIVE_MESSAGE_BYTES};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Errno, Frame, FrameRange, Need, Op, Reactor, Scatter};

use super::lane::{Lane, LaneId, PausedRecv, Phase, Placing};
use super::{Fabric, GetError, Handler};
use crate::checksum::payload_checksum;
use crate::feedback::Stall;
use crate::limits::{CONTROL_FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX, SMALL_BYTES_MAX};
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::{GivenBack, WindowError, WindowKey};
use crate::wire::{FLAG_GRANT, FLAG_PAYLOAD_CHECKSUM, FLAG_PLACED, HEADER_BYTES, Header, Kind, Refuse, RefuseCode};

/// Bytes of the buffer that a lane receives handshakes and bulk headers into, and an idle control lane its messages.
pub(super) const HEADER_FRAME_BYTES: usize = RECEIVE_BYTES_MIN;

impl Fabric {
    pub(super) fn received<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        mut into: Scatter,
        result: Result<usize, Errno>,
        handler: &mut H,
    ) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        lane.receiving = false;
        let mut frames = into.drain();
        let first = frames.next().map(|piece| piece.frame);
        let second = frames.next().map(|piece| piece.frame);
        drop(frames);
        lane.scatter = Some(into);
        // A payload and the next header, or one frame alone.
        let (lent, own) = if second.is_some() { (first, second) } else { (None, first) };
        lane.frame = own;
        let (phase, session) = (lane.phase, lane.session);
        let n = match result {
            Ok(n) if n > 0 && phase != Phase::Closing => n,
            other => return self.receive_ended(reactor, slot, lent, other.err()),
        };
        if let Some(session) = session.and_then(|session| self.sessions.get_mut(session)) {
            session.heard(self.clock);
            session.received(n, self.clock);
        }
        if self.lanes.get(slot).is_some_and(|lane| lane.secure.is_some()) {
            return self.ciphertext_came(reactor, slot, n, handler);
        }
        match (lent, phase, self.lanes.get(slot).map_or(0, |lane| lane.number)) {
            (Some(frame), _, _) => self.payload_came(reactor, slot, frame, n, handler),
            (None, Phase::Up, 0) => self.control_came(reactor, slot, n, handler),
            (None, Phase::Up, _) => self.bulk_came(reactor, slot, n, handler),
            (None, _, _) => self.handshake_came(reactor, slot, n, handler),
        }
    }

    /// The stream ended or failed, or the lane is being closed: the lent frame goes back to its window.
    fn receive_ended(&mut self, reactor: &mut Reactor, slot: LaneId, lent: Option<Frame>, error: Option<Errno>) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let midway =
            lane.placing.is_some() || lane.filled > 0 || lane.secure.as_ref().is_some_and(|secure| secure.is_midway());
        let lent = lent.or_else(|| lane.secure.as_mut().and_then(|secure| secure.target.take()).map(|target| target.0));
        if let (Some(Placing::Window(header)), Some(frame)) = (lane.placing.take(), lent) {
            let _ = self.windows.give_back(WindowKey(header.window.get()), frame);
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.phase == Phase::Closing {
            return self.forget_lane_if_done(slot);
        }
        let reason = match error {
            Some(error) => CloseReason::Io(error),
            None if midway => CloseReason::Truncated,
            None => CloseReason::PeerClosed,
        };
        self.lane_failed(reactor, slot, reason);
    }

    /// Receives into the lane's own frame, until at least `min` bytes have come.
    pub(super) fn receive_own(&mut self, reactor: &mut Reactor, slot: LaneId, len: usize, min: usize) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let (Some(socket), Some(frame)) = (lane.socket, lane.frame.take()) else { return };
        let mut into = lane.scatter.take().unwrap_or_default();
        let start = if seeded::is(Bug::ShortReadAtWrongOffset) { 0 } else { lane.filled };
        into.push(frame, start, len - lane.filled);
        self.submit_receive(reactor, slot, Op::Recv { socket, into, min });
    }

    /// Receives; later, if the peer must take answers first.
    fn submit_receive(&mut self, reactor: &mut Reactor, slot: LaneId, op: Op) {
        let held = self.lanes.get(slot).and_then(|lane| lane.session).is_some_and(|session| self.is_held(session));
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if held {
            (lane.paused, lane.paused_at) = (Some(PausedRecv::Receive(op)), self.clock);
            return;
        }
        self.lanes.receive(reactor, slot, op);
    }

    /// Whether nothing more is received from a server's client until it has taken answers.
    pub(super) fn is_held(&self, session: SessionId) -> bool {
        self.sessions.is_held(session, &self.lanes)
    }

    /// Ends the sessions of peers that take nothing.
    pub(super) fn end_stopped(&mut self, reactor: &mut Reactor) {
        for session in self.sessions.stopped(&self.lanes, reactor.now()) {
            self.close(reactor, session, CloseReason::TakesNothing);
        }
    }

    /// Resumes control lanes that wait for a longer buffer, in the order in which they came. To be called before
    /// [`Fabric::flush`], ahead of all else that waits for frames.
    pub fn feed_starved<H: Handler>(&mut self, reactor: &mut Reactor, handler: &mut H) {
        let given_back = reactor.receive_buffers().given_back();
        for slot in self.lanes.take_starved(given_back) {
            if self.lanes.feed(slot) {
                self.control_came(reactor, slot, 0, handler);
            }
        }
    }

    /// A session's peer has taken something: goes on with what was held.
    pub(super) fn resume<H: Handler>(&mut self, reactor: &mut Reactor, session: SessionId, handler: &mut H) {
        let Some(state) = self.sessions.get(session) else { return };
        let waits = |lane: &Lane| lane.paused.is_some() || !lane.backlog.is_empty();
        let is_held = |slot: &&LaneId| self.lanes.get(**slot).is_some_and(waits);
        let held: Vec<LaneId> = state.lanes.iter().flatten().filter(is_held).copied().collect();
        for slot in held {
            if self.is_held(session) {
                return;
            }
            let Some(lane) = self.lanes.get_mut(slot).filter(|lane| lane.phase == Phase::Up) else { continue };
            if lane.connection.is_some() {
                self.take_backlog(reactor, slot, handler);
                continue;
            }
            let held = lane.paused.take();
            if held.is_some() {
                self.sessions.note_stall(session, Stall::Take, self.clock.since(lane.paused_at));
            }
            match held {
                None => {}
                Some(PausedRecv::Receive(op)) => self.submit_receive(reactor, slot, op),
                Some(PausedRecv::Messages) if lane.secure.is_some() => self.ciphertext_came(reactor, slot, 0, handler),
                Some(PausedRecv::Messages) => self.control_came(reactor, slot, 0, handler),
            }
        }
    }

    /// A lane that is closed and receives nothing gives its window the frame back that it was filling.
    pub(super) fn return_lent(&mut self, slot: LaneId) {
        let Some(lane) = self.lanes.get_mut(slot).filter(|lane| !lane.receiving) else { return };
        let Some(Placing::Window(header)) = lane.placing.take() else { return };
        let held = match lane.paused.take() {
            Some(PausedRecv::Receive(Op::Recv { mut into, .. })) => into.drain().next().map(|piece| piece.frame),
            _ => None,
        };
        let target = || Some(lane.secure.as_mut()?.target.take()?.0);
        if let Some(frame) = held.or_else(target) {
            let _ = self.windows.give_back(WindowKey(header.window.get()), frame);
        }
    }

    /// Gives an accepted or connected lane the frame for its handshake, and starts to receive. False without frames.
    pub(super) fn receive_handshake(&mut self, reactor: &mut Reactor, slot: LaneId) -> bool {
        let Some(lane) = self.lanes.get_mut(slot) else { return false };
        if lane.secure.is_some() {
            return self.receive_ciphertext(reactor, slot);
        }
        lane.frame = reactor.receive_buffers().alloc(HEADER_FRAME_BYTES);
        if lane.frame.is_none() {
            return false;
        }
        self.receive_own(reactor, slot, HEADER_BYTES, HEADER_BYTES);
        true
    }

    /// A lane is up: from now on it receives messages. What the frame held is done with.
    pub(super) fn receive_messages(&mut self, reactor: &mut Reactor, slot: LaneId) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.connection.is_some() {
            return;
        }
        lane.filled = 0;
        if lane.secure.is_some() {
            return self.receive_ciphertext_again(reactor, slot);
        }
        if lane.number > 0 {
            return self.receive_own(reactor, slot, HEADER_BYTES, HEADER_BYTES);
        }
        self.receive_own(reactor, slot, HEADER_FRAME_BYTES, 1);
    }

    /// Reads the header at the front of `bytes`.
    pub(super) fn open_header(&mut self, slot: LaneId, bytes: &[u8]) -> Result<(Header, Kind), CloseReason> {
        let (Some(lane), Some(bytes)) = (self.lanes.get_mut(slot), bytes.first_chunk::<HEADER_BYTES>()) else {
            return Err(CloseReason::Closed);
        };
        let opened = Header::open(bytes, lane.sequence_in).map_err(CloseReason::Header)?;
        lane.sequence_in += 1;
        Ok(opened)
    }

    fn control_came<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, n: usize, handler: &mut H) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let (Some(mut frame), Some(session)) = (lane.frame.take(), lane.session) else { return };
        lane.filled += n;
        let filled = lane.filled;
        let (at, need) = match self.take_messages(reactor, slot, session, &frame.bytes()[..filled], handler) {
            Ok(taken) => taken,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        };
        if self.lanes.get(slot).is_none_or(|lane| lane.phase == Phase::Closing) {
            return self.forget_lane_if_done(slot);
        }
        // Over shared memory answers cost no call that others could share: they go before anything else is done. Not if the rest
        // was held back for them: what is left here is then looked at again when they have gone.
        let left = filled - at;
        if !self.is_held(session) {
            self.send_now(reactor, slot, handler);
        }
        if self.is_held(session) {
            frame.bytes_mut().copy_within(at..filled, 0);
            if let Some(lane) = self.lanes.get_mut(slot) {
                (lane.filled, lane.frame, lane.paused) = (left, Some(frame), Some(PausedRecv::Messages));
                lane.paused_at = self.clock;
            }
            return;
        }
        let buffers = reactor.receive_buffers();
        let next_len = buffers.len_for(Need {
            held: frame.len(),
            used: left,
            message: need,
            wanted: control_frame_bytes(frame.len(), filled == frame.len()),
        });
        // Lanes that wait for a longer buffer get it in the order in which they came.
        let must_wait = next_len > frame.len() && self.lanes.has_starved();
        let next = if next_len == frame.len() || must_wait { None } else { buffers.alloc(next_len) };
        if let Some(mut next) = next {
            next.copy_from(0, &frame, at..filled);
            frame = next;
        } else if at > 0 {
            frame.bytes_mut().copy_within(at..filled, 0);
        }
        let len = frame.len();
        let starved = need > len;
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.filled = left;
            lane.frame = Some(frame);
            if starved {
                lane.paused = Some(PausedRecv::Messages);
                return self.lanes.starve(slot);
            }
        }
        self.receive_own(reactor, slot, len, (need - left).max(1));
    }

    /// Passes on the whole messages at the front of `bytes`, unless the peer must take answers first: gives how many bytes
    /// they took, and how many the next one has, as far as is known.
    pub(super) fn take_messages<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        session: SessionId,
        bytes: &[u8],
        handler: &mut H,
    ) -> Result<(usize, usize), CloseReason> {
        let mut at = 0;
        while bytes.len() - at >= HEADER_BYTES && !self.is_held(session) {
            // The length is looked at before the rest is: it is checked with the checksum, once the message is whole.
            let peeked = u32::from_le_bytes([bytes[at + 8], bytes[at + 9], bytes[at + 10], bytes[at + 11]]);
            if peeked as usize > SMALL_BYTES_MAX && bytes[at + 5] & FLAG_PLACED == 0 {
                let bad = self.open_header(slot, &bytes[at..]).err();
                return Err(bad.unwrap_or(CloseReason::Oversize(peeked)));
            }
            let need = HEADER_BYTES + if bytes[at + 5] & FLAG_PLACED == 0 { peeked as usize } else { 0 };
            if bytes.len() - at < need {
                return Ok((at, need));
            }
            let (header, kind) = self.open_header(slot, &bytes[at..])?;
            let payload = &bytes[at + HEADER_BYTES..at + need];
            self.dispatch(reactor, session, kind, &header, payload, handler)?;
            at += need;
            if self.lanes.get(slot).is_none_or(|lane| lane.phase == Phase::Closing) {
                break;
            }
        }
        Ok((at, HEADER_BYTES))
    }

    /// Passes on a message of the control lane.
    pub(super) fn dispatch<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &[u8],
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        if header.flags & FLAG_PLACED != 0 {
            return self.placed_came(reactor, session, kind, header, handler);
        }
        if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
            if crc32c::crc32c(payload) != header.payload_checksum.get() {
                return Err(CloseReason::PayloadChecksum);
            }
        } else if !payload.is_empty() && self.agreed(session).is_some_and(crate::Agreed::payload_checksum) {
            return Err(CloseReason::PayloadChecksum);
        }
        let payload = if header.flags & FLAG_GRANT == 0 {
            payload
        } else {
            self.granted(reactor, session, kind, header, payload)?
        };
        match kind {
            Kind::Ping => self.send(session, Header::new(Kind::Pong)),
            Kind::Pong => {}
            Kind::Goodbye => {
                let refuse: Refuse = header.body();
                return Err(CloseReason::Refused(RefuseCode::from_number(refuse.code.get())));
            }
            Kind::Pull => return self.pulled(reactor, session, header),
            Kind::Nack => return self.refused(reactor, session, header, handler),
            Kind::Window => return self.window_advert_came(reactor, session, header, handler),
            Kind::Call
            | Kind::Reply
            | Kind::Notice
            | Kind::Message
            | Kind::Credit
            | Kind::Placed
            | Kind::Cancel
            | Kind::Protocols
            | Kind::NoticeCredit => {
                handler.message(self, reactor, session, kind, header, payload);
            }
            Kind::Hello | Kind::Welcome | Kind::Refuse | Kind::Data => {
                return Err(CloseReason::Unexpected(kind));
            }
        }
        Ok(())
    }

    /// A bulk lane's header, or a part of what is thrown away, has come.
    fn bulk_came<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, n: usize, handler: &mut H) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if let Some(Placing::Drain(left)) = lane.placing.take() {
            let left = left - n;
            return if left > 0 { self.drain(reactor, slot, left) } else { self.receive_header(reactor, slot, 0) };
        }
        let filled = lane.filled + n;
        self.bulk_header(reactor, slot, filled, handler);
    }

    /// Looks at the `filled` bytes of a header that a bulk lane has.
    fn bulk_header<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, filled: usize, _handler: &mut H) {
        if filled < HEADER_BYTES {
            return self.receive_header(reactor, slot, filled);
        }
        let Some((frame, session)) =
            self.lanes.get_mut(slot).and_then(|lane| Some((lane.frame.take()?, lane.session?)))
        else {
            return;
        };
        let opened = self.open_header(slot, frame.bytes());
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.frame = Some(frame);
            lane.filled = 0;
        }
        let (header, kind) = match opened {
            Ok(opened) => opened,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        };
        let len = header.payload_len();
        if let Err(reason) = check_bulk(&header, kind) {
            return self.lane_failed(reactor, slot, reason);
        }
        match self.windows.lend(session, WindowKey(header.window.get()), header.window_offset.get(), len) {
            Ok((target, start)) => self.receive_payload(reactor, slot, header, FrameRange::new(target, start, len)),
            Err(error) => {
                self.nack(session, &header, error);
                self.drain(reactor, slot, len);
            }
        }
    }

    fn receive_header(&mut self, reactor: &mut Reactor, slot: LaneId, filled: usize) {
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.filled = filled;
        }
        self.receive_own(reactor, slot, HEADER_BYTES, HEADER_BYTES - filled);
    }

    /// Throws `left` bytes away, through the header's frame.
    fn drain(&mut self, reactor: &mut Reactor, slot: LaneId, left: usize) {
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.filled = 0;
            lane.placing = Some(Placing::Drain(left));
        }
        self.receive_own(reactor, slot, left.min(HEADER_FRAME_BYTES), 1);
    }

    /// Receives a payload into its window, and behind it as much as has come of the next header.
    fn receive_payload(&mut self, reactor: &mut Reactor, slot: LaneId, header: Header, target: FrameRange) {
        let FrameRange { frame, start, len } = target;
        let own = self.lanes.get_mut(slot).and_then(|lane| Some((lane.socket?, lane.frame.take()?)));
        let (Some((socket, own)), Some(lane)) = (own, self.lanes.get_mut(slot)) else { return };
        let mut into = lane.scatter.take().unwrap_or_default();
        into.push(frame, start, len);
        into.push(own, 0, HEADER_BYTES);
        lane.placing = Some(Placing::Window(header));
        self.submit_receive(reactor, slot, Op::Recv { socket, into, min: len });
    }

    /// A payload has come into its window's frame, and `n` bytes in all.
    fn payload_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        frame: Frame,
        n: usize,
        handler: &mut H,
    ) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let (Some(Placing::Window(header)), Some(session)) = (lane.placing.take(), lane.session) else { return };
        let len = header.payload_len();
        if n < len {
            let _ = self.windows.give_back(WindowKey(header.window.get()), frame);
            return self.lane_failed(reactor, slot, CloseReason::Truncated);
        }
        if let Err(reason) = self.payload_placed(reactor, session, &header, frame, handler) {
            return self.lane_failed(reactor, slot, reason);
        }
        if self.lanes.get(slot).is_none_or(|lane| lane.phase == Phase::Closing) {
            return self.forget_lane_if_done(slot);
        }
        self.bulk_header(reactor, slot, n - len, handler);
    }

    /// A payload lies in the frame of its window: checks it, gives the frame back, tells the owner.
    pub(super) fn payload_placed<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        header: &Header,
        frame: Frame,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let (key, len) = (WindowKey(header.window.get()), header.payload_len());
        let checked = header.flags & FLAG_PAYLOAD_CHECKSUM != 0;
        let due = checked || self.agreed(session).is_some_and(crate::Agreed::payload_checksum);
        let start = self.windows.start(key).unwrap_or(0) + header.window_offset.get() as usize;
        let inside = start.checked_add(len).is_some_and(|end| end <= frame.len());
        let good = !due
            || (checked && inside && payload_checksum(&frame, start..start + len) == header.payload_checksum.get());
        let given = self.windows.give_back(key, frame);
        if !good {
            return Err(CloseReason::PayloadChecksum);
        }
        if !matches!(given, GivenBack::Open) {
            // Closed while it was filled: the peer waits for an answer, as for a put that comes a moment later.
            self.nack(session, header, WindowError::Key);
            return Ok(());
        }
        if self.windows.is_get(session, key) {
            let wanted = self.windows.bytes(key);
            let result = if wanted == len { Ok(()) } else { Err(GetError::Length { wanted, got: len }) };
            self.end_get(reactor, session, key, result, handler);
        } else {
            let kind = if header.kind == Kind::Reply as u8 { Kind::Reply } else { Kind::Data };
            handler.placed(self, reactor, session, kind, header);
        }
        Ok(())
    }
}

/// What suits a control lane that received into `len` bytes: if it filled them, more.
fn control_frame_bytes(len: usize, full: bool) -> usize {
    match len {
        _ if !full => len,
        ..RECEIVE_MESSAGE_BYTES => RECEIVE_MESSAGE_BYTES,
        _ => CONTROL_FRAME_BYTES_MAX,
    }
}

/// Whether a message may be on a bulk lane.
pub(super) fn check_bulk(header: &Header, kind: Kind) -> Result<(), CloseReason> {
    let len = header.payload_len();
    if !matches!(kind, Kind::Data | Kind::Reply) || len == 0 {
        return Err(CloseReason::Unexpected(kind));
    }
    if len > PAYLOAD_BYTES_MAX { Err(CloseReason::Oversize(len as u32)) } else { Ok(()) }
}
