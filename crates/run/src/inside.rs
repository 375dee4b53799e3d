//! The library's own work within a call of the program.
//!
//! Meanwhile the thread takes no signal and cannot be cancelled: a handler that leaves by `longjmp`, or that reads a file of a share
//! itself, would leave locks behind or wait for them. Signals that a fault of the thread itself raises are not held back. What the
//! library calls in libc goes to the kernel, although this library has the same names.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}

const CANCEL_DISABLE: libc::c_int = 1;

/// Whether this thread is within the library: then a call is the library's own, and goes to the kernel.
pub(crate) fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(true)
}

struct Guard {
    signals: libc::sigset_t,
    cancel: libc::c_int,
}

impl Guard {
    fn enter() -> Self {
        let (mut all, mut signals) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::zeroed());
        let mut cancel = 0;
        // SAFETY: the set is made by sigfillset before it is used; the old mask and state are written to memory of this frame.
        let signals = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT] {
                libc::sigdelset(all.as_mut_ptr(), fault);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), signals.as_mut_ptr());
            pthread_setcancelstate(CANCEL_DISABLE, &raw mut cancel);
            signals.assume_init()
        };
        INSIDE.set(true);
        Self { signals, cancel }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        INSIDE.set(false);
        // SAFETY: both are what `enter` found.
        unsafe {
            pthread_setcancelstate(self.cancel, std::ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.signals, std::ptr::null_mut());
        }
    }
}

/// Does the library's work for a call, or a part of it. A panic, which would be a bug, is `EIO`, and not the program's end.
pub(crate) fn inside<T>(work: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    if is_inside() {
        return work();
    }
    let _guard = Guard::enter();
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Errno::IO))
}
