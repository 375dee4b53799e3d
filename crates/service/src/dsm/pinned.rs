//! Pages that cannot leave yet, because a device reads or writes them.
//!
//! For a direct read, or a ring with registered buffers, the kernel pins the program's page: the device writes to the frame,
//! whatever happens to the page in the program's memory. If the page left meanwhile, those bytes would be lost. So the
//! actions that take it wait until no pin is left, and with them all later actions of that page. Other pages are not
//! delayed.

use std::collections::{HashMap, VecDeque};

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::{Action, Page};

#[derive(Debug)]
struct Pinned {
    since: Instant,
    actions: VecDeque<Action>,
}

/// See the module. Bounded by the pages that other ranks ask for: each has one ask for a page.
#[derive(Debug, Default)]
pub struct PinnedPages {
    pages: HashMap<Page, Pinned>,
    waits: u64,
}

impl PinnedPages {
    /// Gives back an action that can be done now. One whose page waits is kept behind those that wait.
    pub fn admit(&mut self, action: Action) -> Option<Action> {
        match action.page().and_then(|page| self.pages.get_mut(&page)) {
            Some(pinned) if !seeded::is(Bug::DsmPinnedPageOvertaken) => {
                pinned.actions.push_back(action);
                None
            }
            _ => Some(action),
        }
    }

    /// Keeps an action, given back by [`PinnedPages::admit`], that cannot be done yet.
    pub fn wait(&mut self, action: Action, now: Instant) {
        let Some(page) = action.page() else { return };
        self.waits += 1;
        self.pages.insert(page, Pinned { since: now, actions: VecDeque::from([action]) });
    }

    /// Does what waits. `act` gives an action back that still cannot be done.
    pub fn retry(&mut self, mut act: impl FnMut(Action) -> Option<Action>) {
        self.pages.retain(|_, pinned| {
            while let Some(action) = pinned.actions.pop_front() {
                if let Some(waits) = act(action) {
                    pinned.actions.push_front(waits);
                    return true;
                }
                if seeded::is(Bug::DsmPinnedPageForgotten) {
                    return false;
                }
            }
            false
        });
    }

    /// Whether actions of the page wait.
    pub fn has(&self, page: Page) -> bool {
        self.pages.contains_key(&page)
    }

    /// The page that has waited longest, and since when.
    pub fn oldest(&self) -> Option<(Page, Instant)> {
        self.pages.iter().map(|(page, pinned)| (*page, pinned.since)).min_by_key(|(_, since)| *since)
    }

    /// How many pages had to wait so far.
    pub fn waits(&self) -> u64 {
        self.waits
    }
}
