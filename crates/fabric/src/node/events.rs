//! What comes over the sessions of a node.

use byway_reactor::{Frame, Reactor};
use zerocopy::FromZeros;

use super::Message;
use super::Session;
use super::engine::{Core, Link};
use super::error::OpError;
use super::shared::Phase;
use super::transfers::grant;
use super::windows::ONCE;
use super::wire::{Class, CreditBody, MessageBody, PlacedBody, PutBody, put_number};
use crate::fabric::{Fabric, GetError, Handler};
use crate::session::CloseReason;
use crate::slots::Slot;
use crate::windows::{WindowError, WindowKey};
use crate::wire::{Header, Kind, RefuseCode};

/// Messages that a peer may grant in all. One that grants more counts wrongly, or wants our numbers to overflow.
const CREDITS_MAX: u32 = 1 << 20;

impl Handler for Core {
    fn up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: Slot) {
        if !self.by_fabric.contains_key(&slot) {
            let session = self.shared().add_session(Phase::Arriving, self.credits);
            self.add_link(slot, session);
        }
        grant(fabric, slot, u32::from(self.credits));
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let Some(link) = self.links.get_mut(&session) else { return };
        link.up = true;
        if link.greeted {
            self.began(fabric, reactor, session);
        }
        self.note_debts(session);
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        slot: Slot,
        (kind, header): (Kind, &Header),
        payload: &[u8],
    ) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let taken = match kind {
            Kind::Credit => self.credit_came(fabric, reactor, session, header),
            // Neither program nor layer knows of the session, nor would either be told that it has ended.
            other if !self.is_ready(session) => Err(CloseReason::Unexpected(other)),
            Kind::Message => self.message_came(fabric, reactor, session, header, payload),
            Kind::Placed => {
                let name = Slot::from_u64(put_number(header.body::<PlacedBody>().put));
                self.part_ended(name, Some(session), None);
                Ok(())
            }
            other => Err(CloseReason::Unexpected(other)),
        };
        if let Err(reason) = taken {
            fabric.close(reactor, slot, reason);
        }
    }

    fn placed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: Slot, (kind, header): (Kind, &Header)) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let body: PutBody = header.body();
        let (Kind::Data, Ok(message), true) = (kind, body.message(), self.is_ready(session)) else {
            return fabric.close(reactor, slot, CloseReason::Unexpected(kind));
        };
        let window = WindowKey(header.window.get());
        if fabric.windows().context(window) == Some(ONCE) {
            // The frame goes: nothing more is put there.
            let _ = fabric.windows().close(window);
        }
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

    fn got(
        &mut self,
        _fabric: &mut Fabric,
        _reactor: &mut Reactor,
        slot: Slot,
        (frame, get): (Option<Frame>, u64),
        result: Result<(), GetError>,
    ) {
        drop(frame);
        self.got_part(slot, get, result);
    }

    fn put_refused(&mut self, _: &mut Fabric, _: &mut Reactor, slot: Slot, (header, error): (&Header, WindowError)) {
        if let Some(&session) = self.by_fabric.get(&slot) {
            let name = Slot::from_u64(put_number(header.body::<PutBody>().put));
            self.part_ended(name, Some(session), Some(OpError::Refused(error)));
        }
    }

    fn recalled(&mut self, _: &mut Fabric, _: &mut Reactor, slot: Slot, window: WindowKey) {
        self.window_recalled(slot, window);
    }

    fn down(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: Slot, reason: CloseReason) {
        let Some(&session) = self.by_fabric.get(&slot) else { return };
        let Some(link) = self.links.get_mut(&session) else { return };
        link.ended = Some(reason);
        let ready = link.is_ready();
        // First: what other threads begin meanwhile would be told of its end by nobody.
        self.shared().session_ends(session, reason);
        self.end_deferred(fabric, reactor, session);
        if ready {
            self.with_layer(fabric, reactor, |layer, turn| layer.ended(turn, session, reason));
        }
        self.shared().session_ended(session, reason);
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, slot: Slot) {
        if let Some(session) = self.by_fabric.remove(&slot) {
            let reason = self.links.get(&session).and_then(|link| link.ended).unwrap_or(CloseReason::Closed);
            self.end_transfers(session, reason);
            if let Some(link) = self.links.remove(&session) {
                for key in link.windows.into_iter().flat_map(|keys| [keys.0, keys.1]) {
                    fabric.windows().leave(WindowKey(key), slot);
                }
            }
        }
        fabric.release(slot);
    }
}

impl Core {
    /// Whether a session has begun: a peer that is a node says nothing but `Credit` before.
    fn is_ready(&self, session: Session) -> bool {
        self.links.get(&session).is_some_and(Link::is_ready)
    }

    fn credit_came(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        header: &Header,
    ) -> Result<(), CloseReason> {
        let messages = header.body::<CreditBody>().messages.get();
        let Some(link) = self.links.get_mut(&session) else { return Ok(()) };
        link.credits =
            link.credits.checked_add(messages).filter(|all| *all <= CREDITS_MAX).ok_or(CloseReason::Credit)?;
        let first = !std::mem::replace(&mut link.greeted, true);
        if first && link.up {
            self.began(fabric, reactor, session);
        }
        self.note_debts(session);
        self.send_waiting(fabric, reactor, session);
        Ok(())
    }

    /// Both ends can use a session.
    fn began(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session) {
        let slot = self.links.get(&session).map(|link| link.fabric);
        let capabilities = slot.and_then(|slot| fabric.capabilities(slot));
        let peer = slot.and_then(|slot| fabric.identity(slot));
        let taken = self.shared().session_up(session, capabilities, peer);
        if taken {
            self.with_layer(fabric, reactor, |layer, turn| layer.began(turn, session));
        } else {
            self.close(fabric, reactor, session, RefuseCode::Busy);
        }
    }

    /// Counts a message against what the peer was granted.
    fn take_credit(&mut self, session: Session) -> Result<(), CloseReason> {
        let Some(link) = self.links.get_mut(&session) else { return Ok(()) };
        link.granted = link.granted.checked_sub(1).ok_or(CloseReason::Credit)?;
        Ok(())
    }

    fn message_came(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), CloseReason> {
        let body: MessageBody = header.body();
        let (class, header) = body.read().ok_or(CloseReason::Unexpected(Kind::Message))?;
        if class != Class::Program && self.layer.is_none() {
            return Err(CloseReason::Unexpected(Kind::Message));
        }
        if class != Class::Now {
            self.take_credit(session)?;
        }
        if class == Class::Program {
            self.deliver(fabric, session, header, payload);
        } else {
            let mut good = true;
            self.with_layer(fabric, reactor, |layer, turn| {
                good = layer.message(turn, session, class, header, payload);
            });
            if !good {
                return Err(CloseReason::Unexpected(Kind::Message));
            }
        }
        Ok(())
    }

    fn deliver(&mut self, fabric: &mut Fabric, session: Session, header: &[u8], payload: &[u8]) {
        let message = Message { session, header: header.to_vec(), payload: payload.to_vec() };
        let owes = {
            let mut shared = self.shared();
            shared.message_came(message);
            shared.owes_credit(session)
        };
        if owes {
            self.give_credit(fabric, session);
        }
    }
}

#[cfg(test)]
mod tests;
