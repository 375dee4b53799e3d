//! What is written, so that it can be told on arrival whether it is that: each word follows from the client, the number of
//! the block and the word's place.

/// A word that two blocks share at one place only by a chance of 1 in 2^64.
fn seed(client: u64, sequence: u64) -> u64 {
    // The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    let mut word = (client << 40 ^ sequence).wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// What words next to each other differ by.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Fills a block of whole words.
pub(super) fn fill(block: &mut [u8], client: u64, sequence: u64) {
    let mut word = seed(client, sequence);
    for bytes in block.as_chunks_mut::<8>().0 {
        *bytes = word.to_le_bytes();
        word = word.wrapping_add(STEP);
    }
}

/// Whether a block is what that client wrote.
pub(super) fn is_intact(block: &[u8], client: u64, sequence: u64) -> bool {
    let mut word = seed(client, sequence);
    let mut wrong = 0;
    for bytes in block.as_chunks::<8>().0 {
        wrong |= u64::from_le_bytes(*bytes) ^ word;
        word = word.wrapping_add(STEP);
    }
    wrong == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_bit_anywhere_is_found_and_so_is_another_block() {
        let mut block = vec![0; 64 << 10];
        fill(&mut block, 1023, 77);
        assert!(is_intact(&block, 1023, 77));
        assert!(!is_intact(&block, 1023, 78) && !is_intact(&block, 1022, 77));
        for at in [0, 7, 8, 4095, 32_768, 65_535] {
            block[at] ^= 4;
            assert!(!is_intact(&block, 1023, 77), "byte {at}");
            block[at] ^= 4;
        }
        block.rotate_left(8);
        assert!(!is_intact(&block, 1023, 77), "at another place");
    }
}
