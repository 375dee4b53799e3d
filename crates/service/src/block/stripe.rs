//! RAID 0: where a volume's bytes lie when it is spread over several files in chunks (the gmblock paper's `md` layout).
//!
//! Chunk `i` of the volume is chunk `i / n` of file `i % n`. A single file is a stripe of one.

/// The layout: chunk size and number of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) chunk_bytes: u64,
    pub(super) files: u64,
}

/// Consecutive bytes in one file of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StripeExtent {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Layout {
    pub(super) const SINGLE: Self = Self { chunk_bytes: u64::MAX, files: 1 };

    /// Where `offset` lies, and how many bytes from there lie together, at most `len`.
    pub(super) fn extent(self, offset: u64, len: u64) -> StripeExtent {
        if self.files == 1 {
            return StripeExtent { file: 0, offset, len };
        }
        let chunk = offset / self.chunk_bytes;
        let within = offset % self.chunk_bytes;
        StripeExtent {
            file: (chunk % self.files) as usize,
            offset: chunk / self.files * self.chunk_bytes + within,
            len: len.min(self.chunk_bytes - within),
        }
    }

    /// All extents of a range, in the volume's order, none longer than `extent_max`.
    pub(super) fn extents(self, mut offset: u64, len: u64, extent_max: u64) -> impl Iterator<Item = StripeExtent> {
        let end = offset + len;
        std::iter::from_fn(move || {
            let left = (end - offset).min(extent_max);
            (left > 0).then(|| {
                let extent = self.extent(offset, left);
                offset += extent.len;
                extent
            })
        })
    }

    /// What a range covers of each file: one extent a file, since neighbouring chunks of a file are neighbours in turn.
    pub(super) fn ranges(self, offset: u64, len: u64) -> Vec<StripeExtent> {
        if self.files == 1 || len == 0 {
            return vec![StripeExtent { file: 0, offset, len }];
        }
        let end = offset + len;
        let before = |file: u64, limit: u64| {
            // Bytes of `file` that lie before `limit` in the volume.
            let row = limit / (self.chunk_bytes * self.files) * self.chunk_bytes;
            let within = limit % (self.chunk_bytes * self.files);
            row + within.saturating_sub(file * self.chunk_bytes).min(self.chunk_bytes)
        };
        let extent = |file: u64| {
            let start = before(file, offset);
            StripeExtent { file: file as usize, offset: start, len: before(file, end) - start }
        };
        (0..self.files).map(extent).filter(|extent| extent.len > 0).collect()
    }

    /// The bytes of a volume over files of these lengths: as many whole chunks of each as the shortest has.
    pub(super) fn volume_len(self, lens: impl Iterator<Item = u64>) -> u64 {
        let shortest = lens.min().unwrap_or(0);
        if self.files == 1 { shortest } else { shortest / self.chunk_bytes * self.chunk_bytes * self.files }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_place_and_extents_are_in_order() {
        let layout = Layout { chunk_bytes: 8, files: 3 };
        let mut seen = std::collections::HashSet::new();
        for offset in 0..layout.volume_len([16, 17, 23].into_iter()) {
            let extent = layout.extent(offset, 1);
            assert!(extent.offset < 16);
            assert!(seen.insert((extent.file, extent.offset)), "two bytes in one place");
            assert_eq!(extent.file as u64, offset / 8 % 3);
        }
        assert_eq!(seen.len(), 48);
    }

    #[test]
    fn ranges_are_the_extents_joined_by_file() {
        let layout = Layout { chunk_bytes: 8, files: 3 };
        for (offset, len) in [(0, 1), (5, 20), (7, 100), (24, 24), (30, 3)] {
            let mut joined = std::collections::BTreeMap::<usize, (u64, u64)>::new();
            for extent in layout.extents(offset, len, u64::MAX) {
                let entry = joined.entry(extent.file).or_insert((extent.offset, extent.offset));
                assert_eq!(entry.1, extent.offset, "extents of a file join");
                entry.1 = extent.offset + extent.len;
            }
            let ranges: Vec<_> =
                layout.ranges(offset, len).iter().map(|r| (r.file, (r.offset, r.offset + r.len))).collect();
            assert_eq!(ranges, joined.into_iter().collect::<Vec<_>>(), "{offset} + {len}");
        }
    }

    #[test]
    fn extents_cover_the_range() {
        let layout = Layout { chunk_bytes: 8, files: 2 };
        let extents: Vec<_> = layout.extents(5, 20, 4).collect();
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), 20);
        assert_eq!(extents[0], StripeExtent { file: 0, offset: 5, len: 3 });
        assert_eq!(extents[1], StripeExtent { file: 1, offset: 0, len: 4 });
        assert!(extents.iter().all(|extent| extent.len <= 4));
    }
}
