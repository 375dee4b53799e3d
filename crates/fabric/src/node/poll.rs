//! For programs with an event loop of their own: a descriptor to poll, and a call to make when it is readable.
//!
//! The descriptor is an epoll of three: the loop's own descriptor, a timer for the loop's next deadline, and an event for
//! ended operations and work that is left. Each thread that releases the engine updates the last two, because the polling
//! thread is not the last one that drove the loop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use byway_reactor::{Errno, Instant, Wait};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use super::engine::Engine;
use super::error::WaitError;
use super::{Inner, Node, lock};

pub(super) struct Poll {
    all: OwnedFd,
    timer: OwnedFd,
    event: OwnedFd,
    /// What the timer is set to, on the loop's clock.
    armed: AtomicU64,
}

/// No time of the loop's.
const DISARMED: u64 = u64::MAX;

/// Turns in one call of [`Node::progress`]; what is left keeps the descriptor readable.
const TURNS_MAX: usize = 16;

impl Poll {
    fn new(inner: &Inner) -> std::io::Result<Self> {
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let Some(loop_fd) = &inner.loop_fd else { return Err(std::io::ErrorKind::Unsupported.into()) };
        for fd in [loop_fd.as_fd(), timer.as_fd(), event.as_fd()] {
            epoll::add(&all, fd, EventData::new_u64(0), EventFlags::IN)?;
        }
        Ok(Self { all, timer, event, armed: AtomicU64::new(DISARMED) })
    }

    /// Makes the descriptor readable when the loop's next timer is due. Only the thread that has the engine calls this.
    fn arm(&self, next: Option<Instant>, now: Instant) {
        let at = next.map_or(DISARMED, |next| next.since(Instant::ZERO).as_nanos() as u64);
        if self.armed.swap(at, Ordering::Relaxed) == at {
            return;
        }
        // Zero would disarm it.
        let nanos = next.map_or(0, |next| next.since(now).as_nanos().clamp(1, 1 << 62)) as i64;
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let at = Timespec { tv_sec: nanos / 1_000_000_000, tv_nsec: nanos % 1_000_000_000 };
        let spec = Itimerspec { it_interval: zero, it_value: at };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// The thread that has the engine wakes for its timers from now on, so the descriptor must not report them.
    pub(super) fn disarm(&self) {
        self.arm(None, Instant::ZERO);
    }

    /// Makes the descriptor readable at once: something has ended, or is left to do.
    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Clears the signals. The caller checks everything afterwards.
    fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }
}

impl Inner {
    /// Sets the poll descriptor's timer for the next thing that the loop must do. True if nothing is due before.
    pub(super) fn arm_poll(&self, engine: &mut Engine) -> bool {
        self.poll.get().is_some_and(|poll| {
            let (quiet, next) = engine.reactor().before_sleep();
            poll.arm(next, engine.now());
            quiet
        })
    }

    /// Makes the poll descriptor readable. The engine is free by then: otherwise a program would find it taken, and wait for another signal.
    pub(super) fn signal_poll(&self) {
        if let Some(poll) = self.poll.get() {
            lock::count_wake();
            poll.signal();
        }
    }

    fn turn_until_quiet(&self, engine: &mut Engine) -> Result<(), Errno> {
        for turn in 0..TURNS_MAX {
            if turn > 0 {
                drop(self.settle(engine));
            }
            engine.run_commands();
            engine.reap(Wait::Poll)?;
            if engine.reactor().before_sleep().0 {
                break;
            }
        }
        Ok(())
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
            poll.signal();
            let _ = self.inner.poll.set(poll);
        }
        self.inner.poll.get().map(|poll| poll.all.as_fd()).ok_or_else(|| std::io::ErrorKind::Other.into())
    }

    /// Does what there is to do and never waits. True if any operation has ended since the last call: look at yours.
    ///
    /// # Errors
    /// `Forked`, or the kernel does not let the node look.
    pub fn progress(&self) -> Result<bool, WaitError> {
        self.look(true)
    }

    /// As [`Node::progress`], and leaves it to that to say what has ended, for which the descriptor stays readable: for a
    /// [`Layer`](super::Layer) that looks on behalf of a program.
    ///
    /// # Errors
    /// As there.
    pub fn turn(&self) -> Result<(), WaitError> {
        self.look(false).map(drop)
    }

    fn look(&self, takes_news: bool) -> Result<bool, WaitError> {
        let inner = &self.inner;
        if inner.mark.is_child() {
            return Err(WaitError::Forked);
        }
        // What is signalled from here on is for the next look.
        if let Some(poll) = inner.poll.get() {
            poll.clear();
        }
        let mut shared = inner.lock()?;
        let Some(mut engine) = inner.try_engine() else {
            let news = takes_news && std::mem::take(&mut shared.news);
            // While another thread drives the loop, it signals what ends, and keeps the timers.
            inner.tell_poll(shared);
            return Ok(news);
        };
        engine.take_commands(shared);
        let turned = inner.turn_until_quiet(&mut engine);
        let mut shared = inner.settle(&mut engine);
        // What a thread has taken is not signalled to it again.
        let news = takes_news && std::mem::take(&mut shared.news);
        inner.release_engine(engine, shared);
        turned.map_err(WaitError::Io)?;
        Ok(news)
    }
}
