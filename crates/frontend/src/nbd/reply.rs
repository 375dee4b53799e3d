//! The server's replies: headers onto a send buffer.
//!
//! Every function only appends header bytes to `out`; a read's data follow by the fastest path,
//! and are never copied here. The driver asks for a reply ("this read whole", "this failed"), and the
//! negotiated headers decide its form.

use zerocopy::IntoBytes;
use zerocopy::big_endian::U64;

use super::errno::Errno;
use super::request::{Command, Headers, Request, Rules, Tag};
use super::wire::{
    CHUNK_ERROR, CHUNK_ERROR_OFFSET, CHUNK_FLAG_DONE, CHUNK_NONE, CHUNK_OFFSET_DATA, CHUNK_OFFSET_HOLE,
    EXTENDED_REPLY_MAGIC, ErrorChunk, ExtendedReply, OffsetHole, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
    SimpleReply, StructuredReply,
};
use crate::limits::NAME_BYTES_MAX;

/// Writes reply headers by the rules that the handshake left.
#[derive(Debug, Clone, Copy)]
pub struct Replies {
    rules: Rules,
}

impl Replies {
    /// An encoder for a connection whose handshake ended with `rules`.
    pub const fn new(rules: Rules) -> Replies {
        Replies { rules }
    }

    pub(super) const fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Whether a read may be answered in several chunks; if not, only [`Replies::read_whole`] will
    /// do. A read with the DF flag must be answered in one in any case.
    pub const fn chunks(&self) -> bool {
        !matches!(self.rules.headers, Headers::Simple)
    }

    /// Most bytes that [`Replies::read_whole`], [`Replies::read_data`], [`Replies::read_hole`],
    /// [`Replies::read_end`] or [`Replies::success`] append.
    pub const HEADER_BYTES_MAX: usize = ExtendedReply::BYTES + OffsetHole::BYTES;

    /// The command (any but READ and BLOCK_STATUS) succeeded.
    #[inline]
    pub fn success(&self, out: &mut Vec<u8>, tag: Tag) {
        match self.rules.headers {
            // With structured replies both are allowed where there is no payload; the simple one is
            // shorter.
            Headers::Simple | Headers::Structured => simple(out, tag.cookie, 0),
            Headers::Extended => self.chunk(out, tag, CHUNK_NONE, true, 0),
        }
    }

    /// The request failed as a whole. `message` is for a person and goes out where there is room
    /// for it (not in simple replies), cut to [`NAME_BYTES_MAX`]; it may be empty.
    ///
    /// After [`Replies::read_whole`] of the same request with simple replies nothing but ending the
    /// connection tells the client of a failure.
    pub fn error(&self, out: &mut Vec<u8>, tag: Tag, errno: Errno, message: &str) {
        if self.rules.headers == Headers::Simple {
            return simple(out, tag.cookie, errno.to_wire());
        }
        let message = cut(message);
        let length = ErrorChunk::BYTES + message.len();
        self.chunk(out, tag, CHUNK_ERROR, true, length as u32);
        error_payload(out, errno, message);
    }

    /// The request failed at `offset` (bytes from the start of the export, inside the request);
    /// what was sent for other parts of it stands. With simple replies the request as a whole fails.
    pub fn error_at(&self, out: &mut Vec<u8>, tag: Tag, errno: Errno, offset: u64, message: &str) {
        if self.rules.headers == Headers::Simple {
            return simple(out, tag.cookie, errno.to_wire());
        }
        let message = cut(message);
        let length = ErrorChunk::BYTES + message.len() + 8;
        self.chunk(out, tag, CHUNK_ERROR_OFFSET, true, length as u32);
        error_payload(out, errno, message);
        out.extend_from_slice(U64::new(offset).as_bytes());
    }

    /// The whole of a read in one piece: [`Request::length`] bytes of data must follow. Say it only
    /// when they can no longer fail to come: the chunk is marked as the last one.
    #[inline]
    pub fn read_whole(&self, out: &mut Vec<u8>, request: &Request) {
        debug_assert!(request.command == Command::Read && request.length <= u64::from(u32::MAX - 8));
        match self.rules.headers {
            Headers::Simple => simple(out, request.cookie, 0),
            _ => self.read_data(out, request.tag(), request.offset, request.length as u32, true),
        }
    }

    /// A piece of a read: `length` bytes (not zero, at most the maximum payload) of data from
    /// `offset` must follow. `last` ends the reply. Needs [`Replies::chunks`].
    #[inline]
    pub fn read_data(&self, out: &mut Vec<u8>, tag: Tag, offset: u64, length: u32, last: bool) {
        debug_assert!(self.chunks() && length != 0 && length <= u32::MAX - 8);
        self.chunk(out, tag, CHUNK_OFFSET_DATA, last, length + 8);
        out.extend_from_slice(U64::new(offset).as_bytes());
    }

    /// A piece of a read that is all zeroes: nothing follows. Needs [`Replies::chunks`], and no DF
    /// flag unless it is the whole read.
    pub fn read_hole(&self, out: &mut Vec<u8>, tag: Tag, offset: u64, length: u32, last: bool) {
        debug_assert!(self.chunks() && length != 0);
        self.chunk(out, tag, CHUNK_OFFSET_HOLE, last, OffsetHole::BYTES as u32);
        let hole = OffsetHole { offset: offset.into(), length: length.into() };
        out.extend_from_slice(hole.as_bytes());
    }

    /// Ends a read whose pieces were not marked as last. Needs [`Replies::chunks`].
    pub fn read_end(&self, out: &mut Vec<u8>, tag: Tag) {
        debug_assert!(self.chunks());
        self.chunk(out, tag, CHUNK_NONE, true, 0);
    }

    #[inline]
    pub(super) fn chunk(&self, out: &mut Vec<u8>, tag: Tag, kind: u16, last: bool, length: u32) {
        let flags = if last { CHUNK_FLAG_DONE } else { 0 };
        if self.rules.headers == Headers::Extended {
            let header = ExtendedReply {
                magic: EXTENDED_REPLY_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: tag.cookie.into(),
                offset: tag.offset.into(),
                length: u64::from(length).into(),
            };
            out.extend_from_slice(header.as_bytes());
        } else {
            let header = StructuredReply {
                magic: STRUCTURED_REPLY_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: tag.cookie.into(),
                length: length.into(),
            };
            out.extend_from_slice(header.as_bytes());
        }
    }
}

#[inline]
fn simple(out: &mut Vec<u8>, cookie: u64, error: u32) {
    let header = SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
    out.extend_from_slice(header.as_bytes());
}

fn error_payload(out: &mut Vec<u8>, errno: Errno, message: &str) {
    let chunk = ErrorChunk { error: errno.to_wire().into(), message_length: (message.len() as u16).into() };
    out.extend_from_slice(chunk.as_bytes());
    out.extend_from_slice(message.as_bytes());
}

/// The front of a text, at most as long as the protocol's strings may be.
pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(NAME_BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use super::super::flags::{CommandFlags, TransmissionFlags};
    use super::super::request::BlockSizes;
    use super::*;

    fn replies(headers: Headers) -> Replies {
        Replies::new(Rules {
            headers,
            size_bytes: 1 << 30,
            block: BlockSizes::default(),
            flags: TransmissionFlags::HAS_FLAGS,
            allocation_context: None,
        })
    }

    const TAG: Tag = Tag { cookie: 0x0102_0304_0506_0708, offset: 0x1000 };
    const COOKIE: &[u8] = &[1, 2, 3, 4, 5, 6, 7, 8];

    fn written(headers: Headers, write: impl Fn(&Replies, &mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&replies(headers), &mut out);
        out
    }

    #[test]
    fn success_in_each_form() {
        let success = |replies: &Replies, out: &mut Vec<u8>| replies.success(out, TAG);
        let simple = [b"\x67\x44\x66\x98\0\0\0\0", COOKIE].concat();
        assert_eq!(written(Headers::Simple, success), simple);
        assert_eq!(written(Headers::Structured, success), simple);
        let extended = [b"\x6e\x8a\x27\x8c\0\x01\0\0", COOKIE, b"\0\0\0\0\0\0\x10\0", &[0; 8]].concat();
        assert_eq!(written(Headers::Extended, success), extended);
    }

    #[test]
    fn a_read_in_each_form() {
        let request = Request {
            command: Command::Read,
            flags: CommandFlags::NONE,
            cookie: TAG.cookie,
            offset: 0x1000,
            length: 512,
        };
        let whole = |replies: &Replies, out: &mut Vec<u8>| replies.read_whole(out, &request);
        let offset = b"\0\0\0\0\0\0\x10\0";
        assert_eq!(written(Headers::Simple, whole), [b"\x67\x44\x66\x98\0\0\0\0", COOKIE].concat());
        let structured = [b"\x66\x8e\x33\xef\0\x01\0\x01", COOKIE, b"\0\0\x02\x08", offset].concat();
        assert_eq!(written(Headers::Structured, whole), structured);
        let extended = [b"\x6e\x8a\x27\x8c\0\x01\0\x01", COOKIE, offset, b"\0\0\0\0\0\0\x02\x08", offset].concat();
        assert_eq!(written(Headers::Extended, whole), extended);
    }

    #[test]
    fn a_hole_and_the_end() {
        let pieces = |replies: &Replies, out: &mut Vec<u8>| {
            replies.read_hole(out, TAG, 0x2000, 0x200, false);
            replies.read_end(out, TAG);
        };
        let expected = [
            b"\x66\x8e\x33\xef\0\0\0\x02",
            COOKIE,
            b"\0\0\0\x0c\0\0\0\0\0\0\x20\0\0\0\x02\0",
            b"\x66\x8e\x33\xef\0\x01\0\0",
            COOKIE,
            b"\0\0\0\0",
        ]
        .concat();
        assert_eq!(written(Headers::Structured, pieces), expected);
    }

    #[test]
    fn errors_in_each_form() {
        let error = |replies: &Replies, out: &mut Vec<u8>| replies.error(out, TAG, Errno::NoSpace, "full");
        assert_eq!(written(Headers::Simple, error), [b"\x67\x44\x66\x98\0\0\0\x1c", COOKIE].concat());
        let structured = [b"\x66\x8e\x33\xef\0\x01\x80\x01", COOKIE, b"\0\0\0\x0a\0\0\0\x1c\0\x04full"].concat();
        assert_eq!(written(Headers::Structured, error), structured);
        let at = |replies: &Replies, out: &mut Vec<u8>| {
            replies.error_at(out, TAG, Errno::InputOutput, 0x1200, "");
        };
        let structured =
            [b"\x66\x8e\x33\xef\0\x01\x80\x02", COOKIE, b"\0\0\0\x0e\0\0\0\x05\0\0\0\0\0\0\0\0\x12\0"].concat();
        assert_eq!(written(Headers::Structured, at), structured);
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let message = format!("a{}", "é".repeat(NAME_BYTES_MAX));
        let out = written(Headers::Structured, |replies, out| {
            replies.error(out, TAG, Errno::Invalid, &message);
        });
        assert_eq!(out.len(), StructuredReply::BYTES + ErrorChunk::BYTES + NAME_BYTES_MAX - 1);
    }
}
