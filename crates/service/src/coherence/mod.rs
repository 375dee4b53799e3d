//! Which holders may read or write an object, and how a right is taken back: for leases, locks and pages.
//!
//! An [`Object`] is read by many holders or written by one. Asks are served in order of arrival. An ask that conflicts with
//! another holder's right has that right recalled first, and is granted when each such holder has answered. The object is a
//! pure state machine: the service that owns it passes in events with the time, and performs the resulting [`Action`]s in
//! order.
//!
//! A holder answers a recall only when it can no longer use the old right. Each grant has a version, which increases with
//! every grant of the object. A holder names its grant's version in every message about it; messages with an old version are
//! refused. With a lease, a holder that does not answer loses its right when the lease has expired ([`Action::Fence`]). The
//! holder counts its lease from when it sent its ask, and the object from when the ask came, so the holder stops first.
//!
//! ```
//! use byway_reactor::Instant;
//! use byway_service::coherence::{Action, Delivery, Mode, Object};
//! let now = Instant::ZERO;
//! let mut object = Object::new(None, Delivery::InOrder);
//! object.ask('a', Mode::Write, now)?;
//! assert_eq!(object.next_action(), Some(Action::Grant { holder: 'a', mode: Mode::Write, version: 1 }));
//! object.ask('b', Mode::Read, now)?;
//! assert_eq!(object.next_action(), Some(Action::Recall { holder: 'a', to: Mode::Read, version: 1 }));
//! object.recalled('a', 1, now)?;
//! assert_eq!(object.next_action(), Some(Action::Grant { holder: 'b', mode: Mode::Read, version: 2 }));
//! # Ok::<(), byway_service::coherence::Refused>(())
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use byway_reactor::Instant;

use crate::limits::COHERENCE_ASKS_MAX;

#[cfg(test)]
mod tests;

/// What a holder may do with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Nothing.
    None,
    /// Read, beside other readers.
    Read,
    /// Read and write, alone.
    Write,
}

/// How grants reach their holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// In the order of the actions: a holder has its grant before it hears of a later recall.
    InOrder,
    /// By another way than recalls: no later ask is served until [`Object::delivered`] says that the holder has its grant.
    Confirmed,
}

/// What the service does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action<H> {
    /// The holder has the right from now on.
    Grant {
        /// Which holder asked.
        holder: H,
        /// The right.
        mode: Mode,
        /// Of the grant.
        version: u64,
    },
    /// The holder must give up its right down to `to`, and answer with [`Object::recalled`].
    Recall {
        /// Which holder.
        holder: H,
        /// What it may keep: [`Mode::None`] or [`Mode::Read`].
        to: Mode,
        /// Of its grant.
        version: u64,
    },
    /// The holder did not answer and its lease has run out: it has no right any more, and what it sends is to be refused.
    Fence {
        /// Which holder.
        holder: H,
        /// Of the grant that it has lost.
        version: u64,
    },
}

/// Why an event was refused. The object is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// An old grant, or a holder that has none: what it says is too late.
    #[error("the grant of version {version} is not in force: the holder has lost or returned it, and must ask again")]
    Stale {
        /// What the holder named.
        version: u64,
    },
    /// It answers a recall that it was not sent.
    #[error("the holder answers a recall that it was not sent")]
    NotRecalled,
    /// It confirms a grant that is not on its way.
    #[error("the holder confirms a grant that is not on its way to it")]
    NotGranting,
    /// It asks while an ask of its own waits.
    #[error("the holder has asked for the object already and waits")]
    Asked,
    /// [`COHERENCE_ASKS_MAX`] asks wait.
    #[error("too many holders wait for the object: try again later")]
    Full,
}

/// A holder's right.
#[derive(Clone, Copy, Debug)]
struct Holding<H> {
    holder: H,
    mode: Mode,
    version: u64,
    /// The version of its first grant since it last had no right.
    since: u64,
    /// When its lease ends; [`Instant::FAR`] without leases.
    expires: Instant,
    /// What it was told to keep, until it answers.
    recall: Option<Mode>,
}

/// An ask that waits, or is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask<H> {
    /// Which holder asks.
    pub holder: H,
    /// For what.
    pub mode: Mode,
    asked: Instant,
}

/// See the module.
#[derive(Debug)]
pub struct Object<H> {
    lease: Option<Duration>,
    delivery: Delivery,
    holdings: Vec<Holding<H>>,
    version: u64,
    /// The first is being served.
    asks: VecDeque<Ask<H>>,
    /// Of [`Delivery::Confirmed`]: the holder whose grant is on its way, and the version.
    granting: Option<(H, u64)>,
    actions: VecDeque<Action<H>>,
}

impl<H: Copy + Eq> Object<H> {
    /// An object without holders. With a lease, a right lasts that long after the ask that it was granted for, and longer only
    /// by another ask; without, until it is returned.
    pub fn new(lease: Option<Duration>, delivery: Delivery) -> Self {
        let (holdings, asks, actions) = (Vec::new(), VecDeque::new(), VecDeque::new());
        Self { lease, delivery, holdings, version: 0, asks, granting: None, actions }
    }

    /// As [`Object::new`], for an object that was idle and forgotten: its next grant is newer than `version`.
    pub fn resumed(lease: Option<Duration>, delivery: Delivery, version: u64) -> Self {
        Self { version, ..Self::new(lease, delivery) }
    }

    /// A holder asks for a right. One that it has is granted again, with a new lease: at once where
    /// grants arrive in order, unless it is being recalled.
    ///
    /// # Errors
    /// `Asked`, `Full`.
    pub fn ask(&mut self, holder: H, mode: Mode, now: Instant) -> Result<(), Refused> {
        if self.asks.iter().any(|ask| ask.holder == holder) {
            return Err(Refused::Asked);
        }
        if self.asks.len() >= COHERENCE_ASKS_MAX {
            return Err(Refused::Full);
        }
        let expires = self.lease.map_or(Instant::FAR, |lease| now + lease);
        let in_order = self.delivery == Delivery::InOrder;
        // Else a recall could overtake the grant, and the holder take that for one of a right that it has still.
        let held = self.holdings.iter_mut().find(|held| in_order && held.holder == holder);
        if let Some(held) = held.filter(|held| held.mode >= mode && held.recall.is_none() && held.expires > now) {
            held.expires = expires;
            let (mode, version) = (held.mode, held.version);
            self.actions.push_back(Action::Grant { holder, mode, version });
            return Ok(());
        }
        self.asks.push_back(Ask { holder, mode, asked: now });
        self.serve(now);
        Ok(())
    }

    /// A holder has answered its recall.
    ///
    /// # Errors
    /// `Stale`, `NotRecalled`.
    pub fn recalled(&mut self, holder: H, version: u64, now: Instant) -> Result<(), Refused> {
        let place = self.place(holder, version)?;
        let to = self.holdings[place].recall.take().ok_or(Refused::NotRecalled)?;
        if to == Mode::None {
            self.holdings.remove(place);
        } else {
            self.holdings[place].mode = to;
        }
        self.serve(now);
        Ok(())
    }

    /// A holder returns its right unasked. That answers a recall too. A holder that has asked waits for the grant first: else it
    /// would take the grant of what it has returned for a new one.
    ///
    /// # Errors
    /// `Stale`.
    pub fn release(&mut self, holder: H, version: u64, now: Instant) -> Result<(), Refused> {
        let place = self.place(holder, version)?;
        self.holdings.remove(place);
        self.serve(now);
        Ok(())
    }

    /// The holder has its grant, of an object with [`Delivery::Confirmed`].
    ///
    /// # Errors
    /// `NotGranting`.
    pub fn delivered(&mut self, holder: H, version: u64, now: Instant) -> Result<(), Refused> {
        if self.granting != Some((holder, version)) {
            return Err(Refused::NotGranting);
        }
        self.granting = None;
        self.serve(now);
        Ok(())
    }

    /// A holder has gone: its rights and its ask go with it. The service has made sure that it can use no right any more.
    pub fn gone(&mut self, holder: H, now: Instant) {
        self.holdings.retain(|held| held.holder != holder);
        self.asks.retain(|ask| ask.holder != holder);
        self.actions.retain(|action| match action {
            Action::Grant { holder: other, .. } | Action::Recall { holder: other, .. } => *other != holder,
            Action::Fence { .. } => true,
        });
        if self.granting.is_some_and(|(other, _)| other == holder) {
            self.granting = None;
        }
        self.serve(now);
    }

    /// Time has passed: leases that stand against the ask that is served, and have run out, are over.
    pub fn time(&mut self, now: Instant) {
        self.serve(now);
    }

    /// When [`Self::time`] has something to do.
    pub fn next_time(&self) -> Option<Instant> {
        let ask = self.serving().filter(|_| self.granting.is_none())?;
        let against = self.holdings.iter().filter(|held| held.keeps_for(ask).is_some());
        against.map(|held| held.expires).min().filter(|at| *at < Instant::FAR)
    }

    /// What to do next.
    pub fn next_action(&mut self) -> Option<Action<H>> {
        self.actions.pop_front()
    }

    /// The ask that is being served: of an object that waits for recalls.
    pub fn serving(&self) -> Option<Ask<H>> {
        self.asks.front().copied()
    }

    /// The version that the next grant has.
    pub fn next_version(&self) -> u64 {
        self.version + 1
    }

    /// What a holder may do, also while it is being recalled.
    pub fn mode(&self, holder: H) -> Mode {
        self.holdings.iter().find(|held| held.holder == holder).map_or(Mode::None, |held| held.mode)
    }

    /// The holders, with what they may do.
    pub fn holders(&self) -> impl Iterator<Item = (H, Mode)> {
        self.holdings.iter().map(|held| (held.holder, held.mode))
    }

    /// Whether a holder may do this under the grant of that version, or under a later one that is on its way to it.
    ///
    /// # Errors
    /// `Stale`.
    pub fn check(&self, holder: H, version: u64, mode: Mode, now: Instant) -> Result<(), Refused> {
        let is_it = |held: &&Holding<H>| held.holder == holder && (held.since..=held.version).contains(&version);
        let held = self.holdings.iter().find(is_it).filter(|held| held.mode >= mode && held.expires > now);
        held.map(|_| ()).ok_or(Refused::Stale { version })
    }

    /// Whether it has neither holders nor asks, so that nothing is lost if it is forgotten but its version.
    pub fn is_idle(&self) -> bool {
        self.holdings.is_empty() && self.asks.is_empty() && self.actions.is_empty() && self.granting.is_none()
    }

    fn place(&self, holder: H, version: u64) -> Result<usize, Refused> {
        let is_it = |held: &Holding<H>| held.holder == holder && held.version == version;
        self.holdings.iter().position(is_it).ok_or(Refused::Stale { version })
    }

    /// Grants what nothing stands against, in order, and recalls what stands against the first that it cannot grant.
    fn serve(&mut self, now: Instant) {
        while let (Some(ask), None) = (self.asks.front().copied(), self.granting) {
            self.expire(ask, now);
            if self.recall_for(ask) {
                return;
            }
            self.asks.pop_front();
            self.grant(ask);
        }
    }

    /// Takes the right from those that stand against an ask and whose lease has run out.
    fn expire(&mut self, ask: Ask<H>, now: Instant) {
        let actions = &mut self.actions;
        self.holdings.retain(|held| {
            let stays = held.keeps_for(ask).is_none() || held.expires > now;
            if !stays {
                actions.push_back(Action::Fence { holder: held.holder, version: held.version });
            }
            stays
        });
    }

    /// Recalls what stands against an ask. True if there is anything.
    fn recall_for(&mut self, ask: Ask<H>) -> bool {
        let mut waits = false;
        for held in &mut self.holdings {
            let Some(to) = held.keeps_for(ask) else { continue };
            waits = true;
            // One that is to keep more is asked again when it has answered.
            if held.recall.is_none() {
                held.recall = Some(to);
                self.actions.push_back(Action::Recall { holder: held.holder, to, version: held.version });
            }
        }
        waits
    }

    fn grant(&mut self, ask: Ask<H>) {
        let Ask { holder, mode, asked } = ask;
        // A holder keeps what it has when it asks for less.
        let mode = mode.max(self.mode(holder));
        self.version += 1;
        let expires = self.lease.map_or(Instant::FAR, |lease| asked + lease);
        let holding = Holding { holder, mode, version: self.version, since: self.version, expires, recall: None };
        match self.holdings.iter_mut().find(|held| held.holder == holder) {
            Some(held) => *held = Holding { since: held.since, ..holding },
            None => self.holdings.push(holding),
        }
        if self.delivery == Delivery::Confirmed {
            self.granting = Some((holder, self.version));
        }
        self.actions.push_back(Action::Grant { holder, mode, version: self.version });
    }
}

impl<H: Copy + Eq> Holding<H> {
    /// What the holder may keep if an ask is granted; none if it stands in nothing's way.
    fn keeps_for(&self, ask: Ask<H>) -> Option<Mode> {
        // Its own recall was sent for another ask, which has gone: it answers all the same, and must not find a new grant then.
        if self.holder == ask.holder {
            return self.recall;
        }
        match (ask.mode, self.mode) {
            (Mode::Write, Mode::Read | Mode::Write) => Some(Mode::None),
            (Mode::Read, Mode::Write) => Some(Mode::Read),
            _ => None,
        }
    }
}
