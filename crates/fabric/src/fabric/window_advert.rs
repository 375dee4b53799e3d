//! The message `Window`, by which an end announces its windows where the peer reaches them directly.
//!
//! Over lanes the owner of a window checks each put and get. Over RDMA the device does, and knows only an address and a key.
//! So a node announces the location and rights of each window that it opens, and its peer checks transfers against them
//! first. A program's mistake is then found before anything goes to the device. A peer that does not check meets the
//! registration, which has exactly the window's bytes and rights, and its session ends. Over shared memory an end announces
//! windows in memory that it has lent in the same way (`lending.rs`).

use byway_reactor::Reactor;

use super::transfer::Remote;
use super::wire::Wire;
use super::{Fabric, Handler};
use crate::registration;
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::{WindowError, WindowKey};
use crate::wire::{Header, Kind, WindowAdvert};

impl Fabric {
    /// Tells the peer of a session, over wires where that is needed, that a window is open for it. The advert goes before all
    /// later messages. The peer may then put or get, also if no message names the window.
    pub fn announce(&mut self, session: SessionId, window: WindowKey) {
        let (Some(grant), Some(rights)) = (self.exposed_grant(window), self.windows.exposed_rights(window)) else {
            return;
        };
        self.tell_of_window(session, window, &WindowAdvert::opened(rights, 0, grant));
    }

    /// Tells the peer of a session, over wires where that is needed, that a window is about to close. Its puts and gets in
    /// flight there end the session, and so do those that it begins before it has this message; later ones fail at its end.
    pub fn withdraw(&mut self, session: SessionId, window: WindowKey) {
        if self.windows.exposed_rights(window).is_some() {
            self.tell_of_window(session, window, &WindowAdvert::of(WindowAdvert::CLOSED));
        }
    }

    /// Whether a put (or get, if `put` is false) of `len` bytes can be begun, as far as this side knows.
    ///
    /// # Errors
    /// Over RDMA: no such window of the peer, or not so much of it, or not for that. Over lanes the peer looks.
    pub fn check_remote(&self, session: SessionId, at: Remote, len: usize, put: bool) -> Result<(), WindowError> {
        let state = self.sessions.open(session);
        let Some(Wire::Rdma(rdma)) = state.map(|state| &state.wire) else { return Ok(()) };
        let right = if put { WindowAdvert::PUT } else { WindowAdvert::GET };
        rdma.grants.find(at, len, right).map(|_| ())
    }

    /// What the cache of registered memory has done for sessions over RDMA; nothing before memory outside the pool was
    /// first moved.
    pub fn registrations(&self) -> Option<(registration::Mode, registration::Counters)> {
        self.lanes.rdma()?.registrations()
    }

    pub(super) fn tell_of_window(&mut self, session: SessionId, window: WindowKey, advert: &WindowAdvert) {
        self.send(session, advert.about(window.0));
    }

    /// The peer tells of a window, its own or ours.
    pub(super) fn window_advert_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        header: &Header,
        handler: &mut H,
    ) -> Result<(), CloseReason> {
        let (window, advert) = (WindowKey(header.window.get()), header.body::<WindowAdvert>());
        let Some(state) = self.sessions.get_mut(session) else { return Ok(()) };
        match (advert.what, state.wire.rdma_mut()) {
            // One that finds no room is refused when it is used, as if it were not there.
            (WindowAdvert::OPENED, Some(rdma)) => drop(rdma.grants.note(window, advert.grant, advert.rights)),
            (WindowAdvert::CLOSED, Some(rdma)) => drop(rdma.grants.forget(window)),
            (WindowAdvert::USED, Some(_)) => drop(self.windows.used(session, window)),
            (WindowAdvert::OPENED, None) => return self.lent_window_opened(reactor, session, window, &advert),
            (WindowAdvert::CLOSED, None) => self.lent_window_closed(session, window),
            (WindowAdvert::FORGOTTEN, None) => self.lent_window_forgotten(reactor, session, window, handler),
            (WindowAdvert::UNMAP, None) => return self.unmap(reactor, session, advert.memory.get()),
            _ => return Err(CloseReason::Unexpected(Kind::Window)),
        }
        Ok(())
    }
}
