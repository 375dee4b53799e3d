//! Requests of clients in progress at a server, and their results.

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::wire::{Header, Kind as Message};
use byway_fabric::{CloseReason, Fabric, PayloadMeta, Put, Remote, Route, SessionId, Slot, WindowKey};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{ByteRange, Reactor};
use byway_rpc::message::ReplyBody;
use byway_rpc::session::CallRef;

use super::super::engine::{Done, Outcome, ReadFlags, Slice, Step, VolumeId};
use super::super::error::BlockError;
use super::super::payload::Payload;
use super::super::wire::{CallError, EXTENT_HOLE, status_of};
use super::{ServerContext, request_of};
use crate::host::SmallAnswer;

/// A read, until it is answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) call: CallRef,
    pub(super) volume: VolumeId,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) window: WindowKey,
    /// What was sent of it before its end.
    pub(super) sliced: Option<Sliced>,
}

/// Slices of a read that are on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sliced {
    /// All go by one: a window takes one payload at a time.
    route: Route,
    bytes: usize,
}

/// A write that is pulled, until it is answered.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) call: CallRef,
    pub(super) volume: VolumeId,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) window: WindowKey,
    pub(super) durable: bool,
    /// Bytes that have been asked for.
    pub(super) asked: usize,
    /// Bytes that have not been written.
    pub(super) left: usize,
    pub(super) error: Option<CallError>,
}

/// What a [`BlockRequest`] is called.
pub(super) type BlockRequestId = Slot<BlockRequest>;

/// Something that has not ended.
#[derive(Debug)]
pub(super) enum BlockRequest {
    Read(Read),
    /// A small write, flush, trim, zero, prefetch, list of extents.
    Plain(CallRef),
    Write(Write),
    /// A piece of a write that is got from the client.
    Part {
        write: BlockRequestId,
        session: SessionId,
        at: usize,
        len: usize,
    },
}

impl ServerContext<'_> {
    pub(super) fn start_request(&mut self, session: SessionId, request: BlockRequest) -> BlockRequestId {
        self.sessions.begin_request(session);
        self.core.in_flight.insert(request)
    }

    pub(super) fn end_request(
        &mut self,
        fabric: &mut Fabric,
        session: SessionId,
        request: BlockRequestId,
    ) -> Option<BlockRequest> {
        let ended = self.core.in_flight.remove(request)?;
        self.sessions.end_request(fabric, session);
        Some(ended)
    }

    /// False if there are no frames.
    pub(super) fn try_read(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, read: Read) -> bool {
        let session = read.call.session;
        let private = self.sessions.get(session).is_some_and(|session| session.private);
        let request = self.start_request(session, BlockRequest::Read(read));
        let tag = self.core.tag(request);
        let device = !private && fabric.capabilities(session).is_some_and(|wire| wire.device_memory);
        let sliced = read.len > SMALL_BYTES_MAX;
        let flags = ReadFlags { private, sliced, device, part: false };
        let step = self.engine.read(reactor, read.volume, ByteRange::new(read.offset, read.len as u64), flags, tag);
        if sliced && matches!(step, Ok(Step::Later | Step::Now(_))) {
            let to = Remote { window: read.window, offset: 0 };
            self.sessions.note_transfer(fabric, session, to, read.len, true);
        }
        let result = match step {
            Ok(Step::Later) => {
                self.sessions.note_held(session, read.len);
                return true;
            }
            Ok(Step::Busy) => {
                self.end_request(fabric, session, request);
                return false;
            }
            Ok(Step::Now(payload)) => Ok(payload),
            Ok(Step::InParts) => Err(BlockError::TooLong),
            Err(error) => Err(error),
        };
        self.end_request(fabric, session, request);
        self.answer_read(fabric, reactor, &read, result);
        true
    }

    fn answer_read(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        read: &Read,
        result: Result<Payload, BlockError>,
    ) {
        let payload = match result {
            Ok(payload) => payload,
            Err(error) => return self.fail_read(fabric, read, error),
        };
        let session = read.call.session;
        let Some(header) = self.reply(read.call, Ok(()), read.len) else { return };
        if read.len > SMALL_BYTES_MAX {
            let to = Remote { window: read.window, offset: 0 };
            let put =
                Put { session, route: fabric.route(session), to, header, payload: self.announce(session, &payload) };
            if let Err(error) = fabric.put(reactor, put, |gather| payload.push_to(gather)) {
                // That header was not sent.
                fabric.send(session, failed(&header, BlockError::Io(error)));
            }
            return;
        }
        let meta = self.announce(session, &payload);
        fabric.send_with(session, header, meta, |gather| payload.push_to(gather));
    }

    /// A read failed: the slices of it that are on their way count as payload of the answer, so that the client waits
    /// for them and no payload comes for a window that is closed.
    fn fail_read(&mut self, fabric: &mut Fabric, read: &Read, error: BlockError) {
        let sent = read.sliced.filter(|_| !seeded::is(Bug::SlicesUncounted)).map_or(0, |sliced| sliced.bytes);
        if let Some(header) = self.reply(read.call, Err(error.into()), sent) {
            fabric.send(read.call.session, header);
        }
    }

    /// Sends a slice of a read: by itself, or with the reply, if it is the last.
    fn answer_slice(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, request: BlockRequestId, slice: Slice) {
        let Some(BlockRequest::Read(read)) = self.core.in_flight.get_mut(request) else { return };
        let session = read.call.session;
        let sliced = read.sliced.get_or_insert_with(|| Sliced { route: fabric.route(session), bytes: 0 });
        sliced.bytes += slice.payload.len();
        let (call, len, window, route) = (read.call, read.len, read.window, sliced.route);
        let header = if slice.last { self.reply(call, Ok(()), len) } else { self.sessions.part(call) };
        let Some(header) = header else { return };
        let offset = if seeded::is(Bug::SliceAtWrongOffset) { 0 } else { slice.start };
        // A slice lies in frames, so it is the client's memory that cannot be written.
        let to = Remote { window, offset };
        let put = Put { session, route, to, header, payload: self.announce(session, &slice.payload) };
        if let Err(error) = fabric.put(reactor, put, |gather| slice.payload.push_to(gather)) {
            fabric.close(reactor, session, CloseReason::Io(error));
        }
    }

    fn announce(&mut self, session: SessionId, payload: &Payload) -> PayloadMeta {
        let checked = self.sessions.get(session).is_some_and(|session| session.checksum);
        PayloadMeta { len: payload.len(), checksum: if checked { payload.checksum() } else { None } }
    }

    /// The header of the answer to a call without an inline result. `None`: its session has ended.
    fn reply(&mut self, call: CallRef, result: Result<(), CallError>, total: usize) -> Option<Header> {
        let (status, errno) = result.err().map_or((0, 0), status_of);
        let errno = errno.to_le_bytes();
        let route = self.sessions.reply(call, status, total, if status == 0 { &[] } else { &errno })?;
        Some(route.header)
    }

    /// Answers a call that has no payload.
    pub(super) fn answer(&mut self, fabric: &mut Fabric, call: CallRef, result: Result<(), CallError>) {
        let (status, errno) = result.err().map_or((0, 0), status_of);
        let errno = errno.to_le_bytes();
        let result = if status == 0 { &[][..] } else { &errno };
        self.sessions.answer(fabric, call, SmallAnswer { status, result, payload: &[] });
    }

    /// Takes the first step of a request that has no payload in its answer.
    pub(super) fn first_step(
        &mut self,
        fabric: &mut Fabric,
        call: CallRef,
        request: BlockRequestId,
        step: &Result<Step<()>, BlockError>,
    ) {
        let result = match step {
            Ok(Step::Later) => return,
            Ok(Step::Now(())) => Ok(()),
            Ok(Step::Busy | Step::InParts) => Err(CallError::Busy),
            Err(error) => Err((*error).into()),
        };
        self.end_request(fabric, call.session, request);
        self.answer(fabric, call, result);
    }

    /// The engine has ended a request.
    pub(super) fn ended(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, done: Done) {
        let slot = request_of(done.tag);
        let (session, part) = match self.core.in_flight.get(slot) {
            None => return,
            Some(
                BlockRequest::Read(Read { call, .. })
                | BlockRequest::Plain(call)
                | BlockRequest::Write(Write { call, .. }),
            ) => (call.session, None),
            Some(BlockRequest::Part { session, write, len, .. }) => (*session, Some((*write, *len))),
        };
        if let Some((write, len)) = part {
            self.end_request(fabric, session, slot);
            let result = match done.outcome {
                Outcome::Unit(result) => result.map_err(CallError::from),
                _ => Err(CallError::Malformed),
            };
            return self.part_ended(fabric, write, len, result);
        }
        let read_ended = !matches!(&done.outcome, Outcome::Slice(slice) if !slice.last);
        if let Some(&BlockRequest::Read(read)) = self.core.in_flight.get(slot).filter(|_| read_ended) {
            self.sessions.note_released(session, read.len);
        }
        if let Outcome::Slice(slice) = done.outcome {
            let last = slice.last;
            self.answer_slice(fabric, reactor, slot, slice);
            if last {
                self.end_request(fabric, session, slot);
            }
            return;
        }
        // The answer goes first: the end of the last request may be the end of the session.
        match (self.core.in_flight.get(slot), done.outcome) {
            (Some(&BlockRequest::Read(read)), Outcome::Read(result)) => {
                self.answer_read(fabric, reactor, &read, result);
            }
            (Some(&BlockRequest::Plain(call)), Outcome::Unit(result)) => {
                self.answer(fabric, call, result.map_err(CallError::from));
            }
            (Some(&BlockRequest::Plain(call)), Outcome::Extents(Ok(extents))) => {
                self.answer_extents(fabric, call, &extents);
            }
            (Some(&BlockRequest::Plain(call)), Outcome::Extents(Err(error))) => {
                self.answer(fabric, call, Err(error.into()));
            }
            _ => debug_assert!(false, "an answer of another kind than the question"),
        }
        self.end_request(fabric, session, slot);
    }

    pub(super) fn answer_extents(&mut self, fabric: &mut Fabric, call: CallRef, extents: &[byway_reactor::Extent]) {
        let mut payload = Vec::with_capacity(extents.len().min(SMALL_BYTES_MAX / 8) * 8);
        for extent in extents.iter().take(SMALL_BYTES_MAX / 8) {
            let hole = if extent.hole { EXTENT_HOLE } else { 0 };
            payload.extend_from_slice(&(extent.len | hole).to_le_bytes());
        }
        self.sessions.answer(fabric, call, SmallAnswer::done(&[], &payload));
    }
}

/// The header of an answer that says so instead.
fn failed(reply: &Header, error: BlockError) -> Header {
    let (status, errno) = status_of(error.into());
    let mut body: ReplyBody = reply.body();
    body.status.set(status);
    body.total.set(0);
    body.inline_len = 4;
    body.result[..4].copy_from_slice(&errno.to_le_bytes());
    Header::with_body(Message::Reply, &body)
}
