//! The callee's table of the calls of one session.

use byway_fabric::{SessionId, Slot};

use super::{Breach, CallId};
use crate::message::Token;

/// Which way the answer to a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// No part of it was sent: to the caller directly if there is a session with it then, else back.
    Undecided,
    /// Over the session that the call came over.
    Back,
    /// To the caller, over another session.
    Direct(SessionId),
    /// None: the session that a part of it took has ended.
    Lost,
}

/// A call that was not answered.
#[derive(Clone, Debug)]
pub(super) struct Owed {
    generation: u32,
    pub(super) protocol: u8,
    pub(super) cancelled: bool,
    /// The node that answers it now; this one waits to hear of that.
    pub(super) delegated: Option<CallId>,
    /// Of a delegated call: its caller's.
    pub(super) token: Option<Box<Token>>,
    pub(super) way: Way,
}

/// Calls that were not answered, by the low half of their number: it is below the credits granted.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    calls: Vec<Option<Owed>>,
    count: usize,
}

impl Incoming {
    /// A call came; at most `max` may be in flight.
    pub(super) fn begin(&mut self, call: u64, protocol: u8, token: Option<Token>, max: usize) -> Result<(), Breach> {
        let slot = Slot::<Owed>::from_u64(call);
        let index = slot.index as usize;
        if index >= max {
            return Err(Breach::Credit);
        }
        if index >= self.calls.len() {
            self.calls.resize_with(index + 1, || None);
        }
        if self.calls[index].is_some() {
            return Err(Breach::Duplicate);
        }
        let (generation, token) = (slot.generation, token.map(Box::new));
        self.calls[index] =
            Some(Owed { generation, protocol, cancelled: false, delegated: None, token, way: Way::Undecided });
        self.count += 1;
        Ok(())
    }

    pub(super) fn get_mut(&mut self, call: u64) -> Option<&mut Owed> {
        let slot = Slot::<Owed>::from_u64(call);
        self.calls.get_mut(slot.index as usize)?.as_mut().filter(|owed| owed.generation == slot.generation)
    }

    /// The call is answered.
    pub(super) fn end(&mut self, call: u64) -> Option<Owed> {
        self.get_mut(call)?;
        self.count -= 1;
        self.calls[Slot::<Owed>::from_u64(call).index as usize].take()
    }

    /// Where the calls that were delegated are now.
    pub(super) fn delegated(&self) -> impl Iterator<Item = CallId> {
        self.calls.iter().flatten().filter_map(|owed| owed.delegated)
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }
}
