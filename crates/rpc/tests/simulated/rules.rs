//! Patterns of bytes, and the rules on the ends of sessions.

use byway_fabric::CloseReason;
use byway_fabric::wire::RefuseCode;
pub use byway_skip::rule;
pub use byway_skip::seeds::{Broken, broken};

/// Bytes of a word, each of which says which write it is from.
pub const WORD: usize = 8;

/// The word at `index` of what is written under `tag` (48 bits).
fn word(tag: u64, index: usize) -> u64 {
    tag << 16 | (index as u64 & 0xffff)
}

/// Bytes of `words` words written under `tag`, from word `first` on.
pub fn pattern(tag: u64, first: usize, words: usize) -> Vec<u8> {
    (first..first + words).flat_map(|index| word(tag, index).to_le_bytes()).collect()
}

/// Under which tag the word at `index` was written; `None` if the bytes belong elsewhere. Zeroes have tag 0.
pub fn tag_of(bytes: &[u8], index: usize) -> Option<u64> {
    let value = u64::from_le_bytes(bytes.try_into().ok()?);
    (value == 0 || value & 0xffff == index as u64 & 0xffff).then_some(value >> 16)
}

/// All nodes are honest and no bit flips: a session may end because of a fault or because its program closes it, but never
/// because one end found the other's messages wrong.
pub fn check_end_of_session(whose: usize, reason: CloseReason) {
    let is_fault_of_the_world = match reason {
        CloseReason::PeerClosed
        | CloseReason::Truncated
        | CloseReason::Io(_)
        | CloseReason::SlowHandshake
        | CloseReason::Silent
        | CloseReason::Closed => true,
        CloseReason::Refused(code) | CloseReason::WeRefused(code) => {
            matches!(code, RefuseCode::Superseded | RefuseCode::UnknownSession | RefuseCode::ShuttingDown)
        }
        _ => false,
    };
    rule!(is_fault_of_the_world, "node {whose} ended a session of honest peers: {reason}");
}
