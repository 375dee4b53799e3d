//! The events that a fabric's owner receives.

use byway_reactor::Reactor;

use super::{EndedGet, Fabric};
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::WindowError;
use crate::wire::{Header, Kind};

/// Receives the events of the sessions. Everything is called from [`Fabric::handle`] or [`Fabric::flush`].
pub trait Handler {
    /// A session can be used.
    fn up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId);

    /// A message of the layer above came; its payload, if any, is at most
    /// [`SMALL_BYTES_MAX`](crate::limits::SMALL_BYTES_MAX) and valid during the call.
    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    );

    /// A put came: a `Data` or `Reply` whose payload lies in the window that the header names.
    fn placed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, kind: Kind, header: &Header);

    /// A get ended. Each get ends exactly once, before its session is drained. Does nothing by default.
    fn got(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, get: EndedGet) {
        let _ = (fabric, reactor, session, get);
    }

    /// The peer refused a put of ours: `header` has the body of the put's message. Does nothing by default.
    fn put_refused(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        header: &Header,
        error: WindowError,
    ) {
        let _ = (fabric, reactor, session, header, error);
    }

    /// The peer of a session no longer reaches a window that was announced to it, because it was recalled or the session has ended.
    /// Does nothing by default.
    fn recalled(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, window: crate::WindowKey) {
        let _ = (fabric, reactor, session, window);
    }

    /// Whether memory has come back for requests that wait for it. [`Fabric::flush`] asks at its end, because gets and sends over
    /// shared memory end there without a completion that would wake the loop. If true, the loop does not sleep. False by default.
    fn can_go_on(&self, reactor: &Reactor) -> bool {
        let _ = reactor;
        false
    }

    /// A session ended: nothing can be sent any more, nothing will come. Its lanes may still hold frames.
    fn down(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, reason: CloseReason);

    /// The last lane of an ended session is gone: every window's frame is in its window again. The owner closes its
    /// windows and, once its own I/O for the session has ended, calls [`Fabric::release`].
    fn drained(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId);
}
