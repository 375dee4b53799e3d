//! Locks: a queue of ranks in which each knows the next one and hands the lock to it directly.
//!
//! A lock's manager knows the queue's last rank alone. A rank that asks becomes the last, and the one before is told of it
//! (Mellor-Crummey and Scott's queue lock, with messages for its pointers). Threads of one rank wait in a queue of their own, and
//! ranks that wait go first.

use std::collections::{HashMap, VecDeque};

use super::outgoing::Outbox;
use super::wire::Message;
use super::{Action, Misuse, Outcome, Rank, Ticket};
use crate::limits::DSM_CALLS_MAX;
use byway_reactor::seeded::{self, Bug};

/// A lock as this rank sees it.
#[derive(Debug, Default)]
struct Lock {
    state: State,
    /// The rank to hand it to.
    next: Option<Rank>,
    /// This rank's threads that wait.
    waiters: VecDeque<Ticket>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    Asked,
    Held,
    /// Given back to the manager, which says whether a rank has asked meanwhile.
    Returning,
}

#[derive(Debug)]
pub(super) struct Locks {
    rank: Rank,
    ranks: Rank,
    locks: HashMap<u32, Lock>,
    /// Of the locks that this rank manages and that are not free: the queue's last rank.
    last: HashMap<u32, Rank>,
    waiting: usize,
}

impl Locks {
    pub(super) fn new(rank: Rank, ranks: Rank) -> Self {
        Self { rank, ranks, locks: HashMap::new(), last: HashMap::new(), waiting: 0 }
    }

    fn manager(&self, lock: u32) -> Rank {
        (lock % u32::from(self.ranks)) as Rank
    }

    pub(super) fn lock(&mut self, lock: u32, ticket: Ticket, outbox: &mut Outbox) -> Result<(), Misuse> {
        if self.waiting >= DSM_CALLS_MAX {
            return Err(Misuse::TooMany);
        }
        self.waiting += 1;
        self.locks.entry(lock).or_default().waiters.push_back(ticket);
        self.ask(lock, outbox);
        Ok(())
    }

    /// Asks the manager, if a thread waits and nothing is under way.
    fn ask(&mut self, lock: u32, outbox: &mut Outbox) {
        let manager = self.manager(lock);
        let Some(own) = self.locks.get_mut(&lock) else { return };
        if own.state == State::Idle {
            if own.waiters.is_empty() {
                self.locks.remove(&lock);
            } else {
                own.state = State::Asked;
                outbox.push((manager, Message::Lock { lock }, Vec::new()));
            }
        }
    }

    /// Whether this rank has the lock.
    pub(super) fn is_held(&self, lock: u32) -> bool {
        self.locks.get(&lock).is_some_and(|own| own.state == State::Held)
    }

    pub(super) fn unlock(&mut self, lock: u32, outbox: &mut Outbox) -> Result<Option<Action>, Misuse> {
        let manager = self.manager(lock);
        let own = self.locks.get_mut(&lock).filter(|own| own.state == State::Held);
        let own = own.ok_or(Misuse::NotLocked { lock })?;
        if let Some(next) = own.next.take() {
            own.state = State::Idle;
            outbox.push((next, Message::Locked { lock }, Vec::new()));
            self.ask(lock, outbox);
        } else if let Some(ticket) = own.waiters.pop_front() {
            self.waiting -= 1;
            return Ok(Some(Action::Done { ticket, outcome: Outcome::Locked }));
        } else {
            own.state = State::Returning;
            outbox.push((manager, Message::Unlock { lock }, Vec::new()));
        }
        Ok(None)
    }

    /// At the manager: a rank wants the lock.
    pub(super) fn asked(&mut self, from: Rank, lock: u32, outbox: &mut Outbox) -> Result<(), &'static str> {
        if self.manager(lock) != self.rank {
            return Err("it took this rank for the manager of a lock");
        }
        match self.last.insert(lock, from) {
            None => outbox.push((from, Message::Locked { lock }, Vec::new())),
            Some(last) if last == from => return Err("it asked for a lock twice"),
            Some(_) if seeded::is(Bug::DsmLockGrantedTwice) => {
                outbox.push((from, Message::Locked { lock }, Vec::new()));
            }
            Some(last) => outbox.push((last, Message::Next { lock, waiter: from }, Vec::new())),
        }
        Ok(())
    }

    /// At the manager: a rank knows of none that waits. If one has asked, the rank is told, or was.
    pub(super) fn returned(&mut self, from: Rank, lock: u32, outbox: &mut Outbox) {
        if self.last.get(&lock) == Some(&from) {
            self.last.remove(&lock);
            outbox.push((from, Message::Unlocked { lock }, Vec::new()));
        } else if seeded::is(Bug::DsmLockFreedUnderWaiter) {
            self.last.remove(&lock);
        }
    }

    pub(super) fn next(&mut self, lock: u32, waiter: Rank, outbox: &mut Outbox) -> Result<(), &'static str> {
        let own = self.locks.get_mut(&lock).filter(|own| own.next.is_none());
        let own = own.ok_or("it named the next rank for a lock that this rank does not have")?;
        if own.state == State::Returning {
            if seeded::is(Bug::DsmLockNotHandedOn) {
                return Ok(());
            }
            own.state = State::Idle;
            outbox.push((waiter, Message::Locked { lock }, Vec::new()));
            self.ask(lock, outbox);
        } else {
            own.next = Some(waiter);
        }
        Ok(())
    }

    pub(super) fn locked(&mut self, lock: u32) -> Result<Action, &'static str> {
        let own = self.locks.get_mut(&lock).filter(|own| own.state == State::Asked);
        let own = own.ok_or("it handed over a lock that this rank did not ask for")?;
        own.state = State::Held;
        let ticket = own.waiters.pop_front().ok_or("it handed over a lock that no thread waits for")?;
        self.waiting -= 1;
        Ok(Action::Done { ticket, outcome: Outcome::Locked })
    }

    pub(super) fn freed(&mut self, lock: u32, outbox: &mut Outbox) -> Result<(), &'static str> {
        let own = self.locks.get_mut(&lock).filter(|own| own.state == State::Returning);
        own.ok_or("it freed a lock that this rank did not return")?.state = State::Idle;
        self.ask(lock, outbox);
        Ok(())
    }
}
