//! What a machine wants done, and what it says to itself.

use std::collections::VecDeque;

use super::home::Step;
use super::wire::Message;
use super::{Action, Contents, Counters, Page, Rank};
use crate::coherence::Mode;

/// What a part of the machine sends.
pub(super) type Outbox = Vec<(Rank, Message, Vec<u8>)>;

/// What a message is refused with: the sender has broken the protocol in this way.
pub(super) type Handled = Result<(), &'static str>;

/// What this rank says to itself, and what its homes want, in one order.
#[derive(Debug)]
pub(super) enum Own {
    Message(Message, Vec<u8>),
    Step(Page, Step),
}

/// The machine's output, which all its parts write to.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) rank: Rank,
    pub(super) ranks: Rank,
    pub(super) actions: VecDeque<Action>,
    pub(super) own: VecDeque<Own>,
    pub(super) counters: Counters,
    /// Pages that the program has got, while it waits for a fetch.
    pub(super) arrived: Option<Vec<Page>>,
}

impl Outgoing {
    pub(super) fn new(rank: Rank, ranks: Rank) -> Self {
        let (actions, own) = (VecDeque::new(), VecDeque::new());
        Self { rank, ranks, actions, own, counters: Counters::default(), arrived: None }
    }

    /// The rank that remembers the home of a page.
    pub(super) fn registrar(&self, page: Page) -> Rank {
        (page % u32::from(self.ranks)) as Rank
    }

    pub(super) fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        if to == self.rank {
            self.own.push_back(Own::Message(message, payload));
        } else {
            self.counters.messages += 1;
            self.actions.push_back(Action::Send { to, message, payload });
        }
    }

    pub(super) fn send_page(&mut self, to: Rank, page: Page, message: Message) {
        self.counters.messages += 1;
        self.counters.pages_sent += 1;
        self.actions.push_back(Action::SendPage { to, page, message });
    }

    pub(super) fn install(&mut self, page: Page, mode: Mode, contents: Contents) {
        self.arrives(page);
        self.actions.push_back(Action::Install { page, mode, contents });
    }

    /// The program gets a page.
    pub(super) fn arrives(&mut self, page: Page) {
        self.arrived.iter_mut().for_each(|arrived| arrived.push(page));
    }

    /// Counts a fault that asks a home.
    pub(super) fn count_fault(&mut self, mode: Mode) {
        let counters = &mut self.counters;
        *(if mode == Mode::Write { &mut counters.write_faults } else { &mut counters.read_faults }) += 1;
    }
}
