//! The fabric's messages: a header of 128 bytes, and a payload if the header says so. docs/wire.md draws the byte maps.
//!
//! All fields are little-endian. A header has the same form for every kind; the layer above uses its body of 80 bytes. A
//! payload follows its header at once; on a bulk lane it is received straight into the window that the header names, so only
//! the header must be examined first.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::header_checksum;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 128;
/// Bytes of a header that belong to the layer above.
pub const BODY_BYTES: usize = 80;
/// First bytes of the body of `Hello` and `Welcome`: `bywayFAB`.
pub const MAGIC: [u8; 8] = *b"bywayFAB";
/// The oldest and the newest version of the wire that this program speaks.
pub const VERSIONS: std::ops::RangeInclusive<u16> = 2..=2;

/// Feature bit: payloads carry a CRC32C, which is checked.
pub const FEATURE_PAYLOAD_CHECKSUM: u32 = 1;
/// Every feature that this program knows.
pub const FEATURES: u32 = FEATURE_PAYLOAD_CHECKSUM;

/// Header flag: `payload_crc` holds the payload's CRC32C.
pub const FLAG_PAYLOAD_CHECKSUM: u8 = 1;

/// Header flag: the payload begins with a [`Grant`] for the sender's window that the header names.
pub const FLAG_GRANT: u8 = 2;
/// Header flag: the payload lies in the window already; nothing of it follows.
pub const FLAG_PLACED: u8 = 4;
/// Header flag: a token of a delegated call is in the body of a `Data`, or at the start of the payload of a `Call` or `Reply`.
pub const FLAG_TOKEN: u8 = 8;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// First message of a lane, from the client: [`Hello`].
    Hello = 1,
    /// The server's answer: [`Welcome`].
    Welcome = 2,
    /// The server's other answer, and the last message: [`Refuse`].
    Refuse = 3,
    /// A call of the layer above.
    Call = 4,
    /// The answer to a call.
    Reply = 5,
    /// A payload for a window, and nothing else.
    Data = 6,
    /// Asks for a piece of the peer's window, to be sent as `Data`.
    Pull = 7,
    /// A payload or pull named a window that is not there: nothing was touched.
    Nack = 8,
    /// Are you there?
    Ping = 9,
    /// Yes.
    Pong = 10,
    /// A notice: a call without an answer.
    Notice = 11,
    /// The sender ends the session, and says why: [`Refuse`].
    Goodbye = 12,
    /// A message of a program to a program: see [`node`](crate::node).
    Message = 13,
    /// So many messages more may be sent.
    Credit = 14,
    /// A put of a program lies in its window.
    Placed = 15,
    /// What became of a window that the receiver reaches by itself: [`WindowAdvert`].
    Window = 19,
    /// The caller wants no answer to a call any more.
    Cancel = 20,
    /// The protocols that the sender speaks, and the credit that it gives.
    Protocols = 21,
    /// So many notices more of a protocol may be sent.
    NoticeCredit = 22,
}

impl Kind {
    /// The kind of that number.
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Refuse,
            4 => Self::Call,
            5 => Self::Reply,
            6 => Self::Data,
            7 => Self::Pull,
            8 => Self::Nack,
            9 => Self::Ping,
            10 => Self::Pong,
            11 => Self::Notice,
            12 => Self::Goodbye,
            13 => Self::Message,
            14 => Self::Credit,
            15 => Self::Placed,
            19 => Self::Window,
            20 => Self::Cancel,
            21 => Self::Protocols,
            22 => Self::NoticeCredit,
            _ => return None,
        })
    }
}

/// The header of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// CRC32C of bytes 4 to 127.
    pub checksum: U32,
    /// A [`Kind`].
    pub kind: u8,
    /// `FLAG_*`.
    pub flags: u8,
    /// Zero.
    pub reserved: U16,
    /// Bytes of payload that follow.
    pub payload_len: U32,
    /// CRC32C of the payload, if the flag says so; else 0.
    pub payload_checksum: U32,
    /// Counts the messages of this lane in this direction, from 0.
    pub sequence: U64,
    /// The window that the payload goes into; 0 if it goes into none.
    pub window: U64,
    /// Where in the window the payload starts.
    pub window_offset: U64,
    /// The server process; 0 from a client.
    pub instance: U64,
    /// The body of the layer above.
    pub body: [u8; BODY_BYTES],
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

impl Header {
    /// A header of `kind` without payload.
    pub fn new(kind: Kind) -> Self {
        let mut header = Self::new_zeroed();
        header.kind = kind as u8;
        header
    }

    /// A header of `kind` with that body.
    pub fn with_body<B: IntoBytes + Immutable>(kind: Kind, body: &B) -> Self {
        const { assert!(size_of::<B>() <= BODY_BYTES) };
        let mut header = Self::new(kind);
        header.body[..size_of::<B>()].copy_from_slice(body.as_bytes());
        header
    }

    /// The body read as `B`.
    pub fn body<B: FromBytes + Copy>(&self) -> B {
        const { assert!(size_of::<B>() <= BODY_BYTES) };
        B::read_from_prefix(&self.body).map_or_else(|_| B::new_zeroed(), |(body, _)| body)
    }

    /// Bytes of payload.
    pub fn payload_len(&self) -> usize {
        self.payload_len.get() as usize
    }

    /// Puts the sequence number and the checksum in: the last thing before it is sent.
    pub fn seal(&mut self, sequence: u64) {
        self.sequence.set(sequence);
        let bytes: &[u8; HEADER_BYTES] = zerocopy::transmute_ref!(self);
        self.checksum.set(header_checksum(bytes));
    }

    /// Reads a header and checks its checksum, kind and place in the lane's order.
    ///
    /// # Errors
    /// See [`HeaderError`]: the stream cannot be trusted any more.
    pub fn open(bytes: &[u8; HEADER_BYTES], sequence: u64) -> Result<(Self, Kind), HeaderError> {
        if header_checksum(bytes) != u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) {
            return Err(HeaderError::Checksum);
        }
        let header: Self = zerocopy::transmute!(*bytes);
        let kind = Kind::from_number(header.kind).ok_or(HeaderError::Kind(header.kind))?;
        if header.sequence.get() != sequence {
            return Err(HeaderError::Sequence { expected: sequence, got: header.sequence.get() });
        }
        Ok((header, kind))
    }
}

/// Why a header is not to be trusted. The peer's fault, or the network's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Its checksum is wrong.
    #[error("the header's checksum is wrong")]
    Checksum,
    /// It is of no known kind.
    #[error("{0} is not a kind of message")]
    Kind(u8),
    /// A message was lost, repeated or made up.
    #[error("message {got} came where {expected} was expected")]
    Sequence {
        /// The expected value.
        expected: u64,
        /// The received value.
        got: u64,
    },
}

/// Body of the first message of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Oldest version spoken.
    pub version_min: U16,
    /// Newest version spoken.
    pub version_max: U16,
    /// 0: the control lane, which makes the session. Others join it.
    pub lane: U16,
    /// Bulk lanes that the session will have.
    pub bulk_lanes: U16,
    /// Features wanted.
    pub features: U32,
    /// Features without which the client will not go on.
    pub features_required: U32,
    /// Names the session; unguessable.
    pub nonce: [u8; 16],
    /// Names the client over all its sessions.
    pub client: [u8; 16],
    /// Counts the client's sessions: an older one never replaces a newer.
    pub session: U64,
    /// The longest payload that the client takes.
    pub payload_max: U32,
    /// Zero.
    pub reserved: [u8; 4],
}

/// Body of the answer to [`Hello`]. The server's instance is in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The version of this session.
    pub version: U16,
    /// The lane that this is.
    pub lane: U16,
    /// The longest payload on the control lane.
    pub small_max: U32,
    /// The longest payload on a bulk lane.
    pub payload_max: U32,
    /// The features of this session.
    pub features: U32,
    /// The session's nonce.
    pub nonce: [u8; 16],
    /// Zero.
    pub reserved: [u8; 40],
}

/// Body of `Pull`. The header's window and offset say what of the peer's memory is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Pull {
    /// The window that the `Data` shall go into, from its start.
    pub target: U64,
    /// Bytes.
    pub len: U32,
    /// Zero.
    pub reserved: [u8; 68],
}

/// Where a window of the sender lies, for a wire that places payloads by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Grant {
    /// Its first byte: over shared memory, in the arena that the sender has lent; over RDMA, in the sender's address space.
    pub address: U64,
    /// Bytes.
    pub len: U64,
    /// The remote key; 0 over shared memory.
    pub key: U32,
    /// Zero.
    pub reserved: U32,
}

impl Grant {
    /// Of a window of `len` bytes from `address` on.
    pub const fn new(address: u64, len: u64, key: u32) -> Self {
        Self { address: U64::new(address), len: U64::new(len), key: U32::new(key), reserved: U32::new(0) }
    }
}

/// Body of `Window`: what became of a window that one end has opened in its memory, and that the other reaches by itself: over
/// shared memory that was lent, or by its device. The header names the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WindowAdvert {
    /// [`WindowAdvert::OPENED`] or another of these.
    pub what: u8,
    /// Of a window that was opened: [`WindowAdvert::PUT`], [`WindowAdvert::GET`], [`WindowAdvert::ONCE`].
    pub rights: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// Over shared memory: which of the pieces of memory that the sender has lent over this stream, counted from 0. 0 over RDMA.
    pub memory: U32,
    /// Where a window that was opened lies: over shared memory in that piece.
    pub grant: Grant,
    /// Zero.
    pub reserved_end: [u8; 48],
}

impl WindowAdvert {
    /// The sender has opened a window.
    pub const OPENED: u8 = 1;
    /// The sender closes it. Over shared memory the receiver answers [`WindowAdvert::FORGOTTEN`].
    pub const CLOSED: u8 = 2;
    /// Over RDMA: the sender has read a window of the receiver's that is for one use.
    pub const USED: u8 = 3;
    /// Over shared memory: the sender copies nothing any more into or out of a window that the receiver has closed.
    pub const FORGOTTEN: u8 = 4;
    /// Over shared memory: no window of the sender's lies in the piece of memory, nor will one. It can be unmapped.
    pub const UNMAP: u8 = 5;
    /// It may be written.
    pub const PUT: u8 = 1;
    /// It may be read.
    pub const GET: u8 = 2;
    /// It is for one use.
    pub const ONCE: u8 = 4;

    /// A window was opened, in that piece of memory.
    pub const fn opened(rights: u8, memory: u32, grant: Grant) -> Self {
        let memory = U32::new(memory);
        Self { what: Self::OPENED, rights, reserved: [0; 2], memory, grant, reserved_end: [0; 48] }
    }

    /// Another change of a window.
    pub const fn of(what: u8) -> Self {
        let grant = Grant::new(0, 0, 0);
        Self { what, ..Self::opened(0, 0, grant) }
    }

    /// That a piece of memory can be unmapped.
    pub const fn unmap(memory: u32) -> Self {
        Self { memory: U32::new(memory), ..Self::of(Self::UNMAP) }
    }

    /// The message about that window.
    pub fn about(&self, window: u64) -> Header {
        let mut header = Header::with_body(Kind::Window, self);
        header.window.set(window);
        header
    }
}

/// Body of `Refuse` and `Goodbye`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refuse {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// A [`RefuseCode`].
    pub code: U16,
    /// Oldest version that would have done.
    pub version_min: U16,
    /// Newest version that would have done.
    pub version_max: U16,
    /// Zero.
    pub reserved: U16,
    /// Features that would have done.
    pub features: U32,
    /// Zero.
    pub reserved_end: [u8; 60],
}

const _: () = assert!(size_of::<Pull>() == BODY_BYTES && size_of::<WindowAdvert>() == BODY_BYTES);
const _: () = assert!(size_of::<Hello>() == 72 && size_of::<Welcome>() == 80 && size_of::<Refuse>() == 80);

/// Why a session is refused or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RefuseCode {
    /// No version in common.
    Version = 1,
    /// A feature that one side requires and the other lacks.
    Feature = 2,
    /// Not allowed in: a certificate is missing or wrong.
    Auth = 3,
    /// Too many sessions: try again later.
    Busy = 4,
    /// A newer session of this client exists.
    Superseded = 5,
    /// No session has that nonce.
    UnknownSession = 6,
    /// The server is going down.
    ShuttingDown = 7,
    /// The peer broke the protocol.
    Protocol = 8,
    /// The server is going down, and has answered each call of the session that it began: it will not begin the others.
    Drained = 9,
}

impl std::fmt::Display for RefuseCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Version => "version (no version of byway's wire in common)",
            Self::Feature => "feature (one side requires a feature that the other lacks)",
            Self::Auth => "authentication (the certificate is missing or wrong)",
            Self::Busy => {
                "busy (no room for another connection, or still ending this client's last session; try again later)"
            }
            Self::Superseded => "superseded (this client has a newer session)",
            Self::UnknownSession => "unknown session (no session has that nonce)",
            Self::ShuttingDown => "shutting down (the server stops)",
            Self::Drained => "drained (the server stops, and has answered all calls that it began)",
            Self::Protocol => "protocol (the other side says that the protocol was broken)",
        })
    }
}

impl RefuseCode {
    /// The code of that number; an unknown one is a breach of protocol.
    pub const fn from_number(number: u16) -> Self {
        match number {
            1 => Self::Version,
            2 => Self::Feature,
            3 => Self::Auth,
            4 => Self::Busy,
            5 => Self::Superseded,
            6 => Self::UnknownSession,
            7 => Self::ShuttingDown,
            9 => Self::Drained,
            _ => Self::Protocol,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_header_has_these_bytes() {
        let mut header = Header::new(Kind::Data);
        header.flags = FLAG_PAYLOAD_CHECKSUM;
        header.reserved.set(0x0102);
        header.payload_len.set(0x0304_0506);
        header.payload_checksum.set(0x0708_090a);
        header.window.set(0x1112_1314_1516_1718);
        header.window_offset.set(0x2122_2324_2526_2728);
        header.instance.set(0x3132_3334_3536_3738);
        header.body[0] = 0xb0;
        header.body[79] = 0xb1;
        header.seal(0x4142_4344_4546_4748);
        let bytes = header.as_bytes();
        assert_eq!(bytes[4..16], [6, 1, 2, 1, 6, 5, 4, 3, 0x0a, 9, 8, 7]);
        assert_eq!(bytes[16..24], [0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41]);
        assert_eq!(bytes[24..32], [0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]);
        assert_eq!(bytes[32..40], [0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21]);
        assert_eq!(bytes[40..48], [0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31]);
        assert_eq!((bytes[48], bytes[127]), (0xb0, 0xb1));
        assert_eq!(bytes[..4], crc32c::crc32c(&bytes[4..]).to_le_bytes());
    }

    #[test]
    fn a_pull_has_these_bytes() {
        let pull = Pull { target: U64::new(0x0807_0605_0403_0201), len: U32::new(0x0c0b_0a09), reserved: [0; 68] };
        let mut golden = vec![1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        golden.extend([0; 68]);
        assert_eq!(pull.as_bytes(), golden);
    }

    #[test]
    fn a_grant_has_these_bytes() {
        let grant = Grant::new(0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09, 0x1413_1211);
        let golden: Vec<u8> = (1..=20).chain([0; 4]).collect();
        assert_eq!(grant.as_bytes(), golden);
    }

    #[test]
    fn news_of_a_window_has_these_bytes() {
        let grant = Grant::new(0x0f0e_0d0c_0b0a_0908, 0x1716_1514_1312_1110, 0x1b1a_1918);
        let rights = WindowAdvert::GET | WindowAdvert::ONCE;
        let advert = WindowAdvert::opened(rights, 0x0706_0504, grant);
        let golden: Vec<u8> = [1, 6, 0, 0].into_iter().chain(4..28).chain([0; 52]).collect();
        assert_eq!(advert.as_bytes(), golden);
        assert_eq!(WindowAdvert::unmap(7).as_bytes()[..9], [5, 0, 0, 0, 7, 0, 0, 0, 0]);
        assert_eq!(WindowAdvert::of(WindowAdvert::CLOSED).as_bytes()[..2], [2, 0]);
        assert_eq!((WindowAdvert::USED, WindowAdvert::FORGOTTEN, WindowAdvert::PUT, Kind::Window as u8), (3, 4, 1, 19));
    }

    #[test]
    fn a_hello_has_these_bytes() {
        let hello = Hello {
            magic: MAGIC,
            version_min: U16::new(1),
            version_max: U16::new(2),
            lane: U16::new(3),
            bulk_lanes: U16::new(4),
            features: U32::new(5),
            features_required: U32::new(6),
            nonce: [7; 16],
            client: [8; 16],
            session: U64::new(9),
            payload_max: U32::new(10),
            reserved: [0; 4],
        };
        let mut golden = b"bywayFAB".to_vec();
        golden.extend([1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 0, 0, 6, 0, 0, 0]);
        golden.extend([7; 16]);
        golden.extend([8; 16]);
        golden.extend([9, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(hello.as_bytes(), golden);
    }

    #[test]
    fn a_goodbye_has_these_bytes_and_codes_these_numbers() {
        let goodbye = crate::session::refuse(Kind::Goodbye, RefuseCode::Drained);
        assert_eq!(goodbye.kind, 12);
        assert_eq!(goodbye.body[..20], *b"bywayFAB\x09\0\x02\0\x02\0\0\0\x01\0\0\0");
        assert_eq!(goodbye.body[20..], [0; 60]);
        let codes: Vec<u16> = (1..=9).map(|number| RefuseCode::from_number(number) as u16).collect();
        assert_eq!(codes, (1..=9).collect::<Vec<_>>());
        assert_eq!(RefuseCode::from_number(10), RefuseCode::Protocol, "an unknown one");
    }

    fn kinds() -> impl Strategy<Value = u8> {
        (1u8..=22).prop_filter("a kind", |kind| Kind::from_number(*kind).is_some())
    }

    proptest! {
        #[test]
        fn a_sealed_header_opens_and_any_flipped_bit_shows(
            kind in kinds(), body in proptest::array::uniform32(any::<u8>()), sequence: u64, bit in 0usize..1024,
        ) {
            let mut header = Header::with_body(Kind::from_number(kind).unwrap(), &body);
            header.seal(sequence);
            let mut bytes: [u8; HEADER_BYTES] = zerocopy::transmute!(header);
            prop_assert_eq!(Header::open(&bytes, sequence).unwrap().0, header);
            let skipped = matches!(
                Header::open(&bytes, sequence.wrapping_add(1)), Err(HeaderError::Sequence { .. })
            );
            prop_assert!(skipped);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Header::open(&bytes, sequence), Err(HeaderError::Checksum));
        }
    }
}
