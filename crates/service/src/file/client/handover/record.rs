//! The bytes in which a client's state travels to another process. docs/wire.md draws them.
//!
//! A [`Head`], then the records that it counts: nodes with their names, open files with the groups of their openers, locks, changes that
//! no sync has followed, nodes to be forgotten, files to be closed, and nodes of which the kernel may have pages. Little-endian.

use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::limits::{CALL_GROUPS_MAX, FILE_SLOTS, FILE_STATE_RECORDS_MAX};

/// The client, and how many records follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Head {
    /// The client's name at the server.
    pub(crate) name: [u8; 16],
    /// When the last call was sent that was answered, in nanoseconds since this machine started.
    pub(crate) heard: U64,
    /// The server process of the last session that worked.
    pub(crate) instance: U64,
    /// The number of the last session.
    pub(crate) session: U64,
    /// The last attach: server process, what it had of the client, and the epoch; 0 if there was none.
    pub(crate) attached_instance: U64,
    pub(crate) attached_state: U64,
    pub(crate) attached_epoch: U64,
    /// The last number of a node or handle.
    pub(crate) last: U64,
    /// The epoch of nodes that the server holds.
    pub(crate) held_epoch: U64,
    /// The epoch of the locks; 0 while they are asked for again.
    pub(crate) locks_epoch: U64,
    /// When a name was removed, in nanoseconds since this machine started; 0 if none was.
    pub(crate) removed: U64,
    /// Changes that were counted, and losses.
    pub(crate) changes: U64,
    pub(crate) losses: U64,
    /// Numbers of records.
    pub(crate) nodes: U32,
    pub(crate) handles: U32,
    pub(crate) locks: U32,
    pub(crate) unsynced: U32,
    pub(crate) forgotten: U32,
    pub(crate) unclosed: U32,
    pub(crate) pages: U32,
    /// [`GRANTED`].
    pub(crate) flags: U32,
    /// The last call of each slot, from slot 1.
    pub(crate) slots: [U16; FILE_SLOTS as usize],
}

/// [`Head`]: the server has given a lease once.
pub(crate) const GRANTED: u32 = 1;

/// A file or directory that the kernel knows. Its name follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Node {
    pub(crate) number: U64,
    pub(crate) parent: U64,
    pub(crate) file: File,
    pub(crate) remote: Remote,
    pub(crate) answers: U64,
    pub(crate) look_ups: U64,
    /// [`REMOVED`] and others.
    pub(crate) flags: U16,
    pub(crate) name_len: U16,
}

/// [`Node`]: a name of it was removed.
pub(crate) const REMOVED: u16 = 1;
/// [`Node`], [`Handle`]: a directory.
pub(crate) const DIRECTORY: u16 = 2;
/// [`Node`]: the last that was seen under its name.
pub(crate) const NAMED: u16 = 4;
/// [`Node`]: the last that was seen of this identity.
pub(crate) const IDENTIFIED: u16 = 8;

/// What makes a file the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct File {
    pub(crate) ino: U64,
    pub(crate) subvolume: U64,
    pub(crate) born_s: I64,
    pub(crate) born_ns: U32,
}

/// The server's name of something, in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Remote {
    pub(crate) epoch: U64,
    pub(crate) name: U64,
}

/// An open file. The groups of its opener follow, of 4 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Handle {
    pub(crate) number: U64,
    pub(crate) node: U64,
    pub(crate) remote: Remote,
    pub(crate) losses_seen: U64,
    pub(crate) open_flags: U32,
    pub(crate) uid: U32,
    pub(crate) gid: U32,
    /// [`DIRECTORY`], [`LOST_LOCKS`].
    pub(crate) flags: U16,
    /// How the kernel uses it: 0 not, 1 reads by its cache, 2 reads past it, 3 writes.
    pub(crate) used: u8,
    pub(crate) group_count: u8,
}

/// [`Handle`]: locks of the file were lost while it was open.
pub(crate) const LOST_LOCKS: u16 = 16;

/// A lock that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Lock {
    pub(crate) node: U64,
    pub(crate) owner: U64,
    pub(crate) start: U64,
    pub(crate) last: U64,
    pub(crate) pid: U32,
    /// 1: of the whole file (`flock`). 2: exclusive.
    pub(crate) flags: U32,
}

pub(crate) const WHOLE: u32 = 1;
pub(crate) const EXCLUSIVE: u32 = 2;

/// A file with changes that no sync has followed, or with changes that were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Unsynced {
    pub(crate) file: File,
    /// 1: changes that no sync has followed. 2: attributes are among them.
    pub(crate) flags: U32,
    pub(crate) instance: U64,
    pub(crate) change: U64,
    pub(crate) lost_at: U64,
}

pub(crate) const MARKED: u32 = 1;
pub(crate) const ATTRIBUTES: u32 = 2;

/// A node that the server has not been told to forget yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ToForget {
    pub(crate) remote: Remote,
    pub(crate) answers: U64,
}

const _: () = assert!(size_of::<Head>() == 144 + 2 * FILE_SLOTS as usize && size_of::<Node>() == 80);
const _: () = assert!(size_of::<Handle>() == 56 && size_of::<Lock>() == 40 && size_of::<Unsynced>() == 56);
const _: () = assert!(size_of::<ToForget>() == 24 && CALL_GROUPS_MAX <= 255);

/// Why a state cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the state of the mount's process cannot be read: {0}")]
pub struct StateError(pub(crate) &'static str);

/// Takes records one after the other.
pub(crate) struct Records<'a>(pub(crate) &'a [u8]);

impl<'a> Records<'a> {
    pub(crate) fn take<T: FromBytes + KnownLayout + Immutable + Unaligned>(&mut self) -> Result<&'a T, StateError> {
        let (record, rest) = T::ref_from_prefix(self.0).map_err(|_| StateError("it is too short"))?;
        self.0 = rest;
        Ok(record)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], StateError> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(StateError("it is too short"))?;
        self.0 = rest;
        Ok(bytes)
    }

    /// So many records.
    pub(crate) fn take_all<T: FromBytes + KnownLayout + Immutable + Unaligned + 'a>(
        &mut self,
        count: U32,
    ) -> Result<impl Iterator<Item = Result<&'a T, StateError>>, StateError> {
        let count = count.get() as usize;
        if count > FILE_STATE_RECORDS_MAX {
            return Err(StateError("it has too many records of one kind"));
        }
        let bytes = self.bytes(count * size_of::<T>())?;
        Ok(bytes.chunks_exact(size_of::<T>()).map(|one| T::ref_from_bytes(one).map_err(|_| StateError("a record"))))
    }
}
