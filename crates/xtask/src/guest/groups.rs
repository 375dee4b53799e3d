//! Numbered groups of blocks, and which of them must exist after a loss of power.
//!
//! Group N is written to place N modulo [`PLACES`], over the group that was there: a lost write leaves an older group behind,
//! as on a real disk, and not only zeroes.

pub const BLOCK_BYTES: usize = 4096;
pub const GROUP_BLOCKS: usize = 8;
pub const PLACES: usize = 64;
/// How many groups there are to write; the power is cut before the last.
pub const GROUPS: usize = 512;
pub const VOLUME_BYTES: usize = PLACES * GROUP_BLOCKS * BLOCK_BYTES;
/// Each block repeats its stamp from end to end, so that a torn block shows.
const STAMP_BYTES: usize = 16;

/// All groups, one after another.
pub fn all() -> Vec<u8> {
    (0..GROUPS).flat_map(|group| (0..GROUP_BLOCKS).flat_map(move |block| block_of(group, block))).collect()
}

fn block_of(group: usize, block: usize) -> Vec<u8> {
    stamp(group, block).repeat(BLOCK_BYTES / STAMP_BYTES)
}

fn stamp(group: usize, block: usize) -> Vec<u8> {
    let text = format!("g{group:08}b{block:05}\n");
    debug_assert_eq!(text.len(), STAMP_BYTES);
    text.into_bytes()
}

/// The acknowledged groups that a volume of [`VOLUME_BYTES`] does not have, when groups 0 up to
/// `acknowledged` (not included) were. A place may hold a later group: it was written, though
/// nobody was told. A block that is neither an acknowledged group's nor a later one's is a loss.
pub fn lost(volume: &[u8], acknowledged: usize) -> Vec<usize> {
    (acknowledged.saturating_sub(PLACES)..acknowledged)
        .filter(|&group| !(0..GROUP_BLOCKS).all(|block| is_there(volume, group, block)))
        .collect()
}

fn is_there(volume: &[u8], group: usize, block: usize) -> bool {
    let start = (group % PLACES * GROUP_BLOCKS + block) * BLOCK_BYTES;
    volume
        .get(start..start + BLOCK_BYTES)
        .is_some_and(|found| (group..GROUPS).step_by(PLACES).any(|candidate| found == block_of(candidate, block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The volume after groups 0 up to `written` (not included).
    fn volume_after(written: usize) -> Vec<u8> {
        let group_bytes = GROUP_BLOCKS * BLOCK_BYTES;
        let source = all();
        let mut volume = vec![0; VOLUME_BYTES];
        for group in 0..written {
            let place = group % PLACES * group_bytes;
            volume[place..place + group_bytes].copy_from_slice(&source[group * group_bytes..(group + 1) * group_bytes]);
        }
        volume
    }

    #[test]
    fn a_volume_that_has_all_or_more_has_lost_nothing() {
        for acknowledged in [0, 1, PLACES - 1, PLACES, PLACES + 5, GROUPS - 1] {
            assert_eq!(lost(&volume_after(acknowledged), acknowledged), Vec::<usize>::new());
            assert_eq!(lost(&volume_after(acknowledged + 1), acknowledged), Vec::<usize>::new());
        }
    }

    #[test]
    fn an_older_group_a_zero_or_a_torn_block_is_a_loss() {
        assert_eq!(lost(&volume_after(PLACES + 5), PLACES + 6), [PLACES + 5]);
        assert_eq!(lost(&vec![0; VOLUME_BYTES], 3), [0, 1, 2]);
        let mut torn = volume_after(PLACES + 5);
        // Place 4 holds group PLACES + 4; the tail of its last block is of the group before.
        let end = 5 * GROUP_BLOCKS * BLOCK_BYTES;
        torn[end - 512..end].copy_from_slice(&block_of(4, GROUP_BLOCKS - 1)[..512]);
        assert_eq!(lost(&torn, PLACES + 5), [PLACES + 4]);
        assert_eq!(lost(&[], 1), [0]);
    }
}
