//! The bytes that a read brought, wherever they lie: nothing is copied until a socket takes them.

use byway_fabric::append_payload;
use byway_reactor::{File, Frame, Gather};

/// A piece of a payload.
#[derive(Debug)]
pub(super) enum Piece {
    /// A range of a mapped file.
    Map { file: File, offset: u64, len: usize },
    /// The first `len` bytes of a frame.
    Frame { frame: Frame, len: usize },
    /// Zeroes.
    Zero { len: usize },
}

/// What a read brought, in order. One piece, the usual case, needs no allocation.
#[derive(Debug, Default)]
pub struct Payload {
    pub(super) first: Option<Piece>,
    pub(super) rest: Vec<Piece>,
}

impl Payload {
    pub(super) fn one(piece: Piece) -> Self {
        Self { first: Some(piece), rest: Vec::new() }
    }

    pub(super) fn push(&mut self, piece: Piece) {
        if self.first.is_none() {
            self.first = Some(piece);
        } else {
            self.rest.push(piece);
        }
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.first.iter().chain(&self.rest).map(Piece::len).sum()
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The CRC32C of the bytes; `None` if some lie in a mapped file, whose bytes can change until they are sent.
    pub fn checksum(&self) -> Option<u32> {
        const ZEROES: [u8; 4096] = [0; 4096];
        let mut checksum = 0;
        for piece in self.first.iter().chain(&self.rest) {
            match piece {
                Piece::Map { .. } => return None,
                Piece::Frame { frame, len } => checksum = append_payload(checksum, frame, 0..*len),
                Piece::Zero { len } => {
                    for start in (0..*len).step_by(ZEROES.len()) {
                        checksum = crc32c::crc32c_append(checksum, &ZEROES[..ZEROES.len().min(len - start)]);
                    }
                }
            }
        }
        Some(checksum)
    }

    /// Appends the bytes to a send.
    pub fn push_to(self, gather: &mut Gather) {
        for piece in self.first.into_iter().chain(self.rest) {
            match piece {
                Piece::Map { file, offset, len } => gather.push_map(file, offset, len),
                Piece::Frame { frame, len } => gather.push_frame(frame, 0, len),
                Piece::Zero { len } => gather.push_zeroes(len),
            }
        }
    }
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Map { len, .. } | Self::Frame { len, .. } | Self::Zero { len } => *len,
        }
    }
}
