//! The specification of a volume, as plain data.
//!
//! The program makes these from its command line and its configuration file; the engine opens stores from them. They hold no
//! descriptor and no memory, so they can be compared: that is how a reload finds changes.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use byway_fabric::access::Access;
use byway_reactor::{ByteRange, Errno};

/// Characters of the longest volume name.
pub const VOLUME_NAME_CHARS_MAX: usize = 64;

/// The name that clients ask for: 1 to [`VOLUME_NAME_CHARS_MAX`] characters of `A-Z a-z 0-9 . _ -`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct VolumeName(String);

/// Why a text is no volume name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VolumeNameError {
    /// Nothing there.
    #[error("the volume's name is missing")]
    Empty,
    /// Over [`VOLUME_NAME_CHARS_MAX`].
    #[error("the volume's name has {chars} characters; use at most {VOLUME_NAME_CHARS_MAX}")]
    TooLong {
        /// How many it has.
        chars: usize,
    },
    /// A character outside the set.
    #[error("the volume's name `{name}` has the character {character:?}; use only A-Z a-z 0-9 . _ -")]
    Character {
        /// The text.
        name: String,
        /// The first bad character.
        character: char,
    },
}

impl VolumeName {
    /// Checks a name.
    ///
    /// # Errors
    /// Says which rule it breaks.
    pub fn new(name: &str) -> Result<Self, VolumeNameError> {
        if name.is_empty() {
            return Err(VolumeNameError::Empty);
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if let Some(character) = name.chars().find(|&c| !allowed(c)) {
            return Err(VolumeNameError::Character {
                name: name.chars().take(VOLUME_NAME_CHARS_MAX).collect(),
                character,
            });
        }
        // All ASCII by now: bytes are characters.
        if name.len() > VOLUME_NAME_CHARS_MAX {
            return Err(VolumeNameError::TooLong { chars: name.len() });
        }
        Ok(Self(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for VolumeName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// One volume: its name, what it is made of and how it may be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeSpec {
    /// What clients call it.
    pub name: VolumeName,
    /// What its bytes are kept in.
    pub store: StoreSpec,
    /// Writes are refused.
    pub read_only: bool,
    /// Past the page cache (`O_DIRECT`); only for paths.
    pub direct: bool,
    /// Where the bytes of a direct volume are between its disk and the wire; `None`: as the node says.
    pub stage: Option<Stage>,
    /// Refused on a connection without TLS.
    pub tls_required: bool,
    /// Bytes per second that reads and writes together may move; `None`: no bound.
    pub rate_bytes_per_second: Option<u64>,
    /// Served although the file or device is in use elsewhere on this machine: the operator keeps it coherent.
    pub shared: bool,
    /// Its bytes are served as they are, although they look like an image of another format than raw.
    pub raw: bool,
    /// Which clients may use it.
    pub access: Access,
    /// What a listing shows beside the name.
    pub description: Option<String>,
}

impl VolumeSpec {
    /// A writable volume without options.
    pub fn new(name: VolumeName, store: StoreSpec) -> Self {
        Self {
            name,
            store,
            read_only: false,
            direct: false,
            stage: None,
            tls_required: false,
            rate_bytes_per_second: None,
            shared: false,
            raw: false,
            access: Access::default(),
            description: None,
        }
    }
}

/// Where the bytes of a direct volume are between its disk and the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Stage {
    /// In frames of main memory.
    #[default]
    Memory,
    /// In memory of the disk's own PCI function, as far as there is some free; only where it offers memory.
    Device,
}

/// What a volume's bytes are kept in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreSpec {
    /// A regular file or a block device, whose size it has.
    Path(PathBuf),
    /// Memory of this node, sparse; empty when the node starts.
    Memory {
        /// Size, a multiple of 512.
        bytes: u64,
    },
    /// Reads zeroes, forgets writes.
    Null {
        /// Size, a multiple of 512.
        bytes: u64,
    },
    /// RAID 0 over several paths.
    Stripe {
        /// Bytes on one path before the next one's turn: a power of two, at least 4096.
        chunk_bytes: u64,
        /// Two or more, in order.
        paths: Vec<PathBuf>,
    },
    /// Another store with faults put in, for tests of what stands above.
    Fault {
        /// The store underneath.
        inner: Box<StoreSpec>,
        /// Which operations go wrong, and how.
        rules: FaultRules,
    },
}

impl StoreSpec {
    /// The store under all faults.
    pub fn innermost(&self) -> &Self {
        match self {
            Self::Fault { inner, .. } => inner.innermost(),
            other => other,
        }
    }

    /// All faults put in, the outermost first.
    pub fn faults(&self) -> FaultRules {
        match self {
            Self::Fault { inner, rules } => {
                let mut all = rules.clone();
                all.0.extend(inner.faults().0);
                all
            }
            _ => FaultRules::default(),
        }
    }

    /// The size of memory; `None` for other stores.
    pub fn memory_bytes(&self) -> Option<u64> {
        match self.innermost() {
            Self::Memory { bytes } => Some(*bytes),
            _ => None,
        }
    }

    /// The files and devices that it is made of.
    pub fn paths(&self) -> Vec<&std::path::Path> {
        match self {
            Self::Path(path) => vec![path],
            Self::Memory { .. } | Self::Null { .. } => Vec::new(),
            Self::Stripe { paths, .. } => paths.iter().map(PathBuf::as_path).collect(),
            Self::Fault { inner, .. } => inner.paths(),
        }
    }
}

/// Faults of a store. All rules that match an operation apply, in order: delays add up, the first error or short
/// transfer wins.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FaultRules(pub Vec<FaultRule>);

/// One rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FaultRule {
    /// Which operations.
    pub operation: FaultOperation,
    /// What happens to them.
    pub effect: FaultEffect,
    /// Only those that touch this range; `None`: all. A flush has no range and matches any.
    pub range: Option<ByteRange>,
    /// Only the first so many that match; `None`: all of them.
    pub count_max: Option<u64>,
}

/// Which operations a rule is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultOperation {
    /// All of them.
    Any,
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Trims.
    Trim,
    /// Writes of zeroes.
    Zero,
    /// Questions for extents.
    Extents,
}

/// What a rule does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultEffect {
    /// The operation waits that long, then goes its way.
    Delay(Duration),
    /// The store is not asked; the operation fails with this error.
    Error(Errno),
    /// The store is asked for the first half only, and the operation answers that it moved so much.
    Short,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_small_alphabet_and_a_bound() {
        assert_eq!(VolumeName::new("a.B_9-").unwrap().as_str(), "a.B_9-");
        assert_eq!(VolumeName::new(""), Err(VolumeNameError::Empty));
        assert!(VolumeName::new(&"x".repeat(64)).is_ok());
        assert_eq!(VolumeName::new(&"x".repeat(65)), Err(VolumeNameError::TooLong { chars: 65 }));
        let slash = VolumeName::new("a/b").unwrap_err();
        assert_eq!(slash, VolumeNameError::Character { name: "a/b".to_owned(), character: '/' });
    }
}
