//! The pager answers the program's faults and calls, and the messages of other processes.
//!
//! One thread at a time has it ([`Drive`](crate::drive::Drive)), so the machine's actions are done in their order. That thread never touches the
//! program's view of the memory: it would wait for itself.

mod perform;
mod runs;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::monotonic;
use byway_service::coherence::Mode;
use byway_service::dsm::{
    Action, Actions, Counters, Due, Machine, Misuse, Page, PinnedPages, PlacedSegment, Rank, Ticket, Twins, Watch,
};

use crate::EXIT_JOB_ENDED;
use crate::area::{Area, Bytes, Fault, TakeError};
use crate::call::Call;
use crate::drive::bell;
use crate::environment::Environment;
use crate::limits::{AREA_ADDRESS, LEAVE_TIME_MAX, PAGE_BYTES, PIN_PAUSE, PIN_TIME_MAX};
use crate::report::{Counted, Tally};
use crate::sessions::{Incoming, Sessions};
use crate::spin::Spin;

/// Messages that are taken in a turn.
const MESSAGES_PER_TURN: usize = 64;

pub(crate) struct Pager {
    rank: Rank,
    area: Arc<Area>,
    sessions: Sessions,
    machine: Machine,
    actions: Actions,
    calls: HashMap<Ticket, Call>,
    next_ticket: Ticket,
    /// Pages that the program waits for.
    faulted: HashSet<Page>,
    /// Bytes of pages that were taken from the program, until they are sent.
    aside: HashMap<Page, Bytes>,
    twins: Twins,
    pinned: PinnedPages,
    /// When pinned pages are tried again.
    retries_at: byway_reactor::Instant,
    watch: Watch,
    /// What the thread that leads waits for.
    leader: Option<Call>,
    /// The turn is the leader's.
    is_leading: bool,
    leader_bell: Arc<OwnedFd>,
    has_rung: bool,
    leader_spin: Spin,
    /// Whether messages wake the pager's thread.
    pub(crate) listens: bool,
    /// When the pager's thread looks at the time again, at the latest.
    looks_at: byway_reactor::Instant,
    ending: Option<Ending>,
    tally: Tally,
    /// What it has counted is told at the end.
    reports: bool,
}

/// How the pager ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// When no other process needs this one any more, or at that time.
    Leave(Instant),
    Cut,
}

/// What a turn has left to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Nothing that is known: to be waited for.
    Nothing,
    /// More than a turn does.
    More,
    /// The process has left its job.
    Over,
}

impl Pager {
    pub(crate) fn new(
        area: Arc<Area>,
        sessions: Sessions,
        machine: Machine,
        environment: &Environment,
    ) -> std::io::Result<Self> {
        let Environment { rank, ranks, keep_alive, reports, .. } = *environment;
        Ok(Self {
            rank,
            area,
            sessions,
            machine,
            actions: Actions::default(),
            calls: HashMap::new(),
            next_ticket: 0,
            faulted: HashSet::new(),
            aside: HashMap::new(),
            twins: Twins::default(),
            pinned: PinnedPages::default(),
            retries_at: byway_reactor::Instant::ZERO,
            watch: Watch::new(rank, ranks, keep_alive, monotonic()),
            leader: None,
            is_leading: false,
            leader_bell: Arc::new(bell()?),
            has_rung: false,
            leader_spin: Spin::new(),
            listens: false,
            looks_at: byway_reactor::Instant::ZERO,
            ending: None,
            tally: Tally::new(ranks, reports),
            reports,
        })
    }

    /// Readable when the program has faulted.
    pub(crate) fn faults(&self) -> BorrowedFd<'_> {
        self.area.descriptor()
    }

    /// Readable when messages have come.
    pub(crate) fn messages(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.sessions.descriptor()
    }

    /// Whether the leader's bell has been rung since the last call.
    pub(crate) fn take_rung(&mut self) -> bool {
        std::mem::take(&mut self.has_rung)
    }

    pub(crate) fn leader_bell(&self) -> &Arc<OwnedFd> {
        &self.leader_bell
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters { pin_waits: self.pinned.waits(), ..self.machine.counters() }
    }

    /// Names the bytes at these addresses in reports.
    pub(crate) fn name(&mut self, bytes: Range<usize>, name: &str) {
        self.tally.name(bytes, name);
    }

    /// What this process has counted, if the job makes a report.
    pub(crate) fn report(&mut self) -> Option<Counted> {
        self.reports.then(|| self.look_at_tally())
    }

    /// What this process has counted, from the first call on if the job makes no report.
    pub(crate) fn look_at_tally(&mut self) -> Counted {
        self.tally.begin();
        self.tally.counted(self.counters(), self.machine.segments())
    }

    /// The pages whose home this rank is; at rank 0 all segments.
    pub(crate) fn image(&self) -> (Vec<Page>, Vec<PlacedSegment>) {
        (self.machine.homes(), self.machine.segments())
    }

    pub(crate) fn is_led(&self) -> bool {
        self.leader.is_some()
    }

    pub(crate) fn set_leader(&mut self, leader: Option<Call>) {
        self.leader = leader;
    }

    /// How long a leader looks for messages before it sleeps.
    pub(crate) fn leader_spin(&mut self) -> &mut Spin {
        &mut self.leader_spin
    }

    /// Whether threads of the program wait for answers.
    pub(crate) fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Whether the program waits for pages.
    pub(crate) fn has_faults(&self) -> bool {
        !self.faulted.is_empty()
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// A turn of the pager's thread: faults, the time, and messages, unless another thread takes these.
    pub(crate) fn turn(&mut self) -> Rest {
        let is_time = monotonic() >= self.looks_at;
        self.take_faults();
        self.look_at_time();
        let rest = if self.listens || is_time { self.take_messages() } else { Rest::Nothing };
        match self.ending {
            // Not before the others' last messages are here: a connection that is closed with bytes unread loses those on their way.
            Some(Ending::Leave(at)) if self.machine.is_alone() || Instant::now() >= at => Rest::Over,
            Some(Ending::Cut) => Rest::Over,
            _ => rest,
        }
    }

    /// A turn of the leader: messages.
    pub(crate) fn lead(&mut self) -> Rest {
        self.is_leading = true;
        let rest = self.take_messages();
        self.is_leading = false;
        rest
    }

    /// How long the pager's thread may sleep.
    pub(crate) fn rest_time(&mut self) -> Duration {
        let now = monotonic();
        let retry = self.pinned.oldest().map(|_| PIN_PAUSE);
        let end = match self.ending {
            Some(Ending::Leave(at)) => Some(at.saturating_duration_since(Instant::now())),
            _ => None,
        };
        let time = [retry, end].into_iter().flatten().fold(self.watch.next_time() - now, Duration::min);
        self.looks_at = now + time;
        time
    }

    /// Whether the pager's thread sleeps too long, for what another thread has done.
    pub(crate) fn must_look(&self) -> bool {
        self.pinned.oldest().is_some() && self.looks_at > monotonic() + PIN_PAUSE
    }

    /// The process leaves its job, or is cut from it.
    pub(crate) fn end(&mut self, says_so: bool) {
        if says_so {
            self.ending = Some(Ending::Leave(Instant::now() + LEAVE_TIME_MAX));
            self.machine.leave();
            self.act();
        } else {
            self.ending = Some(Ending::Cut);
        }
    }

    /// Ends the sessions when what was sent has gone out, or time is over. One that is cut ends with them.
    pub(crate) fn close(&mut self, time: Duration) {
        if self.ending != Some(Ending::Cut) {
            self.sessions.close(time);
        }
    }

    /// Begins a call of the program.
    pub(crate) fn begin(
        &mut self,
        call: &Call,
        begin: impl FnOnce(&mut Machine, Ticket) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.calls.insert(ticket, call.clone());
        begin(&mut self.machine, ticket).inspect_err(|_| drop(self.calls.remove(&ticket)))?;
        self.act();
        Ok(())
    }

    /// The program gives back a lock. One that this process does not have is left alone.
    pub(crate) fn unlock(&mut self, lock: u32) {
        let _ = self.machine.unlock(lock);
        self.act();
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

    fn take_faults(&mut self) {
        let mut faults = Vec::new();
        self.area.faults(|fault| faults.push(fault));
        for Fault { page, mode, is_missing } in faults {
            let should_be_there = is_missing && self.machine.mode(page) > Mode::None && !self.pinned.has(page);
            if should_be_there && self.area.is_there(page).is_ok_and(|there| !there) {
                self.die(&format!("the page at {:#x}: {}", address(page), TakeError::Dropped));
            }
            self.faulted.insert(page);
            if let Some(tally) = self.tally.counting() {
                tally.fault(page, mode, Instant::now());
            }
            self.machine.fault(page, mode);
            self.act();
        }
    }

    /// Sends what has waited, and takes what has come.
    pub(crate) fn take_messages(&mut self) -> Rest {
        if let Err(error) = self.sessions.progress() {
            self.die(&format!("the sessions with the other processes cannot be driven: {error}"));
        }
        // What came together is taken together, so that neighbouring pages leave, and come, together.
        let mut is_batch = false;
        for _ in 0..MESSAGES_PER_TURN {
            match self.sessions.next() {
                Ok(Some(Incoming::Message(from, message, payload))) => {
                    self.watch.heard(from, monotonic());
                    self.machine.received(from, message, payload);
                }
                Ok(Some(Incoming::Malformed(from))) => self.die(&format!("rank {from} sent what is no message")),
                Ok(Some(Incoming::Gone(rank))) => self.machine.gone(rank),
                Ok(None) => {
                    self.act();
                    return Rest::Nothing;
                }
                Err(error) => self.die(&format!("the sessions with the other processes cannot be driven: {error}")),
            }
            is_batch |= self.sessions.has_more();
            if !is_batch {
                self.act();
            }
        }
        self.act();
        Rest::More
    }

    fn act(&mut self) {
        let mut run = Vec::new();
        loop {
            self.actions.gather(&mut self.machine);
            if !self.actions.next_run(&mut run) {
                break;
            }
            if run.len() > 1 && !run.iter().filter_map(Action::page).any(|page| self.pinned.has(page)) {
                self.perform_run(&mut run);
                continue;
            }
            for action in run.drain(..) {
                let Some(action) = self.pinned.admit(action) else { continue };
                if let Some(action) = self.perform(action) {
                    self.pinned.wait(action, monotonic());
                }
            }
        }
        if let Err(error) = self.sessions.flush() {
            self.die(&format!("a message cannot be sent: {error}"));
        }
    }

    /// The kernel does not map or take a page.
    fn refused(&self, page: Page, error: &dyn std::error::Error) -> ! {
        self.die(&format!("the page at {:#x} cannot be mapped or taken: {error}", address(page)))
    }

    /// Ends the process. Its threads may wait for pages that never come, with any lock, so nothing of them is run or waited for.
    pub(crate) fn die(&self, reason: &str) -> ! {
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
