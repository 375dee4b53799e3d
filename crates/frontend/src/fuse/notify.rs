//! Notifications to the kernel that cached data is stale.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::{
    InvalidateEntryOut, InvalidateInodeOut, NOTIFY_INVALIDATE_ENTRY, NOTIFY_INVALIDATE_INODE, NOTIFY_RESEND, OutHeader,
};
use super::channel::Channel;

thread_local! {
    /// Whether this thread reads requests of a mount.
    static SERVES: Cell<bool> = const { Cell::new(false) };
}

/// Notes that the calling thread reads requests from now on.
pub(super) fn note_serving() {
    SERVES.set(true);
}

/// Why the kernel was not told.
#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    /// The calling thread reads requests.
    #[error(
        "an invalidation from a thread that serves requests: it waits for pages that only such a thread can free; send it from \
         another one (a bug of byway)"
    )]
    ServingThread,
    /// A name that no directory has.
    #[error("a name of {0} bytes: names have 1 to 255 (a bug of byway)")]
    Name(usize),
    /// The kernel's.
    #[error("the kernel refused a notification: {0}")]
    Kernel(io::Error),
}

/// Sends invalidations. They wait until pages under way are free, which may need requests to be answered: so they are sent
/// by threads that serve none.
#[derive(Clone, Debug)]
pub struct Notifier {
    channel: Arc<Channel>,
}

impl Notifier {
    /// For the mount of this channel.
    pub fn new(channel: Arc<Channel>) -> Self {
        Self { channel }
    }

    /// A node's attributes are stale, and its cached pages from `offset` on: `len` bytes, all if `len` is 0. Returns when they are
    /// gone; false if the kernel does not know the node.
    ///
    /// # Errors
    /// See [`NotifyError`].
    pub fn invalidate_inode(&self, node: u64, offset: i64, len: i64) -> Result<bool, NotifyError> {
        self.send(NOTIFY_INVALIDATE_INODE, &[InvalidateInodeOut { node, offset, len }.as_bytes()])
    }

    /// A node's attributes are stale; its pages stay. Waits for no page, so threads that serve requests may call it. False if the
    /// kernel does not know the node.
    ///
    /// # Errors
    /// See [`NotifyError`].
    pub fn invalidate_attributes(&self, node: u64) -> Result<bool, NotifyError> {
        self.write(NOTIFY_INVALIDATE_INODE, &[InvalidateInodeOut { node, offset: -1, len: 0 }.as_bytes()])
    }

    /// What a directory has under a name is stale. False if the kernel does not know it.
    ///
    /// # Errors
    /// See [`NotifyError`].
    pub fn invalidate_entry(&self, parent: u64, name: &[u8]) -> Result<bool, NotifyError> {
        if name.is_empty() || name.len() > 255 {
            return Err(NotifyError::Name(name.len()));
        }
        let head = InvalidateEntryOut { parent, name_bytes: name.len() as u32, flags: 0 };
        self.send(NOTIFY_INVALIDATE_ENTRY, &[head.as_bytes(), name, &[0]])
    }

    /// Has the kernel send again all requests that were read and not answered, before new ones: a process that has died read them. Bit 63
    /// of their numbers is set. Waits for nothing. To be called before this process reads a request.
    ///
    /// # Errors
    /// [`NotifyError::Kernel`], with `EINVAL` where [`Terms::resends`](super::session::Terms::resends) is false.
    pub fn resend(&self) -> Result<(), NotifyError> {
        self.write(NOTIFY_RESEND, &[]).map(|_| ())
    }

    fn send(&self, code: i32, parts: &[&[u8]]) -> Result<bool, NotifyError> {
        if SERVES.get() {
            return Err(NotifyError::ServingThread);
        }
        self.write(code, parts)
    }

    fn write(&self, code: i32, parts: &[&[u8]]) -> Result<bool, NotifyError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let header = OutHeader { len: (size_of::<OutHeader>() + bytes) as u32, error: code, unique: 0 };
        match self.channel.write(header, parts) {
            Ok(()) => Ok(true),
            // ENOTDIR: the parent's number is another file's now.
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(error) => Err(NotifyError::Kernel(error.into())),
        }
    }
}
