//! The server's transmission phase: requests out of bytes.
//!
//! [`Transmission::parse`] takes one header off the front of the received bytes. It keeps nothing and allocates nothing, so a
//! driver can walk over a receive buffer with many requests in it. A write's payload follows its header, and the driver moves
//! it. The answers are written with [`super::reply::Replies`].

use zerocopy::FromBytes;

use super::flags::CommandFlags;
use super::request::{Command, Headers, Request, Rules, Tag, Violation};
use super::wire::{CompactRequest, EXTENDED_REQUEST_MAGIC, ExtendedRequest, REQUEST_MAGIC};
use crate::limits::REQUEST_BYTES_MAX;

/// What stands at the front of the received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// Not a whole header yet; it has `need` bytes in all.
    Incomplete {
        /// Bytes of the header.
        need: usize,
    },
    /// A request that the export accepts.
    Request {
        /// What to do; [`Request::payload_bytes`] bytes follow the header.
        request: Request,
        /// Bytes to take off.
        header_bytes: usize,
    },
    /// A request to answer with an error.
    Rejected {
        /// To encode the reply with.
        tag: Tag,
        /// What to answer.
        violation: Violation,
        /// Bytes to take off.
        header_bytes: usize,
        /// Bytes after the header to throw away before the next request. The reply may go out
        /// before they have come.
        drain_bytes: u64,
    },
    /// The client broke the protocol and the next message cannot be found: end the connection.
    Bad(ProtocolError),
}

/// Why a connection must end; the client's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A request does not start as it must.
    #[error("client sent request magic {0:#010x}; it lost its place in the stream or ignores what was negotiated")]
    Magic(u32),
    /// A payload too long to be thrown away.
    #[error("client announced a payload of {length} bytes; the limit is {limit}")]
    PayloadTooLong {
        /// Bytes announced.
        length: u64,
        /// Bytes allowed.
        limit: u64,
    },
}

/// Reads requests by the rules that the handshake left.
#[derive(Debug, Clone, Copy)]
pub struct Transmission {
    rules: Rules,
}

/// A header of either size, before it is judged.
struct RawRequest {
    flags: CommandFlags,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u64,
    header_bytes: usize,
}

impl Transmission {
    /// A parser for a connection whose handshake ended with `rules`.
    pub const fn new(rules: Rules) -> Transmission {
        Transmission { rules }
    }

    /// What the connection's requests are held to.
    pub const fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Bytes of every request header of this connection.
    pub const fn header_bytes(&self) -> usize {
        match self.rules.headers {
            Headers::Extended => ExtendedRequest::BYTES,
            Headers::Simple | Headers::Structured => CompactRequest::BYTES,
        }
    }

    /// Judges the request at the front of `bytes`.
    #[inline]
    pub fn parse(&self, bytes: &[u8]) -> Parsed {
        let raw = match self.rules.headers {
            Headers::Extended => read_extended(bytes),
            Headers::Simple | Headers::Structured => read_compact(bytes),
        };
        match raw {
            Ok(Some(raw)) => self.judge(&raw),
            Ok(None) => Parsed::Incomplete { need: self.header_bytes() },
            Err(error) => Parsed::Bad(error),
        }
    }

    #[inline]
    fn judge(&self, raw: &RawRequest) -> Parsed {
        let tag = Tag { cookie: raw.cookie, offset: raw.offset };
        let command = Command::from_wire(raw.command);
        if command == Some(Command::Disconnect) {
            // Nothing may follow and there is no reply, so nothing else in it matters.
            let flags = CommandFlags::NONE;
            let request = Request { command: Command::Disconnect, flags, cookie: raw.cookie, offset: 0, length: 0 };
            return Parsed::Request { request, header_bytes: raw.header_bytes };
        }
        let extended = self.rules.headers == Headers::Extended;
        let write = command == Some(Command::Write);
        let announced = extended && raw.flags.has(CommandFlags::PAYLOAD_LEN);
        // With extended headers a write must say that it has a payload; QEMU 10 does not, and sends one all the same.
        let drain_bytes = if write || announced { raw.length } else { 0 };
        let limit = u64::from(self.rules.block.maximum.max(REQUEST_BYTES_MAX));
        if drain_bytes > limit {
            return Parsed::Bad(ProtocolError::PayloadTooLong { length: drain_bytes, limit });
        }
        let reject = |violation| Parsed::Rejected { tag, violation, header_bytes: raw.header_bytes, drain_bytes };
        let Some(command) = command else {
            return reject(Violation { errno: super::errno::Errno::Invalid, reason: "unknown command" });
        };
        // The flag is only in place on a write: the server does not offer the payload form of
        // BLOCK_STATUS, and on any other command the rules refuse it as unknown.
        let flags = if announced && write { raw.flags.without(CommandFlags::PAYLOAD_LEN) } else { raw.flags };
        let request = Request { command, flags, cookie: raw.cookie, offset: raw.offset, length: raw.length };
        match self.rules.check(&request) {
            Ok(()) => Parsed::Request { request, header_bytes: raw.header_bytes },
            Err(violation) => reject(violation),
        }
    }
}

/// A wrong magic is an error as soon as its four bytes are there, however short the rest.
fn early_magic(bytes: &[u8], magic: u32) -> Result<Option<RawRequest>, ProtocolError> {
    match bytes.first_chunk::<4>() {
        Some(front) if u32::from_be_bytes(*front) != magic => Err(ProtocolError::Magic(u32::from_be_bytes(*front))),
        _ => Ok(None),
    }
}

#[inline]
fn read_compact(bytes: &[u8]) -> Result<Option<RawRequest>, ProtocolError> {
    let Ok((header, _)) = CompactRequest::ref_from_prefix(bytes) else {
        return early_magic(bytes, REQUEST_MAGIC);
    };
    if header.magic.get() != REQUEST_MAGIC {
        return Err(ProtocolError::Magic(header.magic.get()));
    }
    Ok(Some(RawRequest {
        flags: CommandFlags(header.flags.get()),
        command: header.command.get(),
        cookie: header.cookie.get(),
        offset: header.offset.get(),
        length: u64::from(header.length.get()),
        header_bytes: CompactRequest::BYTES,
    }))
}

#[inline]
fn read_extended(bytes: &[u8]) -> Result<Option<RawRequest>, ProtocolError> {
    let Ok((header, _)) = ExtendedRequest::ref_from_prefix(bytes) else {
        return early_magic(bytes, EXTENDED_REQUEST_MAGIC);
    };
    if header.magic.get() != EXTENDED_REQUEST_MAGIC {
        return Err(ProtocolError::Magic(header.magic.get()));
    }
    Ok(Some(RawRequest {
        flags: CommandFlags(header.flags.get()),
        command: header.command.get(),
        cookie: header.cookie.get(),
        offset: header.offset.get(),
        length: header.length.get(),
        header_bytes: ExtendedRequest::BYTES,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::super::errno::Errno;
    use super::super::flags::TransmissionFlags;
    use super::super::request::BlockSizes;
    use super::*;

    fn transmission(headers: Headers) -> Transmission {
        Transmission::new(Rules {
            headers,
            size_bytes: 1 << 40,
            block: BlockSizes::default(),
            flags: TransmissionFlags(0xdfd),
            allocation_context: Some(1),
        })
    }

    fn compact(flags: u16, command: u16, offset: u64, length: u32) -> Vec<u8> {
        let (magic, cookie) = (REQUEST_MAGIC.into(), 9.into());
        CompactRequest {
            magic,
            flags: flags.into(),
            command: command.into(),
            cookie,
            offset: offset.into(),
            length: length.into(),
        }
        .as_bytes()
        .to_vec()
    }

    fn extended(flags: u16, command: u16, offset: u64, length: u64) -> Vec<u8> {
        let (magic, cookie) = (EXTENDED_REQUEST_MAGIC.into(), 9.into());
        ExtendedRequest {
            magic,
            flags: flags.into(),
            command: command.into(),
            cookie,
            offset: offset.into(),
            length: length.into(),
        }
        .as_bytes()
        .to_vec()
    }

    fn drained(parsed: Parsed) -> (Errno, u64) {
        match parsed {
            Parsed::Rejected { violation, drain_bytes, tag, .. } => {
                assert_eq!(tag.cookie, 9);
                (violation.errno, drain_bytes)
            }
            other => panic!("not rejected: {other:?}"),
        }
    }

    #[test]
    fn requests_of_both_sizes() {
        let bytes = compact(1, 1, 4096, 512);
        let Parsed::Request { request, header_bytes: 28 } = transmission(Headers::Simple).parse(&bytes) else {
            panic!("refused");
        };
        assert_eq!((request.command, request.flags), (Command::Write, CommandFlags::FUA));
        assert_eq!((request.cookie, request.offset, request.payload_bytes()), (9, 4096, 512));
        let bytes = extended(0x20, 1, 4096, 512);
        let Parsed::Request { request, header_bytes: 32 } = transmission(Headers::Extended).parse(&bytes) else {
            panic!("refused");
        };
        assert_eq!((request.flags, request.payload_bytes()), (CommandFlags::NONE, 512));
        let bytes = extended(0, 6, 0, 1 << 40);
        let parsed = transmission(Headers::Extended).parse(&bytes);
        assert!(matches!(parsed, Parsed::Request { request, .. } if request.length == 1 << 40));
    }

    #[test]
    fn a_rejected_write_is_drained() {
        let simple = transmission(Headers::Simple);
        assert_eq!(drained(simple.parse(&compact(0, 1, 1 << 40, 512))), (Errno::NoSpace, 512));
        assert_eq!(drained(simple.parse(&compact(0x20, 1, 0, 512))), (Errno::Invalid, 512));
        assert_eq!(drained(simple.parse(&compact(0x20, 0, 0, 512))), (Errno::Invalid, 0));
        assert_eq!(drained(simple.parse(&compact(0, 99, 0, 512))), (Errno::Invalid, 0));
    }

    #[test]
    fn an_unwanted_payload_is_drained() {
        let transmission = transmission(Headers::Extended);
        assert_eq!(drained(transmission.parse(&extended(0x20, 7, 0, 12))), (Errno::Invalid, 12));
        assert_eq!(drained(transmission.parse(&extended(0x20, 0, 0, 512))), (Errno::Invalid, 512));
        assert_eq!(drained(transmission.parse(&extended(0x20, 99, 0, 512))), (Errno::Invalid, 512));
        assert_eq!(drained(transmission.parse(&extended(0, 99, 0, 1 << 50))), (Errno::Invalid, 0));
    }

    #[test]
    fn what_cannot_be_skipped_ends_the_connection() {
        let simple = transmission(Headers::Simple);
        let too_long = Parsed::Bad(ProtocolError::PayloadTooLong {
            length: u64::from(u32::MAX),
            limit: u64::from(REQUEST_BYTES_MAX),
        });
        assert_eq!(simple.parse(&compact(0, 1, 0, u32::MAX)), too_long);
        assert_eq!(simple.parse(b"HTTP"), Parsed::Bad(ProtocolError::Magic(0x4854_5450)));
        assert_eq!(simple.parse(b"HTT"), Parsed::Incomplete { need: 28 });
        let over = Parsed::Bad(ProtocolError::Magic(EXTENDED_REQUEST_MAGIC));
        assert_eq!(simple.parse(&extended(0, 0, 0, 512)), over);
    }

    #[test]
    fn disconnect_is_never_refused() {
        let parsed = transmission(Headers::Extended).parse(&extended(0xffff, 2, 7, u64::MAX));
        let Parsed::Request { request, .. } = parsed else { panic!("refused: {parsed:?}") };
        assert_eq!((request.command, request.length), (Command::Disconnect, 0));
    }

    proptest! {
        #[test]
        fn accepted_requests_keep_the_rules(
            headers in prop::sample::select(vec![Headers::Simple, Headers::Structured, Headers::Extended]),
            flags in 0u16..64, command in 0u16..10, offset in any::<u64>(), length in any::<u64>(),
        ) {
            let transmission = transmission(headers);
            let bytes = match headers {
                Headers::Extended => extended(flags, command, offset, length),
                _ => compact(flags, command, offset, length as u32),
            };
            match transmission.parse(&bytes) {
                Parsed::Request { request, header_bytes } => {
                    prop_assert_eq!(header_bytes, bytes.len());
                    prop_assert_eq!(transmission.rules().check(&request), Ok(()));
                    prop_assert!(request.payload_bytes() <= u64::from(REQUEST_BYTES_MAX));
                    prop_assert!(!request.flags.has(CommandFlags::PAYLOAD_LEN));
                }
                Parsed::Rejected { drain_bytes, .. } => {
                    prop_assert!(drain_bytes <= u64::from(REQUEST_BYTES_MAX));
                }
                Parsed::Bad(_) => {}
                Parsed::Incomplete { .. } => prop_assert!(false, "a whole header was there"),
            }
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
                let transmission = transmission(headers);
                if let Parsed::Incomplete { need } = transmission.parse(&bytes) {
                    prop_assert!(need > bytes.len());
                }
            }
        }
    }
}
