//! Requests, and the rules of an export that they must keep.
//!
//! Both sides use the same rules: the server answers a request that breaks them with an error; byway's client does not send
//! it.

use super::errno::Errno;
use super::flags::{CommandFlags, TransmissionFlags};
use crate::limits::REQUEST_BYTES_MAX;

/// Which headers the two sides agreed on for the transmission phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Headers {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies where there is a payload or an error.
    Structured,
    /// Extended requests and replies.
    Extended,
}

/// What a request does (proto.md, "Request types").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Command {
    /// Read `length` bytes.
    Read = 0,
    /// Write the `length` bytes that follow the header.
    Write = 1,
    /// End the session once everything in flight is done; no reply.
    Disconnect = 2,
    /// Make every write that has been answered durable.
    Flush = 3,
    /// The range is not needed any more.
    Trim = 4,
    /// The range will be needed soon.
    Cache = 5,
    /// Make the range read as zeroes.
    WriteZeroes = 6,
    /// Tell where there are holes and zeroes.
    BlockStatus = 7,
}

impl Command {
    /// The command of a number on the wire.
    pub const fn from_wire(number: u16) -> Option<Command> {
        Some(match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            _ => return None,
        })
    }

    /// The number on the wire.
    pub const fn to_wire(self) -> u16 {
        self as u16
    }

    /// The flags that the command may carry, were all features there.
    const fn flags(self) -> CommandFlags {
        let own = match self {
            Command::Read => CommandFlags::DF.0,
            Command::WriteZeroes => CommandFlags::NO_HOLE.0 | CommandFlags::FAST_ZERO.0,
            Command::BlockStatus => CommandFlags::REQ_ONE.0,
            _ => 0,
        };
        CommandFlags(own | CommandFlags::FUA.0)
    }
}

/// One request, without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub command: Command,
    /// How; never with [`CommandFlags::PAYLOAD_LEN`].
    pub flags: CommandFlags,
    /// Chosen by the client, returned in every reply.
    pub cookie: u64,
    /// Bytes from the start of the export.
    pub offset: u64,
    /// Bytes; above 32 bits only with extended headers.
    pub length: u64,
}

impl Request {
    /// Bytes that follow the header.
    pub const fn payload_bytes(&self) -> u64 {
        match self.command {
            Command::Write => self.length,
            _ => 0,
        }
    }

    /// What a reply repeats.
    pub const fn tag(&self) -> Tag {
        Tag { cookie: self.cookie, offset: self.offset }
    }
}

/// What a reply repeats of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// The client's cookie.
    pub cookie: u64,
    /// The request's offset, which extended replies repeat.
    pub offset: u64,
}

/// Sizes that requests must keep (proto.md, "Size constraints"), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it: a power of two up to 65,536.
    pub minimum: u32,
    /// Below it requests are slow: a power of two, at least 512 and at least the minimum.
    pub preferred: u32,
    /// Largest payload.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// Those that hold when a server says nothing.
    fn default() -> Self {
        BlockSizes { minimum: 1, preferred: 4096, maximum: REQUEST_BYTES_MAX }
    }
}

impl BlockSizes {
    /// Whether the three keep the rules of the protocol.
    pub const fn valid(&self) -> bool {
        self.minimum.is_power_of_two()
            && self.minimum <= 65_536
            && self.preferred.is_power_of_two()
            && self.preferred >= 512
            && self.preferred >= self.minimum
            && self.maximum >= self.preferred
    }
}

/// A request breaks a rule: the error that answers it, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {errno}")]
pub struct Violation {
    /// What the reply says.
    pub errno: Errno,
    /// For a person to read; goes into structured and extended error replies.
    pub reason: &'static str,
}

/// What both sides hold each other to once the handshake is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Which headers are used.
    pub headers: Headers,
    /// Size of the export in bytes, as told in the handshake; a later resize shows at the next one.
    pub size_bytes: u64,
    /// Size constraints.
    pub block: BlockSizes,
    /// What the export can do.
    pub flags: TransmissionFlags,
    /// Id of `base:allocation` in block status replies, if the client selected it.
    pub allocation_context: Option<u32>,
}

const fn violation(errno: Errno, reason: &'static str) -> Result<(), Violation> {
    Err(Violation { errno, reason })
}

impl Rules {
    /// Whether the export accepts the request; the errors are those that proto.md names under
    /// "Error values" and under each command.
    #[inline]
    pub fn check(&self, request: &Request) -> Result<(), Violation> {
        self.check_flags(request)?;
        match request.command {
            Command::Disconnect => Ok(()),
            Command::Flush => self.check_flush(request),
            Command::Write | Command::Trim | Command::WriteZeroes => {
                self.check_writable(request.command)?;
                self.check_range(request)
            }
            Command::Read | Command::Cache | Command::BlockStatus => self.check_range(request),
        }
    }

    #[inline]
    fn check_flags(&self, request: &Request) -> Result<(), Violation> {
        if request.flags == CommandFlags::NONE {
            return Ok(());
        }
        let mut allowed = request.command.flags();
        let gates = [
            (CommandFlags::FUA, TransmissionFlags::SEND_FUA),
            (CommandFlags::DF, TransmissionFlags::SEND_DF),
            (CommandFlags::FAST_ZERO, TransmissionFlags::SEND_FAST_ZERO),
        ];
        for (flag, gate) in gates {
            if !self.flags.has(gate) {
                allowed = allowed.without(flag);
            }
        }
        if request.flags.without(allowed) == CommandFlags::NONE {
            Ok(())
        } else {
            violation(Errno::Invalid, "the command does not take this flag")
        }
    }

    fn check_flush(&self, request: &Request) -> Result<(), Violation> {
        if !self.flags.has(TransmissionFlags::SEND_FLUSH) {
            return violation(Errno::Invalid, "the export does not offer FLUSH");
        }
        if request.offset != 0 || request.length != 0 {
            return violation(Errno::Invalid, "offset and length of a FLUSH must be zero");
        }
        Ok(())
    }

    #[inline]
    fn check_writable(&self, command: Command) -> Result<(), Violation> {
        if self.flags.has(TransmissionFlags::READ_ONLY) {
            return violation(Errno::NotPermitted, "the export is read-only");
        }
        match command {
            Command::Trim if !self.flags.has(TransmissionFlags::SEND_TRIM) => {
                violation(Errno::Invalid, "the export does not offer TRIM")
            }
            Command::WriteZeroes if !self.flags.has(TransmissionFlags::SEND_WRITE_ZEROES) => {
                violation(Errno::Invalid, "the export does not offer WRITE_ZEROES")
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn check_range(&self, request: &Request) -> Result<(), Violation> {
        let maximum = u64::from(self.block.maximum);
        match request.command {
            // Only with chunks may a long read be refused as EOVERFLOW ("Error values").
            Command::Read if request.length > maximum => match self.headers {
                Headers::Simple => {
                    return violation(Errno::Invalid, "longer than the maximum payload");
                }
                _ => return violation(Errno::Overflow, "longer than the maximum payload"),
            },
            Command::Write if request.length > maximum => {
                return violation(Errno::Invalid, "longer than the maximum payload");
            }
            Command::Cache if !self.flags.has(TransmissionFlags::SEND_CACHE) => {
                return violation(Errno::Invalid, "the export does not offer CACHE");
            }
            Command::BlockStatus if self.allocation_context.is_none() => {
                return violation(Errno::Invalid, "no metadata context was selected");
            }
            _ => {}
        }
        // What a zero length does is left to the server; refusing it spares every reply the special
        // case of an empty chunk, which the protocol forbids.
        if request.length == 0 {
            return violation(Errno::Invalid, "the length is zero");
        }
        let past_end = request.offset.checked_add(request.length).is_none_or(|end| end > self.size_bytes);
        if past_end {
            return match request.command {
                Command::Write | Command::WriteZeroes => violation(Errno::NoSpace, "the range ends past the export"),
                _ => violation(Errno::Invalid, "the range ends past the export"),
            };
        }
        if (request.offset | request.length) & u64::from(self.block.minimum - 1) != 0 {
            return violation(Errno::Invalid, "not a multiple of the minimum block");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules {
            headers: Headers::Structured,
            size_bytes: 1 << 30,
            block: BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 },
            flags: TransmissionFlags(0xdfd),
            allocation_context: Some(1),
        }
    }

    fn request(command: Command, flags: CommandFlags, offset: u64, length: u64) -> Request {
        Request { command, flags, cookie: 1, offset, length }
    }

    fn errno(rules: &Rules, request: Request) -> Option<Errno> {
        rules.check(&request).err().map(|violation| violation.errno)
    }

    #[test]
    fn good_requests_pass() {
        let rules = rules();
        for command in 0..8 {
            let command = Command::from_wire(command).unwrap();
            let length = if command == Command::Flush { 0 } else { 4096 };
            assert_eq!(rules.check(&request(command, CommandFlags::FUA, 0, length)), Ok(()));
        }
        let zero = CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO;
        assert_eq!(rules.check(&request(Command::WriteZeroes, zero, 0, 1 << 30)), Ok(()));
        assert_eq!(rules.check(&request(Command::Read, CommandFlags::DF, (1 << 30) - 512, 512)), Ok(()));
    }

    #[test]
    fn ranges_are_bounded_and_aligned() {
        let rules = rules();
        let none = CommandFlags::NONE;
        for (command, past_end) in [
            (Command::Read, Errno::Invalid),
            (Command::Trim, Errno::Invalid),
            (Command::Cache, Errno::Invalid),
            (Command::BlockStatus, Errno::Invalid),
            (Command::Write, Errno::NoSpace),
            (Command::WriteZeroes, Errno::NoSpace),
        ] {
            assert_eq!(errno(&rules, request(command, none, 1 << 30, 512)), Some(past_end));
            assert_eq!(errno(&rules, request(command, none, u64::MAX - 511, 512)), Some(past_end));
            assert_eq!(errno(&rules, request(command, none, 0, 0)), Some(Errno::Invalid));
            assert_eq!(errno(&rules, request(command, none, 1, 512)), Some(Errno::Invalid));
            assert_eq!(errno(&rules, request(command, none, 0, 511)), Some(Errno::Invalid));
        }
        assert_eq!(errno(&rules, request(Command::Flush, none, 512, 0)), Some(Errno::Invalid));
    }

    #[test]
    fn payloads_are_bounded() {
        let mut rules = rules();
        let none = CommandFlags::NONE;
        assert_eq!(errno(&rules, request(Command::Read, none, 0, 2 << 20)), Some(Errno::Overflow));
        assert_eq!(errno(&rules, request(Command::Write, none, 0, 2 << 20)), Some(Errno::Invalid));
        rules.headers = Headers::Simple;
        assert_eq!(errno(&rules, request(Command::Read, none, 0, 2 << 20)), Some(Errno::Invalid));
    }

    #[test]
    fn what_was_not_offered_is_refused() {
        let mut rules = rules();
        rules.flags = TransmissionFlags::HAS_FLAGS;
        rules.allocation_context = None;
        let none = CommandFlags::NONE;
        for command in [Command::Trim, Command::Cache, Command::WriteZeroes, Command::BlockStatus] {
            assert_eq!(errno(&rules, request(command, none, 0, 512)), Some(Errno::Invalid));
        }
        assert_eq!(errno(&rules, request(Command::Flush, none, 0, 0)), Some(Errno::Invalid));
        assert_eq!(errno(&rules, request(Command::Write, CommandFlags::FUA, 0, 512)), Some(Errno::Invalid));
        assert_eq!(errno(&rules, request(Command::Read, CommandFlags::DF, 0, 512)), Some(Errno::Invalid));
        assert_eq!(errno(&rules, request(Command::Read, CommandFlags(1 << 9), 0, 512)), Some(Errno::Invalid));
        rules.flags |= TransmissionFlags::READ_ONLY;
        for command in [Command::Write, Command::Trim, Command::WriteZeroes] {
            assert_eq!(errno(&rules, request(command, none, 0, 512)), Some(Errno::NotPermitted));
        }
    }
}
