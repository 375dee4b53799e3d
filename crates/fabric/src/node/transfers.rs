//! Messages, puts, gets and flushes on the loop.
//!
//! A put goes out in parts, on the one lane that all puts into its window use; the peer confirms each. A get is a get of the
//! fabric for each part. Either ends when all its parts have ended *and* no frame over the program's memory is left: the
//! peer's answer may come before the kernel has released the sent bytes.

use std::collections::hash_map::Entry;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Errno, Frame, Gather, Mapping, Reactor};
use smallvec::SmallVec;
use zerocopy::little_endian::U32;

use super::command::Header;
use super::engine::{Core, Waiting};
use super::error::OpError;
use super::memory::{HeldSegment, HeldSegments, Places, WindowRange};
use super::moving::{Moving, What};
use super::op::{Completed, Outcome};
use super::shared::OpSlot;
use super::wire::{CreditBody, MessageBody};
use super::{OpId, Session};
use crate::Fabric;
use crate::checksum::append_payload;
use crate::fabric::{self, GetError, PayloadMeta, Remote};
use crate::limits::{ASKED_MAX, CONTROL_QUEUE_BYTES, PAYLOAD_BYTES_MAX};
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot};
use crate::windows::WindowKey;
use crate::wire::{Header as WireHeader, Kind};

/// The memory of an operation. Mostly one.
pub(super) type Mappings = SmallVec<[Mapping; 1]>;

/// A put that may begin.
pub(super) struct PutRequest {
    pub(super) op: OpSlot,
    pub(super) segments: HeldSegments,
    pub(super) to: Places,
    /// The header of the message behind it.
    pub(super) message: Option<Header>,
}

/// A put in flight.
pub(super) struct Put {
    op: OpSlot,
    session: Session,
    /// Its place among the puts of its session.
    number: u64,
    /// The key of the window, if it goes through the stream.
    streamed: Option<u64>,
    /// A message follows it, which has taken a credit.
    has_message: bool,
    parts: usize,
    /// Parts that have not ended; one more until all have begun.
    left: u32,
    error: Option<OpError>,
    pub(super) mappings: Mappings,
}

/// A get in flight.
pub(super) struct Get {
    op: OpSlot,
    session: Session,
    parts: usize,
    left: u32,
    error: Option<OpError>,
    pub(super) mappings: Mappings,
}

/// An operation that has ended, except that frames over its memory are still held.
pub(super) struct Linger {
    op: OpSlot,
    mappings: Mappings,
    result: Completed,
    /// Of a put: its session, and its place among the puts there, which flushes wait for.
    put: Option<(Session, u64)>,
}

/// A run of one segment.
pub(super) struct Piece {
    segment: usize,
    start: usize,
    pub(super) len: usize,
}

/// What goes out as one payload: where it belongs, and what it is made of.
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) pieces: SmallVec<[Piece; 1]>,
}

impl Part {
    pub(super) fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }
}

/// Cuts segments into parts, each of at most `max` bytes and within one of the ranges, of as many pieces as it takes. The segments
/// and the ranges have as many bytes.
fn parts(segments: &[HeldSegment], ranges: &[WindowRange], max: usize) -> SmallVec<[Part; 1]> {
    let mut parts = SmallVec::new();
    let (mut segment, mut at) = (0, 0);
    for &WindowRange { offset: start, len } in ranges {
        let mut done = 0;
        while done < len {
            let (first, end) = (done, len.min(done + max));
            let mut pieces = SmallVec::new();
            while done < end {
                let Some(held) = segments.get(segment) else { return parts };
                let len = (held.len - at).min(end - done);
                if len > 0 {
                    pieces.push(Piece { segment, start: held.start + at, len });
                }
                (at, done) = (at + len, done + len);
                if at == held.len {
                    (segment, at) = (segment + 1, 0);
                }
            }
            parts.push(Part { offset: start + first as u64, pieces });
        }
    }
    parts
}

pub(super) fn frame(segments: &[HeldSegment], piece: &Piece) -> Frame {
    // SAFETY: the program's side makes no references to a mapping in use, which it is by its segment and then by this frame; and
    // all frames over a program's memory are of this loop.
    unsafe { Frame::over(&segments[piece.segment].mapping, piece.start, piece.len) }
}

fn push_frames(gather: &mut Gather, frames: SmallVec<[Frame; 1]>) {
    for frame in frames {
        let len = frame.len();
        gather.push_frame(frame, 0, len);
    }
}

/// Whether no operation uses a mapping any more, or only uses that never end: then it stays in use for ever, and its program never
/// gets its bytes.
fn is_free(mapping: &Mapping) -> bool {
    mapping.uses() == 0 || mapping.is_given_up()
}

/// What an operation has come to whose memory is free: it has failed if a device that is gone may still write to that.
fn outcome(mappings: &[Mapping], result: Completed) -> Completed {
    if mappings.iter().any(|mapping| mapping.uses() > 0) { result.and(Err(OpError::Io(Errno::NODEV))) } else { result }
}

/// Where the parts of a put go.
pub(super) struct PutTarget {
    pub(super) session: SessionId,
    pub(super) window: WindowKey,
    /// Through the stream, behind others there.
    pub(super) is_behind: bool,
}

/// Sends a part of a put. With an error nothing was said of it.
pub(super) fn push_part(
    fabric: &mut Fabric,
    reactor: &mut Reactor,
    target: &PutTarget,
    header: WireHeader,
    segments: &[HeldSegment],
    part: &Part,
) -> Result<(), OpError> {
    let PutTarget { session: slot, window, is_behind } = *target;
    let (to, len) = (Remote { window, offset: part.offset }, part.len());
    fabric.check_remote(slot, to, len, true).map_err(OpError::Refused)?;
    let frames: SmallVec<[Frame; 1]> = part.pieces.iter().map(|piece| frame(segments, piece)).collect();
    let checked = fabric.agreed(slot).is_some_and(crate::Agreed::payload_checksum);
    let checksum = checked.then(|| frames.iter().fold(0, |crc, frame| append_payload(crc, frame, 0..frame.len())));
    let (route, payload) = (fabric.route_to(slot, window), PayloadMeta { len, checksum });
    let put = fabric::Put { session: slot, route, to, header, payload };
    let push = |gather: &mut Gather| push_frames(gather, frames);
    if is_behind {
        fabric.put_by_route(put, push);
        return Ok(());
    }
    fabric.put(reactor, put, push).map_err(OpError::Io)
}

/// Whether the wire can have a program's memory: a device cannot have what a peer may write, whose pages may be replaced.
fn can_be_reached(fabric: &Fabric, session: SessionId, segments: &[HeldSegment]) -> bool {
    let registers = fabric.capabilities(session).is_some_and(|wire| wire.registers);
    !registers || segments.iter().all(|segment| segment.mapping.pin())
}

impl Core {
    /// Ends an operation once nothing can touch its memory any more.
    pub(super) fn linger(&mut self, op: OpSlot, mappings: Mappings, result: Completed) {
        self.end_when_free(Linger { op, mappings, result, put: None });
    }

    fn end_when_free(&mut self, linger: Linger) {
        if !linger.mappings.iter().all(is_free) && !seeded::is(Bug::MemoryNotAwaited) {
            return self.lingering.push(linger);
        }
        let Linger { op, mappings, result, put } = linger;
        let result = outcome(&mappings, result);
        drop(mappings);
        self.complete(op, result);
        if let Some((session, number)) = put {
            self.end_flushes(session, number);
        }
    }

    pub(super) fn end_lingering(&mut self) {
        if self.lingering.is_empty() {
            return;
        }
        let free = |linger: &mut Linger| linger.mappings.iter().all(is_free);
        let ended: Vec<Linger> = self.lingering.extract_if(.., free).collect();
        for linger in ended {
            self.end_when_free(linger);
        }
    }

    /// Sends a message or a put with one, now or when there is credit.
    pub(super) fn send(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session, waiting: Waiting) {
        let ended = self.sessions.get(&session).map_or(Some(CloseReason::Closed), |state| state.ended);
        if let Some(reason) = ended {
            return self.end_waiting(session, waiting, reason);
        }
        let Some(state) = self.sessions.get_mut(&session) else { return };
        let is_full = is_full(fabric, state.fabric);
        let has_credit = state.credits > 0 || seeded::is(Bug::MessageWithoutCredit);
        if is_full || !has_credit || !state.waiting.is_empty() {
            state.waiting.push_back(waiting);
            if is_full {
                self.note_crowded(session);
            }
            return self.note_credit(fabric, reactor, session);
        }
        state.credits = state.credits.saturating_sub(1);
        self.send_now(fabric, reactor, session, waiting);
    }

    /// Sends what waited, as far as there is credit.
    pub(super) fn send_waiting(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session) {
        while let Some(state) = self.sessions.get_mut(&session).filter(|state| state.credits > 0) {
            let Some(first) = state.waiting.front() else { break };
            // A message asks for nothing.
            let holds = state.asked >= ASKED_MAX && matches!(first, Waiting::Put { .. });
            // What is copied part by part ends first: one operation of a session at a time is, and messages come in order.
            if state.moving.is_some() || holds || is_full(fabric, state.fabric) {
                self.note_crowded(session);
                break;
            }
            let Some(waiting) = state.waiting.pop_front() else { break };
            state.credits -= 1;
            self.send_now(fabric, reactor, session, waiting);
        }
        self.note_credit(fabric, reactor, session);
    }

    pub(super) fn send_now(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session, waiting: Waiting) {
        self.waits_no_longer(session);
        let Some(state) = self.sessions.get(&session) else { return };
        match waiting {
            Waiting::Message { op, header, payload } => {
                let header = WireHeader::with_body(Kind::Message, &MessageBody::new(header.as_slice()));
                send_small(fabric, state.fabric, header, &payload);
                if let Some(op) = op {
                    self.complete(op, Ok(Outcome::Done));
                }
            }
            Waiting::Put { op, segments, to, message } => {
                self.start_put(fabric, reactor, session, PutRequest { op, segments, to, message: Some(message) });
            }
        }
    }

    pub(super) fn end_waiting(&mut self, session: Session, waiting: Waiting, reason: CloseReason) {
        self.waits_no_longer(session);
        match waiting {
            Waiting::Message { op: Some(op), .. } => self.complete(op, Err(OpError::Ended(reason))),
            Waiting::Message { .. } => {}
            Waiting::Put { op, segments, .. } => {
                drop(segments);
                self.complete(op, Err(OpError::Ended(reason)));
            }
        }
    }

    pub(super) fn start_put(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session, put: PutRequest) {
        let PutRequest { op, segments, to: Places { window, ranges }, message } = put;
        let ended = self.sessions.get(&session).map_or(Some(CloseReason::Closed), |state| state.ended);
        let Some(state) = self.sessions.get_mut(&session).filter(|_| ended.is_none()) else {
            drop(segments);
            return self.complete(op, Err(OpError::Ended(ended.unwrap_or(CloseReason::Closed))));
        };
        if !can_be_reached(fabric, state.fabric, &segments) {
            // Nothing was said of it, so a message with it has taken no credit of the peer's.
            state.credits += u32::from(message.is_some());
            drop(segments);
            return self.complete(op, Err(OpError::Io(Errno::BUSY)));
        }
        let parts = parts(&segments, &ranges, PAYLOAD_BYTES_MAX);
        let slot = state.fabric;
        let number = state.put_count;
        state.put_count += 1;
        state.puts.push_back(number);
        let by_route = |part: &Part| fabric.goes_by_route(slot, Remote { window, offset: part.offset }, part.len());
        let is_behind = state.streamed.contains_key(&window.0);
        let streamed = (is_behind || parts.iter().any(by_route)).then_some(window.0);
        if let Some(window) = streamed {
            *state.streamed.entry(window).or_default() += 1;
        }
        self.note_liveness(session);
        if let Some(state) = self.sessions.get_mut(&session) {
            state.asked += parts.len();
        }
        let (left, mappings) = (parts.len() as u32 + 1, Mappings::new());
        let (has_message, count) = (message.is_some(), parts.len());
        let put = Put { op, session, number, streamed, has_message, parts: count, left, error: None, mappings };
        let what = What::Put { name: self.puts.insert(put), message, is_behind };
        self.go_on(fabric, reactor, session, Moving { what, window, segments, parts, begun: 0 });
    }

    /// The peer of `session` has refused the part of a put that a message follows: the credit is back. False if there was none.
    pub(super) fn message_refused(&mut self, put: Slot<Put>, session: Session) -> bool {
        let state = self.puts.get_mut(put).filter(|put| put.session == session);
        let had_message = state.is_some_and(|put| std::mem::take(&mut put.has_message));
        let had_message = had_message && !seeded::is(Bug::RefusedMessageKeepsCredit);
        if let Some(state) = self.sessions.get_mut(&session).filter(|_| had_message) {
            state.credits += 1;
        }
        had_message
    }

    /// A part of a put has ended, as the peer of `session` says.
    pub(super) fn part_ended(&mut self, put: Slot<Put>, session: Option<Session>, error: Option<OpError>) {
        let Some(state) = self.puts.get_mut(put).filter(|put| session.is_none_or(|session| session == put.session))
        else {
            return;
        };
        state.error = state.error.or(error);
        state.left -= 1;
        if state.left == 0
            && let Some(put) = self.puts.remove(put)
        {
            self.end_put(put, None);
        }
    }

    fn end_put(&mut self, put: Put, error: Option<OpError>) {
        let Put { op, session, number, streamed, parts, mappings, .. } = put;
        let result = put.error.or(error).map_or(Ok(Outcome::Done), Err);
        let Some(state) = self.sessions.get_mut(&session) else { return self.linger(op, mappings, result) };
        state.asked -= parts;
        if let Some(Entry::Occupied(mut count)) = streamed.map(|window| state.streamed.entry(window)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.end_when_free(Linger { op, mappings, result, put: Some((session, number)) });
    }

    /// A put has ended, and so have the flushes that waited for it alone.
    fn end_flushes(&mut self, session: Session, number: u64) {
        let Some(state) = self.sessions.get_mut(&session) else { return };
        if let Ok(place) = state.puts.binary_search(&number) {
            state.puts.remove(place);
        }
        let first = state.puts.front().copied().unwrap_or(u64::MAX);
        let mut done = Vec::new();
        while let Some((_, op)) = state.flushes.pop_front_if(|(before, _)| *before <= first) {
            done.push(op);
        }
        let result = state.ended.map_or(Ok(Outcome::Done), |reason| Err(OpError::Ended(reason)));
        for op in done {
            self.complete(op, result.clone());
        }
        self.note_liveness(session);
    }

    pub(super) fn start_flush(&mut self, op: OpSlot, session: Session) {
        let Some(state) = self.sessions.get_mut(&session) else {
            return self.complete(op, Err(OpError::Ended(CloseReason::Closed)));
        };
        if let Some(reason) = state.ended {
            return self.complete(op, Err(OpError::Ended(reason)));
        }
        if state.puts.is_empty() || seeded::is(Bug::FlushNotAwaited) {
            return self.complete(op, Ok(Outcome::Done));
        }
        state.flushes.push_back((state.put_count, op));
    }

    pub(super) fn start_get(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        op: OpSlot,
        session: Session,
        segments: HeldSegments,
        Places { window, ranges }: Places,
    ) {
        let ended = self.sessions.get(&session).map_or(Some(CloseReason::Closed), |state| state.ended);
        let Some(state) = self.sessions.get_mut(&session).filter(|_| ended.is_none()) else {
            drop(segments);
            return self.complete(op, Err(OpError::Ended(ended.unwrap_or(CloseReason::Closed))));
        };
        let slot = state.fabric;
        if !can_be_reached(fabric, slot, &segments) {
            drop(segments);
            return self.complete(op, Err(OpError::Io(Errno::BUSY)));
        }
        // A frame of the fabric's has one piece.
        let parts = parts(&segments, &ranges, PAYLOAD_BYTES_MAX);
        let count = parts.iter().map(|part| part.pieces.len()).sum();
        state.asked += count;
        let get = Get { op, session, parts: count, left: count as u32, error: None, mappings: Mappings::new() };
        let what = What::Get(self.gets.insert(get));
        self.go_on(fabric, reactor, session, Moving { what, window, segments, parts, begun: 0 });
    }

    /// A part of a get has ended.
    pub(super) fn got_part(&mut self, session: SessionId, get: u64, result: Result<(), GetError>) {
        let reason = || {
            let state = self.by_fabric.get(&session).and_then(|session| self.sessions.get(session));
            state.and_then(|state| state.ended).unwrap_or(CloseReason::Closed)
        };
        let error = result.err().map(|error| match error {
            GetError::Refused(error) => OpError::Refused(error),
            GetError::Ended | GetError::GivenUp => OpError::Ended(reason()),
            GetError::Length { .. } => OpError::WrongAnswer,
            GetError::Io(error) => OpError::Io(error),
        });
        self.get_ended(Slot::from_u64(get), error);
    }

    pub(super) fn get_ended(&mut self, get: Slot<Get>, error: Option<OpError>) {
        let Some(state) = self.gets.get_mut(get) else { return };
        state.error = state.error.or(error);
        state.left -= 1;
        if state.left == 0
            && let Some(Get { op, session, parts, error, mappings, .. }) = self.gets.remove(get)
        {
            if let Some(state) = self.sessions.get_mut(&session) {
                state.asked -= parts;
            }
            self.linger(op, mappings, error.map_or(Ok(Outcome::Done), Err));
        }
    }

    /// Gives back the credit for the messages that the program has taken, unless the peer does not read: what it sends has us
    /// answer, and the credit with it.
    pub(super) fn give_credit(&mut self, fabric: &mut Fabric, session: Session) {
        if let Some(state) = self.sessions.get_mut(&session) {
            state.credit_held = is_full(fabric, state.fabric);
            if state.credit_held {
                return self.note_crowded(session);
            }
        }
        let taken = self.shared().settle_credit(session);
        if taken > 0
            && let Some(state) = self.sessions.get_mut(&session).filter(|state| state.ended.is_none())
        {
            state.granted += taken;
            if !seeded::is(Bug::GrantForgotten) {
                grant(fabric, state.fabric, taken);
            }
        }
    }

    /// The lanes of a session are gone: what was under way ends.
    pub(super) fn end_transfers(&mut self, session: Session, reason: CloseReason) {
        let puts: Vec<Slot<Put>> =
            self.puts.iter().filter(|(_, put)| put.session == session).map(|(name, _)| name).collect();
        for name in puts.into_iter().filter(|_| !seeded::is(Bug::PutsOfTheDead)) {
            if let Some(put) = self.puts.remove(name) {
                self.end_put(put, Some(OpError::Ended(reason)));
            }
        }
        let flushes =
            self.sessions.get_mut(&session).map(|state| std::mem::take(&mut state.flushes)).unwrap_or_default();
        for (_, op) in flushes {
            self.complete(op, Err(OpError::Ended(reason)));
        }
    }
}

/// Whether so much waits for the peer to read it that no more is sent which could wait, and no more is asked for.
pub(super) fn is_full(fabric: &Fabric, session: SessionId) -> bool {
    fabric.control_queued_heap(session) >= CONTROL_QUEUE_BYTES
}

/// Sends a message with a payload of at most 16 KiB, which is copied.
pub(super) fn send_small(fabric: &mut Fabric, session: SessionId, header: WireHeader, payload: &[u8]) {
    let checked = fabric.agreed(session).is_some_and(crate::Agreed::payload_checksum);
    let checksum = (checked && !payload.is_empty()).then(|| crc32c::crc32c(payload));
    let meta = PayloadMeta { len: payload.len(), checksum };
    fabric.send_with(session, header, meta, |gather| gather.push_head(payload));
}

/// Lets the peer of a session send so many messages more.
pub(super) fn grant(fabric: &mut Fabric, session: SessionId, messages: u32) {
    let body = CreditBody { messages: U32::new(messages), reserved: [0; 76] };
    fabric.send(session, WireHeader::with_body(Kind::Credit, &body));
}

impl From<OpId> for OpSlot {
    fn from(id: OpId) -> Self {
        id.0
    }
}
