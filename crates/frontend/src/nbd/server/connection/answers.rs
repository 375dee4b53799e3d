//! Results of the engine for a connection's requests, and the replies to them.

use byway_service::block::{BlockError, Engine, Outcome, Payload, Slice};
use slab::Slab;

use super::{Connection, Pending};
use crate::limits::SMALL_WRITE_BYTES_MAX;
use crate::nbd::block_status::Allocation;
use crate::nbd::errno::Errno;
use crate::nbd::request::{Command, Request};

impl Connection {
    /// Takes the end of something that the engine did for request `id`.
    pub(in crate::nbd::server) fn done(
        &mut self,
        engine: &mut Engine,
        pending: &mut Slab<Pending>,
        id: usize,
        outcome: Outcome,
    ) {
        if self.is_part(id) {
            self.forget_pending(pending, id);
            return self.part_done(outcome);
        }
        if let Outcome::Slice(slice) = outcome {
            return self.slice_done(pending, id, slice);
        }
        let request = &mut pending[id];
        request.left -= 1;
        match outcome {
            Outcome::Unit(Ok(())) => {}
            Outcome::Unit(Err(error)) => {
                request.error.get_or_insert(error);
            }
            other => {
                let request = self.forget_pending(pending, id);
                return self.reply(&request, other);
            }
        }
        self.finish_if_done(engine, pending, id);
    }

    pub(super) fn finish_if_done(&mut self, engine: &mut Engine, pending: &mut Slab<Pending>, id: usize) {
        let Pending { left: 0, receiving: false, error, .. } = pending[id] else { return };
        let request = self.forget_pending(pending, id);
        if request.command == Command::Write && request.length > SMALL_WRITE_BYTES_MAX as u64 && error.is_none() {
            engine.note_written(self.volume);
        }
        self.reply(&request, Outcome::Unit(error.map_or(Ok(()), Err)));
    }

    pub(super) fn forget_pending(&mut self, pending: &mut Slab<Pending>, id: usize) -> Request {
        let ended = pending.remove(id);
        self.in_flight -= 1;
        self.in_flight_bytes -= ended.bytes();
        ended.request
    }

    pub(super) fn reply(&mut self, request: &Request, outcome: Outcome) {
        match outcome {
            Outcome::Read(Ok(payload)) => self.reply_data(request, payload),
            Outcome::Extents(Ok(extents)) => {
                let allocations = extents.iter().map(|e| Allocation { length: e.len, hole: e.hole, zero: e.hole });
                self.out.push_head_with(|out| self.replies.block_status(out, request, allocations));
            }
            Outcome::Unit(Ok(())) => self.out.push_head_with(|out| self.replies.success(out, request.tag())),
            Outcome::Read(Err(error)) | Outcome::Extents(Err(error)) | Outcome::Unit(Err(error)) => {
                self.fail(request, error);
            }
            Outcome::Slice(_) => debug_assert!(false, "taken before"),
        }
    }

    /// Answers with a slice of a read, as soon as it is here.
    fn slice_done(&mut self, pending: &mut Slab<Pending>, id: usize, slice: Slice) {
        let Slice { start, payload, last } = slice;
        let request = if last { self.forget_pending(pending, id) } else { pending[id].request };
        let (at, len) = (request.offset + start, payload.len() as u32);
        self.out.push_head_with(|out| self.replies.read_data(out, request.tag(), at, len, last));
        payload.push_to(&mut self.out);
    }

    pub(super) fn reply_data(&mut self, request: &Request, payload: Payload) {
        self.out.push_head_with(|out| self.replies.read_whole(out, request));
        payload.push_to(&mut self.out);
    }

    pub(super) fn fail(&mut self, request: &Request, error: BlockError) {
        let errno = Errno::from_os(error.errno().raw_os_error());
        let message = error.to_string();
        self.out.push_head_with(|out| self.replies.error(out, request.tag(), errno, &message));
    }
}
