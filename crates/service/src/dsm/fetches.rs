//! Pages that the program has asked for ahead of its loads.

use std::collections::HashSet;

use super::{Misuse, Page, Ticket};
use crate::limits::DSM_CALLS_MAX;

/// Fetches, each with the pages that have not come.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    waiting: Vec<(Ticket, HashSet<Page>)>,
}

impl Fetches {
    pub(super) fn wait(&mut self, missing: HashSet<Page>, ticket: Ticket) -> Result<(), Misuse> {
        if self.waiting.len() >= DSM_CALLS_MAX {
            return Err(Misuse::TooMany);
        }
        self.waiting.push((ticket, missing));
        Ok(())
    }

    /// These pages have come. Gives the fetches that are over.
    pub(super) fn arrived(&mut self, pages: &[Page]) -> Vec<Ticket> {
        for (_, missing) in &mut self.waiting {
            for page in pages {
                missing.remove(page);
            }
        }
        let over = self.waiting.extract_if(.., |(_, missing)| missing.is_empty());
        over.map(|(ticket, _)| ticket).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}
