//! Signals that wait while a thread drives the pager: their handlers may use segments, and would wait for the pager themselves.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Until it is dropped, the thread that made it takes no signals but in [`HeldSignals::poll`].
pub(crate) struct HeldSignals {
    before: libc::sigset_t,
    /// It is of one thread.
    _of_thread: std::marker::PhantomData<*const ()>,
}

impl HeldSignals {
    pub(crate) fn hold() -> Self {
        let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::uninit());
        // SAFETY: the first call fills `all`, the second reads it and fills `before`.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Self { before, _of_thread: std::marker::PhantomData }
    }

    /// Waits until one of the descriptors is readable, a signal that the program lets through has been handled, or time is over (none: never).
    /// True if one is readable.
    pub(crate) fn poll(&self, sources: &[BorrowedFd<'_>], time: Option<Duration>) -> bool {
        let entry = |fd: &BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut entries: Vec<libc::pollfd> = sources.iter().map(entry).collect();
        let time = time.map(|time| libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(time.subsec_nanos() as i32),
        });
        let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the entries, the time and the mask are what the call takes, and live through it.
        let ready =
            unsafe { libc::ppoll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, limit, &raw const self.before) };
        ready > 0
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // SAFETY: the mask that the thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}
