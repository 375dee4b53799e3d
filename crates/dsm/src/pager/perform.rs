//! Performs the machine's actions.

use std::time::Instant;

use byway_service::coherence::Mode;
use byway_service::dsm::wire::Message;
use byway_service::dsm::{Action, Contents, Page, Rank};

use super::{Pager, address};
use crate::area::{Bytes, TakeError};
use crate::drive::ring;
use crate::limits::{LAST_WORDS_TIME_MAX, PAGE_BYTES};

impl Pager {
    /// Does an action, or gives it back if a device has its page pinned.
    pub(super) fn perform(&mut self, action: Action) -> Option<Action> {
        match action {
            Action::Send { to, message, payload } => self.send_away(to, message, payload),
            Action::SendPage { to, page, message } => {
                let Some(bytes) = self.aside.remove(&page) else {
                    self.die(&format!(
                        "the page at {:#x} was not taken before it is sent: a bug of byway",
                        address(page)
                    ));
                };
                self.send(to, message, (bytes as Box<[u8]>).into_vec());
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
                if let Err(error) = self.area.drop_copies(page, 1) {
                    self.refused(page, &error);
                }
            }
            Action::Install { page, mode, contents } => {
                self.install(page, mode, &contents);
                self.served(page);
            }
            Action::Twin { page, ref contents } => {
                if !self.open_with_twin(page, contents) {
                    return Some(action);
                }
                self.served(page);
            }
            Action::ForgetTwin { page } => self.twins.forget(page),
            Action::Flush { to, page, message, keeps } => {
                let bytes = if keeps { self.area.protect(page) } else { self.area.take(page) };
                let Some(bytes) = self.taken(page, bytes) else { return Some(action) };
                self.flush(to, page, message, &bytes);
            }
            Action::Done { ticket, outcome } => {
                if let Some(call) = self.calls.remove(&ticket) {
                    call.answer(outcome);
                    if !self.is_leading && self.leader.as_ref().is_some_and(|leader| leader.is(&call)) {
                        ring(&self.leader_bell);
                        self.has_rung = true;
                    }
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

    /// Sends what has changed in a page that was taken.
    pub(super) fn flush(&mut self, to: Rank, page: Page, message: Message, bytes: &Bytes) {
        let difference = self.twins.difference(page, &bytes[..]);
        self.send(to, message, difference);
        self.machine.flushed(page);
    }

    /// Sends a message with bytes of a page, perhaps to this process's own machine.
    fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        if to == self.rank {
            self.machine.received(to, message, payload);
        } else {
            self.send_away(to, message, payload);
        }
    }

    fn send_away(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        if let Some(tally) = self.tally.counting() {
            tally.sent(to, payload.len());
        }
        self.sessions.send(to, message, payload);
    }

    /// The program has a page for which it may have waited.
    pub(super) fn served(&mut self, page: Page) {
        self.faulted.remove(&page);
        if let Some(tally) = self.tally.counting() {
            tally.served(page, Instant::now());
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
            Contents::Received(bytes) => {
                self.check_page(bytes);
                self.area.fill(page, bytes, mode)
            }
            Contents::Kept => self.area.allow(page, mode),
        };
        if let Err(error) = done {
            self.refused(page, &error);
        }
    }

    pub(super) fn check_page(&self, bytes: &[u8]) {
        if bytes.len() != PAGE_BYTES {
            self.die(&format!("a page came with {} bytes instead of {PAGE_BYTES}", bytes.len()));
        }
    }
}
