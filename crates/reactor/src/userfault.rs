//! userfaultfd(2): page faults of chosen ranges handed to a program, and events about changes of these ranges.
//!
//! A [`Userfault`] belongs to the address space of the process that made it. Its descriptor can be handed to another process, which
//! then answers the faults: every call but [`Userfault::move_pages`] works from there (that one is `EINVAL`).
//!
//! A thread that faults, or that changes a watched mapping, waits until its message is [read](Userfault::read), and a fault
//! until it is answered. While such a change is under way, or its message unread, calls that fill or move pages fail with
//! [`FillError::Changing`]: the caller reads the messages first, then looks again whether the page is still to be filled.

pub mod dead_mans_switch;
pub mod helper;
mod message;
pub mod pagemap;
pub mod split;

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general as sys;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;

pub use self::message::{Event, FaultKind, Read};

/// What a userfaultfd must be able to do (`UFFD_FEATURE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

/// Which faults of a range are handed over (`UFFDIO_REGISTER_MODE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes(u64);

/// Why no userfaultfd could be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The kernel has none.
    #[error("this kernel has no userfaultfd, or a seccomp filter hides it")]
    Missing,
    /// It may not be used.
    #[error(
        "userfaultfd is refused: run as root, set vm.unprivileged_userfaultfd=1, or give the user the right to open /dev/userfaultfd"
    )]
    NotPermitted,
    /// A limit on descriptors or memory is reached.
    #[error("cannot open a userfaultfd, for lack of descriptors or memory: raise the limit on open files")]
    NoRoom,
    /// The kernel does not have these features, or refuses one (`EVENT_FORK` without `CAP_SYS_PTRACE`).
    #[error("this kernel's userfaultfd lacks a feature, or refuses it to this user")]
    Features,
}

/// Why pages were not filled, protected or moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// `EAGAIN`: a mapping is being changed, or a message about that is unread. Read the messages, then look again.
    #[error("a mapping is being changed; read the messages and look again")]
    Changing,
    /// `EEXIST`: the page is there.
    #[error("the page is there")]
    Exists,
    /// `ENOENT`: no watched mapping lies there, or no page to move.
    #[error("no watched mapping lies there, or no page")]
    NoMapping,
    /// `EBUSY`: the page is pinned, or shared with a forked child; it cannot be moved now.
    #[error("the page is pinned, or shared with a forked child")]
    Busy,
    /// `ESRCH`: the process is gone.
    #[error("the process is gone")]
    Gone,
    /// Another error of the kernel's.
    #[error("{0}")]
    Other(Errno),
}

/// What was done before a call ended: all, or so many bytes and why no more.
pub type Filled = Result<(), Partly>;

/// A call that did not do all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error} ({bytes} bytes were done before)")]
pub struct Partly {
    /// Bytes done from the start of the range on.
    pub bytes: usize,
    /// Why not the next page.
    pub error: FillError,
}

/// See the module.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
}

impl Features {
    /// Write protection that the kernel lifts by itself: no fault is raised.
    pub const WRITE_PROTECT_ASYNC: Self = Self(sys::UFFD_FEATURE_WP_ASYNC as u64);
    /// Faults of write protection.
    pub const WRITE_PROTECT: Self = Self(sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64);
    /// Write protection of shared memory.
    pub const WRITE_PROTECT_SHARED: Self = Self(sys::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64);
    /// Write protection of pages that are not there yet.
    pub const WRITE_PROTECT_UNPOPULATED: Self = Self(sys::UFFD_FEATURE_WP_UNPOPULATED as u64);
    /// [`Event::Unmapped`].
    pub const UNMAP: Self = Self(sys::UFFD_FEATURE_EVENT_UNMAP as u64);
    /// [`Event::Remapped`].
    pub const REMAP: Self = Self(sys::UFFD_FEATURE_EVENT_REMAP as u64);
    /// [`Event::Removed`].
    pub const REMOVE: Self = Self(sys::UFFD_FEATURE_EVENT_REMOVE as u64);
    /// [`Event::Forked`]; needs `CAP_SYS_PTRACE` of the process that asks for it.
    pub const FORK: Self = Self(sys::UFFD_FEATURE_EVENT_FORK as u64);
    /// The thread of each fault.
    pub const THREAD: Self = Self(sys::UFFD_FEATURE_THREAD_ID as u64);
    /// [`Userfault::move_pages`] (Linux 6.8).
    pub const MOVE: Self = Self(sys::UFFD_FEATURE_MOVE as u64);
    /// [`Userfault::poison`] (Linux 6.6).
    pub const POISON: Self = Self(sys::UFFD_FEATURE_POISON as u64);
    /// [`Modes::MINOR`] on shared memory, and [`Userfault::resume`].
    pub const MINOR_SHARED: Self = Self(sys::UFFD_FEATURE_MINOR_SHMEM as u64);
    /// [`Modes::MISSING`] on shared memory.
    pub const MISSING_SHARED: Self = Self(sys::UFFD_FEATURE_MISSING_SHMEM as u64);

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Modes {
    /// A page that is not there.
    pub const MISSING: Self = Self(sys::UFFDIO_REGISTER_MODE_MISSING as u64);
    /// A write to a page that is protected ([`Userfault::write_protect`]).
    pub const WRITE_PROTECT: Self = Self(sys::UFFDIO_REGISTER_MODE_WP as u64);
    /// A page of shared memory that is in the page cache, and not in this mapping.
    pub const MINOR: Self = Self(sys::UFFDIO_REGISTER_MODE_MINOR as u64);

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl FillError {
    fn of(error: Errno) -> Self {
        match error {
            Errno::AGAIN => Self::Changing,
            Errno::EXIST => Self::Exists,
            Errno::NOENT => Self::NoMapping,
            Errno::BUSY => Self::Busy,
            Errno::SRCH => Self::Gone,
            other => Self::Other(other),
        }
    }
}

/// What the kernel calls the group of these calls.
const GROUP: u8 = sys::UFFDIO as u8;
const API: Opcode = opcode::read_write::<sys::uffdio_api>(GROUP, sys::_UFFDIO_API as u8);
const REGISTER: Opcode = opcode::read_write::<sys::uffdio_register>(GROUP, sys::_UFFDIO_REGISTER as u8);
const UNREGISTER: Opcode = opcode::read::<sys::uffdio_range>(GROUP, sys::_UFFDIO_UNREGISTER as u8);
const WAKE: Opcode = opcode::read::<sys::uffdio_range>(GROUP, sys::_UFFDIO_WAKE as u8);
const COPY: Opcode = opcode::read_write::<sys::uffdio_copy>(GROUP, sys::_UFFDIO_COPY as u8);
const ZEROPAGE: Opcode = opcode::read_write::<sys::uffdio_zeropage>(GROUP, sys::_UFFDIO_ZEROPAGE as u8);
const MOVE: Opcode = opcode::read_write::<sys::uffdio_move>(GROUP, sys::_UFFDIO_MOVE as u8);
const WRITEPROTECT: Opcode = opcode::read_write::<sys::uffdio_writeprotect>(GROUP, sys::_UFFDIO_WRITEPROTECT as u8);
const CONTINUE: Opcode = opcode::read_write::<sys::uffdio_continue>(GROUP, sys::_UFFDIO_CONTINUE as u8);
const POISON: Opcode = opcode::read_write::<sys::uffdio_poison>(GROUP, sys::_UFFDIO_POISON as u8);

/// `USERFAULTFD_IOC_NEW` of /dev/userfaultfd: the flags are the argument itself.
const NEW: Opcode = opcode::none(GROUP, 0);
/// `UFFDIO_WRITEPROTECT_MODE_*`.
const PROTECT: u64 = 1;
const PROTECT_DONTWAKE: u64 = 2;

impl Userfault {
    /// Makes one for this process, with these features; faults that the kernel raises on the process's behalf (in system calls) are
    /// handed over too, unless `user_mode_only`. It is non-blocking and closed by exec.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(features: Features, user_mode_only: bool) -> Result<Self, OpenError> {
        let userfault = Self { fd: create(user_mode_only)? };
        userfault.agree(features)?;
        Ok(userfault)
    }

    /// Makes one for this process that is to be handed to another process, which [agrees](Self::agree) on its features.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn create() -> Result<OwnedFd, OpenError> {
        create(false)
    }

    /// Takes over one of another process.
    ///
    /// # Safety
    /// It is a userfaultfd of another process's address space; or the caller answers for what fills the watched ranges of this one.
    pub unsafe fn of_other_process(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Agrees with the kernel on features: once, before anything else.
    ///
    /// # Errors
    /// [`OpenError::Features`].
    pub fn agree(&self, features: Features) -> Result<(), OpenError> {
        let mut api = sys::uffdio_api { api: sys::UFFD_API.into(), features: features.0, ioctls: 0 };
        // SAFETY: the structure is that of the call.
        unsafe { ioctl(&self.fd, Updater::<API, _>::new(&mut api)) }.map_err(|_| OpenError::Features)
    }

    /// Has faults and events of a range handed over, all of which must be mapped: whole pages. A mapping has one userfaultfd.
    ///
    /// # Safety
    /// A range of this process is not referred to while its pages may be missing, or their contents are filled so that what
    /// refers to them finds what it relies on. With [`Modes::WRITE_PROTECT`] alone, or in another process, nothing is asked for.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has a mapping in it. `EINVAL`: mappings that cannot be watched so, or none.
    pub unsafe fn register(&self, range: Range<usize>, modes: Modes) -> Result<(), Errno> {
        let mut request = sys::uffdio_register { range: raw(&range), mode: modes.0, ioctls: 0 };
        // SAFETY: the structure is that of the call; what it changes about accesses is the caller's to answer for.
        unsafe { ioctl(&self.fd, Updater::<REGISTER, _>::new(&mut request)) }
    }

    /// Ends that, and wakes waiting threads. Parts of the range that are unmapped or watched by others are ignored.
    pub fn unregister(&self, range: Range<usize>) {
        // SAFETY: the structure is that of the call, which ends only what `register` began.
        let _ = unsafe { ioctl(&self.fd, Setter::<UNREGISTER, _>::new(raw(&range))) };
    }

    /// Fills missing pages from `to` on, and wakes the threads that wait for them. With `protect` they are write-protected from the
    /// start. A page that is there is not touched ([`FillError::Exists`]).
    ///
    /// # Errors
    /// See [`Partly`].
    pub fn copy(&self, to: usize, from: &[u8], protect: bool) -> Filled {
        let mode = if protect { sys::UFFDIO_COPY_MODE_WP.into() } else { 0 };
        let (src, len) = (from.as_ptr().expose_provenance() as u64, from.len() as u64);
        let mut request = sys::uffdio_copy { dst: to as u64, src, len, mode, copy: 0 };
        // SAFETY: the structure is that of the call, which reads `from` and fills only missing pages of registered ranges.
        let done = unsafe { ioctl(&self.fd, Updater::<COPY, _>::new(&mut request)) };
        filled(done, request.copy)
    }

    /// As [`Userfault::copy`], with zeroes. They take no memory until they are written to; that write raises no fault.
    ///
    /// # Errors
    /// See [`Partly`].
    pub fn zero(&self, range: Range<usize>) -> Filled {
        let mut request = sys::uffdio_zeropage { range: raw(&range), mode: 0, zeropage: 0 };
        // SAFETY: the structure is that of the call, which fills only missing pages of registered ranges.
        let done = unsafe { ioctl(&self.fd, Updater::<ZEROPAGE, _>::new(&mut request)) };
        filled(done, request.zeropage)
    }

    /// Maps pages that are in the page cache ([`Modes::MINOR`]), and wakes the threads that wait for them; write-protected from the start
    /// with `protect`.
    ///
    /// # Errors
    /// See [`Partly`].
    pub fn resume(&self, range: Range<usize>, protect: bool) -> Filled {
        // UFFDIO_CONTINUE_MODE_WP.
        let mode = if protect { 2 } else { 0 };
        let mut request = sys::uffdio_continue { range: raw(&range), mode, mapped: 0 };
        // SAFETY: the structure is that of the call, which maps pages that the file has.
        let done = unsafe { ioctl(&self.fd, Updater::<CONTINUE, _>::new(&mut request)) };
        filled(done, request.mapped)
    }

    /// Makes writes to a range fault, or no longer; then the threads that wait are woken, unless `keep_waiting`.
    ///
    /// # Errors
    /// See [`FillError`].
    pub fn write_protect(&self, range: Range<usize>, protect: bool, keep_waiting: bool) -> Result<(), FillError> {
        let mode = if protect { PROTECT } else { 0 } | if keep_waiting && !protect { PROTECT_DONTWAKE } else { 0 };
        let mut request = sys::uffdio_writeprotect { range: raw(&range), mode };
        // SAFETY: the structure is that of the call, which changes no contents.
        unsafe { ioctl(&self.fd, Updater::<WRITEPROTECT, _>::new(&mut request)) }.map_err(FillError::of)
    }

    /// Makes accesses to missing pages end in SIGBUS, and wakes the threads that wait for them.
    ///
    /// # Errors
    /// See [`Partly`].
    pub fn poison(&self, range: Range<usize>) -> Filled {
        let mut request = sys::uffdio_poison { range: raw(&range), mode: 0, updated: 0 };
        // SAFETY: the structure is that of the call, which touches only missing pages of registered ranges.
        let done = unsafe { ioctl(&self.fd, Updater::<POISON, _>::new(&mut request)) };
        filled(done, request.updated)
    }

    /// Moves anonymous private pages of this process to a place that has none. The destination must be registered.
    ///
    /// # Safety
    /// What refers to the pages at `from` finds none there, and is answered as `register` asks for; nothing lies at `to`: a page there would
    /// be taken for one that was moved.
    ///
    /// # Errors
    /// See [`Partly`]: `NoMapping` where no page lies; `Busy` for a pinned page, or one that a fork shares; `EINVAL` from another process,
    /// and between mappings that are not alike (rights, locks).
    pub unsafe fn move_pages(&self, to: usize, from: usize, len: usize) -> Filled {
        let mut moved = 0;
        while moved < len {
            // SAFETY: as the caller promises.
            match unsafe { self.move_some(to + moved, from + moved, len - moved) } {
                Ok(()) => break,
                Err(Partly { bytes, .. }) if bytes > 0 => moved += bytes,
                // Linux 6.18 moves a page that it migrates at the same time (compaction), tries once more, and finds it at its new place: EEXIST.
                // At the end of an earlier call that may have happened unseen, and this one may fail otherwise before it looks.
                Err(_) if is_mapped(to + moved) => moved += helper::PAGE_BYTES,
                Err(Partly { error, .. }) => return Err(Partly { bytes: moved, error }),
            }
        }
        Ok(())
    }

    /// One call, which may end after some pages.
    ///
    /// # Safety
    /// As for [`Userfault::move_pages`].
    unsafe fn move_some(&self, to: usize, from: usize, len: usize) -> Filled {
        let mut request = sys::uffdio_move { dst: to as u64, src: from as u64, len: len as u64, mode: 0, move_: 0 };
        // SAFETY: the structure is that of the call; what becomes of the pages is the caller's to answer for.
        let done = unsafe { ioctl(&self.fd, Updater::<MOVE, _>::new(&mut request)) };
        filled(done, request.move_)
    }

    /// Whether the address space is gone: its process has ended, or runs another file. The kernel says so where a page could be protected
    /// that is in no mapping.
    pub fn is_gone(&self) -> bool {
        self.write_protect(4096..8192, false, true) == Err(FillError::Gone)
    }

    /// Wakes the threads that wait in a range: they fault again if their page is still missing.
    pub fn wake(&self, range: Range<usize>) {
        // SAFETY: the structure is that of the call.
        let _ = unsafe { ioctl(&self.fd, Setter::<WAKE, _>::new(raw(&range))) };
    }

    /// Reads messages that are there; `take` gets each. A thread that changed a mapping goes on as soon as its message has been read.
    /// It allocates nothing.
    pub fn read(&self, take: impl FnMut(Event)) -> Read {
        message::read(&self.fd, take)
    }

    /// Whether no change of a watched mapping is pending or on its way.
    ///
    /// The kernel counts such changes from before the first page goes until the call that makes them has found its message
    /// read, and refuses to write-protect meanwhile. To protect no pages is refused in another way otherwise.
    pub fn is_quiet(&self) -> bool {
        matches!(self.write_protect(0..0, false, false), Err(FillError::Other(Errno::INVAL)))
    }

    /// The number of the descriptor.
    pub fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// By the system call; where it is refused, by the device, whose file may be opened to a group.
fn create(user_mode_only: bool) -> Result<OwnedFd, OpenError> {
    let mut flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    if user_mode_only {
        flags |= UserfaultfdFlags::from_bits_retain(sys::UFFD_USER_MODE_ONLY);
    }
    // SAFETY: nothing is registered yet.
    match unsafe { rustix::mm::userfaultfd(flags) } {
        Ok(fd) => Ok(fd),
        Err(Errno::NOSYS) => Err(OpenError::Missing),
        Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Err(OpenError::NoRoom),
        Err(_) => of_device(flags).ok_or(OpenError::NotPermitted),
    }
}

fn of_device(flags: UserfaultfdFlags) -> Option<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    let device = open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    // SAFETY: the call takes flags and gives a new descriptor.
    unsafe { ioctl(&device, message::NewDescriptor::<NEW>::new(flags.bits())) }.ok()
}

fn raw(range: &Range<usize>) -> sys::uffdio_range {
    sys::uffdio_range { start: range.start as u64, len: range.end.saturating_sub(range.start) as u64 }
}

/// Whether an anonymous page lies at an address.
fn is_mapped(at: usize) -> bool {
    let mut resident = 0_u8;
    let page = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the call looks at the page's entry alone, and writes one byte for one page.
    let looked = unsafe { libc::mincore(page, helper::PAGE_BYTES, &raw mut resident) };
    looked == 0 && resident & 1 == 1
}

/// The kernel says how far it came also where it failed: a negative number is the error of the first page.
fn filled(done: Result<(), Errno>, bytes: i64) -> Filled {
    match done {
        Ok(()) => Ok(()),
        Err(error) => {
            // After a part `EAGAIN` says that there is more to do, and the next try says why it was not done.
            Err(Partly { bytes: usize::try_from(bytes).unwrap_or(0), error: FillError::of(error) })
        }
    }
}

#[cfg(test)]
mod tests;
