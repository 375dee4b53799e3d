//! Rules on single sectors and on the ends of sessions.

use byway_fabric::CloseReason;
use byway_fabric::wire::RefuseCode;
pub use byway_skip::seeds::{Broken, broken};

pub const SECTOR: usize = 512;

/// Fills sectors so that each says who wrote it, and that it is whole.
pub fn fill(bytes: &mut [u8], client: usize, request: u64, first_sector: usize) {
    for (index, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        let words = [request, client as u64, (first_sector + index) as u64];
        for (at, word) in words.into_iter().enumerate() {
            sector[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        sector[24..504].fill(request as u8);
        sector[504..].copy_from_slice(&request.to_le_bytes());
    }
}

/// Which request wrote a sector; 0 for zeroes.
pub fn written_by(sector: &[u8], client: usize, number: usize) -> u64 {
    let word = |at: usize| u64::from_le_bytes(sector[at..at + 8].try_into().unwrap());
    let request = word(0);
    if request == 0 {
        if sector.iter().any(|byte| *byte != 0) {
            broken(format!("sector {number} is torn: half of it is zeroes"));
        }
        return 0;
    }
    if (word(8), word(16)) != (client as u64, number as u64) {
        broken(format!("sector {number} of client {client} holds sector {} of client {}", word(16), word(8)));
    }
    if word(504) != request || sector[24..504].iter().any(|byte| *byte != request as u8) {
        broken(format!("sector {number} is torn"));
    }
    request
}

/// Nobody lies in this world and no bit flips: a session may end because of a fault, or because a newer one replaces it,
/// but never because one side found the other's messages wrong.
pub fn check_end_of_session(whose: &str, reason: CloseReason) {
    let wrong = match reason {
        CloseReason::PeerClosed
        | CloseReason::Truncated
        | CloseReason::Io(_)
        | CloseReason::SlowHandshake
        | CloseReason::Silent
        | CloseReason::NoFrames
        | CloseReason::Closed => false,
        CloseReason::Refused(code) | CloseReason::WeRefused(code) => {
            use RefuseCode::{Busy, ShuttingDown, Superseded, UnknownSession};
            // `ShuttingDown`: the volume was replaced.
            !matches!(code, Busy | Superseded | UnknownSession | ShuttingDown)
        }
        // Those that say that the peer did something wrong, and whatever else there may come to be.
        _ => true,
    };
    if wrong {
        broken(format!("{whose} ended a session of honest peers: {reason}"));
    }
}
