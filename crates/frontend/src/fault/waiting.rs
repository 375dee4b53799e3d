//! How the pager waits: it looks again and again for a moment before it sleeps, as long as that has been worth it lately.
//!
//! A fault costs up to four wake-ups (pager, lender, pager, program), of 25 to 60 us each on virtual machines; all else of it takes some 15 us.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::process::{Helped, Process};
use super::{FarJob, LOOK};
use crate::limits::FAR_GREETINGS_MAX;

/// The longest time that it looks before it sleeps: about what the wake-up that it saves costs.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// It spins while there was something to do within this time on average.
const SPIN_WORTH: Duration = Duration::from_micros(120);

/// What one wait can add to the average: one long pause ends spinning.
const WAIT_MAX: Duration = Duration::from_millis(2);

/// Whether looking before sleep is worth it.
#[derive(Debug)]
pub(crate) struct Spin {
    /// Moving average of how long it took until there was something to do.
    average: Duration,
    /// There is another CPU, so that polling does not delay the program.
    is_allowed: bool,
}

/// What there is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ready {
    /// Programs begin.
    pub(super) joins: bool,
    /// Helpers have answered, or programs have ended.
    pub(super) answers: bool,
}

impl Spin {
    pub(crate) fn new() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { average: WAIT_MAX, is_allowed: cpus > 1 }
    }

    fn time(&self) -> Duration {
        if self.is_allowed && self.average <= SPIN_WORTH { SPIN_MAX } else { Duration::ZERO }
    }

    fn note(&mut self, wait: Duration) {
        self.average = self.average * 7 / 8 + wait.min(WAIT_MAX) / 8;
    }

    /// Waits until `look` finds something to do, `longest` at most. `look` is told how long it may sleep.
    pub(crate) fn wait(
        &mut self,
        longest: Duration,
        mut look: impl FnMut(Duration) -> std::io::Result<bool>,
    ) -> std::io::Result<()> {
        let (began, time) = (Instant::now(), self.time());
        let mut found = look(Duration::ZERO)?;
        while !found && began.elapsed() < time {
            // Other threads that are ready run first.
            rustix::thread::sched_yield();
            found = look(Duration::ZERO)?;
        }
        if !found {
            look(longest)?;
        }
        self.note(began.elapsed());
        Ok(())
    }
}

impl FarJob {
    /// Waits until there is something to do, a millisecond at most.
    pub(super) fn wait(&mut self) -> std::io::Result<Ready> {
        let node = self.rpc.node().descriptor()?;
        let mut fds = vec![PollFd::from_borrowed_fd(node, PollFlags::IN)];
        if self.greetings.len() < FAR_GREETINGS_MAX && !self.accept_waits {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        fds.extend(self.greetings.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN)));
        let joins = 1..fds.len();
        for helped in self.processes.iter().filter_map(|process| process.helped.as_ref()) {
            fds.push(PollFd::new(&helped.pidfd, PollFlags::IN));
            fds.extend(helped.socket.as_ref().map(|socket| PollFd::new(socket, PollFlags::IN)));
        }
        let answers = joins.end..fds.len();
        let is_read = |process: &&Process| {
            process.helped.as_ref().is_none_or(Helped::has_no_moves) && process.fork_waits.is_none()
        };
        let read = self.processes.iter().filter(is_read);
        fds.extend(read.map(|process| PollFd::new(&process.userfault, PollFlags::IN)));
        self.spin.wait(LOOK, |limit| {
            let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
            look(&mut fds, &limit)
        })?;
        let is_ready = |some: &[PollFd<'_>]| some.iter().any(|fd| !fd.revents().is_empty());
        let ready = Ready { joins: is_ready(&fds[joins]), answers: is_ready(&fds[answers]) };
        Ok(ready)
    }
}

fn look(fds: &mut [PollFd<'_>], limit: &Timespec) -> std::io::Result<bool> {
    match poll(fds, Some(limit)) {
        Err(Errno::INTR) => Ok(false),
        result => Ok(result? > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_pager_sleeps_at_once_and_a_busy_one_looks_first() {
        let mut spin = Spin { average: WAIT_MAX, is_allowed: true };
        assert_eq!(spin.time(), Duration::ZERO);
        (0..40).for_each(|_| spin.note(Duration::from_micros(30)));
        assert_eq!(spin.time(), SPIN_MAX);
        spin.note(Duration::from_secs(1));
        assert_eq!(spin.time(), Duration::ZERO, "one pause ends it");
        let mut alone = Spin { average: Duration::ZERO, is_allowed: false };
        alone.note(Duration::ZERO);
        assert_eq!(alone.time(), Duration::ZERO, "the only CPU is the program's");
    }
}
