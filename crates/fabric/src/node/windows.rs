//! Windows of a program's memory on the loop: how they are opened, lent and closed.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Errno, Frame, FrameRange, Mapping, Reactor};
use smallvec::smallvec;

use super::Session;
use super::engine::Core;
use super::error::OpError;
use super::op::Outcome;
use super::shared::OpSlot;
use crate::descriptor::{Descriptor, Rights};
use crate::session::CloseReason;
use crate::slots::{SessionId, Slot, Slots};
use crate::windows::Closed;
use crate::{Capabilities, Fabric, WindowKey};

/// What a window is opened with: it is closed when it was used once.
pub(super) const ONCE: u64 = 1;

/// Windows that are closed here, and of which a peer that reaches them by itself has not said that it forgets them.
#[derive(Default)]
pub(super) struct Closings {
    closing: Slots<Closing>,
    /// Whose a window is, by session of the fabric and key.
    waiting: HashMap<(SessionId, u64), Slot<Closing>>,
}

/// A window to open.
pub(super) struct OpenWindow<'a> {
    pub(super) mapping: &'a Mapping,
    /// Of the mapping.
    pub(super) range: Range<usize>,
    pub(super) rights: Rights,
    /// For one use.
    pub(super) once: bool,
}

struct Closing {
    op: OpSlot,
    mapping: Mapping,
    left: usize,
}

impl Core {
    /// Opens a window for the peers of one session, or of several.
    pub(super) fn open(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        sessions: &[Session],
        asked: &OpenWindow<'_>,
    ) -> Result<Descriptor, OpError> {
        let OpenWindow { mapping, rights, once, .. } = *asked;
        let (start, len) = (asked.range.start, asked.range.len());
        let mut slots = Vec::with_capacity(sessions.len());
        for session in sessions {
            let state = self.sessions.get(session).ok_or(OpError::Ended(CloseReason::Closed))?;
            if let Some(reason) = state.ended {
                return Err(OpError::Ended(reason));
            }
            slots.push(state.fabric);
        }
        let &slot = slots.first().ok_or(OpError::Ended(CloseReason::Closed))?;
        let wires: Vec<Capabilities> = slots.iter().filter_map(|slot| fabric.capabilities(*slot)).collect();
        if slots.len() > 1 && wires.iter().any(|wire| !wire.windows_for_several) {
            return Err(OpError::Io(Errno::OPNOTSUPP));
        }
        if wires.iter().any(|wire| wire.registers) && !mapping.pin() {
            // Lent to another peer for writing: what its device would have may be replaced.
            return Err(OpError::Io(Errno::BUSY));
        }
        // SAFETY: the program's side makes no references to a mapping that is in use, and this one is, by the caller's handle
        // and then by its frames. Frames over the same bytes are all of this loop.
        let frame = || unsafe { Frame::over(mapping, start, len) };
        let context = if once { ONCE } else { 0 };
        let put = if rights.put {
            Some(fabric.open_target(slot, FrameRange::new(frame(), 0, len), context).map_err(|(error, _)| error)?)
        } else {
            None
        };
        let get = rights
            .get
            .then(|| fabric.open_source(slot, FrameRange::new(Rc::new(frame()), 0, len), context))
            .transpose();
        if get.is_err() {
            put.map(|key| fabric.windows().close(key));
        }
        let get = get?;
        for key in [put, get].into_iter().flatten().filter(|_| once) {
            fabric.windows().use_once(key);
        }
        let keys = (put.map_or(0, |key| key.0), get.map_or(0, |key| key.0));
        for session in sessions {
            self.sessions.get_mut(session).map(|state| state.windows.insert(keys));
        }
        if slots.len() > 1 {
            [put, get].into_iter().flatten().for_each(|key| fabric.windows().share(key, slots.clone()));
        }
        if slots.len() == 1 {
            for key in [put, get].into_iter().flatten() {
                fabric.announce(slot, key);
            }
        }
        // Only this end knows whether a window for a single use was used.
        if !once {
            let puts = put.map(|key| fabric.lend_window(reactor, slot, key, mapping, asked.range.clone(), true));
            // A loan for reading seals the memory, and no later peer could be lent it for writing. If this peer could have been but was
            // not, as when it has just died, then this window goes by the stream.
            if puts != Some(false) || !mapping.may_be_lent_for_writing() {
                get.map(|key| fabric.lend_window(reactor, slot, key, mapping, asked.range.clone(), false));
            }
        }
        Ok(Descriptor::new(put, get, len))
    }

    pub(super) fn close_window(
        &mut self,
        fabric: &mut Fabric,
        reactor: &Reactor,
        op: OpSlot,
        sessions: &[Session],
        descriptor: Descriptor,
        mapping: Mapping,
    ) {
        let keys = (descriptor.put_key(), descriptor.get_key());
        let mut recalled = Vec::new();
        for session in sessions {
            let Some(state) = self.sessions.get_mut(session) else { continue };
            state.windows.remove(&(keys.0.0, keys.1.0));
            for key in [keys.0, keys.1] {
                fabric.withdraw(state.fabric, key);
            }
            let lent = [keys.0, keys.1].into_iter().filter(|key| fabric.recall(reactor, state.fabric, *key));
            recalled.extend(lent.map(|key| (state.fabric, key.0)));
        }
        for key in [keys.0, keys.1] {
            if !seeded::is(Bug::ClosedWindowStaysOpen) && matches!(fabric.windows().close(key), Closed::WhenReceived) {
                self.note_filling(key, sessions);
            }
        }
        if recalled.is_empty() || seeded::is(Bug::RecallNotAwaited) {
            return self.linger(op, smallvec![mapping], Ok(Outcome::Done));
        }
        let name = self.closings.closing.insert(Closing { op, mapping, left: recalled.len() });
        self.closings.waiting.extend(recalled.into_iter().map(|window| (window, name)));
    }

    /// A session's peer no longer reaches a window by itself.
    pub(super) fn window_recalled(&mut self, session: SessionId, window: WindowKey) {
        let Some(name) = self.closings.waiting.remove(&(session, window.0)) else { return };
        let Some(closing) = self.closings.closing.get_mut(name) else { return };
        closing.left -= 1;
        if closing.left == 0
            && let Some(Closing { op, mapping, .. }) = self.closings.closing.remove(name)
        {
            self.linger(op, smallvec![mapping], Ok(Outcome::Done));
        }
    }
}
