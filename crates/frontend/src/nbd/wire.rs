//! The layouts and numbers of NBD; every field is big endian and no struct has padding.
//!
//! docs/wire.md draws the byte maps.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First magic of a server's greeting, `NBDMAGIC`.
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second magic of a newstyle greeting and the magic of every option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second magic of an oldstyle greeting, which byway refuses.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Magic of an option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// `NBD_REQUEST_MAGIC`, of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// `NBD_EXTENDED_REQUEST_MAGIC`.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// `NBD_SIMPLE_REPLY_MAGIC`.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// `NBD_STRUCTURED_REPLY_MAGIC`.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// `NBD_EXTENDED_REPLY_MAGIC`.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Zeroes after the reply to `NBD_OPT_EXPORT_NAME`, unless both sides do without.
pub const EXPORT_NAME_ZEROES_BYTES: usize = 124;

/// Handshake flag (16 bits, server) and client flag (32 bits): fixed newstyle.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag and client flag: no zeroes after the reply to `NBD_OPT_EXPORT_NAME`.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// `NBD_OPT_EXPORT_NAME`
pub const OPT_EXPORT_NAME: u32 = 1;
/// `NBD_OPT_ABORT`
pub const OPT_ABORT: u32 = 2;
/// `NBD_OPT_LIST`
pub const OPT_LIST: u32 = 3;
/// `NBD_OPT_STARTTLS`
pub const OPT_STARTTLS: u32 = 5;
/// `NBD_OPT_INFO`
pub const OPT_INFO: u32 = 6;
/// `NBD_OPT_GO`
pub const OPT_GO: u32 = 7;
/// `NBD_OPT_STRUCTURED_REPLY`
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// `NBD_OPT_LIST_META_CONTEXT`
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// `NBD_OPT_SET_META_CONTEXT`
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// `NBD_OPT_EXTENDED_HEADERS`
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// `NBD_REP_ACK`
pub const REP_ACK: u32 = 1;
/// `NBD_REP_SERVER`
pub const REP_SERVER: u32 = 2;
/// `NBD_REP_INFO`
pub const REP_INFO: u32 = 3;
/// `NBD_REP_META_CONTEXT`
pub const REP_META_CONTEXT: u32 = 4;
/// The bit that marks a reply as an error.
pub const REP_ERROR_BIT: u32 = 1 << 31;
/// `NBD_REP_ERR_UNSUP`
pub const REP_ERR_UNSUP: u32 = REP_ERROR_BIT + 1;
/// `NBD_REP_ERR_POLICY`
pub const REP_ERR_POLICY: u32 = REP_ERROR_BIT + 2;
/// `NBD_REP_ERR_INVALID`
pub const REP_ERR_INVALID: u32 = REP_ERROR_BIT + 3;
/// `NBD_REP_ERR_TLS_REQD`
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR_BIT + 5;
/// `NBD_REP_ERR_UNKNOWN`
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR_BIT + 6;
/// `NBD_REP_ERR_SHUTDOWN`
pub const REP_ERR_SHUTDOWN: u32 = REP_ERROR_BIT + 7;
/// `NBD_REP_ERR_TOO_BIG`
pub const REP_ERR_TOO_BIG: u32 = REP_ERROR_BIT + 9;
/// `NBD_REP_ERR_EXT_HEADER_REQD`
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERROR_BIT + 10;

/// `NBD_INFO_EXPORT`
pub const INFO_EXPORT: u16 = 0;
/// `NBD_INFO_NAME`
pub const INFO_NAME: u16 = 1;
/// `NBD_INFO_DESCRIPTION`
pub const INFO_DESCRIPTION: u16 = 2;
/// `NBD_INFO_BLOCK_SIZE`
pub const INFO_BLOCK_SIZE: u16 = 3;

/// `NBD_REPLY_FLAG_DONE`: the last chunk of a reply.
pub const CHUNK_FLAG_DONE: u16 = 1 << 0;
/// `NBD_REPLY_TYPE_NONE`
pub const CHUNK_NONE: u16 = 0;
/// `NBD_REPLY_TYPE_OFFSET_DATA`
pub const CHUNK_OFFSET_DATA: u16 = 1;
/// `NBD_REPLY_TYPE_OFFSET_HOLE`
pub const CHUNK_OFFSET_HOLE: u16 = 2;
/// `NBD_REPLY_TYPE_BLOCK_STATUS`
pub const CHUNK_BLOCK_STATUS: u16 = 5;
/// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`
pub const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
/// The bit that marks a chunk as an error.
pub const CHUNK_ERROR_BIT: u16 = 1 << 15;
/// `NBD_REPLY_TYPE_ERROR`
pub const CHUNK_ERROR: u16 = CHUNK_ERROR_BIT + 1;
/// `NBD_REPLY_TYPE_ERROR_OFFSET`
pub const CHUNK_ERROR_OFFSET: u16 = CHUNK_ERROR_BIT + 2;

/// The one metadata context that byway knows.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// `NBD_STATE_HOLE` of `base:allocation`.
pub const STATE_HOLE: u32 = 1 << 0;
/// `NBD_STATE_ZERO` of `base:allocation`.
pub const STATE_ZERO: u32 = 1 << 1;

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident, $size:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
        impl $name {
            /// Bytes on the wire.
            pub const BYTES: usize = $size;
        }
    };
}

layout! {
    /// What a newstyle server sends first.
    Greeting, 18 {
        /// [`NBD_MAGIC`]
        magic: U64,
        /// [`OPTION_MAGIC`]
        option_magic: U64,
        /// Handshake flags.
        flags: U16,
    }
}
layout! {
    /// Before every option.
    OptionHeader, 16 {
        /// [`OPTION_MAGIC`]
        magic: U64,
        /// `NBD_OPT_*`
        option: U32,
        /// Bytes of the body that follows.
        length: U32,
    }
}
layout! {
    /// Before every reply to an option.
    OptionReplyHeader, 20 {
        /// [`OPTION_REPLY_MAGIC`]
        magic: U64,
        /// The option that is answered.
        option: U32,
        /// `NBD_REP_*`
        kind: U32,
        /// Bytes of the body that follows.
        length: U32,
    }
}
layout! {
    /// The reply to `NBD_OPT_EXPORT_NAME`, before its zeroes.
    ExportNameReply, 10 {
        /// Size of the export in bytes.
        size: U64,
        /// Transmission flags.
        flags: U16,
    }
}
layout! {
    /// Body of an `NBD_REP_INFO` of type `NBD_INFO_EXPORT`.
    InfoExport, 12 {
        /// [`INFO_EXPORT`]
        kind: U16,
        /// Size of the export in bytes.
        size: U64,
        /// Transmission flags.
        flags: U16,
    }
}
layout! {
    /// Body of an `NBD_REP_INFO` of type `NBD_INFO_BLOCK_SIZE`.
    InfoBlockSize, 14 {
        /// [`INFO_BLOCK_SIZE`]
        kind: U16,
        /// Minimum block, bytes.
        minimum: U32,
        /// Preferred block, bytes.
        preferred: U32,
        /// Maximum payload, bytes.
        maximum: U32,
    }
}
layout! {
    /// A request without extended headers; a write's payload follows.
    CompactRequest, 28 {
        /// [`REQUEST_MAGIC`]
        magic: U32,
        /// Command flags.
        flags: U16,
        /// `NBD_CMD_*`
        command: U16,
        /// Chosen by the client, returned in the reply.
        cookie: U64,
        /// Bytes from the start of the export.
        offset: U64,
        /// Bytes.
        length: U32,
    }
}
layout! {
    /// A request with extended headers; with the PAYLOAD_LEN flag, `length` bytes follow.
    ExtendedRequest, 32 {
        /// [`EXTENDED_REQUEST_MAGIC`]
        magic: U32,
        /// Command flags.
        flags: U16,
        /// `NBD_CMD_*`
        command: U16,
        /// Chosen by the client, returned in the reply.
        cookie: U64,
        /// Bytes from the start of the export.
        offset: U64,
        /// Bytes of the payload or of the effect.
        length: U64,
    }
}
layout! {
    /// A reply in one piece; the data of a successful read follow.
    SimpleReply, 16 {
        /// [`SIMPLE_REPLY_MAGIC`]
        magic: U32,
        /// Zero or an error number.
        error: U32,
        /// That of the request.
        cookie: U64,
    }
}
layout! {
    /// One chunk of a structured reply; `length` bytes follow.
    StructuredReply, 20 {
        /// [`STRUCTURED_REPLY_MAGIC`]
        magic: U32,
        /// [`CHUNK_FLAG_DONE`] or zero.
        flags: U16,
        /// `NBD_REPLY_TYPE_*`
        kind: U16,
        /// That of the request.
        cookie: U64,
        /// Bytes that follow.
        length: U32,
    }
}
layout! {
    /// One chunk of an extended reply; `length` bytes follow.
    ExtendedReply, 32 {
        /// [`EXTENDED_REPLY_MAGIC`]
        magic: U32,
        /// [`CHUNK_FLAG_DONE`] or zero.
        flags: U16,
        /// `NBD_REPLY_TYPE_*`
        kind: U16,
        /// That of the request.
        cookie: U64,
        /// That of the request.
        offset: U64,
        /// Bytes that follow.
        length: U64,
    }
}
layout! {
    /// Payload of `NBD_REPLY_TYPE_OFFSET_HOLE`.
    OffsetHole, 12 {
        /// Bytes from the start of the export.
        offset: U64,
        /// Bytes that read as zeroes.
        length: U32,
    }
}
layout! {
    /// Start of the payload of every error chunk; the message follows, then, in
    /// `NBD_REPLY_TYPE_ERROR_OFFSET`, a 64-bit offset.
    ErrorChunk, 6 {
        /// Error number.
        error: U32,
        /// Bytes of the message.
        message_length: U16,
    }
}
layout! {
    /// One descriptor of `NBD_REPLY_TYPE_BLOCK_STATUS`; a 32-bit context id stands before them.
    Extent, 8 {
        /// Bytes.
        length: U32,
        /// Flags of the context.
        status: U32,
    }
}
layout! {
    /// Start of the payload of `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
    BlockStatusExtended, 8 {
        /// Context id.
        context: U32,
        /// Descriptors that follow.
        count: U32,
    }
}
layout! {
    /// One descriptor of `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
    ExtentExtended, 16 {
        /// Bytes.
        length: U64,
        /// Flags of the context.
        status: U64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        use std::fmt::Write;
        bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    #[test]
    fn handshake_bytes() {
        let greeting = Greeting {
            magic: NBD_MAGIC.into(),
            option_magic: OPTION_MAGIC.into(),
            flags: (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).into(),
        };
        assert_eq!(greeting.as_bytes(), b"NBDMAGICIHAVEOPT\x00\x03");
        let option = OptionHeader { magic: OPTION_MAGIC.into(), option: OPT_GO.into(), length: 6.into() };
        assert_eq!(option.as_bytes(), b"IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x06");
        let reply = OptionReplyHeader {
            magic: OPTION_REPLY_MAGIC.into(),
            option: OPT_GO.into(),
            kind: REP_ERR_UNKNOWN.into(),
            length: 0.into(),
        };
        assert_eq!(hex(reply.as_bytes()), "0003e889045565a9000000078000000600000000");
        let export = InfoExport { kind: INFO_EXPORT.into(), size: 0x0102_0304.into(), flags: 0x0be5.into() };
        assert_eq!(hex(export.as_bytes()), "000000000000010203040be5");
        let block = InfoBlockSize {
            kind: INFO_BLOCK_SIZE.into(),
            minimum: 512.into(),
            preferred: 4096.into(),
            maximum: 0x0200_0000.into(),
        };
        assert_eq!(hex(block.as_bytes()), "0003000002000000100002000000");
    }

    #[test]
    fn request_bytes() {
        let compact = CompactRequest {
            magic: REQUEST_MAGIC.into(),
            flags: 1.into(),
            command: 6.into(),
            cookie: 0x1122_3344_5566_7788.into(),
            offset: 0x1000.into(),
            length: 0x200.into(),
        };
        assert_eq!(hex(compact.as_bytes()), "25609513000100061122334455667788000000000000100000000200");
        let extended = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: 0x21.into(),
            command: 1.into(),
            cookie: 0x1122_3344_5566_7788.into(),
            offset: 0x1000.into(),
            length: 0x200.into(),
        };
        assert_eq!(hex(extended.as_bytes()), "21e41c7100210001112233445566778800000000000010000000000000000200");
    }

    #[test]
    fn reply_bytes() {
        let simple = SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: 28.into(), cookie: 1.into() };
        assert_eq!(hex(simple.as_bytes()), "674466980000001c0000000000000001");
        let structured = StructuredReply {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags: CHUNK_FLAG_DONE.into(),
            kind: CHUNK_ERROR_OFFSET.into(),
            cookie: 1.into(),
            length: 14.into(),
        };
        assert_eq!(hex(structured.as_bytes()), "668e33ef0001800200000000000000010000000e");
        let extended = ExtendedReply {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: CHUNK_FLAG_DONE.into(),
            kind: CHUNK_BLOCK_STATUS_EXT.into(),
            cookie: 1.into(),
            offset: 2.into(),
            length: 24.into(),
        };
        assert_eq!(hex(extended.as_bytes()), "6e8a278c00010006000000000000000100000000000000020000000000000018");
    }
}
