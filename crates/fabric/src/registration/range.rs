//! Ranges of whole pages of the process's address space.

/// A range of whole pages, never empty.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct PageRange {
    start: usize,
    end: usize,
}

impl PageRange {
    /// The pages of `bytes` bytes at `address`; `None` for no bytes, and for bytes beyond the end of the address space.
    pub fn covering(address: usize, bytes: usize) -> Option<Self> {
        let mask = rustix::param::page_size() - 1;
        let end = address.checked_add(bytes)?.checked_add(mask)? & !mask;
        (bytes > 0).then_some(Self { start: address & !mask, end })
    }

    /// Where it starts.
    pub const fn start(self) -> usize {
        self.start
    }

    /// The first address after it.
    pub const fn end(self) -> usize {
        self.end
    }

    /// How many bytes it has; at least a page.
    pub const fn bytes(self) -> usize {
        self.end - self.start
    }

    /// Whether all of `other` lies in it.
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the two share a page.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The smallest range with both in it, and what lies between them.
    #[must_use]
    pub fn hull(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_covered_by_whole_pages() {
        let page = rustix::param::page_size();
        let range = PageRange::covering(page * 5 - 1, 2).unwrap();
        assert_eq!((range.start(), range.end(), range.bytes()), (page * 4, page * 6, page * 2));
        assert_eq!(PageRange::covering(page, page).unwrap().bytes(), page);
    }

    #[test]
    fn nothing_and_what_wraps_around_is_no_range() {
        assert_eq!(PageRange::covering(4096, 0), None);
        assert_eq!(PageRange::covering(usize::MAX - 4096, 4096), None);
    }
}
