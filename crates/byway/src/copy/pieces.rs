//! Arithmetic of a copy: where pieces may end, and the checksum of the whole from those of the pieces.

use std::collections::BTreeMap;

use byway_reactor::Extent;

use super::resume::Record;

/// The extents from `offset` (a multiple of `block`) on with ends at multiples of `block`, or at the image's end: what is
/// a hole only in part of a block is data. Never nothing.
pub(super) fn align_extents(offset: u64, extents: &[Extent], block: u64, bytes: u64) -> Vec<Extent> {
    let (mut runs, mut at, mut done) = (Vec::<Extent>::new(), offset, offset);
    let mut add = |runs: &mut Vec<Extent>, end: u64, hole| {
        if end > done {
            match runs.last_mut().filter(|last| last.hole == hole) {
                Some(last) => last.len += end - done,
                None => runs.push(Extent { len: end - done, hole }),
            }
            done = end;
        }
    };
    for extent in extents {
        let end = (at + extent.len).min(bytes);
        let whole_end = if end == bytes { end } else { end - end % block };
        let whole_start = at.next_multiple_of(block);
        if extent.hole && whole_start < whole_end {
            add(&mut runs, whole_start, false);
            add(&mut runs, whole_end, true);
        }
        at = end;
        if !extent.hole {
            add(&mut runs, at.next_multiple_of(block).min(bytes), false);
        }
    }
    if runs.is_empty() {
        add(&mut runs, at.next_multiple_of(block).min(bytes), false);
    }
    runs
}

/// The CRC32C of all pieces in order.
pub(super) fn whole_crc(records: &BTreeMap<u64, Record>) -> u32 {
    records.values().fold(0, |crc, record| {
        let piece = record.crc.unwrap_or_else(|| zeroes_crc(record.len));
        crc32c::crc32c_combine(crc, piece, record.len as usize)
    })
}

/// The CRC32C of `len` zeroes, by doubling.
fn zeroes_crc(len: u64) -> u32 {
    let (mut crc, mut power_crc, mut power, mut rest) = (0, crc32c::crc32c(&[0]), 1usize, len);
    while rest > 0 {
        if rest & 1 == 1 {
            crc = crc32c::crc32c_combine(crc, power_crc, power);
        }
        rest >>= 1;
        if rest > 0 {
            power_crc = crc32c::crc32c_combine(power_crc, power_crc, power);
            power *= 2;
        }
    }
    crc
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ends_are_at_blocks_and_holes_are_within_holes(
            extents in prop::collection::vec((1u64..20_000, any::<bool>()), 1..20),
            block in prop::sample::select(vec![1u64, 512, 4096]),
            start in 0u64..4,
            cut in 0u64..3000,
        ) {
            let start = start * block;
            let extents: Vec<_> = extents.into_iter().map(|(len, hole)| Extent { len, hole }).collect();
            let end = start + extents.iter().map(|extent| extent.len).sum::<u64>();
            // The image ends within the extents, or goes on behind them.
            let bytes = if cut % 2 == 0 { end + cut * block } else { (start + 1).max(end.saturating_sub(cut)) };
            let runs = align_extents(start, &extents, block, bytes);
            prop_assert!(!runs.is_empty());
            prop_assert!(runs.windows(2).all(|pair| pair[0].hole != pair[1].hole), "neighbours are joined");
            let mut at = start;
            for run in &runs {
                prop_assert!(run.len > 0);
                let run_end = at + run.len;
                prop_assert!(run_end <= bytes && (run_end % block == 0 || run_end == bytes));
                if run.hole {
                    let mut from = start;
                    for extent in &extents {
                        let to = from + extent.len;
                        prop_assert!(extent.hole || to <= at || from >= run_end, "data was taken for a hole");
                        from = to;
                    }
                }
                at = run_end;
            }
            let is_data_last = extents.last().is_some_and(|extent| !extent.hole);
            prop_assert!(!is_data_last || at >= end.min(bytes), "data is never left for later");
        }

        #[test]
        fn the_checksum_of_the_whole_is_that_of_its_pieces(
            pieces in prop::collection::vec((prop::collection::vec(any::<u8>(), 1..200), any::<bool>()), 0..20),
        ) {
            let (mut whole, mut records) = (Vec::new(), BTreeMap::new());
            for (mut piece, zero) in pieces {
                if zero {
                    piece.fill(0);
                }
                let crc = (!zero).then(|| crc32c::crc32c(&piece));
                records.insert(whole.len() as u64, Record { len: piece.len() as u64, crc });
                whole.extend(piece);
            }
            prop_assert_eq!(whole_crc(&records), crc32c::crc32c(&whole));
        }
    }
}
