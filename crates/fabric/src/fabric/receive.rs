//! Receiving: many messages at once on the control lane, payloads straight into windows on bulk lanes.
//!
//! A control lane receives all available bytes into one frame, and moves an unfinished message to the frame's start. A bulk
//! lane receives a header, then in one call the payload into the window's frame and the next header behind it. So a stream
//! of large payloads costs one call each, and no byte is copied twice.

use std::ops::Range;

use byway_reactor::limits::RECEIVE_MESSAGE_BYTES;
use byway_reactor::{Errno, Frame, FrameRange, Need, Op, Reactor, ReceiveBuffers, Scatter};

use super::inbound::{FilledFrame, HEADER_FRAME_BYTES, LentFrame, PausedRecv};
use super::lane::{Lane, LaneId, Phase};
use super::secure::{Decrypted, Filled};
use super::{Fabric, Handler};
use crate::feedback::Stall;
use crate::limits::{CONTROL_FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX, SMALL_BYTES_MAX};
use crate::rdma::transport::Received;
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::WindowKey;
use crate::wire::{FLAG_GRANT, FLAG_PAYLOAD_CHECKSUM, FLAG_PLACED, HEADER_BYTES, Header, Kind, Refuse, RefuseCode};

impl Fabric {
    pub(super) fn received<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        into: Scatter,
        result: Result<usize, Errno>,
        handler: &mut H,
    ) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let lent = lane.inbound.received(into);
        let (phase, session) = (lane.phase, lane.session);
        let n = match result {
            Ok(n) if n > 0 && phase != Phase::Closing => n,
            other => return self.receive_ended(reactor, slot, lent, other.err()),
        };
        if let Some(session) = session.and_then(|session| self.sessions.get_mut(session)) {
            session.heard(self.clock);
            session.received(n, self.clock);
        }
        if self.lanes.get(slot).is_some_and(|lane| lane.tls.is_on()) {
            return self.ciphertext_came(reactor, slot, n, handler);
        }
        match (lent, phase, self.lanes.get(slot).map_or(0, |lane| lane.number)) {
            (Some(frame), _, _) => self.payload_came(reactor, slot, frame, n, handler),
            (None, Phase::Up, 0) => self.control_came(reactor, slot, n, handler),
            (None, Phase::Up, _) => self.bulk_came(reactor, slot, n),
            (None, _, _) => self.handshake_came(reactor, slot, n, handler),
        }
    }

    /// The stream ended or failed, or the lane is being closed: the lent frame goes back to its window.
    fn receive_ended(&mut self, reactor: &mut Reactor, slot: LaneId, lent: Option<Frame>, error: Option<Errno>) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let midway = lane.is_midway();
        if let Some(LentFrame { window, frame }) = lane.take_payload(lent) {
            let _ = self.windows.give_back(window, frame);
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

    /// Begins the receive that `next` says; later, if the peer must take answers first.
    #[inline]
    fn receive(&mut self, reactor: &mut Reactor, slot: LaneId, next: impl FnOnce(&mut Lane) -> Option<Op>) {
        if let Some(op) = self.lanes.get_mut(slot).and_then(next) {
            self.submit_receive(reactor, slot, op);
        }
    }

    #[inline]
    fn submit_receive(&mut self, reactor: &mut Reactor, slot: LaneId, op: Op) {
        let Some(lane) = self.lanes.get(slot) else { return };
        if lane.session.is_some_and(|session| self.is_held(session)) {
            return self.pause(slot, PausedRecv::Receive(op));
        }
        self.lanes.receive(reactor, slot, op);
    }

    /// Receives no more on a lane until the peer has taken answers.
    fn pause(&mut self, slot: LaneId, paused: PausedRecv) {
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.inbound.pause(paused, self.clock);
        }
    }

    /// Whether nothing more is received from a server's client until it has taken answers.
    #[inline]
    pub(super) fn is_held(&self, session: SessionId) -> bool {
        self.sessions.is_held(session, &self.lanes)
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
        let waits = |lane: &Lane| lane.inbound.is_paused() || lane.inbound.has_messages();
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
            let held = lane.inbound.take_paused();
            if held.is_some() {
                self.sessions.note_stall(session, Stall::Take, lane.inbound.paused_for(self.clock));
            }
            match held {
                None => {}
                Some(PausedRecv::Receive(op)) => self.submit_receive(reactor, slot, op),
                Some(PausedRecv::Messages) if lane.tls.is_on() => self.ciphertext_came(reactor, slot, 0, handler),
                Some(PausedRecv::Messages) => self.control_came(reactor, slot, 0, handler),
            }
        }
    }

    /// Gives an accepted or connected lane the frame for its handshake, and starts to receive. False without frames.
    pub(super) fn receive_handshake(&mut self, reactor: &mut Reactor, slot: LaneId) -> bool {
        let Some(lane) = self.lanes.get_mut(slot) else { return false };
        let frame = reactor.receive_buffers().alloc(HEADER_FRAME_BYTES);
        let has_frame = frame.is_some();
        lane.inbound.set_frame(frame);
        if !has_frame {
            return false;
        }
        let is_secure = lane.tls.is_on();
        self.receive(reactor, slot, |lane| if is_secure { lane.receive_ciphertext() } else { lane.receive_header(0) });
        true
    }

    /// A lane is up: from now on it receives messages.
    pub(super) fn receive_messages(&mut self, reactor: &mut Reactor, slot: LaneId) {
        self.receive(reactor, slot, Lane::receive_first);
    }

    /// Reads the header at the front of `bytes`.
    #[inline]
    pub(super) fn open_header(&mut self, slot: LaneId, bytes: &[u8]) -> Result<(Header, Kind), CloseReason> {
        self.lanes.get_mut(slot).ok_or(CloseReason::Closed)?.inbound.open_header(bytes)
    }

    fn control_came<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, n: usize, handler: &mut H) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let (Some(received), Some(session)) = (lane.inbound.take_filled(n), lane.session) else { return };
        let FilledFrame { mut frame, filled } = received;
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
                lane.inbound.keep(FilledFrame { frame, filled: left });
            }
            return self.pause(slot, PausedRecv::Messages);
        }
        // Lanes that wait for a longer buffer get it in the order in which they came.
        let frame = next_frame(reactor.receive_buffers(), frame, at..filled, need, self.lanes.has_starved());
        let (len, starved) = (frame.len(), need > frame.len());
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.inbound.keep(FilledFrame { frame, filled: left });
            if starved {
                lane.inbound.pause_for_buffer();
                return self.lanes.starve(slot);
            }
        }
        self.receive(reactor, slot, |lane| lane.receive_own(len, (need - left).max(1)));
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
    fn bulk_came(&mut self, reactor: &mut Reactor, slot: LaneId, n: usize) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if let Some(left) = lane.inbound.to_drain() {
            lane.inbound.drained(n);
            let left = left - n;
            let next = |lane: &mut Lane| if left > 0 { lane.drain(left) } else { lane.receive_header(0) };
            return self.receive(reactor, slot, next);
        }
        let filled = lane.inbound.filled() + n;
        self.bulk_header(reactor, slot, filled);
    }

    /// Looks at the `filled` bytes of a header that a bulk lane has.
    fn bulk_header(&mut self, reactor: &mut Reactor, slot: LaneId, filled: usize) {
        if filled < HEADER_BYTES {
            return self.receive(reactor, slot, |lane| lane.receive_header(filled));
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let (Some(session), Some(opened)) = (lane.session, lane.inbound.take_bulk_header()) else { return };
        let header = match opened {
            Ok(header) => header,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        };
        let len = header.payload_len();
        match self.windows.lend(session, WindowKey(header.window.get()), header.window_offset.get(), len) {
            Ok((target, start)) => {
                let target = FrameRange::new(target, start, len);
                self.receive(reactor, slot, |lane| lane.receive_payload(header, target));
            }
            Err(error) => {
                self.refuse_payload(slot, session, &header, error);
                self.receive(reactor, slot, |lane| lane.drain(len));
            }
        }
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
        let (Some(header), Some(session)) = (lane.inbound.end_payload(), lane.session) else { return };
        let len = header.payload_len();
        if n < len {
            let _ = self.windows.give_back(WindowKey(header.window.get()), frame);
            return self.lane_failed(reactor, slot, CloseReason::Truncated);
        }
        if let Err(reason) = self.payload_placed(reactor, slot, session, &header, frame, handler) {
            return self.lane_failed(reactor, slot, reason);
        }
        if self.lanes.get(slot).is_none_or(|lane| lane.phase == Phase::Closing) {
            return self.forget_lane_if_done(slot);
        }
        self.bulk_header(reactor, slot, n - len);
    }

    /// Ciphertext has come: decrypts it and takes what messages it holds.
    fn ciphertext_came<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, n: usize, handler: &mut H) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let Decrypted { mut plaintext, wants_send, ended } = match lane.decrypt(reactor.receive_buffers(), n) {
            None => return,
            Some(Ok(decrypted)) => decrypted,
            Some(Err(reason)) => return self.tls_failed(reactor, slot, reason),
        };
        // A lane that goes to another loop takes what TLS wants to send along: a send in flight would keep it here.
        let taken = match self.take_plaintext(reactor, slot, &plaintext, handler) {
            Ok(taken) => taken,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        };
        if ended {
            return self.stream_ended(reactor, slot, taken < plaintext.len());
        }
        if wants_send {
            self.lanes.start_send(reactor, slot, self.clock);
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.phase == Phase::Closing {
            return self.forget_lane_if_done(slot);
        }
        plaintext.drain(..taken);
        lane.keep_plaintext(plaintext);
        let session = lane.session;
        if session.is_some_and(|session| self.is_held(session)) {
            return self.pause(slot, PausedRecv::Messages);
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        // A fenced lane and one that is being refused say no more.
        if lane.phase != Phase::Fenced && lane.close_when_sent.is_none() && !lane.inbound.is_in_flight() {
            self.receive(reactor, slot, Lane::receive_ciphertext);
        }
    }

    /// TLS failed: the peer is told why if that may help it, then the lane ends.
    fn tls_failed(&mut self, reactor: &mut Reactor, slot: LaneId, reason: CloseReason) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.phase == Phase::Up {
            return self.lane_failed(reactor, slot, reason);
        }
        lane.close_when_sent = Some(reason);
        self.lanes.start_send(reactor, slot, self.clock);
        if self.lanes.get(slot).is_some_and(|lane| !lane.is_busy()) {
            self.lane_failed(reactor, slot, reason);
        }
    }

    /// The peer has said by TLS that it will send no more.
    fn stream_ended(&mut self, reactor: &mut Reactor, slot: LaneId, midway: bool) {
        let Some(lane) = self.lanes.get(slot) else { return };
        let midway = midway || lane.inbound.has_payload();
        self.lane_failed(reactor, slot, if midway { CloseReason::Truncated } else { CloseReason::PeerClosed });
    }

    /// Makes a lane whose first bytes, which lie in its frame, are none of ours a TLS lane, if they may be TLS.
    pub(super) fn try_tls<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        n: usize,
        handler: &mut H,
    ) -> Result<bool, CloseReason> {
        let Some(lane) = self.lanes.get_mut(slot) else { return Ok(false) };
        let has_begun = lane.begin_offered_tls()?;
        if has_begun {
            self.ciphertext_came(reactor, slot, n, handler);
        }
        Ok(has_begun)
    }

    /// Takes all that is whole from the front of `bytes`; gives how much.
    fn take_plaintext<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        bytes: &[u8],
        handler: &mut H,
    ) -> Result<usize, CloseReason> {
        let mut at = 0;
        loop {
            let Some(lane) = self.lanes.get(slot) else { return Ok(at) };
            let rest = &bytes[at..];
            match (lane.phase, lane.session, lane.number) {
                (Phase::AwaitHello | Phase::AwaitWelcome, _, _) if rest.len() >= HEADER_BYTES => {
                    self.handshake_message(reactor, slot, rest)?;
                    at += HEADER_BYTES;
                    if self.lanes.get(slot).is_some_and(|lane| lane.close_when_sent.is_some()) {
                        return Ok(bytes.len());
                    }
                }
                (Phase::Up, Some(session), 0) => {
                    let (taken, _) = self.take_messages(reactor, slot, session, rest, handler)?;
                    return Ok(at + taken);
                }
                (Phase::Up, Some(session), _) => match self.take_bulk(reactor, slot, session, rest, handler)? {
                    0 => return Ok(at),
                    taken => at += taken,
                },
                _ => return Ok(at),
            }
        }
    }

    /// Takes a bulk lane's next header, or the next bytes of its payload; 0 if more must come first.
    fn take_bulk<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        session: SessionId,
        bytes: &[u8],
        handler: &mut H,
    ) -> Result<usize, CloseReason> {
        let Some(lane) = self.lanes.get_mut(slot) else { return Ok(0) };
        if let Some(Filled { bytes, payload }) = lane.fill(bytes)? {
            if let Some((header, frame)) = payload {
                self.payload_placed(reactor, slot, session, &header, frame, handler)?;
            }
            return Ok(bytes);
        }
        if bytes.len() < HEADER_BYTES {
            return Ok(0);
        }
        let header = lane.inbound.open_bulk_header(bytes)?;
        let (key, len) = (WindowKey(header.window.get()), header.payload_len());
        let lent = self.windows.lend(session, key, header.window_offset.get(), len);
        if let Err(error) = lent {
            self.refuse_payload(slot, session, &header, error);
        }
        if let Some(lane) = self.lanes.get_mut(slot) {
            lane.begin_filling(header, lent.ok());
        }
        Ok(HEADER_BYTES)
    }

    /// Takes the messages that have come, unless the peer must take answers first.
    pub(super) fn take_backlog<H: Handler>(&mut self, reactor: &mut Reactor, slot: LaneId, handler: &mut H) {
        loop {
            let Some(lane) = self.lanes.get(slot) else { return };
            let is_held = lane.session.is_some_and(|session| self.sessions.is_held(session, &self.lanes));
            if matches!(lane.phase, Phase::Fenced | Phase::Closing) || (lane.phase == Phase::Up && is_held) {
                return;
            }
            let (phase, session, connection) = (lane.phase, lane.session, lane.connection);
            let Some(received) = self.lanes.get_mut(slot).and_then(|lane| lane.inbound.take_message()) else { return };
            if let Some(state) = session.and_then(|session| self.sessions.get_mut(session)) {
                state.heard(reactor.now());
            }
            let step = match (phase, session) {
                (Phase::Up, Some(session)) => self.rdma_message(reactor, slot, session, &received, handler),
                _ => self.handshake_message(reactor, slot, received.header()),
            };
            if let (Some(connection), Some(rdma)) = (connection, self.lanes.rdma_mut()) {
                rdma.transport.done_with(connection, received);
            }
            if let Err(reason) = step {
                return self.lane_failed(reactor, slot, reason);
            }
        }
    }

    fn rdma_message<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        session: SessionId,
        received: &Received,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let (header, kind) = self.open_header(slot, received.header())?;
        let payload = received.payload();
        let placed = header.flags & FLAG_PLACED != 0;
        if header.payload_len() != payload.len() && !(placed && payload.is_empty()) {
            return Err(CloseReason::Truncated);
        }
        if let Some(state) = self.sessions.get_mut(session) {
            // What was placed came by the device, just before.
            let bytes = HEADER_BYTES + header.payload_len().min(PAYLOAD_BYTES_MAX);
            state.received(bytes, reactor.now());
        }
        self.dispatch(reactor, session, kind, &header, payload, handler)
    }
}

/// The buffer that a control lane receives into next, with the `rest` of what `frame` holds at its start: the beginning of a message of
/// `need` bytes, as far as is known.
#[inline]
fn next_frame(buffers: &ReceiveBuffers, mut frame: Frame, rest: Range<usize>, need: usize, others_wait: bool) -> Frame {
    let (held, used) = (frame.len(), rest.len());
    let wanted = control_frame_bytes(held, rest.end == held);
    let next_len = buffers.len_for(Need { held, used, message: need, wanted });
    let must_wait = next_len > held && others_wait;
    let next = if next_len == held || must_wait { None } else { buffers.alloc(next_len) };
    if let Some(mut next) = next {
        next.copy_from(0, &frame, rest);
        return next;
    }
    if rest.start > 0 {
        frame.bytes_mut().copy_within(rest, 0);
    }
    frame
}

/// What suits a control lane that received into `len` bytes: if it filled them, more.
fn control_frame_bytes(len: usize, full: bool) -> usize {
    match len {
        _ if !full => len,
        ..RECEIVE_MESSAGE_BYTES => RECEIVE_MESSAGE_BYTES,
        _ => CONTROL_FRAME_BYTES_MAX,
    }
}
