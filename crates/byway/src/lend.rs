//! What a node lends of its memory, as `--lend` says it.

use std::str::FromStr;
use std::sync::Arc;

use byway_service::limits::SLAB_BYTES;
use byway_service::memory::{Guard, Lending};

use crate::units::{UnitError, parse_size};

/// `SIZE[,guard=SIZE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LendSpec {
    /// Bytes that are lent at most.
    pub bytes: u64,
    /// Bytes that stay available to this machine; `None`: nothing is looked at.
    pub guard_bytes: Option<u64>,
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
    /// Another option than `guard`.
    #[error("unknown option `{0}` of --lend; write SIZE or SIZE,guard=SIZE")]
    Option(String),
}

impl FromStr for LendSpec {
    type Err = LendSpecError;

    fn from_str(text: &str) -> Result<Self, LendSpecError> {
        let (size, options) = text.split_once(',').map_or((text, None), |(size, options)| (size, Some(options)));
        let bytes = parse_size(size)?;
        if bytes < SLAB_BYTES as u64 {
            return Err(LendSpecError::TooSmall(bytes));
        }
        let guard = options.map(|option| {
            let size = option.strip_prefix("guard=").ok_or_else(|| LendSpecError::Option(option.to_owned()))?;
            Ok::<_, LendSpecError>(parse_size(size)?)
        });
        Ok(Self { bytes, guard_bytes: guard.transpose()? })
    }
}

impl LendSpec {
    /// What the loops share. Before the node is confined.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read, for the guard.
    pub fn open(self) -> std::io::Result<Arc<Lending>> {
        Ok(Arc::new(Lending::new(self.bytes, self.guard_bytes.map(Guard::new).transpose()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_and_a_guard_are_read() {
        assert_eq!("1G".parse(), Ok(LendSpec { bytes: 1 << 30, guard_bytes: None }));
        assert_eq!("1G,guard=512M".parse(), Ok(LendSpec { bytes: 1 << 30, guard_bytes: Some(512 << 20) }));
        assert_eq!("1M".parse::<LendSpec>(), Err(LendSpecError::TooSmall(1 << 20)));
        assert_eq!("1G,x=1".parse::<LendSpec>(), Err(LendSpecError::Option("x=1".to_owned())));
        assert!(matches!("much".parse::<LendSpec>(), Err(LendSpecError::Size(_))));
    }
}
