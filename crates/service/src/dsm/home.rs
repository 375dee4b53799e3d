//! A page at its home: which ranks have copies, and the transfer that is under way.

use super::wire::Message;
use super::{Page, Rank};
use crate::coherence::{Action, Delivery, Mode, Object};
use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

/// Rights have no leases: a page is given up when it is asked for, or the job ends.
const NO_TIME: Instant = Instant::ZERO;

/// What a home wants done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Send a message, perhaps to itself.
    Tell(Rank, Message),
    /// The home's own program loses the right to write, if it has it (`Read`), or any (`None`); the page's bytes are set aside.
    Lower(Mode),
    /// Send the page as it is here.
    SendPage(Rank, Message),
    /// The home's own program may do this with a page of zeroes.
    Begin(Mode),
}

/// The transfer for the ask that is served.
#[derive(Debug, Default)]
struct Transfer {
    /// Copies that were told to go: the rank, and the version of its grant.
    invalidating: Vec<(Rank, u64)>,
    /// The holder that sends the page when they have gone.
    source: Option<(Rank, u64)>,
    forwarded: bool,
    /// The home has the page and sends it.
    from_home: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Home {
    page: Page,
    /// The home's rank.
    me: Rank,
    object: Object<Rank>,
    /// Ranks with the page's last contents, a bit each.
    copies: u64,
    transfer: Option<Transfer>,
}

const fn bit(rank: Rank) -> u64 {
    1 << rank
}

impl Home {
    /// Of a page that the home is the first to touch: it may write to it.
    pub(super) fn new(page: Page, me: Rank, steps: &mut Vec<Step>) -> Self {
        let mut home = Self { page, me, object: Object::new(None, Delivery::Confirmed), copies: 0, transfer: None };
        // A new object refuses no ask.
        let _ = home.ask(me, Mode::Write, steps);
        home
    }

    /// A rank asks.
    pub(super) fn ask(&mut self, requester: Rank, mode: Mode, steps: &mut Vec<Step>) -> Result<(), &'static str> {
        if seeded::is(Bug::DsmAskLost) && self.object.serving().is_some() {
            return Ok(());
        }
        self.object.ask(requester, mode, NO_TIME).map_err(|_| "it asked for a page twice")?;
        self.go_on(steps);
        Ok(())
    }

    /// A rank has given up its copy.
    pub(super) fn acknowledged(&mut self, from: Rank, version: u64, steps: &mut Vec<Step>) -> Result<(), &'static str> {
        let right_version = version == self.object.next_version();
        let transfer = self.transfer.as_mut().filter(|_| right_version);
        let transfer = transfer.ok_or("it acknowledged an invalidation that is over")?;
        let place = transfer.invalidating.iter().position(|(rank, _)| *rank == from);
        let place = place.ok_or("it acknowledged an invalidation that it was not sent")?;
        let (_, grant) = transfer.invalidating.swap_remove(place);
        self.recalled(from, grant);
        self.go_on(steps);
        Ok(())
    }

    /// A rank has the page that another sent.
    pub(super) fn confirmed(&mut self, from: Rank, version: u64, steps: &mut Vec<Step>) -> Result<(), &'static str> {
        let serving = self.object.serving().map(|ask| ask.holder);
        let source = self.transfer.as_ref().filter(|transfer| transfer.forwarded).and_then(|transfer| transfer.source);
        match source {
            Some((source, grant)) if serving == Some(from) && version == self.object.next_version() => {
                self.recalled(source, grant);
            }
            // A copy among readers.
            None => {
                let delivered = self.object.delivered(from, version, NO_TIME);
                delivered.map_err(|_| "it confirmed a page that it was not sent")?;
            }
            Some(_) => return Err("it confirmed a page that another rank is sent"),
        }
        self.go_on(steps);
        Ok(())
    }

    fn recalled(&mut self, holder: Rank, grant: u64) {
        // What is acknowledged or confirmed was recalled: the caller has looked.
        let _ = self.object.recalled(holder, grant, NO_TIME);
        if self.object.mode(holder) == Mode::None && !seeded::is(Bug::DsmCopyRemembered) {
            self.copies &= !bit(holder);
        }
    }

    fn go_on(&mut self, steps: &mut Vec<Step>) {
        while let Some(action) = self.object.next_action() {
            match action {
                Action::Recall { holder, to, version } => self.recall(holder, to, version, steps),
                Action::Grant { holder, mode, version } => self.grant(holder, mode, version, steps),
                Action::Fence { .. } => debug_assert!(false, "rights without leases run out"),
            }
        }
        self.forward(steps);
    }

    fn recall(&mut self, holder: Rank, to: Mode, grant: u64, steps: &mut Vec<Step>) {
        let Some(ask) = self.object.serving() else { return };
        let needs_data = self.copies & bit(ask.holder) == 0;
        let has_page = self.copies & bit(self.me) != 0;
        let transfer = self.transfer.get_or_insert_default();
        if needs_data && holder == self.me {
            transfer.from_home = true;
            if !seeded::is(Bug::DsmHomeKeepsItsCopy) {
                steps.push(Step::Lower(to));
            }
            self.recalled(holder, grant);
        } else if needs_data && !has_page && !transfer.from_home && transfer.source.is_none() {
            transfer.source = Some((holder, grant));
        } else if seeded::is(Bug::DsmCopyNotInvalidated) {
            self.recalled(holder, grant);
        } else {
            transfer.invalidating.push((holder, grant));
            let (page, version) = (self.page, self.object.next_version());
            steps.push(Step::Tell(holder, Message::Invalidate { page, version }));
        }
    }

    /// Has the source send the page when no other copy is left.
    fn forward(&mut self, steps: &mut Vec<Step>) {
        let (Some(ask), Some(transfer)) = (self.object.serving(), &mut self.transfer) else { return };
        let Some((source, _)) = transfer.source.filter(|_| !transfer.forwarded) else { return };
        if transfer.invalidating.is_empty() || seeded::is(Bug::DsmForwardedEarly) {
            transfer.forwarded = true;
            let (page, version) = (self.page, self.object.next_version());
            let forward = Message::Forward { page, mode: ask.mode, requester: ask.holder, version };
            steps.push(Step::Tell(source, forward));
        }
    }

    fn grant(&mut self, holder: Rank, mode: Mode, version: u64, steps: &mut Vec<Step>) {
        let page = self.page;
        let transfer = self.transfer.take().unwrap_or_default();
        let had_copy = self.copies & bit(holder) != 0;
        let others = self.copies & !bit(holder);
        self.copies |= bit(holder);
        let mut is_delivered = true;
        if had_copy {
            steps.push(Step::Tell(holder, Message::Upgrade { page, version }));
        } else if transfer.from_home || others & bit(self.me) != 0 {
            if !transfer.from_home {
                steps.push(Step::Lower(Mode::Read));
            }
            let message = Message::Page { page, mode, home: self.me, version };
            steps.push(Step::SendPage(holder, message));
        } else if transfer.forwarded {
            // The source sent it, and the holder has said so.
        } else if others != 0 {
            let source = others.trailing_zeros() as Rank;
            steps.push(Step::Tell(source, Message::Forward { page, mode, requester: holder, version }));
            is_delivered = seeded::is(Bug::DsmNotConfirmed);
        } else {
            steps.push(Step::Begin(mode));
        }
        // What the home sends itself, it sends before any later recall.
        if is_delivered {
            let _ = self.object.delivered(holder, version, NO_TIME);
        }
    }
}
