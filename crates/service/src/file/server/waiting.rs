//! Reads and large writes that wait for frames, fairly between sessions (`host/waiting.rs`).

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::{Fabric, Remote, SessionId};
use byway_reactor::{File, FileRange, Op, Reactor};

use super::super::wire::{CallError, PROTOCOL};
use super::{FileRequest, FileRequestId, Shares, Window};
use crate::host::{At, Feeds, Line, Sessions, Tried, feed};

/// A request that needs a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) request: FileRequestId,
    pub(super) session: SessionId,
    pub(super) len: usize,
    pub(super) begin: Begin,
}

/// What it begins with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Begin {
    /// Reading from the file.
    Read { file: File, offset: u64 },
    /// Getting from the client's window what is to be written.
    Get(Window),
}

struct Feeding<'a> {
    shares: &'a mut Shares,
    sessions: &'a mut Sessions,
}

impl Shares {
    /// Begins a transfer, now or when it is its turn and there are frames.
    pub(super) fn transfer_in_turn(&mut self, at: &mut At<'_>, transfer: Transfer) {
        let free = self.line.is_empty() && !at.sessions.must_wait(at.fabric, at.reactor, transfer.session);
        if !free || !self.try_transfer(at, transfer) {
            self.line.push(at.reactor, transfer.session, transfer);
        }
    }

    /// False if there is no frame.
    fn try_transfer(&mut self, at: &mut At<'_>, Transfer { request, session, len, begin }: Transfer) -> bool {
        let window = match (begin, self.requests.get(request)) {
            (Begin::Get(window), _) => Some(window),
            (Begin::Read { .. }, Some(FileRequest::Read { window, .. })) => *window,
            _ => None,
        };
        let note_begun = |at: &mut At<'_>| {
            if let Some(window) = window.filter(|_| len > SMALL_BYTES_MAX) {
                let (window, put) = (Remote { window: window.key, offset: 0 }, matches!(begin, Begin::Read { .. }));
                at.sessions.note_transfer(at.fabric, session, window, len, put);
            }
        };
        if let Begin::Read { file, offset } = begin
            && self.try_read_direct(at, request, FileRange { file, offset, len })
        {
            note_begun(at);
            return true;
        }
        let Some(into) = at.reactor.frames().alloc(len) else { return false };
        note_begun(at);
        at.sessions.note_held(session, len);
        match begin {
            Begin::Read { file, offset } => {
                at.reactor.submit(Op::Read { file, offset, into, start: 0, len }, self.token(request));
            }
            Begin::Get(window) => {
                let from = Remote { window: window.key, offset: 0 };
                if at.get(session, from, into, PROTOCOL, request.to_u64()).is_err() {
                    at.sessions.note_released(session, len);
                    self.end(at, request, Err(CallError::Busy));
                }
            }
        }
        true
    }

    /// A session has ended: what of it waits is not begun.
    pub(super) fn leave_line(&mut self, at: &mut At<'_>, session: SessionId) {
        let waiting: Vec<_> = self.line.leave(session).collect();
        for transfer in waiting {
            self.end(at, transfer.request, Err(CallError::Busy));
        }
    }

    /// Gives those that wait their turns, as long as there are frames.
    pub(super) fn feed(&mut self, at: &mut At<'_>) {
        if self.line.is_empty() {
            return;
        }
        feed(&mut Feeding { shares: self, sessions: at.sessions }, at.fabric, at.reactor);
        // Not before: what is tried in vain gives frames back too.
        self.given_back = at.reactor.frames().given_back();
    }

    /// Whether something waits, and frames have come back since it was tried.
    pub(super) fn can_feed(&self, reactor: &Reactor) -> bool {
        !self.line.is_empty() && reactor.frames().given_back() != self.given_back
    }
}

impl Feeds<Transfer> for Feeding<'_> {
    fn line(&mut self) -> &mut Line<Transfer> {
        &mut self.shares.line
    }

    fn sessions(&self) -> &Sessions {
        self.sessions
    }

    fn try_one(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, transfer: Transfer) -> Tried<Transfer> {
        let mut at = At { fabric, reactor, sessions: self.sessions };
        if self.shares.try_transfer(&mut at, transfer) {
            Tried::All(transfer.len as u64)
        } else {
            Tried::NoFrames(transfer)
        }
    }
}
