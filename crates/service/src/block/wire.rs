//! The block service's messages: methods, arguments, results. docs/wire.md draws the byte maps.

use byway_reactor::Errno;
use byway_rpc::message::Status;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::BlockError;

pub use byway_rpc::protocol::{VOLUMES as PROTOCOL, VOLUMES_VERSIONS as VERSIONS};

/// What a call asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Method {
    /// Open the volume whose name is the payload.
    Open = 1,
    /// Read.
    Read = 2,
    /// Write: up to 16 KiB with the call, else pulled from the window.
    Write = 3,
    /// Make durable what was answered before.
    Flush = 4,
    /// No longer needed.
    Trim = 5,
    /// Zeroes from now on.
    Zero = 6,
    /// List data and holes.
    Extents = 7,
    /// Bring into memory.
    Prefetch = 8,
    /// List the volumes.
    List = 9,
}

impl Method {
    /// Whether it changes what the volume holds.
    pub const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::Zero)
    }

    /// The method of that number.
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Open,
            2 => Self::Read,
            3 => Self::Write,
            4 => Self::Flush,
            5 => Self::Trim,
            6 => Self::Zero,
            7 => Self::Extents,
            8 => Self::Prefetch,
            9 => Self::List,
            _ => return None,
        })
    }
}

/// `Write`, `Trim`, `Zero`: durable before the answer.
pub const FLAG_DURABLE: u32 = 1;
/// `Zero`: the space stays allocated.
pub const FLAG_KEEP_SPACE: u32 = 2;
/// `Zero`: fail rather than write zeroes out.
pub const FLAG_FAST: u32 = 4;
/// `Open`: nothing will be written.
pub const FLAG_READ_ONLY: u32 = 8;

/// [`OpenResult`]: writes are refused.
pub const VOLUME_READ_ONLY: u32 = 1;
/// [`OpenResult`]: the contents go with the server process.
pub const VOLUME_VOLATILE: u32 = 2;
/// [`ListEntry`]: refused on a plain wire.
pub const VOLUME_TLS_REQUIRED: u32 = 4;

/// A hole, in an entry of the answer to `Extents`; the other bits are its length in bytes.
pub const EXTENT_HOLE: u64 = 1 << 63;

/// The number of the notice that a volume's size has changed: [`Resized`] in the arguments.
pub const NOTICE_RESIZED: u16 = 1;

/// Arguments of every method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Arguments {
    /// The volume, as `Open` named it.
    pub handle: U32,
    /// `FLAG_*`.
    pub flags: U32,
    /// First byte; for `List` the first entry.
    pub offset: U64,
    /// Bytes.
    pub len: U64,
    /// Zero.
    pub reserved: [u8; 40],
}

/// Result of `Open`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenResult {
    /// Names the volume in this session.
    pub handle: U32,
    /// `VOLUME_*`.
    pub flags: U32,
    /// Bytes.
    pub len: U64,
    /// What offsets and lengths must be multiples of.
    pub block_bytes: U32,
    /// The longest read or write.
    pub request_max: U32,
    /// Names the files that are open for the volume, unlike any others: if it is another number than in an earlier session
    /// with the same server process, the volume was replaced, and what was not flushed may be missing.
    pub store: U64,
    /// Names what the bytes lie in, the same for all server processes; 0 if that is not known. If it is another than in an
    /// earlier session, the name is now another volume's.
    pub backing_id: U64,
    /// Zero.
    pub reserved: [u8; 24],
}

/// Arguments of the notice [`NOTICE_RESIZED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Resized {
    /// The volume, as `Open` named it.
    pub handle: U32,
    /// Zero.
    pub reserved: U32,
    /// Bytes from now on.
    pub len: U64,
    /// Zero.
    pub reserved_end: [u8; 48],
}

/// An entry of the answer to `List`; the name's bytes follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ListEntry {
    /// Bytes of the volume.
    pub len: U64,
    /// `VOLUME_*`.
    pub flags: U32,
    /// What offsets and lengths must be multiples of.
    pub block_bytes: U32,
    /// Bytes of the name.
    pub name_len: U32,
    /// Bytes of the description, which follows the name.
    pub description_len: U32,
}

const _: () = assert!(size_of::<Arguments>() == 64 && size_of::<OpenResult>() == 64 && size_of::<Resized>() == 64);
const _: () = assert!(size_of::<ListEntry>() == 24);

/// One volume of the answer to `List`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed<'a> {
    /// Sizes and flags.
    pub entry: ListEntry,
    /// Its name.
    pub name: &'a [u8],
    /// For people.
    pub description: &'a [u8],
}

/// Takes the answer to `List` apart. What is malformed is a `None`, and the last.
pub fn read_list(payload: &[u8]) -> impl Iterator<Item = Option<Listed<'_>>> {
    let mut rest = Some(payload);
    std::iter::from_fn(move || {
        let bytes = rest.take().filter(|bytes| !bytes.is_empty())?;
        let listed = read_listed(bytes);
        rest = listed.map(|(_, rest)| rest);
        Some(listed.map(|(listed, _)| listed))
    })
}

fn read_listed(bytes: &[u8]) -> Option<(Listed<'_>, &[u8])> {
    let (entry, rest) = ListEntry::read_from_prefix(bytes).ok()?;
    let (name, rest) = rest.split_at_checked(entry.name_len.get() as usize)?;
    let (description, rest) = rest.split_at_checked(entry.description_len.get() as usize)?;
    Some((Listed { entry, name, description }, rest))
}

/// Why a call failed, or that it did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The engine's.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// No volume has that name.
    #[error("no volume has that name")]
    NotFound,
    /// The caller's fault: no such handle or form of arguments.
    #[error("the server did not understand the request")]
    Malformed,
    /// The volume wants TLS.
    #[error("the volume is served over TLS only; connect with TLS")]
    TlsRequired,
    /// The server knows no such request: it is older or newer than this program.
    #[error("the server does not know this kind of request; it speaks another version of the protocol of volumes")]
    UnknownMethod,
    /// The server has no memory for it now: try again.
    #[error("the server has no memory for the request now")]
    Busy,
    /// The server does not serve volumes, or not by a version of the protocol that this program speaks.
    #[error("no volumes are served there: {0}")]
    NotServed(Status),
}

/// The status and the errno (0 unless the store failed) of a result on the wire.
pub fn status_of(error: CallError) -> (u16, i32) {
    match error {
        CallError::Block(error) => match error {
            BlockError::OutOfRange => (1, 0),
            BlockError::Misaligned => (2, 0),
            BlockError::TooLong => (3, 0),
            BlockError::ReadOnly => (4, 0),
            BlockError::PastEnd | BlockError::NoSpace => (5, 0),
            BlockError::Unsupported => (6, 0),
            BlockError::FlushFailed => (7, 0),
            BlockError::Closed => (8, 0),
            BlockError::Io(errno) => (9, errno.raw_os_error()),
        },
        CallError::NotFound => (10, 0),
        CallError::Malformed => (11, 0),
        CallError::TlsRequired => (12, 0),
        CallError::Busy => (13, 0),
        CallError::UnknownMethod => (Status::UnknownMethod as u16, 0),
        CallError::NotServed(status) => (status as u16, 0),
    }
}

/// What a status on the wire says; the errno lies in the first four bytes of the result.
///
/// # Errors
/// What the status says, unless it is 0.
pub fn read_status(status: u16, result: &[u8]) -> Result<(), CallError> {
    let errno = result.first_chunk::<4>().map_or(0, |bytes| i32::from_le_bytes(*bytes));
    Err(match status {
        0 => return Ok(()),
        1 => BlockError::OutOfRange.into(),
        2 => BlockError::Misaligned.into(),
        3 => BlockError::TooLong.into(),
        4 => BlockError::ReadOnly.into(),
        5 => BlockError::NoSpace.into(),
        6 => BlockError::Unsupported.into(),
        7 => BlockError::FlushFailed.into(),
        8 => BlockError::Closed.into(),
        // A number that is no errno says no more than that it failed.
        9 if (1..4096).contains(&errno) => BlockError::Io(Errno::from_raw_os_error(errno)).into(),
        9 => BlockError::Io(Errno::IO).into(),
        10 => CallError::NotFound,
        12 => CallError::TlsRequired,
        13 => CallError::Busy,
        number => match Status::from_number(number) {
            Some(Status::Busy) => CallError::Busy,
            Some(Status::UnknownMethod) => CallError::UnknownMethod,
            Some(status @ (Status::UnknownProtocol | Status::Version)) => CallError::NotServed(status),
            _ => CallError::Malformed,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_and_results_have_these_bytes() {
        let arguments = Arguments {
            handle: U32::new(0x0403_0201),
            flags: U32::new(0x0807_0605),
            offset: U64::new(0x100f_0e0d_0c0b_0a09),
            len: U64::new(0x1817_1615_1413_1211),
            reserved: [0; 40],
        };
        let golden: Vec<u8> = (1..=24).chain([0; 40]).collect();
        assert_eq!(arguments.as_bytes(), golden);
        let result = OpenResult {
            handle: U32::new(0x0403_0201),
            flags: U32::new(0x0807_0605),
            len: U64::new(0x100f_0e0d_0c0b_0a09),
            block_bytes: U32::new(0x1413_1211),
            request_max: U32::new(0x1817_1615),
            store: U64::new(0x201f_1e1d_1c1b_1a19),
            backing_id: U64::new(0x2827_2625_2423_2221),
            reserved: [0; 24],
        };
        let golden: Vec<u8> = (1..=40).chain([0; 24]).collect();
        assert_eq!(result.as_bytes(), golden);
    }

    #[test]
    fn entries_of_a_list_have_these_bytes() {
        let entry = ListEntry {
            len: U64::new(0x0807_0605_0403_0201),
            flags: U32::new(0x0c0b_0a09),
            block_bytes: U32::new(0x100f_0e0d),
            name_len: U32::new(3),
            description_len: U32::new(2),
        };
        let golden: Vec<u8> = (1..=16).chain([3, 0, 0, 0, 2, 0, 0, 0]).collect();
        assert_eq!(entry.as_bytes(), golden);
        let mut payload = golden.clone();
        payload.extend(b"abcde");
        payload.extend_from_within(..);
        let listed = Some(Listed { entry, name: b"abc", description: b"de" });
        assert_eq!(read_list(&payload).collect::<Vec<_>>(), [listed, listed]);
        assert_eq!(read_list(&payload[..payload.len() - 1]).collect::<Vec<_>>(), [listed, None], "cut");
        assert_eq!(read_list(&golden[..23]).collect::<Vec<_>>(), [None]);
        assert_eq!(read_list(&[]).count(), 0);
    }

    #[test]
    fn every_error_survives_the_wire() {
        let block = [
            BlockError::OutOfRange,
            BlockError::Misaligned,
            BlockError::TooLong,
            BlockError::ReadOnly,
            BlockError::NoSpace,
            BlockError::Unsupported,
            BlockError::FlushFailed,
            BlockError::Closed,
            BlockError::Io(Errno::IO),
            BlockError::Io(Errno::NOMEM),
        ];
        let not_served = [Status::UnknownProtocol, Status::Version].map(CallError::NotServed);
        let own = [
            CallError::NotFound,
            CallError::Malformed,
            CallError::TlsRequired,
            CallError::Busy,
            CallError::UnknownMethod,
        ];
        let own = own.into_iter().chain(not_served);
        for error in block.into_iter().map(CallError::Block).chain(own) {
            let (status, errno) = status_of(error);
            assert_ne!(status, 0);
            assert_eq!(read_status(status, &errno.to_le_bytes()), Err(error));
        }
        assert_eq!(read_status(0, &[]), Ok(()));
        assert_eq!(read_status(9, &(-1i32).to_le_bytes()), Err(BlockError::Io(Errno::IO).into()));
        assert_eq!(read_status(999, &[]), Err(CallError::Malformed));
        assert_eq!(read_status(Status::Busy as u16, &[]), Err(CallError::Busy));
        for number in 0..100 {
            assert!(Method::from_number(number).is_none_or(|method| method as u16 == number));
        }
    }
}
