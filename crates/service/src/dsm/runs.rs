//! What a machine wants done, in an order in which neighbouring pages leave, and come, together.
//!
//! A fetch asks for many pages at once. Its owner takes each from its program and sends it, and the process that fetches gives each to its program. The
//! kernel does that for a run of neighbouring pages at little more than the cost of one page. So of the actions that wait, those that change the
//! program's pages are done first, by page, and what is to be sent goes then. That is as if the sends took longer: another rank cannot tell. What
//! concerns one page stays in its order.

use std::collections::{HashSet, VecDeque};

use byway_reactor::seeded::{self, Bug};

use super::{Action, Contents, Machine, Page};
use crate::coherence::Mode;
use crate::limits::DSM_RUN_PAGES_MAX;

/// The actions of a machine that are not done yet. Bounded by what its driver gives the machine before it does them.
#[derive(Debug, Default)]
pub struct Actions {
    /// In the machine's order.
    waiting: VecDeque<Action>,
    /// These go before them: changes of pages, no two of one page, by kind and page; then the sends that were among them.
    ordered: VecDeque<Action>,
    /// The pages of those.
    pages: HashSet<Page>,
}

/// What can be done to neighbouring pages at once, in the order in which it is done: other ranks wait for pages that leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Protect,
    Take,
    Unmap,
    Install(Mode),
    Flush {
        keeps: bool,
    },
    /// This action alone.
    Other,
}

impl Kind {
    fn of(action: &Action) -> Self {
        match action {
            Action::Protect { .. } => Self::Protect,
            Action::Take { .. } => Self::Take,
            Action::Unmap { .. } => Self::Unmap,
            Action::Install { mode, contents: Contents::Received(_), .. } => Self::Install(*mode),
            Action::Flush { keeps, .. } => Self::Flush { keeps: *keeps },
            _ => Self::Other,
        }
    }
}

impl Actions {
    /// Takes what the machine wants done.
    pub fn gather(&mut self, machine: &mut Machine) {
        self.waiting.extend(std::iter::from_fn(|| machine.next_action()));
    }

    /// Whether there is nothing to do, apart from what the machine has not given yet.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.ordered.is_empty()
    }

    /// Fills `run` with what to do next: one action, or up to [`DSM_RUN_PAGES_MAX`] of one kind on neighbouring pages, in their order. These are
    /// [`Action::Protect`], [`Action::Take`], [`Action::Unmap`], [`Action::Install`] of bytes that came, in one mode, or [`Action::Flush`] that all
    /// keep the page or all do not. False if there is nothing to do.
    pub fn next_run(&mut self, run: &mut Vec<Action>) -> bool {
        run.clear();
        self.order();
        let queue = if self.ordered.is_empty() { &mut self.waiting } else { &mut self.ordered };
        let Some(first) = queue.pop_front() else { return false };
        let (kind, page) = (Kind::of(&first), first.page());
        run.push(first);
        if let (true, Some(page)) = (kind != Kind::Other, page) {
            for next in (page..).skip(1).take(DSM_RUN_PAGES_MAX - 1) {
                let is_next = |action: &mut Action| Kind::of(action) == kind && action.page() == Some(next);
                let Some(action) = queue.pop_front_if(is_next) else { break };
                run.push(action);
            }
        }
        true
    }

    /// Orders what waits, up to an action that nothing overtakes, or that changes a page a second time.
    fn order(&mut self) {
        // One action alone is in its order.
        if !self.ordered.is_empty() || self.waiting.len() <= 1 {
            return;
        }
        let mut sends = VecDeque::new();
        self.pages.clear();
        while let Some(action) = self.waiting.front() {
            match action {
                Action::Protect { page }
                | Action::Take { page }
                | Action::Unmap { page }
                | Action::Install { page, .. }
                    if self.pages.insert(*page) || seeded::is(Bug::DsmRunMixesPage) =>
                {
                    self.ordered.extend(self.waiting.pop_front());
                }
                Action::SendPage { .. } | Action::Send { .. } => {
                    // What comes behind does not change the page before this has been sent.
                    self.pages.extend(action.page());
                    sends.extend(self.waiting.pop_front());
                }
                _ => break,
            }
        }
        self.ordered.make_contiguous().sort_by_key(|action| (Kind::of(action), action.page()));
        if seeded::is(Bug::DsmRunSentFirst) {
            std::mem::swap(&mut self.ordered, &mut sends);
        }
        self.ordered.append(&mut sends);
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Message;
    use super::*;

    fn taken(page: Page) -> Action {
        Action::Take { page }
    }

    fn protected(page: Page) -> Action {
        Action::Protect { page }
    }

    fn installed(page: Page, mode: Mode) -> Action {
        Action::Install { page, mode, contents: Contents::Received(vec![page as u8]) }
    }

    fn sent(page: Page) -> Action {
        Action::SendPage { to: 1, page, message: Message::Own { page } }
    }

    fn confirmed(page: Page) -> Action {
        Action::Send { to: 2, message: Message::Confirm { page, version: 1 }, payload: Vec::new() }
    }

    fn flushed(page: Page, keeps: bool) -> Action {
        Action::Flush { to: 1, page, message: Message::Difference { page, version: 1 }, keeps }
    }

    fn runs(actions: &[Action]) -> Vec<Vec<Action>> {
        let mut all = Actions { waiting: actions.iter().cloned().collect(), ..Actions::default() };
        let mut run = Vec::new();
        let runs = std::iter::from_fn(|| all.next_run(&mut run).then(|| run.clone())).collect();
        assert!(all.is_empty());
        runs
    }

    #[test]
    fn pages_that_leave_are_taken_together_before_the_first_is_sent() {
        let all =
            runs(&[protected(1), sent(1), taken(7), sent(7), protected(2), sent(2), sent(9), protected(4), sent(4)]);
        let expected = [
            vec![protected(1), protected(2)],
            vec![protected(4)],
            vec![taken(7)],
            vec![sent(1)],
            vec![sent(7)],
            vec![sent(2)],
            vec![sent(9)],
            vec![sent(4)],
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn pages_of_two_owners_come_together() {
        let read = |page| installed(page, Mode::Read);
        let all = runs(&[read(2), confirmed(2), read(4), confirmed(4), read(3), installed(5, Mode::Write), read(1)]);
        let expected = [
            vec![read(1), read(2), read(3), read(4)],
            vec![installed(5, Mode::Write)],
            vec![confirmed(2)],
            vec![confirmed(4)],
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn what_concerns_one_page_stays_in_its_order() {
        for actions in [
            vec![sent(1), taken(1), sent(1)],
            vec![protected(1), sent(1), taken(1), sent(1)],
            vec![
                installed(2, Mode::Read),
                confirmed(2),
                Action::Unmap { page: 2 },
                confirmed(2),
                installed(2, Mode::Write),
            ],
            vec![taken(1), sent(1), Action::ForgetTwin { page: 3 }, taken(2), sent(2)],
        ] {
            assert_eq!(runs(&actions).concat(), actions);
        }
    }

    #[test]
    fn differences_are_taken_together_and_overtake_nothing() {
        let all = [sent(1), flushed(1, true), flushed(2, true), flushed(3, false), flushed(5, false), taken(6)];
        let expected: [&[Action]; 5] = [&all[..1], &all[1..3], &all[3..4], &all[4..5], &all[5..]];
        assert_eq!(runs(&all), expected);
    }

    #[test]
    fn a_run_has_a_bound() {
        let all: Vec<_> = (0..DSM_RUN_PAGES_MAX as Page + 3).map(taken).collect();
        assert_eq!(runs(&all).iter().map(Vec::len).collect::<Vec<_>>(), [DSM_RUN_PAGES_MAX, 3]);
    }

    #[test]
    fn pages_of_zeroes_and_pages_that_are_here_come_alone() {
        for contents in [Contents::Zero, Contents::Kept] {
            let installed = |page| Action::Install { page, mode: Mode::Write, contents: contents.clone() };
            assert_eq!(runs(&[installed(1), installed(2)]).len(), 2);
        }
    }
}
