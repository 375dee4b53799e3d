//! Memory in which each byte tells where it belongs, and numbers that look random.

use byway_fabric::node::{Memory, Node};

/// Bytes before and behind each window and each buffer, which nobody may touch.
pub const MARGIN: usize = 4096;
/// Bytes of a window.
pub const WINDOW: usize = 256 << 10;
/// What lies beside a window, and where nothing was put.
pub const CANARY: u8 = 0xee;

/// The bytes of a window, made of a seed; none is the canary.
pub fn bytes(seed: u64) -> Vec<u8> {
    let byte = |at: u64| ((seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 47) as u8;
    (0..WINDOW as u64).map(|at| if byte(at) == CANARY { 0x11 } else { byte(at) }).collect()
}

/// What lies in memory from `at` on.
pub fn read(memory: &Memory, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(at, &mut bytes).unwrap();
    bytes
}

/// Memory with margins that is all canaries.
pub fn empty(node: &Node, len: usize, shared: bool) -> Memory {
    let len = len + 2 * MARGIN;
    let memory = if shared { node.register_shared(len) } else { node.register(len) }.unwrap();
    memory.write(0, &vec![CANARY; len]).unwrap();
    memory
}

/// Nothing was written beside the `len` bytes that begin behind the first margin.
#[track_caller]
pub fn assert_margins(memory: &Memory, len: usize, what: &str) {
    let (front, back) = (read(memory, 0, MARGIN), read(memory, MARGIN + len, MARGIN));
    assert!(front.iter().chain(&back).all(|byte| *byte == CANARY), "beside {what}");
}

/// Which of some bytes are not those that belong there; the canary is right too where they need not have come.
pub fn first_wrong(found: &[u8], wanted: &[u8], is_whole: bool) -> Option<usize> {
    assert_eq!(found.len(), wanted.len());
    if found == wanted {
        return None;
    }
    found.iter().zip(wanted).position(|(found, wanted)| found != wanted && (is_whole || *found != CANARY))
}

/// Numbers that look random.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27) % end
    }
}
