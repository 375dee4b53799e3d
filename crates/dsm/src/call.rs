//! A call of the program that the pager answers.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use byway_service::dsm::{Counters, Misuse, Outcome, Page};

/// What the pager answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Done(Outcome),
    Misused(Misuse),
    Counted(Counters),
}

/// Waited for by one thread, answered by the pager.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call {
    answer: Arc<(Mutex<Option<Answer>>, Condvar)>,
}

impl Call {
    pub(crate) fn answer(&self, answer: Answer) {
        let (slot, answered) = &*self.answer;
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        answered.notify_all();
    }

    pub(crate) fn wait(&self) -> Answer {
        let (slot, answered) = &*self.answer;
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match slot.take() {
                Some(answer) => return answer,
                None => slot = answered.wait(slot).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// What the program asks of the pager.
#[derive(Debug)]
pub(crate) enum Command {
    Lock(u32, Call),
    Unlock(u32),
    Barrier(u32, Call),
    Fence(Call),
    Fetch(Range<Page>, Call),
    Map(Vec<u8>, u64, Call),
    Count(Call),
    /// Tell the others that this process leaves, and end.
    Leave,
    /// End at once: the others take this process for gone.
    Cut,
}
