//! The messages of the call protocol: bodies of the fabric's `Call`, `Reply`, `Data`, `Notice`, `Cancel`, `NoticeCredit`
//! and `Protocols`. docs/wire.md draws the byte maps.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use byway_fabric::wire::BODY_BYTES;

use crate::limits::INLINE_BYTES;

/// A node's name: random, new for each process.
pub type NodeId = [u8; 16];

/// Body of a `Call` or a `Notice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CallBody {
    /// The call's number in its session, 56 bits, chosen by the caller: the low 32 bits are below the credits that the callee
    /// granted. 0 in a notice.
    pub call: [u8; 7],
    /// Bytes of arguments; zeroes follow them.
    pub inline_len: u8,
    /// The method of the protocol.
    pub method: U16,
    /// The protocol.
    pub protocol: u8,
    /// Windows at the start of the payload.
    pub windows: u8,
    /// Milliseconds that the caller waits from now on; 0 for no limit.
    pub deadline_ms: U32,
    /// The arguments.
    pub arguments: [u8; INLINE_BYTES],
}

/// Body of a `Reply`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReplyBody {
    /// The call.
    pub call: U64,
    /// 0 for success, below [`Status::FIRST`] the protocol's own, else a [`Status`].
    pub status: U16,
    /// Bytes of result; zeroes follow them.
    pub inline_len: u8,
    /// Zero.
    pub reserved: u8,
    /// Payload bytes of the whole answer, in this message and in every `Data` of the call.
    pub total: U32,
    /// The result.
    pub result: [u8; INLINE_BYTES],
}

/// Body of a `Data` that carries a part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DataBody {
    /// The call.
    pub call: U64,
    /// The caller's token, if the sender is not the node that was called ([`FLAG_TOKEN`](byway_fabric::wire::FLAG_TOKEN)); else
    /// zeroes.
    pub token: Token,
    /// Zero.
    pub reserved: [u8; 32],
}

/// Body of a `Cancel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CancelBody {
    /// The call.
    pub call: U64,
    /// Zero.
    pub reserved: [u8; 72],
}

/// Body of a `NoticeCredit`: the receiver may send `credits` more notices of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CreditBody {
    /// The protocol.
    pub protocol: u8,
    /// Zero.
    pub reserved: [u8; 3],
    /// Notices.
    pub credits: U32,
    /// Zero.
    pub reserved_end: [u8; 72],
}

/// Body of a `Protocols`, the first message of either end. Its payload is a list of [`ProtocolEntry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ProtocolsBody {
    /// The sender's name. A claim: nothing proves it.
    pub node: NodeId,
    /// The sender's name for this session, for tokens.
    pub session: U64,
    /// Entries in the payload.
    pub count: U16,
    /// Zero.
    pub reserved: [u8; 54],
}

/// The protocols that the sender of a `Protocols` supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ProtocolEntry {
    /// The protocol.
    pub protocol: u8,
    /// 1 if the sender serves it; 0 if it only calls.
    pub serves: u8,
    /// Oldest version spoken.
    pub version_min: U16,
    /// Newest version spoken.
    pub version_max: U16,
    /// Calls that the receiver may have in flight at the sender.
    pub calls: U16,
    /// Notices that the receiver may send before it gets more credit.
    pub notices: U16,
}

/// The right to answer a call, told to a third node. It precedes the payload of a delegated `Call`, and that of the `Reply` that
/// the third node sends to the caller; in a `Data` it is part of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Token {
    /// The caller.
    pub caller: NodeId,
    /// The caller's name for the session that the call went over.
    pub session: U64,
    /// The call's number in that session.
    pub call: U64,
    /// A keyed hash of `call`; the key is the session's nonce, which only its two ends know.
    pub secret: U64,
}

/// Bytes of a [`Token`].
pub const TOKEN_BYTES: usize = size_of::<Token>();

const _: () = assert!(size_of::<CallBody>() == BODY_BYTES && size_of::<ReplyBody>() == BODY_BYTES);
const _: () = assert!(size_of::<DataBody>() == BODY_BYTES && size_of::<CancelBody>() == BODY_BYTES);
const _: () = assert!(size_of::<CreditBody>() == BODY_BYTES && size_of::<ProtocolsBody>() == BODY_BYTES);
const _: () = assert!(size_of::<ProtocolEntry>() == 10 && TOKEN_BYTES == 40);

/// Up to 64 bytes that travel in a header: arguments, or a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inline {
    bytes: [u8; INLINE_BYTES],
    len: u8,
}

impl Inline {
    /// None.
    pub const EMPTY: Self = Self { bytes: [0; INLINE_BYTES], len: 0 };

    /// These bytes; `None` if there are more than [`INLINE_BYTES`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut inline = Self { bytes: [0; INLINE_BYTES], len: bytes.len() as u8 };
        inline.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(inline)
    }

    /// As they lie in a header: all 64 bytes, and how many of them count. `None` if that is more.
    pub fn from_wire(bytes: &[u8; INLINE_BYTES], len: u8) -> Option<Self> {
        (usize::from(len) <= INLINE_BYTES).then_some(Self { bytes: *bytes, len })
    }

    /// All 64 bytes, with zeroes behind those that count.
    pub fn padded(&self) -> &[u8; INLINE_BYTES] {
        &self.bytes
    }
}

impl std::ops::Deref for Inline {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The number of a call in seven bytes.
pub fn call_number(bytes: [u8; 7]) -> u64 {
    let mut number = [0; 8];
    number[..7].copy_from_slice(&bytes);
    u64::from_le_bytes(number)
}

/// A status that any callee may answer, whatever the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum Status {
    /// The callee does not serve the protocol.
    #[error("the peer does not serve the protocol")]
    UnknownProtocol = 0xff00,
    /// The callee does not know the method.
    #[error("the peer does not know the method")]
    UnknownMethod = 0xff01,
    /// The two ends have no version of the protocol in common.
    #[error("the peer speaks other versions of the protocol")]
    Version = 0xff02,
    /// The arguments, windows or payload have the wrong form.
    #[error("the peer did not understand the call")]
    Malformed = 0xff03,
    /// The callee has no memory or no place in a queue for the call now.
    #[error("the peer is busy; try again")]
    Busy = 0xff04,
    /// The callee's program dropped the call without an answer.
    #[error("the peer dropped the call without an answer")]
    Abandoned = 0xff05,
    /// The call was delegated, and the session with the node that had it ended.
    #[error("the call was delegated to a node whose session has ended")]
    DelegateLost = 0xff06,
    /// To the node that delegated the call: its caller has the answer.
    #[error("the caller was answered directly")]
    AnsweredDirectly = 0xff07,
}

impl Status {
    /// The lowest status that is not a protocol's own.
    pub const FIRST: u16 = 0xff00;

    /// The status of that number.
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            0xff00 => Self::UnknownProtocol,
            0xff01 => Self::UnknownMethod,
            0xff02 => Self::Version,
            0xff03 => Self::Malformed,
            0xff04 => Self::Busy,
            0xff05 => Self::Abandoned,
            0xff06 => Self::DelegateLost,
            0xff07 => Self::AnsweredDirectly,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn bodies_have_these_bytes() {
        let call = CallBody {
            call: [1, 2, 3, 4, 5, 6, 7],
            inline_len: 8,
            method: U16::new(0x0a09),
            protocol: 11,
            windows: 12,
            deadline_ms: U32::new(0x100f_0e0d),
            arguments: [0xaa; 64],
        };
        let mut golden: Vec<u8> = (1..=16).collect();
        golden.extend([0xaa; 64]);
        assert_eq!(call.as_bytes(), golden);
        assert_eq!(call_number(call.call), 0x0007_0605_0403_0201);
        let reply = ReplyBody {
            call: U64::new(0x0807_0605_0403_0201),
            status: U16::new(0x0a09),
            inline_len: 11,
            reserved: 12,
            total: U32::new(0x100f_0e0d),
            result: [0xaa; 64],
        };
        assert_eq!(reply.as_bytes(), golden);
        let token =
            Token { caller: [1; 16], session: U64::new(2), call: U64::new(3), secret: U64::new(0x0807_0605_0403_0201) };
        let mut golden = vec![1; 16];
        golden.extend([2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(token.as_bytes(), golden);
        let data = DataBody { call: U64::new(9), token, reserved: [0; 32] };
        assert_eq!(data.as_bytes()[..8], [9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(data.as_bytes()[8..48], golden);
        let mut protocols = ProtocolsBody::new_zeroed();
        (protocols.node, protocols.session, protocols.count) = ([7; 16], U64::new(1), U16::new(2));
        assert_eq!(protocols.as_bytes()[14..28], [7, 7, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        let entry = ProtocolEntry {
            protocol: 1,
            serves: 2,
            version_min: U16::new(0x0403),
            version_max: U16::new(0x0605),
            calls: U16::new(0x0807),
            notices: U16::new(0x0a09),
        };
        assert_eq!(entry.as_bytes(), (1..=10).collect::<Vec<u8>>());
        let credit = CreditBody { protocol: 5, reserved: [0; 3], credits: U32::new(6), reserved_end: [0; 72] };
        assert_eq!(credit.as_bytes()[..9], [5, 0, 0, 0, 6, 0, 0, 0, 0]);
    }

    #[test]
    fn statuses_keep_their_numbers() {
        let known = (0..=u16::MAX).filter_map(|number| Some((number, Status::from_number(number)? as u16)));
        let known: Vec<_> = known.collect();
        assert_eq!(known.len(), 8);
        assert!(known.iter().all(|(number, again)| number == again && *number >= Status::FIRST));
    }

    #[test]
    fn inline_bytes_are_bounded() {
        assert_eq!(Inline::new(&[1; 65]), None);
        assert_eq!(Inline::from_wire(&[1; 64], 65), None);
        let inline = Inline::new(b"abc").expect("three bytes fit");
        assert_eq!((&*inline, inline.padded()[3]), (&b"abc"[..], 0));
        assert_eq!(Inline::from_wire(inline.padded(), 3), Some(inline));
    }
}
