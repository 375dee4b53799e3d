//! For programs with an event loop of their own: a descriptor to poll, and a call to make when it is readable.
//!
//! The descriptor is an epoll of three: the loop's own, a timer for the loop's next one, and an event for what other threads have
//! brought meanwhile.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use byway_reactor::{Instant, Wait};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use super::error::WaitError;
use super::{Inner, Node};

pub(super) struct Poll {
    all: OwnedFd,
    timer: OwnedFd,
    event: OwnedFd,
}

/// Turns in one call of [`Node::progress`]; what is left keeps the descriptor readable.
const TURNS_MAX: usize = 16;

impl Poll {
    fn new(inner: &Inner) -> std::io::Result<Self> {
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for fd in [inner.loop_fd.as_fd(), timer.as_fd(), event.as_fd()] {
            epoll::add(&all, fd, EventData::new_u64(0), EventFlags::IN)?;
        }
        Ok(Self { all, timer, event })
    }

    /// Makes the descriptor readable at once, or at that time.
    fn arm(&self, ready: bool, left: Option<std::time::Duration>) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
        if ready {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
        // Zero would disarm it.
        let nanos = left.map_or(0, |left| left.as_nanos().clamp(1, 1 << 62)) as i64;
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let at = Timespec { tv_sec: nanos / 1_000_000_000, tv_nsec: nanos % 1_000_000_000 };
        let spec = Itimerspec { it_interval: zero, it_value: at };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// Something has come while another thread turned the loop.
    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl Node {
    /// A descriptor that is readable when [`Node::progress`] should be called: something has come, or has ended. For poll, epoll
    /// and the like; there is nothing to read from it.
    ///
    /// # Errors
    /// The kernel's: no descriptors.
    pub fn descriptor(&self) -> std::io::Result<BorrowedFd<'_>> {
        if self.inner.mark.is_child() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        if self.inner.poll.get().is_none() {
            let poll = Poll::new(&self.inner)?;
            poll.arm(true, None);
            let _ = self.inner.poll.set(poll);
        }
        self.inner.poll.get().map(|poll| poll.all.as_fd()).ok_or_else(|| std::io::ErrorKind::Other.into())
    }

    /// Does what there is to do and never waits. True if any operation has ended since the last call: look at yours.
    ///
    /// # Errors
    /// `Forked`, or the kernel does not let the node look.
    pub fn progress(&self) -> Result<bool, WaitError> {
        self.turn()?;
        Ok(std::mem::take(&mut self.inner.lock()?.news))
    }

    /// As [`Node::progress`], and leaves it to that to say what has ended: for a [`Layer`](super::Layer) that looks on behalf of a program.
    ///
    /// # Errors
    /// As there.
    pub fn turn(&self) -> Result<(), WaitError> {
        drop(self.inner.lock()?);
        let mut quiet = (false, None);
        let mut held = false;
        if let Some(mut engine) = self.inner.try_engine() {
            held = true;
            for _ in 0..TURNS_MAX {
                engine.submit();
                engine.reap(Wait::Poll).map_err(WaitError::Io)?;
                let (may_sleep, next): (bool, Option<Instant>) = engine.reactor().before_sleep();
                let now = engine.now();
                quiet = (may_sleep, next.map(|at| at.since(now)));
                if may_sleep {
                    break;
                }
            }
            engine.leave();
            drop(engine);
            self.inner.left_engine();
        }
        if let Some(poll) = self.inner.poll.get() {
            // While somebody else turns the loop, what he brings is signalled: after this, or it is in the news already.
            poll.arm(held && !quiet.0, quiet.1);
        }
        Ok(())
    }
}
