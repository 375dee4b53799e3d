//! Ranges of bytes: of a volume, a file or a memory.

use crate::op::File;

/// `len` bytes from `offset` on. It may come from a peer, so its end need not exist: [`ByteRange::end`] is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes; may be 0.
    pub len: u64,
}

impl ByteRange {
    /// `len` bytes from `offset` on.
    pub const fn new(offset: u64, len: u64) -> Self {
        Self { offset, len }
    }

    /// The offset behind the last byte; `None` if 64 bits do not hold it.
    pub const fn end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// Whether it ends at `limit` or before; an empty range too.
    pub const fn ends_by(self, limit: u64) -> bool {
        match self.end() {
            Some(end) => end <= limit,
            None => false,
        }
    }

    /// Whether the two share a byte, or one is empty and lies inside the other. A range whose end 64 bits do not hold counts up to
    /// the last offset that they hold.
    pub const fn overlaps(self, other: Self) -> bool {
        self.offset < other.offset.saturating_add(other.len) && other.offset < self.offset.saturating_add(self.len)
    }
}

/// A range of an open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileRange {
    /// The file.
    pub file: File,
    /// First byte.
    pub offset: u64,
    /// Bytes; the file may end before.
    pub len: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_64_bits_do_not_hold_lies_behind_every_limit() {
        assert_eq!(ByteRange::new(4096, 512).end(), Some(4608));
        assert_eq!(ByteRange::new(u64::MAX, 1).end(), None);
        assert!(ByteRange::new(4096, 512).ends_by(4608));
        assert!(!ByteRange::new(4096, 513).ends_by(4608));
        assert!(ByteRange::new(4608, 0).ends_by(4608));
        assert!(!ByteRange::new(4609, 0).ends_by(4608));
        assert!(!ByteRange::new(u64::MAX, 1).ends_by(u64::MAX));
    }

    #[test]
    fn ranges_overlap_that_share_a_byte() {
        let range = ByteRange::new(4096, 4096);
        assert!(range.overlaps(ByteRange::new(8191, 1)));
        assert!(range.overlaps(ByteRange::new(0, 4097)));
        assert!(!range.overlaps(ByteRange::new(0, 4096)));
        assert!(!range.overlaps(ByteRange::new(8192, 10)));
        assert!(ByteRange::new(u64::MAX - 1, 100).overlaps(ByteRange::new(u64::MAX - 1, 1)));
    }
}
