//! Unpredictable numbers: window keys, nonces, client and instance ids.
//!
//! They are read from the kernel many at a time, so that a key costs no system call. A simulation gives a seed instead, so
//! that a run can be repeated bit for bit.

/// Numbers per question to the kernel.
const BATCH: usize = 64;

/// A source of random numbers.
#[derive(Debug)]
pub struct Random {
    batch: [u64; BATCH],
    left: usize,
    seed: Option<u64>,
}

impl Random {
    /// Unguessable, from the kernel.
    pub fn from_kernel() -> Self {
        Self { batch: [0; BATCH], left: 0, seed: None }
    }

    /// The sequence of `seed`, which anybody can guess: for simulations only.
    pub fn from_seed(seed: u64) -> Self {
        Self { batch: [0; BATCH], left: 0, seed: Some(seed) }
    }

    /// The next number.
    ///
    /// # Panics
    /// If the kernel has no random numbers, which it always has once it is up: going on with a guessable key would open
    /// memory to anybody.
    pub fn next_u64(&mut self) -> u64 {
        if let Some(state) = &mut self.seed {
            // splitmix64 (Steele, Lea, Flood 2014).
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = *state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            return z ^ (z >> 31);
        }
        if self.left == 0 {
            let bytes = zerocopy::IntoBytes::as_mut_bytes(&mut self.batch);
            getrandom::fill(bytes).expect("the kernel has random numbers once it is up");
            self.left = BATCH;
        }
        self.left -= 1;
        // Used numbers are wiped: a later read of this memory tells nothing.
        std::mem::take(&mut self.batch[self.left])
    }

    /// Sixteen bytes.
    pub fn bytes16(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next_u64().to_le_bytes());
        bytes[8..].copy_from_slice(&self.next_u64().to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ_and_seeds_repeat() {
        let mut kernel = Random::from_kernel();
        let seen: std::collections::HashSet<_> = (0..1000).map(|_| kernel.next_u64()).collect();
        assert_eq!(seen.len(), 1000);
        let sequence = |seed| {
            std::iter::repeat_with({
                let mut random = Random::from_seed(seed);
                move || random.next_u64()
            })
        };
        assert!(sequence(7).take(100).eq(sequence(7).take(100)));
        assert!(!sequence(7).take(100).eq(sequence(8).take(100)));
    }
}
