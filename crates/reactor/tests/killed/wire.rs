//! What client and server say to each other here: requests and replies of one form, and bytes that tell where they belong.

/// Bytes of a request, and of its reply, which is the request again.
pub const REQUEST_BYTES: usize = 32;
/// The most bytes that a request moves.
pub const LEN_MAX: usize = 256 << 10;
/// What lies where nothing was put.
pub const CANARY: u8 = 0xee;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An arena was lent: the server takes it.
    Take,
    /// The server copies into the arena.
    Put,
    /// The server copies out of it, and looks at what it got.
    Get,
    /// The bytes follow on the stream; the server looks at them and sends them back.
    Echo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub kind: Kind,
    pub len: usize,
    pub offset: u64,
    /// What the bytes are made of.
    pub seed: u64,
}

impl Request {
    pub fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.kind as u64, self.len as u64, self.offset, self.seed])
        {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Self {
        let word = |at: usize| u64::from_ne_bytes(bytes[at * 8..][..8].try_into().unwrap());
        let kind = [Kind::Take, Kind::Put, Kind::Get, Kind::Echo][word(0) as usize];
        Self { kind, len: word(1) as usize, offset: word(2), seed: word(3) }
    }
}

/// Byte `at` of the data of a seed; never the canary.
pub fn byte(seed: u64, at: usize) -> u8 {
    let byte = ((seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 47) as u8;
    if byte == CANARY { 0x11 } else { byte }
}

pub fn fill(bytes: &mut [u8], seed: u64) {
    bytes.iter_mut().enumerate().for_each(|(at, place)| *place = byte(seed, at));
}

/// Whether these are the data of a seed.
pub fn is_right(bytes: &[u8], seed: u64) -> bool {
    bytes.iter().enumerate().all(|(at, found)| *found == byte(seed, at))
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
