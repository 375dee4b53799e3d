//! A simulated kernel's record of bytes of a file that it could not write out.
//!
//! As in Linux since 4.17 (`errseq_t`), each open file description receives the error once, by the first sync over it that
//! checks. A description that is opened later receives only errors that no other received before.

use crate::op::Errno;

#[derive(Debug)]
pub(super) struct Losses {
    count: u64,
    last: Option<Errno>,
    /// The last loss was reported.
    was_told: bool,
    /// By description: of how many it was told.
    told: Vec<u64>,
}

impl Losses {
    /// Of a file with one description.
    pub(super) fn new() -> Self {
        Self { count: 0, last: None, was_told: true, told: vec![0] }
    }

    /// One more description: gives its number.
    pub(super) fn open(&mut self) -> usize {
        self.told.push(if self.was_told { self.count } else { 0 });
        self.told.len() - 1
    }

    /// Bytes were lost.
    pub(super) fn add(&mut self, error: Errno) {
        self.count += 1;
        (self.last, self.was_told) = (Some(error), false);
    }

    /// A description looks.
    pub(super) fn tell(&mut self, description: usize) -> Option<Errno> {
        if std::mem::replace(&mut self.told[description], self.count) == self.count {
            return None;
        }
        self.was_told = true;
        self.last
    }
}
