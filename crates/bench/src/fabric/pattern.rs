//! The contents of blocks, by which the server checks each block.
//!
//! A client writes a few blocks of its own again and again. Each word of a block follows from the client, the block's number
//! and the word's place; the first word of each page follows from the number of blocks that the client has written, which
//! detects stale pages. A client changes those words alone, because the data that programs write to servers is seldom fresh in
//! a core's cache.

/// Bytes from one stamp to the next.
const PAGE_BYTES: usize = 4096;
/// What words next to each other differ by.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A word that two blocks share at one place only by a chance of 1 in 2^64.
fn seed(client: u64, number: u64) -> u64 {
    // The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    let mut word = (client << 40 ^ number).wrapping_add(STEP);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// The stamp of a client's block number `sequence` in page `page`.
fn stamp_of(client: u64, sequence: u64, page: usize) -> u64 {
    seed(!client, sequence) ^ page as u64
}

/// Fills block `place` of a client's, which consists of whole words.
pub(super) fn fill(block: &mut [u8], client: u64, place: u64) {
    let mut word = seed(client, place);
    for bytes in block.as_chunks_mut::<8>().0 {
        *bytes = word.to_le_bytes();
        word = word.wrapping_add(STEP);
    }
}

/// What to write where in a filled block of `bytes`, so that it becomes the client's block number `sequence`.
pub(super) fn stamps(bytes: usize, client: u64, sequence: u64) -> impl Iterator<Item = (usize, [u8; 8])> {
    (0..bytes / PAGE_BYTES).map(move |page| (page * PAGE_BYTES, stamp_of(client, sequence, page).to_le_bytes()))
}

/// Whether a block is what that client wrote as number `sequence`, from its block `place`.
pub(super) fn is_intact(block: &[u8], client: u64, place: u64, sequence: u64) -> bool {
    let mut word = seed(client, place);
    let mut wrong = 0;
    for (page, bytes) in block.chunks(PAGE_BYTES).enumerate() {
        let (words, rest) = bytes.as_chunks::<8>();
        let Some((first, others)) = words.split_first().filter(|_| rest.is_empty()) else { return false };
        wrong |= u64::from_le_bytes(*first) ^ stamp_of(client, sequence, page);
        word = word.wrapping_add(STEP);
        for bytes in others {
            wrong |= u64::from_le_bytes(*bytes) ^ word;
            word = word.wrapping_add(STEP);
        }
    }
    wrong == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(block: &mut [u8], client: u64, sequence: u64) {
        for (at, bytes) in stamps(block.len(), client, sequence) {
            block[at..at + 8].copy_from_slice(&bytes);
        }
    }

    #[test]
    fn one_wrong_bit_anywhere_is_found_and_so_is_another_block() {
        let mut block = vec![0; 64 << 10];
        fill(&mut block, 1023, 5);
        assert!(!is_intact(&block, 1023, 5, 77), "not stamped");
        stamp(&mut block, 1023, 77);
        assert!(is_intact(&block, 1023, 5, 77));
        assert!(!is_intact(&block, 1023, 5, 78) && !is_intact(&block, 1022, 5, 77));
        assert!(!is_intact(&block, 1023, 4, 77));
        for at in [0, 7, 8, 4095, 4096, 32_768, 65_535] {
            block[at] ^= 4;
            assert!(!is_intact(&block, 1023, 5, 77), "byte {at}");
            block[at] ^= 4;
        }
        block.rotate_left(8);
        assert!(!is_intact(&block, 1023, 5, 77), "at another place");
    }

    #[test]
    fn a_page_that_is_older_or_belongs_elsewhere_is_found() {
        let mut old = vec![0; 16 << 10];
        fill(&mut old, 3, 0);
        stamp(&mut old, 3, 10);
        let mut new = old.clone();
        stamp(&mut new, 3, 12);
        assert!(is_intact(&new, 3, 0, 12));
        new[8192..12288].copy_from_slice(&old[8192..12288]);
        assert!(!is_intact(&new, 3, 0, 12));
    }
}
