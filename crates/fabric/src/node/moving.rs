//! Puts and gets in progress, part by part. In memory that a peer has lent, this end copies, at most [`TURN_BYTES_MAX`]
//! bytes a turn, so that one operation does not keep the driving thread while others have work. The rest is done in the next
//! turns, which follow at once; later operations over the same session wait behind it.

use byway_reactor::Reactor;
use byway_reactor::seeded::{self, Bug};
use smallvec::SmallVec;

use super::Session;
use super::command::Header;
use super::engine::Core;
use super::error::OpError;
use super::memory::HeldSegments;
use super::transfers::{Get, Part, Put, PutTarget, frame, push_part};
use super::wire::PutBody;
use crate::Fabric;
use crate::fabric::Remote;
use crate::limits::TURN_BYTES_MAX;
use crate::slots::{SessionId, Slot};
use crate::windows::WindowKey;
use crate::wire::{Header as WireHeader, Kind};

/// An operation whose parts have not all begun.
pub(super) struct Moving {
    pub(super) what: What,
    pub(super) window: WindowKey,
    pub(super) segments: HeldSegments,
    pub(super) parts: SmallVec<[Part; 1]>,
    /// Parts that have begun.
    pub(super) begun: usize,
}

/// Which operation it is.
pub(super) enum What {
    Put {
        name: Slot<Put>,
        /// The header of the message behind it.
        message: Option<Header>,
        /// The rest of it goes through the stream, behind others there.
        is_behind: bool,
    },
    Get(Slot<Get>),
}

impl Core {
    /// Begins the parts of an operation, as many as this turn may copy.
    pub(super) fn go_on(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Session, mut moving: Moving) {
        let Some(slot) = self.sessions.get(&session).map(|state| state.fabric) else { return };
        while let Some(part) = moving.parts.get(moving.begun) {
            let (at, len) = (Remote { window: moving.window, offset: part.offset }, part.len());
            let is_copied = match &mut moving.what {
                What::Put { is_behind, .. } => {
                    let is_copied = !*is_behind && fabric.is_copied(slot, at, len, true);
                    // The peer refuses what follows a refused part on the same lane.
                    *is_behind |= !is_copied && fabric.goes_by_route(slot, at, len);
                    is_copied
                }
                What::Get(_) => fabric.is_copied(slot, at, len, false),
            };
            if is_copied {
                if self.copied_bytes >= TURN_BYTES_MAX {
                    return self.go_on_later(session, moving);
                }
                self.copied_bytes += len;
            }
            if !self.begin_next(fabric, reactor, session, slot, &mut moving, is_copied) {
                break;
            }
        }
        self.all_begun(moving);
    }

    /// Begins the next part, or of a get that is not copied here all parts. False if nothing more of the operation is to begin.
    fn begin_next(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Session,
        slot: SessionId,
        moving: &mut Moving,
        is_copied: bool,
    ) -> bool {
        let (first, window) = (moving.begun, moving.window);
        match &moving.what {
            What::Put { name, message, is_behind } => {
                let is_last = first + 1 == moving.parts.len();
                let header = message.as_ref().filter(|_| is_last).map(Header::as_slice);
                let header = WireHeader::with_body(Kind::Data, &PutBody::new(name.to_u64(), header));
                let to = PutTarget { session: slot, window, is_behind: *is_behind };
                let pushed = push_part(fabric, reactor, &to, header, &moving.segments, &moving.parts[first]);
                moving.begun += 1;
                if let Err(error) = pushed {
                    moving.begun -= 1;
                    self.end_rest(session, moving, error);
                    return false;
                }
            }
            // The pieces of one get are one use of a window for one use, so they are begun together.
            What::Get(name) => {
                let count = if is_copied { 1 } else { moving.parts.len() - first };
                let mut pieces: SmallVec<[_; 1]> = SmallVec::new();
                for part in &moving.parts[first..first + count] {
                    let mut offset = part.offset;
                    for piece in &part.pieces {
                        pieces.push((offset, frame(&moving.segments, piece)));
                        offset += if seeded::is(Bug::GetPieceAtWrongOffset) { 0 } else { piece.len as u64 };
                    }
                }
                let name = *name;
                moving.begun += count;
                let refused = fabric.get_pieces(reactor, slot, window, pieces, name.to_u64());
                if moving.begun == moving.parts.len() {
                    self.note_mappings(moving);
                }
                for frame in refused {
                    drop(frame);
                    self.get_ended(name, Some(OpError::Full));
                }
            }
        }
        true
    }

    /// Ends the parts that have not begun: no message says that all of the operation is done. A put with a message has taken no
    /// credit of the peer's then.
    pub(super) fn end_rest(&mut self, session: Session, moving: &mut Moving, error: OpError) {
        let rest = moving.parts.drain(moving.begun..).collect::<SmallVec<[Part; 1]>>();
        match &moving.what {
            What::Put { name, message, .. } => {
                rest.iter().for_each(|_| self.part_ended(*name, None, Some(error)));
                if let Some(state) = self.sessions.get_mut(&session).filter(|_| message.is_some()) {
                    state.credits += 1;
                }
            }
            What::Get(name) => {
                let name = *name;
                self.note_mappings(moving);
                let pieces = rest.iter().map(|part| part.pieces.len()).sum();
                (0..pieces).for_each(|_| self.get_ended(name, Some(error)));
            }
        }
    }

    /// All parts have begun, or never will. An operation ends when its memory is noted, and not before: otherwise its waiter could
    /// find it in use.
    pub(super) fn all_begun(&mut self, mut moving: Moving) {
        self.note_mappings(&mut moving);
        if let What::Put { name, .. } = moving.what {
            self.part_ended(name, None, None);
        }
    }

    fn note_mappings(&mut self, moving: &mut Moving) {
        let segments = std::mem::take(&mut moving.segments);
        let mappings = match moving.what {
            What::Put { name, .. } => self.puts.get_mut(name).map(|put| &mut put.mappings),
            What::Get(name) => self.gets.get_mut(name).map(|get| &mut get.mappings),
        };
        if let Some(mappings) = mappings {
            mappings.extend(segments.into_iter().map(|segment| segment.mapping));
        }
    }

    fn go_on_later(&mut self, session: Session, moving: Moving) {
        if let Some(state) = self.sessions.get_mut(&session) {
            debug_assert!(state.moving.is_none(), "one operation of a session is copied part by part at a time");
            state.moving = Some(Box::new(moving));
            self.moving += 1;
            self.note_crowded(session);
        }
    }

    /// What was left of an operation when a turn had copied enough.
    pub(super) fn take_moving(&mut self, session: Session) -> Option<Moving> {
        let moving = self.sessions.get_mut(&session)?.moving.take()?;
        self.moving -= 1;
        Some(*moving)
    }
}
