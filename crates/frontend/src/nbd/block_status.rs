//! The server's answer to BLOCK_STATUS.
//!
//! A store knows extents in its own grain and in any number; a reply must keep several rules
//! (proto.md, `NBD_REPLY_TYPE_BLOCK_STATUS`): no extent is empty, each is a multiple of the minimum
//! block, the sum reaches the requested length only with the last, with REQ_ONE there is one that
//! does not exceed the request. Neighbours of the same state are joined, since each costs the client
//! a round.

use zerocopy::IntoBytes;
use zerocopy::big_endian::U32;

use super::flags::CommandFlags;
use super::reply::Replies;
use super::request::{Headers, Request};
use super::wire::{
    BlockStatusExtended, CHUNK_BLOCK_STATUS, CHUNK_BLOCK_STATUS_EXT, Extent, ExtentExtended, STATE_HOLE, STATE_ZERO,
};
use crate::limits::EXTENTS_PER_REPLY_MAX;

/// What a store says about a stretch of a volume, from where the one before ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes.
    pub length: u64,
    /// Nothing is allocated for it: a write may fail for lack of space.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

/// Longest extent in a compact reply: 32 bits, and a multiple of every minimum block.
const COMPACT_EXTENT_BYTES_MAX: u64 = 0xffff_0000;

/// Joins neighbours of one state and appends their descriptors.
struct Joiner<'a> {
    out: &'a mut Vec<u8>,
    extended: bool,
    pending: Option<(u64, u32)>,
    emitted: usize,
}

impl Joiner<'_> {
    fn push(&mut self, length: u64, state: u32) {
        match &mut self.pending {
            Some((total, same)) if *same == state => *total += length,
            _ => {
                self.flush();
                self.pending = Some((length, state));
            }
        }
    }

    fn flush(&mut self) {
        let Some((length, state)) = self.pending.take() else {
            return;
        };
        if self.emitted == EXTENTS_PER_REPLY_MAX {
            return;
        }
        self.emitted += 1;
        if self.extended {
            let extent = ExtentExtended { length: length.into(), status: u64::from(state).into() };
            self.out.extend_from_slice(extent.as_bytes());
        } else {
            // Nothing longer than COMPACT_EXTENT_BYTES_MAX is asked for.
            let extent = Extent { length: (length as u32).into(), status: state.into() };
            self.out.extend_from_slice(extent.as_bytes());
        }
    }
}

/// Rounds extents to the minimum block: a block that several share is a hole, or zero, only if all
/// of them are. Gives up to the requested length, a whole number of blocks.
fn by_block(
    extents: impl IntoIterator<Item = Allocation>,
    requested: u64,
    block: u64,
    mut push: impl FnMut(u64, u32) -> bool,
) {
    let (mut position, mut done) = (0u64, 0u64);
    let mut shared: Option<u32> = None;
    for extent in extents {
        if done >= requested || extent.length == 0 {
            continue;
        }
        let state = if extent.hole { STATE_HOLE } else { 0 } | if extent.zero { STATE_ZERO } else { 0 };
        let end = position.saturating_add(extent.length).min(requested);
        if let Some(mixed) = shared {
            shared = Some(mixed & state);
            if end < done + block {
                position = end;
                continue;
            }
            done += block;
            shared = None;
            if !push(block, mixed & state) {
                return;
            }
        }
        let whole = (end - done) / block * block;
        done += whole;
        if whole > 0 && !push(whole, state) {
            return;
        }
        if end > done {
            shared = Some(state);
        }
        position = end;
        if position >= requested {
            break;
        }
    }
    if shared.is_some() {
        // Nothing is known of the rest of this block.
        push(block, 0);
    }
}

impl Replies {
    /// Answers a BLOCK_STATUS that the rules accepted with what the store says of its range;
    /// `extents` start at the request's offset and may end early, or past its end. An empty list is
    /// answered as one allocated extent, which is always safe to say.
    ///
    /// Appends the whole reply: at most [`EXTENTS_PER_REPLY_MAX`] descriptors.
    pub fn block_status(&self, out: &mut Vec<u8>, request: &Request, extents: impl IntoIterator<Item = Allocation>) {
        let extended = self.rules().headers == Headers::Extended;
        let requested = if extended { request.length } else { request.length.min(COMPACT_EXTENT_BYTES_MAX) };
        // The length is not known yet; the header is written again once it is.
        let start = out.len();
        self.status_header(out, request, 0);
        let mut joiner = Joiner { out, extended, pending: None, emitted: 0 };
        let one = request.flags.has(CommandFlags::REQ_ONE);
        let mut first_state = None;
        by_block(extents, requested, u64::from(self.rules().block.minimum), |length, state| {
            if one && state != *first_state.get_or_insert(state) {
                return false;
            }
            joiner.push(length, state);
            joiner.emitted < EXTENTS_PER_REPLY_MAX
        });
        if joiner.emitted == 0 && joiner.pending.is_none() {
            joiner.push(requested, 0);
        }
        joiner.flush();
        let count = joiner.emitted;
        let end = out.len();
        self.status_header(out, request, count as u32);
        out.copy_within(end.., start);
        out.truncate(end);
    }

    fn status_header(&self, out: &mut Vec<u8>, request: &Request, count: u32) {
        let context = self.rules().allocation_context.unwrap_or_default();
        if self.rules().headers == Headers::Extended {
            let length = BlockStatusExtended::BYTES as u32 + count * ExtentExtended::BYTES as u32;
            self.chunk(out, request.tag(), CHUNK_BLOCK_STATUS_EXT, true, length);
            let head = BlockStatusExtended { context: context.into(), count: count.into() };
            out.extend_from_slice(head.as_bytes());
        } else {
            self.chunk(out, request.tag(), CHUNK_BLOCK_STATUS, true, 4 + count * Extent::BYTES as u32);
            out.extend_from_slice(U32::new(context).as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::FromBytes;

    use super::super::flags::TransmissionFlags;
    use super::super::request::{BlockSizes, Command, Rules};
    use super::super::wire::{ExtendedReply, StructuredReply};
    use super::*;

    fn reply(
        headers: Headers,
        block: u32,
        flags: CommandFlags,
        length: u64,
        extents: &[Allocation],
    ) -> Vec<(u64, u64)> {
        let rules = Rules {
            headers,
            size_bytes: u64::MAX,
            block: BlockSizes { minimum: block, ..BlockSizes::default() },
            flags: TransmissionFlags::HAS_FLAGS,
            allocation_context: Some(7),
        };
        let request = Request { command: Command::BlockStatus, flags, cookie: 1, offset: 0, length };
        let mut out = b"before".to_vec();
        Replies::new(rules).block_status(&mut out, &request, extents.iter().copied());
        let out = &out[6..];
        if headers == Headers::Extended {
            let (header, rest) = ExtendedReply::ref_from_prefix(out).unwrap();
            assert_eq!(header.length.get(), rest.len() as u64);
            let (head, rest) = BlockStatusExtended::ref_from_prefix(rest).unwrap();
            assert_eq!((head.context.get(), head.count.get() as usize), (7, rest.len() / 16));
            let extents = <[ExtentExtended]>::ref_from_bytes(rest).unwrap();
            return extents.iter().map(|extent| (extent.length.get(), extent.status.get())).collect();
        }
        let (header, rest) = StructuredReply::ref_from_prefix(out).unwrap();
        assert_eq!(header.length.get(), rest.len() as u32);
        assert_eq!(rest[..4], [0, 0, 0, 7]);
        let extents = <[Extent]>::ref_from_bytes(&rest[4..]).unwrap();
        extents.iter().map(|extent| (u64::from(extent.length.get()), u64::from(extent.status.get()))).collect()
    }

    fn allocation(length: u64, state: u32) -> Allocation {
        Allocation { length, hole: state & STATE_HOLE != 0, zero: state & STATE_ZERO != 0 }
    }

    const NONE: CommandFlags = CommandFlags::NONE;

    #[test]
    fn neighbours_are_joined_and_the_end_is_cut() {
        let extents = [allocation(512, 3), allocation(512, 3), allocation(1024, 0), allocation(1 << 20, 3)];
        assert_eq!(reply(Headers::Structured, 1, NONE, 4096, &extents), [(1024, 3), (1024, 0), (2048, 3)]);
        assert_eq!(reply(Headers::Extended, 1, NONE, 4096, &extents), [(1024, 3), (1024, 0), (2048, 3)]);
        assert_eq!(reply(Headers::Extended, 1, CommandFlags::REQ_ONE, 4096, &extents), [(1024, 3)]);
    }

    #[test]
    fn a_block_is_what_all_of_its_parts_are() {
        let extents = [allocation(600, 3), allocation(100, 2), allocation(1348, 3)];
        assert_eq!(reply(Headers::Extended, 512, NONE, 2048, &extents), [(512, 3), (512, 2), (1024, 3)]);
        assert_eq!(reply(Headers::Extended, 512, NONE, 2048, &extents[..1]), [(512, 3), (512, 0)]);
    }

    #[test]
    fn nothing_known_is_data() {
        assert_eq!(reply(Headers::Structured, 1, NONE, 4096, &[]), [(4096, 0)]);
    }

    #[test]
    fn lengths_beyond_32_bits() {
        let hole = [allocation(1 << 40, 3)];
        assert_eq!(reply(Headers::Extended, 512, NONE, 1 << 40, &hole), [(1 << 40, 3)]);
        assert_eq!(reply(Headers::Structured, 512, NONE, 0xffff_fe00, &hole), [(0xffff_0000, 3)]);
    }

    #[test]
    fn a_long_map_is_cut() {
        let many: Vec<_> = (0..10_000).map(|index| allocation(512, index % 2)).collect();
        assert_eq!(reply(Headers::Extended, 1, NONE, 1 << 40, &many).len(), EXTENTS_PER_REPLY_MAX);
    }

    proptest! {
        #[test]
        fn replies_keep_the_rules_and_never_claim_more_than_is_known(
            extents in prop::collection::vec((0u64..5000, 0u32..4), 0..40),
            block in prop::sample::select(vec![1u32, 512, 4096]),
            blocks in 1u64..64,
            one in any::<bool>(),
        ) {
            let extents: Vec<_> = extents.into_iter().map(|(length, state)| allocation(length, state)).collect();
            let requested = u64::from(block) * blocks;
            let flags = if one { CommandFlags::REQ_ONE } else { NONE };
            let said = reply(Headers::Extended, block, flags, requested, &extents);
            prop_assert!(!said.is_empty() && (!one || said.len() == 1));
            prop_assert!(said.iter().map(|(length, _)| length).sum::<u64>() <= requested);
            let mut truth = extents.iter().flat_map(|extent| {
                let state = u64::from(extent.hole) | u64::from(extent.zero) << 1;
                std::iter::repeat_n(state, extent.length as usize)
            });
            for (length, state) in said {
                prop_assert!(length > 0 && length % u64::from(block) == 0);
                for _ in 0..length {
                    prop_assert_eq!(state & !truth.next().unwrap_or(0), 0);
                }
            }
        }
    }
}
