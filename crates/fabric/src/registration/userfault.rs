//! userfaultfd(2) as the cache uses it: events about chosen ranges of our own address space, and no faults.
//!
//! Ranges are registered in write-protect mode with `WP_ASYNC`: no page is ever protected, so nothing is ever delayed but the
//! calls that change mappings, each until its event is read. That mode takes anonymous, file and memfd mappings alike
//! (`MISSING` is `EINVAL` on a file).

use byway_reactor::userfault::{Event, Features, Modes, Read as Messages, Userfault as Descriptor};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Unavailable;
use super::cache::Change;
use super::range::PageRange;

/// What the kernel must tell. A fork (`EVENT_FORK`) needs privilege; see [`fork`](super::fork).
const FEATURES: Features =
    Features::WRITE_PROTECT_ASYNC.and(Features::UNMAP).and(Features::REMAP).and(Features::REMOVE);

/// How often the trial in [`Userfault::open`] looks whether its thread is through, should no event come.
const TRIAL_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// How often events are looked for where `poll` is refused.
const REFUSED_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// The process's userfaultfd.
#[derive(Debug)]
pub(super) struct Userfault {
    descriptor: Descriptor,
}

/// What a [`Userfault::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// So many changes, and perhaps more.
    Changes(usize),
    /// None is pending.
    Nothing,
    /// The descriptor is no longer usable: the program closed it, and no events come.
    Broken,
}

impl Userfault {
    /// Opens it, and tries out that it behaves as the cache needs it.
    pub(super) fn open() -> Result<Self, Unavailable> {
        // The kernel's own accesses need no handling: no fault is ever raised. (The user's mode alone is what processes
        // without privilege may have whatever `vm.unprivileged_userfaultfd` says.)
        let userfault = Self { descriptor: Descriptor::open(FEATURES, true)? };
        userfault.try_out()?;
        Ok(userfault)
    }

    /// Asks for events about `range`, all of which must be mapped. From the moment it returns, no change of these mappings is
    /// missed: the call waits for threads that are changing them.
    pub(super) fn watch(&self, range: PageRange) -> Result<(), Errno> {
        // SAFETY: this mode changes nothing about accesses.
        unsafe { self.descriptor.register(range.start()..range.end(), Modes::WRITE_PROTECT) }
    }

    /// Requests no more events about `range`. Parts of it that are unmapped or watched by others are ignored.
    pub(super) fn unwatch(&self, range: PageRange) {
        self.descriptor.unregister(range.start()..range.end());
    }

    /// Whether no change of a watched mapping is pending or on its way.
    ///
    /// How the kernel says so is [tried out](Self::open).
    pub(super) fn is_quiet(&self) -> bool {
        self.descriptor.is_quiet()
    }

    /// Reads pending events; `take` gets each. **The thread that made the change goes on as soon as this has read its
    /// event**, so the caller holds the lock under which look-ups are made. It allocates nothing.
    pub(super) fn read(&self, mut take: impl FnMut(Change)) -> Read {
        match self.descriptor.read(|event| change(event).into_iter().for_each(&mut take)) {
            Messages::Messages(count) => Read::Changes(count),
            Messages::Nothing => Read::Nothing,
            // Forks are not asked for.
            Messages::Broken | Messages::NoDescriptors => Read::Broken,
        }
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
        let mut fds = [PollFd::new(&self.descriptor, PollFlags::IN)];
        match poll(&mut fds, timeout) {
            Ok(_) => Ok(fds[0].revents()),
            Err(Errno::INTR) => Ok(PollFlags::empty()),
            Err(error) => Err(error),
        }
    }

    /// The number of the descriptor, for a forked child to close.
    pub(super) fn raw_fd(&self) -> i32 {
        self.descriptor.raw_fd()
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
            // Unwatched first: otherwise unmapping would wait for a reader of its event.
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

fn change(event: Event) -> Option<Change> {
    let covered = |range: std::ops::Range<usize>| PageRange::covering(range.start, range.end.checked_sub(range.start)?);
    match event {
        Event::Unmapped(range) => covered(range).map(Change::Unmapped),
        Event::Removed(range) => covered(range).map(Change::Removed),
        Event::Remapped { from, to, bytes } => {
            let (from, to) = (PageRange::covering(from, bytes)?, PageRange::covering(to, bytes)?);
            Some(Change::Remapped { from, to })
        }
        Event::Fault { .. } | Event::Forked(_) => None,
    }
}
