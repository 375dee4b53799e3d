//! The thin layer over userfaultfd(2): events about chosen ranges of our own address space, and no faults.
//!
//! Ranges are registered in write-protect mode with `WP_ASYNC`: no page is ever protected, so nothing is ever delayed but the
//! calls that change mappings, each until its event is read. That mode takes anonymous, file and memfd mappings alike
//! (`MISSING` is `EINVAL` on a file).

use std::os::fd::{AsRawFd, OwnedFd};

use linux_raw_sys::general as sys;
use linux_raw_sys::ioctl as codes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::ioctl::{Setter, Updater, ioctl};
use rustix::mm::UserfaultfdFlags;

use super::Unavailable;
use super::cache::Change;
use super::range::PageRange;

/// What the kernel must tell. A fork (`EVENT_FORK`) needs privilege; see [`fork`](super::fork).
const FEATURES: u32 = sys::UFFD_FEATURE_WP_ASYNC
    | sys::UFFD_FEATURE_EVENT_UNMAP
    | sys::UFFD_FEATURE_EVENT_REMAP
    | sys::UFFD_FEATURE_EVENT_REMOVE;

/// Events read by one call.
const BATCH: usize = 16;

const EVENT_BYTES: usize = size_of::<sys::uffd_msg>();
const _: () = assert!(EVENT_BYTES == 32);

/// How often the trial in [`Userfault::open`] looks whether its thread is through, should no event come.
const TRIAL_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// How often events are looked for where `poll` is refused.
const REFUSED_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// The process's userfaultfd.
#[derive(Debug)]
pub(super) struct Userfault {
    fd: OwnedFd,
}

/// What a [`Userfault::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// So many changes, and perhaps more.
    Changes(usize),
    /// None is pending.
    Nothing,
    /// The descriptor is of no use any more: somebody closed it, and no events come.
    Broken,
}

impl Userfault {
    /// Opens it, and tries out that it behaves as the cache needs it.
    pub(super) fn open() -> Result<Self, Unavailable> {
        // The kernel's own accesses need no handling: no fault is ever raised. (`UFFD_USER_MODE_ONLY` is what processes
        // without privilege may have whatever `vm.unprivileged_userfaultfd` says.)
        let user_mode_only = UserfaultfdFlags::from_bits_retain(sys::UFFD_USER_MODE_ONLY);
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | user_mode_only;
        // SAFETY: nothing is registered in a mode that changes what an access does.
        let fd = unsafe { rustix::mm::userfaultfd(flags) }.map_err(Unavailable::of_userfaultfd)?;
        let mut api = sys::uffdio_api { api: sys::UFFD_API.into(), features: FEATURES.into(), ioctls: 0 };
        // SAFETY: the structure is that of the call.
        let agreed = unsafe { ioctl(&fd, Updater::<{ codes::UFFDIO_API as rustix::ioctl::Opcode }, _>::new(&mut api)) };
        agreed.map_err(|_| Unavailable::OldKernel)?;
        let userfault = Self { fd };
        userfault.try_out()?;
        Ok(userfault)
    }

    /// Asks for events about `range`, all of which must be mapped. From the moment it returns, no change of these
    /// mappings is missed: the call waits for whoever is changing them.
    pub(super) fn watch(&self, range: PageRange) -> Result<(), Errno> {
        let mode = sys::UFFDIO_REGISTER_MODE_WP.into();
        let mut request = sys::uffdio_register { range: raw(range), mode, ioctls: 0 };
        // SAFETY: the structure is that of the call, and this mode changes nothing about accesses.
        unsafe { ioctl(&self.fd, Updater::<{ codes::UFFDIO_REGISTER as rustix::ioctl::Opcode }, _>::new(&mut request)) }
    }

    /// Asks for no more events about `range`. Where parts of it are unmapped or somebody else's, nothing is to be done.
    pub(super) fn unwatch(&self, range: PageRange) {
        // SAFETY: the structure is that of the call, which ends only what `watch` began.
        let _ = unsafe {
            ioctl(&self.fd, Setter::<{ codes::UFFDIO_UNREGISTER as rustix::ioctl::Opcode }, _>::new(raw(range)))
        };
    }

    /// Whether no change of a watched mapping is pending or on its way.
    ///
    /// The kernel counts such changes from before the first page goes until the call that makes them has found its event
    /// read, and refuses to write-protect meanwhile. To protect no pages is refused in another way otherwise; that this
    /// holds is [tried out](Self::open).
    pub(super) fn is_quiet(&self) -> bool {
        let mut nothing = sys::uffdio_writeprotect { range: sys::uffdio_range { start: 0, len: 0 }, mode: 0 };
        // SAFETY: the structure is that of the call, which does nothing to a range without bytes.
        let refused = unsafe {
            ioctl(&self.fd, Updater::<{ codes::UFFDIO_WRITEPROTECT as rustix::ioctl::Opcode }, _>::new(&mut nothing))
        };
        refused == Err(Errno::INVAL)
    }

    /// Reads pending events; `take` gets each. **The thread that made the change goes on as soon as this has read its
    /// event**, so the caller holds the lock under which look-ups are made. It allocates nothing.
    pub(super) fn read(&self, mut take: impl FnMut(Change)) -> Read {
        let mut events = [[0u64; EVENT_BYTES / 8]; BATCH];
        // SAFETY: the kernel writes at most so many bytes into the array, and any bytes are valid numbers.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), events.as_mut_ptr().cast(), size_of_val(&events)) };
        if got < 0 {
            let error = std::io::Error::last_os_error().raw_os_error();
            let is_nothing = matches!(error, Some(libc::EAGAIN | libc::EINTR));
            return if is_nothing { Read::Nothing } else { Read::Broken };
        }
        let count = got as usize / EVENT_BYTES;
        events[..count].iter().filter_map(|words| change(*words)).for_each(&mut take);
        if count == 0 { Read::Broken } else { Read::Changes(count) }
    }

    /// Waits for an event. False where none will ever come.
    pub(super) fn wait(&self) -> bool {
        let Ok(flags) = self.wait_until(None) else {
            // The call is refused (`EINVAL` where the limit of descriptors is zero by now, `ENOMEM`), the descriptor works:
            // somebody who unmaps may be waiting for it to be read.
            let _ = rustix::thread::nanosleep(&REFUSED_STEP);
            return true;
        };
        !flags.intersects(PollFlags::NVAL | PollFlags::ERR | PollFlags::HUP)
    }

    fn wait_until(&self, timeout: Option<&Timespec>) -> Result<PollFlags, Errno> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match poll(&mut fds, timeout) {
            Ok(_) => Ok(fds[0].revents()),
            Err(Errno::INTR) => Ok(PollFlags::empty()),
            Err(error) => Err(error),
        }
    }

    /// The number of the descriptor, for a forked child to close.
    pub(super) fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// Lets a thread unmap a watched page: an event must come, it must not be quiet before the event is read, and must be
    /// quiet when the thread is through.
    fn try_out(&self) -> Result<(), Unavailable> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
        let bytes = rustix::param::page_size();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let address = page.map_err(|_| Unavailable::Misbehaves)?.expose_provenance();
        let range = PageRange::covering(address, bytes).ok_or(Unavailable::Misbehaves)?;
        self.watch(range).map_err(|_| Unavailable::OldKernel)?;
        let was_quiet = self.is_quiet();
        // SAFETY: the page was mapped above, and nothing refers to it; it is unmapped once, by the thread or for want of one.
        let unmap = move || unsafe { munmap(std::ptr::with_exposed_provenance_mut(address), bytes) };
        let Ok(unmapper) = std::thread::Builder::new().spawn(unmap) else {
            // Unwatched first: nobody would read the event that unmapping waits for.
            self.unwatch(range);
            let _ = unmap();
            return Err(Unavailable::NoThread);
        };
        let (mut was_busy, mut told) = (false, None);
        while !unmapper.is_finished() {
            if self.wait_until(Some(&TRIAL_STEP)).is_ok_and(|flags| flags.contains(PollFlags::IN)) {
                was_busy |= !self.is_quiet();
                self.read(|change| told = Some(change));
            }
        }
        let is_unmapped = unmapper.join().is_ok_and(|result| result.is_ok());
        let is_right = was_quiet && was_busy && is_unmapped && self.is_quiet();
        if is_right && told == Some(Change::Unmapped(range)) { Ok(()) } else { Err(Unavailable::Misbehaves) }
    }
}

fn raw(range: PageRange) -> sys::uffdio_range {
    sys::uffdio_range { start: range.start() as u64, len: range.bytes() as u64 }
}

/// An event (`struct uffd_msg`: the kind in the first byte, arguments from byte 8).
fn change(words: [u64; EVENT_BYTES / 8]) -> Option<Change> {
    let [kind, first, second, third] = words;
    let between = |start: u64, end: u64| PageRange::covering(start as usize, end.checked_sub(start)? as usize);
    match u32::from(kind.to_ne_bytes()[0]) {
        sys::UFFD_EVENT_UNMAP => between(first, second).map(Change::Unmapped),
        sys::UFFD_EVENT_REMOVE => between(first, second).map(Change::Removed),
        sys::UFFD_EVENT_REMAP => {
            let from = PageRange::covering(first as usize, third as usize)?;
            let to = PageRange::covering(second as usize, third as usize)?;
            Some(Change::Remapped { from, to })
        }
        _ => None,
    }
}
