//! Loops that belong to no thread: a waiting thread drives them, one thread at a time.

use std::os::fd::{AsFd, BorrowedFd};

use super::{Backend, BackendContext, Io, IoChoice, Reactor};
use crate::epoll::Epoll;
use crate::frame::FramePool;
use crate::op::{Completion, Wait};
use crate::time::{Clock, Instant};
use crate::uring::Uring;

impl Reactor {
    /// Opens a loop that several threads use in turn; that they never do at the same time is for the caller to see to.
    /// [`IoChoice::Auto`] is epoll: a ring gives way to it in all but the number of system calls, is not usable after a fork,
    /// and its operations are begun again when the thread that submitted them ends.
    ///
    /// # Errors
    /// As for [`Reactor::open`].
    pub fn open_for_threads(choice: IoChoice, frame_bytes: usize) -> std::io::Result<Self> {
        let frames = FramePool::new(frame_bytes)?;
        let reason = if choice == IoChoice::Auto { "for any thread" } else { "asked for" }.to_owned();
        if choice == IoChoice::Uring {
            let backend = Backend::Uring(Box::new(Uring::open_for_threads()?));
            return Ok(Self::over(backend, Io { name: "uring", reason }, frames));
        }
        Ok(Self::over(Backend::Epoll(Box::new(Epoll::open()?)), Io { name: "epoll", reason }, frames))
    }

    /// The loop's clock, for any thread.
    pub fn clock(&self) -> Clock {
        match &self.backend {
            Backend::Sim(sim) => sim.clock(),
            _ => Clock::default(),
        }
    }

    /// A descriptor that is readable while completions wait in the kernel, for programs with their own poll loop; `None` in a
    /// simulation. It does not cover timers and streams over shared memory: see [`Reactor::before_sleep`].
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.backend {
            Backend::Uring(uring) => Some(uring.ring_descriptor()),
            Backend::Epoll(epoll) => Some(epoll.queue_descriptor()),
            Backend::Sim(_) => None,
        }
    }

    /// Submits pending requests to the kernel without collecting completions, for a caller that does neither afterwards.
    pub fn hand_over(&mut self) {
        if let Backend::Uring(uring) = &mut self.backend {
            uring.hand_over();
        }
    }

    /// Whether the kernel has not taken all that was submitted: [`Reactor::hand_over`] would call it.
    pub fn has_unsubmitted(&mut self) -> bool {
        if let Backend::Uring(uring) = &mut self.backend { uring.has_unsubmitted() } else { false }
    }

    /// Appends the completions that are known without asking the kernel. Call it before submitting, without waiting: otherwise an
    /// operation that ended when it was submitted delays the next one of its stream.
    ///
    /// # Errors
    /// The kernel's: the loop is then unusable.
    pub fn reap_known(&mut self, into: &mut Vec<Completion>) -> std::io::Result<()> {
        let before = into.len();
        into.append(&mut self.aside);
        let reaped = into.len();
        match &mut self.backend {
            Backend::Epoll(epoll) => into.extend(epoll.os().ready.drain(..)),
            // Without submissions this reads the ring alone.
            Backend::Uring(uring) => uring.reap(into, Wait::Poll)?,
            Backend::Sim(sim) => sim.reap(into, Wait::Poll)?,
        }
        if !self.shared.is_unused() {
            let (shared, mut context) = context!(self);
            shared.turn(&mut context, into, reaped);
        }
        if into.len() > before {
            self.turned_at = self.now();
        }
        Ok(())
    }

    /// Must be called before a thread sleeps on [`Reactor::descriptor`] instead of in [`Reactor::reap`]: asks the peers of
    /// shared streams to ring. Gives whether one may sleep, and until when at most: the next timer.
    pub fn before_sleep(&mut self) -> (bool, Option<Instant>) {
        let quiet = self.shared.sleep() && self.aside.is_empty();
        if let Backend::Sim(sim) = &self.backend {
            return (quiet && !sim.has_ready(), None);
        }
        match self.backend.os() {
            Some(os) => (quiet && os.ready.is_empty(), os.timers.next_at()),
            None => (quiet, None),
        }
    }
}

impl Epoll {
    fn queue_descriptor(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl Uring {
    fn hand_over(&mut self) {
        if self.has_unsubmitted() {
            // What it does not take now it takes with the next turn.
            let _ = self.ring.submit();
        }
    }

    fn has_unsubmitted(&mut self) -> bool {
        let mut submission = self.ring.submission();
        submission.sync();
        !submission.is_empty()
    }

    fn ring_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's, which lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&self.ring)) }
    }
}
