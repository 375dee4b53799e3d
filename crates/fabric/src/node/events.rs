//! Events from the sessions of a node.

use byway_reactor::Reactor;
use zerocopy::FromZeros;

use super::Message;
use super::Session;
use super::engine::{Core, NodeSession};
use super::error::OpError;
use super::shared::Phase;
use super::transfers::grant;
use super::windows::ONCE;
use super::wire::{CreditBody, MessageBody, PlacedBody, PutBody, put_number};
use crate::fabric::{EndedGet, Fabric, Handler};
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot};
use crate::windows::{WindowError, WindowKey};
use crate::wire::{Header, Kind, RefuseCode};

/// Messages that a peer may grant in all. One that grants more counts wrongly, or wants our numbers to overflow.
const CREDITS_MAX: u32 = 1 << 20;

impl Handler for Core {
    fn up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: SessionId) {
        if !self.by_fabric.contains_key(&slot) {
            let credits = self.credits;
            let session = self.shared().add_session(Phase::Arriving, credits);
            self.add_link(slot, session, false);
        }
        grant(fabric, slot, u32::from(self.credits));
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let Some(state) = self.sessions.get_mut(&session) else { return };
        state.up = true;
        let (begins, greeted) = (state.begins, state.greeted);
        if begins && self.layer.is_none() {
            // It speaks no protocol: a server that waits to call it must hear that.
            fabric.send(slot, Header::new(Kind::Protocols));
        } else if begins {
            let nonce = fabric.nonce(slot).unwrap_or_default();
            self.with_layer(fabric, reactor, |layer, turn| layer.began(turn, session, nonce, true));
        }
        if greeted {
            self.began(fabric, reactor, session);
        }
        self.note_liveness(session);
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        slot: SessionId,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    ) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let taken = match kind {
            Kind::Credit => self.credit_came(fabric, reactor, session, header),
            Kind::Protocols => self.protocols_came(fabric, reactor, session, kind, header, payload),
            // Neither program nor layer knows of the session, nor would either be told that it has ended.
            other if !self.is_ready(session) => Err(CloseReason::Unexpected(other)),
            Kind::Message => self.message_came(fabric, session, header, payload),
            Kind::Placed => {
                let name = Slot::from_u64(put_number(header.body::<PlacedBody>().put));
                self.part_ended(name, Some(session), None);
                Ok(())
            }
            Kind::Call | Kind::Reply | Kind::Notice | Kind::Cancel | Kind::NoticeCredit => {
                self.said(fabric, reactor, session, kind, header, payload)
            }
            other => Err(CloseReason::Unexpected(other)),
        };
        if let Err(reason) = taken {
            fabric.close(reactor, slot, reason);
        }
    }

    fn placed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: SessionId, kind: Kind, header: &Header) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let window = WindowKey(header.window.get());
        if fabric.windows().context(window) == Some(ONCE) {
            // The frame goes: nothing more is put there, be it by a put or as a part of an answer.
            let _ = fabric.windows().close(window);
        }
        let body: PutBody = header.body();
        // Of an answer: the target of a put is no call.
        if body.target.get() != 0 && self.is_ready(session) && self.layer.is_some() {
            let mut good = true;
            self.with_layer(fabric, reactor, |layer, turn| good = layer.placed(turn, session, kind, header));
            if !good {
                fabric.close(reactor, slot, CloseReason::Unexpected(kind));
            }
            return;
        }
        let (Kind::Data, Ok(message), true) = (kind, body.message(), self.is_ready(session)) else {
            return fabric.close(reactor, slot, CloseReason::Unexpected(kind));
        };
        let mut placed = PlacedBody::new_zeroed();
        placed.put = body.put;
        fabric.send(slot, Header::with_body(Kind::Placed, &placed));
        if let Some(header) = message {
            let came = self.take_credit(session).map(|()| self.deliver(fabric, session, header, &[]));
            if let Err(reason) = came {
                fabric.close(reactor, slot, reason);
            }
        }
    }

    fn got(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, slot: SessionId, get: EndedGet) {
        let EndedGet { frame, context, result } = get;
        drop(frame);
        self.got_part(slot, context, result);
    }

    fn put_refused(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        slot: SessionId,
        header: &Header,
        error: WindowError,
    ) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let body: PutBody = header.body();
        let name = Slot::from_u64(put_number(body.put));
        if body.message != 0 && self.message_refused(name, session) {
            self.send_waiting(fabric, reactor, session);
        }
        self.part_ended(name, Some(session), Some(OpError::Refused(error)));
    }

    fn can_go_on(&self, _: &Reactor) -> bool {
        self.moving > 0
    }

    fn recalled(&mut self, _: &mut Fabric, _: &mut Reactor, slot: SessionId, window: WindowKey) {
        self.window_recalled(slot, window);
    }

    fn down(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: SessionId, reason: CloseReason) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let Some(state) = self.sessions.get_mut(&session) else { return };
        state.ended = Some(reason);
        let ready = state.up && (state.begins || state.greeted);
        // First: otherwise operations that other threads begin meanwhile would never end.
        self.shared().session_ends(session, reason);
        self.end_deferred(fabric, reactor, session);
        if ready {
            self.with_layer(fabric, reactor, |layer, turn| layer.ended(turn, session, reason));
        }
        self.shared().session_ended(session, reason);
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, slot: SessionId) {
        if let Some(session) = self.by_fabric.remove(&slot) {
            let reason = self.sessions.get(&session).and_then(|state| state.ended).unwrap_or(CloseReason::Closed);
            self.end_transfers(session, reason);
            if let Some(state) = self.sessions.remove(&session) {
                for key in state.windows.into_iter().flat_map(|keys| [keys.0, keys.1]) {
                    fabric.windows().leave(WindowKey(key), slot);
                }
            }
        }
        fabric.release(slot);
    }
}

impl Core {
    /// Whether a session has begun: a node sends nothing but `Credit` and `Protocols` before.
    fn is_ready(&self, session: Session) -> bool {
        self.sessions.get(&session).is_some_and(NodeSession::is_ready)
    }

    fn credit_came(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        header: &Header,
    ) -> Result<(), CloseReason> {
        let messages = header.body::<CreditBody>().messages.get();
        let Some(state) = self.sessions.get_mut(&session) else { return Ok(()) };
        state.credits =
            state.credits.checked_add(messages).filter(|all| *all <= CREDITS_MAX).ok_or(CloseReason::Credit)?;
        self.send_waiting(fabric, reactor, session);
        Ok(())
    }

    /// The peer has all lanes, and names its protocols. The layer learns them, and a server answers, before the program has the
    /// session: the client waits for the answer, and the server's program may turn the loop no more once it has the session.
    fn protocols_came(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), CloseReason> {
        let Some(state) = self.sessions.get_mut(&session) else { return Ok(()) };
        let begins_now = !std::mem::replace(&mut state.greeted, true) && state.up;
        if begins_now && !state.begins {
            let nonce = fabric.nonce(state.fabric).unwrap_or_default();
            self.with_layer(fabric, reactor, |layer, turn| layer.began(turn, session, nonce, false));
        }
        self.said(fabric, reactor, session, kind, header, payload)?;
        if begins_now {
            self.began(fabric, reactor, session);
        }
        self.note_liveness(session);
        Ok(())
    }

    /// A message for the layer came. A node without one answers only that it speaks no protocol.
    fn said(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), CloseReason> {
        if self.layer.is_none() && kind == Kind::Protocols {
            if let Some(state) = self.sessions.get(&session).filter(|state| !state.begins) {
                fabric.send(state.fabric, Header::new(Kind::Protocols));
            }
            return Ok(());
        }
        let mut good = self.layer.is_some();
        self.with_layer(fabric, reactor, |layer, turn| good = layer.message(turn, session, kind, header, payload));
        if good { Ok(()) } else { Err(CloseReason::Unexpected(kind)) }
    }

    /// Both ends can use a session.
    fn began(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session) {
        let slot = self.sessions.get(&session).map(|state| state.fabric);
        let capabilities = slot.and_then(|slot| fabric.capabilities(slot));
        let peer = slot.and_then(|slot| fabric.identity(slot));
        let taken = self.shared().session_up(session, capabilities, peer);
        if !taken {
            self.close(fabric, reactor, session, RefuseCode::Busy);
        }
    }

    /// Counts a message against what the peer was granted.
    fn take_credit(&mut self, session: Session) -> Result<(), CloseReason> {
        let Some(state) = self.sessions.get_mut(&session) else { return Ok(()) };
        state.granted = state.granted.checked_sub(1).ok_or(CloseReason::Credit)?;
        Ok(())
    }

    fn message_came(
        &mut self,
        fabric: &mut Fabric,
        session: Session,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), CloseReason> {
        let body: MessageBody = header.body();
        let header = body.read().ok_or(CloseReason::Unexpected(Kind::Message))?;
        self.take_credit(session)?;
        self.deliver(fabric, session, header, payload);
        Ok(())
    }

    fn deliver(&mut self, fabric: &mut Fabric, session: Session, header: &[u8], payload: &[u8]) {
        let message = Message { session, header: header.to_vec(), payload: payload.to_vec() };
        let is_due = {
            let mut shared = self.shared();
            shared.message_came(message);
            shared.is_credit_due(session)
        };
        if is_due {
            self.give_credit(fabric, session);
        }
    }
}

#[cfg(test)]
mod tests;
