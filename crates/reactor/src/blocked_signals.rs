//! All signals blocked in a thread, for threads that the program's signal handlers must not run in.

/// All signals are blocked in the thread that made it, and in threads that it starts, until it is dropped.
#[derive(Debug)]
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// It is of one thread.
    _of_thread: std::marker::PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks them.
    #[expect(clippy::new_without_default, reason = "it changes the thread")]
    pub fn new() -> Self {
        // SAFETY: both sets are made before they are read: any bytes are a set, and `sigfillset` cannot fail on one.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before, _of_thread: std::marker::PhantomData }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is what the call gave.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}
