//! A page at its home: its contents, or the rank that alone has them.

use std::collections::VecDeque;

use super::super::difference::apply;
use super::super::outgoing::{Handled, Outbox};
use super::super::wire::Message;
use super::super::{Page, Rank};
use crate::coherence::Mode;
use byway_reactor::seeded::{self, Bug};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// This rank has the only copy and stores to it without a word.
    Exclusive(Rank),
    /// As before, and it was told to send what it has.
    Recalling(Rank),
    /// The home has the contents; any rank may have a copy.
    Shared,
}

#[derive(Debug)]
enum Waiting {
    Ask(Rank),
    Difference(Rank, u64, Vec<u8>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Home {
    page: Page,
    /// The home's rank.
    me: Rank,
    state: State,
    /// Counts the changes of the contents that other ranks have to hear of.
    version: u64,
    /// While they are shared.
    contents: Vec<u8>,
    /// Until the contents are here. Each rank has one ask for a page under way, and a difference for each lock that it is about to give back.
    waiting: VecDeque<Waiting>,
    /// The rank that sent the last difference, if none has asked for the page since.
    writer: Option<Rank>,
}

impl Home {
    /// Of a page that the home is the first to touch.
    pub(super) fn new(page: Page, me: Rank) -> Self {
        let (contents, waiting) = (Vec::new(), VecDeque::new());
        Self { page, me, state: State::Exclusive(me), version: 0, contents, waiting, writer: None }
    }

    /// A rank asks for a copy.
    pub(super) fn ask(&mut self, requester: Rank, outbox: &mut Outbox) -> Handled {
        match self.state {
            State::Exclusive(rank) if rank == requester => Err("it asked for a page that it has"),
            State::Shared => {
                self.serve(requester, outbox);
                Ok(())
            }
            State::Exclusive(_) | State::Recalling(_) => {
                self.waiting.push_back(Waiting::Ask(requester));
                self.recall(outbox);
                Ok(())
            }
        }
    }

    /// A rank has changed its copy, which had the changes up to version `base`.
    pub(super) fn difference(&mut self, from: Rank, base: u64, difference: Vec<u8>, outbox: &mut Outbox) -> Handled {
        match self.state {
            State::Shared => self.change(from, base, &difference, outbox),
            // Sent before the rank knew that it was alone: it has all that, and sends it with what it has.
            State::Exclusive(rank) if rank == from => {
                self.acknowledge(from, self.version, Mode::Read, outbox);
                Ok(())
            }
            State::Recalling(rank) if rank == from => {
                self.acknowledge(from, self.version + 1, Mode::Read, outbox);
                Ok(())
            }
            State::Exclusive(_) | State::Recalling(_) => {
                self.waiting.push_back(Waiting::Difference(from, base, difference));
                self.recall(outbox);
                Ok(())
            }
        }
    }

    /// The rank that was alone has sent what it has.
    pub(super) fn came(&mut self, from: Rank, contents: Vec<u8>, outbox: &mut Outbox) -> Handled {
        if self.state != State::Recalling(from) {
            return Err("it sent the contents of a page that it was not asked for");
        }
        (self.state, self.contents, self.writer) = (State::Shared, contents, None);
        self.version += 1;
        // Nobody is alone with the page while others wait: it stays shared to the end of this loop.
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting {
                Waiting::Ask(requester) => self.serve(requester, outbox),
                Waiting::Difference(from, base, difference) => self.change(from, base, &difference, outbox)?,
            }
        }
        Ok(())
    }

    fn recall(&mut self, outbox: &mut Outbox) {
        if let State::Exclusive(rank) = self.state {
            self.state = State::Recalling(rank);
            let (page, requester, version) = (self.page, self.me, self.version + 1);
            outbox.push((rank, Message::Forward { page, mode: Mode::Read, requester, version }, Vec::new()));
        }
    }

    fn serve(&mut self, requester: Rank, outbox: &mut Outbox) {
        self.writer = self.writer.filter(|writer| *writer == requester);
        let (page, home, version) = (self.page, self.me, self.version);
        outbox.push((requester, Message::Page { page, mode: Mode::Read, home, version }, self.contents.clone()));
    }

    fn change(&mut self, from: Rank, base: u64, difference: &[u8], outbox: &mut Outbox) -> Handled {
        if difference.is_empty() {
            self.acknowledge(from, 0, Mode::Read, outbox);
            return Ok(());
        }
        apply(&mut self.contents, difference).map_err(|_| "it sent a malformed difference")?;
        self.version += 1;
        // A copy without changes of other ranks, and no rank has asked since its last difference: others do without the page. Their copies
        // are older than the notice of this difference, so they ask before they load what comes after it.
        let has_all = base + 1 == self.version || seeded::is(Bug::DsmAloneWithOldCopy);
        let is_alone = has_all && self.writer == Some(from) && self.waiting.is_empty();
        let mode = if is_alone { Mode::Write } else { Mode::Read };
        self.writer = Some(from);
        self.acknowledge(from, self.version, mode, outbox);
        if is_alone {
            (self.state, self.writer) = (State::Exclusive(from), None);
            self.contents = Vec::new();
        }
        Ok(())
    }

    fn acknowledge(&self, to: Rank, version: u64, mode: Mode, outbox: &mut Outbox) {
        outbox.push((to, Message::Differed { page: self.page, mode, version }, Vec::new()));
    }
}
