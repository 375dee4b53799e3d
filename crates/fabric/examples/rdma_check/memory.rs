//! Memory with a pattern in it and canaries around it.

use std::ptr::NonNull;

use byway_fabric::rdma::{Buffer, Domain, Rights, Window};

use crate::node::{Outcome, ensure};

/// Bytes on each side of a window that nobody may touch.
pub const CANARY_BYTES: usize = 64;
const CANARY: u8 = 0xa5;
/// Windows do not begin at a page.
const SKEW_BYTES: usize = 61;

/// `len` bytes that depend on `seed` and on their place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ seed.wrapping_mul(131)) as u8).collect()
}

/// Memory for a window, inside of a larger one.
pub struct Fenced {
    outer: Buffer,
    len: usize,
}

impl Fenced {
    /// With `content` inside of the fence.
    pub fn new(content: &[u8]) -> Outcome<Self> {
        let len = content.len();
        let mut outer = Buffer::zeroed(SKEW_BYTES + len + 2 * CANARY_BYTES).ok_or("no memory")?;
        outer.fill(CANARY);
        outer[start()..start() + len].copy_from_slice(content);
        Ok(Self { outer, len })
    }

    /// A window of what is inside of the fence, to be closed before this is looked at.
    pub fn window(&mut self, domain: &Domain, rights: Rights) -> Outcome<Window> {
        let inside = NonNull::from(&mut self.outer[start()]);
        // SAFETY: the range lies in `outer`, which the checks neither drop nor look at while the window is open.
        let inside = unsafe { Buffer::from_raw_parts(inside, self.len) };
        Ok(domain.open_window(inside, rights)?)
    }

    /// Whether the content is this and the canaries are alive.
    pub fn check(&self, expected: &[u8], what: &str) -> Outcome<()> {
        let inside = &self.outer[start()..start() + self.len];
        if let Some(at) = inside.iter().zip(expected).position(|(found, wanted)| found != wanted) {
            return Err(
                format!("{what}: byte {at} of {} is {:#x}, not {:#x}", self.len, inside[at], expected[at]).into()
            );
        }
        let fence = [&self.outer[..start()], &self.outer[start() + self.len..]].concat();
        ensure(fence.iter().all(|byte| *byte == CANARY), || format!("{what}: bytes around the window were touched"))
    }
}

const fn start() -> usize {
    SKEW_BYTES + CANARY_BYTES
}
