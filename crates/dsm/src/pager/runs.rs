//! What the pager does to neighbouring pages at once.

use byway_reactor::monotonic;
use byway_service::coherence::Mode;
use byway_service::dsm::{Action, Contents, Page};

use super::Pager;
use crate::area::{Bytes, TakeError};
use crate::limits::PAGE_BYTES;

impl Pager {
    /// Does a run of actions ([`Actions::next_run`](byway_service::dsm::Actions::next_run)), of which no page waits for a device. Those whose page turns
    /// out to be pinned wait.
    pub(super) fn perform_run(&mut self, run: &mut Vec<Action>) {
        let Some(first) = run.first().and_then(Action::page) else { return };
        match run[0] {
            Action::Install { mode, .. } => self.install_run(first, mode, run),
            Action::Unmap { .. } => {
                if let Err(error) = self.area.drop_copies(first, run.len()) {
                    self.refused(first, &error);
                }
            }
            Action::Protect { .. } | Action::Flush { keeps: true, .. } => self.take_run(first, Mode::Read, run),
            _ => self.take_run(first, Mode::None, run),
        }
    }

    /// Takes pages, and does with the bytes of each what its action says.
    fn take_run(&mut self, first: Page, keeps: Mode, run: &mut Vec<Action>) {
        let mut actions = run.drain(..);
        let mut page = first;
        while actions.len() > 0 {
            match self.area.take_run(page, actions.len(), keeps) {
                Ok(taken) => {
                    for (bytes, action) in taken.into_iter().zip(actions.by_ref()) {
                        self.took(page, action, bytes);
                        page += 1;
                    }
                }
                Err(TakeError::Pinned) => {
                    if let Some(action) = actions.next() {
                        self.pinned.wait(action, monotonic());
                    }
                    page += 1;
                }
                Err(error) => self.refused(page, &error),
            }
        }
    }

    fn took(&mut self, page: Page, action: Action, bytes: Bytes) {
        match action {
            Action::Flush { to, message, .. } => self.flush(to, page, message, &bytes),
            _ => drop(self.aside.insert(page, bytes)),
        }
    }

    /// Gives the program pages that came.
    fn install_run(&mut self, first: Page, mode: Mode, run: &[Action]) {
        let mut all = Vec::with_capacity(run.len() * PAGE_BYTES);
        for action in run {
            if let Action::Install { contents: Contents::Received(bytes), .. } = action {
                self.check_page(bytes);
                all.extend_from_slice(bytes);
            }
        }
        if let Err(error) = self.area.fill(first, &all, mode) {
            self.refused(first, &error);
        }
        run.iter().filter_map(Action::page).for_each(|page| self.served(page));
    }
}
