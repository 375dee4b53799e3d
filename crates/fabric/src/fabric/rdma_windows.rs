//! Gets over RDMA that are under way, and the uses of windows that they are; `transfer.rs` begins them.
//!
//! A put or get is checked against the peer's [grants](super::grants) first: a mistake is then refused here and not by the
//! device, which would end the connection. All pieces of one get count as the one use of a window for one use. When the last
//! piece has ended, the window's owner is told and closes it. A get of which no piece reached the device, because the memory to
//! be filled could not be registered, does not count as a use of the window.

use std::rc::Rc;

use byway_reactor::{Frame, FrameRange};

use super::operations::Get;
use super::sessions::Sessions;
use crate::rdma::transport::{ConnectionId, Transport};
use crate::rdma::{RdmaError, Window as ExposedWindow, WindowAddress};
use crate::slots::{SessionId, Slot, Slots};
use crate::windows::{WindowKey, Windows};
use crate::wire::Grant;

/// Gets that devices have in flight.
#[derive(Default)]
pub(super) struct RdmaReads {
    gets: Slots<RdmaGet>,
    uses: Slots<Use>,
}

/// A get, or a piece of one.
pub(super) struct RdmaGet {
    pub(super) session: SessionId,
    pub(super) context: u64,
    /// Of a window for one use.
    pub(super) once: Option<UseId>,
}

/// What a use of a window is called.
pub(super) type UseId = Slot<Use>;

/// A window for one use that is being read.
pub(super) struct Use {
    session: SessionId,
    window: WindowKey,
    /// Pieces that were asked for and have not ended.
    left: usize,
    /// Whether more of them may come.
    is_open: bool,
    /// What was not read is not used.
    was_read: bool,
}

/// A window of the peer that was used up, of which the peer is to be told.
pub(super) struct UsedUp {
    pub(super) session: SessionId,
    pub(super) window: WindowKey,
}

impl RdmaReads {
    /// Begins a get, and gives its number; followed by [`Self::asked`] or [`Self::was_refused`].
    pub(super) fn begin(&mut self, get: &Get) -> u64 {
        let Get { session, once, context, .. } = *get;
        self.gets.insert(RdmaGet { session, context, once }).to_u64()
    }

    /// The device has been asked for a get: a piece of a use is under way.
    pub(super) fn asked(&mut self, once: Option<UseId>) {
        if let Some(using) = once.and_then(|once| self.uses.get_mut(once)) {
            using.left += 1;
        }
    }

    /// The device was not asked for a get.
    pub(super) fn was_refused(&mut self, number: u64) {
        self.gets.remove(Slot::from_u64(number));
    }

    /// Takes a get that has ended.
    pub(super) fn end(&mut self, number: u64) -> Option<RdmaGet> {
        self.gets.remove(Slot::from_u64(number))
    }

    /// A get of a window for one use is begun, which may have several pieces.
    pub(super) fn begin_use(&mut self, session: SessionId, window: WindowKey) -> UseId {
        self.uses.insert(Use { session, window, left: 0, is_open: true, was_read: false })
    }

    /// All pieces of a get were asked for: the window is in use, unless none was found.
    pub(super) fn end_use(&mut self, once: UseId, sessions: &mut Sessions) -> Option<UsedUp> {
        let using = self.uses.get_mut(once)?;
        using.is_open = false;
        if (using.left > 0 || using.was_read)
            && let Some(rdma) = sessions.rdma_mut(using.session)
        {
            rdma.grants.set_in_use(using.window, true);
        }
        self.forget_use(once, sessions)
    }

    /// A piece of a get has ended.
    pub(super) fn end_piece(&mut self, once: UseId, was_read: bool, sessions: &mut Sessions) -> Option<UsedUp> {
        let using = self.uses.get_mut(once)?;
        using.left -= 1;
        using.was_read |= was_read;
        self.forget_use(once, sessions)
    }

    /// With its last piece a use is over: the window is forgotten, unless nothing was read.
    fn forget_use(&mut self, once: UseId, sessions: &mut Sessions) -> Option<UsedUp> {
        self.uses.get(once).filter(|using| using.left == 0 && !using.is_open)?;
        let Use { session, window, was_read, .. } = self.uses.remove(once)?;
        if let Some(rdma) = sessions.rdma_mut(session) {
            if was_read {
                rdma.grants.forget(window);
            } else {
                rdma.grants.set_in_use(window, false);
            }
        }
        was_read.then_some(UsedUp { session, window })
    }
}

/// Where a window of ours lies, for the peer of a session over RDMA.
pub(super) fn exposed_grant(windows: &mut Windows, window: WindowKey) -> Option<Grant> {
    let (WindowAddress { address, rkey }, len) = windows.exposed(window)?;
    Some(Grant::new(address, len as u64, rkey))
}

/// What it means that a device does not open a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It cannot have this memory.
    Alone,
    /// It is at its end, and the session with it.
    EndsSession,
    /// The session is at its end, which its owner has yet to hear.
    Ended,
}

impl Refusal {
    pub(super) fn of(error: RdmaError, has_connection: bool) -> Self {
        match error {
            _ if !has_connection => Self::Ended,
            error if error.is_of_memory() => Self::Alone,
            _ => Self::EndsSession,
        }
    }
}

/// Memory that is to be opened.
pub(super) enum ToExpose {
    /// For the peer to fill.
    Target(FrameRange),
    /// For the peer to read.
    Source(FrameRange<Rc<Frame>>),
}

impl ToExpose {
    /// Bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Target(memory) => memory.len,
            Self::Source(memory) => memory.len,
        }
    }

    /// Opens it to the device of a connection's peer; gives it back if that cannot be, unless it is lost.
    pub(super) fn open(
        self,
        transport: &Transport,
        connection: ConnectionId,
    ) -> Result<ExposedWindow, (RdmaError, Option<Self>)> {
        match self {
            Self::Target(memory) => {
                let (start, len) = (memory.start, memory.len);
                let again = |frame| Self::Target(FrameRange { frame, start, len });
                transport.open_target(connection, memory).map_err(|(error, frame)| (error, frame.map(again)))
            }
            Self::Source(memory) => {
                let opened = transport.open_source(connection, memory.clone());
                opened.map_err(|error| (error, Some(Self::Source(memory))))
            }
        }
    }

    /// A target's frame.
    pub(super) fn into_frame(self) -> Option<Frame> {
        match self {
            Self::Target(memory) => Some(memory.frame),
            Self::Source(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::Errno;

    use super::*;

    #[test]
    fn a_device_at_its_end_ends_the_session_and_memory_that_it_cannot_have_does_not() {
        let registering = |errno| RdmaError::System { call: "ibv_reg_mr", errno };
        assert_eq!(Refusal::of(RdmaError::MemoryLimit { bytes: 9 }, true), Refusal::Alone);
        assert_eq!(Refusal::of(registering(Errno::FAULT), true), Refusal::Alone);
        assert_eq!(Refusal::of(registering(Errno::IO), true), Refusal::EndsSession);
        assert_eq!(Refusal::of(registering(Errno::NODEV), true), Refusal::EndsSession);
        // The transport has ended the connection, and says so later: its reason is the session's.
        assert_eq!(Refusal::of(RdmaError::State("a window"), false), Refusal::Ended);
    }
}
