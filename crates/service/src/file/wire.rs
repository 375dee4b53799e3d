//! The messages of the file service: methods, arguments, results. docs/wire.md draws the byte maps.
//!
//! Numbers that Linux defines (errno, open flags, modes, lock types, seek and rename flags) travel as Linux on x86-64 has them.

use byway_reactor::Errno;
use byway_rpc::message::Status;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use byway_rpc::protocol::{FILES as PROTOCOL, FILES_VERSIONS as VERSIONS};

pub use self::method::Method;

mod method;

/// `Sync`: the data and what is needed to read it, as `fdatasync`.
pub const FLAG_DATA_ONLY: u32 = 1;
/// `ReadDirectory`: look each entry up, so that the client holds its node.
pub const FLAG_NODES: u32 = 2;
/// `Lock`: `flock` of the whole file; else a POSIX range.
pub const FLAG_WHOLE: u32 = 4;
/// `Lock`: wait until it can be had.
pub const FLAG_WAIT: u32 = 8;
/// `Lock`: only ask what is in its way.
pub const FLAG_TEST: u32 = 16;
/// `Lock`: a wait of this owner for this range ends with `EINTR`.
pub const FLAG_CANCEL: u32 = 32;
/// `Write`: at the end of the file as it is at the server then, whatever the offset says.
pub const FLAG_APPEND: u32 = 64;
/// `Lock`: the client had this lock from the server process before this one. Good in the grace time alone.
pub const FLAG_RECLAIM: u32 = 128;
/// `Recalls`: the session uses no lease any more; answered at once.
pub const FLAG_ALL: u32 = 256;
/// `ReclaimComplete`: removed files that were not asked for may be the client's too: the server has refused to list them.
pub const FLAG_UNCLAIMED: u32 = 512;
/// `Open` and `OpenDirectory`, in `extra`: the client had this open, and the server process before this one has ended. The owner of the
/// file needs no right that its mode gives.
pub const OPENS_AGAIN: u64 = 1;
/// `Attach`: while the client holds locks, it calls every few seconds; its locks are not kept when it is silent for
/// [`FILE_LEASE_TIME`](crate::limits::FILE_LEASE_TIME).
pub const FLAG_RENEWS_LOCKS: u32 = 1024;

/// [`AttachResult`], [`ShareEntry`]: changes are refused.
pub const SHARE_READ_ONLY: u32 = 1;
/// [`AttachResult`]: rights are those of the users that calls name, and their groups count.
pub const SHARE_TRUSTS: u32 = 2;
/// [`AttachResult`]: sessions that call `Recalls` get leases.
pub const SHARE_LEASES: u32 = 4;

/// Names a client of a server process in all its sessions: random, and known to the two alone. Payload of `Attach`, behind the share's name.
pub type ClientName = [u8; 16];

/// Arguments of every method. Unused fields are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Arguments {
    /// A node or an open file, as an answer of this session named it.
    pub node: U64,
    /// Another one.
    pub second: U64,
    /// First byte, cookie or index. `Unlink`, `RemoveDirectory` and `Rename`: the node that the client takes the name for, and of which it
    /// has dropped what it kept, or 0.
    pub offset: U64,
    /// Bytes.
    pub len: U64,
    /// `CopyRange`: first byte of the destination. `Lock`: the owner. `Rename`: as `offset`, of the second name. `Create`,
    /// `CreateUnnamed`, `MakeNode`, `MakeDirectory`: rights that the program's umask took from the mode. They count in a directory with
    /// a default ACL.
    pub extra: U64,
    /// Flags of the method.
    pub flags: U32,
    /// Mode of what is made, rights that are asked for, type of a lock, mode of `fallocate`, or `whence`.
    pub mode: U32,
    /// The user for whom the client calls; the server decides whether that counts.
    pub uid: U32,
    /// The user's group.
    pub gid: U32,
    /// Bytes of the name, at the start of the payload.
    pub name_len: U16,
    /// Bytes of the second name, behind it.
    pub second_name_len: U16,
    /// Further groups of the user, of 4 bytes each, behind the names.
    pub group_count: u8,
    /// The slot in which the server keeps the answer, from 1 to [`FILE_SLOTS`](crate::limits::FILE_SLOTS); 0 if it keeps none.
    pub slot: u8,
    /// Another number than the slot's last call had, or the same: then it is that call again, and is answered as it was.
    pub sequence: U16,
}

/// Result of `Attach`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AttachResult {
    /// `SHARE_*`.
    pub flags: U32,
    /// The longest read or write of one call, in bytes.
    pub transfer_max: U32,
    /// Names this server process: after another number, what was not synced may be lost. The high half names the boot of its machine.
    pub instance: U64,
    /// Names what the process has of the client: another number than in an earlier session says that nodes, open files, locks and kept
    /// answers are gone; the same, that all is as it was.
    pub state: U64,
    /// How long the process has served files, in milliseconds.
    pub uptime_ms: U64,
    /// Syncs of the share's file system, or of files there, that had failed in the process when it had nothing of the client yet. Another
    /// number than in an earlier session with it says that what was changed before and not synced may be lost.
    pub failed_syncs: U64,
}

/// What is known of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Attributes {
    /// The inode's number.
    pub ino: U64,
    /// Bytes.
    pub size: U64,
    /// Blocks of 512 bytes that it takes.
    pub blocks: U64,
    /// Seconds of the last access.
    pub accessed_s: I64,
    /// Seconds of the last change of data.
    pub modified_s: I64,
    /// Seconds of the last change of attributes.
    pub changed_s: I64,
    /// Seconds of its making; 0 if the file system does not say.
    pub born_s: I64,
    /// Nanoseconds to these.
    pub accessed_ns: U32,
    /// Nanoseconds to these.
    pub modified_ns: U32,
    /// Nanoseconds to these.
    pub changed_ns: U32,
    /// Nanoseconds to these.
    pub born_ns: U32,
    /// Type and rights.
    pub mode: U32,
    /// Names.
    pub links: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Major (high half) and minor number of a device node.
    pub device: U32,
    /// Best size of a transfer.
    pub block_bytes: U32,
    /// The subvolume, where a file system has several in which files have the same inode numbers (btrfs, bcachefs); else 0.
    pub subvolume: U64,
}

/// A node that the client may use from now on, until it forgets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// Its name in this session. 0 in a listing without nodes.
    pub node: U64,
    /// What is known of it.
    pub attributes: Attributes,
}

/// Result of `Open`, `Create`, `CreateUnnamed` and `OpenDirectory`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenResult {
    /// Names the open file in this session.
    pub handle: U64,
}

/// Result of `Write`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WriteResult {
    /// Bytes that were written.
    pub bytes: U64,
    /// Version of a new lease on the file, if nothing but this call has changed it since the client gave up the lease that it had; else 0.
    pub lease: U64,
}

/// Result of `LookUp` and `GetAttributes`, in a session that takes recalls: versions of the leases that come with the answer, 0 for none. Of
/// `SetAttributes`: `on_node` as the lease of [`WriteResult`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrantedLeases {
    /// On the node that was asked about.
    pub on_node: U64,
    /// On the one that was found.
    pub on_found: U64,
}

/// Behind the payload of the answer to a call that adds or removes names of one directory, if the session takes recalls: what the client may
/// go on using.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChangedDirectory {
    /// Version of a new lease on the directory, if nothing but this call has changed it since the client gave up the lease that it had; else
    /// 0.
    pub lease: U64,
    /// Version of a lease on what the call has made, 0 for none.
    pub made_lease: U64,
    /// Of what the call has made: [`ENTRY_WITHOUT_XATTRS`].
    pub made_flags: U64,
    /// The directory's, after the call.
    pub attributes: Attributes,
}

/// A lease that is recalled or returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Lease {
    /// The node.
    pub node: U64,
    /// Of the grant.
    pub version: U64,
}

/// One of a list of nodes to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Forgotten {
    /// The node.
    pub node: U64,
    /// How many of the answers that named it are forgotten.
    pub count: U64,
}

/// Payload of `SetAttributes`, behind the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NewAttributes {
    /// `SET_*`: which fields count.
    pub which: U32,
    /// Rights.
    pub mode: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Bytes.
    pub size: U64,
    /// Seconds.
    pub accessed_s: I64,
    /// Seconds.
    pub modified_s: I64,
    /// Nanoseconds.
    pub accessed_ns: U32,
    /// Nanoseconds.
    pub modified_ns: U32,
}

/// [`NewAttributes`]: the rights.
pub const SET_MODE: u32 = 1;
/// [`NewAttributes`]: the owner.
pub const SET_UID: u32 = 2;
/// [`NewAttributes`]: the group.
pub const SET_GID: u32 = 4;
/// [`NewAttributes`]: the size.
pub const SET_SIZE: u32 = 8;
/// [`NewAttributes`]: the time of access.
pub const SET_ACCESSED: u32 = 16;
/// [`NewAttributes`]: the time of change.
pub const SET_MODIFIED: u32 = 32;
/// [`NewAttributes`]: the time of access is the server's time now.
pub const SET_ACCESSED_NOW: u32 = 64;
/// [`NewAttributes`]: the time of change is the server's time now.
pub const SET_MODIFIED_NOW: u32 = 128;

/// An entry of the answer to `ReadDirectory`; the name's bytes follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DirectoryEntry {
    /// Where the listing goes on behind this entry.
    pub cookie: U64,
    /// The node; all zeroes but for `ino` and the type in `mode` if the entry could not be looked up.
    pub entry: Entry,
    /// Version of the lease on the node that comes with the answer, 0 for none.
    pub lease: U64,
    /// Bytes of the name.
    pub name_len: U16,
    /// [`ENTRY_WITHOUT_XATTRS`].
    pub flags: U16,
}

/// [`DirectoryEntry`], [`ChangedDirectory`]: the node has no extended attribute that its user may list. Told where leases are given.
pub const ENTRY_WITHOUT_XATTRS: u16 = 1;

/// Result of `ReadDirectory`, of 8 bytes: the directory had no further entries when it was read.
pub const LISTING_HAS_ENDED: u64 = 1;

/// Answer to `StatFileSystem`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FileSystem {
    /// Bytes of a block.
    pub block_bytes: U64,
    /// Blocks.
    pub blocks: U64,
    /// Free ones.
    pub blocks_free: U64,
    /// Free ones that the user may take.
    pub blocks_available: U64,
    /// Inodes.
    pub files: U64,
    /// Free ones.
    pub files_free: U64,
    /// Bytes of the longest name.
    pub name_max: U64,
}

/// Answer to a `Lock` that only asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LockResult {
    /// First byte of the lock that is in the way.
    pub start: U64,
    /// Its last byte.
    pub last: U64,
    /// `F_UNLCK` (2) if nothing is in the way, else its type.
    pub kind: U32,
    /// The process that holds it, as its client said; 0 if that is another client's.
    pub pid: U32,
}

/// An entry of the answer to `List`; the name's bytes follow it, and those of the description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ShareEntry {
    /// `SHARE_*`.
    pub flags: U32,
    /// Bytes of the name.
    pub name_len: U16,
    /// Bytes of the description.
    pub description_len: U16,
}

const _: () = assert!(size_of::<Arguments>() == 64 && size_of::<AttachResult>() == 40);
const _: () = assert!(size_of::<Attributes>() == 104 && size_of::<Entry>() == 112 && size_of::<OpenResult>() == 8);
const _: () = assert!(
    size_of::<GrantedLeases>() == 16
        && size_of::<WriteResult>() == 16
        && size_of::<ChangedDirectory>() == 128
        && size_of::<Lease>() == 16
);
const _: () = assert!(size_of::<NewAttributes>() == 48 && size_of::<DirectoryEntry>() == 132);
const _: () = assert!(size_of::<FileSystem>() == 56 && size_of::<LockResult>() == 24 && size_of::<ShareEntry>() == 8);

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The file system below, or the rules of the service: what `errno` says.
    #[error("{0}")]
    Errno(Errno),
    /// No share has that name, or none that this client may use.
    #[error("no share has that name")]
    NoShare,
    /// The session names no such node or open file: it was forgotten or closed, or is another session's.
    #[error("the server does not know the file in this session")]
    Stale,
    /// The caller's fault: a form of arguments that the protocol does not have.
    #[error("the server did not understand the request")]
    Malformed,
    /// The session holds as many nodes as it may.
    #[error("the client holds as many files as it may; unmount and mount again, or let its caches shrink")]
    TooManyNodes,
    /// The session has as many files open as it may.
    #[error("the client has as many files open as it may; close some")]
    TooManyOpen,
    /// The session has as many locks and waiting locks as it may.
    #[error("the client has as many locks as it may; release some")]
    TooManyLocks,
    /// The server has no memory or no room in a queue now: try again.
    #[error("the server has no room for the request now")]
    Busy,
    /// The server process is new, and clients that had locks or leases have not come back yet: it gives no new locks, or changes no
    /// files.
    #[error("the server has just started and waits for clients that had locks or leases; try again")]
    Grace,
    /// A lock is asked for again when others may have had it.
    #[error("the server restores no locks after its grace time")]
    GraceOver,
    /// The server knows no such method: it is older or newer than this program.
    #[error("the server does not know this kind of request; it speaks another version of the protocol of files")]
    UnknownMethod,
    /// The server does not serve files, or not by a version of the protocol that this program speaks.
    #[error("no files are served there: {0}")]
    NotServed(Status),
}

impl From<Errno> for CallError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl CallError {
    /// What a program is told of it.
    pub fn errno(self) -> Errno {
        match self {
            Self::Errno(errno) => errno,
            Self::NoShare => Errno::NOENT,
            Self::Stale => Errno::STALE,
            Self::Malformed => Errno::PROTO,
            Self::TooManyNodes => Errno::NFILE,
            Self::TooManyOpen => Errno::MFILE,
            Self::TooManyLocks | Self::GraceOver => Errno::NOLCK,
            Self::Busy | Self::Grace => Errno::AGAIN,
            Self::UnknownMethod => Errno::NOSYS,
            Self::NotServed(_) => Errno::PROTONOSUPPORT,
        }
    }

    /// The status on the wire: an errno, or from 4096 on the protocol's own.
    pub fn status(self) -> u16 {
        match self {
            Self::Errno(errno) => errno.raw_os_error() as u16,
            Self::NoShare => 4096,
            Self::Stale => 4097,
            Self::Malformed => 4098,
            Self::TooManyNodes => 4099,
            Self::TooManyOpen => 4100,
            Self::TooManyLocks => 4101,
            Self::Busy => 4102,
            Self::Grace => 4103,
            Self::GraceOver => 4104,
            Self::UnknownMethod => Status::UnknownMethod as u16,
            Self::NotServed(status) => status as u16,
        }
    }

    /// What a status other than 0 says.
    pub fn from_status(status: u16) -> Self {
        match status {
            1..4096 => Self::Errno(Errno::from_raw_os_error(i32::from(status))),
            4096 => Self::NoShare,
            4097 => Self::Stale,
            4099 => Self::TooManyNodes,
            4100 => Self::TooManyOpen,
            4101 => Self::TooManyLocks,
            4102 => Self::Busy,
            4103 => Self::Grace,
            4104 => Self::GraceOver,
            number => match Status::from_number(number) {
                Some(Status::Busy) => Self::Busy,
                Some(Status::UnknownMethod) => Self::UnknownMethod,
                Some(status @ (Status::UnknownProtocol | Status::Version)) => Self::NotServed(status),
                _ => Self::Malformed,
            },
        }
    }
}

/// One entry of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed<'a> {
    /// Cookie, node and attributes.
    pub head: DirectoryEntry,
    /// Its name.
    pub name: &'a [u8],
}

impl Listed<'_> {
    /// Whether the name is a single one. A client would follow another one to another directory of its own machine.
    pub fn has_single_name(&self) -> bool {
        !self.name.is_empty() && !self.name.iter().any(|byte| [0, b'/'].contains(byte))
    }
}

/// Takes the answer to `ReadDirectory` or `KeptFiles` apart. What is malformed is a `None`, and the last.
pub fn read_directory(payload: &[u8]) -> impl Iterator<Item = Option<Listed<'_>>> {
    let mut rest = Some(payload);
    std::iter::from_fn(move || {
        let bytes = rest.take().filter(|bytes| !bytes.is_empty())?;
        let listed = DirectoryEntry::read_from_prefix(bytes).ok().and_then(|(head, bytes)| {
            let (name, bytes) = bytes.split_at_checked(usize::from(head.name_len.get()))?;
            Some((Listed { head, name }, bytes))
        });
        rest = listed.map(|(_, rest)| rest);
        Some(listed.map(|(listed, _)| listed))
    })
}

#[cfg(test)]
mod tests;
