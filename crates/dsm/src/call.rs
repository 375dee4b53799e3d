//! A thread of the program that waits for an answer of the machine.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;

use byway_service::dsm::Outcome;

use crate::held_signals::HeldSignals;

#[derive(Debug, Default)]
struct Slot {
    answer: Option<Outcome>,
    /// The thread that sleeps until the answer has come: another one drives the pager.
    sleeper: Option<Thread>,
}

/// Waited for by one thread, answered by the one that drives the pager.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call {
    slot: Arc<Mutex<Slot>>,
}

impl Call {
    pub(crate) fn answer(&self, answer: Outcome) {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.answer = Some(answer);
        if let Some(sleeper) = slot.sleeper.take() {
            sleeper.unpark();
        }
    }

    /// The answer, if it has come.
    pub(crate) fn take(&self) -> Option<Outcome> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).answer.take()
    }

    /// Sleeps until the answer has come. Handlers of signals run meanwhile, never with the lock: one that waits for a page waits for
    /// the thread that answers here.
    pub(crate) fn wait(&self) -> Outcome {
        loop {
            {
                let _signals = HeldSignals::hold();
                let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(answer) = slot.answer.take() {
                    return answer;
                }
                slot.sleeper = Some(std::thread::current());
            }
            std::thread::park();
        }
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.slot, &other.slot)
    }
}
