//! Tables by numbers that this process chose itself: a page costs a dozen look-ups, and nobody can choose the numbers so that they collide.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A table by small numbers.
pub(super) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Multiplies: numbers that follow each other go to different places.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NumberHasher(u64);

/// 2 to the power of 64 by the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.0.rotate_left(5) ^ number) * u128::from(SPREAD);
        // The table looks at the lowest bits and at the highest: both are to differ.
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_follow_each_other_or_differ_in_high_bits_alone_lie_apart() {
        for shift in [0, 12, 14, 32] {
            let hash = |number: u64| {
                let mut hasher = NumberHasher::default();
                hasher.write_u64(number << shift);
                hasher.finish()
            };
            // At random 2,589 of 4,096 places would be taken.
            let low = (0..4096).map(|number| hash(number) % 4096).collect::<std::collections::BTreeSet<_>>();
            assert!(low.len() > 2000, "{} places, shift {shift}", low.len());
            let high = (0..4096).map(|number| hash(number) >> 57).collect::<std::collections::BTreeSet<_>>();
            assert_eq!(high.len(), 128, "shift {shift}");
        }
    }
}
