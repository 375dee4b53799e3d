//! How programs begin to be paged, and how they end.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use byway_reactor::userfault::Userfault;
use byway_reactor::userfault::helper::{Hello, STATUS_REQUEST, WORDS_MAX, hear_with_fd, say};
use byway_service::memory::pager::{Moved, SpaceId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, getrlimit};

use super::process::{self, Process};
use super::{FEATURES, FarJob};
use crate::limits::{FAR_DESCRIPTORS_KEPT, FAR_GREETINGS_MAX, FAR_PROGRAMS_MAX};

/// How long a program may be silent between connecting and its first word.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a fork waits for a descriptor for the child's userfaultfd. The kernel cannot refuse that fork any more.
const FORK_PATIENCE: Duration = Duration::from_secs(5);

/// How long a program may live on when its helper has ended.
const HELPER_PATIENCE: Duration = Duration::from_secs(1);

impl FarJob {
    /// Takes programs that begin. One that says nothing holds up no other.
    pub(super) fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        self.accept_waits = false;
        while self.greetings.len() < FAR_GREETINGS_MAX {
            match accept_with(&self.listener, flags) {
                Ok(socket) => self.greetings.push((socket, Instant::now())),
                Err(error) => {
                    self.accept_waits = matches!(error, Errno::MFILE | Errno::NFILE);
                    if self.accept_waits {
                        self.note_descriptors("a program that starts waits until another has ended");
                    }
                    break;
                }
            }
        }
        for index in (0..self.greetings.len()).rev() {
            let (socket, since) = &self.greetings[index];
            let mut words = [0; WORDS_MAX];
            let heard = hear_with_fd(socket, &mut words);
            if matches!(heard, Err(Errno::AGAIN | Errno::INTR)) && since.elapsed() < PATIENCE {
                continue;
            }
            let (socket, _) = self.greetings.swap_remove(index);
            let welcomed = match heard {
                // It has ended without a word.
                Ok((0, _)) => Ok(()),
                Ok((1, _)) if words[0] == STATUS_REQUEST => self.answer_status(&socket).map_err(Into::into),
                Ok((count, userfault)) => self.welcome(socket, &words[..count], userfault),
                Err(Errno::AGAIN) => Err(format!("it has said nothing for {} s", PATIENCE.as_secs()).into()),
                Err(error) => Err(error.into()),
            };
            if let Err(error) = welcomed {
                tracing::error!(%error, "a program cannot be paged");
            }
        }
    }

    fn welcome(
        &mut self,
        socket: OwnedFd,
        words: &[u64],
        userfault: Option<OwnedFd>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        if self.processes.len() >= FAR_PROGRAMS_MAX {
            return Err(format!("more than {FAR_PROGRAMS_MAX} programs at a time").into());
        }
        let descriptors = descriptors_max();
        let taken = self.processes.iter().map(Process::descriptors).sum::<usize>() + FAR_DESCRIPTORS_KEPT;
        if (taken + Process::DESCRIPTORS) as u64 > descriptors {
            return Err(format!("the limit of open files ({descriptors}) is reached: raise it with ulimit -Hn").into());
        }
        let hello = Hello::of(words).ok_or("its library is of another version of byway")?;
        // SAFETY: it is the program's, which has sent it.
        let userfault = unsafe { Userfault::of_other_process(userfault.ok_or("it has sent no userfaultfd")?) };
        userfault.agree(FEATURES)?;
        let space = self.next_space();
        let answer = socket.try_clone()?;
        let process = Process::of_program(space, &hello, userfault, socket)?;
        // The same process runs another file now.
        let number = process.helped.as_ref().map(|helped| helped.process);
        let is_same = |process: &Process| process.helped.as_ref().map(|helped| helped.process) == number;
        while let Some(index) = self.processes.iter().position(is_same) {
            self.remove(index);
        }
        self.pager.add_space(space, true);
        self.processes.push(process);
        self.report.programs += 1;
        say(&answer, &[self.store.frames_bytes() as u64], Some(self.store.file()))?;
        Ok(())
    }

    /// A fork cannot be told, because this process can open no descriptor for the child: after a while its program is killed.
    pub(super) fn await_descriptor(&mut self, index: usize) {
        self.note_descriptors("a forked child waits until a program has ended");
        let process = &mut self.processes[index];
        if process.fork_waits.get_or_insert_with(Instant::now).elapsed() >= FORK_PATIENCE {
            process.fork_waits = None;
            tracing::error!(
                process = process.number(),
                "a program forked, and byway far had no descriptor for the child for {} s; the program is killed",
                FORK_PATIENCE.as_secs()
            );
            if !process.kill() {
                tracing::error!(
                    "that program is a forked child whose process is not known, so it cannot be killed: it waits"
                );
            }
        }
    }

    pub(super) fn next_space(&mut self) -> SpaceId {
        self.spaces += 1;
        SpaceId(self.spaces)
    }

    pub(super) fn remove(&mut self, index: usize) {
        let process = self.processes.swap_remove(index);
        for frame in process.helped.iter().flat_map(|helped| &helped.commanded) {
            self.pager.moved(*frame, Moved::Missing);
        }
        self.waits.forget(|at| at.space == process.space);
        self.pager.remove_space(process.space);
        self.act();
    }

    /// Takes what helpers have done, and looks whether programs have ended.
    pub(super) fn take_answers(&mut self) {
        for index in (0..self.processes.len()).rev() {
            let process = &mut self.processes[index];
            let Some(helped) = &mut process.helped else { continue };
            if let Ok(answers) = helped.answers() {
                if !answers.is_empty() {
                    self.moving_since = None;
                }
                for (frame, outcome) in answers {
                    self.pager.moved(frame, process::moved(outcome));
                }
            } else {
                // Its program ends, or runs another file: if not, see below. The result of a command under way is unknown.
                helped.socket = None;
                helped.ended = Some(Instant::now());
            }
            self.look_for_end(index);
            if self.processes[index].helped.as_ref().is_some_and(|helped| is_readable(&helped.pidfd)) {
                self.remove(index);
            }
        }
        self.act();
    }

    /// Looks what has become of a program whose helper has ended.
    fn look_for_end(&mut self, index: usize) {
        let process = &mut self.processes[index];
        let Some(helped) = &mut process.helped else { return };
        let Some(ended) = helped.ended else { return };
        let (space, commanded) = (process.space, std::mem::take(&mut helped.commanded));
        if process.userfault.is_gone() {
            // It runs another file, and says so when that has loaded the library.
            helped.ended = None;
            for frame in commanded {
                self.pager.moved(frame, Moved::Missing);
            }
            self.pager.remove_space(space);
        } else {
            // Pages of the command may be anywhere: a thread that touches one waits. The others come, for what ends the program may need them.
            helped.commanded = commanded;
            if ended.elapsed() >= HELPER_PATIENCE {
                tracing::error!(
                    process = helped.process,
                    "a program has ended its helper's thread, so its pages cannot be kept apart; it is killed"
                );
                helped.ended = None;
                process.kill();
            }
        }
    }
}

/// Descriptors that this process may have open.
pub(super) fn descriptors_max() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Whether the process of a pidfd has ended, or a descriptor can be read.
pub(super) fn is_readable(fd: impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
}
