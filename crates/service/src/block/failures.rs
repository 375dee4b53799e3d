//! Failures of a volume's store: the log has them at a limited rate, `/metrics` and `byway ctl status` ask for the last one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use byway_reactor::Instant;

use super::engine::Operation;
use super::error::BlockError;
use crate::limits::FAILURE_LOG_PAUSE;

/// An operation that the store failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreFailure {
    /// What was asked of the store.
    pub operation: Operation,
    /// First byte of the volume.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What the store said.
    pub error: BlockError,
    /// When, on the clock of the loops.
    pub at: Instant,
}

/// The failures of one volume, on all loops. Touched only when something fails.
#[derive(Debug, Default)]
pub(super) struct Failures {
    state: Mutex<State>,
    flush_failure_logged: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    last: Option<StoreFailure>,
    logged_at: Option<Instant>,
    /// Failures since the last log line.
    not_logged: u64,
}

impl Failures {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn last(&self) -> Option<StoreFailure> {
        self.state().last
    }

    /// Remembers a failure, and logs it unless another one of the volume was logged less than [`FAILURE_LOG_PAUSE`] ago.
    pub(super) fn note(&self, volume: &str, failure: StoreFailure) {
        let not_logged = {
            let mut state = self.state();
            state.last = Some(failure);
            if state.logged_at.is_some_and(|logged| failure.at.since(logged) < FAILURE_LOG_PAUSE) {
                state.not_logged += 1;
                return;
            }
            state.logged_at = Some(failure.at);
            std::mem::take(&mut state.not_logged)
        };
        let StoreFailure { operation, offset, len, error, .. } = failure;
        let (operation, errno) = (operation.name(), error.errno());
        tracing::error!(volume, operation, offset, len, %errno, not_logged, "the store failed");
    }

    /// Logs, once, that a flush has failed.
    pub(super) fn note_failed_flush(&self, volume: &str) {
        if !self.flush_failure_logged.swap(true, Ordering::Relaxed) {
            tracing::error!(
                volume,
                "a flush failed: data that clients wrote may be lost, and every flush fails from now on; check the disk, \
                 then run `byway ctl reopen {volume}` (docs/operations.md)"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::Errno;

    use super::*;

    #[test]
    fn the_last_failure_is_kept_and_a_burst_is_logged_once() {
        let failures = Failures::default();
        let begin = Instant::default();
        let failure = |number: u64, after| {
            let error = BlockError::Io(Errno::IO);
            StoreFailure { operation: Operation::Write, offset: number * 512, len: 512, error, at: begin + after }
        };
        assert_eq!(failures.last(), None);
        for number in 0..100 {
            failures.note("disk", failure(number, FAILURE_LOG_PAUSE / 200 * number as u32));
        }
        assert_eq!(failures.last().map(|failure| failure.offset), Some(99 * 512));
        assert_eq!(failures.state().not_logged, 99);
        failures.note("disk", failure(100, FAILURE_LOG_PAUSE));
        assert_eq!(failures.state().not_logged, 0, "the next line says how many there were");
    }
}
