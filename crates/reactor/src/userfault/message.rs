//! The kernel's messages (`struct uffd_msg`).

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general as sys;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};

use super::Userfault;

/// Messages read by one call.
const BATCH: usize = 16;
const MESSAGE_BYTES: usize = size_of::<sys::uffd_msg>();
const _: () = assert!(MESSAGE_BYTES == 32);

/// A message.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault {
        /// Of the page, or of the access with `EXACT_ADDRESS`.
        address: usize,
        /// Why.
        kind: FaultKind,
        /// It wants to write.
        write: bool,
        /// The thread, with [`Features::THREAD`](super::Features::THREAD); else 0.
        thread: u32,
    },
    /// The process was forked; this is the child's, with the same ranges.
    Forked(Userfault),
    /// `mremap`: what lay at `from` lies at `to`.
    Remapped {
        /// Where it lay.
        from: usize,
        /// Where it lies.
        to: usize,
        /// Bytes.
        bytes: usize,
    },
    /// `madvise` drops the contents of the range, in a moment.
    Removed(Range<usize>),
    /// The range was unmapped.
    Unmapped(Range<usize>),
}

/// Why a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The page is not there.
    Missing,
    /// The page is in the page cache, and not mapped.
    Minor,
    /// The page is write-protected.
    WriteProtected,
}

/// What a [`Userfault::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// So many messages, and perhaps more.
    Messages(usize),
    /// None is there.
    Nothing,
    /// A child was forked, and no descriptor is left for it: the child waits. The message stays.
    NoDescriptors,
    /// The descriptor is no longer usable: the program closed it, and no messages come.
    Broken,
}

pub(super) fn read(fd: &OwnedFd, take: impl FnMut(Event)) -> Read {
    let mut messages = [[0u64; MESSAGE_BYTES / 8]; BATCH];
    // SAFETY: the kernel writes at most so many bytes into the array, and any bytes are valid numbers.
    let got = unsafe { libc::read(fd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(&messages)) };
    if got < 0 {
        let error = std::io::Error::last_os_error().raw_os_error();
        return match error {
            Some(libc::EAGAIN | libc::EINTR) => Read::Nothing,
            Some(libc::EMFILE | libc::ENFILE) => Read::NoDescriptors,
            _ => Read::Broken,
        };
    }
    let count = got as usize / MESSAGE_BYTES;
    messages[..count].iter().filter_map(|words| event(*words)).for_each(take);
    if count == 0 { Read::Broken } else { Read::Messages(count) }
}

/// The kind is the first byte, arguments begin at byte 8.
fn event([kind, first, second, third]: [u64; MESSAGE_BYTES / 8]) -> Option<Event> {
    Some(match u32::from(kind.to_ne_bytes()[0]) {
        sys::UFFD_EVENT_PAGEFAULT => {
            let has = |flag: u32| first & u64::from(flag) != 0;
            let kind = if has(sys::UFFD_PAGEFAULT_FLAG_WP) {
                FaultKind::WriteProtected
            } else if has(sys::UFFD_PAGEFAULT_FLAG_MINOR) {
                FaultKind::Minor
            } else {
                FaultKind::Missing
            };
            let write = has(sys::UFFD_PAGEFAULT_FLAG_WRITE);
            Event::Fault { address: second as usize, kind, write, thread: third as u32 }
        }
        // SAFETY: the kernel has made this descriptor for whoever reads the message, which is read once.
        sys::UFFD_EVENT_FORK => Event::Forked(Userfault { fd: unsafe { OwnedFd::from_raw_fd(first as u32 as RawFd) } }),
        sys::UFFD_EVENT_REMAP => Event::Remapped { from: first as usize, to: second as usize, bytes: third as usize },
        sys::UFFD_EVENT_REMOVE => Event::Removed(first as usize..second as usize),
        sys::UFFD_EVENT_UNMAP => Event::Unmapped(first as usize..second as usize),
        _ => return None,
    })
}

/// A call whose argument is a number, and whose result is a new descriptor.
pub(super) struct NewDescriptor<const OPCODE: Opcode> {
    argument: usize,
}

impl<const OPCODE: Opcode> NewDescriptor<OPCODE> {
    pub(super) fn new(argument: u32) -> Self {
        Self { argument: argument as usize }
    }
}

// SAFETY: the kernel takes the argument as a number and writes to no memory; what it gives is a descriptor that is ours.
unsafe impl<const OPCODE: Opcode> Ioctl for NewDescriptor<OPCODE> {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.argument)
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the call has given a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}
