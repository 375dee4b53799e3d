//! The pager: the thread of a process that answers its program's faults and calls, and the messages of other processes.
//!
//! One thread does it all, so the machine's actions are done in their order without a lock. It never touches the program's view of
//! the memory: it would wait for itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use byway_reactor::monotonic;
use byway_service::coherence::Mode;
use byway_service::dsm::wire::Message;
use byway_service::dsm::{Action, Contents, Counters, Due, Machine, Page, PinnedPages, Rank, Ticket, Twins, Watch};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::EXIT_JOB_ENDED;
use crate::area::{Area, Bytes, Fault, TakeError};
use crate::call::{Answer, Call, Command};
use crate::environment::{Environment, Waits};
use crate::limits::{
    AREA_ADDRESS, LAST_WORDS_TIME_MAX, LEAVE_TIME_MAX, PAGE_BYTES, PIN_PAUSE, PIN_TIME_MAX, POLL_TIME_MAX,
};
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
    /// Pages that the program waits for.
    faulted: HashSet<Page>,
    /// When something last came.
    busy_at: Instant,
    /// Bytes of pages that were taken from the program, until they are sent.
    aside: HashMap<Page, Bytes>,
    twins: Twins,
    pinned: PinnedPages,
    /// When pinned pages are tried again.
    retries_at: byway_reactor::Instant,
    watch: Watch,
    waits: Waits,
}

/// How the pager ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Leave,
    Cut,
}

impl Pager {
    pub(crate) fn new(
        area: Arc<Area>,
        sessions: Sessions,
        commands: Arc<Commands>,
        machine: Machine,
        environment: &Environment,
    ) -> Self {
        let Environment { rank, ranks, keep_alive, waits, .. } = *environment;
        Self {
            rank,
            area,
            sessions,
            machine,
            commands,
            calls: HashMap::new(),
            next_ticket: 0,
            faulted: HashSet::new(),
            busy_at: Instant::now(),
            aside: HashMap::new(),
            twins: Twins::default(),
            pinned: PinnedPages::default(),
            retries_at: byway_reactor::Instant::ZERO,
            watch: Watch::new(rank, ranks, keep_alive, monotonic()),
            waits,
        }
    }

    /// Starts the pager's thread. All signals are blocked there: they are for the program, whose handlers may use segments.
    pub(crate) fn start(self) -> std::io::Result<JoinHandle<()>> {
        let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::uninit());
        // SAFETY: the first call fills `all`, the second reads it and fills `before`.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        }
        let thread = std::thread::Builder::new().name("dsm-pager".to_owned()).spawn(move || self.run());
        // SAFETY: `before` was filled above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
        thread
    }

    /// Until the process leaves its job.
    fn run(mut self) {
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
            self.look_at_time();
            match self.sessions.progress() {
                Ok(some) => is_busy |= some,
                Err(error) => self.die(&format!("the sessions with the other processes cannot be driven: {error}")),
            }
            // Not before the others' last messages are here: a connection that is closed with bytes unread loses those on their way.
            if leaves_by.is_some_and(|at| self.machine.is_alone() || Instant::now() >= at) {
                return self.sessions.close(LEAVE_TIME_MAX);
            }
            if is_busy {
                self.busy_at = Instant::now();
            } else if self.looks_again() {
                std::hint::spin_loop();
            } else {
                self.sleep(leaves_by.map(|at| at.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Whether the pager looks again, rather than have the kernel wake it.
    fn looks_again(&self) -> bool {
        match self.waits {
            Waits::Sleep => false,
            Waits::Poll => {
                let is_waited_for = !self.faulted.is_empty() || !self.calls.is_empty();
                is_waited_for && self.busy_at.elapsed() < POLL_TIME_MAX
            }
            Waits::Spin => true,
        }
    }

    /// Until there is something to do.
    fn sleep(&self, time: Option<Duration>) {
        let node = match self.sessions.descriptor() {
            Ok(node) => node,
            Err(error) => self.die(&format!("the node has no descriptor: {error}")),
        };
        let mut sources = [
            PollFd::from_borrowed_fd(self.area.descriptor(), PollFlags::IN),
            PollFd::from_borrowed_fd(node, PollFlags::IN),
            PollFd::new(&self.commands.event, PollFlags::IN),
        ];
        let retry = self.pinned.oldest().map(|_| PIN_PAUSE);
        let look = self.watch.next_time() - monotonic();
        let time = [time, retry].into_iter().flatten().fold(look, Duration::min);
        let _ = poll(&mut sources, Timespec::try_from(time).ok().as_ref());
    }

    /// Tries pinned pages again, and looks whether the other ranks live.
    fn look_at_time(&mut self) {
        let now = monotonic();
        if self.pinned.oldest().is_some() && now >= self.retries_at {
            self.retries_at = now + PIN_PAUSE;
            let mut pinned = std::mem::take(&mut self.pinned);
            pinned.retry(|action| self.perform(action));
            self.pinned = pinned;
            self.act();
        }
        if let Some((page, since)) = self.pinned.oldest()
            && now - since > PIN_TIME_MAX
        {
            let at = address(page);
            self.die(&format!(
                "another process has waited {PIN_TIME_MAX:?} for the page at {at:#x}, which a device has pinned: direct I/O must end, and \
                 segments must not be registered as buffers of a ring or a device"
            ));
        }
        match self.watch.look(now) {
            Due::Nothing => return,
            Due::Alive => self.machine.tell_alive(),
            Due::Silent(rank, silence) => self.machine.silent(rank, silence.as_secs()),
        }
        self.act();
    }

    fn take_faults(&mut self) -> bool {
        let mut faults = Vec::new();
        let some = self.area.faults(|fault| faults.push(fault));
        for Fault { page, mode, is_missing } in faults {
            let should_be_there = is_missing && self.machine.mode(page) > Mode::None && !self.pinned.has(page);
            if should_be_there && self.area.is_there(page).is_ok_and(|there| !there) {
                self.die(&format!("the page at {:#x}: {}", address(page), TakeError::Dropped));
            }
            self.faulted.insert(page);
            self.machine.fault(page, mode);
            self.act();
        }
        some
    }

    fn take_messages(&mut self) -> bool {
        for taken in 0..MESSAGES_PER_TURN {
            match self.sessions.next() {
                Ok(Some(Incoming::Message(from, message, payload))) => {
                    self.watch.heard(from, monotonic());
                    self.machine.received(from, message, payload);
                }
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
                Command::Fence(call) => self.call(call, Machine::fence),
                Command::Fetch(pages, call) => self.call(call, |machine, ticket| machine.fetch(pages, ticket)),
                Command::Map(name, pages, call) => self.call(call, |machine, ticket| machine.map(&name, pages, ticket)),
                // A guard sends it once; of others a lock that this process does not have is left alone.
                Command::Unlock(lock) => drop(self.machine.unlock(lock)),
                Command::Count(call) => {
                    let counters = Counters { pin_waits: self.pinned.waits(), ..self.machine.counters() };
                    call.answer(Answer::Counted(counters));
                }
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
            let Some(action) = self.pinned.admit(action) else { continue };
            if let Some(action) = self.perform(action) {
                self.pinned.wait(action, monotonic());
            }
        }
    }

    /// Does an action, or gives it back if a device has its page pinned.
    fn perform(&mut self, action: Action) -> Option<Action> {
        match action {
            Action::Send { to, message, payload } => self.sessions.send(to, message, payload),
            Action::SendPage { to, page, message } => {
                let bytes = match self.aside.remove(&page) {
                    Some(bytes) => Ok(bytes),
                    None => self.area.protect(page),
                };
                match self.taken(page, bytes) {
                    Some(bytes) => self.send(to, message, bytes.to_vec()),
                    None => return Some(action),
                }
            }
            Action::Protect { page } | Action::Take { page } => {
                let is_copy = matches!(action, Action::Protect { .. });
                let bytes = if is_copy { self.area.protect(page) } else { self.area.take(page) };
                match self.taken(page, bytes) {
                    Some(bytes) => drop(self.aside.insert(page, bytes)),
                    None => return Some(action),
                }
            }
            Action::Unmap { page } => {
                if let Err(error) = self.area.drop_copy(page) {
                    self.refused(page, &error);
                }
            }
            Action::Install { page, mode, contents } => {
                self.install(page, mode, &contents);
                self.faulted.remove(&page);
            }
            Action::Twin { page, ref contents } => {
                if !self.open_with_twin(page, contents) {
                    return Some(action);
                }
                self.faulted.remove(&page);
            }
            Action::ForgetTwin { page } => self.twins.forget(page),
            Action::Flush { to, page, message, keeps } => {
                let bytes = if keeps { self.area.protect(page) } else { self.area.take(page) };
                let Some(bytes) = self.taken(page, bytes) else { return Some(action) };
                let difference = self.twins.difference(page, &bytes[..]);
                self.send(to, message, difference);
                self.machine.flushed(page);
            }
            Action::Done { ticket, outcome } => {
                if let Some(call) = self.calls.remove(&ticket) {
                    call.answer(Answer::Done(outcome));
                }
            }
            Action::End { reason } => {
                // Before the others see the end of these sessions: they shall name the cause, not this process.
                self.sessions.close(LAST_WORDS_TIME_MAX);
                self.die(&reason.to_string());
            }
        }
        None
    }

    /// The page's bytes; none if a device has it pinned.
    fn taken(&self, page: Page, bytes: Result<Bytes, TakeError>) -> Option<Bytes> {
        match bytes {
            Ok(bytes) => Some(bytes),
            Err(TakeError::Pinned) => None,
            Err(error) => self.refused(page, &error),
        }
    }

    /// Sends a message with bytes of a page, perhaps to this process's own machine.
    fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        if to == self.rank {
            self.machine.received(to, message, payload);
        } else {
            self.sessions.send(to, message, payload);
        }
    }

    /// Lets the program store to a page whose twin is kept. False if a device has the page pinned.
    fn open_with_twin(&mut self, page: Page, contents: &Contents) -> bool {
        let before = match contents {
            Contents::Received(bytes) => {
                self.install(page, Mode::Write, contents);
                bytes.as_slice().into()
            }
            Contents::Zero | Contents::Kept => match self.taken(page, self.area.open_for_stores(page)) {
                Some(bytes) => bytes as Box<[u8]>,
                None => return false,
            },
        };
        self.twins.keep(page, before);
        true
    }

    fn install(&self, page: Page, mode: Mode, contents: &Contents) {
        let done = match contents {
            Contents::Zero => self.area.fill(page, &[0; PAGE_BYTES], mode),
            Contents::Received(bytes) => match bytes.as_slice().try_into() {
                Ok(bytes) => self.area.fill(page, bytes, mode),
                Err(_) => self.die(&format!("a page came with {} bytes instead of {PAGE_BYTES}", bytes.len())),
            },
            Contents::Kept => self.area.allow(page, mode),
        };
        if let Err(error) = done {
            self.refused(page, &error);
        }
    }

    /// The kernel does not map or take a page.
    fn refused(&self, page: Page, error: &dyn std::error::Error) -> ! {
        self.die(&format!("the page at {:#x} cannot be mapped or taken: {error}", address(page)))
    }

    /// Ends the process. Its threads may wait for pages that never come, with any lock, so nothing of them is run or waited for.
    fn die(&self, reason: &str) -> ! {
        let line = format!("byway dsm: rank {}: {reason}\n", self.rank);
        let _ = rustix::io::write(std::io::stderr(), line.as_bytes());
        // SAFETY: ends the process; nothing is run after it.
        unsafe { libc::_exit(EXIT_JOB_ENDED) }
    }
}

/// Where the program has a page.
fn address(page: Page) -> usize {
    AREA_ADDRESS + page as usize * PAGE_BYTES
}
