//! The bytes in which a mount goes from one process to another. docs/wire.md draws them.
//!
//! A [`Head`], then requests that were read and not answered, owners of locks, files that programs may map for writing, and the state of
//! the share's client. Little-endian. A process refuses a document of another version, and the process before goes on.

use byway_frontend::fuse::session::Terms;
use byway_frontend::limits::{FUSE_REQUESTS_MAX, FUSE_SMALL_REQUEST_BYTES};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::limits::MOUNT_STATE_BYTES_MAX;

/// The version that this program reads and writes. The client's state counts, too.
pub(super) const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"bywaymnt";

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U32,
    /// What was agreed with the kernel: FUSE's minor version, the longest WRITE in bytes, flags.
    minor: U32,
    flags: U64,
    write_bytes_max: U32,
    takeovers: U32,
    /// Seconds since 1970.
    since: U64,
    /// Numbers of records.
    requests: U32,
    owners: U32,
    mapped: U32,
    reserved: U32,
}

/// The request's bytes follow, as the kernel has sent them.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RequestHead {
    channel: U32,
    bytes: U32,
}

/// An owner of `fcntl` locks: node, owner, handle. Or a file that is open for reading and writing: node, handle, and 1 if programs may
/// have mapped it.
type Three = [U64; 3];

const _: () = assert!(size_of::<Head>() == 56 && size_of::<RequestHead>() == 8);

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    pub(super) terms: Terms,
    /// When it was mounted, in seconds since 1970.
    pub(super) since: u64,
    /// How often it was taken over.
    pub(super) takeovers: u32,
    /// Requests, each with the index of its channel.
    pub(super) requests: Vec<(usize, Vec<u8>)>,
    pub(super) owners: Vec<(u64, u64, u64)>,
    pub(super) mapped: Vec<(u64, u64, bool)>,
    /// The client's.
    pub(super) client: Vec<u8>,
}

/// Why a document cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// It has another version.
    #[error(
        "the mount's process hands over version {0}, and this program takes version {VERSION}; unmount, and mount again"
    )]
    Version(u32),
    /// It is no document.
    #[error("what the mount's process has handed over cannot be read (a bug of byway)")]
    Malformed,
    /// It is too long.
    #[error("the mount knows too many files to be handed over: {0} bytes of state")]
    TooLong(usize),
}

impl Document {
    pub(super) fn encode(&self) -> Result<Vec<u8>, DocumentError> {
        let Terms { minor, write_bytes_max, flags } = self.terms;
        let head = Head {
            magic: MAGIC,
            version: VERSION.into(),
            minor: minor.into(),
            flags: flags.into(),
            write_bytes_max: write_bytes_max.into(),
            takeovers: self.takeovers.into(),
            since: self.since.into(),
            requests: (self.requests.len() as u32).into(),
            owners: (self.owners.len() as u32).into(),
            mapped: (self.mapped.len() as u32).into(),
            reserved: 0.into(),
        };
        let mut bytes = head.as_bytes().to_vec();
        for (channel, request) in &self.requests {
            let head = RequestHead { channel: (*channel as u32).into(), bytes: (request.len() as u32).into() };
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(request);
        }
        let owners = self.owners.iter().map(|(node, owner, handle)| [*node, *owner, *handle]);
        let mapped = self.mapped.iter().map(|(node, handle, has_pages)| [*node, *handle, u64::from(*has_pages)]);
        bytes.extend(owners.chain(mapped).flatten().flat_map(u64::to_le_bytes));
        bytes.extend_from_slice(&self.client);
        if bytes.len() > MOUNT_STATE_BYTES_MAX { Err(DocumentError::TooLong(bytes.len())) } else { Ok(bytes) }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DocumentError> {
        let malformed = DocumentError::Malformed;
        let (head, mut rest) = Head::ref_from_prefix(bytes).map_err(|_| malformed)?;
        if head.magic != MAGIC {
            return Err(malformed);
        }
        if head.version.get() != VERSION {
            return Err(DocumentError::Version(head.version.get()));
        }
        let mut requests = Vec::new();
        if head.requests.get() as usize > FUSE_REQUESTS_MAX {
            return Err(malformed);
        }
        for _ in 0..head.requests.get() {
            let (RequestHead { channel, bytes }, behind) = RequestHead::ref_from_prefix(rest).map_err(|_| malformed)?;
            let len = bytes.get() as usize;
            let (request, behind) = behind.split_at_checked(len).ok_or(malformed)?;
            if len > FUSE_SMALL_REQUEST_BYTES {
                return Err(malformed);
            }
            requests.push((channel.get() as usize, request.to_vec()));
            rest = behind;
        }
        let mut threes = |count: U32| {
            let len = (count.get() as usize).checked_mul(size_of::<Three>()).ok_or(malformed)?;
            let (bytes, behind) = rest.split_at_checked(len).ok_or(malformed)?;
            rest = behind;
            <[Three]>::ref_from_bytes(bytes).map_err(|_| malformed)
        };
        let owners = threes(head.owners)?.iter().map(|[node, owner, handle]| (node.get(), owner.get(), handle.get()));
        let mapped = threes(head.mapped)?;
        let mapped = mapped.iter().map(|[node, handle, pages]| (node.get(), handle.get(), pages.get() != 0));
        Ok(Self {
            terms: Terms {
                minor: head.minor.get(),
                write_bytes_max: head.write_bytes_max.get(),
                flags: head.flags.get(),
            },
            since: head.since.get(),
            takeovers: head.takeovers.get(),
            requests,
            owners: owners.collect(),
            mapped: mapped.collect(),
            client: rest.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        Document {
            terms: Terms { minor: 40, write_bytes_max: 1 << 20, flags: 1 << 38 | 3 },
            since: 1_700_000_000,
            takeovers: 2,
            requests: vec![(5, b"lock".to_vec())],
            owners: vec![(1, 2, 3)],
            mapped: vec![(7, 8, true)],
            client: b"client".to_vec(),
        }
    }

    /// docs/wire.md draws these bytes.
    #[test]
    fn a_document_has_these_bytes() {
        let bytes = document().encode().unwrap();
        let golden = [
            &b"bywaymnt\x01\0\0\0\x28\0\0\0\x03\0\0\0\x40\0\0\0\0\0\x10\0\x02\0\0\0"[..],
            b"\0\xf1\x53\x65\0\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\0\0\0\0\0\0",
            b"\x05\0\0\0\x04\0\0\0lock",
            b"\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0",
            b"\x07\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0",
            b"client",
        ];
        assert_eq!(bytes, golden.concat());
        assert_eq!(Document::decode(&bytes), Ok(document()));
    }

    #[test]
    fn what_is_cut_or_of_another_version_is_refused() {
        let bytes = document().encode().unwrap();
        for len in 0..bytes.len() - b"client".len() {
            assert_eq!(Document::decode(&bytes[..len]), Err(DocumentError::Malformed), "{len} bytes");
        }
        let mut other = bytes.clone();
        other[8] = 9;
        assert_eq!(Document::decode(&other), Err(DocumentError::Version(9)));
        let mut many = bytes;
        many[40..44].fill(0xff);
        assert_eq!(Document::decode(&many), Err(DocumentError::Malformed));
    }
}
