//! The methods of the file service.

#[cfg(doc)]
use super::*;

/// What a call asks for. `node` and `second` are the fields of [`Arguments`]; names and data lie in the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Method {
    /// Use the share whose name is the payload. Answers an [`AttachResult`] and the root's [`Entry`].
    Attach = 1,
    /// List the shares that the client may use, from index `offset` on.
    List = 2,
    /// Find `name` in the directory `node`. Answers an [`Entry`].
    LookUp = 3,
    /// Forget nodes: the payload is a list of [`Forgotten`].
    Forget = 4,
    /// Attributes of `node`, or of the open file `second` if it is not 0.
    GetAttributes = 5,
    /// Change attributes; the payload is a [`NewAttributes`].
    SetAttributes = 6,
    /// The target of the symbolic link `node`.
    ReadLink = 7,
    /// Make a symbolic link `name` in `node`; the second name is its target.
    MakeSymlink = 8,
    /// Make a regular file, FIFO or socket node.
    MakeNode = 9,
    /// Make a directory.
    MakeDirectory = 10,
    /// Remove the entry `name` of a file.
    Unlink = 11,
    /// Remove the empty directory `name`.
    RemoveDirectory = 12,
    /// Rename `name` in `node` to the second name in `second`, with the flags of `renameat2`.
    Rename = 13,
    /// Give the file `node` another name in the directory `second`.
    Link = 14,
    /// Open the file `node`.
    Open = 15,
    /// Make and open `name` in `node`. Answers an [`OpenResult`] and an [`Entry`].
    Create = 16,
    /// Make and open a file without a name in the directory `node` (`O_TMPFILE`).
    CreateUnnamed = 17,
    /// Read from the open file `node`.
    Read = 18,
    /// Write to the open file `node`: up to 16 KiB with the call, else got from the window.
    Write = 19,
    /// Close the open file or directory `node`.
    Close = 20,
    /// Make the open file or directory `node` durable.
    Sync = 21,
    /// Open the directory `node`.
    OpenDirectory = 22,
    /// List the open directory `node` from the cookie `offset` on.
    ReadDirectory = 23,
    /// Sizes of the file system that `node` lies in. Answers a [`FileSystem`].
    StatFileSystem = 24,
    /// The extended attribute `name` of `node`.
    GetXattr = 25,
    /// Set it to the data behind the name.
    SetXattr = 26,
    /// The names of all.
    ListXattrs = 27,
    /// Remove it.
    RemoveXattr = 28,
    /// `fallocate` of the open file `node`.
    Allocate = 29,
    /// `lseek` for data or a hole. Answers the offset.
    Seek = 30,
    /// Copy from the open file `node` at `offset` to `second` at `extra`. Answers the number of bytes.
    CopyRange = 31,
    /// Lock or unlock a range of the open file `node`, or all of it. Answers a [`LockResult`] if it only asks.
    Lock = 32,
    /// Whether the caller has the rights of `mode` (`access(2)`) on `node`.
    Access = 33,
    /// The client does not come back: what it holds is let go at once.
    Detach = 34,
    /// Return leases and wait for recalls: the payload of both is a list of [`Lease`]. A session that calls this gets leases.
    Recalls = 35,
    /// The client has asked a new server process for all locks that it had, and believes no lease of an earlier session.
    ReclaimComplete = 36,
    /// The removed files that the process before has kept for the client in the share of the node `node`, from inode number `offset`
    /// on: as `ReadDirectory` with nodes, without names. They are the client's until it forgets them.
    KeptFiles = 37,
    /// Make durable what was changed in the share of the node `node`: data, names and attributes, also of files that are not open.
    SyncShare = 38,
}

impl Method {
    /// Whether its answer is an open file or directory.
    pub const fn opens(self) -> bool {
        matches!(self, Self::Open | Self::Create | Self::CreateUnnamed | Self::OpenDirectory)
    }

    /// Whether it changes something in the share.
    pub const fn changes(self) -> bool {
        use Method as M;
        matches!(
            self,
            M::SetAttributes
                | M::MakeSymlink
                | M::MakeNode
                | M::MakeDirectory
                | M::Unlink
                | M::RemoveDirectory
                | M::Rename
                | M::Link
                | M::Create
                | M::CreateUnnamed
                | M::Write
                | M::SetXattr
                | M::RemoveXattr
                | M::Allocate
                | M::CopyRange
        )
    }

    /// Whether a client gives the call a slot, in which the server keeps the answer: the call changes something, its answer names
    /// something that the client holds from then on, or the kernel gives it once, as it does a failed write-back.
    pub const fn takes_slot(self) -> bool {
        use Method as M;
        let holds = matches!(self, M::LookUp | M::Open | M::OpenDirectory | M::ReadDirectory | M::Forget);
        self.changes() || holds || matches!(self, M::Sync)
    }

    /// The method of that number.
    pub fn from_number(number: u16) -> Option<Self> {
        use Method as M;
        const ALL: [M; 38] = [
            M::Attach,
            M::List,
            M::LookUp,
            M::Forget,
            M::GetAttributes,
            M::SetAttributes,
            M::ReadLink,
            M::MakeSymlink,
            M::MakeNode,
            M::MakeDirectory,
            M::Unlink,
            M::RemoveDirectory,
            M::Rename,
            M::Link,
            M::Open,
            M::Create,
            M::CreateUnnamed,
            M::Read,
            M::Write,
            M::Close,
            M::Sync,
            M::OpenDirectory,
            M::ReadDirectory,
            M::StatFileSystem,
            M::GetXattr,
            M::SetXattr,
            M::ListXattrs,
            M::RemoveXattr,
            M::Allocate,
            M::Seek,
            M::CopyRange,
            M::Lock,
            M::Access,
            M::Detach,
            M::Recalls,
            M::ReclaimComplete,
            M::KeptFiles,
            M::SyncShare,
        ];
        ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}
