//! Reads that would take too many frames at once: answered part by part, one at a time, in order.
//!
//! Where chunks are allowed each part is one, so that an error can still be told. Else the reply's header promises all
//! of it, and a part that cannot be read ends the connection.

use byway_reactor::ByteRange;
use byway_service::block::{BlockError, Outcome, Payload, ReadFlags, Step};

use super::{CloseReason, Connection, Context, Expect, Pending, Progress, tag_of};
use crate::limits::READ_PART_BYTES;
use crate::nbd::errno::Errno;
use crate::nbd::flags::CommandFlags;
use crate::nbd::request::Request;

/// How far such a read is.
#[derive(Debug)]
pub(super) struct PartedRead {
    request: Request,
    /// Bytes answered.
    done: u64,
    /// The part that the engine reads: the request's id, and its length.
    asked: Option<(usize, usize)>,
}

impl PartedRead {
    pub(super) fn new(request: Request) -> Self {
        Self { request, done: 0, asked: None }
    }

    /// The length of the next part, where one may have so many bytes.
    fn part(&self, bytes_max: usize) -> usize {
        (self.request.length - self.done).min(bytes_max as u64) as usize
    }
}

impl Connection {
    /// Asks for the next part, when the one before has been sent and its frames are free.
    pub(super) fn step_parts(&mut self, context: &mut Context<'_>) -> Progress {
        let Expect::Parts(read) = &mut self.expect else { return Progress::Waits };
        if read.asked.is_some() || self.sending || !self.out.is_empty() {
            return Progress::Waits;
        }
        let request = read.request;
        let (done, len) = (read.done, read.part(READ_PART_BYTES.min(context.engine.read_bytes_max(context.reactor))));
        // Where the first header promises all bytes, no other reply may come between them.
        if self.in_flight > 0 && !self.in_chunks(&request) {
            return Progress::Waits;
        }
        let id = context.pending.vacant_key();
        let at = request.offset + done;
        let last = done + len as u64 == request.length;
        let request = Request { length: len as u64, ..request };
        let (range, flags) = (ByteRange::new(at, len as u64), ReadFlags { part: !last, ..ReadFlags::default() });
        match self.read(context.reactor, context.engine, range, flags, tag_of(id)) {
            Ok(Step::Now(payload)) => self.push_part(payload, len),
            Ok(Step::Later) => {
                if let Expect::Parts(read) = &mut self.expect {
                    read.asked = Some((id, len));
                }
                let pending = Pending { connection: self.index, request, left: 1, receiving: false, error: None };
                self.note_pending(context, pending);
                return Progress::Waits;
            }
            Ok(Step::Busy | Step::InParts) => {
                self.stalled = true;
                return Progress::Waits;
            }
            Err(error) => self.part_failed(error),
        }
        Progress::Moved
    }

    /// Whether a request of the engine is a part.
    pub(super) fn is_part(&self, id: usize) -> bool {
        matches!(&self.expect, Expect::Parts(read) if read.asked.is_some_and(|(asked, _)| asked == id))
    }

    pub(super) fn part_done(&mut self, outcome: Outcome) {
        let Expect::Parts(read) = &mut self.expect else { return };
        let Some((_, len)) = read.asked.take() else { return };
        match outcome {
            Outcome::Read(Ok(payload)) => self.push_part(payload, len),
            Outcome::Read(Err(error)) | Outcome::Unit(Err(error)) | Outcome::Extents(Err(error)) => {
                self.part_failed(error);
            }
            Outcome::Unit(Ok(())) | Outcome::Extents(Ok(_)) | Outcome::Slice(_) => {}
        }
    }

    fn push_part(&mut self, payload: Payload, len: usize) {
        let Expect::Parts(read) = &mut self.expect else { return };
        let (request, done) = (read.request, read.done);
        read.done += len as u64;
        let last = read.done == request.length;
        if self.in_chunks(&request) {
            let at = request.offset + done;
            self.out.push_head_with(|out| self.replies.read_data(out, request.tag(), at, len as u32, last));
        } else if done == 0 {
            self.out.push_head_with(|out| self.replies.read_whole(out, &request));
        }
        payload.push_to(&mut self.out);
        if last {
            self.expect = Expect::Header;
        }
    }

    fn part_failed(&mut self, error: BlockError) {
        let Expect::Parts(read) = &mut self.expect else { return };
        let request = read.request;
        if read.done > 0 && !self.in_chunks(&request) {
            self.closing = Some(CloseReason::HalfRead(error));
            return;
        }
        let errno = Errno::from_os(error.errno().raw_os_error());
        self.out.push_head_with(|out| self.replies.error(out, request.tag(), errno, &error.to_string()));
        self.expect = Expect::Header;
    }

    pub(super) fn in_chunks(&self, request: &Request) -> bool {
        self.replies.chunks() && !request.flags.has(CommandFlags::DF)
    }
}
