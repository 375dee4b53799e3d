//! The requests of an open connection: which commands go out next, and the destinations of incoming bytes.

use std::collections::VecDeque;

use byway_reactor::Frame;
use slab::Slab;

use super::Completed;
use super::error::{ClientError, RequestError};
use super::inbox::{Inbox, Room};
use super::nbd_request::{NbdRequest, Payload};
use crate::limits::{CLIENT_CONNECTION_DEPTH, CLIENT_INPUT_BYTES, SMALL_READ_BYTES_MAX};
use crate::nbd::client::{ClientTransmission, Content, Received, ReplyError, Session, SubmitError};
use crate::nbd::request::Headers;
use crate::nbd::wire::{ExtendedReply, SimpleReply, StructuredReply};

/// See the module.
pub(super) struct Traffic {
    session: Session,
    machine: ClientTransmission,
    requests: Slab<NbdRequest>,
    /// Jobs that have commands to be sent, in order.
    unsent: VecDeque<usize>,
    /// By the machine's slot: the request whose command it is.
    owners: Vec<usize>,
    placing: Option<Placing>,
    /// Bytes of the head at the front of the inbox, as far as is known.
    need: usize,
    /// The last read was large; so will the next be.
    large: bool,
}

/// A payload that is coming in.
#[derive(Clone, Copy)]
struct Placing {
    cookie: u64,
    request: usize,
    /// Where the next byte belongs in the request's frame.
    at: usize,
    left: usize,
    last: bool,
}

/// The part of a write's payload that goes with a command.
pub(super) struct PayloadPart<'a> {
    pub(super) payload: Payload<'a>,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Bytes that are decrypted at a time where they cannot be decrypted in place: a record of TLS.
const PLAINTEXT_BYTES: usize = 16 << 10;

const NO_FRAME: ReplyError = ReplyError("data for a request that has no memory");

impl Traffic {
    pub(super) fn new(session: Session) -> Self {
        let machine = ClientTransmission::new(session.rules, CLIENT_CONNECTION_DEPTH);
        Self {
            session,
            machine,
            requests: Slab::new(),
            unsent: VecDeque::new(),
            owners: vec![usize::MAX; CLIENT_CONNECTION_DEPTH],
            placing: None,
            need: 0,
            large: false,
        }
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    /// Requests that have not been answered.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn add(&mut self, request: NbdRequest) {
        if let Some(large) = request.is_large_read(SMALL_READ_BYTES_MAX) {
            self.large = large;
        }
        let id = self.requests.insert(request);
        self.unsent.push_back(id);
    }

    pub(super) fn disconnect(&self, out: &mut Vec<u8>) {
        self.machine.disconnect(out);
    }

    /// Hands out commands while the connection may have more in flight.
    pub(super) fn send(
        &mut self,
        done: &mut Vec<Completed>,
        mut put: impl FnMut(
            Option<PayloadPart<'_>>,
            &mut dyn FnMut(&mut Vec<u8>) -> Result<u64, SubmitError>,
        ) -> Result<u64, SubmitError>,
    ) {
        while let Some(&id) = self.unsent.front() {
            let Some(request) = self.requests.get_mut(id) else {
                self.unsent.pop_front();
                continue;
            };
            let Some(part) = request.next_part(self.machine.rules()) else {
                self.unsent.pop_front();
                self.retire(id, done);
                continue;
            };
            let (start, len) = (part.start as usize, part.len as usize);
            let payload = request.payload().map(|payload| PayloadPart { payload, start, len });
            let machine = &mut self.machine;
            let mut head = |out: &mut Vec<u8>| machine.submit(part.command, part.flags, part.offset, part.len, out);
            match put(payload, &mut head) {
                Ok(cookie) => {
                    self.owners[ClientTransmission::slot(cookie)] = id;
                    if !request.sent(&part) {
                        self.unsent.pop_front();
                    }
                }
                Err(SubmitError::Full) => return,
                Err(SubmitError::Violation(violation)) => request.fail(violation.into()),
            }
        }
    }

    fn retire(&mut self, id: usize, done: &mut Vec<Completed>) {
        if self.requests.get(id).is_some_and(NbdRequest::is_over) {
            done.push(self.requests.remove(id).complete());
        }
    }

    /// Everything fails.
    pub(super) fn fail(&mut self, error: &ClientError, done: &mut Vec<Completed>) {
        self.unsent.clear();
        self.placing = None;
        for mut request in self.requests.drain() {
            request.fail(RequestError::Lost(error.clone()));
            done.push(request.complete());
        }
    }

    /// How many bytes to offer for heads, when `here` of them are in the inbox.
    pub(super) fn wanted(&self, here: usize) -> usize {
        if !self.large {
            return CLIENT_INPUT_BYTES;
        }
        // What a part of a read begins with: more would be the first bytes of its payload, which then are copied.
        let head = match self.session.rules.headers {
            Headers::Simple => SimpleReply::BYTES,
            Headers::Structured => StructuredReply::BYTES + 8,
            Headers::Extended => ExtendedReply::BYTES + 8,
        };
        self.need.max(head).saturating_sub(here)
    }

    /// Gives out the frame that the rest of a payload belongs in.
    pub(super) fn lend(&mut self) -> Option<Room> {
        let placing = self.placing?;
        let frame = self.requests.get_mut(placing.request)?.into.take()?;
        Some(Room { frame, start: placing.at, len: placing.left })
    }

    /// Takes it back after `count` bytes have come: how many of them came behind the payload. `None`: too few, since the
    /// stream ended.
    pub(super) fn give_back(&mut self, frame: Frame, count: usize) -> Option<usize> {
        let placing = self.placing.as_mut()?;
        self.requests.get_mut(placing.request)?.into = Some(frame);
        let behind = count.checked_sub(placing.left)?;
        placing.at += placing.left;
        placing.left = 0;
        Some(behind)
    }

    /// Has `fill` write what comes next of a payload to where it belongs; it says how much that was. `None`: no payload
    /// is coming in, and `fill` was not called.
    pub(super) fn fill<E>(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Option<Result<usize, E>> {
        let placing = self.placing.as_mut().filter(|placing| placing.left > 0)?;
        let frame = self.requests.get_mut(placing.request)?.into.as_mut()?;
        let went = if frame.is_private() {
            fill(frame.bytes_mut().get_mut(placing.at..placing.at + placing.left)?)
        } else {
            // Of the memory that a copy's other end has lent: its bytes are copied in, never referred to.
            if placing.at + placing.left > frame.len() {
                return None;
            }
            let mut plain = [0; PLAINTEXT_BYTES];
            let went = fill(&mut plain[..placing.left.min(PLAINTEXT_BYTES)]);
            frame.write(placing.at, &plain[..went.as_ref().copied().unwrap_or(0)]);
            went
        };
        let count = went.as_ref().copied().unwrap_or(0);
        placing.at += count;
        placing.left -= count;
        Some(went)
    }

    /// Uses what is in the inbox, as far as it goes.
    pub(super) fn use_inbox(&mut self, inbox: &mut Inbox, done: &mut Vec<Completed>) -> Result<(), ClientError> {
        loop {
            if !self.place(inbox, done)? {
                return Ok(());
            }
            self.need = 0;
            if inbox.bytes().is_empty() {
                return Ok(());
            }
            match self.machine.parse(inbox.bytes())? {
                Received::Incomplete { need } => {
                    self.need = need;
                    return Ok(());
                }
                Received::Part { cookie, content, last, taken } => {
                    let id = self.owners[ClientTransmission::slot(cookie)];
                    let request = self.requests.get_mut(id).ok_or(NO_FRAME)?;
                    match content {
                        Content::Data { offset, length } => {
                            let at = request.position(offset);
                            self.placing = Some(Placing { cookie, request: id, at, left: length as usize, last });
                        }
                        Content::Hole { offset, length } if !request.clear(offset, length) => {
                            return Err(NO_FRAME.into());
                        }
                        Content::Extent(allocation) => request.extent(allocation),
                        Content::Failed { errno, message, .. } => {
                            let message = String::from_utf8_lossy(message).into_owned();
                            request.fail(RequestError::Refused { errno, message });
                        }
                        Content::Hole { .. } | Content::Nothing => {}
                    }
                    inbox.consume(taken);
                    if self.placing.is_none() && last {
                        self.end_part(cookie, id, done);
                    }
                }
            }
        }
    }

    /// Moves what has come of a payload from the inbox to where it belongs. False if more is to come.
    fn place(&mut self, inbox: &mut Inbox, done: &mut Vec<Completed>) -> Result<bool, ClientError> {
        let Some(placing) = &mut self.placing else { return Ok(true) };
        let here = placing.left.min(inbox.bytes().len());
        if here > 0 {
            let frame = self.requests.get_mut(placing.request).and_then(|request| request.into.as_mut());
            let frame = frame.filter(|frame| placing.at + here <= frame.len()).ok_or(NO_FRAME)?;
            frame.write(placing.at, &inbox.bytes()[..here]);
            inbox.consume(here);
            placing.at += here;
            placing.left -= here;
        }
        if placing.left > 0 {
            return Ok(false);
        }
        let Placing { cookie, request, last, .. } = *placing;
        self.placing = None;
        if last {
            self.end_part(cookie, request, done);
        }
        Ok(true)
    }

    fn end_part(&mut self, cookie: u64, id: usize, done: &mut Vec<Completed>) {
        let finished = self.machine.finish(cookie);
        let Some(request) = self.requests.get_mut(id) else { return };
        if let Some(Err(errno)) = finished {
            request.fail(RequestError::Refused { errno, message: String::new() });
        }
        if request.ended() {
            if request.is_cut_short() {
                self.unsent.retain(|unsent| *unsent != id);
            }
            done.push(self.requests.remove(id).complete());
        }
    }
}
