//! Waking a loop from another thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes the loop that it came from complete a [`Token::WAKE`](crate::Token::WAKE). Wakes between two reaps are one.
#[derive(Clone, Debug)]
pub struct Waker {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pending: AtomicBool,
    /// `None` in a simulation, where all loops are turned in order.
    event: Option<OwnedFd>,
}

impl Waker {
    pub(crate) fn new(event: Option<OwnedFd>) -> Self {
        Self { shared: Arc::new(Shared { pending: AtomicBool::new(false), event }) }
    }

    /// Wakes the loop; it need not be asleep. Cheap when a wake is already pending.
    pub fn wake(&self) {
        if !self.shared.pending.swap(true, Ordering::AcqRel)
            && let Some(event) = &self.shared.event
        {
            // Fails only when the counter is full, and then the loop is woken anyway.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// Whether a wake was pending; it no longer is.
    pub(crate) fn take(&self) -> bool {
        self.shared.pending.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn event(&self) -> Option<&OwnedFd> {
        self.shared.event.as_ref()
    }
}
