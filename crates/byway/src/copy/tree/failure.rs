//! Why an entry of a tree was not copied.

use std::fmt;

use rustix::fs::FileType;
use rustix::io::Errno;

/// A path as it is shown, without control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(String);

impl Place {
    /// The place of a path below a side of the copy.
    pub(super) fn below(side: &str, path: &[u8]) -> Self {
        let path = String::from_utf8_lossy(path);
        let (side, query) = side.split_once('?').map_or((side, None), |(side, query)| (side, Some(query)));
        let slash = if path.is_empty() || side.ends_with('/') { "" } else { "/" };
        let query = query.map_or_else(String::new, |query| format!("?{query}"));
        let text = format!("{side}{slash}{path}{query}");
        Self(text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why an entry was not copied, and what to do. Nothing of it is at the destination, or what was there before.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A call failed.
    #[error("{place}: cannot {doing}: {source}{}", hint(*source))]
    Call {
        /// Of what.
        place: Place,
        /// Which.
        doing: &'static str,
        /// Why.
        source: Errno,
    },
    /// Another file is there.
    #[error("{0} exists, and differs from the source in size or time of change; add --overwrite to replace it")]
    Exists(Place),
    /// One is a directory, the other is not.
    #[error(
        "{0} is not of the same kind as the source (file, directory, symbolic link); remove it, or name another destination"
    )]
    OtherKind(Place),
    /// The source was written to.
    #[error("{0} changed while it was copied; stop its writers, then run the same command again")]
    Changed(Place),
    /// The bytes that were read back differ.
    #[error(
        "{place}: the copy differs from the source at byte {offset}; check the destination's disk, then run the same command again"
    )]
    Differs {
        /// The copy.
        place: Place,
        /// The first byte.
        offset: u64,
    },
    /// A server restarted and lost the name.
    #[error(
        "{0} is not there, or not as it was copied: the server restarted before it was durable; run the same command again"
    )]
    Unsynced(Place),
    /// A FIFO, socket or device.
    #[error("{place} is a {kind}; byway copy copies files, directories and symbolic links only")]
    Special {
        /// Which.
        place: Place,
        /// What it is.
        kind: &'static str,
    },
    /// Too deep.
    #[error("{0} lies more than {max} directories deep; copy it by a command of its own", max = crate::limits::COPY_TREE_DEPTH_MAX)]
    Deep(Place),
    /// The destination, under a name of the source.
    #[error("{0} is the directory that is copied to; name a destination outside of the source")]
    Within(Place),
    /// The copy was stopped.
    #[error("stopped")]
    Stopped,
}

fn hint(error: Errno) -> &'static str {
    match error {
        Errno::NOSPC => "; make room on the destination's file system, then run the same command again",
        Errno::DQUOT => "; the quota of the destination's user is used up",
        Errno::ACCESS | Errno::PERM => "; the user of this command, or of the share (users=), needs the right",
        Errno::ROFS => "; the destination is read-only",
        Errno::IO | Errno::STALE => "; the log of its server or machine says more; then run the same command again",
        Errno::MFILE | Errno::NFILE => "; raise the limit of open files (ulimit -n), or use a smaller --depth",
        Errno::NAMETOOLONG => "; the destination's file system takes shorter names only",
        _ => "",
    }
}

/// The name of a kind of entry that is not copied.
pub(super) fn special(kind: FileType) -> Option<&'static str> {
    match kind {
        FileType::RegularFile | FileType::Directory | FileType::Symlink => None,
        FileType::Fifo => Some("FIFO"),
        FileType::Socket => Some("socket"),
        FileType::BlockDevice => Some("block device"),
        FileType::CharacterDevice => Some("character device"),
        FileType::Unknown => Some("file of an unknown kind"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_shown_as_its_side_writes_it() {
        let shown = |side: &str, path: &str| Place::below(side, path.as_bytes()).to_string();
        assert_eq!(shown("/a/b", "c"), "/a/b/c");
        assert_eq!(shown("/", "c"), "/c");
        assert_eq!(shown("a", ""), "a");
        assert_eq!(shown("byway+unix:///s/d?socket=/x", "c\x1b"), "byway+unix:///s/d/c\u{fffd}?socket=/x");
    }
}
