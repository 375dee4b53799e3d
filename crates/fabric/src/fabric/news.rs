//! What two nodes tell each other of their windows, where a device reaches them.
//!
//! Over lanes who owns a window looks at each put and get. Over RDMA the device does, which knows an address and a key: so a
//! node says of each window that it opens where it lies and what it is for, and who uses windows looks there first. What is
//! wrong with a use is found out before anything goes to the device, as a program's mistake is; a peer that does not look
//! finds the registration, which has just the window's bytes and rights, and its session ends.

use byway_reactor::Gather;
use zerocopy::{FromBytes, IntoBytes};

use super::Fabric;
use super::transfer::{Announced, Remote};
use crate::registration;
use crate::session::CloseReason;
use crate::slots::Slot;
use crate::windows::{WindowError, WindowKey};
use crate::wire::{FLAG_GRANT, Grant, Header, Kind, WindowNews};

impl Fabric {
    /// Tells the peer of a session that a window was opened for it, if it must be told: before anything that is sent
    /// afterwards. It may then put or get whether or not a message names the window.
    pub fn announce(&mut self, session: Slot, window: WindowKey) {
        let (Some(grant), Some(rights)) = (self.exposed_grant(window), self.windows.exposed_rights(window)) else {
            return;
        };
        self.tell_of_window(session, window, WindowNews::new(WindowNews::OPENED, rights), Some(grant));
    }

    /// Tells the peer of a session that a window is about to be closed, if it must be told. What it has under way there
    /// ends its session, and so does what it begins before it has heard of this; later it is refused on its side.
    pub fn withdraw(&mut self, session: Slot, window: WindowKey) {
        if self.windows.exposed_rights(window).is_some() {
            self.tell_of_window(session, window, WindowNews::new(WindowNews::CLOSED, 0), None);
        }
    }

    /// Whether a put (or get, if `put` is false) of `len` bytes can be begun, as far as this side knows.
    ///
    /// # Errors
    /// Over RDMA: no such window of the peer, or not so much of it, or not for that. Over lanes the peer looks.
    pub fn check_remote(&self, session: Slot, at: Remote, len: usize, put: bool) -> Result<(), WindowError> {
        if self.link_of(session).is_none() {
            return Ok(());
        }
        let state = self.sessions.get(session).ok_or(WindowError::Key)?;
        let right = if put { WindowNews::PUT } else { WindowNews::GET };
        state.grants.find(at, len, right).map(|_| ())
    }

    /// What the cache of registered memory has done for sessions over RDMA; nothing before memory outside the pool was
    /// first moved.
    pub fn registrations(&self) -> Option<(registration::Mode, registration::Counters)> {
        self.links.as_ref()?.registrations()
    }

    pub(super) fn tell_of_window(&mut self, session: Slot, window: WindowKey, news: WindowNews, grant: Option<Grant>) {
        let mut header = Header::with_body(Kind::Window, &news);
        header.window.set(window.0);
        let Some(grant) = grant else { return self.send_with(session, header, Announced::default(), |_| ()) };
        header.flags |= FLAG_GRANT;
        let bytes = grant.as_bytes();
        let announced = Announced { len: bytes.len(), checksum: None };
        self.send_with(session, header, announced, |gather: &mut Gather| gather.push_head(bytes));
    }

    pub(super) fn window_news_came(
        &mut self,
        session: Slot,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), CloseReason> {
        let unexpected = CloseReason::Unexpected(Kind::Window);
        let is_linked = self.link_of(session).is_some();
        let state = self.sessions.get_mut(session).filter(|_| is_linked).ok_or(unexpected)?;
        let (window, news) = (WindowKey(header.window.get()), header.body::<WindowNews>());
        match news.what {
            WindowNews::OPENED => {
                let grant = Grant::read_from_bytes(payload).map_err(|_| unexpected)?;
                // One that finds no room is refused when it is used, as if it were not there.
                state.grants.note(window, grant, news.rights);
            }
            WindowNews::CLOSED => drop(state.grants.forget(window)),
            WindowNews::USED => drop(self.windows.used(session, window)),
            _ => return Err(unexpected),
        }
        Ok(())
    }
}
