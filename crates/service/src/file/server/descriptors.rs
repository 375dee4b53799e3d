//! How many descriptors the clients of all shares hold together.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::limits::{FILE_DESCRIPTORS_LEFT, FILE_DESCRIPTORS_SPARE};

static HELD: AtomicU64 = AtomicU64::new(0);

/// As many as this process may have, but for those that connections and volumes need.
fn most() -> u64 {
    static MOST: OnceLock<u64> = OnceLock::new();
    *MOST.get_or_init(|| {
        let all = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        all - all / FILE_DESCRIPTORS_LEFT
    })
}

/// Whether a call may begin that holds a file. With few descriptors, the spare ones are few too.
///
/// # Errors
/// `ENFILE`: clients have all that they may.
pub(super) fn check_room() -> Result<(), Errno> {
    let spare = FILE_DESCRIPTORS_SPARE.min(most() / 8);
    if HELD.load(Ordering::Relaxed) + spare <= most() { Ok(()) } else { Err(Errno::NFILE) }
}

/// Whether clients hold more than half of what they may. Then they get no further leases, since a file with a lease has to stay held.
pub(super) fn are_scarce() -> bool {
    HELD.load(Ordering::Relaxed) > most() / 2
}

/// A descriptor that is held for a client; it counts until this is dropped.
#[derive(Debug)]
pub(super) struct Counted(());

impl Counted {
    /// Counts one more; `None` if clients have all that they may.
    pub(super) fn take() -> Option<Self> {
        let fits = |held: u64| (held < most()).then_some(held + 1);
        HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok().map(|_| Self(()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        HELD.fetch_sub(1, Ordering::Relaxed);
    }
}
