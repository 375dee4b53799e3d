//! Which thread drives the pager: its own, or one of the program's that waits for an answer.
//!
//! A thread of the program that calls (for a lock, a barrier, a fence, a fetch) does the machine's part of the call itself. While it waits it *leads*:
//! it looks for messages, so that neither the call nor its answer is handed from one thread to another. The pager's own thread answers faults, and
//! messages that come while the program computes, and it keeps the time. With [`Waits::Points`] nobody takes these messages but the program, where it
//! says so. Each thread has the pager for a turn at a time, under a lock, and none
//! sleeps with it.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use byway_service::dsm::{Counters, Machine, Misuse, Outcome, Ticket};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{Pid, getpid};

use crate::call::Call;
use crate::environment::Waits;
use crate::held_signals::HeldSignals;
use crate::job::CallError;
use crate::limits::LEAVE_TIME_MAX;
use crate::pager::{Pager, Rest};
use crate::spin::Spin;

/// See the module.
pub(crate) struct Drive {
    pager: Mutex<Pager>,
    /// What the pager's thread sleeps on: faults, messages where no other thread takes them, and the bell.
    sources: OwnedFd,
    /// Readable when messages have come.
    messages: OwnedFd,
    /// Has the pager's thread look at the pager again.
    bell: OwnedFd,
    /// Tells the leader that another thread has taken its answer.
    leader_bell: Arc<OwnedFd>,
    leads: AtomicBool,
    waits: Waits,
    /// Its children have no part in the job.
    process: Pid,
}

impl std::fmt::Debug for Drive {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Drive").field("waits", &self.waits).finish_non_exhaustive()
    }
}

/// A bell: to be written to and polled.
pub(crate) fn bell() -> std::io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

pub(crate) fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

fn quieten(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

impl Drive {
    pub(crate) fn new(mut pager: Pager, waits: Waits) -> std::io::Result<Arc<Self>> {
        let (bell, leader_bell) = (bell()?, Arc::clone(pager.leader_bell()));
        let messages = pager.messages()?.try_clone_to_owned()?;
        let sources = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&sources, pager.faults(), EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&sources, &bell, EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&sources, &messages, EventData::new_u64(0), EventFlags::IN)?;
        pager.listens = true;
        let (leads, process) = (AtomicBool::new(false), getpid());
        Ok(Arc::new(Self { pager: Mutex::new(pager), sources, messages, bell, leader_bell, leads, waits, process }))
    }

    /// Starts the pager's thread. All signals are blocked there: they are for the program, whose handlers may use segments.
    pub(crate) fn start(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let drive = Arc::clone(self);
        let _signals = HeldSignals::hold();
        std::thread::Builder::new().name("dsm-pager".to_owned()).spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| drive.run())).is_err() {
                // Threads of the program, and other ranks, would wait for this one's pages for ever.
                drive.lock().die("the pager has panicked");
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Pager> {
        self.pager.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the pager's thread look for messages, if no other thread does.
    fn settle(&self, pager: &mut Pager) {
        // Threads that wait for answers, or one that computes and is not to be asked at its safe points alone.
        let asks = pager.has_calls() || self.waits != Waits::Points;
        let listens = !pager.is_led() && asks || pager.has_faults() || pager.is_ending();
        if listens != pager.listens {
            pager.listens = listens;
            let flags = if listens { EventFlags::IN } else { EventFlags::empty() };
            let _ = epoll::modify(&self.sources, &self.messages, EventData::new_u64(0), flags);
        }
    }

    /// A thread of the program has done its turn.
    fn release(&self, mut pager: MutexGuard<'_, Pager>) {
        self.settle(&mut pager);
        let must_ring = pager.must_look();
        drop(pager);
        if must_ring {
            ring(&self.bell);
        }
    }

    /// The pager's thread, until the process leaves its job.
    fn run(&self) {
        let mut spin = Spin::new();
        loop {
            let mut pager = self.lock();
            let rest = pager.turn();
            if rest == Rest::Over {
                return pager.close(LEAVE_TIME_MAX);
            }
            self.settle(&mut pager);
            let (time, is_led) = (pager.rest_time(), pager.is_led());
            drop(pager);
            // A thread that leads is the one that spins.
            let waits = if self.waits == Waits::Spin && is_led { Waits::Sleep } else { self.waits };
            if rest == Rest::Nothing {
                wait(waits, &mut spin, Some(time), |time| self.look(time));
                quieten(&self.bell);
            }
        }
    }

    /// Whether there is something for the pager's thread.
    fn look(&self, time: Option<Duration>) -> bool {
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 1];
        epoll::wait(&self.sources, &mut events, time.as_ref()).is_ok_and(|count| count > 0)
    }

    /// Does a call of the program, and waits for its outcome.
    pub(crate) fn call(
        &self,
        begin: impl FnOnce(&mut Machine, Ticket) -> Result<(), Misuse>,
    ) -> Result<Outcome, CallError> {
        let signals = self.enter()?;
        let mut pager = self.lock();
        let call = Call::default();
        pager.begin(&call, begin)?;
        if let Some(outcome) = call.take() {
            self.release(pager);
            return Ok(outcome);
        }
        let leads = !self.leads.swap(true, Ordering::Relaxed);
        if leads {
            pager.set_leader(Some(call.clone()));
        }
        self.release(pager);
        if leads {
            return Ok(self.lead(&call, &signals));
        }
        drop(signals);
        Ok(call.wait())
    }

    /// Does something of the program's that needs no answer.
    pub(crate) fn tell<T>(&self, say: impl FnOnce(&mut Pager) -> T) -> Option<T> {
        let _signals = self.enter().ok()?;
        let mut pager = self.lock();
        let said = say(&mut pager);
        self.release(pager);
        Some(said)
    }

    /// A safe point of the program: answers the messages that have come, if nobody else does.
    pub(crate) fn poll(&self) {
        if self.waits != Waits::Points {
            return;
        }
        let mut messages = [PollFd::new(&self.messages, PollFlags::IN)];
        if poll(&mut messages, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0) {
            while self.tell(Pager::take_messages) == Some(Rest::More) {}
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        self.enter().map_or_else(|_| Counters::default(), |_signals| self.lock().counters())
    }

    /// Has the pager's thread end: the others know that this process leaves, or take it for gone.
    pub(crate) fn end(&self, says_so: bool) {
        let _ = self.tell(|pager| pager.end(says_so));
        ring(&self.bell);
    }

    /// Whether this process is a forked child of the one that has joined: its locks and descriptors are those of its parent.
    pub(crate) fn is_of_parent(&self) -> bool {
        getpid() != self.process
    }

    /// What every call begins with.
    fn enter(&self) -> Result<HeldSignals, CallError> {
        if self.is_of_parent() { Err(CallError::Forked) } else { Ok(HeldSignals::hold()) }
    }

    /// Drives the pager until the call has its outcome.
    fn lead(&self, call: &Call, signals: &HeldSignals) -> Outcome {
        let mut spin = None;
        loop {
            let mut pager = self.lock();
            let spin = spin.get_or_insert_with(|| *pager.leader_spin());
            if pager.take_rung() {
                quieten(&self.leader_bell);
            }
            let rest = pager.lead();
            // What has been received wakes nobody again, so it is not left to others.
            if rest == Rest::Nothing
                && let Some(outcome) = call.take()
            {
                *pager.leader_spin() = *spin;
                pager.set_leader(None);
                self.leads.store(false, Ordering::Relaxed);
                self.release(pager);
                if self.waits == Waits::Spin {
                    ring(&self.bell);
                }
                return outcome;
            }
            self.release(pager);
            if rest == Rest::Nothing {
                let sources = [self.messages.as_fd(), self.leader_bell.as_fd()];
                wait(self.waits, spin, None, |time| signals.poll(&sources, time));
            }
        }
    }
}

/// Waits, in the way that was asked for, until `look` finds something.
fn wait(waits: Waits, spin: &mut Spin, time: Option<Duration>, mut look: impl FnMut(Option<Duration>) -> bool) {
    const NO_TIME: Option<Duration> = Some(Duration::ZERO);
    let began = Instant::now();
    let ends = |now: Instant| time.is_some_and(|time| now - began >= time);
    match waits {
        Waits::Sleep => drop(look(time)),
        Waits::Spin => {
            while !look(NO_TIME) && !ends(Instant::now()) {
                std::hint::spin_loop();
            }
        }
        Waits::Poll | Waits::Points => {
            let looks = spin.time(began);
            let (mut now, mut found) = (began, look(NO_TIME));
            while !found && now - began < looks && !ends(now) {
                rustix::thread::sched_yield();
                let yielded = Instant::now();
                found = look(NO_TIME);
                if !spin.yielded(yielded - now, yielded) {
                    break;
                }
                now = Instant::now();
            }
            if !found {
                look(time);
            }
            spin.waited(began.elapsed());
        }
    }
}
