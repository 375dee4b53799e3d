//! A user's request as commands on the wire: one or several, each no longer than the export accepts.

use std::rc::Rc;

use byway_reactor::{Extent, Frame};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Answer, Request};

use super::error::RequestError;
use super::{Completed, LONG_COMMAND_BYTES_MAX};
use crate::limits::EXTENTS_PER_REPLY_MAX;
use crate::nbd::block_status::Allocation;
use crate::nbd::errno::Errno;
use crate::nbd::flags::{CommandFlags, TransmissionFlags};
use crate::nbd::request::{Command, Headers, Rules, Violation};

/// Zeroes that are written out because the export has no command for them, in one command.
const ZEROES_BYTES_MAX: u64 = 1 << 20;

/// A request under way.
#[derive(Debug)]
pub(super) struct NbdRequest {
    tag: u64,
    command: Command,
    flags: CommandFlags,
    offset: u64,
    len: u64,
    /// Bytes of it that have been asked for.
    asked: u64,
    all_asked: bool,
    /// Commands in flight.
    parts: u32,
    pub(super) into: Option<Frame>,
    from: Option<Rc<Frame>>,
    extents: Vec<Extent>,
    covered: u64,
    failed: Option<RequestError>,
}

/// The next command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) command: Command,
    pub(super) flags: CommandFlags,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Where in the request it starts.
    pub(super) start: u64,
}

/// What a write sends behind its header.
pub(super) enum Payload<'a> {
    Frame(&'a Rc<Frame>),
    Zeroes,
}

fn flag(on: bool, flag: CommandFlags) -> CommandFlags {
    if on { flag } else { CommandFlags::NONE }
}

impl NbdRequest {
    /// Takes a request apart; one that needs nothing of the server is answered at once.
    pub(super) fn new(tag: u64, request: Request<Frame, Rc<Frame>>, rules: &Rules) -> Result<Self, Completed> {
        let none = CommandFlags::NONE;
        let fua = |durable| flag(durable, CommandFlags::FUA);
        let (mut into, mut from) = (None, None);
        let (command, flags, offset, len) = match request {
            Request::Read { offset, len, into: frame } => {
                into = Some(frame);
                (Command::Read, none, offset, len as u64)
            }
            Request::Write { offset, len, from: frame, durable } => {
                from = Some(frame);
                (Command::Write, fua(durable), offset, len as u64)
            }
            Request::Flush => (Command::Flush, none, 0, 0),
            Request::Trim { offset, len, durable } => (Command::Trim, fua(durable), offset, len),
            Request::Zero { offset, len, flags } => (zero_command(flags, rules), zero_flags(flags, rules), offset, len),
            Request::Extents { offset, len } => (Command::BlockStatus, none, offset, len),
            Request::Prefetch { offset, len } => (Command::Cache, none, offset, len),
        };
        let (asked, all_asked, parts, covered) = (0, false, 0, 0);
        let extents = Vec::new();
        let mut request = Self {
            tag,
            command,
            flags,
            offset,
            len,
            asked,
            all_asked,
            parts,
            into,
            from,
            extents,
            covered,
            failed: None,
        };
        let room = request.into.as_ref().map(Frame::len).or(request.from.as_ref().map(|frame| frame.len()));
        if room.is_some_and(|room| (room as u64) < len) {
            let reason = "its memory is shorter than the range";
            request.failed = Some(Violation { errno: Errno::Invalid, reason }.into());
            return Err(request.complete());
        }
        if request.needs_nothing(rules) { Err(request.complete()) } else { Ok(request) }
    }

    /// Whether there is nothing to ask the server for; then the answer is in place.
    fn needs_nothing(&mut self, rules: &Rules) -> bool {
        let has = |flag| rules.flags.has(flag);
        match self.command {
            // Without the command the server keeps nothing back that a flush would make durable, as far as it tells.
            Command::Flush => !has(TransmissionFlags::SEND_FLUSH),
            Command::Trim => self.len == 0 || !has(TransmissionFlags::SEND_TRIM),
            Command::Cache => self.len == 0 || !has(TransmissionFlags::SEND_CACHE),
            Command::BlockStatus if rules.allocation_context.is_none() => {
                self.extents.push(Extent { len: self.len, hole: false });
                true
            }
            _ => self.len == 0,
        }
    }

    /// Whether its payload is to be received where it belongs.
    pub(super) fn is_large_read(&self, small_bytes_max: u64) -> Option<bool> {
        (self.command == Command::Read).then_some(self.len > small_bytes_max)
    }

    /// The next command, unless all have been sent.
    pub(super) fn next_part(&self, rules: &Rules) -> Option<Part> {
        if self.all_asked || self.failed.is_some() {
            return None;
        }
        let minimum = u64::from(rules.block.minimum);
        let longest = match self.command {
            Command::Write if self.from.is_none() => ZEROES_BYTES_MAX.min(rules.block.maximum.into()).max(minimum),
            Command::Read | Command::Write => rules.block.maximum.into(),
            Command::BlockStatus if rules.headers == Headers::Extended => u64::MAX,
            _ => LONG_COMMAND_BYTES_MAX,
        };
        let (command, flags, start) = (self.command, self.flags, self.asked);
        Some(Part { command, flags, offset: self.offset + start, len: (self.len - start).min(longest), start })
    }

    /// A part was sent. Whether there are more.
    pub(super) fn sent(&mut self, part: &Part) -> bool {
        self.parts += 1;
        self.asked += part.len;
        // The answer to a list of extents may be shorter than the range: its user asks again.
        self.all_asked = self.asked >= self.len || self.command == Command::BlockStatus;
        !self.all_asked
    }

    pub(super) fn payload(&self) -> Option<Payload<'_>> {
        (self.command == Command::Write).then(|| self.from.as_ref().map_or(Payload::Zeroes, Payload::Frame))
    }

    /// Where in the frame a byte of the export belongs.
    pub(super) fn position(&self, offset: u64) -> usize {
        (offset - self.offset) as usize
    }

    /// A range reads as zeroes. False if the frame is not here.
    pub(super) fn clear(&mut self, offset: u64, len: u32) -> bool {
        let start = self.position(offset);
        let end = start + len as usize;
        let frame = self.into.as_mut().filter(|frame| end <= frame.len());
        frame.map(|frame| frame.fill_range(start..end, 0)).is_some()
    }

    /// The next extent of the answer, cut to the range that was asked for.
    pub(super) fn extent(&mut self, allocation: Allocation) {
        let len = allocation.length.min(self.len - self.covered);
        self.covered += len;
        // A hole that does not read as zeroes must be read like data.
        let hole = allocation.zero;
        let full = self.extents.len() == EXTENTS_PER_REPLY_MAX;
        match self.extents.last_mut() {
            Some(last) if last.hole == hole => last.len += len,
            // The list may end anywhere, so it ends here.
            _ if full => self.covered = self.len,
            _ if len > 0 => self.extents.push(Extent { len, hole }),
            _ => {}
        }
    }

    pub(super) fn fail(&mut self, error: RequestError) {
        self.failed.get_or_insert(error);
    }

    /// A part has ended. Whether the request has.
    pub(super) fn ended(&mut self) -> bool {
        self.parts -= 1;
        self.is_over()
    }

    /// Whether it would still send, had it not failed.
    pub(super) fn is_cut_short(&self) -> bool {
        !self.all_asked
    }

    /// Whether nothing is in flight and nothing will be sent.
    pub(super) fn is_over(&self) -> bool {
        self.parts == 0 && (self.all_asked || self.failed.is_some())
    }

    /// Its end.
    pub(super) fn complete(self) -> Completed {
        let result = match self.failed {
            Some(error) => Err(error),
            None if self.command == Command::BlockStatus => Ok(Answer::Extents(self.extents)),
            None => Ok(Answer::Unit),
        };
        Completed { tag: self.tag, result, buffer: self.into }
    }
}

/// Zeroes are written out where the export has no command for them; if they are to be fast, the command is refused.
fn zero_command(flags: ZeroFlags, rules: &Rules) -> Command {
    let writes = !flags.fast && !rules.flags.has(TransmissionFlags::SEND_WRITE_ZEROES);
    if writes { Command::Write } else { Command::WriteZeroes }
}

fn zero_flags(flags: ZeroFlags, rules: &Rules) -> CommandFlags {
    let fua = flag(flags.durable, CommandFlags::FUA);
    if zero_command(flags, rules) == Command::Write {
        return fua;
    }
    fua | flag(flags.keep_space, CommandFlags::NO_HOLE) | flag(flags.fast, CommandFlags::FAST_ZERO)
}
