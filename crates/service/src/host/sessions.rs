//! The sessions of a loop's clients, and their state that services share: calls and answers, calls in progress, held frames.

use std::convert::Infallible;

use byway_fabric::access::Identity;
use byway_fabric::limits::TURN_BYTES_MAX;
use byway_fabric::wire::{Header, Kind as Message, RefuseCode};
use byway_fabric::{CloseReason, Fabric, Remote, SessionId};
use byway_reactor::Reactor;
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, Breach, CallRef, Calls, CannotSend, Event, Route, Spoken};
use zerocopy::IntoBytes;

use super::sending::{send, send_outbox};

/// A client's session.
#[derive(Debug)]
pub struct Session {
    /// The fabric's name for it.
    pub slot: SessionId,
    /// The identity of the client, as proved by TLS and the wire.
    pub client: Identity,
    /// Payloads must lie in memory that only this process changes, and that it may read.
    pub private: bool,
    /// Payloads have checksums.
    pub checksum: bool,
    /// Requests of services in progress.
    requests: usize,
    /// Frames that its requests hold at the stores, in bytes.
    held_bytes: usize,
    down: bool,
    drained: bool,
    /// It was told goodbye: its further calls are not begun.
    dismissed: bool,
}

/// The sessions of a loop's clients.
#[derive(Debug)]
pub struct Sessions {
    calls: Calls<Infallible>,
    /// By the index of the fabric's slot.
    table: Vec<Option<Session>>,
    /// No call is begun any more; each session is told goodbye when its calls have been answered.
    draining: bool,
    answered: u64,
    /// Bytes of the transfers that were begun in this turn, and that this loop copies itself.
    turn_bytes: usize,
}

/// An answer that goes in one message.
#[derive(Clone, Copy, Debug)]
pub struct SmallAnswer<'a> {
    /// 0, or an error of the service's protocol.
    pub status: u16,
    /// The inline result.
    pub result: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> SmallAnswer<'a> {
    /// The call was done.
    pub const fn done(result: &'a [u8], payload: &'a [u8]) -> Self {
        Self { status: 0, result, payload }
    }

    /// The call failed, which `status` says.
    pub const fn failed(status: u16) -> Self {
        Self { status, result: &[], payload: &[] }
    }
}

impl Sessions {
    pub(super) fn new(fabric: &mut Fabric, spoken: Vec<Spoken>) -> Self {
        let calls = Calls::new(fabric.random().bytes16(), spoken);
        Self { calls, table: Vec::new(), draining: false, answered: 0, turn_bytes: 0 }
    }

    /// A turn of the loop begins.
    pub(super) fn begin_turn(&mut self) {
        self.turn_bytes = 0;
    }

    /// A put into a client's window was begun, or a get from it if `put` is false.
    pub fn note_transfer(&mut self, fabric: &Fabric, slot: SessionId, window: Remote, len: usize, put: bool) {
        if fabric.is_copied(slot, window, len, put) {
            self.turn_bytes += len;
        }
    }

    /// Whether the transfers of this turn have [`TURN_BYTES_MAX`] to copy. Then others wait for the next turn.
    pub fn turn_is_full(&self) -> bool {
        self.turn_bytes >= TURN_BYTES_MAX
    }

    /// A session, until nothing of it is left.
    pub fn get(&self, slot: SessionId) -> Option<&Session> {
        self.table.get(slot.index as usize)?.as_ref().filter(|session| session.slot == slot)
    }

    fn get_mut(&mut self, slot: SessionId) -> Option<&mut Session> {
        self.table.get_mut(slot.index as usize)?.as_mut().filter(|session| session.slot == slot)
    }

    /// The session at an index of the fabric's.
    pub(super) fn at(&self, index: usize) -> Option<SessionId> {
        Some(self.table.get(index)?.as_ref()?.slot)
    }

    /// Whether its client can be answered still.
    pub fn is_up(&self, slot: SessionId) -> bool {
        self.get(slot).is_some_and(|session| !session.down)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.table.iter().flatten().count()
    }

    /// Calls that have begun and not been answered.
    pub fn calls_in_flight(&self) -> usize {
        self.table.iter().flatten().map(|session| self.calls.calls_in(session.slot)).sum()
    }

    /// Calls that were answered.
    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// A request of a session begins. The fabric keeps the session until [`Sessions::end_request`].
    pub fn begin_request(&mut self, slot: SessionId) {
        if let Some(session) = self.get_mut(slot) {
            session.requests += 1;
        }
    }

    /// A request has ended.
    pub fn end_request(&mut self, fabric: &mut Fabric, slot: SessionId) {
        self.forget_request(slot);
        self.release_if_done(fabric, slot);
    }

    /// The same, for a request whose session has not ended.
    pub fn forget_request(&mut self, slot: SessionId) {
        if let Some(session) = self.get_mut(slot) {
            session.requests -= 1;
        }
    }

    /// A request of a session holds so many bytes of frames from now on.
    pub fn note_held(&mut self, slot: SessionId, bytes: usize) {
        if let Some(session) = self.get_mut(slot) {
            session.held_bytes += bytes;
        }
    }

    /// The request no longer holds them; its answer may.
    pub fn note_released(&mut self, slot: SessionId, bytes: usize) {
        if let Some(session) = self.get_mut(slot) {
            session.held_bytes -= bytes;
        }
    }

    /// Whether a transfer of a session has to wait for its turn.
    pub fn must_wait(&self, fabric: &Fabric, reactor: &Reactor, slot: SessionId) -> bool {
        self.turn_is_full() || self.holds_too_much(fabric, reactor, slot)
    }

    /// Whether a session holds more frames than there are free ones (`waiting.rs`).
    pub fn holds_too_much(&self, fabric: &Fabric, reactor: &Reactor, slot: SessionId) -> bool {
        let held = self.get(slot).map_or(0, |session| session.held_bytes) + fabric.queued_frame_bytes(slot);
        held > 0 && held > reactor.frames().free_bytes()
    }

    /// The header of the answer to a call, and the session that it goes to. The caller sends it with the payload, of `total` bytes.
    /// `None` if the session has ended.
    pub fn reply(&mut self, call: CallRef, status: u16, total: usize, result: &[u8]) -> Option<Route> {
        let result = Inline::new(result).unwrap_or(Inline::EMPTY);
        let route = self.calls.reply(call, status, total as u32, &result)?;
        self.answered += 1;
        Some(route)
    }

    /// Answers a call in one message.
    pub fn answer(&mut self, fabric: &mut Fabric, call: CallRef, answer: SmallAnswer<'_>) {
        let SmallAnswer { status, result, payload } = answer;
        let Some(route) = self.reply(call, status, payload.len(), result) else { return };
        let token = route.token.as_ref().map_or(&[][..], IntoBytes::as_bytes);
        send(fabric, route.session, route.header, &[token, payload]);
    }

    /// The header of a part of an answer, for a window of the caller. `None` if the session has ended.
    pub fn part(&mut self, call: CallRef) -> Option<Header> {
        self.calls.data(call).map(|route| route.header)
    }

    /// Sends a notice.
    ///
    /// # Errors
    /// Why it cannot be sent. After [`CannotSend::NoCredit`], [`Service::may_notify`](super::Service::may_notify) reports new credit.
    pub fn notify(
        &mut self,
        fabric: &mut Fabric,
        slot: SessionId,
        protocol: u8,
        method: u16,
        arguments: &[u8],
    ) -> Result<(), CannotSend> {
        let arguments = Inline::new(arguments).unwrap_or(Inline::EMPTY);
        let header = self.calls.notify(slot, &Ask { protocol, method, arguments: &arguments, windows: 0 })?;
        fabric.send(slot, header);
        Ok(())
    }

    /// Ends a session: its client's further calls are not begun. False if it has ended or was dismissed before.
    pub fn dismiss(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: SessionId) -> bool {
        let is_first = self.note_dismissed(slot);
        if is_first {
            // Calls that were begun are still under way, so this promises nothing about them.
            fabric.say_goodbye(reactor, slot, RefuseCode::ShuttingDown);
        }
        is_first
    }

    fn note_dismissed(&mut self, slot: SessionId) -> bool {
        let session = self.get_mut(slot).filter(|session| !session.down && !session.dismissed);
        session.map(|session| session.dismissed = true).is_some()
    }

    /// Dismisses the sessions for which `is` returns true, and returns them.
    pub(super) fn dismiss_those(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        is: impl Fn(&Fabric, SessionId) -> bool,
    ) -> Vec<SessionId> {
        let mut slots: Vec<SessionId> = self.table.iter().flatten().map(|session| session.slot).collect();
        slots.retain(|slot| is(fabric, *slot) && self.dismiss(fabric, reactor, *slot));
        slots
    }

    pub(super) fn drain(&mut self) {
        self.draining = true;
    }

    /// While draining: dismisses sessions whose calls have all been answered. Their clients learn that the other calls were not begun, and
    /// may repeat each at the next server.
    pub(super) fn say_goodbyes(&mut self, fabric: &mut Fabric, reactor: &Reactor) {
        if !self.draining {
            return;
        }
        for index in 0..self.table.len() {
            if let Some(slot) = self.at(index)
                && self.calls.calls_in(slot) == 0
                && self.note_dismissed(slot)
            {
                fabric.bid_farewell(reactor, slot, RefuseCode::Drained);
            }
        }
    }

    pub(super) fn up(&mut self, fabric: &Fabric, slot: SessionId) {
        let (Some(agreed), Some(nonce)) = (fabric.agreed(slot), fabric.nonce(slot)) else { return };
        self.calls.up(slot, nonce, false);
        let index = slot.index as usize;
        if self.table.len() <= index {
            self.table.resize_with(index + 1, || None);
        }
        self.table[index] = Some(Session {
            slot,
            client: fabric.identity(slot).unwrap_or_default(),
            private: agreed.payload_checksum() || fabric.capabilities(slot).is_none_or(|wire| wire.secure),
            checksum: agreed.payload_checksum(),
            requests: 0,
            held_bytes: 0,
            down: false,
            drained: false,
            dismissed: false,
        });
    }

    /// Takes a message. `Ok(None)`: there is nothing to do.
    pub(super) fn message<'a>(
        &mut self,
        slot: SessionId,
        kind: Message,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Option<Event<'a, Infallible>>, CloseReason> {
        match kind {
            Message::Call if self.begins_none(slot) => return Ok(None),
            // Credit is for messages between programs, which a server does not send.
            Message::Credit => return Ok(None),
            Message::Call | Message::Cancel | Message::Notice | Message::NoticeCredit | Message::Protocols => {}
            _ => return Err(CloseReason::Unexpected(kind)),
        }
        let event = self.calls.message(slot, kind, header, payload);
        Ok(Some(event.map_err(|breach| match breach {
            Breach::Form => CloseReason::Unexpected(kind),
            _ => CloseReason::Credit,
        })?))
    }

    /// Whether calls of a session are ignored: its client repeats them at the next server, or has lost its rights.
    fn begins_none(&self, slot: SessionId) -> bool {
        self.draining || self.get(slot).is_none_or(|session| session.dismissed)
    }

    pub(super) fn send_outbox(&mut self, fabric: &mut Fabric) {
        send_outbox(&mut self.calls, fabric);
    }

    /// A session has ended; whether it was up.
    pub(super) fn down(&mut self, slot: SessionId) -> bool {
        let Some(session) = self.get_mut(slot) else { return false };
        session.down = true;
        self.calls.down(slot);
        true
    }

    /// The fabric has no transfer of a session any more.
    pub(super) fn drained(&mut self, fabric: &mut Fabric, slot: SessionId) {
        match self.get_mut(slot) {
            Some(session) => session.drained = true,
            // It ended before it was up.
            None => return fabric.release(slot),
        }
        self.release_if_done(fabric, slot);
    }

    /// Lets the fabric forget a session, once nothing of it is left.
    fn release_if_done(&mut self, fabric: &mut Fabric, slot: SessionId) {
        if self.get(slot).is_some_and(|session| session.drained && session.requests == 0) {
            self.table[slot.index as usize] = None;
            fabric.release(slot);
        }
    }
}
