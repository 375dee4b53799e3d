//! The pager: the thread of a process that answers its program's faults and calls, and the messages of other processes.
//!
//! One thread does it all, so the machine's actions are done in their order without a lock. It never touches the program's view of
//! the memory: it would wait for itself.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use byway_reactor::userfault::FillError;
use byway_service::dsm::{Action, Contents, Machine, Rank, Ticket};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::EXIT_JOB_ENDED;
use crate::area::{Area, Fault};
use crate::call::{Answer, Call, Command};
use crate::limits::{LEAVE_TIME_MAX, PAGE_BYTES};
use crate::sessions::{Incoming, Sessions};

/// Messages that are taken before faults and calls have their turn.
const MESSAGES_PER_TURN: usize = 64;

/// What the program's threads hand to the pager.
#[derive(Debug)]
pub(crate) struct Commands {
    queue: Mutex<VecDeque<Command>>,
    event: OwnedFd,
}

impl Commands {
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { queue: Mutex::default(), event }))
    }

    pub(crate) fn push(&self, command: Command) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    fn take(&self) -> VecDeque<Command> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
        std::mem::take(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) struct Pager {
    rank: Rank,
    area: Arc<Area>,
    sessions: Sessions,
    machine: Machine,
    commands: Arc<Commands>,
    calls: HashMap<Ticket, Call>,
    next_ticket: Ticket,
}

/// How the pager ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Leave,
    Cut,
}

impl Pager {
    pub(crate) fn new(
        rank: Rank,
        area: Arc<Area>,
        sessions: Sessions,
        machine: Machine,
        commands: Arc<Commands>,
    ) -> Self {
        Self { rank, area, sessions, machine, commands, calls: HashMap::new(), next_ticket: 0 }
    }

    /// Until the process leaves its job.
    pub(crate) fn run(mut self) {
        let mut leaves_by = None;
        loop {
            let mut is_busy = self.take_faults();
            match self.take_commands() {
                Ok(some) => is_busy |= some,
                Err(Ending::Cut) => return,
                Err(Ending::Leave) => {
                    leaves_by = Some(Instant::now() + LEAVE_TIME_MAX);
                    self.machine.leave();
                    self.act();
                }
            }
            is_busy |= self.take_messages();
            match self.sessions.progress() {
                Ok(some) => is_busy |= some,
                Err(error) => self.die(&format!("the sessions with the other processes cannot be driven: {error}")),
            }
            // Not before the others' last messages are here: a connection that is closed with bytes unread loses those on their way.
            if leaves_by.is_some_and(|at| self.machine.is_alone() || Instant::now() >= at) {
                return self.sessions.close();
            }
            if !is_busy {
                self.wait(leaves_by.map(|at| at.saturating_duration_since(Instant::now())));
            }
        }
    }

    fn wait(&self, time: Option<Duration>) {
        let node = match self.sessions.descriptor() {
            Ok(node) => node,
            Err(error) => self.die(&format!("the node has no descriptor: {error}")),
        };
        let mut sources = [
            PollFd::from_borrowed_fd(self.area.descriptor(), PollFlags::IN),
            PollFd::from_borrowed_fd(node, PollFlags::IN),
            PollFd::new(&self.commands.event, PollFlags::IN),
        ];
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let _ = poll(&mut sources, time.as_ref());
    }

    fn take_faults(&mut self) -> bool {
        let mut faults = Vec::new();
        let some = self.area.faults(|fault| faults.push(fault));
        for Fault { page, mode } in faults {
            self.machine.fault(page, mode);
            self.act();
        }
        some
    }

    fn take_messages(&mut self) -> bool {
        for taken in 0..MESSAGES_PER_TURN {
            match self.sessions.next() {
                Ok(Some(Incoming::Message(from, message, payload))) => self.machine.received(from, message, payload),
                Ok(Some(Incoming::Malformed(from))) => self.die(&format!("rank {from} sent what is no message")),
                Ok(Some(Incoming::Gone(rank))) => self.machine.gone(rank),
                Ok(None) => return taken > 0,
                Err(error) => self.die(&format!("the sessions with the other processes cannot be driven: {error}")),
            }
            self.act();
        }
        true
    }

    fn take_commands(&mut self) -> Result<bool, Ending> {
        let commands = self.commands.take();
        let some = !commands.is_empty();
        for command in commands {
            match command {
                Command::Lock(lock, call) => self.call(call, |machine, ticket| machine.lock(lock, ticket)),
                Command::Barrier(barrier, call) => self.call(call, |machine, ticket| machine.barrier(barrier, ticket)),
                Command::Map(name, pages, call) => self.call(call, |machine, ticket| machine.map(&name, pages, ticket)),
                // A guard sends it once; of others a lock that this process does not have is left alone.
                Command::Unlock(lock) => drop(self.machine.unlock(lock)),
                Command::Count(call) => call.answer(Answer::Counted(self.machine.counters())),
                Command::Leave => return Err(Ending::Leave),
                Command::Cut => return Err(Ending::Cut),
            }
            self.act();
        }
        Ok(some)
    }

    fn call(&mut self, call: Call, begin: impl FnOnce(&mut Machine, Ticket) -> Result<(), byway_service::dsm::Misuse>) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        match begin(&mut self.machine, ticket) {
            Ok(()) => drop(self.calls.insert(ticket, call)),
            Err(misuse) => call.answer(Answer::Misused(misuse)),
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.next_action() {
            let done = match action {
                Action::Send { to, message, payload } => {
                    self.sessions.send(to, message, payload);
                    Ok(())
                }
                Action::SendPage { to, page, message } => {
                    self.sessions.send(to, message, self.area.read(page).to_vec());
                    Ok(())
                }
                Action::Protect { page } => self.area.protect(page),
                Action::Unmap { page } => self.area.unmap(page),
                Action::Install { page, mode, contents } => self.install(page, mode, &contents),
                Action::Done { ticket, outcome } => {
                    if let Some(call) = self.calls.remove(&ticket) {
                        call.answer(Answer::Done(outcome));
                    }
                    Ok(())
                }
                Action::End { reason } => self.die(&reason.to_string()),
            };
            if let Err(error) = done {
                self.die(&format!("the kernel refuses to map a page: {error}"));
            }
        }
    }

    fn install(&self, page: u32, mode: byway_service::coherence::Mode, contents: &Contents) -> Result<(), FillError> {
        match contents {
            Contents::Zero => self.area.touch(page),
            Contents::Received(bytes) => match bytes.as_slice().try_into() {
                Ok(bytes) => self.area.fill(page, bytes),
                Err(_) => self.die(&format!("a page came with {} bytes instead of {PAGE_BYTES}", bytes.len())),
            },
            Contents::Kept => {}
        }
        self.area.allow(page, mode)
    }

    /// Ends the process. Its threads may wait for pages that never come, with any lock, so nothing of them is run or waited for.
    fn die(&self, reason: &str) -> ! {
        let line = format!("byway dsm: rank {}: {reason}\n", self.rank);
        let _ = rustix::io::write(std::io::stderr(), line.as_bytes());
        // SAFETY: ends the process; nothing is run after it.
        unsafe { libc::_exit(EXIT_JOB_ENDED) }
    }
}
