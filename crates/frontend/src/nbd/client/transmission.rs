//! Requests out, replies in.
//!
//! The machine knows the requests in flight, because only they say whether a reply is due, how much data it may bring, and
//! its destination. A cookie is a slot and a generation, so a reply to a request that has ended is noticed.

use zerocopy::big_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

use super::coverage::Coverage;
use crate::limits::{CLIENT_IN_FLIGHT_MAX, REPLY_HEAD_BYTES_MAX};
use crate::nbd::block_status::Allocation;
use crate::nbd::errno::Errno;
use crate::nbd::flags::CommandFlags;
use crate::nbd::request::{Command, Headers, Request, Rules, Violation};
use crate::nbd::wire::{
    BlockStatusExtended, CHUNK_BLOCK_STATUS, CHUNK_BLOCK_STATUS_EXT, CHUNK_ERROR_BIT, CHUNK_ERROR_OFFSET,
    CHUNK_FLAG_DONE, CHUNK_NONE, CHUNK_OFFSET_DATA, CHUNK_OFFSET_HOLE, CompactRequest, EXTENDED_REPLY_MAGIC,
    EXTENDED_REQUEST_MAGIC, ErrorChunk, ExtendedReply, ExtendedRequest, Extent, ExtentExtended, OffsetHole,
    REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, STRUCTURED_REPLY_MAGIC, SimpleReply, StructuredReply,
};

/// Most descriptors in a status chunk (proto.md: a server should not send more).
const EXTENTS_PER_CHUNK_MAX: u64 = 1 << 20;

/// Why a request was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Wait for a reply first.
    #[error("too many requests are in flight")]
    Full,
    /// The export would refuse it.
    #[error("the export does not accept the request: {0}")]
    Violation(#[from] Violation),
}

/// What stands at the front of the received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received<'a> {
    /// Not enough yet; `need` bytes in all, at most [`REPLY_HEAD_BYTES_MAX`].
    Incomplete {
        /// Bytes needed.
        need: usize,
    },
    /// A part of a reply.
    Part {
        /// Of the request.
        cookie: u64,
        /// What it brings.
        content: Content<'a>,
        /// Whether the reply ends with it (with its payload, for [`Content::Data`]): then call
        /// [`ClientTransmission::finish`].
        last: bool,
        /// Bytes to take off.
        taken: usize,
    },
}

/// What a part of a reply brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// `length` bytes follow, which belong at `offset` of the export; inside the request's range.
    Data {
        /// Bytes from the start of the export.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// `length` bytes at `offset` are zeroes.
    Hole {
        /// Bytes from the start of the export.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// The next extent; the first starts at the request's offset. It may end past the request.
    Extent(Allocation),
    /// The request failed, at `offset` or as a whole.
    Failed {
        /// How.
        errno: Errno,
        /// Where, bytes from the start of the export.
        offset: Option<u64>,
        /// The server's words, not always UTF-8.
        message: &'a [u8],
    },
    /// Nothing more.
    Nothing,
}

/// The server broke the protocol: end the connection; everything in flight has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server broke the protocol: {0}")]
pub struct ReplyError(pub &'static str);

#[derive(Debug)]
struct InFlight {
    request: Request,
    content_bytes: u64,
    coverage: Coverage,
    status: bool,
    failed: Option<Errno>,
    ended: bool,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    in_flight: Option<InFlight>,
}

/// A status chunk that is being read.
#[derive(Debug, Clone, Copy)]
struct StatusChunk {
    cookie: u64,
    remaining: u64,
    last: bool,
}

/// The machine of one connection.
#[derive(Debug)]
pub struct ClientTransmission {
    rules: Rules,
    slots: Vec<Slot>,
    free: Vec<u32>,
    status: Option<StatusChunk>,
}

/// The header of a chunk of either size.
struct Chunk {
    last: bool,
    kind: u16,
    cookie: u64,
    length: u64,
    header_bytes: usize,
}

type Parsed<'a> = Result<Received<'a>, ReplyError>;

const fn bad(what: &'static str) -> ReplyError {
    ReplyError(what)
}

impl ClientTransmission {
    /// A machine with room for `depth` requests in flight, at most [`CLIENT_IN_FLIGHT_MAX`].
    pub fn new(rules: Rules, depth: usize) -> ClientTransmission {
        let depth = depth.clamp(1, CLIENT_IN_FLIGHT_MAX);
        let free = (0..depth as u32).rev().collect();
        ClientTransmission {
            rules,
            slots: std::iter::repeat_with(Slot::default).take(depth).collect(),
            free,
            status: None,
        }
    }

    /// What requests are held to.
    pub const fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Requests without a final reply.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slot of a cookie, below the depth: an index for what the driver keeps of a request.
    pub const fn slot(cookie: u64) -> usize {
        (cookie & 0xffff_ffff) as usize
    }

    /// Appends the header of a request to `out` and gives its cookie; a write's `length` bytes must
    /// follow it. DISC is [`ClientTransmission::disconnect`].
    pub fn submit(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
        out: &mut Vec<u8>,
    ) -> Result<u64, SubmitError> {
        let mut request = Request { command, flags, cookie: 0, offset, length };
        self.rules.check(&request)?;
        if self.rules.headers != Headers::Extended && length > u64::from(u32::MAX) {
            let errno = Errno::Overflow;
            return Err(Violation { errno, reason: "longer than a compact request can say" }.into());
        }
        let index = self.free.pop().ok_or(SubmitError::Full)?;
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        request.cookie = u64::from(slot.generation) << 32 | u64::from(index);
        let (coverage, failed) = (Coverage::default(), None);
        let in_flight = InFlight { request, content_bytes: 0, coverage, status: false, failed, ended: false };
        slot.in_flight = Some(in_flight);
        self.write_request(&request, out);
        Ok(request.cookie)
    }

    /// Appends a DISC to `out`; nothing may be sent after it.
    pub fn disconnect(&self, out: &mut Vec<u8>) {
        let (command, flags) = (Command::Disconnect, CommandFlags::NONE);
        self.write_request(&Request { command, flags, cookie: 0, offset: 0, length: 0 }, out);
    }

    /// Ends a request whose last part has come, its payload too: its outcome, and its slot is free
    /// again. `None` if there is no such request, or it has not ended.
    pub fn finish(&mut self, cookie: u64) -> Option<Result<(), Errno>> {
        let in_flight = self.find(cookie).filter(|in_flight| in_flight.ended)?;
        let outcome = in_flight.failed.map_or(Ok(()), Err);
        let index = Self::slot(cookie);
        self.slots[index].in_flight = None;
        self.free.push(index as u32);
        Some(outcome)
    }

    fn write_request(&self, request: &Request, out: &mut Vec<u8>) {
        let (cookie, offset) = (request.cookie.into(), request.offset.into());
        let command = request.command.to_wire().into();
        if self.rules.headers == Headers::Extended {
            let mut flags = request.flags;
            if request.command == Command::Write {
                flags |= CommandFlags::PAYLOAD_LEN;
            }
            let header = ExtendedRequest {
                magic: EXTENDED_REQUEST_MAGIC.into(),
                flags: flags.0.into(),
                command,
                cookie,
                offset,
                length: request.length.into(),
            };
            out.extend_from_slice(header.as_bytes());
        } else {
            let header = CompactRequest {
                magic: REQUEST_MAGIC.into(),
                flags: request.flags.0.into(),
                command,
                cookie,
                offset,
                length: (request.length as u32).into(),
            };
            out.extend_from_slice(header.as_bytes());
        }
    }

    fn find(&mut self, cookie: u64) -> Option<&mut InFlight> {
        let slot = self.slots.get_mut(Self::slot(cookie))?;
        slot.in_flight.as_mut().filter(|in_flight| in_flight.request.cookie == cookie)
    }

    fn expect(&mut self, cookie: u64) -> Result<&mut InFlight, ReplyError> {
        self.find(cookie).filter(|in_flight| !in_flight.ended).ok_or(bad("a reply to a request that is not in flight"))
    }

    /// Judges what is at the front of `bytes`.
    #[inline]
    pub fn parse<'a>(&mut self, bytes: &'a [u8]) -> Result<Received<'a>, ReplyError> {
        if let Some(status) = self.status {
            return self.extent(status, bytes);
        }
        let Some(magic) = bytes.first_chunk::<4>() else {
            return Ok(Received::Incomplete { need: 4 });
        };
        match (u32::from_be_bytes(*magic), self.rules.headers) {
            (SIMPLE_REPLY_MAGIC, Headers::Simple | Headers::Structured) => self.simple(bytes),
            (STRUCTURED_REPLY_MAGIC, Headers::Structured) => {
                let Ok((header, _)) = StructuredReply::ref_from_prefix(bytes) else {
                    return Ok(Received::Incomplete { need: StructuredReply::BYTES });
                };
                let chunk = Chunk {
                    last: header.flags.get() & CHUNK_FLAG_DONE != 0,
                    kind: header.kind.get(),
                    cookie: header.cookie.get(),
                    length: u64::from(header.length.get()),
                    header_bytes: StructuredReply::BYTES,
                };
                self.chunk(&chunk, bytes)
            }
            (EXTENDED_REPLY_MAGIC, Headers::Extended) => {
                let Ok((header, _)) = ExtendedReply::ref_from_prefix(bytes) else {
                    return Ok(Received::Incomplete { need: ExtendedReply::BYTES });
                };
                let chunk = Chunk {
                    last: header.flags.get() & CHUNK_FLAG_DONE != 0,
                    kind: header.kind.get(),
                    cookie: header.cookie.get(),
                    length: header.length.get(),
                    header_bytes: ExtendedReply::BYTES,
                };
                if self.expect(chunk.cookie)?.request.offset != header.offset.get() {
                    return Err(bad("an extended reply with another offset than its request"));
                }
                self.chunk(&chunk, bytes)
            }
            _ => Err(bad("wrong magic in a reply")),
        }
    }

    fn simple<'a>(&mut self, bytes: &[u8]) -> Parsed<'a> {
        let Ok((header, _)) = SimpleReply::ref_from_prefix(bytes) else {
            return Ok(Received::Incomplete { need: SimpleReply::BYTES });
        };
        let (cookie, error) = (header.cookie.get(), header.error.get());
        let structured = self.rules.headers == Headers::Structured;
        let in_flight = self.expect(cookie)?;
        let request = in_flight.request;
        if structured && request.command == Command::Read {
            return Err(bad("a simple reply to a read though structured replies are in use"));
        }
        if request.command == Command::BlockStatus && error == 0 {
            return Err(bad("a block status reply without a status"));
        }
        in_flight.ended = true;
        let content = if error != 0 {
            let errno = Errno::from_wire(error);
            in_flight.failed = Some(errno);
            Content::Failed { errno, offset: None, message: &[] }
        } else if request.command == Command::Read {
            Content::Data { offset: request.offset, length: request.length as u32 }
        } else {
            Content::Nothing
        };
        Ok(Received::Part { cookie, content, last: true, taken: SimpleReply::BYTES })
    }

    fn chunk<'a>(&mut self, chunk: &Chunk, bytes: &'a [u8]) -> Parsed<'a> {
        self.expect(chunk.cookie)?;
        match chunk.kind {
            CHUNK_NONE if chunk.length != 0 || !chunk.last => {
                Err(bad("a NONE chunk that has a payload or is not the last"))
            }
            CHUNK_NONE => self.part(chunk, Content::Nothing, chunk.header_bytes),
            CHUNK_OFFSET_DATA => self.data(chunk, bytes),
            CHUNK_OFFSET_HOLE => self.hole(chunk, bytes),
            CHUNK_BLOCK_STATUS | CHUNK_BLOCK_STATUS_EXT => self.status(chunk, bytes),
            kind if kind & CHUNK_ERROR_BIT != 0 => self.error(chunk, bytes),
            _ => Err(bad("a chunk of an unknown type")),
        }
    }

    /// Gives a part out; with the last one the reply must be complete.
    fn part<'a>(&mut self, chunk: &Chunk, content: Content<'a>, taken: usize) -> Parsed<'a> {
        let (cookie, last) = (chunk.cookie, chunk.last);
        self.end_if(cookie, last)?;
        Ok(Received::Part { cookie, content, last, taken })
    }

    fn end_if(&mut self, cookie: u64, last: bool) -> Result<(), ReplyError> {
        let in_flight = self.expect(cookie)?;
        if !last {
            return Ok(());
        }
        in_flight.ended = true;
        if in_flight.failed.is_some() {
            return Ok(());
        }
        match in_flight.request.command {
            Command::Read if in_flight.content_bytes != in_flight.request.length => {
                Err(bad("a read that succeeded without all of its data"))
            }
            Command::BlockStatus if !in_flight.status => Err(bad("a block status reply without a status")),
            _ => Ok(()),
        }
    }

    /// Accounts for a piece of a read; it must lie inside the request.
    fn content(&mut self, cookie: u64, offset: u64, length: u64) -> Result<(), ReplyError> {
        let in_flight = self.expect(cookie)?;
        let request = in_flight.request;
        if request.command != Command::Read {
            return Err(bad("data in the reply to something other than a read"));
        }
        let inside = offset >= request.offset
            && offset.checked_add(length).is_some_and(|end| end <= request.offset + request.length);
        if length == 0 || !inside {
            return Err(bad("data outside of the read"));
        }
        let all = in_flight.content_bytes + length;
        // A chunk that is the whole read needs no account, and no memory.
        if all > request.length || (length < request.length && !in_flight.coverage.add(offset, offset + length)) {
            return Err(bad("data of a read twice, or in too many pieces without order"));
        }
        in_flight.content_bytes = all;
        Ok(())
    }

    fn data<'a>(&mut self, chunk: &Chunk, bytes: &[u8]) -> Parsed<'a> {
        let taken = chunk.header_bytes + 8;
        let length = chunk.length.checked_sub(8).ok_or(bad("a data chunk without an offset"))?;
        let Ok((offset, _)) = U64::ref_from_prefix(&bytes[chunk.header_bytes..]) else {
            return Ok(Received::Incomplete { need: taken });
        };
        let offset = offset.get();
        self.content(chunk.cookie, offset, length)?;
        // A read is at most the maximum payload, so what lies inside it has 32 bits.
        self.part(chunk, Content::Data { offset, length: length as u32 }, taken)
    }

    fn hole<'a>(&mut self, chunk: &Chunk, bytes: &[u8]) -> Parsed<'a> {
        if chunk.length != OffsetHole::BYTES as u64 {
            return Err(bad("a hole chunk of a wrong length"));
        }
        let taken = chunk.header_bytes + OffsetHole::BYTES;
        let Ok((hole, _)) = OffsetHole::ref_from_prefix(&bytes[chunk.header_bytes..]) else {
            return Ok(Received::Incomplete { need: taken });
        };
        let (offset, length) = (hole.offset.get(), hole.length.get());
        self.content(chunk.cookie, offset, u64::from(length))?;
        self.part(chunk, Content::Hole { offset, length }, taken)
    }

    fn error<'a>(&mut self, chunk: &Chunk, bytes: &'a [u8]) -> Parsed<'a> {
        let limit = (REPLY_HEAD_BYTES_MAX - chunk.header_bytes) as u64;
        if chunk.length < ErrorChunk::BYTES as u64 || chunk.length > limit {
            return Err(bad("an error chunk of a wrong length"));
        }
        let taken = chunk.header_bytes + chunk.length as usize;
        let Some(payload) = bytes.get(chunk.header_bytes..taken) else {
            return Ok(Received::Incomplete { need: taken });
        };
        let Ok((head, rest)) = ErrorChunk::ref_from_prefix(payload) else {
            return Err(bad("an error chunk of a wrong length"));
        };
        let Some((message, rest)) = rest.split_at_checked(head.message_length.get() as usize) else {
            return Err(bad("an error message longer than its chunk"));
        };
        if head.error.get() == 0 {
            return Err(bad("an error chunk without an error"));
        }
        let offset = match U64::ref_from_prefix(rest) {
            Ok((offset, _)) if chunk.kind == CHUNK_ERROR_OFFSET => Some(offset.get()),
            _ if chunk.kind == CHUNK_ERROR_OFFSET => return Err(bad("an error without its offset")),
            _ => None,
        };
        let errno = Errno::from_wire(head.error.get());
        let in_flight = self.expect(chunk.cookie)?;
        in_flight.failed = in_flight.failed.or(Some(errno));
        self.part(chunk, Content::Failed { errno, offset, message }, taken)
    }

    fn status<'a>(&mut self, chunk: &Chunk, bytes: &'a [u8]) -> Parsed<'a> {
        let extended = chunk.kind == CHUNK_BLOCK_STATUS_EXT;
        if extended != (self.rules.headers == Headers::Extended) {
            return Err(bad("a block status chunk of the wrong size"));
        }
        let (head, extent) = if extended {
            (BlockStatusExtended::BYTES, ExtentExtended::BYTES as u64)
        } else {
            (4, Extent::BYTES as u64)
        };
        let extents = chunk.length.saturating_sub(head as u64);
        let remaining = extents / extent;
        if extents == 0 || !extents.is_multiple_of(extent) || remaining > EXTENTS_PER_CHUNK_MAX {
            return Err(bad("a block status chunk of a wrong length"));
        }
        let start = chunk.header_bytes;
        let Some(payload) = bytes.get(start..start + head) else {
            return Ok(Received::Incomplete { need: start + head });
        };
        let context = payload.first_chunk::<4>().map(|id| u32::from_be_bytes(*id));
        if context != self.rules.allocation_context {
            return Err(bad("a block status of a context that was not selected"));
        }
        if extended && payload[4..] != (remaining as u32).to_be_bytes() {
            return Err(bad("a block status chunk with a wrong count"));
        }
        let in_flight = self.expect(chunk.cookie)?;
        let request = in_flight.request;
        let one = request.flags.has(CommandFlags::REQ_ONE);
        if request.command != Command::BlockStatus || in_flight.status || (one && remaining != 1) {
            return Err(bad("a block status that was not asked for"));
        }
        in_flight.status = true;
        let status = StatusChunk { cookie: chunk.cookie, remaining, last: chunk.last };
        self.status = Some(status);
        let cookie = chunk.cookie;
        Ok(Received::Part { cookie, content: Content::Nothing, last: false, taken: start + head })
    }

    fn extent<'a>(&mut self, status: StatusChunk, bytes: &[u8]) -> Parsed<'a> {
        let extended = self.rules.headers == Headers::Extended;
        let taken = if extended { ExtentExtended::BYTES } else { Extent::BYTES };
        let (length, state) = if extended {
            let Ok((extent, _)) = ExtentExtended::ref_from_prefix(bytes) else {
                return Ok(Received::Incomplete { need: taken });
            };
            (extent.length.get(), extent.status.get() as u32)
        } else {
            let Ok((extent, _)) = Extent::ref_from_prefix(bytes) else {
                return Ok(Received::Incomplete { need: taken });
            };
            (u64::from(extent.length.get()), extent.status.get())
        };
        if length == 0 {
            return Err(bad("an empty extent"));
        }
        let remaining = status.remaining - 1;
        self.status = (remaining > 0).then_some(StatusChunk { remaining, ..status });
        let last = status.last && remaining == 0;
        self.end_if(status.cookie, last)?;
        let (hole, zero) = (state & STATE_HOLE != 0, state & STATE_ZERO != 0);
        let content = Content::Extent(Allocation { length, hole, zero });
        Ok(Received::Part { cookie: status.cookie, content, last, taken })
    }
}
