//! A program's memory, and the windows that it opens in it.
//!
//! The bytes lie in a [`Mapping`]. It counts the frames that can reach them, and the operations that will make frames. A
//! program gets references to the bytes only while that count is zero, and no operation begins while it has them. While a
//! window is open the peer may read or write at any moment: then the bytes can only be copied in and out, one by one.
//!
//! There are three kinds. *Private* memory ([`Node::register`]) is reached by this process only: bytes of puts and gets go
//! through the connection. *Shared* memory ([`Node::register_shared`]) lies in a file that is lent to a peer on the same
//! host when a window in it is opened over `shm://`; the peer then copies in and out directly, each byte once. A *caller's
//! file* ([`Node::register_file`]) is lent in this way for reading, if the caller has sealed it.
//!
//! All of the memory is lent, not only the window, and a hostile peer can continue to write there after the window is
//! closed. So memory that one peer may put into must not hold another peer's data, and references to it are not given out
//! any more.

use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use byway_reactor::{ByteRange, Mapping, PartUses, bytewise};
use smallvec::{SmallVec, smallvec};

use super::error::{InUse, SubmitError};
use super::{Node, Op, Session};
use crate::descriptor::Descriptor;
use crate::limits::SEGMENTS_MAX;
use crate::windows::WindowKey;

/// Memory that operations and windows can use; see [`Node::register`], [`Node::register_shared`] and [`Node::register_file`]. Freed when it was dropped and nothing uses it any more.
#[derive(Debug)]
pub struct Memory {
    mapping: Mapping,
    len: usize,
    user: Mutex<User>,
    /// How often the program looks at it.
    borrows: AtomicUsize,
    /// How many threads are in [`Memory::write`].
    writes: AtomicUsize,
}

/// The users of a memory.
#[derive(Debug)]
struct User {
    /// [`Node::number`] of the node that used it last.
    node: u64,
    /// Counts of the uses of its operations, which are used again.
    counts: Vec<Arc<PartUses>>,
}

/// Of that many operations at a time the counts are kept; those of more are made for each.
const COUNTS_KEPT: usize = 16;

/// A thread is in [`Memory::write`] until this is dropped.
struct Writing<'a> {
    memory: &'a Memory,
}

/// Memory that the program looks at; operations on it are refused with [`SubmitError::Borrowed`] until this is dropped.
#[derive(Debug)]
pub struct Bytes<'a> {
    memory: &'a Memory,
}

/// A range of a program's memory.
#[derive(Clone, Debug)]
pub struct Segment<'a> {
    /// The memory.
    pub memory: &'a Memory,
    /// Bytes of it.
    pub range: Range<usize>,
}

/// A window that is open to the peer of one session, or of several. Dropping it closes it; [`Window::close`] also says when the peer can no
/// longer reach the memory.
#[derive(Debug)]
pub struct Window {
    node: Node,
    sessions: Vec<Session>,
    descriptor: Descriptor,
    mapping: Option<Mapping>,
}

/// Ranges of a window of the peer, in order.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) window: WindowKey,
    pub(super) ranges: Ranges,
}

/// Bytes of a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowRange {
    /// Where they begin in the window.
    pub(super) offset: u64,
    pub(super) len: usize,
}

/// Ranges of a window. Mostly one.
pub(super) type Ranges = SmallVec<[WindowRange; 1]>;

/// The segments of an operation. Mostly one.
pub(super) type HeldSegments = SmallVec<[HeldSegment; 1]>;

/// A segment that an operation will make frames of.
#[derive(Debug)]
pub(super) struct HeldSegment {
    /// Counts the operation's frames alone.
    pub(super) mapping: Mapping,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Memory {
    pub(super) fn new(node: &Node, mapping: Mapping, len: usize) -> Self {
        Self {
            mapping,
            len,
            user: Mutex::new(User { node: node.number(), counts: Vec::new() }),
            borrows: AtomicUsize::new(0),
            writes: AtomicUsize::new(0),
        }
    }

    /// Bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A range of it, for an operation. Whether it lies in the memory is looked at there.
    pub fn segment(&self, range: Range<usize>) -> Segment<'_> {
        Segment { memory: self, range }
    }

    /// Whether operations or windows use it.
    pub fn is_in_use(&self) -> bool {
        self.mapping.uses() > 0
    }

    /// Whether processes may write there that no count covers: it is a caller's file, or a peer over shared memory once had a window
    /// for puts in it. Then only [`Memory::read`] and [`Memory::write`] can be used.
    pub fn is_exposed(&self) -> bool {
        self.mapping.is_exposed()
    }

    /// The bytes, to be read. Operations on the memory are refused meanwhile.
    ///
    /// # Errors
    /// Operations or windows use it, or it is [exposed](Memory::is_exposed).
    pub fn bytes(&self) -> Result<Bytes<'_>, InUse> {
        self.borrows.fetch_add(1, Ordering::Relaxed);
        let bytes = Bytes { memory: self };
        // An operation or write is counted before the borrows are checked, so one of the two sees the other.
        fence(Ordering::SeqCst);
        let is_written = self.writes.load(Ordering::Acquire) > 0;
        if is_written || self.mapping.uses() > 0 || self.is_exposed() { Err(InUse) } else { Ok(bytes) }
    }

    /// The bytes, to be changed.
    ///
    /// # Errors
    /// Operations or windows use it, or it is [exposed](Memory::is_exposed).
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], InUse> {
        if self.mapping.uses() > 0 || self.is_exposed() {
            return Err(InUse);
        }
        // SAFETY: mapped and initialised for `len` bytes as long as `mapping` lives. No use is left, and none begins while the
        // memory is borrowed mutably, as each begins with a reference to it; nor does a `Bytes` live. Other processes that have
        // the memory have it for reading: it is not exposed.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr(), self.len) })
    }

    /// Copies bytes from `at` on out, also while operations or peers use the memory. A byte that changes meanwhile is old or
    /// new, each byte for itself.
    ///
    /// # Errors
    /// The range does not lie in the memory.
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), SubmitError> {
        let range = self.check(&(at..at.saturating_add(into.len())))?;
        // SAFETY: within the mapping, by the check, and `into` is no part of it: `bytes_mut` borrows the memory. Other threads,
        // loops, peers and the kernel may write there: all of them by copies of this kind, or from outside of the process.
        unsafe { bytewise::copy(self.mapping.as_ptr().add(range.start), into.as_mut_ptr(), range.len()) };
        Ok(())
    }

    /// Writes bytes of it to a descriptor, behind `head`, by one system call; gives how many bytes that has taken, of both. As
    /// [`Memory::read`], also while operations or peers use the memory.
    ///
    /// # Errors
    /// `EINVAL` if the range does not lie in the memory, and the system call's.
    pub fn write_to(&self, fd: BorrowedFd<'_>, head: &[u8], range: Range<usize>) -> io::Result<usize> {
        let range = self.check(&range).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: within the mapping, by the check.
        let bytes = unsafe { self.mapping.as_ptr().add(range.start) };
        let parts = [
            libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
            libc::iovec { iov_base: bytes.cast(), iov_len: range.len() },
        ];
        loop {
            // SAFETY: the kernel reads `head`, and the mapping, which lives as long as `self`. That others write there meanwhile, by
            // copies as in `read` or from outside of the process, changes what it reads and nothing else.
            let written = unsafe { libc::writev(fd.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
            if let Ok(written) = usize::try_from(written) {
                return Ok(written);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Copies bytes in from `at` on, also while operations or peers use the memory. A peer that gets them at that moment, over
    /// a session with [checksums](super::NodeOptions::checksum), may find bytes that do not fit their checksum, and end the
    /// session.
    ///
    /// # Errors
    /// The range does not lie in the memory; [`SubmitError::Borrowed`] if the program looks at it elsewhere.
    pub fn write(&self, at: usize, from: &[u8]) -> Result<(), SubmitError> {
        let range = self.check(&(at..at.saturating_add(from.len())))?;
        let _writing = self.begin_write()?;
        // SAFETY: as in `read`; and no reference to the bytes lives, since none is made while this thread is counted.
        unsafe { bytewise::copy(from.as_ptr(), self.mapping.as_ptr().add(range.start), range.len()) };
        Ok(())
    }

    /// Where it begins, for a program in a language that answers for its own accesses. Valid as long as the memory, and then
    /// as long as something uses it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    fn check(&self, range: &Range<usize>) -> Result<Range<usize>, SubmitError> {
        if range.start <= range.end && range.end <= self.len { Ok(range.clone()) } else { Err(SubmitError::OutOfRange) }
    }

    /// Begins a use by operations of that node. Memory is one node's at a time, so that each node knows all operations on it.
    fn begin_use_by(&self, node: &Node) -> Result<Mapping, SubmitError> {
        // A panic cannot leave a number half written.
        let mut user = self.user.lock().unwrap_or_else(PoisonError::into_inner);
        if user.node != node.number() && self.mapping.uses() > 0 {
            return Err(SubmitError::OtherNode);
        }
        user.node = node.number();
        // Counted before another node is let in.
        self.begin_use(user.count())
    }

    /// Counts a write, which is no use: a node's first use may begin beside it.
    fn begin_write(&self) -> Result<Writing<'_>, SubmitError> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let writing = Writing { memory: self };
        fence(Ordering::SeqCst);
        if self.borrows.load(Ordering::Acquire) > 0 { Err(SubmitError::Borrowed) } else { Ok(writing) }
    }

    /// Begins a use, which ends when the mapping that it gives, and all that was made of it, is dropped.
    fn begin_use(&self, count: Arc<PartUses>) -> Result<Mapping, SubmitError> {
        let counted = self.mapping.counted_by(count);
        fence(Ordering::SeqCst);
        if self.borrows.load(Ordering::Acquire) > 0 { Err(SubmitError::Borrowed) } else { Ok(counted) }
    }
}

impl User {
    /// A count that nothing uses.
    fn count(&mut self) -> Arc<PartUses> {
        if let Some(count) =
            self.counts.iter_mut().find_map(|count| PartUses::is_free(count).then(|| Arc::clone(count)))
        {
            return count;
        }
        let count = Arc::<PartUses>::default();
        if self.counts.len() < COUNTS_KEPT {
            self.counts.push(Arc::clone(&count));
        }
        count
    }
}

impl Places {
    /// No bytes?
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.iter().all(|range| range.len == 0)
    }
}

impl Segment<'_> {
    pub(super) fn hold(&self, node: &Node) -> Result<HeldSegment, SubmitError> {
        let range = self.memory.check(&self.range)?;
        Ok(HeldSegment { mapping: self.memory.begin_use_by(node)?, start: range.start, len: range.len() })
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`; there was no use when this was made, and none begins while it lives: so it is not lent either.
        unsafe { std::slice::from_raw_parts(self.memory.mapping.as_ptr(), self.memory.len) }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.memory.writes.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        self.memory.borrows.fetch_sub(1, Ordering::Release);
    }
}

impl Window {
    pub(super) fn new(node: Node, sessions: Vec<Session>, descriptor: Descriptor, mapping: Mapping) -> Self {
        Self { node, sessions, descriptor, mapping: Some(mapping) }
    }

    /// What the peer needs to use it.
    pub fn descriptor(&self) -> Descriptor {
        self.descriptor
    }

    /// For whose peers it is open.
    pub fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// Closes it. The operation ends when the peer can no longer reach the memory by it: what it was writing has come, or its
    /// session has ended. Of memory that the peer was lent it says so
    /// itself, so its program must turn its node. It may keep the memory mapped, for the next window; a hostile one may use it.
    ///
    /// # Errors
    /// The child of a fork.
    pub fn close(mut self) -> Result<Op, SubmitError> {
        let mapping = self.mapping.take().ok_or(SubmitError::NoSession)?;
        self.node.close_window(std::mem::take(&mut self.sessions), self.descriptor, mapping)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.take() {
            // In the child of a fork: the window is its parent's.
            let _ = self.node.close_window(std::mem::take(&mut self.sessions), self.descriptor, mapping);
        }
    }
}

impl Descriptor {
    /// Itself, if it is for puts.
    pub(super) fn writable(&self) -> Result<&Self, SubmitError> {
        if self.rights().put { Ok(self) } else { Err(SubmitError::Rights) }
    }

    /// Itself, if it is for gets.
    pub(super) fn readable(&self) -> Result<&Self, SubmitError> {
        if self.rights().get { Ok(self) } else { Err(SubmitError::Rights) }
    }

    /// One range.
    pub(super) fn place(&self, window: WindowKey, offset: u64, len: usize) -> Result<Places, SubmitError> {
        self.check(offset, len)?;
        Ok(Places { window, ranges: smallvec![WindowRange { offset, len }] })
    }

    /// Several ranges, of `len` bytes in all.
    pub(super) fn places(&self, window: WindowKey, ranges: &[Range<u64>], len: usize) -> Result<Places, SubmitError> {
        if ranges.len() > SEGMENTS_MAX {
            return Err(SubmitError::TooLong);
        }
        let place = |range: &Range<u64>| {
            let len = range.end.checked_sub(range.start).and_then(|len| usize::try_from(len).ok());
            let range = WindowRange { offset: range.start, len: len.ok_or(SubmitError::OutOfRange)? };
            self.check(range.offset, range.len).map(|()| range)
        };
        let ranges: Ranges = ranges.iter().map(place).collect::<Result<_, _>>()?;
        let all = ranges.iter().try_fold(0usize, |sum, range| sum.checked_add(range.len));
        if all == Some(len) { Ok(Places { window, ranges }) } else { Err(SubmitError::OutOfRange) }
    }

    pub(super) fn check(&self, offset: u64, len: usize) -> Result<(), SubmitError> {
        let inside = ByteRange::new(offset, len as u64).ends_by(self.len());
        if inside { Ok(()) } else { Err(SubmitError::OutOfRange) }
    }
}
