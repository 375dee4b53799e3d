//! Which bytes of a read have come, so that no byte comes twice and none is missing without notice.

use crate::limits::CLIENT_RANGES_MAX;

/// Disjoint ranges in order. A server that answers in order, as all that we know do, needs one, and no search.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    ranges: Vec<(u64, u64)>,
}

impl Coverage {
    /// Notes that `start..end` has come; false if some of it had come before, or if there are too many gaps to keep.
    pub(super) fn add(&mut self, start: u64, end: u64) -> bool {
        let at = self.ranges.partition_point(|range| range.1 <= start);
        if self.ranges.get(at).is_some_and(|next| next.0 < end) {
            return false;
        }
        let joins_before = at > 0 && self.ranges[at - 1].1 == start;
        let joins_next = self.ranges.get(at).is_some_and(|next| next.0 == end);
        match (joins_before, joins_next) {
            (true, true) => self.ranges[at - 1].1 = self.ranges.remove(at).1,
            (true, false) => self.ranges[at - 1].1 = end,
            (false, true) => self.ranges[at].0 = start,
            (false, false) if self.ranges.len() < CLIENT_RANGES_MAX => self.ranges.insert(at, (start, end)),
            (false, false) => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn gaps_are_bounded() {
        let mut coverage = Coverage::default();
        for at in 0..CLIENT_RANGES_MAX as u64 {
            assert!(coverage.add(at * 10, at * 10 + 1));
        }
        assert!(!coverage.add(5, 6), "one gap too many");
        assert!(coverage.add(1, 10), "but a gap may be closed");
        assert_eq!(coverage.ranges.len(), CLIENT_RANGES_MAX - 1);
    }

    proptest! {
        #[test]
        fn no_byte_is_taken_twice(pieces in proptest::collection::vec((0u64..64, 1u64..9), 1..40)) {
            let (mut coverage, mut model) = (Coverage::default(), [false; 80]);
            for (start, len) in pieces {
                let part = &mut model[start as usize..(start + len) as usize];
                let fresh = part.iter().all(|came| !came);
                prop_assert_eq!(coverage.add(start, start + len), fresh);
                if fresh {
                    part.fill(true);
                }
            }
            let runs = model.windows(2).filter(|pair| !pair[0] && pair[1]).count() + usize::from(model[0]);
            prop_assert_eq!(coverage.ranges.len(), runs, "neighbours are joined");
        }
    }
}
