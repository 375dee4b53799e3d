//! Sequential consistency: the pages of a rank that are written by one rank or read by many, and the homes that see to it.

use std::collections::HashMap;

use super::home::{Home, Step};
use super::outgoing::{Handled, Outgoing, Own};
use super::wire::Message;
use super::{Action, Contents, Page, Rank};
use crate::coherence::Mode;
use byway_reactor::seeded::{self, Bug};

/// A page as this rank has it.
#[derive(Clone, Copy, Debug)]
struct PageState {
    mode: Mode,
    /// What was asked for.
    asked: Mode,
    /// Once it is known.
    home: Option<Rank>,
}

/// One rank's pages.
#[derive(Debug, Default)]
pub(super) struct Sequential {
    held: HashMap<Page, PageState>,
    /// Of the pages whose home this rank is.
    homes: HashMap<Page, Home>,
    /// Of the pages that this rank is the registrar of: which rank touched each first.
    first: HashMap<Page, Rank>,
}

impl Sequential {
    /// The program's load or store has faulted.
    pub(super) fn fault(&mut self, page: Page, mode: Mode, out: &mut Outgoing) {
        let held = self.held(page);
        if held.mode >= mode {
            // Another thread's fault has brought it in between.
            out.install(page, held.mode, Contents::Kept);
            return;
        }
        // What comes wakes all threads that wait for the page; one that needs more faults again.
        if held.asked > Mode::None {
            return;
        }
        held.asked = mode;
        let home = held.home;
        out.count_fault(mode);
        let to = home.unwrap_or_else(|| out.registrar(page));
        out.send(to, Message::Ask { page, mode, requester: out.rank }, Vec::new());
    }

    /// The pages whose home this rank is.
    pub(super) fn homes(&self) -> Vec<Page> {
        self.homes.keys().copied().collect()
    }

    /// What the program may do with a page.
    pub(super) fn mode(&self, page: Page) -> Mode {
        self.held.get(&page).map_or(Mode::None, |held| held.mode)
    }

    /// A message about a page.
    pub(super) fn handle(&mut self, from: Rank, message: Message, payload: Vec<u8>, out: &mut Outgoing) -> Handled {
        match message {
            Message::Ask { page, mode, requester } => self.asked(from, page, mode, requester, out),
            Message::Own { page } => self.owns(from, page, out),
            Message::Forward { page, mode, requester, version } => {
                self.forwarded(from, page, mode, (requester, version), out)
            }
            Message::Page { page, mode, home, version } => {
                self.page_came(from, (page, mode, home, version), payload, out)
            }
            Message::Upgrade { page, .. } => self.upgraded(page, out),
            Message::Invalidate { page, version } => self.invalidated(from, page, version, out),
            Message::Acknowledge { page, version } => {
                self.at_home(page, |home, steps| home.acknowledged(from, version, steps), out)
            }
            Message::Confirm { page, version } => {
                self.at_home(page, |home, steps| home.confirmed(from, version, steps), out)
            }
            _ => Err("it sent a message of another consistency"),
        }
    }

    fn held(&mut self, page: Page) -> &mut PageState {
        self.held.entry(page).or_insert(PageState { mode: Mode::None, asked: Mode::None, home: None })
    }

    fn asked(&mut self, from: Rank, page: Page, mode: Mode, requester: Rank, out: &mut Outgoing) -> Handled {
        let registrar = out.registrar(page);
        if requester >= out.ranks || requester != from && from != registrar {
            return Err("it asked for a page on behalf of another rank");
        }
        if self.homes.contains_key(&page) {
            return self.at_home(page, |home, steps| home.ask(requester, mode, steps), out);
        }
        if registrar != out.rank {
            return Err("it asked a rank that is neither the page's home nor its registrar");
        }
        match self.first.get(&page) {
            Some(home) if *home == requester => return Err("it asked the registrar for a page whose home it is"),
            Some(home) => out.send(*home, Message::Ask { page, mode, requester }, Vec::new()),
            None => {
                if !seeded::is(Bug::DsmHomeNotRecorded) {
                    self.first.insert(page, requester);
                }
                out.send(requester, Message::Own { page }, Vec::new());
            }
        }
        Ok(())
    }

    fn owns(&mut self, from: Rank, page: Page, out: &mut Outgoing) -> Handled {
        let is_asked = self.held(page).asked > Mode::None;
        if from != out.registrar(page) || !is_asked || self.homes.contains_key(&page) {
            return Err("it gave away a page that is not its to give");
        }
        self.held(page).home = Some(out.rank);
        let mut steps = Vec::new();
        self.homes.insert(page, Home::new(page, out.rank, &mut steps));
        out.own.extend(steps.into_iter().map(|step| Own::Step(page, step)));
        Ok(())
    }

    fn at_home(
        &mut self,
        page: Page,
        change: impl FnOnce(&mut Home, &mut Vec<Step>) -> Handled,
        out: &mut Outgoing,
    ) -> Handled {
        let mut steps = Vec::new();
        let home = self.homes.get_mut(&page).ok_or("it took this rank for the home of a page")?;
        change(home, &mut steps)?;
        out.own.extend(steps.into_iter().map(|step| Own::Step(page, step)));
        Ok(())
    }

    /// Does what a home of this rank wants.
    pub(super) fn take_step(&mut self, page: Page, step: Step, out: &mut Outgoing) -> Handled {
        match step {
            Step::Tell(to, message) if to == out.rank => return self.handle(to, message, Vec::new(), out),
            Step::Tell(to, message) => out.send(to, message, Vec::new()),
            Step::Lower(to) => self.lower(page, to, out),
            Step::SendPage(to, message) => out.send_page(to, page, message),
            Step::Begin(mode) => self.install(page, mode, Contents::Zero, out),
        }
        Ok(())
    }

    /// The program has no more than this right to a page, which is sent to another rank then.
    fn lower(&mut self, page: Page, to: Mode, out: &mut Outgoing) {
        let held = self.held(page);
        let had = held.mode;
        held.mode = had.min(to);
        match (had, to) {
            (Mode::Read | Mode::Write, Mode::Read) => out.actions.push_back(Action::Protect { page }),
            (_, Mode::None) => out.actions.push_back(Action::Take { page }),
            _ => {}
        }
    }

    /// The program loses a copy that another rank has too.
    fn drop_copy(&mut self, page: Page, out: &mut Outgoing) {
        self.held(page).mode = Mode::None;
        out.actions.push_back(Action::Unmap { page });
    }

    fn install(&mut self, page: Page, mode: Mode, contents: Contents, out: &mut Outgoing) {
        let held = self.held(page);
        held.mode = mode;
        held.asked = Mode::None;
        out.install(page, mode, contents);
    }

    /// A home wants a page sent to another rank.
    fn forwarded(
        &mut self,
        from: Rank,
        page: Page,
        mode: Mode,
        (requester, version): (Rank, u64),
        out: &mut Outgoing,
    ) -> Handled {
        if requester >= out.ranks || requester == out.rank || self.held(page).mode == Mode::None {
            return Err("it wants a page sent that is not here");
        }
        let to = if mode == Mode::Write { Mode::None } else { Mode::Read };
        let message = Message::Page { page, mode, home: from, version };
        let early = match to {
            Mode::None => seeded::is(Bug::DsmSentBeforeUnmap),
            _ => seeded::is(Bug::DsmSentBeforeProtect),
        };
        if early {
            out.send_page(requester, page, message);
        }
        if !(to == Mode::Read && seeded::is(Bug::DsmWriterNotProtected)) {
            self.lower(page, to, out);
        }
        if !early {
            out.send_page(requester, page, message);
        }
        Ok(())
    }

    fn page_came(
        &mut self,
        from: Rank,
        (page, mode, home, version): (Page, Mode, Rank, u64),
        payload: Vec<u8>,
        out: &mut Outgoing,
    ) -> Handled {
        let held = self.held(page);
        if held.asked == Mode::None || held.asked > mode || home != held.home.unwrap_or(home) {
            return Err("it sent a page that this rank did not ask for");
        }
        held.home = Some(home);
        out.counters.pages_received += 1;
        let installed = if seeded::is(Bug::DsmCopyWritable) { Mode::Write } else { mode };
        self.install(page, installed, Contents::Received(payload), out);
        // The home's own pages come in the order of its messages.
        if from != home {
            out.send(home, Message::Confirm { page, version }, Vec::new());
        }
        Ok(())
    }

    fn upgraded(&mut self, page: Page, out: &mut Outgoing) -> Handled {
        let held = self.held(page);
        if held.asked != Mode::Write || held.mode != Mode::Read {
            return Err("it let this rank write to a page that it has no copy of");
        }
        let zeroes = seeded::is(Bug::DsmUpgradeToZeroes);
        self.install(page, Mode::Write, if zeroes { Contents::Zero } else { Contents::Kept }, out);
        Ok(())
    }

    fn invalidated(&mut self, from: Rank, page: Page, version: u64, out: &mut Outgoing) -> Handled {
        match self.held(page).mode {
            Mode::None => return Err("it recalled a page that this rank has no copy of"),
            Mode::Write if !seeded::is(Bug::DsmCopyWritable) => {
                return Err("it dropped the only copy of a page, which this rank may write to");
            }
            _ => {}
        }
        out.counters.invalidations += 1;
        let acknowledge = Message::Acknowledge { page, version };
        if seeded::is(Bug::DsmAcknowledgedBeforeUnmap) {
            out.send(from, acknowledge, Vec::new());
            self.drop_copy(page, out);
        } else {
            self.drop_copy(page, out);
            out.send(from, acknowledge, Vec::new());
        }
        Ok(())
    }
}
