//! The memory that a node lends, as `--lend` specifies it, and how the node takes it back when it ends.

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::monotonic;
use byway_service::limits::{GUARD_LOOK, LENDER_DRAIN_TIME, SLAB_BYTES};
use byway_service::memory::{Guard, Lending};

use crate::limits::{LEND_GUARD_BYTES_MIN, LEND_GUARD_PERCENT};
use crate::units::{UnitError, parse_size};

/// How often a node that ends looks whether all lent memory is back.
const LENT_LOOK: Duration = Duration::from_millis(20);

/// `SIZE[,guard=SIZE][,quota=SIZE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LendSpec {
    /// Bytes that are lent at most.
    pub bytes: u64,
    /// Bytes that stay available to this machine; 0: nothing is looked at; `None`: 5 % of its memory, at least 512 MiB.
    pub guard_bytes: Option<u64>,
    /// Bytes that one borrower gets at most; `None`: as much as there is.
    pub quota_bytes: Option<u64>,
}

/// Why a text says no such thing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LendSpecError {
    /// A size.
    #[error(transparent)]
    Size(#[from] UnitError),
    /// Less than a slab.
    #[error("{0} bytes are less than one slab of {slab}M; lend at least {slab}M", slab = SLAB_BYTES >> 20)]
    TooSmall(u64),
    /// Another option than `guard` and `quota`.
    #[error("unknown option `{0}` of --lend; write SIZE[,guard=SIZE][,quota=SIZE]")]
    Option(String),
}

impl FromStr for LendSpec {
    type Err = LendSpecError;

    fn from_str(text: &str) -> Result<Self, LendSpecError> {
        let mut parts = text.split(',');
        let too_small =
            |bytes: u64| if bytes < SLAB_BYTES as u64 { Err(LendSpecError::TooSmall(bytes)) } else { Ok(bytes) };
        let bytes = too_small(parse_size(parts.next().unwrap_or_default())?)?;
        let mut spec = Self { bytes, guard_bytes: None, quota_bytes: None };
        for option in parts {
            match option.split_once('=') {
                Some(("guard", size)) => spec.guard_bytes = Some(parse_size(size)?),
                Some(("quota", size)) => spec.quota_bytes = Some(too_small(parse_size(size)?)?),
                _ => return Err(LendSpecError::Option(option.to_owned())),
            }
        }
        Ok(spec)
    }
}

impl LendSpec {
    /// What the loops share. Before the node is confined.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read, for the guard.
    pub fn open(self) -> std::io::Result<Arc<Lending>> {
        let guard = match self.guard_bytes {
            Some(0) => None,
            Some(bytes) => Some(Guard::new(bytes)?),
            None => Some(Guard::new(default_guard_bytes(Guard::machine_bytes()?))?),
        };
        Ok(Arc::new(Lending::new(self.bytes, self.quota_bytes, guard)))
    }
}

/// Leases no more, and waits until borrowers have moved their pages to other lenders and returned all slabs, or their time is over. `wait`
/// waits for so long.
pub fn take_back(lending: &Lending, mut wait: impl FnMut(Duration)) {
    lending.end(monotonic());
    // The loops close slabs whose time is over when they look next; a loop that hangs does not.
    let deadline = Instant::now() + LENDER_DRAIN_TIME + 2 * GUARD_LOOK;
    while lending.status().lent_bytes > 0 && Instant::now() < deadline {
        wait(LENT_LOOK);
    }
}

/// What a machine with so many bytes of memory keeps available to itself where `guard` does not say it.
fn default_guard_bytes(machine_bytes: u64) -> u64 {
    (machine_bytes / 100 * LEND_GUARD_PERCENT).max(LEND_GUARD_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_and_a_guard_are_read() {
        let spec = |guard_bytes, quota_bytes| Ok(LendSpec { bytes: 1 << 30, guard_bytes, quota_bytes });
        assert_eq!("1G".parse(), spec(None, None));
        assert_eq!("1G,guard=0".parse(), spec(Some(0), None));
        assert_eq!("1G,guard=512M".parse(), spec(Some(512 << 20), None));
        assert_eq!("1G,quota=128M,guard=512M".parse(), spec(Some(512 << 20), Some(128 << 20)));
        assert_eq!("1G,quota=1M".parse::<LendSpec>(), Err(LendSpecError::TooSmall(1 << 20)));
        assert_eq!("1M".parse::<LendSpec>(), Err(LendSpecError::TooSmall(1 << 20)));
        assert_eq!("1G,x=1".parse::<LendSpec>(), Err(LendSpecError::Option("x=1".to_owned())));
        assert!(matches!("much".parse::<LendSpec>(), Err(LendSpecError::Size(_))));
    }

    #[test]
    fn a_machine_keeps_a_twentieth_of_its_memory_or_half_a_gibibyte() {
        let gib = 1 << 30;
        assert_eq!([gib, 8 * gib].map(default_guard_bytes), [512 << 20; 2]);
        assert_eq!(default_guard_bytes(100 * gib), 5 * gib);
    }
}
